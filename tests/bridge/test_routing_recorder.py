# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts are assigned to the requests and positions they belong to, however the scheduler cuts them up."""

import types

import numpy as np
import pytest
from qarl_bridge.engine.routing_recorder import Recorder
from qarl_bridge.protocol.errors import BridgeError

torch = pytest.importorskip("torch")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
LAYERS, K = 3, 2
SIZES = {"num_layers": 1, "num_chosen": 1, "max_rows": 1}


class Router:
    def set_capture_fn(self, function):
        self.tell = function


class World:
    """A runner and two routers (layers 0 and 2; layer 1 is dense) that route a token by its request and position."""

    device = torch.device("cpu")

    def __init__(self):
        self.routers = {0: Router(), 2: Router()}
        self.input_batch = types.SimpleNamespace(req_ids=[])
        modules = {
            f"model.layers.{n}.mlp.experts": types.SimpleNamespace(router=router) for n, router in self.routers.items()
        }
        modules["model.layers.1.mlp"] = types.SimpleNamespace()
        self.recorder = Recorder(modules, self, num_layers=LAYERS, num_chosen=K, max_rows=32)

    def execute_model(self, scheduled):
        """What the real one does: run the batch's rows, padded to four, in the order of its own list."""
        rows = []
        for name in self.input_batch.req_ids:
            start = scheduled.starts.get(name, 0)
            rows += [self.route(name, start + i) for i in range(scheduled.num_scheduled_tokens.get(name, 0))]
        rows += [[9, 9]] * (-len(rows) % 4)
        self.forward(torch.tensor(rows))
        return "result"

    def forward(self, rows):
        for layer, router in self.routers.items():
            router.tell(rows + layer)

    salt = 0  # another policy, or another day: a position routed again need not go where it went

    def route(self, name, position):
        number = int(name.split("-")[0])
        return [10 * number + position, position + self.salt]

    def step(self, new=(), cached=(), order=(), ended=()):
        """new, cached: (request, tokens before, tokens now)."""
        self.input_batch.req_ids = list(order) or [name for name, _, _ in (*new, *cached)]
        scheduled = types.SimpleNamespace(
            num_scheduled_tokens={name: count for name, _, count in (*new, *cached)},
            scheduled_new_reqs=[types.SimpleNamespace(req_id=n, num_computed_tokens=s) for n, s, _ in new],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=[n for n, _, _ in cached], num_computed_tokens=[s for _, s, _ in cached]
            ),
            starts={name: start for name, start, _ in (*new, *cached)},
            finished_req_ids=set(ended),
        )
        assert self.execute_model(scheduled) == "result"

    def check(self, request, length):
        routed = self.recorder.take(request, length)
        assert routed.shape == (length, LAYERS, K)
        assert routed.dtype == np.int16
        for position in range(length):
            wanted = np.array(self.route(request, position))
            np.testing.assert_array_equal(routed[position, 0], wanted)
            np.testing.assert_array_equal(routed[position, 2], wanted + 2)
        assert (routed[:, 1] == -1).all(), "a dense layer routes nothing"


def test_chunks_and_decoding_steps_of_several_requests_are_put_together():
    world = World()
    world.step(new=[("0-0-aa", 0, 3), ("1-0-bb", 0, 2)])
    world.step(cached=[("0-0-aa", 3, 2), ("1-0-bb", 2, 1)], order=["1-0-bb", "0-0-aa"])
    world.step(new=[("2-0-cc", 0, 4)], cached=[("0-0-aa", 5, 1)], order=["0-0-aa", "1-0-bb", "2-0-cc"])
    world.check("0-0", 6)
    world.check("1-0", 3)
    world.check("2-0", 4)


def test_what_a_preempted_request_computes_again_counts():
    world = World()
    world.step(new=[("0-0-aa", 0, 3)])
    world.step(cached=[("0-0-aa", 3, 1)])
    world.salt = 50
    world.step(cached=[("0-0-aa", 0, 5)])
    world.check("0-0", 5)


def test_a_replayed_graph_that_calls_no_python_records_all_the_same():
    world = World()
    captured = make_fx(lambda rows: world.forward(rows))(torch.zeros(4, K, dtype=torch.int64))
    for router in world.routers.values():
        router.tell = None
    world.forward = captured
    world.step(new=[("0-0-aa", 0, 3)])
    world.step(cached=[("0-0-aa", 3, 1)])
    world.check("0-0", 4)


