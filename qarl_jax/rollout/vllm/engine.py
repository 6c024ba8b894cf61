# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The vLLM rollout engine: a client of the bridge process, which it starts, supervises and, when it dies, replaces.

    engine = VllmEngine(Config())                          # nothing runs yet
    engine.publish(PolicyWeights(graphdef, params, qweights), version=0)
    engine.generate(prompts, num_samples=8, sampling=..., key=...)

The first publish writes a model folder without weights (config.json and the list of tensors), starts the bridge on it,
and then goes the way of every later publish: stage, validate, load in place, read back. The staged copy of the last
version is kept (low-bit, in shared memory), so a bridge that dies during `generate` is restarted, given the same bytes
again, and asked again; the trainer's loop does not notice. Because a draw depends on the weights, its prompt and its
seed only, the answer is the one the dead bridge would have given.

With `Config.address` set, the bridge was started by hand (`python -m qarl_bridge --help`), possibly on another host; it
is never started or stopped from here, only reconnected to.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from qarl_bridge.client import sender
from qarl_bridge.protocol import expert_stacks, formats, messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.models.transformer import quantizable
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights, Request, SamplingConfig
from qarl_jax.rollout.vllm.gpu_staging import DeviceStager, gpus_of, layout
from qarl_jax.rollout.vllm.process import BridgeProcess
from qarl_jax.types import Completion, Prompt, UserError, VersionSpan

