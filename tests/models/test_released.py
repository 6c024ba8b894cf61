# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders that were released quantized: codes and scales as they are under adapters, what they stand for as masters."""

import copy
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from qarl_jax import models, train
from qarl_jax.models.hf.released import rules_of
from qarl_jax.models.hf.safetensors import SafetensorsFile
from qarl_jax.models.hf.weights import check_weights
from qarl_jax.quant import dequantize, parse_scheme, quantize
from qarl_jax.quant.config import Rule
from qarl_jax.rollout.vllm.engine import engine_config
from qarl_jax.run import build, export
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from tests.reference import tiny

pytestmark = pytest.mark.usefixtures("compiled_programs")  # whatever codes there are, files hold them
SCHEMES = {"w4a16": "w4a16:g32", "w8a8": "w8a8", "fp8": "fp8", "nvfp4": "nvfp4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of `tiny.random_model`, exported quantized."""
    graphdef, params, _ = models.split(tiny.random_model())
    made = {}
    for name, scheme in SCHEMES.items():
        made[name] = tiny.model_folder(tmp_path_factory.mktemp(name))
        low_bit = models.with_scheme(graphdef, scheme)
        export.write_quantized(low_bit, params, models.quantize_params(low_bit, params), made[name])
    return made


def bytes_of(folder):
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: (dtype, shape, file.tensor(name).tobytes()) for name, (dtype, shape, _) in file.entries.items()}


def section_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def frozen_base(folder, scheme, mesh=None):
    """(graph definition, masters, QTensors) of a policy of which nothing learns."""
    config = models.read_config(folder, quant=models.parse_rules(scheme), compute_dtype="bfloat16")
    entries = list(models.read_masters(folder, config, mesh, frozen=lambda path: True))
    of = lambda wanted: nnx.from_flat_state([x for x in entries if isinstance(x[1], models.Quantized) == wanted])  # noqa: E731
    return models.split(models.abstract_model(config))[0], of(False), of(True)


def masters_of(folder):
    with pytest.warns(UserWarning, match="released quantized") as said:
        found = models.by_path(models.split(models.load_hf(folder))[1])
    assert len(said) == 1
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_codes_and_scales_of_a_base_are_the_folders_and_are_written_as_they_are(folders, name, tmp_path):
    graphdef, params, qweights = frozen_base(folders[name], SCHEMES[name])
    assert len(models.by_path(qweights)) == 7
    config = models.read_config(folders[name])
    check_weights(folders[name], config)
    assert "quantization_config" not in models.hf_config_json(config)
    export.write_quantized(graphdef, params, qweights, tmp_path)
    assert bytes_of(tmp_path) == bytes_of(folders[name])
    assert section_of(tmp_path) == section_of(folders[name])


def test_a_base_lies_on_a_mesh_as_its_masters_would(folders):
    mesh = make_mesh(fsdp=2, tensor=2)
    whole, parts = (models.by_path(frozen_base(folders["w4a16"], SCHEMES["w4a16"], on)[2]) for on in (None, mesh))
    codes = parts["stacks.0.mlp.down.kernel"].codes
    assert codes.addressable_shards[0].data.size == codes.size // 4
    for path, held in parts.items():
        assert jax.tree.all(jax.tree.map(np.array_equal, held, whole[path])), path


@pytest.mark.parametrize(("name", "moves"), [("w4a16", True), ("w8a8", True), ("fp8", False)])
def test_masters_are_what_codes_stand_for_and_quantizing_them_moves_integer_codes(folders, name, moves):
    masters, qtensors = masters_of(folders[name]), models.by_path(frozen_base(folders[name], SCHEMES[name])[2])
    for path, held in qtensors.items():
        assert np.array_equal(masters[path], dequantize(held, jnp.float32)), path
    path = "stacks.0.mlp.down.kernel"
    held = qtensors[path]
    again = quantize(masters[path], parse_scheme(SCHEMES[name]))
    moved = {part: np.asarray(again.arrays[part] != held.arrays[part]) for part in ("codes", "scales")}
    assert moved["codes"].any() == moves
    assert moved["scales"].all() == moved["scales"].any() == moves


def foreign(folder, source):
    """`source` with its linear maps on the grid absmax / 7, [-7, 7], packed and described by compressed-tensors.

    Returns what compressed-tensors' own code says that they stand for, by name.
    """
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    args = quantization.QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    shutil.copytree(source, folder)
    tensors, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        groups = tensor.astype(np.float32).reshape(tensor.shape[0], -1, 32)
        scale = (np.abs(groups).max(-1) / 7).astype(ml_dtypes.bfloat16)
        codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -7, 7).astype(np.int8)
        held = {
            "weight_packed": packed.pack_to_int32(torch.from_numpy(codes.reshape(tensor.shape)), 4),
            "weight_scale": torch.from_numpy(scale.astype(np.float32)).to(torch.bfloat16),
            "weight_shape": torch.tensor(tensor.shape),
        }
        module = name.removesuffix("weight")
        tensors |= {module + "weight_packed": held["weight_packed"].numpy(), module + "weight_scale": scale}
        tensors[module + "weight_shape"] = held["weight_shape"].numpy()
        whole = packed.PackedQuantizationCompressor.decompress(held, scheme)
        meant[name] = whole["weight"].float().numpy()
    save_file(tensors, folder / "model.safetensors")
    section = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized"
    )
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": json.loads(section.model_dump_json())}
    path.write_text(json.dumps(values))
    return meant


