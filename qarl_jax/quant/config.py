# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `quant` of a run's config. `rules.py` decides which weight gets which scheme."""

from __future__ import annotations

import dataclasses
from typing import Literal

from qarl_jax.quant.rules import Rules
from qarl_jax.quant.schemes import parse_scheme
from qarl_jax.types import UserError, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `quant.rules`: weights whose path contains the regular expression `match` get `scheme`."""

    match: str
    scheme: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The section `quant`: the low-bit formats that the learner and the sampler compute with.

    Attributes:
      forward: the learner's scheme (bf16, w8a8, w4a16, ...; "w4a16:g64" sets a group size).
      rollout: the sampler's scheme; null: the learner's, which is QaRL. forward=bf16 with rollout=w4a16 is the
        quantized-rollout baseline.
      group_size: weights per scale along the input dimension, for schemes with groups written without one. The
        asymmetric schemes' paper has 32.
      engine: the engine whose arithmetic the learner mirrors: cpu or cuda (vLLM on such a device), plain (no engine),
        or auto: vLLM on this host with rollout.engine.name=vllm, plain with jax.
      kernels: matrix products on a Hopper GPU: auto takes our kernels (`kernels/products.py`), xla takes XLA's. w8a8
        has the same bits with both; the other schemes have the engine's bits with auto alone.
      backward: format of the gradient's products dX and dW in linear layers: bf16 (the compute dtype's own), or int8 or
        fp8 codes, rounded stochastically, seeded by the update's number (`quant/backward.py`). Adapters, embedding,
        head, norms and attention keep the compute dtype. Not for MoE models.
      code_flips: report the share of codes that a publish changes (`quant/code_flips`). This keeps the QTensors of the
        last publish in memory, beside those of a step with several updates.
      rules: schemes by weight path, first match wins; then `forward` is only the fallback. The embedding and the head
        stay bf16 unless a rule names them: {match: "embed|head", scheme: w4a16}.
      uaq_scale: QuRL's invariant scaling, once, when the model is loaded (`models/invariant_scaling.py`); 1: off, 1.5
        in the paper.
    """

    forward: str = "w4a16"
    rollout: str | None = None
    group_size: int = 128
    engine: Literal["auto", "cpu", "cuda", "plain"] = "auto"
    kernels: Literal["auto", "xla"] = "auto"
    backward: Literal["bf16", "fp8", "int8"] = "bf16"
    code_flips: bool = True
    rules: tuple[Rule, ...] = ()
    uaq_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.uaq_scale < float("inf"):
            raise UserError(f"uaq_scale must be positive (1: off, 1.5 in QuRL), got {self.uaq_scale}.")
        at_least(self, 1, "group_size", note="; 128 is what vLLM's kernels take")
        for scheme in (self.forward, self.rollout):
            if scheme is not None:
                parse_scheme(scheme, self.group_size)
        Rules.parse([dataclasses.asdict(rule) for rule in self.rules], self.group_size)

    @property
    def rollout_scheme(self) -> str:
        """The name of the sampler's scheme: `rollout`, `forward` where that is null or the same scheme."""
        parse = lambda scheme: parse_scheme(scheme, self.group_size)  # noqa: E731
        return self.forward if self.rollout is None or parse(self.rollout) == parse(self.forward) else self.rollout
