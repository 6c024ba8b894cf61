# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""QTensor bytes <-> checkpoint tensors, and the config section that describes them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qarl_bridge.protocol import formats
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import quant
from tests.reference import quant_reference as ref

CONFIGS = [config() for config in quant.SCHEMES.values()] + [
    quant.parse_scheme("w4a16:g32"),
    quant.parse_scheme("w4a16:g-1"),
]
NAME = "model.layers.3.mlp.down_proj"
LINEAR = [*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down"))]


def arrays(config, n=128, k=256, seed=0):
    w = np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)
    qt = quant.quantize(w, config)
    return {name: np.asarray(array) for name, array in qt.arrays.items()}, qt


def layouts(schemes):
    """Maps each module to the wire layout of its scheme."""
    found = {name: quant.parse_scheme(scheme) for name, scheme in schemes.items()}
    return {name: None if scheme is None else scheme.wire for name, scheme in found.items()}


def section_of(schemes, ignore=("lm_head",)):
    return formats.quantization_config(layouts(schemes), ignore)


def every_layer(scheme, layers=2, **others):
    """All linear layers of a dense model, `others` overriding by suffix with dots as underscores."""
    names = [f"model.layers.{i}.{leaf}" for i in range(layers) for leaf in LINEAR]
    return {name: next((s for key, s in others.items() if key in name), scheme) for name in names}


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
class TestEveryScheme:
    @pytest.mark.slow
    def test_packing_round_trips_byte_for_byte(self, config):
        held, _ = arrays(config)
        tensors = formats.pack(NAME, held, config.wire)
        assert list(tensors) == list(config.wire.names(NAME).values())
        back = formats.unpack(NAME, {**tensors, "other.weight": held["scales"]}, config.wire)
        assert list(back) == [array.name for array in config.wire.arrays]
        assert back.keys() == held.keys()
        assert all(same_bytes(back[name], held[name]) for name in held)

    @pytest.mark.slow
    def test_packing_copies_nothing(self, config):
        held, _ = arrays(config)
        tensors = formats.pack(NAME, held, config.wire)
        assert all(np.shares_memory(tensors[config.wire.names(NAME)[name]], array) for name, array in held.items())

    def test_the_layout_says_dtypes_and_shapes_of_what_is_quantized(self, config):
        held, qt = arrays(config)
        assert config.wire.scheme == str(config)
        assert config.wire.codes.name == "codes"
        for array in config.wire.arrays:
            assert (held[array.name].dtype, held[array.name].shape) == (array.dtype, array.shape(*qt.shape))

    def test_what_is_published_stands_for_the_learners_weight(self, config):
        held, qt = arrays(config)
        value = ref.grid(config.name).value(held)
        np.testing.assert_array_equal(value, np.asarray(quant.dequantize(qt, jnp.float32)))

    def test_the_name_may_carry_the_weight_suffix(self, config):
        held, _ = arrays(config)
        a, b = (formats.pack(name, held, config.wire) for name in (NAME, NAME + ".weight"))
        assert list(a) == list(b)

    @pytest.mark.parametrize("poison", [np.nan, np.inf, 0.0, -1.0])
    def test_a_scale_that_is_not_finite_and_positive_is_refused(self, config, poison):
        held, _ = arrays(config)
        for array in config.wire.arrays:
            if array.is_scale:
                scales = held[array.name].copy()
                scales[-1, 0] = poison
                with pytest.raises(BridgeError, match=NAME) as error:
                    formats.pack(NAME, held | {array.name: scales}, config.wire)
                assert error.value.code == "tensor"

    def test_wrong_dtypes_shapes_and_missing_tensors_are_refused_by_name(self, config):
        held, _ = arrays(config)
        codes, scales = held["codes"], held["scales"]
        for bad in (
            held | {"codes": codes[None]},
            held | {"codes": codes.astype(np.int16)},
            held | {"scales": scales.astype(np.float64)},
            held | {"scales": scales[:-1]},
            held | {"scales": np.repeat(scales, 3, axis=1)},
            {"codes": codes},
            held | {"zeros": codes},
        ):
            with pytest.raises(BridgeError, match=NAME):
                formats.pack(NAME, bad, config.wire)
        tensors = formats.pack(NAME, held, config.wire)
        del tensors[f"{NAME}.weight_scale"]
        with pytest.raises(BridgeError, match="weight_scale"):
            formats.unpack(NAME, tensors, config.wire)

    @pytest.mark.slow
    def test_the_config_is_json_and_compressed_tensors_accepts_it(self, config):
        section = section_of(every_layer(str(config)))
        assert json.loads(json.dumps(section)) == section
        quantization = pytest.importorskip("compressed_tensors.quantization")
        if config.wire.format not in {
            known.value for known in pytest.importorskip("compressed_tensors").CompressionFormat
        }:
            pytest.skip(f"compressed-tensors has no format {config.wire.format}")
        parsed = quantization.QuantizationConfig.model_validate(section)
        (group,) = parsed.config_groups.values()
        assert group.targets == ["Linear"]
        bits = {"w8a8": 8, "fp8": 8} | dict.fromkeys(("w4a16", "w4a8", "w3a16", "w2a16"), 4)
        assert group.weights.num_bits == bits.get(config.name, config.wire.weights["num_bits"])
        assert group.weights.symmetric


