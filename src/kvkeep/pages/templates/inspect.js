/* kvkeep inspect. State is what the controls say; `show` redraws what depends on it. Text is cut into blocks; only blocks
   near the screen have elements for their tokens. */
const tokens = facts.tokens, total = tokens.length, layers = facts.layers.length, heads = facts.kv_heads;
const shown = facts.methods.filter((method) => method.kept);
const state = { method: 0, by: "kept", layer: -1, head: -1, heat: "counts" };
const BLOCK = { least: 200, most: 600 };
const HEATS = {
  counts: ["tokens kept", "How many tokens of the prompt each KV head holds."],
  found: [`of the answer's top ${facts.top}`, `Of the ${facts.top} tokens that the answer attended to most in the full cache, the share that the head kept.`],
  mass: ["attention covered", "Of the answer's attention to the prompt in the full cache, the share that went to tokens the head kept."],
};
let arrays = []; // of each shown method: { kept, name of values: bytes }
let attention = null;
let level = new Float32Array(total); // 0 to 1, of each token: how dark it is
let words = (index) => ""; // about a token
let blocks = [];

const method = () => shown[state.method];
const chosenLayers = () => state.layer < 0 ? [...Array(layers).keys()] : [state.layer];
const chosenHeads = () => state.head < 0 ? [...Array(heads).keys()] : [state.head];
const kind = (index) => index >= facts.parts.question[0] && index < facts.parts.question[1] ? "question"
  : index >= facts.parts.document[0] && index < facts.parts.document[1] ? "" : "template";
const answerTokens = new Set(facts.answer_tokens), attendedTokens = new Set(facts.attended);
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "(part of a character)";

/* How many of the chosen heads kept each token. */
function keptCounts() {
  const bits = arrays[state.method].kept, width = (total + 7) >> 3, counts = new Uint16Array(total);
  for (const layer of chosenLayers()) for (const head of chosenHeads()) {
    const row = (layer * heads + head) * width;
    for (let at = 0; at < width; at++) {
      let byte = bits[row + at];
      for (let bit = 0; byte; bit++, byte >>= 1) if (byte & 1) counts[8 * at + bit]++;
    }
  }
  return counts;
}

/* The chosen values of each token, averaged over the chosen layers and heads. */
function valuesOf(source, bytes) {
  const [deep, wide, length] = source.values.shape, found = new Float32Array(length);
  const some = deep === 1 ? [0] : chosenLayers(), each = wide === 1 ? [0] : chosenHeads();
  for (const layer of some) for (const head of each) {
    const row = (layer * wide + head) * length;
    for (let at = 0; at < length; at++) found[at] += bytes[row + at];
  }
  return found.map((sum) => sum / (some.length * each.length));
}

const sources = () => [...method().values, ...(facts.attention ? [facts.attention] : [])];
const who = (number, all) => state.layer < 0 || state.head < 0 ? `${number} of ${all} heads` : number ? "this head" : "no: not by this head";
function place() {
  const layer = state.layer < 0 ? "all layers" : `layer ${facts.layers[state.layer]}`;
  return `${layer}, ${state.head < 0 ? "all KV heads" : `KV head ${state.head}`}`;
}

function compute() {
  level.fill(0);
  if (state.by === "kept") {
    const counts = keptCounts(), all = chosenLayers().length * chosenHeads().length;
    for (let i = 0; i < total; i++) level[i] = Math.sqrt(counts[i] / all); // few heads show, too
    words = (index) => (method().retrieves ? "retrieved by " : "kept by ") + who(counts[index], all);
    return;
  }
  const source = sources().find((each) => each.name === state.by), bytes = source === facts.attention ? attention : arrays[state.method][source.name];
  if (source.values.kind === "numbers") return computeClusters(source, bytes);
  const found = valuesOf(source, bytes), { low, high } = source.values;
  found.forEach((value, at) => { level[source.first + at] = value / 255; });
  words = (index) => {
    const at = index - source.first;
    return at < 0 || at >= found.length ? `${source.name}: not in its window` : `${source.name} ${(low + found[at] / 255 * (high - low)).toPrecision(3)}${found[at] >= 254.5 ? " or more" : ""}`;
  };
}

