# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Combines the vLLM engines of several trainer processes into one; each process has a fleet of engines on its host.

| what           | how                                                                                          |
|----------------|----------------------------------------------------------------------------------------------|
| a version      | every process stages all of it, from its shards and the others' (all-gathered by layer), and |
|                | publishes it to its own engines; none gets it before all manifests are equal                 |
| requests       | equal shares in their order (`share`), each drawn by the engines of its process              |
| completions    | every process is given all of them, and packs the rows of its own devices                    |
| an engine dies | its process's fleet replaces it; the other processes wait                                    |
| an error       | raised on every process, with a bridge's code                                                |
| a process dies | all end, and their engines with them (`runtime/peers.py`)                                    |

A completion depends on the weights, its prompt and its seed alone, so any host may draw it. In a run of one process
these functions do not communicate. In a run of several, all processes must call them in one order, from the main
thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence

import msgspec
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.runtime import processes

Drawn = Generator[tuple[int, messages.Drawn], None, None]
_DRAWN = msgspec.msgpack.Decoder(list[messages.Drawn])


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises an error of one process on all processes, when the block ends; a bridge's error keeps its code."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    code = failure.code if isinstance(failure, BridgeError) else ""
    if processes.count() > 1:
        for number, said in enumerate(processes.gather(f"{code}\n{failure}".encode() if code else b"")):
            if said and failure is None:
                code, _, text = said.decode().partition("\n")
                failure = BridgeError(f"process {number}: {text}", code)
    processes.agree(failure)


def check_manifest(manifest: messages.Manifest) -> None:
    """Compares the fingerprints of a staged version's tensors between all processes.

    Raises:
      UserError: on every process; it names the first process whose fingerprints differ.
    """
    processes.check_same(manifest.digest, f"the tensors of {manifest.version}")


def check_facts(facts: messages.Facts | None) -> None:
    """Compares the engines' versions, kernels and arithmetic between all processes.

    Raises:
      UserError: on every process; it names the first process whose engine differs.
    """
    if facts is not None:
        same = facts.engine, facts.engine_version, facts.profile, facts.isa, facts.kernels, facts.execution
        processes.check_same(repr(same).encode(), "the engine's version, kernels and instruction set")


def share(count: int, number: int, of: int) -> range:
    """Returns the indices of the requests that process `number` of `of` draws: equal, contiguous shares."""
    return range(count * number // of, count * (number + 1) // of)


def draw(draws: Sequence[messages.Draw], ask: Callable[[Sequence[messages.Draw]], Drawn]) -> Drawn:
    """Yields (index of the draw, its completion) once per draw; with several processes in order, after the last ended.

    Args:
      draws: the requests, equal in every process.
      ask: draws some requests with the engines of this process, as `Fleet.draw`.
    """
    of = processes.count()
    if of == 1:
        yield from ask(draws)
        return
    mine = share(len(draws), processes.number(), of)
    found: dict[int, messages.Drawn] = {}
    with together():
        if mine:
            with contextlib.closing(ask(draws[mine.start : mine.stop])) as drawn:
                found.update(drawn)
    said = processes.gather(msgspec.msgpack.encode([found[index] for index in range(len(mine))]))
    yield from enumerate(one for part in said for one in _DRAWN.decode(part))
