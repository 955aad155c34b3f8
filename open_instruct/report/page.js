"use strict";
// Draws the curves of a page of runs and shows their rollouts. What runs wrote becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340, HEIGHT = 170, LEFT = 56, BOTTOM = 18, TOP = 6;
const ROWS_SHOWN = 25, TOKENS_SHOWN = 4000, NUM_COLOURS = 13, REFRESH_MS = 4000;
const data = JSON.parse(document.getElementById("data").textContent);

function make(name, attributes = {}, ...children) {
  const node = ["svg", "path", "line", "text", "circle"].includes(name)
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
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(+value.toPrecision(4)) : value.toExponential(2);
}

// Curves

// A moving mean whose beginning is not drawn towards 0.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

// Runs that have this column: {run, steps, values}.
function linesOf(group, name) {
  return data.runs.flatMap((run, index) => {
    const values = run[group].columns[name];
    return values ? [{ run: index, name: run.name, steps: run[group].step, values }] : [];
  });
}

function pathOf(line, values, x, y) {
  let path = "", drawn = false;
  const width = WIDTH - LEFT;
  let columnAt = -1, low = 0, high = 0;
  // Where several points share a pixel, their least and their largest are drawn.
  values.forEach((value, index) => {
    if (value === null || !Number.isFinite(y(value))) return;
    const column = Math.round(x(line.steps[index]) * 2) / 2;
    const level = y(value);
    if (column === columnAt && values.length > 2 * width) {
      if (level < low || level > high) path += `V${level.toFixed(1)}`;
      low = Math.min(low, level); high = Math.max(high, level);
    } else {
      path += `${drawn ? "L" : "M"}${column.toFixed(1)} ${level.toFixed(1)}`;
      low = high = level; columnAt = column; drawn = true;
    }
  });
  return path;
}

function draw(chart, group, name) {
  const lines = linesOf(group, name);
  // A rate that is set, and counts, are exact: a mean of them would show what never was.
  const isExact = group !== "curves" || /(^|\/)(lr$|num_)/.test(name);
  const weight = isExact ? 0 : +byId("smoothing").value;
  const shown = lines.map(line => smoothed(line.values, weight));
  const numbers = lines.flatMap(line => line.values).filter(value => value !== null);
  let low = Math.min(...numbers), high = Math.max(...numbers);
  const isLog = byId("log-scale").checked && low > 0;
  const scale = isLog ? Math.log10 : value => value;
  const first = Math.min(...lines.map(line => line.steps[0]));
  const last = Math.max(...lines.map(line => line.steps[line.steps.length - 1]));
  const x = step => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (WIDTH - LEFT - 4);
  const inner = HEIGHT - BOTTOM - TOP;
  const y = value => TOP + (high > low ? (scale(high) - scale(value)) / (scale(high) - scale(low)) : 0.5) * inner;
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
  const ticks = high > low ? [low, isLog ? Math.sqrt(low * high) : (low + high) / 2, high] : [low];
  for (const value of ticks) {
    svg.append(make("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: "axis" }),
      make("text", { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end", class: "soft small" }, said(+value.toPrecision(3))));
  }
  svg.append(make("text", { x: LEFT, y: HEIGHT - 4, class: "soft small" }, said(first)),
    make("text", { x: WIDTH, y: HEIGHT - 4, "text-anchor": "end", class: "soft small" }, `step ${said(last)}`));
  lines.forEach((line, index) => {
    const style = `stroke: ${colour(line.run)}`;
    if (weight > 0) svg.append(make("path", { d: pathOf(line, line.values, x, y), class: "curve raw", style }));
    svg.append(make("path", { d: pathOf(line, shown[index], x, y), class: "curve", style }));
    const known = line.values.flatMap((value, place) => value === null ? [] : [place]);
    if (known.length < 30) {
      for (const place of known) {
        svg.append(make("circle", { cx: x(line.steps[place]), cy: y(line.values[place]), r: 2.2, style: `fill: ${colour(line.run)}` }));
      }
    }
  });
  const cursor = make("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  const read = make("div", { class: "read" });
  const tell = at => {
    read.replaceChildren();
    let words = "";
    lines.forEach((line, index) => {
      const place = nearest(line, at);
      if (place === null) return;
      if (!words) { words = `step ${said(line.steps[place])}`; read.append(words); cursor.setAttribute("x1", x(line.steps[place])); cursor.setAttribute("x2", x(line.steps[place])); }
      const [exact, smooth] = [said(line.values[place]), said(shown[index][place])];
      const number = exact === smooth ? exact : `${exact} (${smooth})`;
      const swatch = make("span", { class: "swatch", style: `background: ${colour(line.run)}; margin-left: 10px` });
      read.append(swatch, lines.length > 1 ? `${line.name} ${number}` : number);
    });
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - 4);
    cursor.setAttribute("visibility", "visible");
    tell(first + share * (last - first));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tell(last); });
  tell(last);
  chart.replaceChildren(make("figcaption", {}, name), svg, read);
}

// The place of the known value whose step is nearest.
function nearest(line, at) {
  let best = null;
  for (let place = 0; place < line.steps.length; place++) {
    if (line.values[place] === null) continue;
    if (best === null || Math.abs(line.steps[place] - at) <= Math.abs(line.steps[best] - at)) best = place;
    else break;
  }
  return best;
}

const charts = [];
const seen = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = charts.find(each => each.node === entry.target);
    chart.isSeen = entry.isIntersecting;
    if (chart.isSeen && !chart.isDrawn) { draw(chart.node, chart.group, chart.name); chart.isDrawn = true; }
  }
}, { rootMargin: "400px" });

