# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges the first step of a run: its mismatch beside the known one, and how full its rows are.

k3 estimates the KL divergence between sampler and learner at the start of the update (`mismatch/k3`). A run above what
its pair is known for (`verify/alignment.py`) has something else than its config promises, and says so in one sentence
with the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping

from qarl_jax.run.config import RunConfig
from qarl_jax.verify.alignment import Alignment

# Share of padding from which on a run warns.
PADDING = 0.5


def remark(cfg: RunConfig, record: Mapping[str, float], alignment: Alignment) -> str | None:
    """One sentence where `mismatch/k3` of a record is above what the pair is known for; None: nothing to say.

    Args:
      record: of the first step.
      alignment: the verdict on the run.
    """
    k3, known = record.get("mismatch/k3"), alignment.known_k3
    if k3 is None or known is None or k3 <= known:
        return None
    same = cfg.quant.rollout_scheme == cfg.quant.forward
    pair = "in learner and sampler" if same else "under a bf16 learner"
    most = f"at most {known:.0e}" if known else "exactly 0"
    said = f"mismatch/k3 of the first step is {k3:.1e}, and {cfg.quant.rollout_scheme} {pair} is known for {most}"
    return f"{said}: {alignment.remedy}."


def padding(cfg: RunConfig, record: Mapping[str, float]) -> str | None:
    """One sentence where most of the learner's rows is padding; None: nothing to say. record: of the first step."""
    share = record.get("train/padding_share", 0.0)
    if share < PADDING:
        return None
    return (
        f"{share:.0%} of the learner's rows is padding, which costs time and memory: raise train.max_segments, lower"
        f" train.micro_batch_rows, or set a train.row_len below {cfg.row_len} (at least data.max_prompt_len +"
        " rollout.max_response_len)."
    )
