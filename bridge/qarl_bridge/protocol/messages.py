# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between trainer and bridge, and the manifest that describes a published version.

Every message is msgpack, decoded by msgspec into the tagged structs below. An unknown tag, an unknown or missing field,
a wrong type or an oversized value is a `BridgeError`. Received data is never unpickled, evaluated, or used as a path or
an import name. (HostMemory names a descriptor; transport/shm.py opens it only if it is a staged version of this user.)
transport/zeromq.py carries the messages, and admits only peers that hold the key.

A connection begins with Hello; then each request has its replies, one request at a time:

    trainer -> bridge   Hello(protocol)                        Status(), Acquire(...), Announce(...), ...
    bridge -> trainer   Welcome(facts)                         Progress()..., then one of the other replies, or Error

A version is (run_id, incarnation, step). One trainer at a time holds the lease; within one incarnation steps only grow;
a later incarnation of the same run (a resumed trainer) may step back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from qarl_bridge.protocol import fingerprint
from qarl_bridge.protocol.errors import BridgeError as BridgeError
from qarl_bridge.protocol.keys import create_key as create_key
from qarl_bridge.protocol.keys import parse_address as parse_address
from qarl_bridge.protocol.keys import read_key as read_key
from qarl_bridge.protocol.options import EngineOptions as EngineOptions
from qarl_bridge.protocol.scratch import Scratch as Scratch
from qarl_bridge.protocol.tensors import DIGEST_BYTES as DIGEST_BYTES
from qarl_bridge.protocol.tensors import DTYPES as DTYPES
from qarl_bridge.protocol.tensors import as_bytes as as_bytes
from qarl_bridge.protocol.tensors import digest as digest
from qarl_bridge.protocol.tensors import dtype_name as dtype_name
from qarl_bridge.protocol.tensors import model_fingerprint as model_fingerprint
from qarl_bridge.protocol.tensors import scheme_hash as scheme_hash

PROTOCOL = 15
MAX_REPLY = 1 << 30  # what a trainer takes from its bridge: completions with the experts of every token
MAX_FRAME = 64 << 20  # of a message: a batch of 4,096 completions of 1,024 tokens is 32 MiB; weights travel in Chunks
CHUNK_BYTES = 8 << 20  # of tensor data per message, where no memory is shared
MAX_STAGE_BYTES = 1 << 41
NCCL_ID_BYTES = 128
ALIGNMENT = fingerprint.ROW_BYTES  # of tensors in a staged version, so that no row holds two


Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
RunId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of structs that are nested in messages."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="t", tag=True):
    """Base of every message; `t` on the wire is the class name."""


class Version(_Struct):
    """The identity of published weights: run, incarnation (a number that grows at each start of the run), step."""

    run_id: RunId
    incarnation: Incarnation
    step: Step

    def __str__(self) -> str:
        return f"{self.run_id}/{self.incarnation}/{self.step}"


class TensorEntry(_Struct):
    """One tensor of a version: Hugging Face name, dtype, shape, byte range, and fingerprint (`digest`).

    Example: TensorEntry(name="model.norm.weight", dtype="bfloat16", shape=[256], offset=4096, nbytes=512, digest=...).
    """

    name: Name
    dtype: Name
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]
    offset: Count
    nbytes: Count
    digest: Digest


class Expected(_Struct):
    """Name, dtype and shape of one tensor that the engine's loader needs."""

    name: Name
    dtype: Name
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]


