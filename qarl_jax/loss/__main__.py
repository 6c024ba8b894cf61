# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.loss` prints `docs/algorithms.md`: every objective, correction and term, from the code itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from qarl_jax.loss import LOSSES, MISMATCH, TERMS
from qarl_jax.loss.advantages import ADVANTAGES
from qarl_jax.loss.common.aggregation import denominator
from qarl_jax.loss.common.options import AGGREGATIONS, Shared

_HEAD = """\
# Objectives, sampler corrections and terms

Generated from the code by `python -m qarl_jax.loss > docs/algorithms.md`; a test keeps it up to date.

Notation: r_t = exp(logprob_t - old_logprob_t), learner now over learner at the start of the update, its log clamped to
+-20; rho_t = exp(old_logprob_t - rollout_logprob_t), learner at the start of the update over sampler; A the advantage;
w the sampler correction, never differentiated; L the masked tokens of a response; M and N the masked tokens and
non-empty responses of the whole optimizer mini-batch; sg stops the gradient. Objectives are maximized: the loss is
their negative. Padding may hold NaN; empty responses count nowhere; rejected and dropped ones stay in the denominators.

In a config: `loss: {name: grpo, mismatch: tis, clip_high: 0.28}`. In code: `get_loss("grpo", mismatch="tis")`.
"""

_AGGREGATION = {
    "token-mean": "sum of all token terms / M",
    "seq-mean-token-mean": "sum over responses of (sum of token terms / L) / N",
    "seq-mean-token-sum": "sum of all token terms / N",
    "seq-mean-token-sum-norm": "sum of all token terms / (N max_response_len)",
}


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines) + "\n"


def _show(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _options(config_type: Any, *, skip: frozenset[str] = frozenset()) -> list[list[str]]:
    rows = []
    for field in dataclasses.fields(config_type):
        if field.name not in skip:
            meta = field.metadata
            allowed = ", ".join(meta["choices"] or ()) if field.name != "mismatch" else "see corrections"
            rows.append([f"`{field.name}`", _show(field.default), meta["doc"], meta["source"] or "-", allowed or "-"])
    return rows


_OPTION_HEADER = ["option", "default", "meaning", "default from", "one of"]


def _inherited(config_type: Any) -> frozenset[str]:
    """Shared fields that a Config leaves as they are."""
    own = {field.name: field for field in dataclasses.fields(config_type)}
    return frozenset(f.name for f in dataclasses.fields(Shared) if own[f.name].default == f.default)


def document() -> str:
    """The whole of `docs/algorithms.md`."""
    parts = [_HEAD, "## Objectives\n"]
    rows = []
    for config_type in LOSSES:
        config = config_type()
        rows.append(
            [
                f"`{config.name}`",
                f"`{config.formula}`",
                config.source,
                config.aggregation,
                denominator(config.aggregation),
            ]
        )
    parts.append(_table(["name", "objective", "source", "aggregation", "Mean counts"], rows))
    parts.append("## Options of every objective\n")
    parts.append(_table(_OPTION_HEADER, _options(Shared)))
    for config_type in LOSSES:
        own = _options(config_type, skip=_inherited(config_type))
        parts.append(f"### `{config_type.name}`\n")
        parts.append(f"{config_type.__doc__.strip()}\n")
        parts.append(_table(_OPTION_HEADER, own))
    parts.append("## Aggregation\n")
    parts.append(_table(["mode", "value"], [[f"`{mode}`", _AGGREGATION[mode]] for mode in AGGREGATIONS]))
    parts.append("## Advantages (`advantage`)\n")
    parts.append(
        "R is the reward of a response, R_t that of its token t: R at the last one and 0 before. `gae` needs a critic\n"
        "(`qarl_jax.learning.critic`) and takes groups of any size, one response included.\n"
    )
    rows = [[f"`{name}`", f"`{c.formula}`", c.source] for name, c in ADVANTAGES.items()]
    parts.append(_table(["name", "advantage", "source"], rows))
    for name, config_type in ADVANTAGES.items():
        if dataclasses.fields(config_type):
            parts.append(f"### `{name}`\n")
            parts.append(_table(_OPTION_HEADER, _options(config_type)))
    parts.append("## Sampler corrections (`mismatch`)\n")
    parts.append(
        "Each names its level: the same rule at another level differs by orders of magnitude. All work with\n"
        "every objective. `acr` widens a clip: with one that has none (`tbpo`, `sapo`, `cispo`) it equals `tis`.\n"
    )
    rows = [
        [f"`{name}`", c.level or "-", c.formula, ", ".join(f"`{o}`" for o in c.reads) or "-", c.source]
        for name, c in MISMATCH.items()
    ]
    parts.append(_table(["name", "level", "weight", "reads", "source"], rows))
    parts.append("## Terms beside the objective\n")
    rows = [[f"`{c.name}`", f"`{c.formula}`", c.source] for c in TERMS]
    parts.append(_table(["name", "loss", "source"], rows))
    for config_type in TERMS:
        parts.append(f"### `{config_type.name}`\n")
        parts.append(_table(_OPTION_HEADER, _options(config_type)))
    return "\n".join(parts)


if __name__ == "__main__":
    print(document(), end="")