/* Clusters have numbers, not amounts: each token is shaded by whether its cluster is that of the token before it. */
function computeClusters(source, bytes) {
  const [, wide, length] = source.values.shape, row = (Math.max(0, state.layer) * wide + Math.max(0, state.head)) * length;
  let dark = 0;
  for (let at = 0; at < length; at++) {
    if (at && bytes[row + at] !== bytes[row + at - 1]) dark = 1 - dark;
    level[source.first + at] = dark ? 0.35 : 0.1;
  }
  words = (index) => `cluster ${bytes[row + index - source.first]} (layer ${facts.layers[Math.max(0, state.layer)]}, KV head ${Math.max(0, state.head)})`;
}

/* --- the text --- */
function buildText() {
  let start = 0;
  const edges = new Set([facts.parts.document[0], facts.parts.question[0], facts.parts.question[1]]);
  for (let i = 0; i < total; i++) {
    const length = i + 1 - start, ends = length >= BLOCK.least && tokens[i].includes("\n");
    if (!(ends || length >= BLOCK.most || i + 1 === total || edges.has(i + 1))) continue;
    const element = make("div", { class: "block", dir: "auto", text: tokens.slice(start, i + 1).join("") });
    blocks.push({ element, start, end: i + 1, near: false, stale: true, spans: null });
    start = i + 1;
  }
  $("text").append(...blocks.map((block) => block.element));
  const near = new IntersectionObserver((seen) => {
    for (const each of seen) {
      const block = blocks[blocks.findIndex((one) => one.element === each.target)];
      block.near = each.isIntersecting;
      if (block.near) shadeBlock(block);
    }
  }, { root: $("text"), rootMargin: "600px" });
  blocks.forEach((block) => near.observe(block.element));
}

function shadeBlock(block) {
  if (!block.spans) {
    block.spans = [];
    for (let i = block.start; i < block.end; i++) {
      const names = [kind(i), answerTokens.has(i) && "answer", attendedTokens.has(i) && "attended"].filter(Boolean).join(" ");
      block.spans.push(make("span", { class: names || null, text: tokens[i], "data-i": i }));
    }
    block.element.replaceChildren(...block.spans);
  } else if (!block.stale) return;
  block.stale = false;
  block.spans.forEach((span, at) => {
    const share = level[block.start + at], amount = step(share);
    if (span.dataset.s === String(amount)) return;
    span.dataset.s = amount;
    span.style.background = amount ? shade(share) : "";
    span.style.color = amount ? inkOn(share) : "";
  });
}

function reshade(again) {
  for (const block of blocks) {
    block.stale = true;
    if (again && block.spans) block.spans.forEach((span) => delete span.dataset.s);
    if (block.near) shadeBlock(block);
  }
}

/* --- pictures --- */
/* The strip: one row for equally many tokens, dark where any of them is, and a frame around those on the screen. */
function drawMap() {
  const canvas = $("map"), height = $("text").clientHeight, brush = prepare(canvas, 46, height);
  const colours = getComputedStyle(document.documentElement), rows = Math.min(total, height), y = (index) => index * height / total;
  for (let row = 0; row < rows; row++) {
    const part = level.subarray(Math.floor(row * total / rows), Math.max(1, Math.floor((row + 1) * total / rows)));
    let most = 0, sum = 0;
    for (const each of part) { most = Math.max(most, each); sum += each; }
    brush.fillStyle = shade((most + sum / part.length) / 2);
    brush.fillRect(0, row * height / rows, 34, height / rows + 0.5);
  }
  for (const [set, name, wide] of [[attendedTokens, "--soft", 4], [answerTokens, "--answer", 10]]) {
    brush.fillStyle = colours.getPropertyValue(name);
    for (const i of set) brush.fillRect(35, y(i) - 1, wide, 3);
  }
  const [first, last] = [visibleToken(0), visibleToken($("text").clientHeight)];
  brush.strokeStyle = colours.getPropertyValue("--ink");
  brush.lineWidth = 1.5;
  brush.strokeRect(1, y(first) + 1, 44, Math.max(8, y(last) - y(first)) - 2);
}

