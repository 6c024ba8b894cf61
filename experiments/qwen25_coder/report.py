# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the report of this experiment from the archives of stretch.sh. PLAN.md says how it is judged.

    python -m experiments.qwen25_coder.report results.tar.xz... > docs/appendix/qwen25_coder.md
    python -m experiments.qwen25_coder.report --figure docs/results/qwen25_coder.png results.tar.xz...
    python -m experiments.qwen25_coder.report --probabilities docs/results/qwen25_coder_probabilities.png results...
    python -m experiments.qwen25_coder.report --policy 1.5B results_1p5b.tar.xz   # a part of report_1p5b's page
    python -m experiments.qwen25_coder.report --merge experiments/qwen25_coder/results.tar.xz results.tar.xz...

With --merge the archives become one, which keeps the samples of the last steps alone. A run that is in several of them
is taken from the last.

An arm is named after its config. FORMAT of stretch.sh puts another scheme in the place of w4a16, and so does its name
here: `rollout_w8a8_grpo`. Arms are compared on the seeds that both were judged with, question by question.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import lzma
import pathlib
import re
import tarfile
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from experiments.qwen25_coder import stats
from experiments.qwen25_coder.curves import Curve, panels
from qarl_jax import plot
from qarl_jax.data.suites import IN_GSM_SYMBOLIC

COMMAND = "python -m experiments.qwen25_coder.report"
KEPT = re.compile(
    r"(metrics|eval|eval_correct|questions|samples|suite[.\w]*)\.jsonl|suites\.json|config\.yaml|run\.json"
)
NAME = re.compile(r"(?P<arm>.+)_seed(?P<seed>\d+)")
FORMATTED = re.compile(r"(?P<arm>.*?_w4a16.*?)_(?P<format>(w\d|fp8).*)")  # as stretch.sh names a run under FORMAT
BF16, ROLLOUT, ROLLOUT_TBPO, QARL = "bf16_grpo", "rollout_w4a16_grpo", "rollout_w4a16_tbpo", "qarl_w4a16"
MAIN = (BF16, ROLLOUT, ROLLOUT_TBPO, QARL)
BF16_TBPO = "bf16_tbpo"
ABLATIONS = ("seqmis_grpo_w4a16", "opsm_grpo_w4a16", "positive_grpo_w4a16", BF16_TBPO)
ANOTHER_FORMAT = re.compile(r"rollout_(?P<sampler>.+)_(grpo|tbpo)|qarl_(?P<both>.+)")
UNTRAINED = "base_"  # and a scheme: the model before any RL
STEPS = 30  # of every arm of the plan; what a run does after them counts in no comparison
JUDGED = {"gsm8k": "greedy", "gsm8k:sampled": "T = 1"}  # the suites that decide
POLICIES = {"0.5B": "qwen25_coder", "1.5B": "qwen25_coder_1p5b"}  # what its page and figures are named after
ENDS = 3  # first and last steps that a table averages over
PHASES = {
    "rollout": "time/rollout_s",
    "rewards": "time/reward_s",
    "packing": "time/pack_s",
    "log-probs": "time/old_logprobs_s",
    "updates": "time/update_s",
    "publish": "time/publish_s",
    "evaluation": "time/eval_s",
}
PANELS = (
    ("eval/reward/mean", "accuracy, validation split", True, False),
    ("mismatch/k3", "mismatch k3 per token (no line: zero)", False, True),
    ("mismatch/exact", "share of equal tokens", False, False),
    ("error/tok_learner", "error tokens under the learner", False, True),
    ("entropy/mean", "entropy", False, False),
    ("later/clip/seq_dropped", "responses dropped after the first update", False, False),
)
ERROR = np.log(1e-3)  # a token less probable than this, as in the metrics error/*


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of one run's folder under runs/, by name."""

    name: str
    files: dict[str, bytes]

    def lines(self, file: str) -> list[dict[str, Any]]:
        """Reads the records of a .jsonl file, or of suites.json; empty if it is missing. A torn line is left out."""
        out = []
        for line in self.files.get(file, b"").decode(errors="replace").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                continue
        return out

    @functools.cached_property
    def steps(self) -> list[dict[str, Any]]:
        return self.lines("metrics.jsonl")

    @functools.cached_property
    def evals(self) -> list[dict[str, Any]]:
        return self.lines("eval.jsonl")

    def right(self, suite: str, *, clean: bool = False) -> dict[str, float]:
        """Returns question -> share of right responses, in a suite."""
        return {
            record["uid"]: record["num_correct"] / len(record["responses"])
            for record in self.lines(f"suite.{suite.replace(':', '_')}.jsonl") or self._only(suite)
            if not (clean and record["id"] in IN_GSM_SYMBOLIC)
        }

    def _only(self, suite: str) -> list[dict[str, Any]]:
        """Where one suite was asked for, its file has no name."""
        asked = [record.get("suite") for record in self.lines("suites.json")]
        return self.lines("suite.jsonl") if asked == [suite] else []

    def ends(self, key: str) -> tuple[float, float] | None:
        """Returns the means of a metric over the first and over the last steps; None if it was not recorded."""
        found = [step[key] for step in self.steps if step.get(key) is not None]
        return (float(np.mean(found[:ENDS])), float(np.mean(found[-ENDS:]))) if found else None


