# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges whether a learner and a sampler compute equal log-probs, and if not, why, and what to do.

    verdict = of_run(cfg, engine.facts)      # or `judge(Pair(...))` for a pair that is no run
    verdict.is_aligned                       # every log-prob is to be equal, to the last bit
    verdict.reason, verdict.remedy           # otherwise: what differs, and the setting that ends it

The learner's settings are read here, and what the bridge reports of its live engine (`messages.Facts`). The doctor, the
ladder, a run's first step and its search for mismatched tokens all use this verdict.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from qarl_bridge.protocol.messages import Facts

from qarl_jax import quant
from qarl_jax.numerics.engine import Numerics
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig

# Largest k3 (`mismatch/k3`) that was measured, on policies with random weights, which show every difference, of learner
# and sampler under one scheme that compute alike but for the last bits. That of a bf16 learner beside a quantized
# sampler is `Scheme.baseline_k3`.
CLOSE = 2e-3
# Expected share of the steps of which the tokens after the first update are compared, where old log-probs are the
# sampler's (`loop/proximal.py`).
CHECKED = 1 / 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The settings and facts of learner and engine that decide the verdict.

    Attributes:
      engine: the sampler's settings; None: the embedded sampler.
      facts: the live engine's report of itself; None: not started yet.
      learner, sampler: the schemes of both.
      numerics: the learner's arithmetic. dtype, attention: its `model.dtype` and `model.attention`.
      noise: the correction of a sampler whose norm gains have noise; empty: they have none.
      path: the model's folder, for commands.
    """

    engine: VllmConfig | None
    learner: str
    sampler: str
    numerics: Numerics
    dtype: str = "bfloat16"
    attention: str = "auto"
    noise: str = ""
    path: str = "DIR"
    facts: Facts | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """The verdict on whether learner and sampler compute equal log-probs.

    Attributes:
      kind: "aligned": log-probs are equal to the last bit; "close": equal functions in programs that round differently
        (the embedded sampler, unless it computes in float64); "baseline": schemes or norm gains differ on purpose;
        "apart": a setting or the machine makes the arithmetics differ.
      reason: why the pair is not aligned; empty if it is.
      remedy: what to do about a mismatch.
      known_k3: the largest k3 that such a pair is known for; None: not measured.
    """

    kind: Literal["aligned", "close", "baseline", "apart"]
    reason: str = ""
    remedy: str = ""
    known_k3: float | None

    @property
    def is_aligned(self) -> bool:
        """Tells whether every log-prob must be equal."""
        return self.kind == "aligned"

    def __str__(self) -> str:
        if self.is_aligned:
            return "every log-prob is to be equal in learner and sampler, to the bit"
        return f"log-probs may differ between learner and sampler: {self.reason}"


def of_run(cfg: RunConfig, facts: Facts | None = None, version: int | None = None) -> Alignment:
    """Judges the learner and the sampler of a run.

    Args:
      facts: the live engine's report; None: not started yet, or the sampler is embedded.
      version: the policy version that samples; None: any version of the run.
    """
    engine, noise = cfg.rollout.engine, cfg.rollout.norm_noise
    noisy = noise is not None and (version is None or noise.sigma(version, cfg.train.steps) > 0)
    correction = "loss.ratio=sampler" if cfg.loss.ratio == "sampler" else f"loss.mismatch={cfg.loss.mismatch}"
    pair = Pair(
        engine=engine if isinstance(engine, VllmConfig) else None,
        learner=cfg.quant.forward,
        sampler=cfg.quant.rollout_scheme,
        numerics=dataclasses.replace(cfg.numerics, own_kernels=cfg.quant.kernels == "auto"),
        dtype=cfg.model.dtype,
        attention=cfg.model.attention,
        noise=correction if noisy else "",
        path=cfg.model.path,
        facts=facts,
    )
    return judge(pair)


def takes_samplers(cfg: RunConfig, facts: Facts | None = None, version: int | None = None) -> bool:
    """Tells whether `old_logprobs` are the sampler's (`train.proximal`), if one version drew a step's tokens.

    Args:
      facts, version: as in `of_run`.
    """
    setting = cfg.train.proximal
    return setting == "sampler" or (setting == "auto" and of_run(cfg, facts, version).is_aligned)


def judge(pair: Pair) -> Alignment:
    """Judges a pair; the first reason found counts. The order is: what the engine lacks, norm noise, different schemes,
    what the learner lacks."""
    same = pair.learner == pair.sampler
    sampler = quant.parse_scheme(pair.sampler)
    known = CLOSE if same else None if sampler is None else sampler.baseline_k3
    if found := None if pair.engine is None else _of_the_engine(pair.engine, pair.facts):
        return Alignment(kind="apart", reason=found[0], remedy=found[1], known_k3=known)
    if pair.noise:
        reason = f"the sampler's norm gains have noise (rollout.norm_noise), for which {pair.noise} corrects"
        return Alignment(kind="baseline", reason=reason, remedy="set rollout.norm_noise=null", known_k3=None)
    if not same:
        reason = f"the learner computes in {pair.learner}, the sampler in {pair.sampler}"
        remedy = f"set quant.forward={pair.sampler}, so that the learner has the sampler's weights"
        return Alignment(kind="baseline", reason=reason, remedy=remedy, known_k3=known)
    if pair.engine is None:
        remedy = "learner and sampler are one program's functions here, so please report it with samples.jsonl"
        if pair.numerics.float64 and pair.dtype == "bfloat16":  # no program's order of a sum can be seen
            return Alignment(kind="aligned", remedy=remedy, known_k3=0.0)
        reason = f"the embedded sampler promises closeness alone under quant.engine={pair.numerics.profile}"
        return Alignment(kind="close", reason=reason, remedy=remedy, known_k3=known)
    if found := _of_the_learner(pair):
        return Alignment(kind="apart", reason=found[0], remedy=found[1], known_k3=known)
    verb = f"python -m qarl_jax.parity --model {pair.path} --scheme {pair.learner} --engine {pair.numerics.profile}"
    return Alignment(kind="aligned", remedy=f"see which layer differs with {verb}", known_k3=0.0)


def _of_the_engine(engine: VllmConfig, facts: Facts | None) -> tuple[str, str] | None:
    """Returns why an engine is not batch-invariant, and what to do; None: it is."""
    if engine.engine == "fake" or (facts is not None and facts.execution == "none"):
        return "this engine computes nothing", "set rollout.engine.engine=vllm"
    if engine.arithmetic == "vllm":
        reason = "vLLM's own kernels depend on the batch and round otherwise (rollout.engine.arithmetic=vllm)"
        return reason, "set rollout.engine.arithmetic=batch_invariant"
    if facts is not None and facts.departures:
        return "; ".join(facts.departures), "see docs/install.md for the GPUs and versions of vLLM that are aligned"
    return None


def _of_the_learner(pair: Pair) -> tuple[str, str] | None:
    """Returns why a learner does not compute as a batch-invariant engine, and what to do; None: it does."""
    if pair.dtype != "bfloat16":
        return f"the learner computes in {pair.dtype}, vLLM in bfloat16 (model.dtype)", "set model.dtype=bfloat16"
    if pair.numerics.profile == "plain":
        return "the learner does not round where vLLM does (quant.engine=plain)", "set quant.engine=auto"
    if pair.numerics.float64:  # on a CPU no order of a sum can be seen
        return None
    scheme = quant.parse_scheme(pair.learner)
    if not pair.numerics.own_kernels and (scheme is None or not scheme.sums_are_exact):
        reason = "XLA orders the learner's sums of few rows its own way (quant.kernels=xla)"
        return reason, "set quant.kernels=auto"
    if pair.attention not in ("auto", "flash3"):
        reason = f"the learner's attention adds in another order (model.attention={pair.attention})"
        return reason, "set model.attention=auto"
    return None
