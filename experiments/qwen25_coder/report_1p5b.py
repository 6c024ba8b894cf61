# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the report on PLAN_1p5b.md's runs, and puts it before the report on the first runs of the 1.5B.

    python -m experiments.qwen25_coder.report_1p5b --merge OUT.tar.xz WORK/questions.jsonl WORK/results.tar.xz...
    python -m experiments.qwen25_coder.report_1p5b results_1p5b_plan.tar.xz results_1p5b.tar.xz > PAGE
    python -m experiments.qwen25_coder.report_1p5b --figure PNG results_1p5b_plan.tar.xz
    python -m experiments.qwen25_coder.report_1p5b --format w3a16 MERGED.tar.xz   # the plan's next part

PAGE is docs/appendix/qwen25_coder_1p5b.md, PNG docs/results/qwen25_coder_1p5b_plan.png.
What plan_1p5b.sh packs is read as report.py reads it. A run is judged by its own evaluations (eval_correct.jsonl); the
archive holds the questions as a run of that name.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.qwen25_coder import report, stats
from experiments.qwen25_coder.curves import Curve, panels
from experiments.qwen25_coder.report import BF16, QARL, ROLLOUT, ROLLOUT_TBPO, Run
from qarl_jax import plot
from qarl_jax.data.suites import IN_GSM_SYMBOLIC

QUESTIONS = "questions"  # name of the file, and of the run that holds it
HELD_OUT, GSM8K = "held out", "GSM8K, clean"
VERSIONS = (28, 20)  # the one that is judged, and the one beside it
ALIGNED = "aligned_grpo_w4a16"
PLANNED = {QARL: 6, ROLLOUT: 6, ALIGNED: 3, BF16: 3, ROLLOUT_TBPO: 3}  # seeds
COMPARED = {
    (QARL, ROLLOUT): "alignment and bands",
    (BF16, ROLLOUT): "the gap",
    (ALIGNED, ROLLOUT): "alignment alone",
    (QARL, ALIGNED): "the bands alone",
    (QARL, ROLLOUT_TBPO): "alignment, under the bands",
    (BF16, QARL): "what is left of the gap",
}
SAID = {names: f"`{names[0]}` less `{names[1]}`: {says}" for names, says in COMPARED.items()}
TRAINING = {
    "reward": "reward/mean",
    "k3": "mismatch/k3",
    "equal tokens": "mismatch/exact",
    "entropy": "entropy/mean",
    "dropped later": "later/clip/seq_dropped",
    "length": "response/length_mean",
    "cut off": "response/truncated",
}
PANELS = (
    ("reward/mean", "share of right samples, training questions", False, False),
    ("mismatch/k3", "mismatch k3 per token (no line: zero)", False, True),
    ("entropy/mean", "entropy", False, False),
    ("response/length_mean", "tokens of a response", False, False),
)


def sets(questions: Run) -> dict[str, list[list[str]]]:
    """Maps each test to its questions, each given as the uids under which it was asked."""
    held_out, gsm8k = [], {}
    for number, row in enumerate(questions.lines(f"{QUESTIONS}.jsonl"), start=1):
        uid = f"{QUESTIONS}/{number}"
        if row["id"].startswith("heldout-"):
            held_out.append([uid])
        elif row["id"] not in IN_GSM_SYMBOLIC:
            gsm8k.setdefault(row["id"], []).append(uid)
    return {HELD_OUT: held_out, GSM8K: list(gsm8k.values())}


def right(run: Run, version: int, asked: Sequence[Sequence[str]]) -> np.ndarray | None:
    """Returns the share of right responses to each question, [P]; None: the version was not evaluated."""
    found = {one["version"]: one["num_correct"] for one in run.lines("eval_correct.jsonl")}.get(version)
    return None if found is None else np.array([np.mean([found[uid] for uid in uids]) for uids in asked])


def scores(seeds: dict[int, Run], version: int, asked: Sequence[Sequence[str]]) -> dict[int, np.ndarray]:
    """Returns seed -> `right`, for the seeds that were evaluated."""
    each = {seed: right(run, version, asked) for seed, run in seeds.items()}
    return {seed: x for seed, x in each.items() if x is not None}


def pair(
    found: dict[str, dict[int, Run]], names: Sequence[str], version: int, asked: Sequence[Sequence[str]]
) -> tuple[list[int], np.ndarray | None]:
    """Returns the seeds that both arms were judged with, and the first's answers less the second's, [S, P] or None."""
    left, other = (scores(found.get(name, {}), version, asked) for name in names)
    both = sorted(left.keys() & other.keys())
    return both, np.array([left[seed] - other[seed] for seed in both]) if both else None


