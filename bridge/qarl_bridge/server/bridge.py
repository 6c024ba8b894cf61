# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge: a state machine around one engine that serves completions and loads published versions.

    announce v -> stage -> validate whole -> prepare -> drain -> pause -> load in place -> read back -> resume at v

| transition    | owner             | limit                  | on failure                   | test (tests/bridge)      |
|---------------|-------------------|------------------------|------------------------------|--------------------------|
| acquire       | peer's thread     | immediate              | refused: lease, stale        | test_second_trainer_*    |
| announce      | peer's thread     | immediate              | refused: torn, foreign, ...  | test_announce_refuses_*  |
| stage         | peer's thread     | client's silence limit | version dropped              | test_chunks_*, test_nccl |
| validate      | peer's thread     | size / hash speed      | refused: torn, tensor        | test_validation_*       |
| prepare       | peer's thread     | copy to the device     | version dropped              | test_partial             |
| drain + pause | engine thread     | Commit.drain_timeout_s | refused: timeout             | test_drain_timeout_*     |
| load          | engine thread     | none (memory copies)   | fenced, last good restored   | test_failed_load_*       |
| read back     | engine thread     | none (a few matmuls)   | fenced, last good restored   | test_failed_read_back_*  |
| resume        | engine thread     | immediate              | cannot fail                  | test_publish_then_*      |

A failure up to and including drain leaves the engine serving its old version, unchanged.

Engine states: "empty" (started without weights: waits for its first version), "serving", "draining", "loading",
"reading_back", "fenced" (a load failed and no good version could be restored; a complete new version ends this state).
The engine computes completions only in "serving" and "draining", so one version draws a whole completion, and its spans
name the version. Requests that arrive during a load wait, and are drawn under the new version.

Threads: only the engine thread (the main thread) calls the engine. One thread owns the socket (transport/zeromq.py). A
thread for each peer decodes and validates requests, and hands jobs to the engine thread. While it waits it sends
Progress, by which both ends notice a dead peer. A lease ends with its connection: when the trainer dies, the next
message to it fails, and the bridge ends the lease.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.manifest import check_manifest
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.chunked import ChunkedCopy
from qarl_bridge.server.engine_api import Engine, Sweeps
from qarl_bridge.server.good import Good
from qarl_bridge.server.incoming import Pending, Spare
from qarl_bridge.server.lease import Lease
from qarl_bridge.server.profiling import Steps, profiled
from qarl_bridge.server.requests import Batch, Draws
from qarl_bridge.server.staged import Copy, HostCopy
from qarl_bridge.server.waits import ClientGoneError, Waits, decode
from qarl_bridge.transport import shm
from qarl_bridge.transport.zeromq import Listener, Peer

LAST_WORDS_S = 3.0  # how long a bridge that stops waits for its peers' threads, all together


