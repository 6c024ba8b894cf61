# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling ahead of the learner: which version draws what, how old it may be, and that a killed run goes on with it."""

import contextlib
import dataclasses
import json
import random
import threading
import time

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.data import PromptStream
from qarl_jax.loop import ahead, setup, updates
from qarl_jax.loop.ahead import Ahead, restored, saved
from qarl_jax.loop.collector import Collector
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.rollout import RolloutEngine, SamplingConfig, dynamic_sampling
from qarl_jax.rollout.asynchronous import Config, Schedule, SharedEngine
from qarl_jax.rollout.dynamic_sampling import Collected
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.types import RolloutGroup, Turn, UserError
from tests.reference import fleet_world, tiny
from tests.reference.fleet_world import Bridge, weights
from tests.reference.numbered import Source
from tests.reference.rollouts import completion

pytestmark = pytest.mark.usefixtures("shared_learners")

STEPS, LENGTH = 12, 6


class Engine(RolloutEngine):
    """A response is LENGTH tokens long; token t drawn under version v has the log-prob -v - t/100."""

    def __init__(self, pause=lambda: 0.0):
        self.version, self.pause, self.publishing, self.drawing = -1, pause, False, False

    def publish(self, weights, version):
        assert not self.drawing
        time.sleep(self.pause())
        self.version = version
        return {}

    def draw(self, requests, *, sampling):
        for index, r in enumerate(requests):
            yield index, self._draw(r.prompt, len(r.tokens), len(r.tokens) + r.max_tokens)

    def _draw(self, prompt, start, end):
        self.drawing, version = True, self.version
        time.sleep(self.pause())
        assert self.version == version  # nothing is published meanwhile
        self.drawing = False
        end = min(end, LENGTH)
        return completion(
            range(start, end),
            [-version - t / 100 for t in range(start, end)],
            prompt=prompt.tokens,
            finish_reason="stop" if end == LENGTH else "length",
            version=version,
        )

    def close(self):
        self.closed = True


class Batches:
    """A collector: two responses to each prompt of the step."""

    def __init__(self, engine, stream, fails_at=None):
        self.engine, self.stream, self.fails_at = engine, stream, fails_at

    def keep(self):
        pass

    def state(self):
        return {}

    def collect(self, step):
        if step == self.fails_at:
            raise UserError("no more prompts")
        prompts = self.stream.batch(step)
        sampling = SamplingConfig(max_response_len=LENGTH)
        found = self.engine.generate(prompts, num_samples=2, sampling=sampling, key=step)
        groups = [
            RolloutGroup(prompt=p, completions=tuple(own), rewards=np.array([0.25, step], np.float32), texts=("a", "b"))
            for p, own in zip(prompts, found, strict=True)
        ]
        parts = {"exact": np.array([g.rewards for g in groups], np.float32).reshape(-1)}
        return Collected(groups=groups, sampled=groups, parts=parts, metrics={})


@contextlib.contextmanager
def pipeline(k, *, lockstep=True, chunk=0, first=0, state=None, sampling_s=lambda: 0.0, fails_at=None, steps=STEPS):
    stream = PromptStream(Source(20), seed=1, prompts_per_step=2)
    schedule = Schedule(k, lockstep, steps)
    engine = SharedEngine(Engine(sampling_s), schedule, chunk)
    timers = {"timer": PhaseTimer(), "behind": PhaseTimer()}
    ahead = Ahead(Batches(engine, stream, fails_at), schedule, stream, first=first, state=state, **timers)
    with contextlib.closing(ahead):
        yield engine, ahead


def versions(collected):
    return [span.version for g in collected.groups for c in g.completions for span in c.versions]


def train_on(engine, ahead, steps, learning_s=lambda: 0.0, first=0):
    """What each step got, as a learner that takes its time sees it; a publish behind each."""
    engine.publish(None, first)
    out = []
    for step in steps:
        out.append(ahead.collect(step))
        ahead.keep()
        time.sleep(learning_s())
        engine.publish(None, step + 1)
    return out


