# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The engines of several processes as one: each process has a fleet of its own, on its host, and nobody else's.

| what           | how                                                                                          |
|----------------|----------------------------------------------------------------------------------------------|
| a version      | every process stages all of it, from its shards and the others' (all-gathered by layer), and |
|                | publishes it to its own engines; none gets it before all manifests are equal                 |
| requests       | equal shares in their order (`share`), each drawn by the engines of its process              |
| completions    | every process is given all of them, and packs the rows of its own devices                    |
| an engine dies | its process's fleet replaces it; the other processes wait                                    |
| an error       | raised on every process, with a bridge's code                                                |
| a process dies | all end, and their engines with them (`runtime/peers.py`)                                    |

A completion depends on the weights, its prompt and its seed alone, so that it does not matter which host draws it. In a
run of one process everything here is a no-op. The others must be called by all processes in the same order, from the
main thread.
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
    """Raises on all processes, at the end, an error that one raised inside; a bridge's error keeps its code."""
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
    """Stops every process unless all have staged the same version, by every tensor's fingerprint.

    Raises:
      UserError: naming the first process that differs.
    """
    processes.check_same(manifest.digest, f"the tensors of {manifest.version}")


def check_facts(facts: messages.Facts | None) -> None:
    """Stops every process unless all engines are one build with one arithmetic.

    Raises:
      UserError: naming the first process that differs.
    """
    if facts is not None:
        same = facts.engine, facts.engine_version, facts.profile, facts.isa, facts.kernels, facts.execution
        processes.check_same(repr(same).encode(), "the engine's version, kernels and instruction set")


def share(count: int, number: int, of: int) -> range:
    """The requests that process `number` draws: equal shares of neighbours, which mostly have one prompt."""
    return range(count * number // of, count * (number + 1) // of)


def draw(draws: Sequence[messages.Draw], ask: Callable[[Sequence[messages.Draw]], Drawn]) -> Drawn:
    """Yields (index of the draw, its completion) once per draw; of several processes in order, after the last ended.

    Args:
      draws: the same in every process.
      ask: draws some of them with the engines of this process, as `Fleet.draw`.
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
