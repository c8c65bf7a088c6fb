/** Charts over time, by uPlot (`uplot/`, MIT): loss, the fate of tokens, merge rate, bytes, memory, the outer step. */

import { lossLacks, lossLines, lossRange, tokensAt } from "./loss.js";
import { colour, woven } from "./palette.js";
import { bars, carried, rate } from "./rates.js";
import { clock, counted, element, percent, put, sized } from "./words.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {{times: import("./model.js").Times, begin: number, end: number, origin: number}} Span */

/** The fate of tokens, from the bottom. @type {[string, import("./palette.js").Weave, string][]} */
export const FATES = [
  ["merged", "solid", "merged"],
  ["overwritten", "slant", "overwritten"],
  ["rejected", "cross", "rejected"],
  ["died", "back", "died"],
  ["pending", "dots", "pending"],
  ["unsaid", "lines", "not merged, cause not known"],
];
const HEIGHT = 210;
const LOSS_HEIGHT = 320;
/** Up to so many learners have a colour each; the lines of more are alike, and their median has a name. */
const COLOURS = 8;
const BY_TIME = { label: "run time (0:00: the run began)",
  incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800] };
const BY_TOKENS = { label: "trained tokens" };
const BAD = ["killed", "died", "went silent", "failed over or was restarted"];

/** While no cursor chooses another, the legend has the last values; once the plot has settled. @param {any} plot */
function last(plot) {
  queueMicrotask(() => {
    if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  });
}

/** @type {(plot: any, line: number, n?: number|null) => number[]} values of a line, up to a place */
function known(plot, line, n) {
  return plot.data[line].slice(0, n == null ? undefined : n + 1).filter((/** @type {any} */ one) => one !== null);
}

/**
 * What the legend says of a line: where it has ended, or is known at some places only, its last value.
 * @param {(one: number) => string} write
 */
function lastKnown(write) {
  return (/** @type {any} */ plot, /** @type {any} */ _, /** @type {number} */ line, /** @type {number|null} */ n) => {
    const one = known(plot, line, n).pop();
    return one === undefined ? "–" : write(one);
  };
}

/** All charts of a page. */
export class Charts {
  constructor() {
    /** @type {Map<string, any>} */
    this.plots = new Map();
    this.against = "time";
    this.begin = 0;
    this.named = "";
    this.focused = "";
    /** @type {[number, number]} */
    this.lossRange = [0, 1];
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
    [this.model, this.begin] = [model, span.begin];
    const { times, origin } = span;
    const from = Math.max(0, Math.floor(span.begin / times.step) - times.first);
    const to = Math.min(times.length, Math.ceil(span.end / times.step) - times.first);
    const at = Array.from({ length: Math.max(0, to - from) }, (_, n) => (times.first + from + n) * times.step - origin);
    const of = (/** @type {string} */ name) => carried(times, name, from, to);
    this.fate(at, of, [span.begin - origin, span.end - origin]);
    this.loss(model, span);
    const over = Math.max(20, 4 * times.step);
    // What is left of the span is looked at too: a line that enters it there has no beginning.
    const rates = (/** @type {string} */ name, /** @type {number} */ within) =>
      rate(carried(times, name, 0, to), times.step, within).slice(from);
    const range = /** @type {[number, number]} */ ([span.begin - origin, span.end - origin]);
    const [begins, merges] = bars(carried(times, "merges", 0, times.length), times.first, times.step, span.begin, span.end,
      origin);
    this.lines("rate", begins.map((one) => one - origin), [["merges a minute", "merging", merges]],
      (one) => one.toFixed(one < 10 ? 1 : 0), range);
    const traffic = ["received", "sent"].map((name) => rates(name, over));
    this.lines("bytes", at, [["in", "uploading", traffic[0]], ["out", "publishing", traffic[1], [6, 4]]], sized, range);
    const polls = (times.series.get("redis") ?? []).filter((one) => one !== null).length; // of a finished run there is one
    this.lines("redis", at, [["used", "adopting", polls > 1 ? of("redis") : at.map(() => null)]], sized, range);
    this.lines("outer", at, [["effective outer rate", "line-0", of("outer_rate")],
      ["cosine with the merge before (rho)", "line-1", of("rho"), [6, 4]],
      ["cosine among learners", "line-2", of("cosine"), [2, 3]]], (one) => one.toFixed(2), range);
    // Cells are narrower once all charts that have something to show are there.
    for (const [id, plot] of this.plots) {
      const width = element(id).clientWidth;
      if (width && plot.width !== width) plot.setSize({ width, height: plot.height });
    }
  }

  /** @param {number[]} at @param {(name: string) => (number|null)[]} of @param {[number, number]} range */
  fate(at, of, range) {
    const parts = Object.fromEntries(FATES.map(([name]) => [name, of(name)]));
    const tokens = of("tokens");
    const stacked = FATES.map(() => /** @type {(number|null)[]} */ (new Array(at.length)));
    const unsaid = at.some((_, n) => parts.pending[n] === null && (tokens[n] ?? 0) > (parts.merged[n] ?? 0) + (parts.rejected[n] ?? 0));
    put("fate-lacks", unsaid ? "Grey: not merged, before this page read the causes. The legend has their sums at the end." : "");
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
    this.draw("fate", [at, ...shown.map((one) => one.values)], series, counted, clock, range);
  }

