# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention by the accelerators' own fused kernels: cuDNN on GPUs, splash attention on TPUs.

Both compute causal softmax attention without storing scores, and take packed rows without a mask of [T, T]: cuDNN by
the offsets of segments (its "ragged" or packed layout, Hopper and later), splash by segment ids, block by block.
Padding is treated as a segment, so that every position has a finite output and a finite gradient.

The public `jax.nn.dot_product_attention` lacks cuDNN's packed layout, so a private module of JAX is imported; jax is
pinned, and tests lower the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import round_to
from qarl_jax.runtime.mesh import BATCH_AXES, batch_shards, is_hopper
from qarl_jax.runtime.remat import ATTENTION_OUTPUT
from qarl_jax.types import UserError

WORKSPACE_BYTES = 2**31  # that the backward of cuDNN may take
_MOST_ELEMENTS = 2**31  # of the queries: JAX counts a run's first element in int32, and two runs are taken at once
_BLOCK = 512  # of queries and of keys in splash attention, where the row is a multiple of it


def runs(segment_ids: Int[Array, "B T"], most: int) -> tuple[Int[Array, "B M1"], Int[Array, "B M"]]:
    """Finds the starts and lengths of runs of equal segment ids; padding (0) is a run too.

    Args:
      segment_ids: int [B, T]. A row has at most `most` runs.
      most: number of runs, M, for which the results have room.

    Returns:
      int32 [B, M + 1], the starts, and int32 [B, M], the lengths: run by run from the left, then -1.

    Example: segment_ids [[1, 1, 2, 0]], most 4 -> starts [[0, 2, 3, -1, -1]], lengths [[2, 1, 1, -1]].
    """
    length = segment_ids.shape[1]
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    places = jnp.arange(length, dtype=jnp.int32)[None, :]
    begins = jnp.sort(jnp.where(segment_ids != before, places, jnp.int32(length)), axis=1)
    begins = jnp.pad(begins, ((0, 0), (0, max(0, most + 1 - length))), constant_values=length)[:, : most + 1]
    starts, ends = begins[:, :-1], begins[:, 1:]
    lengths = jnp.where(starts < length, ends - starts, -1)
    return jnp.where(begins < length, begins, -1), lengths


def segment_bounds(length: int, segment_ids: Int[Array, "B T"] | None) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
    """Finds the first slot of every position's run of equal segment ids, and the slot after its last, int32.

    Example: [[1, 1, 2, 0]] -> [[0, 0, 2, 3]], [[2, 2, 3, 4]].
    """
    slots = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is None:
        return jnp.zeros_like(slots), jnp.full_like(slots, length)
    edges: Bool[Array, "B T1"] = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.where(jnp.pad(edges, ((0, 0), (1, 0)), constant_values=True), slots, 0)
    ends = jnp.where(jnp.pad(edges, ((0, 0), (0, 1)), constant_values=True), slots + 1, length)
    return jax.lax.cummax(begins, axis=1), jax.lax.cummin(ends, axis=1, reverse=True)


def cudnn_packs() -> bool:
    """Tells whether cuDNN's packed layout runs on this host's GPUs (compute capability 9.0 and later)."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return bool(fused.check_compute_capability("9.0"))


def flash3_lacks(dtype: Any, head_dim: int) -> str | None:
    """Names what this host lacks for the kernel of `attention_flash3.py` ("a Hopper GPU"); None: nothing."""
    if jax.default_backend() != "gpu":
        return "a GPU"
    if not is_hopper():
        return "a Hopper GPU (compute capability 9.0)"
    if dtype != jnp.bfloat16:
        return "model.dtype=bfloat16"
    return "a head_dim of at most 128" if head_dim > 128 else None


def can_decode(attention: str, head_dim: int, numerics: Numerics) -> bool:
    """Tells whether `decode_attention` can compute a decode step here: one GPU, head_dim a power of two from 16 to 256,
    and no mirrored engine.

    Args:
      attention: `model.attention`; the kernel needs "auto".
    """
    mirrors = numerics.block_attention or numerics.float64
    mesh = jax.sharding.get_abstract_mesh()
    devices = jax.device_count() if mesh.empty else mesh.size
    shape_fits = 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return attention == "auto" and not mirrors and shape_fits and devices == 1 and jax.default_backend() == "gpu"


def cudnn_workspace(positions: int, heads: int, head_dim: int, runs: int) -> int:
    """Counts the bytes that cuDNN's backward of packed rows works in.

    A float32 dQ and two statistics, as long as the row, for each run that it is given room for, used or not (read off
    an H100, benchmarks/results/cudnn_workspace_h100.json).
    """
    return 4 * runs * positions * heads * (head_dim + 2)


def runs_at_once(positions: int, heads: int, head_dim: int, most: int) -> int:
    """Finds how many runs of `most` a row the backward of cuDNN is given at once: those within `WORKSPACE_BYTES`, and
    two at least.

    Beyond 2^32 elements of that workspace, cuDNN 9 leaves the dQ of runs unset, without an error
    (benchmarks/results/cudnn_long_rows_h200.json). JAX ignores where a single run begins.

    Args:
      positions: rows times their length, on one device. heads, head_dim: of the queries.
      most: runs that a row has at most.
    """
    return min(most, max(2, WORKSPACE_BYTES // max(1, cudnn_workspace(positions, heads, head_dim, 1))))


def cudnn_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    packed_runs: tuple[Int[Array, "B M1"], Int[Array, "B M"]],
) -> Float[Array, "B T N H"]:
    """Computes causal attention by cuDNN within runs (`runs`), bfloat16.

    Where the gradient of all runs would take more than `WORKSPACE_BYTES`, it takes a few runs at a time
    (`runs_at_once`), none of them empty, and repeats the forward.

    Raises:
      UserError: a device has more positions than JAX and cuDNN count without an error.
    """
    B, T, N, H = q.shape
    if T % 2:  # its backward takes even lengths alone; the position added is in no segment, and no other sees it
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
        return cudnn_attention(q, k, v, packed_runs)[:, :T]
    positions = -(-B // batch_shards(jax.sharding.get_abstract_mesh())) * T
    if cudnn_workspace(positions, N, H, 1) > 4 * _MOST_ELEMENTS:
        raise UserError(
            f"attention=cudnn counts {_MOST_ELEMENTS // (N * (H + 2))} positions of {N} heads of {H} at most, got"
            f" {positions}: set a smaller train.micro_batch_rows or train.row_len, or model.attention=xla."
        )
    most = packed_runs[1].shape[1]
    at_once = runs_at_once(positions, N, H, most)
    return _packed(q, k, v, packed_runs) if at_once == most else _in_groups(at_once, q, k, v, packed_runs)


def _packed(q: jax.Array, k: jax.Array, v: jax.Array, packed_runs: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Computes attention within runs by cuDNN; positions of no run are unset.

    A single run must begin at 0: JAX ignores its offset, and takes the layout of rows that are not packed.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    starts, lengths = packed_runs
    # JAX before 0.11 scales the key offsets by the number of query heads, which is right only where there are as many
    # key heads. Repeated, keys and values cost a copy of the queries' size each.
    shared = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, shared, axis=2) if shared > 1 else x for x in (k, v))
    return fused.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=q.shape[-1] ** -0.5,
        mask_type=fused.MaskType.CAUSAL,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_groups(
    at_once: int, q: jax.Array, k: jax.Array, v: jax.Array, packed_runs: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Computes `_packed`; its gradient takes `at_once` runs at a time."""
    return _packed(q, k, v, packed_runs)


