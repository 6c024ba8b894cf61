# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The messages between trainer and bridge, with manifests, versions and the options of an engine.

Everything is msgpack, decoded by msgspec into the tagged structs below and nothing else: an unknown tag, an unknown or
missing field, a wrong type or an oversized value is a `BridgeError`. Nothing that arrives is unpickled, evaluated, or
used as a path or an import name (a HostMemory names a descriptor, which transport/shm.py opens only if it is a staged
version of the same user's). transport/zeromq.py carries the messages, and lets in only who holds the key.

A connection begins with Hello; then each request has its replies, one request at a time:

    trainer -> bridge   Hello(protocol)                        Status(), Acquire(...), Announce(...), ...
    bridge -> trainer   Welcome(facts)                         Progress()..., then one of the other replies, or Error

A version is (run_id, incarnation, step). One trainer at a time holds the lease; within one incarnation steps only grow;
a later incarnation of the same run (a resumed trainer) may step back.
"""

from __future__ import annotations

import math
from collections.abc import Collection
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

PROTOCOL = 14
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
    """Base of what is nested in messages."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="t", tag=True):
    """Base of every message; `t` on the wire is the class name."""


class Version(_Struct):
    """Example: Version(run_id="quickstart", incarnation=1763726400, step=17)."""

    run_id: RunId
    incarnation: Incarnation
    step: Step

    def __str__(self) -> str:
        return f"{self.run_id}/{self.incarnation}/{self.step}"


class TensorEntry(_Struct):
    """One tensor of a staged version, by its Hugging Face name; `digest` is its fingerprint (fingerprint.py).

    Example: TensorEntry(name="model.norm.weight", dtype="bfloat16", shape=[256], offset=4096, nbytes=512, digest=...).
    """

    name: Name
    dtype: Name
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]
    offset: Count
    nbytes: Count
    digest: Digest


class Expected(_Struct):
    """Name, dtype and shape of one tensor the engine's loader must be given."""

    name: Name
    dtype: Name
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]


class Manifest(_Struct):
    """Everything about a version except its bytes. `digest` covers all other fields.

    A partial version keeps tensors of a complete one: `base` is the fingerprint of those (`kept`), whoever published
    them. It has whole modules, every adapter (adapters.py), and every tensor in which the version that serves differs
    from that complete one."""

    version: Version
    model: Digest
    scheme: Digest
    tensors: Annotated[list[TensorEntry], msgspec.Meta(max_length=500_000)]
    total_bytes: Count
    digest: Digest
    base: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""

    def computed_digest(self) -> bytes:
        """The digest these fields should have."""
        return digest(b"manifest", msgspec.msgpack.encode(msgspec.structs.replace(self, digest=bytes(DIGEST_BYTES))))

    def kept(self, replaced: Collection[str]) -> bytes:
        """The fingerprint of this model's tensors that are not `replaced`. Run, step and order do not count."""
        entries = sorted((e.name, e.dtype, e.shape, e.digest) for e in self.tensors if e.name not in replaced)
        return digest(b"kept", msgspec.msgpack.encode((self.model, self.scheme, entries)))

    def sealed(self) -> Manifest:
        """The same manifest with its digest filled in."""
        return msgspec.structs.replace(self, digest=self.computed_digest())


class Span(_Struct):
    """Tokens [start, end) were drawn under `version`."""

    version: Version
    start: Count
    end: Count


class HostMemory(_Struct, tag_field="t", tag=True):
    """The place of a memory file: descriptor `fd` of process `pid`.

    `inode` guards against reuse of the descriptor. `host` (shm.host) is set when the file belongs to another process's
    host.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    inode: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    host: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""


class DeviceMemory(_Struct, tag_field="t", tag=True):
    """A buffer on a GPU that another process of this host may map: CUDA's handle for it, and the GPU by its UUID.

    With `ends` the transfer is chunked: a version comes part by part through a buffer smaller than the version. A part
    is some tensors of the manifest in their order. `ends` has the index where each part ends; the last is the number
    of tensors. The bridge asks for each part with Fill."""

    device: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    ends: Annotated[list[Count], msgspec.Meta(max_length=500_000)] = []


class NcclMemory(_Struct, tag_field="t", tag=True):
    """A buffer on another GPU, which its owner broadcasts while it waits for the reply (transport/nccl.py): join the
    communicator `unique_id` as `rank` of `world`, or use it again, and receive. `version` is the sender's NCCL's."""

    unique_id: Annotated[bytes, msgspec.Meta(min_length=NCCL_ID_BYTES, max_length=NCCL_ID_BYTES)]
    rank: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    world: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    timeout_s: Seconds


class Changes(_Struct, tag_field="t", tag=True):
    """The Chunks were not the version but what turns the one with this manifest's digest into it (delta.py)."""

    base: Digest