  /** @param {Model} model @param {Span} span */
  loss(model, span) {
    const byTime = this.against === "time";
    const drawn = lossLines(model, span, !byTime);
    const write = (/** @type {number} */ one) => (Math.abs(one) < 0.01 || Math.abs(one) >= 1e5 ? one.toExponential(2) : one.toFixed(3));
    const [lacks, command] = lossLacks(model, drawn);
    put("loss-lacks", lacks);
    put("loss-how", command);
    const few = drawn.names.length <= COLOURS;
    const base = { spanGaps: false, points: { show: false }, value: lastKnown(write) };
    const thin = drawn.names.map((name, n) => ({ ...base, label: name, class: few ? null : "unnamed", width: few ? 1.3 : 1,
      stroke: colour(few ? `line-${n}` : "thin") }));
    const lines = [drawn.held, ...drawn.learners];
    const measured = model.losses.length > 0;
    const series = [{ ...base, label: "global, held out", stroke: colour("ink"), width: 3, spanGaps: true,
      class: measured ? null : "unnamed", points: { size: 6, fill: colour("ink"),
        show: (/** @type {any} */ plot) => known(plot, 1).length < 40 } }, ...thin];
    if (!few) {
      lines.push(drawn.median);
      series.push({ ...base, label: `median of ${drawn.names.length} learners`, stroke: colour("training"), width: 1.8, class: null });
    }
    const key = `${measured} ${drawn.names.join()}`;
    if (this.named !== key) { // other lines than before
      this.named = key;
      this.forget("loss");
    }
    this.lossRange = lossRange(lines);
    const range = byTime ? /** @type {[number, number]} */ ([span.begin - span.origin, span.end - span.origin]) : null;
    this.draw("loss", [drawn.xs, ...lines], series, write, byTime ? clock : counted, range);
    this.focus(this.focused);
  }

  /** Choose a learner, whose line stands out; "": none. @param {string} name */
  focus(name) {
    this.focused = name;
    const plot = this.plots.get("loss");
    const at = plot?.series.findIndex((/** @type {any} */ one, /** @type {number} */ n) => n && one.label === name) ?? -1;
    plot?.setSeries(at < 0 ? null : at, { focus: true });
  }

  /** @param {string} id */
  forget(id) {
    this.plots.get(id)?.destroy();
    this.plots.delete(id);
  }

  /**
   * @param {string} id of its element
   * @param {number[]} xs
   * @param {[string, string, (number|null)[], number[]?][]} lines label, colour, values, dashes
   * @param {(one: number) => string} write
   * @param {[number, number]} range
   */
  lines(id, xs, lines, write, range) {
    const bar = id === "rate" ? { fill: colour(lines[0][1]), paths: /** @type {any} */ (globalThis).uPlot.paths.bars({ size: [0.9, 40], align: 1 }) } : {};
    const series = lines.map(([label, name, , dash]) => ({
      label,
      stroke: colour(name),
      width: 1.6,
      dash,
      spanGaps: true,
      points: { show: false },
      value: lastKnown(write),
      ...bar,
    }));
    this.draw(id, [xs, ...lines.map(([, , values]) => values)], series, write, clock, range);
  }

  /**
   * @param {string} id @param {any[]} data @param {any[]} series @param {(one: number) => string} write
   * @param {(one: number) => string} writeX @param {[number, number] | null} [range]
   */
  draw(id, data, series, write, writeX, range = null) {
    const root = element(id);
    const section = /** @type {HTMLElement} */ (root.closest("section"));
    const height = id === "loss" ? LOSS_HEIGHT : HEIGHT;
    const there = this.plots.get(id);
    const any = data.slice(1).some((values) => values.some((/** @type {any} */ one) => one !== null));
    section.hidden = id !== "loss" && !any && !there;
    root.hidden = !any && !there;
    const width = root.clientWidth;
    if (!any || (!width && !there)) return there?.setData(data);
    if (there) {
      there.span = range;
      there.setData(data);
      return last(there);
    }
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") },
      font: "11px system-ui, sans-serif" };
    const plot = new /** @type {any} */ (globalThis).uPlot({
      width,
      height,
      scales: { x: { time: false, range: (/** @type {any} */ u, /** @type {number} */ low, /** @type {number} */ high) =>
        u.span ?? [low, high > low ? high : low + 1] },
      y: id === "loss" ? { range: () => this.lossRange } : { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) =>
        [Math.min(0, 1.08 * low), 1.08 * (high || 1)] } },
      cursor: { drag: { x: false, y: false }, points: { show: false }, ...(writeX === clock ? { sync: { key: "time" } } : {}),
        ...(id === "loss" ? { focus: { prox: 16 } } : {}) },
      focus: { alpha: id === "loss" ? 0.25 : 1 },
      legend: { live: true },
      series: [{}, ...series],
      axes: [
        { ...axis, ...(writeX === clock ? BY_TIME : BY_TOKENS), labelFont: axis.font, labelSize: 18, size: 32,
          values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(writeX) },
        { ...axis, size: 62, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) =>
          id === "loss" ? ticks.map((one) => String(Number(one.toPrecision(6)))) : ticks.map(write) },
      ],
      hooks: {
        draw: [(/** @type {any} */ u) => this.marks(u, writeX === clock)],
        setCursor: [(/** @type {any} */ u) => {
          const x = u.cursor.idx == null ? null : u.data[0][u.cursor.idx];
          put(`${id}-at`, x == null ? "" : `at ${writeX(x)}`);
        }],
      },
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
    const shown = this.model.marks.filter((one) => one.at_s >= this.begin &&
      (BAD.includes(one.what) || ["joined", "started again"].includes(one.what)));
    shown.sort((a, b) => a.at_s - b.at_s);
    const tokens = byTime ? [] : tokensAt(this.model.coarse, shown.map((one) => one.at_s));
    for (const [n, mark] of shown.entries()) {
      const bad = BAD.includes(mark.what);
      const x = plot.valToPos(byTime ? mark.at_s - origin : tokens[n], "x", true);
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