def arms(found: dict[str, dict[int, Run]], tests: dict[str, list[list[str]]]) -> str:
    """Makes the table of planned arms: their runs, and their accuracies."""
    rows = []
    for arm, planned in PLANNED.items():
        seeds = found.get(arm, {})
        cells = [f"`{arm}`", f"{len(seeds)} of {planned}", report.listed(len(run.steps) for run in seeds.values())]
        for test, asked in tests.items():
            for version in VERSIONS[::-1] if test == HELD_OUT else VERSIONS[:1]:
                x = list(scores(seeds, version, asked).values())
                cells.append(report.plus_minus(stats.estimate(np.array(x))) if x else "-")
        rows.append(cells)
    columns = ["arm", "seeds", "steps", *(f"held out, version {v}" for v in VERSIONS[::-1]), GSM8K]
    return report.table(columns, rows)


def differences(
    found: dict[str, dict[int, Run]],
    version: int,
    asked: Sequence[Sequence[str]],
    compared: dict[tuple[str, str], str] = SAID,
) -> str:
    """Makes the table of a plan's comparisons, for pairs of which both arms were judged."""
    rows = []
    for names, says in compared.items():
        seeds, x = pair(found, names, version, asked)
        if x is not None:
            by_seed = report.listed(f"{100 * mean:+.1f}" for mean in x.mean(1))
            rows.append([*report.difference(says, seeds, x), by_seed])
    return report.table(["difference", "seeds", "points", "over seeds", "over questions", "by seed"], rows)


def verdict(found: dict[str, dict[int, Run]], tests: dict[str, list[list[str]]]) -> str:
    """States the report's headline, by the plan's rule."""
    seeds, x = pair(found, (QARL, ROLLOUT), VERSIONS[0], tests[HELD_OUT])
    if x is None:
        return "The headline is not measured yet."
    size = stats.estimate(x)
    if abs(size.mean) <= size.half:
        words = "Whether QaRL is ahead is **not clear**: the interval holds 0."
    else:
        words = f"QaRL is **{'ahead' if size.mean > 0 else 'behind'}**."
    return (
        f"On {x.shape[1]:,} held-out questions after {VERSIONS[0]} steps, `{QARL}` less `{ROLLOUT}` is"
        f" {report.plus_minus(size)} points over {len(seeds)} pairs of seeds. {words}"
    )


