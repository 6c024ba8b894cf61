"use strict";
// What is known of the runs, what the reader chose, and small helpers. Texts reach the page through textContent alone.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && !(node instanceof SVGElement) && key !== "list") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const runs = [];
const ui = {view: "curves", smooth: 5, x: "step", zoom: null, filter: "", logs: new Map(), wide: new Set(), hidden: new Set(),
  pinned: null, step: null, weight: "", level: "", shade: "ratio"};

// One part per run, as run_data.py makes them. Returns the names of what changed.
function apply(parts) {
  const changed = new Set();
  parts.forEach((part, index) => {
    const run = runs[index] = runs[index] || {index, color: index % 7};
    if (part.fresh || run.steps === undefined) {
      Object.assign(run, {steps: [], values: {}, eval: [], samples: [], band: null, flips: null, timeline: [], positions: null, about: {rows: [], settings: {}}});
      if (part.fresh) changed.add("samples");
    }
    run.name = part.name;
    if (run.error !== part.error) changed.add("runs");
    run.error = part.error;
    if (part.written !== undefined) run.written = part.written;
    for (const key of ["about", "eval", "band", "flips", "timeline", "positions"]) if (part[key]) { run[key] = part[key]; changed.add(key); }
    if (part.metrics) { grow(run, part.metrics); changed.add("metrics"); }
    if (part.samples) {
      run.samples.length = part.samples.from;
      for (const row of part.samples.rows) run.samples.push(Object.assign(row, {run: index, at: run.samples.length}));
      changed.add("samples");
    }
  });
  return changed;
}

function grow(run, part) {
  const before = part.from;
  run.steps.length = before;
  run.steps.push(...part.steps);
  for (const name of Object.keys(part.values)) {
    const column = run.values[name] = run.values[name] || [];
    while (column.length < before) column.push(null);
    column.length = before;
    column.push(...part.values[name]);
  }
  for (const column of Object.values(run.values)) while (column.length < run.steps.length) column.push(null);
  run.xs = {};
}

const shown = () => runs.filter(run => !ui.hidden.has(run.name));

// Where a run's steps stand on the axis of all curves: step, hours trained, or tokens sampled.
function axis(run) {
  if (ui.x === "step") return run.steps;
  if (!run.xs[ui.x]) {
    const column = run.values[{hours: "time/step_s", tokens: "response/tokens"}[ui.x]] || [], scale = ui.x === "hours" ? 3600 : 1;
    let sum = 0;
    run.xs[ui.x] = run.steps.map((_, i) => sum += (column[i] || 0) / scale);
  }
  return run.xs[ui.x];
}

function points(run, metric, {log = false, needs = ""} = {}) {
  const column = run.values[metric], xs = axis(run), need = needs && run.values[needs], out = {x: [], y: [], step: []};
  if (!column) return out;
  for (let i = 0; i < column.length; i++) {
    if (column[i] === null || (log && column[i] <= 0) || (needs && !(need && need[i] > 0))) continue;
    out.x.push(xs[i]); out.y.push(column[i]); out.step.push(run.steps[i]);
  }
  return out;
}

// A held-out evaluation stands at the version that was evaluated: step n samples from version n.
function evaluated(run, metric) {
  if (!run.eval.length) {
    const found = points(run, metric);
    return {...found, x: ui.x === "step" ? found.x.map(x => x + 1) : found.x};
  }
  const xs = axis(run), out = {x: [], y: [], step: []};
  for (const one of run.eval) {
    if (!(metric in one)) continue;
    const at = run.steps.findIndex(step => step >= one.version);
    const x = ui.x === "step" ? one.version : one.version === 0 ? 0 : xs[at < 0 ? xs.length - 1 : at];
    out.x.push(x); out.y.push(one[metric]); out.step.push(one.version);
  }
  return out;
}

function smooth(values, window) {
  if (window < 2) return values;
  let sum = 0;
  return values.map((value, i) => {
    sum += value - (i >= window ? values[i - window] : 0);
    return sum / Math.min(i + 1, window);
  });
}

const last = values => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };
const mean = values => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
const clip = (x, low, high) => Math.max(low, Math.min(high, x));

function number(x, digits = 4) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (typeof x !== "number") return String(x);
  if (x === 0 || (Number.isInteger(x) && Math.abs(x) < 1e6)) return String(x);
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-3 ? x.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e") : String(Number(x.toPrecision(digits)));
}
const percent = x => x === null || x === undefined ? "–" : `${Number((100 * x).toPrecision(3))} %`;

function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

// The colour that a variable of the style sheet has now, for canvases.
function color(name) {
  const probe = color.probe = color.probe || document.body.appendChild(el("i", {hidden: true}));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function tip(event, ...content) {
  const box = $("tip");
  box.hidden = !content.length;
  if (!content.length) return;
  box.replaceChildren(...content);
  const {clientX: x, clientY: y} = event, wide = box.offsetWidth, high = box.offsetHeight;
  box.style.left = `${x + 14 + wide > innerWidth ? x - wide - 14 : x + 14}px`;
  box.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - high - 4))}px`;
}
const tipLine = (run, label, value) => el("div", {className: run === null ? "" : `run${run % 7}`}, run === null ? null : el("i", {className: "swatch"}), label, el("b", {}, value));
