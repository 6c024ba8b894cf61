# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Which promise a test guards, by the place of its file: the headline of a failing test says it first.

The first four are the README's. Tests are named as claims, so that a failure reads "One grid: weight codes and scales
equal compressed tensors".
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

# The longest prefix of a file's path under tests/ decides.
PLACES = {
    "One grid": ("quant", "bridge/test_formats.py", "bridge/test_readback.py", "rollout/test_moved_codes.py"),
    "One arithmetic": ("numerics", "kernels", "models", "parity", "verify", "gpu", "rollout", "test_vllm_run.py"),
    "Masters stay high precision": ("optim", "learning", "qat"),
    "Nothing is lost": (
        "bridge",
        "runtime",
        "loop",
        "run/test_checkpoint.py",
        "run/test_checkpoint_damage.py",
        "rollout/test_partial_rollouts.py",
        "test_resume.py",
        "test_chaos.py",
        "chaos.py",
    ),
    "The formula is the paper's": ("loss",),
    "What is graded and read is what was meant": ("data", "rewards"),
    "What is reported is what happened": ("observe", "experiments", "test_plot.py", "test_metrics_keys.py"),
    "A mistake gets one sentence": (
        "typed_config",
        "run",
        "test_bad_input.py",
        "test_doctor.py",
        "test_entry_point.py",
    ),
    "A command does what the guide says": ("",),
}


def of(path: str) -> str:
    """The promise that a file, named by its path under tests/, guards."""
    matches = {
        place: promise
        for promise, places in PLACES.items()
        for place in places
        if not place or path == place or path.startswith(f"{place}/")
    }
    return matches[max(matches, key=len)]


def headline(nodeid: str) -> str:
    """`tests/quant/test_dot.py::test_a_b[c]` -> "One grid: a b [c]"."""
    path, _, test = nodeid.partition("::")
    parts = pathlib.PurePosixPath(path).parts
    name, bracket, case = test.rpartition("::")[2].partition("[")
    claim = name.removeprefix("test_").replace("_", " ")
    inside = "/".join(parts[parts.index("tests") + 1 :] if "tests" in parts else parts)
    return f"{of(inside)}: {claim}{f' [{case}' if bracket else ''}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Puts the promise and the claim into the line that opens a failure."""
    report = yield
    if report.failed:
        file, line, _ = report.location
        report.location = (file, line, headline(report.nodeid))
    return report