class Manifest(_Struct):
    """The description of a version: its identity, tensors and size. `digest` covers all other fields.

    A partial version replaces some tensors of a complete one; `base` is the fingerprint of the tensors that stay
    (`kept`). A partial version has whole modules, every adapter (adapters.py), and every tensor in which the serving
    version differs from the complete one."""

    version: Version
    model: Digest
    scheme: Digest
    tensors: Annotated[list[TensorEntry], msgspec.Meta(max_length=500_000)]
    total_bytes: Count
    digest: Digest
    base: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""

    def computed_digest(self) -> bytes:
        """Computes the digest of all fields but `digest`; the two differ if the manifest was damaged."""
        return digest(b"manifest", msgspec.msgpack.encode(msgspec.structs.replace(self, digest=bytes(DIGEST_BYTES))))

    def kept(self, replaced: Collection[str]) -> bytes:
        """Computes one fingerprint of the tensors not in `replaced`; run, step and order do not change it."""
        entries = sorted((e.name, e.dtype, e.shape, e.digest) for e in self.tensors if e.name not in replaced)
        return digest(b"kept", msgspec.msgpack.encode((self.model, self.scheme, entries)))

    def part(self, entries: Sequence[TensorEntry]) -> Manifest:
        """Makes a manifest of some neighbouring entries, with offsets from the first entry's first byte."""
        first = entries[0].offset
        moved = [msgspec.structs.replace(entry, offset=entry.offset - first) for entry in entries]
        return msgspec.structs.replace(self, tensors=moved, total_bytes=moved[-1].offset + moved[-1].nbytes)

    def sealed(self) -> Manifest:
        """Returns a copy of the manifest with `digest` filled in."""
        return msgspec.structs.replace(self, digest=self.computed_digest())


class Span(_Struct):
    """A range of a response: tokens [start, end) were sampled under `version`."""

    version: Version
    start: Count
    end: Count


class HostMemory(_Struct, tag_field="t", tag=True):
    """The location of a memory file: descriptor `fd` of process `pid`.

    `inode` guards against reuse of the descriptor. `host` (`shm.host`) is set for a memory file that a bridge holds.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    inode: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    host: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""


class DeviceMemory(_Struct, tag_field="t", tag=True):
    """A GPU buffer that another process of this host may map: the GPU's UUID and the buffer's CUDA IPC handle.

    With `ends` the transfer is chunked: a version comes part by part through a buffer smaller than the version. A part
    is a run of consecutive tensors of the manifest. `ends` has the index where each part ends; the last is the number
    of tensors. The bridge asks for each part with Fill."""

    device: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    ends: Annotated[list[Count], msgspec.Meta(max_length=500_000)] = []


class NcclMemory(_Struct, tag_field="t", tag=True):
    """A buffer on another GPU, which the trainer broadcasts over NCCL (transport/nccl.py). The engine joins
    communicator `unique_id` as `rank` of `world` and receives.

    `version`: number of the trainer's NCCL release, which the engine's must equal (22703 is 2.27.3). `timeout_s`:
    seconds in which all ranks must join."""

    unique_id: Annotated[bytes, msgspec.Meta(min_length=NCCL_ID_BYTES, max_length=NCCL_ID_BYTES)]
    rank: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    world: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    timeout_s: Seconds


class Changes(_Struct, tag_field="t", tag=True):
    """Says that the Chunks held only the changes (delta.py) to the version whose manifest has digest `base`."""

    base: Digest


class Array(_Struct):
    """An array by value: `data` is its bytes, little-endian."""

    dtype: Name
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]
    data: bytes

    @staticmethod
    def of(array: np.ndarray) -> Array:
        """Converts a numpy array whose dtype is in `DTYPES`; BridgeError("tensor") for another dtype."""
        return Array(dtype=dtype_name(array.dtype), shape=list(array.shape), data=bytes(as_bytes(array)))

    def numpy(self) -> np.ndarray:
        """Converts back to a numpy array; BridgeError if `data` does not have the size of dtype and shape."""
        if self.dtype not in DTYPES or math.prod(self.shape) * DTYPES[self.dtype].itemsize != len(self.data):
            raise BridgeError(f"{len(self.data)} bytes do not hold {self.dtype}{self.shape}")
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


ROUTING = "routing"  # not a module: the experts each token of a probe was sent to


class Recorded(_Struct):
    """The recorded inputs and outputs of one module of the live model, in order of its arguments and results."""

    module: Name
    inputs: list[Array]
    outputs: list[Array]


class Sampling(_Struct):
    """Sampling parameters of a Generate. Reported log-probs are taken after temperature and top-p."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=1024)] = []