function redraw() {
  for (const chart of charts) {
    chart.isDrawn = chart.isSeen;
    if (chart.isSeen) draw(chart.node, chart.group, chart.name);
  }
}

function addCharts(place, group) {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run[group].columns)))];
  const families = new Map();
  for (const name of names) {
    const family = name.includes("/") && group === "curves" ? name.split("/")[0] : "";
    families.set(family, [...(families.get(family) || []), name]);
  }
  for (const [family, members] of [...families].sort((a, b) => (a[0] > b[0]) - (a[0] < b[0]))) {
    const grid = make("div", { class: "grid" });
    for (const name of members) {
      const node = make("figure", { class: "chart", style: "min-height: 190px" });
      grid.append(node);
      charts.push({ node, group, name, isDrawn: false, isSeen: false });
      seen.observe(node);
    }
    place.append(...(family ? [make("h3", {}, family)] : []), grid);
  }
}

function findCurves() {
  const asked = byId("find-curve").value.trim().toLowerCase();
  for (const chart of charts) {
    if (chart.group === "curves") chart.node.hidden = !chart.name.toLowerCase().includes(asked);
  }
  for (const grid of byId("charts").querySelectorAll(".grid")) {
    const isEmpty = [...grid.children].every(node => node.hidden);
    grid.hidden = isEmpty;
    if (grid.previousElementSibling?.tagName === "H3") grid.previousElementSibling.hidden = isEmpty;
  }
}

// Rollouts

