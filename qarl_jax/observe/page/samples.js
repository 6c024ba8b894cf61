// Samples: a list of any length, and one of them token by token.

const SHADES = {ratio: "importance ratio", mismatch: "learner / sampler", weight: "mismatch weight", push: "push of the loss",
  rollout: "sampler's probability", old: "learner's probability", fate: "clipped or dropped"};
const SORTS = {newest: ["newest first", (a, b) => b.step - a.step || a.run - b.run || a.at - b.at], oldest: ["oldest first", (a, b) => a.step - b.step || a.run - b.run || a.at - b.at],
  reward: ["reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)], advantage: ["|advantage|", (a, b) => Math.abs(b.advantage ?? 0) - Math.abs(a.advantage ?? 0)],
  ratio: ["response ratio, off 1", (a, b) => off(b.ratio) - off(a.ratio)], mismatch: ["mismatch", (a, b) => off(b.mismatch) - off(a.mismatch)],
  dropped: ["dropped tokens", (a, b) => b.dropped - a.dropped], length: ["length", (a, b) => (b.length ?? 0) - (a.length ?? 0)]};
const FATES = {above: "dropped above the band", below: "dropped below the band", rejected: "rejected by its weight", "no signal": "no signal: A = 0"};
const off = x => x > 0 ? Math.abs(Math.log(x)) : -1;
const ROW = 54, SURPRISED = Math.log(1e-3);

const choice = {run: "", steps: "", sign: "", fate: "", finish: "", query: "", sort: "newest", found: null};
let rows = [], selected = null, detail = null, token = null, kept = false, scales = {};

const sampledSteps = () => [...new Set(shown().flatMap(run => run.samples.map(row => row.step)))].sort((a, b) => a - b);
const nearestSampled = step => { const steps = sampledSteps(); return steps.length ? steps[nearest(steps, step)] : step; };

function chosen() {
  const found = /^\s*(\d+)\s*(?:(?:-|–|to|\.\.)\s*(\d+))?\s*$/.exec(choice.steps), low = found ? Number(found[1]) : -Infinity, high = found ? Number(found[2] ?? found[1]) : Infinity;
  const out = [];
  for (const run of runs) {
    if (ui.hidden.has(run.name) || (choice.run !== "" && Number(choice.run) !== run.index)) continue;
    for (const row of run.samples) {
      if (row.step < low || row.step > high || (choice.sign && row.sign !== choice.sign)) continue;
      if (choice.fate && !(choice.fate === "dropped" ? row.dropped : row.cut[choice.fate])) continue;
      if (choice.finish && row.finish !== choice.finish) continue;
      if (choice.found && !choice.found[run.index].has(row.at)) continue;
      out.push(row);
    }
  }
  return out.sort(SORTS[choice.sort][1]);
}

// A report has its samples in full, and searches by itself; a live page asks its server for both.
async function search() {
  const query = choice.query.trim();
  choice.found = null;
  if (query && DATA.live) {
    const lists = await ask("find", {q: query});
    if (query !== choice.query.trim()) return;
    choice.found = lists.map(list => new Set(list));
  } else if (query) {
    const wanted = query.toLowerCase(), fits = ({full}) => [full.uid, full.prompt, full.response, full.answer].some(text => text.toLowerCase().includes(wanted));
    choice.found = runs.map(run => new Set(run.samples.filter(fits).map(row => row.at)));
  }
}

async function fetchFull(row) {
  if (!row.full) row.full = await ask("sample", {run: row.run, at: row.at});
  return row.full;
}

function viewSamples(view) {
  const option = ([value, text], now) => el("option", {value, selected: value === now}, text);
  const select = (id, options) => el("select", {id, onchange: event => { choice[id] = event.target.value; filtered(); }}, options.map(one => option(one, choice[id])));
  let waiting = null;
  const query = el("input", {type: "search", id: "query", placeholder: "text  ( / )", ariaLabel: "Text of prompt, response, answer or uid", value: choice.query, oninput: event => {
    choice.query = event.target.value;
    clearTimeout(waiting);
    waiting = setTimeout(async () => { await search(); filtered(); }, 200);
  }});
  view.append(el("form", {className: "bar", id: "bar", autocomplete: "off", onsubmit: event => event.preventDefault()},
    el("label", {}, "shade by ", el("select", {id: "shade", onchange: event => { ui.shade = event.target.value; shade(); remember(); }}, Object.entries(SHADES).map(one => option(one, ui.shade)))),
    runs.length > 1 && el("label", {}, "run ", select("run", [["", "all"], ...runs.map(run => [String(run.index), run.name])])),
    el("label", {}, "steps ", el("input", {id: "steps", size: 7, placeholder: "12 or 3-9", value: choice.steps, oninput: event => { choice.steps = event.target.value; filtered(); }})),
    el("label", {}, "advantage ", select("sign", [["", "all"], ["pos", "A > 0"], ["neg", "A < 0"], ["zero", "A = 0"]])),
    el("label", {}, "fate ", select("fate", [["", "all"], ["dropped", "tokens dropped"], ["above", "above the band"], ["below", "below the band"], ["rejected", "rejected"], ["no signal", "no signal"]])),
    el("label", {}, "ended ", select("finish", [["", "all"], ["stop", "by itself"], ["length", "cut off"], ["abort", "aborted"]])),
    el("label", {}, "sort ", select("sort", Object.entries(SORTS).map(([key, [text]]) => [key, text]))), query,
    el("span", {id: "count", role: "status", className: "soft num"}), el("div", {className: "legend", id: "legend"})),
    el("div", {className: "samples"}, el("div", {id: "list", role: "listbox", tabindex: 0, ariaLabel: "Samples", onscroll: paint}, el("div", {id: "rows"})), el("div", {id: "sample"})));
  measure();
  shade();
  if (choice.query && !choice.found) search().then(filtered);
  filtered();
}

function filtered() {
  rows = chosen();
  const all = runs.reduce((sum, run) => sum + run.samples.length, 0);
  $("count").textContent = `${rows.length} of ${all} samples`;
  $("rows").style.height = `${rows.length * ROW}px`;
  const at = rows.indexOf(selected);
  paint();
  if (!rows.length) {
    $("sample").replaceChildren(el("p", {className: "empty"}, all ? "No sample fits." : "No run has samples.jsonl: nothing was sampled yet, or log.samples_per_step was 0."));
    selected = detail = null;
  } else if (at < 0) open(rows[0]);
  else if (!detail || !$("sample").firstChild) open(selected);
  remember();
}

// New samples came: the list grows around what is being read.
function arrived() {
  const list = $("list"), first = rows[Math.floor(list.scrollTop / ROW)], within = list.scrollTop % ROW, atTop = list.scrollTop < ROW;
  measure();
  if (selected && !runs[selected.run].samples.includes(selected)) selected = null;
  filtered();
  if (!atTop && first) { const now = rows.indexOf(first); if (now >= 0) list.scrollTop = now * ROW + within; }
}

function paint() {
  const list = $("list"), from = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), to = Math.min(rows.length, from + Math.ceil(list.clientHeight / ROW) + 8);
  $("rows").replaceChildren(...rows.slice(from, to).map((row, i) => {
    const cut = Object.keys(row.cut).find(fate => fate !== "no signal");
    return el("div", {className: `row run${runs[row.run].color}`, role: "option", style: `top:${(from + i) * ROW}px`, ariaSelected: String(row === selected), onclick: () => open(row)},
      el("div", {className: "top-line"}, el("b", {}, `step ${row.step}`), el("span", {className: row.reward > 0 ? "plus" : ""}, `reward ${number(row.reward, 3)}`),
        row.advantage === null ? null : el("span", {}, `A ${number(row.advantage, 3)}`), cut && el("span", {className: "mark"}, cut === "rejected" ? "rejected" : `dropped ${cut}`),
        el("span", {className: "soft"}, `${row.length ?? "?"} tokens${row.finish === "length" ? " …" : ""}`)),
      el("div", {className: "head"}, row.head || row.uid));
  }));
}