def hasty(seed, most_s=0.004):
    rng = random.Random(seed)
    return lambda: rng.random() * most_s


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("sampling_s", "learning_s"), [(0.003, 0.0), (0.0, 0.01)], ids=["slow engine", "slow learner"])
def test_in_lockstep_every_batch_has_the_version_that_its_number_says(k, sampling_s, learning_s):
    with pipeline(k, sampling_s=lambda: sampling_s) as (engine, ahead):
        found = train_on(engine, ahead, range(STEPS), lambda: learning_s)
    for step, batch in enumerate(found):
        assert set(versions(batch)) == {max(0, step - k)}
        assert batch.metrics["rollout/lag_max"] == min(k, step)
        assert [g.prompt.uid for g in batch.groups] == [str(i) for i in ahead._stream.indices(step)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk", [0, 2])
def test_by_the_clock_no_step_trains_on_tokens_older_than_it_may(seed, chunk):
    k = 1 + seed % 3
    with pipeline(k, lockstep=False, chunk=chunk, sampling_s=hasty(seed)) as (engine, ahead):
        found = train_on(engine, ahead, range(STEPS), hasty(seed + 100, 0.02))
    for step, batch in enumerate(found):
        assert step - k <= min(versions(batch)) <= max(versions(batch)) <= step


def test_a_sequence_that_is_interrupted_keeps_versions_and_log_probs_token_by_token():
    with pipeline(2, lockstep=False, chunk=2, sampling_s=lambda: 0.004) as (engine, ahead):
        found = train_on(engine, ahead, range(STEPS), lambda: 0.03)
    mixed = 0
    for batch in found:
        for one in (c for g in batch.groups for c in g.completions):
            assert one.tokens == tuple(range(LENGTH))
            assert one.finish_reason == "stop"
            by = np.concatenate([np.full(s.end - s.start, s.version) for s in one.versions])
            np.testing.assert_allclose(one.logprobs, -by - np.arange(LENGTH) / 100, rtol=1e-6)
            mixed += len(one.versions) > 1
    assert mixed  # a version came in while they were drawn


def test_the_sampler_runs_ahead_while_the_learner_learns():
    with pipeline(2) as (engine, ahead):
        engine.publish(None, 0)
        ahead.collect(0)
        deadline = time.monotonic() + 10
        while len(ahead._ready) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert sorted(ahead._ready) == [0, 1, 2]  # and not a step further than it may


@pytest.mark.parametrize("chunk", [0, 2])
def test_no_batch_is_drawn_from_a_policy_that_is_served_for_an_evaluation(chunk):
    with pipeline(4, lockstep=False, chunk=chunk, sampling_s=lambda: 0.001) as (engine, ahead):
        engine.publish(None, 0)
        ahead.collect(0)
        inner, drawing, threads = engine.engine, engine.engine._draw, []

        def drawn(*rest):
            threads.append(threading.current_thread())
            return drawing(*rest)

        with engine.reserved():
            inner._draw = drawn
            engine.publish(None, 0)
            time.sleep(0.05)
            engine.generate(
                [Source(1).prompt(0)], num_samples=2, sampling=SamplingConfig(max_response_len=LENGTH), key=0
            )
            engine.publish(None, 0)
            assert set(threads) == {threading.main_thread()}
        ahead.keep()
        for step in range(1, 5):
            ahead.collect(step)
            ahead.keep()
        assert len(set(threads)) == 2


def test_what_is_served_may_change_before_the_first_batch_is_begun():
    """A run that evaluates first serves another policy for it: one without noise, or of fewer bits."""
    with pipeline(1) as (engine, ahead):
        first = threading.Thread(target=lambda: [engine.publish(None, 0) for _ in range(3)], daemon=True)
        first.start()
        first.join(10)
        assert not first.is_alive()
        assert set(versions(ahead.collect(0))) == {0}


def test_what_ends_the_sampling_is_told_to_who_waits_and_holds_nobody_up():
    with pipeline(1, fails_at=3) as (engine, ahead):
        train_on(engine, ahead, range(3))
        with pytest.raises(UserError, match="no more prompts"):
            ahead.collect(3)
        engine.publish(None, 4)


def test_a_run_that_ends_early_leaves_no_thread():
    with pipeline(2, sampling_s=lambda: 0.01) as (engine, ahead):
        train_on(engine, ahead, range(2))
    assert not ahead._thread.is_alive()


# ---- over a fleet ----------------------------------------------------------------------------------------------------


def trained_over(folder, count, k, lockstep, kills=()):
    """The batches of a run over `count` toy engines. Before a step's publish, `kills` bridges end as by a signal."""
    folder.mkdir()
    bridges = [Bridge(fleet_world.short_path(folder, f"s{number}")) for number in range(count)]
    config = vllm.Config(
        endpoints=tuple(bridge.address for bridge in bridges), key_file=fleet_world.key_file(folder), max_model_len=128,
        max_num_seqs=8, start_timeout_s=60, request_timeout_s=30,
    )  # fmt: skip
    schedule = Schedule(k, lockstep, STEPS)
    engine = SharedEngine(vllm.VllmEngine(config, run_id="run", incarnation=1), schedule)
    stream = PromptStream(Source(20), seed=1, prompts_per_step=6)
    ahead = Ahead(Batches(engine, stream), schedule, stream, timer=PhaseTimer(), behind=PhaseTimer())
    out = []
    try:
        with contextlib.closing(ahead):
            engine.publish(weights(0), 0)
            for step in range(STEPS):
                out.append(ahead.collect(step))
                ahead.keep()
                if step in kills:  # while others sample ahead
                    bridges.pop().stop()
                engine.publish(weights((step + 1) % 3), step + 1)
    finally:
        engine.close()
        for bridge in bridges:
            bridge.stop()
    return out


@pytest.mark.slow
def test_a_fleet_that_samples_ahead_loses_two_engines_and_not_a_bit(tmp_path):
    one = trained_over(tmp_path / "a", 1, 2, True)
    three = trained_over(tmp_path / "b", 3, 2, True, kills=(2, 6))
    for step, (batch, other) in enumerate(zip(one, three, strict=True)):
        assert set(versions(batch)) == {max(0, step - 2)}
        assert described(batch) == described(other)


@pytest.mark.slow
def test_a_fleet_that_samples_by_the_clock_keeps_the_bound(tmp_path):
    for step, batch in enumerate(trained_over(tmp_path / "a", 3, 1, False, kills=(3,))):
        assert len(batch.groups) == 6
        assert step - 1 <= min(versions(batch)) <= max(versions(batch)) <= step


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [1, 4, 9])
@pytest.mark.parametrize("dropped", [False, True], ids=["trained", "dropped"])
def test_a_run_that_was_killed_gets_the_batches_of_one_that_was_not(stop_at, dropped):
    k = 2
    with pipeline(k) as (engine, ahead):
        whole = train_on(engine, ahead, range(STEPS))
    with pipeline(k) as (engine, ahead):
        train_on(engine, ahead, range(stop_at))
        if dropped:  # an interrupt: the step in hand is given up
            ahead.collect(stop_at)
        state = json.loads(json.dumps(ahead.state()["ahead"]))
    with pipeline(k, first=stop_at, state=state) as (engine, ahead):
        rest = train_on(engine, ahead, range(stop_at, STEPS), first=stop_at)
    for one, other in zip(whole[stop_at:], rest, strict=True):
        assert described(one) == described(other)


