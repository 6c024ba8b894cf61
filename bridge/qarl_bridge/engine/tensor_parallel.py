# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a tensor-parallel vLLM engine: the first shard in this process, each other shard in a child process.

It uses vLLM's `external_launcher`: every shard is a whole engine, and all get equal calls in equal order, so all
schedule alike. They communicate in the sums of o and down and in the logits. So this process holds its shard's model,
as with one shard: it loads in place, and reads back its weights.

    trainer -- version --> first shard -- tensors, layer by layer, over gloo or NCCL --> each other shard

Every shard receives whole tensors, one layer at a time, and vLLM's loader cuts out its part. When one process of an
engine ends, all end: the others would wait for it for ever. `shard.py` says what is not supported.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

from qarl_bridge.engine import shard_memory
from qarl_bridge.engine.engine import VllmEngine
from qarl_bridge.engine.shard import Shard, whole_record
from qarl_bridge.protocol import formats, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.engine_api import Finished, Parts, lasts
from qarl_bridge.server.staged import Copy

_START_S = 600.0
_LAST_WORDS_S = 3.0  # for a shard that failed to say why, before all end


class ShardedEngine:
    """A tensor-parallel engine over several processes; implements `engine_api.Engine`.

    Args:
      path: the model folder. config: its config.json.
      expected: dtype and shape of every tensor of a version, by name.
      has_weights: True if the folder has weights, which are loaded.
      options: the engine's options; `tensor_parallel_size` is the number of processes.

    Raises:
      BridgeError: an engine cannot start ("setup"), or a shard is gone ("engine").
    """

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
        # The shards meet at a store that listens from here on, so that no other process can take its port.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
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
        self._closing = False
        threading.Thread(target=self._watch, daemon=True, name="shards").start()
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
        """Queues a request for one completion on every shard."""
        self._tell("submit", request_id, draw, sampling)
        self._own.submit(request_id, draw, sampling)

    def abort(self, request_ids: list[str]) -> None:
        """Cancels requests on every shard."""
        self._tell("abort", request_ids)
        self._own.abort(request_ids)

    def running(self) -> int:
        """Counts the unfinished requests."""
        return self._own.running()

    def step(self) -> list[Finished]:
        """Runs one step on every shard; all sample equal tokens. Returns the requests that ended."""
        self._tell("step")
        return self._own.step()

    def prepare(self, copy: Copy) -> None:
        """Does nothing: shards receive a version in the order of their calls, so while they do not decode."""

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Replaces weights in place on every shard."""
        self._with_parts("load", parts, partial=partial)

    def restore_initial(self) -> bool:
        """Reloads the model folder's weights on every shard; returns False if the folder has none."""
        return self._all("restore_initial", self._own.restore_initial)[0]

    def read_back(self, parts: Parts, mode: str, seed: int, *, partial: bool = False) -> tuple[int, int]:
        """Compares each shard's live weights with its part of `parts`; returns the first shard's counts."""
        return self._with_parts("read_back", parts, mode, seed, partial=partial)

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """Maps a version in the trainer's buffer on the first shard's GPU; BridgeError("unshared") if it cannot."""
        return self._own.open_device(manifest, memory)

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """Receives a version over NCCL into the first shard's GPU memory."""
        return self._own.receive(manifest, memory, check)

    def forget_trainer(self) -> None:
        """Unmaps the trainer's buffers that no version uses."""
        self._own.forget_trainer()

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Prefills `prompt` on every shard and joins the shards' records to inputs and outputs of whole modules."""
        every = self._all("probe", functools.partial(self._own.probe, prompt, modules), prompt, modules)
        return [
            whole_record(of_a_module, self._own.outputs_of(of_a_module[0].module))
            for of_a_module in zip(*every, strict=True)
        ]

    def close(self) -> None:
        """Stops every shard and its process."""
        with contextlib.suppress(BridgeError):
            self._closing = True
            self._tell("close")
        self._own.close()
        for child in self._children:
            child.join(10.0)
        self._kill()

    def _kill(self) -> None:
        self._closing = True
        for child in self._children:
            child.kill()

    # ---- the other shards --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ends this process, with an error message, when another shard's process has ended unexpectedly."""
        connection.wait([child.sentinel for child in self._children])
        time.sleep(_LAST_WORDS_S)
        if self._closing:
            return
        said = "it was killed, or its log says why"
        with contextlib.suppress(EOFError, OSError):
            said = next((str(pipe.recv()[1]) for pipe in self._pipes if pipe.poll()), said)
        print(f"error: a shard of the engine has ended: {' '.join(said.split())}", file=sys.stderr, flush=True)
        os._exit(3)

    def _tell(self, *message: Any) -> None:
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError as error:
            raise BridgeError(f"another shard of the engine is gone: {error}", "engine") from None

    def _answers(self) -> list[Any]:
        """Collects the other shards' answers to the last call; raises the first error among them."""
        failed: BridgeError | None = None
        answers = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(_START_S):
                    raise BridgeError(f"another shard of the engine said nothing for {_START_S:.0f} s", "engine")
                code, answer = pipe.recv()
            except (EOFError, OSError):
                raise BridgeError("another shard of the engine is gone", "engine") from None
            answers.append(answer)
            if code is not None:
                failed = failed or BridgeError(f"in another shard of the engine: {answer}", code)
        if failed is not None:
            raise failed
        return answers

    def _all(self, what: str, own: Callable[[], Any], *arguments: Any, **named: Any) -> list[Any]:
        """Calls method `what` on all shards; returns results by rank, or raises the first error after all ended."""
        self._tell(what, *arguments, named)
        try:
            result = own()
        except BaseException:
            with contextlib.suppress(BridgeError):
                self._answers()
            raise
        return [result, *self._answers()]

    def _with_parts(self, what: str, parts: Parts, *arguments: Any, **named: Any) -> Any:
        """Calls method `what` on every shard with a version's parts as first argument; returns this shard's result."""
        sent = _Sent(parts, self._tell, self._own.tensor_on_device)

        def own() -> Any:
            try:
                return getattr(self._own, what)(sent, *arguments, **named)
            finally:
                sent.end()

        return self._all(what, own, _Received, *arguments, **named)[0]


