# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Combinations of several choices: every value of each in `make test`, all combinations in `make test-slow`."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def each_once(*choices: Sequence[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all combinations, those nightly without which no value is left out.

    Example: each_once("ab", [1, 2, 3]) keeps (a, 1), (b, 2) and (a, 3).
    """
    lengths = [len(values) for values in choices]
    kept = {tuple(i % length for length in lengths) for i in range(max(lengths))}
    return [
        pytest.param(*(values[i] for values, i in zip(choices, at, strict=True)), marks=_marks(at in kept))
        for at in itertools.product(*map(range, lengths))
    ]


def few(cases: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Marks as nightly the cases of `each_once` whose first value is not among `kept`."""
    return [case if case.values[0] in kept else pytest.param(*case.values, marks=pytest.mark.nightly) for case in cases]


def _marks(kept: bool) -> Any:
    return () if kept else pytest.mark.nightly


def named(value: Any) -> str:
    """What a case is called: a type by its name, the rest as it prints."""
    return value.__name__ if isinstance(value, type) else str(value)
