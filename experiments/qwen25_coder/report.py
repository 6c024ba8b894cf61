# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of this experiment, made from what stretch.sh packs. PLAN.md says how it is judged.

    python -m experiments.qwen25_coder.report results.tar.xz... > docs/appendix/qwen25_coder.md
    python -m experiments.qwen25_coder.report --figure docs/results/qwen25_coder.png results.tar.xz...
    python -m experiments.qwen25_coder.report --merge experiments/qwen25_coder/results.tar.xz results.tar.xz...

With --merge the archives become one, which keeps the samples of the last steps alone. A run that is in several of them
is taken from the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import pathlib
import re
import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.alignment import figures, stats
from experiments.alignment.report import Curve
from qarl_jax import plot
from qarl_jax.data.suites import IN_GSM_SYMBOLIC

COMMAND = "python -m experiments.qwen25_coder.report"
KEPT = re.compile(r"(metrics|eval|samples|suite[.\w]*)\.jsonl|suites\.json|config\.yaml|run\.json")
NAME = re.compile(r"(?P<arm>.+)_seed(?P<seed>\d+)")
BF16, ROLLOUT, ROLLOUT_TBPO, QARL = "bf16_grpo", "rollout_w4a16_grpo", "rollout_w4a16_tbpo", "qarl_w4a16"
MAIN = (BF16, ROLLOUT, ROLLOUT_TBPO, QARL)
FIGURE = "results/qwen25_coder.png"  # in docs/
ENDS = 3  # first and last steps that a table averages over
PHASES = {
    "rollout": "time/rollout_s",
    "log-probs": "time/old_logprobs_s",
    "updates": "time/update_s",
    "publish": "time/publish_s",
    "step": "time/step_s",
}
ERROR = np.log(1e-3)  # a token less probable than this, as in the metrics error/*


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder under runs/: its files by name."""

    name: str
    files: dict[str, bytes]

    def lines(self, file: str) -> list[dict[str, Any]]:
        """The records of a .jsonl file, or of suites.json; none where it is missing. A torn last line is left out."""
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
        """Question -> share of right responses."""
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
        """Means over the first and the last steps."""
        found = [step[key] for step in self.steps if step.get(key) is not None]
        return (float(np.mean(found[:ENDS])), float(np.mean(found[-ENDS:]))) if found else None


def read(archives: Sequence[pathlib.Path]) -> dict[str, Run]:
    """Runs by name."""
    runs: dict[str, Run] = {}
    for archive in archives:
        found: dict[str, dict[str, bytes]] = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                parts = pathlib.PurePosixPath(member.name).parts
                if member.isfile() and len(parts) == 3 and parts[0] == "runs" and KEPT.fullmatch(parts[2]):
                    file = tar.extractfile(member)
                    assert file is not None
                    found.setdefault(parts[1], {})[parts[2]] = file.read()
        runs |= {name: Run(name, files) for name, files in found.items()}
    return dict(sorted(runs.items()))


def write(runs: dict[str, Run], out: pathlib.Path) -> None:
    """One archive of them; the same runs give the same bytes."""
    with tarfile.open(out, "w:xz") as tar:
        for run in runs.values():
            for name, content in sorted(run.files.items()):
                if name == "samples.jsonl":
                    content = last_steps(content)
                info = tarfile.TarInfo(f"runs/{run.name}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def last_steps(samples: bytes) -> bytes:
    """The lines of the last ENDS steps; a torn line is none."""
    lines = [
        (int(found[1]), line) for line in samples.splitlines(True) if (found := re.search(rb'"step": ?(\d+)', line))
    ]
    last = max((step for step, _ in lines), default=0)
    return b"".join(line for step, line in lines if step > last - ENDS)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "Not run yet."


def plus_minus(x: stats.Estimate) -> str:
    return f"{100 * x.mean:.1f} ± {100 * x.half:.1f}"


def arms(runs: dict[str, Run]) -> dict[str, dict[int, Run]]:
    """Arm -> seed -> run."""
    out: dict[str, dict[int, Run]] = {}
    for run in runs.values():
        if found := NAME.fullmatch(run.name):
            out.setdefault(found["arm"], {})[int(found["seed"])] = run
    return out


def matrix(seeds: Sequence[Run], suite: str, *, clean: bool = False) -> np.ndarray | None:
    """[S, P]: share right per seed and question; None where a seed has no answers."""
    each = [run.right(suite, clean=clean) for run in seeds]
    if not each or not all(each):
        return None
    shared = sorted(set.intersection(*(set(x) for x in each)))
    return np.array([[x[uid] for uid in shared] for x in each])


def score(seeds: Sequence[Run], suite: str, *, clean: bool = False) -> str:
    found = matrix(seeds, suite, clean=clean)
    return "-" if found is None else plus_minus(stats.estimate(found))


def formats(runs: dict[str, Run]) -> str:
    """Before any RL, by scheme."""
    rows = []
    for run in runs.values():
        if run.name.startswith("base_"):
            scores = [score([run], suite) for suite in ("own", "gsm8k", "gsm8k:sampled", "humaneval")]
            scores += [score([run], suite) for suite in ("hellaswag", "truthfulqa")]
            rows.append([f"`{run.name.removeprefix('base_')}`", *scores])
    columns = ["scheme", "held out", "GSM8K", "GSM8K, T = 1", "HumanEval", "HellaSwag", "TruthfulQA"]
    return table(columns, rows)


def accuracy(found: dict[str, dict[int, Run]]) -> str:
    """Every arm."""
    rows = []
    for arm, seeds in found.items():
        runs = [run for _, run in sorted(seeds.items())]
        held = ["-", "-"]
        if all(run.evals for run in runs):
            held = [held_out([run.evals[i] for run in runs]) for i in (0, -1)]
        steps = ", ".join(str(len(run.steps)) for run in runs)
        scores = [score(runs, "gsm8k"), score(runs, "gsm8k", clean=True), score(runs, "gsm8k:sampled")]
        scores.append(score(runs, "humaneval"))
        rows.append([f"`{arm}`", ", ".join(map(str, sorted(seeds))), steps, *held, *scores])
    columns = [
        "arm",
        "seeds",
        "steps",
        "held out, before",
        "after",
        "GSM8K",
        "the clean 94",
        "GSM8K, T = 1",
        "HumanEval",
    ]
    return table(columns, rows)


def held_out(evals: Sequence[dict[str, Any]]) -> str:
    """The mean of some seeds' validation, and 1.96 standard errors over its questions."""
    error = np.sqrt(sum(one["eval/reward/stderr"] ** 2 for one in evals)) / len(evals)
    return f"{100 * np.mean([one['eval/reward/mean'] for one in evals]):.1f} ± {196 * error:.1f}"