def test_a_step_that_recorded_nothing_is_an_error_and_not_the_step_before():
    world = World()
    world.step(new=[("0-0-aa", 0, 3)])
    world.forward = lambda rows: None
    with pytest.raises(RuntimeError, match="did not record"):
        world.step(cached=[("0-0-aa", 3, 1)])


def test_under_the_second_model_runner_a_batch_belongs_to_its_step_and_dry_runs_count_for_nothing():
    world = World()
    world.input_batch = None
    first_runner = world.recorder._execute

    def execute_model(scheduled, dummy_run=False):
        world.input_batch = world.batch
        result = first_runner(scheduled)
        world.execute_model_state = types.SimpleNamespace(input_batch=world.input_batch)
        del world.input_batch
        return result

    world.recorder._execute = execute_model
    world.batch = types.SimpleNamespace(req_ids=["1-0-bb", "0-0-aa"])
    scheduled = types.SimpleNamespace(
        num_scheduled_tokens={"0-0-aa": 3, "1-0-bb": 1},
        scheduled_new_reqs=[types.SimpleNamespace(req_id=n, num_computed_tokens=0) for n in ("0-0-aa", "1-0-bb")],
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        starts={},
        finished_req_ids=set(),
    )
    world.execute_model(scheduled)
    world.execute_model(scheduled, dummy_run=True)
    world.check("0-0", 3)
    world.check("1-0", 1)


def test_steps_are_dealt_out_when_their_copies_have_come_and_at_the_latest_when_asked_for(monkeypatch):
    events = []

    class Event:
        def __init__(self):
            self.come = False
            events.append(self)

        def query(self):
            return self.come

        def synchronize(self):
            self.come = True

    monkeypatch.setattr(Recorder, "_event", lambda self: Event())
    world = World()
    world.step(new=[("0-0-aa", 0, 3), ("1-0-bb", 0, 2)])
    world.step(cached=[("0-0-aa", 3, 1), ("1-0-bb", 2, 1)])
    assert not world.recorder._kept  # nothing has been waited for
    events[0].come = True
    world.step(cached=[("0-0-aa", 4, 1), ("1-0-bb", 3, 1)])
    assert list(world.recorder._kept["0-0-aa"]) == [0]
    world.check("0-0", 4)  # vLLM had scheduled a step more than it turned out to need
    world.step(cached=[("0-0-aa", 5, 1), ("1-0-bb", 4, 1)])
    world.check("1-0", 5)
    world.step(new=[("2-0-cc", 0, 1)])
    world.recorder.forget(["2-0"])  # its first step is known, a second was scheduled beside a new request's
    world.step(new=[("3-0-dd", 0, 1), ("4-0-ee", 0, 1)])
    world.step(new=[("5-0-ff", 0, 1)], ended=["2-0-cc", "3-0-dd"])
    world.check("4-0", 1)
    assert list(world.recorder._kept) == ["5-0-ff"]  # nothing is left of those that ended


def test_a_position_that_was_not_routed_is_an_error_and_aborted_requests_are_forgotten():
    world = World()
    world.step(new=[("0-0-aa", 0, 3), ("1-0-bb", 0, 1)])
    with pytest.raises(RuntimeError, match="request 0-0: position 3 was not routed"):
        world.recorder.take("0-0", 5)
    world.recorder.forget(["1-0"])
    with pytest.raises(RuntimeError, match="its routing was not recorded"):
        world.recorder.take("1-0", 1)


def test_a_dense_model_is_refused():
    with pytest.raises(BridgeError, match="needs an MoE model"):
        Recorder({"model.layers.0.mlp": types.SimpleNamespace()}, types.SimpleNamespace(input_batch=None), **SIZES)


def test_an_engine_that_cannot_be_listened_to_is_refused():
    with pytest.raises(BridgeError, match="does not tell whose tokens a step has"):
        Recorder({}, types.SimpleNamespace(), **SIZES)
    alone = types.SimpleNamespace(router=Router(), quant_method=types.SimpleNamespace(is_monolithic=True))
    with pytest.raises(BridgeError, match="routes by itself"):
        Recorder({"model.layers.0.mlp.experts": alone}, types.SimpleNamespace(input_batch=None), **SIZES)