def read(archives: Sequence[pathlib.Path]) -> dict[str, Run]:
    """Reads the runs of some archives, by name."""
    runs: dict[str, Run] = {}
    for archive in archives:
        try:
            runs |= _read(archive)
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
            reason = str(error).partition("\n")[0].rstrip(":")  # tarfile adds a line for each compression
            raise SystemExit(f"{archive}: cannot be read ({reason}); name a whole archive of stretch.sh.") from None
    return dict(sorted(runs.items()))


def _read(archive: pathlib.Path) -> dict[str, Run]:
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = pathlib.PurePosixPath(member.name).parts
            if member.isfile() and len(parts) == 3 and parts[0] == "runs" and KEPT.fullmatch(parts[2]):
                file = tar.extractfile(member)
                assert file is not None
                found.setdefault(parts[1], {})[parts[2]] = file.read()
    return {name: Run(name, files) for name, files in found.items()}


def write(runs: dict[str, Run], out: pathlib.Path) -> None:
    """Writes runs to one archive; equal runs give equal bytes."""
    with tarfile.open(out, "w:xz") as tar:
        for run in runs.values():
            for name, content in sorted(run.files.items()):
                if name == "samples.jsonl":
                    content = last_steps(content)
                info = tarfile.TarInfo(f"runs/{run.name}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def last_steps(samples: bytes) -> bytes:
    """Keeps the lines of the last ENDS steps; a torn line is left out."""
    lines = [
        (int(found[1]), line) for line in samples.splitlines(True) if (found := re.search(rb'"step": ?(\d+)', line))
    ]
    last = max((step for step, _ in lines), default=0)
    return b"".join(line for step, line in lines if step > last - ENDS)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "Not run yet."


def listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))


def plus_minus(x: stats.Estimate) -> str:
    return f"{100 * x.mean:.1f} ± {100 * x.half:.1f}"


