# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/results.md (the answer) and docs/appendix/results.md (all else), from the results alone.

Every number has the runs it comes from beside it; what is missing says so.

A folder in backticks is a run (or, without its seed, the runs of all seeds) in results.tar.xz.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.alignment import arms, stats
from experiments.alignment.results import Results, RunResult

ENDS = 10
"""Steps at either end of a run over which its first and last numbers are averaged."""

PHASES = {
    "rollout": ("time/rollout_s",),
    "log-probs": ("time/old_logprobs_s",),
    "update": ("time/update_s",),
    "publish": ("time/publish_s",),
    "rest": (),
}

BF16, ROLLOUT, ROLLOUT_TBPO, QARL = (name for name, arm in arms.ARMS.items() if arm.main)

ABLATIONS, VLLM = "ablations", "vllm"

PLACES = {"gpu": ("H200", "On the H200"), "cpu": ("CPU, small", "On one CPU core")}
WORDS = {
    "gpu": "## One H200: the experiment",
    "cpu": "## One CPU core: the same at the quickstart's size, much smaller than the experiment",
}

HEAD = """# Does alignment pay?

Generated from `experiments/alignment/results.tar.xz` by `python -m experiments.alignment.figures`; do not edit. The
plan, written before the runs, is [PLAN.md](../experiments/alignment/PLAN.md). Every arm, table and figure is in
[the appendix](appendix/results.md). Intervals are 95 %; a difference is clear where it exceeds two standard errors.
"""

APPENDIX_HEAD = """# All results of the alignment experiment

Generated from `experiments/alignment/results.tar.xz` by `python -m experiments.alignment.figures`; do not edit.
[Results](../results.md) has the answer. The plan, written before the runs, is
[PLAN.md](../../experiments/alignment/PLAN.md): arms, seeds, ladder of formats, stop rule, how checkpoints are selected
and how intervals are made. A name such as `w4a16_g128/4_qarl_tbpo/seed0` is a run in the archive, with its metrics of
every step, its evaluations and its config. Intervals are 95 %; a difference is clear where it exceeds two standard
errors.
"""


def pages(results: dict[str, Results]) -> dict[str, str]:
    """The two documents, by their paths under docs/."""
    parts = [APPENDIX_HEAD]
    for name, words in WORDS.items():
        parts += [words, "", section(results[name])]
    answer = [HEAD, verdict(results), *_answer_figures(results)]
    joined = {"results.md": answer, "appendix/results.md": parts}
    return {path: "\n".join(lines).rstrip("\n") + "\n" for path, lines in joined.items()}


def _answer_figures(results: dict[str, Results]) -> list[str]:
    """Training curves of the formats that lose something, place by place."""
    lines = []
    for name, (place, _) in PLACES.items():
        for rung in _rungs(results[name]):
            row, figure = _answer(results[name], rung), _figure(results[name], arms.folder_of(rung), "results")
            if row is not None and not row[3].startswith("none") and figure:
                lines += [f"{place}, `{rung}`:", "", *figure]
    return lines


def verdict(results: dict[str, Results]) -> str:
    """The answer as one table, as far as there is one, and the price; the appendix names the runs."""
    columns = [
        *("where, scheme", "QaRL's runs", "seeds", "gap of quantized rollouts, points", "QaRL recovers"),
        *("TBPO under a bf16 learner recovers", "alignment adds to TBPO, points"),
    ]
    rows, lines = [], []
    for name, (place, there) in PLACES.items():
        result = results[name]
        found = [row for rung in _rungs(result) if (row := _answer(result, rung)) is not None]
        rows += [[f"{place}, `{row[0]}`", *row[1:]] for row in found]
        if not found:
            lines.append(f"- {there}: not run yet.")
    note = (
        "Final checkpoints on the test split, each arm in its sampler's precision; intervals of each arm are in the"
        " appendix. Gap: BF16 GRPO less quantized rollout with a bf16 learner and GRPO. Recovered: what an arm is"
        " better than the latter, over the gap, where there is one. QaRL is the aligned TBPO; the paper: 63 to 108 %."
    )
    table = ["", note, "", _table(columns, rows)] if rows else []
    lines += [line for name in WORDS if (line := _price(results[name]))]
    return "\n".join(["## The answer", *table, "", *lines, ""])


