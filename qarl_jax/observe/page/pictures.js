// Where a step's time goes, the band of the objective, the mismatch by position, and changed codes by layer.

const PHASES = ["#3b7dd8", "#e08a2c", "#2e9e6b", "#c9514c", "#8c6bc8", "#8b6a4f", "#d375b3", "#7f8790", "#b5a82c", "#2fa9b8"];
const NOT_PHASES = new Set(["step", "start", "rollout_tok_per", "tok_per"]);

// ---- time -----------------------------------------------------------------------------------------------------------

// Seconds by phase: as `metrics.phases` in Python.
function phasesOf(run) {
  const out = {};
  for (const key of Object.keys(run.values)) {
    const found = /^time\/([^/]+)_s$/.exec(key);
    if (found && !NOT_PHASES.has(found[1]) && !/^(start_|ahead_)/.test(found[1])) out[found[1]] = run.values[key];
  }
  return out;
}

function phaseColors() {
  const sums = {};
  for (const run of runs) for (const [name, column] of Object.entries(phasesOf(run))) sums[name] = (sums[name] || 0) + column.reduce((a, b) => a + (b || 0), 0);
  const names = Object.keys(sums).filter(name => name !== "other").sort((a, b) => sums[b] - sums[a]);
  for (const run of runs) for (const one of run.timeline) for (const [name] of one.spans) if (!names.includes(name.replace("beside/", ""))) names.push(name.replace("beside/", ""));
  return new Map([...names.map((name, i) => [name, PHASES[i % PHASES.length]]), ["other", "#9aa0a8"]]);
}

function timeKey(event) {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!by) return;
  const steps = timedSteps();
  if (!steps.length) return;
  event.preventDefault();
  ui.step = steps[clip(nearest(steps, ui.step ?? last(steps)) + by, 0, steps.length - 1)];
  draw();
}

const timedSteps = () => [...new Set(shown().flatMap(run => run.timeline.map(one => one.step)))].sort((a, b) => a - b);

function viewTime(view) {
  const colors = phaseColors(), steps = timedSteps();
  const legend = el("div", {className: "bar"}, [...colors].filter(([name]) => name !== "other" || shown().some(run => phasesOf(run).other)).map(([name, hex]) => el("span", {className: "key"}, el("i", {className: "swatch", style: `background:${hex}`}), " ", name.replace(/_/g, " "))));
  if (!shown().some(run => run.steps.length)) return view.append(el("p", {className: "empty"}, "No step has been recorded yet."));
  if (steps.length) {
    const step = steps[nearest(steps, ui.step ?? last(steps))];
    const slide = el("input", {type: "range", min: 0, max: steps.length - 1, value: steps.indexOf(step), ariaLabel: "Step", oninput: event => { ui.step = steps[event.target.value]; swap(); }});
    const words = el("b", {className: "num"}), lanes = el("div");
    const swap = () => {
      const now = steps[nearest(steps, ui.step ?? last(steps))], timed = shown().filter(run => run.timeline.length).map(run => [run, run.timeline[nearest(run.timeline.map(one => one.step), now)]]);
      words.textContent = `step ${now}`;
      slide.value = steps.indexOf(now);
      const most = Math.max(...timed.map(([, one]) => one.seconds));
      lanes.replaceChildren(...timed.map(([run, one]) => gantt(run, one, most, colors)));
    };
    view.append(el("div", {className: "bar"}, words, slide, el("span", {className: "soft"}, "← → go from step to step; the newest ", String(steps.length), " are here")), lanes);
    swap();
  } else view.append(el("p", {className: "soft"}, "This run recorded no timeline.jsonl; the seconds of its phases are below."));
  view.append(legend, el("div", {className: "pictures"}, shown().filter(run => run.steps.length).map(run => stacked(run, colors))));
}

