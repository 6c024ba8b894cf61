# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions of a policy of which some leaves are fixed: the first is complete, later ones have what moves."""

import dataclasses

import jax
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import adapters, fingerprint, messages

from qarl_jax import models
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, engine_tensors, moving
from qarl_jax.types import UserError
from qarl_jax.verify import ladder
from tests.reference.bridge_world import draws, wait_for
from tests.reference.fleet_world import KEY, Bridge, config, drawn, key_file, weights

PATHS = frozenset(models.by_path(models.split(models.abstract_model(config()))[1]))
NORMS = frozenset(path for path in PATHS if "norm" in path)
FIXED = PATHS - NORMS


def version(number):
    """The policy with other norms."""
    moved = jax.tree.map_with_path(
        lambda path, x: x * (1 + number / 8) if "norm" in jax.tree_util.keystr(path) else x, weights().params
    )
    return dataclasses.replace(weights(), params=moved, fixed=FIXED)


@pytest.fixture
def served(tmp_path):
    """Two bridges, and an engine over them that has published version 0."""
    bridges = [Bridge(str(tmp_path / f"s{number}")) for number in range(2)]
    config = Config(
        endpoints=tuple(bridge.address for bridge in bridges), key_file=key_file(tmp_path), max_model_len=128
    )
    lines = []
    engine = VllmEngine(config, run_id="run", incarnation=1, log=lines.append)
    engine.lines = lines
    engine.publish(version(0), 0)
    yield engine, bridges
    engine.close()
    for bridge in bridges:
        bridge.stop()


def test_what_moves_is_whole_modules_of_the_engine():
    assert moving(config(), FIXED) == NORMS
    assert moving(config(), frozenset()) == PATHS
    assert moving(config(), PATHS) == frozenset()
    query = "stacks.0.attn.q.kernel"
    assert moving(config(), PATHS - {query}) == {f"stacks.0.attn.{name}.kernel" for name in "qkv"}


def test_later_versions_have_what_moves_and_draw_as_they_would_whole(served):
    engine, bridges = served
    base = engine._base
    tensors = len(list(engine_tensors(version(1), paths=NORMS)))
    for number in (1, 2):
        report = engine.publish(version(number), number)
        assert report["tensors"] == tensors == 2 * 4 + 1
        assert report["bytes"] < base.manifest.total_bytes / 4
    partial = drawn(engine)
    assert {one[2] for group in partial for one in group} == {2}
    assert base.fd >= 0
    report = engine.publish(dataclasses.replace(version(2), fixed=frozenset()), 3)
    assert report["bytes"] == base.manifest.total_bytes
    assert base.fd == -1
    assert engine._base is None
    tokens = [[one[:2] for one in group] for group in drawn(engine)]
    assert tokens == [[one[:2] for one in group] for group in partial]
    assert [bridge.engine.loads for bridge in bridges] == [5, 5]  # the first is the base, and what moves over it


def test_a_later_version_reads_no_byte_of_the_base(served, monkeypatch):
    """Its own are summed when they are staged, and by each of two bridges when they come and when they are loaded."""
    engine, bridges = served
    sums, sizes = fingerprint.row_sums, []

    def counted(data):
        sizes.append(data.nbytes if hasattr(data, "nbytes") else len(data))
        return sums(data)

    monkeypatch.setattr(fingerprint, "row_sums", counted)
    report = engine.publish(version(1), 1)
    times = 1 + 2 * len(bridges)
    assert len(sizes) == times * report["tensors"]
    own = sum(array.nbytes for _, array in engine_tensors(version(1), paths=NORMS))
    assert sum(sizes) == times * own


def test_a_bridge_that_comes_later_is_given_the_base_too(served, tmp_path):
    engine, bridges = served
    engine.publish(version(1), 1)
    before = drawn(engine)
    bridges[0].stop()
    bridges[0] = Bridge(str(tmp_path / "s0"))
    assert drawn(engine) == before
    engine.publish(version(2), 2)
    wait_for(lambda: all(replica.serves(engine._staged) for replica in engine.fleet.replicas))
    assert bridges[0].engine.loads >= 2


