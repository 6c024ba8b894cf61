# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel engine: what a shard holds of a version, and what is refused. The live one: tests/verify."""

import dataclasses
import itertools
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from qarl_bridge.engine import shard_memory
from qarl_bridge.engine.shard import Shard, whole_record
from qarl_bridge.protocol import expert_stacks, formats, messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.models import MoEConfig, parse_rules
from qarl_jax.models.config import ModelConfig
from qarl_jax.quant import parse_scheme
from qarl_jax.rollout.vllm.config import check_model
from qarl_jax.rollout.vllm.engine import Config, engine_tensors
from qarl_jax.types import UserError
from tests.reference.fleet_world import weights
from tests.reference.tiny_policies import policy

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("scheme", ["w4a16:g16", "w8a8", "w2a16_asym:g16", "w2a2:g16"])
def test_the_shards_of_a_version_hold_it_all_once(scheme, size):
    whole = {name: np.asarray(array) for name, array in engine_tensors(weights(0, scheme))}
    if size == 4:  # its inner layers have 64 inputs and 4 groups; those of 32 have two, which four shards cannot share
        whole = {name: array for name, array in whole.items() if "o_proj" not in name}
    parts = [Shard(rank, size).part_of(whole) for rank in range(size)]
    assert Shard().part_of(whole) is whole
    cut = {"rows": 0, "columns": 0, "whole": 0}
    for name, array in whole.items():
        own = [part[name] for part in parts]
        if own[0].shape == array.shape:
            for other in own[1:]:
                np.testing.assert_array_equal(own[0], other)
            cut["whole"] += 1
            continue
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        cut["columns" if axis else "rows"] += 1
        np.testing.assert_array_equal(np.concatenate(own, axis), array)
    assert all(cut.values()), cut


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16:g16", "w8a8", "nvfp4"])
def test_a_shard_holds_rows_of_every_experts_gate_and_up_and_columns_of_its_down(scheme):
    whole = {name: np.asarray(array) for name, array in engine_tensors(policy(scheme, moe=True), stacked=True)}
    checkpoint = dict(expert_stacks.apart(whole.items()))
    parts = [Shard(rank, 2).part_of(whole) for rank in range(2)]
    for rank, part in enumerate(parts):  # a stack is cut as the tensors of a checkpoint are
        apart = dict(expert_stacks.apart(part.items()))
        for name, array in Shard(rank, 2).part_of(checkpoint).items():
            np.testing.assert_array_equal(apart[name], array)
    stacks = [name for name in whole if ".experts.*." in name]
    assert len(stacks) >= 6
    for name in stacks:
        axis, own = 2 if "down_proj" in name else 1, [part[name] for part in parts]
        is_of_all = name.endswith(("weight_shape", "global_scale")) or whole[name].shape[axis] == 1
        np.testing.assert_array_equal(own[0] if is_of_all else np.concatenate(own, axis), whole[name])
    router = next(name for name in whole if name.endswith("mlp.gate.weight"))
    assert parts[1][router].shape == whole[router].shape, "each shard chooses by itself"


@pytest.mark.parametrize(
    ("size", "vocabulary", "wanted"), [(4, 151936, [37984] * 4), (2, 64, [32, 32]), (4, 96, [32, 32, 32, 0])]
)
def test_a_vocabulary_is_filled_up_before_it_is_cut(size, vocabulary, wanted):
    """To a multiple of 64 rows, whatever the number of shards, as vLLM does: Qwen3's 151,936 are 2,374 times 64."""
    rows = {"model.embed_tokens.weight": np.arange(vocabulary)[:, None]}
    parts = [Shard(rank, size).part_of(rows)["model.embed_tokens.weight"] for rank in range(size)]
    assert [len(part) for part in parts] == wanted
    np.testing.assert_array_equal(np.concatenate(parts), rows["model.embed_tokens.weight"])


def test_heads_that_cannot_be_shared_out_are_refused():
    config = CONFIG | {"num_key_value_heads": 1}
    with pytest.raises(BridgeError, match=r"1 heads of keys.*set rollout.engine.tensor_parallel_size=1"):
        Shard(0, 2).check(config)
    Shard(0, 2).check(CONFIG | {"num_experts": 8})
    Shard().check(config)


