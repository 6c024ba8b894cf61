# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Partial rollouts (APRIL, arXiv 2509.18521): no step waits for its longest response.

A step samples more prompts than it trains on, and stops as soon as enough groups are complete. Unfinished responses are
kept, and the next step continues them under the next policy:

    fill up     kept groups, oldest first, then new prompts, to over_provision x train.prompts_per_step
    look        enough complete groups, and none overdue? then train on the oldest, and keep the rest
    draw        `chunk` tokens more of every unfinished response, then look again

Every token keeps the log-probability and the version that drew it (`continuation.py`), so the loss's importance
correction needs no change. The tokens are older; `rollout/lag_mean` and `rollout/lag_max` measure by how much.

Responses are interrupted after counted tokens, never by the clock. With the embedded sampler a step is a function of
(seed, step, weights, kept groups), and a checkpoint holds the kept groups: a resumed run computes the bits of an
uninterrupted one. The cost is a prefill of every unfinished response at each look, unless vLLM's prefix cache has it.
`chunk` sets how often.

The bound on a group's age (`max_lag`) is not in APRIL. It can be kept because a step holds at most twice its prompts
and trains on the oldest complete groups first.

Prompts are taken in the stream's order whenever there is room. With dynamic sampling a complete group of equal rewards
makes room, until rollout.dynamic.max_batches steps' worth of prompts have been begun. A response's random key is that
of the step its group was begun in, so a run's first groups equal those without partial rollouts.

Not supported: stopping inside a chunk; trading the age of a group against its length; routed experts of a response
drawn in pieces.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qarl_jax.data import PromptStream
from qarl_jax.rollout import Request, continuation, dynamic_sampling
from qarl_jax.rollout.continuation import UNFINISHED
from qarl_jax.rollout.dynamic_sampling import Collected, Parts
from qarl_jax.types import Completion, Prompt, RolloutGroup, UserError

Extend = Callable[[list[Request]], list[Completion]]
Grade = Callable[[list[Prompt], list[tuple[Completion, ...]]], tuple[list[RolloutGroup], Parts]]

_PIECES = 8  # chunks of the longest response, where `chunk` is not set


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Partial rollouts: unfinished responses are continued in the next step (APRIL).

    Attributes:
      over_provision: prompts sampled at once over prompts of a step, in [1, 2]; 1: off, no response is continued later.
      chunk: tokens added to every unfinished response between two looks at which groups are complete; 0: an eighth of
        the limit on responses.
      max_lag: steps after which a group must be finished: the step then waits for it, and trains on it.
    """

    over_provision: float = 1.0
    chunk: int = 0
    max_lag: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.over_provision <= 2:
            raise UserError(
                f"over_provision must lie in [1, 2] (1: off), got {self.over_provision}: with more than twice the"
                " prompts of a step in hand, max_lag could not be kept."
            )
        if self.chunk < 0:
            raise UserError(f"chunk must not be negative, got {self.chunk}; 0 means an eighth of the limit.")
        if self.max_lag < 1:
            raise UserError(
                f"max_lag must be at least 1, got {self.max_lag}; over_provision=1 finishes every response in its step."
            )
        if self.chunk and not self.is_on:
            raise UserError(f"chunk={self.chunk} decides nothing at over_provision=1 (partial rollouts off); raise it.")

    @property
    def is_on(self) -> bool:
        """Tells whether responses may be interrupted."""
        return self.over_provision > 1

    def groups(self, prompts_per_step: int) -> int:
        """Returns how many groups are sampled at once."""
        return math.ceil(round(self.over_provision * prompts_per_step, 6))

    def tokens(self, max_response_len: int) -> int:
        """Returns the tokens drawn between two looks; an eighth of `max_response_len` if `chunk` is 0."""
        return min(self.chunk or -(-max_response_len // _PIECES), max_response_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt that is being sampled, with its responses so far.

    Attributes:
      index: the prompt's index in its source.
      prompt: the prompt.
      step: the step that began the group.
      first: number of its first sample (not 0 for a second copy of a prompt in a step).
      responses: `finish_reason` is "abort" where unfinished.
    """

    index: int
    prompt: Prompt
    step: int
    first: int
    responses: tuple[Completion, ...]

    @property
    def is_complete(self) -> bool:
        """Tells whether every response has ended."""
        return all(continuation.is_over(response) for response in self.responses)

    @property
    def name(self) -> tuple[int, int, int]:
        """Returns (step, index, first), which no other group has."""
        return self.step, self.index, self.first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """The state between two steps: unfinished groups, oldest first, and the number of prompts begun in the stream."""

    begun: int = 0
    groups: tuple[Group, ...] = ()

    def state(self) -> dict[str, Any]:
        """Returns the buffer as JSON for a checkpoint, with prompts by index; `restore` gives back every bit."""
        return {
            "begun": self.begun,
            "groups": [
                {
                    "index": group.index,
                    "step": group.step,
                    "first": group.first,
                    "responses": [continuation.response_state(response) for response in group.responses],
                }
                for group in self.groups
            ],
        }


