# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Read-back of linear layers and fused experts, on modules of torch that keep their weights in layouts of their own."""

import contextlib
import functools

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from qarl_bridge.engine import engine, fast_load, versions  # noqa: E402
from qarl_bridge.engine.machine import Cuda  # noqa: E402
from qarl_bridge.engine.readback import experts, linear  # noqa: E402
from qarl_bridge.engine.readback import formulas as readback_formulas  # noqa: E402
from qarl_bridge.protocol import formats, messages  # noqa: E402
from qarl_bridge.protocol.errors import BridgeError  # noqa: E402

from qarl_jax import quant  # noqa: E402
from qarl_jax.quant.schemes import asym_grid  # noqa: E402
from tests.reference import quant_reference  # noqa: E402


def bf16(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1).bfloat16()


class Method:
    """What vLLM's quant_method is to the read-back."""

    def __init__(self, apply):
        self.apply = apply


class Live(torch.nn.Module):
    def __init__(self, apply, **parameters):
        super().__init__()
        self.quant_method = Method(apply)
        for name, value in parameters.items():
            setattr(self, name, torch.nn.Parameter(value, requires_grad=False))


def dense(weight):
    """A layer that keeps its weight transposed."""
    return Live(lambda layer, x, bias: (x.float() @ layer.weight.float()).bfloat16(), weight=weight.t().contiguous())


def int8(weight, scale):
    def apply(layer, x, bias):
        top = x.float().abs().amax(1, keepdim=True)
        codes = torch.round(x.float() * (127 / top))
        return ((codes @ layer.weight.float()) * (top / 127) * layer.scale.reshape(1, -1)).bfloat16()

    return Live(apply, weight=weight.t().contiguous(), scale=scale)


