# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders in and out: round trips through transformers, and one clear sentence for each way a folder can be wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from jax.sharding import PartitionSpec as P

from qarl_jax.models import (
    abstract_model,
    by_path,
    export_tensors,
    hf_names,
    load_hf,
    merge,
    quantize_params,
    read_config,
    save_hf,
    split,
    with_scheme,
)
from qarl_jax.models.hf import weights
from qarl_jax.models.hf.safetensors import SafetensorsFile
from qarl_jax.quant import QTensor
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from tests.reference import hf_models

pytestmark = pytest.mark.usefixtures("compiled_programs")

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def tiny_tensors(values=None):
    """{name: array} of random float32 tensors a config asks for."""
    config = read_config(values or TINY)
    params = by_path(split(abstract_model(config))[1])
    rng = np.random.default_rng(0)
    return {
        str(name): rng.standard_normal(params[path].shape[names.ndim :]).astype(np.float32)
        for path, names in hf_names(config).items()
        for name in names.reshape(-1)
    }


def write(folder, values=None, tensors=None, shards=None):
    """A folder; shards: {file: [names]}."""
    folder.mkdir(exist_ok=True)
    tensors = tiny_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(TINY if values is None else values))
    if shards is None:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    for file, names in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in names}, folder / file)
    index = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def check_loaded(model, tensors):
    params = by_path(split(model)[1])
    for path, names in hf_names(model.config).items():
        for index in np.ndindex(names.shape):
            np.testing.assert_array_equal(np.asarray(params[path][index]), tensors[names[index]], err_msg=names[index])


def test_a_single_file_and_shards_load_the_same_bytes(tmp_path):
    tensors = tiny_tensors()
    check_loaded(load_hf(write(tmp_path / "one", tensors=tensors)), tensors)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    check_loaded(load_hf(write(tmp_path / "two", tensors=tensors, shards=shards)), tensors)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_file_dtypes_are_cast_exactly(tmp_path, dtype):
    tensors = {name: x.astype(dtype) for name, x in tiny_tensors().items()}
    model = load_hf(write(tmp_path / "m", tensors=tensors))
    check_loaded(model, {name: x.astype(np.float32) for name, x in tensors.items()})