@pytest.fixture(scope="module")
def foreign_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    return folder / "low", foreign(folder / "low", tiny.model_folder(folder / "plain"))


def test_a_folder_on_the_grid_of_sevens_stands_for_what_compressed_tensors_says(foreign_folder, tmp_path):
    folder, meant = foreign_folder
    masters = masters_of(folder)
    config = models.read_config(folder)
    for path, names in models.hf_names(config).items():
        for layer, name in enumerate(names.reshape(-1)):
            if name in meant:
                assert np.array_equal(masters[path][layer], meant[name]), name
    assert len(meant) == 2 * 7
    export.write_quantized(*frozen_base(folder, "w4a16:g32"), tmp_path)
    assert bytes_of(tmp_path) == bytes_of(folder)


def group(section, **changes):
    """The section with fields of its group's weights changed."""
    changed = copy.deepcopy(section)
    changed["config_groups"]["group_0"]["weights"] |= changes
    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s | {"quant_method": "gptq"}, "method 'gptq'"),
        (lambda s: s | {"kv_cache_scheme": {"num_bits": 8}}, "'kv_cache_scheme'"),
        (lambda s: group(s, symmetric=False), "zero points"),
        (lambda s: group(s, actorder="group"), "weight_g_idx"),
        (lambda s: group(s, num_bits=3), "num_bits=3"),
        (lambda s: group(s, strategy="block"), "strategy=block"),
        (
            lambda s: {**group(s), "format": "marlin-24"} | {"config_groups": {"g": {"targets": ["Linear"]}}},
            "marlin-24",
        ),
        (lambda s: s | {"ignore": "lm_head"}, "form .*'ignore' is the string 'lm_head', not a list"),
        (lambda s: s | {"config_groups": {"W4A16": ["Linear"]}}, "not in compressed-tensors' form"),
        (lambda s: group(s, group_size="32"), "not in compressed-tensors' form"),
        (lambda s: "fp8", "not in compressed-tensors' form"),
    ],
)
def test_sections_that_are_no_schemes_are_refused_by_what_they_have(folders, change, said):
    with pytest.raises(UserError, match=said):
        rules_of(change(section_of(folders["w4a16"])))


def test_a_frozen_base_under_another_scheme_is_told_the_setting(folders):
    with pytest.raises(UserError, match=r"released as w4a16:g32.*asks for w8a8.*quant.forward=w4a16:g32"):
        frozen_base(folders["w4a16"], "w8a8")
    with pytest.raises(UserError, match=r"set quant\.forward=w8a8,"):
        frozen_base(folders["w8a8"], "bf16")


def test_targets_and_ignored_layers_are_rules_the_nearest_first(folders):
    section = group(section_of(folders["w4a16"]), actorder="static")
    section["config_groups"]["group_1"] = section_of(folders["w8a8"])["config_groups"]["group_0"]
    section["config_groups"]["group_1"] |= {"targets": ["re:.*down_proj", "a.up"], "format": "int-quantized"}
    section |= {"ignore": ["lm_head", "re:.*layers\\.0\\."]}
    rules = rules_of(section)
    wanted = {"a.up": "w8a8", "a.upper": "w4a16:g32", "layers.1.down_proj": "w8a8", "model.layers.0.down_proj": "None"}
    assert {name: str(rules.scheme_for(name)) for name in wanted} == wanted


