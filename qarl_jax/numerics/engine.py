# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of engines' arithmetic; the learner computes by one of them, to get the engine's bits.

All engines have equal codes and scales of weights. They differ in the scaling of activations, the order of sums, and
the roundings in between. A record of `Numerics` describes these for one engine; no other code asks for the machine. To
add an engine, add a record with its differences from `PLAIN`. `python -m qarl_jax.numerics` prints all records as the
table in docs/concepts/engines.md.

`CPU` and `CUDA` are batch-invariant in engine and learner. vLLM's CPU engine computes with the bridge's operations
(`engine/cpu/` there), which are the same on every build. On CUDA the bridge replaces bf16 and int4 products, norms and
log-probs (`engine/cuda/` there); vLLM 0.25.1's other kernels are batch-invariant, and the learner mirrors them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from qarl_bridge.protocol.split_k import splits_of, splits_of_adapter

from qarl_jax.types import UserError

NormOrder = Literal["any", "float64", "torch"]
ENGINES = ("auto", "cpu", "cuda", "plain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """The arithmetic of one engine. It is hashable: pass it as a static argument. The defaults are those of `PLAIN`.

    Below, x is an activation, am the absmax of its row (a token), s_x = am / 127 its int8 scale, s_w the weight's scale
    and acc the int32 sum of products.

    Attributes:
      profile: the record's name, which a run's metadata keeps.
      float64: all sums and functions between two roundings are computed in float64 and rounded to float32 once, so
        that order, vector width and math library do not change them. Rescaling is included:
        f32(s_x * (s_w * acc)); otherwise it is two float32 products, in this order, and on a Hopper GPU fp8 products
        accumulate as its tensor cores do.
      amax_floor: lower bound of a row's absmax for its int8 scale; 0: none.
      split_k: sums of bfloat16 products are split along K, depending on the weight's shape (`of_layer`).
      fp8_divides: fp8 activation codes come from x / s_x; otherwise from x * (1 / s_x).
      block_attention: attention reads keys in blocks, the last one first, and rounds its weights relative to the
        maximum so far (FlashAttention-3).
      norm_order: the order in which RMSNorm sums squares: exactly in float64, in torch's order (8-float vectors on x86;
        its rsqrt is 1 / sqrt), or in the compiler's order.
      round_sum_before_norm: the residual sum is rounded before RMSNorm reads it; otherwise it reads the float32 sum.
      round_silu: SiLU(gate) is rounded before it is multiplied by up.
      divided_silu: SiLU is x / (1 + exp(-x)), an IEEE division; otherwise as the compiler divides.
      round_rope_table: cos and sin are rounded to the compute dtype; the rotation itself is float32, rounded once.
      rope_on_device: the engine computes the table of cos and sin on the device, by the device's power function.
      float64_experts: a router's logits, the weights of the chosen experts, and the weighted sum of their rounded
        outputs are computed in float64 and rounded to float32 once (part of `float64`); otherwise in float32.
      float64_log_softmax: log-probs are computed in float64 from the float32 logits, and rounded once (part of
        `float64`).
      splits: number of parts of K in which a layer's bfloat16 products are summed; `of_layer` sets it.
      shards: number of shards of a tensor-parallel engine. A shard has some rows of a weight, or, in the layers o and
        down, some columns. There a shard quantizes its inputs with its own scale and rounds its own sum. The layer
        adds the shards' sums in float32, by rank, and rounds once. `of_layer` sets 1 for layers split by rows. Of
        experts each shard rounds its weighted sum (`models/moe.py`).
      own_kernels: whether a Hopper GPU computes layers by `kernels/products.py` (`quant.kernels`); otherwise XLA does,
        with other last bits for fp8 and for `split_k`.
    """

    profile: str = "plain"
    float64: bool = False
    amax_floor: float = 0.0
    split_k: bool = False
    fp8_divides: bool = False
    block_attention: bool = False
    norm_order: NormOrder = "any"
    round_sum_before_norm: bool = False
    round_silu: bool = False
    divided_silu: bool = False
    round_rope_table: bool = False
    rope_on_device: bool = False
    float64_experts: bool = False
    float64_log_softmax: bool = False
    splits: int = 1
    shards: int = 1
    own_kernels: bool = True

    def of_layer(self, outputs: int, inputs: int, spread_inputs: bool = False) -> Numerics:
        """Returns the arithmetic of one layer, whose fused weight (q, k and v; gate and up) is [outputs, inputs].

        The shape of one shard's part decides the number of `splits`.

        spread_inputs: a tensor-parallel engine splits the layer's inputs over shards; otherwise its outputs.
        """
        own = self if spread_inputs or self.shards == 1 else dataclasses.replace(self, shards=1)
        if not self.split_k:
            return own
        shape = (outputs, inputs // self.shards) if spread_inputs else (outputs // self.shards, inputs)
        return dataclasses.replace(own, splits=splits_of(*shape))

    def of_adapter(self, inputs: int) -> Numerics:
        """Returns the arithmetic of the product of a layer's inputs, [.., inputs], with its adapter's A.

        Every shard of an engine computes it whole. B is multiplied in one part.
        """
        return dataclasses.replace(self, splits=splits_of_adapter(inputs) if self.split_k else 1, shards=1)


# No engine: the embedded sampler calls the learner's own functions. float32 inside, one rounding at the end.
PLAIN = Numerics()

# vLLM CPU with the bridge's own operations, on any build.
CPU = Numerics(
    profile="cpu",
    float64=True,
    amax_floor=1e-7,
    norm_order="float64",
    float64_experts=True,
    float64_log_softmax=True,
)
# vLLM CUDA: CUTLASS for 8-bit codes, FlashAttention-3, and the bridge's kernels for the rest.
CUDA = Numerics(
    profile="cuda",
    split_k=True,
    fp8_divides=True,
    block_attention=True,
    norm_order="float64",
    round_sum_before_norm=True,
    round_silu=True,
    divided_silu=True,
    round_rope_table=True,
    rope_on_device=True,
    float64_experts=True,
    float64_log_softmax=True,
)
RECORDS = {record.profile: record for record in (PLAIN, CPU, CUDA)}
PROFILES: tuple[str, ...] = tuple(RECORDS)


def of_profile(name: str) -> Numerics:
    """Returns the record called `name`, for example the name that a run has saved.

    Raises:
      UserError: there is no such record.
    """
    if name not in RECORDS:
        raise UserError(
            f"unknown numerics profile {name!r}: use one of {', '.join(PROFILES)} (cpu takes the place of cpu_amx, "
            "cpu_avx512_bf16 and cpu_avx2: set quant.engine=cpu)"
        )
    return RECORDS[name]


def table() -> str:
    """Makes a Markdown table of all records, with a row per field."""

    def cell(value: object) -> str:
        return {True: "yes", False: ""}[value] if isinstance(value, bool) else str(value)

    own = ("profile", "splits", "shards", "own_kernels")  # a layer's or a run's, not an engine's
    names = [f.name for f in dataclasses.fields(Numerics) if f.name not in own]
    rows = [[f"`{name}`", *(cell(getattr(record, name)) for record in RECORDS.values())] for name in names]
    lines = [["", *(f"`{profile}`" for profile in PROFILES)], ["---"] * (1 + len(PROFILES)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def resolve(engine: str) -> Numerics:
    """Returns the arithmetic of an engine. Call it once per run and save the result's name.

    Args:
      engine: "cpu" (vLLM CPU), "cuda" (vLLM CUDA), "plain" (no vLLM), or "auto" (vLLM on this host: cuda where JAX runs
        on a GPU, otherwise cpu). In a run, "auto" also depends on the sampler (`RunConfig.numerics`).

    Raises:
      UserError: the engine is unknown.
    """
    if engine == "auto":
        import jax  # the backend is asked for here only, so that naming an engine never initialises one

        engine = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if engine in RECORDS:
        return RECORDS[engine]
    raise UserError(f"unknown quant.engine {engine!r}: use one of {', '.join(ENGINES)}")