async function unpacked(run, name) {
  const packed = atob(byId(`run${run}-${name}`).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let index = 0; index < packed.length; index++) bytes[index] = packed.charCodeAt(index);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const loaded = new Map();

// The rows of a run, each an object; `start` is where its tokens begin in the arrays.
async function rolloutsOf(run) {
  if (loaded.has(run)) return loaded.get(run);
  const { columns, prompts, pieces } = JSON.parse(new TextDecoder().decode(await unpacked(run, "text")));
  const names = Object.keys(columns);
  let start = 0;
  const rows = columns.step.map((_, index) => {
    const row = { index, start };
    for (const name of names) row[name] = columns[name][index];
    row.given = prompts[row.prompt];
    start += row.num_tokens;
    return row;
  });
  loaded.set(run, { rows, pieces, arrays: null });
  return loaded.get(run);
}

async function arraysOf(run) {
  const rollouts = loaded.get(run);
  if (!rollouts.arrays && byId(`run${run}-token_ids`)) {
    rollouts.arrays = {
      token_ids: new Uint32Array(await unpacked(run, "token_ids")),
      logprobs: new Int16Array(await unpacked(run, "logprobs")),
      versions: new Uint32Array(await unpacked(run, "versions")),
    };
  }
  return rollouts.arrays;
}

const KINDS = {
  all: row => true,
  some: row => row.reward > 0,
  none: row => !(row.reward > 0),
  cut: row => row.finish_reason === "length",
  used: row => row.used_in_training,
  rejected: row => row.rejected,
  failed: row => (row.problems || []).length > 0,
  held_out: row => row.held_out,
};
const least = -Infinity;
const ORDERS = {
  step: (a, b) => a.step - b.step,
  newest: (a, b) => b.step - a.step,
  best: (a, b) => (b.reward ?? least) - (a.reward ?? least),
  worst: (a, b) => (a.reward ?? least) - (b.reward ?? least),
  advantage: (a, b) => (b.advantage ?? least) - (a.advantage ?? least),
  longest: (a, b) => b.num_tokens - a.num_tokens,
  shortest: (a, b) => a.num_tokens - b.num_tokens,
};

function chosen(rows, { find, kind, order }) {
  const asked = find.trim().toLowerCase();
  const has = text => (text || "").toLowerCase().includes(asked);
  return rows.filter(row => KINDS[kind](row) && (!asked || has(row.completion) || has(row.given.prompt)))
    .sort((a, b) => ORDERS[order](a, b) || a.index - b.index);
}

// A rendered prompt taken apart into its turns, by the marks of the well-known chat templates.
function turnsOf(text) {
  const forms = [
    /<\|im_start\|>(\w+)\n?([\s\S]*?)(?:<\|im_end\|>|$)/g,
    /<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*([\s\S]*?)(?:<\|eot_id\|>|$)/g,
    /<\|(system|user|assistant|tool|environment)\|>\n?([\s\S]*?)(?=<\|(?:system|user|assistant|tool|environment)\|>|$)/g,
  ];
  for (const form of forms) {
    const turns = [...text.matchAll(form)].map(match => ({ role: match[1], text: match[2].trim() }));
    if (turns.length) return turns.filter(turn => turn.text);
  }
  return [{ role: "prompt", text }];
}

// A completion in parts: what is thought, tool calls and what tools said, and the text between.
function partsOf(text) {
  const marks = /<(think|tool_call|tool_response|function_calls|function_results|code|output|answer)>([\s\S]*?)(?:<\/\1>|$)/g;
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(marks)) {
    if (match.index > at) parts.push({ kind: "", text: text.slice(at, match.index) });
    parts.push({ kind: match[1], text: match[2] });
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push({ kind: "", text: text.slice(at) });
  return parts.filter(part => part.text.trim());
}

const view = { run: 0, from: 0, rows: [] };

function short(text, length) {
  const line = (text || "").replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

async function showTable(from = 0) {
  view.run = +byId("rollout-run").value;
  const { rows } = await rolloutsOf(view.run);
  view.rows = chosen(rows, { find: byId("find-rollout").value, kind: byId("rollout-kind").value, order: byId("rollout-order").value });
  view.from = Math.max(0, Math.min(from, view.rows.length - 1));
  const shown = view.rows.slice(view.from, view.from + ROWS_SHOWN);
  const head = make("tr", {}, make("th", {}, "step"), make("th", {}, "reward"), make("th", { class: "rare" }, "advantage"),
    make("th", { class: "rare" }, "tokens"), make("th", { class: "left rare" }, "end"), make("th", { class: "text" }, "prompt"),
    make("th", { class: "text" }, "completion"));
  const lines = shown.map((row, index) => {
    const turns = turnsOf(row.given.prompt || "");
    const line = make("tr", { tabindex: "0" }, make("td", {}, said(row.step)),
      make("td", { class: row.reward > 0 ? "good" : "bad" }, said(row.reward)), make("td", { class: "rare" }, said(row.advantage)),
      make("td", { class: "rare" }, row.held_out ? "" : said(row.num_tokens)),
      make("td", { class: "left rare" }, row.held_out ? "held out" : row.rejected ? "rejected" : said(row.finish_reason)),
      make("td", { class: "text" }, short(turns.length ? turns[turns.length - 1].text : "", 140)),
      make("td", { class: "text" }, short(row.completion, 180)));
    line.addEventListener("click", () => showSample(view.from + index));
    line.addEventListener("keydown", event => { if (event.key === "Enter") showSample(view.from + index); });
    return line;
  });
  byId("rollout-table").replaceChildren(head, ...lines);
  const to = view.from + shown.length;
  byId("rollout-count").textContent = view.rows.length
    ? `${said(view.from + 1)} to ${said(to)} of ${said(view.rows.length)} (${said(rows.length)} in all); a row opens`
    : `none of ${said(rows.length)}`;
  byId("rollout-back").disabled = view.from === 0;
  byId("rollout-on").disabled = to >= view.rows.length;
}

function button(words, act, isOff = false) {
  const node = make("button", isOff ? { disabled: "" } : {}, words);
  node.addEventListener("click", act);
  return node;
}

async function showSample(place) {
  const row = view.rows[place];
  const { rows } = await rolloutsOf(view.run);
  const dialog = byId("sample");
  const near = row.held_out ? [] : rows.filter(other => other.step === row.step && other.ticket === row.ticket && !other.held_out);
  const facts = [["step", row.step], ["ticket", row.ticket], ["row", row.row_id], ["reward", row.reward],
    ["advantage", row.advantage], ["tokens", row.held_out ? null : row.num_tokens], ["ended by", row.finish_reason], ["scores", row.scores],
    [row.held_out ? "right answer" : "checked by", row.given.checks], ["problems", (row.problems || []).join("; ")],
    ["", row.held_out ? "a held-out answer" : row.rejected ? "rejected: its group taught nothing" : row.used_in_training ? "trained on" : "not trained on"]];
  const list = make("p", { class: "soft" });
  for (const [name, value] of facts) {
    if (value !== null && value !== undefined && value !== "") list.append(make("span", { class: "key", style: "white-space: normal" }, `${name} ${said(value)}`.trim()));
  }
  const conversation = turnsOf(row.given.prompt || "").flatMap(turn =>
    [make("div", { class: "role" }, turn.role), make("div", { class: "turn" }, turn.text)]);
  const reply = make("div", { class: "turn" });
  for (const part of partsOf(row.completion || "")) {
    reply.append(part.kind ? make("div", { class: "part" }, make("div", { class: "role" }, part.kind), part.text.trim()) : part.text);
  }
  const siblings = near.length > 1 ? make("p", {}, "the same prompt: ", ...near.map(other =>
    button(said(other.reward) || "–", () => { view.rows = near; showSample(near.indexOf(other)); }, other === row))) : "";
  const tokens = make("div");
  dialog.replaceChildren(
    make("div", { class: "controls" }, button("before", () => showSample(place - 1), place === 0),
      button("next", () => showSample(place + 1), place >= view.rows.length - 1), button("close", () => dialog.close())),
    list, siblings, ...conversation, make("div", { class: "role" }, "completion"), reply, tokens);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  if (row.num_tokens) await showTokens(tokens, row);
}

const PAINT = {
  "log-prob": token => `color-mix(in srgb, var(--c5) ${Math.min(90, Math.round(-token.logprob * 22))}%, transparent)`,
  advantage: token => `color-mix(in srgb, var(${token.advantage < 0 ? "--c1" : "--c2"}) ${Math.min(90, Math.round(Math.abs(token.advantage) * 45))}%, transparent)`,
  version: token => `color-mix(in srgb, ${colour(token.version)} 60%, transparent)`,
};

function tokensOf(row, { pieces, arrays }) {
  return Array.from({ length: row.num_tokens }, (_, index) => {
    const id = arrays.token_ids[row.start + index];
    return { id, piece: pieces[id], logprob: arrays.logprobs[row.start + index] / 1000,
      version: arrays.versions[row.start + index], advantage: row.advantage ?? 0 };
  });
}

async function showTokens(place, row) {
  await arraysOf(view.run);
  const tokens = tokensOf(row, loaded.get(view.run));
  const select = make("select", {}, ...Object.keys(PAINT).map(name => make("option", { value: name }, name)));
  const read = make("div", { class: "soft" }, "point at a token");
  const shownTokens = make("div", { class: "tokens turn" });
  const canvas = make("canvas", { class: "strip", width: String(tokens.length), height: "3" });
  const painter = canvas.getContext("2d");
  const probe = make("span");
  place.append(probe);
  Object.values(PAINT).forEach((paint, line) => tokens.forEach((token, index) => {
    probe.style.backgroundColor = paint(token);
    painter.fillStyle = getComputedStyle(probe).backgroundColor;
    painter.fillRect(index, line, 1, 1);
  }));
  probe.remove();
  const tell = index => {
    const { id, piece, logprob, version, advantage } = tokens[index];
    read.textContent = `token ${index + 1}: ${piece === undefined ? "" : `${JSON.stringify(piece)} `}(id ${id}), log-prob ${said(logprob)} (p ${said(Math.exp(logprob))}), version ${version}, advantage ${said(advantage)}`;
  };
  const paintAll = () => shownTokens.replaceChildren(...tokens.slice(0, TOKENS_SHOWN).map((token, index) => {
    const node = make("span", {}, token.piece ?? `${token.id} `);
    node.style.background = PAINT[select.value](token);
    node.addEventListener("pointerenter", () => tell(index));
    return node;
  }), tokens.length > TOKENS_SHOWN ? ` … ${said(tokens.length - TOKENS_SHOWN)} more` : "");
  select.addEventListener("change", paintAll);
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    tell(Math.max(0, Math.min(tokens.length - 1, Math.floor((event.clientX - box.left) / box.width * tokens.length))));
  });
  paintAll();
  place.append(make("div", { class: "role" }, "tokens: log-prob, advantage and version, from above"), canvas, read,
    make("label", {}, "coloured by ", select), shownTokens);
}

