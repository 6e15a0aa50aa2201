/* kvkeep report. A config is a method and a budget; filters choose among protocols, tasks, methods and budgets. */
const said = (budget) => budget === null ? "–" : String(budget);
const unique = (values) => [...new Set(values)];
const FILTERS = {
  protocol: unique(facts.cells.map((cell) => cell.protocol)),
  task: unique(facts.cells.map((cell) => cell.task)),
  method: unique(facts.cells.map((cell) => cell.method)),
  budget: unique(facts.cells.map((cell) => said(cell.budget))).sort((one, other) => Number(one) - Number(other)),
};
const chosen = Object.fromEntries(Object.entries(FILTERS).map(([name, values]) => [name, new Set(values)]));
chosen.protocol = new Set(FILTERS.protocol.slice(0, 1));
const SHAPES = ["circle", "square", "triangle", "diamond"];
const colourOf = (method) => method === "full" ? "var(--soft)" : PALETTES[dark() ? "dark" : "light"][FILTERS.method.filter((each) => each !== "full").indexOf(method) % 9];
const shapeOf = (method) => SHAPES[FILTERS.method.indexOf(method) % SHAPES.length];
const fits = (each) => chosen.protocol.has(each.protocol) && chosen.method.has(each.method) && (each.budget === null || chosen.budget.has(said(each.budget)));
const cells = () => facts.cells.filter((cell) => fits(cell) && chosen.task.has(cell.task));
const config = (each) => `${each.method}${each.budget === null ? "" : ` ${each.budget}`}`;

function buildFilters() {
  for (const [name, values] of Object.entries(FILTERS)) {
    const single = name === "protocol", box = make("fieldset", { id: `filter-${name}` }, make("legend", { text: `${name}s` }));
    for (const value of values) {
      const input = make("input", { type: single ? "radio" : "checkbox", name, value });
      input.checked = chosen[name].has(value);
      input.addEventListener("change", () => {
        if (single) chosen[name] = new Set([value]);
        else input.checked ? chosen[name].add(value) : chosen[name].delete(value);
        show();
      });
      box.append(make("label", {}, input, ` ${value === "–" ? "none (full)" : value}`));
    }
    if (!single && values.length > 3) for (const [text, all] of [["all", true], ["none", false]]) {
      box.append(make("button", { type: "button", text, onclick: () => {
        chosen[name] = new Set(all ? values : []);
        box.querySelectorAll("input").forEach((input) => { input.checked = all; });
        show();
      } }));
    }
    $("filters").append(box);
  }
}

/* --- scores --- */
function drawScores() {
  const found = cells(), tasks = unique(found.map((cell) => cell.task)), configs = unique(found.map(config));
  const averages = facts.averages.filter(fits), names = unique(averages.map((each) => each.name));
  const rows = configs.map((name) => {
    const mine = found.filter((cell) => config(cell) === name), first = mine[0];
    const kept = make("td", { class: "num", text: percent(mean(mine.map((cell) => heldShare(cell)))) });
    const scores = tasks.map((task) => scoreCell(mine.find((cell) => cell.task === task)));
    const means = names.map((each) => averageCell(averages.find((one) => config(one) === name && one.name === each)));
    return make("tr", { "data-config": name }, make("th", { text: first.method, scope: "row" }), make("td", { class: "num", text: said(first.budget) }), kept, ...scores, ...means);
  });
  const titles = ["method", "budget", "memory"].map((text, at) => make("th", { text, class: at ? "num" : null, title: at === 2 ? "bytes of keys and values held, of a full cache's" : null }));
  $("scores").replaceChildren(make("thead", {}, make("tr", {}, ...titles, ...[...tasks, ...names].map((text) => make("th", { class: "task", scope: "col" }, ...breakable(text))))), make("tbody", {}, ...rows));
  if (!rows.length) $("scores").replaceChildren(make("caption", { text: "No rows are chosen." }));
  $("scores-ramp").replaceChildren(rampLegend("0", "100"));
}

