# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of a publish: stage tensors, take their fingerprints, hand them to the bridge.

    announce v -> stage -> commit

`stage` makes one copy (host arrays into a memory file) and takes each tensor's fingerprint while its bytes are warm. On
a GPU the learner itself writes a buffer (`gpu_buffers`) and hands it in with the fingerprints it computed there: an
engine on that GPU maps it (transport/cuda_ipc.py), to one on another it is broadcast (transport/nccl.py). A staged
version stays with the sender, so that a bridge that died can be given it again without touching the learner.
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
    """A version in a sealed memory file. Close it, or let it be collected, to free the memory.

    Attributes:
      fd: the file's descriptor; -1 once closed.
      stage_s: seconds that staging took.
      over: of a partial version, the complete one whose other tensors it keeps; to be closed by its owner.
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
        """Encodes the change from the version of that manifest to this one (delta.py); None: send it whole.

        Made once, by whoever asks first, from any thread; `base` must not be closed meanwhile.
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
        """While it lasts, nobody else sends to a host; what is learned of where it lies there is kept."""
        with self._lock:
            elsewhere = self._elsewhere.setdefault(host, _Elsewhere())
        with elsewhere.lock:
            yield elsewhere

    def memory(self) -> messages.HostMemory:
        """Locates the version for the bridge."""
        return shm.locate(self.fd)

    def chunk(self, offset: int, size: int) -> bytes:
        """Some of its bytes, for a bridge that cannot reach the memory."""
        return os.pread(self.fd, size, offset)

    def close(self) -> None:
        """Free the memory (the bridge keeps its own reference while it needs one)."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


@dataclasses.dataclass
class DeviceVersion:
    """A version in a buffer on the GPU, or in one on each of several. Close it to let them be written again.

    Attributes:
      buffers: the same bytes in each.
      stage_s: seconds that staging took.
      transport: "cuda_ipc", "nccl", or "auto" (see `Client.route`).
    """

    manifest: messages.Manifest
    buffers: Sequence[cuda_ipc.Buffer]
    stage_s: float
    transport: str = "auto"
    over = None  # none is partial

    def buffer(self, device: bytes) -> cuda_ipc.Buffer:
        """The one on the GPU of that UUID, else the first."""
        return next((buffer for buffer in self.buffers if buffer.device.uuid == device), self.buffers[0])

    def lies_on(self, device: bytes) -> bool:
        """Tells whether there is one on the GPU of that UUID."""
        return any(buffer.device.uuid == device for buffer in self.buffers)

    def memory(self, device: bytes = b"") -> messages.DeviceMemory:
        """Locates the version for a bridge whose engine is on that GPU."""
        buffer = self.buffer(device)
        return messages.DeviceMemory(device=buffer.device.uuid, handle=buffer.handle)

    def chunk(self, offset: int, size: int) -> bytes:
        """Raises BridgeError("unshared"), always."""
        raise BridgeError("a version on the GPU is mapped or broadcast: it has no chunks", "unshared")

    def close(self) -> None:
        """The bridge must not need it any more: it has been refused, or another version serves."""
        for buffer in self.buffers:
            buffer.release()


@dataclasses.dataclass
class ChunkedVersion(DeviceVersion):
    """A version that is written part by part into a buffer smaller than the version, on each of some GPUs.

    Attributes:
      ends: indices of parts' ends, see messages.DeviceMemory.
      write: (part, buffer) -> writes that part into the buffer; BridgeError("bad_state") if the version is gone.
    """

    ends: list[int] = dataclasses.field(default_factory=list)
    write: Callable[[int, cuda_ipc.Buffer], None] = lambda part, buffer: None

    def memory(self, device: bytes = b"") -> messages.DeviceMemory:
        """The buffer on that GPU."""
        return msgspec.structs.replace(super().memory(device), ends=self.ends)


Version = StagedVersion | DeviceVersion


def complete_of(version: Version) -> Version:
    """The version itself, or the complete one that it is over."""
    return version.over or version


def gpu_buffers(ordinal: int, library: str = "libcuda.so.1") -> cuda_ipc.Buffers:
    """Staging buffers on GPU `ordinal` of this process; BridgeError("unshared") where there is none."""
    return cuda_ipc.Buffers(cuda_ipc.Device(ordinal, cuda_ipc.load(library)))


def gpu_memory(ordinal: int) -> tuple[int, int]:
    """(free, total) bytes of GPU `ordinal` of this process; BridgeError("unshared") where there is none."""
    return cuda_ipc.Device(ordinal).memory()


def gpu_count(library: str = "libcuda.so.1") -> int:
    """Number of GPUs of this process; BridgeError("unshared") where there is none."""
    return cuda_ipc.count(cuda_ipc.load(library))


def align(offset: int) -> int:
    """Rounds an offset up to one at which a tensor of a staged version may begin."""
    return -(-offset // messages.ALIGNMENT) * messages.ALIGNMENT


def manifest_of(
    entries: list[messages.TensorEntry],
    *,
    version: messages.Version,
    model: bytes,
    scheme: bytes,
    base: bytes = b"",
) -> messages.Manifest:
    """The sealed manifest of a version that ends where the last of its entries does. Arguments as in `stage`."""
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
    """Copy (Hugging Face name, array) pairs into a sealed memory file with a manifest.

    Args:
      tensors: whole fused modules together and layer by layer (the engine's loader holds one module at a time); arrays
        of any dtype in `tensors.DTYPES`.
      version: number and run of these tensors.
      model: `tensors.model_fingerprint` of the config.json.
      scheme: `tensors.scheme_hash` of its quantization_config.
      over: the complete version whose other tensors this one keeps (`messages.Manifest`); None: it is complete.
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
    """A model folder without weights, for an engine whose first version arrives by publish like every later one."""
    os.makedirs(path, exist_ok=True)
    for name, data in (
        ("config.json", json.dumps(config, indent=1).encode()),
        ("tensors.json", msgspec.json.encode(list(expected))),
    ):
        temporary = os.path.join(path, f".{name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, os.path.join(path, name))


class Client:
    """One authenticated connection to a bridge: requests out, replies in, errors raised as BridgeError.

    Args:
      address: a path, unix:/path or tcp://host:port.
      key: the bridge's, 32 bytes (`keys.read_key`).
      timeout_s: longest silence tolerated, in seconds.
      is_over: looked at while a reply is waited for; once true, the request ends with BridgeError("dead").

    Raises:
      BridgeError: nobody listens there ("dead") or answers in time ("timeout"), the key is another ("auth"), or the
        protocol is ("setup").
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
        """Longest silence tolerated in later requests."""
        self._timeout_s = seconds

    def close(self) -> None:
        """Close the connection; a lease held on it ends."""
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
        """Send one request and wait for its reply. fill: writes the part of a version that the bridge asks for."""
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
        """Take the publishing lease; refused while another trainer holds it."""
        self.request(messages.Acquire(run_id=run_id, incarnation=incarnation), messages.Ok)

    def publish(
        self, staged: Version, *, readback: str = "sampled", drain_timeout_s: float = 600.0
    ) -> dict[str, float]:
        """Announce, stage, commit; of a partial version, first the complete one, if the engine does not hold it.

        Args:
          readback: "full", "sampled" or "off": which live weights are compared with what was published.
          drain_timeout_s: longest time for running requests to end, in seconds.

        Returns:
          Seconds (`*_s`), `bytes`, and counts; `base_s` is 0 where the engine held the base already.

        Raises:
          BridgeError: refused; the engine goes on serving what it served, or is fenced (code "fenced"). "base": the
            complete version cannot be had any more.
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
        """The route of a version to this bridge: "host", "cuda_ipc" or "nccl".

        "auto" maps a buffer on the engine's own GPU and broadcasts to another GPU, but not past a TCP address: what
        the socket encrypts, NCCL does not.

        Raises:
          BridgeError("unshared"): there is no such way.
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
        """The bytes: from the GPU where they lie there, else as shared memory, else over the socket."""
        manifest = staged.manifest
        route = self.sent_over = self.route(staged)
        self.sent_bytes = 0
        ready = self.request(messages.Announce(manifest=manifest), messages.Ready)
        if isinstance(staged, DeviceVersion):
            if route == "nccl":
                return self._broadcast(staged.buffer(self.facts.device))
            stage = messages.Stage(memory=staged.memory(self.facts.device))
            return self.request(stage, messages.Staged, fill=self._filler(staged))
        if ready.share_memory:
            try:
                return self.request(messages.Stage(memory=staged.memory()), messages.Staged)
            except BridgeError as error:
                if error.code != "unshared":
                    raise
            self.request(messages.Announce(manifest=manifest), messages.Ready)
        with staged.turn_of(ready.host) as elsewhere:
            if elsewhere.memory is not None:  # in another bridge of its host
                try:
                    return self.request(messages.Stage(memory=elsewhere.memory), messages.Staged)
                except BridgeError as error:
                    if error.code != "unshared":
                        raise
                self.request(messages.Announce(manifest=manifest), messages.Ready)
            done = self._send(staged, ready.holds)
            elsewhere.memory = done.memory
            return done

    def _filler(self, staged: Version) -> Callable[[int], None] | None:
        if not isinstance(staged, ChunkedVersion):
            return None
        return lambda part: staged.write(part, staged.buffer(self.facts.device))

    def _send(self, staged: StagedVersion, holds: bytes) -> messages.Staged:
        """Through the socket: what has changed since the version the bridge holds, or the whole."""
        manifest = staged.manifest
        changes = staged.changes_to(holds)
        if changes is not None:
            for offset in range(0, len(changes), messages.CHUNK_BYTES):
                self._send_chunk(offset, changes[offset : offset + messages.CHUNK_BYTES])
            try:
                return self.request(messages.Stage(memory=messages.Changes(base=holds)), messages.Staged)
            except BridgeError as error:
                if error.code not in ("unshared", "torn"):
                    raise
            self.request(messages.Announce(manifest=manifest), messages.Ready)
        for offset in range(0, manifest.total_bytes, messages.CHUNK_BYTES):
            size = min(messages.CHUNK_BYTES, manifest.total_bytes - offset)
            self._send_chunk(offset, staged.chunk(offset, size))
        return self.request(messages.Stage(memory=None), messages.Staged)

    def _send_chunk(self, offset: int, data: bytes) -> None:
        self.request(messages.Chunk(offset=offset), messages.Ok, data=data)
        self.sent_bytes += len(data)

    def _broadcast(self, buffer: cuda_ipc.Buffer) -> messages.Staged:
        """Send a buffer while the bridge receives it, each looking at the other over the socket.

        Raises:
          BridgeError: what the bridge says of it; "dead" or "timeout", it is gone or silent; "unshared", NCCL failed
            or took too long, with both ends free again. The next broadcast begins with a new communicator.
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
        """End the bridge's waiting, and take its two answers, so that the connection can be used again."""
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
        """Completions in the order of `draws`.

        Raises:
          BridgeError: a request beyond the engine's limits ("limits"), or an engine without weights ("bad_state") or
            behind a fence ("fenced").
        """
        message = messages.Generate(draws=draws, sampling=sampling)
        return self.request(message, messages.Completions, on_progress=on_progress).completions

    def read_back(self, mode: str = "full", seed: int = 0) -> messages.ReadBackReply:
        """Compare the live layers with the staged copy of the serving version.

        Args:
          mode: "full", or "sampled" by `seed`.
        """
        return self.request(messages.ReadBack(mode=mode, seed=seed), messages.ReadBackReply)

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Records the inputs and outputs of live modules while `prompt` is prefilled."""
        return self.request(messages.Probe(prompt=prompt, modules=modules), messages.Probed).records

    def shutdown(self) -> None:
        """Ask the bridge to stop."""
        self.request(messages.Shutdown(), messages.Ok)