function gantt(run, one, most, colors) {
  const width = 1200, left = 92, row = 26, lanes = [];
  const spans = one.spans.map(([name, a, b]) => ({name: name.replace("beside/", ""), beside: name.startsWith("beside/"), a, b})).sort((p, q) => p.a - q.a || q.b - p.b);
  // What lies beside goes into the first lane that is free; phases within a phase lie on top of it.
  for (const span of spans) {
    if (!span.beside) { span.lane = 0; continue; }
    let lane = lanes.findIndex(end => end <= span.a + 1e-6);
    if (lane < 0) lane = lanes.length < 6 ? lanes.length : 5;
    lanes[lane] = Math.max(span.b, lanes[lane] || 0);
    span.lane = lane + 1;
  }
  const high = row * (1 + lanes.length) + 22, place = x => left + x / most * (width - left - 12);
  const plot = svg("svg", {viewBox: `0 0 ${width} ${high}`, role: "img", "aria-label": `Phases of step ${one.step} of ${run.name}`});
  for (const x of ticks(0, most, 8)) plot.append(svg("line", {class: "grid", x1: place(x), x2: place(x), y1: 0, y2: high - 18}), svg("text", {x: place(x), y: high - 5, "text-anchor": "middle"}, `${number(x)} s`));
  plot.append(svg("text", {x: 0, y: 17, class: "lane"}, "trainer"));
  if (lanes.length) plot.append(svg("text", {x: 0, y: row + 17, class: "lane"}, "beside it"));
  spans.forEach((span, i) => {
    const inside = !span.beside && spans.slice(0, i).some(o => !o.beside && o.a <= span.a && o.b >= span.b);
    const x = place(span.a), wide = Math.max(0.8, place(span.b) - x), y = row * span.lane + (inside ? 7 : 3);
    const bar = svg("rect", {class: "phase", x, y, width: wide, height: inside ? row - 14 : row - 6, rx: 2, fill: colors.get(span.name) || "#9aa0a8"});
    bar.addEventListener("pointermove", event => tip(event, el("div", {}, span.name.replace(/_/g, " "), el("b", {}, `${number(span.b - span.a, 3)} s`)), el("div", {className: "soft"}, `${number(span.a, 3)} to ${number(span.b, 3)} s`)));
    bar.addEventListener("pointerleave", () => tip(null));
    plot.append(bar);
    if (wide > 7 * span.name.length + 8 && !inside) plot.append(svg("text", {x: x + 5, y: y + 14, style: "fill:#fff;pointer-events:none"}, span.name.replace(/_/g, " ")));
  });
  const covered = number(one.seconds, 3);
  return el("figure", {className: `run${run.color}`, style: "margin-bottom:.6rem"}, el("figcaption", {}, el("i", {className: "swatch"}), run.name, el("span", {className: "soft"}, `step ${one.step}: ${covered} s`)), plot);
}

