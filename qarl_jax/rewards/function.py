# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward function of your own, named by import path.

    reward: {name: python, path: "my_rewards.py:graded", options: {bonus: 0.1}}

    def graded(text: str, answer: str, meta: dict, **options) -> float: ...

`path` is "package.module:function" or "file.py:function". The function runs in the trainer's process; it must be quick,
and an exception in it stops the run (a reward that silently became 0 would be worse).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.sample import Sample
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Attributes:
    path: "package.module:function" or "file.py:function".
    options: keyword arguments for the function.
    """

    path: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        module, colon, function = self.path.rpartition(":")
        if not (colon and module and function.isidentifier()):
            raise UserError(f"path: expected package.module:function or file.py:function, got {self.path!r}.")


class Reward:
    """See the module's text."""

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        self.function = load_function(cfg.path)

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        return np.array([self._one(sample) for sample in samples], np.float32)

    def _one(self, sample: Sample) -> float:
        try:
            value = float(
                self.function(sample.text, sample.prompt.answer, dict(sample.prompt.meta), **self.cfg.options)
            )
        except Exception as error:
            raise UserError(
                f"reward function {self.cfg.path} failed on prompt {sample.prompt.uid}: {type(error).__name__}: {error}"
            ) from error
        if not np.isfinite(value):
            raise UserError(f"reward function {self.cfg.path} returned {value} on prompt {sample.prompt.uid}.")
        return value

    def close(self) -> None:
        """Nothing to release."""


def load_function(path: str) -> Callable[..., float]:
    """Imports "module:function" or "file.py:function".

    Raises:
      UserError: no such module, file or function, or the import itself fails.
    """
    where, _, name = path.rpartition(":")
    try:
        if where.endswith(".py"):
            if not os.path.isfile(where):
                raise UserError(f"reward function {path}: no such file {where}.")
            spec = importlib.util.spec_from_file_location(f"qarl_user_reward_{abs(hash(where))}", where)
            assert spec is not None  # a .py file always has a loader
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"reward function {path}: importing {where} failed: {type(error).__name__}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise UserError(f"reward function {path}: {where} has no function {name!r}.")
    return function
