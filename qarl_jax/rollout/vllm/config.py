# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The `rollout.engine` section of a config that samples with vLLM."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from qarl_bridge.protocol import formats, messages, split_k
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.models import abstract_model
from qarl_jax.models.config import ModelConfig
from qarl_jax.models.transformer import quantizable
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(messages.EngineOptions):
    """Options of vLLM (`messages.EngineOptions`), and how the trainer reaches and supervises its engines.

    Attributes:
    python: interpreter that runs the bridge, with qarl_bridge and vLLM installed; empty: the trainer's.
    replicas: number of engines that each trainer process starts, each behind its own bridge; 0: one, or none if
      `endpoints` names bridges.
    endpoints: bridges started by hand, each a unix socket's path or tcp://host:port. A bridge that does not answer
      joins the others as soon as it does. A run of several processes takes socket paths, each on its process's host.
    key_file: file with the key of all bridges in `endpoints` (64 hexadecimal digits, mode 0600); required with
      endpoints.
    visible_gpus: the engine's CUDA_VISIBLE_DEVICES (a number, or a UUID); empty: the trainer process's, so that both
      share its first GPU. A tensor-parallel engine needs one GPU for each shard: "0,1". With `replicas`, one such list
      per engine, joined by ";": "1;2;3". Set `shares_gpus` if these GPUs are the learner's, too.
    shares_gpus: true if the GPUs of `visible_gpus` are the learner's, too: the memory plan of a GPU then counts both.
    transport: how weights reach the engine: "cuda_ipc" (engine and learner on one GPU; no copy through the host),
      "nccl" (between two GPUs, also of two hosts; not encrypted), "host" (shared memory, or the socket to another
      host). "auto": on one host cuda_ipc or nccl, whichever fits, else host. The choice is logged. Adapters of a
      frozen base always go through the host.
    memory: "given": the engine uses `kv_cache_gb` and `gpu_memory_utilization` as set; "auto": both are chosen before a
      training run starts: a KV cache for the sequences of a step, or less where the GPU is too small for it.
    staging_buffers: GPU buffers for versions: 2: the served version and the next; 1: the next overwrites the served
      one, so an engine that fails to load it cannot go back; 0: chunked weight transfer through a buffer of 2 GiB, to
      an engine on the learner's GPU.
    readback: weights compared in the live engine after each publish: "off", "sampled" (16 inputs of a layer) or "full".
    start_timeout_s: longest start of the engine, in seconds.
    request_timeout_s: seconds without a report after which a bridge is taken for dead; it reports every 2 s (not from a
      config).
    max_restarts: bridge deaths survived in a row, without a successful call in between (not from a config).
    log_file: the bridge's output; empty: a temporary folder. A training run sets engine.log in its own (not from a
      config).
    """

    python: str = ""
    replicas: int = 0
    endpoints: tuple[str, ...] = ()
    key_file: str = ""
    visible_gpus: str = ""
    shares_gpus: bool = False
    transport: Literal["auto", "cuda_ipc", "nccl", "host"] = "auto"
    memory: Literal["given", "auto"] = "given"
    staging_buffers: Literal[0, 1, 2] = 2
    readback: Literal["off", "sampled", "full"] = "sampled"
    start_timeout_s: float = 600.0
    request_timeout_s: float = internal(120.0)
    max_restarts: int = internal(3)
    log_file: str = internal("")

    @property
    def is_fleet(self) -> bool:
        """Tells whether there may be several engines."""
        return len(self.endpoints) + self.started > 1

    @property
    def started(self) -> int:
        """The number of engines that the trainer starts."""
        return self.replicas or int(not self.endpoints)

    @property
    def is_remote(self) -> bool:
        """Tells whether some bridge is reached over a network."""
        return any(address.startswith("tcp://") for address in self.endpoints)

    @property
    def has_own_gpu(self) -> bool:
        """Tells whether the engine runs on another GPU than the learner."""
        apart = bool(self.visible_gpus) or self.transport == "nccl" or self.is_remote
        return apart and self.transport != "cuda_ipc" and not self.shares_gpus

    @property
    def stages_on_gpu(self) -> bool:
        """Tells whether versions are staged in memory of the learner's GPU, if it has one."""
        return self.transport == "nccl" or (self.transport != "host" and not self.is_remote)

    def gpus_of(self, number: int) -> str:
        """Returns the CUDA_VISIBLE_DEVICES of started engine `number`."""
        lists = self.visible_gpus.split(";")
        return lists[number] if len(lists) > 1 else self.visible_gpus

    def check_hosts(self) -> None:
        """Refuses options that do not work in a run of several processes (`hosts.py`).

        Raises:
          UserError: a bridge over TCP, which all processes would call; or chunked weight transfer, in which engines ask
            for layers at different times while the all-gather needs all processes at once.
        """
        if self.is_remote:
            raise UserError(
                "rollout.engine.endpoints: a run of several processes has engines on its own hosts, and a bridge serves"
                " one process; name unix sockets, the same path on every host, or let rollout.engine.replicas start"
                " engines."
            )
        if self.staging_buffers == 0 and self.transport != "host":
            raise UserError(
                "rollout.engine.staging_buffers=0: a run of several processes stages whole versions; set it to 1, or"
                " rollout.engine.transport=host."
            )

    def __post_init__(self) -> None:
        if self.endpoints and not self.key_file:
            raise UserError(
                "rollout.engine.endpoints names a bridge started by hand: set rollout.engine.key_file to its key"
            )
        for address in self.endpoints:
            try:
                messages.parse_address(address)
            except BridgeError as error:
                raise UserError(f"rollout.engine.endpoints: {error}") from None
        if len(set(self.endpoints)) < len(self.endpoints):
            raise UserError("rollout.engine.endpoints names a bridge twice: it serves one connection as well as two")
        if self.endpoints and self.visible_gpus and not self.replicas:
            raise UserError(
                "rollout.engine.visible_gpus is for a bridge that the trainer starts: start the one at "
                "rollout.engine.endpoints with CUDA_VISIBLE_DEVICES, and leave visible_gpus empty"
            )
        lists = len(self.visible_gpus.split(";"))
        if lists not in (1, self.started):
            raise UserError(
                f"rollout.engine.visible_gpus has {lists} lists, joined by ';', and {self.started} engines are started:"
                " name one list per engine, or one for all"
            )
        few = min(len({gpu.strip() for gpu in names.split(",")} - {""}) for names in self.visible_gpus.split(";"))
        if self.visible_gpus and few < self.tensor_parallel_size:
            raise UserError(
                f"rollout.engine.visible_gpus={self.visible_gpus} names {few} GPU(s) for an engine of"
                f" tensor_parallel_size={self.tensor_parallel_size}: name one for each shard, as in 0,1"
            )
        if self.transport == "cuda_ipc" and self.is_remote:
            raise UserError(
                "rollout.engine.transport=cuda_ipc needs learner and engine on one GPU: to a bridge over TCP set nccl "
                "or host"
            )
        if self.transport == "nccl" and not self.endpoints and not self.visible_gpus:
            raise UserError(
                "rollout.engine.transport=nccl is for learner and engine on different GPUs: name the engine's in "
                "rollout.engine.visible_gpus, or set transport=auto"
            )
        if self.transport == "nccl" and self.shares_gpus:
            raise UserError(
                "rollout.engine.transport=nccl is for learner and engine on different GPUs, and shares_gpus=true says"
                " that they share them: set transport=auto, or shares_gpus=false"
            )
        try:
            super().__post_init__()
        except ValueError as error:
            raise UserError(f"rollout.engine.{error}") from None
        at_least(self, 0, "replicas", "max_restarts")
        for name in ("start_timeout_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"rollout.engine.{name} must be positive, got {getattr(self, name)}")


def check_model(config: Config, model: ModelConfig) -> None:
    """Refuses engine options that vLLM or the bridge would refuse for this model, before anything is started.

    Raises:
      UserError: `max_model_len` exceeds the model's positions, its shards cannot divide the model evenly, or vLLM has
        no layer for a split weight (`check_splitting`).
    """
    positions = model.max_position_embeddings
    beyond = config.max_model_len > positions and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    if beyond and config.started and config.engine == "vllm":
        raise UserError(
            f"rollout.engine.max_model_len={config.max_model_len} is more than the model's {positions} positions"
            " (max_position_embeddings in its config.json)",
            "lower it, or set 0, what the model allows",
            ": ",
        )
    _check_shards(config, model)
    check_splitting(model)
    _check_tables(config, model)


def check_splitting(model: ModelConfig) -> None:
    """Raises UserError if channels are split (`qarl_jax.quant.splitting`), and a weight's scheme has no zero points."""
    if model.splitting is None:
        return
    for path in quantizable(abstract_model(model)):
        scheme = model.scheme_of(path)
        if scheme is None or scheme.wire is None or scheme.wire.format not in formats.ASYMMETRIC:
            raise UserError(
                f"vLLM has no layer for {model.describe(path)} in {scheme or 'bf16'}, whose channels are split",
                "take a scheme with zero points (w2a16_asym), the embedded sampler (rollout.engine.name=jax), or the"
                " folder that `qarl export --format hf` makes of the model.",
                ": ",
            )


def _check_tables(config: Config, model: ModelConfig) -> None:
    """Raises UserError if the embedding or the head has codes, and vLLM's own kernels are asked for, or a GPU's are
    not made for its width."""
    coded = [path for path in quantizable(abstract_model(model)) if not path.startswith("stacks.")]
    if not coded or config.engine != "vllm":
        return
    weight = f"{model.describe(coded[0])} in {model.scheme_of(coded[0])}"
    if config.arithmetic == "vllm":
        raise UserError(
            f"vLLM's own kernels compute {weight} otherwise than the learner",
            "drop rollout.engine.arithmetic=vllm, or leave the weight in bf16 (quant.rules).",
            ": ",
        )
    if model.numerics.profile == "cuda" and model.hidden_size % split_k.STEP:
        raise UserError(
            f"on CUDA the bridge reads {weight} by {split_k.STEP} inputs at a time, and it has {model.hidden_size}",
            "leave it in bf16 (quant.rules), or sample with the embedded sampler (rollout.engine.name=jax).",
            ": ",
        )


def _check_shards(config: Config, model: ModelConfig) -> None:
    """Refuses a tensor-parallel engine of a model that its shards cannot share, as the engine would."""
    shards = config.tensor_parallel_size
    if shards == 1 or config.engine != "vllm":
        return
    why = ""
    inner = model.intermediate_size if model.moe is None else model.moe.intermediate_size
    if model.num_kv_heads % shards or model.num_heads % shards or inner % shards:
        why = f"{model.num_kv_heads} heads of keys and {inner} inner features are not shared evenly"
    else:
        why = _cut_group(shards, model)
    if why:
        raise UserError(f"rollout.engine.tensor_parallel_size={shards}: {why}", "set it to 1")


def _cut_group(shards: int, model: ModelConfig) -> str:
    """Words the first weight whose inputs are spread over shards that would cut a group of it; empty: none is cut."""
    for path, linear in quantizable(abstract_model(model)).items():
        scheme = model.scheme_of(path)
        if scheme is None or path.split(".")[-2] not in ("o", "down"):
            continue
        outputs, inputs = linear.kernel.get_value().shape[-2:]
        if scheme.check((outputs, inputs // shards)):
            return f"a shard's {inputs // shards} inputs of {model.describe(path)} are no whole groups under {scheme}"
    return ""
