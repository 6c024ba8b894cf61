# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about plots: every panel with data and only those, whatever the runs lack."""

import builtins
import json
from types import SimpleNamespace

import numpy as np
import pytest

from qarl_jax import plot
from qarl_jax.observe import curves
from qarl_jax.types import UserError


def write_run(path, steps=20, seed=0, **extra):
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "reward/mean": 0.2 + 0.5 * step / steps + 0.05 * rng.standard_normal(),
                "response/length_mean": 40 - step / 2 + rng.standard_normal(),
                "entropy/mean": 1.2 - step / 40,
                "mismatch/k3": 1e-4 * float(np.exp(rng.standard_normal())),
                "mismatch/max_abs": 0.3 * float(np.exp(rng.standard_normal())),
                "clip/seq_dropped": 0.1 + 0.02 * rng.standard_normal(),
                "time/step_s": 4.0 + rng.random(),
            } | {k: v(step) for k, v in extra.items()}
            file.write(json.dumps(record) + "\n")
    return path


def titles(fig):
    return [axes.get_title() for axes in fig.axes]


@pytest.mark.slow
def test_two_runs_make_one_png_with_a_panel_for_each_metric_they_have(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, seed=i)) for i, name in enumerate(("tbpo", "grpo"))]
    assert plot.main([*runs, "--out", str(tmp_path / "figures")]) == 0
    png = tmp_path / "figures" / "curves.png"
    assert capsys.readouterr().out.split() == [str(png), str(tmp_path / "figures" / "report.html")]
    assert png.read_bytes().startswith(b"\x89PNG")
    fig = plot.figure(plot.load_runs(runs))
    assert titles(fig) == [
        "Reward",
        "Response length (tokens)",
        "Entropy (nats per token)",
        "Learner and sampler apart",
        "Sequences dropped by the loss",
        "Seconds per step",
    ]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["tbpo", "grpo"]


def test_the_strong_line_is_the_running_mean_of_what_was_recorded(tmp_path):
    run = write_run(tmp_path / "a")
    (loaded,) = plot.load_runs([run])
    steps, values = loaded.series("reward/mean")
    faint, strong = plot.figure([loaded], window=4).axes[0].lines
    np.testing.assert_allclose(faint.get_xydata(), np.column_stack([steps, values]))
    np.testing.assert_allclose(strong.get_ydata()[10], np.mean(values[7:11]))
    assert curves.running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_missing_null_and_zero_values_leave_gaps_not_errors(tmp_path):
    holes = write_run(
        tmp_path / "holes",
        **{
            "reward/mean": lambda step: None if step % 2 else 0.5,
            "mismatch/k3": lambda step: 0.0,  # no place on a logarithmic axis
            "eval/reward/mean": lambda step: 0.4 if step == 20 else None,
        },
    )
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "rew')
    runs = plot.load_runs([holes, tmp_path / "bare"])
    assert runs[0].series("reward/mean")[0] == list(range(2, 21, 2))
    fig = plot.figure(runs)
    assert "Reward" in titles(fig)
    assert {text.get_text() for text in fig.axes[0].get_legend().get_texts()} == {"mean", "held-out"}
    fig.savefig(tmp_path / "x.png")


def test_a_logarithmic_panel_is_one_only_where_its_numbers_span_a_factor_of_ten(tmp_path):
    wide = write_run(tmp_path / "wide", **{"optim/grad_norm": lambda step: 10.0**-step})
    narrow = write_run(tmp_path / "narrow", **{"optim/grad_norm": lambda step: 1.0 + step / 20})
    for run, scale in ((wide, "log"), (narrow, "linear")):
        fig = plot.figure(plot.load_runs([run]))
        (axes,) = [axes for axes in fig.axes if axes.get_title() == "Gradient norm"]
        assert axes.get_yscale() == scale


def test_an_onset_is_shown_only_where_there_was_a_cluster(tmp_path):
    metrics = {"error/onset_share": lambda step: 0.5 * (step > 10), "error/seq_learner": lambda step: 0.1 * (step > 10)}
    runs = plot.load_runs([write_run(tmp_path / "a", **metrics)])
    (chart,) = [chart for chart in plot.charts(runs) if chart.title.startswith("Where the first cluster begins")]
    assert [list(line.steps) for line in chart.lines] == [list(range(11, 21))] * 2
    assert set(chart.lines[1].values) == {0.5}
    none = plot.load_runs([write_run(tmp_path / "b", **metrics | {"error/seq_learner": lambda step: 0.0})])
    assert not [chart for chart in plot.charts(none) if chart.title.startswith("Where")]


