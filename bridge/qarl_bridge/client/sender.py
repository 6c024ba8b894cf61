# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Publishes weights from the trainer: stages tensors, computes their fingerprints, and hands them to the bridge.

    announce v -> stage -> commit

`stage` copies host arrays into a memory file and computes each tensor's fingerprint while its bytes are in cache. On a
GPU the learner writes a buffer (`gpu_buffers`) and computes the fingerprints there. An engine on the learner's GPU maps
the buffer (transport/cuda_ipc.py); an engine on another GPU receives a broadcast (transport/nccl.py). The sender keeps
a staged version, so it can publish it again to a restarted bridge without the learner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from qarl_bridge.protocol import delta, fingerprint, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import cuda_ipc, nccl, shm, zeromq


@dataclasses.dataclass
class _Elsewhere:
    """The place of a version that was sent to another host."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    memory: messages.HostMemory | None = None


@dataclasses.dataclass
class StagedVersion:
    """A version in a sealed memory file. `close` or garbage collection frees the memory.

    Attributes:
      fd: the file's descriptor; -1 once closed.
      stage_s: seconds that staging took.
      over: for a partial version, the complete version that supplies the remaining tensors; `close` leaves it open.
    """

    manifest: messages.Manifest
    fd: int
    stage_s: float

    over: Version | None = None
    transport = "host"
    base: StagedVersion | None = None  # the version before it, for who holds that
    _changes: bytes | None = None
    _changes_to: bytes = b""  # the base they were made for
    _elsewhere: dict[bytes, _Elsewhere] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    def changes_to(self, digest: bytes) -> bytes | None:
        """Encodes the bytes that differ from `base` (delta.py), if `digest` is the digest of its manifest.

        Returns None where the whole version must be sent. The result is cached. Thread-safe; `base` must stay open.
        """
        with self._lock:
            base = self.base
            fits = base is not None and base.fd >= 0 and base.manifest.total_bytes == self.manifest.total_bytes
            if base is not None and fits and base.manifest.digest == digest != self._changes_to:
                old, new = (shm.map_sealed(one.fd, one.manifest.total_bytes) for one in (base, self))
                self._changes, self._changes_to = delta.difference(old, new), digest
            return self._changes if digest and digest == self._changes_to else None

    @contextlib.contextmanager
    def turn_of(self, host: bytes) -> Iterator[_Elsewhere]:
        """Locks sending to a host, and yields the record of the memory in which the version lies on the host."""
        with self._lock:
            elsewhere = self._elsewhere.setdefault(host, _Elsewhere())
        with elsewhere.lock:
            yield elsewhere

    def memory(self) -> messages.HostMemory:
        """Returns the process and descriptor by which the bridge opens the memory file."""
        return shm.locate(self.fd)

    def chunk(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, for a bridge that cannot share memory with the trainer."""
        return os.pread(self.fd, size, offset)

    def close(self) -> None:
        """Closes the memory file; the memory is freed once the bridge has closed its mapping, too. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


@dataclasses.dataclass
class DeviceVersion:
    """A version in a buffer on each of one or more GPUs. `close` lets the next version overwrite the buffers.

    Attributes:
      buffers: one for each GPU; all hold equal bytes.
      stage_s: seconds that staging took.
      transport: "cuda_ipc", "nccl", or "auto" (see `Client.route`).
    """

    manifest: messages.Manifest
    buffers: Sequence[cuda_ipc.Buffer]
    stage_s: float
    transport: str = "auto"
    over = None  # none is partial

    def buffer(self, device: bytes) -> cuda_ipc.Buffer:
        """Returns the buffer on the GPU with UUID `device`, or the first buffer if that GPU has none."""
        return next((buffer for buffer in self.buffers if buffer.device.uuid == device), self.buffers[0])

    def lies_on(self, device: bytes) -> bool:
        """Tells whether a buffer lies on the GPU with UUID `device`."""
        return any(buffer.device.uuid == device for buffer in self.buffers)

    def memory(self, device: bytes = b"") -> messages.DeviceMemory:
        """Returns the CUDA handle by which a bridge maps the buffer on the GPU with UUID `device`."""
        buffer = self.buffer(device)
        return messages.DeviceMemory(device=buffer.device.uuid, handle=buffer.handle)

    def chunk(self, offset: int, size: int) -> bytes:
        """Always raises BridgeError("unshared"): a version on a GPU is never sent through the socket."""
        raise BridgeError("a version on the GPU is mapped or broadcast: it has no chunks", "unshared")

    def close(self) -> None:
        """Releases the buffers. Call it once the bridge has refused the version or serves another one."""
        for buffer in self.buffers:
            buffer.release()


@dataclasses.dataclass
class ChunkedVersion(DeviceVersion):
    """A version for chunked weight transfer: it is written part by part into a GPU buffer smaller than the version.

    Attributes:
      ends: for each part the index of the tensor after its last one, see messages.DeviceMemory.
      write: a callback (part, buffer) that writes a part into a buffer, or raises BridgeError("bad_state").
    """

    ends: list[int] = dataclasses.field(default_factory=list)
    write: Callable[[int, cuda_ipc.Buffer], None] = lambda part, buffer: None

    def memory(self, device: bytes = b"") -> messages.DeviceMemory:
        """Returns the CUDA handle of the buffer on the GPU with UUID `device`, and the ends of the parts."""
        return msgspec.structs.replace(super().memory(device), ends=self.ends)


Version = StagedVersion | DeviceVersion


def complete_of(version: Version) -> Version:
    """Returns the complete version under a partial one (`StagedVersion.over`), or a complete version unchanged."""
    return version.over or version


def gpu_buffers(ordinal: int, library: str = "libcuda.so.1") -> cuda_ipc.Buffers:
    """Makes a pool of staging buffers on GPU `ordinal` of this process; BridgeError("unshared") without a GPU."""
    return cuda_ipc.Buffers(cuda_ipc.Device(ordinal, cuda_ipc.load(library)))


def gpu_memory(ordinal: int) -> tuple[int, int]:
    """Returns (free, total) bytes of GPU `ordinal` of this process; BridgeError("unshared") without a GPU."""
    return cuda_ipc.Device(ordinal).memory()


def gpu_count(library: str = "libcuda.so.1") -> int:
    """Counts the GPUs that this process sees; BridgeError("unshared") without a GPU."""
    return cuda_ipc.count(cuda_ipc.load(library))


def align(offset: int) -> int:
    """Rounds a byte offset up to a multiple of `messages.ALIGNMENT`, where a tensor of a version may begin."""
    return -(-offset // messages.ALIGNMENT) * messages.ALIGNMENT


def manifest_of(
    entries: list[messages.TensorEntry],
    *,
    version: messages.Version,
    model: bytes,
    scheme: bytes,
    base: bytes = b"",
) -> messages.Manifest:
    """Builds the manifest, digest included, of a version with these tensors. Other arguments as in `stage`."""
    return messages.Manifest(
        version=version,
        model=model,
        scheme=scheme,
        tensors=entries,
        total_bytes=entries[-1].offset + entries[-1].nbytes if entries else 0,
        digest=bytes(messages.DIGEST_BYTES),
        base=base,
    ).sealed()


def stage(
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    version: messages.Version,
    model: bytes,
    scheme: bytes,
    over: Version | None = None,
) -> StagedVersion:
    """Copies (Hugging Face name, array) pairs into a sealed memory file and computes the manifest.

    Args:
      tensors: in order of layers, tensors of a fused module side by side (the engine's loader holds one module at a
        time); arrays of any dtype in `tensors.DTYPES`.
      version: the run, its incarnation and the step that made these tensors.
      model: `tensors.model_fingerprint` of the config.json.
      scheme: `tensors.scheme_hash` of its quantization_config.
      over: the complete version that supplies the tensors left out here (`messages.Manifest`); None: none left out.
    """
    start = time.perf_counter()
    entries: list[messages.TensorEntry] = []
    fd, end = shm.create(0), 0
    try:
        for name, array in tensors:
            array = np.asarray(array)
            data = messages.as_bytes(array)
            offset = align(end)
            shm.write(fd, data, offset)
            entries.append(
                messages.TensorEntry(
                    name=name,
                    dtype=messages.dtype_name(array.dtype),
                    shape=list(array.shape),
                    offset=offset,
                    nbytes=len(data),
                    digest=fingerprint.digest(data),
                )
            )
            end = offset + len(data)
        os.ftruncate(fd, end)
        shm.seal(fd)
        base = b"" if over is None else over.manifest.kept({entry.name for entry in entries})
        manifest = manifest_of(entries, version=version, model=model, scheme=scheme, base=base)
    except BaseException:
        os.close(fd)
        raise
    return StagedVersion(manifest, fd, time.perf_counter() - start, over)


def write_folder(path: str, config: Mapping[str, Any], expected: Iterable[messages.Expected]) -> None:
    """Writes a model folder without weights (config.json, tensors.json); its engine waits for the first publish."""
    os.makedirs(path, exist_ok=True)
    write_file(path, "config.json", json.dumps(config, indent=1).encode())
    write_file(path, "tensors.json", msgspec.json.encode(list(expected)))


def write_file(folder: str, name: str, data: bytes) -> None:
    """Writes a file of a model folder, and replaces an earlier one once it is complete."""
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, os.path.join(folder, name))


class Client:
    """One authenticated connection to a bridge: requests out, replies in, errors raised as BridgeError.

    Args:
      address: a path, unix:/path or tcp://host:port.
      key: the bridge's 32-byte key (`keys.read_key`).
      timeout_s: seconds without any message from the bridge after which a request fails.
      is_over: a callback, polled during a request; once it is true, the request ends with BridgeError("dead").

    Raises:
      BridgeError: no bridge listens at the address ("dead"), it does not answer in time ("timeout"), the keys differ
        ("auth"), or the protocols do ("setup").
    """

    def __init__(
        self, address: str, key: bytes, *, timeout_s: float = 60.0, is_over: Callable[[], bool] = lambda: False
    ):
        self.address = address
        self._timeout_s = timeout_s
        self._channel = zeromq.Channel(address, key, timeout_s, is_over)
        self._communicator: nccl.Communicator | None = None
        self.sent_bytes = 0  # of the last version, through the socket
        self.sent_over = ""  # "host", "cuda_ipc" or "nccl": how the last version went
        try:
            self.facts: messages.Facts = self.request(
                messages.Hello(protocol=messages.PROTOCOL), messages.Welcome
            ).facts
        except BaseException:
            self.close()
            raise

    def set_timeout(self, seconds: float) -> None:
        """Sets the seconds without any message from the bridge after which a later request fails."""
        self._timeout_s = seconds

    def close(self) -> None:
        """Closes the connection, and thereby ends a lease that was acquired on it."""
        self._leave()
        self._channel.close()

    def request(
        self,
        message: Any,
        reply: type,
        *,
        data: bytes | None = None,
        on_progress: Callable[[messages.Progress], None] | None = None,
        fill: Callable[[int], None] | None = None,
    ) -> Any:
        """Sends one request and returns its reply, of type `reply`. data: raw bytes of a Chunk. on_progress, fill:
        callbacks for Progress, and for Fill, which must write the part with the given index."""
        self._channel.send(message, data)
        return self._answer(message, reply, on_progress, fill)

    def _answer(
        self,
        message: Any,
        reply: type,
        on_progress: Callable[[messages.Progress], None] | None = None,
        fill: Callable[[int], None] | None = None,
    ) -> Any:
        failed: Exception | None = None
        while True:
            answer = messages.decode(self._channel.receive(self._timeout_s), messages.REPLY_DECODER)
            if isinstance(answer, messages.Fill) and fill is not None:
                try:
                    fill(answer.part)
                except Exception as error:  # the bridge is waiting: it hears of it before anybody else
                    failed = error
                self._channel.send(messages.Cancel() if failed else messages.Filled(part=answer.part))
            elif isinstance(answer, messages.Progress):
                if on_progress is not None:
                    on_progress(answer)
            elif failed is not None:
                raise failed
            elif isinstance(answer, messages.Error):
                raise BridgeError(answer.message, answer.code)
            elif isinstance(answer, reply):
                return answer
            else:
                raise BridgeError(f"the bridge answered {type(message).__name__} with {type(answer).__name__}")

    def status(self) -> messages.StatusReply:
        """Asks the bridge for its state."""
        return self.request(messages.Status(), messages.StatusReply)

    def acquire(self, run_id: str, incarnation: int) -> None:
        """Takes the publishing lease; BridgeError("lease") while another trainer holds it."""
        self.request(messages.Acquire(run_id=run_id, incarnation=incarnation), messages.Ok)

    def publish(
        self, staged: Version, *, readback: str = "sampled", drain_timeout_s: float = 600.0
    ) -> dict[str, float]:
        """Publishes a version: announces it, transfers the bytes, and commits, which loads them into the engine.

        The base of a partial version is published first where the engine does not hold it.

        Args:
          readback: "full", "sampled" or "off": which live weights are compared with the published ones.
          drain_timeout_s: seconds that running requests may take to end.

        Returns:
          Seconds (`*_s`), `bytes`, and counts; `base_s` is 0 where the engine held the base already.

        Raises:
          BridgeError: the publish failed, and the engine serves its old version or none ("fenced"). "base": the
            partial version's base is not available any more.
        """
        start = begun = time.perf_counter()
        commit = messages.Commit(digest=staged.manifest.digest, readback=readback, drain_timeout_s=drain_timeout_s)

        def attempt() -> tuple[messages.Staged, float, messages.Published]:
            done = self._transfer(staged)
            transferred = time.perf_counter()
            return done, transferred, self.request(commit, messages.Published, fill=self._filler(staged))

        try:
            done, transferred, published = attempt()
        except BridgeError as error:
            if error.code != "base" or staged.over is None:
                raise
            self._publish_base(staged.over, readback=readback, drain_timeout_s=drain_timeout_s)
            start = time.perf_counter()
            done, transferred, published = attempt()
        return {
            "stage_s": staged.stage_s,
            "transfer_s": transferred - start,
            "open_s": done.open_s,
            "validate_s": done.validate_s,
            "base_s": start - begun if start > begun else 0.0,
            "total_s": staged.stage_s + time.perf_counter() - begun,
            "sent_bytes": float(self.sent_bytes),
            **{name: float(value) for name, value in msgspec.structs.asdict(published.report).items()},
        }

    def _publish_base(self, staged: Version, **options: Any) -> None:
        try:
            self.publish(staged, **options)
        except BridgeError as error:
            if error.code != "bad_state":
                raise
            raise BridgeError(str(error), "base") from error

    def route(self, staged: Version) -> str:
        """Chooses the transport of a version to this bridge: "host", "cuda_ipc" or "nccl".

        `transport="auto"` maps a buffer on the engine's GPU, and broadcasts to another GPU. It never broadcasts to a
        bridge with a TCP address, because NCCL does not encrypt.

        Raises:
          BridgeError("unshared"): the version's transport cannot reach this engine.
        """
        if isinstance(staged, StagedVersion):
            return "host"
        same = staged.lies_on(self.facts.device)
        if isinstance(staged, ChunkedVersion) and not same:
            raise BridgeError(
                "versions that are not staged whole are read on the learner's own GPU: with the engine elsewhere set "
                "rollout.engine.staging_buffers to 1 or 2",
                "unshared",
            )
        if staged.transport == "nccl" and same:
            raise BridgeError(
                "learner and engine share a GPU, and NCCL joins different ones: name another in "
                "rollout.engine.visible_gpus",
                "unshared",
            )
        if staged.transport != "auto":
            return staged.transport
        if not self.facts.device:
            raise BridgeError("this engine runs on a CPU", "unshared")
        if self.address.startswith("tcp://"):
            raise BridgeError("the bridge is reached over TCP", "unshared")
        return "cuda_ipc" if same else "nccl"

    def _transfer(self, staged: Version) -> messages.Staged:
        """Transfers the bytes: through a GPU buffer if they lie there, else shared memory, else the socket."""
        manifest = staged.manifest
        route = self.sent_over = self.route(staged)
        self.sent_bytes = 0
        ready = self.request(messages.Announce(manifest=manifest), messages.Ready)
        if isinstance(staged, DeviceVersion):
            if route == "nccl":
                return self._broadcast(staged.buffer(self.facts.device))
            stage = messages.Stage(memory=staged.memory(self.facts.device))
            return self.request(stage, messages.Staged, fill=self._filler(staged))
        if ready.share_memory and (done := self._offered(staged.memory(), manifest)):
            return done
        with staged.turn_of(ready.host) as elsewhere:  # whose memory is in another bridge of its host
            if elsewhere.memory is not None and (done := self._offered(elsewhere.memory, manifest)):
                return done
            done = self._send(staged, ready.holds)
            elsewhere.memory = done.memory
            return done

    def _offered(self, memory: Any, manifest: messages.Manifest, *codes: str) -> messages.Staged | None:
        """Stages bytes in `memory`; if the bridge cannot take them ("unshared" or `codes`), announces again: None."""
        try:
            return self.request(messages.Stage(memory=memory), messages.Staged)
        except BridgeError as error:
            if error.code not in ("unshared", *codes):
                raise
        self.request(messages.Announce(manifest=manifest), messages.Ready)
        return None

    def _filler(self, staged: Version) -> Callable[[int], None] | None:
        if not isinstance(staged, ChunkedVersion):
            return None
        return lambda part: staged.write(part, staged.buffer(self.facts.device))

    def _send(self, staged: StagedVersion, holds: bytes) -> messages.Staged:
        """Sends a version through the socket: the changes since the version with digest `holds`, or all bytes."""
        manifest = staged.manifest
        changes = staged.changes_to(holds)
        if changes is not None:
            for offset in range(0, len(changes), messages.CHUNK_BYTES):
                self._send_chunk(offset, changes[offset : offset + messages.CHUNK_BYTES])
            if done := self._offered(messages.Changes(base=holds), manifest, "torn"):
                return done
        for offset in range(0, manifest.total_bytes, messages.CHUNK_BYTES):
            size = min(messages.CHUNK_BYTES, manifest.total_bytes - offset)
            self._send_chunk(offset, staged.chunk(offset, size))
        return self.request(messages.Stage(memory=None), messages.Staged)

    def _send_chunk(self, offset: int, data: bytes) -> None:
        self.request(messages.Chunk(offset=offset), messages.Ok, data=data)
        self.sent_bytes += len(data)

    def _broadcast(self, buffer: cuda_ipc.Buffer) -> messages.Staged:
        """Broadcasts a buffer over NCCL while the bridge receives it; both ends watch each other over the socket.

        Raises:
          BridgeError: the bridge's error; "dead" or "timeout", the bridge is gone or silent; "unshared", NCCL failed
            or took too long, and both ends have left it. The next broadcast begins with a new communicator.
        """
        library = nccl.load()
        communicator = self._communicator
        unique_id = nccl.new_id(library) if communicator is None else communicator.unique_id
        version = nccl.version(library)
        stage = messages.Stage(
            memory=messages.NcclMemory(unique_id=unique_id, rank=1, world=2, version=version, timeout_s=self._timeout_s)
        )
        heard = time.monotonic()
        early: list[Any] = []  # what the bridge answers before our end has noticed that it is done

        def check() -> None:
            nonlocal heard
            while (payload := self._channel.poll()) is not None:
                heard = time.monotonic()
                answer = messages.decode(payload, messages.REPLY_DECODER)
                if not isinstance(answer, messages.Progress):
                    early.append(answer)
            if early and isinstance(early[0], messages.Error):
                raise BridgeError(early[0].message, early[0].code)
            if not early and time.monotonic() - heard > self._timeout_s:
                raise BridgeError("timed out while waiting for the other side", "timeout")

        self._channel.send(stage)
        try:
            if communicator is None:
                communicator = self._communicator = nccl.Communicator(
                    buffer.device, 0, 2, unique_id, library=library, timeout_s=self._timeout_s, check=check
                )
            communicator.broadcast(buffer.pointer, buffer.size, timeout_s=self._timeout_s, check=check)
        except BaseException as error:
            self._leave()
            if isinstance(error, BridgeError) and error.code == "unshared" and not early:
                self._give_up(stage)
            raise
        if early:
            return early[0]
        try:
            return self._answer(stage, messages.Staged)
        except BaseException:  # whether the bridge is still in the communicator is not known here
            self._leave()
            raise

    def _give_up(self, stage: messages.Stage) -> None:
        """Cancels the bridge's wait for NCCL and reads its two replies, so that the connection stays usable."""
        self._channel.send(messages.Cancel())
        for expected in (messages.Staged, messages.Ok):
            try:
                self._answer(stage, expected)
            except BridgeError as error:
                if error.code in ("dead", "timeout"):
                    raise

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def generate(
        self,
        draws: list[messages.Draw],
        sampling: messages.Sampling,
        *,
        on_progress: Callable[[messages.Progress], None] | None = None,
    ) -> list[messages.Drawn]:
        """Samples completions; returns them in the order of `draws`.

        Args:
          sampling: settings of all draws. on_progress: called with each Progress that the bridge sends meanwhile.

        Raises:
          BridgeError: a request exceeds the engine's limits ("limits"), or the engine has no weights yet ("bad_state")
            or none that can be trusted after a failed load ("fenced").
        """
        message = messages.Generate(draws=draws, sampling=sampling)
        return self.request(message, messages.Completions, on_progress=on_progress).completions

    def read_back(self, mode: str = "full", seed: int = 0) -> messages.ReadBackReply:
        """Compares the engine's live weights with the bridge's copy of the serving version.

        Args:
          mode: "full" for every weight, or "sampled" for a choice drawn with `seed`.
        """
        return self.request(messages.ReadBack(mode=mode, seed=seed), messages.ReadBackReply)

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Records the inputs and outputs of the named modules of the live model while it prefills `prompt`."""
        return self.request(messages.Probe(prompt=prompt, modules=modules), messages.Probed).records

    def shutdown(self) -> None:
        """Asks the bridge to stop; BridgeError("lease") while another trainer holds the lease."""
        self.request(messages.Shutdown(), messages.Ok)