/* A name that may be broken after its underscores. */
const breakable = (text) => text.split(/(?<=_)/).flatMap((part) => [part, make("wbr")]);

function coloured(cell, share) {
  cell.style.background = shade(share);
  cell.style.color = inkOn(share);
  return cell;
}
function scoreCell(cell) {
  if (!cell) return make("td", { class: "score soft", text: "–" });
  const about = `${config(cell)}, ${cell.task}: ${count(cell.score, 1)} [${count(cell.low, 1)}, ${count(cell.high, 1)}], n = ${cell.n}, ${count(cell.kept_per_head)} tokens kept per KV head, ${size(cell.bytes)} of ${size(cell.full_bytes)}` + (cell.truncated ? `, ${cell.truncated} prompts truncated` : "");
  return coloured(make("td", { class: "score", title: about, "data-score": cell.score }, count(cell.score, 1), make("small", { text: `${count(cell.low)}–${count(cell.high)}` })), cell.score / 100);
}
const averageCell = (each) => each ? coloured(make("td", { class: "score", text: count(each.score, 1) }), each.score / 100) : make("td", { class: "score soft", text: "–" });

/* --- charts --- */
const WIDE = 360, TALL = 230, EDGE = { left: 42, right: 12, top: 10, bottom: 40 };

function marker(method, x, y, title) {
  const at = { circle: `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`, square: `M${x - 3.5},${y - 3.5}h7v7h-7z`, triangle: `M${x},${y - 5}l4.6,8h-9.2z`, diamond: `M${x},${y - 5}l4.5,5l-4.5,5l-4.5,-5z` };
  const path = make("svg:path", { d: at[shapeOf(method)], style: `fill:${colourOf(method)}` });
  if (title) path.append(make("svg:title", { text: title }));
  return path;
}

/* An empty chart. x: { low, high, log, ticks: [value, label], under } -> the chart, and where a value lies */
function chart(x, wide = WIDE, tall = TALL) {
  const svg = make("svg:svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img" });
  const inner = wide - EDGE.left - EDGE.right, scale = (value) => x.log ? Math.log(value) : value;
  const range = scale(x.high) - scale(x.low) || 1, middle = x.high === x.low;
  const px = (value) => EDGE.left + (middle ? 0.5 : (scale(value) - scale(x.low)) / range) * inner;
  const py = (score) => EDGE.top + (1 - score / 100) * (tall - EDGE.top - EDGE.bottom);
  for (const score of [0, 25, 50, 75, 100]) {
    svg.append(make("svg:line", { class: "axis", x1: EDGE.left, x2: wide - EDGE.right, y1: py(score), y2: py(score) }),
      make("svg:text", { x: EDGE.left - 6, y: py(score) + 4, "text-anchor": "end", text: score }));
  }
  let last = -Infinity;
  for (const [value, label] of x.ticks) {
    if (px(value) - last < 7 * label.length + 6) continue;
    last = px(value);
    svg.append(make("svg:text", { x: px(value), y: tall - EDGE.bottom + 16, "text-anchor": px(value) > wide - 30 ? "end" : "middle", text: label }));
  }
  svg.append(make("svg:text", { x: EDGE.left + inner / 2, y: tall - 6, "text-anchor": "middle", text: x.under }),
    make("svg:text", { transform: `translate(11 ${EDGE.top + (tall - EDGE.top - EDGE.bottom) / 2}) rotate(-90)`, "text-anchor": "middle", text: "score (percent)" }));
  return { svg, px, py };
}

function drawCurves() {
  const found = cells(), tasks = unique(found.map((cell) => cell.task)), methods = unique(found.map((cell) => cell.method));
  const key = methods.map((method) => make("span", {}, make("svg:svg", { viewBox: "0 0 26 14", "aria-hidden": "true" },
    make("svg:line", { x1: 0, x2: 26, y1: 7, y2: 7, style: `stroke:${colourOf(method)}`, "stroke-width": 2, "stroke-dasharray": method === "full" ? "4 3" : null }), method === "full" ? "" : marker(method, 13, 7)), method));
  $("key").replaceChildren(...key);
  $("curves-about").textContent = "A point is a budget, placed by the tokens per KV head that were really kept, on a logarithmic axis; dashed: the full cache.";
  $("curves").replaceChildren(...tasks.map((task) => curve(task, found.filter((cell) => cell.task === task))));
}