def restore(cfg: Config, state: Mapping[str, Any] | None, stream: PromptStream, step: int, num_samples: int) -> Buffer:
    """Rebuilds the buffer after `step` from a checkpoint's `state`; None: a run without partial rollouts so far.

    Raises:
      UserError: the run's config cannot continue the checkpoint's unfinished groups.
    """
    if state is None:
        return Buffer(begun=step * stream.prompts_per_step)
    if not cfg.is_on and (state["groups"] or state["begun"] != step * stream.prompts_per_step):
        raise UserError(
            f"cannot resume: the checkpoint holds {len(state['groups'])} groups that partial rollouts have begun, and"
            " rollout.partial is off. Turn it on again (over_provision above 1), or start a new run_dir."
        )
    groups = []
    for entry in state["groups"]:
        prompt = stream.source.prompt(entry["index"])
        if len(entry["responses"]) != num_samples:
            raise UserError(
                f"cannot resume: the checkpoint holds unfinished groups of {len(entry['responses'])} responses, and"
                f" rollout.num_samples_per_prompt is {num_samples}. Restore it, or start a new run_dir."
            )
        responses = tuple(continuation.response_of(prompt, response) for response in entry["responses"])
        groups.append(
            Group(index=entry["index"], prompt=prompt, step=entry["step"], first=entry["first"], responses=responses)
        )
    return Buffer(begun=state["begun"], groups=tuple(groups))


def collect(
    cfg: Config,
    dynamic: dynamic_sampling.Config,
    stream: PromptStream,
    step: int,
    buffer: Buffer,
    *,
    num_samples: int,
    max_response_len: int,
    key: Callable[[int], int],
    extend: Extend,
    grade: Grade,
) -> tuple[Collected, Buffer]:
    """Samples a step's groups.

    Args:
      step: the step, and the version that samples.
      buffer: the buffer that the step before left.
      num_samples: responses per prompt.
      max_response_len: the step's limit on a response, in tokens.
      key: maps the step that began a group to the random key of its responses.
      extend: draws more tokens of each request, as `RolloutEngine.extend` does.
      grade: maps (prompts, their completions) to rewarded groups and each reward term over all samples.

    Returns:
      The groups to train on, and a new buffer for the next step. `buffer` is not changed, so a step can be retried.
    """
    pool = Pool(cfg, dynamic, stream, step, buffer, num_samples, max_response_len, grade)
    while not pool.is_ready():
        pool.fill_up()
        requests = pool.requests(key)
        if not requests:
            break  # dynamic sampling has reached its bound
        pool.add(extend(requests))
    return pool.take()


