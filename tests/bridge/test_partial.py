# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions that replace some tensors of a complete one: adapters and norms travel alone."""

import functools
import json
import os
import time

import ml_dtypes
import msgspec
import numpy as np
import pytest
from qarl_bridge import cli
from qarl_bridge.client import sender
from qarl_bridge.protocol import adapters, expert_stacks, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import bridge as server
from qarl_bridge.server import waits
from qarl_bridge.server.chunked import ChunkedCopy
from qarl_bridge.server.fake_engine import FakeEngine
from safetensors.numpy import save_file

from tests.reference import bridge_world
from tests.reference.bridge_world import K_WEIGHT, SAMPLING, draws, refused, still_serves, version_of, world

BASE = bridge_world.tensors
NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj"


def some(seed):
    """The tensors that change from version to version: a norm, and the adapter of q."""
    rng = np.random.default_rng(seed)
    shapes = {NORM: (8,), Q + adapters.A: (2, 8), Q + adapters.B: (8, 2)}
    return {name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def version(step, over=None, base=0, replace=None, **identity):
    """Staged: complete, or partial over another."""
    named = (BASE(base) if over is None else {}) | some(step) | (replace or {})
    identity = {"model": messages.model_fingerprint(bridge_world.CONFIG)} | identity
    return sender.stage(
        ((name, array) for name, array in named.items() if array is not None),
        version=messages.Version(run_id="run", incarnation=1, step=step),
        scheme=messages.scheme_hash(bridge_world.CONFIG["quantization_config"]),
        over=over,
        **identity,
    )


@pytest.fixture(params=["unix", "tcp"])
def served(request, tmp_path, monkeypatch):
    """A bridge that serves a complete version 0, its trainer, and that version."""
    monkeypatch.setattr(bridge_world, "tensors", lambda seed: BASE(seed) | some(seed))
    with world(tmp_path, tcp=request.param == "tcp") as w:
        client, first = w.trainer(), version(0)
        client.publish(first)
        yield w, client, first


def test_a_partial_version_draws_what_it_draws_whole(served):
    _, client, first = served
    report = client.publish(version(1, over=first), readback="full")
    assert report["tensors"] == report["weights_read_back"] == 3
    partial = client.generate(draws(), SAMPLING)
    assert [version_of(one) for one in partial] == [1, 1, 1]
    client.publish(version(2))
    assert client.generate(draws(), SAMPLING) != partial
    whole = version(3, replace=some(1))
    client.publish(whole)
    assert [one.tokens for one in client.generate(draws(), SAMPLING)] == [one.tokens for one in partial]
    assert client.read_back().weights == 7


def test_a_partial_version_is_prepared_before_its_commit_and_a_complete_one_is_not(served):
    w, client, first = served
    partial = version(1, over=first)
    client._transfer(partial)
    assert w.engine.prepared == [1]
    assert version_of(client.generate(draws(1), SAMPLING)[0]) == 0
    client.publish(partial)
    client.publish(version(2))
    assert w.engine.prepared == [1, 1]


def test_over_a_socket_only_the_changes_of_a_partial_version_travel(tmp_path, monkeypatch):
    monkeypatch.setattr(bridge_world, "tensors", lambda seed: BASE(seed) | some(seed))
    with world(tmp_path, tcp=True) as w:
        client, first = w.trainer(), version(0)
        client.publish(first)
        second = version(1, over=first)
        assert client.publish(second, readback="full")["sent_bytes"] == second.manifest.total_bytes
        changed = some(1)[Q + adapters.B].copy()
        changed[3, 1] += 1
        third = version(2, over=first, replace=some(1) | {Q + adapters.B: changed})
        third.base = second
        assert 0 < client.publish(third, readback="full")["sent_bytes"] < 30
        assert w.engine.prepared == [1, 2]
        drawn = client.generate(draws(), SAMPLING)
        client.publish(version(3, replace=some(1) | {Q + adapters.B: changed}))
        assert [one.tokens for one in client.generate(draws(), SAMPLING)] == [one.tokens for one in drawn]


def test_a_version_that_cannot_be_prepared_is_refused_and_the_old_one_serves(served, monkeypatch):
    w, client, first = served
    before = client.generate(draws(), SAMPLING)

    def prepare(copy):
        raise BridgeError("tensor x is torn", "torn")

    with monkeypatch.context() as patch, refused("torn", "tensor x"):
        patch.setattr(w.engine, "prepare", prepare)
        client.publish(version(1, over=first))
    assert client.generate(draws(), SAMPLING) == before
    client.publish(version(2, over=first))
    assert version_of(client.generate(draws(1), SAMPLING)[0]) == 2


def test_a_breakdown_of_prepare_drops_the_version_and_the_old_one_serves(served, monkeypatch):
    """Memory ran out, say. Nothing of the version is left, so it cannot be staged again without its bytes."""
    w, client, first = served

    def prepare(copy):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, refused("engine", "out of memory"):
        patch.setattr(w.engine, "prepare", prepare)
        client.publish(version(1, over=first))
    assert w.bridge._pending is None
    with refused("bad_state", "no version announced"):
        client.request(messages.Stage(memory=None), messages.Staged)
    client.publish(version(2, over=first))
    assert version_of(client.generate(draws(1), SAMPLING)[0]) == 2


def test_a_trainer_hears_of_progress_while_its_version_is_prepared(served, monkeypatch):
    """A prepare may wait for a read-back that another client asked for."""
    w, client, first = served
    prepare = w.engine.prepare

    def slow(copy):
        time.sleep(0.3)
        prepare(copy)

    sent, progress = [], waits.Waits._progress
    monkeypatch.setattr(waits, "PROGRESS_S", 0.05)
    monkeypatch.setattr(waits.Waits, "_progress", lambda *given: sent.append(1) or progress(*given))
    monkeypatch.setattr(w.engine, "prepare", slow)
    client._transfer(version(1, over=first))
    assert w.engine.prepared == [1]
    assert len(sent) >= 2


def test_the_base_is_loaded_once_and_two_hundred_publishes_leave_nothing_behind(served):
    w, client, first = served
    before, loaded, files = version(1, over=first), w.engine.loaded_bytes, []
    client.publish(before)
    of_one = w.engine.loaded_bytes - loaded
    assert of_one == sum(array.nbytes for array in some(0).values())
    for step in range(2, 202):
        after = version(step, over=first)
        after.base = before
        client.publish(after)
        before.close()
        before = after
        if step % 50 == 0:
            assert version_of(client.generate(draws(1), SAMPLING)[0]) == step
            files.append(len(os.listdir("/proc/self/fd")))
    assert w.engine.loaded_bytes - loaded == 201 * of_one
    assert files[-1] <= files[0] + 6
    assert client.status().published == 202
    assert client.read_back().weights == 7


def test_a_bridge_that_does_not_hold_the_base_is_given_it_first(served, tmp_path):
    _, _, first = served
    (tmp_path / "new").mkdir()
    with world(tmp_path / "new", tcp=True) as fresh:
        client = fresh.trainer()
        client.publish(version(7, over=first), readback="full")
        assert client.status().published == 2
        assert version_of(client.generate(draws(1), SAMPLING)[0]) == 7
        assert client.read_back().weights == 7


def test_another_trainer_publishes_adapters_alone_on_the_base_that_is_there(served):
    """Its own complete version has other adapters, and its tensors in another order."""
    w, client, first = served
    client.publish(version(1, over=first))
    client.close()
    named, loaded = dict(reversed((BASE(0) | some(9)).items())), w.engine.loaded_bytes
    own = bridge_world.staged(0, run="next", replace=named)
    theirs = sender.stage(
        some(7).items(),
        version=messages.Version(run_id="next", incarnation=1, step=1),
        model=own.manifest.model,
        scheme=own.manifest.scheme,
        over=own,
    )
    trainer = w.trainer("next")
    report = trainer.publish(theirs, readback="full")
    assert (report["tensors"], report["base_s"]) == (3, 0)
    assert w.engine.loaded_bytes - loaded == sum(array.nbytes for array in some(0).values())
    drawn = trainer.generate(draws(), SAMPLING)
    trainer.publish(bridge_world.staged(2, run="next", replace=BASE(0) | some(7)))
    assert [one.tokens for one in trainer.generate(draws(), SAMPLING)] == [one.tokens for one in drawn]


def test_a_base_that_was_never_read_back_is_published_again_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(bridge_world, "tensors", lambda seed: BASE(seed) | some(seed))
    with world(tmp_path) as w:
        client, first = w.trainer("first"), bridge_world.staged(0, run="first")
        client.publish(first, readback="off")
        client.close()
        trainer, own = w.trainer(), version(0)
        assert trainer.publish(version(1, over=own), readback="off")["base_s"] == 0
        report = trainer.publish(version(2, over=own), readback="off")
        assert report["base_s"] == report["weights_read_back"] == 0
        trainer.close()
        later = w.trainer(incarnation=2)
        of = msgspec.structs.replace(own.manifest.version, incarnation=2)
        again = sender.stage(
            (BASE(0) | some(0)).items(), version=of, model=own.manifest.model, scheme=own.manifest.scheme
        )
        partial = sender.stage(
            some(1).items(),
            version=msgspec.structs.replace(of, step=1),
            model=own.manifest.model,
            scheme=own.manifest.scheme,
            over=again,
        )
        report = later.publish(partial, readback="full")
        assert report["base_s"] > 0
        assert report["weights_read_back"] == 3


def test_a_base_with_a_tensor_that_another_trainer_replaced_is_published_again(served):
    w, client, first = served
    client.publish(version(1, over=first))
    client.close()
    own = bridge_world.staged(0, run="next", replace=BASE(0) | some(0))
    keeps = sender.stage(
        [item for item in some(7).items() if item[0] != NORM],
        version=messages.Version(run_id="next", incarnation=1, step=1),
        model=own.manifest.model,
        scheme=own.manifest.scheme,
        over=own,
    )
    trainer = w.trainer("next")
    with refused("base", r"the engine holds it with model\.norm\.weight replaced: publish the base first"):
        trainer.request(messages.Announce(manifest=keeps.manifest), messages.Ready)
    assert trainer.publish(keeps, readback="full")["base_s"] > 0
    drawn = trainer.generate(draws(), SAMPLING)
    trainer.publish(bridge_world.staged(2, run="next", replace=BASE(0) | some(7) | {NORM: some(0)[NORM]}))
    assert [one.tokens for one in trainer.generate(draws(), SAMPLING)] == [one.tokens for one in drawn]


def test_a_bridge_that_does_not_hold_the_base_says_so_where_it_cannot_be_had(served, monkeypatch):
    _, client, first = served
    other = version(0, base=5)
    with refused(
        "base", "over a base of fingerprint [0-9a-f]{12}, and the engine holds one of fingerprint [0-9a-f]{12}: pub"
    ):
        client.request(messages.Announce(manifest=version(1, over=other).manifest), messages.Ready)
    monkeypatch.setattr(client, "_publish_base", lambda over, **options: sender.Client._publish_base(client, None))
    monkeypatch.setattr(client, "publish", lambda over: (_ for _ in ()).throw(BridgeError("gone", "bad_state")))
    with refused("base", "gone"):
        sender.Client.publish(client, version(1, over=other))
    del first


@pytest.mark.parametrize("failure", ["fail_load", "fail_read_back"])
def test_a_partial_version_that_fails_leaves_the_last_good_one(served, failure):
    w, client, first = served
    client.publish(version(1, over=first))
    before = client.generate(draws(), SAMPLING)
    setattr(w.engine, failure, 1)
    with refused("engine" if failure == "fail_load" else "read_back", "run/1/1 was restored"):
        client.publish(version(2, over=first))
    assert client.generate(draws(), SAMPLING) == before
    assert client.read_back().weights == 7
    client.publish(version(2, over=first))
    assert version_of(client.generate(draws(1), SAMPLING)[0]) == 2


def test_a_fenced_engine_takes_the_base_again_and_what_is_over_it(served):
    w, client, first = served
    client.publish(version(1, over=first))
    w.engine.fail_load = 2
    with refused("fenced", "so did restoring"):
        client.publish(version(2, over=first))
    client.publish(version(3, over=first))
    assert client.status().state == "serving"
    assert version_of(client.generate(draws(1), SAMPLING)[0]) == 3
    assert client.read_back().weights == 7


def test_bad_adapters_are_refused_while_the_last_good_version_serves(served):
    _, client, first = served
    client.publish(version(1, over=first))
    bf16 = ml_dtypes.bfloat16
    poisoned = some(2)[Q + adapters.A].copy()
    poisoned[1, 3] = np.nan
    foreign = f"{K_WEIGHT.removesuffix('.weight')}{adapters.A}"
    for changes, code, words in (
        ({Q + adapters.A: np.zeros((2, 9), bf16)}, "tensor", r"lora_A.*\[2, 9\], the engine expects bfloat16\[2, 8\]"),
        (
            {Q + adapters.A: np.zeros((4, 8), bf16), Q + adapters.B: np.zeros((8, 4), bf16)},
            "setup",
            "2 has adapters of rank 4 of q_proj, and the engine was started for adapters of rank 2 of q_proj: start it",
        ),
        ({Q + adapters.B: np.zeros((9, 2), bf16)}, "tensor", r"lora_B.*\[9, 2\]"),
        (
            {foreign: np.zeros((2, 8), bf16)},
            "setup",
            "of rank 2 of k_proj and q_proj, and the engine.*of rank 2 of q_proj:",
        ),
        ({Q + adapters.B: None}, "torn", "lacks 1 tensor.*q_proj.lora_B"),
        ({NORM: None}, "torn", "lacks 1.*the version before it replaced, first: model.norm"),
        ({K_WEIGHT: BASE(0)[K_WEIGHT]}, "torn", "lacks.*fused module"),
        ({Q + adapters.A: poisoned}, "tensor", "lora_A.weight holds NaN"),
    ):
        with refused(code, words):
            client.publish(version(2, over=first, replace=changes))
        assert version_of(client.generate(draws(1), SAMPLING)[0]) == 1
    assert client.read_back().weights == 7


def test_an_engine_without_adapters_refuses_them(bridge):
    client = bridge.trainer()
    client.publish(bridge_world.staged(0))
    with refused("setup", "adapters of rank 2 of q_proj, and the engine was started for no adapters"):
        client.publish(bridge_world.staged(1, replace={n: a for n, a in some(0).items() if n != NORM}))
    still_serves(bridge, client, 0)


def test_what_lies_in_the_trainers_memory_is_let_go_of_with_it(served):
    """The base borrowed, and the version over it the bridge's own: then nothing could be restored."""
    w, client, first = served
    good = w.bridge._good
    client.publish(version(1, over=first))
    base, owner = good._base, next(iter(good._owners.values()))
    base.borrowed = True
    assert good.forget(object()) == []
    assert good.forget(owner) == [base]
    assert not good.is_there
    assert good.complete == first.manifest
    client.publish(version(2, over=first))
    with refused("bad_state", "nothing published to compare with"):
        client.read_back()
    assert not isinstance(base, ChunkedCopy)


def test_options_add_the_adapters_of_a_folder_of_weights():
    weights = bridge_world.expected(BASE(0)) | {
        "model.layers.1.mlp.up_proj.weight_packed": messages.Expected(
            name="model.layers.1.mlp.up_proj.weight_packed", dtype="int32", shape=[16, 4]
        )
    }
    found = adapters.expected(weights, 4, ["q_proj", "up_proj"])
    added = {name: one.shape for name, one in found.items() if name not in weights}
    assert added == {
        Q + adapters.A: [4, 8],
        Q + adapters.B: [8, 4],
        "model.layers.1.mlp.up_proj.lora_A.weight": [4, 32],
        "model.layers.1.mlp.up_proj.lora_B.weight": [16, 4],
    }
    assert adapters.expected(weights, 0, []) == weights
    with refused("setup", "no layer 'gate_proj'"):
        adapters.expected(weights, 4, ["gate_proj"])
    with refused("setup", "belong together"):
        messages.EngineOptions.from_json('{"lora_rank": 4}')


def test_a_folder_that_an_engine_was_started_from_is_a_base_for_adapters(tmp_path):
    """Its own weights, in two files, are a version like any other; the first trainer's adapters are all that travel."""
    stacked = {"model.layers.1.mlp.experts.*.up_proj.weight": np.arange(24, dtype=np.int8).reshape(3, 2, 4)}
    named = BASE(0) | {NORM: some(0)[NORM]} | stacked
    apart = dict(expert_stacks.apart(named.items()))
    for number, names in enumerate((list(apart)[:4], list(apart)[4:])):
        save_file({name: apart[name] for name in names}, tmp_path / f"{number}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(bridge_world.CONFIG))
    config, expected, has_weights = cli.read_folder(str(tmp_path))
    engine = FakeEngine(config, adapters.expected(expected, 2, ["q_proj"]), has_weights=has_weights)
    bridge = server.Bridge(engine)
    cli._adopt_folder(bridge, engine, str(tmp_path))
    assert (bridge.state, str(bridge.version), engine.loads) == ("serving", "initial/0/0", 1)
    own = {name: array for name, array in some(4).items() if name != NORM}
    identity = {"model": engine.facts.model, "scheme": engine.facts.scheme}
    of = functools.partial(messages.Version, run_id="run", incarnation=1)
    first = sender.stage((named | own).items(), version=of(step=0), **identity)
    partial = sender.stage(own.items(), version=of(step=1), over=first, **identity)
    bridge._good.check(partial.manifest)
    changed = sender.stage((named | own | {K_WEIGHT: BASE(1)[K_WEIGHT]}).items(), version=of(step=0), **identity)
    with refused("foreign_base", "the engine holds another base, of fingerprint [0-9a-f]{12} from initial/0/0"):
        bridge._good.check(sender.stage(own.items(), version=of(step=1), over=changed, **identity).manifest)
