# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel vLLM: one shard in this process, each other shard in a child.

vLLM's own way to be launched from outside (`external_launcher`): every shard is a whole engine that is asked the same
things in the same order, so that all schedule alike; they meet in the sums of o and down, and in the logits. So this
process keeps its engine in its hands, as with one shard: it loads in place, and reads back what it holds itself.

What is left out: GPUs, experts, more than two shards (`shard.py` says why), single modules (`probe`). A version goes to
the other shards through their pipes, whole.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from qarl_bridge.engine import shard_memory
from qarl_bridge.engine.engine import VllmEngine
from qarl_bridge.engine.shard import Shard
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.engine_api import Finished, Parts
from qarl_bridge.server.staged import Copy

_START_S = 600.0


class ShardedEngine:
    """A `server.engine_api.Engine` over several processes. Arguments as `engine.VllmEngine`'s."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        expected: Mapping[str, messages.Expected],
        *,
        has_weights: bool,
        options: messages.EngineOptions,
    ):
        shard_memory.remove_stale()
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        size = options.tensor_parallel_size
        self._pipes: list[Connection] = []
        self._children = []
        for rank in range(1, size):
            pipe, theirs = context.Pipe()
            arguments = (
                theirs,
                port,
                Shard(rank, size, os.getpid()),
                path,
                dict(config),
                dict(expected),
                has_weights,
                options,
            )
            child = context.Process(target=_follow, args=arguments, daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(pipe)
            self._children.append(child)
        first = Shard(0, size, os.getpid())
        try:
            os.environ |= first.environment(port)
            self._own = VllmEngine(path, config, expected, has_weights=has_weights, options=options, shard=first)
            self._answers()
        except BaseException:
            self._kill()
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
        """One step of all; they draw the same."""
        self._tell("step")
        return self._own.step()

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Replace weights in place, in every shard."""
        named = _whole(parts)  # before anything is replaced anywhere
        self._all("load", lambda: self._own.load([named], partial=partial), [named], partial=partial)

    def restore_initial(self) -> bool:
        """Reload the folder that all were started from."""
        return self._all("restore_initial", self._own.restore_initial)

    def read_back(self, parts: Parts, mode: str, seed: int, *, partial: bool = False) -> tuple[int, int]:
        """Each shard compares its own part."""
        named = _whole(parts)
        compare = functools.partial(self._own.read_back, [named], mode, seed, partial=partial)
        return self._all("read_back", compare, [named], mode, seed, partial=partial)

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """Raises BridgeError("unshared"), as the engine of one shard does on a CPU."""
        return self._own.open_device(manifest, memory)

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """Raises BridgeError("unshared"), as the engine of one shard does on a CPU."""
        return self._own.receive(manifest, memory, check)

    def forget_trainer(self) -> None:
        """Nothing is kept of its memory."""

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Not there: a module of a shard has a part of its inputs or outputs."""
        raise BridgeError("modules of a tensor-parallel engine cannot be probed: each shard has a part", "limits")

    def close(self) -> None:
        """Free every shard."""
        with contextlib.suppress(BridgeError):
            self._tell("close")
        self._own.close()
        for child in self._children:
            child.join(10.0)
        self._kill()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    # ---- the other shards --------------------------------------------------------------------------------------------

    def _tell(self, *message: Any) -> None:
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError as error:
            raise BridgeError(f"another shard of the engine is gone: {error}", "engine") from None

    def _answers(self) -> None:
        """Waits for what every other shard says to the last thing it was asked. Raises what went wrong there first."""
        failed: BridgeError | None = None
        for pipe in self._pipes:
            try:
                if not pipe.poll(_START_S):
                    raise BridgeError(f"another shard of the engine said nothing for {_START_S:.0f} s", "engine")
                code, answer = pipe.recv()
            except (EOFError, OSError):
                raise BridgeError("another shard of the engine is gone", "engine") from None
            if code is not None:
                failed = failed or BridgeError(f"in another shard of the engine: {answer}", code)
        if failed is not None:
            raise failed

    def _all(self, what: str, own: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
        """Every shard does it; the first failure is raised when all have ended."""
        self._tell(what, *arguments, named)
        try:
            result = own()
        except BaseException:
            with contextlib.suppress(BridgeError):
                self._answers()
            raise
        self._answers()
        return result


def _whole(parts: Parts) -> dict[str, Any]:
    """A version that lies in the host's memory, where a part stays when the next one is asked for."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def _follow(
    pipe: Connection,
    port: int,
    shard: Shard,
    path: str,
    config: dict[str, Any],
    expected: dict[str, messages.Expected],
    has_weights: bool,
    options: messages.EngineOptions,
) -> None:
    """A child: does what it is told, until the pipe ends."""
    os.environ |= shard.environment(port)
    try:
        engine = VllmEngine(path, config, expected, has_weights=has_weights, options=options, shard=shard)
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
            if what in ("submit", "abort", "step"):  # a failure here ends the process, and the first shard notices
                getattr(engine, what)(*given)
                continue
            try:
                *positional, named = given
                pipe.send((None, getattr(engine, what)(*positional, **named)))
            except BridgeError as error:
                pipe.send((error.code, str(error)))
            except Exception:
                pipe.send(("engine", traceback.format_exc()))
