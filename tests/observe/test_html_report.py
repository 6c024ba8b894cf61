# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The report says what the files say, escapes what the policy wrote, and works in a real browser.

The browser is a headless Chromium; where there is none on PATH those tests are skipped (Debian: apt-get install
chromium).
"""

import html.parser
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest

from qarl_jax import plot
from qarl_jax.observe import html_report
from qarl_jax.types import UserError

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
    for name, lines in (("metrics", records), ("eval", evals), ("samples", samples)):
        if lines:
            (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def page_of(*runs, steps=12):
    loaded = plot.load_runs(runs)
    names = {run.name: path for run, path in zip(loaded, runs, strict=True)}
    return html_report.render(names, plot.charts(loaded), steps=steps)


class Page(html.parser.HTMLParser):
    """What a reader of the page sees: tags with their attributes, text of tokens, the data block."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tokens, self.data, self.text = [], [], "", ""
        self._into = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "div" and "tokens" in (attrs.get("class") or ""):
            self.tokens.append([])
        if tag == "span" and (attrs.get("class") or "").split()[:1] == ["t"] and self.tokens:
            self.tokens[-1].append({"text": "", **attrs})
            self._into = self.tokens[-1][-1]
        elif tag == "script":
            self._into = {"json": attrs.get("type") == "application/json"}

    def handle_endtag(self, tag):
        if tag in ("span", "script"):
            self._into = None

    def handle_data(self, text):
        if self._into is None:
            self.text += text
        elif "text" in self._into:
            self._into["text"] += text
        elif self._into["json"]:
            self.data += text

    def articles(self):
        return [attrs for tag, attrs in self.tags if tag == "article"]


# ---- content ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "tbpo", SAMPLES)


def test_the_head_of_a_run_says_what_ran_and_what_came_of_it(run):
    said = Page(page_of(run)).text
    for part in (
        *(
            "tbpo",
            "train --config x.yaml",
            "models/<tiny>, 2,005,760 parameters",
            "bf16; sampler w4a16",
            "abc",
            "cpu:0",
        ),
        *(
            "tbpo (clip_high 0.008)",
            "0.300 (first five steps) → 0.550 (last five)",
            "0.125 → 0.625 (95 %: 0.250 to 0.875; 8 prompts (6 different) x 4 samples)",
            "seed: 3  # <b>",
        ),
    ):
        assert part in said, part


def test_every_sample_shows_its_tokens_their_numbers_and_what_the_loss_dropped(run):
    page = Page(page_of(run))
    assert [[token["text"] for token in row] for row in page.tokens[:2]] == [
        ["so", " we", " get", " 4", "<eos>"],
        ["wait", ",", " wait"],
    ]
    classes = [[token["class"] for token in row] for row in page.tokens]
    assert classes[1] == ["t above"] * 3
    assert classes[2] == ["t", "t below", "t rejected", "t"]
    assert classes[3] == ["t no-signal"] * 2
    articles = page.articles()
    assert [a["data-step"] for a in articles] == ["0", "0", "5", "5", "9"]
    assert [a["data-sign"] for a in articles] == ["pos", "neg", "neg", "zero", "pos"]
    assert [a["data-dropped"] for a in articles] == ["0", "3", "2", "0", "1"]
    data = json.loads(page.data)
    assert [len(columns["ratio"]) for columns in data["columns"]] == [len(row) for row in page.tokens]
    assert data["columns"][2]["push"] == [-0.225, -0.0, -0.0, -0.225]
    said = page.text
    for part in ("update 2 of 4", "dropped above the band", "rejected by its weight: 1 of 4 tokens", "1.012", "-0.25"):
        assert part in " ".join(said.split()), part


def test_what_the_policy_wrote_is_text_and_nothing_else(run):
    text = page_of(run)
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    shown = page.tokens[4][0]["text"]
    # Control characters as pictures, a lone surrogate and a character that turns text around disarmed.
    assert shown == "</script><img src=x onerror=console.error('owned')> & \"'[U+202E] ␀\ufffd␛[31m↵\n{{ 7*7 }}"
    assert page.tokens[4][1]["text"] == "·"  # part of a character
    text.encode("utf-8")  # no lone surrogate is left
    assert "owned" not in page.data