/* About which token is so far below the upper edge of the text. */
function visibleToken(below) {
  const at = $("text").scrollTop + below, next = blocks.findIndex((block) => block.element.offsetTop + block.element.offsetHeight > at);
  if (next < 0) return total;
  const { element, start, end } = blocks[next];
  return start + Math.max(0, Math.min(1, (at - element.offsetTop) / element.offsetHeight)) * (end - start);
}

/* Bring a token to the upper third of the text; heights of blocks that were never on the screen are guesses at first. */
function goTo(index, again = 2) {
  const block = blocks.find((one) => index < one.end);
  shadeBlock(block);
  const top = (element) => element.getBoundingClientRect().top;
  $("text").scrollTop += top(block.spans[index - block.start]) - top($("text")) - $("text").clientHeight / 3;
  if (again) requestAnimationFrame(() => goTo(index, again - 1));
}

/* A grid of cells with labelled axes. at(row, column) -> 0 to 1 */
function drawGrid(canvas, rows, columns, at, axis, options = {}) {
  const width = canvas.parentElement.clientWidth - 28, left = 46, bottom = 34;
  const tall = Math.max(4, Math.min(options.words && rows <= 40 ? 14 : 11, 900 / rows)), brush = prepare(canvas, width, rows * tall + bottom);
  const wide = (width - left - 6) / columns, soft = brush.fillStyle;
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
    const share = at(row, column);
    brush.fillStyle = shade(share);
    brush.fillRect(left + column * wide, row * tall, wide + 0.5, tall + 0.5);
    if (options.words && wide > 34 && tall > 12) {
      brush.fillStyle = inkOn(share);
      brush.textAlign = "center";
      brush.font = `${Math.min(11, tall)}px system-ui, sans-serif`;
      brush.fillText(options.words(row, column), left + (column + 0.5) * wide, row * tall + tall / 2 + 4);
    }
  }
  brush.strokeStyle = soft;
  brush.globalAlpha = 0.5;
  brush.strokeRect(left + 0.5, 0.5, width - left - 7, rows * tall - 1);
  brush.globalAlpha = 1;
  brush.fillStyle = soft;
  brush.font = "12px system-ui, sans-serif";
  brush.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / tall));
  for (let row = 0; row < rows; row += every) brush.fillText(axis.row(row), left - 6, row * tall + tall / 2 + 4);
  for (const [column, label, where] of axis.columns) {
    brush.textAlign = where || "center";
    brush.fillText(label, left + column * wide, rows * tall + 14);
  }
  brush.textAlign = "center";
  brush.fillText(axis.under, left + (width - left) / 2, rows * tall + 30);
  brush.save();
  brush.translate(11, rows * tall / 2);
  brush.rotate(-Math.PI / 2);
  brush.fillText(axis.beside, 0, 0);
  brush.restore();
  if (options.line !== undefined && options.line >= 0) {
    brush.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--answer");
    brush.lineWidth = 2;
    brush.strokeRect(left + 1, options.line * tall + 1, width - left - 8, tall - 2);
  }
}
const positions = (bins) => [[0, "0", "left"], [bins / 2, count(Math.round(total / 2))], [bins, count(total), "right"]];

function drawHistogram() {
  const rows = method().histogram, bins = rows[0].length, highest = Math.max(...rows.flat(), 1);
  const each = (bin) => Math.ceil((bin + 1) * total / bins) - Math.ceil(bin * total / bins);
  drawGrid($("histogram"), layers, bins, (row, bin) => rows[row][bin] / (heads * each(bin)),
    { row: (row) => facts.layers[row], columns: positions(bins), under: "position in the prompt (token)", beside: "layer" }, { line: state.layer });
  $("histogram").setAttribute("aria-label", `Tokens kept by layer and position, at most ${highest} in a cell`);
  $("histogram-about").replaceChildren(`${method().name}: each cell is ${count(Math.round(total / bins))} tokens, shaded by the share that its ${heads} KV heads kept. `, rampLegend("none", "all"));
}

