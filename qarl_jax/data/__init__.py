# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts, tokenizers and packing.

Adding a source: one file with its `Config` and a `Source(cfg, template, split, holdout)`, and one line in `SOURCES`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from qarl_jax.data.curriculum import Stage
from qarl_jax.data.curriculum import check as check_stages
from qarl_jax.data.sources import files, huggingface, mix, reasoning_gym
from qarl_jax.data.sources.hints import Hint
from qarl_jax.data.sources.template import PromptSource, Split, Template
from qarl_jax.data.stream import PromptStream
from qarl_jax.data.tokenizer import Tokenizer, load_tokenizer, make_char_tokenizer, stop_token_ids
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import UserError, at_least

# Config type -> source of prompts.
SOURCES: dict[type, Any] = {
    reasoning_gym.Config: reasoning_gym.Source,
    files.Jsonl: files.Source,
    files.Parquet: files.Source,
    huggingface.Config: files.Source,
}

# The names used in config files.
SOURCE_NAMES: dict[str, type] = {**mix.PARTS, "mix": mix.Config}

LONGEST = 1024
"""Most tokens of a prompt, where `Config.max_prompt_len` does not say."""

NO_EVALUATION = "eval.every=0 eval.at_start=false eval.at_end=false"

SourceConfig = Annotated[Any, Variants(SOURCE_NAMES)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sources of prompts, and their templates.

    Attributes:
      source: reasoning_gym, jsonl, parquet or huggingface, with their own settings, or a mix of these.
      stages: which parts of a mix a step's prompts come from, and until when (`curriculum.py`); empty: each part by its
        size, from the first step to the last.
      template: raw | chat | a Jinja template (see `Template`).
      system: system message (chat) or leading text (raw).
      chat_args: further arguments of the tokenizer's chat template, for example {enable_thinking: false}.
      max_prompt_len: longer prompts, in tokens, are left out and counted. 0: no longer than the longest of the files,
        to a multiple of 16, and at most 1024 (`with_prompt_len`); reasoning_gym has no longest. Rows have room for it.
      holdout: share of the prompts, by hash of their question, that is kept for evaluation and never trained on.
      hint: help beside the questions that are trained on (`sources/hints.py`); null: none.
    """

    source: SourceConfig
    template: str = "chat"
    system: str = ""
    chat_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_prompt_len: int = 0
    holdout: float = 0.05
    stages: tuple[Stage, ...] = ()
    hint: Hint | None = None

    def __post_init__(self) -> None:
        at_least(self, 0, "max_prompt_len")
        if not 0.0 <= self.holdout < 1.0:
            raise UserError(f"holdout is a share of the prompts, at least 0 and below 1; got {self.holdout}.")
        if self.stages:
            if not isinstance(self.source, mix.Config):
                raise UserError(
                    "stages weighs the parts of a mix: set source.name=mix, with the sources in its `parts`."
                )
            check_stages(self.stages, list(self.source.parts))

    @property
    def prompt_limit(self) -> int:
        """The maximum number of tokens of a prompt."""
        return self.max_prompt_len or LONGEST


def rounded(length: int) -> int:
    """Rounds a length in tokens up to the next multiple of 16."""
    return -(-length // 16) * 16


def with_prompt_len(cfg: Config, tokenizer: Tokenizer) -> Config:
    """Returns the config with `max_prompt_len` set to the longest prompt's rounded length, if it is 0."""
    if cfg.max_prompt_len:
        return cfg
    longest = rounded(make_source(cfg, tokenizer, "all").longest)
    return dataclasses.replace(cfg, max_prompt_len=min(LONGEST, longest))


def _opened(cfg: Any, template: Template, split: Split, holdout: float) -> PromptSource:
    return SOURCES[type(cfg)](cfg, template, split, holdout)


def make_source(
    cfg: Config, tokenizer: Tokenizer, split: Split = "train", hint_len: int = 0, section: str = "data"
) -> PromptSource:
    """Opens the prompts of a split: those to train on, those held out, or all (for data that is only evaluated on).

    Args:
      hint_len: tokens by which a prompt with its hint may exceed `cfg.prompt_limit`.
      section: the section of the config that `cfg` is, for messages.

    Raises:
      UserError: see the sources. A held-out split may be empty.
    """
    limits = cfg.prompt_limit, cfg.hint, hint_len
    template = Template(tokenizer, cfg.template, cfg.system, cfg.chat_args, *limits, section=section)
    if isinstance(cfg.source, mix.Config):
        parts = {name: _opened(part, template, split, cfg.holdout) for name, part in cfg.source.parts.items()}
        return mix.Source(parts)
    return _opened(cfg.source, template, split, cfg.holdout)
