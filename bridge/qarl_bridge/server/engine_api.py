# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine to the state machine. `engine.VllmEngine` and `fake_engine.FakeEngine` implement it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from qarl_bridge.protocol import messages
from qarl_bridge.server.staged import Copy


@dataclasses.dataclass(frozen=True)
class Finished:
    """One completed request: tokens [n] int32, logprobs [n] float32, "stop" or "length"; routed [positions, layers, k]
    int16 where the engine records it."""

    request_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    routed: np.ndarray | None = None


Parts = Iterable[Mapping[str, Any]]
"""A version's tensors by name, chunked by whole layers. It may be gone through more than once; what a part gave is
there until the next one is asked for, or for good (`lasts`)."""


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """Parts, by a function that goes through them once."""

    begin: Callable[[], Iterator[Mapping[str, Any]]]
    lasting: bool

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self.begin()


def lasts(parts: Parts) -> bool:
    """Tells whether tensors of a part may be kept when the next one is asked for."""
    return getattr(parts, "lasting", True)


class Engine(Protocol):
    """One thread calls it, except `open_device` and `receive`. Tensors are numpy arrays, or torch tensors on the
    engine's GPU."""

    facts: messages.Facts
    expected: Mapping[str, messages.Expected]  # exactly the tensors a version must hold
    met: dict[str, int]  # how often the scheduler did what to requests
    has_weights: bool  # False: started without weights, nothing may be drawn before the first version

    def submit(self, request_id: str, draw: messages.Draw, sampling: messages.Sampling) -> None:
        """Queue one completion."""

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""

    def step(self) -> list[Finished]:
        """Advance every running request; return those that ended."""

    def running(self) -> int:
        """Unfinished requests."""

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """A version that lies in a buffer on the engine's GPU; BridgeError("unshared") if it cannot be reached."""

    def forget_trainer(self) -> None:
        """The trainer is gone: let go of what is kept of its memory between versions."""

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """A version that comes from another GPU. `check` is called while waiting; what it raises ends that.
        BridgeError("unshared") if nothing can come."""

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Replace all weights in place and forget everything computed with the old ones (prefix and KV cache).
        partial: replace those that are given; each module is given whole or not at all."""

    def restore_initial(self) -> bool:
        """Load the weights the engine was started with; False if there are none."""

    def read_back(self, parts: Parts, mode: str, seed: int, *, partial: bool = False) -> tuple[int, int]:
        """Compare live layers with `parts` ("sampled" or "full"); (weights, input rows) compared, or BridgeError.
        partial: `parts` has some layers."""

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Prefill `prompt` and record what goes into and comes out of live modules; BridgeError if it cannot."""

    def close(self) -> None:
        """Free everything."""
