/**
 * Colours and patterns. Colours are CSS variables, so that dark and light are settled in one place; patterns tell the
 * same to whoever does not tell colours apart.
 */

/** @param {string} name of a CSS variable without its dashes @returns {string} */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** @param {string} css a colour as `#rgb` or `#rrggbb` @returns {number} a pixel of `ImageData`, little-endian */
export function pixel(css) {
  const hex = css.slice(1);
  const full = hex.length === 3 ? [...hex].map((digit) => digit + digit).join("") : hex;
  const value = parseInt(full, 16);
  return ((255 << 24) | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

/** How an area is drawn: strokes on a ground of its colour. @typedef {"solid"|"slant"|"dots"|"cross"|"lines"|"back"} Weave */

/**
 * @param {string} css colour
 * @param {Weave} weave
 * @returns {CanvasPattern | string} a fill
 */
export function woven(css, weave) {
  if (weave === "solid") return css;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
  pen.fillStyle = css;
  pen.globalAlpha = 0.55;
  pen.fillRect(0, 0, 8, 8);
  pen.globalAlpha = 1;
  pen.strokeStyle = css;
  pen.lineWidth = 1.6;
  pen.beginPath();
  if (weave === "slant" || weave === "cross") for (const x of [-8, 0, 8]) pen.moveTo(x, 8), pen.lineTo(x + 8, 0);
  if (weave === "back" || weave === "cross") for (const x of [-8, 0, 8]) pen.moveTo(x, 0), pen.lineTo(x + 8, 8);
  if (weave === "lines") pen.moveTo(0, 4), pen.lineTo(8, 4);
  if (weave === "dots") pen.arc(4, 4, 1.4, 0, 7), pen.fill();
  pen.stroke();
  return /** @type {CanvasPattern} */ (pen.createPattern(tile, "repeat"));
}
