# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Which engine's arithmetic the learner mirrors.

The integer codes and scales of the weights are the same everywhere. What differs between vLLM's engines is how
activations are scaled, in which order the integer accumulator is rescaled, and where elementwise layers round. A
profile names one combination; nothing else in the project asks what machine this is.

    profile          engine                        activation code   rescale             bias
    plain            none: embedded sampler        x * (127 / am)    s_x * (s_w * acc)   float32, then round
    cpu_amx          vLLM CPU, AMX (sgl)           x * (127 / am)    (acc * s_x) * s_w   float32, then round
    cpu_avx512_bf16  vLLM CPU, AVX-512 with bf16   x * (1 / s_x)     (acc * s_w) * s_x   float32, then round
    cpu_avx2         vLLM CPU, less than that      x * (1 / s_x)     (acc * s_w) * s_x   float32, then round
    cuda             vLLM CUDA (CUTLASS, Machete)  x * (127 / am)    s_x * (s_w * acc)   w4a16: after rounding

(am = max |x| of a token, s_x = am / 127, the int8 activation scale; cpu_amx puts 1e-7 under am.)

vLLM's CPU wheel holds three builds and loads one by the CPU's flags: `_C` (AVX-512 with bf16; AMX is a switch inside
it), `_C_AVX512` and `_C_AVX2`. The last two have no rounding conversion to bf16 and share a profile.

Elementwise layers, in eager mode (the mode the bridge pins): see the fields below. Sources: vLLM 0.32 CPU (run on an
AMD Zen 3 and a Zen 5; AMX as in its sources) and vLLM 0.25.1 CUDA (csrc/quantization, run on one H200).
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from qarl_jax.numerics import machete
from qarl_jax.types import UserError

