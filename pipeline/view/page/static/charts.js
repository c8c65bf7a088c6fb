/** Charts over time, by uPlot (`uplot/`, MIT): the fate of tokens, loss, merge rate, bytes, memory. */

import { colour, woven } from "./palette.js";
import { clock, counted, percent, sized } from "./words.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").Times} Times */
/** @typedef {{times: Times, begin: number, end: number, origin: number}} Span */

/** The fate of tokens, from the bottom. @type {[string, import("./palette.js").Weave, string][]} */
export const FATES = [
  ["merged", "solid", "merged"],
  ["overwritten", "slant", "overwritten"],
  ["rejected", "cross", "rejected"],
  ["died", "back", "died"],
  ["pending", "dots", "pending"],
  ["unsaid", "lines", "not merged, not told apart"],
];
const HEIGHT = 210;
const BY_TIME = { label: "run time (0:00: the run began)",
  incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800] };
const BY_TOKENS = { label: "trained tokens" };
const BAD = ["killed", "died", "went silent"];

/** @param {Times} times @param {string} name @param {number} from @param {number} to numbers of buckets
 * @returns {(number | null)[]} a sum at each bucket: where nothing was noted it is what it was before */
function carried(times, name, from, to) {
  const values = times.series.get(name) ?? [];
  const found = [];
  let last = null;
  for (let at = 0; at < to; at++) {
    last = values[at] ?? last;
    if (at >= from) found.push(last);
  }
  return found;
}

/** @param {(number | null)[]} sums at buckets one after the other @param {number} step seconds of a bucket
 * @param {number} over seconds
 * @returns {(number | null)[]} by how much a sum grew in a second: none where half the time is not known yet, since one
 * merge in a second is no sixty a minute; none either where a counter began anew */
export function rate(sums, step, over) {
  const most = Math.max(1, Math.floor(over / step));
  const least = Math.ceil(most / 2);
  return sums.map((sum, n) => {
    for (let back = Math.min(most, n); back >= least; back--) {
      const before = sums[n - back];
      if (sum !== null && before !== null) return sum < before ? null : (sum - before) / (back * step);
    }
    return null;
  });
}

/** While no cursor chooses another, the legend has the last values; once the plot has settled. @param {any} plot */
function last(plot) {
  queueMicrotask(() => {
    if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  });
}

/** All charts of a page. */
export class Charts {
  constructor() {
    /** @type {Map<string, any>} */
    this.plots = new Map();
    this.against = "time";
    /** @type {Model | null} */
    this.model = null;
  }

  /** Colours have changed, or what is drawn. */
  anew() {
    for (const plot of this.plots.values()) plot.destroy();
    this.plots.clear();
  }

  /** @param {Model} model @param {Span} span */
  show(model, span) {
    this.model = model;
    const { times, origin } = span;
    const from = Math.max(0, Math.floor(span.begin / times.step) - times.first);
    const to = Math.min(times.length, Math.ceil(span.end / times.step) - times.first);
    const at = Array.from({ length: Math.max(0, to - from) }, (_, n) => (times.first + from + n) * times.step - origin);
    const of = (/** @type {string} */ name) => carried(times, name, from, to);
    this.fate(at, of);
    this.loss(model, span);
    const over = Math.max(20, 4 * times.step);
    // What is left of the span is looked at too: a line that enters it there has no beginning.
    const rates = (/** @type {string} */ name, /** @type {number} */ within) =>
      rate(carried(times, name, 0, to), times.step, within).slice(from);
    const merges = rates("merges", Math.max(over, 30)).map((one) => one === null ? null : one * 60);
    this.lines("rate", at, [["merges a minute", "merging", merges]], (one) => one.toFixed(one < 10 ? 1 : 0));
    const traffic = ["received", "sent"].map((name) => rates(name, over));
    this.lines("bytes", at, [["in", "uploading", traffic[0]], ["out", "publishing", traffic[1], [6, 4]]], sized);
    this.lines("redis", at, [["used", "adopting", of("redis")]], sized);
  }

  /** @param {number[]} at @param {(name: string) => (number|null)[]} of */
  fate(at, of) {
    const parts = Object.fromEntries(FATES.map(([name]) => [name, of(name)]));
    const tokens = of("tokens");
    const stacked = FATES.map(() => /** @type {(number|null)[]} */ (new Array(at.length)));
    at.forEach((_, n) => {
      const told = parts.pending[n] !== null;
      let sum = 0;
      FATES.forEach(([name], k) => {
        if (name === "unsaid") sum = told ? sum : Math.max(sum, tokens[n] ?? 0);
        else sum += (told || k === 0 || name === "rejected" ? parts[name][n] : 0) ?? 0;
        stacked[k][n] = tokens[n] === null && !sum ? null : sum;
      });
    });
    const shown = FATES.map(([name, weave, label], k) => ({ name, weave, label, values: stacked[k] })).reverse();
    const series = shown.map(({ name, weave, label, values }, k) => ({
      label,
      stroke: colour(name),
      width: 1,
      fill: woven(colour(name), weave),
      points: { show: false },
      value: (/** @type {any} */ plot, /** @type {number|null} */ sum, /** @type {any} */ _, /** @type {number|null} */ n) => {
        if (sum == null || n == null) return "–";
        const below = plot.data[k + 2]?.[n] ?? 0;
        return `${counted(sum - below)} (${percent((sum - below) / (plot.data[1][n] || 1))})`;
      },
    }));
    this.draw("fate", [at, ...shown.map((one) => one.values)], series, counted, clock);
  }