def test_the_page_needs_nothing_and_may_load_nothing(run):
    text = page_of(run)
    policy = next(attrs["content"] for tag, attrs in Page(text).tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert not re.search(
        r"""(?:src|href|action)\s*=|url\(|@import|https?://""", re.sub(r"(?s)<main>.*</main>", "", text)
    )


def test_texts_without_numbers_runs_without_samples_and_several_runs(tmp_path):
    bare = {key: SAMPLES[0][key] for key in ("step", "uid", "prompt", "response", "answer", "reward")}
    old = write_run(tmp_path / "old", [bare | {"response_len": 5, "finish_reason": "length"}])
    none = write_run(tmp_path / "none")
    full = write_run(tmp_path / "full", SAMPLES)
    page = Page(page_of(old))
    assert "so we get 4<eos>" in page.text
    assert "no numbers recorded for its tokens" in page.text
    assert page.tokens == []
    assert "No run has samples.jsonl" in Page(page_of(none)).text
    both = Page(page_of(none, full, old))
    assert [a["data-run"] for a in both.articles()] == ["1"] * 5 + ["2"]
    assert ("select", {"id": "run"}) in both.tags


def test_the_steps_shown_are_spread_over_the_run(tmp_path):
    run = write_run(tmp_path / "long", [sample(step, ["a"], [0]) for step in range(101)])
    steps = [int(a["data-step"]) for a in Page(page_of(run, steps=5)).articles()]
    assert steps == [0, 25, 50, 75, 100]
    assert Page(page_of(run, steps=0)).articles() == []
    assert html_report.spread([3, 4, 5], 1) == [5]
    assert html_report.spread([3, 4], 7) == [3, 4]


def test_what_is_left_out_of_a_long_response_is_said_where_it_is_missing(tmp_path):
    record = sample(0, ["a", "b", "c", "d"], [0, 0, 0, 0])
    record["tokens"]["left_out"] = [2, 300]
    text = page_of(write_run(tmp_path / "long", [record]))
    assert re.search(r'>b</span><span class="gap"> … 300 tokens left out … </span><span class="t">c<', text)


def test_colours_are_scaled_to_what_is_there_and_noise_stays_pale():
    columns = [{"ratio": [1.0, math.exp(0.5), None, 0.0], "mismatch": [1.0 + 1e-7] * 9, "push": [-2.0, 0.0]}]
    assert html_report.scales(columns) == {
        "ratio": pytest.approx(0.475, abs=0.01),
        "mismatch": 1e-3,
        "weight": 1e-3,
        "push": 2.0,
    }
    assert html_report.scales([])["ratio"] == 1e-3


def test_curves_lie_inside_their_axes_and_ticks_are_round():
    line = html_report.Line(label="", run=0, steps=[0, 1, 2], values=[1e-6, 1e-3, 1.0])
    drawn = html_report._drawn(html_report.Chart(title="x", lines=[line], log=True))
    points = drawn["lines"][0]["points"]
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2)
    box = drawn["box"]
    assert all(box["left"] <= x <= box["right"] and 0 <= y <= box["bottom"] for x, y in points)
    assert {"1", "1e-06"} <= {label for _, label in drawn["y_ticks"]}
    assert html_report.ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    flat = html_report.Line(label="", run=0, steps=[3], values=[0.0])
    for chart in (html_report.Chart(title="x", lines=[flat], percent=True), html_report.Chart(title="x", lines=[flat])):
        assert len(html_report._drawn(chart)["y_ticks"]) > 1


