# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel in FlashAttention-3's order: under Pallas' interpreter against the formula in float64, against the XLA
form of the same blocks, and its row sums to the last bit; on a Hopper GPU against recorded outputs of vLLM's kernel."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.kernels import attention_flash3
from qarl_jax.kernels.attention_flash3 import flash3_attention
from qarl_jax.kernels.attention_vendor import runs, segment_bounds
from qarl_jax.models import ModelConfig, merge, random_model, split
from qarl_jax.models import attention as attention_module
from qarl_jax.models.attention import _flash3, attention, choose
from qarl_jax.numerics.attention import flash_block
from qarl_jax.runtime import mesh
from tests.reference.cases import each_once
from tests.reference.hf_models import relative
from tests.reference.one_layer import on_hopper

B, T, N, K = 2, 300, 4, 2
# Three segments, one of them of a single token and one of several blocks, padding behind; and a row that is full.
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [37, 1, 202, 60]), np.ones(T, int)]).astype(np.int32)
FILE = pathlib.Path(__file__).parents[1] / "reference" / "cuda_kernels.npz"


@functools.cache
def operands(head_dim):
    """q, k, v and a cotangent of the output, bfloat16."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((B, T, n, head_dim)), jnp.bfloat16) for n in (N, K, K, N))


def formula(q, k, v, segment_ids):
    """softmax(q k / sqrt(H)) v in float64, causal within segments."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    seen = np.tril(np.ones((T, T), bool))[None] & (segment_ids[:, :, None] == segment_ids[:, None])
    s = np.where(seen[:, None], np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)


def interpreted(q, k, v, segment_ids):
    run = functools.partial(flash3_attention, block=flash_block(q.shape[-1]), interpret=True)
    return jax.jit(run)(q, k, v, None if segment_ids is None else jnp.asarray(segment_ids))


def share_equal(mine, theirs):
    """Share of elements that are equal to the last bit."""
    mine, theirs = np.asarray(mine), np.asarray(theirs)
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype == ml_dtypes.bfloat16
    return np.mean(mine.view(np.int16) == theirs.view(np.int16))


# ---- under the interpreter -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_a_run")
@pytest.mark.parametrize(("head_dim", "packed"), each_once([32, 64, 128], [True, False]))
def test_equals_the_formula_in_float64_and_the_xla_form_of_the_same_blocks(head_dim, packed):
    q, k, v, _ = operands(head_dim)
    segment_ids = SEGMENTS if packed else None
    mine = interpreted(q, k, v, segment_ids)
    want = formula(q, k, v, SEGMENTS if packed else np.ones((B, T)))
    # Output and weights are rounded to bf16, 2^-9 each at most.
    assert np.abs(np.asarray(mine, np.float64) - want).max() <= 2**-8 * np.abs(want).max()
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    run = jax.jit(attention, static_argnames=("implementation", "numerics"))
    form = functools.partial(run, q, k, v, segment_ids=ids, implementation="xla")
    assert share_equal(mine, form(numerics=quant.resolve("cuda"))) >= 0.9995
    assert share_equal(mine, form(numerics=quant.resolve("plain"))) < 0.99  # which is not in blocks


@pytest.mark.slow
def test_the_size_of_a_tile_changes_nothing(monkeypatch):
    q, k, v, _ = operands(64)
    mine = interpreted(q, k, v, SEGMENTS)
    monkeypatch.setattr(attention_flash3, "QUERIES", 64)
    assert share_equal(mine, interpreted(q, k, v, SEGMENTS)) == 1


@pytest.mark.slow
def test_its_gradient_is_that_of_plain_attention():
    q, k, v, g = operands(64)
    ids = jnp.asarray(SEGMENTS)

    def gradients(attend):
        return jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1](g))(q, k, v)

    mine = gradients(lambda q, k, v: _flash3("xla", True, q, k, v, ids, runs(ids, 4)))
    plain = gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation="xla"))
    for x, y in zip(mine, plain, strict=True):
        assert np.abs(np.asarray(y, np.float32)).max() > 0
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_rows_and_heads_split_over_a_mesh_give_the_same():
    q, k, v, _ = operands(64)
    ids = jnp.asarray(SEGMENTS)
    with jax.set_mesh(mesh.make_mesh(fsdp=2, tensor=2)):
        split = jax.jit(lambda q, k, v, ids: _flash3("xla", True, q, k, v, ids, None))(q, k, v, ids)
    assert share_equal(split, interpreted(q, k, v, SEGMENTS)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["attention", pytest.param("none", marks=pytest.mark.nightly)])
