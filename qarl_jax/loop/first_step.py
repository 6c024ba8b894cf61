# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Warns after a run's first step: if its mismatch exceeds the known value, or if most of its rows is padding.

`mismatch/k3` estimates the KL divergence between sampler and learner at the start of the update. `verify/alignment.py`
lists known values for pairs of learner and sampler schemes. A value above shows that the run does not compute what its
config says; the warning names the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping

from qarl_jax.run.config import RunConfig
from qarl_jax.verify.alignment import Alignment

# Share of padding from which on a run warns.
PADDING = 0.5


def remark(cfg: RunConfig, record: Mapping[str, float], alignment: Alignment) -> str | None:
    """Makes a warning if a record's `mismatch/k3` is above the known value for the run's schemes; else None.

    Args:
      record: metrics of the first step.
      alignment: the run's known mismatch, and the remedy.
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
    """Makes a warning if at least half of the learner's rows is padding; else None. record: of the first step."""
    share = record.get("train/padding_share", 0.0)
    if share < PADDING:
        return None
    return (
        f"{share:.0%} of the learner's rows is padding, which costs time and memory: raise train.max_segments, lower"
        f" train.micro_batch_rows, or set a train.row_len below {cfg.row_len} (at least data.max_prompt_len +"
        " rollout.max_response_len)."
    )