def test_settings_that_changed_within_a_run_stand_beside_the_step_they_changed_at(tmp_path):
    run = write_run(tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    first, *_ = record["starts"]
    later = [{"step": step, "changed": [f"optimizer.lr 0 -> {step}"]} for step in (2, 6, 4, 4)]
    (run / "run.json").write_text(json.dumps(record | {"starts": [first, *later, {"step": 9, "changed": []}]}))
    rows = [row for row in html_report._about(run)["rows"] if row[0].startswith("from")]
    assert rows == [("from step 2", "optimizer.lr 0 -> 2"), ("from step 4", "optimizer.lr 0 -> 4")]  # 6 was made anew


def test_broken_files_and_places_are_one_sentence(tmp_path, run):
    (run / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json is not JSON"):
        page_of(run)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        html_report.write(tmp_path / "file" / "report.html", "x")


# ---- in a browser ----------------------------------------------------------------------------------------------------


def browse(page, folder, *flags, script="", state=""):
    """(DOM after scripts, console lines) of a page, with `script` run at its end."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=3000", "--window-size=1200,2000"),
            *(f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri() + state),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def colours(page):
    """Background of every token, by sample."""
    return [[token.get("style") or "" for token in row] for row in page.tokens]


def choose(field, value):
    return (
        f"{{const f = document.getElementById('{field}'); f.value = '{value}'; f.dispatchEvent(new Event('change'));}}"
    )


@pytest.mark.slow
@browser
def test_the_page_opens_renders_every_token_and_logs_nothing(run, tmp_path):
    dom, console = browse(page_of(run), tmp_path, "--dump-dom")
    assert console == []
    page = Page(dom)
    assert [len(row) for row in page.tokens] == [5, 3, 4, 2, 3]
    shades = colours(page)
    # By ratio: e^-0.05 first, e^0.05 last, nothing in the middle.
    assert "--down" in shades[0][0]
    assert "--up" in shades[0][4]
    assert shades[0][2] == ""
    assert "5 of 5 samples" in page.text
    # And a mistake in the script would be seen here.
    assert "planted" in browse(page_of(run), tmp_path, "--dump-dom", script="throw Error('planted')")[1][0]


@pytest.mark.slow
@browser
def test_the_shading_switch_filters_and_the_panel_work(run, tmp_path):
    page = page_of(run)
    first = colours(Page(browse(page, tmp_path, "--dump-dom")[0]))
    seen = {"ratio": first}
    script = choose("shade", "rollout") + choose("sign", "neg")
    script += "document.getElementById('dropped').click(); document.querySelectorAll('.tokens .t')[9].click();"
    dom, console = browse(page, tmp_path, "--dump-dom", script=script)
    assert console == []
    switched = Page(dom)
    seen["rollout"] = colours(switched)
    assert all("--one" in style for style in seen["rollout"][0][1:])
    strengths = [float(re.search(r"([\d.]+)\)", style).group(1)) for style in seen["rollout"][0][1:]]
    assert strengths == sorted(strengths)  # the less likely, the stronger
    assert strengths[-1] == 0.76  # e^-7.1 is below 0.001
    assert [("hidden" in a) for a in switched.articles()] == [True, False, False, True, True]
    assert "2 of 5 samples" in switched.text
    # The tenth token is " b" of the third sample.
    for part in ("Token 2 of 4", "dropped below the band", "0.983471"):
        assert part in dom[dom.index('id="panel"') :], part
    # The same state by address, another quantity.
    dom, console = browse(page, tmp_path, "--dump-dom", state="#shade=fate&step=5")
    assert console == []
    linked = Page(dom)
    seen["fate"] = colours(linked)
    assert [("hidden" in a) for a in linked.articles()] == [True, True, False, False, True]
    assert ["--down" in style for style in seen["fate"][2]] == [False, True, False, False]
    assert ["--one" in style for style in seen["fate"][2]] == [False, False, True, False]
    assert len({str(value) for value in seen.values()}) == 3


@pytest.mark.slow
@browser
@pytest.mark.parametrize(("scheme", "background"), [(0, (22, 23, 26)), (1, (255, 255, 255))], ids=["dark", "light"])
def test_a_screenshot_has_the_colours_of_the_legend_in_light_and_dark(run, tmp_path, scheme, background):
    image = pytest.importorskip("matplotlib.image")
    png = tmp_path / "page.png"
    flags = (f"--screenshot={png}", f"--blink-settings=preferredColorScheme={scheme}")
    _, console = browse(page_of(run), tmp_path, *flags, state="#shade=fate")
    assert console == []
    pixels = np.round(image.imread(png)[:, :, :3] * 255).astype(int)
    assert pixels.shape == (2000, 1200, 3)
    assert (pixels[3, 3] == background).all()
    red, green, blue = np.moveaxis(pixels, 2, 0)
    vermilion, sky = (red > blue + 90) & (red > green + 50), (blue > red + 90) & (blue > green + 30)
    assert vermilion.sum() > 1000  # three tokens dropped above the band, and the legend
    assert sky.sum() > 1000