def verdict(found: dict[str, dict[int, Run]]) -> list[str]:
    """The gap, and what of it is recovered, on the clean GSM8K questions."""
    seeds = sorted(set(found.get(BF16, {})) & set(found.get(ROLLOUT, {})))
    if not seeds:
        return ["The gap is not measured yet: it takes the first two arms with one seed."]
    out = []
    for suite in ("gsm8k", "gsm8k:sampled"):
        names = [*MAIN[:2], *(name for name in MAIN[2:] if set(seeds) <= set(found.get(name, {})))]
        x = {name: matrix([found[name][seed] for seed in seeds], suite, clean=True) for name in names}
        bf16, rollout = x[BF16], x[ROLLOUT]
        if bf16 is None or rollout is None:
            continue
        gap = stats.estimate(bf16 - rollout)
        there_is = "a gap" if gap.is_clear and gap.mean > 0 else "no gap beyond two standard errors"
        out.append(f"- `{suite}`, seeds {', '.join(map(str, seeds))}: {there_is}, {plus_minus(gap)} points.")
        for name in names[2:]:
            arm = x[name]
            if arm is None:
                continue
            share = stats.recovered(bf16, rollout, arm)
            more = "" if share is None else f"; it recovers {plus_minus(share)} % of the gap"
            out.append(f"- `{name}` less `{ROLLOUT}`: {plus_minus(stats.estimate(arm - rollout))} points{more}.")
    return out or ["No answers to GSM8K were kept of these runs."]


