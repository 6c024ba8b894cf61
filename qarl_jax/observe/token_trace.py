# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Traces the tokens of a step's logged responses: log-probs, ratios, weights, and whether the loss dropped them.

The compiled gradient program also returns the log-probs it differentiated (`learner.Options.token_logprobs`), and the
loss's functions compute ratios and weights from them (`loss.common.token_effects`). So a trace costs no forward pass,
and its ratios are those that the loss compared with its band.

    follow = Follower(picks, learner.loss_fn, most=cfg.log.sample_tokens, rows=cfg.log.samples_per_step)
    learn(..., follow)                     # follow.packed(...), then follow.updated(...) for every update
    follow.records(groups, tokenizer)      # {(group, sample): {"update": 2, "seq_ratio": 1.0016, "tokens": {...}}}

With several passes over a response (`train.update_epochs`) the last is traced. In a step's first update the weights
have not changed, and every ratio is 1 up to `proximal/noise`.

Numbers are rounded to six digits: enough to tell 1.0003 from 1.0004, and half the size on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from qarl_jax.data.packing import Packed, Segment
from qarl_jax.data.tokenizer import Tokenizer, pieces
from qarl_jax.loss import Loss, Objective
from qarl_jax.loss.common import token_effects
from qarl_jax.metrics import Metric, Rows
from qarl_jax.runtime import processes
from qarl_jax.types import LossInputs, RolloutGroup, TrainBatch

LOGPROBS = "tokens/logprobs"
"""The key of the scores among the learner's metrics."""

