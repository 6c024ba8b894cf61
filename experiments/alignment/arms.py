# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What is compared: the arms of the experiment, and the sizes at which it runs.

An arm is a set of overrides on top of one config (`Scale.config`): schemes and objective, nothing else. So arms of one
seed share the policy they start from, prompts, their order, the number of samples and updates, and the learning rate.

    overrides(ARMS["4_qarl_tbpo"], SCALES["gpu"], "w4a16")  # -> ["quant.forward=w4a16", "loss={name: tbpo, ...}", ...]

The bands on a response's ratio (TBPO's and GSPO's) suit responses of thousands of tokens. The spread of a mean over L
tokens falls with sqrt(L), so they are all multiplied by sqrt(REFERENCE_LEN / L): fixed before any run, from the mean
response length of the base, and not tuned. PLAN.md says which length was taken.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

REFERENCE_LEN = 4096
"""Tokens of a response for which the paper's bands are taken to be meant: a quarter of its limit of 16,384."""

TBPO = {"clip_high": 4e-4, "neg_clip_low": 3e-4, "neg_clip_high": 7e-4}  # QaRL, table 2
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}  # GSPO, sec. 5.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """A size of the experiment.

    Attributes:
      name: gpu (the experiment) or cpu (the same code at the quickstart's size).
      config: of the QaRL arm; the others differ by overrides.
      base: of the supervised run that makes the policy; empty: the policy is shipped.
      response_len: mean tokens per response of the base, from which the bands are scaled.
      rungs: schemes of the ladder, from gentle to harsh; what rounding to each costs is measured before any run.
      main: the rung of the main arms and of the ablations.
      gentle: rungs at which only arms 1, 2 and 4 run, with the first seed.
      harsh: rungs at which the main arms run with all seeds, after everything else.
      seeds: of the main arms; an ablation has the first.
      test_prompts, test_samples: size of an evaluation on the test split.
      vllm: overrides that make vLLM the sampler, and the learner one that mirrors its kernels.
      confirmed: whether the main arms' first seed runs with vLLM too, or only on demand.
    """

    name: str
    config: pathlib.Path
    base: pathlib.Path | None
    response_len: float
    rungs: tuple[str, ...]
    main: str
    gentle: tuple[str, ...]
    harsh: tuple[str, ...]
    seeds: tuple[int, ...]
    test_prompts: int
    test_samples: int
    vllm: tuple[str, ...]
    confirmed: bool

    @property
    def band_factor(self) -> float:
        """What the bands on a response's ratio are multiplied with, to two digits."""
        return float(f"{math.sqrt(REFERENCE_LEN / self.response_len):.2g}")


SCALES: dict[str, Scale] = {
    "gpu": Scale(
        name="gpu",
        config=HERE / "rl.yaml",
        base=HERE / "base_sft.yaml",
        response_len=173.0,
        rungs=("w8a8", "fp8", "w4a16:g128", "w4a16:g-1", "w3a16:g128", "w2a16:g128"),
        main="w4a16:g128",
        gentle=("w8a8", "fp8"),
        harsh=("w4a16:g-1", "w3a16:g128", "w2a16:g128"),
        seeds=(0, 1, 2),
        test_prompts=512,
        test_samples=4,
        # Small enough for the four arms side by side on one device: 4 KiB of KV cache per token.
        vllm=(
            "rollout.engine={name: vllm, max_model_len: 464, kv_cache_gb: 1.0, gpu_memory_utilization: 0.15}",
            "quant.engine=cuda",
            "model.dtype=bfloat16",  # what vLLM computes in
        ),
        confirmed=True,
    ),
    "cpu": Scale(
        name="cpu",
        config=HERE / "rl_cpu.yaml",
        base=None,
        response_len=19.4,
        rungs=("w8a8", "w4a16:g128", "w4a16:g-1", "w3a16:g128", "w2a16:g128"),
        main="w4a16:g-1",
        gentle=(),
        harsh=("w3a16:g128", "w2a16:g128"),
        seeds=(0, 1, 2),
        test_prompts=512,
        test_samples=4,
        vllm=(
            "rollout.engine={name: vllm, max_model_len: 64, kv_cache_gb: 0.5}",
            "quant.engine=cpu",
            "model.dtype=bfloat16",  # what vLLM's CPU build computes in
        ),
        confirmed=False,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
      name: of the runs' folders.
      title: for tables.
      learner, sampler: "low" (the rung's scheme) or "bf16".
      loss: fields of the objective.
      bands: those of `loss` that are scaled to the response length.
      more: further overrides.
      main: whether it is one of the four that are compared over several seeds.
    """

    name: str
    title: str
    loss: dict[str, object]
    learner: str = "low"
    sampler: str = "low"
    bands: dict[str, float] = dataclasses.field(default_factory=dict)
    more: tuple[str, ...] = ()
    main: bool = False


_GRPO = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2, "mismatch": "tis", "mismatch_cap": 2.0}
_ACR = _GRPO | {"mismatch": "acr", "aggregation": "seq-mean-token-mean"}
_GSPO = {"name": "gspo", "mismatch": "tis", "mismatch_cap": 2.0}
_TBPO = {"name": "tbpo", "mismatch_cap": 2.0}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name="1_bf16_grpo", title="BF16, GRPO", learner="bf16", sampler="bf16", loss=_GRPO, main=True),
        Arm(
            name="2_rollout_grpo",
            title="quantized rollout, bf16 learner, GRPO",
            learner="bf16",
            loss=_GRPO,
            main=True,
        ),
        Arm(
            name="3_rollout_tbpo",
            title="quantized rollout, bf16 learner, TBPO",
            learner="bf16",
            loss=_TBPO,
            bands=TBPO,
            main=True,
        ),
        Arm(name="4_qarl_tbpo", title="QaRL: aligned learner, TBPO", loss=_TBPO, bands=TBPO, main=True),
        Arm(name="a_grpo", title="aligned, GRPO", loss=_GRPO),
        Arm(name="b_gspo", title="aligned, GSPO", loss=_GSPO, bands=GSPO),
        Arm(name="c_mis_gspo", title="aligned, MIS-GSPO", loss=_GSPO | {"mismatch": "seq_mis"}, bands=GSPO),
        Arm(name="d_dual_clip_grpo", title="aligned, dual-clip GRPO (c = 3)", loss=_GRPO | {"dual_clip": 3.0}),
        Arm(
            name="e_positive_grpo",
            title="aligned, GRPO on positive advantages",
            loss=_GRPO | {"positive_only": True},
        ),
        Arm(
            name="f_on_policy_grpo",
            title="aligned, GRPO with one update per step",
            loss=_GRPO | {"on_policy": True},
            more=("train.prompts_per_update=0",),
        ),
        Arm(
            name="g_sapo",
            title="aligned, SAPO",
            loss={"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05, "mismatch": "tis", "mismatch_cap": 2.0},
        ),
        Arm(name="h_acr", title="QuRL: quantized rollout, ACR", learner="bf16", loss=_ACR),
        Arm(
            name="i_acr_uaq",
            title="QuRL: quantized rollout, ACR, UAQ",
            learner="bf16",
            loss=_ACR,
            more=("quant.uaq_scale=1.5",),
        ),
    )
}

GENTLE = ("1_bf16_grpo", "2_rollout_grpo", "4_qarl_tbpo")
"""The arms that run at the gentle rungs too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: an arm, at a rung, with a seed; sampled by the embedded sampler or by vLLM."""

    arm: Arm
    rung: str
    seed: int
    vllm: bool = False

    @property
    def name(self) -> str:
        """Its folder, as in w4a16_g128/4_qarl_tbpo/seed0, or w4a16_g128_vllm/... with vLLM as the sampler.

        Nothing of arm 1 is quantized: it has one for all rungs.
        """
        low = "low" in (self.arm.learner, self.arm.sampler)
        rung = folder_of(self.rung) if low else "bf16"
        return f"{rung}{'_vllm' if self.vllm else ''}/{self.arm.name}/seed{self.seed}"

    @property
    def program(self) -> str:
        """Runs with the same have the same compiled programs: all but the seed."""
        return self.name.rpartition("/")[0]


def folder_of(rung: str) -> str:
    """ "w4a16:g128" -> "w4a16_g128", as in the names of runs and figures."""
    return rung.replace(":", "_")


def scheme(kind: str, rung: str) -> str:
    """ "low" -> the rung's scheme."""
    return rung if kind == "low" else "bf16"


def overrides(arm: Arm, scale: Scale, rung: str, vllm: bool = False) -> list[str]:
    """The arm as "section.field=value" overrides on `scale.config`."""
    loss = arm.loss | {key: float(f"{value * scale.band_factor:.3g}") for key, value in arm.bands.items()}
    fields = ", ".join(f"{key}: {_yaml(value)}" for key, value in loss.items())
    return [
        f"quant.forward={scheme(arm.learner, rung)}",
        f"quant.rollout={scheme(arm.sampler, rung)}",
        f"loss={{{fields}}}",
        *arm.more,
        *(scale.vllm if vllm else ()),
    ]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def stages(scale: Scale, vllm: bool = False) -> list[list[Run]]:
    """The runs in the order they are made: each stage is paired (same base, same stretch), the main question first.

    Args:
      vllm: with the main arms' first seed under vLLM at a scale that is not `confirmed` by itself.
    """
    main = [arm for arm in ARMS.values() if arm.main]
    rest = [arm for arm in ARMS.values() if not arm.main]
    out = [[Run(arm=arm, rung=scale.main, seed=seed) for arm in main] for seed in scale.seeds]
    first = scale.seeds[0]
    for rung in scale.gentle:  # arm 1 is that of the main rung
        out.append([Run(arm=ARMS[name], rung=rung, seed=first) for name in GENTLE[1:]])
    out.append([Run(arm=arm, rung=scale.main, seed=first) for arm in rest])
    if scale.confirmed or vllm:
        out.append([Run(arm=arm, rung=scale.main, seed=first, vllm=True) for arm in main])
    for rung in scale.harsh:
        out += [[Run(arm=arm, rung=rung, seed=seed) for arm in main[1:]] for seed in scale.seeds]
    return out
