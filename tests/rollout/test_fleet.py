# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one interface: what is drawn is what one engine draws, whatever happens to some of them."""

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.rollout.vllm import fleet
from qarl_jax.rollout.vllm.engine import BrokenPromiseError, Config, VllmEngine
from qarl_jax.types import UserError
from tests.reference import fleet_faults
from tests.reference.bridge_world import wait_for
from tests.reference.fleet_world import PROMPTS, SAMPLING, Bridge, drawn, key_file, weights

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def started(count, **options):
    """An engine over `count` processes with toy engines."""
    config = Config(engine="fake", replicas=count, max_model_len=128, start_timeout_s=120, **options)
    lines = []
    engine = VllmEngine(config, log=lines.append)
    engine.lines = lines
    try:
        yield engine
    finally:
        engine.close()


def all_serve(engine):
    return all(replica.serves(engine._staged) for replica in engine.fleet.replicas)


class Endpoints:
    """Bridges in threads, and an engine over them."""

    def __init__(self, folder, count, **options):
        self.folder = folder
        self.addresses = [str(folder / f"s{number}") for number in range(count)]
        self.bridges = {}
        self.lines = []
        self.options = {"request_timeout_s": 30, "start_timeout_s": 60, "max_model_len": 128} | options

    def up(self, number):
        self.bridges[number] = Bridge(self.addresses[number])
        return self.bridges[number]

    def down(self, number):
        self.bridges.pop(number).stop()

    def engine(self, **options):
        config = Config(endpoints=tuple(self.addresses), key_file=key_file(self.folder), **self.options | options)
        self.made = VllmEngine(config, run_id="run", incarnation=1, log=self.lines.append)
        return self.made

    def serving(self):
        """An engine that has published version 0, every bridge being up."""
        for number in range(len(self.addresses)):
            self.up(number)
        engine = self.engine()
        engine.publish(weights(0), 0)
        return engine

    def close(self):
        self.made.close()
        for number in list(self.bridges):
            self.down(number)