function open(row, {scroll = true} = {}) {
  selected = row;
  kept = false;
  token = null;
  if (scroll) {
    const list = $("list"), top = rows.indexOf(row) * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  }
  paint();
  fetchFull(row).then(full => { if (selected === row && $("sample")) show(row, full); }, error => $("sample").replaceChildren(el("p", {className: "problem"}, String(error.message || error))));
}

// Full colour is at the 95th percentile of what is on record; what is smaller than 1e-3 is noise and stays pale.
function measure() {
  const strong = runs.flatMap(run => run.samples.map(row => row.strong).filter(Boolean));
  const at = i => { const sorted = strong.map(one => one[i]).sort((a, b) => a - b); return Number(Math.max(sorted[Math.floor(0.95 * (sorted.length - 1))] || 0, 1e-3).toPrecision(2)); };
  scales = {ratio: at(0), mismatch: at(1), weight: at(2), push: at(3)};
}

// A quantity in [-1, 1]: how strong its colour is, and which. Probabilities: surprise, in [0, 1].
function strength(full, i) {
  const key = ui.shade, value = key === "fate" ? full.fates[i] : (full.columns[key] || [])[i];
  if (value === null || value === undefined) return 0;
  if (key === "fate") return {above: 1, below: -1, rejected: 1}[value] || 0;
  if (key === "push") return clip(value / scales.push, -1, 1);
  if (key === "rollout" || key === "old") return clip(value / SURPRISED, 0, 1);
  return clip(Math.log(value) / scales[key], -1, 1) || 0;
}
const hue = (full, i, x) => ui.shade === "rollout" || ui.shade === "old" || (ui.shade === "fate" && full.fates[i] === "rejected") ? "one" : x > 0 ? "up" : "down";