def test_a_panel_of_zeros_is_left_out_unless_it_was_asked_for(tmp_path):
    zeros = {"response/truncated": lambda step: 0.0, "text/loops": lambda step: 0.0}
    runs = plot.load_runs([write_run(tmp_path / "a", **zeros)])
    for shown in (titles(plot.figure(runs)), [chart.title for chart in plot.charts(runs)]):
        assert "Reward" in shown
        assert not {"Truncated responses", "Repetition"} & set(shown)
    assert titles(plot.figure(runs, extra=["text/loops"]))[-1] == "text/loops"


def test_held_out_rewards_stand_at_their_version_from_before_training_on(tmp_path):
    run = write_run(tmp_path / "a", steps=4, **{"eval/reward/mean": lambda step: 0.4 if step == 4 else None})
    (run / "eval.jsonl").write_text(
        '{"version": 0, "eval/reward/mean": 0.1}\n{"version": 5, "eval/reward/mean": 0.4}\n'
    )
    (chart, *_) = plot.charts(plot.load_runs([run]))
    (marks,) = [line for line in chart.lines if line.marks]
    assert (list(marks.steps), list(marks.values)) == ([0, 5], [0.1, 0.4])
    (run / "eval.jsonl").unlink()  # metrics.jsonl alone knows those made while training
    (marks,) = [line for line in plot.charts(plot.load_runs([run]))[0].lines if line.marks]
    assert (list(marks.steps), list(marks.values)) == ([5], [0.4])


def test_the_figure_draws_the_charts_panels(tmp_path):
    runs = plot.load_runs([write_run(tmp_path / name, seed=i) for i, name in enumerate("ab")])
    charts = plot.charts(runs, window=3, extra=["time/step_s"])
    assert [chart.title for chart in charts] == titles(plot.figure(runs, extra=["time/step_s"]))
    faint, strong, *other = charts[0].lines
    assert (faint.faint, strong.faint, strong.run, other[-1].run) == (True, False, 0, 1)
    assert strong.values == curves.running_mean(faint.values, 3)


def test_any_metric_can_be_added(tmp_path):
    run = write_run(tmp_path / "a", **{"my/own": lambda step: step})
    assert titles(plot.figure(plot.load_runs([run]), extra=["my/own"]))[-1] == "my/own"


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = plot.load_runs([write_run(tmp_path / seed / "quickstart") for seed in ("s0", "s1")])
    assert [run.name for run in runs] == ["s0/quickstart", "s1/quickstart"]