def _rungs(result: Results) -> list[str]:
    return list(dict.fromkeys((result.scale.main, *result.scale.gentle, *result.scale.harsh)))


def _answer(result: Results, rung: str) -> list[str] | None:
    """A rung's row of the answer, without the place; None where its arms were not run."""
    program = _programs(result, rung)
    seeds = result.seeds(program[BF16], program[ROLLOUT], program[QARL])
    if not seeds:
        return None
    arm = {name: result.accuracy(program[name], "final", True, seeds) for name in (BF16, ROLLOUT, QARL)}
    gap = stats.estimate(arm[BF16] - arm[ROLLOUT])
    share = stats.recovered(arm[BF16], arm[ROLLOUT], arm[QARL])
    row = [rung, f"`{program[QARL]}`", ", ".join(map(str, seeds))]
    row.append(_pm(gap) if share is not None else f"none ({_pm(gap)})")
    row.append("-" if share is None else f"{_pm(share, digits=0)} %")
    if not set(seeds) <= set(result.seeds(program[ROLLOUT_TBPO])):
        return [*row, "-", "-"]
    tbpo = result.accuracy(program[ROLLOUT_TBPO], "final", True, seeds)
    other, added = stats.recovered(arm[BF16], arm[ROLLOUT], tbpo), stats.estimate(arm[QARL] - tbpo)
    row.append("-" if other is None else f"{_pm(other, digits=0)} %")
    return [*row, _judged(added)]


def _price(result: Results) -> str:
    """What a step of QaRL costs beside the others, from runs that had the machine to themselves."""
    seconds = {program.rpartition("/")[2]: phases(run)["step"] for program, run in result.timing.items()}
    if not {BF16, ROLLOUT, QARL} <= set(seconds):
        return ""
    each = ", ".join(f"{seconds[name]:.2f} s ({arms.ARMS[name].title})" for name in (BF16, ROLLOUT, QARL))
    price = f"{100 * (seconds[QARL] / seconds[ROLLOUT] - 1):+.1f} %"
    return f"- {PLACES[result.scale.name][1]} a step takes {each} (`timing/`): alignment costs {price} of a step."


def section(result: Results) -> str:
    """One scale."""
    if not result.runs and result.base is None:
        return "Not run yet.\n"
    parts = [setting(result), base_table(result)]
    parts += [accuracy_table(result, rung) for rung in _rungs(result)]
    parts += [ablation_table(result), vllm_table(result), diverged_list(result), drift_table(result)]
    parts += [time_table(result), figures(result), missing(result)]
    return "\n".join(part for part in parts if part)


# ---- parts ---------------------------------------------------------------------------------------------------------


def setting(result: Results) -> str:
    """Where it ran."""
    runs = list(result.runs.values())
    start = runs[0].facts["starts"][0] if runs and runs[0].facts["starts"] else {}
    found = start.get("versions", {})
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "jax", "flax") if name in found)
    lines = [f"Policy before RL: sha256 `{result.sha256 or 'unknown'}`."]
    if start:
        lines.append(f"Device of `{runs[0].name}`: {_devices(start)}; {versions}.")
        lines.append(
            f'Compute in {_dtype(runs[0])}; "bf16" names weights that are not quantized, whatever they compute in.'
        )
    length = None if result.base is None else result.base.get("response_len")
    words = "is not on record" if length is None else f"was {length:.1f}"
    lines.append(f"Bands on a response's ratio: the paper's times {result.scale.band_factor:g} (PLAN.md), for a mean")
    lines[-1] += f" response length of {result.scale.response_len:g} tokens; that of the policy before RL {words}."
    return "\n".join([*lines, ""])


