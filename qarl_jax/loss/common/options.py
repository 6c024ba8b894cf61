# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of objectives: dataclass fields with a meaning, an allowed range, and the source of the default.

Every objective has a `Config`. It inherits the fields that all objectives have (aggregation, sampler correction) from
`Shared`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import typing
from collections.abc import Iterable
from typing import Any, ClassVar

from qarl_jax.loss.common.sampler_correction import MISMATCH, bounds
from qarl_jax.types import UserError

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
_SHORT = {"token": "token-mean", "seq": "seq-mean-token-mean"}


def option(
    default: Any,
    doc: str,
    source: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    internal: bool = False,
) -> Any:
    """Makes a dataclass field with its meaning, the source of its default and its allowed range.

    internal: configs cannot set the field.
    """
    checks = {"at_least": at_least, "above": above, "at_most": at_most, "choices": choices, "internal": internal}
    return dataclasses.field(default=default, metadata={"doc": doc, "source": source, **checks})


def nearest(word: str, known: Iterable[str]) -> str:
    """Makes the hint of an error message: "did you mean ...? Known: ..."."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}"


def canonical_aggregation(word: Any) -> Any:
    """Normalizes the name of an aggregation (`seq_mean_token_mean`, `seq`); returns unknown values for `check`."""
    if not isinstance(word, str):
        return word
    return _SHORT.get(word, word.replace("_", "-"))


def check(config: Any, what: str = "loss") -> None:
    """Checks types and ranges of a config's fields. what: the noun for messages, "loss" or "advantage".

    Raises:
      UserError: a field has a wrong type or value; the message names the field, its value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, meta = getattr(config, field.name), field.metadata
        where = f"{what} {type(config).name!r}: {field.name} = {value!r}"
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        if value is None and type(None) in kinds:
            continue
        if bool in kinds:
            if not isinstance(value, bool):
                raise UserError(f"{where}: must be true or false")
        elif float in kinds:
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                hint = " (YAML reads 4e-4 as text: write 4.0e-4)" if isinstance(value, str) else ""
                raise UserError(f"{where}: must be a finite number{hint}")
            if meta.get("at_least") is not None and value < meta["at_least"]:
                raise UserError(f"{where}: must be at least {meta['at_least']:g}")
            if meta.get("above") is not None and value <= meta["above"]:
                raise UserError(f"{where}: must be greater than {meta['above']:g}")
            if meta.get("at_most") is not None and value > meta["at_most"]:
                raise UserError(f"{where}: must be at most {meta['at_most']:g}")
        elif not isinstance(value, str) or (meta.get("choices") and value not in meta["choices"]):
            raise UserError(f"{where}: {nearest(value, meta.get('choices') or ())}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """The options that every objective has.

    `level` is "token" or "response": the unit whose ratio is clipped.
    """

    name: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    source: ClassVar[str] = ""
    level: ClassVar[str] = "token"

    aggregation: str = option(
        "token-mean",
        "how per-token terms become one number; counts are those of the whole optimizer mini-batch",
        "verl",
        choices=AGGREGATIONS,
    )
    max_response_len: float | None = option(
        None,
        "constant divisor of `seq-mean-token-sum-norm`: the length limit of a response, not the padded length;"
        " unset: 1. A run sets its own limit (not from a config)",
        "Dr. GRPO code (generate_max_length)",
        above=0.0,
        internal=True,
    )
    mismatch: str = option(
        "none",
        "correction for sampler != learner (table below)",
        "off in the paper",
        choices=tuple(MISMATCH),
    )
    ratio: str = option(
        "learner",
        "the ratio divides by the `learner`'s old log-probs (the proximal policy) or by the `sampler`'s, which leaves"
        " nothing for `mismatch` to correct",
        "QuRL eq. 3 has the sampler's",
        choices=("learner", "sampler"),
    )
    mismatch_cap: float = option(2.0, "C, the cap of a truncated weight", "verl, slime, FlashRL (GSM8K)", above=0.0)
    mismatch_low: float | None = option(None, "lower bound of a mask; unset: the correction's own", at_least=0.0)
    mismatch_high: float | None = option(None, "upper bound of a mask; unset: the correction's own", above=0.0)
    positive_only: bool = option(False, "A < 0 counts as 0; denominators stay those of the batch", "QaRL ablation")
    on_policy: bool = option(
        False, "old_logprobs := stop_gradient(logprobs): one update per rollout batch, ratio 1", "QaRL ablation"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregation", canonical_aggregation(self.aggregation))
        check(self)
        for field in ("mismatch_low", "mismatch_high"):
            users = [name for name, correction in MISMATCH.items() if field in correction.reads]
            if getattr(self, field) is not None and self.mismatch not in users:
                raise UserError(
                    f"loss {self.name!r}: {field} is set, but mismatch = {self.mismatch!r} has no such bound; "
                    f"it belongs to {', '.join(users)}"
                )
        if self.ratio == "sampler" and (self.mismatch != "none" or self.on_policy):
            what = "on_policy" if self.on_policy else f"mismatch = {self.mismatch!r}"
            raise UserError(
                f"loss {self.name!r}: ratio = 'sampler' and {what} both say what the learner is compared with; set"
                " mismatch = 'none' and on_policy = false, or ratio = 'learner'"
            )
        low, high = bounds(self)
        if low >= high:
            raise UserError(
                f"loss {self.name!r}: mismatch = {self.mismatch!r} has the lower bound {low:g}, which must be below its"
                f" upper bound {high:g}: change mismatch_cap, mismatch_low or mismatch_high"
            )