function drawHeat() {
  const rows = method()[state.heat], counts = state.heat === "counts";
  if (!rows) { $("heat-about").textContent = "not known: there is no full cache to compare with"; return prepare($("heat"), 1, 1); }
  const highest = counts ? Math.max(...rows.flat()) : 1;
  drawGrid($("heat"), layers, heads, (row, head) => rows[row][head] / highest,
    { row: (row) => facts.layers[row], columns: [...Array(heads).keys()].map((head) => [head + 0.5, String(head)]), under: "KV head", beside: "layer" },
    { words: (row, head) => counts ? count(rows[row][head]) : percent(rows[row][head]), line: state.layer });
  $("heat-about").replaceChildren(HEATS[state.heat][1] + " ", rampLegend("0", counts ? count(highest) : "100 %"));
  $("heat").setAttribute("aria-label", `${HEATS[state.heat][0]} by layer and KV head, ${count(Math.min(...rows.flat()), counts ? 0 : 2)} to ${count(Math.max(...rows.flat()), counts ? 0 : 2)}`);
}

/* What shades the text, along the text: means of equally long stretches. */
function drawProfile() {
  const source = state.by === "kept" ? null : sources().find((each) => each.name === state.by);
  const verb = method().retrieves ? "retrieved" : "kept", first = source ? source.first : 0, length = source ? source.values.shape[2] : total;
  const width = $("profile").parentElement.clientWidth - 28, height = 150, left = 46, bottom = 34, inner = width - left - 8;
  const bins = Math.min(length, Math.floor(inner / 2)), brush = prepare($("profile"), width, height), soft = brush.fillStyle;
  const tops = Array.from({ length: bins }, (_, bin) => {
    const part = level.subarray(first + Math.floor(bin * length / bins), first + Math.floor((bin + 1) * length / bins));
    return mean(source ? [...part] : [...part].map((each) => each * each));
  });
  const highest = Math.max(...tops, 1e-9);
  brush.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  tops.forEach((value, bin) => brush.fillRect(left + bin * inner / bins, (height - bottom) * (1 - value / highest), Math.max(1, inner / bins - 0.3), (height - bottom) * value / highest));
  brush.fillStyle = soft;
  const range = source && source.values.kind === "levels" ? source.values : { low: 0, high: 1 };
  const say = (share) => source ? (range.low + share * (range.high - range.low)).toPrecision(2) : percent(share);
  brush.textAlign = "right";
  brush.fillText(say(highest), left - 6, 11);
  brush.fillText(source ? say(0) : "0", left - 6, height - bottom);
  for (const [x, label, where] of [[0, count(first), "left"], [inner / 2, count(first + Math.round(length / 2)), "center"], [inner, count(first + length), "right"]]) {
    brush.textAlign = where;
    brush.fillText(label, left + x, height - bottom + 14);
  }
  brush.textAlign = "center";
  brush.fillText("position in the prompt (token)", left + inner / 2, height - 4);
  $("profile-title").textContent = source ? `${source.name[0].toUpperCase()}${source.name.slice(1)} along the prompt` : `${verb[0].toUpperCase()}${verb.slice(1)} along the prompt`;
  $("profile-about").textContent = `${method().name}, ${place()}: ${source ? source.about : `share of the heads that ${verb} a token`}; mean of stretches of ${count(length / bins, 1)} tokens.`;
  $("profile").setAttribute("aria-label", $("profile-title").textContent);
  $("profile-panel").hidden = source !== null && source.values.kind === "numbers";
}

/* Retrieval in windows: which tokens each window of the prompt attended to. */
function drawWindows() {
  const windows = method().windows, layer = Math.max(0, state.layer);
  $("windows-panel").hidden = !windows;
  if (!windows) return;
  const [, rows, bins] = windows.retrieved.shape, bytes = arrays[state.method].windows;
  $("windows-title").textContent = `Retrieved by each window, layer ${facts.layers[layer]}`;
  $("windows-about").replaceChildren(`${method().name} prefills ${count(windows.size)} tokens at a time. A row is one window, shaded by the share of the tokens there that it attended to: sinks, what it retrieved, and the near ones. `, rampLegend("none", "all"));
  drawGrid($("windows"), rows, bins, (row, bin) => bytes[(layer * rows + row) * bins + bin] / 255,
    { row: (row) => row + 1, columns: positions(bins), under: "position of the tokens attended to", beside: "window" });
}