def test_where_the_base_is_lost_all_weights_are_published_again(served, tmp_path, monkeypatch):
    engine, bridges = served
    engine.publish(version(1), 1)

    def gone(self, staged, **options):
        raise sender.BridgeError("the learner holds the weights no longer", "base")

    monkeypatch.setattr(sender.Client, "_publish_base", gone)
    for bridge in bridges:
        bridge.bridge._good.lose()  # as behind a fence
    whole = engine._base.manifest.total_bytes
    assert engine.publish(version(2), 2)["bytes"] == whole
    assert any("publishing all weights" in line for line in engine.lines)
    assert engine.publish(version(3), 3)["bytes"] < whole / 4
    bridges[0].bridge._good.lose()  # one of two: it is left out until the next version, which is complete
    assert engine.publish(version(4), 4)["replicas"] == 1
    assert engine.publish(version(5), 5)["bytes"] == whole
    assert engine.publish(version(6), 6)["replicas"] == 2


def test_a_later_run_publishes_what_moves_where_the_base_is_held_already(served, tmp_path):
    engine, bridges = served
    engine.publish(version(1), 1)
    expected = drawn(engine)
    engine.close()
    loads, lines = [bridge.engine.loads for bridge in bridges], []
    later = VllmEngine(engine._config, run_id="later", incarnation=1, log=lines.append)
    report = later.publish(version(1), 0)
    assert report["tensors"] == 2 * 4 + 1
    assert [bridge.engine.loads for bridge in bridges] == [number + 1 for number in loads]
    assert "the engine holds the base already: adapters alone were published" in lines
    found = drawn(later)
    assert [[one[:2] for one in group] for group in found] == [[one[:2] for one in group] for group in expected]
    assert {one[2] for group in found for one in group} == {0}
    bridges[0].stop()
    bridges[0] = Bridge(str(tmp_path / "s0"))  # it has nothing
    assert drawn(later) == found
    later.publish(version(2), 1)
    wait_for(lambda: all(replica.serves(later._staged) for replica in later.fleet.replicas))
    later.close()


def test_another_base_is_the_users_to_mend_and_the_version_before_serves_on(served):
    engine, bridges = served
    engine.close()
    loads = [bridge.engine.loads for bridge in bridges]
    later = VllmEngine(engine._config, run_id="later", incarnation=1)
    moved = jax.tree.map_with_path(
        lambda path, x: x * 2 if "embed" in jax.tree_util.keystr(path) else x, version(1).params
    )
    with pytest.raises(UserError, match=r"holds another base, of fingerprint .* from run/.* start the bridge again"):
        later.publish(dataclasses.replace(version(1), params=moved), 0)
    later.close()
    assert [bridge.engine.loads for bridge in bridges] == loads
    client = sender.Client(bridges[0].address, KEY, timeout_s=60)
    again = client.generate(draws(), messages.Sampling(max_tokens=4))
    assert {one.spans[0].version.run_id for one in again} == {"run"}
    client.close()


def test_adapters_that_a_bridge_was_not_started_for_are_the_users_to_mend(served):
    """A rank and targets, in one sentence; the version before serves on."""
    engine, bridges = served
    for bridge in bridges:
        bridge.engine.expected = adapters.expected(bridge.engine.expected, 4, ["q_proj"])
    engine.close()
    later = VllmEngine(engine._config, run_id="later", incarnation=1)
    said = "has adapters of rank 8 of down_proj .*, and the engine was started for adapters of rank 4 of q_proj: start"
    with pytest.raises(UserError, match=said):
        later.publish(ladder.with_adapters(weights(), 8), 0)
    later.close()
    client = sender.Client(bridges[0].address, KEY, timeout_s=60)
    again = client.generate(draws(), messages.Sampling(max_tokens=4))
    assert {one.spans[0].version.run_id for one in again} == {"run"}
    client.close()


def test_a_policy_of_which_nothing_moves_is_published_whole(served):
    engine, _ = served
    whole = engine._base.manifest.total_bytes
    engine.close()
    later = VllmEngine(engine._config, run_id="later", incarnation=1)
    assert later.publish(dataclasses.replace(version(0), fixed=PATHS), 0)["bytes"] == whole
    later.close()