def base_table(result: Results) -> str:
    """What rounding costs before any RL."""
    if result.base is None:
        return "### Rounding before any RL\n\nNot run yet.\n"
    n = result.base["num_samples"]
    share = {k: np.asarray(v, np.float64)[None] / n for k, v in result.base["schemes"].items()}
    rows = []
    for scheme, x in share.items():
        cost = stats.estimate(share["bf16"] - x)
        words = "-" if scheme == "bf16" else f"{_pm(cost)}, {_clear(cost, 'cost', 'gain')}"
        rows.append([f"`{scheme}`", _pm(stats.estimate(x)), words])
    prompts = share["bf16"].shape[1]
    source = f"`{result.scale.name}/base_test.json`"
    note = f"The base on {prompts} test prompts x {n} samples ({source}); intervals over prompts."
    table = _table(["scheme", "accuracy, %", "less than bf16, paired by prompt"], rows)
    return f"### Rounding before any RL\n\n{note}\n\n{table}\n"


def accuracy_table(result: Results, rung: str) -> str:
    """The main arms at a rung, and what is recovered."""
    programs = _programs(result, rung)
    rows = []
    for name, program in programs.items():
        if rung in result.scale.gentle and name not in arms.GENTLE:
            continue
        rows.append(_accuracy_row(result, name, program))
    if all(row[2].startswith("not ") for row in rows if "bf16/" not in row[1]):
        return f"### Main arms, `{rung}`\n\nNot run yet.\n"
    columns = ["arm", "runs", "seeds", "final, served", "final, bf16", "selected, served", "selected, bf16"]
    sentences = [
        *(f"- Final checkpoints: {sentence}" for sentence in gap_sentences(result, rung, "final")),
        *(f"- Selected checkpoints: {sentence}" for sentence in gap_sentences(result, rung, "selected")),
    ]
    note = (
        "Accuracy on the test split, %. *served*: in the precision of the arm's sampler. *selected*: the checkpoint of"
        " the best validation accuracy."
    )
    figure = _figure(result, arms.folder_of(rung))
    return "\n".join([f"### Main arms, `{rung}`", "", note, "", _table(columns, rows), "", *sentences, "", *figure])


def gap_sentences(result: Results, rung: str, label: str, vllm: bool = False) -> list[str]:
    """The gap that quantized rollouts leave, the share of it that QaRL and TBPO alone recover, or that there is no gap;
    and what alignment adds to TBPO."""
    programs = _programs(result, rung, vllm)

    def accuracies(*names: str) -> list[Any]:
        return [result.accuracy(programs[name], label, True, seeds) for name in names]

    def runs(*names: str, of: Sequence[str] = ()) -> str:
        """The runs of a sentence, and which diverged of those that it rests on (`of`; empty: the same)."""
        shown = ", ".join(f"`{programs[name]}`" for name in names)
        return f"{shown}, {_seeds(seeds)}{_diverged(result, [programs[name] for name in of or names], seeds)}"

    seeds = result.seeds(programs[BF16], programs[ROLLOUT])
    if not seeds:
        return []
    a, b = accuracies(BF16, ROLLOUT)
    gap = stats.estimate(a - b)
    names = f"`{programs[BF16]}` less `{programs[ROLLOUT]}`, {_seeds(seeds)}"
    names += _diverged(result, (programs[BF16], programs[ROLLOUT]), seeds)
    out = []
    if gap.is_clear and gap.mean > 0:
        out.append(f"the gap of quantized rollouts at `{rung}` is {_pm(gap)} points ({names}).")
    else:
        out.append(f"no gap at `{rung}`: {_pm(gap)} points, within two standard errors or in favour of the quantized")
        out[-1] += f" rollout ({names}). There is nothing to recover; by the interval, a gap of up to"
        out[-1] += f" {100 * max(0.0, gap.mean + gap.half):.0f} points is not excluded."
    for name, title, paper in (
        (QARL, "QaRL", "; the paper: 63 to 108 %"),
        (ROLLOUT_TBPO, "TBPO under a bf16 learner", ""),
    ):
        seeds = result.seeds(programs[BF16], programs[ROLLOUT], programs[name])
        if not seeds:
            continue
        a, b, c = accuracies(BF16, ROLLOUT, name)
        share, names = stats.recovered(a, b, c), runs(name, ROLLOUT, of=(BF16, ROLLOUT, name))
        if share is not None:
            out.append(f"{title} recovers {_pm(share, digits=0)} % of it ({names}){paper}.")
        out.append(f"{title} less quantized rollout with GRPO: {_judged(stats.estimate(c - b), ' points')} ({names}).")
    seeds = result.seeds(programs[QARL], programs[ROLLOUT_TBPO])
    if seeds:
        c, d = accuracies(QARL, ROLLOUT_TBPO)
        out.append("What alignment adds to TBPO (QaRL less TBPO under a bf16 learner):")
        out[-1] += f" {_judged(stats.estimate(c - d), ' points')} ({runs(QARL, ROLLOUT_TBPO)})."
    return out


