# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates that are made while the last groups are decoded: the same run to the bit, or the step waits, and says why."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from qarl_jax import train
from qarl_jax.loop import tail, updates
from qarl_jax.loop.tail import Tail
from qarl_jax.observe.recorder import read_lines
from qarl_jax.run import build, config
from qarl_jax.verify import alignment
from tests.reference import tiny
from tests.reference.aligned import STEPS, Run, assert_same_bits
from tests.reference.bridge_world import alive

pytestmark = pytest.mark.usefixtures("shared_learners")

FIRST = 8  # responses of the first mini-batch


class Watched(Tail):
    """The updates of the step in hand. steps: whether each step that might make updates early made one so far.

    latest: of the step that is being sampled.
    """

    latest, steps = None, []

    def __init__(self, *args):
        super().__init__(*args)
        Watched.latest = self

    def end(self):
        hidden_s = super().end()
        Watched.steps.append(bool(self.done))
        Watched.latest = None
        return hidden_s


def awaited(*engine):
    """Until the first update is made, or known not to be."""
    deadline = time.monotonic() + 100
    while (one := Watched.latest) is not None and not (one.done or one._has_ended):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def staggered(draw, before=awaited):
    """`draw` of an engine that begins the other requests when the first mini-batch has ended and `before` returned."""

    def drawing(requests, *, sampling):
        yield from draw(requests[:FIRST], sampling=sampling)
        before()
        for index, one in draw(requests[FIRST:], sampling=sampling):
            yield FIRST + index, one

    return drawing


@pytest.fixture(autouse=True, scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "Tail", Watched)
        patch.setattr(alignment, "CHECKED", 0.0)
        yield


@pytest.fixture(autouse=True)
def counted():
    Watched.steps.clear()


# ---- step by step ---------------------------------------------------------------------------------------------------

MORE = {"train": {"update_epochs": 2, "mask_truncated": True}}


@pytest.fixture(scope="module", params=[(8, {}), pytest.param((4, MORE), marks=pytest.mark.nightly)])
def run(request, tmp_path_factory):
    made = Run(tmp_path_factory.mktemp("tail"), request.param[0], **request.param[1])
    made.draw, session, collect = staggered(made.draw), made.session, made.session._collector.collect
    # As `train` collects.
    session._collector.collect = lambda step: session._updates.arriving(collect, session.state, step)
    yield made
    made.session.close()


@pytest.fixture(scope="module")
def waited(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "waits", lambda *args: "to compare")
        return run.steps("auto", (99, 0, 0.0))


@pytest.mark.slow
def test_updates_begin_while_the_last_groups_are_decoded_and_change_no_bit(run, waited):
    state, records, said, _ = run.steps("auto", (99, 0, 0.0))
    assert Watched.steps == [True] * (STEPS - 1)  # the first step of a process compiles
    assert_same_bits(state, waited[0])
    assert (records, said) == (waited[1], [])
    assert all(record["later/proximal/max_abs"] > 1e-3 for record in records[:2])  # the masters move


@pytest.mark.slow
def test_a_first_update_that_is_discarded_leaves_the_step_as_it_was(run):
    step, response, amount = 2, 5, 0.0
    wanted, found = (run.steps(setting, (step, response, amount)) for setting in ("learner", "auto"))
    assert Watched.steps == [True] * (step - 1) + [False] + [True] * (STEPS - step - 2)  # one step is scored
    assert_same_bits(found[0], wanted[0])
    said, again = found[2]
    assert again.startswith(f"step {step + 2}: the last step's log-probs are equal")
    assert said.startswith(f"step {step}, update 1 of ")
    assert "is discarded: a token has another log-prob" in said
    assert found[1][step]["mismatch/exact"] < 1


@pytest.mark.slow
def test_a_step_whose_later_tokens_are_compared_waits(run, waited, monkeypatch):
    monkeypatch.setattr(alignment, "CHECKED", 1.0)
    state, records, _, _ = run.steps("auto", (99, 0, 0.0))
    assert Watched.steps == []
    assert_same_bits(state, waited[0])
    assert all(record["mismatch/checked"] == 1 for record in records)


# ---- a whole run, and what may happen in its tail -------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Four steps of two updates; a reference policy pulls."""
    return tiny.World(tmp_path_factory.mktemp("world")).changed(
        model={"dtype": "bfloat16"},
        quant={"forward": "w8a8", "engine": "cpu"},
        optimizer={"name": "adamw", "lr": 0.004},
        kl={"coef": 0.1},
        train={"steps": 4},
        eval={"at_start": False, "at_end": False},
    )


def trained(world, monkeypatch, before=awaited, waits=None):
    """The exit code of a start, whose engine calls `before` in the tail of each step. world: or a command."""
    make, Watched.latest = build.make_engine, None

    def made(*args):
        engine = make(*args)
        engine.draw = staggered(engine.draw, functools.partial(before, engine))
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(build, "make_engine", made)
        if waits is not None:
            patch.setattr(updates, "waits", lambda *args: waits)
        return train.main(world if isinstance(world, list) else world.command())


def only(what):
    """`before` of a run in which `what` happens once, after the first update that is made early."""
    left = [what]

    def before(engine):
        awaited()
        if Watched.latest is not None and left:
            left.pop()(engine)

    return before


def outcome(world):
    return world.records(), world.records("samples")


@pytest.fixture(scope="module")
def whole(world):
    """Records of a run whose steps wait."""
    waiting = world.changed(run_dir=str(world.folder / "whole"))
    with pytest.MonkeyPatch.context() as patch:
        assert trained(waiting, patch, waits="to compare") == 0
    return outcome(waiting)