function curve(task, found) {
  const kept = found.filter((cell) => cell.method !== "full").map((cell) => cell.kept_per_head), full = found.find((cell) => cell.method === "full");
  const ends = kept.length ? kept : [full.kept_per_head], ticks = unique(ends.map((each) => Math.round(each))).sort((one, other) => one - other).map((each) => [each, count(each)]);
  const { svg, px, py } = chart({ low: Math.min(...ends), high: Math.max(...ends), log: true, ticks, under: "tokens kept per KV head" });
  if (full) svg.append(make("svg:line", { x1: EDGE.left, x2: WIDE - EDGE.right, y1: py(full.score), y2: py(full.score), style: "stroke:var(--soft)", "stroke-width": 2, "stroke-dasharray": "4 3" }));
  for (const method of unique(found.map((cell) => cell.method)).filter((each) => each !== "full")) {
    const mine = found.filter((cell) => cell.method === method).sort((one, other) => one.kept_per_head - other.kept_per_head);
    const points = mine.map((cell) => [px(cell.kept_per_head), py(cell.score)]);
    svg.append(make("svg:polyline", { points: points.map((each) => each.join(",")).join(" "), fill: "none", style: `stroke:${colourOf(method)}`, "stroke-width": 2 }),
      ...mine.map((cell, at) => marker(method, ...points[at], `${config(cell)}: ${count(cell.score, 1)} [${count(cell.low, 1)}, ${count(cell.high, 1)}], n = ${cell.n}`)));
  }
  svg.setAttribute("aria-label", `Score of ${task} by budget`);
  return make("figure", { class: "panel" }, make("figcaption", { text: task }), svg);
}

/* --- Pareto --- */
function points() {
  const found = cells(), tasks = unique(found.map((cell) => cell.task));
  return unique(found.map(config)).map((name) => {
    const mine = found.filter((cell) => config(cell) === name), first = mine[0];
    const speed = facts.speeds.find((each) => config(each) === name && each.protocol === first.protocol);
    return { name, method: first.method, whole: mine.length === tasks.length, score: mean(mine.map((cell) => cell.score)), memory: 100 * mean(mine.map((cell) => heldShare(cell))), rate: speed && speed.tokens_per_s, together: speed && speed.together };
  }).filter((point) => point.whole);
}

function drawPareto() {
  const found = points(), tasks = unique(cells().map((cell) => cell.task)), together = Math.max(1, ...facts.speeds.map((each) => each.together));
  $("pareto-about").textContent = `Mean score of the ${tasks.length} chosen tasks, of configs that have them all (${found.length}). The line joins those that no other beats in both.` + (together > 1 ? ` Speeds are of answers decoded in one batch with up to ${together} configs; kvkeep eval --alone times each by itself.` : "");
  const fast = found.filter((point) => point.rate);
  $("pareto").replaceChildren(...[found.length && scatter(found, "memory", "memory of keys and values (percent of a full cache)", -1), fast.length && scatter(fast, "rate", "tokens per second", 1)].filter(Boolean));
}

