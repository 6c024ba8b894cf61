# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Procedural reasoning tasks by name (https://github.com/open-thought/reasoning-gym, arXiv 2505.24760).

A task is generated when its index is asked for, so a set of a million prompts costs nothing until used. Where a
candidate belongs to the other split, is too long or cannot be encoded, the index takes its next draw. So the prompt of
an index does not depend on earlier calls.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import random
import sys
import warnings
from typing import Any

import numpy as np

from qarl_jax.data.sources.template import Skipped, Split, Template, compiled, digest, rendered, said_in, wanted
from qarl_jax.types import Prompt, UserError, at_least, did_you_mean

# Candidates per slot before giving up; a held-out share of 1 % needs a few hundred.
MAX_CANDIDATES = 2000
# Draw from sets, in the order of Python's hashes (reasoning-gym 0.1.25).
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One part of a mix. Example: {dataset: gcd, weight: 2, config: {max_value: 50}}."""

    dataset: str
    weight: float = 1.0
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Reasoning-gym tasks.

    Attributes:
      dataset: name in reasoning-gym, for example chain_sum. Leave empty when `mix` is given.
      config: that data set's own parameters, for example {min_terms: 2, max_terms: 4}.
      mix: several tasks with weights, instead of `dataset`.
      question: a Jinja template that makes the question from a task's own `question` and `meta`, for example
        "{{ meta.expression }}="; empty: the task's own.
      size: number of training prompts; the held-out split has size x data.holdout of its own on top.
      seed: seed of the tasks themselves (their order comes from the run's seed).
    """

    dataset: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    mix: tuple[Task, ...] = ()
    question: str = ""
    size: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.dataset) == bool(self.mix):
            raise UserError("give either `dataset` (one reasoning-gym task, for example chain_sum) or `mix` (several).")
        if self.mix and self.config:
            raise UserError("`config` belongs to `dataset`; in a `mix`, put it inside each task.")
        at_least(self, 1, "size")
        if any(task.weight <= 0 for task in self.mix):
            raise UserError("every task of `mix` needs a weight above 0.")

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of `mix`, or the one of `dataset`."""
        return self.mix or (Task(dataset=self.dataset, config=self.config),)


class Source:
    """Prompts of one task or a mix (see `PromptSource`)."""

    def __init__(self, cfg: Config, template: Template, split: Split, holdout: float):
        self.cfg = cfg
        self.template = template
        self.split: Split = split
        self.holdout = holdout
        self.skipped, self.notes, self.longest = Skipped(), template.notes, template.max_len
        self._setting = f"{template.section}.source.question"
        self.question = compiled(cfg.question, self._setting)[0] if cfg.question else None
        self.size = round(cfg.size * holdout) if split == "heldout" else cfg.size
        self.fingerprint = digest("reasoning_gym", cfg, split, holdout, template.fingerprint())
        # Candidates per reasoning-gym data set: some load word lists when made, some refuse sizes above 20,000.
        self.block = max(1, 16_384 // max(1, self.size))
        weights = np.array([task.weight for task in cfg.tasks], np.float64)
        self.cumulative = np.cumsum(weights / weights.sum())
        for task in cfg.tasks:
            make_dataset(task.dataset, task.config, seed=cfg.seed, size=self.block * max(1, self.size))
        self.prompt = functools.lru_cache(maxsize=65_536)(self._prompt)  # type: ignore[method-assign]
        if self.size:
            self.prompt(0)  # a broken template or an impossible split shows here, not after minutes of loading

    def __len__(self) -> int:
        return self.size

    def prompt(self, i: int) -> Prompt:
        """Returns prompt `i`. Its `meta` says how to make the task again: dataset, config, seed, size and index."""
        return self._prompt(i)

    def _prompt(self, i: int) -> Prompt:
        if not 0 <= i < self.size:
            raise IndexError(f"prompt {i} of {self.size}")
        task = self.cfg.tasks[self._task_of(i)]
        for candidate in range(MAX_CANDIDATES):
            # reasoning-gym draws item j from seed + j, so every candidate of every slot is another draw.
            block, within = divmod(candidate, self.block)
            size, index = self.block * self.size, i + within * self.size
            seed = self.cfg.seed + block * size
            entry = drawn(make_dataset(task.dataset, task.config, seed=seed, size=size), index)
            question, facts = entry["question"], entry.get("metadata", {})
            if self.question is not None:
                question = rendered(self.question, self._setting, question=question, meta=facts)
            if not wanted(question, self.split, self.holdout):
                continue
            answer = str(entry["answer"])
            text, tokens = self.template.prompt(question, facts, self.skipped, row=facts, answer=answer)
            if not tokens:
                continue
            origin = {"dataset": task.dataset, "config": task.config, "seed": seed, "size": size, "index": index}
            uid = f"{task.dataset}/{self.split}/{i}"
            meta = {"origin": origin, "question": entry["question"]}
            said = tuple(said_in(question))
            return Prompt(uid=uid, tokens=tokens, text=text, answer=answer, meta=meta, messages=said)
        raise UserError(
            f"reasoning_gym task {task.dataset!r}: no usable {self.split} prompt in {MAX_CANDIDATES} tries"
            f" (left out: {self.skipped}). The task may have too few different questions for holdout={self.holdout}, or"
            f" {self.template.section}.max_prompt_len is too small."
        )

    def _task_of(self, i: int) -> int:
        if len(self.cumulative) == 1:
            return 0
        draw = np.random.default_rng([self.cfg.seed, i]).random()
        found = int(np.searchsorted(self.cumulative, draw, side="right"))
        return min(found, len(self.cumulative) - 1)


def make_dataset(name: str, config: dict[str, Any], *, seed: int, size: int) -> Any:
    """Makes a reasoning-gym data set; equal arguments return one cached object.

    Raises:
      UserError: the name or a parameter is unknown, or reasoning-gym refuses a parameter.
    """
    return _make_dataset(name, repr(sorted(config.items())), _Held(config), seed, size)


def drawn(dataset: Any, index: int) -> dict[str, Any]:
    """Returns an entry reproducibly: seeds the module `random`, from which list_functions draws, too."""
    kept = random.getstate()
    random.seed(index)  # as the scorer does (`rewards/_worker.py`)
    try:
        return dataset[index]
    finally:
        random.setstate(kept)


class _Held:
    """Passes a dict through a cache that is keyed by the text beside it."""

    def __init__(self, value: dict[str, Any]):
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)


@functools.lru_cache(maxsize=512)
def _make_dataset(name: str, _key: str, config: _Held, seed: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its packages' modules say when they are compiled
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(sorted(DATASETS))}."
        raise UserError(f"unknown reasoning_gym data set {name!r}.{hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in config.value:
        if key not in known:
            hint = did_you_mean(key, known)
            raise UserError(
                f"reasoning_gym's {name} has no parameter {key!r}.{hint} Known: {', '.join(sorted(known))}."
            )
    hashed = [each for each in HASHED if each in f"{name} {config.value}"]
    if hashed and sys.flags.hash_randomization:
        raise UserError(
            f"reasoning_gym's {hashed[0]} follows Python's hash seed: the scorer and a resumed run would see other"
            " questions. Start with the environment variable PYTHONHASHSEED=0."
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config.value)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"reasoning_gym's {name} refuses {config.value}: {error}") from None
