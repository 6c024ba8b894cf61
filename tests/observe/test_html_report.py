# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The page loads nothing, shows what the policy wrote as text, and works in a real browser.

The browser is a headless Chromium; where there is none on PATH those tests are skipped (Debian: apt-get install
chromium). `test_live.py` has the page that a server feeds.
"""

import html.parser
import json
import re

import numpy as np
import pytest

from qarl_jax.observe import html_report
from qarl_jax.types import UserError
from tests.reference.pages import HOSTILE, SAMPLES, browse, browser, said, sample, with_script, write_run

SETTLE = "await new Promise(done => setTimeout(done, 400));"
COLOURS = "tokenSpans().map(t => [t.textContent, t.className, t.style.getPropertyValue('--a')])"


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the data block."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self._json = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._json = tag == "script" and ("type", "application/json") in attrs

    def handle_data(self, text):
        self.data += text if self._json else ""
        self._json = False


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "tbpo", SAMPLES)


def open_page(page, folder, *flags, script="", state="", budget=3000):
    """(what a script returned, console lines, DOM) of a page opened from a file."""
    file = folder / "page.html"
    file.write_text(with_script(page, script) if script else page, encoding="utf-8")
    dom, console = browse(file.as_uri() + state, folder, *(flags or ["--dump-dom"]), budget=budget)
    return (said(dom) if script else None), console, dom


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_and_may_load_nothing(run):
    text = html_report.render({"tbpo": run})
    page = Page(text)
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    markup = text.replace(page.data, "")
    assert not re.search(r"""\b(?:src|href|action)\s*=|url\(|@import""", markup)
    assert set(re.findall(r"https?://[^\s\"'`]*", markup)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    for name in html_report.SCRIPTS:
        source = (html_report.PAGE / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", source), name


def test_what_the_policy_wrote_is_data_and_no_markup(run):
    text = html_report.render({HOSTILE.replace("\ud800", ""): run})
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    text.encode("utf-8")  # no lone surrogate is left
    data = json.loads(page.data)
    assert [len(row["full"]["tokens"]) for row in data["runs"][0]["samples"]["rows"]] == [5, 3, 4, 2, 3]


def test_places_that_cannot_be_written_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        html_report.write(tmp_path / "file" / "report.html", "x")


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@browser
def test_every_view_draws_and_logs_nothing(run, tmp_path):
    other = write_run(tmp_path / "other", steps=4)
    page = html_report.render({"tbpo": run, "other": other}, extra=["time/step_s"])
    script = """
      const out = {};
      for (const key of "1234567") {
        press(key);
        const colours = [...document.querySelectorAll("#view canvas")].map(c => new Set(paintedBytes(c)).size);
        const figures = document.querySelectorAll("#view figure").length;
        out[ui.view] = [figures, colours.length, Math.min(99, ...colours), $("view").textContent];
      }
      return out;"""
    views, console, _ = open_page(page, tmp_path, script=script)
    assert console == []
    figures = {name: value[0] for name, value in views.items()}
    # Per run bars, and the timeline of the step nearest to the newest.
    assert figures == {"curves": 5, "time": 4, "band": 4, "mismatch": 2, "codes": 2, "samples": 0, "settings": 0}
    for name, canvases in (("band", 4), ("codes", 2)):
        assert views[name][1] == canvases
        assert views[name][2] > 5, f"{name}: an empty picture"
    assert "dropped" not in views["band"][3]  # the edges are in the picture
    assert "seed: 3  # <b>" in views["settings"][3]
    assert "0.125 → 0.625 (95 %: 0.250 to 0.875" in views["settings"][3]
    # And a mistake in the script would be seen here.
    assert (
        "planted" in open_page(page, tmp_path, script="setTimeout(() => { throw Error('planted'); }); return 1;")[1][0]
    )


@pytest.mark.slow
@browser
def test_tokens_are_shaded_marked_and_explained_and_keys_lead_through_them(run, tmp_path):
    script = f"""
      {SETTLE}
      const out = {{first: {COLOURS}, count: $("count").textContent, sample: $("sample").textContent}};
      press("s"); press("s"); press("s"); press("s");            // by the sampler's probability
      out.shade = ui.shade; out.rollout = {COLOURS};
      press("ArrowRight"); press("ArrowRight");
      out.panel = $("panel").textContent; out.strip = new Set(paintedBytes(document.querySelector('.strip'))).size;
      press("n"); out.next = $("panel").textContent;
      press("j"); {SETTLE} out.second = {COLOURS}; out.selected = selected.step;
      press("k"); {SETTLE} out.back = selected === rows[0];
      return out;"""
    out, console, _ = open_page(
        html_report.render({"tbpo": run}), tmp_path, script=script, state="#view=samples&sort=oldest"
    )
    assert console == []
    assert out["count"] == "5 of 5 samples"
    # By ratio: e^-0.05 first, e^0.05 last, nothing in the middle.
    texts, classes, alphas = zip(*out["first"], strict=True)
    assert texts == ("so", " we", " get", " 4", "<eos>")
    assert (classes[0], classes[2], classes[4]) == ("t down", "t", "t up")
    assert alphas[0] == alphas[4] == "76"
    assert "update 2 of 4" in out["sample"]
    assert out["shade"] == "rollout"
    strengths = [int(alpha or 0) for _, _, alpha in out["rollout"]]
    assert strengths == sorted(strengths)  # the less likely, the stronger
    assert strengths[-1] == 76  # e^-7.1 is below 0.001
    assert "Token 2 of 5" in out["panel"]
    assert out["strip"] > 5  # bars, not an empty picture
    assert "0.9753" in out["panel"]  # its ratio, e^-0.025
    assert "Token 3 of 5" in out["next"]  # the next whose shade is at least half as strong as can be
    assert [name for _, name, _ in out["second"]] == [
        "t above",
        "t above one",
        "t above one",
    ]  # p 0.9: too likely to show
    assert out["back"]


@pytest.mark.slow
@browser
def test_filters_search_and_an_address_choose_samples(run, tmp_path):
    page = html_report.render({"tbpo": run, "again": run})
    script = f"""
      {SETTLE}
      const steps = () => rows.map(row => [row.run, row.step]);
      const out = {{linked: steps(), shade: ui.shade}};
      set("run", ""); out.both = rows.length;
      set("sign", ""); set("fate", ""); set("steps", "5-9"); out.range = steps();
      set("steps", ""); set("query", "wait"); {SETTLE} out.found = steps();
      set("query", "nothing like it"); {SETTLE} out.none = $("sample").textContent;
      set("query", ""); {SETTLE} set("sort", "length"); out.longest = rows[0].length; out.address = location.hash;
      go("curves"); press("/"); out.focus = document.activeElement.id;
      set("filter", "k3");
      out.charts = [...document.querySelectorAll("figcaption")].map(c => c.firstChild.textContent);
      out.focused = document.activeElement.id;
      return out;"""
    out, console, _ = open_page(page, tmp_path, script=script, state="#shade=weight&sign=neg&dropped=1&run=1")
    assert console == []
    assert (out["linked"], out["shade"]) == ([[1, 5], [1, 0]], "weight")
    assert out["both"] == 4
    assert out["range"] == [[0, 9], [1, 9], [0, 5], [0, 5], [1, 5], [1, 5]]
    assert out["found"] == [[0, 0], [1, 0]]
    assert out["none"] == "No sample fits."
    assert (out["longest"], out["address"]) == (5, "#view=samples&shade=weight&sort=length")
    assert (out["focus"], out["focused"]) == ("filter", "filter")
    assert out["charts"] == ["Learner and sampler apart", "mismatch/k3"]


@pytest.mark.slow
@browser
def test_curves_are_the_files_numbers_and_can_be_zoomed_pinned_and_hidden(run, tmp_path):
    script = f"""
      {SETTLE}
      const [first] = drawn, out = {{title: first.panel.title}};
      const strong = first.scale.lines.find(line => !line.faint && !line.marks);
      out.raw = strong.raw; out.smooth = strong.y; out.x = first.scale.lines.find(line => line.marks).x;
      const d = first.plot.querySelector("path.curve:not(.faint)").getAttribute("d");
      out.points = d.split(/[ML]/).filter(Boolean).length;
      const box = first.plot.getBoundingClientRect(), at = share => box.left + share * box.width;
      const fire = (type, share) => {{
        const place = {{clientX: at(share), clientY: box.top + 50, button: 0, pointerId: 1, bubbles: true}};
        first.plot.dispatchEvent(new PointerEvent(type, place));
      }};
      first.plot.setPointerCapture = () => {{}};
      fire("pointermove", 0.5); out.tip = $("tip").textContent;
      out.crosses = document.querySelectorAll(".cross[visibility=visible]").length;
      fire("pointerdown", 0.5); fire("pointerup", 0.5); out.pinned = $("pinned").textContent;
      fire("pointerdown", 0.3); fire("pointermove", 0.6); fire("pointerup", 0.6);
      out.zoom = ui.zoom; out.inside = drawn[0].scale.x0;
      drawn[0].plot.dispatchEvent(new MouseEvent("dblclick")); out.whole = ui.zoom;
      document.querySelector(".runs input").click(); out.hidden = $("charts").textContent;
      return out;"""
    out, console, _ = open_page(html_report.render({"tbpo": run}), tmp_path, script=script)
    assert console == []
    assert out["title"] == "Reward"
    assert out["raw"] == pytest.approx([0.2 + s / 20 for s in range(10)])
    assert out["smooth"][9] == pytest.approx(np.mean(out["raw"][5:]))
    assert out["x"] == [0, 10]  # a held-out evaluation stands at its version
    assert out["points"] == 10
    assert out["tip"].startswith("step ")
    assert out["crosses"] == 4
    assert out["pinned"].startswith("step ")
    low, high = out["zoom"]
    assert 0 < low < high < 10
    assert out["inside"] == low
    assert out["whole"] is None
    assert out["hidden"] == "No metric has that name."


@pytest.mark.slow
@browser
@pytest.mark.parametrize(("scheme", "background"), [(0, (19, 20, 23)), (1, (255, 255, 255))], ids=["dark", "light"])
def test_a_screenshot_has_the_colours_of_the_tokens_in_light_and_dark(run, tmp_path, scheme, background):
    image = pytest.importorskip("matplotlib.image")
    png = tmp_path / "page.png"
    flags = (f"--screenshot={png}", f"--blink-settings=preferredColorScheme={scheme}")
    page = html_report.render({"tbpo": run})
    _, console, _ = open_page(page, tmp_path, *flags, state="#view=samples&shade=fate&steps=5&sign=neg")
    assert console == []
    pixels = np.round(image.imread(png)[:, :, :3] * 255).astype(int)
    assert pixels.shape == (1600, 1400, 3)
    assert (pixels[1590, 3] == background).all()
    red, green, blue = np.moveaxis(pixels, 2, 0)
    purple, sky = (red > green + 40) & (blue > green + 40), (blue > red + 80) & (blue > green + 30)
    assert purple.sum() > 150  # the rejected token
    assert sky.sum() > 150  # the one dropped below the band


def test_a_sample_of_this_file_is_what_a_run_records():
    """The planted records have the columns of `token_trace.Follower.records`."""
    assert set(sample(0, ["a"], [0])["tokens"]) == {
        *("text", "rollout", "old", "now", "ratio", "mismatch", "weight", "gain", "fate")
    }