def arms(runs: dict[str, Run]) -> dict[str, dict[int, Run]]:
    """Groups runs as arm -> seed -> run: main arms, their ablations, other formats, then arms that are not compared."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs.values():
        if name := NAME.fullmatch(run.name):
            arm, formatted = name["arm"], FORMATTED.fullmatch(name["arm"])
            if formatted:
                arm = formatted["arm"].replace("w4a16", formatted["format"])
            found.setdefault(arm, {})[int(name["seed"])] = run
    first = [*MAIN, *ABLATIONS]
    order = [*first, *(arm for arm in sorted(found) if arm not in first and ANOTHER_FORMAT.fullmatch(arm))]
    order += [arm for arm in sorted(found) if arm not in order]
    return {arm: dict(sorted(found[arm].items())) for arm in order if arm in found}


def is_compared(arm: str) -> bool:
    """Tells whether the plan compares an arm; other arms have a task, a length or a rate of their own."""
    return arm in (*MAIN, *ABLATIONS) or ANOTHER_FORMAT.fullmatch(arm) is not None


def matrices(groups: Sequence[Sequence[Run]], suite: str, *, clean: bool = False) -> list[np.ndarray] | None:
    """Returns, per group, an array [S, P]: share right per seed and question that all answered; None: no question."""
    each = [[run.right(suite, clean=clean) for run in group] for group in groups]
    shared = sorted(set.intersection(*(set(x) for group in each for x in group)))
    return [np.array([[x[uid] for uid in shared] for x in group]) for group in each] if len(shared) > 1 else None


def score(seeds: dict[int, Run], suite: str, *, clean: bool = False) -> str:
    """Formats the accuracy over the seeds that were judged, and names these seeds if some are missing."""
    judged = {seed: run for seed, run in seeds.items() if run.right(suite)}
    found = matrices([list(judged.values())], suite, clean=clean) if judged else None
    return "-" if found is None else plus_minus(stats.estimate(found[0])) + partly(judged, seeds)


def partly(found: Iterable[int], seeds: Collection[int]) -> str:
    """Names the seeds that a table cell is about, if it is not about all of them; else ""."""
    found = list(found)
    return "" if len(found) == len(seeds) else f" (of {listed(found)})"


def formats(runs: dict[str, Run]) -> str:
    """Makes the table of accuracies before any RL, by scheme."""
    rows = []
    for run in runs.values():
        if run.name.startswith(UNTRAINED):
            scores = [score({0: run}, suite) for suite in ("own", "gsm8k", "gsm8k:sampled", "humaneval")]
            scores += [score({0: run}, suite) for suite in ("hellaswag", "truthfulqa")]
            rows.append([f"`{run.name.removeprefix(UNTRAINED)}`", *scores])
    columns = ["scheme", "held out", "GSM8K", "GSM8K, T = 1", "HumanEval", "HellaSwag", "TruthfulQA"]
    return table(columns, rows)


def accuracy(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of accuracies of every arm."""
    rows = []
    for arm, seeds in found.items():
        before = {seed: run.evals[0] for seed, run in seeds.items() if run.evals}
        after = {seed: run.evals[-1] for seed, run in seeds.items() if run.evals[1:]}
        if is_compared(arm):
            after = {seed: one for seed, run in seeds.items() for one in run.evals if one["version"] == STEPS}
        held = [held_out(list(x.values())) + partly(x, seeds) if x else "-" for x in (before, after)]
        steps = listed(len(run.steps) for run in seeds.values())
        scores = [score(seeds, "gsm8k"), score(seeds, "gsm8k", clean=True), score(seeds, "gsm8k:sampled")]
        # Its training questions are HumanEval's.
        scores.append("-" if arm.startswith("code_") else score(seeds, "humaneval"))
        scores += [score(seeds, suite) for suite in ("hellaswag", "truthfulqa")]
        rows.append([f"`{arm}`", listed(seeds), steps, *held, *scores])
    columns = [
        *("arm", "seeds", "steps", "held out, before", "after"),
        *("GSM8K", "the clean 94", "GSM8K, T = 1", "HumanEval", "HellaSwag", "TruthfulQA"),
    ]
    return table(columns, rows)


def held_out(evals: Sequence[dict[str, Any]]) -> str:
    """Formats the mean held-out reward of some seeds, with its interval over seeds and their questions."""
    means, errors = (np.array([one[f"eval/reward/{key}"] for one in evals]) for key in ("mean", "stderr"))
    return plus_minus(stats.of_means(means, errors))


def tried(found: dict[str, dict[int, Run]]) -> list[str]:
    """Lists the formats under which some arm was trained."""
    names = [ANOTHER_FORMAT.fullmatch(arm) for arm in found]
    return list(dict.fromkeys(name["sampler"] or name["both"] for name in names if name))


def comparisons(found: dict[str, dict[int, Run]]) -> Iterable[tuple[str, str, str]]:
    """Yields pairs of arms, and the format whose gap the first may recover from the second ("": none)."""
    yield BF16, f"{UNTRAINED}bf16", ""
    for form in tried(found):
        rollout, tbpo, qarl = f"rollout_{form}_grpo", f"rollout_{form}_tbpo", f"qarl_{form}"
        yield BF16, rollout, ""
        yield tbpo, rollout, form
        yield qarl, rollout, form
        yield qarl, tbpo, ""
        yield BF16, qarl, ""
        yield qarl, f"{UNTRAINED}{form}", ""
    for arm in ABLATIONS:
        yield (arm, BF16, "") if arm == BF16_TBPO else (QARL, arm, "")


def judged_by_all(
    found: dict[str, dict[int, Run]], names: Sequence[str], suite: str
) -> tuple[list[int], list[np.ndarray]]:
    """Returns the seeds with which all of these arms were judged, and per arm the answers [S, P] to clean questions."""
    groups = [{seed: run for seed, run in found.get(name, {}).items() if run.right(suite)} for name in names]
    seeds = sorted(set.intersection(*map(set, groups)))
    x = matrices([[group[seed] for seed in seeds] for group in groups], suite, clean=True) if seeds else None
    return (seeds, x) if x else ([], [])