NormOrder = Literal["any", "torch", "cuda"]
PROFILES: tuple[str, ...] = ("plain", "cpu_amx", "cpu_avx512_bf16", "cpu_avx2", "cuda")
ENGINES = ("auto", "cpu", "cuda", "plain")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The arithmetic of one engine. Hashable: pass it as a static argument.

    Attributes:
      profile: one of PROFILES.
      parts: of K, in which a w4a16 layer's sum is made (`of_layer`). A layer's own; a run records the profile.
    """

    profile: str = "plain"
    parts: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise UserError(f"unknown numerics profile {self.profile!r}: use one of {', '.join(PROFILES)}")

    # ---- quantized linear layers ----

    @property
    def amax_floor(self) -> float:
        """Lower bound put under a row's absmax before its int8 scale is taken; 0: none."""
        return 1e-7 if self.profile == "cpu_amx" else 0.0

    @property
    def code_from_rounded_scale(self) -> bool:
        """int8 activation codes are RNE(x * (1 / s_x)), with the rounded s_x; otherwise RNE(x * (127 / absmax))."""
        return self.profile in ("cpu_avx512_bf16", "cpu_avx2")

    @property
    def rescale_order(self) -> Literal["x_then_w", "w_then_x"]:
        """Whether the int32 accumulator meets the activation scale or the weight scale first."""
        return "x_then_w" if self.profile == "cpu_amx" else "w_then_x"

    @property
    def bias_fused(self) -> bool:
        """w8a8's last multiplication and the bias are one operation; otherwise two, each rounded (oneDNN on AVX2)."""
        return self.profile != "cpu_avx2"

    @property
    def bias_after_rounding(self) -> bool:
        """w4a16 adds the bias to the already rounded output (two roundings)."""
        return self.profile == "cuda"

    @property
    def int8_experts_keep_activations(self) -> bool:
        """w8a8's experts multiply unquantized activations with their int8 codes: vLLM 0.25 on CUDA takes dynamic
        activation scales, which a checkpoint does not hold, for none (`make_int8_moe_quant_config`)."""
        return self.profile == "cuda"

    def of_layer(self, outputs: int, inputs: int) -> Numerics:
        """The arithmetic of one layer, [outputs, inputs] as the engine fuses it (q, k and v; gate and up)."""
        if self.profile != "cuda":
            return self
        return dataclasses.replace(self, parts=machete.parts(outputs, inputs))

    @property
    def tile_sums(self) -> bool:
        """bf16 products (unquantized and w4a16 layers, head, attention) are summed as AMX's tiles sum them; otherwise
        in the compiler's order."""
        return self.profile == "cpu_amx"

    @property
    def block_attention(self) -> bool:
        """Attention meets the keys in blocks, the last one first, and rounds its weights against the maximum so far
        (FlashAttention-3)."""
        return self.profile == "cuda"

    @property
    def fp8_divides(self) -> bool:
        """fp8 activation codes come from x / s_x; otherwise from x * (1 / s_x)."""
        return self.profile == "cuda"

    @property
    def w4a8_is_fp8(self) -> bool:
        """The engine's int4 layers with 8-bit activations multiply in e4m3, on a grid of their own (`w4a8_fp8`)."""
        return self.profile == "cuda"

    # ---- elementwise layers, for the models ----

    @property
    def mirrors_engine(self) -> bool:
        """Elementwise layers round where the engine's do (otherwise: float32 inside, one rounding at the end)."""
        return self.profile != "plain"

    @property
    def is_vllm_cpu(self) -> bool:
        """Any of vLLM's CPU builds."""
        return self.profile.startswith("cpu_")

    @property
    def round_before_norm_weight(self) -> bool:
        """RMSNorm is bf(bf(x * r) * w) (vLLM CPU eager); otherwise bf(x * r * w)."""
        return self.is_vllm_cpu

    @property
    def norm_order(self) -> NormOrder:
        """The order in which RMSNorm's mean of squares is summed: torch's (8-float vectors on x86; its rsqrt is
        1 / sqrt), that of vLLM's CUDA kernels, or the compiler's."""
        return "torch" if self.is_vllm_cpu else "cuda" if self.profile == "cuda" else "any"

    @property
    def round_sum_before_norm(self) -> bool:
        """The residual sum is rounded before RMSNorm reads it (CUDA); otherwise the norm reads the float32 sum."""
        return self.profile == "cuda"

    @property
    def round_silu(self) -> bool:
        """SiLU(gate) is rounded before it is multiplied by up."""
        return self.mirrors_engine

    @property
    def divided_silu(self) -> bool:
        """SiLU is x / (1 + exp(-x)), an IEEE division; otherwise as the compiler divides."""
        return self.profile == "cuda"

    @property
    def weighted_experts(self) -> bool:
        """Each expert's output is multiplied by the token's weight for it before it is rounded, and the rounded ones
        are summed (vLLM's Triton experts); otherwise rounded outputs are weighted and summed in float32."""
        return self.profile == "cuda"

    @property
    def round_rope_table(self) -> bool:
        """cos and sin are rounded to the compute dtype; the rotation itself is float32 with one rounding."""
        return self.mirrors_engine

    @property
    def rope_on_device(self) -> bool:
        """The engine makes that table on the device, by its power function."""
        return self.profile == "cuda"

    @property
    def round_probabilities(self) -> bool:
        """Attention weights exp(s - max) are rounded, unnormalised, before they multiply V; the divisor is not."""
        return self.mirrors_engine and not self.vector_attention

    @property
    def vector_attention(self) -> bool:
        """Attention is vLLM's `vec` kernel: float32 throughout, the queries scaled first, exp(s - max) not rounded."""
        return self.profile in ("cpu_avx512_bf16", "cpu_avx2")

    @property
    def polynomial_exp(self) -> bool:
        """The kernel's exp is a polynomial of degree 5, up to 3e-7 off (AVX-512); otherwise the C library's."""
        return self.profile in ("cpu_amx", "cpu_avx512_bf16")

    @property
    def truncates(self) -> bool:
        """vLLM's own C++ ops (rope, attention) store bf16 by dropping the low bits: the builds for CPUs without bf16
        instructions have no rounding conversion. Measured with both of them."""
        return self.profile == "cpu_avx2"

    @property
    def round_routing(self) -> bool:
        """The weights of a token's experts are rounded to the compute dtype (vLLM CPU takes their softmax in bf16)."""
        return self.is_vllm_cpu

    @property
    def float_experts(self) -> bool:
        """Experts that are not quantized round their hidden state and the sum of their outputs alone (vLLM CPU)."""
        return self.is_vllm_cpu

    @property
    def round_logits(self) -> bool:
        """Logits are rounded to the compute dtype (the engine's lm_head is not float32)."""
        return self.mirrors_engine


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
    if engine in PROFILES and engine != "cuda":
        return Numerics(engine)
    if engine == "auto":
        import jax  # the backend is asked for here only, so that naming an engine never initialises one

        engine = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if engine == "cuda":
        return Numerics("cuda")
    if engine == "cpu":
        return Numerics("cpu_amx" if cpu_has_amx() else "cpu_avx512_bf16" if cpu_has_avx512_bf16() else "cpu_avx2")
    raise UserError(f"unknown quant.engine {engine!r}: use one of {', '.join(ENGINES)}")
