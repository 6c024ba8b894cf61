# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Partial rollouts (APRIL, arXiv 2509.18521): no step waits for its longest response.

A step has more prompts in hand than it trains on, and stops sampling as soon as enough groups are complete. What is
unfinished by then is kept, and the next step goes on with it, under the next policy:

    fill up     groups in hand, oldest first, then new prompts, to over_provision x train.prompts_per_step
    look        enough complete groups, and none overdue? then train on the oldest, and keep the others
    draw        `chunk` tokens more of every unfinished response, then look again

Every token keeps the log-probability of the version that drew it, and a `VersionSpan` says which that was. So the
behaviour policy of a response of several versions is known token by token, and the sampler's correction in the loss
(`mismatch`) reads it as any other; the proximal policy is scored by the learner as ever. What is lost is freshness, and
`rollout/lag_mean` and `rollout/lag_max` measure it.

What is interrupted depends on counted tokens, never on the clock: with the embedded sampler, whose draws are a function
of (weights, prompt, sample, position), a step is a function of (seed, step, weights, groups in hand), and the groups in
hand are part of a checkpoint. So a killed run goes on to the same bits. The price is a prefill of what is unfinished at
every look (which vLLM's prefix cache spares): `chunk` sets how often.

The bound on the age is ours. A group begun at step s is trained on at step s + max_lag at the latest: sampling goes on
until it is complete. With at most twice the prompts of a step in hand there is always room for those that are due,
since the oldest complete groups are taken first.

Prompts are taken from the stream in its order, the next ones whenever there is room; with dynamic sampling a complete
group without a signal makes room, until rollout.dynamic.max_batches steps' worth of prompts have been begun. Responses
draw with the randomness of the step their group was begun in: the first groups of a run are those it would have without
partial rollouts.

Left out: stopping inside a chunk, which an engine could do by itself at the cost of an interface of its own; trading
the age of a group against its length; routed experts of a response in pieces.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qarl_jax.data import PromptStream
from qarl_jax.rollout import Request, dynamic_sampling
from qarl_jax.rollout.dynamic_sampling import Collected, Parts
from qarl_jax.types import Completion, Prompt, RolloutGroup, Turn, UserError, VersionSpan

Extend = Callable[[list[Request]], list[Completion]]
Grade = Callable[[list[Prompt], list[tuple[Completion, ...]]], tuple[list[RolloutGroup], Parts]]

_UNFINISHED = "abort"
_PIECES = 8  # chunks of the longest response, where `chunk` is not set


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Partial rollouts.

    Attributes:
      over_provision: prompts in hand over prompts of a step, in [1, 2]; 1: off, every response is finished in its step.
      chunk: tokens added to every unfinished response between two looks at which groups are complete; 0: an eighth of
        the limit on responses.
      max_lag: steps after which a group is finished and trained on, however long that takes.
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
        """Whether anything is interrupted."""
        return self.over_provision > 1

    def groups(self, prompts_per_step: int) -> int:
        """Groups in hand while a step samples."""
        return math.ceil(round(self.over_provision * prompts_per_step, 6))

    def tokens(self, max_response_len: int) -> int:
        """Tokens between two looks, resolved."""
        return min(self.chunk or -(-max_response_len // _PIECES), max_response_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt in hand, with its responses so far.

    Attributes:
      index: of the prompt in its source.
      prompt: the prompt.
      step: at which it was begun.
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
        """Whether every response has ended."""
        return all(response.finish_reason != _UNFINISHED for response in self.responses)

    @property
    def name(self) -> tuple[int, int, int]:
        """Tells it from every other group."""
        return self.step, self.index, self.first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """What a step hands to the next: groups in hand, oldest first, and how many prompts of the stream were begun."""

    begun: int = 0
    groups: tuple[Group, ...] = ()

    def state(self) -> dict[str, Any]:
        """The buffer as JSON, for a checkpoint; every number comes back to the bit. Prompts go by their index."""
        return {
            "begun": self.begun,
            "groups": [
                {
                    "index": group.index,
                    "step": group.step,
                    "first": group.first,
                    "responses": [response_state(response) for response in group.responses],
                }
                for group in self.groups
            ],
        }


def restore(cfg: Config, state: Mapping[str, Any] | None, stream: PromptStream, step: int, num_samples: int) -> Buffer:
    """The buffer a run goes on with after `step`; `state` None: a run that begins, or had no partial rollouts so far.

    Raises:
      UserError: the checkpoint holds groups that this run could not go on with.
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
        responses = tuple(response_of(prompt, response) for response in entry["responses"])
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
      cfg, dynamic: partial rollouts, and dynamic sampling.
      stream: the prompts.
      step: the step, and the version that samples.
      buffer: what the step before left.
      num_samples: responses per prompt.
      max_response_len: the step's limit on a response.
      key: step a group was begun in -> key of its draws.
      extend: the engine's, see `RolloutEngine`.
      grade: (prompts, their completions) -> their groups and the reward terms over all their samples.

    Returns:
      The groups to train on, and the buffer for the next step. `buffer` itself stays as it is: a step may be dropped.
    """
    size, limit = stream.prompts_per_step, max_response_len
    chunk = cfg.tokens(limit)
    is_dynamic = dynamic.max_batches > 1
    # A limit that has come down (`rollout.stages`) ends what has reached it.
    pool = [
        dataclasses.replace(group, responses=tuple(_ended(r, limit) for r in group.responses))
        for group in buffer.groups
    ]
    begun = buffer.begun
    copies: collections.Counter[str] = collections.Counter()
    graded: dict[tuple[int, int, int], tuple[RolloutGroup, Parts]] = {}
    idle: list[Group] = []
    unfinished = sum(r.finish_reason == _UNFINISHED for group in pool for r in group.responses)
    rounds = drawn = 0

    def judge(groups: Sequence[Group]) -> None:
        new = [group for group in groups if group.name not in graded]
        if new:
            found, parts = grade([group.prompt for group in new], [group.responses for group in new])
            for i, group in enumerate(new):
                mine = slice(i * num_samples, (i + 1) * num_samples)
                graded[group.name] = found[i], {term: values[mine] for term, values in parts.items()}

    while True:
        # ---- look ----------------------------------------------------------------------------------------------------
        if is_dynamic:
            complete = [group for group in pool if group.is_complete]
            judge(complete)
            useless = {
                g.name for g in complete if not dynamic_sampling.informative(*_one(graded[g.name]), dynamic.metric)[0]
            }
            idle += [group for group in pool if group.name in useless]
            pool = [group for group in pool if group.name not in useless]
        overdue = any(not group.is_complete and step - group.step >= cfg.max_lag for group in pool)
        if sum(group.is_complete for group in pool) >= size and not overdue:
            break
        # ---- fill up -------------------------------------------------------------------------------------------------
        room = cfg.groups(size) - len(pool)
        if is_dynamic:
            room = min(room, dynamic.max_batches * size - (begun - buffer.begun))
        for index in stream.positions(begun, max(0, room)):
            prompt = stream.source.prompt(index)
            first = num_samples * copies[prompt.uid]
            copies[prompt.uid] += 1
            empty = (begin(prompt),) * num_samples
            pool.append(Group(index=index, prompt=prompt, step=step, first=first, responses=empty))
            begun += 1
        # ---- draw ----------------------------------------------------------------------------------------------------
        places = [
            (i, j)
            for i, group in enumerate(pool)
            for j, response in enumerate(group.responses)
            if response.finish_reason == _UNFINISHED
        ]
        if not places:
            break  # dynamic sampling has reached its bound
        requests = []
        for i, j in places:
            group, so_far = pool[i], pool[i].responses[j].tokens
            requests.append(
                Request(
                    prompt=group.prompt,
                    number=group.first + j,
                    key=key(group.step),
                    tokens=so_far,
                    max_tokens=min(chunk, limit - len(so_far)),
                )
            )
        added = extend(requests)
        longer = [list(group.responses) for group in pool]
        for (i, j), more in zip(places, added, strict=True):
            longer[i][j] = joined(longer[i][j], more, limit)
            drawn += len(more.tokens)
        pool = [dataclasses.replace(g, responses=tuple(r)) for g, r in zip(pool, longer, strict=True)]
        rounds += 1

    # ---- take the oldest, keep the others ----------------------------------------------------------------------------
    chosen = [group for group in pool if group.is_complete][:size]
    short = size - len(chosen)
    trained, spare = [*chosen, *idle[:short]], idle[short:]
    judge([*trained, *spare])
    taken = {group.name for group in chosen}
    left = tuple(group for group in pool if group.name not in taken)
    sampled = [graded[group.name] for group in [*trained, *spare]]
    metrics = {
        "rollout/partial_rounds": float(rounds),
        "rollout/partial_tokens": float(drawn),
        "rollout/partial_continued": float(unfinished if rounds else 0),
        "rollout/partial_buffered": float(sum(r.finish_reason == _UNFINISHED for g in left for r in g.responses)),
        **lags([response for group in trained for response in group.responses], step),
    }
    if is_dynamic:
        metrics |= {
            "rollout/batches": (begun - buffer.begun) / size,
            "rollout/groups_dropped": len(idle) / len(sampled),
            "rollout/groups_filled": short / size,
        }
    collected = Collected(
        groups=[group for group, _ in sampled[:size]],
        sampled=[group for group, _ in sampled],
        parts={term: np.concatenate([parts[term] for _, parts in sampled]) for term in sampled[0][1]},
        metrics=metrics,
    )
    return collected, Buffer(begun=begun, groups=left)


def begin(prompt: Prompt) -> Completion:
    """A response of which nothing has been drawn."""
    return Completion(
        prompt_tokens=tuple(prompt.tokens),
        tokens=(),
        logprobs=np.zeros(0, np.float32),
        finish_reason=_UNFINISHED,
        versions=(),
    )


def is_over(response: Completion) -> bool:
    """Whether nothing is to be added to it."""
    return response.finish_reason != _UNFINISHED


def response_state(response: Completion) -> dict[str, Any]:
    """A response as JSON, for a checkpoint; every number comes back to the bit."""
    state: dict[str, Any] = {
        "tokens": _text(np.asarray(response.tokens, "<i4")),
        "logprobs": _text(np.asarray(response.logprobs, "<f4")),
        "finish_reason": response.finish_reason,
        "versions": [[span.version, span.start, span.end] for span in response.versions],
    }
    if response.turns:
        state["turns"] = [[turn.start, turn.end, turn.reward] for turn in response.turns]
    if response.routed_experts is not None:
        state["routed"] = _text(response.routed_experts.astype("<i2"))
        state["routed_shape"] = list(response.routed_experts.shape)
    return state


def response_of(prompt: Prompt, state: Mapping[str, Any]) -> Completion:
    """What `response_state` wrote of a response to this prompt."""
    routed = _array(state["routed"], "<i2").reshape(state["routed_shape"]) if "routed" in state else None
    return Completion(
        prompt_tokens=tuple(prompt.tokens),
        tokens=tuple(_array(state["tokens"], "<i4").tolist()),
        logprobs=_array(state["logprobs"], "<f4").astype(np.float32),
        finish_reason=state["finish_reason"],
        versions=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in state["versions"]),
        routed_experts=routed,
        turns=tuple(Turn(start=s, end=e, reward=r) for s, e, r in state.get("turns", ())),
    )


def joined(before: Completion, added: Completion, max_response_len: int) -> Completion:
    """A response and what was added to it, as one; unfinished below the limit, unless it stopped by itself."""
    if not added.tokens:
        raise RuntimeError("the engine added no token to a response that it was asked to go on with")
    start = len(before.tokens)
    spans = list(before.versions)
    for span in added.versions:
        moved = VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
        if spans and spans[-1].version == moved.version:
            moved = dataclasses.replace(moved, start=spans.pop().start)
        spans.append(moved)
    whole = dataclasses.replace(
        before,
        tokens=before.tokens + added.tokens,
        logprobs=np.concatenate([before.logprobs, added.logprobs]),
        finish_reason="stop" if added.finish_reason == "stop" else _UNFINISHED,
        versions=tuple(spans),
    )
    return _ended(whole, max_response_len)


def _ended(response: Completion, max_response_len: int) -> Completion:
    """The response, ended where it is unfinished at the limit."""
    if response.finish_reason != _UNFINISHED or len(response.tokens) < max_response_len:
        return response
    return dataclasses.replace(response, finish_reason="length")


def _one(graded: tuple[RolloutGroup, Parts]) -> tuple[list[RolloutGroup], Parts]:
    return [graded[0]], graded[1]


def lags(completions: Sequence[Completion], step: int) -> dict[str, float]:
    """How many versions ago the tokens trained on were drawn: `rollout/lag_mean`, `rollout/lag_max`."""
    spans = [span for completion in completions for span in completion.versions]
    tokens = np.array([span.end - span.start for span in spans])
    ages = np.array([step - span.version for span in spans])
    return {
        "rollout/lag_mean": float((tokens * ages).sum() / max(tokens.sum(), 1)),
        "rollout/lag_max": float(ages.max(initial=0)),
    }


def _text(array: np.ndarray) -> str:
    """Bytes as text: a third longer than the numbers themselves, where JSON's digits would be three times as long."""
    return base64.b64encode(array.tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)
