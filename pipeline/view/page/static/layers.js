/**
 * What the bits of a lane look like, and the legend that says so. What a colour tells, the height or a hatching tells as
 * well.
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

/** Bands of equal look within a lane's height, and a pixel for each byte in each band. */
export class Look {
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