function stacked(run, colors) {
  const phases = Object.entries(phasesOf(run)), n = run.steps.length, group = Math.max(1, Math.ceil(n / 150)), bars = Math.ceil(n / group);
  const width = 560, height = 200, order = [...colors.keys()];
  phases.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
  const totals = Array.from({length: bars}, (_, i) => phases.map(([name, column]) => [name, mean(column.slice(i * group, (i + 1) * group).map(x => x || 0))]));
  const sums = totals.map(one => one.reduce((a, [, s]) => a + s, 0)), sorted = [...sums].sort((a, b) => a - b);
  const typical = sorted[Math.floor(0.9 * (sorted.length - 1))], most = Math.min(sorted[sorted.length - 1], 2.5 * typical) || 1;  // a first step that compiles would flatten the others
  const place = i => LEFT + i / bars * (width - LEFT - RIGHT), down = s => TOP + (1 - s / most) * (height - TOP - BOTTOM);
  const plot = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Seconds of each phase by step, ${run.name}`});
  for (const y of ticks(0, most)) plot.append(svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: down(y), y2: down(y)}), svg("text", {x: LEFT - 6, y: down(y) + 3.5, "text-anchor": "end"}, `${number(y)} s`));
  totals.forEach((one, i) => {
    let sum = 0;
    const first = run.steps[i * group], end = run.steps[Math.min(n, (i + 1) * group) - 1], label = first === end ? `step ${first}` : `steps ${first} to ${end}, mean`;
    const bar = svg("g", {});
    for (const [name, seconds] of one) {
      const top = Math.min(sum + seconds, most);
      if (top > sum) bar.append(svg("rect", {x: place(i), width: Math.max(0.6, (width - LEFT - RIGHT) / bars - (bars < 80 ? 1 : 0)), y: down(top), height: down(sum) - down(top), fill: colors.get(name) || "#9aa0a8"}));
      sum = top;
    }
    if (sums[i] > most) bar.append(svg("text", {x: place(i) + 2, y: TOP + 10, style: "fill:#fff"}, `${number(sums[i], 3)} s ↑`));
    bar.addEventListener("pointermove", event => tip(event, el("div", {className: "soft"}, label, el("b", {}, `${number(sums[i], 3)} s`)), ...one.filter(([, s]) => s > 0.001 * sums[i]).map(([name, s]) => el("div", {}, el("i", {className: "swatch", style: `background:${colors.get(name)}`}), name.replace(/_/g, " "), el("b", {}, `${number(s, 3)} s`)))));
    bar.addEventListener("pointerleave", () => tip(null));
    bar.addEventListener("click", () => { ui.step = end; draw(); });
    plot.append(bar);
  });
  const at = [...new Set([0, bars >> 1, bars - 1])];
  at.forEach(i => plot.append(svg("text", {x: place(i + 0.5), y: height - 6, "text-anchor": "middle"}, run.steps[i * group])));
  return el("figure", {className: `run${run.color}`}, el("figcaption", {}, el("i", {className: "swatch"}), run.name, el("span", {className: "soft"}, "seconds of each phase, by step")), plot);
}

// ---- pictures over steps: a canvas of cells, a column for some steps ------------------------------------------------

function heat({columns, rows, cell, words, lines = [], yTicks, steps, height = 220, label}) {
  const ratio = Math.max(2, devicePixelRatio || 1), width = 560, left = 62, bottom = 20, top = 6;
  const canvas = el("canvas", {width: width * ratio, height: height * ratio, ariaLabel: label, role: "img"});
  canvas.style.aspectRatio = `${width} / ${height}`;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  const x = i => left + i / columns * (width - left - 6), y = j => top + (1 - j / rows) * (height - top - bottom);
  for (let i = 0; i < columns; i++) for (let j = 0; j < rows; j++) {
    const found = cell(i, j);
    if (!found) continue;
    paint.globalAlpha = found[1];
    paint.fillStyle = found[0];
    paint.fillRect(x(i), y(j + 1), x(i + 1) - x(i) + (columns > 60 ? 0.5 : -0.6), y(j) - y(j + 1) + (rows > 40 ? 0.4 : -0.6));
  }
  paint.globalAlpha = 1;
  paint.font = "10.5px system-ui, sans-serif";
  paint.fillStyle = color("soft");
  paint.textAlign = "right";
  for (const [at, text] of yTicks) paint.fillText(text, left - 6, y(at) + 3.5);
  paint.textAlign = "center";
  for (const i of new Set([0, columns >> 1, columns - 1])) paint.fillText(steps[i][0], clip(x(i + 0.5), left + 8, width - 14), height - 6);
  for (const {at, text, tone, dash} of lines) {
    paint.strokeStyle = paint.fillStyle = tone;
    paint.setLineDash(dash || []);
    paint.lineWidth = 1.3;
    paint.beginPath(); paint.moveTo(left, y(at)); paint.lineTo(width - 6, y(at)); paint.stroke();
    if (!text) continue;
    const wide = paint.measureText(text).width;  // on a plate, since the picture goes on behind it
    paint.globalAlpha = 0.82;
    paint.fillStyle = color("card");
    paint.fillRect(width - wide - 14, y(at) - 15, wide + 8, 13);
    paint.globalAlpha = 1;
    paint.fillStyle = tone;
    paint.textAlign = "right";
    paint.fillText(text, width - 10, y(at) - 5);
  }
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * width, py = (event.clientY - box.top) / box.height * height;
    const i = Math.floor((px - left) / (width - left - 6) * columns), j = Math.floor((1 - (py - top) / (height - top - bottom)) * rows);
    if (i < 0 || j < 0 || i >= columns || j >= rows) return tip(null);
    const [first, end] = steps[i];
    tip(event, el("div", {className: "soft"}, first === end ? `step ${first}` : `steps ${first} to ${end}`), ...words(i, j));
  });
  canvas.addEventListener("pointerleave", () => tip(null));
  return canvas;
}

// A histogram's bin 0 lies below the first edge, bin i above edge i - 1. Where a value stands, in bins from the bottom.
function inBins(edges, value) {
  const i = edges.findIndex(edge => edge >= value);
  if (i < 0) return edges.length;
  if (i === 0) return 1;
  const [a, b] = [edges[i - 1], edges[i]], log = a > 0 || b < 0;
  return i + (log ? (Math.log(Math.abs(value)) - Math.log(Math.abs(a))) / (Math.log(Math.abs(b)) - Math.log(Math.abs(a))) : (value - a) / (b - a));
}

function histogramPicture(run, kind, sign, {limits, title}) {
  const {edges, steps, kinds} = run.band, columns = kinds[`${kind}_${sign}`];
  if (!columns || !columns.some(counts => counts.some(Boolean))) return null;
  const [below, above] = limits || [null, null], marks = [below, above].filter(x => x !== null).map(x => inBins(edges, x));
  const used = columns.flatMap(counts => counts.flatMap((n, j) => n ? [j] : []));
  const middle = inBins(edges, 0), low = Math.max(0, Math.floor(Math.min(...used, ...marks, middle) - 2)), high = Math.min(edges.length + 1, Math.ceil(Math.max(...used, ...marks, middle) + 3));
  const kept = color("down"), lost = color("up"), peak = columns.map(counts => Math.max(...counts) || 1), sums = columns.map(counts => counts.reduce((a, b) => a + b, 0));
  const outside = j => (above !== null && j + 0.5 > inBins(edges, above)) || (below !== null && j + 0.5 < inBins(edges, below));
  const lines = [{at: middle - low, tone: color("soft"), dash: [2, 3]}];
  if (above !== null) lines.push({at: inBins(edges, above) - low, text: `dropped above ×${number(Math.exp(above), 5)}`, tone: lost});
  if (below !== null) lines.push({at: inBins(edges, below) - low, text: `dropped below ×${number(Math.exp(below), 5)}`, tone: lost});
  const yTicks = [-1, -1e-1, -1e-2, -1e-3, -1e-4, -1e-5, 0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1].map(v => [inBins(edges, v) - low, v === 0 ? "0" : `${v > 0 ? "+" : "−"}${number(Math.abs(v))}`])
    .filter(([at, text], i) => at >= 0 && at <= high - low && (Math.abs(i - 6) !== 1 || high - low < 30));
  const range = j => j <= 0 ? `below ${number(edges[0])}` : j >= edges.length ? `above ${number(last(edges))}` : `${number(edges[j - 1])} to ${number(edges[j])}`;
  const share = columns.map((counts, i) => sums[i] ? counts.reduce((a, n, j) => a + (outside(j) ? n : 0), 0) / sums[i] : 0);
  const recent = sums.slice(-10).reduce((a, b) => a + b, 0) ? mean(share.slice(-10).filter((_, i) => sums.slice(-10)[i])) : null;
  const canvas = heat({columns: columns.length, rows: high - low, steps, yTicks, lines, label: title,
    cell: (i, j) => { const n = columns[i][j + low]; return n ? [outside(j + low) ? lost : kept, 0.15 + 0.85 * Math.sqrt(n / peak[i])] : null; },
    words: (i, j) => [el("div", {}, `log-ratio ${range(j + low)}`, el("b", {}, `${columns[i][j + low]} of ${sums[i]}`)), limits ? el("div", {}, "outside the band", el("b", {}, percent(share[i]))) : null].filter(Boolean)});
  const noted = limits && (above !== null || below !== null) && recent !== null ? el("span", {className: "soft"}, `outside, newest steps: ${percent(recent)}`) : null;
  return el("figure", {}, el("figcaption", {}, title, noted), canvas);
}

function viewBand(view) {
  const with_ = shown().filter(run => run.band && run.band.steps.length);
  if (!with_.length) return view.append(el("p", {className: "empty"}, "No run has histograms.jsonl yet: the first step writes it."));
  const level = ui.level || (with_[0].band.limits.level === "token" ? "token" : "response"), kind = level === "token" ? "ratio" : "seq_ratio";
  view.append(el("div", {className: "bar"}, ["response", "token"].map(one => el("button", {type: "button", ariaPressed: String(one === level), onclick: () => { ui.level = one; draw(); }}, `per ${one}`)),
    el("span", {className: "soft"}, `log of the ${level === "response" ? "geometric mean of a response's" : "token's"} ratio, learner when updated / at the start of the step; darker: more of them`)));
  for (const run of with_) {
    const limits = run.band.limits.level === level ? run.band.limits : null;
    const name = run.about.loss && run.about.loss.name ? run.about.loss.name.toUpperCase() : "";
    const pictures = [["pos", "A > 0"], ["neg", "A < 0"]].map(([sign, words]) => histogramPicture(run, kind, sign, {limits: limits && limits[sign], title: words}));
    view.append(el("h2", {className: `run${run.color}`}, el("i", {className: "swatch"}), ` ${run.name} `, el("span", {className: "soft"}, limits ? `band of ${name}` : name ? `${name} has no band here` : "")), el("div", {className: "pictures"}, pictures.filter(Boolean)));
    if (!pictures.some(Boolean)) view.append(el("p", {className: "soft"}, "No response has had an advantage other than 0."));
  }
}

// ---- mismatch -------------------------------------------------------------------------------------------------------

function viewMismatch(view) {
  const with_ = shown().filter(run => run.positions && run.positions.halves.some(half => half.rows.length));
  const equal = with_.filter(run => run.positions.halves.every(half => half.rows.every(([, , most]) => most === 0))), other = with_.filter(run => !equal.includes(run));
  if (!with_.length) view.append(el("p", {className: "empty"}, "No run has tokens in samples.jsonl yet (log.samples_per_step, log.sample_tokens)."));
  for (const run of equal) view.append(el("p", {className: `run${run.color}`}, el("i", {className: "swatch"}), ` ${run.name}: sampler and learner gave every recorded token the same log-probability, to the bit (${with_.length && number(run.positions.halves.reduce((a, half) => a + half.rows.reduce((b, row) => b + row[3], 0), 0))} tokens).`));
  if (other.length) view.append(el("h2", {}, "By position in the response"), el("div", {className: "pictures"},
    positionChart(other, 1, "mean |Δ log-prob|"), positionChart(other, 2, "largest |Δ log-prob|")));
  const pictures = shown().filter(run => run.band && run.band.steps.length).flatMap(run => [["weight", "per token"], ["seq_weight", "per response"]].map(([kind, words]) => {
    const merged = {...run, band: {...run.band, kinds: {[`${kind}_all`]: merge(run.band.kinds[`${kind}_pos`], run.band.kinds[`${kind}_neg`])}}};
    return histogramPicture(merged, kind, "all", {title: `${run.name}: log learner / sampler, ${words}`});
  })).filter(Boolean);
  if (pictures.length) view.append(el("h2", {}, "Learner at the start of the step against sampler, by step"), el("div", {className: "pictures"}, pictures));
}

const merge = (a, b) => !a ? b : !b ? a : a.map((counts, i) => counts.map((n, j) => n + b[i][j]));

function positionChart(some, column, title) {
  const width = 560, height = 230, rows = some.flatMap(run => run.positions.halves.flatMap(half => half.rows)), values = rows.map(row => row[column]).filter(v => v > 0);
  const most = Math.max(...rows.map(row => row[0])), low = Math.log10(Math.min(...values)) - 0.1, high = Math.log10(Math.max(...values)) + 0.1;
  const place = p => LEFT + Math.log(p) / Math.log(Math.max(most, 2)) * (width - LEFT - RIGHT), down = v => TOP + (high - Math.log10(v)) / Math.max(high - low, 1e-6) * (height - TOP - BOTTOM);
  const plot = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} by position`});
  const whole = ticks(low, high).filter(Number.isInteger).map(e => 10 ** e);
  for (const y of whole.length > 1 ? whole : ticks(10 ** low, 10 ** high).filter(v => v > 10 ** low)) plot.append(svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: down(y), y2: down(y)}), svg("text", {x: LEFT - 6, y: down(y) + 3.5, "text-anchor": "end"}, number(y, 2)));
  for (let p = 1; p <= most; p *= 4) plot.append(svg("text", {x: place(p), y: height - 6, "text-anchor": "middle"}, p));
  for (const run of some) run.positions.halves.forEach((half, i) => {
    const found = half.rows.filter(row => row[column] > 0), newest = i === run.positions.halves.length - 1;
    plot.append(svg("path", {class: `curve run${run.color} ${newest ? "" : "d1"}`, "stroke-width": newest ? 1.9 : 1.2, d: found.map((row, k) => `${k ? "L" : "M"}${place(row[0]).toFixed(1)} ${down(row[column]).toFixed(1)}`).join("")}));
    for (const row of found) {
      const dot = svg("circle", {class: `dot run${run.color}`, cx: place(row[0]), cy: down(row[column]), r: newest ? 3 : 2});
      dot.addEventListener("pointermove", event => tip(event, el("div", {className: "soft"}, `up to token ${row[0]}, ${half.label}, ${row[3]} tokens`), tipLine(run.index, `${run.name}: mean`, number(row[1])), tipLine(null, "largest", number(row[2]))));
      dot.addEventListener("pointerleave", () => tip(null));
      plot.append(dot);
    }
  });
  const dashed = some[0].positions.halves.length > 1 ? el("span", {className: "soft"}, `dashed: first half of the run`) : null;
  return el("figure", {}, el("figcaption", {}, title, dashed), plot, el("div", {className: "key"}, "token of the response, recorded samples"));
}

