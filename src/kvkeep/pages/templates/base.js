"use strict";
/* What both pages share: the facts, the theme, a ramp of one hue, and small makers of elements. Data becomes text by
   textContent alone. */
const facts = JSON.parse(document.getElementById("facts").textContent);
const $ = (id) => document.getElementById(id);

function make(tag, options = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

async function unpack(packed) {
  const raw = Uint8Array.from(atob(packed.data), (each) => each.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return packed.kind === "numbers" ? new Uint16Array(bytes.buffer) : bytes;
}

/* A ramp of one hue, from the page's background on: 0 to 1 in eleven steps, equally far in lightness. */
const RAMPS = {
  light: ["#ffffff", "#e9f1fa", "#d3e3f4", "#bbd4ee", "#a1c4e6", "#84b2dd", "#659fd1", "#478ac3", "#2d74b1", "#185d9b", "#08467f"],
  dark: ["#12161c", "#16243a", "#1a3150", "#1f3f67", "#254e7f", "#2f5f97", "#4074ae", "#578bc4", "#75a4d8", "#9abfe9", "#c6dcf7"],
};
const dark = () => document.documentElement.dataset.theme === "dark";
const ramp = () => RAMPS[dark() ? "dark" : "light"];
const step = (share) => share <= 0 ? 0 : Math.max(1, Math.min(10, Math.round(share * 10)));
const shade = (share) => ramp()[step(share)];
function luminance(colour) {
  const linear = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255).map((v) => v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}
const inkOn = (share) => luminance(shade(share)) > 0.179 ? "#000000" : "#ffffff"; // whichever has more contrast
const PALETTES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#882255", "#44aa99", "#777777"],
  dark: ["#4aa3df", "#ff8c42", "#2ec795", "#e8a6cb", "#e0b13c", "#9ad7fa", "#d0709f", "#86dccf", "#b0b0b0"],
};

const count = (number, digits = 0) => number.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) => share === null || share === undefined ? "–" : count(100 * share, share > 0.1 ? 0 : 1) + " %";
const heldShare = (held) => Math.min(1, held.bytes / held.full_bytes); // room for tokens to come is not counted
function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000 || unit === "GB") return count(bytes, unit === "B" ? 0 : 1) + " " + unit;
    bytes /= 1000;
  }
}
const mean = (numbers) => numbers.reduce((sum, each) => sum + each, 0) / numbers.length;

/* The ramp as a legend, with the words for its two ends. */
function rampLegend(low, high) {
  const boxes = ramp().map((colour) => { const box = make("i"); box.style.background = colour; return box; });
  return make("span", { class: "ends" }, low, make("span", { class: "ramp", "aria-hidden": "true" }, ...boxes), high);
}

function setTheme(theme, redraw) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  redraw();
}
function startTheme(redraw) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(system.matches ? "dark" : "light", redraw);
  system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light", redraw));
  $("theme").addEventListener("click", () => setTheme(dark() ? "light" : "dark", redraw));
}

/* A canvas as wide as its parent, sharp on any screen. -> its context, in CSS pixels */
function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const brush = canvas.getContext("2d");
  brush.setTransform(scale, 0, 0, scale, 0, 0);
  brush.clearRect(0, 0, width, height);
  brush.font = "12px system-ui, sans-serif";
  brush.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--soft");
  return brush;
}