def differences(found: dict[str, dict[int, Run]], suite: str) -> str:
    """Makes the table of differences between arms, each with its intervals."""
    rows = []
    for left, right, form in comparisons(found):
        seeds, x = judged_by_all(found, [left, right], suite)
        if not seeds:
            continue
        cells = difference(f"`{left}` less `{right}`", seeds, x[0] - x[1])
        rows.append([*cells, recovered(found, left, form, suite) if form else ""])
    return table(["difference", "seeds", "points", "over seeds", "over questions", "of the gap, %"], rows)


def difference(name: str, seeds: Sequence[int], x: np.ndarray) -> list[str]:
    """Formats a difference x [S, P] between arms as table cells: name, seeds, mean, and three intervals."""
    both, seeds_alone = stats.estimate(x), stats.over_seeds(x)
    mark = "**" if both.is_clear else ""
    alone = "-" if seeds_alone is None else f"± {100 * seeds_alone.half:.1f}"
    over_questions = interval(stats.bootstrap(lambda drawn: drawn.mean(0), x))
    return [name, listed(seeds), f"{mark}{plus_minus(both)}{mark}", alone, over_questions]


def held_out_differences(found: dict[str, dict[int, Run]]) -> str:
    """Lists differences of held-out accuracy after STEPS; empty without a pair of arms of two seeds.

    The 0.5B's runs kept no answers to single held-out questions, so the interval is over seeds alone.
    """
    after = {
        arm: {s: one["eval/reward/mean"] for s, run in seeds.items() for one in run.evals if one["version"] == STEPS}
        for arm, seeds in found.items()
    }
    rows = []
    for left, right, _ in comparisons(found):
        seeds = sorted(after.get(left, {}).keys() & after.get(right, {}).keys())
        if len(seeds) > 1:
            gains = np.array([after[left][seed] - after[right][seed] for seed in seeds])
            size = stats.of_means(gains, np.zeros_like(gains))
            mark = "**" if abs(size.mean) > size.half else ""
            by_seed = listed(f"{100 * gain:+.1f}" for gain in gains)
            rows.append(f"- `{left}` less `{right}`: {mark}{plus_minus(size)}{mark} ({by_seed})")
    return "\n".join(rows)


def recovered(found: dict[str, dict[int, Run]], arm: str, form: str, suite: str) -> str:
    """Formats the share of a format's gap that an arm recovers, on the seeds of all three arms."""
    _, x = judged_by_all(found, [BF16, f"rollout_{form}_grpo", arm], suite)
    share = stats.recovered(*x) if x else None
    if share is None:
        return "no gap" if x else "-"
    bf16, rollout, aligned = x
    ends = stats.bootstrap(share_of_gap, aligned - rollout, bf16 - rollout)
    return f"{plus_minus(share)} {interval(ends)}"