class Array(_Struct):
    """An array by value: `data` is its bytes, little-endian."""

    dtype: Name
    shape: Annotated[list[Count], msgspec.Meta(max_length=8)]
    data: bytes

    @staticmethod
    def of(array: np.ndarray) -> Array:
        """The message for an array of a wire dtype."""
        return Array(dtype=dtype_name(array.dtype), shape=list(array.shape), data=bytes(as_bytes(array)))

    def numpy(self) -> np.ndarray:
        """The array; BridgeError if the bytes are not those of its shape."""
        if self.dtype not in DTYPES or math.prod(self.shape) * DTYPES[self.dtype].itemsize != len(self.data):
            raise BridgeError(f"{len(self.data)} bytes do not hold {self.dtype}{self.shape}")
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


ROUTING = "routing"  # not a module: the experts each token of a probe was sent to


class Recorded(_Struct):
    """The inputs and outputs of a live module, in the order of its arguments and results."""

    module: Name
    inputs: list[Array]
    outputs: list[Array]


class Sampling(_Struct):
    """The distribution to draw from. Reported log-probs are those of this distribution."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=1024)] = []


class Draw(_Struct):
    """One completion wanted. The seed makes it independent of what else is in the batch.

    A response is gone on with by a prompt that ends with its tokens so far; `max_tokens` is then what it may still add
    (0: what Sampling says).
    """

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=1 << 22)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0

    def under(self, sampling: Sampling) -> Sampling:
        """`sampling` with this draw's own, lower limit on tokens, where it has one."""
        if not self.max_tokens:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=min(self.max_tokens, sampling.max_tokens))


class Drawn(_Struct):
    """One completion: `tokens` int32 and `logprobs` float32, little-endian bytes, of equal length.

    `routed`: int16 of shape `routed_shape`, [prompt + tokens - 1, layers, k]: the experts each position was sent to,
    where the engine was started to record them (-1: a dense layer).
    """

    tokens: bytes
    logprobs: bytes
    finish_reason: Annotated[str, msgspec.Meta(pattern="^(stop|length|abort)$")]
    spans: list[Span]
    routed: bytes = b""
    routed_shape: Annotated[list[Count], msgspec.Meta(max_length=3)] = []


class Facts(_Struct):
    """The engine's report of itself. The trainer asserts it before the first step and records it in the run."""

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
    """First message of a connection: may these two talk, and what engine is it? Reply: Welcome."""

    protocol: int


class Status(_Message):
    """Ask for a StatusReply."""


class Acquire(_Message):
    """Take the publishing lease for (run_id, incarnation), bound to this connection, renewed by every message on it."""

    run_id: RunId
    incarnation: Incarnation


class Announce(_Message):
    """Propose a version. Everything checkable without its bytes is checked now. Needs the lease. Reply: Ready."""

    manifest: Manifest


class Stage(_Message):
    """The announced bytes are complete: in a sealed memory file of the trainer's, in a buffer of its on the engine's
    GPU or on another, or (None, Changes) in the Chunks before this; or they come chunked. Every fingerprint and
    every float is checked. Reply: Staged; Error "unshared" if the memory cannot be reached, or the changes are to
    another version."""

    memory: HostMemory | DeviceMemory | NcclMemory | Changes | None


class Cancel(_Message):
    """The trainer gives up. Ends the bridge's wait for an NCCL transfer (reply: Ok, after the reply to Stage) or for a
    Filled (reply: that of the pending request)."""