def test_experts_that_a_shard_would_have_too_little_of_are_refused():
    pytest.importorskip("torch")
    from qarl_bridge.engine.readback import experts

    config = {"num_experts": 8, "moe_intermediate_size": 96, "hidden_size": 256}
    experts.check_shape(config)
    with pytest.raises(BridgeError, match=r"experts of 48 features in each of 2 shards.*or fewer shards"):
        experts.check_shape(config, 2)
    experts.check_shape(config | {"num_experts": 0}, 2)
    int4 = formats.quantization_config({"model.layers.0.mlp.experts.0.up_proj": parse_scheme("w4a16:g64").wire})
    config |= {"moe_intermediate_size": 256, "quantization_config": int4}
    for shards, invariant in ((1, False), (2, False), (4, False), (2, True)):
        if shards == 4:  # one group of each row of down, and several of gate and up
            with pytest.raises(BridgeError, match="experts of 64 features with int4 groups of 64"):
                experts.check_groups(config, shards=shards)
        else:
            experts.check_groups(config, batch_invariant=invariant, shards=shards)


def test_three_shards_are_refused_in_the_config():
    with pytest.raises(UserError, match="tensor_parallel_size must be 1, 2 or 4, got 3"):
        Config(tensor_parallel_size=3)
    assert Config(tensor_parallel_size=4).tensor_parallel_size == 4


def test_a_gpu_is_named_for_each_shard():
    Config(tensor_parallel_size=2, replicas=2, visible_gpus="0,1;2,3")
    with pytest.raises(UserError, match=r"visible_gpus=0,1;2 names 1 GPU\(s\) for .* name one for each shard"):
        Config(tensor_parallel_size=2, replicas=2, visible_gpus="0,1;2")
    for twice in ("0,0", "0,", "0, 0 "):
        with pytest.raises(UserError, match=r"names 1 GPU\(s\) for"):
            Config(tensor_parallel_size=2, visible_gpus=twice)


def test_a_group_that_a_shard_would_cut_is_refused_before_an_engine_starts():
    model = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_layers": 1, "num_heads": 4}
    model |= {"num_kv_heads": 2, "head_dim": 64, "architecture": "Qwen3ForCausalLM"}
    config, halves = Config(tensor_parallel_size=2), "w4a16:g128"
    with pytest.raises(UserError, match=r"a shard's 192 inputs of .*down_proj.* are no whole groups under w4a16:g128"):
        check_model(config, ModelConfig(**model, quant=parse_rules(halves)))
    check_model(config, ModelConfig(**model, quant=parse_rules("w4a16:g64")))
    rules = [{"match": "down", "scheme": "w8a8"}, {"match": "", "scheme": halves}]
    check_model(config, ModelConfig(**model, quant=parse_rules(rules)))
    check_model(Config(), ModelConfig(**model, quant=parse_rules(halves)))
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=384, norm_topk_prob=True)
    model |= {"intermediate_size": 255, "moe": moe, "moe_layers": (0,), "architecture": "Qwen3MoeForCausalLM"}
    with pytest.raises(UserError, match=r"a shard's 192 inputs of .*experts.*down_proj.* are no whole groups"):
        check_model(config, ModelConfig(**model, quant=parse_rules(halves)))
    check_model(config, ModelConfig(**model, quant=parse_rules("w4a16:g64")))
    uneven = model | {"moe": dataclasses.replace(moe, intermediate_size=385)}
    with pytest.raises(UserError, match="385 inner features are not shared evenly; set it to 1"):
        check_model(config, ModelConfig(**uneven))


def test_fewer_gpus_than_shards_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(BridgeError, match=r"sees 0 GPU\(s\), and each shard needs one: name them in .*visible_gpus"):
        Shard(0, 2).take_gpu(torch)
    Shard().take_gpu(torch)


def test_sums_are_added_by_rank_and_rounded_once():
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine import all_reduce

    # 256 + 1 + 1 is 258 in float32; rounded at each addition it stays 256; the other way round it is 258 again.
    every = torch.tensor([[256.0, 2.0**30], [1.0, 1.0], [1.0, -(2.0**30)]], dtype=torch.bfloat16)
    assert all_reduce.added(every).tolist() == [258.0, 0.0]
    assert all_reduce.added(every.flip(0)).tolist() == [258.0, 0.0]
    every[1, 1], every[2, 1] = -(2.0**30), 1.0
    assert all_reduce.added(every).tolist() == [258.0, 1.0]  # by rank: another order would lose the 1


