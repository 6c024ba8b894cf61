# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A fleet of engines behind one interface: publishes a version to all, and draws completions from any that has room.

    fleet = Fleet(config, ...)
    fleet.publish(staged)                  # returns when every engine that is up serves it
    fleet.draw(draws, sampling)            # yields (index, completion) as they end

A run with one engine is a fleet of one. A completion depends on the weights, its prompt and its seed alone, so any
engine may draw it, any number of times, in any order. With batch-invariant kernels a fleet's run equals the one-engine
run, to the bit.

| what happens                         | what the fleet does                                                           |
|--------------------------------------|-------------------------------------------------------------------------------|
| a bridge dies, or is silent too long | what it had not answered goes to the others; it is started (or called) again, |
|                                      | given the current version, and serves                                         |
| it dies `max_restarts` times in a row| it is left out; by hand started ones are called again every RETRY_S           |
| it does not start                    | with the run: the run ends, and says why; later: as if it had died            |
| it draws under another version       | its answer is not taken; it is treated as one that died                       |
| it refuses a version                 | it is left out until the next one; the others go on                           |
| it is slow (`HEDGE`)                 | an idle engine is asked as well, and the first answer counts                  |
| an endpoint comes up later           | it is given the current version, and serves                                   |
| none is left                         | the call fails, with what the first of them said                              |

Threads: one per engine while it loads the current version, and one per request in flight. One condition guards all
state; `publish` and `draw`, from any thread, wait on it. Callbacks run in the thread that called `draw`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.rollout.vllm.config import Config
from qarl_jax.rollout.vllm.replica import Life, Replica
from qarl_jax.types import UserError

RETRY_S = 15.0  # between calls to an endpoint that was left out
GRACE_S = 5.0  # for endpoints to answer at a first publish, once one of them serves
_TICK_S = 0.5  # how often a waiting call looks for slow engines and late ones
HEDGE = 3.0
"""Requests that take so many times as long as others did are asked of an idle engine as well (J. Dean, L. A. Barroso,
The Tail at Scale, CACM 56, 2013)."""
_SHORTEST_HEDGE_S = 1.0
# What a user can fix.
USER_CODES = frozenset({"auth", "setup", "lease", "foreign_base", "foreign_model", "foreign_scheme", "limits"})
# After these the bridge may not serve what it served before.
_UNSETTLING = frozenset({"read_back", "engine", "fenced", "stale", "bad_state"})


@dataclasses.dataclass(eq=False)
class _Flight:
    """A request that one engine is drawing: `pending` are the numbers of its draws that it has not reported."""

    numbers: list[int]
    pending: set[int]
    replica: Replica
    life: Life
    oldest: int  # version it may be drawn under
    began: float
    progress: messages.Progress | None = None
    is_over: bool = False  # nobody waits for it any more
    is_hedged: bool = False
    was_dropped: bool = False


class _Work:
    """One call of `draw`."""

    def __init__(self, draws: Sequence[messages.Draw], sampling: messages.Sampling, pieces: Iterator[list[int]]):
        self.draws, self.sampling = draws, sampling
        self.drawn: list[messages.Drawn | None] = [None] * len(draws)
        self.left = len(draws)
        self.pieces = collections.deque(pieces)
        self.flights: set[_Flight] = set()
        self.news: list[int] = []
        self.took: list[float] = []  # seconds of the requests that have ended
        self.tokens = 0
        self.has_progressed = False
        self.error: Exception | None = None


