// Views, keys, and the way to the server of a live page.

const VIEWS = {curves: ["Curves", viewCurves, ["metrics", "eval"]], time: ["Time", viewTime, ["metrics", "timeline"]],
  band: ["Band", viewBand, ["band"]], mismatch: ["Mismatch", viewMismatch, ["positions", "band"]], codes: ["Codes", viewCodes, ["flips"]],
  samples: ["Samples", viewSamples, ["samples"]], settings: ["Settings", viewSettings, ["about"]]};

function draw() {
  const view = $("view"), scroll = scrollY;
  view.replaceChildren();
  drawn.length = 0;
  VIEWS[ui.view][1](view);
  for (const button of $("tabs").children) button.setAttribute("aria-selected", String(button.dataset.view === ui.view));
  scrollTo(scrollX, scroll);
}

function go(view, filters) {
  ui.view = view;
  if (filters) Object.assign(choice, {steps: "", sign: "", fate: "", finish: "", run: "", query: "", found: null}, filters);
  tip(null);
  draw();
  remember();
}

// The address names the view and the filters of the samples, so that a state can be sent to somebody.
function remember() {
  const words = new URLSearchParams(ui.view === "curves" ? {} : {view: ui.view});
  if (ui.view === "samples") for (const key of ["shade", "run", "steps", "sign", "fate", "finish", "query", "sort"])
    if ((key === "shade" ? ui.shade : choice[key]) && !(key === "shade" && ui.shade === "ratio") && !(key === "sort" && choice.sort === "newest")) words.set(key, key === "shade" ? ui.shade : choice[key]);
  if (ui.x !== "step") words.set("x", ui.x);
  history.replaceState(null, "", `${location.pathname}${[...words].length ? `#${words}` : ""}`);
}

function recall() {
  const words = new URLSearchParams(location.hash.slice(1)), get = key => words.get(key);
  if (get("shade") in SHADES) ui.shade = get("shade");
  for (const key of ["run", "sign", "fate", "finish", "query", "steps", "sort"]) if (get(key)) choice[key] = get(key);
  if (get("step")) choice.steps = get("step");
  if (get("dropped") === "1") choice.fate = "dropped";
  if (["hours", "tokens"].includes(get("x"))) ui.x = get("x");
  const wantsSamples = ["shade", "sign", "step", "steps", "dropped", "run", "fate", "query"].some(get);
  ui.view = get("view") in VIEWS ? get("view") : wantsSamples ? "samples" : "curves";
}

// ---- the table of runs ----------------------------------------------------------------------------------------------

function sparkline(values, run) {
  const some = values.slice(-200), low = Math.min(...some), span = Math.max(...some) - low || 1;
  const d = some.map((v, i) => `${i ? "L" : "M"}${(2 + 106 * i / Math.max(1, some.length - 1)).toFixed(1)} ${(20 - 18 * (v - low) / span).toFixed(1)}`).join("");
  return svg("svg", {viewBox: "0 0 110 22", class: `run${run.color}`, "aria-hidden": "true"}, svg("path", {class: "curve", d}));
}

function left(run) {
  const total = run.about.total, seconds = mean((run.values["time/step_s"] || []).slice(-20).filter(x => x !== null));
  if (!total || !run.steps.length) return "";
  const more = total - 1 - last(run.steps);
  return more <= 0 ? "done" : DATA.live && seconds && Date.now() / 1000 - run.written < Math.max(120, 10 * seconds) ? `${duration(more * seconds)} left` : "";
}

function runTable() {
  const rows = runs.map(run => {
    const of = name => points(run, name).y, reward = of("reward/mean"), held = run.eval.filter(e => "eval/reward/mean" in e);
    const evalText = held.length ? held.length > 1 ? `${number(held[0]["eval/reward/mean"], 3)} → ${number(last(held)["eval/reward/mean"], 3)}` : number(held[0]["eval/reward/mean"], 3) : "–";
    const range = held.length && "eval/reward/low" in last(held) ? `95 %: ${number(last(held)["eval/reward/low"], 3)} to ${number(last(held)["eval/reward/high"], 3)}` : null;
    const exact = last(of("mismatch/exact")), total = run.about.total;
    const cells = [
      el("td", {}, el("label", {title: "Show or hide"}, el("input", {type: "checkbox", checked: !ui.hidden.has(run.name), onchange: event => {
        event.target.checked ? ui.hidden.delete(run.name) : ui.hidden.add(run.name); table(); draw(); }}), el("i", {className: `swatch run${run.color}`}), run.name)),
      run.steps.length ? `${last(run.steps)}${total ? ` of ${total - 1}` : ""}` : "none yet", left(run),
      reward.length ? el("span", {}, `${number(mean(reward.slice(0, 5)), 3)} → ${number(mean(reward.slice(-5)), 3)} `, sparkline(smooth(reward, 5), run)) : "–",
      el("span", {title: range || ""}, evalText), number(last(of("mismatch/k3")), 2), exact === null ? "–" : percent(exact),
      percent(last(of("later/clip/seq_dropped")) ?? last(of("clip/seq_dropped")) ?? last(of("clip/frac"))), number(last(of("time/step_s")), 3), number(Math.round(last(of("time/tok_per_s")))),
    ];
    return el("tr", {className: ui.hidden.has(run.name) ? "off" : ""}, cells.map((cell, i) => i ? el("td", {}, cell) : cell));
  });
  const heads = ["run", "step", "", "reward, first and last 5 steps", "held out", "k3", "equal tokens", "dropped", "s / step", "tokens / s"];
  return el("div", {className: "scroll"}, el("table", {className: "runs"}, el("thead", {}, el("tr", {}, heads.map(head => el("th", {}, head)))), el("tbody", {}, rows)));
}

function table() {
  const errors = runs.filter(run => run.error).map(run => el("p", {className: "problem"}, `${run.name}: ${run.error}`));
  $("runs").replaceChildren(runTable(), ...errors);
}

function viewSettings(view) {
  const all = [...new Set(runs.flatMap(run => Object.keys(run.about.settings)))];
  const differ = all.filter(key => key !== "run_dir" && new Set(runs.map(run => run.about.settings[key])).size > 1);
  const grid = (keys, value) => el("div", {className: "scroll"}, el("table", {className: "settings"}, el("thead", {}, el("tr", {}, el("th"), runs.map(run => el("th", {}, el("i", {className: `swatch run${run.color}`}), " ", run.name)))),
    el("tbody", {}, keys.map(key => el("tr", {}, el("td", {}, key), runs.map(run => el("td", {}, value(run, key))))))));
  const labels = [...new Set(runs.flatMap(run => run.about.rows.map(([label]) => label)))];
  view.append(el("h2", {}, "Runs"), grid(labels, (run, label) => (run.about.rows.find(row => row[0] === label) || ["", "–"])[1]));
  if (runs.length > 1) view.append(el("h2", {}, `Settings that differ (${differ.length})`), differ.length ? grid(differ, (run, key) => run.about.settings[key] ?? "–") : el("p", {className: "soft"}, "None."));
  for (const run of runs) if (run.about.config) view.append(el("h2", {}, `config.yaml of ${run.name}`), el("pre", {}, run.about.config));
}

// ---- keys -----------------------------------------------------------------------------------------------------------

const KEYS = [["1 … 7", "views"], ["/", "filter metrics, or search samples"], ["j  k", "next and previous sample"], ["←  →", "tokens of a sample; steps of a chart or timeline"],
  ["n  p", "next and previous token that stands out"], ["s", "next shading"], ["t", "light or dark"], ["Esc", "let go of a step or token"], ["?", "this list"]];

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  draw();
}