def test_a_model_of_scanned_layers_takes_it_with_segments_and_recomputation(remat, monkeypatch):
    made = []

    def interpreted(backward, interpret, *operands):
        made.append(backward)
        return _flash3(backward, True, *operands)

    monkeypatch.setattr(attention_module, "flash3_lacks", lambda dtype, head_dim: None)
    monkeypatch.setattr(attention_module, "_flash3", interpreted)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 67, (B, T)))

    def value_and_gradient(implementation):
        config = ModelConfig(
            architecture="Qwen3ForCausalLM",
            vocab_size=67,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=N,
            num_kv_heads=K,
            head_dim=32,
            qk_norm=True,
            initializer_range=0.2,
            compute_dtype=jnp.bfloat16,
            attention=implementation,
            remat=remat,
        )
        graphdef, params, qweights = split(random_model(config, 0))

        def loss(params):
            out = merge(graphdef, params, qweights)(tokens, None, jnp.asarray(SEGMENTS))
            return jax.nn.log_softmax(out)[..., 0].mean()

        return jax.jit(jax.value_and_grad(loss))(params)

    (mine, gradient), (plain, wanted) = value_and_gradient("flash3"), value_and_gradient("xla")
    assert set(made) == {"xla"}
    np.testing.assert_allclose(mine, plain, rtol=2**-8)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert relative(x, y) < 2**-5  # bf16 activations and cotangents of two layers, rounded some twenty times each


# ---- parts -----------------------------------------------------------------------------------------------------------


