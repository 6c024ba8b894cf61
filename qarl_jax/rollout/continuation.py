# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses drawn in pieces, under one policy version or several.

    response = begin(prompt)                            # nothing drawn; finish_reason "abort" marks it unfinished
    response = joined(response, added, limit)           # with a piece appended
    for index, whole in in_chunks(extend, requests, sampling, chunk=256): ...

Every token keeps the log-probability of the version that drew it, and a `VersionSpan` names that version. Partial
rollouts (`partial_rollouts.py`) and asynchronous training (`asynchronous.py`) are made of these functions.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qarl_jax.rollout import Request, SamplingConfig
from qarl_jax.types import Completion, Prompt, Turn, VersionSpan

UNFINISHED = "abort"


def begin(prompt: Prompt) -> Completion:
    """Makes a response without tokens; its finish_reason "abort" marks it as unfinished."""
    return Completion(
        prompt_tokens=tuple(prompt.tokens),
        tokens=(),
        logprobs=np.zeros(0, np.float32),
        finish_reason=UNFINISHED,
        versions=(),
    )


def is_over(response: Completion) -> bool:
    """Tells whether the response has ended."""
    return response.finish_reason != UNFINISHED


def in_chunks(
    extend: Callable[[Sequence[Request], SamplingConfig], Sequence[Completion]],
    requests: Sequence[Request],
    sampling: SamplingConfig,
    chunk: int,
) -> Iterator[tuple[int, Completion]]:
    """Draws `chunk` tokens of every unfinished response at a time; yields (index of the request, its completion).

    Args:
      extend: draws a piece of each response, in the order of the requests, as `RolloutEngine.extend` does.
      sampling: settings of the whole response, whose limit is `max_response_len`.
    """
    limits = [min(request.max_tokens, sampling.max_response_len) for request in requests]
    drawn = {index: begin(request.prompt) for index, request in enumerate(requests)}
    piece = dataclasses.replace(sampling, max_response_len=chunk)
    while drawn:
        wanted = [continued(requests[i], one, min(chunk, limits[i] - len(one.tokens))) for i, one in drawn.items()]
        for (index, one), added in zip(list(drawn.items()), extend(wanted, piece), strict=True):
            drawn[index] = joined(one, added, limits[index])
            if is_over(drawn[index]):
                yield index, drawn.pop(index)


def continued(request: Request, response: Completion, max_tokens: int) -> Request:
    """Makes a request for at most `max_tokens` more tokens of a response to `request`."""
    return dataclasses.replace(request, tokens=request.tokens + response.tokens, max_tokens=max_tokens)


def response_state(response: Completion) -> dict[str, Any]:
    """Returns a response as JSON for a checkpoint; `response_of` restores every number to the bit."""
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
    """Restores a response to `prompt` from the JSON of `response_state`."""
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
    """Appends a piece to a response. The response ends with a stop token or at the limit.

    Raises:
      RuntimeError: the piece is empty.
    """
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
        finish_reason="stop" if added.finish_reason == "stop" else UNFINISHED,
        versions=tuple(spans),
    )
    return ended(whole, max_response_len)


def ended(response: Completion, max_response_len: int) -> Completion:
    """Cuts a response after `max_response_len` tokens, or ends an unfinished one of as many: finish_reason "length"."""
    size = len(response.tokens)
    if size < max_response_len or (size == max_response_len and response.finish_reason != UNFINISHED):
        return response
    experts, versions = response.routed_experts, response.versions
    return dataclasses.replace(
        response,
        tokens=response.tokens[:max_response_len],
        logprobs=response.logprobs[:max_response_len],
        finish_reason="length",
        versions=tuple(
            dataclasses.replace(span, end=min(span.end, max_response_len))
            for span in versions
            if span.start < max_response_len
        ),
        routed_experts=None if experts is None else experts[: len(response.prompt_tokens) + max_response_len - 1],
    )


def lags(completions: Sequence[Completion], step: int) -> dict[str, float]:
    """Measures how many versions ago the tokens of a step were drawn: `rollout/lag_mean`, `rollout/lag_max`."""
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
