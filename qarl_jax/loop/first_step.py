# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What the first step says of a run: is its mismatch what scheme and execution mode are known for, are its rows full?

k3 estimates the KL divergence between sampler and learner at the start of the update (`mismatch/k3`). Under a contract
(`unequal.reason`) it is 0. The numbers below are for other runs: the largest that were measured, on policies with
random weights, which show every difference. A run above them has something else than its config promises, and is told
so in one sentence with the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping

from qarl_jax.loop import unequal
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run.config import RunConfig

# Learner and sampler under one scheme, in one arithmetic, where no contract holds.
ALIGNED = 2e-3
# Share of padding from which on a run is told.
PADDING = 0.5
# A bf16 learner beside a quantized sampler, by the sampler's scheme; others were not measured.
ROLLOUT_ONLY = {"w8a8": 6e-2, "fp8": 3e-1, "w4a16": 1.2}


def remark(cfg: RunConfig, record: Mapping[str, float], execution: str = "") -> str | None:
    """One sentence where `mismatch/k3` of a record is above what the run is known for; None: nothing to say.

    Args:
      record: of the first step.
      execution: the engine's mode, as its facts say; empty: the embedded sampler's.
    """
    k3 = record.get("mismatch/k3")
    if k3 is None:
        return None
    rollout = cfg.quant.rollout_scheme
    aligned = rollout == cfg.quant.forward
    by_contract = not unequal.reason(cfg, execution)
    known = 0.0 if by_contract else ALIGNED if aligned else ROLLOUT_ONLY.get(rollout.partition(":")[0])
    if known is None or k3 <= known:
        return None
    most = "exactly 0" if by_contract else f"at most {known:.0e}"
    said = f"mismatch/k3 of the first step is {k3:.1e}, and {rollout} {_words(aligned)} is known for {most}"
    return f"{said}: {_remedy(cfg, execution, aligned)}."


def padding(cfg: RunConfig, record: Mapping[str, float]) -> str | None:
    """One sentence where most of the learner's rows is padding; None: nothing to say. record: of the first step."""
    share = record.get("train/padding_share", 0.0)
    if share < PADDING:
        return None
    remedies = ["packing=packed"] if cfg.train.packing == "unpacked" else ["a larger max_segments"]
    remedies += ["fewer micro_batch_rows", f"a row_len below {cfg.row_len}"]
    return (
        f"{share:.0%} of the learner's rows is padding, which costs time and memory; less of it: train.* with"
        f" {', '.join(remedies)} (its least is data.max_prompt_len + rollout.max_response_len)."
    )


def _words(aligned: bool) -> str:
    return "in learner and sampler" if aligned else "under a bf16 learner"


def _remedy(cfg: RunConfig, execution: str, aligned: bool) -> str:
    engine = cfg.rollout.engine
    if execution == "compiled":
        return "vLLM's compiled kernels round otherwise than the learner; set rollout.engine.execution=auto"
    if isinstance(engine, vllm.Config) and cfg.numerics.profile == "plain" and aligned:
        return "the learner does not round where vLLM does; set quant.engine=auto"
    if isinstance(engine, vllm.Config) and engine.split_attention:
        return "attention may split the keys of a sequence; set rollout.engine.split_attention=false"
    if not aligned:
        return f"set quant.forward={cfg.quant.rollout_scheme}, so that the learner has the sampler's weights"
    verb = f"python -m qarl_jax.parity --model {cfg.model.path} --scheme {cfg.quant.forward}"
    if not isinstance(engine, vllm.Config):
        return "learner and sampler are one program's functions here, so please report it with samples.jsonl"
    return f"see which layer differs with {verb} --engine {'cuda' if cfg.numerics.profile == 'cuda' else 'cpu'}"