/* better: 1 where more of it is better, -1 where less is */
function scatter(found, key, under, better) {
  const values = found.map((point) => point[key]), low = better < 0 ? 0 : Math.min(...values) * 0.9, high = Math.max(...values) * 1.05;
  const unit = 10 ** Math.floor(Math.log10((high - low) / 4)), every = [1, 2, 5, 10].map((each) => each * unit).find((each) => (high - low) / each <= 6);
  const ticks = Array.from({ length: 8 }, (_, at) => (Math.ceil(low / every) + at) * every).filter((each) => each <= high).map((each) => [each, count(each, every < 1 ? 1 : 0)]);
  const wide = Math.max(320, Math.min(560, innerWidth - 60)), { svg, px, py } = chart({ low, high, ticks, under }, wide, 320);
  const front = found.filter((one) => !found.some((other) => other !== one && other.score >= one.score && better * (other[key] - one[key]) >= 0 && (other.score > one.score || other[key] !== one[key])));
  front.sort((one, other) => one[key] - other[key]);
  svg.append(make("svg:polyline", { points: front.map((point) => `${px(point[key])},${py(point.score)}`).join(" "), fill: "none", style: "stroke:var(--accent)", "stroke-width": 1.5, "stroke-dasharray": "5 3" }));
  for (const point of found) svg.append(marker(point.method, px(point[key]), py(point.score), `${point.name}: ${count(point.score, 1)}, ${count(point[key], 1)} ${key === "memory" ? "%" : "tokens per second"}`));
  const taken = found.map((point) => [px(point[key]) - 5, py(point.score) - 5, 10, 10]);
  for (const point of front) {
    const long = 7.2 * point.name.length, x = px(point[key]), y = py(point.score);
    const places = [[x + 8, y - 8], [x - 8 - long, y - 8], [x + 8, y + 16], [x - 8 - long, y + 16], [x - long / 2, y - 14], [x - long / 2, y + 22]];
    const hits = ([left, base]) => taken.filter(([a, b, w, h]) => a < left + long && a + w > left && b < base + 2 && b + h > base - 11).length
      + 9 * (left < EDGE.left || left + long > wide || base > 320 - EDGE.bottom);
    const [left, base] = places.reduce((best, each) => hits(each) < hits(best) ? each : best);
    taken.push([left, base - 11, long, 13]);
    svg.append(make("svg:text", { class: "name", x: left, y: base, text: point.name }));
  }
  svg.setAttribute("aria-label", `Mean score against ${under}`);
  return make("figure", { class: "panel" }, make("figcaption", { text: `Score against ${key === "memory" ? "memory" : "speed"}` }), svg);
}

/* --- needles --- */
function drawNeedles() {
  const found = facts.needles.filter((cell) => fits(cell) && chosen.task.has(cell.task));
  $("needles-section").hidden = !facts.needles.length;
  $("needles-ramp").replaceChildren(rampLegend("0", "1"));
  const maps = unique(found.map((cell) => JSON.stringify([cell.task, config(cell)])));
  $("needles").replaceChildren(...maps.map((place) => {
    const mine = found.filter((cell) => JSON.stringify([cell.task, config(cell)]) === place);
    const number = (name) => unique(mine.map((cell) => cell[name])).sort((one, other) => one - other), lengths = number("length"), depths = number("depth");
    const rows = depths.map((depth) => make("tr", {}, make("th", { text: `${count(depth)} %`, scope: "row" }), ...lengths.map((length) => {
      const cell = mine.find((each) => each.length === length && each.depth === depth);
      return cell ? coloured(make("td", { text: cell.score.toFixed(2), title: `n = ${cell.n}`, "data-score": cell.score }), cell.score) : make("td", { text: "–" });
    })));
    const [task, name] = JSON.parse(place), head = make("tr", {}, make("th", { text: "depth", scope: "col" }), ...lengths.map((length) => make("th", { text: count(length), scope: "col" })));
    return make("figure", { class: "panel" }, make("figcaption", { text: `${name}, ${task}: ${count(mean(mine.map((cell) => cell.score)), 2)}` }),
      make("div", { class: "scroll" }, make("table", { class: "heat" }, make("caption", { text: "columns: tokens of the text" }), head, ...rows)));
  }));
}

function show() {
  for (const draw of [drawScores, drawCurves, drawPareto, drawNeedles]) draw();
}
$("title").textContent = `Scores of ${facts.name}`;
$("setting").textContent = `${facts.models.join(", ") || "model not named"} · ${count(facts.rows)} rows · ${FILTERS.method.length} methods · ${FILTERS.task.length} tasks${facts.version && ` · kvkeep ${facts.version}`}`;
buildFilters();
startTheme(show);
addEventListener("resize", show);
document.documentElement.dataset.ready = "yes";