@pytest.mark.slow
def test_records_and_samples_are_those_of_a_run_that_waits(world, whole, monkeypatch):
    early = world.changed(run_dir=str(world.folder / "early"))
    assert trained(early, monkeypatch, only(lambda engine: time.sleep(0.2))) == 0
    assert Watched.steps == [True] * 3
    assert outcome(early) == whole
    first, second, *_ = read_lines(early.run_dir / "metrics.jsonl")
    assert "time/update/hidden_s" not in first
    assert second["time/update/hidden_s"] > 0
    assert second["time/rollout/tail_s"] > second["time/rollout/idle_s"] > 0.1  # the sleep, after the update
    assert second["time/beside/update_s"] > 0 < second["time/beside/ref_logprobs_s"]
    assert second["perf/model_tflops"] * second["time/update_s"] * 1e12 < 0.99 * second["train/flops"]


def failing(engine):
    raise RuntimeError("no engine is left")


@pytest.mark.slow
def test_a_run_that_fails_and_is_interrupted_in_the_tail_resumes_to_the_bit(world, whole, monkeypatch):
    victim = world.changed(run_dir=str(world.folder / "victim"))
    with pytest.raises(RuntimeError, match="no engine is left"):
        trained(victim, monkeypatch, only(failing))
    assert len(victim.records()) == 1
    victim = victim.changed(checkpoint={"every": 100})  # what is saved is saved because of the signal
    assert trained(victim, monkeypatch, only(lambda engine: os.kill(os.getpid(), signal.SIGTERM))) == 0
    assert len(victim.records()) == 3  # the third step's masters had moved: it could not be dropped
    assert trained(victim, monkeypatch) == 0
    assert Watched.steps == [True]  # and of the step that failed nothing is counted
    assert outcome(victim) == whole


def killed(command):
    """A process's run, which ends in the tail of its second step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "Tail", Watched)
        patch.setattr(alignment, "CHECKED", 0.0)
        trained(command, patch, only(lambda engine: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.nightly
def test_a_trainer_that_is_killed_in_the_tail_resumes_to_the_bit(world, whole, monkeypatch):
    victim = world.changed(run_dir=str(world.folder / "killed"))
    program = f"from tests.loop import test_tail\ntest_tail.killed({victim.command()!r})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=tiny.ROOT, env=tiny.environment(), timeout=600)
    assert ended.returncode == -signal.SIGKILL
    assert len(victim.records()) == 1
    assert trained(victim, monkeypatch) == 0
    assert outcome(victim) == whole


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_vllm_that_is_killed_in_the_tail_is_given_the_version_that_the_step_began_with(tmp_path, monkeypatch):
    world = tiny.World(tmp_path, hidden=128).changed(
        model={"dtype": "bfloat16"},
        quant={"forward": "w8a8", "engine": "cpu"},
        rollout={"engine": {"name": "vllm", "max_model_len": 64, "kv_cache_gb": 0.1, "threads": 1}},
        train={"steps": 3},
        eval={"at_start": False, "at_end": False},
    )
    pids = []

    def kill(engine):
        pids.append(engine.facts.pid)
        threading.Timer(0.02, os.kill, (pids[0], signal.SIGKILL)).start()

    waiting = world.changed(run_dir=str(tmp_path / "whole"))
    assert trained(waiting, monkeypatch, waits="to compare") == 0
    assert trained(world, monkeypatch, only(kill)) == 0
    assert len(pids) == 1
    assert not alive(pids[0])
    assert Watched.steps == [True, True]
    assert outcome(world) == outcome(waiting)
    assert [line["mismatch/exact"] for line in world.records()] == [1, 1, 1]


# ---- runs whose steps wait ------------------------------------------------------------------------------------------

GIVEN = [
    "model.path=/m",
    "data.source={name: jsonl, path: /d.jsonl}",
    "quant={forward: w8a8, engine: cuda}",
    "rollout.engine.name=vllm",
    "train.prompts_per_update=8",
]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], ""),
        (["train.update_epochs=2"], ""),
        (["train.mask_truncated=true"], ""),
        (["kl.coef=0.1"], ""),
        (["rollout.engine.staging_buffers=1"], ""),
        (["rollout.engine.staging_buffers=0", "rollout.engine.transport=host"], ""),
        (["train.prompts_per_update=0"], "train.prompts_per_update"),
        (["train.asynchronous.max_staleness=1"], "train.asynchronous"),
        (["rollout.partial.over_provision=1.5"], "rollout.partial"),
        (["rollout.dynamic.max_batches=2"], "rollout.dynamic"),
        (["loss.name=ppo", "advantage={name: gae}", "critic={}"], "critic"),
        (["quant.forward=w2a16_shift", "train.widths=[8, 2]"], "train.widths"),
        (["kl={coef: 0.1, reference: masters}"], "kl.reference"),
        (["rollout.engine.staging_buffers=0"], "rollout.engine.staging_buffers"),
        (["train.proximal=learner"], "train.proximal"),
        (["quant.rollout=w8a8", "quant.forward=bf16", "quant.engine=plain"], "train.proximal"),
    ],
)
def test_a_run_whose_first_update_needs_the_whole_step_waits_and_names_the_setting(overrides, reason):
    found = tail.waits(config.load(None, [*GIVEN, *overrides]))
    assert found.endswith(f"({reason})") if reason else not found