function help() {
  const box = $("help");
  if (box.open) return box.close();
  box.replaceChildren(el("table", {}, KEYS.map(([key, what]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what)))), el("button", {type: "button", onclick: () => box.close()}, "close"));
  box.showModal();
}

document.addEventListener("keydown", event => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName) && document.activeElement.type !== "checkbox" && document.activeElement.type !== "range";
  if (event.key === "Escape") { if (typing) document.activeElement.blur(); pin(null); tip(null); if (ui.view === "samples") keep(null); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const views = Object.keys(VIEWS), at = Number(event.key);
  if (at >= 1 && at <= views.length) return go(views[at - 1]);
  if (event.key === "/") { event.preventDefault(); if (!$("filter") && !$("query")) go("curves"); ($("query") || $("filter")).focus(); return; }
  if (event.key === "t") return theme();
  if (event.key === "?") return help();
  if (ui.view === "samples") sampleKey(event);
  else if (ui.view === "time") timeKey(event);
});

// ---- start, and the server ------------------------------------------------------------------------------------------

let have = [], failures = 0;

async function ask(path, words) {
  const answer = await fetch(`${path}?${new URLSearchParams(words)}`);
  if (!answer.ok) throw Error(await answer.text());
  return answer.json();
}

async function poll() {
  let more = false;
  try {
    if (!document.hidden || !have.length) {
      const {runs: parts, have: now} = await ask("data", {have: JSON.stringify(have)});
      const changed = apply(parts);
      more = parts.some(part => part.more);
      have = now;
      failures = 0;
      update(changed);
    }
    const written = Math.max(...runs.map(run => run.written || 0));
    $("state").className = "live";
    $("state").textContent = written ? `last step ${duration(Math.max(0, Date.now() / 1000 - written))} ago` : "waiting for the first step";
  } catch (error) {
    failures += 1;
    $("state").className = "lost";
    $("state").textContent = failures > 1 ? "the server does not answer" : "…";
  }
  setTimeout(poll, more ? 0 : Math.min(2000 * 2 ** Math.min(failures, 4), 30000));
}

function update(changed) {
  if (!changed.size) return;
  table();
  if (update.runs !== runs.length) { update.runs = runs.length; return draw(); }  // the first answer
  if (ui.view === "samples") return changed.has("samples") && arrived();
  if (!VIEWS[ui.view][2].some(name => changed.has(name)) || ui.dragging) return;
  if (ui.view === "curves") refreshCurves(); else draw();
}

Object.entries(VIEWS).forEach(([view, [title]], i) => $("tabs").append(el("button", {type: "button", role: "tab", title: `key ${i + 1}`, onclick: () => go(view)}, title)));
[...$("tabs").children].forEach((button, i) => { button.dataset.view = Object.keys(VIEWS)[i]; });
$("theme").addEventListener("click", theme);
$("keys").addEventListener("click", help);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("hashchange", () => { recall(); draw(); });
recall();
if (DATA.live) {
  history.replaceState(null, "", location.pathname + location.hash);  // the token is a cookie by now
  poll();
} else {
  apply(DATA.runs);
  $("state").textContent = "report";
}
table();
draw();
