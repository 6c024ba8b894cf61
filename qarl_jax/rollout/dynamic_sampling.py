# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses a step's responses: dynamic sampling and overlong filtering (DAPO, arXiv 2503.14476, sec. 3).

Dynamic sampling. A group whose rewards are all equal has no gradient; under `advantage.level=turn`, one whose rewards
of each turn are. Such groups are left out, and more prompts are sampled until the step is full or `max_batches` batches
have been drawn; then the step is cut to its size. If it is still short, groups of equal rewards fill it up. They count
in the loss's denominators, as they do without dynamic sampling.

Batch 0 of a step comes from the prompt stream; batch k > 0 is drawn from the remaining prompts by (seed, step, k). A
step's prompts therefore depend on its number, the seed and the policy alone: a resumed run repeats them, and the
stream's order does not change.

Overlong filtering. A response cut off at the length limit has a misleading reward. When it is masked, it takes part in
its group's advantages but not in the loss or its denominators. Off by default, as in verl; TRL's recipe turns it on.

Not supported: sampling more prompts at once than a step holds; partial rollouts (`partial_rollouts.py`) do so without
wasting tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from qarl_jax.data import PromptStream
from qarl_jax.loss.advantages import group_advantages, turn_advantages
from qarl_jax.types import Completion, Prompt, RolloutGroup, UserError, at_least

# Keeps these draws apart from others of the same seed.
_EXTRA = 0xDA90

Parts = Mapping[str, Float[np.ndarray, " n"]]
Sampler = Callable[[list[Prompt], int], tuple[list[RolloutGroup], Parts]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Dynamic sampling: groups of equal rewards are replaced by more prompts (DAPO).

    Attributes:
      max_batches: most batches of prompts sampled per step; 1: off, every group is trained on. DAPO, verl: 10.
      metric: reward term whose values must differ within a group (a verifier's, with reward.name=sum); empty: the total
        reward. A length penalty makes totals differ where the answers are all wrong.
    """

    max_batches: int = 1
    metric: str = ""

    def __post_init__(self) -> None:
        at_least(self, 1, "max_batches", note="; 1 turns it off")
        if self.metric and self.max_batches == 1:
            raise UserError(f"metric={self.metric} decides nothing at max_batches=1 (dynamic sampling off); raise it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """The sampled groups of a step.

    Attributes:
      groups: the groups to train on, as many as a step has prompts.
      sampled: every sampled group, in drawing order.
      parts: each reward term by name, [n] over all responses of `sampled`.
      metrics: `rollout/batches` drawn, `rollout/groups_dropped` (share of sampled groups with equal rewards) and
        `rollout/groups_filled` (share of the step's groups with equal rewards).
    """

    groups: list[RolloutGroup]
    sampled: list[RolloutGroup]
    parts: dict[str, Float[np.ndarray, " n"]]
    metrics: dict[str, float]


def informative(
    groups: Sequence[RolloutGroup], parts: Parts, metric: str = "", by_turn: bool = False
) -> Bool[np.ndarray, " g"]:
    """Tells per group whether its responses differ in `metric` (a key of `parts`; empty: the total reward).

    The total reward also counts for a group that another source's term graded.

    Args:
      by_turn: without a metric, whether a difference in the rewards to go of one turn is enough.

    Raises:
      UserError: no reward term of that name.
    """
    if metric and metric not in parts:
        raise UserError(f"rollout.dynamic.metric={metric}: the reward has no such term; it has {', '.join(parts)}.")
    out, at = np.zeros(len(groups), bool), 0
    for i, group in enumerate(groups):
        size = len(group.completions)
        values = np.asarray(parts[metric][at : at + size] if metric else group.rewards, np.float64)
        values = np.where(np.isnan(values), group.rewards, values)
        if by_turn and not metric:
            turns = [[turn.reward for turn in completion.turns] for completion in group.completions]
            out[i] = turn_advantages([turns], valid=group.valid[None]).any()
        else:
            out[i] = group_advantages(values[None], valid=group.valid[None]).any()
        at += size
    return out


def more_indices(stream: PromptStream, step: int, batch: int, taken: Sequence[int]) -> list[int]:
    """Returns source indices of batch `batch` > 0 of a step: up to a step's worth of prompts that are not in `taken`.

    A pure function of (seed, step, batch, taken).
    """
    rest = np.setdiff1d(stream.eligible(step), np.asarray(taken, np.int64))
    rng = np.random.default_rng([_EXTRA, stream.seed, step, batch])
    return [int(i) for i in rng.choice(rest, size=min(stream.prompts_per_step, len(rest)), replace=False)]


def collect(cfg: Config, stream: PromptStream, step: int, sample: Sampler, *, by_turn: bool = False) -> Collected:
    """Samples a step's groups, with more batches while too many groups have equal rewards.

    Args:
      sample: maps (prompts, number of the batch) to rewarded groups and each reward term over all samples.
      by_turn: as in `informative`.
    """
    size = stream.prompts_per_step
    taken = stream.indices(step)
    prompts = [stream.source.prompt(i) for i in taken]
    sampled: list[RolloutGroup] = []
    terms: list[Parts] = []
    kept: list[int] = []
    batches = 0
    while True:
        groups, parts = sample(prompts, batches)
        batches += 1
        useful = informative(groups, parts, cfg.metric, by_turn)
        kept += [len(sampled) + int(i) for i in np.flatnonzero(useful)]
        sampled += groups
        terms.append(parts)
        more = more_indices(stream, step, batches, taken)
        if len(kept) >= size or batches == cfg.max_batches or not more:
            break
        taken = [*taken, *more]
        prompts = [stream.source.prompt(i) for i in more]
    signal = set(kept)
    idle = [i for i in range(len(sampled)) if i not in signal]
    chosen = [*kept[:size], *idle[: max(0, size - len(kept))]]
    return Collected(
        groups=[sampled[i] for i in chosen],
        sampled=sampled,
        parts={key: np.concatenate([parts[key] for parts in terms]) for key in terms[0]},
        metrics={
            "rollout/batches": float(batches),
            "rollout/groups_dropped": len(idle) / len(sampled),
            "rollout/groups_filled": max(0, size - len(kept)) / size,
        },
    )


def emptied(completion: Completion) -> Completion:
    """Returns the completion without tokens: it keeps its place in the group, and the loss does not see it."""
    return dataclasses.replace(
        completion, tokens=(), logprobs=np.zeros(0, np.float32), versions=(), routed_experts=None, turns=()
    )


def without_truncated(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Empties responses that did not end by themselves. Rewards and places stay; their tokens are not trained on."""

    def finished(group: RolloutGroup) -> RolloutGroup:
        completions = tuple(c if c.finish_reason == "stop" else emptied(c) for c in group.completions)
        return dataclasses.replace(group, completions=completions)

    return [finished(group) for group in groups]
