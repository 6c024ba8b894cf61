# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Which engine's arithmetic the learner computes in.

The integer codes and scales of the weights are the same everywhere. What differs is how activations are scaled, how
the accumulator is rescaled, and where the layers in between round. A profile names one combination; nothing else in the
project asks what machine this is.

    profile   engine                         sums                        w8a8's rescale         bias
    plain     none: embedded sampler         float32, compiler's order   s_x * (s_w * acc)      float32, then round
    cpu       vLLM CPU with the bridge's     float64, rounded to         f32(s_x * s_w * acc)   float32, then round
              own operations, every build    float32 once                in float64
    cuda      vLLM CUDA (CUTLASS, Machete)   float32, the kernel's       s_x * (s_w * acc)      w4a16: after rounding

(s_x = max |x| of a token / 127, the int8 activation scale; cpu puts 1e-7 under that maximum.)

`cpu` is a contract that both sides keep: see `docs/numerics.md` and, on the engine's side, the bridge's
`cpu_kernels.py` and `cpu_layers.py`. Source of `cuda`: vLLM 0.25.1 (csrc/quantization, run on one H200), in
eager mode, the mode the bridge pins.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from qarl_jax.numerics import machete
from qarl_jax.types import UserError

NormOrder = Literal["any", "float64", "torch", "cuda"]
PROFILES: tuple[str, ...] = ("plain", "cpu", "cuda")
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
            raise UserError(
                f"unknown numerics profile {self.profile!r}: use one of {', '.join(PROFILES)}"
                " (cpu takes the place of cpu_amx, cpu_avx512_bf16 and cpu_avx2: set quant.engine=cpu)"
            )

    # ---- quantized linear layers ----

    @property
    def amax_floor(self) -> float:
        """Lower bound put under a row's absmax before its int8 scale is taken; 0: none."""
        return 1e-7 if self.profile == "cpu" else 0.0

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
    def float64(self) -> bool:
        """Every sum, and every function of floats between two roundings, is computed in float64 and rounded to float32
        once: then its order, the vector width and the library cannot be seen in it."""
        return self.profile == "cpu"

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
        """Elementwise layers round where the engine's do (otherwise: one rounding at the end)."""
        return self.profile == "cuda"

    @property
    def norm_order(self) -> NormOrder:
        """How RMSNorm's mean of squares is summed: in float64, in the order of vLLM's CUDA kernels, or the
        compiler's."""
        return "float64" if self.float64 else "cuda" if self.profile == "cuda" else "any"

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
    def round_router_logits(self) -> bool:
        """Router logits are rounded to the compute dtype, as the engine's are."""
        return self.mirrors_engine

    @property
    def rope_on_device(self) -> bool:
        """The engine makes that table on the device, by its power function."""
        return self.profile == "cuda"

    @property
    def round_logits(self) -> bool:
        """Logits are rounded to the compute dtype (the engine's lm_head is not float32)."""
        return self.mirrors_engine


def resolve(engine: str) -> Numerics:
    """The profile of an engine on this host. Call it once per run and record the result.

    Args:
      engine: "cpu" (vLLM CPU), "cuda" (vLLM CUDA), "plain" (no vLLM), or "auto" (vLLM on this host: cuda where JAX runs
        on a GPU, otherwise cpu). What auto is to a run depends on its sampler, too (`RunConfig.numerics`).

    Raises:
      UserError: an unknown engine.
    """
    if engine == "auto":
        import jax  # the backend is asked for here only, so that naming an engine never initialises one

        engine = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if engine in PROFILES:
        return Numerics(engine)
    raise UserError(f"unknown quant.engine {engine!r}: use one of {', '.join(ENGINES)}")
