# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about what a run shows: what there is, in lines or in a table."""

import io

import numpy as np

from qarl_jax.observe.recorder import Config, Observer
from qarl_jax.observe.terminal import held_out_score, sparkline, summary_line

RECORD = {
    "step": 12,
    "reward/mean": 0.53,
    "response/length_mean": 41.25,
    "mismatch/k3": 1.5e-5,
    "clip/seq_dropped": 0.125,
    "loss/total": None,
    "nonfinite": {"loss/total": "nan"},
    "time/rollout_s": 1.5,
    "time/update_s": 2.5,
    "time/step_s": 4.25,
    "time/tok_per_s": 12345.6,
    "time/rollout_tok_per_s": 23456.7,
}


def test_a_step_s_line_shows_what_there_is_and_fits_a_wide_terminal():
    shown = summary_line(RECORD, 100)
    assert shown == (
        "step 12/100 | reward 0.530 | length 41.2 | k3 1.5e-05 | dropped 12.5% | seconds 4.25 | "
        "tokens/s 12,346 | not finite: loss/total"
    )
    everything = RECORD | {"eval/reward/mean": 0.123, "clip/frac": 0.5, "optim/grad_norm": 123.4}
    del everything["nonfinite"]
    assert len(summary_line(everything, 100)) < 150
    assert summary_line({"step": 0}) == "step 0"


def test_a_held_out_score_says_of_how_much_and_how_far_it_is_known():
    record = {"eval/reward/mean": 1.0, "eval/reward/low": 0.2068, "eval/reward/high": 1.0}
    record |= {"eval/prompts": 1.0, "eval/different_prompts": 1.0, "eval/responses": 4.0}
    assert held_out_score(record) == "1.000 (95 %: 0.207 to 1.000; 1 prompt x 4 samples)"
    assert held_out_score({"eval/reward/mean": 0.5}) == "0.500"  # of an older version


def test_outside_a_terminal_each_step_is_a_plain_line(tmp_path):
    stream = io.StringIO()
    with Observer(tmp_path, Config(trackers=()), total_steps=2, stream=stream) as observer:
        observer.say("hello [bold]")
        observer.log(1, {"reward/mean": 0.5})
    assert stream.getvalue() == "hello [bold]\nstep 1/2 | reward 0.500\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_a_table_shows_every_group_and_notes_scroll_above(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Observer(tmp_path, Config(trackers=()), total_steps=100, stream=stream) as observer:
        observer.log(11, {"reward/mean": 0.1, "time/step_s": 4.25})
        observer.say("saved [step 11]")
        observer.log(12, {k: v for k, v in RECORD.items() if k not in ("step", "nonfinite")} | {"loss/total": np.nan})
    shown = stream.getvalue()
    for text in ("step 12 of 100", "0:06:10 left", "reward", "0.530", "▁█", "1.50e-05", "12.5%", "2.50s", "12,346"):
        assert text in shown  # 87 steps of 4.25 s are 370 s
    assert "saved [step 11]" in shown
    assert "[dim]" not in shown  # the table is drawn anew below a note
    assert "loss/total = nan" in shown


def test_a_view_that_has_ended_has_no_time_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Observer(tmp_path, Config(trackers=()), total_steps=3, stream=stream) as observer:
        observer.log(1, {"reward/mean": 0.5, "time/step_s": 24.0})
        assert "0:00:24 left" in stream.getvalue()
        observer.end("interrupted")
    *_, last = stream.getvalue().split("step 1 of 3")
    assert "left" not in last
    assert "0.500" in last


def test_the_last_word_stands_below_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Observer(tmp_path, Config(trackers=()), total_steps=100, stream=stream) as observer:
        observer.log(12, {"reward/mean": 0.1})
        observer.end("interrupted: saved after step 12")
    shown = stream.getvalue()
    assert shown.rindex("step 12 of 100") < shown.index("interrupted: saved after step 12")


def test_sparklines_scale_to_what_they_show():
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(100)], width=40)) == 40