class _Sent:
    """A version's parts, one layer at a time, broadcast to the other shards during iteration.

    Args:
      tell: sends a message to all other shards.
      on_device: converts a numpy or torch tensor to a torch tensor on the engine's device.
    """

    lasting = True

    def __init__(self, parts: Parts, tell: Callable[..., None], on_device: Callable[[Any], Any]):
        self._parts, self._tell, self._on_device = parts, tell, on_device
        self._sweeps: list[Iterator[Any]] = []

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        self._sweeps.append(sweep := self._sweep())
        return sweep

    def _sweep(self) -> Iterator[Mapping[str, Any]]:
        lasting = lasts(self._parts)
        try:
            for part in self._parts:
                for _, names in itertools.groupby(part, formats.layer_of):
                    layer = {name: self._on_device(part[name]) for name in names}
                    self._tell([(name, tuple(x.shape), x.dtype) for name, x in layer.items()])
                    for x in layer.values():
                        _broadcast(x)
                    yield layer if lasting else {name: x.clone() for name, x in layer.items()}
        finally:
            self._tell(None)

    def end(self) -> None:
        """Ends all iterations and tells the other shards that no more parts come."""
        for sweep in self._sweeps:
            sweep.close()  # type: ignore[attr-defined]
        self._tell(False)


class _Received:
    """The parts that `_Sent` broadcasts, received in another shard. device: the engine's device."""

    lasting = True

    def __init__(self, pipe: Connection, device: Any):
        self._pipe, self._device = pipe, device
        self._ended = False

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        import torch

        while not self._ended:
            (listed,) = self._pipe.recv()
            if listed is None:
                return
            if listed is False:
                self._ended = True
                return
            layer = {name: torch.empty(shape, dtype=dtype, device=self._device) for name, shape, dtype in listed}
            for x in layer.values():
                _broadcast(x)
            yield layer

    def end(self) -> None:
        """Receives and drops the parts that are still sent, after this shard has failed."""
        while not self._ended:
            for _ in self:
                pass


def _broadcast(x: Any) -> None:
    """Broadcasts the bytes of the first shard's tensor into the other shards' tensors."""
    import torch
    from vllm.distributed import get_tp_group

    if not x.numel():
        return
    group = get_tp_group()
    raw = x.reshape(-1).view(torch.uint8)
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is not None and not nccl.disabled:
        nccl.broadcast(raw, src=0)
    else:
        torch.distributed.broadcast(raw, src=group.ranks[0], group=group.device_group)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(4)


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
    """Runs another shard in a child process: executes the first shard's calls until the pipe closes."""
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
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
            if what in ("submit", "abort", "step"):  # a failure here ends the process, and all others with it
                getattr(engine, what)(*given)
                continue
            *positional, named = given
            received = [_Received(pipe, engine.device) for kind in positional if kind is _Received]
            answer: tuple[str | None, Any]
            try:
                answer = None, getattr(engine, what)(*received, *positional[len(received) :], **named)
            except BridgeError as error:
                answer = error.code, str(error)
            except Exception:
                answer = "engine", traceback.format_exc()
            for stream in received:
                stream.end()
            pipe.send(answer)