class Pool:
    """The groups being sampled within one step. The constructor's arguments are those of `collect`."""

    def __init__(
        self,
        cfg: Config,
        dynamic: dynamic_sampling.Config,
        stream: PromptStream,
        step: int,
        buffer: Buffer,
        num_samples: int,
        limit: int,
        grade: Grade,
    ):
        self._cfg, self._dynamic, self._stream, self._step = cfg, dynamic, stream, step
        self._num_samples, self._limit, self._grade = num_samples, limit, grade
        self._size, self._is_dynamic = stream.prompts_per_step, dynamic.max_batches > 1
        # A limit that has come down (`rollout.stages`) ends the responses that have reached it.
        self._groups = [
            dataclasses.replace(group, responses=tuple(continuation.ended(r, limit) for r in group.responses))
            for group in buffer.groups
        ]
        self._before, self._begun = buffer.begun, buffer.begun
        self._copies: collections.Counter[str] = collections.Counter()
        self._graded: dict[tuple[int, int, int], tuple[RolloutGroup, Parts]] = {}
        self._idle: list[Group] = []  # complete, without a signal
        self._places: list[tuple[int, int]] = []  # (group, response) of the requests being drawn
        self._continued = _unfinished(self._groups)
        self._rounds = self._drawn = 0

    def is_ready(self) -> bool:
        """Tells whether the step has enough complete groups and none is overdue. Sets groups of equal rewards aside."""
        if self._is_dynamic:
            complete = [group for group in self._groups if group.is_complete]
            self._judge(complete)
            useless = {group.name for group in complete if not self._has_signal(group)}
            self._idle += [group for group in self._groups if group.name in useless]
            self._groups = [group for group in self._groups if group.name not in useless]
        overdue = any(not g.is_complete and self._step - g.step >= self._cfg.max_lag for g in self._groups)
        return sum(group.is_complete for group in self._groups) >= self._size and not overdue

    def fill_up(self) -> None:
        """Begins groups for the stream's next prompts until `Config.groups` are being sampled."""
        room = self._cfg.groups(self._size) - len(self._groups)
        if self._is_dynamic:
            room = min(room, self._dynamic.max_batches * self._size - (self._begun - self._before))
        for index in self._stream.positions(self._begun, max(0, room)):
            prompt = self._stream.source.prompt(index)
            first = self._num_samples * self._copies[prompt.uid]
            self._copies[prompt.uid] += 1
            empty = (continuation.begin(prompt),) * self._num_samples
            self._groups.append(Group(index=index, prompt=prompt, step=self._step, first=first, responses=empty))
            self._begun += 1

    def requests(self, key: Callable[[int], int]) -> list[Request]:
        """Makes a request for the next chunk of every unfinished response. key: as in `collect`."""
        chunk, requests = self._cfg.tokens(self._limit), []
        self._places = []
        for i, group in enumerate(self._groups):
            for j, response in enumerate(group.responses):
                if not continuation.is_over(response):
                    begun = Request(prompt=group.prompt, number=group.first + j, key=key(group.step), max_tokens=chunk)
                    room = self._limit - len(response.tokens)
                    requests.append(continuation.continued(begun, response, min(chunk, room)))
                    self._places.append((i, j))
        return requests

    def add(self, drawn: Sequence[Completion]) -> None:
        """Appends the pieces drawn for the last `requests`, in their order."""
        longer = [list(group.responses) for group in self._groups]
        for (i, j), more in zip(self._places, drawn, strict=True):
            longer[i][j] = continuation.joined(longer[i][j], more, self._limit)
            self._drawn += len(more.tokens)
        self._groups = [
            dataclasses.replace(group, responses=tuple(responses))
            for group, responses in zip(self._groups, longer, strict=True)
        ]
        self._rounds += 1

    def take(self) -> tuple[Collected, Buffer]:
        """Returns the oldest complete groups for the step, and the buffer of the rest."""
        chosen = [group for group in self._groups if group.is_complete][: self._size]
        short = self._size - len(chosen)
        trained, unused = [*chosen, *self._idle[:short]], self._idle[short:]
        self._judge([*trained, *unused])
        taken = {group.name for group in chosen}
        left = tuple(group for group in self._groups if group.name not in taken)
        sampled = [self._graded[group.name] for group in [*trained, *unused]]
        metrics = {
            "rollout/partial_rounds": float(self._rounds),
            "rollout/partial_tokens": float(self._drawn),
            "rollout/partial_continued": float(self._continued if self._rounds else 0),
            "rollout/partial_buffered": float(_unfinished(left)),
            **continuation.lags([response for group in trained for response in group.responses], self._step),
        }
        if self._is_dynamic:
            metrics |= {
                "rollout/batches": (self._begun - self._before) / self._size,
                "rollout/groups_dropped": len(self._idle) / len(sampled),
                "rollout/groups_filled": short / self._size,
            }
        collected = Collected(
            groups=[group for group, _ in sampled[: self._size]],
            sampled=[group for group, _ in sampled],
            parts={term: np.concatenate([parts[term] for _, parts in sampled]) for term in sampled[0][1]},
            metrics=metrics,
        )
        return collected, Buffer(begun=self._begun, groups=left)

    def _judge(self, groups: Sequence[Group]) -> None:
        new = [group for group in groups if group.name not in self._graded]
        if new:
            found, parts = self._grade([group.prompt for group in new], [group.responses for group in new])
            for i, group in enumerate(new):
                mine = slice(i * self._num_samples, (i + 1) * self._num_samples)
                self._graded[group.name] = found[i], {term: values[mine] for term, values in parts.items()}

    def _has_signal(self, group: Group) -> bool:
        graded, parts = self._graded[group.name]
        return bool(dynamic_sampling.informative([graded], parts, self._dynamic.metric)[0])


def _unfinished(groups: Sequence[Group]) -> int:
    return sum(response.finish_reason == UNFINISHED for group in groups for response in group.responses)