function show(row, full) {
  const said = (label, value, title) => value === null || value === undefined ? null : el("span", {title}, label, " ", el("b", {}, typeof value === "number" ? number(value) : value));
  const badges = Object.entries(full.cut).map(([fate, count]) => el("span", {className: `badge${fate === "no signal" ? " off" : ""}`}, FATES[fate] + (count === full.length ? "" : `: ${count} of ${full.length} tokens`)));
  const turns = full.turns.filter(turn => turn.tokens).map(turn => `${turn.tokens} tokens (reward ${number(turn.reward)})`).join(", ");
  const body = full.tokens.length ? tokensOf(full) : el("div", {className: "text"}, full.turns.length ? full.turns.flatMap(turn => [turn.text, turn.observation && el("span", {className: "observed"}, turn.observation)]) : full.response);
  detail = {row, full, spans: [...body.querySelectorAll(".t")]};
  const strip = el("canvas", {className: "strip", role: "img", ariaLabel: "Tokens of the response, by the quantity that shades them"});
  strip.addEventListener("pointermove", event => point(stripAt(event), false));
  strip.addEventListener("click", event => { const i = stripAt(event); keep(i); detail.spans[i].scrollIntoView({block: "nearest"}); });
  const same = runs.flatMap(run => run.samples.filter(one => one.uid === row.uid && one.uid)).sort((a, b) => a.step - b.step);
  $("sample").replaceChildren(el("article", {className: `run${runs[row.run].color}`, ariaLabel: `step ${row.step}, ${row.uid}`},
    el("header", {}, el("span", {}, el("b", {}, `step ${row.step}`), runs.length > 1 ? ` · ${runs[row.run].name}` : ""), said("reward", full.reward), said("advantage", full.advantage),
      said("response ratio", full.ratio, "Geometric mean of the tokens' ratios: learner when the update was made / at the start of the step"),
      said("learner / sampler", full.mismatch, "Geometric mean over the tokens: learner at the start of the step / sampler"),
      full.update ? el("span", {title: full.update === 1 ? "Nothing had moved yet: every ratio is 1 but for rounding" : null}, "update ", el("b", {}, full.update), ` of ${full.updates}`) : null,
      el("span", {}, `${full.length} tokens, ${full.finish}`), turns && el("span", {}, `turns: ${turns}`), badges, el("span", {}, full.uid)),
    el("div", {className: "text prompt", title: "prompt"}, full.prompt),
    el("div", {className: "detail"}, el("div", {}, full.tokens.length ? strip : null, body,
      full.tokens.length ? null : el("div", {className: "soft"}, `${full.advantage === null ? "not trained on, or " : ""}no numbers recorded for its tokens`),
      full.answer ? el("div", {className: "soft"}, "expected: ", el("span", {className: "text"}, full.answer)) : null,
      same.length > 1 ? el("div", {className: "same"}, el("span", {className: "soft"}, "the same prompt:"), same.slice(0, 30).map(one => el("button", {type: "button", className: `run${runs[one.run].color}`, ariaPressed: String(one === row), onclick: () => open(one)}, `step ${one.step}: ${number(one.reward, 3)}`))) : null),
      full.tokens.length ? el("aside", {id: "panel", ariaLive: "polite"}) : null)));
  shade();
  point(null);
}

