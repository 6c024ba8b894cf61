// Curves: every panel of curves.py that has something to show, on one axis that all of them share.

const W = 360, H = 190, LEFT = 50, RIGHT = 10, TOP = 10, BOTTOM = 22;

function ticks(low, high, about = 4) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(size => size >= raw * 0.75);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) out.push(Number((i * step).toPrecision(12)));
  return out;
}

function linesOf(panel) {
  const log = ui.logs.get(panel.title) ?? panel.log, lines = [];
  for (const run of shown()) {
    Object.entries(panel.metrics).forEach(([metric, label], style) => {
      const found = points(run, metric, {log, needs: panel.needs});
      if (!found.x.length) return;
      if (ui.smooth > 1 && found.x.length > 1) lines.push({...found, run, label, style, faint: true});
      lines.push({...found, y: smooth(found.y, ui.smooth), raw: found.y, run, label, style});
    });
    for (const [metric, label] of Object.entries(panel.markers || {})) {
      const found = evaluated(run, metric);
      if (found.x.length) lines.push({...found, run, label, marks: true, low: "eval/reward/low", high: "eval/reward/high"});
    }
  }
  return lines;
}

// {lines, place(x), height(y), ...} of a panel within the window that is zoomed to.
function scaleOf(panel, lines, width, height) {
  const all = lines.flatMap(line => line.x);
  let [x0, x1] = ui.zoom || [Math.min(...all), Math.max(...all)];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  let y0 = Infinity, y1 = -Infinity;
  for (const line of lines) line.x.forEach((x, i) => { if (x >= x0 && x <= x1) { y0 = Math.min(y0, line.y[i]); y1 = Math.max(y1, line.y[i]); } });
  if (y0 > y1) { y0 = 0; y1 = 1; }
  const asked = ui.logs.get(panel.title);
  const log = y0 > 0 && (asked ?? (panel.log && y1 > 10 * y0));
  if (log) { y0 = Math.log10(y0); y1 = Math.log10(y1); } else if (panel.percent) y0 = Math.min(0, y0);
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y1))) [y0, y1] = log ? [y0 - 1, y1 + 1] : y0 === 0 ? [0, 0.05] : [y0 - 0.5 * Math.abs(y0), y1 + 0.5 * Math.abs(y1)];
  const pad = 0.04 * (y1 - y0);
  if (!(panel.percent && y0 === 0)) y0 -= pad;
  y1 += pad;
  const place = x => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  const down = y => TOP + (y1 - (log ? Math.log10(y) : y)) / (y1 - y0) * (height - TOP - BOTTOM);
  const back = px => x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
  let marks = ticks(y0, y1);
  if (log) { const whole = marks.filter(y => Number.isInteger(y)); marks = whole.length > 1 ? whole.map(y => 10 ** y) : ticks(10 ** y0, 10 ** y1).filter(y => y > 10 ** y0); }
  return {x0, x1, log, place, down, back, marks, lines};
}

function path(line, scale) {
  let out = "", up = true;
  line.x.forEach((x, i) => {
    if (x < scale.x0 - 1e-9 || x > scale.x1 + 1e-9) { up = true; return; }
    out += `${up ? "M" : "L"}${scale.place(x).toFixed(1)} ${scale.down(line.y[i]).toFixed(1)}`;
    up = false;
  });
  return out;
}

const drawn = [];  // charts on the page, for the shared cross hair