def test_names_dtypes_and_shapes_are_those_of_the_format():
    def packed(scheme):
        config = quant.parse_scheme(scheme)
        return formats.pack(NAME, arrays(config)[0], config.wire)

    tensors = packed("w4a16:g32")
    described = {name.removeprefix(NAME + "."): (str(t.dtype), t.shape) for name, t in tensors.items()}
    assert described == {
        "weight_packed": ("int32", (128, 32)),
        "weight_scale": ("bfloat16", (128, 8)),
        "weight_shape": ("int64", (2,)),
    }
    assert tensors[f"{NAME}.weight_shape"].tolist() == [128, 256]
    tensors = packed("w8a8")
    described = {name.removeprefix(NAME + "."): (str(t.dtype), t.shape) for name, t in tensors.items()}
    assert described == {"weight": ("int8", (128, 256)), "weight_scale": ("float32", (128, 1))}


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_int4_words_equal_the_learners_and_the_reference(seed, words):
    codes = np.random.default_rng(seed).integers(-8, 8, (3, 8 * words)).astype(np.int8)
    packed = ref.pack(codes)
    np.testing.assert_array_equal(quant.pack_int4(codes), packed)
    np.testing.assert_array_equal(quant.unpack_int4(packed), codes)
    np.testing.assert_array_equal(ref.unpack(packed), codes)


def test_int4_words_equal_compressed_tensors_packing():
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = np.random.default_rng(0).integers(-8, 8, (64, 256)).astype(np.int8)
    theirs = helpers.pack_to_int32(torch.from_numpy(codes), 4).numpy()
    np.testing.assert_array_equal(ref.pack(codes), theirs)
    np.testing.assert_array_equal(np.asarray(jax.jit(quant.pack_int4)(codes)), theirs)


def test_mixed_rules_name_the_exceptions_and_ignore_bf16_layers():
    schemes = every_layer("w4a16:g128", layers=3, self_attn="w8a8")
    schemes |= {name: "bf16" for name in schemes if ".0." in name}
    section = section_of(schemes, ignore=["lm_head"])
    assert section["format"] == "mixed-precision"
    assert section["ignore"][0] == "lm_head"
    assert set(section["ignore"][1:]) == {n for n in schemes if ".0." in n}
    named, rest = section["config_groups"].values()
    expected = {"int-quantized": "w8a8", "pack-quantized": "w4a16:g128"}[named["format"]]
    assert set(named["targets"]) == {n for n, s in schemes.items() if s == expected}
    assert rest["targets"] == ["Linear"]


