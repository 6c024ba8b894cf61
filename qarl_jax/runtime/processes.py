# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-process runs: every process runs one program over one mesh of all processes' devices (SPMD).

    python -m qarl_jax.train --config X distributed.coordinator=auto             # under SLURM, Open MPI, on TPUs, GKE
    python -m qarl_jax.train --config X distributed.coordinator=host0:7777 \
        distributed.num_processes=2 distributed.process_id=0                     # ... and 1 on the other host

Prompts, packing and sampling are functions of (config, seed, step), so each process computes equal values by itself.
Everything else has an owner:

    files, the view, rewards (their pools have time limits)      the first process broadcasts (`from_first`)
    responses of engines outside the program (vLLM)              each draws its share; all get all (`gather`)
    interrupts, errors while writing                             any process; all act on them (`any_of`, `together`)
    the contents of an array that lies on several hosts          all, by a gather (`fetch`)

In a run of one process no function communicates: each returns what the process itself has. In a run of several, all
processes must call the communicating ones in one order, from the main thread: they use the collectives that training
uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # has no public name
from jax.experimental import multihost_utils

from qarl_jax.runtime import peers
from qarl_jax.types import UserError, at_least

AUTO = "auto"
WAIT_S = 300  # for the other processes, at the start
GRACE_S = 30  # JAX waits so much longer for the others than we do
PIECE_BYTES = 2**24  # of each process's bytes that a collective has on the devices at once
MEETING_S = 7 * 24 * 3600  # a process that ends meanwhile ends all of them: peers.py
SHUTDOWN_S = 60
"""Seconds that a process waits at its end for the others. One that ends by an error of its own waits in vain."""
_MEETINGS = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The section `distributed` of a run's config; processes differ in `process_id` alone.

    Attributes:
      coordinator: host:port at which the first process listens; auto: from the cluster (SLURM, Open MPI, Cloud TPU,
        GKE); empty: a run of one process.
      num_processes: number of processes; 0: from the cluster.
      process_id: number of this process, from 0; -1: from the cluster.
      local_devices: ids of the host's GPUs that this process takes; empty: JAX's choice (one GPU per process under
        SLURM and Open MPI, else all).
    """

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    local_devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.coordinator not in ("", AUTO) and not self.coordinator.rpartition(":")[2].isdigit():
            raise UserError(
                f"coordinator={self.coordinator!r} must be host:port of the first process, auto (SLURM, Open MPI, Cloud"
                " TPU or GKE tell), or empty (one process)."
            )
        at_least(self, 0, "num_processes", note="; 0: as the cluster says")
        if self.process_id < -1 or 0 < self.num_processes <= self.process_id:
            raise UserError(
                f"process_id={self.process_id} must be -1 (as the cluster says) or count from 0 below num_processes="
                f"{self.num_processes}."
            )
        if not self.coordinator and (self.num_processes > 1 or self.process_id > 0):
            raise UserError(
                f"num_processes={self.num_processes}, process_id={self.process_id} without a coordinator would start"
                " runs of one process each: set distributed.coordinator=host:port of the first, or auto."
            )

    @property
    def is_on(self) -> bool:
        """Tells whether the run may have several processes."""
        return bool(self.coordinator)


def start(cfg: Config) -> None:
    """Joins the other processes. Call it before anything asks JAX for its devices; a second call does nothing.

    Raises:
      UserError: coordinator=auto finds no cluster, or the processes cannot connect.
    """
    if not cfg.is_on or jax.distributed.is_initialized():
        return

    def give_up() -> None:  # before JAX does, which aborts the process with a trace of C++
        print(
            f"error: distributed.coordinator={cfg.coordinator}: the processes did not all meet within {WAIT_S} s."
            " Start every one of them, and check host, port and firewall.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    patience = threading.Timer(WAIT_S, give_up)
    patience.daemon = True
    patience.start()
    try:
        jax.distributed.initialize(
            None if cfg.coordinator == AUTO else cfg.coordinator,
            cfg.num_processes or None,
            None if cfg.process_id < 0 else cfg.process_id,
            list(cfg.local_devices) or None,
            initialization_timeout=WAIT_S + GRACE_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except ValueError as error:
        raise UserError(
            f"distributed.coordinator={cfg.coordinator}: no SLURM, Open MPI, Cloud TPU or GKE says which process this"
            f" is ({error}). Set distributed.coordinator=host:port, distributed.num_processes and"
            " distributed.process_id."
        ) from None
    except RuntimeError as error:
        if "before any JAX" in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(
            f"distributed.coordinator={cfg.coordinator}: {reason}. Check host, port and firewall."
        ) from error
    finally:
        patience.cancel()
    peers.watch()


def count() -> int:
    """Returns the number of processes of the run. Initializes JAX's devices only in a run of several."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def planned(cfg: Config) -> int:
    """Returns the number of processes that the config names, before they have met; 1 if it names none."""
    return count() if jax.distributed.is_initialized() else max(1, cfg.num_processes)


