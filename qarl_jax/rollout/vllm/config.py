# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The `rollout.engine` section of a run that samples with vLLM."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.types import UserError, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(messages.EngineOptions):
    """The engine's own options (`messages.EngineOptions`), and how the trainer reaches and supervises it.

    Attributes:
    python: interpreter that runs the bridge, with qarl_bridge and vLLM installed; empty: this one.
    replicas: engines that the trainer starts, each behind a bridge of its own; 0: one, or none where others are named.
    launch: what starts them: "process", on this host, or "ray", on the hosts of a Ray cluster (ray_bridge.py).
    ray_gpus, ray_cpus: what each of them is given there.
    address: a bridge started by hand: a unix socket's path or tcp://host:port; empty: start one.
    endpoints: several of them. One that does not answer yet, or no longer, joins when it does.
    endpoints_file: a file with one such address per line, read again during the run: lines may come and go.
    key_file: the key of them all (64 hexadecimal digits, mode 0600), needed with addresses.
    visible_gpus: the engine's GPU, as CUDA_VISIBLE_DEVICES names it (a number, or a UUID); empty: what the trainer
      sees, so that they share the first. With `replicas`, one such list per engine, joined by ";": "1;2;3". Those that
      are the learner's: `shares_gpus`.
    shares_gpus: the GPUs of `visible_gpus` are the learner's own, so that a card's plan has to fit both.
    hedge: requests that take this many times as long as others did are asked of an idle engine as well, and the first
      answer counts (J. Dean, L. A. Barroso, The Tail at Scale, CACM 56, 2013); 0: off.
    transport: how weights reach the engine: "cuda_ipc" (the engine on a GPU of the learner's: over no host), "nccl" (on
      two GPUs, also of two hosts; not encrypted), "host" (shared memory, or the socket to another host), "auto": on one
      host cuda_ipc or nccl, whichever fits, else host. The choice is logged.
    memory: "given", the engine takes what `kv_cache_gb` and `gpu_memory_utilization` say; "auto", both are chosen
      before a training run starts: a KV cache for the sequences of a step, or less where the card is too small for it.
    staging_buffers: versions that are held on the GPU where they are staged there: 2, the one that serves and the next;
      1, the next overwrites it, so that an engine that fails to load it has nothing to go back to; 0, the next goes
      through a window of 2 GiB, layers after layers, to an engine on the learner's own GPU.
    readback: weights compared after each publish: "off", "sampled" (16 inputs of every layer) or "full".
    start_timeout_s: longest start of the engine.
    request_timeout_s: longest silence of the bridge before it is taken for dead (it reports every 2 s).
    drain_timeout_s: longest wait for running requests before a publish.
    max_restarts: bridge deaths survived in a row, without a successful call in between.
    log_file: where the bridge's output goes; empty: into engine.log of the folder of a training run, with other
      commands into a temporary folder.
    """

    python: str = ""
    replicas: int = 0
    launch: Literal["process", "ray"] = "process"
    ray_gpus: float = 1.0
    ray_cpus: float = 4.0
    address: str = ""
    endpoints: tuple[str, ...] = ()
    endpoints_file: str = ""
    key_file: str = ""
    visible_gpus: str = ""
    shares_gpus: bool = False
    hedge: float = 3.0
    transport: Literal["auto", "cuda_ipc", "nccl", "host"] = "auto"
    memory: Literal["given", "auto"] = "given"
    staging_buffers: Literal[0, 1, 2] = 2
    readback: Literal["off", "sampled", "full"] = "sampled"
    start_timeout_s: float = 600.0
    request_timeout_s: float = 120.0
    drain_timeout_s: float = 600.0
    max_restarts: int = 3
    log_file: str = ""

    @property
    def is_fleet(self) -> bool:
        """Whether there may be several engines."""
        return len(self.named) + self.started > 1 or bool(self.endpoints_file)

    @property
    def named(self) -> tuple[str, ...]:
        """Addresses of bridges started by hand, those of `endpoints_file` apart."""
        return (self.address, *self.endpoints) if self.address else self.endpoints

    @property
    def by_hand(self) -> str:
        """The option that names bridges started by hand, to speak of; empty: none does."""
        return next((name for name in ("address", "endpoints", "endpoints_file") if getattr(self, name)), "")

    @property
    def started(self) -> int:
        """How many engines the trainer starts."""
        return self.replicas or int(not self.named and not self.endpoints_file)

    @property
    def is_remote(self) -> bool:
        """Whether some bridge is reached over a network."""
        is_elsewhere = self.launch == "ray" or bool(self.endpoints_file)
        return is_elsewhere or any(address.startswith("tcp://") for address in self.named)

    @property
    def has_own_gpu(self) -> bool:
        """Whether the engine is meant for another GPU than the learner's."""
        apart = bool(self.visible_gpus) or self.transport == "nccl" or self.is_remote
        return apart and self.transport != "cuda_ipc" and not self.shares_gpus

    @property
    def stages_on_gpu(self) -> bool:
        """Whether versions are staged in the learner's GPU, if it has one."""
        return self.transport == "nccl" or (self.transport != "host" and not self.is_remote)

    def gpus_of(self, number: int) -> str:
        """`visible_gpus` of a started engine."""
        lists = self.visible_gpus.split(";")
        return lists[number] if len(lists) > 1 else self.visible_gpus

    def __post_init__(self) -> None:
        by_hand = self.by_hand
        if self.address and (self.endpoints or self.endpoints_file):
            raise UserError("rollout.engine.address is for one bridge: put it among rollout.engine.endpoints")
        if by_hand and not self.key_file:
            raise UserError(
                f"rollout.engine.{by_hand} names a bridge started by hand: set rollout.engine.key_file to its key"
            )
        for address in self.named:
            try:
                messages.parse_address(address)
            except BridgeError as error:
                raise UserError(f"rollout.engine.{by_hand}: {error}") from None
        if len(set(self.named)) < len(self.named):
            raise UserError("rollout.engine.endpoints names a bridge twice: it serves one connection as well as two")
        if by_hand and self.visible_gpus and not self.replicas:
            raise UserError(
                "rollout.engine.visible_gpus is for a bridge that the trainer starts: start the one at "
                f"rollout.engine.{by_hand} with CUDA_VISIBLE_DEVICES, and leave visible_gpus empty"
            )
        if self.launch == "ray" and (self.visible_gpus or self.log_file):
            raise UserError(
                "rollout.engine.launch=ray gives each engine its GPUs, on whichever host: leave visible_gpus and "
                "log_file empty, and set ray_gpus"
            )
        lists = len(self.visible_gpus.split(";"))
        if lists not in (1, self.started):
            raise UserError(
                f"rollout.engine.visible_gpus has {lists} lists, joined by ';', and {self.started} engines are started:"
                " name one list per engine, or one for all"
            )
        if self.transport == "cuda_ipc" and self.is_remote:
            raise UserError(
                "rollout.engine.transport=cuda_ipc needs learner and engine on one GPU: to a bridge over TCP set nccl "
                "or host"
            )
        if self.transport == "nccl" and not by_hand and not self.visible_gpus:
            raise UserError(
                "rollout.engine.transport=nccl is for learner and engine on different GPUs: name the engine's in "
                "rollout.engine.visible_gpus, or set transport=auto"
            )
        try:
            super().__post_init__()
        except ValueError as error:
            raise UserError(f"rollout.engine.{error}") from None
        at_least(self, 0, "replicas", "ray_gpus", "ray_cpus", "hedge", "max_restarts", "drain_timeout_s")
        for name in ("start_timeout_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"rollout.engine.{name} must be positive, got {getattr(self, name)}")


def check_length(config: Config, positions: int) -> None:
    """Refuses an engine that is to be started for longer sequences than its model has positions, as vLLM would."""
    beyond = config.max_model_len > positions and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    if beyond and config.started and config.engine == "vllm":
        raise UserError(
            f"rollout.engine.max_model_len={config.max_model_len} is more than the model's {positions} positions"
            " (max_position_embeddings in its config.json): lower it, or set 0, what the model allows"
        )
