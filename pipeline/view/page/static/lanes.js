/**
 * Lanes of learners and strips of fragments on a canvas. A lane's buckets become a row of pixels by a table, so that
 * hundreds of lanes cost some milliseconds.
 */

import { colour } from "./palette.js";
import { Look } from "./layers.js";
import { clock } from "./words.js";

/** @typedef {import("./layers.js").Layer} Layer */
/** @typedef {{name: string, lane: string, label: string, note: string, words: () => string}} Row */
/** @typedef {{begin: number, end: number, times: import("./model.js").Times, origin: number}} Span */

/** One picture of lanes below each other, that can be read by pointer and keys. */
export class Strips {
  /**
   * @param {HTMLElement} root
   * @param {string} about what it shows, for who cannot see it
   * @param {Layer[]} layers
   */
  constructor(root, about, layers) {
    this.root = root;
    this.layers = layers;
    this.canvas = root.appendChild(document.createElement("canvas"));
    this.chosen = root.appendChild(document.createElement("div"));
    this.chosen.className = "chosen";
    this.chosen.hidden = true;
    this.tip = document.body.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.tip.setAttribute("role", "status");
    root.tabIndex = 0;
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", `${about}: arrows choose one`);
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Span | null} */
    this.span = null;
    this.height = 16;
    this.row = -1;
    /** Called with the row that is chosen; "": none. @type {(name: string) => void} */
    this.chosenRow = () => {};
    this.at = 1; // place of the time cursor, 0 to 1
    this.drawn = "";
    /** @type {Map<number, string>} */
    this.texts = new Map();
    root.addEventListener("scroll", () => this.span && this.show(this.rows, this.span), { passive: true });
    root.addEventListener("pointermove", (event) => this.point(event));
    root.addEventListener("pointerleave", () => this.choose(-1));
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("focus", () => root.matches(":focus-visible") && this.reach(Math.max(0, this.row)));
    root.addEventListener("blur", () => this.choose(-1));
  }

  /** Pixels of the canvas for each of the page's. */
  get scale() {
    return this.rows.length > 64 ? 1 : Math.min(2, devicePixelRatio || 1);
  }

  /** Width of the names on the left, and of the notes on the right. */
  get gutters() {
    const wide = this.root.clientWidth;
    return wide < 620 ? [Math.min(96, wide * 0.3), 0] : [130, Math.min(290, wide * 0.28)];
  }

  /** @param {Row[]} rows @param {Span} span */
  show(rows, span) {
    [this.rows, this.span] = [rows, span];
    const wide = this.root.clientWidth;
    if (!wide) return;
    this.height = rows.length <= 16 ? 20 : rows.length <= 64 ? 15 : 11;
    const scale = this.scale;
    const key = `${wide} ${rows.length} ${scale} ${colour("panel")}`;
    if (key !== this.drawn) {
      this.drawn = key;
      this.texts.clear();
      [this.canvas.width, this.canvas.height] = [Math.round(wide * scale), Math.round(rows.length * this.height * scale)];
      this.canvas.style.width = `${wide}px`;
      this.canvas.style.height = `${rows.length * this.height}px`;
      this.look = new Look(this.layers, Math.round(this.height * scale));
    }
    if (!rows.length) return;
    this.paint(scale);
    this.write(scale);
    if (this.row >= 0) this.choose(this.row);
  }

  /** @param {number} scale */
  paint(scale) {
    const { begin, end, times } = /** @type {Span} */ (this.span);
    const look = /** @type {Look} */ (this.look);
    const [left, right] = this.gutters;
    const x0 = Math.round(left * scale);
    const wide = Math.max(1, this.canvas.width - x0 - Math.round(right * scale));
    const tall = Math.round(this.height * scale);
    const pen = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    // What is scrolled out of sight is painted when it comes into sight.
    const first = Math.max(0, Math.floor(this.root.scrollTop / this.height));
    const shown = this.rows.slice(first, Math.ceil((this.root.scrollTop + this.root.clientHeight) / this.height));
    const picture = pen.createImageData(wide, Math.max(1, shown.length * tall));
    const pixels = new Uint32Array(picture.data.buffer);
    const froms = new Int32Array(wide + 1);
    for (let x = 0; x <= wide; x++) {
      froms[x] = Math.floor((begin + ((end - begin) * x) / wide) / times.step) - times.first;
    }
    const line = new Uint32Array(wide);
    const bytes = new Uint8Array(wide);
    shown.forEach((row, number) => {
      const cells = times.lanes.get(row.lane);
      let hatched = 0;
      bytes.fill(0);
      if (cells) {
        for (let x = 0; x < wide; x++) {
          const last = Math.max(froms[x] + 1, froms[x + 1]);
          let bits = 0;
          for (let at = Math.max(0, froms[x]); at < last; at++) bits |= cells[at];
          bytes[x] = bits;
          hatched |= bits;
        }
        if (hatched & look.ticks) for (let x = wide - 1; x > 1; x--) bytes[x] &= ~(bytes[x - 2] & look.ticks);
      }
      let y = number * tall;
      for (const { rows, table } of look.bands) {
        for (let x = 0; x < wide; x++) line[x] = table[bytes[x]];
        for (let n = 0; n < rows; n++, y++) pixels.set(line, y * wide);
      }
      for (const { bit, over, pixel: drawn } of look.hatch) {
        if (!(hatched & bit)) continue;
        for (let x = 0; x < wide; x++) {
          if (!(bytes[x] & bit) || bytes[x] & over) continue;
          const edge = !x || !(bytes[x - 1] & bit); // the gap's first column is a line: it shows, however short it is
          for (let n = 0; n < tall - 1; n++) {
            const on = edge || (x + n) % 6 < 2;
            pixels[(number * tall + n) * wide + x] = on ? drawn : look.ground;
            if (edge && x + 1 < wide && !(bytes[x + 1] & over)) pixels[(number * tall + n) * wide + x + 1] = drawn;
          }
          if (edge) x += 1;
        }
      }
    });
    pen.putImageData(picture, x0, first * tall);
  }

  /** Names and notes, where they have changed. @param {number} scale */
  write(scale) {
    const pen = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    const [left, right] = this.gutters;
    const [ground, ink, soft] = [colour("panel"), colour("ink"), colour("soft")];
    const wide = this.canvas.width / scale;
    pen.save();
    pen.scale(scale, scale);
    pen.textBaseline = "middle";
    pen.font = `${Math.min(12, this.height - 1)}px system-ui, sans-serif`;
    this.rows.forEach((row, number) => {
      const text = `${row.label}\n${row.note}`;
      if (this.texts.get(number) === text) return;
      this.texts.set(number, text);
      const y = number * this.height;
      pen.fillStyle = ground;
      pen.fillRect(0, y, left, this.height);
      pen.fillRect(wide - right, y, right, this.height);
      for (const [words, x, room, style] of /** @type {const} */ ([
        [row.label, 6, left - 10, ink],
        [row.note, wide - right + 8, right - 10, soft],
      ])) {
        if (room <= 0) continue;
        pen.save();
        pen.beginPath();
        pen.rect(x, y, room, this.height);
        pen.clip();
        pen.fillStyle = style;
        pen.fillText(words, x, y + this.height / 2);
        pen.restore();
      }
    });
    pen.restore();
  }

  /** @param {PointerEvent} event */
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [left, right] = this.gutters;
    const place = (event.clientX - box.left - left) / Math.max(1, box.width - left - right);
    this.at = Math.min(1, Math.max(0, place));
    this.choose(Math.floor((event.clientY - box.top) / this.height), event.clientX, event.clientY);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const moves = /** @type {Record<string, [number, number]>} */ ({
      ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowLeft: [0, -0.02], ArrowRight: [0, 0.02],
      Home: [-this.rows.length, 0], End: [this.rows.length, 0],
    });
    if (event.key === "Escape") return this.choose(-1);
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    this.at = Math.min(1, Math.max(0, this.at + move[1]));
    this.reach(Math.min(this.rows.length - 1, Math.max(0, this.row + move[0])));
  }

  /** Choose a row by keys: it comes into sight, and its words stand below it. @param {number} row */
  reach(row) {
    this.choose(row);
    this.chosen.scrollIntoView({ block: "nearest" });
    const box = this.chosen.getBoundingClientRect();
    this.choose(row, box.left + this.gutters[0], box.bottom);
  }

  /** Show one row's words. @param {number} row none: -1 @param {number} [x] where @param {number} [y] */
  choose(row, x, y) {
    const before = this.row;
    this.row = row < this.rows.length ? row : -1;
    if (this.row !== before) this.chosenRow(this.rows[this.row]?.name ?? "");
    this.tip.hidden = this.chosen.hidden = this.row < 0;
    if (this.row < 0 || !this.span) return;
    this.chosen.style.top = `${this.row * this.height}px`;
    this.chosen.style.height = `${this.height}px`;
    const words = this.rows[this.row].words() + this.then();
    if (this.tip.textContent !== words) this.tip.textContent = words;
    if (x !== undefined && y !== undefined) {
      const room = document.documentElement.clientWidth - this.tip.offsetWidth - 8;
      this.tip.style.left = `${Math.max(4, Math.min(x + 14, room))}px`;
      const below = y + 18 + this.tip.offsetHeight < document.documentElement.clientHeight;
      this.tip.style.top = `${below ? y + 18 : Math.max(4, y - this.tip.offsetHeight - 12)}px`;
    }
  }

  /** What was at the time cursor. */
  then() {
    const { begin, end, times, origin } = /** @type {Span} */ (this.span);
    if (this.at >= 1) return "";
    const at = begin + (end - begin) * this.at;
    const bits = times.lanes.get(this.rows[this.row].lane)?.[Math.floor(at / times.step) - times.first] ?? 0;
    const said = this.layers.filter((one) => bits & one.bit).map((one) => one.label);
    return `\nat ${clock(at - origin)}: ${said.join("; ") || "nothing"}`;
  }
}