// ---- codes ----------------------------------------------------------------------------------------------------------

function viewCodes(view) {
  const with_ = shown().filter(run => run.flips && run.flips.steps.length);
  if (!with_.length) return view.append(el("p", {className: "empty"}, "No run has shares of changed codes by layer: the second publish of a run writes them (quant.code_flips), and bf16 has no codes."));
  const names = [...new Set(with_.flatMap(run => Object.keys(run.flips.weights)))];
  const pick = el("select", {id: "weight", onchange: event => { ui.weight = event.target.value; draw(); }}, [["", "all weights of a layer, mean"], ...names.map(name => [name, name])].map(([value, text]) => el("option", {value, selected: ui.weight === value}, text)));
  const grids = with_.map(run => [run, gridOf(run)]), flat = grids.flatMap(([, grid]) => grid.flat()).filter(v => v > 0);
  const low = Math.log(Math.min(...flat)), high = Math.log(Math.max(...flat));
  view.append(el("div", {className: "bar"}, el("label", {}, "weight ", pick), el("span", {className: "soft run0"}, `share of codes that a publish changed: ${percent(Math.exp(low))}`, el("i", {className: "ramp heat"}), percent(Math.exp(high)))));
  view.append(el("div", {className: "pictures"}, grids.map(([run, grid]) => {
    const layers = Math.max(...grid.map(column => column.length)), tone = color(`c${run.color}`);
    const canvas = heat({columns: grid.length, rows: layers, steps: run.flips.steps, height: clip(60 + 9 * layers, 150, 380), label: `Changed codes by layer, ${run.name}`,
      yTicks: ticks(0, Math.max(1, layers - 1), 6).filter(Number.isInteger).map(j => [j + 0.5, `layer ${j}`]),
      cell: (i, j) => { const v = grid[i][j]; return v > 0 ? [tone, 0.06 + 0.94 * (high > low ? (Math.log(v) - low) / (high - low) : 1)] : null; },
      words: (i, j) => [el("div", {}, `layer ${j}`, el("b", {}, percent(grid[i][j])))]});
    return el("figure", {className: `run${run.color}`}, el("figcaption", {}, el("i", {className: "swatch"}), run.name, el("span", {className: "soft"}, "layer by step")), canvas);
  })));
}

// Per column of steps the share of each layer: of one weight, or the mean over those that lie in all layers' places.
function gridOf(run) {
  const {weights, steps} = run.flips;
  if (ui.weight) return weights[ui.weight] || steps.map(() => []);
  const layers = Math.max(...Object.values(weights).map(columns => Math.max(...columns.map(column => column.length))));
  const inLayers = Object.values(weights).filter(columns => columns.some(column => column.length === layers));
  return steps.map((_, i) => Array.from({length: layers}, (_, j) => mean(inLayers.map(columns => columns[i][j]).filter(v => v !== null && v !== undefined))));
}
