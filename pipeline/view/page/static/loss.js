/** The lines of the loss chart: each learner's smoothed training loss, and the held-out loss of the global model. Pure. */

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").Times} Times */
/** @typedef {{xs: number[], names: string[], learners: (number|null)[][], median: (number|null)[],
 *   held: (number|null)[]}} LossLines */

/** Places at which lines are drawn. */
const PLACES = 300;

/**
 * @param {(number | null)[]} losses
 * @returns {(number | null)[]} each with its neighbours' mean: fewer at the beginning, where a loss falls fast
 */
export function smoothed(losses) {
  const most = Math.min(8, Math.floor(losses.length / 16));
  // Sums and counts of all before each place, so that hundreds of learners cost little.
  const [sums, counts] = [new Float64Array(losses.length + 1), new Uint16Array(losses.length + 1)];
  losses.forEach((loss, n) => {
    sums[n + 1] = sums[n] + (loss ?? 0);
    counts[n + 1] = counts[n] + (loss === null ? 0 : 1);
  });
  return losses.map((loss, n) => {
    const reach = Math.min(most, n);
    const [from, to] = [n - reach, Math.min(losses.length, n + reach + 1)];
    return loss === null ? null : reach ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : loss;
  });
}

/**
 * @param {[number, number][]} points in order of their first numbers
 * @param {number[]} places in order
 * @returns {(number | null)[]} straight lines between the points; null outside
 */
export function between(points, places) {
  let at = 0;
  return places.map((place) => {
    while (at < points.length && points[at][0] < place) at++;
    if (at === points.length || (!at && points[0][0] > place)) return null;
    const [x1, y1] = points[at];
    if (x1 === place || !at) return y1;
    const [x0, y0] = points[at - 1];
    return y0 + ((y1 - y0) * (place - x0)) / (x1 - x0);
  });
}

/**
 * @param {Times} times
 * @param {number[]} places Unix times, in order
 * @returns {number[]} tokens that the run had trained
 */
export function tokensAt(times, places) {
  /** @type {[number, number][]} */
  const known = [];
  (times.series.get("tokens") ?? []).forEach((tokens, n) => {
    if (tokens !== null) known.push([(times.first + n + 1) * times.step, tokens]);
  });
  if (!known.length) return places.map(() => 0);
  const inside = places.map((one) => Math.min(Math.max(one, known[0][0]), known[known.length - 1][0]));
  return /** @type {number[]} */ (between(known, inside));
}

/**
 * @param {Model} model @param {{begin: number, end: number}} span Unix times
 * @param {boolean} byTokens the xs are trained tokens of the run, else seconds since it began
 * @returns {LossLines}
 */
export function lossLines(model, span, byTokens) {
  const every = (span.end - span.begin) / PLACES;
  const grid = Array.from({ length: PLACES + 1 }, (_, n) => span.begin + n * every);
  /** The last evaluation in each part, at its own time and tokens. @type {Map<number, [number, number, number]>} */
  const held = new Map();
  for (const one of [...model.losses].sort((a, b) => a[0] - b[0])) {
    if (one[0] >= span.begin && one[0] <= span.end) held.set(Math.floor((one[0] - span.begin) / every), one);
  }
  const gridTokens = byTokens ? tokensAt(model.coarse, grid) : [];
  const places = grid.map((when, n) => ({ when, x: byTokens ? gridTokens[n] : when - model.origin, loss: NaN }));
  for (const [when, tokens, loss] of held.values()) places.push({ when, x: byTokens ? tokens : when - model.origin, loss });
  places.sort((a, b) => a.x - b.x || a.when - b.when);

  const order = places.map((_, n) => n).sort((a, b) => places[a].when - places[b].when);
  const whens = order.map((n) => places[n].when);
  /** @type {Map<string, (number|null)[]>} */
  const lines = new Map();
  for (const curve of model.curves.values()) {
    /** At the middle of each bucket, and as far as the first and the last one reach. @type {[number, number][]} */
    const points = [];
    smoothed(curve.losses).forEach((loss, n) => {
      if (loss !== null) points.push([curve.begin_s + (n + 0.5) * curve.every_s, loss]);
    });
    if (!points.length) continue;
    const half = curve.every_s / 2;
    const [first, last] = [points[0], points[points.length - 1]];
    points.unshift([first[0] - half, first[1]]);
    points.push([Math.max(last[0], Math.min(last[0] + half, model.now)), last[1]]);
    const values = between(points, whens);
    if (values.every((one) => one === null)) continue;
    const line = lines.get(curve.learner) ?? new Array(places.length).fill(null);
    values.forEach((value, n) => (line[order[n]] = value ?? line[order[n]]));
    lines.set(curve.learner, line);
  }
  const names = [...lines.keys()].sort((a, b) => a.length - b.length || (a < b ? -1 : 1));
  const learners = names.map((name) => /** @type {(number|null)[]} */ (lines.get(name)));
  const median = places.map((_, n) => {
    const there = sorted(learners.map((line) => line[n]));
    return there.length ? there[there.length >> 1] : null;
  });
  return { xs: places.map((one) => one.x), names, learners, median,
    held: places.map((one) => (Number.isNaN(one.loss) ? null : one.loss)) };
}

/** @param {(number|null)[]} values @returns {Float64Array} those that are there, in order */
function sorted(values) {
  return Float64Array.from(/** @type {number[]} */ (values.filter((one) => one !== null))).sort();
}

/**
 * @param {(number|null)[][]} lines
 * @returns {[number, number]} what the axis shows: all but losses far above the rest, rare ones and those of the first quarter
 */
export function lossRange(lines) {
  const there = sorted(lines.flat());
  if (!there.length) return [0, 1];
  const later = sorted(lines.flatMap((line) => line.slice(line.length >> 2)));
  const [low, usual] = [there[0], later[Math.floor(0.95 * (later.length - 1))] ?? there[there.length - 1]];
  const high = Math.min(there[there.length - 1], usual + 3 * (usual - low));
  const edge = 0.05 * (high - low) || 0.05 * Math.abs(low) || 1;
  return [low - edge, high + edge];
}

/** @param {Model} model @param {LossLines} lines @returns {[string, string]} what the chart lacks, and a command that tells how to get it */
export function lossLacks(model, lines) {
  const totals = model.totals;
  if (!totals) return ["", ""];
  const over = totals.phase === "finished";
  const none = lines.names.length || over ? "" : "Learners report no loss: pass loss= to step() or attach(). ";
  if (model.losses.length) return ["", ""];
  const whose = lines.names.length ? "These are losses of training batches. " : none;
  if (over) return [`${whose}No held-out loss of the global model was measured.`, ""];
  if (!totals.own_loop) return [`${whose}The first held-out loss of the global model is still being measured.`, ""];
  return [`${whose}For the held-out loss of the global model, run an Evaluator (doc: evaluator.md):`, "python -m pydoc diloco.Evaluator"];
}
