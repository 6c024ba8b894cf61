# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel engine: what a shard holds of a version, and what is refused. The live one: tests/verify."""

import os
import subprocess

import numpy as np
import pytest
from qarl_bridge.engine import shard_memory
from qarl_bridge.engine.shard import Shard
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.rollout.vllm.engine import Config, engine_tensors
from qarl_jax.types import UserError
from tests.reference.fleet_world import weights

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16:g16", "w8a8", "w2a16_asym:g16"])
def test_the_shards_of_a_version_hold_it_all_once(scheme):
    whole = {name: np.asarray(array) for name, array in engine_tensors(weights(0, scheme))}
    parts = [Shard(rank, 2).part_of(whole) for rank in range(2)]
    assert Shard().part_of(whole) is whole
    cut = {"rows": 0, "columns": 0, "whole": 0}
    for name, array in whole.items():
        one, other = (part[name] for part in parts)
        if one.shape == array.shape and "embed" not in name:
            np.testing.assert_array_equal(one, other)
            cut["whole"] += 1
            continue
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        cut["columns" if axis else "rows"] += 1
        np.testing.assert_array_equal(np.concatenate([one, other], axis), array)
    assert all(cut.values()), cut
    # vLLM fills a vocabulary up to 64 rows a shard: all 64 of them are the first one's.
    assert len(parts[0]["model.embed_tokens.weight"]) == 64
    assert len(parts[1]["model.embed_tokens.weight"]) == 0


@pytest.mark.parametrize(
    ("config", "options", "on_gpu", "said"),
    [
        (CONFIG, {}, True, "on a GPU"),
        (CONFIG | {"num_experts": 8}, {}, False, "experts"),
        (CONFIG | {"num_key_value_heads": 1}, {}, False, "1 heads of keys"),
        (CONFIG, {"record_routing": True}, False, "routing"),
    ],
)
def test_what_is_not_mirrored_is_refused(config, options, on_gpu, said):
    with pytest.raises(BridgeError, match=f"{said}.*set rollout.engine.tensor_parallel_size=1"):
        Shard(0, 2).check(config, messages.EngineOptions(tensor_parallel_size=2, **options), on_gpu=on_gpu)
    Shard(0, 2).check(CONFIG, messages.EngineOptions(tensor_parallel_size=2), on_gpu=False)
    Shard().check(config, messages.EngineOptions(**options), on_gpu=on_gpu)


def test_more_than_two_shards_are_refused_in_the_config():
    with pytest.raises(UserError, match="tensor_parallel_size must be 1 or 2, got 4"):
        Config(tensor_parallel_size=4)


def test_files_of_a_killed_engine_are_removed_and_those_of_a_live_one_stay(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"qarl-shards-{pid}-tp:0-[0-1]-cpushm_{rank}" for pid in (gone.pid, os.getpid()) for rank in range(2)]
    for name in [*names, "-tp:0-[0-1]-cpushm_0", "psm_0"]:
        (tmp_path / name).write_bytes(b"")
    assert sorted(shard_memory.remove_stale(tmp_path)) == sorted(names[:2])
    assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], "-tp:0-[0-1]-cpushm_0", "psm_0"])
    assert shard_memory.remove_stale(tmp_path / "none") == []
