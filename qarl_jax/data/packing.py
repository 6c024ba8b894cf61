# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs responses into rows of a fixed shape.

A segment is a prompt followed by one response. Segments are placed whole, longest first, each into the row where it
leaves the least room (best fit decreasing). Most rows are nearly full, and attention never crosses segments. Shapes
come from a small fixed set (row lengths given by the caller, rows rounded up to whole micro-batches), so nothing is
compiled twice.

    minis = mini_batches(len(groups), prompts_per_update=8, seed=0, step=3, epoch=0)      # split first, then pack
    packed = pack([groups[i] for i in minis[0]], advantages[minis[0]], row_len=512, rows_multiple=4)
    for batch in packed.micro_batches(4): ...                                             # TrainBatch [4, 512]

The result is a pure function of its arguments. A response without tokens is left out.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from qarl_jax.types import Completion, RolloutGroup, TrainBatch, Turn, UserError

# Keeps these shuffles apart from other draws of the same seed.
_MINI_BATCH = 0xBA7C4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """The place of one response in a batch.

    Attributes:
      group, sample: the response is groups[group].completions[sample].
      row: row of the batch; number: the response's value in segment_ids, from 1.
      start: position of the prompt's first token; prompt_len, response_len: tokens of either.
      version: oldest policy version its tokens were drawn under.
    """

    group: int
    sample: int
    row: int
    number: int
    start: int
    prompt_len: int
    response_len: int
    version: int

    @property
    def response(self) -> slice:
        """The positions of the response in its row."""
        begin = self.start + self.prompt_len
        return slice(begin, begin + self.response_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """Packed rows, and the place of each response in them.

    Attributes:
      batch: TrainBatch of numpy arrays [R, T].
      segments: in the order of groups and samples; responses without tokens are absent.
      num_tokens, num_sequences: response tokens that were drawn and non-empty responses, the loss's denominators.
      padding_share: share of the positions [R, T] that are padding.
      max_segments: static upper bound on segment numbers, the same for every call with the same settings.
    """

    batch: TrainBatch
    segments: tuple[Segment, ...]
    num_tokens: int
    num_sequences: int
    padding_share: float
    max_segments: int

    def micro_batches(self, rows: int) -> Iterator[TrainBatch]:
        """Yields the rows in order, `rows` at a time. Raises ValueError unless `rows` divides their number."""
        total = self.batch.tokens.shape[0]
        if total % rows:
            raise ValueError(f"{total} rows cannot be split into micro-batches of {rows}")
        for start in range(0, total, rows):
            yield jax.tree.map(lambda x, start=start: x[start : start + rows], self.batch)

    def responses(self, values: Shaped[np.ndarray, "R T"]) -> list[np.ndarray]:
        """Unpacks an array [R, T]: returns, per segment, its entries at the response's tokens."""
        return [values[segment.row, segment.response] for segment in self.segments]


def mini_batches(num_prompts: int, prompts_per_update: int, *, seed: int, step: int, epoch: int) -> list[np.ndarray]:
    """Returns the prompt indices of each optimizer update of one epoch; a pure function of its arguments.

    An entry is an int64 array [prompts_per_update]; the last may be shorter.
    Epoch 0 keeps the sampling order (already a shuffle of the data set); later epochs are shuffled.
    """
    order = np.arange(num_prompts)
    if epoch > 0:
        order = np.random.default_rng([_MINI_BATCH, seed, step, epoch]).permutation(num_prompts)
    return [order[start : start + prompts_per_update] for start in range(0, num_prompts, prompts_per_update)]


def pack(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[Any]] | np.ndarray,
    *,
    row_len: int | Sequence[int],
    rows_multiple: int = 1,
    max_segments: int = 16,
    pad_id: int = 0,
) -> Packed:
    """Packs the responses of groups into rows, with their advantages.

    Args:
      groups: P groups; their sizes may differ.
      advantages: advantages[g][j] belongs to groups[g].completions[j]: a number, or one for each of its turns (and any
        number after them).
      row_len: row length T, or a few allowed ones, of which the one with the smallest batch is taken.
      rows_multiple: the number of rows is rounded up to a multiple of this (the micro-batch), with empty rows.
      max_segments: most responses in a row.
      pad_id: token at padding positions; it is masked everywhere.

    Returns:
      A `Packed` whose batch has at least `rows_multiple` rows.

    Raises:
      UserError: a prompt with its response is longer than the longest row.
    """
    lengths = sorted({row_len} if isinstance(row_len, int) else set(row_len))
    items = _items(groups)
    _check(groups, items, lengths[-1])
    best: tuple[int, int, list[list[int]]] | None = None
    sizes = [item[2] + item[3] for item in items]
    for length in lengths:
        if sizes and max(sizes) > length:
            continue
        rows = _place(sizes, length, max_segments)
        count = max(rows_multiple, -(-len(rows) // rows_multiple) * rows_multiple)
        # On a tie the longer row: fewer rows, the same number of positions.
        if best is None or count * length <= best[0] * best[1]:
            best = (count, length, rows)
    assert best is not None  # _check saw that the longest row is long enough
    return _fill(groups, advantages, items, best, max_segments, pad_id)


def _per_token(completion: Completion, advantage: Any) -> Any:
    """A number for all tokens of a response, or one per token where each turn has its own."""
    if not np.ndim(advantage):
        return advantage
    out = np.zeros(len(completion.tokens), np.float32)
    for turn, value in zip(completion.turns or (Turn(start=0, end=len(out)),), advantage, strict=False):
        out[turn.start : turn.end] = value
    return out


_Item = tuple[int, int, int, int]  # group, sample, prompt_len, response_len


def _items(groups: Sequence[RolloutGroup]) -> list[_Item]:
    return [
        (g, j, len(completion.prompt_tokens), len(completion.tokens))
        for g, group in enumerate(groups)
        for j, completion in enumerate(group.completions)
        if completion.tokens
    ]


def _check(groups: Sequence[RolloutGroup], items: Sequence[_Item], longest: int) -> None:
    for g, j, prompt_len, response_len in items:
        uid = groups[g].prompt.uid
        if prompt_len == 0:
            raise ValueError(f"prompt {uid} has no tokens: the first response token would be scored by nothing")
        if prompt_len + response_len > longest:
            raise UserError(
                f"sample {j} of prompt {uid} has {prompt_len} + {response_len} tokens, too many for a row of {longest}."
                " Raise train.row_len, or lower data.max_prompt_len or rollout.max_response_len."
            )


def _place(sizes: Sequence[int], length: int, limit: int) -> list[list[int]]:
    """Best fit decreasing: per row, the items in it. Ties go to the earlier item and the earlier row."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect.bisect_left(open_rows, (sizes[item], -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(item)
        room -= sizes[item]
        if room > 0 and len(rows[row]) < limit:
            bisect.insort(open_rows, (room, row))
    return rows


def _empty_routing(groups: Sequence[RolloutGroup], shape: tuple[int, int]) -> np.ndarray | None:
    """[R, T, L, k] of -1 where any completion knows the experts of its tokens."""
    for group in groups:
        for completion in group.completions:
            if completion.routed_experts is not None:
                return np.full((*shape, *completion.routed_experts.shape[1:]), -1, np.int16)
    return None


def _fill(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[Any]] | np.ndarray,
    items: Sequence[_Item],
    layout: tuple[int, int, list[list[int]]],
    limit: int,
    pad_id: int,
) -> Packed:
    count, length, rows = layout
    shape = (count, length)
    tokens = np.full(shape, pad_id, np.int32)
    positions = np.zeros(shape, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    loss_mask = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    advantage = np.zeros(shape, np.float32)
    segments: list[Segment | None] = [None] * len(items)
    routed = _empty_routing(groups, shape)
    for row, members in enumerate(rows):
        at = 0
        for number, item in enumerate(members, start=1):
            g, j, prompt_len, response_len = items[item]
            completion = groups[g].completions[j]
            end = at + prompt_len + response_len
            segment = Segment(
                group=g,
                sample=j,
                row=row,
                number=number,
                start=at,
                prompt_len=prompt_len,
                response_len=response_len,
                version=completion.policy_version,
            )
            tokens[row, at : at + prompt_len] = completion.prompt_tokens
            tokens[row, segment.response] = completion.tokens
            positions[row, at:end] = np.arange(prompt_len + response_len)
            segment_ids[row, at:end] = number
            loss_mask[row, segment.response] = drawn = completion.drawn
            logprobs[row, segment.response] = completion.logprobs
            advantage[row, segment.response] = np.where(drawn, _per_token(completion, advantages[g][j]), 0.0)
            if routed is not None and completion.routed_experts is not None:
                routed[row, at : at + len(completion.routed_experts)] = completion.routed_experts
            segments[item] = segment
            at = end
    used = int((segment_ids > 0).sum())
    return Packed(
        batch=TrainBatch(
            tokens=tokens,
            positions=positions,
            segment_ids=segment_ids,
            loss_mask=loss_mask,
            rollout_logprobs=logprobs,
            advantages=advantage,
            routed_experts=routed,
        ),
        segments=tuple(segment for segment in segments if segment is not None),
        num_tokens=int(loss_mask.sum()),
        num_sequences=len(items),
        padding_share=1.0 - used / (count * length),
        max_segments=limit,
    )