class Draw(_Struct):
    """A request for one completion. `seed` makes it independent of other requests in the batch.

    To continue a response, append its tokens to the prompt and set `max_tokens` to the number of tokens still allowed
    (0: the limit of Sampling).
    """

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=1 << 22)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0

    def under(self, sampling: Sampling) -> Sampling:
        """Returns `sampling` with `max_tokens` lowered to this request's limit, if it has one."""
        if not self.max_tokens:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=min(self.max_tokens, sampling.max_tokens))


class Drawn(_Struct):
    """One completion: int32 `tokens` and float32 `logprobs`, one for each token, as little-endian bytes.

    `routed`: int16 of shape `routed_shape`, [prompt + tokens - 1, layers, k]: the experts that each position used, if
    the engine records them (-1: a dense layer).
    """

    tokens: bytes
    logprobs: bytes
    finish_reason: Annotated[str, msgspec.Meta(pattern="^(stop|length|abort)$")]
    spans: list[Span]
    routed: bytes = b""
    routed_shape: Annotated[list[Count], msgspec.Meta(max_length=3)] = []


class Facts(_Struct):
    """A description of the engine: versions, arithmetic, limits. The trainer checks it and records it in the run."""

    engine: Text
    engine_version: Text
    profile: Annotated[str, msgspec.Meta(pattern="^(plain|cpu|cuda)$")]
    isa: Text
    kernels: dict[Name, Text]
    model: Digest
    scheme: Digest
    vocab_size: Count
    max_model_len: Count
    threads: Count
    pid: Count
    notes: list[Text] = []
    execution: Annotated[str, msgspec.Meta(pattern="^(none|eager|graphs|compiled)$")] = "none"
    departures: list[Text] = []  # what of the engine's arithmetic is not batch-invariant, and why
    device: Annotated[bytes, msgspec.Meta(max_length=16)] = b""  # UUID of the engine's GPU; empty: it runs on a CPU
    records_routing: bool = False  # completions carry the experts of their tokens
    tensor_parallel_size: Count = 1


# Requests
class Hello(_Message):
    """The first message of a connection, with the trainer's protocol number. Reply: Welcome."""

    protocol: int


class Status(_Message):
    """Asks for the bridge's state. Reply: StatusReply."""


class Acquire(_Message):
    """Takes the publishing lease for (run_id, incarnation). The lease ends with the connection. Reply: Ok."""

    run_id: RunId
    incarnation: Incarnation


class Announce(_Message):
    """Announces a version. The bridge checks its manifest. Needs the lease. Reply: Ready."""

    manifest: Manifest


class Stage(_Message):
    """Tells the bridge where the announced bytes are; the bridge checks every fingerprint and every float. `memory` is
    a sealed memory file, a GPU buffer, or, for bytes in the Chunks before this message, None or Changes. Reply: Staged;
    Error "unshared" if the bridge cannot reach the memory or does not hold the base of Changes."""

    memory: HostMemory | DeviceMemory | NcclMemory | Changes | None


class Cancel(_Message):
    """Cancels the bridge's wait for an NCCL transfer (reply: Ok, after the reply to Stage), or for a Filled (reply:
    the one to the pending request)."""


class Filled(_Message):
    """Reports that the buffer holds the part that Fill asked for. Reply: Fill, or the one to Stage or Commit."""

    part: Count


class Chunk(_Message):
    """Bytes [offset, offset+n) of the announced version, for a trainer that shares no memory with the bridge. The n
    bytes are the second frame of the message. Reply: Ok."""

    offset: Count


class Commit(_Message):
    """Makes the engine serve the staged version: drain requests, load in place, read back, resume. Reply: Published."""

    digest: Digest
    readback: Annotated[str, msgspec.Meta(pattern="^(off|sampled|full)$")] = "sampled"
    drain_timeout_s: Seconds = 600.0


class Generate(_Message):
    """Asks for completions. Reply: any number of Progress, then Completions."""

    draws: Annotated[list[Draw], msgspec.Meta(min_length=1, max_length=1 << 20)]
    sampling: Sampling


class ReadBack(_Message):
    """Asks for a comparison of the engine's live weights with the bridge's copy. Reply: ReadBackReply."""

    mode: Annotated[str, msgspec.Meta(pattern="^(sampled|full)$")] = "full"
    seed: Count = 0