  /** @param {Model} model @param {Span} span */
  loss(model, span) {
    const byTime = this.against === "time";
    const points = model.losses
      .map(([when, tokens, loss]) => /** @type {[number, number]} */ ([byTime ? when - span.origin : tokens, loss]))
      .filter(([x]) => !byTime || (x >= span.begin - span.origin && x <= span.end - span.origin))
      .sort((a, b) => a[0] - b[0]);
    this.lines("loss", points.map(([x]) => x), [["loss", "training", points.map(([, y]) => y)]],
      (one) => one.toFixed(3), byTime ? clock : counted, byTime ? [span.begin - span.origin, span.end - span.origin] : null);
  }

  /**
   * @param {string} id of its element
   * @param {number[]} xs
   * @param {[string, string, (number|null)[], number[]?][]} lines label, colour, values, dashes
   * @param {(one: number) => string} write
   * @param {(one: number) => string} [writeX]
   * @param {[number, number] | null} [range]
   */
  lines(id, xs, lines, write, writeX = clock, range = null) {
    const series = lines.map(([label, name, , dash]) => ({
      label,
      stroke: colour(name),
      width: 1.6,
      dash,
      spanGaps: true,
      points: { show: xs.length < 60, size: 4 },
      value: (/** @type {any} */ _, /** @type {number|null} */ one) => (one == null ? "–" : write(one)),
    }));
    this.draw(id, [xs, ...lines.map(([, , values]) => values)], series, write, writeX, range);
  }

  /**
   * @param {string} id @param {any[]} data @param {any[]} series @param {(one: number) => string} write
   * @param {(one: number) => string} writeX @param {[number, number] | null} [range]
   */
  draw(id, data, series, write, writeX, range = null) {
    const root = /** @type {HTMLElement} */ (document.getElementById(id));
    if (root.parentElement?.hidden) root.parentElement.hidden = false; // to know its width
    const width = root.clientWidth;
    const there = this.plots.get(id);
    const known = data.slice(1).some((values) => values.some((/** @type {any} */ one) => one !== null));
    /** @type {HTMLElement} */ (root.parentElement).hidden = !known && !there;
    if (!known || (!width && !there)) return there?.setData(data);
    if (there) {
      there.span = range;
      if (width && there.width !== width) there.setSize({ width, height: HEIGHT });
      there.setData(data);
      return last(there);
    }
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") },
      font: "11px system-ui, sans-serif" };
    const plot = new /** @type {any} */ (globalThis).uPlot({
      width,
      height: HEIGHT,
      scales: { x: { time: false, range: (/** @type {any} */ u, /** @type {number} */ low, /** @type {number} */ high) =>
        u.span ?? [low, high > low ? high : low + 1] },
      y: id === "loss" ? {} : { range: (/** @type {any} */ _, /** @type {any} */ __, /** @type {number} */ high) =>
        [0, 1.08 * (high || 1)] } },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      legend: { live: true },
      series: [{ label: writeX === clock ? "run time" : "tokens",
        value: (/** @type {any} */ _, /** @type {number|null} */ x) => (x == null ? "–" : writeX(x)) }, ...series],
      axes: [
        { ...axis, ...(writeX === clock ? BY_TIME : BY_TOKENS), labelFont: axis.font, labelSize: 18, size: 32,
          values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(writeX) },
        { ...axis, size: 62, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(write) },
      ],
      hooks: { draw: [(/** @type {any} */ u) => this.marks(u, writeX === clock)] },
    }, data, root);
    plot.span = range;
    this.plots.set(id, plot);
    last(plot);
  }

  /** Kills and joins: a line with a cross at its top, or a dash. @param {any} plot @param {boolean} byTime */
  marks(plot, byTime) {
    if (!this.model || !["fate", "loss"].includes(plot.root.parentElement?.id)) return;
    const origin = this.model.origin;
    const { left, top, width, height } = plot.bbox;
    const pen = /** @type {CanvasRenderingContext2D} */ (plot.ctx);
    const scale = devicePixelRatio || 1;
    pen.save();
    for (const mark of this.model.marks) {
      const bad = BAD.includes(mark.what);
      if (!bad && !["joined", "started again"].includes(mark.what)) continue;
      const x = plot.valToPos(byTime ? mark.at_s - origin : mark.tokens, "x", true);
      if (!(x >= left && x <= left + width)) continue;
      pen.strokeStyle = colour(bad ? "gone" : "well");
      pen.lineWidth = 1.2 * scale;
      pen.setLineDash(bad ? [] : [3 * scale, 3 * scale]);
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.setLineDash([]);
      const r = 4 * scale;
      pen.beginPath();
      if (bad) pen.moveTo(x - r, top), pen.lineTo(x + r, top + 2 * r), pen.moveTo(x + r, top), pen.lineTo(x - r, top + 2 * r);
      else pen.moveTo(x - r, top + 2 * r), pen.lineTo(x, top), pen.lineTo(x + r, top + 2 * r);
      pen.stroke();
    }
    pen.restore();
  }
}
