# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge process: a small state machine around one engine. `python -m qarl_bridge --help`.

    announce v -> stage -> validate whole -> drain -> pause -> load in place -> read back -> resume at v

| transition    | owner             | limit                  | on failure                   | test (tests/bridge)      |
|---------------|-------------------|------------------------|------------------------------|--------------------------|
| acquire       | peer's thread     | immediate              | refused: lease, stale        | test_second_trainer_*    |
| announce      | peer's thread     | immediate              | refused: torn, foreign, ...  | test_announce_refuses_*  |
| stage         | peer's thread     | client's silence limit | version dropped              | test_chunks_*            |
| validate      | peer's thread     | size / hash speed      | refused: torn, tensor        | test_validation_*       |
| drain + pause | engine thread     | Commit.drain_timeout_s | refused: timeout             | test_drain_timeout_*     |
| load          | engine thread     | none (memory copies)   | fenced, last good restored   | test_failed_load_*       |
| read back     | engine thread     | none (a few matmuls)   | fenced, last good restored   | test_failed_read_back_*  |
| resume        | engine thread     | immediate              | cannot fail                  | test_publish_then_*      |

Up to and including drain, a failure leaves the engine serving its old version, untouched.

Engine states: "empty" (started without weights: waits for its first version), "serving", "draining", "loading",
"reading_back", "fenced" (a load failed and nothing good could be restored; a complete new version lifts the fence).
Completions leave the engine only in "serving" and "draining", so a completion is drawn wholly under one version; its
spans say which. Requests that arrive while a version is being loaded wait and are drawn under the new one.

Who may touch what: the engine belongs to the main thread alone. One thread owns the socket (transport/zeromq.py). A
thread per peer decodes, checks and validates, then hands the engine thread a job and waits, sending Progress so that
either side notices the other's death. A lease is bound to its connection: when the trainer dies, however it dies, its
connection closes, the next message that cannot reach it shows it, and the lease ends.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from qarl_bridge import wire
from qarl_bridge.transport import shm
from qarl_bridge.transport.zeromq import Listener, Peer
from qarl_bridge.wire import BridgeError

PROGRESS_S = 2.0
MAX_WAITING_DRAWS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Finished:
    """One completed request: tokens [n] int32, logprobs [n] float32, "stop" or "length"."""

    request_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str