def ablation_table(result: Results) -> str:
    """One seed each, against QaRL's run of that seed, prompt by prompt."""
    rung, seed = result.scale.main, result.scale.seeds[0]
    rows = []
    reference = f"{_programs(result, rung)[QARL]}"
    for arm in arms.ARMS.values():
        if arm.main:
            continue
        name = arms.Run(arm=arm, rung=rung, seed=seed).name
        run, program = result.runs.get(name), name.rpartition("/")[0]
        head = [arm.title, f"`{name}`", _validation(run)]
        seeds = [s for s in result.seeds(program, reference) if s == seed]
        if run is None or not seeds:
            rows.append([*head, "not run yet" if run is None or not run.has_ended else "not tested", "", ""])
            continue
        if run.failure is not None:
            head[0] += " (diverged)"
        served, bf16 = (result.accuracy(program, "final", precision, seeds) for precision in (True, False))
        versus = stats.estimate(served - result.accuracy(reference, "final", True, seeds))
        rows.append([*head, _pm(stats.estimate(served)), _pm(stats.estimate(bf16)), _judged(versus)])
    if all(row[3] == "not run yet" for row in rows):
        return f"### Ablations, `{rung}`, one seed each\n\nNot run yet.\n"
    columns = ["arm", "run", "validation, last", "final, served", "final, bf16", "less QaRL with TBPO, served"]
    last = _validation(result.runs.get(f"{reference}/seed{seed}"))
    note = (
        "Accuracy, %; on the test split but for *validation, last*: the run's own last evaluation, served. Intervals"
        f" over prompts. QaRL with TBPO is `{reference}/seed{seed}` (validation, last: {last})."
    )
    head = [f"### Ablations, `{rung}`, one seed each", "", note, ""]
    return "\n".join([*head, _table(columns, rows), "", *_figure(result, ABLATIONS)])


def _validation(run: RunResult | None) -> str:
    """Accuracy of a run's last evaluation on the validation split, %."""
    found = [] if run is None or not run.has_ended else [x["eval/reward/mean"] for x in run.evals]
    return f"{100 * found[-1]:.1f}" if found else "-"


def vllm_table(result: Results) -> str:
    """The main arms with vLLM as the sampler, beside the embedded sampler's runs of the same seed."""
    rung, seed = result.scale.main, result.scale.seeds[0]
    embedded, programs = _programs(result, rung), _programs(result, rung, vllm=True)
    rows = []
    for name, program in programs.items():
        head = [arms.ARMS[name].title, f"`{program}/seed{seed}`"]
        if seed not in result.seeds(program):
            rows.append([*head, "not run yet", "", ""])
            continue
        x, bf16 = (result.accuracy(program, "final", served, [seed]) for served in (True, False))
        versus = "not run yet"
        if seed in result.seeds(embedded[name]):
            difference = stats.estimate(x - result.accuracy(embedded[name], "final", True, [seed]))
            versus = f"{_judged(difference)} (`{embedded[name]}/seed{seed}`)"
        rows.append([*head, _pm(stats.estimate(x)), _pm(stats.estimate(bf16)), versus])
    title = f"### vLLM as the sampler, `{rung}`, one seed"
    if all(row[2] == "not run yet" for row in rows):
        return f"{title}\n\nNot run yet.\n"
    columns = ["arm", "run", "final, served", "final, bf16", "less the embedded sampler's run, served"]
    note = (
        "Responses were drawn by vLLM, and the learner mirrors its kernels; tested with the embedded sampler, as all"
        " runs are. Accuracy on the test split, %; intervals over prompts."
    )
    sentences = [f"- Final checkpoints: {sentence}" for sentence in gap_sentences(result, rung, "final", vllm=True)]
    return "\n".join([title, "", note, "", _table(columns, rows), "", *sentences, "", *_figure(result, VLLM)])


