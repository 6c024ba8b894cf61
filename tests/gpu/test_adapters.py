# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of live layers on a GPU: a version is prepared by another thread while the engine's stream is busy."""

import contextlib
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qarl_bridge.client import sender  # noqa: E402
from qarl_bridge.engine.adapters import Adapters  # noqa: E402
from qarl_bridge.protocol import messages  # noqa: E402
from qarl_bridge.protocol.errors import BridgeError  # noqa: E402

pytestmark = pytest.mark.gpu
K, N, RANK, LAYERS = 1024, 1536, 32, 24


class Layer(torch.nn.Module):
    """As vLLM's."""

    quant_method, input_size, output_size, output_partition_sizes = None, K, N, [N - 512, 256, 256]

    def forward(self, x):
        return torch.zeros(len(x), N, dtype=x.dtype, device=x.device), None


def product(x, weight, splits, added):
    d = (x.double() @ weight.double().t()).bfloat16()
    return d if added is None else added + d


def made():
    """Live layers, their adapters, and three versions: manifests and torch tensors on the host."""
    modules = {f"model.layers.{number}.self_attn.qkv_proj": Layer() for number in range(LAYERS)}
    sizes = dict(zip(("q_proj", "k_proj", "v_proj"), Layer.output_partition_sizes, strict=True))
    shapes = {
        f"model.layers.{number}.self_attn.{name}.lora_{end}.weight": shape
        for number in range(LAYERS)
        for name, size in sizes.items()
        for end, shape in (("A", (RANK, K)), ("B", (size, RANK)))
    }
    held = Adapters(modules, shapes, product=product, dtype=torch.bfloat16, device="cuda")
    versions = []
    for step in range(3):
        rng = np.random.default_rng(step)
        arrays = {n: rng.standard_normal(s).astype(messages.DTYPES["bfloat16"]) for n, s in shapes.items()}
        identity = messages.Version(run_id="run", incarnation=1, step=step)
        staged = sender.stage(arrays.items(), version=identity, model=bytes(16), scheme=bytes(16))
        with contextlib.closing(staged):
            tensors = {n: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for n, a in arrays.items()}
            versions.append((staged.manifest, tensors))
    return modules, held, versions


def outputs(modules, x):
    return torch.stack([layer(x)[0] for layer in modules.values()])


def test_a_version_prepared_beside_a_busy_stream_is_what_a_load_makes_live():
    modules, held, versions = made()
    x = torch.randn(16, K, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    wanted = []
    for _, tensors in versions:
        list(held.load([tensors]))
        wanted.append(outputs(modules, x))
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    live = len(versions) - 1
    for number in [0, 1, 2] * 10:
        manifest, tensors = versions[number]
        thread = threading.Thread(target=held.prepare, args=(manifest, [tensors]))
        thread.start()
        while thread.is_alive():
            busy = torch.nn.functional.normalize(busy @ busy)
            torch.cuda.current_stream().synchronize()  # else a thousand of these wait in the stream
        thread.join()
        assert torch.equal(outputs(modules, x), wanted[live])
        assert held.prepared(manifest.digest) == {}
        held.switch()
        assert held.compare()[0] == LAYERS
        assert torch.equal(outputs(modules, x), wanted[number])
        live = number


def test_a_captured_graph_computes_the_version_that_is_live():
    modules, held, versions = made()
    x = torch.randn(16, K, device="cuda").bfloat16()
    outputs(modules, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs(modules, x)
    for manifest, tensors in versions:
        held.prepare(manifest, [tensors])
        held.switch()
        graph.replay()
        assert torch.equal(found, outputs(modules, x))
        assert held.compare()[0] == LAYERS
    assert found.abs().max() > 0


def test_read_back_finds_one_bit():
    _, held, versions = made()
    manifest, tensors = versions[0]
    held.prepare(manifest, [tensors])
    held.switch()
    b = held._of["model.layers.7.self_attn.qkv_proj"].b
    b[5, 3] += 1
    with pytest.raises(BridgeError, match=r"the adapter of model\.layers\.7\.self_attn\.qkv_proj"):
        held.compare()
    torn = {name: tensor.clone() for name, tensor in tensors.items()}
    torn["model.layers.23.self_attn.v_proj.lora_B.weight"].view(torch.int16)[255, 31] ^= 1
    with pytest.raises(BridgeError, match=r"v_proj\.lora_B\.weight is torn"):
        held.prepare(manifest, [torn])
    assert held.prepared(manifest.digest) is None
