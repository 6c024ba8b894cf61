# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Waits for the engine in a peer's thread: sends Progress, and requests the parts of a chunked version."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.chunked import ChunkedCopy
from qarl_bridge.server.requests import Batch, Draws
from qarl_bridge.server.staged import Copy
from qarl_bridge.transport.zeromq import Peer

PROGRESS_S = 2.0


class ClientGoneError(BridgeError):
    """The error for a client that disconnected while its request ran."""


class Waits:
    """Waits for results in the threads of peers. draws: the requests that Progress counts."""

    def __init__(self, draws: Draws):
        self._draws = draws

    def result(self, peer: Peer, future: concurrent.futures.Future, batch: Batch | None = None) -> Any:
        """Waits for a future's result, and sends the client a Progress every PROGRESS_S seconds."""
        while True:
            try:
                return future.result(timeout=PROGRESS_S)
            except concurrent.futures.TimeoutError:
                if future.done():  # just now, or by a TimeoutError of its own
                    return future.result()
            self._progress(peer, batch)

    def reading(self, copy: Copy, peer: Peer, start: Callable[[], concurrent.futures.Future]) -> Any:
        """Returns the result of `start`, which reads a version; meanwhile requests the parts of a chunked version."""
        if not isinstance(copy, ChunkedCopy):
            return self.result(peer, start())
        fetches = copy.fetches
        fetches.begin()
        try:
            future = start()
            future.add_done_callback(lambda done: fetches.stop())
            while True:
                try:
                    part = fetches.wanted(PROGRESS_S)
                except queue.Empty:
                    self._progress(peer)
                    continue
                if part is None:
                    return future.result()
                peer.send(messages.Fill(part=part))
                fetches.bring(self._filled(peer, copy, part))
        finally:
            fetches.end(ClientGoneError("the trainer is not there to fill the buffer", "dead"))

    def _filled(self, peer: Peer, copy: Copy, part: int) -> BridgeError | None:
        """Reads the client's reply to Fill: None, or the error if the client gives up."""
        frames = peer.receive()
        if frames is None or peer.gone:
            raise ClientGoneError("the client is gone", "dead")
        request, _ = decode(frames)
        if isinstance(request, messages.Filled) and request.part == part:
            return None
        return BridgeError(f"the trainer gave up sending {copy.manifest.version}", "unshared")

    def _progress(self, peer: Peer, batch: Batch | None = None) -> None:
        """Sends Progress to the client; ClientGoneError if it has disconnected."""
        if peer.gone:
            raise ClientGoneError("the client is gone", "dead")
        tokens, ended = (batch.tokens, batch.news()) if batch is not None else (0, [])
        running, waiting = len(self._draws.running), len(self._draws.waiting)
        peer.send(messages.Progress(running=running, waiting=waiting, tokens=tokens, ended=ended))


def decode(frames: list[bytes]) -> tuple[messages.Request, bytes]:
    """Decodes a message's frames into (request, raw bytes of a Chunk); BridgeError if they are malformed."""
    if len(frames) not in (1, 2):
        raise BridgeError("malformed message: one frame expected, or two for a Chunk")
    request = messages.decode(frames[0])
    if isinstance(request, messages.Chunk) != (len(frames) == 2):
        raise BridgeError(f"malformed message: {type(request).__name__} in {len(frames)} frame(s)")
    data = frames[1] if len(frames) == 2 else b""
    if len(data) > messages.CHUNK_BYTES:
        raise BridgeError(f"chunk of {len(data)} bytes exceeds the {messages.CHUNK_BYTES} of a Chunk", "limits")
    return request, data
