# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A fake engine for protocol tests: each token is a hash of (weights, prompt, seed, position).

Like a real engine it samples as a function of the loaded bytes, loads in place, and compares the held bytes in a
read-back. Tests can make it fail: `fail_load`, `fail_read_back`, `stall`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.engine_api import Finished, Parts
from qarl_bridge.server.staged import Copy


class FakeEngine:
    """Implements `engine_api.Engine` without a model, for tests. `config` must have `vocab_size`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        expected: Mapping[str, messages.Expected],
        *,
        has_weights: bool,
        max_model_len: int = 4096,
    ):
        self.expected = expected
        self.has_weights = has_weights
        self.facts = messages.Facts(
            engine="fake",
            engine_version="1",
            profile="plain",
            isa="none",
            kernels={},
            model=messages.model_fingerprint(config),
            scheme=messages.scheme_hash(config.get("quantization_config")),
            vocab_size=int(config["vocab_size"]),
            max_model_len=max_model_len,
            threads=1,
            pid=os.getpid(),
        )
        self.met: dict[str, int] = {}
        self.held: dict[str, np.ndarray] = {}
        self._state = b"initial"
        self._requests: dict[str, tuple[messages.Draw, messages.Sampling, list[int], list[float]]] = {}
        self.fail_load = 0  # number of coming loads to fail half-way
        self.fail_read_back = 0
        self.loads = self.loaded_bytes = 0  # so far
        self.prepared: list[int] = []
        self.stall = False  # steps make no progress
        self.trainers_forgotten = 0
        self.mapper: Callable[[messages.Manifest, messages.DeviceMemory], Copy] | None = None
        self.receiver: Callable[[messages.Manifest, messages.NcclMemory, Callable[[], None]], Copy] | None = None

    def submit(self, request_id: str, draw: messages.Draw, sampling: messages.Sampling) -> None:
        """Queues a request for one completion."""
        self._requests[request_id] = (draw, sampling, [], [])

    def abort(self, request_ids: list[str]) -> None:
        """Cancels requests."""
        for request_id in request_ids:
            del self._requests[request_id]

    def running(self) -> int:
        """Counts the unfinished requests."""
        return len(self._requests)

    def step(self) -> list[Finished]:
        """Samples one token for every request; returns the requests that ended. With `stall` it does nothing."""
        finished: list[Finished] = []
        if self.stall:
            time.sleep(0.001)  # the bridge asks again at once; its other threads need the interpreter too
            return finished
        for request_id, (draw, sampling, tokens, logprobs) in list(self._requests.items()):
            seed = struct.pack("<QI", draw.seed, len(tokens))
            bits = hashlib.sha256(self._state + np.asarray(draw.prompt, "<i4").tobytes() + seed).digest()
            tokens.append(int.from_bytes(bits[:4], "little") % self.facts.vocab_size)
            logprobs.append(-bits[4] / 64.0)
            reason = "stop" if tokens[-1] in sampling.stop_token_ids else "length"
            if reason == "stop" or len(tokens) == sampling.max_tokens:
                del self._requests[request_id]
                finished.append(
                    Finished(request_id, np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), reason)
                )
        return finished

    def prepare(self, copy: Copy) -> None:
        """Records the version's step in `prepared`."""
        self.prepared.append(copy.manifest.version.step)

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Copies the tensors; fails after the first one while `fail_load` is positive."""
        self._state = b"half loaded"
        self.loads += 1
        for index, (name, array) in enumerate(pair for part in parts for pair in part.items()):
            if self.fail_load and index == 1:
                self.fail_load -= 1
                raise RuntimeError("simulated loader failure")
            self.held[name] = array.copy()
            self.loaded_bytes += array.nbytes
        state = hashlib.sha256()
        for name in self.expected:
            state.update(name.encode() + messages.as_bytes(self.held[name]))
        self._state = state.digest()

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """Calls `mapper`, which a test sets, to open the memory; BridgeError("unshared") without one."""
        if self.mapper is None:
            raise BridgeError("this engine has no GPU", "unshared")
        return self.mapper(manifest, memory)

    def forget_trainer(self) -> None:
        """Increments `trainers_forgotten`."""
        self.trainers_forgotten += 1

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """Calls `receiver`, which a test sets, to get the version; BridgeError("unshared") without one."""
        if self.receiver is None:
            raise BridgeError("this engine has no GPU", "unshared")
        return self.receiver(manifest, memory, check)

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Returns the prompt, int32, as both input and output of every named module."""
        tokens = messages.Array.of(np.asarray(prompt, np.int32))
        return [messages.Recorded(module=name, inputs=[tokens], outputs=[tokens]) for name in modules]

    def restore_initial(self) -> bool:
        """Restores the state before the first load; returns False if the engine started without weights."""
        if not self.has_weights:
            return False
        self._state = b"initial"
        return True

    def read_back(self, parts: Parts, mode: str, seed: int, *, partial: bool = False) -> tuple[int, int]:
        """Compares all held tensors with `parts`; fails while `fail_read_back` is positive."""
        if self.fail_read_back:
            self.fail_read_back -= 1
            raise BridgeError("simulated read-back difference", "engine")
        return compare(self.held, parts)

    def close(self) -> None:
        """Does nothing."""


def compare(held: Mapping[str, np.ndarray], parts: Parts) -> tuple[int, int]:
    """Compares held tensors with published ones, byte for byte; returns counts of (weights, rows) or BridgeError."""
    weights = rows = 0
    for name, array in (pair for part in parts for pair in part.items()):
        if messages.as_bytes(held[name]) != messages.as_bytes(array):
            raise BridgeError(f"read-back of {name} differs", "engine")
        weights, rows = weights + 1, rows + (array.shape[0] if array.ndim else 0)
    return weights, rows
