# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of an evaluation (`evaluate --view`) by difficulty or with hints (SPARKLE, https://arxiv.org/abs/2506.04723).

    plain        the questions as they are
    difficulty   plain, by how often the base policy solves them (--base FILE, its `evaluate --out`, several samples)
    plan         with a correct plan below each question: measures how much a plan helps
    knowledge    with the facts of its solution below each: measures how much the facts help

`data/sources/hints.py` extracts plan and facts from a worked solution. Views share questions and random numbers, so
differences can be paired by question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qarl_jax.run.estimators import effective, interval
from qarl_jax.types import UserError, did_you_mean

VIEWS = ("plain", "difficulty", "plan", "knowledge")
LEVELS = {"0": 0.0, "25": 0.25, "50": 0.5, "75": 0.75, "100": 1.0}
"""Name of a level of difficulty, in percent -> the largest pass rate of the base in it."""


def overrides(view: str) -> list[str]:
    """Returns the config overrides of a view. Raises `UserError` for an unknown one."""
    if view not in VIEWS:
        raise UserError(f"--view {view}: unknown.{did_you_mean(view, VIEWS)} Known: {', '.join(VIEWS)}.")
    return [f"eval.hint.kind={view}"] if view in ("plan", "knowledge") else []


def check(asked: Sequence[str], rates: Mapping[str, float]) -> None:
    """Refuses questions, given as prompts' texts, of which the base policy has no pass rate. Raises `UserError`."""
    missing = sum(text not in rates for text in asked)
    if missing:
        raise UserError(
            f"--base: {missing} of {len(asked)} questions are not in it; evaluate the base on the same data, suite,"
            " system message and template."
        )


def by_difficulty(records: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> dict[str, float]:
    """Computes accuracy by level of difficulty (`LEVELS`).

    Args:
      records: an evaluation's records, one per prompt (`Evaluation.prompts`).
      rates: maps a prompt's text to the base policy's pass rate (`hints.pass_rates`).

    Returns:
      eval/difficulty_<level>, with /low and /high at 95 % and /prompts, for each level that has a prompt.

    Raises:
      UserError: the base policy has no pass rate for one of the questions.
    """
    check([record["prompt"] for record in records], rates)
    edges = list(LEVELS.values())
    level = np.searchsorted(edges, [rates[record["prompt"]] for record in records])
    samples = len(records[0]["responses"])
    correct = np.array([record["num_correct"] / len(record["responses"]) for record in records])
    metrics: dict[str, float] = {}
    for i, name in enumerate(LEVELS):
        own = correct[level == i]
        if len(own):
            asked = [record["prompt"] for record, at in zip(records, level, strict=True) if at == i]
            low, high = interval(own, effective(asked), samples)
            key = f"eval/difficulty_{name}"
            metrics |= {key: float(own.mean()), f"{key}/low": low, f"{key}/high": high, f"{key}/prompts": len(own)}
    return metrics
