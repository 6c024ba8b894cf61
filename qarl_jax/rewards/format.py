# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward 1 for a response that consists of the wanted tagged sections, each once and in order, else 0.

With the default sections: "<think> ... </think> <answer> ... </answer>" and only white space around (the format reward
of DeepSeek-R1, arXiv 2501.12948, sec. 2.2.2). Set `opened` if prompts end in the first opening tag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The tags that a response must have, each once and in order.

    Attributes:
      sections: tag names, in order.
      opened: the prompt already ends in the first opening tag, so the response must not repeat it.
    """

    sections: tuple[str, ...] = ("think", "answer")
    opened: bool = False

    def __post_init__(self) -> None:
        if not self.sections or len(set(self.sections)) != len(self.sections):
            raise UserError(f"sections: expected different tag names, got {list(self.sections)}.")


class Reward(BaseReward):
    """Checks that a response consists of the wanted tagged sections, each once and in order: 1 or 0."""

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        return np.array([float(well_formed(sample.text, self.cfg)) for sample in samples], np.float32)


def well_formed(text: str, cfg: Config) -> bool:
    """Tells whether `text` consists of exactly the sections of `cfg`."""
    text = f"<{cfg.sections[0]}>{text}" if cfg.opened else text
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in cfg.sections):
        return False
    at = 0
    for tag in cfg.sections:
        start, end = text.find(f"<{tag}>", at), text.find(f"</{tag}>", at)
        if start < 0 or end < start or text[at:start].strip():
            return False
        at = end + len(f"</{tag}>")
    return not text[at:].strip()
