// Curves: their scales and lines, the large one on top, and zoom.

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

// Steps of 1, 2 or 5 times a power of ten, of which some four fit between two numbers.
function ticksBetween(low, high, least = 0) {
  if (!(high > low)) return [low];
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].find(times => times * power >= rough) * power);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => +((first + index) * step).toPrecision(12));
}

// Powers of ten; between close numbers, what a plain axis has.
function logTicksBetween(low, high) {
  const powers = ticksBetween(Math.log10(low), Math.log10(high), 1).filter(Number.isInteger).map(power => 10 ** power);
  return powers.length > 1 ? powers : ticksBetween(low, high).filter(value => value > 0);
}

// As people write them on an axis: 0.25, 20k, 1.5M, and where one is as small as 5e-4, 1e-3 too.
function tickWords(values) {
  const isSmall = values.some(value => value !== 0 && Math.abs(value) < 1e-3);
  return values.map(value => tickWord(value, isSmall));
}

function tickWord(value, isSmall) {
  const size = Math.abs(value);
  if (size === 0 || (!isSmall && size < 1e4)) return String(+value.toPrecision(4));
  const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([unit]) => size >= unit && size < 1e12) || [0, ""];
  return unit ? `${+(value / unit).toPrecision(4)}${letter}` : withExponent(value, 3);
}

// Runs that have this column: {run, steps, values}; of those that share an objective, where one is named.
function linesOf({ group, name, objective }) {
  return data.runs.flatMap((run, index) => {
    const values = objective === null || run.objective === objective ? run[group].columns[name] : null;
    return values ? [{ run: index, name: run.name, steps: run[group].step, values }] : [];
  });
}

// The path of a line's known values. Where several points share a pixel, their least and largest are drawn.
function pathOf(line, values, x, y, width = WIDTH - LEFT) {
  let path = "", drawn = false;
  let columnAt = -1, low = 0, high = 0;
  values.forEach((value, index) => {
    if (value === null || !Number.isFinite(y(value))) return;
    const column = Math.round(x(line.steps[index]) * 2) / 2;
    const level = y(value);
    if (column === columnAt && values.length > 2 * width) {
      if (level < low || level > high) path += `V${level.toFixed(1)}`;
      low = Math.min(low, level);
      high = Math.max(high, level);
    } else {
      path += `${drawn ? "L" : "M"}${column.toFixed(1)} ${level.toFixed(1)}`;
      low = high = level;
      columnAt = column;
      drawn = true;
    }
  });
  return path;
}

// The steps that all curves show: null for all of them, or {first, last}.
let zoom = null;
let isDragging = false;

// The part of a line, with its smoothed values, that lies between two steps.
function cut(line, smooth, { first, last }) {
  const places = line.steps.flatMap((step, place) => step >= first && step <= last ? [place] : []);
  return {
    ...line,
    steps: places.map(place => line.steps[place]),
    values: places.map(place => line.values[place]),
    smooth: places.map(place => smooth[place]),
  };
}

// What a chart shows now: its lines between the steps in sight, their range, and how a step and a value lie on it.
function frameOf(chart) {
  const width = chart.isMain ? Math.max(WIDTH, Math.round(chart.node.clientWidth)) : WIDTH;
  const height = chart.isMain ? MAIN_HEIGHT : HEIGHT;
  const whole = linesOf(chart);
  const range = zoom ?? {
    first: Math.min(...whole.map(line => line.steps[0])),
    last: Math.max(...whole.map(line => line.steps[line.steps.length - 1])),
  };
  // A rate that is set, and counts, are exact: a mean of them would show what never was.
  const isExact = chart.group !== "curves" || data.metrics[chart.name].exact;
  const weight = isExact ? 0 : +byId("smoothing").value;
  const lines = whole.map(line => cut(line, smoothed(line.values, weight), range));
  const numbers = lines.flatMap(line => line.values).filter(value => value !== null);
  const low = Math.min(...numbers), high = Math.max(...numbers);
  const isLog = byId("log-scale").checked && low > 0;
  const scale = isLog ? Math.log10 : value => value;
  const { first, last } = range;
  const across = width - LEFT - 4, down = height - BOTTOM - TOP;
  const share = value => (scale(high) - scale(value)) / (scale(high) - scale(low));
  return {
    ...{ width, height, lines, first, last, low, high, isLog },
    isSmooth: weight > 0,
    x: step => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * across,
    y: value => TOP + (high > low ? share(value) : 0.5) * down,
    stepAt: position => first + Math.min(1, Math.max(0, (position - LEFT) / across)) * (last - first),
  };
}

