# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens a run's prompts before anything expensive starts, and describes them for the printed plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qarl_jax import data
from qarl_jax.data.sources import hints
from qarl_jax.rewards.total import TERMS
from qarl_jax.run import build
from qarl_jax.run.config import RunConfig
from qarl_jax.types import Prompt, UserError

LOOKED_AT = 64
"""Prompts whose lengths the plan tells; making a reasoning-gym task takes time."""


SEARCHED = 2000
"""Training questions among which one has to be in `data.hint.base`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run.

    Attributes:
      tokenizer: the policy's. stream: training prompts, in order. held_out: evaluation prompts; empty without
        evaluation.
      lines: (label, text) lines of the printed plan, for `description.describe`.
    """

    tokenizer: Any
    stream: data.PromptStream
    held_out: list[Prompt]
    lines: list[tuple[str, str]]


def open_prompts(cfg: RunConfig) -> tuple[RunConfig, Prompts]:
    """Reads the tokenizer and the data. Returns the config with `data.max_prompt_len` resolved, and the prompts.

    Raises:
      AbsentError: tokenizer or data are not on this machine.
      UserError: tokenizer or data cannot be read, or there are too few prompts to train or evaluate on.
    """
    tokenizer = data.load_tokenizer(cfg.model.path)
    cfg = dataclasses.replace(cfg, data=data.with_prompt_len(cfg.data, tokenizer))
    train = data.make_source(cfg.data, tokenizer, "train")
    _check_base(cfg.data, tokenizer)
    stream = data.PromptStream(train, cfg.seed, cfg.train.prompts_per_step, cfg.data.stages)
    first = [train.prompt(i) for i in range(min(LOOKED_AT, len(train)))]
    _check_answers(cfg, first)
    lengths = [len(prompt.tokens) for prompt in first]
    some = f"the first {len(lengths)} have" if len(lengths) < len(train) else "they have"
    span = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    lines = [("prompts", f"{len(train)} to train on; {some} {span} tokens")]
    if train.skipped.total:
        lines.append(("", f"left out: {train.skipped}"))
    lines += [("", note) for note in train.notes.values()]
    better = data.rounded(max(lengths))
    shorter = cfg.row_len - cfg.data.prompt_limit + better
    if not cfg.train.row_len and shorter < 0.75 * cfg.row_len:
        makes = f"rows of {shorter} tokens, not {cfg.row_len}, and leaves longer prompts out"
        lines.append(("", f"data.max_prompt_len={better} makes {makes}"))
    said: list[str] = []
    evaluates = cfg.eval.every or cfg.eval.at_start or cfg.eval.at_end
    held_out = build.eval_prompts(cfg, tokenizer, said.append) if evaluates else []
    lines += [("evaluation", cfg.eval.words(len(held_out))), *(("", text) for text in said)]
    return cfg, Prompts(tokenizer=tokenizer, stream=stream, held_out=held_out, lines=lines)


def _check_base(cfg: data.Config, tokenizer: Any) -> None:
    """Refuses a hint whose `base` has none of the training questions: no prompt would get the hint."""
    if cfg.hint is None or not cfg.hint.base:
        return
    rates = hints.pass_rates(cfg.hint.base)
    bare = data.make_source(dataclasses.replace(cfg, hint=None), tokenizer, "train")
    count = min(SEARCHED, len(bare))
    if not any(bare.prompt(i).text in rates for i in range(count)):
        raise UserError(
            f"data.hint.base={cfg.hint.base}: none of the first {count} training questions is in it, so no question"
            " gets a hint; ask the base the training questions (eval.data as data), not the held-out ones."
        )


def _check_answers(cfg: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Refuses a reward that compares with a reference answer where the data has none."""
    compares = [name for name, cls in TERMS.items() if type(cfg.reward) is cls and name in ("exact", "math_verify")]
    if compares and prompts and not any(prompt.answer for prompt in prompts):
        raise UserError(
            f"reward.name={compares[0]} compares with a reference answer, and the data has none: set"
            " data.source.answer_key, or take a judge, a reward_model or a function of your own."
        )
