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
  const { rows, pieces } = JSON.parse(new TextDecoder().decode(await unpacked(run, "text")));
  let start = 0;
  rows.forEach((row, index) => {
    Object.assign(row, { index, start });
    start += row.num_tokens;
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
  return rows.filter(row => KINDS[kind](row) && (!asked || has(row.completion) || has(row.prompt)))
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
    const turns = turnsOf(row.prompt || "");
    const line = make("tr", { tabindex: "0" }, make("td", {}, said(row.step)),
      make("td", { class: row.reward > 0 ? "good" : "bad" }, said(row.reward)), make("td", { class: "rare" }, said(row.advantage)),
      make("td", { class: "rare" }, row.held_out ? "" : said(row.num_tokens)),
      make("td", { class: "left rare" }, row.held_out ? "held out" : row.rejected ? "rejected" : said(row.finish_reason)),
      make("td", { class: "text asked" }, short(turns.length ? turns[turns.length - 1].text : "", 140)),
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
    ["advantage", row.advantage], ["tokens", row.held_out ? null : row.num_tokens], ["ended by", row.finish_reason],
    ["", row.held_out ? "a held-out answer" : row.rejected ? "rejected: its group taught nothing" : row.used_in_training ? "trained on" : "not trained on"]];
  const list = make("p", { class: "soft" });
  for (const [name, value] of facts) {
    if (value !== null && value !== undefined && value !== "") list.append(make("span", { class: "key", style: "white-space: normal" }, `${name} ${said(value)}`.trim()));
  }
  const conversation = turnsOf(row.prompt || "").flatMap(turn =>
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
    list, siblings, ...conversation, make("div", { class: "role" }, "completion"), reply, checkTable(row), tokens);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  if (row.num_tokens) await showTokens(tokens, row);
}

function readJson(text) {
  try { return JSON.parse(text) ?? {}; } catch { return {}; }
}

// What checked a completion as a table: who, against what, and the score that it gave.
function checkTable(row) {
  const checks = readJson(row.checks), scores = { ...readJson(row.scores) };
  const lines = [];
  // Held-out answers name no verifiers beside what is right.
  for (const check of [].concat(checks)) {
    const name = check?.verifier ?? "", right = check?.verifier === undefined ? check : check.ground_truth;
    lines.push([name, typeof right === "string" ? right : JSON.stringify(right), scores[name]]);
    delete scores[name];
  }
  const left = Object.entries(scores);
  if (left.length === 1 && lines.length === 1 && !lines[0][0]) [lines[0][0], lines[0][2]] = left[0];
  else lines.push(...left.map(([name, score]) => [name, "", score]));
  const problems = row.problems || [];
  const table = make("table", { class: "checks" }, make("tr", {}, make("th", { class: "left" }, "checked by"), make("th", { class: "left" }, "right answer"), make("th", {}, "score")),
    ...lines.map(([name, right, score]) => make("tr", {}, make("td", { class: "left" }, name), make("td", { class: "text" }, right ?? ""), make("td", { class: score > 0 ? "good" : "bad" }, said(score)))),
    ...problems.map(problem => make("tr", {}, make("td", { class: "left bad" }, "problem"), make("td", { class: "text", colspan: "2" }, problem))));
  return make("div", { class: "scroll" }, table);
}

const PAINT = {
  "log-prob": token => `color-mix(in srgb, var(--c5) ${Math.min(90, Math.round(-token.logprob * 22))}%, transparent)`,
  advantage: token => `color-mix(in srgb, var(${token.advantage < 0 ? "--c1" : "--c2"}) ${Math.min(90, Math.round(Math.abs(token.advantage) * 45))}%, transparent)`,
  version: token => `color-mix(in srgb, ${colour(token.version)} 60%, transparent)`,
};

// What the colours of a strip mean: pairs of words and a token that has such a colour.
const LEGENDS = {
  "log-prob": () => [["0", { logprob: 0 }], ["−1", { logprob: -1 }], ["−2", { logprob: -2 }], ["−4 and less", { logprob: -4 }]],
  advantage: () => [["below 0", { advantage: -1 }], ["0", { advantage: 0 }], ["above 0", { advantage: 1 }]],
  version: tokens => [...new Set(tokens.map(token => token.version))].sort((a, b) => a - b).map(version => [said(version), { version }]),
};

function legendOf(name, tokens) {
  return make("span", { class: "legend soft" }, ...LEGENDS[name](tokens).map(([words, token]) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = PAINT[name](token);
    return make("span", { class: "key" }, swatch, words);
  }));
}

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
  const probe = make("span");
  place.append(probe);
  const strips = Object.entries(PAINT).map(([name, paint]) => {
    const canvas = make("canvas", { class: "strip", width: String(tokens.length), height: "1" });
    const painter = canvas.getContext("2d");
    tokens.forEach((token, index) => {
      probe.style.backgroundColor = paint(token);
      painter.fillStyle = getComputedStyle(probe).backgroundColor;
      painter.fillRect(index, 0, 1, 1);
    });
    canvas.addEventListener("pointermove", event => {
      const box = canvas.getBoundingClientRect();
      tell(Math.max(0, Math.min(tokens.length - 1, Math.floor((event.clientX - box.left) / box.width * tokens.length))));
    });
    return make("div", {}, make("span", { class: "role" }, name), legendOf(name, tokens), canvas);
  });
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
  paintAll();
  place.append(make("div", { class: "role" }, "tokens, from the first to the last"), ...strips, read,
    make("label", {}, "coloured by ", select), shownTokens);
}