def diverged_list(result: Results) -> str:
    """Runs that ended with a gradient that is not finite; they count in every table, with their last checkpoint."""
    lines = []
    for name, run in sorted(result.runs.items()):
        if run.failure is None:
            continue
        line = f"- `{name}`: the gradient was not finite in step {run.failure['step']}, update {run.failure['update']}"
        if run.test is None:
            line += "; not tested yet"
        else:
            version = run.test["final"]["version"]
            served, bf16 = (_pm(stats.estimate(run.accuracy("final", x)[None])) for x in (True, False))
            line += f"; its last checkpoint, version {version}: {served} % served, {bf16} % in bf16"
        lines.append(f"{line}.")
    if not lines:
        return ""
    note = "They end there, and their last checkpoint is their final one in all tables (version 0: before RL)."
    return "\n".join(["### Diverged runs", "", note, "", *lines, ""])


def drift_table(result: Results) -> str:
    """Mismatch, error tokens and what the bands drop, at both ends of training."""
    rows = []
    for program in _run_programs(result):
        runs = [run for _, run in sorted(result.runs.items()) if run.program == program and run.has_ended]
        runs = [run for run in runs if run.metrics]
        if runs:
            rows.append([f"`{program}`", _seeds([run.seed for run in runs]), *_drift(runs)])
    if not rows:
        return ""
    columns = [
        *("runs", "seeds", "k3, first steps", "k3, last steps", "largest k3 of a step"),
        *("error tokens, last", "hidden ones, last", "dropped after the first update, last", "entropy, last"),
    ]
    note = (
        f"Means over the first and the last {ENDS} steps and over seeds. k3 estimates the KL divergence of learner and"
        " sampler per token, both at the start of a step. An error token has a probability below 0.001 under the"
        " learner; it is hidden where the sampler was not surprised. Dropped: responses outside TBPO's bands."
    )
    return "\n".join(["### Mismatch, error tokens and dropped responses", "", note, "", _table(columns, rows), ""])


def _drift(runs: Sequence[RunResult]) -> list[str]:
    def mean(key: str, last: bool) -> float | None:
        each = [run.series(key) for run in runs]
        if not all(each):
            return None
        return float(np.mean([np.mean(x[-ENDS:] if last else x[:ENDS]) for x in each]))

    largest = max((max(run.series("mismatch/k3"), default=0.0) for run in runs), default=0.0)
    dropped = mean("later/clip/seq_dropped", last=True)
    return [
        _sci(mean("mismatch/k3", last=False)),
        _sci(mean("mismatch/k3", last=True)),
        _sci(largest),
        _sci(mean("error/tok_learner", last=True)),
        _sci(mean("error/tok_hidden", last=True)),
        "-" if dropped is None else f"{100 * dropped:.1f} %",
        _sci(mean("entropy/mean", last=True)),
    ]


def phases(run: RunResult) -> dict[str, float]:
    """Median seconds per step of each phase, over all steps but the first two, which compile; and of the whole step."""
    steps = run.metrics[2:] or run.metrics
    out = {}
    total = float(np.median([step["time/step_s"] - step.get("time/eval_s", 0.0) for step in steps]))
    for phase, keys in PHASES.items():
        if keys:
            out[phase] = float(np.median([sum(step.get(key, 0.0) for key in keys) for step in steps]))
    out["rest"] = max(0.0, total - sum(out.values()))
    return out | {"step": total}