/* --- tables and controls --- */
function buildAnswers() {
  const titles = ["method", "budget", "answer", "kept per KV head", "cache", "first token", "tokens per second"];
  const known = facts.methods.some((each) => each.found), asked = facts.answer_tokens.length > 0;
  if (known) titles.push(`answer's top ${facts.top} kept`, "answer's attention covered");
  if (asked) titles.push("answer's words kept by");
  $("answers").tHead.append(make("tr", {}, ...titles.map((text, at) => make("th", { text, scope: "col", class: at === 1 || at > 2 ? "num" : null }))));
  for (const each of facts.methods) {
    const index = shown.indexOf(each), cost = each.cost, cells = [[each.name, null], [each.budget === null ? "–" : String(each.budget), "num"]];
    if (each.error) cells.push([each.error, "answer soft"], ...titles.slice(3).map(() => ["–", "num"]));
    else {
      cells.push([each.answer || "(empty)", "answer"], [count(cost.kept_per_head, cost.kept_per_head % 1 ? 1 : 0), "num"],
        [`${size(cost.bytes)} (${percent(heldShare(cost))})` + (cost.host_bytes ? `\n+ ${size(cost.host_bytes)} offloaded` : ""), "num"],
        [`${count(cost.first_token_s, 2)} s`, "num"], [cost.tokens_per_s === null ? "–" : count(cost.tokens_per_s, 1), "num"]);
      if (known) cells.push([percent(each.found && mean(each.found.flat())), "num"], [percent(each.mass && mean(each.mass.flat())), "num"]);
      if (asked) cells.push([each.answer_kept === null ? "–" : `${count(each.answer_kept * layers * heads, 0)} of ${layers * heads} heads`, "num"]);
    }
    const row = make("tr", { "data-method": each.name, title: each.about }, ...cells.map(([text, name]) => make("td", { text, class: name, dir: "auto" })));
    if (each.differs) row.querySelector(".answer").append(" ", make("span", { class: "differs", text: "differs from full" }));
    if (index >= 0) row.addEventListener("click", () => choose(index));
    else row.style.cursor = "default";
    $("answers").tBodies[0].append(row);
  }
}

function buildAgreement() {
  const names = facts.compared;
  $("agreement").append(make("tr", {}, make("th"), ...names.map((text) => make("th", { text, scope: "col" }))),
    ...names.map((name, row) => make("tr", {}, make("th", { text: name, scope: "row" }),
      ...facts.agreement[row].map((share) => make("td", { text: share.toFixed(2), "data-share": share })))));
}

function colourAgreement() {
  for (const cell of document.querySelectorAll("#agreement td")) {
    cell.style.background = shade(Number(cell.dataset.share));
    cell.style.color = inkOn(Number(cell.dataset.share));
  }
}

function buildControls() {
  shown.forEach((each, index) => {
    const radio = make("input", { type: "radio", name: "method", value: index, onchange: () => choose(index) });
    radio.checked = index === 0;
    $("methods").append(make("label", {}, radio, make("span", { text: each.name })));
  });
  $("layer").max = layers - 1;
  $("head").max = heads - 1;
  for (const name of ["layer", "head"]) $(name).addEventListener("input", () => { state[name] = Number($(name).value); show(); });
  $("by").addEventListener("change", () => { state.by = $("by").value; show(); });
  $("marks").addEventListener("change", () => $("text").classList.toggle("marked", $("marks").checked));
  $("text").classList.add("marked");
  for (const [name, [label]] of Object.entries(HEATS)) $("heat-by").append(make("option", { value: name, text: label }));
  $("heat-by").addEventListener("change", () => { state.heat = $("heat-by").value; drawHeat(); });
}