def _in_groups_fwd(at_once: int, *args: Any) -> tuple[jax.Array, Any]:
    return _in_groups(at_once, *args), args


def _in_groups_bwd(at_once: int, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    q, k, v, packed_runs = saved
    most = packed_runs[1].shape[1]
    starts, lengths = (jnp.pad(x[:, :most], ((0, 0), (0, -most % at_once)), constant_values=-1) for x in packed_runs)
    slots = jnp.arange(q.shape[1], dtype=jnp.int32)[None, None]

    def add(group: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begins, sizes = (jax.lax.dynamic_slice_in_dim(x, group * at_once, at_once, axis=1) for x in (starts, lengths))
        here = ((slots >= begins[..., None]) & (slots < (begins + sizes)[..., None])).any(1)[..., None, None]
        own = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1), sizes
        found = jax.vjp(lambda q, k, v: _packed(q, k, v, own), q, k, v)[1](jnp.where(here, dy, 0))
        return tuple(jnp.where(here, x, total) for x, total in zip(found, sums, strict=True))  # elsewhere it is unset

    groups = -(-jnp.max(jnp.sum(lengths >= 0, axis=1)) // at_once)
    return *jax.lax.fori_loop(0, groups, add, tuple(map(jnp.zeros_like, (q, k, v)))), None


_in_groups.defvjp(_in_groups_fwd, _in_groups_bwd)


@functools.lru_cache(maxsize=16)
def _splash_kernel(length: int, shared: int, interpret: bool) -> Any:
    """The kernel for `shared` query heads over one key head, causal; its masks are made once per shape."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = math.gcd(length, _BLOCK)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((length, length)) for _ in range(shared)])
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            mask, block_sizes=sizes, residual_checkpoint_name=ATTENTION_OUTPUT, interpret=interpret
        )


def splash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes causal attention by Pallas' splash kernel. interpret: run on any backend in Pallas' interpreter, slowly.

    Raises:
      UserError: T is not a multiple of 128.
    """
    length = q.shape[1]
    if length % 128:
        raise UserError(
            f"attention=splash needs rows of a multiple of 128 tokens, got {length}: set train.row_len, or"
            " model.attention=xla."
        )
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        B, T, N, H = q.shape
        K = k.shape[2]
        kernel = _splash_kernel(T, N // K, interpret)
        # The kernel does not scale; in float32 and rounded once, as its products take the compute dtype.
        q = round_to(q.astype(jnp.float32) * jnp.float32(H**-0.5), q.dtype)
        q_BKGTH = jnp.transpose(q.reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
        k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k, v))

        def row(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
            segments = None if ids is None else splash.SegmentIds(ids, ids)
            return jax.vmap(lambda q, k, v: kernel(q, k, v, segments))(q, k, v)

        out = jax.vmap(row, in_axes=(0, 0, 0, None if ids is None else 0))(q_BKGTH, k_BKTH, v_BKTH, ids)
        return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(B, T, N, H).astype(q.dtype)

    return split_by_hand(local, q, k, v, segment_ids)


def split_by_hand(
    local: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Calls local(q, k, v, segment_ids) on each device's rows and heads, because XLA cannot partition a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(q, k, v, segment_ids)
    heads = "tensor" if k.shape[2] % mesh.shape["tensor"] == 0 else None
    spec = jax.sharding.PartitionSpec(BATCH_AXES, None, heads, None)
    if segment_ids is None:
        return jax.shard_map(
            lambda q, k, v: local(q, k, v, None), in_specs=(spec,) * 3, out_specs=spec, check_vma=False
        )(q, k, v)
    ids = jax.sharding.PartitionSpec(BATCH_AXES, None)
    return jax.shard_map(local, in_specs=(spec, spec, spec, ids), out_specs=spec, check_vma=False)(q, k, v, segment_ids)
