/**
 * The model of a run as the page has it: one snapshot, and patches to it. `pipeline/view/page/model.py` makes both.
 *
 * @typedef {{state: string, does: number, step: number, tokens: number, tokens_per_s: number, step_s: number,
 *   loss: number | null, heard_s: number, time: Record<string, number>, behind: number, version: number, lives: number,
 *   host: string, device: string}} LearnerRow
 * @typedef {{version: number, state: string, members: number, quorum: number, expected: number,
 *   until_s: number | null, reason: string, attempt: number, interval: number, asked_interval: number, merge_s: number, outer_s: number,
 *   refused: number, suspected: number, averaged: boolean, owner: string}} FragmentRow
 * @typedef {{at_s: number, what: string, who: string, detail: string}} Mark
 * @typedef {{learner: string, begin_s: number, every_s: number, losses: (number|null)[]}} Curve
 * @typedef {{step_s: number, first: number, lanes: Record<string, string>, series: Record<string, (number|null)[]>}} Whole
 * @typedef {{first: number, lanes: Record<string, [number, number[]]>,
 *   series: Record<string, [number, (number|null)[]]>}} Change
 */

const MAX_MARKS = 400;

/** What happened when, in buckets of equal length: `timeline.py`. */
export class Times {
  constructor() {
    this.step = 1;
    this.first = 0;
    /** Buckets that are there. */
    this.length = 0;
    /** @type {Map<string, Uint8Array>} */
    this.lanes = new Map();
    /** @type {Map<string, (number | null)[]>} */
    this.series = new Map();
  }

  get begin() {
    return this.first * this.step;
  }

  get end() {
    return (this.first + this.length) * this.step;
  }

  /** @param {Whole} all */
  take(all) {
    [this.step, this.first] = [all.step_s, all.first];
    this.series = new Map(Object.entries(all.series));
    this.lanes = new Map();
    for (const [name, text] of Object.entries(all.lanes)) {
      this.lanes.set(name, Uint8Array.from(atob(text), (one) => one.charCodeAt(0)));
    }
    this.length = Math.max(0, ...[...this.lanes.values(), ...this.series.values()].map((one) => one.length));
  }

  /** @param {{whole?: Whole} & Partial<Change>} patch */
  change(patch) {
    if (patch.whole) return this.take(patch.whole);
    const gone = /** @type {number} */ (patch.first) - this.first;
    if (gone > 0) {
      for (const [name, cells] of this.lanes) this.lanes.set(name, cells.slice(gone));
      for (const values of this.series.values()) values.splice(0, gone);
      this.first += gone;
      this.length = Math.max(0, this.length - gone);
    }
    for (const [name, [number, cells]] of Object.entries(patch.lanes ?? {})) {
      const at = number - this.first;
      let lane = this.lanes.get(name) ?? new Uint8Array(0);
      if (lane.length < at + cells.length) {
        const longer = new Uint8Array(at + cells.length + 32); // zeros are nothing: they are there before their time
        longer.set(lane);
        this.lanes.set(name, (lane = longer));
      }
      lane.set(cells, at);
      this.length = Math.max(this.length, at + cells.length);
    }
    for (const [name, [number, values]] of Object.entries(patch.series ?? {})) {
      const at = number - this.first;
      const series = this.series.get(name) ?? [];
      this.series.set(name, series);
      while (series.length < at) series.push(null);
      values.forEach((value, n) => (series[at + n] = value));
      this.length = Math.max(this.length, series.length);
    }
  }
}

/** All that the page shows. */
export class Model {
  constructor() {
    this.run = "";
    this.now = 0;
    this.sentence = { level: "note", text: "", do: "", command: "" };
    /** @type {string[]} */
    this.notes = [];
    /** @type {any} as `status.py` names it */
    this.totals = null;
    /** @type {Map<string, LearnerRow>} */
    this.learners = new Map();
    /** @type {Map<string, FragmentRow>} */
    this.fragments = new Map();
    /** @type {{id: string, leads: boolean, fragments: number}[]} */
    this.syncers = [];
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {[number, number, number][]} Unix time, trained tokens, loss */
    this.losses = [];
    /** Training losses by learner and incarnation. @type {Map<string, Curve>} */
    this.curves = new Map();
    this.fine = new Times();
    this.coarse = new Times();
    /** Unix time at which the run began; null: it has not. @type {number | null} */
    this.origin_s = null;
  }

  /** Where all times that are shown begin. */
  get origin() {
    return this.origin_s ?? this.coarse.begin;
  }

  /** @param {any} all */
  snapshot(all) {
    Object.assign(this, new Model());
    this.patch({ ...all, fine: undefined, coarse: undefined });
    if (all.fine) this.fine.take(all.fine);
    if (all.coarse) this.coarse.take(all.coarse);
  }

  /** @param {any} patch */
  patch(patch) {
    if (patch.now_s !== undefined) this.now = patch.now_s;
    for (const name of /** @type {const} */ (["run", "origin_s", "sentence", "notes", "totals", "syncers"])) {
      if (patch[name] !== undefined) this[name] = patch[name];
    }
    for (const name of /** @type {const} */ (["learners", "fragments"])) {
      for (const [key, row] of Object.entries(patch[name] ?? {})) {
        if (row === null) this[name].delete(key);
        else this[name].set(key, /** @type {any} */ ({ ...this[name].get(key), .../** @type {object} */ (row) }));
      }
    }
    for (const [key, row] of Object.entries(patch.curves ?? {})) {
      const curve = this.curves.get(key);
      if (row === null) this.curves.delete(key);
      else if (row.from === undefined) this.curves.set(key, row);
      else if (curve) this.curves.set(key, { ...curve, losses: [...curve.losses.slice(0, row.from), ...row.losses] });
    }
    if (patch.marks) this.marks = [...this.marks, ...patch.marks].slice(-MAX_MARKS);
    if (patch.losses_anew) this.losses = patch.losses_anew;
    else if (patch.losses) this.losses.push(...patch.losses);
    if (patch.fine) this.fine.change(patch.fine);
    if (patch.coarse) this.coarse.change(patch.coarse);
  }
}
