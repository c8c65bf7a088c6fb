/** Sums over time, and how fast they grew. Pure. */

/** @typedef {import("./model.js").Times} Times */

/** Bars of the merge rate at most, and how long one may be, in seconds: in a short one merges come one at a time. */
const BARS = 40;
const BAR_S = [10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800];

/** @param {Times} times @param {string} name @param {number} from @param {number} to numbers of buckets
 * @returns {(number | null)[]} a sum at each bucket: where nothing was noted it is what it was before */
export function carried(times, name, from, to) {
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

/**
 * @param {(number | null)[]} sums at buckets, the first of which is number `first` @param {number} first
 * @param {number} step seconds of a bucket @param {number} begin @param {number} end Unix times
 * @param {number} origin Unix time at which a bar begins, so that bars stay where they are while time goes on
 * @returns {[number[], (number|null)[]]} begins of the bars, and by how much the sum grew a minute in each; null where it
 * is not known, and where a counter began anew
 */
export function bars(sums, first, step, begin, end, origin) {
  const long = BAR_S.find((one) => one >= step && (end - begin) / one <= BARS) ?? BAR_S[BAR_S.length - 1];
  const sum = (/** @type {number} */ when) => sums[Math.min(sums.length, Math.floor(when / step) - first) - 1] ?? null;
  const known = sums.find((one) => one !== null); // what grows in a bar before it is known counts from there
  const begins = [];
  for (let at = origin + Math.floor((begin - origin) / long) * long; at < end; at += long) begins.push(at);
  return [begins, begins.map((at) => {
    const [from, to] = [sum(at) ?? known, sum(Math.min(at + long, end))];
    const took = Math.min(at + long, end) - at;
    return from == null || to === null || to < from || took < long / 2 ? null : ((to - from) * 60) / took;
  })];
}