def test_scales_of_another_dtype_are_taken_where_no_value_changes(folders, tmp_path):
    folder = tmp_path / "low"
    shutil.copytree(folders["w8a8"], folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    held = models.by_path(frozen_base(folder, "w8a8")[2])["stacks.0.mlp.up.kernel"]
    assert np.array_equal(held.scales[0], tensors[name].astype(np.float32))
    tensors[name][0] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj.*not finite"):
        frozen_base(folder, "w8a8")


@pytest.mark.nightly  # it compiles a whole step
def test_adapters_learn_on_a_released_base_which_is_exported_as_it_was(foreign_folder, tmp_path):
    folder, _ = foreign_folder
    lora = {"rank": 8, "alpha": 12}
    run = tiny.World(tmp_path).changed(
        model={"path": str(folder)}, lora=lora, optimizer={"name": "adamw", "lr": 0.01}, quant={"engine": "cpu"}
    )
    assert train.main(run.command("train.steps=1", "eval.at_start=false", "eval.at_end=false")) == 0
    assert run.records()[-1]["mismatch/max_abs"] < 2e-6
    out = tmp_path / "out"
    export.export(run.run_dir, out, "compressed-tensors")
    assert bytes_of(out) == bytes_of(folder)


def test_a_run_under_another_scheme_is_refused_before_anything_starts(folders, tmp_path, capsys):
    run = tiny.World(tmp_path).changed(model={"path": str(folders["w8a8"])}, lora={"rank": 8})
    assert train.main(run.command()) == 2
    assert "set quant.forward=w8a8" in capsys.readouterr().err


@pytest.mark.slow
def test_transformers_reads_an_nvfp4_folder_as_it_is_meant(folders):
    """By compressed-tensors' own reader, which rounds s / g, and a weight, to bfloat16."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    with torch.compiler.set_stance("force_eager"):  # compiling takes long, and gives the same numbers
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folders["nvfp4"], dtype=torch.bfloat16)
        theirs(torch.tensor([[1, 2, 3]]))  # which decompresses
    held = dict(theirs.named_parameters())
    masters, config = masters_of(folders["nvfp4"]), models.read_config(folders["nvfp4"])
    compared = 0
    for path, names in models.hf_names(config).items():
        for place, name in np.ndenumerate(names):
            want = np.asarray(masters[path])[place]
            np.testing.assert_allclose(held[str(name)].detach().float().numpy(), want, rtol=2**-7, err_msg=name)
            compared += str(name).endswith("_proj.weight")
    assert compared == 2 * 7


@pytest.fixture(scope="module")
def released_nvfp4(tmp_path_factory):
    """`tiny`'s folder as llm-compressor leaves it: a number for each of q, k and v, and a layer that is ignored."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    compressor = pytest.importorskip("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    ignored = "model.layers.1.mlp.down_proj"
    source, folder = (tmp_path_factory.mktemp("nvfp4") / name for name in ("plain", "low"))
    shutil.copytree(tiny.model_folder(source), folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module == ignored:
            tensors[name] = tensor
            continue
        w = torch.from_numpy(tensor.astype(np.float32)).to(torch.bfloat16)
        divisor = helpers.generate_gparam(*torch.aminmax(w))
        blocks = w.unflatten(-1, (-1, 16))
        scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
        with torch.compiler.set_stance("force_eager"):
            made = compressor.compress({"weight": w, "weight_scale": scale, "weight_global_scale": divisor}, scheme)
        tensors |= {
            f"{module}.weight_packed": made["weight_packed"].numpy(),
            f"{module}.weight_scale": made["weight_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
            f"{module}.weight_global_scale": made["weight_global_scale"].numpy(),
        }
    save_file(tensors, folder / "model.safetensors")
    section = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head", ignored], format="nvfp4-pack-quantized"
    )
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": json.loads(section.model_dump_json())}
    path.write_text(json.dumps(values))
    return folder, ignored, tensors


def test_a_frozen_nvfp4_base_keeps_the_number_of_each_part_and_the_layers_its_folder_ignores(released_nvfp4, tmp_path):
    folder, ignored, tensors = released_nvfp4
    cfg = (
        tiny.World(tmp_path)
        .changed(model={"path": str(folder)}, lora={"rank": 8}, quant={"forward": "nvfp4", "engine": "cpu"})
        .config
    )
    model = build.model_config(cfg, cfg.quant.forward)
    models.check_released(model, lambda path: True)
    assert [str(model.scheme_of(f"stacks.{i}.mlp.down.kernel")) for i in range(2)] == ["nvfp4", "None"]
    named = dataclasses.replace(cfg, quant=dataclasses.replace(cfg.quant, rules=(Rule(match="down", scheme="nvfp4"),)))
    with pytest.raises(UserError, match=f"base's {ignored} was released as bf16"):
        models.check_released(build.model_config(named, cfg.quant.forward), lambda path: True)

    held = {
        path: leaf
        for path, leaf in models.read_masters(folder, model, frozen=lambda path: True)
        if isinstance(leaf, models.Quantized)
    }
    parts = {keys[3]: leaf.get_value() for keys, leaf in held.items() if keys[:3] == ("stacks", 0, "attn")}
    divisors = {x: float(np.asarray(parts[x].arrays["divisor"]).item()) for x in "qkv"}
    assert len(set(divisors.values())) == 3
    for x, divisor in divisors.items():
        assert divisor == tensors[f"model.layers.0.self_attn.{x}_proj.weight_global_scale"].item()
    section = engine_config(models.split(models.abstract_model(model))[0])["quantization_config"]
    assert section["ignore"] == ["lm_head", ignored]
