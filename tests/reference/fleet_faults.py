# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults in a fleet, at random moments of publishing and drawing; what comes out must be what one engine draws.

    python -m tests.reference.fleet_faults --faults 1000 --seed 0

Four toy engines behind bridges in threads, each reached over TCP through a link that can be broken:

    kill     the bridge ends, and comes back without weights a round later
    hang     the link carries nothing any more, and says nothing
    slow     the link takes its time over every few bytes
    torn     a byte of a version is another when it reaches the bridge
    garbled  a byte on the wire is another (the encryption notices, and the connection ends)
    cut      the connections end
    late     the bridge comes up while the others are at work

A round publishes a version and draws its groups twice, under one to three faults. It holds if every group comes exactly
once, in order, drawn under that version alone and with that version's weights: equal to the bits one engine draws.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import random
import socket
import sys
import tempfile
import threading
import time

from qarl_bridge.server import incoming

from qarl_jax.rollout.vllm import fleet
from qarl_jax.rollout.vllm.engine import Config, VllmEngine
from qarl_jax.types import Completion
from tests.reference.bridge_world import free_port
from tests.reference.fleet_world import PROMPTS, SAMPLING, Bridge, key_file, weights

ENGINES = 4
SEEDS = 3  # versions take turns
KINDS = ("kill", "hang", "slow", "torn", "garbled", "cut", "late")


class Link:
    """A TCP port that leads to another, and does with what passes what it is told."""

    def __init__(self, target: tuple[str, int]):
        self.target = target
        self.how = "good"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            self._pairs.add((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b, (near, far)), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.how == "hang":
                    time.sleep(0.02)
                if self.how == "slow":
                    time.sleep(0.05)
                if self.how == "garbled":
                    self.how = "good"
                    data = data[:-1] + bytes([data[-1] ^ 0x55])
                to.sendall(data)
        self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.discard(pair)
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def cut(self) -> None:
        """Ends what passes through it."""
        for pair in list(self._pairs):
            self._end(pair)

    def close(self) -> None:
        self._server.close()
        self.cut()


class Field:
    """The engines, their links, and the faults."""

    def __init__(self, folder: pathlib.Path, rng: random.Random):
        self.rng = rng
        self.ports = [free_port() for _ in range(ENGINES)]
        self.bridges: list[Bridge | None] = [None] * ENGINES
        for number in range(ENGINES):
            self.up(number)
        self.links = [Link(("127.0.0.1", port)) for port in self.ports]
        self.made: collections.Counter[str] = collections.Counter()
        self.lines: list[str] = []
        self.tears = 0
        config = Config(
            endpoints=tuple(link.address for link in self.links), key_file=key_file(folder), max_model_len=128,
            max_num_seqs=8, request_timeout_s=4.0, start_timeout_s=60, max_restarts=1000,
        )  # fmt: skip
        self.engine = VllmEngine(config, run_id="run", incarnation=1, log=self.lines.append)

    def up(self, number: int) -> None:
        if self.bridges[number] is None:
            self.bridges[number] = Bridge(f"tcp://127.0.0.1:{self.ports[number]}")

    def fault(self, kind: str, number: int) -> None:
        """Breaks something at an engine that works."""
        self.made[kind] += 1
        match kind:
            case "kill":
                bridge, self.bridges[number] = self.bridges[number], None
                if bridge is not None:
                    bridge.stop()
            case "late":
                self.up(number)
            case "torn":
                self.tears += 1
            case "cut":
                self.links[number].cut()
            case _:
                self.links[number].how = kind

    def heal(self) -> None:
        """All links are good again. Bridges stay as they are: the next round brings some of them up."""
        for link in self.links:
            if link.how == "hang":
                link.cut()
            link.how = "good"

    def round(self, version: int, wanted: list[list[tuple]]) -> None:
        """One version under faults; AssertionError if something is not as promised."""
        down = [number for number in range(ENGINES) if self.bridges[number] is None]
        well = [number for number in range(ENGINES) if number not in down]
        plan = [("late", number) for number in down]  # they come back during this round
        for number in self.rng.sample(well, min(len(well) - 1, self.rng.randint(1, 3))):
            plan.append((self.rng.choice([kind for kind in KINDS if kind != "late"]), number))
        timers = [threading.Timer(self.rng.uniform(0.0, 0.4), self.fault, one) for one in plan]
        for timer in timers:
            timer.start()
        self.engine.publish(weights(version % SEEDS), version)
        for key in (1, 2):
            told: collections.Counter[int] = collections.Counter()

            def on_group(number: int, completions: list[Completion], told: collections.Counter = told) -> None:
                told[number] += 1

            groups = self.engine.generate(PROMPTS, num_samples=2, sampling=SAMPLING, key=key, on_group=on_group)
            assert told == dict.fromkeys(range(len(PROMPTS)), 1), told
            assert {c.policy_version for g in groups for c in g} == {version}
            assert [[c.prompt_tokens for c in g] for g in groups] == [[p.tokens] * 2 for p in PROMPTS]
            assert drawn_of(groups) == wanted[key - 1], f"version {version}, key {key}"
        for timer in timers:
            timer.join()

    def close(self) -> None:
        self.engine.close()
        for link in self.links:
            link.close()
        for bridge in self.bridges:
            if bridge is not None:
                bridge.stop()


def drawn_of(groups: list[list[Completion]]) -> list[tuple]:
    return [(c.tokens, c.logprobs.tobytes(), c.finish_reason) for group in groups for c in group]


def one_engine(folder: pathlib.Path) -> list[list[list[tuple]]]:
    """[seed][key]: what one engine draws that nobody disturbs."""
    bridge = Bridge(str(folder / "s"))
    config = Config(endpoints=(bridge.address,), key_file=key_file(folder), max_model_len=128)
    engine = VllmEngine(config, run_id="one", incarnation=1)
    out = []
    for seed in range(SEEDS):
        engine.publish(weights(seed), seed)
        draws = [engine.generate(PROMPTS, num_samples=2, sampling=SAMPLING, key=key) for key in (1, 2)]
        out.append([drawn_of(groups) for groups in draws])
    engine.close()
    bridge.stop()
    return out


def run(
    count: int, rng: random.Random, folder: pathlib.Path, seconds: float = float("inf")
) -> collections.Counter[str]:
    """Rounds until that many faults were made, or the time is over; the faults, by kind.

    Raises:
      AssertionError: something was not as promised.
    """
    wanted = one_engine(folder)
    monkey, fleet.RETRY_S = fleet.RETRY_S, 0.5
    field = Field(folder, rng)
    append, deadline = incoming.Pending.append, time.monotonic() + seconds

    def torn(pending: incoming.Pending, chunk, data: bytes) -> None:
        if field.tears and data:
            field.tears -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        append(pending, chunk, data)

    incoming.Pending.append = torn  # type: ignore[method-assign]
    try:
        version = 0
        while field.made.total() < count and time.monotonic() < deadline:
            field.round(version, wanted[version % SEEDS])
            field.heal()
            version += 1
        return field.made + collections.Counter(rounds=version, replaced=field.engine.restarts)
    finally:
        incoming.Pending.append = append  # type: ignore[method-assign]
        fleet.RETRY_S = monkey
        field.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        made = run(args.faults, random.Random(args.seed), pathlib.Path(folder), 60 * args.minutes)
    print(dict(made), f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
