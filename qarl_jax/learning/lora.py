# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections `lora` and `critic.lora` of a config: low-rank adapters on a frozen base (LoRA, arXiv 2106.09685).

    h = round(A x)        d = round(B' h)        y = round(W_q x + d)        B' = round(round(B) scale)

The base has any scheme and is frozen (`Trainable`): it has no masters, gradients or moments. Roundings are vLLM's: the
base's output is rounded before the adapter's is added, and the scale is folded into B. So learner and sampler compute
one policy, and adapters are never merged into codes.

`rank` is one that vLLM serves. `scale` is alpha / r, or alpha / sqrt(r) under rsLoRA (arXiv 2312.03732). Muon updates A
and B as any other matrix: all r directions of each move alike, by an RMS of 0.2 lr.

Left out: DoRA, adapters of experts, embedding and head, and ranks that differ between layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from qarl_jax.learning.trainable import Trainable
from qarl_jax.models import BLOCK_NORMS, Lora
from qarl_jax.types import UserError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM serves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The section `lora`: adapters that are trained instead of a model's weights.

    Attributes:
      rank: r of every adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512.
      alpha: an adapter is scaled by alpha / rank.
      targets: linear maps by name (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj); empty: all of them,
        or in a MoE model the attention's, because experts have no adapters.
      rslora: scale by alpha / sqrt(rank).
      train_norms: also train the gains of the norms before attention and MLP.
      init: PEFT folder of adapters to start from; null: fresh adapters.
    """

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    train_norms: bool = False
    init: str | None = None

    def __post_init__(self) -> None:
        if self.rank not in RANKS:
            raise UserError(f"rank={self.rank} is none that vLLM serves; take one of {', '.join(map(str, RANKS))}.")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UserError(f"alpha must be positive and finite, got {self.alpha}; alpha=rank scales by 1.")

    def check(self, quant: Any, critic: Any, engine: Any) -> None:
        """Raises UserError if the run's sections `quant`, `critic` and `rollout.engine` do not work with adapters."""
        if getattr(engine, "arithmetic", None) == "vllm":
            raise UserError("lora: rollout.engine.arithmetic=vllm serves no adapters; leave it out.")
        learner, sampler = quant.forward, quant.rollout_scheme
        if learner not in ("bf16", sampler):
            raise UserError(
                f"lora: of a base under quant.forward={learner} nothing is kept that quant.rollout={sampler} could be"
                f" made of; set both to {learner}, or quant.forward=bf16."
            )
        if quant.uaq_scale != 1:
            raise UserError(
                f"quant.uaq_scale={quant.uaq_scale} is for weights that learn, and under lora they are frozen; set 1."
            )
        if critic is not None and critic.path is None and critic.lora is None:
            raise UserError(
                "critic: it begins with the policy's masters, and under lora there are none; give it adapters"
                " (critic.lora={}), or name a model's folder in critic.path."
            )

    @property
    def adapters(self) -> Lora:
        """The adapters as a field of `ModelConfig`, with their scale computed."""
        scale = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        return Lora(rank=self.rank, scale=scale, targets=self.targets)

    @property
    def words(self) -> str:
        """A description of the section for printed plans."""
        scale = f"alpha {self.alpha:g}{' over the root of the rank (rsLoRA)' * self.rslora}"
        norms = ", and gains of norms" * self.train_norms
        return (
            f"rank {self.rank}, {scale}, of {', '.join(self.targets) or 'all linear maps'}{norms}; the rest is frozen"
        )

    @property
    def trainable(self) -> Trainable:
        """The trainable leaves: adapters, and norm gains if `train_norms` is set."""
        norms = (BLOCK_NORMS,) if self.train_norms else ()
        return Trainable(freeze=("",), train=(r"\.lora_[ab]$", *norms))