function drawAxes(svg, { width, height, first, last, low, high, isLog, x, y }) {
  if (!(high >= low)) return; // no number lies between these steps
  const levels = (isLog ? logTicksBetween : ticksBetween)(low, high), words = tickWords(levels);
  levels.forEach((value, index) => {
    svg.append(make("line", { x1: LEFT, x2: width, y1: y(value), y2: y(value), class: "axis" }));
    const place = { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end" };
    svg.append(make("text", { ...place, class: "soft small" }, words[index]));
  });
  for (const step of ticksBetween(first, last, 1)) {
    const anchor = x(step) > width - 20 ? "end" : "middle";
    const place = { x: anchor === "end" ? width : x(step), y: height - 4, "text-anchor": anchor };
    svg.append(make("text", { ...place, class: "soft small" }, tickWord(step)));
  }
}

function drawLine(svg, line, { x, y, width, isSmooth }) {
  const style = `stroke: ${colour(line.run)}`;
  const path = values => pathOf(line, values, x, y, width - LEFT);
  if (isSmooth) svg.append(make("path", { d: path(line.values), class: "curve raw", style }));
  svg.append(make("path", { d: path(line.smooth), class: "curve", style }));
  const known = line.values.flatMap((value, place) => value === null ? [] : [place]);
  if (known.length >= 30) return;
  for (const place of known) {
    const centre = { cx: x(line.steps[place]), cy: y(line.values[place]), r: 2.2 };
    svg.append(make("circle", { ...centre, style: `fill: ${colour(line.run)}` }));
  }
}

// What the lines have nearest to a step, in words with the colours of the runs; returns that step.
function readAt(read, lines, step) {
  let nearestStep = null;
  read.replaceChildren();
  for (const line of lines) {
    const place = nearest(line, step);
    if (place === null) continue;
    if (nearestStep === null) {
      nearestStep = line.steps[place];
      read.append(`step ${said(nearestStep)}`);
    }
    const exact = said(line.values[place]), smooth = said(line.smooth[place]);
    const number = exact === smooth ? exact : `${exact} (${smooth})`;
    const style = `background: ${colour(line.run)}; margin-left: 10px`;
    const words = lines.length > 1 ? `${line.name} ${number}` : number;
    read.append(make("span", { class: "swatch", style }), words);
  }
  return nearestStep;
}

// A pointer over a curve reads its values; drawn from one step to another, it zooms all curves to what lies between.
function followPointer(svg, frame, read) {
  const { height, lines, last, x, stepAt, width } = frame;
  const ends = { y1: TOP, y2: height - BOTTOM };
  const cursor = make("line", { ...ends, class: "cursor", visibility: "hidden" });
  const band = make("rect", { y: TOP, height: height - BOTTOM - TOP, class: "band", visibility: "hidden" });
  svg.append(band, cursor);
  let from = null;
  const stepOf = event => {
    const box = svg.getBoundingClientRect();
    return stepAt((event.clientX - box.left) / box.width * width);
  };
  const leave = () => {
    from = null;
    isDragging = false;
    for (const mark of [cursor, band]) mark.setAttribute("visibility", "hidden");
    readAt(read, lines, last);
  };
  svg.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    event.preventDefault(); // which would select text
    svg.setPointerCapture(event.pointerId);
    from = stepOf(event);
    isDragging = true;
  });
  svg.addEventListener("pointermove", event => {
    const step = stepOf(event), at = readAt(read, lines, step);
    if (at === null) return;
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    if (from === null) return;
    band.setAttribute("visibility", "visible");
    band.setAttribute("x", Math.min(x(from), x(step)));
    band.setAttribute("width", Math.abs(x(step) - x(from)));
  });
  svg.addEventListener("pointerup", event => {
    const [first, last] = [from ?? 0, stepOf(event)].sort((a, b) => a - b);
    const isDrawn = from !== null && x(last) - x(first) > 6;
    leave();
    if (isDrawn) zoomTo({ first, last });
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointercancel", leave);
  svg.addEventListener("dblclick", () => zoomTo(null));
  readAt(read, lines, last);
}

function draw(chart) {
  const { node, name } = chart, metric = data.metrics[name];
  const frame = frameOf(chart);
  const svg = make("svg", { viewBox: `0 0 ${frame.width} ${frame.height}`, role: "img", "aria-label": name });
  drawAxes(svg, frame);
  for (const line of frame.lines) drawLine(svg, line, frame);
  const read = make("div", { class: "read" });
  followPointer(svg, frame, read);
  const facts = [metric.unit, chart.objective].filter(Boolean).join("; of ");
  const isHeldOut = name.startsWith("eval/") && !metric.name.startsWith("eval/");
  const meaning = isHeldOut ? `held out: ${metric.meaning}` : metric.meaning;
  const words = facts ? make("span", { class: "soft" }, ` (${facts})`) : "";
  node.replaceChildren(make("figcaption", {}, name, words), make("p", { class: "meaning" }, meaning), svg, read);
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

// Charts in the order of the page, and the one on top, which shows any of their curves.
const charts = [];
const mainChart = { node: null, isMain: true };
// Those that are not drawn as they should be now. What is in sight is drawn at once, the rest between other work.
const waiting = new Set();
let isDrawing = false;

function redraw() {
  for (const chart of mainChart.name ? [mainChart, ...charts] : charts) waiting.add(chart);
  for (const chart of waiting) {
    const { top, bottom } = chart.node.getBoundingClientRect();
    if (bottom > 0 && top < innerHeight && !chart.node.hidden) drawWaiting(chart);
  }
  if (!isDrawing) drawSome();
}

function drawWaiting(chart) {
  waiting.delete(chart);
  draw(chart);
}

// All of them, as for paper, which does not wait.
function drawAll() {
  for (const chart of waiting) drawWaiting(chart);
}

function drawSome() {
  const began = performance.now();
  for (const chart of waiting) {
    drawWaiting(chart);
    if (performance.now() - began > 10) break;
  }
  isDrawing = waiting.size > 0;
  if (isDrawing) setTimeout(drawSome);
}

// Show the steps of `range` in all curves: at least two of some run, or, without a range, all.
function zoomTo(range) {
  const has = ({ step }) => step.filter(each => each >= range.first && each <= range.last).length > 1;
  if (range && !data.runs.some(run => has(run.curves) || has(run.held_out))) return;
  zoom = range;
  byId("all-steps").hidden = !zoom;
  byId("zoomed").textContent = zoom ? `steps ${Math.ceil(zoom.first)} to ${Math.floor(zoom.last)}` : "drag to zoom";
  redraw();
}

function addCharts(place, group) {
  // Two points make no curve: the table above has them.
  if (group === "held_out" && data.runs.every(run => run.held_out.step.length < 3)) return;
  let title = null, grid = null;
  for (const [name, metric] of Object.entries(data.metrics)) {
    const runs = data.runs.filter(run => run[group].columns[name]);
    const objectives = new Set(runs.map(run => metric.of_its_loss ? run.objective : null));
    if (objectives.size && (grid === null || (group === "curves" && metric.group !== title))) {
      title = metric.group;
      grid = make("div", { class: "grid" });
      place.append(...(group === "curves" ? [make("h3", {}, title)] : []), grid);
    }
    for (const objective of objectives) {
      const node = make("figure", { class: "chart" });
      grid.append(node);
      charts.push({ node, group, name, numRuns: runs.length, objective: objectives.size > 1 ? objective : null });
    }
  }
}

const keyOf = ({ group, name, objective }) => JSON.stringify([group, name, objective]);

// The choice of the curve on top: at first the one that says most of what is learned, and that all runs share.
function offerCurves() {
  const select = byId("main-metric");
  const groups = new Map();
  for (const chart of charts) {
    const title = chart.group === "held_out" ? "Held out" : data.metrics[chart.name].group;
    if (!groups.has(title)) groups.set(title, make("optgroup", { label: title }));
    const words = chart.objective ? `${chart.name} (${chart.objective})` : chart.name;
    groups.get(title).append(make("option", { value: keyOf(chart) }, words));
  }
  select.append(...groups.values());
  const isShared = chart => chart.group === "curves" && !chart.objective && chart.numRuns === data.runs.length;
  const first = charts.find(isShared) ?? charts.find(chart => chart.group === "curves");
  byId("main").hidden = !first;
  if (first) select.value = keyOf(first);
}

function chooseCurve() {
  const chosen = byId("main-metric").value;
  const { group, name, objective } = charts.find(chart => keyOf(chart) === chosen) ?? {};
  Object.assign(mainChart, { node: byId("main-curve"), group, name, objective });
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
