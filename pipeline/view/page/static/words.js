/** Numbers and states in words, and where they stand in the page. */

/** @param {string} id @returns {HTMLElement} */
export function element(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/** @param {string} id @param {string} text */
export function put(id, text) {
  const one = element(id);
  if (one.textContent !== text) one.textContent = text;
}

/** @param {number} number @returns {string} '950', '12.3k', '2.50M' */
export function counted(number) {
  for (const [limit, unit, digits] of /** @type {const} */ ([[1e9, "G", 2], [1e6, "M", 2], [1e4, "k", 1]])) {
    if (number >= limit) return (number / (unit === "k" ? 1e3 : limit)).toFixed(digits) + unit;
  }
  return number.toFixed(0);
}

/** @param {number} number @param {string} what @returns {string} '1 learner', '2 learners' */
export function numbered(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

/** @param {number} bytes @returns {string} */
export function sized(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < 4; unit++) bytes /= 1000;
  return `${bytes.toFixed(bytes < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

/** @param {number} seconds @returns {string} '2:03', '1:02:03' */
export function clock(seconds) {
  const whole = Math.round(Math.max(0, seconds));
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** @param {number | null | undefined} share @returns {string} */
export function percent(share) {
  return share == null ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** Names of what learners' time went into, by `goodput.py`, where they do not say it themselves. */
const SPENT = /** @type {Record<string, string>} */ ({
  kept: "training that is kept", blocked: "in the library's calls", rejoining: "joining again",
  away: "away after a death", died: "lost by a death", rejected: "refused or late",
});

/** @param {string} name @param {number} share @returns {string} 'away after a death 5.0 %' */
export function spentWords(name, share) {
  return `${SPENT[name] ?? name} ${percent(share)}`;
}

/** @param {Record<string, number>} shares of a learner's time @returns {string} */
export function sharesWords(shares) {
  return Object.entries(shares).map(([name, share]) => spentWords(name, share)).join(", ") || "–";
}

const DOES = /** @type {const} */ ([[2, "publishing"], [4, "adopting"]]);

/**
 * What a learner does, in a few words.
 * @param {import("./model.js").LearnerRow} row
 * @param {number} now Unix time
 * @returns {string}
 */
export function doing(row, now) {
  if (row.state === "left") return row.state;
  if (row.state === "dead") return `dead: silent for ${clock(now - row.heard_s)}`;
  if (row.state === "silent") return "silent";
  if (row.does & 8) return row.step ? "makes no step" : "waits to begin";
  const more = DOES.filter(([bit]) => row.does & bit).map(([, word]) => word);
  return more.length ? `training, ${more.join(", ")}` : "training, waits for nothing";
}

/**
 * @param {string} name
 * @param {import("./model.js").LearnerRow} row
 * @param {number} now Unix time
 * @returns {string} lines
 */
export function learnerWords(name, row, now) {
  const lives = row.lives > 1 ? `, life ${row.lives}: it came back` : "";
  const loss = row.loss == null ? "" : `, loss ${row.loss.toFixed(3)}`;
  return [
    `${name}: ${doing(row, now)}${lives}`,
    `step ${row.step}, ${counted(row.tokens_per_s)} tokens/s${loss}`,
    `its time: ${sharesWords(row.time)}`,
    row.behind ? `${numbered(row.behind, "fragment")} to adopt, version ${row.version}` : `all adopted, version ${row.version}`,
    [row.host, row.device].filter(Boolean).join(", "),
  ].join("\n");
}

/**
 * What a fragment's window does, in a few words.
 * @param {import("./model.js").FragmentRow} row
 * @param {number} now Unix time
 * @returns {string}
 */
export function windowWords(row, now) {
  const left = row.state === "grace" && row.until_s != null ? `, ${Math.max(0, row.until_s - now).toFixed(1)} s left` : "";
  return row.state === "idle" ? "idle" : `${row.state} ${row.members} / ${row.quorum}${left}`;
}

/**
 * @param {import("./model.js").FragmentRow} row
 * @returns {string} '24 steps'; longer than asked for: '72 steps (asked: 24)'
 */
export function intervalWords(row) {
  const long = row.asked_interval && row.interval > row.asked_interval;
  return numbered(row.interval, "step") + (long ? ` (asked: ${row.asked_interval})` : "");
}

/**
 * @param {string} name
 * @param {import("./model.js").FragmentRow} row
 * @param {number} now Unix time
 * @returns {string} lines
 */
export function fragmentWords(name, row, now) {
  const more = [
    row.expected ? `${numbered(row.expected, "learner")} expected` : "",
    row.attempt ? `attempt ${row.attempt + 1}` : "",
    row.suspected ? `${numbered(row.suspected, "learner")} suspected` : "",
    row.refused ? `${numbered(row.refused, "delta")} refused so far` : "",
  ].filter(Boolean);
  return [
    `fragment ${name}, version ${row.version}: ${windowWords(row, now)}`,
    row.reason,
    more.join(", "),
    `interval ${intervalWords(row)}; last merge ${row.merge_s.toFixed(2)} s, outer step ${row.outer_s.toFixed(2)} s`,
    row.owner ? `served by ${row.owner}` : "nobody serves it",
  ].filter(Boolean).join("\n");
}