@pytest.fixture
def endpoints(tmp_path):
    made = []

    def make(count, **options):
        made.append(Endpoints(tmp_path, count, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def one_engine():
    """What a single engine draws under seeds 0 and 1, as versions 0 and 1."""
    with started(1) as engine:
        out = []
        for version in (0, 1):
            engine.publish(weights(version), version)
            out.append(drawn(engine))
        return out


def test_four_processes_two_of_them_killed_at_random_moments_draw_what_one_engine_draws(one_engine):
    rng = random.Random(0)
    with started(4, max_num_seqs=4) as engine:
        report = engine.publish(weights(0), 0)
        assert report["replicas"] == 4
        assert drawn(engine) == one_engine[0]
        pids = [replica.facts.pid for replica in engine.fleet.replicas]
        victims = rng.sample(pids, 2)
        os.kill(victims[0], signal.SIGSTOP)  # so that it surely has requests in hand when it dies
        timers = [threading.Timer(rng.uniform(0, 0.2), os.kill, (pid, signal.SIGKILL)) for pid in victims]
        for timer in timers:
            timer.start()
        assert drawn(engine) == one_engine[0]
        for timer in timers:
            timer.join()
        engine.publish(weights(1), 1)
        assert drawn(engine) == one_engine[1]
        wait_for(lambda: engine.restarts == 2 or not drawn(engine))
        assert sum("died" in line for line in engine.lines) == 2
        # Everybody is back, with the current version.
        wait_for(lambda: drawn(engine) == one_engine[1] and all_serve(engine))


def test_requests_of_an_engine_that_hangs_move_to_the_others(one_engine):
    with started(2, request_timeout_s=3.0) as engine:
        engine.publish(weights(0), 0)
        os.kill(engine.fleet.replicas[1].facts.pid, signal.SIGSTOP)
        assert drawn(engine) == one_engine[0]
        wait_for(lambda: drawn(engine) == one_engine[0] and engine.restarts == 1 and all_serve(engine))


def test_endpoints_share_the_requests_and_draw_what_one_engine_draws(endpoints, one_engine):
    world = endpoints(3, max_num_seqs=4)
    for number in range(3):
        world.up(number)
    engine = world.engine()
    for version in (0, 1):
        assert engine.publish(weights(version), version)["replicas"] == 3
        before = [len(bridge.asked) for bridge in world.bridges.values()]
        assert drawn(engine) == one_engine[version]
        shares = [len(bridge.asked) - n for bridge, n in zip(world.bridges.values(), before, strict=True)]
        assert sum(shares) == 24
        assert min(shares) >= 4, "nobody is left idle"


def test_an_endpoint_that_comes_later_is_given_the_current_version_and_serves(endpoints, one_engine, monkeypatch):
    world = endpoints(2)
    world.up(0)
    monkeypatch.setattr(fleet, "GRACE_S", 0.0)
    engine = world.engine()
    assert engine.publish(weights(0), 0)["replicas"] == 1
    assert engine.publish(weights(1), 1)["replicas"] == 1
    late = world.up(1)
    wait_for(lambda: late.bridge.version is not None)
    assert late.bridge.version.step == 1
    world.down(0)
    assert drawn(engine) == one_engine[1]
    # And the first comes back as another process would: without weights.
    world.up(0)
    wait_for(lambda: drawn(engine) == one_engine[1] and all_serve(engine))


def test_a_slow_engines_requests_are_asked_of_an_idle_one_as_well(endpoints, one_engine, monkeypatch):
    monkeypatch.setattr(fleet, "_SHORTEST_HEDGE_S", 0.2)
    world = endpoints(2)
    world.up(0)
    world.up(1).engine.stall = True
    engine = world.engine()
    engine.publish(weights(0), 0)
    began = time.monotonic()
    assert drawn(engine) == one_engine[0]
    assert time.monotonic() - began < 20  # its requests would never have ended, and it is not silent
    assert engine.restarts == 0
    # What was asked in vain is given up, so that the next version need not wait for it.
    wait_for(lambda: not world.bridges[1].bridge.draws.running)
    world.bridges[1].engine.stall = False
    assert engine.publish(weights(1), 1)["replicas"] == 2
    assert drawn(engine) == one_engine[1]


def test_an_engine_that_does_not_hold_what_was_published_is_left_out_and_tried_at_the_next_version(
    endpoints, one_engine
):
    world = endpoints(2)
    world.up(0)
    world.up(1).engine.fail_read_back = 1
    engine = world.engine()
    assert engine.publish(weights(0), 0)["replicas"] == 1
    assert sum("is left out: " in line for line in world.lines) == 1
    assert drawn(engine) == one_engine[0]
    assert engine.publish(weights(1), 1)["replicas"] == 2
    # If nobody takes it, that is told, and the version before it is served on.
    for bridge in world.bridges.values():
        bridge.engine.fail_load = 1
    with pytest.raises(BridgeError, match="simulated loader failure"):
        engine.publish(weights(0), 2)
    assert drawn(engine) == one_engine[1]


def test_a_version_that_is_the_learners_fault_is_told(endpoints):
    world = endpoints(2)
    engine = world.serving()
    bad = weights(1)
    bad = dataclasses.replace(bad, params=jax.tree.map(lambda x: x * jnp.nan, bad.params))
    with pytest.raises(BrokenPromiseError, match="finite"):
        engine.publish(bad, 1)
    assert len(drawn(engine)) == len(PROMPTS)
    assert engine.restarts == 0


def test_completions_of_another_version_are_not_taken(endpoints, one_engine):
    """A bridge that serves something else under our feet: its answers are drawn again by another."""
    world = endpoints(2)
    engine = world.serving()
    astray = world.bridges[1]
    astray.bridge.version = type(astray.bridge.version)(run_id="another", incarnation=7, step=0)

    def told():  # the other bridge may have answered for it before it does
        assert drawn(engine) == one_engine[0]
        return any("drew under another/7/0" in line for line in world.lines)

    wait_for(told)


@pytest.mark.parametrize("calls", ["a request", "every call for a while"])
def test_a_handshake_that_a_death_interrupts_is_no_wrong_key(endpoints, one_engine, monkeypatch, calls):
    """It reads like one: the bridge hangs up without a word. Found by `make chaos`."""
    world = endpoints(2)
    engine = world.serving()
    real, left = sender.Client.__init__, [1 if calls == "a request" else 5]

    def interrupted(client, address, *args, **options):
        if address == world.addresses[1] and left[0]:
            left[0] -= 1
            raise BridgeError("refused the handshake: this trainer does not hold this bridge's key", "auth")
        real(client, address, *args, **options)

    monkeypatch.setattr(sender.Client, "__init__", interrupted)
    assert drawn(engine) == one_engine[0]
    wait_for(lambda: drawn(engine) == one_engine[0] and all_serve(engine))
    assert not left[0] or calls != "a request"


def test_a_dozen_random_faults_change_nothing_that_is_drawn(tmp_path):
    """A minute of what `make chaos` does a thousand times."""
    made = fleet_faults.run(12, random.Random(5), tmp_path)
    assert sum(made[kind] for kind in fleet_faults.KINDS) >= 12


def test_when_none_is_left_the_first_one_says_why():
    with started(2, max_restarts=0) as engine:
        engine.publish(weights(0), 0)
        for replica in engine.fleet.replicas:
            os.kill(replica.facts.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"vLLM bridge 1 died 1 times in a row; .*exit code -9"):
            drawn(engine)


def test_an_engine_of_ours_that_cannot_start_ends_the_run_at_its_start_and_is_not_waited_for_later(monkeypatch):
    """Half of the engines is half of what was asked for; on a GPU without room one never starts."""

    def refusing(engine, tried):
        def connect(*args):
            tried.append(1)
            raise UserError("vLLM bridge 2 did not start: no room")

        monkeypatch.setattr(engine.fleet.replicas[1], "connect", connect)

    with started(2) as engine:
        refusing(engine, [])
        with pytest.raises(UserError, match="no room"):
            engine.publish(weights(0), 0)
    with started(2, max_restarts=1) as engine:
        assert engine.publish(weights(0), 0)["replicas"] == 2
        tried = []
        refusing(engine, tried)
        os.kill(engine.fleet.replicas[1].facts.pid, signal.SIGKILL)
        for version in range(1, 5):
            assert engine.publish(weights(version % 2), version)["replicas"] == 1
        assert 1 <= len(tried) <= 2


def test_a_request_that_no_engine_can_serve_is_the_users_to_mend(endpoints):
    world = endpoints(2)
    engine = world.serving()
    with pytest.raises(UserError, match="max_model_len 128"):
        engine.generate(PROMPTS, num_samples=1, sampling=dataclasses.replace(SAMPLING, max_response_len=126), key=0)
    assert engine.restarts == 0
    assert len(drawn(engine)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoints": ("tcp://h:1",)}, "key_file"),
        ({"endpoints": ("h:1://",), "key_file": "k"}, "bad address"),
        ({"endpoints": ("/s", "/s"), "key_file": "k"}, "twice"),
        ({"replicas": 2, "visible_gpus": "1;2;3"}, "3 lists"),
        ({"replicas": -1}, "replicas"),
        ({"endpoints": ("/s",), "key_file": "k", "visible_gpus": "1"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Config(**options)


def test_each_started_engine_has_its_own_gpus():
    config = Config(replicas=3, visible_gpus="1,2;3,4;5,6")
    assert [config.gpus_of(number) for number in range(3)] == ["1,2", "3,4", "5,6"]
    assert Config(replicas=3, visible_gpus="1").gpus_of(2) == "1"
    assert (Config().started, Config(endpoints=("/s",), key_file="k").started) == (1, 0)
