# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The state machine around a fake engine: every transition and every refusal."""

import sys
import threading
import types

import numpy as np
from qarl_bridge.protocol import messages
from qarl_bridge.server import profiling
from qarl_bridge.server.profiling import Steps

from tests.reference.bridge_world import (
    K_WEIGHT,
    PATIENCE_S,
    SAMPLING,
    acquire_when_free,
    draws,
    refused,
    staged,
    still_serves,
    version_of,
    wait_for,
    world,
)

# ---- the way things go ----------------------------------------------------------------------------------------------


def test_publish_then_generate_then_publish_again(any_world):
    client = any_world.trainer()
    first = client.publish(staged(0))
    assert first["tensors"] == 5
    assert first["bytes"] == staged(0).manifest.total_bytes
    before = client.generate(draws(), SAMPLING)
    assert [version_of(d) for d in before] == [0, 0, 0]
    client.publish(staged(1), readback="full")
    after = client.generate(draws(), SAMPLING)
    assert [version_of(d) for d in after] == [1, 1, 1]
    assert before[0].tokens != after[0].tokens  # the fake's tokens depend on the loaded bytes
    assert client.status().published == 2


def test_a_draw_does_not_depend_on_its_company(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    together = client.generate(draws(8), SAMPLING)
    for draw, drawn in zip(draws(8), together, strict=True):
        assert client.generate([draw], SAMPLING) == [drawn]


def test_generation_needs_no_lease_and_clients_share_the_engine(bridge):
    first = bridge.trainer()
    first.publish(staged(0))
    first.close()
    trainer = bridge.trainer(incarnation=2)
    trainer.publish(staged(1, incarnation=2))
    evaluator = bridge.client()
    assert version_of(evaluator.generate(draws(1), SAMPLING)[0]) == 1
    with refused("lease", "send Acquire first"):
        evaluator.publish(staged(2))


def test_an_engine_without_weights_draws_nothing(bridge):
    with refused("bad_state", "publish a version first"):
        bridge.client().generate(draws(), SAMPLING)


def test_requests_that_cannot_be_served_are_refused_at_once(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    with refused("limits", "max_model_len 4096"):
        client.generate(draws(), messages.Sampling(max_tokens=4094))
    with refused("limits", "token id 100 >= vocabulary 100"):
        client.generate([messages.Draw(prompt=[1, 100], seed=0)], SAMPLING)
    still_serves(bridge, client, 0)


# ---- leases and versions --------------------------------------------------------------------------------------------


def test_second_trainer_is_refused_while_the_first_lives_and_accepted_after(bridge):
    first, second = bridge.trainer("run"), bridge.client()
    with refused("lease", "run run, incarnation 1"):
        second.acquire("other", 1)
    first.close()
    wait_for(lambda: second.status().holder is None)
    second.acquire("other", 1)
    second.publish(staged(0, run="other"))
    still_serves(bridge, second, 0)


def test_a_resumed_trainer_may_step_back_but_not_its_ghost(bridge):
    first = bridge.trainer(incarnation=5)
    first.publish(staged(7, incarnation=5))
    first.close()
    resumed = acquire_when_free(bridge, incarnation=6)
    resumed.publish(staged(3, incarnation=6))
    still_serves(bridge, resumed, 3)
    resumed.close()
    with refused("stale", "was resumed since"):
        acquire_when_free(bridge, incarnation=5)


def test_announce_refuses_a_stale_version_but_takes_the_same_one_again(bridge):
    client = bridge.trainer()
    client.publish(staged(4))
    with refused("stale", "already serves run/1/4"):
        client.publish(staged(3))
    with refused("stale"):
        client.publish(staged(4, seed=99))  # same number, other bytes
    client.publish(staged(4))
    still_serves(bridge, client, 4)


def test_announce_refuses_versions_of_others(bridge):
    client = bridge.trainer()
    with refused("lease", "not of the leased run/1"):
        client.publish(staged(0, run="other"))
    with refused("lease"):
        client.publish(staged(0, incarnation=2))


def test_announce_refuses_a_wrong_model_a_wrong_scheme_and_missing_shards(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    with refused("foreign_model"):
        client.publish(staged(1, model=bytes(16)))
    with refused("foreign_scheme"):
        client.publish(staged(1, scheme=bytes(16)))
    with refused("torn", f"first: {K_WEIGHT}.*fused module"):
        client.publish(staged(1, replace={K_WEIGHT: None}))
    with refused("tensor", "unknown.*extra"):
        client.publish(staged(1, replace={"extra": np.zeros(2, np.int8)}))
    with refused("tensor", f"{K_WEIGHT} is int32"):
        client.publish(staged(1, replace={K_WEIGHT: np.zeros((8, 8), np.int32)}))
    with refused("tensor", r"expects int8\[8, 8\]"):
        client.publish(staged(1, replace={K_WEIGHT: np.zeros((8, 7), np.int8)}))
    still_serves(bridge, client, 0)


# ---- failures while loading -----------------------------------------------------------------------------------------


def test_failed_load_restores_the_last_good_version(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    before = client.generate(draws(), SAMPLING)
    bridge.engine.fail_load = 1
    with refused("engine", "simulated loader failure.*run/1/0 was restored"):
        client.publish(staged(1))
    still_serves(bridge, client, 0)
    assert client.generate(draws(), SAMPLING) == before
    client.publish(staged(1))
    still_serves(bridge, client, 1)


def test_failed_read_back_restores_the_last_good_version(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.fail_read_back = 1
    with refused("read_back", "simulated read-back.*restored"):
        client.publish(staged(1))
    still_serves(bridge, client, 0)


def test_a_failed_first_read_back_says_what_differs_and_nothing_else(bridge):
    bridge.engine.fail_read_back = 1
    with refused("read_back", "^simulated read-back difference$"):
        bridge.trainer().publish(staged(0))
    assert bridge.bridge.state == "fenced"


def test_an_engine_that_cannot_be_restored_is_fenced_until_a_complete_version(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.fail_load = 2
    with refused("fenced", "so did restoring"):
        client.publish(staged(1))
    assert client.status().state == "fenced"
    with refused("fenced"):
        client.generate(draws(), SAMPLING)
    with refused("bad_state"):
        client.read_back()
    client.publish(staged(2))
    still_serves(bridge, client, 2)


def test_a_failed_first_load_goes_back_to_the_folders_weights_or_stays_fenced(tmp_path):
    for has_weights in (True, False):
        with world(tmp_path, has_weights=has_weights) as w:
            client = w.trainer()
            w.engine.fail_load = 1
            with refused("engine" if has_weights else "fenced"):
                client.publish(staged(0))
            assert client.status().state == ("serving" if has_weights else "fenced")


# ---- draining -------------------------------------------------------------------------------------------------------


def generate_in_background(client, results):
    thread = threading.Thread(target=lambda: results.append(client.generate(draws(), SAMPLING)))
    thread.start()
    return thread


def test_publishing_waits_for_running_requests_and_never_mixes_versions(bridge):
    trainer, sampler, other = bridge.trainer(), bridge.client(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    early, late = [], []
    first = generate_in_background(sampler, early)
    wait_for(lambda: trainer.status().running == 3)
    publish = threading.Thread(target=lambda: trainer.publish(staged(1)))
    publish.start()
    wait_for(lambda: bridge.bridge.state == "draining")
    second = generate_in_background(other, late)
    wait_for(lambda: len(bridge.bridge.draws.waiting) == 3)
    bridge.engine.stall = False
    for thread in (first, publish, second):
        thread.join(PATIENCE_S)
    assert [version_of(d) for d in early[0]] == [0, 0, 0]
    assert [version_of(d) for d in late[0]] == [1, 1, 1]


def test_drain_timeout_refuses_the_version_and_serving_goes_on(bridge):
    trainer, sampler = bridge.trainer(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    results = []
    thread = generate_in_background(sampler, results)
    wait_for(lambda: trainer.status().running == 3)
    with refused("timeout", "run/1/0 goes on serving"):
        trainer.publish(staged(1), drain_timeout_s=0.1)
    bridge.engine.stall = False
    thread.join(PATIENCE_S)
    assert [version_of(d) for d in results[0]] == [0, 0, 0]
    trainer.publish(staged(1))
    still_serves(bridge, trainer, 1)


# ---- looking inside -------------------------------------------------------------------------------------------------


def test_a_probe_needs_an_idle_serving_engine_and_a_prompt_that_fits(bridge):
    client, sampler = bridge.trainer(), bridge.client()
    with refused("bad_state", "serving engine"):
        client.probe([1, 2], ["layer"])
    client.publish(staged(0))
    (record,) = client.probe([1, 2], ["layer"])
    assert (record.module, record.inputs[0].numpy().tolist()) == ("layer", [1, 2])
    with refused("limits", "vocabulary"):
        client.probe([100], ["layer"])
    bridge.engine.stall = True
    results = []
    thread = generate_in_background(sampler, results)
    wait_for(lambda: client.status().running == 3)
    with refused("busy", "idle"):
        client.probe([1, 2], ["layer"])
    bridge.engine.stall = False
    thread.join(PATIENCE_S)
    assert [version_of(d) for d in results[0]] == [0, 0, 0]


def test_loads_are_profiled_where_that_was_asked_for(bridge, tmp_path):
    client = bridge.trainer()
    bridge.bridge._profile = str(tmp_path / "profiles")
    client.publish(staged(7))
    assert "load" in (tmp_path / "profiles" / "publish-7.txt").read_text()
    assert (tmp_path / "profiles" / "publish-7.prof").stat().st_size > 0


def test_some_steps_are_profiled_and_no_other_leaves_a_trace(tmp_path):
    steps = Steps(str(tmp_path), "steps")
    steps.FIRST, steps.LAST, steps.KERNELS = 1, 2, 3
    found = []

    def step():
        found.append(bool(sys.getprofile()))

    for _ in range(4):
        steps.run(step)
        assert (tmp_path / "steps.txt").exists() == (len(found) > 2)
    assert found == [False, True, True, False]
    assert "2    0.000" in (tmp_path / "steps.txt").read_text()
    assert not (tmp_path / "steps.kernels.txt").exists()  # no GPU
    Steps("", "steps").run(step)


def test_kernels_of_some_steps_are_written_by_the_time_they_take(tmp_path, monkeypatch):
    class Fake:
        running = False

        def stop(self):
            self.running = False

        def key_averages(self):
            kernel = types.SimpleNamespace
            return [
                kernel(key="norm", count=8, device_time_total=4.0),
                kernel(key="product", count=4, device_time_total=90.0),
            ]

    fake, seen = Fake(), []

    def begin():
        fake.running = True
        return fake

    monkeypatch.setattr(profiling, "_begin_kernels", begin)
    steps = Steps(str(tmp_path), "steps")
    steps.FIRST, steps.LAST, steps.KERNELS = 1, 1, 3
    for _ in range(5):
        steps.run(lambda: seen.append(fake.running))
    assert seen == [False, False, True, True, False]
    lines = (tmp_path / "steps.kernels.txt").read_text().splitlines()
    assert lines[0] == "47 us a step, mean of 2 steps"
    assert [line.split() for line in lines[1:]] == [
        ["45.0", "us", "2.0", "x", "product"],
        ["2.0", "us", "4.0", "x", "norm"],
    ]