function tokensOf(full) {
  const body = el("div", {className: "text tokens", tabindex: 0, ariaLabel: `response, ${full.tokens.length} tokens`}), [at, left] = full.left_out;
  const seen = i => full.observed[i] ? el("span", {className: "observed", title: "observed: said by the environment, not trained on"}, full.observed[i]) : null;
  full.tokens.forEach((text, i) => {
    if (left && i === at) body.append(el("span", {className: "gap"}, ` … ${left} tokens left out … `));
    const before = seen(i);
    if (before) body.append(before);
    body.append(el("span", {className: `t${full.fates[i] === "kept" ? "" : ` ${full.fates[i].replace(" ", "-")}`}`}, text));
  });
  const after = seen(full.tokens.length);
  if (after) body.append(after);
  const which = event => { const t = event.target.closest(".t"); return t ? detail.spans.indexOf(t) : null; };
  body.addEventListener("pointerover", event => { const i = which(event); if (i !== null) point(i, false); });
  body.addEventListener("click", event => keep(which(event)));
  return body;
}

function shade() {
  if (!$("legend")) return;
  const over = x => `÷${number(Math.exp(x))}`, times = x => `×${number(Math.exp(x))}`, ramp = (kind, low, high) => [low, el("i", {className: `ramp ${kind}`}), high];
  const around = key => ramp("two", over(scales[key]), times(scales[key]));
  const words = {ratio: () => ["learner when updated / at the start of the step: ", ...around("ratio")], mismatch: () => ["learner at the start of the step / sampler: ", ...around("mismatch")],
    weight: () => ["correction w in the loss: ", ...around("weight")], push: () => ["advantage × gain: ", ...ramp("two", `pushed down ${scales.push}`, `up ${scales.push}`)],
    rollout: () => ["probability: ", ...ramp("sole", "1", "0.001 or less")], old: () => ["probability: ", ...ramp("sole", "1", "0.001 or less")], fate: () => ["as marked:"]}[ui.shade]();
  $("legend").replaceChildren(el("span", {}, words), ...[["above", "overline", " dropped above the band"], ["below", "underline", " dropped below it"], ["rejected", "struck", " rejected: weight 0"], ["no-signal", "dotted", " no signal: A = 0"]]
    .map(([name, look, text]) => el("span", {}, el("span", {className: `t ${name}`}, look), text)));
  if (!detail || !detail.full.tokens.length) return;
  const {full, spans} = detail;
  spans.forEach((span, i) => {
    const x = strength(full, i), alpha = Math.abs(x) < 0.02 ? 0 : 6 + 70 * Math.abs(x);
    span.classList.remove("up", "down", "one");
    span.style.setProperty("--a", alpha.toFixed(0));
    if (alpha) span.classList.add(hue(full, i, x));
  });
  drawStrip();
}