def training(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of first and last steps of each arm, means over seeds."""
    rows = []
    for arm, seeds in found.items():
        ends = [report.ends_of(seeds, key) for key in TRAINING.values()]
        rows.append([f"`{arm}`", *("-" if x is None else f"{x[0]:.3g}, {x[1]:.3g}" for x in ends)])
    return report.table(["arm", *TRAINING], rows)


def cut_off(found: dict[str, dict[int, Run]]) -> str:
    """Names the runs that were cut off by the time limit."""
    short = [
        f"`{arm}`, seed {seed}: {len(run.steps)} steps"
        for arm, seeds in found.items()
        for seed, run in seeds.items()
        if len(run.steps) < VERSIONS[0]
    ]
    return f"Cut off by time: {'; '.join(short)}." if short else "No run was cut off."


def formatted(planned: dict[str, Run], form: str) -> str:
    """Returns the tables of the runs under another format; their arms have the names that w4a16's have."""
    found, tests = planned_arms(planned, form), sets(planned[QUESTIONS])
    parts = [f"## Under `{form}`", verdict(found, tests), arms(found, tests), cut_off(found)]
    for test, asked in tests.items():
        parts += [f"### {test}, version {VERSIONS[0]}", differences(found, VERSIONS[0], asked)]
    parts += [f"### {HELD_OUT}, version {VERSIONS[1]}", differences(found, VERSIONS[1], tests[HELD_OUT])]
    return "\n\n".join([*parts, "### Over training", training(found)])


def page(planned: dict[str, Run], first: dict[str, Run]) -> str:
    """Returns the text of the whole report."""
    found, tests = planned_arms(planned), sets(planned[QUESTIONS])
    tokens = sum(step["response/tokens"] for run in found.get(QARL, {}).values() for step in run.steps)
    unequal = sum(step["mismatch/k3"] > 0 for run in found.get(QARL, {}).values() for step in run.steps)
    written = (
        "Generated by `python -m experiments.qwen25_coder.report_1p5b`; do not edit."
        " [PLAN_1p5b.md](../../experiments/qwen25_coder/PLAN_1p5b.md) was committed before the first of its runs."
        " Scores are per cent, with 95 % intervals: Student's t over seeds and questions together."
    )
    judged = (
        f"Held out: {len(tests[HELD_OUT]):,} questions, one sample at T = 1. GSM8K: its {len(tests[GSM8K])} clean"
        f" questions, 4 samples at T = 1, after {VERSIONS[0]} steps. One run of one cell: `make data data-1.5b && bash"
        f" experiments/qwen25_coder/plan_1p5b.sh WORK SECONDS {QARL}:1`."
    )
    drawn = (
        f"{cut_off(found)} The samplers of `{QARL}` drew {tokens:,.0f} tokens; k3 is above 0 in {unequal} of its steps."
    )
    between = (
        "Percentage points, paired by seed and question; bold exceeds two standard errors. The intervals are of 95 %:"
        " with the points over seeds and questions, then over seeds alone, then over questions alone (a bootstrap)."
    )
    shared = "Seconds per step. Two runs shared an H200, and a third then had it for itself: these compare no arms."
    ends = f"Means over seeds, and over the first and the last {report.ENDS} steps."
    earlier = report.page(first, "1.5B").split("\n\n", 1)[1]
    parts = [
        *("# A real policy: Qwen2.5-Coder-1.5B", written),
        *("## Six seeds of QaRL and of a bf16 learner", verdict(found, tests), judged, arms(found, tests), drawn),
        *(f"## Differences after {VERSIONS[0]} steps", between),
        *("### Held-out questions", differences(found, VERSIONS[0], tests[HELD_OUT])),
        *("### GSM8K, clean", differences(found, VERSIONS[0], tests[GSM8K])),
        *(f"## Held-out questions after {VERSIONS[1]} steps", differences(found, VERSIONS[1], tests[HELD_OUT])),
        "## Over training",
        "![Reward, mismatch, entropy and length of each arm and seed.](../results/qwen25_coder_1p5b_plan.png)",
        *(ends, training(found), shared, report.seconds(found)),
        *("# The first runs, one seed", earlier.replace(f"`{report.COMMAND}`; do not edit", "the same command")),
    ]
    return "\n\n".join(parts)


def planned_arms(planned: dict[str, Run], form: str = "w4a16") -> dict[str, dict[int, Run]]:
    """Selects the plan's arms among the runs, by their names under w4a16; form: the scheme in its place."""
    found = report.arms(planned)
    named = {arm: arm.replace("w4a16", form.replace(":", "_")) for arm in PLANNED}
    return {arm: found[name] for arm, name in named.items() if name in found}


def curves(found: dict[str, dict[int, Run]], key: str) -> list[Curve]:
    """Returns the curves of a metric over each arm's steps."""
    out = []
    for arm, seeds in found.items():
        each = {seed: [one for one in run.steps if one.get(key) is not None] for seed, run in seeds.items()}
        out.append(Curve(arm, {s: ([one["step"] for one in x], [one[key] for one in x]) for s, x in each.items() if x}))
    return [curve for curve in out if curve.seeds]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="the plan's archive and that of the first runs")
    parser.add_argument(
        "--merge", type=pathlib.Path, metavar="OUT", help="from the questions and archives: one archive"
    )
    parser.add_argument("--figure", type=pathlib.Path, metavar="PNG", help="write curves and no report")
    parser.add_argument("--format", metavar="SCHEME", help="FORMAT of the runs: report these alone")
    args = parser.parse_args(argv)
    head, *rest = args.files
    if args.merge is not None:
        runs = {name: run for name, run in report.read(rest).items() if run.steps or run.lines("suites.json")}
        report.write(runs | {QUESTIONS: Run(QUESTIONS, {f"{QUESTIONS}.jsonl": head.read_bytes()})}, args.merge)
        return 0
    planned = report.read([head])
    if args.figure is not None:
        look = {arm: (plot.COLORS[number], "-") for number, arm in enumerate(PLANNED)}
        fig = panels(lambda key, _: curves(planned_arms(planned), key), look.__getitem__, PANELS)
        fig.savefig(args.figure, dpi=90, metadata={"Software": None})
        return 0
    if QUESTIONS not in planned:
        raise SystemExit(f"{head}: holds no questions; make an archive with them by --merge, and name it first.")
    print(formatted(planned, args.format) if args.format else page(planned, report.read(rest)), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
