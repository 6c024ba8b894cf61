# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts travel as stacks: `model.layers.0.mlp.experts.*.up_proj.weight` [E, N, K] stands for the tensors

    model.layers.0.mlp.experts.0.up_proj.weight [N, K]    ...    model.layers.0.mlp.experts.<E-1>.up_proj.weight

of a checkpoint. A 30B-A3B has 55,000 of those under w4a16, and 1,250 with stacks; every tensor of a version costs both
ends time in Python: a copy to start, two fingerprints, an entry of the manifest, checks. The learner's arrays and the
parameters of vLLM's fused experts are stacks already. vLLM's own loader alone wants them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qarl_bridge.protocol import messages

_ONE, _ALL = re.compile(r"\.experts\.\d+\."), ".experts.*."


def name_of(name: str) -> str:
    """Names the stack that holds an expert's tensor; returns other names unchanged."""
    return _ONE.sub(_ALL, name)


def is_stack(name: str) -> bool:
    """Tells whether a tensor of that name holds all experts of a layer."""
    return _ALL in name


def names(stack: str, count: int) -> list[str]:
    """Names the tensors that a stack of so many experts holds."""
    return [stack.replace(_ALL, f".experts.{expert}.") for expert in range(count)]


def apart(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) pairs as a checkpoint has them: views of stacks, expert by expert."""
    for name, tensor in tensors:
        if not is_stack(name):
            yield name, tensor
            continue
        yield from zip(names(name, len(tensor)), tensor, strict=True)


def expected(tensors: Mapping[str, messages.Expected]) -> dict[str, messages.Expected]:
    """Derives the tensors of a version from the tensors of a checkpoint.

    Experts of unequal shapes or dtypes stay apart; nobody publishes such a model.
    """
    groups: dict[str, list[messages.Expected]] = {}
    for name, one in tensors.items():
        groups.setdefault(name_of(name), []).append(one)
    out: dict[str, messages.Expected] = {}
    for name, group in groups.items():
        first = group[0]
        if first.name == name or any((one.dtype, one.shape) != (first.dtype, first.shape) for one in group):
            out |= {one.name: one for one in group}
        else:
            out[name] = messages.Expected(name=name, dtype=first.dtype, shape=[len(group), *first.shape])
    return out