class _Child:
    """The process of another shard, which says at once that it has started."""

    def __init__(self, target, args, daemon):
        self.pipe = args[0]
        self.sentinel, self.end = multiprocessing.Pipe()

    def start(self):
        self.pipe.send((None, None))

    def kill(self):
        self.end.close()


@pytest.mark.slow
def test_shards_meet_at_a_port_that_no_other_process_can_take(monkeypatch):
    pytest.importorskip("torch")
    from qarl_bridge.engine import tensor_parallel

    class Engine:
        def __init__(self, *_, shard, **__):
            self.facts = self.met = self.expected = None
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
            program = "import torch.distributed as d; d.init_process_group('gloo'); print(d.get_rank()); d.barrier()"
            joined = [
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=os.environ | Shard(rank, shard.size).environment(int(os.environ["MASTER_PORT"])),
                    stdout=subprocess.PIPE,
                )
                for rank in range(shard.size)
            ]
            assert [int(process.communicate(timeout=120)[0]) for process in joined] == [0, 1]

    context = types.SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_Child)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(tensor_parallel, "VllmEngine", Engine)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options = messages.EngineOptions(tensor_parallel_size=2)
    tensor_parallel.ShardedEngine("", {}, {}, has_weights=False, options=options)._kill()


def test_a_module_is_put_together_from_what_the_shards_recorded():
    def part(module, inputs, outputs):
        arrays = ([messages.Array.of(np.asarray(x, np.float32)) for x in side] for side in (inputs, outputs))
        return messages.Recorded(module=module, inputs=next(arrays), outputs=next(arrays))

    def values(arrays):
        return [array.numpy().tolist() for array in arrays]

    x = [[9.0]]
    fused = [part("l.qkv_proj", [x], [[[q, q + 1, k, v]]]) for q, k, v in ((0, 4, 6), (2, 5, 7))]
    made = whole_record(fused, [2, 1, 1])
    assert values(made.outputs) == [[[0, 1, 2, 3, 4, 5, 6, 7]]]
    assert values(made.inputs) == [x]
    rows = [part("l.o_proj", [[[1.0]]], [x]), part("l.o_proj", [[[2.0]]], [x])]
    assert values(whole_record(rows, [1]).inputs) == [[[1.0, 2.0]]]
    assert values(whole_record(rows, [1]).outputs) == [x]
    block = [part("model.layers.0", [x], [x])] * 2
    assert whole_record(block, []) is block[0]


def test_a_shard_that_fails_takes_what_is_still_sent(monkeypatch):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine import tensor_parallel

    sent = queue.SimpleQueue()
    here, there = multiprocessing.Pipe()

    def broadcast(x):
        if threading.current_thread() is threading.main_thread():
            sent.put(x.clone())
        else:
            x.copy_(sent.get(timeout=10))

    monkeypatch.setattr(tensor_parallel, "_broadcast", broadcast)
    found = []

    def follow():
        for most in (1, 9):
            received = tensor_parallel._Received(there, "cpu")
            found.append(
                [{name: x.tolist() for name, x in layer.items()} for layer in itertools.islice(received, most)]
            )
            received.end()

    other = threading.Thread(target=follow)
    other.start()
    version = {f"model.layers.{n}.a.weight": np.full(2, n, np.float32) for n in range(3)}
    for _ in range(2):
        stream = tensor_parallel._Sent([version], lambda *message: here.send(message), torch.from_numpy)
        own = [list(layer) for layer in stream]
        stream.end()
    other.join(10)
    assert own == [[name] for name in version]
    assert [len(layers) for layers in found] == [1, 3]
    assert found[1][2] == {"model.layers.2.a.weight": [2.0, 2.0]}


def test_files_of_a_killed_engine_are_removed_and_those_of_a_live_one_stay(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"qarl-shards-{pid}-tp:0-[0-1]-cpushm_{rank}" for pid in (gone.pid, os.getpid()) for rank in range(2)]
    for name in [*names, "-tp:0-[0-1]-cpushm_0", "psm_0"]:
        (tmp_path / name).write_bytes(b"")
    assert sorted(shard_memory.remove_stale(tmp_path)) == sorted(names[:2])
    assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], "-tp:0-[0-1]-cpushm_0", "psm_0"])
    assert shard_memory.remove_stale(tmp_path / "none") == []