Pick = tuple[int, int]
"""(group, sample) of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """The place of a response in the update that used it last, and the arrays of that update."""

    update: int
    row: int
    segment: Segment
    batch: TrainBatch
    old: Any
    now: Any


class Follower:
    """Traces chosen responses of one step through its updates.

    Args:
      picks: (group, sample) of each response to trace.
      most: most tokens recorded per response; of a longer one half at its beginning, half at its end; 0: none.
      rows: static upper bound on the number of picks, so that one program fits every step.

    Raises:
      ValueError: there are more picks than `rows`.
    """

    def __init__(self, picks: Sequence[Pick], loss: Objective, *, most: int, rows: int):
        if len(picks) > rows:
            raise ValueError(f"{len(picks)} picks in {rows} rows")
        self._loss, self._most, self._rows = loss, most, rows
        self._picks = list(picks) if most and isinstance(loss, Loss) else []
        self._updates: list[dict[Pick, Segment]] = []
        self._seen: dict[Pick, _Seen] = {}

    def packed(self, chosen: Sequence[int] | np.ndarray, packed: Packed) -> None:
        """Notes that the step's next update uses groups `chosen`, packed into these rows."""
        wanted = set(self._picks)
        at = {(int(chosen[s.group]), s.sample): s for s in packed.segments}
        self._updates.append({pick: segment for pick, segment in at.items() if pick in wanted})

    def updated(self, number: int, micros: Sequence[TrainBatch], old: Sequence[Any], now: Metric | None) -> None:
        """Notes that update `number` used these micro-batches. Fetches nothing from the device.

        Args:
          old: per micro-batch the proximal policy's log-probs [B, T]; None if they equal the update's.
          now: per micro-batch the log-probs [B, T] in the update's forward; None if the learner does not return them.
        """
        if not isinstance(now, Rows):
            return
        for pick, segment in self._updates[number].items():
            micro, row = divmod(segment.row, micros[0].tokens.shape[0])
            self._seen[pick] = _Seen(
                update=number + 1, row=row, segment=segment, batch=micros[micro], old=old[micro], now=now.parts[micro]
            )

    def records(self, groups: Sequence[RolloutGroup], tokenizer: Tokenizer) -> dict[Pick, dict[str, Any]]:
        """Makes the records of samples.jsonl, one per response that took part in an update.

        `advantage`, `update` (of `updates`), `seq_ratio`, `seq_mismatch` (geometric means), `cut` (tokens without
        gradient, of all) and `tokens`: columns `text`, `rollout`, `old`, `now` (log-probs), `ratio`, `mismatch`,
        `weight`, `gain`, `fate` (index into `token_effects.FATES`), and `left_out: [at, count]` where the middle of a
        long response is missing.
        """
        picks = [pick for pick in self._picks if pick in self._seen]
        if not picks or not isinstance(self._loss, Loss):
            return {}
        x = self._inputs([self._seen[pick] for pick in picks])
        done = jax.device_get(token_effects.compiled(x, self._loss))
        out = {}
        for row, (group, sample) in enumerate(picks):
            completion = groups[group].completions[sample]
            seen = self._seen[group, sample]
            where = np.flatnonzero(x.loss_mask[row])
            shown, left_out = _shown(len(where), self._most)
            at = where[shown]
            columns: dict[str, Any] = {
                "text": _texts(tokenizer, completion.tokens, at - seen.segment.response.start, left_out[0]),
                "rollout": _rounded(x.rollout_logprobs[row, at]),
                "old": _rounded(x.old_logprobs[row, at]),
                "now": _rounded(x.logprobs[row, at]),
                "ratio": _rounded(np.exp(done.log_ratio[row, at])),
                "mismatch": _rounded(np.exp(done.log_mismatch[row, at])),
                "weight": _rounded(done.weight[row, at]),
                "gain": _rounded(done.gain[row, at]),
                "fate": [int(f) for f in done.fate[row, at]],
            }
            if left_out[1]:
                columns["left_out"] = left_out
            fate = done.fate[row, where]
            out[group, sample] = {
                "advantage": _rounded(x.advantages[row, where].mean()),
                "update": seen.update,
                "updates": len(self._updates),
                "seq_ratio": _rounded(np.exp(done.seq_log_ratio[row, where[0]])),
                "seq_mismatch": _rounded(np.exp(done.seq_log_mismatch[row, where[0]])),
                "cut": {
                    name: int((fate == i).sum())
                    for i, name in enumerate(token_effects.FATES)
                    if i and (fate == i).any()
                },
                "tokens": columns,
            }
        return out

    def _inputs(self, seen: Sequence[_Seen]) -> LossInputs:
        """The responses as a batch of the objective, one to a row, each where it lay; unused rows are padding."""
        length = seen[0].batch.tokens.shape[1]
        rows: dict[str, np.ndarray] = {
            name: np.zeros((self._rows, length), np.float32)
            for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
        }
        mask = np.zeros((self._rows, length), bool)
        fetched: dict[int, Any] = {}
        for row, one in enumerate(seen):
            now = one.now
            if id(now) not in fetched:  # several responses of one micro-batch
                old = now if one.old is None else one.old
                arrays = (now, old, one.batch.rollout_logprobs, one.batch.advantages, one.batch.loss_mask)
                fetched[id(now)] = processes.fetch(arrays)
            at = one.segment.response
            for name, values in zip(rows, fetched[id(now)], strict=False):
                rows[name][row, at] = values[one.row, at]
            mask[row, at] = fetched[id(now)][-1][one.row, at]
        return LossInputs(**rows, loss_mask=mask, segment_ids=mask.astype(np.int32), max_segments=1)


def _shown(count: int, most: int) -> tuple[list[int], list[int]]:
    """Picks tokens at both ends, and [first, count] of those left out. Example: (10, 4) -> [0, 1, 8, 9], [2, 6]."""
    if count <= most:
        return list(range(count)), [0, 0]
    head = most - most // 2
    return [*range(head), *range(count - most // 2, count)], [head, count - most]


def _texts(tokenizer: Tokenizer, response: Sequence[int], at: np.ndarray, cut: int) -> list[str]:
    """Decodes the tokens at `at`; the two runs before and after `cut` are decoded separately."""
    out: list[str] = []
    for part in (at[:cut], at[cut:]):
        if len(part):
            text = pieces(tokenizer, response[part[0] : part[-1] + 1])
            out += [text[i - part[0]] for i in part]
    return out


def _rounded(values: Any) -> Any:
    """Rounds a number or an array to six digits; numbers that are not finite, which JSON lacks, become None."""
    x = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        power = np.clip(5 - np.floor(np.log10(np.abs(x))), -300, 300)
        up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
        rounded = np.round(x * up / down) / up * down  # a whole number over a power of ten: few digits in JSON
    out = np.asarray(rounded, object)
    out[~np.isfinite(rounded)] = None
    return out.tolist()
