# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters mean to us what they mean to transformers and PEFT, in files and in numbers."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from qarl_jax import models
from qarl_jax.models.params import united
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from tests.reference import hf_models
from tests.reference.optimizing import has_same_bits

SHAPE = "qwen3-gqa2-headdim-tied"
LORA = models.Lora(rank=8, scale=12 / 8)
pytestmark = pytest.mark.usefixtures("compiled_programs")  # files, and numbers with tolerances
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(transformers' model, its folder, our config with adapters)."""
    model = hf_models.make(SHAPE)
    folder = hf_models.save(model, tmp_path_factory.mktemp("base"))
    return model, folder, models.read_config(folder, compute_dtype="float32", lora=LORA)


@functools.cache
def drawn(config):
    """Adapters with numbers in A and B. Do not change them: they are shared."""
    rng = np.random.default_rng(0)
    fresh = models.fresh_adapters(config, make_mesh())
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), fresh)


def with_base(base, adapters):
    _, folder, config = base
    graphdef, masters = models.load_masters(folder, config)
    return graphdef, united(masters, adapters)


def write(base, adapters, folder, **changes):
    """A PEFT folder of `adapters`, with settings changed."""
    folder.mkdir(exist_ok=True)
    models.write_peft(folder, base[2], adapters, alpha=12, rslora=False, base=str(base[1]))
    values = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(values | changes))
    return folder


def read(base, folder):
    return models.read_peft(str(folder), base[2], models.fresh_adapters(base[2], make_mesh(), seed=1))


@pytest.mark.slow
def test_logits_and_gradients_are_those_of_a_weight_with_the_product_added(base):
    model, _, config = base
    adapters = drawn(config)
    graphdef, params = with_base(base, adapters)
    ids = hf_models.tokens(model, 2, 12)
    names, own = models.hf_names(config), models.by_path(adapters)
    weights, leaves = dict(model.named_parameters()), {}
    for path in (path for path in own if path.endswith("lora_a")):
        for number, name in enumerate(names[path]):
            a, b = (
                torch.tensor(np.asarray(own[p][number]), requires_grad=True)
                for p in (path, path.replace("lora_a", "lora_b"))
            )
            leaves[str(name)], leaves[str(name).replace("lora_A", "lora_B")] = a, b
            weight = f"{str(name).removesuffix('.lora_A.weight')}.weight"
            weights[weight] = weights[weight].detach() + LORA.scale * b @ a
    wanted = torch.func.functional_call(model, weights, (torch.tensor(ids, dtype=torch.long),)).logits
    direction = np.random.default_rng(2).standard_normal(wanted.shape).astype(np.float32)
    (wanted * torch.tensor(direction)).sum().backward()

    def total(adapters):
        logits = models.merge(graphdef, with_base(base, adapters)[1], nnx.State({}))(jnp.asarray(ids))
        return (logits * direction).sum(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(adapters)
    assert hf_models.relative(logits, wanted.detach().numpy()) < 2e-4
    for path, gradient in models.by_path(gradients).items():
        of_torch = np.stack([leaves[str(name)].grad.numpy() for name in names[path]])
        assert hf_models.relative(gradient, of_torch) < 2e-4, path
    merged = models.merge_adapters(models.merge(graphdef, params, nnx.State({})))
    assert merged.config.lora is None
    assert hf_models.relative(merged(jnp.asarray(ids)), wanted.detach().numpy()) < 2e-4


def test_a_folder_comes_back_as_it_was_written(base, tmp_path):
    adapters = drawn(base[2])
    folder = write(base, adapters, tmp_path / "out")
    assert has_same_bits(read(base, folder), adapters)
    tensors = load_file(folder / FILE)
    assert len(tensors) == 3 * 7 * 2
    assert tensors["base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"].shape == (96, 8)
    assert sorted(path.name for path in folder.iterdir()) == [SETTINGS, FILE]


def test_scales_of_patterns_are_folded_and_smaller_ranks_filled_up(base, tmp_path):
    adapters = drawn(base[2])
    folder = write(base, adapters, tmp_path / "out", alpha_pattern={"layers.1.self_attn.q_proj": 24, "up_proj": 6})
    found, own = models.by_path(read(base, folder)), models.by_path(adapters)
    assert np.array_equal(found["stacks.0.attn.q.lora_b"][1], 2 * own["stacks.0.attn.q.lora_b"][1])
    assert np.array_equal(found["stacks.0.attn.q.lora_b"][0], own["stacks.0.attn.q.lora_b"][0])
    assert np.array_equal(found["stacks.0.mlp.up.lora_b"], own["stacks.0.mlp.up.lora_b"] / 2)
    # The same product from four of the eight directions.
    tensors = {
        name: x[:4] if "lora_A" in name else np.ascontiguousarray(x[:, :4])
        for name, x in load_file(folder / FILE).items()
    }
    save_file(tensors, folder / FILE)
    write_settings(folder, r=4, lora_alpha=6, alpha_pattern={})
    found = models.by_path(read(base, folder))
    fresh = models.by_path(models.fresh_adapters(base[2], make_mesh(), seed=1))
    for path, x in found.items():
        if path.endswith("lora_a"):
            assert np.array_equal(x[:, :4], own[path][:, :4])
            assert np.array_equal(x[:, 4:], fresh[path][:, 4:])  # alive: B's zeros get a gradient
        else:
            assert np.array_equal(x[..., :4], own[path][..., :4])
            assert not np.asarray(x[..., 4:]).any()
    write_settings(folder, r=4, lora_alpha=3, use_rslora=True)  # 3 / sqrt(4) = 12 / 8
    assert has_same_bits(models.by_path(read(base, folder)), found)


def write_settings(folder, **changes):
    values = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(values | changes))