class Filled(_Message):
    """The buffer has the part of Fill. Reply: another Fill, or that of Stage or Commit."""

    part: Count


class Chunk(_Message):
    """Bytes [offset, offset+n) of the announced version, for connections that cannot share memory; the n bytes are the
    second frame of the message. Reply: Ok."""

    offset: Count


class Commit(_Message):
    """Drain, pause, load in place, read back, resume at the staged version. Reply: Published."""

    digest: Digest
    readback: Annotated[str, msgspec.Meta(pattern="^(off|sampled|full)$")] = "sampled"
    drain_timeout_s: Seconds = 600.0


class Generate(_Message):
    """Draw completions. Reply: Progress..., then Completions."""

    draws: Annotated[list[Draw], msgspec.Meta(min_length=1, max_length=1 << 20)]
    sampling: Sampling


class ReadBack(_Message):
    """Functional read-back of the serving version against its staged copy. Reply: ReadBackReply."""

    mode: Annotated[str, msgspec.Meta(pattern="^(sampled|full)$")] = "full"
    seed: Count = 0


class Probe(_Message):
    """Prefill `prompt` alone under the serving version and record the named live modules. Reply: Probed."""

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=4096)]
    modules: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=256)]


class Shutdown(_Message):
    """Stop the bridge. Needs the lease, or nobody holding it. Reply: Ok."""


# Replies
class Welcome(_Message):
    """The engine behind the bridge."""

    facts: Facts


class Ok(_Message):
    """Done."""


class Error(_Message):
    """The request was refused or failed; the connection stays usable."""

    code: Name
    message: Text


class StatusReply(_Message):
    """State of the machine in server/bridge.py; `met`: what the engine's scheduler did to requests so far, counted."""

    state: Name
    version: Version | None
    holder: RunId | None
    running: Count
    waiting: Count
    published: Count
    facts: Facts
    met: dict[Name, Count] = {}


class Ready(_Message):
    """Announcement accepted; `share_memory` says whether Stage may name a memory file, `holds` which version (by its
    manifest's digest) the bridge has in its memory, so that Changes to it may be sent (empty: none), and `host` whose
    processes can share memory files with it."""

    share_memory: bool
    holds: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""
    host: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""


class Staged(_Message):
    """The whole version is within the engine's reach, its fingerprints right and its values finite. What came in Chunks
    lies in `memory`, for other bridges of that host."""

    open_s: Seconds
    validate_s: Seconds
    memory: HostMemory | None = None


class Report(_Struct):
    """The cost and the checks of a publish. The loader checks the fingerprint of every tensor."""

    bytes: Count
    tensors: Count
    drain_s: Seconds
    load_s: Seconds
    readback_s: Seconds
    weights_read_back: Count
    rows_read_back: Count


class Published(_Message):
    """The engine serves `version` from here on."""

    version: Version
    report: Report


class ReadBackReply(_Message):
    """Weights and input rows compared; a difference is an Error instead."""

    weights: Count
    rows: Count


class Probed(_Message):
    """The recorded modules, in the order of Probe.modules."""

    records: list[Recorded]


class Ended(_Struct):
    """A completion ahead of its reply: `index` in Generate.draws."""

    index: Count
    drawn: Drawn


class Progress(_Message):
    """Sent every few seconds while a long request runs, so that both ends notice when the other dies.

    While a Generate runs it brings the completions that ended since the last one, unless their routing was recorded (it
    is large): the trainer may grade them while others are drawn. The reply holds them again.
    """

    running: Count
    waiting: Count
    tokens: Count
    ended: list[Ended] = []


class Fill(_Message):
    """Write this part of the version into the buffer, then send Filled (or Cancel, to give up). Comes while a Stage or
    Commit of a chunked version runs."""

    part: Count


class Completions(_Message):
    """The completions, in the order of Generate.draws."""

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
    """msgpack bytes of a message."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview, decoder: msgspec.msgpack.Decoder = REQUEST_DECODER) -> Any:
    """Strictly decoded message, or BridgeError(bad_message)."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BridgeError(f"malformed message: {str(error)[:300]}") from None
