# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel vLLM: one engine in this process, another in a child, each with half of every weight.

vLLM's own way to be launched from outside (`external_launcher`): every shard is a whole engine that is asked the same
things in the same order, so that all schedule alike; they meet in the sums of o and down, and in the logits. So this
process keeps its engine in its hands, as with one shard: it loads in place, and reads back what it holds itself.

What a shard computes: rows of q, k, v, gate, up, embedding and head; columns of o and down, whose inputs it scales and
whose sums it rounds by itself. Then both add theirs, which two can do in one order alone (the learner's
`Numerics.shards`).

What is left out: GPUs, experts, more than two shards, single modules (`probe`). A version goes to the other shard
through a pipe, whole.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.engine_api import Finished, Parts
from qarl_bridge.server.staged import Copy

_SPREAD_INPUTS = ("o_proj", "down_proj")
_SPREAD_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_UNIT = 64  # vLLM fills a vocabulary up to a multiple of it before it cuts
_START_S = 600.0


def check(config: Mapping[str, Any], options: messages.EngineOptions, *, on_gpu: bool) -> None:
    """Refuses what is not mirrored.

    Raises:
      BridgeError("setup")
    """
    size = options.tensor_parallel_size
    why = ""
    if on_gpu:
        why = "on a GPU a sharded engine is not mirrored"
    elif config.get("num_experts"):
        why = "the experts of a sharded engine are not mirrored"
    elif options.record_routing:
        why = "a sharded engine records no routing"
    elif config["num_key_value_heads"] % size or config["num_attention_heads"] % size:
        why = f"{config['num_key_value_heads']} heads of keys cannot be shared out evenly"
    if why:
        raise BridgeError(f"tensor_parallel_size={size}: {why}; set rollout.engine.tensor_parallel_size=1", "setup")


def arguments(size: int) -> dict[str, Any]:
    """What EngineArgs gets for one of `size` shards; none for a whole engine."""
    return {} if size == 1 else {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}


