# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An exported folder holds the trained policy: the masters rounded to bfloat16, or the very QTensors of the forward."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.protocol import formats
from safetensors.numpy import load_file

from qarl_jax import data, models, train
from qarl_jax.quant import QTensor
from qarl_jax.run import build, evaluation, export
from qarl_jax.run.checkpoint import Checkpoints
from tests.reference import hf_models, tiny

pytestmark = pytest.mark.usefixtures("shared_learners")

STEPS = 2
# What lies in folders of models, and is no part of the policy: notes of its training, adapters, weights of other forms.
FOREIGN = ("sft.json", "adapter_config.json", "tf_model.h5", "consolidated.00.pth", "model.onnx", "flax_model.msgpack")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: two steps of w4a16."""
    world = tiny.World(tmp_path_factory.mktemp("world"))
    for name in FOREIGN:
        (world.model / name).write_text("{}")
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (world.model / name).parent.mkdir(exist_ok=True)
        (world.model / name).write_text("{{ messages }}")
    assert train.main(world.command()) == 0
    return world


@pytest.fixture(scope="module")
def trained(run):
    """(learner, masters) of the last checkpoint."""
    cfg = run.config
    mesh = build.make_mesh(cfg)
    graphdef, params = tiny.load_model(cfg, mesh)
    back = Checkpoints(run.run_dir / "checkpoints").restore({"params": params})
    assert back.step == STEPS
    return build.make_learner(cfg, graphdef, mesh), back.state["params"]


@pytest.fixture(scope="module")
def hf_folder(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("hf") / "out"
    assert export.main(["--checkpoint", str(run.run_dir), "--format", "hf", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def low_bit_folder(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("low_bit") / "out"
    source = run.run_dir / "checkpoints" / f"step_{STEPS:08d}"
    assert export.main(["--checkpoint", str(source), "--format", "compressed-tensors", "--out", str(out)]) == 0
    return out


# ---- hf ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_export_takes_along_what_the_policy_is_asked_with_and_nothing_else(run, hf_folder, low_bit_folder):
    tokenizer = {path.name for path in run.model.iterdir()} - {*FOREIGN, "config.json", "model.safetensors"}
    for folder in (hf_folder, low_bit_folder):
        assert {path.name for path in folder.iterdir()} == tokenizer | {"config.json", "model.safetensors"}
        assert (folder / "additional_chat_templates" / "tools.jinja").is_file()


@pytest.mark.slow
def test_an_hf_export_has_the_names_shapes_and_dtypes_of_the_folder_training_started_from(run, hf_folder):
    before, after = load_file(run.model / "model.safetensors"), load_file(hf_folder / "model.safetensors")
    assert {name: (x.shape, x.dtype) for name, x in after.items()} == {
        name: (x.shape, x.dtype) for name, x in before.items()
    }
    assert any(after[name].tobytes() != before[name].tobytes() for name in before)
    values = json.loads((hf_folder / "config.json").read_text())
    assert "quantization_config" not in values
    assert values["vocab_size"] == 30


@pytest.mark.slow
def test_loading_an_hf_export_gives_the_masters_rounded_to_bfloat16(trained, hf_folder):
    _, params = trained
    loaded = models.split(models.load_hf(hf_folder, dtype="float32"))[1]
    wanted, found = models.by_path(params), models.by_path(loaded)
    assert found.keys() == wanted.keys()
    for path, master in wanted.items():
        rounded = np.asarray(master.astype(jnp.bfloat16).astype(jnp.float32))
        assert np.asarray(found[path]).tobytes() == rounded.tobytes(), path


@pytest.mark.slow
def test_transformers_computes_the_same_logits_from_an_hf_export(hf_folder):
    import torch
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, 30, (2, 20)).astype(np.int32)
    ours = np.asarray(models.load_hf(hf_folder, dtype="float32")(jnp.asarray(tokens)))
    reference = hf_models.logits(theirs, tokens)
    assert hf_models.relative(ours, reference) < 2e-4
    np.testing.assert_array_equal(ours.argmax(-1), reference.argmax(-1))  # the greedy tokens
    assert data.load_tokenizer(hf_folder)("3+4=")["input_ids"] == [6, 13, 7, 14]


@pytest.mark.slow
def test_quantizing_an_hf_export_gives_the_qtensors_of_the_run(trained, hf_folder):
    learner, params = trained
    again = models.split(models.load_hf(hf_folder, dtype="float32", scheme="w4a16:g32"))[2]
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(learner.quantize(params)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ---- compressed-tensors --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compressed_tensors_export_holds_the_learners_qtensors_byte_for_byte(trained, low_bit_folder):
    learner, params = trained
    config = models.config_of(learner.graphdef)
    stored = load_file(low_bit_folder / "model.safetensors")
    wanted, quantized = {}, 0
    for name, tensor in models.export_tensors(params, learner.quantize(params), config):
        if isinstance(tensor, QTensor):
            quantized += 1
            wanted |= formats.pack(name, tensor.arrays, tensor.scheme.wire)
        else:
            wanted[name] = tensor
    assert quantized == 2 * 7
    assert stored.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (stored[name].shape, stored[name].dtype) == (array.shape, array.dtype), name
        assert stored[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
    assert stored["model.layers.1.mlp.down_proj.weight_packed"].shape == (64, 128 // 8)
    assert stored["model.layers.1.mlp.down_proj.weight_scale"].shape == (64, 128 // 32)


@pytest.mark.slow
def test_a_compressed_tensors_export_says_how_it_is_quantized_and_brings_its_tokenizer(run, low_bit_folder):
    values = json.loads((low_bit_folder / "config.json").read_text())
    scheme = values["quantization_config"]
    assert (scheme["quant_method"], scheme["format"]) == ("compressed-tensors", "pack-quantized")
    (group,) = scheme["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (4, 32)
    assert "lm_head" in scheme["ignore"]
    assert data.load_tokenizer(low_bit_folder)("3+4=")["input_ids"] == [6, 13, 7, 14]


@pytest.mark.slow
def test_transformers_computes_the_same_logits_from_an_export_with_zero_points(tmp_path):
    import torch
    import transformers

    model = models.random_model(dataclasses.replace(tiny.model_config(), quant=models.parse_rules("w2a16_asym")), 0)
    graphdef, params, qweights = models.split(model)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)  # an export rounds norms, too
    export.write_quantized(graphdef, params, qweights, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, 30, (2, 20)).astype(np.int32)
    ours = np.asarray(models.merge(graphdef, params, qweights)(jnp.asarray(tokens)))
    reference = hf_models.logits(theirs, tokens)
    assert hf_models.relative(ours, reference) < 2e-4


@pytest.mark.slow
def test_large_exports_are_split_into_shards_with_an_index(run, tmp_path, monkeypatch, low_bit_folder):
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 40_000)
    out = tmp_path / "out"
    export.export(run.run_dir, out, "compressed-tensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    joined = {}
    for file in files:
        part = load_file(file)
        assert {name for name, where in index["weight_map"].items() if where == file.name} == part.keys()
        assert sum(x.nbytes for x in part.values()) <= 40_000
        joined |= part
    whole = load_file(low_bit_folder / "model.safetensors")
    assert {name: x.tobytes() for name, x in joined.items()} == {name: x.tobytes() for name, x in whole.items()}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())


@pytest.mark.slow
def test_one_checkpoint_is_exported_at_every_width_of_its_grid(run, tmp_path):
    nested = run.changed(run_dir=str(tmp_path / "run"), quant={"forward": "w8a16_asym:g32"}, train={"steps": 1})
    assert train.main(nested.command("eval.at_start=false", "eval.at_end=false")) == 0
    held = {}
    for bits in (8, 2):
        arguments = ["--checkpoint", str(nested.run_dir), "--format", "compressed-tensors", "--bits", str(bits)]
        assert export.main([*arguments, "--out", str(tmp_path / str(bits))]) == 0
        held[bits] = load_file(tmp_path / str(bits) / "model.safetensors")
    assert held[8].keys() == held[2].keys()
    for name, whole in held[8].items():
        if name.endswith("weight_packed"):  # bytes: the top two bits, in the middle of their steps
            np.testing.assert_array_equal(held[2][name].view(np.uint8), (whole.view(np.uint8) & 0xC0) + 32)
        else:
            assert held[2][name].tobytes() == whole.tobytes()


@pytest.mark.slow
def test_a_model_folder_is_exported_at_a_width_as_under_the_slices_name(run, tmp_path, capsys):
    held = []
    for scheme, *bits in (("w2a16_midpoint:g32",), ("w8a16_asym:g32", "--bits", "2")):
        out = tmp_path / str(len(held))
        assert export.main(["--model", str(run.model), "--scheme", scheme, *bits, "--out", str(out)]) == 0
        held.append((out / "model.safetensors").read_bytes())
    assert held[0] == held[1]
    said = refused(capsys, "--model", run.model, "--scheme", "w4a16:g32", "--bits", 2, "--out", tmp_path / "none")
    assert "w4a16:g32 has one width: train under w8a16_asym" in said
    with pytest.raises(SystemExit):
        export.main(["--model", str(run.model), "--bits", "2", "--format", "hf", "--out", str(tmp_path / "none")])
    assert "give --scheme w8a16_asym" in capsys.readouterr().err


# ---- refusals ------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    assert export.main(list(map(str, arguments))) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.slow
def test_what_cannot_be_exported_is_told_in_one_sentence_and_leaves_nothing(run, tmp_path, capsys):
    out = tmp_path / "out"
    bf16 = run.changed(run_dir=str(tmp_path / "bf16"), quant={"forward": "bf16"}, train={"steps": 1})
    assert train.main(bf16.command("eval.at_start=false", "eval.at_end=false")) == 0
    capsys.readouterr()
    to = ("--out", out)
    said = refused(capsys, "--checkpoint", bf16.run_dir, "--format", "compressed-tensors", *to)
    assert "--format hf" in said
    said = refused(capsys, "--checkpoint", run.run_dir, "--format", "compressed-tensors", "--bits", 2, *to)
    assert "w4a16:g32 has one width" in said
    assert "--bits 2 is for" in refused(capsys, "--checkpoint", run.run_dir, "--format", "hf", "--bits", 2, *to)
    said = refused(capsys, "--checkpoint", tmp_path / "nowhere", "--format", "hf", *to)
    assert "nowhere" in said
    said = refused(capsys, "--checkpoint", run.run_dir / "checkpoints" / "step_00000009", "--format", "hf", *to)
    assert "step_00000009" in said
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    assert str(used) in refused(capsys, "--checkpoint", run.run_dir, "--format", "hf", "--out", used)
    said = refused(capsys, "--checkpoint", run.run_dir, "--format", "hf", "--out", used / "file" / "below")
    assert "cannot be written" in said
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["bf16", "used"]
    said = refused(capsys, "--checkpoint", run.model, "--format", "hf", *to)
    assert "is a model folder, not a run" in said


# ---- evaluate ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluating_a_checkpoint_repeats_the_runs_own_evaluation(run, capsys):
    first, last = run.records("eval")
    assert first["eval/reward/mean"] != last["eval/reward/mean"]
    for arguments, wanted in [(["--checkpoint", str(run.run_dir)], last), ([], first)]:
        capsys.readouterr()
        assert evaluation.main([*run.command(), *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found == {key: value for key, value in wanted.items() if key.startswith("eval/")}