function drawStrip() {
  const canvas = $("sample") && $("sample").querySelector(".strip");
  if (!canvas || !detail) return;
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 600, height = 46, {full} = detail, n = full.tokens.length;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const paint2d = canvas.getContext("2d"), tones = {up: color("up"), down: color("down"), one: color("one")}, sided = !(ui.shade === "rollout" || ui.shade === "old");
  paint2d.scale(ratio, ratio);
  const base = sided ? height / 2 : height, reach = sided ? height / 2 : height;
  paint2d.fillStyle = color("line");
  paint2d.fillRect(0, base - 0.5, width, 1);
  for (let i = 0; i < n; i++) {
    const x = strength(full, i);
    paint2d.fillStyle = tones[hue(full, i, x)];
    paint2d.fillRect(i / n * width, x > 0 ? base - x * reach : base, Math.max(1, width / n - (width / n > 4 ? 1 : 0)), Math.abs(x) * reach);
  }
  if (token !== null) { paint2d.strokeStyle = color("focus"); paint2d.lineWidth = 1.5; paint2d.strokeRect(token / n * width, 0.5, Math.max(2, width / n), height - 1); }
}

const stripAt = event => { const box = event.target.getBoundingClientRect(), n = detail.full.tokens.length; return clip(Math.floor((event.clientX - box.left) / box.width * n), 0, n - 1); };

function keep(i) {
  if (i === null || i === undefined || (kept && token === i)) { kept = false; return; }
  kept = true;
  point(i, true);
}

function point(i, force = true) {
  if (kept && !force) return;
  const panel = $("panel");
  if (!panel || !detail) return;
  if (token !== null && detail.spans[token]) detail.spans[token].classList.remove("on");
  token = i;
  drawStrip();
  if (i === null) return panel.replaceChildren(el("h3", {}, "Token"), el("p", {className: "soft"}, "Point at a token; click to keep it. ← → go from token to token, n and p to those that stand out."));
  const {full, spans} = detail, c = full.columns, of = key => (c[key] || [])[i];
  const chance = x => x === null || x === undefined ? "–" : `${number(Math.exp(x), 3)}  (${number(x)})`;
  const lines = [["sampler p (log)", chance(of("rollout"))], ["learner, start", chance(of("old"))], ["learner, updated", chance(of("now"))], ["ratio", number(of("ratio"), 6)],
    ["learner / sampler", number(of("mismatch"), 6)], ["weight w", number(of("weight"), 6)], ["gain", number(of("gain"), 6)], ["push", number(of("push"), 6)], ["the loss", {...FATES, kept: "kept", rejected: "rejected: weight 0"}[full.fates[i]]]];
  spans[i].classList.add("on");
  panel.replaceChildren(el("h3", {}, `Token ${i + 1} of ${full.tokens.length}`), el("span", {className: "token"}, full.tokens[i]), el("table", {}, lines.map(([label, value]) => el("tr", {}, el("td", {}, label), el("td", {}, value)))));
}

function sampleKey(event) {
  const by = {j: 1, k: -1, ArrowDown: 1, ArrowUp: -1}[event.key], inTokens = document.activeElement.closest && document.activeElement.closest(".tokens");
  if (by && rows.length && !(event.key.startsWith("Arrow") && inTokens)) {
    event.preventDefault();
    return open(rows[clip(rows.indexOf(selected) + by, 0, rows.length - 1)]);
  }
  if (event.key === "s") {
    const all = Object.keys(SHADES);
    ui.shade = $("shade").value = all[(all.indexOf(ui.shade) + 1) % all.length];
    remember();
    return shade();
  }
  if (!detail || !detail.full.tokens.length) return;
  const n = detail.full.tokens.length, step = {ArrowRight: 1, ArrowLeft: -1, n: 1, p: -1}[event.key];
  if (!step) return;
  event.preventDefault();
  let next = token === null ? (step > 0 ? 0 : n - 1) : token + step;
  if (event.key === "n" || event.key === "p") while (next >= 0 && next < n && Math.abs(strength(detail.full, next)) < 0.5) next += step;
  if (next < 0 || next >= n) return;
  kept = false;
  keep(next);
  detail.spans[next].scrollIntoView({block: "nearest"});
}
