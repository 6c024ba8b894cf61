# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of live layers on a CPU: fused layers have one, whose numbers are those of each part's own."""

import contextlib
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qarl_bridge.client import sender  # noqa: E402
from qarl_bridge.engine import adapters  # noqa: E402
from qarl_bridge.engine.adapters import Adapters  # noqa: E402
from qarl_bridge.engine.machine import Cuda  # noqa: E402
from qarl_bridge.protocol import messages  # noqa: E402
from qarl_bridge.protocol.errors import BridgeError  # noqa: E402

K, SIZES = 24, {"q_proj": 16, "k_proj": 8, "v_proj": 8}
PARENT = "model.layers.0.self_attn"


class Layer(torch.nn.Module):
    """As vLLM's: an output and no bias; what it returns is what the test says."""

    def __init__(self, outputs, sizes):
        super().__init__()
        self.quant_method, self.input_size, self.output_size = None, K, outputs
        self.y = torch.zeros(0)
        if sizes is not None:
            self.output_partition_sizes = sizes

    def forward(self, x):
        return self.y.expand(len(x), -1), None


def product(x, weight, splits, added):
    """bf(x W^T), the sum in float64, or bf(added + that)."""
    d = (x.double() @ weight.double().t()).float().bfloat16()
    return d if added is None else added - (0.0 - d)


def made(ranks):
    """A live q|k|v and o, adapters of these ranks (by layer; o's is 4), and the tensors of a version."""
    rng = np.random.default_rng(0)
    sizes = {name: (SIZES[name], rank) for name, rank in ranks.items()} | {"o_proj": (32, 4)}
    version = {}
    for name, (n, r) in sizes.items():
        for end, shape in ((".lora_A.weight", (r, K)), (".lora_B.weight", (n, r))):
            values = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
            version[f"{PARENT}.{name}{end}"] = values.bfloat16()
    modules = {
        f"{PARENT}.qkv_proj": Layer(32, list(SIZES.values())),
        f"{PARENT}.o_proj": Layer(32, None),
        f"{PARENT}.rotary": torch.nn.Identity(),
    }
    shapes = {name: list(tensor.shape) for name, tensor in version.items()}
    held = Adapters(modules, shapes, product=product, dtype=torch.float64, device="cpu")
    return modules, held, version


def load(held, version):
    """Loads a version that was not prepared, in two parts."""
    names = list(version)
    parts = ({name: version[name] for name in some} for some in (names[:3], names[3:]))
    assert not any(held.load(parts))


@pytest.mark.parametrize("ranks", [dict.fromkeys(SIZES, 4), {"q_proj": 3, "v_proj": 8}])
def test_the_adapter_of_a_fused_layer_is_each_part_s_own(ranks):
    modules, held, version = made(ranks)
    layer = modules[f"{PARENT}.qkv_proj"]
    layer.y = torch.linspace(-2, 2, 32).bfloat16()
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(5, K))).bfloat16()
    before, _ = layer(x)
    other = torch.ones(3)
    assert list(held.load([version, {"model.norm.weight": other}])) == [{}, {"model.norm.weight": other}]
    got, bias = layer(x)
    parts = []
    for name, size in SIZES.items():
        d = torch.zeros(5, size).bfloat16()
        if name in ranks:
            a, b = (version[f"{PARENT}.{name}.lora_{one}.weight"] for one in "AB")
            d = product(product(x, a, 1, None), b, 1, None)
        parts.append(d)
    want = (before.float() + torch.cat(parts, dim=1).float()).bfloat16()
    assert bias is None
    assert torch.equal(got, want)
    assert not torch.equal(got, before)


def test_zeros_leave_every_bit_of_the_layer_s_output():
    """-0 + 0 would be +0."""
    modules, held, version = made(dict.fromkeys(SIZES, 4))
    layer = modules[f"{PARENT}.qkv_proj"]
    layer.y = torch.tensor([-0.0, 0.0, 1.0, -3.5] * 8).bfloat16()
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(5, K))).bfloat16()
    bits = layer.y.expand(5, -1).view(torch.int16)
    assert torch.equal(layer(x)[0].view(torch.int16), bits)
    load(held, {n: t if "lora_A" in n else torch.zeros_like(t) for n, t in version.items()})
    assert torch.equal(layer(x)[0].view(torch.int16), bits)
    load(held, version)
    held.clear()
    assert torch.equal(layer(x)[0].view(torch.int16), bits)


def spoiled(held):
    """Yields what a read-back must find: a value of A, a value of B, and one of the zeros between the parts of B."""
    adapter = held._of[f"{PARENT}.qkv_proj"]
    for matrix, row in ((adapter.a, 5), (adapter.b, 30), (adapter.b, 0)):
        right = matrix.clone()
        matrix[row] += 1
        yield r"the adapter of model\.layers\.0\.self_attn\.qkv_proj"
        matrix.copy_(right)


def test_read_back_finds_what_is_not_the_published_adapter():
    _, held, version = made(dict.fromkeys(SIZES, 4))
    load(held, version)
    assert held.compare() == (2, (16 + 32) + (8 + 32))
    for words in spoiled(held):
        with pytest.raises(BridgeError, match=words):
            held.compare()
    assert held.compare()[0] == 2


def manifest_of(version):
    """The manifest of a staged version, and its tensors in torch."""
    arrays = [(name, tensor.view(torch.int16).numpy().view(messages.DTYPES["bfloat16"])) for name, tensor in version]
    identity = messages.Version(run_id="run", incarnation=1, step=1)
    with contextlib.closing(sender.stage(arrays, version=identity, model=bytes(16), scheme=bytes(16))) as staged:
        return staged.manifest