# What a user can fix, as opposed to what broke.
_USER_CODES = frozenset({"auth", "setup", "lease", "foreign_model", "foreign_scheme", "limits"})
# A promise that was not kept: what was promised, and what it means that it is broken.
_PROMISES = {
    "read_back": (
        "the live engine computes with the very weights that were published",
        "the engine would sample from another policy than the one that learns, so nothing was drawn from it",
    ),
    "torn": (
        "every tensor reaches the engine's loader as the learner made it",
        "the version changed or was cut short on its way, and the engine did not take it",
    ),
    "tensor": (
        "every published tensor is finite and of the scheme's form",
        "the learner's weights are not usable, and the engine did not take them",
    ),
}
_FIRST_WORD_S, _NEXT_WORD_S = 5.0, 30.0  # after which a bridge that does not answer is spoken of
_TRANSPORTS = {
    "host": "host memory (transport=host)",
    "cuda_ipc": "device memory: learner and engine share a GPU (transport=cuda_ipc)",
    "nccl": "NCCL: learner and engine are on different GPUs (transport=nccl)",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(messages.EngineOptions):
    """The engine's own options (`messages.EngineOptions`), and how the trainer reaches and supervises it.

    Attributes:
    python: interpreter that runs the bridge, with qarl_bridge and vLLM installed; empty: this one.
    address: a bridge started by hand: a unix socket's path or tcp://host:port; empty: start one.
    key_file: its key (64 hexadecimal digits, mode 0600), needed with `address`.
    visible_gpus: the engine's GPU, as CUDA_VISIBLE_DEVICES names it (a number, or a UUID); empty: what the trainer
      sees, so that they share the first. Those that are the learner's: `shares_gpus`.
    shares_gpus: the GPUs of `visible_gpus` are the learner's own, so that a card's plan has to fit both.
    transport: how weights reach the engine: "cuda_ipc" (the engine on a GPU of the learner's: over no host), "nccl" (on
      two GPUs, also of two hosts; not encrypted), "host" (shared memory, or the socket to another host), "auto": on one
      host cuda_ipc or nccl, whichever fits, else host. The choice is logged.
    memory: "given", the engine takes what `kv_cache_gb` and `gpu_memory_utilization` say; "auto", both are chosen
      before a training run starts: a KV cache for the sequences of a step, or less where the card is too small for it.
    staging_buffers: versions that are held on the GPU where they are staged there: 2, the one that serves and the next;
      1, the next overwrites it, so that an engine that fails to load it has nothing to go back to.
    readback: weights compared after each publish: "off", "sampled" (16 inputs of every layer) or "full".
    start_timeout_s: longest start of the engine.
    request_timeout_s: longest silence of the bridge before it is taken for dead (it reports every 2 s).
    drain_timeout_s: longest wait for running requests before a publish.
    max_restarts: bridge deaths survived in a row, without a successful call in between.
    log_file: where the bridge's output goes; empty: in a temporary folder, shown when it fails.
    """

    python: str = ""
    address: str = ""
    key_file: str = ""
    visible_gpus: str = ""
    shares_gpus: bool = False
    transport: Literal["auto", "cuda_ipc", "nccl", "host"] = "auto"
    memory: Literal["given", "auto"] = "given"
    staging_buffers: Literal[1, 2] = 2
    readback: Literal["off", "sampled", "full"] = "sampled"
    start_timeout_s: float = 600.0
    request_timeout_s: float = 120.0
    drain_timeout_s: float = 600.0
    max_restarts: int = 3
    log_file: str = ""

    @property
    def has_own_gpu(self) -> bool:
        """Whether the engine is meant for another GPU than the learner's."""
        apart = bool(self.visible_gpus) or self.transport == "nccl" or self.address.startswith("tcp://")
        return apart and self.transport != "cuda_ipc" and not self.shares_gpus

    @property
    def stages_on_gpu(self) -> bool:
        """Whether versions are staged in the learner's GPU, if it has one."""
        return self.transport == "nccl" or (self.transport != "host" and not self.address.startswith("tcp://"))

    def __post_init__(self) -> None:
        if self.address and not self.key_file:
            raise UserError(
                "rollout.engine.address names a bridge started by hand: set rollout.engine.key_file to its key"
            )
        if self.address and self.visible_gpus:
            raise UserError(
                "rollout.engine.visible_gpus is for a bridge that the trainer starts: start the one at "
                "rollout.engine.address with CUDA_VISIBLE_DEVICES, and leave visible_gpus empty"
            )
        if self.transport == "cuda_ipc" and self.address.startswith("tcp://"):
            raise UserError(
                "rollout.engine.transport=cuda_ipc needs learner and engine on one GPU: to a bridge over TCP set nccl "
                "or host"
            )
        if self.transport == "nccl" and not self.address and not self.visible_gpus:
            raise UserError(
                "rollout.engine.transport=nccl is for learner and engine on different GPUs: name the engine's in "
                "rollout.engine.visible_gpus, or set transport=auto"
            )
        try:
            super().__post_init__()
        except ValueError as error:
            raise UserError(f"rollout.engine.{error}") from None
        for name in ("max_restarts", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise UserError(f"rollout.engine.{name} must not be negative, got {getattr(self, name)}")
        for name in ("start_timeout_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"rollout.engine.{name} must be positive, got {getattr(self, name)}")


class BrokenPromiseError(UserError):
    """A version that the engine does not hold, or did not get, as it was published.

    Attributes:
      code: the bridge's: "read_back", "torn" or "tensor".
      found: what the bridge found, with the name of the layer or tensor.
    """

    def __init__(self, error: BridgeError, schemes: Sequence[str], facts: messages.Facts | None):
        self.code, self.found = error.code, str(error)
        promise, meaning = _PROMISES[error.code]
        where = "" if facts is None else f" in {facts.engine} {facts.engine_version}, {facts.isa} ({facts.profile})"
        remedy = (
            "Lower optimizer.lr, or resume from an earlier checkpoint."
            if self.code == "tensor"
            else "Start again. If it comes again, the memory or the network between the two is at fault."
            if self.code == "torn"
            else "Take another scheme (quant.forward and quant.rollout; bf16 relies on least), or the embedded sampler"
            " (rollout.engine.name=jax). `python -m qarl_jax.parity` compares the two rung by rung. Please report its"
            " output and that of `python -m qarl_jax.doctor`: this engine build is not one we know."
        )
        super().__init__(
            f"a promise is broken at publishing.\n"
            f"  promised: {promise}.\n"
            f"  found:    {self.found} (scheme {', '.join(schemes)}{where}).\n"
            f"  means:    {meaning}.\n"
            f"  to do:    {remedy}"
        )


def leave_memory_to_vllm() -> None:
    """Call before JAX first asks for its devices: on a card shared with vLLM it must take memory as it needs it, not
    three quarters of the card at once. What the user has set stays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def engine_tensors(weights: PolicyWeights, *, stacked: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor of a checkpoint the engine loads, layer by layer; masters as bf16.

    stacked: as a version is published, with the experts of a layer in one tensor (qarl_bridge.protocol.expert_stacks).
    """
    config = models.config_of(weights.graphdef)
    for name, tensor in models.export_tensors(weights.params, weights.qweights, config, stacked=stacked):
        name = expert_stacks.name_of(name) if stacked else name
        if isinstance(tensor, QTensor):
            yield from formats.pack(name, tensor.qvalue, tensor.scale, str(tensor.scheme)).items()
        else:
            yield name, tensor


def engine_config(graphdef: Any) -> dict[str, Any]:
    """The config.json the engine is started with: the model's own, and the quantization_config its rules imply."""
    config = models.config_of(graphdef)
    names = models.hf_names(config)
    schemes: dict[str, str] = {}
    for path in quantizable(models.abstract_model(config)):
        scheme = config.scheme_of(path)
        for name in names[path].reshape(-1):
            schemes[str(name)] = "bf16" if scheme is None else str(scheme)
    values = models.hf_config_json(config)
    values.pop("quantization_config", None)
    ignore = ["lm_head"] if config.moe is None else ["lm_head", "re:.*mlp\\.gate$"]
    section = formats.quantization_config(schemes, ignore)
    return values if section is None else values | {"quantization_config": section}


def _schemes(config: models.ModelConfig) -> list[str]:
    """The schemes of a model's weights, each once."""
    paths = quantizable(models.abstract_model(config))
    return list(dict.fromkeys(str(config.scheme_of(path) or "bf16") for path in paths))


def draw_seed(key: int, uid: str, number: int, start: int = 0) -> int:
    """Seed in [0, 2**63) of sample `number` of prompt `uid` under `key`, from position `start`: of these four alone.

    vLLM starts a request's randomness from its seed; the same one for a piece that goes on would draw with the numbers
    its beginning was drawn with.
    """
    place = f"{number}@{start}" if start else f"{number}"
    digest = hashlib.blake2b(f"{key}/{place}/{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _batches(
    draws: Sequence[messages.Draw],
    most: int = messages.MAX_FRAME // 4 * 3,
    most_back: int = messages.MAX_REPLY // 4 * 3,
    routed_bytes: int = 0,
) -> Iterator[list[messages.Draw]]:
    """The draws in order, in as few requests as surely fit a frame each, and their replies too.

    A token takes up to 5 bytes on the way there, 8 on the way back (with its log-prob); `routed_bytes` more come back
    for every position where its experts are recorded.
    """
    batch: list[messages.Draw] = []
    there = back = 0
    for draw in draws:
        question, answer = 5 * len(draw.prompt) + 64, 8 * draw.max_tokens + 512
        answer += routed_bytes * (len(draw.prompt) + draw.max_tokens)
        if batch and (there + question > most or back + answer > most_back):
            yield batch
            batch, there, back = [], 0, 0
        batch.append(draw)
        there, back = there + question, back + answer
    if batch:
        yield batch


class VllmEngine:
    """A RolloutEngine; see the module docstring.

    Args:
      config: see Config.
      run_id: names the run in versions; two runs cannot publish to one bridge.
      incarnation: this start of the run; must grow when a run is resumed. None: the time in nanoseconds.
      on_progress: called every two seconds while sampling, with (running, waiting, tokens).
      log: called with a line when a bridge is started or replaced.
    """

    tells_groups = True

    def __init__(
        self,
        config: Config,
        *,
        run_id: str = "run",
        incarnation: int | None = None,
        on_progress: Callable[[int, int, int], None] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self._config = config
        self._run_id = run_id
        self._incarnation = time.time_ns() if incarnation is None else incarnation
        self._on_progress = on_progress
        self._log = log
        self._bridge = BridgeProcess(
            arguments=["--options", config.to_json()],
            python=config.python,
            visible_gpus=config.visible_gpus,
            log_file=config.log_file,
        )
        self._started = time.monotonic()  # the bridge, last
        self._start_s = 0.0  # until it answered
        self._client: sender.Client | None = None
        self._prepared: tuple[str, bytes] | None = None  # address and key of a bridge that starts before its weights
        self._staged: sender.Version | None = None
        self._stager: DeviceStager | None = None
        self._transport = config.transport
        self.route = ""  # "host", "cuda_ipc" or "nccl": how the last version went
        self._model_json: dict[str, Any] | None = None
        self._model: tuple[bytes, bytes] | None = None  # fingerprint, scheme hash
        self._numerics = "plain"
        self._schemes: list[str] = []
        self.version = -1
        self.restarts = 0

    @property
    def facts(self) -> messages.Facts | None:
        """What the connected engine says of itself: versions, ISA, kernels, arithmetic profile."""
        return None if self._client is None else self._client.facts

    def prepare(self, graphdef: Any) -> None:
        """Starts the bridge for a model whose weights are still to come, and returns at once: vLLM starts meanwhile.

        Args:
          graphdef: as the first `publish` will have it.
        """
        if self._config.address or self._prepared is not None or self._client is not None:
            return
        _, params, _ = models.split(models.abstract_model(models.config_of(graphdef)))
        qweights = jax.eval_shape(functools.partial(models.quantize_params, graphdef), params)
        places = layout(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights))
        expected = [messages.Expected(name=place.name, dtype=place.dtype, shape=list(place.shape)) for place in places]
        self._started = time.monotonic()
        self._prepared = self._bridge.start(engine_config(graphdef), expected)

    # RolloutEngine ---------------------------------------------------------------------------------------------------

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        """Put a version into the engine, in place; returns seconds per phase, bytes, and what was compared."""
        model_json = engine_config(weights.graphdef)
        identity = (messages.model_fingerprint(model_json), messages.scheme_hash(model_json.get("quantization_config")))
        if self._model is not None and identity != self._model:
            raise UserError(
                "publish: model or scheme differ from the first publish; make a new engine for another model"
            )
        self._model, self._model_json = identity, model_json
        config = models.config_of(weights.graphdef)
        self._numerics, self._schemes = config.numerics.profile, _schemes(config)
        try:
            return self._publish(weights, version, self._transport)
        except BridgeError as error:
            if error.code in _USER_CODES:
                raise UserError(f"publishing: {error}") from error
            if error.code in _PROMISES:  # found while staging
                raise BrokenPromiseError(error, self._schemes, self.facts) from None
            if error.code != "unshared" or self._transport == "host":
                raise
            if self._transport != "auto":
                raise UserError(f"rollout.engine.transport={self._transport}: {error}; set auto or host") from error
            self._log(f"publishing over host memory: {error}")
        # Out of the handler: what goes wrong from here on has nothing to do with the first way.
        self._transport = "host"
        if self._stager is not None and self._staged is None:  # nothing published lies in its buffers
            self._stager.close()
            self._stager = None
        return self._publish(weights, version, "host")

    def _publish(self, weights: PolicyWeights, version: int, transport: str) -> dict[str, float]:
        assert self._model is not None
        identity: dict[str, Any] = {
            "version": messages.Version(run_id=self._run_id, incarnation=self._incarnation, step=version),
            "model": self._model[0],
            "scheme": self._model[1],
        }
        staged: sender.Version
        if transport == "host":
            staged = sender.stage(engine_tensors(weights, stacked=True), **identity)
        else:
            stager = self._device_stager(weights)
            if self._config.staging_buffers == 1 and self._staged is not None:
                self._staged.close()
                self._staged = None
            staged = stager.stage(weights, **identity)

        def send(client: sender.Client) -> dict[str, float]:
            return client.publish(staged, readback=self._config.readback, drain_timeout_s=self._config.drain_timeout_s)

        try:
            report = self._surviving(send, staged)
        except BaseException:
            staged.close()
            raise
        if self._staged is not None:
            self._staged.close()
        if transport == "host" and self._stager is not None:  # it was left meanwhile: nothing lies in its buffers
            self._stager.close()
            self._stager = None
        assert self._client is not None
        if (route := self._client.sent_over) != self.route:
            self.route = route
            self._log(f"publishing over {_TRANSPORTS[route]}")
        if self.version < 0:
            report = report | {"start_engine_s": self._start_s}
        self._staged, self.version = staged, version
        return report

    def _device_stager(self, weights: PolicyWeights) -> DeviceStager:
        if not self._config.stages_on_gpu:
            raise BridgeError("the bridge is reached over TCP", "unshared")
        if self._stager is None:
            gpus = gpus_of(weights, [self._config.visible_gpus])
            self._stager = DeviceStager([sender.gpu_buffers(gpu) for gpu in gpus], self._transport)
        return self._stager

    def status(self) -> messages.StatusReply:
        """What the bridge says of itself and its engine now."""
        if self._staged is None:
            raise UserError("status: nothing was published yet")
        return self._surviving(lambda client: client.status(), self._staged)

    def probe(self, prompt: Sequence[int], modules: Sequence[str]) -> list[messages.Recorded]:
        """What goes into and comes out of live modules of the engine (its names) while `prompt` is prefilled."""
        if self._staged is None:
            raise UserError("probe: nothing was published yet")
        staged = self._staged
        return self._surviving(lambda client: client.probe([int(t) for t in prompt], list(modules)), staged)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        sampling: SamplingConfig,
        key: int,
        on_group: Callable[[int, list[Completion]], None] | None = None,
    ) -> list[list[Completion]]:
        """`num_samples` completions of each prompt, in order; a bridge that dies meanwhile is replaced.

        `on_group` is called once for some of the prompts, with (its number, its completions) as soon as all of them
        have ended, while others are still drawn.
        """
        seen: collections.Counter[str] = collections.Counter()
        requests = []
        for prompt in prompts:  # a prompt given twice goes on counting, so that its copies differ
            first = seen[prompt.uid]
            seen[prompt.uid] += num_samples
            requests += [
                Request(prompt=prompt, number=first + j, key=key, max_tokens=sampling.max_response_len)
                for j in range(num_samples)
            ]
        ended: dict[int, dict[int, Completion]] = collections.defaultdict(dict)

        def on_ended(index: int, completion: Completion) -> None:
            number = index // num_samples
            if index not in ended[number]:  # a bridge that was replaced tells it again
                ended[number][index] = completion
                if on_group is not None and len(ended[number]) == num_samples:
                    on_group(number, [ended[number][i] for i in sorted(ended[number])])

        completions = self.extend(requests, sampling=sampling, on_ended=on_ended if on_group is not None else None)
        return [completions[i * num_samples : (i + 1) * num_samples] for i in range(len(prompts))]

    def extend(
        self,
        requests: Sequence[Request],
        *,
        sampling: SamplingConfig,
        on_ended: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """What is added to each response; a bridge that dies meanwhile is replaced. See `RolloutEngine`.

        `on_ended` is told of some completions (their number, and they themselves) before the others have ended.
        """
        if self._staged is None:
            raise UserError("generate: nothing was published yet")
        if not requests:
            return []
        draws = [
            messages.Draw(
                prompt=[int(token) for token in request.context],
                seed=draw_seed(request.key, request.prompt.uid, request.number, len(request.tokens)),
                max_tokens=request.max_tokens,
            )
            for request in requests
        ]
        common = messages.Sampling(
            max_tokens=sampling.max_response_len,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=[int(token) for token in sampling.stop_token_ids],
        )

        drawn: list[messages.Drawn] = []  # of the batches before the one that is asked for

        def report(progress: messages.Progress) -> None:
            if self._on_progress is not None:
                self._on_progress(progress.running, progress.waiting, progress.tokens)
            if on_ended is not None:
                for one in progress.ended:
                    index = len(drawn) + one.index
                    on_ended(index, self._completion(requests[index], one.drawn))

        def ask(batch: list[messages.Draw]) -> Callable[[sender.Client], list[messages.Drawn]]:
            return lambda client: client.generate(batch, common, on_progress=report)

        routed = 2 * int(np.prod(self._routing_shape())) if self._config.record_routing else 0
        for batch in _batches(draws, routed_bytes=routed):
            drawn += self._surviving(ask(batch), self._staged)
        return [self._completion(request, one) for request, one in zip(requests, drawn, strict=True)]

    def close(self) -> None:
        """Stop a bridge this engine started, and free the staged version. Idempotent."""
        grace_s = 0.0
        if self._client is not None:
            if self._bridge.process is not None:
                with contextlib.suppress(BridgeError):
                    self._client.shutdown()
                    grace_s = 10.0
            self._client.close()
            self._client = None
        self._bridge.stop(grace_s)
        if self._staged is not None:
            self._staged.close()
            self._staged = None
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        self._bridge.close()

    # Checks on what came back ----------------------------------------------------------------------------------------

    def _completion(self, request: Request, drawn: messages.Drawn) -> Completion:
        tokens = np.frombuffer(drawn.tokens, "<i4")
        logprobs = np.frombuffer(drawn.logprobs, "<f4").astype(np.float32)
        spans = []
        position = 0
        for span in drawn.spans:
            mine = (span.version.run_id, span.version.incarnation) == (self._run_id, self._incarnation)
            if not mine or span.start != position:
                raise RuntimeError(
                    f"the bridge returned tokens drawn under {span.version}, which this run did not publish"
                )
            spans.append(VersionSpan(version=span.version.step, start=span.start, end=span.end))
            position = span.end
        if position != len(tokens) or len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
            raise RuntimeError("the bridge returned a completion whose tokens, log-probs and versions do not match")
        routed = None
        if self._config.record_routing:
            shape = (len(request.context) + len(tokens) - 1, *self._routing_shape())
            if tuple(drawn.routed_shape) != shape or len(drawn.routed) != 2 * int(np.prod(shape)):
                raise RuntimeError(f"the bridge returned routed experts of shape {drawn.routed_shape}, not {shape}")
            routed = np.frombuffer(drawn.routed, "<i2").reshape(shape)
        return Completion(
            prompt_tokens=tuple(request.prompt.tokens),
            tokens=tuple(int(token) for token in tokens),
            logprobs=logprobs,
            finish_reason=drawn.finish_reason,
            versions=tuple(spans),
            routed_experts=routed,
        )

    def _routing_shape(self) -> tuple[int, int]:
        """(layers, experts per token) of the published model."""
        assert self._model_json is not None
        return self._model_json["num_hidden_layers"], self._model_json["num_experts_per_tok"]

    # Supervision -----------------------------------------------------------------------------------------------------

    def _surviving(self, call: Callable[[sender.Client], Any], staged: sender.Version) -> Any:
        """The result of `call`; a dead bridge is replaced and given the last version first."""
        for attempt in range(self._config.max_restarts + 1):
            try:
                if self._client is None:
                    self._connect(staged)
                assert self._client is not None
                return call(self._client)
            except BridgeError as error:
                if error.code in _USER_CODES:
                    raise UserError(f"vLLM bridge: {error}") from error
                if error.code in _PROMISES:
                    raise BrokenPromiseError(error, self._schemes, self.facts) from None
                if error.code not in ("dead", "timeout"):
                    raise
                cause = self._bury(error)
                if attempt == self._config.max_restarts:
                    raise UserError(f"the vLLM bridge died {attempt + 1} times in a row; last: {cause}") from error
                self.restarts += 1
                self._log(f"the vLLM bridge died ({cause}); starting it again")
        raise AssertionError("unreachable")

    def _connect(self, staged: sender.Version) -> None:
        """A connection with the lease, to an engine that serves the last published version (if there was one)."""
        config = self._config
        if config.address:
            address, key = config.address, messages.read_key(config.key_file)
        elif self._prepared is not None:
            (address, key), self._prepared = self._prepared, None
        else:
            assert self._model_json is not None
            self._started = time.monotonic()
            tensors = staged.manifest.tensors
            expected = [messages.Expected(name=entry.name, dtype=entry.dtype, shape=entry.shape) for entry in tensors]
            address, key = self._bridge.start(self._model_json, expected)
        deadline = time.monotonic() + config.start_timeout_s
        with self._speaking_up(deadline):
            client = self._first_contact(address, key, deadline)
        self._start_s = time.monotonic() - self._started
        client.set_timeout(config.request_timeout_s)
        try:
            client.acquire(self._run_id, self._incarnation)
            self._check_facts(client.facts)
            if self._staged is not None:
                client.publish(self._staged, readback=config.readback, drain_timeout_s=config.drain_timeout_s)
        except BaseException:
            client.close()
            raise
        self._client = client
        notes = "".join(f"; {note}" for note in client.facts.notes)
        facts = client.facts
        self._log(
            f"{facts.engine} {facts.engine_version}, execution {facts.execution} ({facts.profile}, {facts.isa}, "
            f"{facts.threads} threads){notes}"
        )

    def _first_contact(self, address: str, key: bytes, deadline: float) -> sender.Client:
        """A client of a bridge that may have to start first."""
        while True:
            try:
                return sender.Client(address, key, timeout_s=max(1.0, deadline - time.monotonic()))
            except BridgeError as error:
                if error.code != "dead":
                    raise
                if self._bridge.has_ended:
                    raise UserError(f"the vLLM bridge did not start: {self._bridge.last_words()}") from error
                if time.monotonic() > deadline:
                    raise UserError(f"vLLM bridge: {error} (waited {self._config.start_timeout_s:g} s)") from error
                time.sleep(0.1)

    @contextlib.contextmanager
    def _speaking_up(self, deadline: float) -> Iterator[None]:
        """While it lasts, lines that say what is being waited for, with the time left."""
        what = "its vLLM bridge to start"
        if self._config.address:
            what = f"the bridge at {self._config.address} (rollout.engine.address) to answer"
        over = threading.Event()

        def speak() -> None:
            pause = _FIRST_WORD_S
            while not over.wait(pause):
                pause = _NEXT_WORD_S
                left = max(0.0, deadline - time.monotonic())
                self._log(f"waiting for {what}: {left:.0f} s left (rollout.engine.start_timeout_s)")

        threading.Thread(target=speak, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _check_facts(self, facts: messages.Facts) -> None:
        if facts.engine != "fake" and self._numerics not in ("plain", facts.profile):
            raise UserError(
                f"the learner mirrors the arithmetic of {self._numerics}, the engine computes as {facts.profile}: "
                f"set quant.engine={facts.profile} (or plain)"
            )

        if facts.engine != "fake" and facts.records_routing != self._config.record_routing:
            needed = "true" if self._config.record_routing else "false"
            raise UserError(
                f"rollout.router_replay: start the bridge at {self._config.address} with record_routing {needed} in "
                "its --options"
            )

    def _bury(self, error: BridgeError) -> str:
        if self._client is not None:
            self._client.close()
            self._client = None
        # It broke its word or fell silent: nothing to wait for, but the exit code of one that is gone.
        code = self._bridge.kill(patience_s=5.0 if error.code == "dead" else 0.0)
        return str(error) if code is None else f"{error}; exit code {code}"


__all__ = [
    "BrokenPromiseError",
    "Config",
    "VllmEngine",
    "draw_seed",
    "engine_config",
    "engine_tensors",
    "leave_memory_to_vllm",
]
