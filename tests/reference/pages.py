# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with planted records for the page, and a headless browser that shows it."""

from __future__ import annotations

import html
import json
import math
import shutil
import subprocess

import numpy as np
import pytest

from qarl_jax.loss.common.diagnostics import EDGES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")

HOSTILE = "</script><img src=x onerror=console.error('owned')> & \"'\u202e \x00\ud800\x1b[31m\n{{ 7*7 }}"


def sample(step, texts, fates, advantage=1.0, **more):
    """A record of samples.jsonl whose numbers differ from token to token."""
    n = len(texts)
    at = np.arange(n) / max(n - 1, 1)
    columns = {
        "text": list(texts),
        "rollout": [-0.1 - 7.0 * float(x) for x in at],
        "old": [-0.2 - 7.0 * float(x) for x in at],
        "now": [-0.3 - 7.0 * float(x) for x in at],
        "ratio": [math.exp(0.05 * (2 * float(x) - 1)) for x in at],
        "mismatch": [math.exp(0.2 * (1 - 2 * float(x))) for x in at],
        "weight": [0.0 if fate == 3 else 0.9 for fate in fates],
        "gain": [0.0 if fate else 0.9 for fate in fates],
        "fate": list(fates),
    }
    cut = {name: fates.count(i) for i, name in enumerate(("kept", "above", "below", "rejected", "no signal")) if i}
    return {
        "step": step,
        "uid": f"task/{step}",
        "prompt": "2+2=",
        "response": "".join(texts),
        "answer": "4",
        "reward": 1.0,
        "finish_reason": "stop",
        "response_len": n,
        "policy_version": step,
        "advantage": advantage,
        "update": 2,
        "updates": 4,
        "seq_ratio": 1.0123,
        "seq_mismatch": 0.98,
        "cut": {name: count for name, count in cut.items() if count},
        "tokens": columns,
    } | more


SAMPLES = [
    sample(0, ["so", " we", " get", " 4", "<eos>"], [0, 0, 0, 0, 0]),
    sample(0, ["wait", ",", " wait"], [1, 1, 1], advantage=-0.5),
    sample(5, ["a", " b", " c", " d"], [0, 2, 3, 0], advantage=-0.25),
    sample(5, ["x", "y"], [4, 4], advantage=0.0),
    sample(9, [HOSTILE, "", "🙂"], [0, 1, 0], uid=HOSTILE, prompt=HOSTILE, answer=HOSTILE, response=HOSTILE),
]


def write_run(path, samples=(), steps=10):
    path.mkdir(parents=True)
    records = [
        {"step": s, "reward/mean": 0.2 + s / 20, "entropy/mean": 1.0 - s / 20, "mismatch/k3": 10.0 ** (-s)}
        for s in range(steps)
    ]
    for record in records:
        record |= {f"time/{phase}_s": 1.0 for phase in ("rollout", "update")} | {
            "time/step_s": 2.5,
            "time/other_s": 0.5,
        }
    records[-1]["eval/reward/mean"] = 0.625
    counts = {"eval/prompts": 8.0, "eval/different_prompts": 6.0, "eval/responses": 32.0}
    interval = {"eval/reward/low": 0.25, "eval/reward/high": 0.875}
    evals = [
        {"version": 0, "eval/reward/mean": 0.125},
        {"version": steps, "eval/reward/mean": 0.625} | counts | interval,
    ]
    config = {"quant": {"forward": "bf16", "rollout": "w4a16"}, "model": {"path": "models/<tiny>"}}
    config["loss"] = {"name": "tbpo", "clip_high": 0.008, "aggregation": "seq-mean-token-mean"}
    start = {"command": ["train.py", "--config", "x.yaml"], "git": "abc", "devices": ["cpu:0"], "parameters": 2005760}
    (path / "run.json").write_text(json.dumps({"config": config, "starts": [start]}))
    (path / "config.yaml").write_text("seed: 3  # <b>\n")
    empty = [0] * (len(EDGES) + 1)
    counts = {
        f"hist/{kind}_{sign}": [*empty[:60], 10, *empty[61:]]
        for kind in ("seq_ratio", "ratio")
        for sign in ("pos", "neg")
    }
    pictures = [{"step": s, **counts, "flips/attn.q": [0.01, 0.02], "flips/mlp.up": [0.03, None]} for s in range(steps)]
    spans = [["rollout", 0.0, 1.0], ["beside/reward", 0.5, 1.5], ["update", 1.0, 2.0]]
    timeline = [{"step": s, "seconds": 2.5, "ended": 1e9 + s, "spans": spans} for s in range(steps)]
    files = {"metrics": records, "eval": evals, "samples": samples, "histograms": pictures, "timeline": timeline}
    for name, lines in files.items():
        if lines:
            (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def browse(url, folder, *flags, budget=3000):
    """(DOM after scripts, console lines) of a page; the clock of its timers runs `budget` ms ahead."""
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", "--enable-logging=stderr", f"--virtual-time-budget={budget}"),
            *("--window-size=1400,1600", f"--user-data-dir={folder / 'profile'}", *flags, url),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


HELPERS = """
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const set = (id, value) => {
  $(id).value = value;
  $(id).dispatchEvent(new Event($(id).tagName === "SELECT" ? "change" : "input"));
};
const until = async fits => { while (!fits()) await new Promise(done => setTimeout(done, 20)); };
const tokenSpans = () => [...document.querySelectorAll(".tokens .t")];
const paintedBytes = canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const say = value => {
  const output = Object.assign(document.createElement("output"), {id: "said", textContent: JSON.stringify(value)});
  document.body.append(output);
};
"""


def with_script(page, script):
    """A page that runs `script` once its own has run; what it returns stands in `<output id="said">` as JSON."""
    return page.replace("</body>", f"<script>{HELPERS}(async () => {{ {script} }})().then(say);</script></body>")


def said(dom):
    """The value that a script returned."""
    text = dom[dom.index('<output id="said">') + len('<output id="said">') :].split("</output>")[0]
    return json.loads(html.unescape(text))