def described(batch):
    """Everything a step does with a batch."""
    groups = [
        (
            g.prompt.uid,
            g.rewards.tobytes(),
            g.texts,
            [(c.tokens, c.logprobs.tobytes(), c.versions) for c in g.completions],
        )
        for g in batch.groups
    ]
    numbers = {key: value for key, value in batch.metrics.items() if not key.startswith("time/")}
    return groups, {key: value.tobytes() for key, value in batch.parts.items()}, numbers


def test_a_batch_in_a_checkpoint_comes_back_whole():
    stream = PromptStream(Source(40), seed=3, prompts_per_step=2)

    def sample(prompts, number):
        groups = []
        for i, prompt in enumerate(prompts):
            one = completion([4, 5, 6], [-0.1, 0, -1e-7], routed_experts=np.arange(12, dtype=np.int16).reshape(3, 2, 2))
            one = dataclasses.replace(one, turns=(Turn(start=0, end=1, reward=0.1), Turn(start=2, end=3)))
            alike = number == 0 and i == 0
            rewards = np.array([1, 1 if alike else 1 / 3], np.float32)
            groups.append(RolloutGroup(prompt=prompt, completions=(one, one), rewards=rewards, texts=("x", "\ud800")))
        return groups, {"exact": np.concatenate([g.rewards for g in groups])}

    batch = dynamic_sampling.collect(dynamic_sampling.Config(max_batches=4), stream, 5, sample)
    assert batch.metrics["rollout/batches"] == 2
    indices = ahead._indices(stream, 5, batch)
    assert len(indices) == 4
    back, same = restored(stream, json.loads(json.dumps(saved(batch, indices))))
    assert same == indices
    assert described(back) == described(batch)
    assert [g.prompt.uid for g in back.sampled] == [g.prompt.uid for g in batch.sampled]
    one, other = back.groups[0].completions[0], batch.groups[0].completions[0]
    assert one.turns == other.turns
    np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_batches_that_are_too_old_for_a_lower_bound_are_sampled_anew():
    with pipeline(3) as (engine, ahead):
        train_on(engine, ahead, range(4))
        state = ahead.state()["ahead"]
    assert sorted(state) == ["4", "5", "6"]
    with pipeline(1, first=4, state=state) as (engine, ahead):
        found = train_on(engine, ahead, range(4, STEPS), first=4)
    assert [set(versions(batch)) for batch in found[:3]] == [{4}, {4}, {5}]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_staleness": -1}, "must not be negative"),
        ({"chunk": 4}, "decides nothing at max_staleness=0"),
        ({"max_staleness": 1, "chunk": 4, "lockstep": "on"}, "in lockstep"),
    ],
)
def test_settings_that_decide_nothing_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        Config(**settings)


