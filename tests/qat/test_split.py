# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A model whose outlier channels are split: the same function before training, trained by qat, and merged by export."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qarl_jax import models, train
from qarl_jax.models.config import Lora
from qarl_jax.quant.splitting import Splitting
from qarl_jax.rollout.vllm.engine import engine_config
from qarl_jax.run import export, made
from qarl_jax.types import UserError
from tests.qat.test_qat import run, tree
from tests.reference import split_model, tiny

SCHEME, SHARE = "w2a16_asym:g32", 0.5


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def untrained(world):
    """The model's folder, and one of the same model split, in float32."""
    split_model.make(world.model, world.folder / "untrained", SCHEME, SHARE)
    return world.model, world.folder / "untrained"


def logits(folder, scheme="bf16"):
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, 20, (2, 12)), jnp.int32)
    return np.asarray(models.load_hf(folder, scheme=scheme)(tokens))


def test_a_split_model_is_the_model(untrained):
    plain, folder = untrained
    config = models.read_config(folder)
    assert config.splitting == Splitting(SHARE, 32)
    tensors = load_file(folder / "model.safetensors")
    size, last = config.hidden_size, config.num_layers - 1
    first = tensors["model.layers.0.self_attn.q_proj.input_index"]
    assert first.dtype == np.int32
    assert (first == size).all()
    index = tensors[f"model.layers.{last}.self_attn.q_proj.input_index"][0]
    assert len(set(index.tolist())) == size // 2
    np.testing.assert_array_equal(index, tensors[f"model.layers.{last}.self_attn.v_proj.input_index"][0])
    assert tensors[f"model.layers.{last}.self_attn.q_proj.weight"].shape[1] == size + size // 2
    np.testing.assert_allclose(logits(folder), logits(plain), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("scheme", ["bf16", SCHEME])
def test_a_merged_folder_computes_the_same(untrained, tmp_path, scheme):
    out = tmp_path / "merged"
    asked = [] if scheme == "bf16" else ["--scheme", scheme]
    assert export.main(["--model", str(untrained[1]), "--format", "hf", "--out", str(out), *asked]) == 0
    assert models.read_config(out).splitting is None
    np.testing.assert_allclose(logits(out), logits(untrained[1], scheme), rtol=2e-5, atol=2e-6)


@pytest.mark.nightly
def test_training_splits_layers_and_loses_less_than_rounding(world):
    values = tree(world, "trained", stages=[SCHEME], split=SHARE, distill={"epochs": 1, "batch": 2})
    assert run(world, values) == 0
    out = world.folder / "trained"
    for record in made.read_receipt(out, "qat.json")["blocks"]:
        assert record["trained"] < 0.8 * record["rounded"]
    assert models.read_config(out).splitting == Splitting(SHARE, 32)
    before = load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.input_index"][0]
    assert sorted(before.tolist()) == before.tolist()


@pytest.mark.nightly
def test_rl_starts_from_a_split_policy_and_its_export_starts_another(world, untrained):
    other = world.changed(model={"path": str(untrained[1])}, quant={"forward": SCHEME}, train={"steps": 2})
    assert train.main(other.command()) == 0
    assert max(line["mismatch/k3"] for line in other.records()) < 1e-6
    out = world.folder / "exported"
    assert export.main(["--checkpoint", str(other.run_dir), "--format", "hf", "--out", str(out)]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (untrained[1], out))
    assert list(before) == list(after)
    for name in before:
        assert np.array_equal(before[name], after[name]) == name.endswith("input_index"), name


def test_what_has_no_place_for_the_index_is_refused(untrained):
    config = models.read_config(untrained[1], quant=models.parse_rules("w8a8"))
    with pytest.raises(UserError, match=r"no layer for model\.layers.* in w8a8, whose channels are split"):
        engine_config(models.split(models.abstract_model(config))[0])
    with pytest.raises(UserError, match="no experts, no adapters and no tensor-parallel engine"):
        dataclasses.replace(config, lora=Lora(rank=4, scale=1.0))


@pytest.mark.parametrize("sections", [{}, {"split": SHARE}, {"train": None, "distill": {"batch": 2}}])
def test_a_split_folder_is_not_trained_again(world, untrained, sections, capsys):
    values = tree(world, "again", stages=[SCHEME], model={"path": str(untrained[1])}) | sections
    assert run(world, values) == 2
    assert "take the folder that `qarl export --format hf` makes of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"split": 0.1}, "split needs one scheme with zero points"),
        ({"split": 1.5, "stages": [SCHEME]}, "between 0 and 1"),
        ({"split": 0.1, "stages": ["w8a16_asym:g32"], "widths": [8, 2]}, "for one width"),
    ],
)
def test_a_mistake_is_told(world, changed, said, capsys):
    assert run(world, tree(world, "mistake") | changed) == 2
    assert said in capsys.readouterr().err