def int4(words, scale):
    def apply(layer, x, bias):
        nibbles = (layer.packed.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 0xF
        codes = (nibbles - 8).reshape(layer.packed.shape[0], -1).float()
        weight = (codes * layer.scale.float().repeat_interleave(32, dim=1)).bfloat16()
        return (x.float() @ weight.float().t()).bfloat16()

    return Live(apply, packed=words, scale=scale)


def nvfp4(codes, scales):
    def apply(layer, x, bias):
        value, _ = quant_reference.nvfp4_factors(
            quant_reference.nibbles(layer.codes.numpy()), layer.scales.float().numpy(), 1
        )
        return (x.float() @ torch.from_numpy(value).t() * (1 / torch.tensor(3.0))).bfloat16()

    return Live(apply, codes=codes, scales=scales)


ASYM = quant_reference.GRIDS["w3a16_asym"]


def asym(upper, lower, scales, zeros, whole):
    """A layer of three bits in two arrays."""
    held = {"codes": upper, "codes_low": lower, "scales": scales.float(), "zero_points": zeros, "tensor_scale": whole}
    value = torch.from_numpy(ASYM.value({name: tensor.numpy() for name, tensor in held.items()}))
    return Live(lambda layer, x, bias: (x.float() @ layer.value.t()).bfloat16(), value=value)


def read_back(modules, tensors, mode="full", tied=None, activations="bf16"):
    reader = linear.ReadBack(
        modules, tied or {}, device=torch.device("cpu"), activations=activations, context=contextlib.nullcontext
    )
    return reader.compare(tensors if isinstance(tensors, list) else [tensors], mode, 0)


def fused(kind):
    """(live qkv_proj, published tensors) of one layer: q, k and v of 64 inputs."""
    prefix, k = "model.layers.0.self_attn", 64
    tensors, weights, scales = {}, [], []
    for seed, (shard, n) in enumerate((("q_proj", 16), ("k_proj", 8), ("v_proj", 8))):
        name = f"{prefix}.{shard}"
        if kind == "dense":
            weights.append(bf16(n, k, seed=seed))
            tensors[f"{name}.weight"] = weights[-1]
        elif kind == "int8":
            rng = np.random.default_rng(seed)
            weights.append(torch.from_numpy(rng.integers(-128, 128, (n, k)).astype(np.int8)))
            scales.append(torch.from_numpy(rng.uniform(0.001, 0.01, (n, 1)).astype(np.float32)))
            tensors |= {f"{name}.weight": weights[-1], f"{name}.weight_scale": scales[-1]}
        elif kind == "asym":
            rng = np.random.default_rng(seed)
            weights.append([rng.integers(0, 256, (n, k // per)).astype(np.uint8) for per in (4, 8)])
            weights[-1] = [torch.from_numpy(part) for part in weights[-1]]
            scales.append([torch.from_numpy(rng.uniform(0.02, 0.1, (n, k // 32))).to(torch.float8_e4m3fn)])
            scales[-1] += [torch.from_numpy(rng.integers(0, 256, (n, k // 32)).astype(np.uint8))]
            scales[-1] += [torch.full((n, 1), 2.0 ** -(seed + 4))]
            parts = dict(zip(("u2", "u1", "scale", "zero_point"), (*weights[-1], *scales[-1]), strict=False))
            tensors |= {f"{name}.weight_{leaf}": part for leaf, part in parts.items()}
            tensors[f"{name}.weight_tensor_scale"] = scales[-1][-1][0]
        elif kind == "nvfp4":
            rng = np.random.default_rng(seed)
            weights.append(torch.from_numpy(rng.integers(0, 256, (n, k // 2)).astype(np.uint8)))
            steps = rng.uniform(0.02, 0.1, (n, k // 16)) / np.where(np.arange(n) == 0, 9, 1)[:, None]  # row 0: flushed
            scales.append(torch.from_numpy(steps).to(torch.float8_e4m3fn))
            tensors |= {f"{name}.weight_packed": weights[-1], f"{name}.weight_scale": scales[-1]}
            tensors[f"{name}.weight_global_scale"] = torch.tensor([3.0])
        else:
            rng = np.random.default_rng(seed)
            weights.append(torch.from_numpy(quant_reference.pack(rng.integers(-8, 8, (n, k)))))
            scales.append(bf16(n, k // 32, seed=seed).abs() + 0.01)
            tensors |= {f"{name}.weight_packed": weights[-1], f"{name}.weight_scale": scales[-1]}
            tensors[f"{name}.weight_shape"] = torch.tensor([n, k])
    if kind == "asym":
        joined = [
            torch.cat([part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts])
            for parts in zip(*(w + s for w, s in zip(weights, scales, strict=True)), strict=True)
        ]
        return {f"{prefix}.qkv_proj": asym(*joined[:2], joined[2].view(torch.float8_e4m3fn), *joined[3:])}, tensors
    make = {"dense": dense, "int8": int8, "int4": int4, "nvfp4": nvfp4}[kind]
    live = make(torch.cat(weights), *([torch.cat(scales)] if scales else []))
    return {f"{prefix}.qkv_proj": live}, tensors


@pytest.mark.parametrize("kind", ["dense", "int8", "int4", "nvfp4", "asym"])
def test_a_layer_that_holds_what_was_published_is_read_back(kind):
    modules, tensors = fused(kind)
    assert read_back(modules, tensors) == (1, 64)
    assert read_back(modules, tensors, "sampled") == (1, linear.SAMPLED_ROWS)


@pytest.mark.parametrize("kind", ["dense", "int8", "int4", "nvfp4", "asym"])
def test_one_wrong_weight_is_found_and_named(kind):
    modules, tensors = fused(kind)
    name = next(n for n in tensors if "k_proj.weight" in n)
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] = tensors[name][3, 5] * 2 + 1 if kind in ("dense", "int8") else tensors[name][3, 5] ^ 1
    # Row 3 of k is row 19 of the fused layer.
    with pytest.raises(BridgeError, match=r"qkv_proj holds .* at \[19, (5|40|10|20)\].*1 of 2048 values differ"):
        read_back(modules, tensors)


def test_a_layer_that_has_some_inputs_twice_is_read_back_and_others_are_found():
    modules, tensors = fused("asym")
    prefix, live = next(iter(modules.items()))
    twice = torch.tensor([[3, 31, *[32] * 30]], dtype=torch.int32)  # 32 inputs; the index 32 is a zero
    for part in "qkv":
        tensors[f"{prefix.removesuffix('qkv_proj')}{part}_proj.input_index"] = twice
    whole = live.quant_method.apply

    def apply(layer, x, bias, index=twice):
        return whole(layer, torch.cat([x, torch.nn.functional.pad(x, (0, 1))[:, index[0]]], dim=1), bias)

    live.quant_method.apply = apply
    assert read_back(modules, tensors) == (1, 32)
    other = twice.clone()
    other[0, 0] = 4
    live.quant_method.apply = functools.partial(apply, index=other)
    with pytest.raises(BridgeError, match="qkv_proj holds"):
        read_back(modules, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, s in quant.SCHEMES.items() if issubclass(s, asym_grid.Config)])
def test_formulas_read_every_asymmetric_scheme_as_the_learner_does(name):
    scheme = quant.parse_scheme(f"{name}:g32")
    qt = quant.quantize(np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32), scheme)
    packed = formats.pack("p", {key: np.array(array) for key, array in qt.arrays.items()}, scheme.wire)
    leaves = {key.removeprefix("p."): array for key, array in packed.items()}
    tensors = {
        leaf: torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        if array.dtype == formats.FLOAT8
        else torch.from_numpy(array)
        for leaf, array in leaves.items()
    }
    formula = readback_formulas.find(tensors, "bf16")
    value = np.asarray(quant.dequantize(qt, np.float32))
    np.testing.assert_array_equal(formula.served(tensors, torch.float32).numpy(), value)
    columns = readback_formulas.Columns(np.arange(64), 64, computing=torch.device("cpu"), staged=torch.device("cpu"))
    one = np.eye(1, 32, dtype=np.float32)
    if scheme.activation_bits:
        one = np.asarray(scheme.activations(one, numerics=quant.resolve("cpu")))
    assert formula.one == one[0, 0]
    np.testing.assert_array_equal(
        formula.expected([tensors], columns)[0].numpy().T, quant_reference.bf(value * one[0, 0])
    )


def test_a_nan_in_the_kernels_own_copy_is_found():
    modules, tensors = fused("dense")
    modules["model.layers.0.self_attn.qkv_proj"].weight.data[7, 7] = float("nan")
    with pytest.raises(BridgeError, match="holds nan"):
        read_back(modules, tensors)


def test_an_infinity_is_wrong_even_where_it_was_published():
    weight = bf16(8, 16)
    weight[3, 5] = float("inf")
    live = Live(lambda layer, x, bias: layer.weight[x.argmax(1)], weight=weight.t().contiguous())  # no 0 * inf
    with pytest.raises(BridgeError, match=r"o_proj holds inf at \[3, 5\]"):
        read_back({"m.o_proj": live}, {"m.o_proj.weight": weight})


def test_tensors_without_a_live_layer_are_an_error_and_stored_ones_are_compared():
    norm = torch.nn.Module()
    norm.weight = torch.nn.Parameter(bf16(8), requires_grad=False)
    assert read_back({"model.norm": norm}, {"model.norm.weight": norm.weight.data.clone()}) == (1, 0)
    with pytest.raises(BridgeError, match=r"model\.norm does not hold"):
        read_back({"model.norm": norm}, {"model.norm.weight": norm.weight.data + 1})
    with pytest.raises(BridgeError, match=r"no live layer for 1 tensor\(s\), first: other.weight"):
        read_back({"model.norm": norm}, {"model.norm.weight": norm.weight.data, "other.weight": bf16(8)})


def test_a_tied_head_is_pushed_through_although_only_the_embedding_was_published():
    table = bf16(24, 16)
    embedding = torch.nn.Module()
    embedding.weight = torch.nn.Parameter(table, requires_grad=False)
    head = dense(table)
    modules, tensors = {"model.embed_tokens": embedding, "lm_head": head}, {"model.embed_tokens.weight": table}
    assert read_back(modules, tensors, tied={"lm_head": "model.embed_tokens"}) == (2, 16)
    head.weight.data += 1  # a packed copy that a reload forgot
    with pytest.raises(BridgeError, match="lm_head holds"):
        read_back(modules, tensors, tied={"lm_head": "model.embed_tokens"})


# ---- fused experts --------------------------------------------------------------------------------------------------

E, HIDDEN, INNER = 10, 32, 16  # more experts than are multiplied at once
LAYER = "model.layers.0.mlp.experts"


def table(rows=10, group=32):
    """(live embedding whose weight is int4 codes, its published tensors)."""
    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, 8), np.int32))
    live = int4(words, bf16(rows, 64 // group, seed=1).abs() + 0.01)
    tensors = {"weight_packed": live.packed.clone(), "weight_scale": live.scale.clone()}
    tensors |= {"weight_shape": torch.tensor([rows, 64])}
    eye = torch.eye(64, dtype=torch.bfloat16)
    live.quant_method.embedding = lambda module, index: module.quant_method.apply(module, eye, None).t()[index]
    live.quant_method.is_table = True
    return live, {f"model.embed_tokens.{leaf}": tensor for leaf, tensor in tensors.items()}


@pytest.mark.parametrize("multiplies", [True, False])
def test_every_row_of_a_table_of_codes_is_looked_up_and_a_tied_one_multiplies_too(multiplies, monkeypatch):
    monkeypatch.setattr(linear, "_TOKENS", 4)
    live, tensors = table()
    live.quant_method.multiplies = multiplies
    module = type("VocabParallelEmbedding", (torch.nn.Module,), {})()
    module.__dict__ = live.__dict__
    modules = {"model.embed_tokens": module}
    assert read_back(modules, tensors) == (1, 64 if multiplies else 0)
    module.packed.data[9, 3] ^= 1 << 8  # in the last part
    with pytest.raises(BridgeError, match=r"model\.embed_tokens does not look up the published rows"):
        read_back(modules, tensors)


def bank(seed=0):
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"{LAYER}.*.{proj}.weight": bf16(E, *shape, seed=100 * seed + number)
        for number, (proj, shape) in enumerate(shapes.items())
    }


class ExpertsMethod:
    """vLLM's method of a bank of experts: routing given, the bank w13 [E, 2I, H], w2 [E, H, I]."""

    is_monolithic = False
    topk_indices_dtype = None

    class moe:  # noqa: N801
        experts_per_token = 2

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        out = torch.zeros(len(x), HIDDEN)
        for row in range(len(x)):
            for weight, e in zip(topk_weights[row], topk_ids[row], strict=True):
                gate, up = (layer.w13_weight[e].float() @ x[row].float()).bfloat16().float().chunk(2)
                hidden = (torch.nn.functional.silu(gate) * up).bfloat16().float()
                out[row] += weight * (layer.w2_weight[e].float() @ hidden)
        return out.bfloat16()


class Experts(Live):
    def __init__(self, tensors):
        def stacked(*projections):
            return torch.cat([tensors[f"{LAYER}.*.{p}.weight"] for p in projections], dim=1)

        super().__init__(None, w13_weight=stacked("gate_proj", "up_proj"), w2_weight=stacked("down_proj"))
        self.quant_method = ExpertsMethod()


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_experts_are_read_back_through_the_fused_layer(mode):
    layers, rows = read_back({f"{LAYER}.routed_experts": Experts(bank())}, bank(), mode)
    assert (layers, rows > 0) == (1, True)
    assert read_back({LAYER: Experts(bank())}, bank(), mode)[0] == 1  # wherever vLLM puts the parameters


@pytest.mark.parametrize("what", ["another version", "gate and up swapped", "one expert", "not packed"])
def test_wrong_experts_are_found(what):
    live, tensors = Experts(bank()), bank()
    if what == "another version":
        live = Experts(bank(seed=1))
    elif what == "gate and up swapped":
        live.w13_weight.data = torch.cat(live.w13_weight.data.chunk(2, dim=1)[::-1], dim=1)
    elif what == "one expert":
        live.w2_weight.data[2] = live.w2_weight.data[1]
    else:
        live.w13_weight.data = live.w13_weight.data.reshape(E, -1, 8, HIDDEN).transpose(1, 2).reshape(E, -1, HIDDEN)
    with pytest.raises(BridgeError, match=r"routed_experts answers a row for experts .* away from the published"):
        read_back({f"{LAYER}.routed_experts": live}, tensors, "full")


def section_of(schemes):
    return formats.quantization_config({name: quant.parse_scheme(scheme).wire for name, scheme in schemes.items()})


@pytest.mark.parametrize(
    ("width", "scheme", "refused"),
    [
        (128, "w4a16", True),
        (128, "w4a16:g64", False),
        (129, "w4a16", False),
        (128, "w4a16:g-1", False),
        (128, "w8a8", False),
        (256, "w4a16", False),
        (0, "w4a16", False),
    ],
)
def test_int4_experts_whose_scales_vllm_scrambles_are_refused(width, scheme, refused):
    section = section_of({"model.layers.0.mlp.experts.0.up_proj": scheme})
    config = {"num_experts": 8, "moe_intermediate_size": width, "hidden_size": 256, "quantization_config": section}
    if refused:
        with pytest.raises(BridgeError, match="experts of 128 features with int4 groups of 128"):
            experts.check_groups(config)
    else:
        experts.check_groups(config)
    experts.check_groups(config, batch_invariant=True)
    experts.check_groups(config | {"num_experts": 0})
    experts.check_groups(config | {"hidden_size": 128, "quantization_config": section})
    experts.check_groups(config | {"quantization_config": None})
    rules = {"model.layers.0.mlp.experts.0.up_proj": "w8a8", "a.q_proj": "w4a16", "a.k_proj": "w4a16", "b": "w4a16"}
    experts.check_groups(config | {"quantization_config": section_of(rules | {"a.v_proj": "w4a16"})})


def test_experts_with_zero_points_are_refused_before_vllm_starts():
    rules = {"model.layers.0.mlp.experts.0.up_proj": "w2a16_asym", "a.o_proj": "w4a16"}
    config = {"num_experts": 8, "quantization_config": section_of(rules)}
    with pytest.raises(BridgeError, match="experts with zero points have no layer in vLLM: give them w4a16 or bf16"):
        experts.check_format(config)
    experts.check_format(config | {"num_experts": 0})
    rules = {"model.layers.0.mlp.experts.0.up_proj": "w4a16", "a.o_proj": "w4a4", "b.o_proj": "w2a16_asym"}
    dense = config | {"quantization_config": section_of(rules)}
    experts.check_format(dense)
    assert engine._int4_activations(dense) == "bf16"  # those of w4a4 are not vLLM's int8
    gpu, theirs = Cuda.__new__(Cuda), messages.EngineOptions(arithmetic="vllm")
    with pytest.raises(BridgeError, match="vLLM has no layer for weights with zero points: drop arithmetic=vllm"):
        gpu.replace(dense, theirs)
    assert gpu.replace(dense | {"quantization_config": None}, theirs)


def test_parts_of_a_version_are_read_back_as_the_whole_is():
    modules, tensors = fused("int8")
    modules |= {f"{LAYER}.routed_experts": Experts(bank())}
    whole = read_back(modules, tensors | bank())
    assert read_back(modules, [tensors, bank()]) == whole
    with pytest.raises(BridgeError, match=r"no experts were published for .*routed_experts"):
        read_back(modules, [tensors])
    modules[f"{LAYER}.routed_experts"].w2_weight.data[2] = 0
    with pytest.raises(BridgeError, match="routed_experts answers a row"):
        read_back(modules, [tensors, bank()])


def test_experts_without_a_live_bank_are_an_error():
    with pytest.raises(BridgeError, match="no live layer for 3 tensor"):
        read_back({}, bank())


# ---- whole modules --------------------------------------------------------------------------------------------------


def test_a_modules_parameters_are_put_together_from_what_is_published():
    _, tensors = fused("int8")
    meta = {name: torch.empty(0) for name in ("weight", "weight_scale")}
    sources = fast_load._sources("model.layers.0.self_attn.qkv_proj", meta, tensors)
    weight = fast_load._assemble(sources[0], torch.empty(32, 64, dtype=torch.int8), tensors, "cpu")
    assert torch.equal(weight[16:24], tensors["model.layers.0.self_attn.k_proj.weight"])
    # A padded vocabulary, and memory of its own.
    table = {"lm_head.weight": bf16(5, 4)}
    (source,) = fast_load._sources("lm_head", {"weight": None}, table)
    padded = fast_load._assemble(source, torch.empty(8, 4, dtype=torch.bfloat16), table, "cpu")
    assert torch.equal(padded[:5], table["lm_head.weight"])
    assert not padded[5:].any()
    padded.zero_()
    assert table["lm_head.weight"].any()


def test_the_experts_of_a_layer_become_one_parameter():
    tensors = bank()
    sources = fast_load._sources(f"{LAYER}.routed_experts", {"w13_weight": None, "w2_weight": None}, tensors)
    w13 = fast_load._assemble(sources[0], torch.empty(E, 2 * INNER, HIDDEN, dtype=torch.bfloat16), tensors, "cpu")
    live = Experts(tensors)
    assert torch.equal(w13, live.w13_weight)
    w2 = fast_load._assemble(sources[1], torch.empty(E, HIDDEN, INNER, dtype=torch.bfloat16), tensors, "cpu")
    assert torch.equal(w2, live.w2_weight)


def test_a_parameter_that_is_not_published_sends_everything_to_vllms_loader():
    _, tensors = fused("int8")
    with pytest.raises(fast_load.Unsupported, match="has a parameter zero_point"):
        fast_load._sources("model.layers.0.self_attn.qkv_proj", {"weight": None, "zero_point": None}, tensors)
    assert fast_load._sources("model.layers.0.other", {"weight": None}, tensors) == []
    unused = {"weight": None, "weight_g_idx": None}
    assert len(fast_load._sources("model.layers.0.self_attn.qkv_proj", unused, tensors)) == 1
    (source,) = fast_load._sources("model.layers.0.self_attn.qkv_proj", {"weight": None}, tensors)
    with pytest.raises(fast_load.Unsupported, match="does not make weight"):
        fast_load._assemble(source, torch.empty(31, 64, dtype=torch.int8), tensors, "cpu")


def test_a_fused_parameter_is_put_together_in_the_layout_its_kernel_wants():
    tensors = bank()
    source = fast_load._sources(f"{LAYER}.routed_experts", {"w2_weight": None}, tensors)[0]
    like = torch.empty(E, INNER, HIDDEN, dtype=torch.bfloat16)
    like.is_transposed = True  # as vLLM marks it
    assert torch.equal(fast_load._assemble(source, like, tensors, "cpu"), Experts(tensors).w2_weight.mT)


def test_what_a_module_fuses_is_not_joined_on_the_host_first():
    _, tensors = fused("int8")
    (source,) = fast_load._sources("model.layers.0.self_attn.qkv_proj", {"weight": None}, tensors)
    called = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.name())
            return function(*args, **(kwargs or {}))

    with Calls():
        fast_load._assemble(source, torch.empty(32, 64, dtype=torch.int8), tensors, "meta")
    assert called.count("aten::copy_") == 3
    assert "aten::cat" not in called
    uneven = tensors | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 1, dtype=torch.int8)}
    with pytest.raises(fast_load.Unsupported, match="do not make weight"):
        fast_load._assemble(source, torch.empty(32, 64, dtype=torch.int8), uneven, "cpu")


def test_two_modules_of_every_kind_are_given_to_vllms_loader():
    model = torch.nn.Module()
    tensors = {"model.embed_tokens.weight": bf16(24, 16)}
    model.embed_tokens = dense(tensors["model.embed_tokens.weight"])
    model.layers = torch.nn.ModuleList()
    for number in range(5):
        layer = torch.nn.Module()
        prefix = f"model.layers.{number}"
        layer.qkv_proj, layer.norm = dense(bf16(24, 16)), Live(None, weight=bf16(16))
        layer.experts = torch.nn.Module()
        layer.experts.routed_experts = Experts(bank())
        model.layers.append(layer)
        width = 32 if number == 4 else 16  # a kind of its own
        tensors |= {f"{prefix}.{part}_proj.weight": bf16(8, width) for part in "qkv"}
        tensors |= {f"{prefix}.norm.weight": bf16(16)}
        tensors |= {name.replace(LAYER, f"{prefix}.experts"): tensor for name, tensor in bank().items()}
    outer = torch.nn.Module()
    outer.model = model
    found = fast_load.WholeModules(outer, None).sample(tensors)
    layers = [f"model.layers.{number}" for number in range(5)]
    assert set(found) == {
        "model.embed_tokens",
        *(f"{layers[number]}.qkv_proj" for number in (0, 3, 4)),
        *(f"{layers[number]}.norm" for number in (0, 4)),
        *(f"{layers[number]}.experts.routed_experts" for number in (0, 4)),
    }
    assert sorted(found[f"{layers[3]}.qkv_proj"]) == [f"{layers[3]}.{part}_proj.weight" for part in "kqv"]
    assert len(found[f"{layers[4]}.experts.routed_experts"]) == 3
    state = fast_load.WholeModules(outer, None)
    before = state.state(found)
    model.layers[1].norm.weight.data += 1  # not of the sample
    model.layers[4].norm.weight.data += 1
    after = state.state(found)
    assert [name for name in before if before[name] != after[name]] == ["model.layers.4.norm.weight"]


def test_the_shapes_of_a_layers_experts_come_after_its_other_tensors():
    leaves = ("weight_packed", "weight_scale", "weight_shape")
    experts = [f"model.layers.{n}.mlp.experts.{e}.up_proj.{leaf}" for n in (0, 1) for e in (0, 1) for leaf in leaves]
    before, after = [f"model.layers.0.mlp.gate.{leaf}" for leaf in leaves], ["model.norm.weight"]
    given = [(name, number) for number, name in enumerate([*before, *experts, *after])]
    got = list(versions._in_loading_order(given))
    assert sorted(got, key=lambda pair: pair[1]) == given
    wanted = [*before]
    for layer in (experts[:6], experts[6:]):
        wanted += [n for n in layer if not n.endswith("shape")] + [n for n in layer if n.endswith("shape")]
    assert [name for name, _ in got] == [*wanted, *after]


def test_a_format_that_no_formula_has_is_refused_by_its_tensors():
    tensors = {"m.o_proj.weight_packed": torch.zeros(8, 4, dtype=torch.uint8), "m.o_proj.weight_scale": bf16(8, 1)}
    live = dense(bf16(8, 8))
    with pytest.raises(BridgeError, match=r"no formula for a layer of weight_packed torch.uint8, weight_scale"):
        read_back({"m.o_proj": live}, tensors)