class Probe(_Message):
    """Asks to prefill `prompt` alone and to record inputs and outputs of the named modules. Reply: Probed."""

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=4096)]
    modules: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=256)]


class Shutdown(_Message):
    """Stops the bridge. Refused while another trainer holds the lease. Reply: Ok."""


# Replies
class Welcome(_Message):
    """The reply to Hello: a description of the bridge's engine."""

    facts: Facts


class Ok(_Message):
    """The reply to a request that was done and returns nothing."""


class Error(_Message):
    """The reply to a request that was refused or failed; the connection stays usable."""

    code: Name
    message: Text


class StatusReply(_Message):
    """The bridge's state (see server/bridge.py), and in `met` counts of the scheduler's events, such as preemptions."""

    state: Name
    version: Version | None
    holder: RunId | None
    running: Count
    waiting: Count
    published: Count
    facts: Facts
    met: dict[Name, Count] = {}


class Ready(_Message):
    """The reply to an accepted Announce. share_memory: whether Stage may name a memory file. holds: manifest digest of
    the version in the bridge's memory, for Changes to it; empty: none. host: `shm.host` of the bridge."""

    share_memory: bool
    holds: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""
    host: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""


class Staged(_Message):
    """The reply to Stage: all bytes have arrived, fingerprints match and values are finite. `memory` is a file with
    the bytes that came in Chunks, which other bridges of the bridge's host may open."""

    open_s: Seconds
    validate_s: Seconds
    memory: HostMemory | None = None


class Report(_Struct):
    """Durations in seconds, sizes and numbers of compared weights of one publish."""

    bytes: Count
    tensors: Count
    drain_s: Seconds
    load_s: Seconds
    readback_s: Seconds
    weights_read_back: Count
    rows_read_back: Count


class Published(_Message):
    """The reply to Commit: the engine serves `version` from here on."""

    version: Version
    report: Report


class ReadBackReply(_Message):
    """The numbers of weights and input rows that a read-back compared and found equal; Error answers a difference."""

    weights: Count
    rows: Count


class Probed(_Message):
    """The reply to Probe: a record of each module, in the order of Probe.modules.

    If the engine records routed experts, a last record named ROUTING holds them."""

    records: list[Recorded]


class Ended(_Struct):
    """A completion that is sent before its batch is complete; `index` is its place in Generate.draws."""

    index: Count
    drawn: Drawn


class Progress(_Message):
    """A keep-alive that the bridge sends every few seconds during a long request; it shows both ends a dead peer.

    During a Generate it brings the completions that ended since the last Progress, so that the trainer can grade them
    early. Completions with recorded routing are too large, and left out. The reply has every completion again.
    """

    running: Count
    waiting: Count
    tokens: Count
    ended: list[Ended] = []


class Fill(_Message):
    """Asks the trainer, during Stage or Commit, to write a part of a chunked version into the buffer. The trainer then
    sends Filled, or Cancel to give up."""

    part: Count


class Completions(_Message):
    """The reply to Generate: the completions in the order of Generate.draws."""

    completions: list[Drawn]


Request = (
    Hello
    | Status
    | Acquire
    | Announce
    | Stage
    | Cancel
    | Filled
    | Chunk
    | Commit
    | Generate
    | ReadBack
    | Probe
    | Shutdown
)
Reply = (
    Welcome
    | Ok
    | Error
    | StatusReply
    | Ready
    | Staged
    | Published
    | ReadBackReply
    | Probed
    | Progress
    | Fill
    | Completions
)

_encoder = msgspec.msgpack.Encoder()


REQUEST_DECODER = msgspec.msgpack.Decoder(Request, strict=True)
REPLY_DECODER = msgspec.msgpack.Decoder(Reply, strict=True)


def encode(message: _Message) -> bytes:
    """Encodes a message as msgpack bytes."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview, decoder: msgspec.msgpack.Decoder = REQUEST_DECODER) -> Any:
    """Decodes and validates a message; BridgeError("bad_message") if it is malformed."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BridgeError(f"malformed message: {str(error)[:300]}") from None
