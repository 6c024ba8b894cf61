# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The raw results as tables of runs: what figures and text are made from, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.alignment import archive, arms


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run, as packed.

    Attributes:
      name: as in "w4a16_g128/4_qarl_tbpo/seed0".
      metrics, evals, histograms: records of its .jsonl files.
      test: its test.json, None where it was not tested.
      facts: its run.json.
      is_complete: whether it reached its last step.
      failure: its failed.json where it diverged: step, update, last checkpoint; None otherwise.
    """

    name: str
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    histograms: list[dict[str, Any]]
    test: dict[str, Any] | None
    facts: dict[str, Any]
    is_complete: bool
    failure: dict[str, Any] | None

    @property
    def has_ended(self) -> bool:
        """Whether it is complete or diverged."""
        return self.is_complete or self.failure is not None

    @property
    def arm(self) -> str:
        return self.name.split("/")[1]

    @property
    def program(self) -> str:
        """Its folder without the seed."""
        return self.name.rpartition("/")[0]

    @property
    def seed(self) -> int:
        return int(self.name.rpartition("seed")[2])

    @property
    def sampler(self) -> str:
        """Scheme of its sampler."""
        quant = self.facts["config"]["quant"]
        return quant["forward"] if quant.get("rollout") is None else quant["rollout"]

    def accuracy(self, label: str, served: bool) -> Float[np.ndarray, " P"]:
        """Share of right responses per test prompt. label: final or selected; served: in the sampler's scheme."""
        assert self.test is not None
        counts = self.test[label]["schemes"][self.sampler if served else "bf16"]
        return np.asarray(counts, np.float64) / self.test["num_samples"]

    def series(self, key: str) -> list[float]:
        """A metric over the steps that have it."""
        return [record[key] for record in self.metrics if record.get(key) is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """All of one scale.

    Attributes:
      runs: by name. timing: by program: runs that had the machine to themselves.
      base: the base's test, None where not run. sha256: of its weights; empty where unknown.
    """

    scale: arms.Scale
    runs: dict[str, RunResult]
    timing: dict[str, RunResult]
    base: dict[str, Any] | None
    sha256: str

    def tested(self, program: str) -> list[RunResult]:
        """Tested runs of an arm at a rung, complete or diverged, by seed."""
        found = [run for run in self.runs.values() if run.program == program and run.has_ended and run.test]
        return sorted(found, key=lambda run: run.seed)

    def accuracy(self, program: str, label: str, served: bool, seeds: list[int]) -> Float[np.ndarray, "S P"]:
        """Per seed and test prompt."""
        by_seed = {run.seed: run for run in self.tested(program)}
        return np.stack([by_seed[seed].accuracy(label, served) for seed in seeds])

    def seeds(self, *programs: str) -> list[int]:
        """Seeds that all of these arms have tested runs of."""
        each = [{run.seed for run in self.tested(program)} for program in programs]
        return sorted(set.intersection(*each))


def load(path: pathlib.Path) -> dict[str, Results]:
    """The archive's results by scale; a scale of which nothing was run is empty."""
    members = archive.read(path)
    return {name: of_scale(members, scale) for name, scale in arms.SCALES.items()}


def of_scale(members: dict[str, bytes], scale: arms.Scale) -> Results:
    """The members of one scale."""

    def run(name: str, kind: str) -> RunResult:
        head = f"{scale.name}/{kind}/{name}"
        test, failure = members.get(f"{head}/test.json"), members.get(f"{head}/failed.json")
        return RunResult(
            name=name,
            metrics=_lines(members.get(f"{head}/metrics.jsonl")),
            evals=_lines(members.get(f"{head}/eval.jsonl")),
            histograms=_lines(members.get(f"{head}/histograms.jsonl")),
            test=None if test is None else json.loads(test),
            facts=json.loads(members[f"{head}/run.json"]),
            is_complete=f"{head}/done.json" in members,
            failure=None if failure is None else json.loads(failure),
        )

    def names(kind: str) -> list[str]:
        head = f"{scale.name}/{kind}/"
        return sorted(name.removeprefix(head) for name in archive.run_names(members) if name.startswith(head))

    base = members.get(f"{scale.name}/base_test.json")
    return Results(
        scale=scale,
        runs={name: run(name, "runs") for name in names("runs")},
        timing={name: run(name, "timing") for name in names("timing")},
        base=None if base is None else json.loads(base),
        sha256=json.loads(members.get(f"{scale.name}/base.json", b"{}")).get("sha256", ""),
    )


def _lines(text: bytes | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (text or b"").splitlines()]