def number() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index() if count() > 1 else 0


def is_first() -> bool:
    """Tells whether this process owns the run's files."""
    return number() == 0


# -------------------------------------------------------------------------------------------------------------- arrays


def put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts a host array that every process has onto the mesh: an array of its shape. Each process sends only its
    devices' shards."""
    x = np.asarray(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: Any) -> Any:
    """Like `jax.device_get`, also for arrays sharded over several hosts: every process gets the whole arrays."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree) if count() > 1 else tree)


# --------------------------------------------------------------------------------------------------------------- words


def _meet() -> None:
    """Waits until all processes are here. A collective alone may not: on CPUs Gloo's fails after half an hour, in which
    one process grades or samples and the others wait."""
    client, number = distributed.global_state.client, next(_MEETINGS)
    assert client is not None
    client.wait_at_barrier(f"qarl_jax/{number}", MEETING_S * 1000)
    if not number:
        _connect()


def _connect() -> None:
    """Connects the processes' devices, by the first collective."""
    try:
        multihost_utils.process_allgather(np.True_)
    except jax.errors.JaxRuntimeError as error:
        if "Gloo context initialization failed" not in str(error):
            raise
        raise UserError(
            "the processes do not reach each other's devices: on CPUs each listens at the address of its host's name,"
            f" here {socket.gethostname()!r}. Give that name an address that the other hosts reach (/etc/hosts)."
        ) from None


def _padded(data: bytes, length: int) -> np.ndarray:
    """`data` in a buffer of a power of two, so that few shapes are ever compiled."""
    out = np.zeros(1 << max(6, (length - 1).bit_length()), np.uint8)
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return out


def _broadcast(text: str) -> str:
    """The first process's text, on every process."""
    _meet()
    data = text.encode() if is_first() else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(_padded(data, length)))[:length]).decode()


def gather(data: bytes) -> list[bytes]:
    """Returns every process's bytes, ordered by process. Uses collectives of at most `PIECE_BYTES` each."""
    if count() == 1:
        return [data]
    _meet()
    lengths = multihost_utils.process_allgather(np.int32(len(data))).reshape(-1)
    pieces: list[list[bytes]] = [[] for _ in lengths]
    for start in range(0, int(lengths.max()), PIECE_BYTES):
        most = min(PIECE_BYTES, int(lengths.max()) - start)
        rows = multihost_utils.process_allgather(_padded(data[start : start + most], most))
        for row, length, found in zip(rows, lengths, pieces, strict=True):
            found.append(np.asarray(row)[: max(0, min(most, int(length) - start))].tobytes())
    return [b"".join(found) for found in pieces]


def _error(number: int, kind: str, message: str) -> Exception:
    """Rebuilds the error of another process; a UserError keeps its kind."""
    kinds: list[type[UserError]] = [UserError, *UserError.__subclasses__()]
    known = {cls.__name__: cls for cls in kinds}
    if kind not in known:
        return RuntimeError(f"process {number}: {kind}: {message}")
    return known[kind].__new__(known[kind], message)  # its own arguments stayed where it was raised


def from_first(make: Callable[[], Any]) -> Any:
    """Calls `make()` on the first process alone; every process returns its JSON values, or raises its error."""
    if count() == 1:
        return make()
    failure: Exception | None = None
    text = ""
    if is_first():
        try:
            text = json.dumps({"value": make()})
        except Exception as error:
            failure = error
            text = json.dumps({"error": [type(error).__name__, str(error)]})
    told = json.loads(_broadcast(text))
    if failure is not None:
        raise failure
    if "error" in told:
        raise _error(0, *told["error"])
    return told["value"]


def agree(error: Exception | None) -> None:
    """Raises `error`, or on processes without one the first process's; returns if no process has an error."""
    if count() > 1:
        said = gather(b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode())
        others = [_error(number, *json.loads(text)) for number, text in enumerate(said) if text]
        error = error or (others[0] if others else None)
    if error is not None:
        raise error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises an error of one process on all processes when the block ends, so that none waits for a lost one."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(failure)


def any_of(flag: bool) -> bool:
    """Tells whether `flag` is true on any process."""
    return flag if count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def check_same(data: bytes, what: str) -> None:
    """Raises on every process unless all have equal `data`.

    Args:
      what: names the data in the error: "the config's values: process 3 of 8 has others than process 0."

    Raises:
      UserError: it names the first process that differs.
    """
    if count() == 1:
        return
    said = gather(hashlib.blake2b(data, digest_size=16).digest())
    for number, other in enumerate(said):
        if other != said[0]:
            raise UserError(f"{what}: process {number} of {count()} has others than process 0.")