def without(name):
    return lambda tensors: {key: x for key, x in tensors.items() if name not in key}


def changed(name, change):
    return lambda tensors: {key: change(x) if name in key else x for key, x in tensors.items()}


@pytest.mark.parametrize(
    ("settings", "tensors", "said"),
    [
        ({"use_dora": True}, None, "use_dora=True is not supported"),
        ({"use_rslora": "false"}, None, "use_rslora='false' is not supported"),
        ({}, changed("0.mlp.up_proj.lora_A", lambda x: x.astype(np.int8)), "up_proj.lora_A.weight is int8, and"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save=['lm_head'] is not supported"),
        ({"peft_type": "LOHA"}, None, "peft_type='LOHA' is not supported"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights='pissa' is not supported"),
        ({"alora_invocation_tokens": [3]}, None, "alora_invocation_tokens=[3] is not supported"),
        (
            {"lora_alpha": "much"},
            None,
            "adapter_config.json: r, lora_alpha, or a pattern of either, gives model.layers.0",
        ),
        ({"alpha_pattern": {"(": 3}}, None, "gives model.layers.0.self_attn.k_proj no scale"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, None, "gives model.layers.0.self_attn.q_proj the scale nan"),
        ({"lora_alpha": 1e300}, None, "alpha_pattern leaves base_model.model.model.layers.0.self_attn.k_proj.lora_A"),
        (
            {"r": 16},
            None,
            "r or rank_pattern gives model.layers.0.self_attn.k_proj the rank 16, and its tensors have 8",
        ),
        ({"rank_pattern": {"q_proj": 4}}, None, "gives model.layers.0.self_attn.q_proj the rank 4, and its tensors"),
        ({"rank_pattern": ["q_proj"]}, None, "gives model.layers.0.self_attn.k_proj no scale"),
        (
            {},
            changed("0.mlp.up_proj.lora_A", lambda x: x[:4].copy()),
            "up_proj.lora_A.weight has rank 4 and its lora_B 8",
        ),
        ({}, without("layers.1.mlp.up_proj"), "2 tensor(s) missing that lora.targets asks for: base_model"),
        (
            {},
            lambda t: t | {"base_model.model.lm_head.lora_A.weight": t[min(t)]},
            "1 tensor(s) that lora.targets leaves no",
        ),
        ({}, changed("2.self_attn.q_proj.lora_A", lambda x: x[:, :32].copy()), "it is another base's"),
        ({}, changed("0.self_attn.o_proj.lora_B", lambda x: np.repeat(x, 2, 1)), "has rank 16, above lora.rank=8"),
        ({}, changed("0.mlp.gate_proj.lora_B", lambda x: x * np.float32("nan")), "gate_proj.lora_B.weight has numbers"),
    ],
)
def test_a_folder_that_is_no_adapter_of_this_run_is_refused(base, tmp_path, settings, tensors, said):
    folder = write(base, drawn(base[2]), tmp_path / "out", **settings)
    if tensors is not None:
        save_file(tensors(load_file(folder / FILE)), folder / FILE)
    with pytest.raises(UserError, match=re.escape(said)):
        read(base, folder)


def test_a_folder_without_files_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"no adapter_config\.json there; give a folder that PEFT"):
        read(base, tmp_path)
    write(base, drawn(base[2]), tmp_path)
    settings = (tmp_path / SETTINGS).read_text()
    (tmp_path / SETTINGS).write_text("{}")
    with pytest.raises(UserError, match=r"peft_type=None is not supported"):
        read(base, tmp_path)
    (tmp_path / SETTINGS).write_text(settings)
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors there"):
        read(base, tmp_path)


def test_a_bfloat16_policy_is_written_as_its_forward_reads_it(base, tmp_path):
    config = models.read_config(base[1], compute_dtype="bfloat16", param_dtype="float32", lora=LORA)
    adapters = drawn(config)
    write((base[0], base[1], config), adapters, tmp_path)
    tensors = load_file(tmp_path / FILE)
    wanted = np.asarray(models.by_path(adapters)["stacks.0.attn.v.lora_b"][0]).astype(ml_dtypes.bfloat16)
    assert tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].tobytes() == wanted.tobytes()


@pytest.mark.slow
def test_peft_reads_what_we_write_and_we_what_it_writes(base, tmp_path):
    peft = pytest.importorskip("peft")
    config, adapters = base[2], drawn(base[2])
    ids = hf_models.tokens(base[0], 2, 12)

    def logits(adapters):
        return models.merge(*with_base(base, adapters), nnx.State({}))(jnp.asarray(ids))

    fresh = functools.partial(hf_models.make, SHAPE)
    theirs = peft.PeftModel.from_pretrained(fresh(), write(base, adapters, tmp_path / "ours")).eval()
    assert hf_models.relative(logits(adapters), hf_models.logits(theirs, ids)) < 2e-4
    settings = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=[name for names in config.linear_names for name in names],
        rank_pattern={"layers.1.self_attn.q_proj": 4},
        alpha_pattern={"down_proj": 5},
        use_rslora=True,
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(fresh(), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    assert hf_models.relative(logits(read(base, tmp_path / "theirs")), hf_models.logits(theirs, ids)) < 2e-4
    assert hf_models.relative(logits(adapters), hf_models.logits(theirs, ids)) > 1e-2