// The page itself

async function refreshWhenOld() {
  try {
    const answer = await fetch("mark", { cache: "no-store" });
    if (answer.ok && await answer.text() !== data.mark && !byId("sample")?.open) location.reload();
  } catch {
    // The server is gone: what is here stays readable.
  }
}

function start() {
  for (const id of ["smoothing", "find-curve", "log-scale", "find-rollout", "rollout-kind", "rollout-order", "rollout-run"]) {
    const node = byId(id);
    const key = `report ${id}`;
    if (!node) continue;
    if (data.mark && sessionStorage.getItem(key) !== null) {
      if (node.type === "checkbox") node.checked = sessionStorage.getItem(key) === "true";
      else node.value = sessionStorage.getItem(key);
    }
    node.addEventListener("input", () => {
      if (data.mark) sessionStorage.setItem(key, node.type === "checkbox" ? node.checked : node.value);
      if (id === "find-curve") findCurves();
      else if (id === "smoothing" || id === "log-scale") redraw();
      else showTable();
    });
  }
  if (byId("held-out-charts")) addCharts(byId("held-out-charts"), "held_out");
  addCharts(byId("charts"), "curves");
  findCurves();
  if (byId("rollout-table")) {
    byId("rollout-back").addEventListener("click", () => showTable(view.from - ROWS_SHOWN));
    byId("rollout-on").addEventListener("click", () => showTable(view.from + ROWS_SHOWN));
    if (typeof DecompressionStream === "undefined") byId("rollout-count").textContent = "this browser cannot unpack them: take one of 2023 or later";
    else showTable();
  }
  if (data.mark) setInterval(refreshWhenOld, REFRESH_MS);
}

start();