function choose(index) {
  state.method = index;
  document.querySelectorAll("#methods input")[index].checked = true;
  show();
}

function offerSources() {
  const names = ["kept", ...sources().map((each) => each.name)];
  if (!names.includes(state.by)) state.by = "kept";
  $("by").replaceChildren(...names.map((name) => make("option", { value: name, text: name === "kept" && method().retrieves ? "retrieved" : name === "attention" ? "the answer's attention" : name })));
  $("by").value = state.by;
}

function drawLegend() {
  const source = sources().find((each) => each.name === state.by);
  const all = chosenLayers().length * chosenHeads().length, verb = method().retrieves ? "retrieved" : "kept";
  const ends = state.by === "kept" ? [`${verb} by 0`, all === 1 ? "by the head" : `by ${all} of ${all} heads (middle: ${Math.round(all / 4)})`] : source.values.kind === "numbers" ? null : [source.values.low.toPrecision(2), source.values.high.toPrecision(2) + " or more"];
  const marks = [["question", "the question"], ["answer", "words of the answer that the question does not have"], ["attended", `the ${facts.attended.length} tokens that some head of the answer attended to most`]];
  const there = { question: true, answer: facts.answer_tokens.length, attended: facts.attended.length };
  $("legend").replaceChildren(make("span", { text: `${method().name}, ${place()}` }), ends ? rampLegend(...ends) : make("span", { text: "the shade changes where the cluster does" }),
    ...marks.filter(([name]) => there[name]).map(([name, text]) => make("span", {}, make("span", { class: name, text }))));
}

function show(again = false) {
  document.documentElement.style.setProperty("--bar", `${$("controls").offsetHeight}px`);
  offerSources();
  compute();
  $("layer-said").textContent = state.layer < 0 ? "all" : facts.layers[state.layer];
  $("head-said").textContent = state.head < 0 ? "all" : state.head;
  document.querySelectorAll("#answers tbody tr").forEach((row) => row.classList.toggle("chosen", row.dataset.method === method().name));
  reshade(again);
  drawLegend();
  for (const draw of [drawMap, drawHistogram, drawHeat, drawProfile, drawWindows]) draw();
  colourAgreement();
}

function sayToken(event) {
  const index = event.target.dataset && event.target.dataset.i;
  if (index === undefined) return;
  const also = [kind(Number(index)), answerTokens.has(Number(index)) && "a word of the answer", attendedTokens.has(Number(index)) && "attended to by the answer"].filter(Boolean);
  $("said").textContent = `token ${count(Number(index))} of ${count(total)} “${visible(tokens[index])}”: ${words(Number(index))}${also.length ? ` (${also.join(", ")})` : ""}`;
}

async function start() {
  $("question").textContent = facts.question;
  $("setting").textContent = `${facts.model} · ${count(total)} tokens · ${layers} layers × ${heads} KV heads · protocol ${facts.protocol}: ${facts.protocol === "aware" ? "the question was known before anything was evicted" : "the document was compressed before the question was known"} · kvkeep ${facts.version}`;
  $("note").textContent = facts.note;
  $("note").hidden = !facts.note;
  arrays = await Promise.all(shown.map(async (each) => {
    const found = { kept: await unpack(each.kept) };
    for (const values of each.values) found[values.name] = await unpack(values.values);
    if (each.windows) found.windows = await unpack(each.windows.retrieved);
    return found;
  }));
  attention = facts.attention && await unpack(facts.attention.values);
  buildAnswers();
  buildAgreement();
  buildControls();
  buildText();
  startTheme(() => show(true));
  $("text").addEventListener("scroll", () => requestAnimationFrame(drawMap), { passive: true });
  $("text").addEventListener("mouseover", sayToken);
  $("map").addEventListener("click", (event) => goTo(Math.min(total - 1, Math.floor(event.offsetY / $("map").clientHeight * total))));
  $("said").textContent = "Point at a token to see which heads kept it; click the strip on the right to go there.";
  const target = facts.answer_tokens[0];
  if (target !== undefined) goTo(target);
  addEventListener("resize", () => show(true));
  document.documentElement.dataset.ready = "yes";
}
start();