def test_experts_are_named_by_one_pattern_per_layer():
    schemes = {
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj": ("w8a8" if i else "w4a16")
        for i in range(3)
        for e in range(40)
        for p in ("gate", "up", "down")
    }
    section = section_of(schemes, ["lm_head", "re:.*mlp.gate$"])
    targets = [t for group in section["config_groups"].values() for t in group["targets"]]
    assert targets == [r"re:^model\.layers\.0\.mlp\.experts\.", "Linear"]


def test_an_unquantized_model_has_no_section():
    assert section_of(every_layer("bf16")) is None


@pytest.mark.parametrize(
    ("others", "named"),
    [({"k_proj": "w8a8"}, "q_proj"), ({"up_proj": "bf16"}, "gate_proj"), ({"v_proj": "w4a16:g64"}, "v_proj")],
)
def test_parts_of_a_fused_module_must_share_a_scheme(others, named):
    with pytest.raises(BridgeError, match=named) as error:
        section_of(every_layer("w4a16:g128", **others))
    assert error.value.code == "foreign_scheme"


def test_experts_of_a_layer_must_share_a_scheme():
    schemes = {f"model.layers.0.mlp.experts.{e}.down_proj": "w8a8" if e else "w4a16" for e in range(2)}
    with pytest.raises(BridgeError, match="experts"):
        section_of(schemes)


def test_a_layout_may_have_several_levels_of_scales_a_tensors_own_and_experts():
    """The needs of NVFP4 and of nested grids: block scales, zero points, a single number per weight."""
    layout = formats.Layout(
        scheme="toy",
        format="toy-packed",
        weights=formats.arguments(4, "float", "group", group_size=16),
        activations=None,
        arrays=(
            formats.Array("codes", "weight_packed", np.dtype(np.uint8), inputs=2),
            formats.Array("block_scales", "weight_scale", formats.FLOAT8, inputs=16, is_scale=True),
            formats.Array("scale", "weight_global", np.dtype(np.float32), inputs=0, outputs=0, is_scale=True),
            formats.Array("zeros", "weight_zero_point", np.dtype(np.int8), inputs=16),
        ),
    )
    for lead in ((), (3,)):
        held = {array.name: np.ones((*lead, *array.shape(8, 64)), array.dtype) for array in layout.arrays}
        tensors = formats.pack("m", held, layout)
        shapes = {name.removeprefix("m.weight_"): tensor.shape[len(lead) :] for name, tensor in tensors.items()}
        assert shapes == {"packed": (8, 32), "scale": (8, 4), "global": (1,), "zero_point": (8, 4)}
        back = formats.unpack("m", tensors, layout)
        assert {name: array.shape for name, array in back.items()} == {n: a.shape for n, a in held.items()}
        with pytest.raises(BridgeError, match="a value of scale is not finite and positive"):
            formats.pack("m", held | {"scale": 0 * held["scale"]}, layout)


@pytest.mark.vllm
def test_vllm_gives_every_layer_the_scheme_its_name_says():
    pytest.importorskip("vllm")
    compressed = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ).CompressedTensorsConfig
    torch = pytest.importorskip("torch")

    class LinearBase(torch.nn.Module):
        pass

    schemes = every_layer("w4a16:g128", layers=3, self_attn="w8a8", down_proj="w4a8:g64")
    schemes |= {name: "bf16" for name in schemes if ".0." in name}
    config = compressed.from_config(section_of(schemes, ["lm_head"]))
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    for name, scheme in schemes.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("k_proj", "v_proj", "up_proj"):
            continue
        got = config.get_scheme_dict(LinearBase(), f"{parent}.{fused.get(leaf, leaf)}")
        if scheme == "bf16":
            assert got is None, name
            continue
        activations = got["input_activations"]
        kind = f"w{got['weights'].num_bits}a{activations.num_bits if activations else 16}"
        group = got["weights"].group_size
        assert quant.parse_scheme(scheme) == quant.parse_scheme(kind, group), name
