# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Which engine's arithmetic the learner mirrors.

The integer codes and scales of the weights are the same everywhere. What differs between vLLM's engines is how
activations are scaled, in which order the integer accumulator is rescaled, and where elementwise layers round. A record
of `Numerics` says all of it for one engine, and nothing else in the project asks what machine this is. A new engine is
one record, which lists where the engine departs from `PLAIN`; `python -m qarl_jax.numerics` prints all of them as the
table in docs/numerics.md.

vLLM's CPU wheel holds three builds and loads one by the CPU's flags: `_C` (AVX-512 with bf16; AMX is a switch inside
it), `_C_AVX512` and `_C_AVX2`. The last two have no rounding conversion to bf16 and share a record.

Elementwise layers are mirrored in eager mode (the mode the bridge pins). Sources: vLLM 0.32 CPU (run on an AMD Zen 3
and a Zen 5; AMX as in its sources) and vLLM 0.25.1 CUDA (csrc/quantization, run on one H200).
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from qarl_bridge.protocol import contract

from qarl_jax.types import UserError

NormOrder = Literal["any", "torch", "float64"]
ENGINES = ("auto", "cpu", "cuda", "plain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which programs of `kernels/products.py` compute a layer on a GPU that has them; "xla" is XLA's own everywhere.

    Attributes:
      w8a8: the product, its rescale, bias and rounding. "triton": `product_triton.product`. "hopper":
        `product_hopper.product` where a layer has no bias and is made of whole tiles, otherwise as "triton". No choice
        changes a bit.
      w8a8_rows: the activations' codes and scales. "xla": fused with what comes before; behind an RMSNorm XLA computes
        the norm once for the maxima, once more for the codes and once more for its bfloat16 result, if that is used.
        "triton": `product_triton.quantize_rows` reads the stored result once, for all layers that share it.
      fp8: "hopper": `product_hopper.product`, which accumulates as vLLM's kernel does. "xla" has other last bits.
      bf16: "hopper": `product_hopper.float_product`, where sums are made in the contract's parts. "xla" leaves a part's
        order to a library, which cuts it again where rows are few.
    """

    w8a8: Literal["xla", "triton", "hopper"] = "hopper"
    w8a8_rows: Literal["xla", "triton"] = "xla"
    fp8: Literal["xla", "hopper"] = "hopper"
    bf16: Literal["xla", "hopper"] = "hopper"


# By the name of `quant.kernels`.
KERNELS = {"auto": Kernels(), "xla": Kernels(w8a8="xla", fp8="xla", bf16="xla")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """The arithmetic of one engine. Hashable: pass it as a static argument. The defaults are those of `PLAIN`.

    In what follows x is an activation, am the absmax of its row (a token), s_x = am / 127 its int8 scale, s_w the
    weight's scale and acc the int32 sum of products.

    Attributes:
      profile: the record's name, which a run records.
      amax_floor: lower bound put under a row's absmax before its int8 scale is taken; 0: none.
      code_from_rounded_scale: int8 activation codes are RNE(x * (1 / s_x)), with the rounded s_x; otherwise
        RNE(x * (127 / am)).
      rescale_order: whether the int32 accumulator meets s_x or s_w first: (acc * s_x) * s_w, or s_x * (s_w * acc).
      bias_fused: w8a8's last multiplication and the bias are one operation; otherwise two, each rounded (oneDNN on
        AVX2).
      bias_after_rounding: w4a8_fp8 adds the bias to the already rounded output (two roundings).
      int8_experts_keep_activations: w8a8's experts multiply unquantized activations with their int8 codes: vLLM 0.25
        on CUDA takes dynamic activation scales, which a checkpoint does not hold, for none
        (`make_int8_moe_quant_config`).
      tile_sums: bf16 products (unquantized and w4a16 layers, head, attention) are summed as AMX's tiles sum them;
        otherwise in the compiler's order.
      contract_parts: sums of bfloat16 products are made in the contract's parts of K (`of_layer`).
      fp8_divides: fp8 activation codes come from x / s_x; otherwise from x * (1 / s_x).
      fp8_on_tensor_cores: fp8 products accumulate as Hopper's tensor cores do, where there are such.
      w4a8_is_fp8: int4 layers with 8-bit activations multiply in e4m3, on a grid of their own (`w4a8_fp8`).
      block_attention: attention meets the keys in blocks, the last one first, and rounds its weights against the
        maximum so far (FlashAttention-3).
      vector_attention: attention is vLLM's `vec` kernel: float32 throughout, the queries scaled first, exp(s - max)
        not rounded.
      round_probabilities: attention weights exp(s - max) are rounded, unnormalised, before they multiply V; the
        divisor is not.
      polynomial_exp: attention's exp is a polynomial of degree 5, up to 3e-7 off (AVX-512); otherwise the C library's.
      truncates: vLLM's own C++ ops (rope, attention) store bf16 by dropping the low bits: the builds for CPUs without
        bf16 instructions have no rounding conversion. Measured with both of them.
      norm_order: the order in which RMSNorm's mean of squares is summed: torch's (8-float vectors on x86; its rsqrt is
        1 / sqrt), none that matters, in float64, or the compiler's.
      round_before_norm_weight: RMSNorm is bf(bf(x * r) * w) (vLLM CPU eager); otherwise bf(x * r * w).
      round_sum_before_norm: the residual sum is rounded before RMSNorm reads it; otherwise it reads the float32 sum.
      round_silu: SiLU(gate) is rounded before it is multiplied by up.
      divided_silu: SiLU is x / (1 + exp(-x)), an IEEE division; otherwise as the compiler divides.
      round_rope_table: cos and sin are rounded to the compute dtype; the rotation itself is float32, rounded once.
      rope_on_device: the engine makes that table on the device, by its power function.
      round_routing: the weights of a token's experts are rounded to the compute dtype (vLLM CPU takes their softmax in
        bf16).
      round_experts: an expert's inner values round as the engine's do; otherwise float32 inside.
      float_experts: experts that are not quantized round their hidden state and the sum of their outputs alone.
      weighted_experts: each expert's output is multiplied by the token's weight for it before it is rounded, and the
        rounded ones are summed (vLLM's Triton experts); otherwise rounded outputs are weighted and summed in float32.
      round_logits: logits are rounded to the compute dtype (the engine's lm_head is not float32).
      float64_log_softmax: log-probs are computed in float64 from float32 logits, and rounded once.
      parts: of K, in which a layer's sum of bfloat16 products is made. A layer's own.
      kernels: what a GPU computes layers with, which is a run's choice (`quant.kernels`).
    """

    profile: str = "plain"
    amax_floor: float = 0.0
    code_from_rounded_scale: bool = False
    rescale_order: Literal["x_then_w", "w_then_x"] = "w_then_x"
    bias_fused: bool = True
    bias_after_rounding: bool = False
    int8_experts_keep_activations: bool = False
    tile_sums: bool = False
    contract_parts: bool = False
    fp8_divides: bool = False
    fp8_on_tensor_cores: bool = True
    w4a8_is_fp8: bool = False
    block_attention: bool = False
    vector_attention: bool = False
    round_probabilities: bool = False
    polynomial_exp: bool = False
    truncates: bool = False
    norm_order: NormOrder = "any"
    round_before_norm_weight: bool = False
    round_sum_before_norm: bool = False
    round_silu: bool = False
    divided_silu: bool = False
    round_rope_table: bool = False
    rope_on_device: bool = False
    round_routing: bool = False
    round_experts: bool = False
    float_experts: bool = False
    weighted_experts: bool = False
    round_logits: bool = False
    float64_log_softmax: bool = False
    parts: int = 1
    kernels: Kernels = Kernels()

    def of_layer(self, outputs: int, inputs: int) -> Numerics:
        """The arithmetic of one layer, [outputs, inputs] as the engine fuses it (q, k and v; gate and up)."""
        if not self.contract_parts:
            return self
        return dataclasses.replace(self, parts=contract.parts_of(outputs, inputs))


# No engine: the embedded sampler calls the learner's own functions. float32 inside, one rounding at the end.
PLAIN = Numerics()

_VLLM_CPU = Numerics(
    fp8_on_tensor_cores=False,
    norm_order="torch",
    round_before_norm_weight=True,
    round_silu=True,
    round_rope_table=True,
    round_routing=True,
    round_experts=True,
    float_experts=True,
    round_logits=True,
)
# vLLM CPU with AMX (sgl's kernels).
CPU_AMX = dataclasses.replace(
    _VLLM_CPU,
    profile="cpu_amx",
    amax_floor=1e-7,
    rescale_order="x_then_w",
    tile_sums=True,
    round_probabilities=True,
    polynomial_exp=True,
)
# vLLM CPU, AVX-512 with bf16 instructions.
CPU_AVX512_BF16 = dataclasses.replace(
    _VLLM_CPU, profile="cpu_avx512_bf16", code_from_rounded_scale=True, vector_attention=True, polynomial_exp=True
)
# vLLM CPU on less than that.
CPU_AVX2 = dataclasses.replace(
    _VLLM_CPU,
    profile="cpu_avx2",
    code_from_rounded_scale=True,
    bias_fused=False,
    vector_attention=True,
    truncates=True,
)
# vLLM CUDA: CUTLASS for 8-bit codes, FlashAttention-3, and the bridge's kernels for the rest (`contract`).
CUDA = Numerics(
    profile="cuda",
    bias_after_rounding=True,
    int8_experts_keep_activations=True,
    contract_parts=True,
    fp8_divides=True,
    w4a8_is_fp8=True,
    block_attention=True,
    round_probabilities=True,
    norm_order="float64",
    round_sum_before_norm=True,
    round_silu=True,
    divided_silu=True,
    round_rope_table=True,
    rope_on_device=True,
    round_experts=True,
    weighted_experts=True,
    float64_log_softmax=True,
)
RECORDS = {record.profile: record for record in (PLAIN, CPU_AMX, CPU_AVX512_BF16, CPU_AVX2, CUDA)}
PROFILES: tuple[str, ...] = tuple(RECORDS)


def of_profile(name: str) -> Numerics:
    """The record of that name, as a run wrote it down.

    Raises:
      UserError: no such record.
    """
    if name not in RECORDS:
        raise UserError(f"unknown numerics profile {name!r}: use one of {', '.join(PROFILES)}")
    return RECORDS[name]


def table() -> str:
    """All records as a Markdown table, one field a row."""

    def cell(value: object) -> str:
        return {True: "yes", False: ""}[value] if isinstance(value, bool) else str(value)

    names = [f.name for f in dataclasses.fields(Numerics) if f.name not in ("profile", "parts", "kernels")]
    rows = [[f"`{name}`", *(cell(getattr(record, name)) for record in RECORDS.values())] for name in names]
    lines = [["", *(f"`{profile}`" for profile in PROFILES)], ["---"] * (1 + len(PROFILES)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cpu_has_amx() -> bool:
    """Whether this host's CPU has int8 AMX tiles, which is what vLLM's CPU build selects its kernels by."""
    return _cpu_has("amx_int8")


def cpu_has_avx512_bf16() -> bool:
    """Whether this host's CPU converts to bf16 with AVX-512, without which vLLM loads one of its truncating builds."""
    return _cpu_has("avx512_bf16")


def _cpu_has(flag: str) -> bool:
    try:
        return flag in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def resolve(engine: str) -> Numerics:
    """The profile of an engine on this host. Call it once per run and record the result.

    Args:
      engine: "cpu" (vLLM CPU on this host's CPU), "cuda" (vLLM CUDA), "plain" (no vLLM), a profile, or "auto" (vLLM on
        this host: cuda where JAX runs on a GPU, otherwise cpu). What auto is to a run depends on its sampler, too
        (`RunConfig.numerics`).

    Raises:
      UserError: an unknown engine.
    """
    if engine in RECORDS:
        return RECORDS[engine]
    if engine == "auto":
        import jax  # the backend is asked for here only, so that naming an engine never initialises one

        engine = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if engine == "cuda":
        return CUDA
    if engine == "cpu":
        return CPU_AMX if cpu_has_amx() else CPU_AVX512_BF16 if cpu_has_avx512_bf16() else CPU_AVX2
    raise UserError(
        f"unknown quant.engine {engine!r}: use one of {', '.join(ENGINES)}, or a profile: {', '.join(PROFILES)}"
    )