function chart(panel) {
  const lines = linesOf(panel);
  const values = lines.flatMap(line => line.raw || line.y);
  if (!values.length || (!panel.asked && !values.some(value => value !== 0))) return null;
  const wide = ui.wide.has(panel.title), width = wide ? 1100 : W, height = wide ? 320 : H;
  const scale = scaleOf(panel, lines, width, height);
  const label = y => panel.percent ? `${Number((100 * y).toPrecision(3))}%` : number(y, 3);
  const plot = svg("svg", {viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", tabindex: 0, "aria-label": `${panel.title}, by ${ui.x}`});
  for (const y of scale.marks) plot.append(
    svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: scale.down(y), y2: scale.down(y)}),
    svg("text", {x: LEFT - 6, y: scale.down(y) + 3.5, "text-anchor": "end"}, label(y)));
  const xs = ticks(scale.x0, scale.x1, wide ? 10 : 4).filter(x => ui.x !== "step" || Number.isInteger(x));
  xs.forEach(x => plot.append(svg("text", {x: scale.place(x), y: height - 6, "text-anchor": "middle"}, number(x))));
  for (const line of lines) {
    const look = `run${line.run.color}${line.faint ? " faint" : ""} d${(line.style || 0) % 4}`;
    if (line.marks || line.x.length === 1) {
      line.x.forEach((x, i) => {
        if (x < scale.x0 || x > scale.x1) return;
        const one = line.marks && line.run.eval.find(e => e.version === line.step[i]);
        if (one && line.low in one) plot.append(svg("line", {class: `curve ${look}`, "stroke-width": 1, x1: scale.place(x), x2: scale.place(x),
          y1: clip(scale.down(Math.max(one[line.low], scale.log ? 1e-9 : -Infinity)), TOP, height - BOTTOM), y2: clip(scale.down(one[line.high]), TOP, height - BOTTOM)}));
        plot.append(svg("circle", {class: `dot run${line.run.color}`, cx: scale.place(x), cy: scale.down(line.y[i]), r: line.marks ? 3.6 : 2.6}));
      });
    } else plot.append(svg("path", {class: `curve ${look}`, d: path(line, scale)}));
  }
  const cross = svg("line", {class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden"});
  plot.append(cross);
  const mine = {panel, plot, scale, cross, width};
  drawn.push(mine);
  listen(mine, width, height);
  const different = [...new Map(lines.filter(l => !l.faint && l.label).map(l => [l.label, l])).values()];
  const keys = different.length > 1 ? different.map(line => el("span", {className: "key"}, keyMark(line), " ", line.label)) : [];
  const toggle = (words, title, pressed, act) => el("button", {type: "button", title, ariaPressed: String(Boolean(pressed)), onclick: act}, words);
  return el("figure", {className: wide ? "wide" : ""},
    el("figcaption", {}, panel.title, el("span", {className: "tools"},
      toggle("log", "Logarithmic axis", scale.log, () => { ui.logs.set(panel.title, !scale.log); refreshCurves(); }),
      toggle("⤢", "Wide", wide, () => { wide ? ui.wide.delete(panel.title) : ui.wide.add(panel.title); refreshCurves(); }))),
    plot, keys);
}

function keyMark(line) {
  const mark = svg("svg", {viewBox: "0 0 22 8", "aria-hidden": "true", class: `run${shown().length === 1 ? line.run.color : 6}`});
  mark.append(line.marks ? svg("circle", {class: "dot", cx: 11, cy: 4, r: 3.4}) : svg("line", {class: `curve d${(line.style || 0) % 4}`, x1: 0, x2: 22, y1: 4, y2: 4}));
  return mark;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function hover(x) {
  hover.x = x;
  for (const {scale, cross} of drawn) {
    const inside = x !== null && x >= scale.x0 && x <= scale.x1;
    cross.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) for (const side of ["x1", "x2"]) cross.setAttribute(side, scale.place(x));
  }
}

function readings({panel, scale}, x) {
  const lines = scale.lines.filter(line => !line.faint && line.x.length);
  const content = [el("div", {className: "soft"}, ui.x === "step" ? `step ${Math.round(x)}` : `${number(x)} ${ui.x}`)];
  for (const line of lines.slice(0, 16)) {
    const i = nearest(line.x, x);
    if (Math.abs(line.x[i] - x) > 0.03 * (scale.x1 - scale.x0)) continue;  // it has no number near here
    const value = (line.raw || line.y)[i], name = runs.length > 1 ? `${line.run.name} ${line.label}` : line.label || panel.title;
    content.push(tipLine(line.run.index, name, panel.percent ? percent(value) : number(value, 5)));
  }
  return content;
}

function listen(mine, width, height) {
  const {plot, scale} = mine;
  const at = event => scale.back((event.clientX - plot.getBoundingClientRect().left) / plot.getBoundingClientRect().width * width);
  const snap = x => { const xs = scale.lines[0].x; return ui.x === "step" ? clip(Math.round(x), scale.x0, scale.x1) : xs[nearest(xs, x)]; };
  let from = null, box = null;
  plot.addEventListener("pointermove", event => {
    const x = snap(at(event));
    hover(x);
    tip(event, ...readings(mine, x));
    if (from !== null) {
      const [a, b] = [scale.place(clip(from, scale.x0, scale.x1)), scale.place(clip(at(event), scale.x0, scale.x1))];
      box = box || plot.appendChild(svg("rect", {class: "select", y: TOP, height: height - TOP - BOTTOM}));
      box.setAttribute("x", Math.min(a, b)); box.setAttribute("width", Math.abs(b - a));
    }
  });
  plot.addEventListener("pointerleave", () => { if (ui.pinned === null) hover(null); tip(null); });
  plot.addEventListener("pointerdown", event => { if (event.button === 0) { ui.dragging = true; from = at(event); plot.setPointerCapture(event.pointerId); } });
  plot.addEventListener("pointerup", event => {
    const to = at(event), begun = from;
    from = null;
    ui.dragging = false;
    if (begun === null) return;
    if (Math.abs(to - begun) > 0.03 * (scale.x1 - scale.x0)) { ui.zoom = [Math.min(begun, to), Math.max(begun, to)]; refreshCurves(); }
    else pin(stepAt(scale, snap(to)));
  });
  plot.addEventListener("dblclick", () => { ui.zoom = null; pin(null); refreshCurves(); });
  plot.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    const steps = scale.lines[0].step, now = ui.pinned === null ? steps.length - 1 : nearest(steps, ui.pinned) + by;
    pin(steps[clip(now, 0, steps.length - 1)]);
  });
}