class Bridge:
    """The state machine. Call `serve(listener)`, which starts the socket's threads, then `run()` in the main thread."""

    def __init__(self, engine: Engine, log: Callable[[str], None] = lambda line: None, profile: str = ""):
        """profile: folder for profiles, as in `EngineOptions`; empty: no profiles."""
        self._engine = engine
        self._profile, self._steps = profile, Steps(profile, "steps")
        self._log = log
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False  # a plain flag: a lock could not be taken again by a signal handler
        self._lock = threading.Lock()  # lease, pending, peers
        self._lease = Lease()
        self._pending: Pending | None = None
        self._good = Good()
        self._spare = Spare()
        self._listener: Listener | None = None
        self._peers: dict[Peer, threading.Thread] = {}
        self.draws = Draws(engine)
        self._waits = Waits(self.draws)
        self._committing = False
        self.published = 0
        self.state = "serving" if engine.has_weights else "empty"
        # Weights that came with the folder have no publisher; step 0 of the run "initial" names them in spans.
        self.version: messages.Version | None = (
            messages.Version(run_id="initial", incarnation=0, step=0) if engine.has_weights else None
        )
        self.exit_code = 0

    # Engine thread ---------------------------------------------------------------------------------------------------

    def adopt(self, copy: Copy) -> None:
        """Makes the engine's initial weights the served version, over which a trainer may publish adapters alone.

        Call it before `run`. The engine loads the weights again from `copy`, which the bridge keeps, and the bridge
        reads them back.

        Raises:
          BridgeError: `copy` is not valid, or the engine cannot load it or read it back.
        """
        copy.validate()
        commit = messages.Commit(digest=copy.manifest.digest, readback="sampled", drain_timeout_s=0)
        self._commit(copy, None, commit)

    def run(self) -> int:
        """Runs the engine until `stop`; returns the exit code (0 stopped, 3 the engine failed)."""
        try:
            while not self._stopping:
                self._run_jobs(block=not self.draws.running)
                if self.state == "serving":
                    assert self.version is not None
                    self.draws.admit(self.version)
                if self.draws.running:
                    self._steps.run(self.draws.step)
        except Exception:
            # The engine's own state is unknown after this; the trainer restarts the bridge and republishes.
            self._log(f"engine failed:\n{traceback.format_exc()}")
            self.exit_code = 3
        self._stopping = True
        self.draws.fail_all(BridgeError("the bridge is stopping", "dead"))
        self._finish_jobs()
        with self._lock:
            peers = list(self._peers.items())
        for peer, _ in peers:
            peer.inbox.put(None)
        deadline = time.monotonic() + LAST_WORDS_S
        for _, thread in peers:  # they answer what they were at
            while thread.is_alive() and time.monotonic() < deadline:
                self._finish_jobs()
                thread.join(0.02)
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            self._discard_pending()
            self._spare.drop()
            for copy in self._good.clear():
                self._close_soon(copy)
        self._finish_jobs()
        self._engine.close()
        return self.exit_code

    def _finish_jobs(self) -> None:
        """Finishes the jobs of an engine that has stopped, and may have failed."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                try:
                    job()
                except Exception:
                    self._log(f"while stopping:\n{traceback.format_exc()}")

    def stop(self) -> None:
        """Makes `run` return soon; safe to call from signal handlers and other threads."""
        self._stopping = True
        self._jobs.put(lambda: None)

    def _run_jobs(self, block: bool) -> None:
        try:
            job = self._jobs.get(timeout=0.5) if block else self._jobs.get_nowait()
            while True:
                job()
                job = self._jobs.get_nowait()
        except queue.Empty:
            pass

    def _call(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Run `function` on the engine thread."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def job() -> None:
            if self._stopping:
                future.set_exception(BridgeError("the bridge is stopping", "dead"))
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def _commit(self, copy: Copy, owner: Peer | None, request: messages.Commit) -> messages.Published:
        version, partial = copy.manifest.version, bool(copy.manifest.base)
        before, reads = self.state, request.readback != "off"
        self._good.check(copy.manifest)
        if partial and reads and not self._good.is_read_back:
            raise BridgeError(f"{version} is over a base that was never read back: publish the base first", "base")
        started = time.perf_counter()
        self._committing = True
        try:
            if before == "serving":
                self.state = "draining"
            while self.draws.running and not self._stopping:
                if time.perf_counter() - started > request.drain_timeout_s:
                    raise BridgeError(
                        f"{len(self.draws.running)} requests still running after {request.drain_timeout_s:g} s of "
                        f"draining; {version} refused, {self.version} goes on serving",
                        "timeout",
                    )
                self._run_jobs(block=False)
                self.draws.step()
            if self._stopping:
                raise BridgeError("the bridge is stopping", "dead")
            drained = time.perf_counter()
            try:
                weights = rows = 0
                with profiled(self._profile, f"publish-{version.step}"):
                    self.state = "loading"
                    self._engine.load(_sweeps(copy, copy.checked_parts), partial=partial)
                    copy.confirm()
                    loaded = time.perf_counter()
                    if reads:
                        self.state = "reading_back"
                        weights, rows = self._engine.read_back(
                            _sweeps(copy, copy.parts), request.readback, version.step, partial=partial
                        )
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
        with self._lock:
            for old in self._good.put(copy, owner, is_read_back=reads):
                self._close_soon(old)
            self.version, self.state = version, "serving"
        self._spare.drop()
        if isinstance(copy, HostCopy) and copy.of_changes:  # the next one will be, too
            self._spare.prepare(copy)
        self.published += 1
        report = messages.Report(
            bytes=copy.manifest.total_bytes,
            tensors=len(copy.manifest.tensors),
            drain_s=drained - started,
            load_s=loaded - drained,
            readback_s=done - loaded,
            weights_read_back=weights,
            rows_read_back=rows,
        )
        self._log(f"serving {version}: load {report.load_s:.3f} s, read back {report.readback_s:.3f} s")
        return messages.Published(version=version, report=report)

    def _restore(self, version: messages.Version, error: Exception) -> None:
        """Restores the last good version after a failed load, and always raises BridgeError."""
        differs = self.state == "reading_back" and isinstance(error, BridgeError)  # a comparison, not a breakdown
        self.state = "fenced"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error) or f"{type(error).__name__} at {frame.filename}:{frame.lineno}, {frame.line}"
        try:
            if self._good.is_there:
                self._engine.load(Sweeps(lambda: self._good.sweep(lambda copy: copy.checked_parts()), lasting=True))
                self._good.confirm()
                self._engine.read_back(self._all_parts(), "sampled", 0)
                restored = True
            else:
                self._good.lose()
                restored = self._engine.restore_initial()
        except Exception as second:
            self._good.lose()
            self._log(f"restoring failed:\n{traceback.format_exc()}")
            raise BridgeError(
                f"loading {version} failed ({reason}) and so did restoring {self.version} ({second}): the engine is "
                "fenced until a complete version is published",
                "read_back" if differs else "fenced",
            ) from error
        if not restored:
            if differs:
                raise BridgeError(reason, "read_back") from error
            raise BridgeError(
                f"loading {version} failed ({reason}) and there is no earlier version to restore: the engine is fenced "
                "until a complete version is published",
                "fenced",
            ) from error
        self.state = "serving"
        raise BridgeError(
            f"loading {version} failed ({reason}); {self.version} was restored and serves",
            "read_back" if differs else "engine",
        ) from error

    def _all_parts(self) -> Sweeps:
        return Sweeps(lambda: self._good.sweep(lambda copy: copy.parts()), lasting=True)

    def _read_back(self, request: messages.ReadBack) -> messages.ReadBackReply:
        if not self._good.is_there or self.state != "serving":
            raise BridgeError(f"nothing published to compare with (state {self.state})", "bad_state")
        weights, rows = self._engine.read_back(self._all_parts(), request.mode, request.seed)
        return messages.ReadBackReply(weights=weights, rows=rows)

    def _probe(self, request: messages.Probe) -> messages.Probed:
        if self.state != "serving":
            raise BridgeError(f"a probe needs a serving engine (state {self.state})", "bad_state")
        if self.draws.running:
            raise BridgeError("a probe needs an idle engine: wait until nothing is being drawn", "busy")
        facts = self._engine.facts
        if max(request.prompt) >= facts.vocab_size or len(request.prompt) >= facts.max_model_len:
            raise BridgeError("a probe's prompt must fit the engine's vocabulary and max_model_len", "limits")
        return messages.Probed(records=self._engine.probe(request.prompt, request.modules))

    # Peers' threads --------------------------------------------------------------------------------------------------

    def serve(self, listener: Listener) -> None:
        """Starts to receive and answer messages in background threads; `run` closes the listener at its end."""
        self._listener = listener
        listener.start(on_peer=self._welcome, on_gone=self._release, on_end=self.stop)

    def _welcome(self, peer: Peer) -> None:
        thread = threading.Thread(target=self._converse, args=(peer,), daemon=True, name="peer")
        with self._lock:  # run() joins whatever is listed: only a started thread may be
            thread.start()
            self._peers[peer] = thread

    def _release(self, peer: Peer) -> None:
        """Ends a lost peer's lease, drops its announced version, and closes copies in its GPU memory."""
        with self._lock:
            if self._lease.owner is peer:
                self._log(f"lease of {self._lease.run_id} ended with its connection")
                self._lease.end()
            if self._committing:
                return  # the engine thread looks at `gone` when it is done
            if self._pending is not None and self._pending.owner is peer:
                self._discard_pending()
            self._forget_memory_of(peer)

    def _close_soon(self, copy: Copy) -> None:
        self._let_go_soon(copy.close, str(copy.manifest.version))

    def _let_go_soon(self, close: Callable[[], None], what: str) -> None:
        """Closes a copy on the engine thread, which may be reading it."""

        def job() -> None:
            try:
                close()
            except Exception:  # the memory's owner may be dead: nothing of ours depends on it any more
                self._log(f"letting go of {what} failed:\n{traceback.format_exc()}")

        self._jobs.put(job)

    def _discard_pending(self) -> None:
        """Drops the announced version and its copy. The caller holds the lock."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.copy is not None and not self._good.keeps(pending.copy):
            self._close_soon(pending.copy)

    def _forget_memory_of(self, peer: Peer) -> None:
        """Closes copies that lie in a lost trainer's GPU memory; no version can be restored from them any more. The
        engine keeps serving the weights that it loaded. The caller holds the lock."""
        for copy in self._good.forget(peer):
            self._close_soon(copy)
        self._let_go_soon(self._engine.forget_trainer, "a trainer's buffers")

    def _converse(self, peer: Peer) -> None:
        while (frames := peer.receive()) is not None and not peer.gone:
            try:
                reply = self._handle(peer, *decode(frames))
                peer.send(reply)
            except ClientGoneError:
                break
            except BridgeError as error:
                peer.send(messages.Error(code=error.code, message=str(error)[:8000]))
            except Exception as error:
                self._log(f"request failed:\n{traceback.format_exc()}")
                peer.send(messages.Error(code="engine", message=f"{type(error).__name__}: {error}"[:8000]))
        with self._lock:
            del self._peers[peer]

    def _handle(self, peer: Peer, request: messages.Request, data: bytes) -> messages.Reply:
        match request:
            case messages.Hello():
                if request.protocol != messages.PROTOCOL:
                    raise BridgeError(
                        f"the bridge speaks protocol {messages.PROTOCOL}, this trainer {request.protocol}: "
                        "install matching versions",
                        "setup",
                    )
                return messages.Welcome(facts=self._engine.facts)
            case messages.Status():
                return self._status(peer)
            case messages.Acquire():
                return self._acquire(peer, request)
            case messages.Announce():
                return self._announce(peer, request.manifest)
            case messages.Chunk():
                return self._chunk(peer, request, data)
            case messages.Stage():
                return self._stage(peer, request)
            case messages.Cancel():
                return messages.Ok()
            case messages.Filled():
                raise BridgeError("no part was asked for", "bad_state")
            case messages.Commit():
                return self._commit_request(peer, request)
            case messages.Generate():
                return self._generate(peer, request)
            case messages.ReadBack():
                self._look_for_the_dead(peer)
                return self._waits.result(peer, self._call(lambda: self._read_back(request)))
            case messages.Probe():
                return self._waits.result(peer, self._call(lambda: self._probe(request)))
            case messages.Shutdown():
                self._look_for_the_dead(peer)
                with self._lock:
                    if self._lease.keeps_out(peer):
                        raise BridgeError(f"run {self._lease.run_id} holds the lease", "lease")
                self.stop()  # what was posted, and this thread's answer, leave first
                return messages.Ok()

    def _look_for_the_dead(self, peer: Peer) -> None:
        """Checks whether the lease's holder has died, before its lease makes the bridge refuse `peer`."""
        if self._lease.keeps_out(peer) and self._listener is not None:
            self._listener.sweep()

    def _status(self, peer: Peer) -> messages.StatusReply:
        self._look_for_the_dead(peer)
        with self._lock:
            return messages.StatusReply(
                state=self.state,
                version=self.version,
                holder=self._lease.run_id,
                running=len(self.draws.running),
                waiting=len(self.draws.waiting),
                published=self.published,
                facts=self._engine.facts,
                met=dict(self._engine.met),
            )

    def _acquire(self, peer: Peer, request: messages.Acquire) -> messages.Ok:
        self._look_for_the_dead(peer)
        with self._lock:
            self._lease.acquire(request.run_id, request.incarnation, peer)
        return messages.Ok()

    def _announce(self, peer: Peer, manifest: messages.Manifest) -> messages.Ready:
        check_manifest(
            manifest, model=self._engine.facts.model, scheme=self._engine.facts.scheme, expected=self._engine.expected
        )
        version = manifest.version
        with self._lock:
            self._lease.require(peer, version)
            current = self.version
            if current is not None and (current.run_id, current.incarnation) == (version.run_id, version.incarnation):
                again = self._good.serving == manifest.digest or self.state == "fenced"
                if not again and version.step <= current.step:
                    raise BridgeError(f"{version} is stale: the engine already serves {current}", "stale")
            if self._committing:
                raise BridgeError("another version is being loaded", "busy")
            self._good.check(manifest)
            self._discard_pending()
            self._pending = Pending(manifest, peer)
            last = self._good.last
            holds = last.manifest.digest if isinstance(last, HostCopy) else b""
        return messages.Ready(share_memory=peer.shares_memory, holds=holds, host=shm.host())

    def _require_pending(self, peer: Peer) -> Pending:
        with self._lock:
            self._lease.require(peer)
            if self._pending is None or self._pending.owner is not peer:
                raise BridgeError("no version announced: send Announce first", "bad_state")
            return self._pending

    def _drop(self, pending: Pending) -> None:
        with self._lock:
            if self._pending is pending:
                self._discard_pending()
            elif pending.copy is not None and not self._good.keeps(pending.copy):
                self._close_soon(pending.copy)  # replaced meanwhile by another announcement
            if pending.owner.gone:
                self._forget_memory_of(pending.owner)

    def _chunk(self, peer: Peer, chunk: messages.Chunk, data: bytes) -> messages.Ok:
        self._require_pending(peer).append(chunk, data)
        return messages.Ok()

    def _stage(self, peer: Peer, request: messages.Stage) -> messages.Staged:
        pending = self._require_pending(peer)
        try:
            started = time.perf_counter()
            copy = self._copy_of(pending, request.memory)
            opened = time.perf_counter()
            try:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:  # numpy and torch release the GIL
                    self._waits.reading(copy, peer, lambda: pool.submit(self._make_ready, copy))
            except BaseException:
                copy.close()
                raise
        except Exception:
            self._drop(pending)
            raise
        with self._lock:
            alive = self._pending is pending
            if alive:
                pending.copy = copy
        if not alive:
            self._close_soon(copy)
            raise BridgeError(
                "the version was replaced while it was being validated, or its trainer is gone", "bad_state"
            )
        fd = copy.fd if isinstance(copy, HostCopy) else -1
        return messages.Staged(
            open_s=opened - started,
            validate_s=time.perf_counter() - opened,
            memory=shm.locate(fd, shm.host()) if fd >= 0 else None,
        )

    def _make_ready(self, copy: Copy) -> None:
        """Validates a version, and prepares it if it is partial, which may wait for a read-back."""
        copy.validate()
        if copy.manifest.base and not isinstance(copy, ChunkedCopy):
            self._engine.prepare(copy)

    def _receive(self, manifest: messages.Manifest, peer: Peer, memory: messages.NcclMemory) -> Copy:
        """Receives the announced version over NCCL in a thread, and sends Progress to the trainer meanwhile."""

        def check() -> None:
            if peer.gone:
                raise ClientGoneError("the client is gone", "dead")
            if self._stopping:
                raise BridgeError("the bridge is stopping", "dead")
            if not peer.inbox.empty():
                raise BridgeError(f"the trainer gave up sending {manifest.version}", "unshared")

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._engine.receive, manifest, memory, check)
            try:
                return self._waits.result(peer, future)
            except BaseException:  # nobody will use what may still come
                future.add_done_callback(lambda done: None if done.exception() else done.result().close())
                raise

    def _copy_of(
        self,
        pending: Pending,
        memory: messages.HostMemory | messages.DeviceMemory | messages.NcclMemory | messages.Changes | None,
    ) -> Copy:
        """Opens the announced version's bytes in the memory that Stage names, or in the received Chunks."""
        manifest, peer = pending.manifest, pending.owner
        if isinstance(memory, messages.NcclMemory):
            return self._receive(manifest, peer, memory)
        if isinstance(memory, messages.Changes):
            return pending.changed_copy(self._good.last, memory.base, self._spare)
        is_here = isinstance(memory, messages.HostMemory) and memory.host == shm.host()  # another bridge's
        if memory is not None and not peer.shares_memory and not is_here:
            raise BridgeError("memory is shared on one host only: send Chunks", "unshared")
        if isinstance(memory, messages.DeviceMemory):
            if memory.ends:
                return ChunkedCopy(manifest, memory.ends, lambda part: self._engine.open_device(part, memory))
            return self._engine.open_device(manifest, memory)
        if memory is not None:
            fd = shm.open_located(memory)
            try:
                return HostCopy(manifest, shm.map_sealed(fd, manifest.total_bytes))
            finally:
                os.close(fd)
        return pending.received_copy()

    def _commit_request(self, peer: Peer, request: messages.Commit) -> messages.Published:
        pending = self._require_pending(peer)
        copy = pending.copy
        if copy is None:
            raise BridgeError("the announced version is not staged yet", "bad_state")
        if copy.manifest.digest != request.digest:
            raise BridgeError("Commit names another manifest than the staged one", "torn")

        def commit() -> messages.Published:
            try:
                if copy.borrowed and peer.gone:
                    raise BridgeError("the trainer is gone, and the version's memory with it", "dead")
                return self._commit(copy, peer, request)
            finally:
                self._drop(pending)  # on the engine thread: nobody closes a version while it is being read

        return self._waits.reading(copy, peer, lambda: self._call(commit))

    def _generate(self, peer: Peer, request: messages.Generate) -> messages.Completions:
        self.draws.check(request)
        if self.state == "empty":
            raise BridgeError("the engine was started without weights: publish a version first", "bad_state")
        if self.state == "fenced":
            raise BridgeError("the engine is fenced: publish a complete version first", "fenced")
        batch = Batch(request)

        def enqueue() -> None:
            if self._stopping:
                batch.future.set_exception(BridgeError("the bridge is stopping", "dead"))
            else:
                self.draws.add(batch)

        self._jobs.put(enqueue)
        try:
            return self._waits.result(peer, batch.future, batch)
        except ClientGoneError:
            self._jobs.put(lambda: self.draws.abort(batch))
            raise


def _sweeps(copy: Copy, begin: Callable[[], Iterator[Mapping[str, Any]]]) -> Sweeps:
    return Sweeps(begin, lasting=not isinstance(copy, ChunkedCopy), digest=copy.manifest.digest)
