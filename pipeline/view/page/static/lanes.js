/**
 * Lanes of learners and strips of fragments on a canvas. A lane's buckets become a row of pixels by a table, so that
 * hundreds of lanes cost some milliseconds. What a colour tells, the height or a hatching tells as well.
 */

import { colour, pixel } from "./palette.js";

/**
 * A layer: where a bit is set, the lane has this colour from one height to another (0: top, 1: bottom). Later ones
 * cover earlier ones.
 * @typedef {{bit: number, from: number, to: number, colour: string, label: string, hatched?: boolean,
 *   tick?: boolean}} Layer
 */

/** Of a learner's lane; bits as `lanes.py` has them. @type {Layer[]} */
export const LEARNER_LAYERS = [
  { bit: 1, from: 0.25, to: 0.75, colour: "training", label: "trains, and waits for nothing" },
  { bit: 8, from: 0.4, to: 0.6, colour: "waiting", label: "waits to begin, or makes no step" },
  { bit: 2, from: 0, to: 0.25, colour: "publishing", label: "publishes: in a window" },
  { bit: 4, from: 0.75, to: 1, colour: "adopting", label: "a newer global to adopt" },
  { bit: 64, from: 0, to: 0.25, colour: "gone", label: "a delta was refused", tick: true },
  { bit: 16, from: 0, to: 1, colour: "gone", label: "dead: not heard from", hatched: true },
  { bit: 128, from: 0, to: 1, colour: "ink", label: "begins, or is back", tick: true },
];

/** Of a fragment's strip. @type {Layer[]} */
export const FRAGMENT_LAYERS = [
  { bit: 1, from: 0.7, to: 1, colour: "collecting", label: "window open: collecting" },
  { bit: 2, from: 0.5, to: 1, colour: "grace", label: "grace" },
  { bit: 4, from: 0.3, to: 1, colour: "uploading", label: "uploading" },
  { bit: 8, from: 0.1, to: 1, colour: "merging", label: "merging" },
  { bit: 16, from: 0, to: 0.25, colour: "merged", label: "merged: a new version", tick: true },
  { bit: 64, from: 0, to: 0.25, colour: "waiting", label: "opened again", tick: true },
  { bit: 32, from: 0, to: 0.25, colour: "gone", label: "a delta was refused", tick: true },
  { bit: 128, from: 0, to: 1, colour: "gone", label: "rewound", hatched: true },
];

/** @typedef {{name: string, lane: string, label: string, note: string, words: () => string}} Row */
/** @typedef {{begin: number, end: number, times: import("./model.js").Times, origin: number}} Span */

/** Bands of equal look within a lane's height, and a pixel for each byte in each band. */
class Look {
  /** @param {Layer[]} layers @param {number} height */
  constructor(layers, height) {
    const ground = pixel(colour("panel"));
    const rows = Array.from({ length: height }, (_, y) => {
      const at = (y + 0.5) / (height - 1); // the last row of pixels is left free between lanes
      return layers.filter((one) => y < height - 1 && one.from <= at && at < one.to && !one.hatched);
    });
    this.ground = ground;
    /** Bits of what takes no time: two pixels wide, however long a bucket is. */
    this.ticks = layers.reduce((bits, one) => (one.tick ? bits | one.bit : bits), 0);
    this.hatch = layers.filter((one) => one.hatched).map((one) => ({
      bit: one.bit,
      over: layers.slice(layers.indexOf(one) + 1).reduce((bits, later) => bits | later.bit, 0),
      pixel: pixel(colour(one.colour)),
    }));
    /** @type {{rows: number, table: Uint32Array}[]} */
    this.bands = [];
    let before = "";
    for (const shown of rows) {
      const key = shown.map((one) => one.bit).join();
      if (key === before && this.bands.length) {
        this.bands[this.bands.length - 1].rows += 1;
        continue;
      }
      before = key;
      const table = new Uint32Array(256).fill(ground);
      for (const one of shown) {
        const drawn = pixel(colour(one.colour));
        for (let byte = 0; byte < 256; byte++) if (byte & one.bit) table[byte] = drawn;
      }
      this.bands.push({ rows: 1, table });
    }
  }
}

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
    this.at = 1; // place of the time cursor, 0 to 1
    this.drawn = "";
    /** @type {Map<number, string>} */
    this.texts = new Map();
    root.addEventListener("pointermove", (event) => this.point(event));
    root.addEventListener("pointerleave", () => this.choose(-1));
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("focus", () => root.matches(":focus-visible") && this.choose(Math.max(0, this.row)));
    root.addEventListener("blur", () => this.choose(-1));
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
    const scale = rows.length > 64 ? 1 : Math.min(2, devicePixelRatio || 1);
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
    const picture = pen.createImageData(wide, this.rows.length * tall);
    const pixels = new Uint32Array(picture.data.buffer);
    const froms = new Int32Array(wide + 1);
    for (let x = 0; x <= wide; x++) {
      froms[x] = Math.floor((begin + ((end - begin) * x) / wide) / times.step) - times.first;
    }
    const line = new Uint32Array(wide);
    const bytes = new Uint8Array(wide);
    this.rows.forEach((row, number) => {
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
    pen.putImageData(picture, x0, 0);
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
    this.choose(Math.min(this.rows.length - 1, Math.max(0, this.row + move[0])));
    this.chosen.scrollIntoView({ block: "nearest" });
  }

  /** Show one row's words. @param {number} row none: -1 @param {number} [x] where @param {number} [y] */
  choose(row, x, y) {
    this.row = row < this.rows.length ? row : -1;
    this.tip.hidden = this.chosen.hidden = this.row < 0;
    if (this.row < 0 || !this.span) return;
    this.chosen.style.top = `${this.row * this.height}px`;
    this.chosen.style.height = `${this.height}px`;
    const words = this.rows[this.row].words() + this.then();
    if (this.tip.textContent !== words) this.tip.textContent = words;
    const box = this.chosen.getBoundingClientRect();
    if (x === undefined && !this.tip.style.left) [x, y] = [box.left + 140, box.bottom];
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
    const seconds = Math.max(0, Math.round(at - origin));
    return `\nat ${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}: ${said.join("; ") || "nothing"}`;
  }
}

/** @param {HTMLElement} list @param {Layer[]} layers */
export function legend(list, layers) {
  list.replaceChildren(...layers.map((layer) => {
    const item = document.createElement("li");
    const sign = item.appendChild(document.createElement("canvas"));
    [sign.width, sign.height] = [22, 14];
    const pen = /** @type {CanvasRenderingContext2D} */ (sign.getContext("2d"));
    pen.fillStyle = colour("panel");
    pen.fillRect(0, 0, 22, 14);
    pen.fillStyle = colour(layer.colour);
    const rows = [layer.from * 14, (layer.to - layer.from) * 14];
    if (layer.hatched) for (let x = -14; x < 22; x += 6) for (let y = 0; y < 14; y++) pen.fillRect(x + y, 13 - y, 2, 1);
    else if (layer.colour === "ink") pen.fillRect(10, 0, 2, 14);
    else pen.fillRect(0, rows[0], 22, rows[1]);
    item.append(layer.label);
    return item;
  }));
}