def in_order(weights, scales):
    """Row sums of blocks of weights [M, n] float32 in FlashAttention-3's order, written out: four sums to a row."""
    sums = np.zeros((weights[0].shape[0], 4), np.float32)
    for p, scale in zip(weights, scales, strict=True):
        sums = sums * scale[:, None]
        for j in range(p.shape[1] // 8):
            for i in range(2):
                sums = sums + p[:, 8 * j + i : 8 * j + 8 : 2]
    return (sums[:, 0] + sums[:, 2]) + (sums[:, 1] + sums[:, 3])


def test_the_row_sum_is_that_of_four_threads_to_the_last_bit():
    """Operation by operation, so that XLA cannot fuse the rescaling with the addition behind it."""
    rng = np.random.default_rng(0)
    weights = [rng.random((64, 128)).astype(np.float32) ** 4 for _ in range(3)]
    scales = [rng.random(64).astype(np.float32) for _ in range(3)]
    sums = jnp.zeros((64, 4, 1))
    for p, scale in zip(weights, scales, strict=True):
        sums = attention_flash3._add_block(
            sums, jnp.asarray(scale), jnp.asarray(p), attention_flash3._Instructions(interpret=True)
        )
    wanted = in_order(weights, scales)
    np.testing.assert_array_equal(attention_flash3._meet(sums), wanted)
    one_sum = np.zeros(64, np.float32)
    for p, scale in zip(weights, scales, strict=True):
        one_sum = one_sum * scale + p.sum(axis=1)
    assert np.mean(one_sum == wanted) < 0.9  # the order shows


def test_bounds_of_segments():
    begins, ends = segment_bounds(7, jnp.array([[1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]]))
    np.testing.assert_array_equal(begins, [[0, 0, 2, 2, 2, 2, 6], [0, 0, 0, 0, 0, 5, 5]])
    np.testing.assert_array_equal(ends, [[2, 2, 6, 6, 6, 6, 7], [5, 5, 5, 5, 5, 7, 7]])
    np.testing.assert_array_equal(segment_bounds(3, None), [[[0, 0, 0]], [[3, 3, 3]]])


def test_where_it_cannot_be_had_the_xla_form_runs_and_the_warning_says_why(monkeypatch):
    pick = functools.partial(choose, "flash3", length=64)
    with pytest.warns(UserWarning, match="attention=flash3 needs a GPU: attention=xla runs instead"):
        assert pick(jnp.dtype("bfloat16"), 128) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = dataclasses.make_dataclass("Device", ["compute_capability"])
    monkeypatch.setattr(jax, "local_devices", lambda: [device("8.0")])
    with pytest.warns(UserWarning, match=r"needs a Hopper GPU \(compute capability 9.0\)"):
        assert pick(jnp.dtype("bfloat16"), 128) == "xla"
    monkeypatch.setattr(jax, "local_devices", lambda: [device("9.0")])
    with pytest.warns(UserWarning, match=r"needs model\.dtype=bfloat16"):
        assert pick(jnp.dtype("float32"), 128) == "xla"
    with pytest.warns(UserWarning, match="needs a head_dim of at most 128"):
        assert pick(jnp.dtype("bfloat16"), 256) == "xla"
    assert pick(jnp.dtype("bfloat16"), 128) == "flash3"


@pytest.mark.slow
def test_one_kernel_is_lowered_for_a_gpu_and_cudnns_backward(monkeypatch):
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)  # of a GPU that is not here
    monkeypatch.setattr(fused, "check_compute_capability", lambda version: True)
    q, k = (jax.ShapeDtypeStruct((2, 1024, n, 128), jnp.bfloat16) for n in (N, K))

    def loss(q, k, v, ids):
        return _flash3("cudnn", False, q, k, v, ids, runs(ids, 5)).astype(jnp.float32).sum()

    trace = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, k, k, jax.ShapeDtypeStruct((2, 1024), jnp.int32))
    try:
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # JAX 0.11 asks the device for its shared memory
        if "No supported GPU devices found" not in str(error):
            raise
        pytest.skip("this JAX lowers Pallas for a GPU on a GPU only")
    assert len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text)) == 1
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert not re.search(r"tensor<[\dx]*1024x1024x", text)


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@functools.cache
def recorded(name):
    """(q, k, v, outputs) of vLLM's FlashAttention-3 on one H200, arrays [T, heads, H]; the outputs are those of the
    last positions, and the queries before them zeros."""
    keys = "flash_128_300" if name == "flash_prompt" else name
    with np.load(FILE) as file:
        q, k, v, o = (
            file[f"{at}_{part}"].view(ml_dtypes.bfloat16)
            for at, part in zip((name, keys, keys, name), "qkvo", strict=True)
        )
    return np.concatenate([np.zeros((len(k) - len(q), *q.shape[1:]), q.dtype), q]), k, v, o


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", ["flash_prompt", "flash_128_300", "flash_64_300", "flash_64_512"])
def test_every_recorded_output_of_flash_attention_3_is_equal_to_the_last_bit(name, monkeypatch):
    """All of a prompt's 49,152 outputs, and of the decoded tokens'."""
    # Recorded before the bridge kept heads of up to 64 at blocks of 128: the kernel took 192 for a single query.
    monkeypatch.setattr(attention_module, "flash_block", {128: 128, 64: 192}.__getitem__)
    q, k, v, theirs = recorded(name)
    run = jax.jit(lambda q, k, v: attention(q[None], k[None], v[None], implementation="flash3")[0])
    assert share_equal(np.asarray(run(q, k, v))[-len(theirs) :], theirs) == 1


@pytest.mark.gpu
@on_hopper
def test_so_it_is_in_a_packed_row():
    q, k, v, theirs = recorded("flash_prompt")
    q, k, v = (np.concatenate([x[:37], x, x[:30]])[None] for x in (q, k, v))
    ids = jnp.asarray(np.repeat([1, 2, 0], [37, 300, 30])[None].astype(np.int32))
    run = jax.jit(lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation="flash3")[0])
    assert share_equal(np.asarray(run(q, k, v))[337 - len(theirs) : 337], theirs) == 1


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_on_the_gpu_it_equals_float64_and_its_gradient_cudnns(head_dim, monkeypatch):
    monkeypatch.setattr("qarl_jax.kernels.attention_vendor.runs_at_once", lambda *_: 2)  # the rows have three runs
    q, k, v, g = operands(head_dim)
    ids = jnp.asarray(SEGMENTS)

    def value_and_gradients(implementation):
        run = functools.partial(attention, segment_ids=ids, packed_runs=runs(ids, 17), implementation=implementation)
        out, vjp = jax.vjp(run, q, k, v)
        return out, *vjp(g)

    mine, cudnn = (jax.jit(functools.partial(value_and_gradients, x))() for x in ("flash3", "cudnn"))
    want = formula(q, k, v, SEGMENTS)
    assert np.abs(np.asarray(mine[0], np.float64) - want).max() <= 2**-8 * np.abs(want).max()
    for x, y in zip(mine[1:], cudnn[1:], strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() <= 2**-7 * np.abs(y).max()  # cuDNN's sums of dq may have any order