def drift(runs: dict[str, Run]) -> str:
    """Mismatch, error tokens, entropy: first and last steps."""
    keys = {
        "k3": "mismatch/k3",
        "equal tokens": "mismatch/exact",
        "error tokens": "error/tok_learner",
        "hidden from the sampler": "error/tok_hidden",
        "entropy": "entropy/mean",
        "dropped later": "later/clip/seq_dropped",
        "cut off": "response/truncated",
    }
    rows = []
    for run in runs.values():
        if run.steps:
            cells = []
            for key in keys.values():
                ends, digits = run.ends(key), ".4f" if key == "mismatch/exact" else ".2g"
                cells.append("-" if ends is None else f"{ends[0]:{digits}}, {ends[1]:{digits}}")
            rows.append([f"`{run.name}`", *cells])
    return table(["run", *keys], rows)


def curves(found: dict[str, dict[int, Run]], key: str, held_out: bool) -> list[Curve]:
    """A metric of the main arms over training."""
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


def seconds(runs: dict[str, Run]) -> str:
    """Medians by phase."""
    rows = []
    for run in runs.values():
        steps = run.steps[2:]
        if steps:
            medians = [float(np.median([step.get(key, 0.0) for step in steps])) for key in PHASES.values()]
            rows.append([f"`{run.name}`", *(f"{x:.2f}" for x in medians)])
    return table(["run", *PHASES], rows)


def quoted(runs: dict[str, Run], per_run: int = 2) -> list[str]:
    """Error tokens of the last samples that hold some, with what stands before and behind."""
    out = []
    for run in runs.values():
        found: list[str] = []
        for sample in reversed(run.lines("samples.jsonl")):
            text, old = sample["tokens"]["text"], np.array(sample["tokens"]["old"])
            hits = np.flatnonzero(old < ERROR)
            if len(hits) and len(found) < per_run:
                i = int(hits[0])
                before, behind = "".join(text[max(0, i - 12) : i]), "".join(text[i + 1 : i + 9])
                words = re.sub(r"[\n|`]+", " ", f"...{before}[[{text[i]}]]{behind}...")
                what = f"probability {np.exp(old[i]):.1g}, reward {sample['reward']:g}"
                found.append(f"- `{run.name}`, step {sample['step']}, {what}: `{words}`")
        out += found
    return out


def page(runs: dict[str, Run]) -> str:
    """All of it."""
    found = arms(runs)
    written = (
        f"Generated by `{COMMAND}`; do not edit. [PLAN.md](../../experiments/qwen25_coder/PLAN.md) was written before"
        " the runs. Scores are per cent with 95 % intervals over questions and seeds; held-out ones over questions."
    )
    ends = (
        f"Means over the first and over the last {ENDS} steps. An error token has a probability below 0.001 under the"
        " learner; it is hidden where the sampler was not surprised."
    )
    medians = "Medians, the first two steps left out. Runs may have shared their card."
    parts = [
        *("# A real policy: Qwen2.5-Coder-0.5B", written),
        *("## Rounding before any RL", formats(runs)),
        *("## After RL", accuracy(found), "\n".join(verdict(found))),
        *(
            "## Mismatch, error tokens, entropy",
            f"![The main arms over training.](../{FIGURE})",
            ends,
            drift(runs),
            "\n".join(quoted(runs)),
        ),
        *("## Seconds per step", medians, seconds(runs)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archives", nargs="+", type=pathlib.Path)
    parser.add_argument("--merge", type=pathlib.Path, metavar="OUT", help="write one archive and no report")
    parser.add_argument(
        "--figure", type=pathlib.Path, metavar="PNG", help="write curves of the main arms and no report"
    )
    args = parser.parse_args(argv)
    runs = read(args.archives)
    if args.merge is not None:
        write(runs, args.merge)
    elif args.figure is not None:
        found = arms(runs)
        fig = figures.panels(
            lambda key, held_out: curves(found, key, held_out), lambda arm: (plot.COLORS[MAIN.index(arm)], "-")
        )
        fig.savefig(args.figure, dpi=90, metadata={"Software": None})
    else:
        print(page(runs), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