class Engine(Protocol):
    """What the state machine needs; `engine.VllmEngine` and `fake.FakeEngine` implement it. One thread calls it."""

    facts: wire.Facts
    expected: Mapping[str, wire.Expected]  # exactly the tensors a version must hold
    has_weights: bool  # False: started without weights, nothing may be drawn before the first version

    def submit(self, request_id: str, draw: wire.Draw, sampling: wire.Sampling) -> None:
        """Queue one completion."""

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""

    def step(self) -> list[Finished]:
        """Advance every running request; return those that ended."""

    def running(self) -> int:
        """Unfinished requests."""

    def load(self, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
        """Replace all weights in place and forget everything computed with the old ones (prefix and KV cache)."""

    def restore_initial(self) -> bool:
        """Load the weights the engine was started with; False if there are none."""

    def read_back(self, tensors: Mapping[str, np.ndarray], mode: str, seed: int) -> tuple[int, int]:
        """Compare live layers with `tensors` ("sampled" or "full"); (weights, input rows) compared, or BridgeError."""

    def close(self) -> None:
        """Free everything."""


class StagedCopy:
    """A validated version: its manifest and the sealed bytes behind it."""

    def __init__(self, manifest: wire.Manifest, buffer: np.ndarray):
        self.manifest = manifest
        self._buffer = buffer

    def array(self, entry: wire.TensorEntry) -> np.ndarray:
        """Read-only view of one tensor, in its own dtype and shape."""
        raw = self._buffer[entry.offset : entry.offset + entry.nbytes]
        return raw.view(wire.DTYPES[entry.dtype]).reshape(entry.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        """All tensors by name."""
        return {entry.name: self.array(entry) for entry in self.manifest.tensors}

    def at_the_door(self) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors in manifest order, each hashed once more as it is handed to the engine's loader."""
        for entry in self.manifest.tensors:
            array = self.array(entry)
            if wire.digest(wire.as_bytes(array)) != entry.digest:
                raise BridgeError(f"tensor {entry.name} changed between validation and load", "torn")
            yield entry.name, array


def _first_nonfinite(array: np.ndarray) -> bool:
    """Whether any value is NaN or infinite; exact on the bits, so that no dtype needs converting."""
    name = array.dtype.name
    if name == "bfloat16":
        return bool(np.any((array.view(np.uint16) & 0x7F80) == 0x7F80))
    if name == "float8_e4m3fn":
        return bool(np.any((array.view(np.uint8) & 0x7F) == 0x7F))
    if array.dtype.kind == "f":
        return not bool(np.isfinite(array).all())
    return False


def validate_tensor(entry: wire.TensorEntry, array: np.ndarray) -> None:
    """Refuse bytes that differ from the manifest, non-finite values, and scales that are negative or all zero.

    One NaN in a scale would poison the engine's KV cache beyond the next good version, so none may come near it.
    """
    if wire.digest(wire.as_bytes(array)) != entry.digest:
        raise BridgeError(f"tensor {entry.name} is torn: its bytes do not match the manifest's digest", "torn")
    if _first_nonfinite(array):
        raise BridgeError(f"tensor {entry.name} holds NaN or infinite values", "tensor")
    if entry.name.endswith("scale") and array.size:
        low, high = array.min().astype(np.float32), array.max().astype(np.float32)
        if low < 0 or high <= 0:
            raise BridgeError(
                f"tensor {entry.name}: scales must be >= 0 and not all zero, range [{low}, {high}]", "tensor"
            )


@dataclasses.dataclass(frozen=True)
class _Lease:
    run_id: str
    incarnation: int
    owner: Peer


@dataclasses.dataclass
class _Pending:
    """The one version on its way in."""

    manifest: wire.Manifest
    owner: Peer
    received: bytearray | None = None  # chunks, where no memory is shared
    high_water: int = 0
    copy: StagedCopy | None = None


class _Batch:
    """Draws of one Generate request."""

    def __init__(self, number: int, message: wire.Generate):
        self.number = number
        self.message = message
        self.drawn: list[wire.Drawn | None] = [None] * len(message.draws)
        self.left = len(message.draws)
        self.tokens = 0
        self.future: concurrent.futures.Future[wire.Completions] = concurrent.futures.Future()


class Bridge:
    """The state machine. `run()` in the main thread; `serve(listener)` starts the threads that talk."""

    def __init__(self, engine: Engine, log: Callable[[str], None] = lambda line: None):
        self._engine = engine
        self._log = log
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lock = threading.Lock()  # lease, pending, peers
        self._lease: _Lease | None = None
        self._last_lease: _Lease | None = None
        self._pending: _Pending | None = None
        self._good: StagedCopy | None = None
        self._listener: Listener | None = None
        self._peers: dict[Peer, threading.Thread] = {}
        self._numbers = itertools.count()
        self._running: dict[str, tuple[_Batch, int, wire.Version]] = {}
        self._waiting: collections.deque[tuple[_Batch, int]] = collections.deque()
        self._batches: set[_Batch] = set()
        self._committing = False
        self.published = 0
        self.state = "serving" if engine.has_weights else "empty"
        # Weights that came with the folder have no publisher; step 0 of the run "initial" names them in spans.
        self.version: wire.Version | None = (
            wire.Version(run_id="initial", incarnation=0, step=0) if engine.has_weights else None
        )
        self.exit_code = 0

    # Engine thread ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Drive the engine until stopped; returns the exit code."""
        try:
            while not self._stop.is_set():
                self._run_jobs(block=not self._running)
                self._admit()
                if self._running:
                    self._step()
        except Exception:
            # The engine's own state is unknown after this; the trainer restarts the bridge and republishes.
            self._log(f"engine failed:\n{traceback.format_exc()}")
            self.exit_code = 3
        self._stop.set()
        for batch in self._batches:
            batch.future.set_exception(BridgeError("the bridge is stopping", "dead"))
        self._batches.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()()
        with self._lock:
            peers = list(self._peers.items())
        for peer, _ in peers:
            peer.inbox.put(None)
        for _, thread in peers:  # they answer what they were at
            thread.join(1.0)
        if self._listener is not None:
            self._listener.close()
        self._engine.close()
        return self.exit_code

    def stop(self) -> None:
        """Ask run() to return; safe from signal handlers and other threads."""
        self._stop.set()
        self._jobs.put(lambda: None)

    def _run_jobs(self, block: bool) -> None:
        try:
            job = self._jobs.get(timeout=0.5) if block else self._jobs.get_nowait()
            while True:
                job()
                job = self._jobs.get_nowait()
        except queue.Empty:
            pass

    def _admit(self) -> None:
        while self._waiting and self.state == "serving":
            assert self.version is not None
            batch, index = self._waiting.popleft()
            if batch not in self._batches:
                continue
            request_id = f"{batch.number}-{index}"
            draw = batch.message.draws[index]
            self._engine.submit(request_id, draw, draw.under(batch.message.sampling))
            self._running[request_id] = (batch, index, self.version)

    def _step(self) -> None:
        for done in self._engine.step():
            batch, index, version = self._running.pop(done.request_id)
            count = len(done.tokens)
            batch.drawn[index] = wire.Drawn(
                tokens=np.asarray(done.tokens, "<i4").tobytes(),
                logprobs=np.asarray(done.logprobs, "<f4").tobytes(),
                finish_reason=done.finish_reason,
                spans=[wire.Span(version=version, start=0, end=count)],
            )
            batch.tokens += count
            batch.left -= 1
            if batch.left == 0 and batch in self._batches:
                self._batches.remove(batch)
                batch.future.set_result(wire.Completions(completions=[d for d in batch.drawn if d is not None]))

    def _abort(self, batch: _Batch) -> None:
        self._batches.discard(batch)
        mine = [request_id for request_id, (owner, _, _) in self._running.items() if owner is batch]
        self._engine.abort(mine)
        for request_id in mine:
            del self._running[request_id]

    def _call(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Run `function` on the engine thread."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def job() -> None:
            if self._stop.is_set():
                future.set_exception(BridgeError("the bridge is stopping", "dead"))
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def _commit(self, copy: StagedCopy, request: wire.Commit) -> wire.Published:
        version = copy.manifest.version
        before = self.state
        started = time.perf_counter()
        self._committing = True
        try:
            if before == "serving":
                self.state = "draining"
            while self._running and not self._stop.is_set():
                if time.perf_counter() - started > request.drain_timeout_s:
                    raise BridgeError(
                        f"{len(self._running)} requests still running after {request.drain_timeout_s:g} s of draining; "
                        f"{version} refused, {self.version} goes on serving",
                        "timeout",
                    )
                self._run_jobs(block=False)
                self._step()
            if self._stop.is_set():
                raise BridgeError("the bridge is stopping", "dead")
            drained = time.perf_counter()
            try:
                self.state = "loading"
                self._engine.load(copy.at_the_door())
                loaded = time.perf_counter()
                weights = rows = 0
                if request.readback != "off":
                    self.state = "reading_back"
                    weights, rows = self._engine.read_back(copy.arrays(), request.readback, version.step)
            except Exception as error:
                self._log(f"load of {version} failed:\n{traceback.format_exc()}")
                self._restore(version, error)  # always raises
            done = time.perf_counter()
        except BaseException:
            if self.state == "draining":
                self.state = before
            raise
        finally:
            self._committing = False
        self._good, self.version, self.state = copy, version, "serving"
        self.published += 1
        report = wire.Report(
            bytes=copy.manifest.total_bytes,
            tensors=len(copy.manifest.tensors),
            drain_s=drained - started,
            load_s=loaded - drained,
            readback_s=done - loaded,
            weights_read_back=weights,
            rows_read_back=rows,
        )
        self._log(f"serving {version}: load {report.load_s:.3f} s, read back {report.readback_s:.3f} s")
        return wire.Published(version=version, report=report)

    def _restore(self, version: wire.Version, error: Exception) -> None:
        """Fence, bring the last good version back, and say so. Always raises BridgeError."""
        self.state = "fenced"
        reason = str(error) or type(error).__name__
        try:
            if self._good is not None:
                self._engine.load(self._good.at_the_door())
                self._engine.read_back(self._good.arrays(), "sampled", 0)
                restored = True
            else:
                restored = self._engine.restore_initial()
        except Exception as second:
            self._log(f"restoring failed:\n{traceback.format_exc()}")
            raise BridgeError(
                f"loading {version} failed ({reason}) and so did restoring {self.version} ({second}): the engine is "
                "fenced until a complete version is published",
                "fenced",
            ) from error
        if not restored:
            raise BridgeError(
                f"loading {version} failed ({reason}) and there is no earlier version to restore: the engine is fenced "
                "until a complete version is published",
                "fenced",
            ) from error
        self.state = "serving"
        raise BridgeError(
            f"loading {version} failed ({reason}); {self.version} was restored and serves", "engine"
        ) from error

    def _read_back(self, request: wire.ReadBack) -> wire.ReadBackReply:
        if self._good is None or self.state != "serving":
            raise BridgeError(f"nothing published to compare with (state {self.state})", "bad_state")
        weights, rows = self._engine.read_back(self._good.arrays(), request.mode, request.seed)
        return wire.ReadBackReply(weights=weights, rows=rows)

    # Peers' threads --------------------------------------------------------------------------------------------------

    def serve(self, listener: Listener) -> None:
        """Talk in the background until stopped; run() closes the listener at its end."""
        self._listener = listener
        listener.start(on_peer=self._welcome, on_gone=self._release, on_end=self.stop)

    def _welcome(self, peer: Peer) -> None:
        thread = threading.Thread(target=self._converse, args=(peer,), daemon=True, name="peer")
        with self._lock:
            self._peers[peer] = thread
        thread.start()

    def _release(self, peer: Peer) -> None:
        """What a peer that is gone held."""
        with self._lock:
            if self._lease is not None and self._lease.owner is peer:
                self._log(f"lease of {self._lease.run_id} ended with its connection")
                self._lease = None
            if self._pending is not None and self._pending.owner is peer and not self._committing:
                self._pending = None

    def _converse(self, peer: Peer) -> None:
        while (frames := peer.receive()) is not None and not peer.gone:
            try:
                reply = self._handle(peer, *_decode(frames))
                peer.send(reply)
            except _ClientGoneError:
                break
            except BridgeError as error:
                peer.send(wire.Error(code=error.code, message=str(error)[:8000]))
            except Exception as error:
                self._log(f"request failed:\n{traceback.format_exc()}")
                peer.send(wire.Error(code="engine", message=f"{type(error).__name__}: {error}"[:8000]))
        with self._lock:
            del self._peers[peer]

    def _handle(self, peer: Peer, request: wire.Request, data: bytes) -> wire.Reply:
        match request:
            case wire.Hello():
                if request.protocol != wire.PROTOCOL:
                    raise BridgeError(
                        f"the bridge speaks protocol {wire.PROTOCOL}, this trainer {request.protocol}: "
                        "install matching versions",
                        "setup",
                    )
                return wire.Welcome(facts=self._engine.facts)
            case wire.Status():
                return self._status(peer)
            case wire.Acquire():
                return self._acquire(peer, request)
            case wire.Announce():
                return self._announce(peer, request.manifest)
            case wire.Chunk():
                return self._chunk(peer, request, data)
            case wire.Stage():
                return self._stage(peer, request)
            case wire.Commit():
                return self._commit_request(peer, request)
            case wire.Generate():
                return self._generate(peer, request)
            case wire.ReadBack():
                return self._wait(peer, self._call(lambda: self._read_back(request)))
            case wire.Shutdown():
                self._look_for_the_dead(peer)
                with self._lock:
                    if self._lease is not None and self._lease.owner is not peer:
                        raise BridgeError(f"run {self._lease.run_id} holds the lease", "lease")
                self.stop()  # what was posted, and this thread's answer, leave first
                return wire.Ok()

    def _wait(self, peer: Peer, future: concurrent.futures.Future, batch: _Batch | None = None) -> Any:
        """The future's result, with a Progress to the client every PROGRESS_S."""
        while True:
            try:
                return future.result(timeout=PROGRESS_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
            if peer.gone:
                raise _ClientGoneError("the client is gone", "dead")
            tokens = batch.tokens if batch is not None else 0
            peer.send(wire.Progress(running=len(self._running), waiting=len(self._waiting), tokens=tokens))

    def _look_for_the_dead(self, peer: Peer) -> None:
        """Before somebody else's lease counts against `peer`."""
        lease = self._lease
        if lease is not None and lease.owner is not peer and self._listener is not None:
            self._listener.sweep()

    def _status(self, peer: Peer) -> wire.StatusReply:
        self._look_for_the_dead(peer)
        with self._lock:
            return wire.StatusReply(
                state=self.state,
                version=self.version,
                holder=self._lease.run_id if self._lease else None,
                running=len(self._running),
                waiting=len(self._waiting),
                published=self.published,
                facts=self._engine.facts,
            )

    def _acquire(self, peer: Peer, request: wire.Acquire) -> wire.Ok:
        self._look_for_the_dead(peer)
        with self._lock:
            lease = self._lease
            if lease is not None and lease.owner is not peer:
                raise BridgeError(
                    f"another trainer (run {lease.run_id}, incarnation {lease.incarnation}) publishes to this bridge: "
                    "stop it, or start a bridge of your own",
                    "lease",
                )
            last = self._last_lease
            if last is not None and last.run_id == request.run_id and request.incarnation < last.incarnation:
                raise BridgeError(
                    f"run {request.run_id} was resumed since: incarnation {request.incarnation} < {last.incarnation}",
                    "stale",
                )
            self._lease = self._last_lease = _Lease(request.run_id, request.incarnation, peer)
        return wire.Ok()

    def _require_lease(self, peer: Peer) -> _Lease:
        """Caller holds the lock."""
        if self._lease is None or self._lease.owner is not peer:
            raise BridgeError("publishing needs the lease: send Acquire first", "lease")
        return self._lease

    def _announce(self, peer: Peer, manifest: wire.Manifest) -> wire.Ready:
        wire.check_manifest(
            manifest, model=self._engine.facts.model, scheme=self._engine.facts.scheme, expected=self._engine.expected
        )
        version = manifest.version
        with self._lock:
            lease = self._require_lease(peer)
            if (version.run_id, version.incarnation) != (lease.run_id, lease.incarnation):
                raise BridgeError(f"{version} is not of the leased {lease.run_id}/{lease.incarnation}", "lease")
            current = self.version
            if current is not None and (current.run_id, current.incarnation) == (version.run_id, version.incarnation):
                again = self._good is not None and self._good.manifest.digest == manifest.digest
                if version.step < current.step or (version.step == current.step and not again):
                    raise BridgeError(f"{version} is stale: the engine already serves {current}", "stale")
            if self._committing:
                raise BridgeError("another version is being loaded", "busy")
            self._pending = _Pending(manifest, peer)
        return wire.Ready(share_memory=peer.shares_memory)

    def _require_pending(self, peer: Peer) -> _Pending:
        with self._lock:
            self._require_lease(peer)
            if self._pending is None or self._pending.owner is not peer:
                raise BridgeError("no version announced: send Announce first", "bad_state")
            return self._pending

    def _drop(self, pending: _Pending) -> None:
        with self._lock:
            if self._pending is pending:
                self._pending = None

    def _chunk(self, peer: Peer, chunk: wire.Chunk, data: bytes) -> wire.Ok:
        pending = self._require_pending(peer)
        if pending.copy is not None:
            raise BridgeError("the version is already staged", "bad_state")
        if chunk.offset != pending.high_water:
            raise BridgeError(f"chunk at {chunk.offset}, expected {pending.high_water}: chunks come in order", "torn")
        if chunk.offset + len(data) > pending.manifest.total_bytes:
            raise BridgeError("chunk lies beyond the announced bytes", "torn")
        if pending.received is None:
            pending.received = bytearray()
        pending.received += data  # grows with what really arrives, never with what was merely announced
        pending.high_water += len(data)
        return wire.Ok()

    def _stage(self, peer: Peer, request: wire.Stage) -> wire.Staged:
        pending = self._require_pending(peer)
        manifest = pending.manifest
        try:
            if request.memory is not None:
                if not peer.shares_memory:
                    raise BridgeError("memory is shared on one host only: send Chunks", "unshared")
                fd = shm.open_located(request.memory)
                try:
                    buffer = shm.map_sealed(fd, manifest.total_bytes)
                finally:
                    os.close(fd)
            else:
                received = pending.received if pending.received is not None else bytearray()
                pending.received = None
                if len(received) != manifest.total_bytes:
                    raise BridgeError(
                        f"{manifest.version} is torn: {len(received)} of {manifest.total_bytes} bytes arrived", "torn"
                    )
                buffer = np.frombuffer(received, np.uint8)
                buffer.flags.writeable = False
            started = time.perf_counter()
            copy = StagedCopy(manifest, buffer)
            with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

                def validate_all() -> None:  # hashing and numpy release the GIL
                    for entry in manifest.tensors:
                        validate_tensor(entry, copy.array(entry))

                self._wait(peer, pool.submit(validate_all))
        except BridgeError:
            self._drop(pending)
            raise
        pending.copy = copy
        return wire.Staged(validate_s=time.perf_counter() - started)

    def _commit_request(self, peer: Peer, request: wire.Commit) -> wire.Published:
        pending = self._require_pending(peer)
        copy = pending.copy
        if copy is None:
            raise BridgeError("the announced version is not staged yet", "bad_state")
        if copy.manifest.digest != request.digest:
            raise BridgeError("Commit names another manifest than the staged one", "torn")
        try:
            return self._wait(peer, self._call(lambda: self._commit(copy, request)))
        finally:
            self._drop(pending)

    def _check_generate(self, request: wire.Generate) -> None:
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
        if len(self._waiting) + len(request.draws) > MAX_WAITING_DRAWS:
            raise BridgeError(f"more than {MAX_WAITING_DRAWS} draws are waiting", "limits")
        if self.state == "empty":
            raise BridgeError("the engine was started without weights: publish a version first", "bad_state")
        if self.state == "fenced":
            raise BridgeError("the engine is fenced: publish a complete version first", "fenced")

    def _generate(self, peer: Peer, request: wire.Generate) -> wire.Completions:
        self._check_generate(request)
        batch = _Batch(next(self._numbers), request)

        def enqueue() -> None:
            if self._stop.is_set():
                batch.future.set_exception(BridgeError("the bridge is stopping", "dead"))
                return
            self._batches.add(batch)
            self._waiting.extend((batch, index) for index in range(len(request.draws)))

        self._jobs.put(enqueue)
        try:
            return self._wait(peer, batch.future, batch)
        except _ClientGoneError:
            self._jobs.put(lambda: self._abort(batch))
            raise


def _decode(frames: list[bytes]) -> tuple[wire.Request, bytes]:
    """(request, bytes of its second frame), or BridgeError."""
    if len(frames) not in (1, 2):
        raise BridgeError("malformed message: one frame expected, or two for a Chunk")
    request = wire.decode(frames[0])
    if isinstance(request, wire.Chunk) != (len(frames) == 2):
        raise BridgeError(f"malformed message: {type(request).__name__} in {len(frames)} frame(s)")
    data = frames[1] if len(frames) == 2 else b""
    if len(data) > wire.CHUNK_BYTES:
        raise BridgeError(f"chunk of {len(data)} bytes exceeds the {wire.CHUNK_BYTES} of a Chunk", "limits")
    return request, data


class _ClientGoneError(BridgeError):
    """The client vanished while its request ran."""


# ---------------------------------------------------------------------------------------------------------------------
# Process
# ---------------------------------------------------------------------------------------------------------------------


def read_folder(path: str) -> tuple[dict[str, Any], dict[str, wire.Expected], bool]:
    """(config.json, expected tensors, whether the folder holds weights).

    The tensors come from the safetensors headers, or, for a folder without weights, from its tensors.json.
    """
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("not an object")
        names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
    except (OSError, ValueError) as error:
        raise BridgeError(f"{path} is not a model folder: {error}", "setup") from None
    if names:
        expected: dict[str, wire.Expected] = {}
        for name in names:
            expected |= wire.expected_from_safetensors(os.path.join(path, name))
        return config, expected, True
    try:
        with open(os.path.join(path, "tensors.json"), "rb") as file:
            listed = msgspec.json.decode(file.read(), type=list[wire.Expected])
    except (OSError, msgspec.DecodeError) as error:
        raise BridgeError(f"{path} holds neither safetensors nor a readable tensors.json: {error}", "setup") from None
    return config, {entry.name: entry for entry in listed}, False


def _watch_parent(pid: int, on_death: Callable[[], None]) -> None:
    """Stop when the trainer that started this bridge is gone.

    Polling getppid rather than PR_SET_PDEATHSIG: the latter fires when the *thread* that spawned us ends.
    """

    def loop() -> None:
        while os.getppid() == pid:
            time.sleep(0.5)
        on_death()
        time.sleep(5.0)
        os._exit(4)  # the engine thread did not come back in time (a long load, a long step)

    threading.Thread(target=loop, daemon=True, name="parent").start()


def _log(line: str) -> None:
    print(f"[qarl_bridge] {line}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Command line of `python -m qarl_bridge`."""
    parser = argparse.ArgumentParser(
        prog="python -m qarl_bridge", description="Owns one vLLM engine for a qarl_jax trainer."
    )
    parser.add_argument("--socket", required=True, help="path of a unix socket, or tcp://host:port")
    parser.add_argument("--model", required=True, help="model folder (config.json with safetensors or tensors.json)")
    parser.add_argument(
        "--key-file", required=True, help="64 hexadecimal digits, mode 0600; created if missing (unix only)"
    )
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help="fake: a toy, to test a set-up")
    parser.add_argument("--parent-pid", type=int, default=0, help="exit when this process, the parent, is gone")
    parser.add_argument("--max-model-len", type=int, default=0, help="longest prompt + response; 0: the model's own")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most sequences decoded together")
    parser.add_argument("--kv-cache-gb", type=float, default=0.0, help="KV cache size; 0: vLLM decides")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.5, help="fraction of device memory vLLM may use"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all this process may use")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a bridge; returns the exit code (0 stopped, 2 user error, 3 engine failed)."""
    args = build_parser().parse_args(argv)
    try:
        kind, _ = wire.parse_address(args.socket)
        if args.parent_pid and os.getppid() != args.parent_pid:
            return 0
        if not os.path.exists(args.key_file):
            if kind == "tcp":
                raise BridgeError(f"a TCP bridge needs an existing key file; {args.key_file} does not exist", "auth")
            wire.create_key(args.key_file)
        key = wire.read_key(args.key_file)
        config, expected, has_weights = read_folder(args.model)
        listener = Listener(args.socket, key)  # before the slow part: a taken address fails at once
    except BridgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bridge: Bridge | None = None
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        if bridge is not None:
            bridge.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if args.parent_pid:
        _watch_parent(args.parent_pid, stop)
    try:
        started = time.perf_counter()
        engine: Engine
        if args.engine == "fake":
            from qarl_bridge.fake import FakeEngine

            engine = FakeEngine(config, expected, has_weights=has_weights, max_model_len=args.max_model_len or 4096)
        else:
            from qarl_bridge.engine import Options, VllmEngine

            options = Options(
                max_model_len=args.max_model_len,
                max_num_seqs=args.max_num_seqs,
                kv_cache_gb=args.kv_cache_gb,
                gpu_memory_utilization=args.gpu_memory_utilization,
                seed=args.seed,
                threads=args.threads,
            )
            engine = VllmEngine(args.model, config, expected, has_weights=has_weights, options=options)
        bridge = Bridge(engine, _log)
        if stopped:
            bridge.stop()
        _log(f"ready on {args.socket} after {time.perf_counter() - started:.1f} s: {engine.facts.profile}")
        bridge.serve(listener)
        return bridge.run()
    except BridgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        listener.close()