def part_of(tensors: Mapping[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    """Of the tensors of a version, what shard `rank` of `size` holds."""

    def rows(array: np.ndarray, unit: int = 1) -> np.ndarray:
        each = -(-array.shape[0] // (unit * size)) * unit
        return array[rank * each : (rank + 1) * each]

    def columns(array: np.ndarray) -> np.ndarray:
        each = array.shape[1] // size
        return array[:, rank * each : (rank + 1) * each]

    out = {}
    for name, array in tensors.items():
        module, _, leaf = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if leaf == "weight_shape" or not array.ndim:
            pass
        elif kind in _SPREAD_OUTPUTS:
            array = rows(array)
        elif kind in _VOCABULARY:
            array = rows(array, _VOCABULARY_UNIT)
        elif kind in _SPREAD_INPUTS and array.ndim == 2 and array.shape[1] > 1:
            array = columns(array)
        out[name] = np.ascontiguousarray(array)
    return out


class ShardedEngine:
    """A `server.engine_api.Engine` over two processes. Arguments as `engine.VllmEngine`'s."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        expected: Mapping[str, messages.Expected],
        *,
        has_weights: bool,
        options: messages.EngineOptions,
    ):
        from qarl_bridge.engine.engine import VllmEngine

        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=_follow, args=(theirs, port, path, dict(config), dict(expected), has_weights, options), daemon=True
        )
        self._child.start()
        theirs.close()
        try:
            _join(0, options.tensor_parallel_size, port)
            self._own = VllmEngine(path, config, expected, has_weights=has_weights, options=options)
            self._answer(_START_S)
        except BaseException:
            self._child.kill()
            raise
        self.facts, self.met = self._own.facts, self._own.met
        self.expected, self.has_weights = self._own.expected, has_weights

    def submit(self, request_id: str, draw: messages.Draw, sampling: messages.Sampling) -> None:
        """Queue one completion."""
        self._tell("submit", request_id, draw, sampling)
        self._own.submit(request_id, draw, sampling)

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        self._tell("abort", request_ids)
        self._own.abort(request_ids)

    def running(self) -> int:
        """Unfinished requests."""
        return self._own.running()

    def step(self) -> list[Finished]:
        """One step of both; they draw the same."""
        self._tell("step")
        return self._own.step()

    def load(self, parts: Parts) -> None:
        """Replace all weights in place, in both."""
        named = _whole(parts)  # before anything is replaced anywhere
        self._both("load", lambda: self._own.load([named]), [named])

    def restore_initial(self) -> bool:
        """Reload the folder that both were started from."""
        return self._both("restore_initial", self._own.restore_initial)

    def read_back(self, parts: Parts, mode: str, seed: int) -> tuple[int, int]:
        """Each shard compares its own part."""
        named = _whole(parts)
        return self._both("read_back", lambda: self._own.read_back([named], mode, seed), [named], mode, seed)

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """As the engine of one shard, on a CPU: BridgeError("unshared")."""
        return self._own.open_device(manifest, memory)

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """As the engine of one shard, on a CPU: BridgeError("unshared")."""
        return self._own.receive(manifest, memory, check)

    def forget_trainer(self) -> None:
        """Nothing is kept of its memory."""

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Not there: a module of a shard has a part of its inputs or outputs."""
        raise BridgeError("modules of a tensor-parallel engine cannot be probed: each shard has a part", "limits")

    def close(self) -> None:
        """Free both."""
        with contextlib.suppress(BridgeError):
            self._tell("close")
        self._own.close()
        self._child.join(10.0)
        self._child.kill()

    # ---- the other shard ---------------------------------------------------------------------------------------------

    def _tell(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise BridgeError(f"the other shard of the engine is gone: {error}", "engine") from None

    def _answer(self, seconds: float = _START_S) -> Any:
        """What the other shard says to the last thing it was asked. Raises what went wrong there."""
        try:
            if not self._pipe.poll(seconds):
                raise BridgeError(f"the other shard of the engine said nothing for {seconds:.0f} s", "engine")
            code, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise BridgeError("the other shard of the engine is gone", "engine") from None
        if code is not None:
            raise BridgeError(f"in the other shard of the engine: {answer}", code)
        return answer

    def _both(self, what: str, own: Callable[[], Any], *arguments: Any) -> Any:
        """Both do it; the first failure is raised when both have ended."""
        self._tell(what, *arguments)
        try:
            result = own()
        except BaseException:
            with contextlib.suppress(BridgeError):
                self._answer()
            raise
        self._answer()
        return result


def _whole(parts: Parts) -> dict[str, Any]:
    """A version that lies in the host's memory, where a part stays when the next one is asked for."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def _join(rank: int, size: int, port: int) -> None:
    """Says to vLLM, through torch's environment, which shard this process is."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def _follow(
    pipe: Connection,
    port: int,
    path: str,
    config: dict[str, Any],
    expected: dict[str, messages.Expected],
    has_weights: bool,
    options: messages.EngineOptions,
) -> None:
    """The child: does what it is told, until the pipe ends."""
    from qarl_bridge.engine.engine import VllmEngine

    _join(1, options.tensor_parallel_size, port)
    try:
        engine = VllmEngine(path, config, expected, has_weights=has_weights, options=options)
    except BridgeError as error:
        pipe.send((error.code, str(error)))
        return
    pipe.send((None, None))
    with contextlib.suppress(EOFError):
        while True:
            what, *given = pipe.recv()
            if what == "close":
                engine.close()
                return
            if what in ("submit", "abort", "step"):  # a failure here ends the process, and the other shard notices
                getattr(engine, what)(*given)
                continue
            try:
                pipe.send((None, getattr(engine, what)(*given)))
            except BridgeError as error:
                pipe.send((error.code, str(error)))
            except Exception:
                pipe.send(("engine", traceback.format_exc()))


def with_size(facts: messages.Facts, size: int) -> messages.Facts:
    """The facts of an engine of so many shards."""
    note = [] if size == 1 else [f"{size} shards, each with its own scales of activations"]
    return msgspec.structs.replace(facts, tensor_parallel_size=size, notes=[*facts.notes, *note])
