# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Combines several named sources into one, for a curriculum (`data.stages`) or for a reward per source.

A prompt's `meta["mix_part"]` is the name of its part, and its uid begins with this name.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from qarl_jax.data.sources import files, huggingface, reasoning_gym
from qarl_jax.data.sources.template import PromptSource, Skipped, digest
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import Prompt, UserError

PARTS: dict[str, type] = {
    "reasoning_gym": reasoning_gym.Config,
    "jsonl": files.Jsonl,
    "parquet": files.Parquet,
    "huggingface": huggingface.Config,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A mix of other sources.

    Attributes:
      parts: the sources by name, for example {math: {name: jsonl, path: ...}, code: {name: parquet, path: ...}}.
    """

    parts: dict[str, Annotated[Any, Variants(PARTS)]]

    def __post_init__(self) -> None:
        if not self.parts:
            raise UserError("a mix needs at least one source in `parts`.")
        if slashed := [name for name in self.parts if "/" in name]:
            raise UserError(f"parts: {slashed[0]!r} names its prompts NAME/..., so it must have no slash.")


class Source:
    """The prompts of all parts, one part after the other (see `PromptSource`).

    Args:
      parts: name -> source.

    Attributes:
      begin: name -> index of its first prompt.
      sizes: name -> number of its prompts.
    """

    def __init__(self, parts: dict[str, PromptSource]):
        self._parts = parts
        self.sizes = {name: len(part) for name, part in parts.items()}
        self.begin, at = {}, 0
        for name, size in self.sizes.items():
            self.begin[name] = at
            at += size
        self._size = at
        self.skipped = Skipped(
            too_long=sum(part.skipped.too_long for part in parts.values()),
            unknown_characters=sum(part.skipped.unknown_characters for part in parts.values()),
        )
        self.notes = {kind: note for part in parts.values() for kind, note in part.notes.items()}
        self.longest = max(part.longest for part in parts.values())
        self.fingerprint = digest("mix", [(name, part.fingerprint) for name, part in parts.items()])

    def __len__(self) -> int:
        return self._size

    def interleaved(self) -> list[int]:
        """Returns all indices in an order of which every prefix has each part in proportion to the part's size."""
        places = [
            (first + i, (i + 0.5) / self.sizes[name])
            for name, first in self.begin.items()
            for i in range(self.sizes[name])
        ]
        return [index for index, _ in sorted(places, key=lambda place: place[1])]

    def prompt(self, i: int) -> Prompt:
        """Returns the prompt at index `i`, a pure function of `i`; IndexError outside."""
        if not 0 <= i < self._size:
            raise IndexError(f"prompt {i} of {self._size}")
        name = next(name for name, first in self.begin.items() if first <= i < first + self.sizes[name])
        prompt = self._parts[name].prompt(i - self.begin[name])
        return dataclasses.replace(prompt, uid=f"{name}/{prompt.uid}", meta=prompt.meta | {"mix_part": name})
