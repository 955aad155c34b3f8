"use strict";
// Draws the curves of a page of runs and shows their rollouts. What runs wrote becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340, HEIGHT = 170, LEFT = 44, BOTTOM = 18, TOP = 6;
const MAIN_HEIGHT = 300;
const ROWS_SHOWN = 25, TOKENS_SHOWN = 4000, NUM_COLOURS = 13;
const data = JSON.parse(document.getElementById("data").textContent);

function make(name, attributes = {}, ...children) {
  const node = ["svg", "path", "line", "text", "circle", "rect"].includes(name)
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const byId = id => document.getElementById(id);
const colour = index => `var(--c${index % NUM_COLOURS})`;

function said(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(+value.toPrecision(4)) : withExponent(value, 2);
}

// 1e-6 and 2.5e7, without zeros that say nothing.
function withExponent(value, digits) {
  return value.toExponential(digits).replace(/\.?0+e/, "e").replace("e+", "e");
}