def time_table(result: Results) -> str:
    """Seconds per step and phase; the speed-up over bf16 from runs that had the machine to themselves."""
    alone = {program: phases(run) for program, run in result.timing.items()}
    shared = {run.name: phases(run) for run in sharing(result).values()}
    if not alone and not shared:
        return "### Seconds per step\n\nNot run yet.\n"
    lines = ["### Seconds per step", "", "Medians over steps, the first two left out.", ""]
    columns = ["run", *PHASES, "step"]
    if alone:
        bf16 = next((t for program, t in alone.items() if program.endswith(f"/{BF16}")), None)
        rows = []
        for program, t in alone.items():
            ratio = "-" if bf16 is None or not t["step"] else f"{bf16['step'] / t['step']:.2f}"
            rows.append([f"`timing/{program}`", *_seconds(t), ratio])
        note = "Runs that had the machine to themselves (`--timing`). The paper: a speed-up of 1.3 of a possible 1.4."
        lines += [note, ""]
        lines += [_table([*columns, "speed-up over BF16"], rows), ""]
    if shared:
        without = "" if alone else "`--timing` was not run. "
        lines += [f"{without}Training runs, which shared the machine: nothing follows about a speed-up.", ""]
        lines += [_table(columns, [[f"`{name}`", *_seconds(t)] for name, t in shared.items()]), ""]
    return "\n".join(lines)


def sharing(result: Results) -> dict[str, RunResult]:
    """Training runs of the first seed by program: they shared the machine, unlike those of `Results.timing`."""
    runs = (run for _, run in sorted(result.runs.items()) if run.has_ended and run.metrics)
    return {run.program: run for run in runs if run.seed == result.scale.seeds[0]}


def _seconds(times: dict[str, float]) -> list[str]:
    return [f"{times[phase]:.3f}" for phase in (*PHASES, "step")]


def figures(result: Results) -> str:
    """Links to what `figures.py` draws."""
    if not any(run.has_ended for run in result.runs.values()):
        return ""
    names = {
        "ratios": "Ratios of learner to sampler and of update to start: main arms, main rung, first seed, last steps.",
        "seconds": "Seconds per step by phase.",
    }
    lines = [f"![{words}](../results/{result.scale.name}_{name}.png)" for name, words in names.items()]
    return "\n".join(["### Figures", "", *lines, ""])


def training_figures(result: Results) -> dict[str, list[str]]:
    """What is drawn over training: a figure's name -> its runs' folders; only what has ended, with bf16 to compare."""
    ended = {run.program for run in result.runs.values() if run.has_ended}
    bf16 = _programs(result, result.scale.main)[BF16]
    groups = {arms.folder_of(rung): list(_programs(result, rung).values()) for rung in _rungs(result)}
    rest = [arms.Run(arm=arm, rung=result.scale.main, seed=0).program for arm in arms.ARMS.values() if not arm.main]
    groups[ABLATIONS] = [bf16, _programs(result, result.scale.main)[QARL], *rest]
    groups[VLLM] = list(_programs(result, result.scale.main, vllm=True).values())
    drawn = {name: [program for program in programs if program in ended] for name, programs in groups.items()}
    told = {bf16, _programs(result, result.scale.main)[QARL]}
    return {
        name: programs for name, programs in drawn.items() if set(programs) - (told if name == ABLATIONS else {bf16})
    }


def _figure(result: Results, name: str, folder: str = "../results") -> list[str]:
    """The link to a figure over training; `folder`: of the figures, seen from the page."""
    if name not in training_figures(result):
        return []
    words = "Validation accuracy, mismatch k3, error tokens, dropped responses over training"
    return [f"![{words}: {name}.]({folder}/{result.scale.name}_{name}.png)", ""]


