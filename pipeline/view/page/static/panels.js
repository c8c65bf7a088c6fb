/** What is said in words: the sentence, tiles, syncers, events, tables. All of it as text, never as HTML. */

import {
  clock, counted, doing, element, intervalWords, numbered, percent, put, sharesWords, sized, spentWords, windowWords,
} from "./words.js";

/** @typedef {import("./model.js").Model} Model */

const SIGNS = /** @type {Record<string, string>} */ ({ well: "✓", note: "!", bad: "✕", over: "■" });
const MAX_EVENTS = 100;

/** @param {string} tag @param {string} text @returns {HTMLElement} */
function made(tag, text) {
  const one = document.createElement(tag);
  one.textContent = text;
  return one;
}

/** Children anew, if their texts have changed. @param {HTMLElement} root @param {string[]} texts @param {string} tag */
function list(root, texts, tag = "li") {
  const key = texts.join("\n");
  if (root.dataset.key === key) return;
  root.dataset.key = key;
  root.replaceChildren(...texts.map((text) => made(tag, text)));
}

/** @param {Model} model */
export function head(model) {
  const { level, text, do: remedy, command } = model.sentence;
  document.title = `${SIGNS[level] ?? ""} ${model.run}`;
  put("name", model.run);
  put("sentence", text);
  put("sign", SIGNS[level] ?? "");
  put("do", remedy);
  put("command", command ?? "");
  element("verdict").dataset.level = level;
  const totals = model.totals;
  put("phase", totals ? totals.phase + (totals.phase === "running" ? "" : ` (${totals.reason})`) : "");
  /** @type {HTMLProgressElement} */ (element("progress")).value = totals?.progress ?? 0;
  list(element("notes"), model.notes.concat((totals?.warnings ?? []).map((/** @type {string} */ one) => `Warning: ${one}`)));
}

/** @param {Model} model @returns {[string, string][]} */
function facts(model) {
  const totals = model.totals;
  if (!totals) return [];
  const live = [...model.learners.values()].filter((row) => row.state === "live" || row.state === "silent");
  const speed = live.reduce((sum, row) => sum + row.tokens_per_s, 0);
  const { recent, recent_is_all: all } = totals.merged_share;
  const redis = totals.redis;
  const refused = Object.entries(totals.refused)
    .map(([reason, times]) => `${times} ${reason.replaceAll("_", " ")}`).join(",\n");  // a tile is no wider than a word
  return [
    ["trained", counted(totals.tokens) + (totals.budget_tokens ? ` of ${counted(totals.budget_tokens)}` : "")],
    ["merged", percent(totals.merged_share.since_start) + (recent == null || all ? "" : `, lately ${percent(recent)}`)],
    ["learners live", `${live.length} of ${totals.learners}`],
    ["tokens/s", counted(speed)],
    ["merges", String(totals.outer_steps)],
    loss(model),
    ["deltas refused", refused || "none"],
    ["Redis", redis ? sized(redis.used) + (redis.most ? ` of ${sized(redis.most)}` : ", no limit") : "–"],
    ["run time", model.origin_s == null ? "not begun" : clock(totals.elapsed_s)],
  ];
}

/** The bar of what the learners' time went into. @param {Model} model */
export function goodput(model) {
  const { since_start: share, recent } = model.totals?.goodput ?? {};
  element("goodput").hidden = share == null;
  if (share == null) return;
  put("goodput-words", `Goodput ${percent(share)} of the learners' time${recent == null ? "" : `, lately ${percent(recent)}`}`);
  const spent = /** @type {[string, number][]} */ ([["kept", share], ...Object.entries(model.totals.badput)]);
  list(element("goodput-legend"), spent.map(([name, share]) => spentWords(name, share)));
  const bar = element("goodput-bar");
  if (bar.children.length !== spent.length) bar.replaceChildren(...spent.map(() => made("span", "")));
  spent.forEach(([name, share], n) => {
    for (const one of [bar.children[n], element("goodput-legend").children[n]]) {
      /** @type {HTMLElement} */ (one).dataset.spent = name;
    }
    /** @type {HTMLElement} */ (bar.children[n]).style.flexGrow = String(share);
  });
}

/** @param {Model} model @returns {[string, string]} the global loss, or else the learners' own */
function loss(model) {
  const { evaluation } = model.totals;
  if (evaluation) return ["global loss", evaluation.loss?.toFixed(4) ?? "not a number"];
  const known = [...model.learners.values()].filter((row) => row.state === "live" && row.loss != null);
  if (!known.length) return ["global loss", "–"];
  return ["training loss", (known.reduce((sum, row) => sum + /** @type {number} */ (row.loss), 0) / known.length).toFixed(3)];
}

/** @param {Model} model */
export function tiles(model) {
  const root = element("tiles");
  facts(model).forEach(([name, value], n) => {
    let tile = root.children[n];
    if (!tile) {
      tile = root.appendChild(document.createElement("div"));
      tile.append(made("dt", name), made("dd", ""));
    }
    for (const [cell, said] of /** @type {const} */ ([[tile.firstElementChild, name], [tile.lastElementChild, value]])) {
      if (cell && cell.textContent !== said) cell.textContent = said;
    }
  });
}

/** @param {Model} model */
export function lists(model) {
  const syncers = model.syncers.map((one) =>
    `${one.id}${one.leads ? " leads, and" : ""} serves ${numbered(one.fragments, "fragment")}`);
  list(element("syncers"), syncers.length ? syncers : ["none is here"]);
  const events = [...model.marks].sort((a, b) => b.at_s - a.at_s).slice(0, MAX_EVENTS).map((one) =>
    `${one.at_s < model.origin - 0.5 ? "before " : ""}${clock(one.at_s - model.origin)}  ${one.who} ${one.what}${one.detail && !["joined", "left"].includes(one.what) ? `: ${one.detail}` : ""}`);
  list(element("events"), events.length ? events : ["nothing yet"]);
}

/** @param {string[]} names @param {string[][]} rows @param {string} about @returns {HTMLElement} */
function table(names, rows, about) {
  const made_ = document.createElement("table");
  made_.append(made("caption", about));
  const top = document.createElement("tr");
  top.append(...names.map((name) => made("th", name)));
  made_.append(top, ...rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((cell) => made("td", cell)));
    return line;
  }));
  return made_;
}

/** @param {Model} model */
export function tables(model) {
  const learners = [...model.learners].sort(byName).map(([name, row]) =>
    [name, doing(row, model.now), String(row.step), counted(row.tokens_per_s), row.loss?.toFixed(3) ?? "–",
      `${row.version}${row.behind ? `, ${row.behind} to adopt` : ""}`, String(row.lives), sharesWords(row.time),
      row.host, row.device]);
  const fragments = [...model.fragments].sort(byName).map(([name, row]) =>
    [name, String(row.version), windowWords(row, model.now), row.reason, String(row.expected), intervalWords(row),
      String(row.refused), row.owner]);
  element("tables").replaceChildren(
    table(["learner", "does", "step", "tokens/s", "loss", "version", "lives", "time", "host", "device"], learners, "Learners"),
    table(["fragment", "version", "window", "reason", "expected", "interval", "refused", "served by"], fragments, "Fragments"),
  );
}

/** @param {[string, any]} a @param {[string, any]} b @returns {number} `learner-2` before `learner-10` */
export function byName(a, b) {
  return a[0].length - b[0].length || (a[0] < b[0] ? -1 : 1);
}