@pytest.mark.parametrize("piece", [1, 32 << 20])
def test_a_prepared_version_is_live_after_one_copy_and_not_before(piece, monkeypatch):
    """Its norm is handed to the loader; no other version is taken for it."""
    monkeypatch.setattr(adapters, "_CHECKED_BYTES", piece)
    modules, held, version = made(dict.fromkeys(SIZES, 4))
    layer = modules[f"{PARENT}.qkv_proj"]
    layer.y = torch.linspace(-2, 2, 32).bfloat16()
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(5, K))).bfloat16()
    before = layer(x)[0]
    norm = {"model.norm.weight": torch.ones(8).bfloat16()}
    manifest = manifest_of([*version.items(), *norm.items()])
    held.prepare(manifest, [version, norm])
    assert torch.equal(layer(x)[0], before)
    assert held.prepared(bytes(16)) is held.prepared(b"") is None
    rest = held.prepared(manifest.digest)
    assert {name: tensor.tolist() for name, tensor in rest.items()} == {"model.norm.weight": [1.0] * 8}
    with pytest.raises(BridgeError, match="read-back"):
        held.compare()
    held.switch()
    after = layer(x)[0]
    assert held.compare()[0] == 2
    assert not torch.equal(after, before)
    for words in spoiled(held):
        with pytest.raises(BridgeError, match=words):
            held.compare()
    modules, other, _ = made(dict.fromkeys(SIZES, 4))
    load(other, version)
    modules[f"{PARENT}.qkv_proj"].y = layer.y
    assert torch.equal(modules[f"{PARENT}.qkv_proj"](x)[0], after)
    load(held, version)  # another version lies there, whatever the digest said
    assert held.prepared(manifest.digest) is None


@pytest.mark.parametrize("name", [f"{PARENT}.v_proj.lora_B.weight", f"{PARENT}.o_proj.lora_A.weight"])
def test_a_version_that_reaches_the_device_with_other_bytes_is_not_prepared(name):
    _, held, version = made(dict.fromkeys(SIZES, 4))
    manifest = manifest_of(version.items())
    held.prepare(manifest, [version])
    torn = version[name].clone()
    torn[1, 1] += 1
    with pytest.raises(BridgeError, match=f"{name} is torn"):
        held.prepare(manifest, [version | {name: torn}])
    assert held.prepared(manifest.digest) is None


def test_matrices_begin_where_kernels_want_them():
    _, held, _ = made({"q_proj": 3, "v_proj": 8})
    for one in held._of.values():
        for matrix in (one.a, one.b):
            assert matrix.is_contiguous()
            assert (matrix.data_ptr() - held._live.data_ptr()) % 512 == 0
            assert matrix.shape[1] % 8 == 0 or matrix is one.a


def test_two_shards_compute_the_halves_of_one_shard():
    """Each has half of the rows of every part of q|k|v; o's inputs are gathered."""
    modules, whole, version = made(dict.fromkeys(SIZES, 4))
    load(whole, version)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(5, K))).bfloat16()
    y = torch.linspace(-2, 2, 32).bfloat16()
    for layer in modules.values():
        layer.y = y
    wanted = {name: modules[f"{PARENT}.{name}"](x)[0] for name in ("qkv_proj", "o_proj")}
    shapes = {name: list(tensor.shape) for name, tensor in version.items()}
    for rank in range(2):
        qkv, o = Layer(32, [size // 2 for size in SIZES.values()]), Layer(32, [32])
        o.input_size_per_partition = K // 2
        rows = np.concatenate(
            [start + rank * size // 2 + np.arange(size // 2) for start, size in ((0, 16), (16, 8), (24, 8))]
        )
        qkv.y, o.y = y[rows], y
        shard = Adapters(
            {f"{PARENT}.qkv_proj": qkv, f"{PARENT}.o_proj": o},
            shapes,
            product=product,
            dtype=torch.float64,
            device="cpu",
            rank=rank,
            gather=lambda part: x,
        )
        load(shard, version)
        assert torch.equal(qkv(x)[0], wanted["qkv_proj"][:, rows])
        assert torch.equal(o(x[:, : K // 2])[0], wanted["o_proj"])
        assert shard.compare()[0] == 2
        shard._of[f"{PARENT}.qkv_proj"].b[9, 0] += 1
        with pytest.raises(BridgeError, match=r"the adapter of model\.layers\.0\.self_attn\.qkv_proj"):
            shard.compare()


def test_adapters_that_fit_no_live_layer_are_refused():
    modules, _, version = made(dict.fromkeys(SIZES, 4))
    shapes = {name: list(tensor.shape) for name, tensor in version.items()}
    for name, shape, words in (
        (f"{PARENT}.q_proj.lora_A.weight", [4, K + 1], "does not fit"),
        ("model.layers.7.mlp.up_proj.lora_A.weight", [4, K], "no layer for model.layers.7"),
    ):
        with pytest.raises(BridgeError, match=words):
            Adapters(modules, shapes | {name: shape}, product=product, dtype=torch.float64, device="cpu")


def test_the_engine_of_a_gpu_copies_on_one_thread_of_its_host():
    threads = []
    cuda = types.SimpleNamespace(get_device_capability=lambda: (9, 0))
    Cuda(types.SimpleNamespace(cuda=cuda, set_num_threads=threads.append), messages.EngineOptions())
    assert threads == [1]