def missing(result: Results) -> str:
    """What of the plan was not run, run in part, or not tested."""
    lines = []
    for stage in arms.stages(result.scale):
        for run in stage:
            found = result.runs.get(run.name)
            if found is None:
                lines.append(f"- `{run.name}`: not run yet")
            elif not found.has_ended:
                lines.append(f"- `{run.name}`: stopped after {len(found.metrics)} steps, not used")
            elif found.test is None:
                lines.append(f"- `{run.name}`: {'complete' if found.is_complete else 'diverged'}, not tested yet")
    if not lines:
        return "### Not run\n\nNothing: all stages of the plan are complete.\n"
    return "\n".join(["### Not run", "", *lines, ""])


# ---- words ---------------------------------------------------------------------------------------------------------


def _programs(result: Results, rung: str, vllm: bool = False) -> dict[str, str]:
    """Main arm -> its runs' folder at a rung."""
    seed = result.scale.seeds[0]
    return {n: arms.Run(arm=arm, rung=rung, seed=seed, vllm=vllm).program for n, arm in arms.ARMS.items() if arm.main}


def _run_programs(result: Results) -> list[str]:
    """Folders of all runs, main arms first."""
    found = {name.rpartition("/")[0] for name in result.runs}
    return sorted(found, key=lambda program: (program.split("/")[1], program))


def _accuracy_row(result: Results, name: str, program: str) -> list[str]:
    seeds = result.seeds(program)
    head = [arms.ARMS[name].title, f"`{program}`"]
    if not seeds:
        ended = any(run.program == program and run.has_ended for run in result.runs.values())
        return [*head, "not tested" if ended else "not run yet", "", "", "", ""]
    cells = [
        _pm(stats.estimate(result.accuracy(program, label, served, seeds)))
        for label in ("final", "selected")
        for served in (True, False)
    ]
    ends = {run.seed: " (diverged)" for run in result.tested(program) if run.failure is not None}
    return [*head, ", ".join(f"{seed}{ends.get(seed, '')}" for seed in seeds), *cells]


def _pm(x: stats.Estimate, digits: int = 1) -> str:
    return f"{100 * x.mean:.{digits}f} ± {100 * x.half:.{digits}f}"


def _devices(start: dict[str, Any]) -> str:
    found = start.get("devices", "unknown")
    return ", ".join(found) if isinstance(found, list) else str(found)


def _dtype(run: RunResult) -> str:
    return str(run.facts["config"]["model"].get("dtype", "an unknown dtype"))


def _clear(x: stats.Estimate, more: str, less: str) -> str:
    return (more if x.mean > 0 else less) if x.is_clear else "no clear difference"


def _judged(x: stats.Estimate, unit: str = "") -> str:
    """A difference of accuracies, and which of the two is better."""
    return f"{_pm(x)}{unit}, {_clear(x, 'better', 'worse')}"


def _sci(x: float | None) -> str:
    return "-" if x is None else f"{x:.2g}"


def _diverged(result: Results, programs: Sequence[str], seeds: Sequence[int]) -> str:
    """Which of these runs diverged, for the end of a parenthesis."""
    names = [f"{program}/seed{seed}" for program in programs for seed in seeds]
    found = [f"`{name}`" for name in names if result.runs[name].failure is not None]
    return f"; diverged: {', '.join(found)}" if found else ""


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a figure: per seed, (steps, values)."""

    label: str
    seeds: dict[int, tuple[list[int], list[float]]]


def curves(result: Results, programs: Sequence[str], key: str, held_out: bool = False) -> list[Curve]:
    """The series of a metric (or of a validation metric, by version) of the runs that ended, one Curve per folder."""
    out = []
    for program in programs:
        seeds = {}
        for _, run in sorted(result.runs.items()):
            if run.program == program and run.has_ended:
                records, at = (run.evals, "version") if held_out else (run.metrics, "step")
                points = [(r[at], r[key]) for r in records if r.get(key) is not None]
                if points:
                    seeds[run.seed] = ([p[0] for p in points], [p[1] for p in points])
        if seeds:
            out.append(Curve(program, seeds))
    return out