def test_mistakes_are_one_sentence_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 1, "x": 2}\n')
    (tmp_path / "stepless").mkdir()
    (tmp_path / "stepless" / "metrics.jsonl").write_text('{"x": 2}\n')
    good = str(write_run(tmp_path / "good"))
    for args, says in [
        ([str(tmp_path)], "is not a run"),
        ([str(tmp_path / "none")], "is not a run"),
        ([str(tmp_path / "empty")], "holds no step yet"),
        ([str(tmp_path / "other")], "--metric"),
        ([str(tmp_path / "stepless")], "is not the metrics.jsonl of a run"),
        ([good, "--metric", "reward/maen"], "Did you mean reward/mean?"),
        ([good, "--window", "0"], "--window"),
        ([good, "--report-steps", "-1"], "--report-steps"),
        ([good, "--out", good + "/metrics.jsonl"], "Cannot write"),
    ]:
        assert plot.main(args) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_without_matplotlib_the_report_is_written_and_the_extra_is_named(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "a")
    runs = plot.load_runs([run])
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"qarl-jax\[plot\]"):
        plot.figure(runs)
    assert plot.main([str(run)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{run / 'report.html'}\n"
    assert "qarl-jax[plot]" in told.err
    assert (run / "report.html").is_file()


def test_a_run_s_plots_lie_in_its_folder_and_those_of_several_beside_them(tmp_path, monkeypatch, capsys):
    one, other = (str(write_run(tmp_path / name)) for name in "ab")
    monkeypatch.chdir(tmp_path)
    drawn = SimpleNamespace(savefig=lambda target, dpi: target.touch())
    monkeypatch.setattr(plot, "figure", lambda *args, **options: drawn)
    for paths, folder in (([one], one), ([f"{one}/metrics.jsonl"], one), ([one, other], "figures")):
        assert plot.main(paths) == 0
        assert capsys.readouterr().out.split() == [f"{folder}/curves.png", f"{folder}/report.html"]


# ---- histograms ----------------------------------------------------------------------------------------------------


def histogram_line(step, at, bins=82):
    """A step whose every histogram holds 10 counts in bin `at`."""
    counts = [10 if i == at else 0 for i in range(bins)]
    keys = [f"hist/{name}_{sign}" for name, _ in plot.HISTOGRAMS for sign in ("pos", "neg")]
    return json.dumps({"step": step, **dict.fromkeys(keys, counts)})


def test_histograms_of_the_last_steps_are_summed(tmp_path):
    lines = [histogram_line(step, at) for step, at in ((0, 3), (1, 40), (2, 40), (3, 41))]
    (tmp_path / "histograms.jsonl").write_text("\n".join(lines) + "\n")
    got = plot.load_histograms(tmp_path, last=3)
    assert (got["ratio_pos"][3], got["ratio_pos"][40], got["ratio_pos"][41]) == (0, 20, 10)
    assert plot.load_histograms(tmp_path / "metrics.jsonl", last=3) == got
    (tmp_path / "none").mkdir()
    assert plot.load_histograms(tmp_path / "none") == {}


@pytest.mark.slow
def test_the_ratio_figure_draws_each_run_once_per_panel(tmp_path):
    counts = {"a": {"ratio_pos": [0] * 40 + [5, 5] + [0] * 40, "ratio_neg": [0] * 82}, "b": {}}
    fig = plot.ratio_figure(counts)
    drawn = [len(panel.patches) for panel in fig.axes]
    assert drawn == [1, 0, 0, 0, 0, 0, 0, 0]
    values = fig.axes[0].patches[0].get_data().values
    assert sum(values) == 1
    fig.savefig(tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 10_000


# ---- probabilities -------------------------------------------------------------------------------------------------


def sample(step, old, now, advantage=1.0):
    return json.dumps({"step": step, "advantage": advantage, "tokens": {"old": old, "now": now}})


def test_tokens_are_those_of_the_last_steps_and_what_is_not_finite_is_left_out(tmp_path):
    lines = [sample(0, [-9.0], [-9.0]), sample(1, [-1.0, None], [-2.0, -1.0], -0.5), sample(2, [-3.0], [-3.5])]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, json.dumps({"step": 2, "text": "x"})]) + "\n")
    want = {"old": [-1.0, -3.0], "now": [-2.0, -3.5], "advantage": [-0.5, 1.0]}
    assert plot.load_tokens(tmp_path, last=2) == want
    (tmp_path / "none").mkdir()
    assert plot.load_tokens(tmp_path / "none") == {}


def test_tokens_without_an_advantage_are_drawn(tmp_path):
    """All rewards of a run are equal: no token has a sign."""
    run = write_run(tmp_path / "a")
    (run / "samples.jsonl").write_text(sample(20, [-1.0, -2.0], [-1.0, -2.1], 0.0) + "\n")
    drawn = plot.draw([str(run)], tmp_path)
    assert tmp_path / "probabilities.png" in drawn


@pytest.mark.slow
def test_a_run_with_tokens_gets_the_papers_two_figures(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    rng = np.random.default_rng(0)
    old = -rng.exponential(2, 200)
    rows = [sample(20, list(old), list(old + 0.1 * sign), sign) for sign in (1.0, -1.0)]
    (run / "samples.jsonl").write_text("\n".join(rows) + "\n")
    fig = plot.probability_figure({"a": plot.load_tokens(run), "bare": {}})
    density, ratio = (next(x for x in fig.axes if words in x.get_title()) for words in ("density", "ratio"))
    assert density.collections[0].get_array().sum() == 400
    up, down = ratio.lines
    np.testing.assert_allclose(up.get_xdata(), np.exp(old))
    np.testing.assert_allclose(up.get_ydata(), np.exp(0.1), rtol=1e-6)
    np.testing.assert_allclose(down.get_ydata(), np.exp(-0.1), rtol=1e-6)
    assert plot.main([str(run), "--out", str(tmp_path / "figures")]) == 0
    assert str(tmp_path / "figures" / "probabilities.png") in capsys.readouterr().out
    assert (tmp_path / "figures" / "probabilities.png").stat().st_size > 10_000


def test_a_finished_run_is_drawn_into_its_folder_and_no_failure_ends_it(tmp_path, monkeypatch, caplog):
    run = write_run(tmp_path / "run", steps=3)
    monkeypatch.setattr(plot, "leave", plot.leave.__wrapped__)
    plot.leave(str(run))
    assert {"curves.png", "report.html"} <= {path.name for path in run.iterdir()}
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    plot.leave(str(run))
    assert "was not drawn: Cannot write" in caplog.text
    plot.leave(str(tmp_path / "nowhere"))
    assert "The run is whole" in caplog.text