# ---- runs -----------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """Ends a run where nothing was prepared for it."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = tiny.World(tmp_path_factory.mktemp("world"))
    return world.changed(train={"steps": 5, "asynchronous": {"max_staleness": 2}})


@pytest.mark.nightly
def test_a_killed_run_that_sampled_ahead_equals_one_that_was_not(world, monkeypatch):
    whole = world.changed(run_dir=str(world.folder / "whole"))
    assert train.main(whole.command()) == 0
    records = whole.records()
    assert [record["rollout/lag_max"] for record in records] == [0, 1, 2, 2, 2]
    assert [record["rollout/version"] for record in records] == [0, 0, 0, 1, 2]
    victim = world.changed(run_dir=str(world.folder / "killed"))
    real, calls = updates.Updates.run, []

    def dying(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KilledError
        return real(self, *args, **kwargs)

    monkeypatch.setattr(updates.Updates, "run", dying)
    with pytest.raises(KilledError):
        train.main(victim.command())
    assert train.main(victim.command()) == 0
    for name in ("metrics", "eval", "samples"):
        assert victim.records(name) == whole.records(name)


@pytest.mark.slow
def test_without_staleness_the_loop_is_that_of_a_run_that_waits(world, monkeypatch):
    kinds = []
    real = setup.Run.programs_are_ready
    monkeypatch.setattr(setup.Run, "programs_are_ready", lambda run: kinds.append(type(run.collector)) or real(run))
    plain = world.changed(run_dir=str(world.folder / "plain"), train={"steps": 2, "asynchronous": {}})
    zero = world.changed(run_dir=str(world.folder / "zero"), train={"steps": 2, "asynchronous": {"max_staleness": 0}})
    assert train.main(plain.command()) == train.main(zero.command()) == 0
    assert kinds == [Collector, Collector]
    assert zero.records() == plain.records()
    assert zero.records("samples") == plain.records("samples")
