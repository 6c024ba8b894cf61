# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Engines that Ray places: two on this host, one of them killed."""

import os
import signal
import sys

import pytest

from qarl_jax.rollout.vllm.engine import Config, VllmEngine
from qarl_jax.types import UserError
from tests.reference.bridge_world import alive, wait_for
from tests.reference.fleet_world import drawn, weights


def test_gpus_are_rays_to_give():
    with pytest.raises(UserError, match="set ray_gpus"):
        Config(launch="ray", replicas=2, visible_gpus="1;2")
    assert not Config(launch="ray").stages_on_gpu


def test_without_ray_it_is_told_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install .*\[ray\]"):
        VllmEngine(Config(launch="ray", engine="fake"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_engines_that_ray_places_draw_what_one_engine_draws_and_are_replaced():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        options = {"engine": "fake", "max_model_len": 128, "start_timeout_s": 120}
        one = VllmEngine(Config(**options))
        one.publish(weights(0), 0)
        wanted = drawn(one)
        one.close()
        engine = VllmEngine(Config(launch="ray", replicas=2, ray_gpus=0, ray_cpus=0.5, **options))
        try:
            report = engine.publish(weights(0), 0)
            assert report["replicas"] == 2
            assert report["sent_bytes"] > 0  # over TCP, as to another host
            assert drawn(engine) == wanted
            pids = [replica.facts.pid for replica in engine.fleet.replicas]
            os.kill(pids[1], signal.SIGKILL)
            assert drawn(engine) == wanted
            wait_for(lambda: drawn(engine) == wanted and all(r.serves(engine._staged) for r in engine.fleet.replicas))
            assert engine.restarts == 1
            pids = [replica.facts.pid for replica in engine.fleet.replicas]
        finally:
            engine.close()
        assert not any(alive(pid) for pid in pids)
    finally:
        ray.shutdown()
