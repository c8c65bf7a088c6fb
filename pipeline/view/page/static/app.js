/** The page: takes events, and draws what has changed, no more often than the screen shows it. */

import { doing, element, fragmentWords, learnerWords, put, windowWords } from "./words.js";
import { Model } from "./model.js";
import { Stream } from "./stream.js";
import { FRAGMENT_LAYERS, LEARNER_LAYERS, legend } from "./layers.js";
import { Strips } from "./lanes.js";
import { Charts } from "./charts.js";
import { byName, goodput, head, lists, tables, tiles } from "./panels.js";

/** Time shown: the last so many seconds; 0: all of it. @type {[string, number][]} */
const SPANS = [["last 2 minutes", 120], ["last 10 minutes", 600], ["whole run", 0]];
const CHARTS_MS = 1000;

const model = new Model();
const learners = new Strips(element("learners"), "Lanes of learners", LEARNER_LAYERS);
const fragments = new Strips(element("fragments"), "Strips of fragments", FRAGMENT_LAYERS);
const charts = new Charts();
learners.chosenRow = (name) => charts.focus(name);
let shownSpan = 0;
let chartsAt = -Infinity;
let chartsMs = 0;
let asked = false;
/** Time that scripts have taken for the last update, ms, and how many there were: for who measures it. */
export const took = { patch: 0, draw: 0, updates: 0 };
Object.assign(globalThis, { diloco: { model, took, charts } });

/** @returns {import("./lanes.js").Span} */
function span() {
  // What was before the run began is not drawn: parties were starting.
  const first = Math.max(model.coarse.begin, model.origin);
  const end = Math.max(first + 1, model.coarse.end, model.fine.end);
  const whole = !shownSpan || end - first <= shownSpan;
  // While the last minutes are the whole run, they are the finer picture of it.
  const times = !whole || model.fine.begin <= first ? model.fine : model.coarse;
  return { times, begin: whole ? first : end - shownSpan, end, origin: model.origin };
}

function draw() {
  asked = false;
  if (element("run").hidden) return;
  const began = performance.now();
  const shown = span();
  head(model);
  tiles(model);
  goodput(model);
  lists(model);
  learners.show([...model.learners].sort(byName).map(([name, row]) => ({
    name,
    lane: `L/${name}`,
    label: `${mark(row)}${name}`,
    note: `${doing(row, model.now)}${row.lives > 1 ? `, back (life ${row.lives})` : ""}`,
    words: () => learnerWords(name, row, model.now),
  })), shown);
  fragments.show([...model.fragments].sort(byName).map(([name, row]) => ({
    name,
    lane: `F/${name}`,
    label: `${name}  v${row.version}`,
    note: windowWords(row, model.now),
    words: () => fragmentWords(name, row, model.now),
  })), shown);
  // A slow machine, or one with hundreds of learners to draw, spends a tenth of its time on charts.
  if (performance.now() - chartsAt > Math.max(CHARTS_MS, 10 * chartsMs)) {
    chartsAt = performance.now();
    charts.show(model, shown);
    chartsMs = performance.now() - chartsAt;
    if (/** @type {HTMLDetailsElement} */ (element("as-table")).open) tables(model);
  }
  took.draw = performance.now() - began;
  took.updates += 1;
}

/** @param {import("./model.js").LearnerRow} row @returns {string} */
function mark(row) {
  return row.state === "dead" || row.state === "silent" ? "✕ " : row.state === "left" ? "– " : "";
}

/** Draw soon: with the next picture of the screen; not at all while nobody sees it. */
function soon() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(draw);
}

function anew() {
  charts.anew();
  chartsAt = -Infinity;
  legend(element("learner-legend"), LEARNER_LAYERS);
  legend(element("fragment-legend"), FRAGMENT_LAYERS);
  soon();
}

/**
 * A row of buttons of which one is chosen.
 * @param {string} id @param {string[]} names @param {number} first @param {(number: number) => void} choose
 * @returns {(number: number) => void} to choose one from elsewhere
 */
function choice(id, names, first, choose) {
  const buttons = names.map((name, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("role", "radio");
    button.textContent = name;
    button.addEventListener("click", () => take(number));
    return button;
  });
  function take(/** @type {number} */ number) {
    buttons.forEach((button, n) => button.setAttribute("aria-checked", String(n === number)));
    choose(number);
  }
  element(id).replaceChildren(...buttons);
  take(first);
  return take;
}

function controls() {
  const spans = choice("spans", SPANS.map(([name]) => name), 2, (number) => {
    shownSpan = SPANS[number][1];
    chartsAt = -Infinity;
    soon();
  });
  let byTokens = 0;
  const against = choice("against", ["time", "tokens"], 0, (number) => {
    byTokens = number;
    charts.against = number ? "tokens" : "time";
    charts.forget("loss");
    chartsAt = -Infinity;
    soon();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey) return;
    if (["1", "2", "3"].includes(event.key)) spans(Number(event.key) - 1);
    if (event.key === "l") against(1 - byTokens);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
  addEventListener("resize", () => {
    chartsAt = -Infinity;
    soon();
  });
  // A scrollbar that comes with the first lanes makes it narrower: draw anew before the screen shows it.
  let wide = 0;
  new ResizeObserver(() => {
    if (wide === element("run").clientWidth) return;
    wide = element("run").clientWidth;
    chartsAt = -Infinity;
    draw();
  }).observe(element("run"));
  element("as-table").addEventListener("toggle", () => tables(model));
}

function show() {
  element("ask").hidden = element("loading").hidden = true;
  element("run").hidden = false;
}

/** Ask for a token, and show nothing meanwhile. @param {Stream} stream @param {boolean} again */
function ask(stream, again) {
  model.snapshot({});
  element("run").hidden = element("loading").hidden = true;
  element("ask").hidden = false;
  put("ask-why", again ? "That is not the token of this run." : "");
  const input = /** @type {HTMLInputElement} */ (element("token"));
  input.value = "";
  input.focus();
  /** @type {HTMLFormElement} */ (element("ask")).onsubmit = (event) => {
    event.preventDefault();
    put("ask-why", "");
    stream.give(input.value);
  };
}

function start() {
  controls();
  const kept = document.getElementById("model")?.textContent;
  if (kept) {
    model.snapshot(JSON.parse(kept));
    show();
    anew();
    return;
  }
  const stream = new Stream(
    (kind, data) => {
      const began = performance.now();
      if (kind === "snapshot") model.snapshot(data);
      else model.patch(data);
      took.patch = performance.now() - began;
      if (element("run").hidden) {
        show();
        anew();
      }
      soon();
    },
    (words) => ["link", "loading"].forEach((id) => put(id, words)),
    (again) => ask(stream, again),
  );
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) history.replaceState(null, "", location.pathname);
  if (given) stream.give(given);
  else stream.follow();
}

start();
