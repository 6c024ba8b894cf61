# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Queues completion requests, submits them to the engine, and gathers completions into replies with their version."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools

import numpy as np

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.engine_api import Engine

MAX_WAITING = 1 << 20


class Batch:
    """One Generate request and its completions so far; `future` gets the reply once all have ended."""

    def __init__(self, message: messages.Generate):
        self.message = message
        self.drawn: list[messages.Drawn | None] = [None] * len(message.draws)
        self.left = len(message.draws)
        self.tokens = 0
        self.ended: collections.deque[int] = collections.deque()  # indices nobody was told of yet
        self.future: concurrent.futures.Future[messages.Completions] = concurrent.futures.Future()

    def news(self) -> list[messages.Ended]:
        """Returns the completions that ended since the last call. One thread at a time may call it."""
        found = []
        while self.ended:
            index = self.ended.popleft()
            drawn = self.drawn[index]
            assert drawn is not None
            found.append(messages.Ended(index=index, drawn=drawn))
        return found


class Draws:
    """All completion requests of an engine. Other threads than the engine's may only call `check` and read lengths."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._numbers = itertools.count()
        self._batches: dict[Batch, int] = {}
        self.running: dict[str, tuple[Batch, int, messages.Version]] = {}
        self.waiting: collections.deque[tuple[Batch, int]] = collections.deque()

    def check(self, request: messages.Generate) -> None:
        """Raises BridgeError("limits") for a request that exceeds max_model_len, the vocabulary, or the queue."""
        facts, sampling = self._engine.facts, request.sampling
        for index, draw in enumerate(request.draws):
            limit = draw.under(sampling).max_tokens
            if len(draw.prompt) + limit > facts.max_model_len:
                raise BridgeError(
                    f"draw {index}: {len(draw.prompt)} prompt + {limit} response tokens exceed the "
                    f"engine's max_model_len {facts.max_model_len}",
                    "limits",
                )
            if max(draw.prompt) >= facts.vocab_size:
                raise BridgeError(
                    f"draw {index}: token id {max(draw.prompt)} >= vocabulary {facts.vocab_size}", "limits"
                )
        if len(self.waiting) + len(request.draws) > MAX_WAITING:
            raise BridgeError(f"more than {MAX_WAITING} draws are waiting", "limits")

    def add(self, batch: Batch) -> None:
        """Appends all draws of a batch to the waiting ones."""
        self._batches[batch] = next(self._numbers)
        self.waiting.extend((batch, index) for index in range(len(batch.message.draws)))

    def admit(self, version: messages.Version) -> None:
        """Submits all waiting draws to the engine; their completions are marked as sampled under `version`."""
        while self.waiting:
            batch, index = self.waiting.popleft()
            if batch not in self._batches:
                continue
            request_id = f"{self._batches[batch]}-{index}"
            draw = batch.message.draws[index]
            self._engine.submit(request_id, draw, draw.under(batch.message.sampling))
            self.running[request_id] = (batch, index, version)

    def step(self) -> None:
        """Runs one engine step, and completes the futures of batches whose last completion ended in it."""
        for done in self._engine.step():
            batch, index, version = self.running.pop(done.request_id)
            count = len(done.tokens)
            batch.drawn[index] = messages.Drawn(
                tokens=np.asarray(done.tokens, "<i4").tobytes(),
                logprobs=np.asarray(done.logprobs, "<f4").tobytes(),
                finish_reason=done.finish_reason,
                spans=[messages.Span(version=version, start=0, end=count)],
                routed=b"" if done.routed is None else np.asarray(done.routed, "<i2").tobytes(),
                routed_shape=[] if done.routed is None else list(done.routed.shape),
            )
            batch.tokens += count
            if done.routed is None:
                batch.ended.append(index)
            batch.left -= 1
            if batch.left == 0 and batch in self._batches:
                del self._batches[batch]
                batch.future.set_result(messages.Completions(completions=[d for d in batch.drawn if d is not None]))

    def abort(self, batch: Batch) -> None:
        """Cancels the draws of a batch whose client is gone."""
        self._batches.pop(batch, None)
        mine = [request_id for request_id, (owner, _, _) in self.running.items() if owner is batch]
        self._engine.abort(mine)
        for request_id in mine:
            del self.running[request_id]

    def fail_all(self, error: BridgeError) -> None:
        """Fails the futures of all batches with `error`."""
        for batch in self._batches:
            batch.future.set_exception(error)
        self._batches.clear()
