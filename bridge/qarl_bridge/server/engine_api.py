# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Defines the interface `Engine` that the state machine calls; `VllmEngine` and `FakeEngine` implement it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from qarl_bridge.protocol import messages
from qarl_bridge.server.staged import Copy


@dataclasses.dataclass(frozen=True)
class Finished:
    """One completed request: tokens [n] int32, logprobs [n] float32, finish reason "stop", "length" or "abort", and
    the recorded experts `routed`, int16 [prompt + n - 1, layers, k], or None."""

    request_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    routed: np.ndarray | None = None


Parts = Iterable[Mapping[str, Any]]
"""A version's tensors by name, in parts of whole layers. It may be iterated several times. A part's tensors stay valid
until the next part is requested, or longer where `lasts` is true."""


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """A re-iterable `Parts`: each iteration calls `begin`.

    Attributes:
      lasting: tensors stay valid after their part. digest: of the version's manifest; empty: unknown.
    """

    begin: Callable[[], Iterator[Mapping[str, Any]]]
    lasting: bool
    digest: bytes = b""

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self.begin()


def lasts(parts: Parts) -> bool:
    """Tells whether a part's tensors stay valid after the next part is requested."""
    return getattr(parts, "lasting", True)


class Engine(Protocol):
    """The interface of an inference engine. One thread calls all methods except `open_device`, `receive` and
    `prepare`. Tensors are numpy arrays, or torch tensors on the engine's GPU."""

    facts: messages.Facts
    expected: Mapping[str, messages.Expected]  # exactly the tensors a version must hold
    met: dict[str, int]  # how often the scheduler did what to requests
    has_weights: bool  # False: started without weights, nothing may be drawn before the first version

    def submit(self, request_id: str, draw: messages.Draw, sampling: messages.Sampling) -> None:
        """Queues a request for one completion."""

    def abort(self, request_ids: list[str]) -> None:
        """Cancels requests."""

    def step(self) -> list[Finished]:
        """Computes one step of all running requests (continuous batching); returns those that ended."""

    def running(self) -> int:
        """Counts the unfinished requests."""

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """Maps a version in the trainer's buffer on this engine's GPU; BridgeError("unshared") if it cannot."""

    def forget_trainer(self) -> None:
        """Unmaps the memory of a trainer that is gone."""

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """Receives a version from another GPU over NCCL; BridgeError("unshared") if it cannot.
        check: a callback, polled during the wait; an exception that it raises ends the wait."""

    def prepare(self, copy: Copy) -> None:
        """Copies a valid partial version to the engine's device while the engine computes, if its load is then faster.

        `load` and `read_back` of parts with its digest read that copy. BridgeError("torn") if it has other bytes."""

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Replaces all weights in place and clears the prefix and KV caches.
        partial: replaces only the given weights, which make whole modules."""

    def restore_initial(self) -> bool:
        """Reloads the weights with which the engine was started; returns False if there are none."""

    def read_back(self, parts: Parts, mode: str, seed: int, *, partial: bool = False) -> tuple[int, int]:
        """Compares live weights with `parts`, all (mode "full") or some ("sampled", by `seed`); BridgeError if they
        differ. Returns counts of (weights, input rows) compared. partial: `parts` has only some layers."""

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Prefills `prompt` and records inputs and outputs of the named modules, in order; BridgeError if it cannot.

        If the engine records routed experts, a last record named messages.ROUTING holds them."""

    def close(self) -> None:
        """Frees the engine's memory and processes."""