@pytest.mark.slow
def test_weights_load_straight_into_their_sharding(tmp_path):
    tensors = tiny_tensors()
    model = load_hf(write(tmp_path / "m", tensors=tensors), mesh=make_mesh(fsdp=4, tensor=2), scheme="w8a8")
    kernel = model.stacks[0].attn.q.kernel.get_value()
    assert kernel.sharding.spec == P(None, ("fsdp", "tensor"), None)
    assert kernel.addressable_shards[0].data.shape == (2, 2, 16)
    check_loaded(model, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-gqa7-tied", "moe-mlp-only-layers"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
def test_a_saved_folder_is_read_by_transformers_with_the_same_logits(tmp_path, name, max_shard_bytes):
    reference = hf_models.make(name)
    model = load_hf(hf_models.save(reference, tmp_path / "in"))
    save_hf(model, tmp_path / "out", dtype="float32", max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "out/model.safetensors.index.json").is_file() == (max_shard_bytes < 10**9)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    ids = hf_models.tokens(reference, 2, 9)
    np.testing.assert_allclose(hf_models.logits(again, ids), hf_models.logits(reference, ids), atol=1e-6)
    check_loaded(load_hf(tmp_path / "out"), dict(export_tensors(*split(model)[1:], model.config, "float32")))


def test_bfloat16_export_equals_rounding_the_masters_and_reloads_bit_equal(tmp_path):
    tensors = tiny_tensors()
    save_hf(load_hf(write(tmp_path / "in", tensors=tensors)), tmp_path / "out")
    file = SafetensorsFile(tmp_path / "out/model.safetensors")
    assert set(file.entries) == set(tensors)
    for name, x in tensors.items():
        np.testing.assert_array_equal(file.tensor(name), x.astype(ml_dtypes.bfloat16))
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    with safetensors.safe_open(tmp_path / "out/model.safetensors", framework="pt") as oracle:
        assert set(oracle.keys()) == set(tensors)
        name = "model.layers.1.mlp.up_proj.weight"
        np.testing.assert_array_equal(oracle.get_tensor(name).float(), torch.tensor(tensors[name]).bfloat16().float())


@pytest.mark.slow
def test_export_yields_qtensor_slices_in_layer_order(tmp_path):
    reference = hf_models.make("moe-mlp-only-layers")
    model = load_hf(hf_models.save(reference, tmp_path), scheme="w4a16:g32")
    _, params, qweights = split(model)
    items = list(export_tensors(params, qweights, model.config))
    names = [name for name, _ in items]
    assert len(set(names)) == len(names)
    assert set(names) == {name for own in hf_names(model.config).values() for name in own.reshape(-1)}
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    quantized = {name for name, value in items if isinstance(value, QTensor)}
    assert quantized == {name for name in names if "_proj.weight" in name}
    found = dict(items)["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert found.shape == (64, 64)
    np.testing.assert_array_equal(found.codes, by_path(qweights)["stacks.1.moe.down.kernel"].codes[0, 3])
    assert dict(items)["model.norm.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.slow
def test_quantize_params_is_what_a_load_does(tmp_path):
    model = load_hf(write(tmp_path / "m"), scheme="w8a8")
    graphdef, params, qweights = split(model)
    again = jax.jit(lambda p: quantize_params(graphdef, p))(params)
    assert jax.tree.structure(again) == jax.tree.structure(qweights)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(qweights), strict=True):
        np.testing.assert_array_equal(a, b)


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


Q1 = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: without(t, Q1), r"1 tensor\(s\) missing.*layers\.1\.self_attn\.q_proj"),
        (lambda t: t | {"model.layers.2.extra": np.zeros(3, np.float32)}, r"no place for: model\.layers\.2\.extra"),
        (lambda t: t | {Q1: np.zeros((16, 15), np.float32)}, r"layers\.1\.self_attn\.q_proj.*\(16, 15\).*\(16, 16\)"),
        (lambda t: t | {Q1: np.zeros((16, 16), np.int8)}, r"layers\.1\.self_attn\.q_proj.*int8"),
        (lambda t: without(t, "lm_head.weight"), r"missing.*lm_head\.weight"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        load_hf(write(tmp_path / "m", tensors=change(tiny_tensors())))


def test_a_tied_head_may_be_on_disk_or_not(tmp_path):
    values = TINY | {"tie_word_embeddings": True}
    tensors = without(tiny_tensors(), "lm_head.weight")
    a = load_hf(write(tmp_path / "a", values, tensors))
    b = load_hf(write(tmp_path / "b", values, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    np.testing.assert_array_equal(a.head_weight(), b.head_weight())
    np.testing.assert_array_equal(a.head_weight(), tensors["model.embed_tokens.weight"])
    with pytest.raises(UserError, match=r"has tie_word_embeddings, and lm_head\.weight differs"):
        load_hf(write(tmp_path / "c", values, tiny_tensors()))


def test_damaged_files_are_named(tmp_path):
    folder = write(tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors: truncated, 10 bytes"):
        load_hf(folder)
    for broken in (b"", b"abc", b"\xff" * 64, len(whole).to_bytes(8, "little") + whole[8:100]):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=r"model\.safetensors: not a safetensors file"):
            load_hf(folder)
    for header in (b"{]", b"[1]", b'{"a": {"dtype": "F32"}}', b'{"a": {"dtype":"F9","shape":[],"data_offsets":[0,4]}}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(UserError, match=r"model\.safetensors"):
            load_hf(folder)
    entry = b'"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UserError, match="'a' is listed twice"):
        load_hf(folder)
    file.unlink()
    with pytest.raises(UserError, match="no weights there"):
        load_hf(folder)


def test_disagreeing_shards_are_named(tmp_path):
    tensors = tiny_tensors()
    names = sorted(tensors)
    double = {"a.safetensors": names, "b.safetensors": names[:1]}
    with pytest.raises(UserError, match=r"in two files.*a\.safetensors.*b\.safetensors"):
        load_hf(write(tmp_path / "double", tensors=tensors, shards=double))
    folder = write(tmp_path / "gone", tensors=tensors, shards={"a.safetensors": names[:9], "b.safetensors": names[9:]})
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors: cannot be read"):
        load_hf(folder)
    folder = write(tmp_path / "lies", tensors=tensors, shards={"a.safetensors": names})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys([*names, "ghost"], "a.safetensors")})
    )
    with pytest.raises(UserError, match="'ghost'"):
        load_hf(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match="not a safetensors index"):
        load_hf(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["OPTForCausalLM"]},
            r"'OPTForCausalLM' is not supported.*Llama.*Qwen2.*Qwen3Moe",
        ),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "'mlp_bias'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"'rope_scaling'\.'low_freq_factor' is None"),
        ({"architectures": None}, "'architectures' is None"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "16"}, "'hidden_size' is '16', expected int"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "'use_sliding_window'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'"),
        ({"logits_scaling": 8.0}, "'logits_scaling' is 8.0, which changes what the model computes"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ({"is_causal": False}, "'is_causal' is False"),
        ({"no_rope_layers": [1, 0]}, "'no_rope_layers'"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "'dual_chunk_attention_config'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"'rope_parameters'\.'full_attention'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, r"'rope_scaling'\.'mrope_section'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'rope_scaling'.*'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'rope_parameters'.*'linear'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 2 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_unsupported_configs_name_the_key(change, message):
    with pytest.raises(UserError, match=message):
        read_config(TINY | change)


def test_config_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object"):
        load_hf(tmp_path)


def test_both_spellings_of_rope_theta():
    old = read_config(TINY | {"rope_theta": 5e5})
    new = read_config(TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert old.rope_theta == new.rope_theta == 5e5


def test_keys_that_change_nothing_are_ignored():
    neutral = {"logits_scaling": 1.0, "clip_qkv": None, "use_mrope": False, "no_rope_layers": [1, 1], "is_causal": True}
    unread = {"attention_dropout": 0.1, "use_cache": False, "pretraining_tp": 2, "bos_token_id": 1}
    given, plain = read_config(TINY | neutral | unread), read_config(TINY)
    assert dataclasses.replace(given, hf_config="") == dataclasses.replace(plain, hf_config="")


def test_sliding_window_that_no_layer_uses_is_accepted():
    assert read_config(TINY | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}).num_layers == 2


def test_a_group_that_does_not_divide_names_the_weight(tmp_path):
    with pytest.raises(UserError, match=r"self_attn\.[qkvo]_proj.*group size 128"):
        load_hf(write(tmp_path / "m"), scheme="w4a16")


@pytest.mark.slow
def test_rules_choose_by_hugging_face_name_and_split_the_stack(tmp_path):
    rules = [{"match": r"layers\.0\.", "scheme": "bf16"}, {"match": "mlp", "scheme": "w4a16:g16"}]
    model = load_hf(write(tmp_path / "m"), scheme=rules)
    assert [stack.length for stack in model.config.stacks] == [1, 1]
    assert set(by_path(split(model)[2])) == {f"stacks.1.mlp.{name}.kernel" for name in ("gate", "up", "down")}
    # The same masters under one scheme for all: the stack boundaries stay.
    graphdef, params, _ = split(model)
    other = with_scheme(graphdef, "w8a8")
    tokens = jnp.zeros((1, 4), jnp.int32)
    plain = split(load_hf(tmp_path / "m", scheme="w8a8"))
    np.testing.assert_allclose(
        merge(other, params, quantize_params(other, params))(tokens), merge(*plain)(tokens), rtol=1e-5, atol=1e-5
    )
    uniform = split(load_hf(tmp_path / "m"))[0]
    with pytest.raises(UserError, match=r"layers \[1\].*splits=\(1,\)"):
        with_scheme(uniform, rules)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_a_table_reaches_the_host_piece_by_piece_as_it_would_whole(monkeypatch, rows):
    table = jax.random.normal(jax.random.key(0), (96, 5), jnp.float32)
    monkeypatch.setattr(weights, "_PIECE_BYTES", rows * 5 * 4)
    got = weights._on_host(table, np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(got, np.asarray(table).astype(ml_dtypes.bfloat16))