class Fleet:
    """All vLLM engines of a process behind one interface; see the module docstring.

    Args:
      config: the engines' options, and the addresses of bridges started by hand.
      run_id, incarnation: see `messages.Version`.
      check: called with a newly connected engine's facts; raises UserError if the engine does not fit the learner.
      explain: maps a bridge's error to a clearer exception if the error breaks a promise; else None.
      log: called with a line, from any thread.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_id: str,
        incarnation: int,
        check: Callable[[messages.Facts], None],
        explain: Callable[[BridgeError, messages.Facts | None], Exception | None],
        log: Callable[[str], None],
    ):
        self._config, self._check, self._explain, self._log = config, check, explain, log
        self._run_id, self._incarnation = run_id, incarnation
        self._changed = threading.Condition()
        self._target: sender.Version | None = None
        self._model_json: Mapping[str, Any] = {}
        self._closing = False
        self._numbers = itertools.count(1)
        self._broadcast_lock = threading.Lock()  # one broadcast from a GPU at a time
        self.replicas = [self._replica(number=number) for number in range(config.started)]
        self.replicas += [self._replica(address=address) for address in config.endpoints]

    def _replica(self, **where: Any) -> Replica:
        number = next(self._numbers)
        place = f" at {where['address']}" if "address" in where else ""
        name = f"vLLM bridge {number}{place}" if self._config.is_fleet else "the vLLM bridge"
        return Replica(name, self._config, run_id=self._run_id, incarnation=self._incarnation, **where)

    @property
    def restarts(self) -> int:
        """The number of bridges that were replaced."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def first(self) -> Replica | None:
        """A connected engine; the same one as long as it stays connected. None if there is none."""
        return next((replica for replica in self.replicas if replica.client is not None), None)

    def prepare(self, model_json: Mapping[str, Any], expected: list[messages.Expected]) -> None:
        """Starts the bridges that the trainer owns, before there are weights. Arguments as in `Replica.start`."""
        for replica in self.replicas:
            replica.start(model_json, expected)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def publish(self, staged: sender.Version, model_json: Mapping[str, Any]) -> dict[str, float]:
        """Publishes a version to every engine that is up. Keep `staged` open until the next version has been published.

        Returns:
          As `sender.Client.publish`; seconds are the slowest engine's. With several engines also `replicas` that serve.

        Raises:
          The first engine's error, if no engine serves the version; engines then keep the version before it.
          BridgeError("unshared"): if any engine cannot be reached this way.
        """
        with self._changed:
            before, self._target, self._model_json = self._target, staged, model_json
            others = any(replica.serves(before) for replica in self.replicas)
            for replica in self.replicas:
                if replica.error is not None and not (others and replica.deaths > self._config.max_restarts):
                    replica.error = None
            began = time.monotonic()
            try:
                while True:
                    self._start_catch_ups()
                    if not any(self._is_awaited(replica, before is None, began) for replica in self.replicas):
                        break
                    self._changed.wait(_TICK_S)
                serving = [replica for replica in self.replicas if replica.serves(staged)]
                for replica in self.replicas:
                    # One of ours that cannot start when the run does was asked for in vain: no fault, a setting.
                    in_vain = before is None and not replica.address and isinstance(replica.error, UserError)
                    if in_vain or getattr(replica.error, "code", "") == "unshared":
                        assert replica.error is not None
                        raise replica.error
                if not serving:
                    raise self._no_engine()
            except BaseException:
                self._target = before
                for replica in self.replicas:
                    replica.error = None
                raise
            for replica in serving:
                replica.deaths = 0
            reports = [replica.report for replica in serving]
            report = {name: max(one[name] for one in reports) for name in reports[0]}
            return report | ({"replicas": float(len(serving))} if self._config.is_fleet else {})

    def _is_awaited(self, replica: Replica, is_first: bool, began: float) -> bool:
        """Tells whether a publish waits for an engine: for those that are up, and those that are started here."""
        if replica.task is None:
            return False
        grace = is_first and time.monotonic() < began + GRACE_S
        up = replica.client is not None or not replica.address
        return up or grace or not any(other.serves(self._target) for other in self.replicas)

    def _start_catch_ups(self) -> None:
        """Starts a thread per engine that lacks the current version and is not left out. The caller holds the lock."""
        if self._target is None or self._closing:
            return
        now = time.monotonic()
        for replica in self.replicas:
            if replica.task is not None or replica.serves(self._target):
                continue
            if replica.error is not None:
                if not replica.address or now < replica.retry_at:
                    continue
                replica.error, replica.deaths = None, 0
            replica.task = threading.Thread(target=self._catch_up, args=(replica,), daemon=True, name="catch-up")
            replica.task.start()

    def _catch_up(self, replica: Replica) -> None:
        """Brings an engine to the current version, in a thread, until the engine serves it or is left out."""
        while True:
            with self._changed:
                staged, trouble = self._target, replica.trouble
                done = trouble is None and replica.holds is staged and replica.client is not None
                if done or staged is None or self._closing:
                    replica.task = None
                    self._changed.notify_all()
                    return
                if trouble is not None:
                    replica.holds = replica.trouble = None
            try:
                if trouble is not None:
                    self._count_death(replica, trouble)
                if replica.client is None:
                    expected = [
                        messages.Expected(name=entry.name, dtype=entry.dtype, shape=entry.shape)
                        for entry in sender.complete_of(staged).manifest.tensors
                    ]
                    self._check(replica.connect(self._model_json, expected))
                    self._introduce(replica)
                    continue  # meanwhile the version may be another
                assert replica.facts is not None
                # What lies on their own GPUs is read by all at once.
                is_broadcast = isinstance(staged, sender.DeviceVersion) and not staged.lies_on(replica.facts.device)
                with self._broadcast_lock if is_broadcast else contextlib.nullcontext():
                    report = replica.publish(staged)
                with self._changed:
                    replica.holds, replica.report = staged, report
            except BridgeError as error:
                if _is_fault(error, replica):
                    with self._changed:
                        replica.trouble = error
                    continue
                if error.code in _UNSETTLING:
                    replica.holds = None
                return self._leave_out(replica, self._converted(error, replica))
            except Exception as error:
                if replica.holds is None:
                    replica.hang_up()
                    replica.deaths += 1  # else every publish would wait for it to fail again
                return self._leave_out(replica, error)

    def _count_death(self, replica: Replica, error: BridgeError) -> None:
        """Counts the death of a bridge, and logs its replacement. Raises UserError after too many in a row."""
        cause = replica.bury(error)
        replica.deaths += 1
        if replica.deaths > self._config.max_restarts:
            words = "" if replica.address else f". It said: {replica.bridge.last_words()}"
            raise UserError(f"{replica.name} died {replica.deaths} times in a row; last: {cause}{words}") from error
        replica.restarts += 1
        again = "calling it again" if replica.address else "starting it again"
        self._log(f"{replica.name} died ({cause}); {again}")

    def _introduce(self, replica: Replica) -> None:
        facts = replica.facts
        assert facts is not None
        name = f"{replica.name}: " if self._config.is_fleet else ""
        notes = "".join(f"; {note}" for note in facts.notes)
        self._log(
            f"{name}{facts.engine} {facts.engine_version}, execution {facts.execution} ({facts.profile}, {facts.isa}, "
            f"{facts.threads} threads){notes}"
        )

    def _converted(self, error: BridgeError, replica: Replica) -> Exception:
        """Converts a bridge's error to the exception to raise."""
        if error.code in USER_CODES:
            told: Exception = UserError(f"vLLM bridge: {error}")
            told.__cause__ = error
            return told
        return self._explain(error, replica.facts) or error

    def _leave_out(self, replica: Replica, error: Exception) -> None:
        with self._changed:
            replica.error, replica.task = error, None
            replica.retry_at = time.monotonic() + RETRY_S
            self._changed.notify_all()
        if self._config.is_fleet:
            self._log(f"{replica.name} is left out: {error}")

    def _no_engine(self) -> Exception:
        """Returns the exception to raise when no engine serves."""
        for replica in self.replicas:
            if replica.error is not None:
                return replica.error
        return UserError("no vLLM bridge is left")

    # ---- completions -------------------------------------------------------------------------------------------------

    def draw(
        self,
        draws: Sequence[messages.Draw],
        sampling: messages.Sampling,
        *,
        routed_bytes: int = 0,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> Generator[tuple[int, messages.Drawn], None, None]:
        """Yields (index of the draw, its completion) once per draw, as draws end.

        Args:
          routed_bytes: bytes of routed experts that a reply has per position; 0 if experts are not recorded.
          on_progress: called every two seconds with (running, waiting, tokens).

        Raises:
          UserError: an engine refused a request that every engine would refuse, or no engine is left.
        """
        work = _Work(draws, sampling, self._pieces(draws, routed_bytes))
        try:
            while True:
                with self._changed:
                    self._start_catch_ups()
                    self._dispatch(work)
                    if work.error is not None:
                        raise work.error
                    up = any(replica.task is not None or replica.serves(self._target) for replica in self.replicas)
                    if work.left and not up and not work.flights:
                        raise self._no_engine()
                    if work.left and not work.news and not work.has_progressed:
                        self._changed.wait(_TICK_S)
                    news, work.news = work.news, []
                    progress, work.has_progressed = work.has_progressed, False
                    latest = {flight.replica: flight.progress for flight in work.flights if flight.progress}
                    running = sum(one.running for one in latest.values())
                    waiting = sum(one.waiting for one in latest.values())
                for number in news:
                    drawn = work.drawn[number]
                    if drawn is not None:
                        yield number, drawn
                if progress and on_progress is not None:
                    on_progress(running, waiting, work.tokens)
                if not work.left and not work.news:
                    return
        finally:
            with self._changed:
                for flight in work.flights:
                    flight.is_over = True

    def _pieces(self, draws: Sequence[messages.Draw], routed_bytes: int) -> Iterator[list[int]]:
        """Yields the numbers of draws that are asked for together. A single engine is asked for all at once.

        Of several, each gets four pieces, or pieces of a quarter of what it decodes at a time. Samples of a prompt stay
        together, because they share its prefix.
        """
        most = len(draws)
        if self._config.is_fleet:
            most = max(1, min(-(-most // (4 * len(self.replicas))), self._config.max_num_seqs // 4))
            alike = sum(1 for _ in itertools.takewhile(lambda one: one.prompt == draws[0].prompt, draws))
            most = most // alike * alike or most
        at = 0
        for start in range(0, len(draws), most):
            for batch in batches(draws[start : start + most], routed_bytes=routed_bytes):
                yield list(range(at, at + len(batch)))
                at += len(batch)

    def _dispatch(self, work: _Work) -> None:
        """Sends requests to the least loaded engines while these have room. The caller holds the lock."""
        while work.pieces and not work.error:
            free = [replica for replica in self.replicas if replica.serves(self._target) and replica.has_room]
            if not free:
                return
            numbers = [number for number in work.pieces.popleft() if work.drawn[number] is None]
            if numbers:
                self._send(work, numbers, min(free, key=lambda replica: replica.draws))
        if work.left:
            self._hedge(work)

    def _hedge(self, work: _Work) -> None:
        """Repeats slow requests on idle engines; the first completion of a draw counts."""
        if not work.took:
            return
        limit = max(_SHORTEST_HEDGE_S, HEDGE * statistics.median(work.took))
        now = time.monotonic()
        for flight in list(work.flights):
            idle = [replica for replica in self.replicas if replica.serves(self._target) and not replica.requests]
            if not idle:
                return
            if not flight.is_hedged and flight.replica not in idle and now - flight.began > limit:
                flight.is_hedged = True
                if numbers := [number for number in flight.numbers if work.drawn[number] is None]:
                    self._send(work, numbers, idle[0]).is_hedged = True

    def _send(self, work: _Work, numbers: list[int], replica: Replica) -> _Flight:
        assert self._target is not None
        oldest = self._target.manifest.version.step
        flight = _Flight(numbers, set(numbers), replica, replica.life, oldest, time.monotonic())
        work.flights.add(flight)
        replica.requests += 1
        replica.draws += len(numbers)
        threading.Thread(target=self._request, args=(work, flight), daemon=True, name="draw").start()
        return flight

    def _request(self, work: _Work, flight: _Flight) -> None:
        """Sends a request to its engine, in a thread, and stores the completions as they arrive."""
        replica = flight.replica

        def report(progress: messages.Progress) -> None:
            with self._changed:
                if flight.is_over:  # only now: whether an engine is alive, its silence would show
                    flight.was_dropped = True
                    raise BridgeError("nobody waits for this request any more", "dead")
                flight.progress, work.has_progressed = progress, True
                for one in progress.ended:
                    self._take(work, flight, flight.numbers[one.index], one.drawn)
                self._changed.notify_all()

        asked = [work.draws[number] for number in flight.numbers]
        failed: BridgeError | None = None
        try:
            drawn = replica.ask(lambda client: client.generate(asked, work.sampling, on_progress=report))
            with self._changed:
                for number, one in zip(flight.numbers, drawn, strict=True):
                    self._take(work, flight, number, one)
                replica.deaths = 0
        except BridgeError as error:
            failed = error
        except Exception as error:
            work.error = error
        with self._changed:
            work.flights.discard(flight)
            replica.requests -= 1
            replica.draws -= len(flight.pending)
            if failed is None:
                work.took.append(time.monotonic() - flight.began)
            elif failed.code == "limits":  # what else a user could mend, this bridge was beyond when it was connected
                work.error = self._converted(failed, replica)
            elif not flight.was_dropped:
                left = [number for number in flight.numbers if work.drawn[number] is None]
                if left:
                    work.pieces.appendleft(left)
                if flight.life is replica.life and not flight.life.is_over:
                    replica.trouble = replica.trouble or failed
            self._changed.notify_all()

    def _take(self, work: _Work, flight: _Flight, number: int, drawn: messages.Drawn) -> None:
        """Stores a completion, unless another engine drew it before. The caller holds the lock.

        Raises:
          BridgeError("stale"): it was drawn under a version that it must not be drawn under.
        """
        assert self._target is not None
        now = self._target.manifest.version
        for span in drawn.spans:
            its = span.version
            ours = (its.run_id, its.incarnation) == (now.run_id, now.incarnation)
            if not ours or not flight.oldest <= its.step <= now.step:
                raise BridgeError(f"the bridge drew under {its}, which this run does not serve", "stale")
        if number in flight.pending:
            flight.pending.discard(number)
            flight.replica.draws -= 1
        if work.drawn[number] is None:
            work.drawn[number] = drawn
            work.left -= 1
            work.tokens += len(drawn.tokens) // 4
            work.news.append(number)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def ask(self, call: Callable[[sender.Client], Any]) -> Any:
        """Returns `call` of a connection to a serving engine; replaces an engine that dies meanwhile."""
        while True:
            with self._changed:
                while True:
                    self._start_catch_ups()
                    serving = [replica for replica in self.replicas if replica.serves(self._target)]
                    if serving or not any(replica.task for replica in self.replicas):
                        break
                    self._changed.wait(_TICK_S)
                if not serving:
                    raise self._no_engine()
                replica, life = serving[0], serving[0].life
            try:
                return replica.ask(call)
            except BridgeError as error:
                if not _is_fault(error, replica):
                    if error.code in USER_CODES:
                        raise self._converted(error, replica) from error
                    raise
                with self._changed:
                    if life is replica.life and not life.is_over:
                        replica.trouble = error

    def close(self) -> None:
        """Stops the bridges that the trainer started, and closes connections as `Replica.hang_up` does. Idempotent."""
        with self._changed:
            self._closing = True
            tasks = [replica.task for replica in self.replicas if replica.task is not None]
            for replica in self.replicas:
                if replica.task is not None:
                    replica.life.is_over = True
            self._changed.notify_all()
        for task in tasks:
            task.join(10.0)
        with ThreadPoolExecutor(max(1, len(self.replicas))) as pool:
            list(pool.map(Replica.close, self.replicas))


def _is_fault(error: BridgeError, replica: Replica) -> bool:
    """Tells whether a bridge is to be replaced: it is gone or silent, or refuses a second handshake.

    A bridge that dies during a handshake looks as if it refused.
    """
    return error.code in ("dead", "timeout") or (error.code == "auth" and replica.has_held_lease)


def batches(
    draws: Sequence[messages.Draw],
    most: int = messages.MAX_FRAME // 4 * 3,
    most_back: int = messages.MAX_REPLY // 4 * 3,
    routed_bytes: int = 0,
) -> Iterator[list[messages.Draw]]:
    """Splits draws, in order, into few requests whose messages and replies fit the protocol's size limits.

    A token takes up to 5 bytes in a request and 8 in a reply (with its log-prob). Recorded experts add `routed_bytes`
    to the reply for every position. A draw that exceeds a limit alone is yielded alone.

    Args:
      most, most_back: bytes of a request, and of its reply.
    """
    batch: list[messages.Draw] = []
    there = back = 0
    for draw in draws:
        question, answer = 5 * len(draw.prompt) + 64, 8 * draw.max_tokens + 512
        answer += routed_bytes * (len(draw.prompt) + draw.max_tokens)
        if batch and (there + question > most or back + answer > most_back):
            yield batch
            batch, there, back = [], 0, 0
        batch.append(draw)
        there, back = there + question, back + answer
    if batch:
        yield batch