const stepAt = (scale, x) => { const line = scale.lines.find(l => !l.marks) || scale.lines[0]; return line.step[nearest(line.x, x)]; };

function pin(step) {
  ui.pinned = step;
  const bar = $("pinned");
  bar.hidden = step === null;
  if (step === null) return hover(null);
  hover(ui.x === "step" ? step : axis(shown()[0])[nearest(shown()[0].steps, step)]);
  bar.replaceChildren(el("b", {}, `step ${step}`),
    el("button", {type: "button", onclick: () => go("samples", {steps: String(nearestSampled(step))})}, "its samples"),
    el("button", {type: "button", onclick: () => { ui.step = step; go("time"); }}, "its seconds"),
    el("button", {type: "button", title: "Escape", onclick: () => pin(null)}, "×"));
}

function panelsShown() {
  const filter = ui.filter.trim().toLowerCase(), fits = text => text.toLowerCase().includes(filter);
  if (!filter) return DATA.panels;
  const known = new Set(runs.flatMap(run => Object.keys(run.values)));
  return [...DATA.panels.filter(panel => fits(panel.title) || Object.keys({...panel.metrics, ...panel.markers}).some(fits)),
    ...[...known].filter(fits).sort().slice(0, 60).map(name => ({title: name, metrics: {[name]: ""}, asked: true}))];
}

function refreshCurves() {
  drawn.length = 0;
  const figures = panelsShown().map(chart).filter(Boolean);
  const none = runs.some(run => run.steps.length) ? "No metric has that name." : "No step has been recorded yet.";
  $("charts").replaceChildren(...(figures.length ? figures : [el("p", {className: "empty"}, none)]));
  $("smoothed").textContent = ui.smooth;
  $("whole").hidden = !ui.zoom;
  if (ui.pinned !== null) pin(ui.pinned); else hover(hover.x ?? null);
}

function viewCurves(view) {
  const search = el("input", {type: "search", id: "filter", placeholder: "filter metrics  ( / )", ariaLabel: "Filter metrics", value: ui.filter, oninput: event => { ui.filter = event.target.value; refreshCurves(); }});
  const smoothness = el("input", {type: "range", min: 1, max: 50, value: ui.smooth, ariaLabel: "Steps of the running mean", oninput: event => { ui.smooth = Number(event.target.value); refreshCurves(); }});
  const axes = el("select", {id: "axis", onchange: event => { ui.x = event.target.value; ui.zoom = null; refreshCurves(); remember(); }}, ["step", "hours", "tokens"].map(x => el("option", {value: x, selected: ui.x === x}, x)));
  view.append(el("div", {className: "bar"}, search, el("label", {}, "running mean of ", smoothness, el("span", {className: "num", id: "smoothed"}), " steps"), el("label", {}, "by ", axes),
    el("button", {type: "button", id: "whole", onclick: () => { ui.zoom = null; refreshCurves(); }}, "whole run"),
    el("span", {className: "soft"}, "drag to zoom, click to pin a step")), el("section", {className: "charts", id: "charts"}));
  refreshCurves();
}