def share_of_gap(gained: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Returns the recovered share of the draws whose gap is above 0; arrays are [P, N], one column per draw."""
    gained, gap = gained.mean(0), gap.mean(0)
    return gained[gap > 0] / gap[gap > 0]


def interval(ends: tuple[float, float]) -> str:
    return f"[{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def verdict(found: dict[str, dict[int, Run]]) -> list[str]:
    """States, per format, whether quantized rollouts have a gap to BF16 on the clean GSM8K questions."""
    out, measured, gaps = [], [], 0
    for form in tried(found):
        for suite, words in JUDGED.items():
            seeds, x = judged_by_all(found, [BF16, f"rollout_{form}_grpo"], suite)
            if seeds:
                gap = stats.estimate(x[0] - x[1])
                gaps += (is_gap := gap.is_clear and gap.mean > 0)
                measured += [f"`{form}`"] if f"`{form}`" not in measured else []
                there_is = "a gap" if is_gap else "no gap beyond two standard errors"
                out.append(f"- `{form}`, {words}, seeds {listed(seeds)}: {there_is}, {plus_minus(gap)} points.")
    if out and not gaps:
        out.append(f"- No format that was trained with has a gap beyond two standard errors: {listed(measured)}.")
    return out or ["The gap is not measured yet: it takes the first two arms with one seed."]


def drift(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of mismatch and entropy in the first and last steps, over an arm's seeds together."""
    keys = {
        "k3": "mismatch/k3",
        "equal tokens": "mismatch/exact",
        "entropy": "entropy/mean",
        "dropped later": "later/clip/seq_dropped",
        "cut off": "response/truncated",
    }
    rows = []
    for arm, seeds in trained(found).items():
        cells = []
        for key in keys.values():
            ends, digits = ends_of(seeds, key), ".4f" if key == "mismatch/exact" else ".2g"
            cells.append("-" if ends is None else f"{ends[0]:{digits}}, {ends[1]:{digits}}")
        rows.append([f"`{arm}`", listed(seeds), *cells])
    return table(["arm", "seeds", *keys], rows)


def error_tokens(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of error tokens, per thousand tokens and hundred responses, in first and last steps."""
    keys = {
        "under the learner": ("error/tok_learner", 1000),
        "A > 0": ("error/tok_learner_pos", 1000),
        "A < 0": ("error/tok_learner_neg", 1000),
        "hidden from the sampler": ("error/tok_hidden", 1000),
        "responses with a cluster, %": ("error/seq_learner", 100),
    }
    rows = []
    for arm, seeds in trained(found).items():
        ends = [(ends_of(seeds, key), times) for key, times in keys.values()]
        cells = ["-" if x is None else f"{times * x[0]:.1f}, {times * x[1]:.1f}" for x, times in ends]
        rows.append([f"`{arm}`", *cells])
    return table(["arm", *keys], rows)


def trained(found: dict[str, dict[int, Run]]) -> dict[str, dict[int, Run]]:
    """Keeps the runs that made a step."""
    made = {arm: {seed: run for seed, run in seeds.items() if run.steps} for arm, seeds in found.items()}
    return {arm: seeds for arm, seeds in made.items() if seeds}


def ends_of(seeds: dict[int, Run], key: str) -> tuple[float, float] | None:
    """Returns the means of a metric over seeds, in the first and in the last steps."""
    ends = [found for run in seeds.values() if (found := run.ends(key)) is not None]
    return (float(np.mean([x[0] for x in ends])), float(np.mean([x[1] for x in ends]))) if ends else None


def curves(found: dict[str, dict[int, Run]], key: str, held_out: bool) -> list[Curve]:
    """Returns the curves of a metric of the main arms over training."""
    out = []
    for arm in MAIN:
        seeds: dict[int, tuple[list[int], list[float]]] = {}
        for seed, run in found.get(arm, {}).items():
            records = [one for one in (run.evals if held_out else run.steps) if one.get(key) is not None]
            if records:
                seeds[seed] = [one["version" if held_out else "step"] for one in records], [one[key] for one in records]
        if seeds:
            out.append(Curve(arm, seeds))
    return out


def seconds(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of mean seconds by phase, which sum to the step's."""
    rows = []
    for arm, seeds in trained(found).items():
        steps = [one for run in seeds.values() for one in run.steps[2:]]
        if steps:
            step, *phases = (
                float(np.mean([one.get(key, 0.0) for one in steps])) for key in ("time/step_s", *PHASES.values())
            )
            rows.append([f"`{arm}`", *(f"{x:.2f}" for x in (*phases, step - sum(phases), step))])
    return table(["arm", *PHASES, "rest", "step"], rows)


def quoted(found: dict[str, dict[int, Run]]) -> list[str]:
    """Quotes one error token, with its context, of each main arm's first seed; one hidden from the sampler, if any."""
    out = []
    for arm, seeds in found.items():
        if arm not in MAIN:
            continue
        hits = []
        for sample in reversed(next(iter(seeds.values())).lines("samples.jsonl")):
            text, tokens = sample["tokens"]["text"], sample["tokens"]
            # What was not finite is null, and no error token.
            old, drawn = (np.array(tokens.get(key, tokens["old"]), float) for key in ("old", "rollout"))
            low = np.flatnonzero(old < ERROR)
            if len(low):  # the one that surprised the sampler least
                i = int(max(low, key=lambda at: drawn[at] - old[at]))
                before, behind = "".join(text[max(0, i - 6) : i]), "".join(text[i + 1 : i + 5])
                words = re.sub(r"[\s|`]+", " ", f"...{before}[[{text[i]}]]{behind}...")
                odds = f"sampler {np.exp(drawn[i]):.1g}, learner {np.exp(old[i]):.1g}"
                line = f"- `{arm}`, step {sample['step']}, {odds}, reward {sample['reward']:g}: `{words}`"
                hits.append((drawn[i] < ERROR, line))
        out += [line for _, line in sorted(hits, key=lambda hit: hit[0])[:1]]
    return out


def page(runs: dict[str, Run], policy: str = "0.5B") -> str:
    """Returns the text of the whole report; `policy` is one of POLICIES."""
    figure = f"../results/{POLICIES[policy]}"
    found = arms(runs)
    compared = {arm: seeds for arm, seeds in found.items() if is_compared(arm)}
    every_seed = range(100)
    untrained = {run.name: dict.fromkeys(every_seed, run) for run in runs.values() if run.name.startswith(UNTRAINED)}
    written = (
        f"Generated by `{COMMAND}`; do not edit. [PLAN.md](../../experiments/qwen25_coder/PLAN.md) was written before"
        " the runs. Scores are per cent, with 95 % intervals: Student's t over seeds and questions, or over one"
        " seed's questions."
    )
    judged = (
        f"Runs are judged after {STEPS} steps, or fewer. GSM8K and HumanEval are greedy; at T = 1, 4 samples a"
        f" question. One run of one cell: `make data{'' if policy == '0.5B' else ' data-1.5b'} && MODEL=models/"
        f"qwen25-coder-{policy.lower()} bash experiments/qwen25_coder/stretch.sh WORK SECONDS {QARL}:0`."
    )
    between = (
        "Percentage points on the 94 clean questions of GSM8K, paired by seed and question; bold exceeds two standard"
        f" errors. `{UNTRAINED}...` is the untrained model; the gap is `{BF16}` less the rollout arm. Intervals are of"
        " 95 %: over seeds and questions, over seeds alone, over questions alone (a bootstrap)."
    )
    of_seeds = "128 questions, 4 samples at T = 1; intervals over seeds alone, bold where they leave 0 out."
    ends = f"Means over seeds, and over the first and the last {ENDS} steps."
    errors = (
        "An error token has a probability below 0.001 under the learner. Hidden ones have more under the sampler."
        " Rates are per thousand tokens, of all responses and by the advantage's sign."
        " Clusters are three within eight positions."
    )
    pairs = (
        "Density of the last samples' tokens by probability under the learner, before and after a step's updates, and"
        " the ratio (QaRL's figures 4 and 5). Main arms, first seed."
    )
    means = (
        "Means over seeds without the first two steps. Runs shared cards: no arms are compared. Earlier runs counted"
        " waiting for log-probs as packing."
    )
    parts = [
        *(f"# A real policy: Qwen2.5-Coder-{policy}", written),
        *("## Rounding before any RL", formats(runs)),
        *("## After RL", judged, accuracy(compared)),
        *("## Differences", between, "\n".join(verdict(found))),
    ]
    for suite, words in JUDGED.items():
        parts += [f"### GSM8K, {words}", differences(untrained | found, suite)]
    if seen := held_out_differences(found):
        parts += [f"### Held-out questions, after {STEPS} steps", of_seeds, seen]
    if others := {arm: seeds for arm, seeds in found.items() if not is_compared(arm)}:
        parts += ["## Other runs", "They are in no comparison.", accuracy(others)]
    parts += [
        *("## Mismatch and entropy", f"![The main arms over training.]({figure}.png)", ends, drift(found)),
        *("## Error tokens", errors, error_tokens(compared), "\n".join(quoted(found))),
        *("## Probabilities before and after", pairs),
        f"![Density and ratio of probabilities.]({figure}_probabilities.png)",
        *("## Seconds per step", means, seconds(found)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archives", nargs="+", type=pathlib.Path)
    parser.add_argument("--merge", type=pathlib.Path, metavar="OUT", help="write one archive and no report")
    parser.add_argument(
        "--figure", type=pathlib.Path, metavar="PNG", help="write curves of the main arms and no report"
    )
    parser.add_argument(
        "--probabilities", type=pathlib.Path, metavar="PNG", help="write tokens' probabilities and no report"
    )
    parser.add_argument("--policy", choices=POLICIES, default="0.5B")
    args = parser.parse_args(argv)
    runs = read(args.archives)
    if args.merge is not None:
        write(runs, args.merge)
    elif args.figure is not None:
        found = arms(runs)
        fig = panels(
            lambda key, held_out: curves(found, key, held_out),
            lambda arm: (plot.COLORS[MAIN.index(arm)], "-"),
            PANELS,
        )
        fig.savefig(args.figure, dpi=90, metadata={"Software": None})
    elif args.probabilities is not None:
        first = {arm: next(iter(seeds.values())) for arm, seeds in arms(runs).items() if arm in MAIN}
        tokens = {arm: plot.tokens_of(run.lines("samples.jsonl"), ENDS) for arm, run in first.items()}
        plot.probability_figure(tokens).savefig(args.probabilities, dpi=60, metadata={"Software": None})
    else:
        print(page(runs, args.policy), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
