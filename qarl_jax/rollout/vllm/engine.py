# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The vLLM rollout engine: a client of bridge processes, which it starts, supervises and, when they die, replaces.

    engine = VllmEngine(Config())                          # nothing runs yet
    engine.publish(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), version=0)
    engine.generate(prompts, num_samples=8, sampling=..., key=...)

The first publish, or `prepare` before it, writes a model folder without weights (config.json and the list of tensors)
and starts a bridge on it. Every publish stages a version, validates it, loads it in place and reads it back. The last
version stays staged: in shared memory, or in buffers on the learner's GPU. A chunked version is not kept; each chunk is
written from the learner's weights when a bridge asks for it. A bridge that dies during `generate` is restarted, gets
the staged version and the unanswered requests again, and the trainer's loop goes on. A draw depends on the weights, its
prompt and its seed only, so the answer is the one the dead bridge would have given.

fleet.py starts and supervises any number of bridges. This file makes versions and requests, and checks answers.

In a run of several processes each process has a fleet on its host (hosts.py). All publish equal bytes, each to its
bridges; each draws its share of the requests; every process yields all completions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from qarl_bridge.client import sender
from qarl_bridge.protocol import expert_stacks, formats, messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.models.transformer import quantizable
from qarl_jax.quant import QTensor
from qarl_jax.rollout import Drawn, PolicyWeights, Request, RolloutEngine, SamplingConfig
from qarl_jax.rollout.vllm import hosts, one_base
from qarl_jax.rollout.vllm.config import Config, check_model, check_splitting
from qarl_jax.rollout.vllm.fleet import USER_CODES, Fleet
from qarl_jax.rollout.vllm.gpu_staging import DeviceStager, gpus_of, layout
from qarl_jax.rollout.vllm.one_base import OneBase
from qarl_jax.runtime import processes, progress
from qarl_jax.types import Completion, UserError, VersionSpan

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
_TRANSPORTS = {
    "host": "host memory (transport=host)",
    "cuda_ipc": "device memory: learner and engine share a GPU (transport=cuda_ipc)",
    "nccl": "NCCL: learner and engine are on different GPUs (transport=nccl)",
}


class BrokenPromiseError(UserError):
    """Raised when a published version is invalid, arrives damaged, or differs from the engine's weights.

    Attributes:
      code: the bridge's error code: "read_back", "torn" or "tensor".
      found: the bridge's finding, with the name of the layer or tensor.
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
    """Turns off JAX's preallocation on a GPU shared with vLLM, unless the user set it. Call before JAX's first use."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def engine_tensors(
    weights: PolicyWeights, *, stacked: bool = False, paths: Collection[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of every tensor of the checkpoint that the engine loads, layer by layer; masters as bf16.

    stacked: the experts of a layer are one tensor, as in a published version (qarl_bridge.protocol.expert_stacks).
    paths: the wanted parameters; None: all but `weights.elsewhere`.
    """
    config = models.config_of(weights.graphdef)
    if weights.elsewhere:
        paths = frozenset(models.hf_names(config) if paths is None else paths) - weights.elsewhere
    exported = models.export_tensors(weights.params, weights.qweights, config, stacked=stacked, paths=paths)
    for name, tensor in exported:
        name = expert_stacks.name_of(name) if stacked else name
        if isinstance(tensor, QTensor):
            yield from formats.pack(name, tensor.arrays, tensor.scheme.wire).items()
        else:
            yield name, tensor


def moving(config: models.ModelConfig, fixed: Collection[str]) -> frozenset[str]:
    """Finds the parameters to send if the engine keeps `fixed` ones; a changed module is sent whole."""
    modules: dict[str, set[str]] = {}
    for path, names in models.hf_names(config).items():
        for name in names.reshape(-1):
            modules.setdefault(formats.live_module(str(name)), set()).add(path)
    return frozenset().union(*(paths for paths in modules.values() if not paths <= set(fixed)))


def engine_config(graphdef: Any, *, exported: bool = False) -> dict[str, Any]:
    """Makes the config.json that the engine is started with: the model's, and a quantization_config for its schemes.

    exported: for a folder of weights in the export layouts (`Scheme.exports`).

    Raises:
      UserError: channels are split (`qarl_jax.quant.splitting`), and a weight's scheme has no zero points.
    """
    config = models.config_of(graphdef)
    check_splitting(config)
    names = models.hf_names(config)
    layouts: dict[str, formats.Layout | None] = {}
    for path in quantizable(models.abstract_model(config)):
        scheme = config.scheme_of(path)
        layout = None if scheme is None else (scheme.exports if exported else scheme).wire
        layouts |= {str(name): layout for name in names[path].reshape(-1)}
    values = models.hf_config_json(config)
    ignore = ["lm_head"] if config.moe is None else ["lm_head", "re:.*mlp\\.gate$"]
    ignore = [name for name in ignore if f"{name}.weight" not in layouts]
    section = formats.quantization_config(layouts, ignore)
    return values if section is None else values | {"quantization_config": section}


def _schemes(config: models.ModelConfig) -> list[str]:
    """The schemes of a model's weights, each once."""
    paths = quantizable(models.abstract_model(config))
    return list(dict.fromkeys(str(config.scheme_of(path) or "bf16") for path in paths))


def draw_seed(key: int, uid: str, number: int, start: int = 0) -> int:
    """Hashes (key, uid, number, start) to the seed in [0, 2**63) of a sample that begins or continues at `start`.

    vLLM starts a request's random numbers from its seed: with an equal seed, a continued response would repeat the
    numbers of its beginning.
    """
    place = f"{number}@{start}" if start else f"{number}"
    digest = hashlib.blake2b(f"{key}/{place}/{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class VllmEngine(RolloutEngine):
    """A RolloutEngine that samples with vLLM behind bridges; see the module docstring.

    Args:
      config: options of the engine and its bridges.
      run_id: names the run in version numbers; two runs cannot publish to one bridge.
      incarnation: number of this start of the run, equal in all its processes; must grow when a run is resumed. None:
        the first process's time in nanoseconds.
      on_progress: called every two seconds while sampling, with (running, waiting, tokens).
      log: called with a line when a bridge is started or replaced.
    """

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
        self._incarnation = processes.from_first(time.time_ns) if incarnation is None else incarnation
        self._on_progress = on_progress
        self._log = log
        self.fleet = Fleet(
            config,
            run_id=run_id,
            incarnation=self._incarnation,
            check=self._check_facts,
            explain=self._broken_promise,
            log=log,
        )
        self._staged: sender.Version | None = None
        self._base: sender.Version | None = None  # complete, if later versions may be partial
        self._fixed: frozenset[str] = frozenset()  # what they may keep of it
        self._may_hold_base = bool(config.endpoints)  # of an earlier trainer
        self._one_base: OneBase | None = None
        self._stager: DeviceStager | None = None
        self._transport = config.transport
        self.route = ""  # "host", "cuda_ipc" or "nccl": how the last version went
        self._folded: Any = None  # masters of the last version, where it has adapters
        self._model_json: dict[str, Any] | None = None
        self._model: tuple[bytes, bytes] | None = None  # fingerprint, scheme hash
        self._numerics, self._shards = "plain", 1
        # Wire steps grow with every publish, policy versions need not.
        self._again, self._policies = 0, dict[int, int]()
        self._schemes: list[str] = []
        self.version = -1

    @property
    def facts(self) -> messages.Facts | None:
        """The engine's report about itself: versions, kernels, arithmetic profile. None before its start."""
        return None if self.fleet.first is None else self.fleet.first.facts

    @property
    def restarts(self) -> int:
        """The number of bridges that were replaced."""
        return self.fleet.restarts

    def prepare(self, graphdef: Any) -> None:
        """Starts bridges before the weights exist, so that vLLM starts while the trainer loads them. Returns at once.

        Args:
          graphdef: the static half that the first `publish` will have.

        Raises:
          UserError: the engine cannot serve the model, or transport=cuda_ipc without a GPU.
        """
        self._check_platform(jax.default_backend())
        if not self._config.started:
            return
        check_model(self._config, models.config_of(graphdef))
        _, params, _ = models.split(models.abstract_model(models.config_of(graphdef)))
        qweights = jax.eval_shape(functools.partial(models.quantize_params, graphdef), params)
        places = layout(self._published(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)))
        expected = [messages.Expected(name=place.name, dtype=place.dtype, shape=list(place.shape)) for place in places]
        self.fleet.prepare(engine_config(graphdef), expected)

    def hold_once(self, graphdef: Any, mesh: Mesh) -> OneBase | None:
        """Allocates a frozen base that the engine reads in the learner's memory; see `RolloutEngine`.

        Raises:
          UserError: the device has no room for the base, its memory cannot be exported, or is no GPU's under
            transport=cuda_ipc.
        """
        platform = mesh.devices.flat[0].platform
        self._check_platform(platform)
        if platform not in ("cpu", "gpu") or not one_base.shareable(graphdef):
            return None
        try:
            self._one_base = OneBase(graphdef, mesh)
        except BridgeError as error:
            raise UserError(
                f"the base cannot be held once by learner and engine ({error}): set rollout.engine.transport=host, so"
                " that each holds a copy."
            ) from error
        self._transport = "host"  # what is left of a version is small
        for replica in self.fleet.replicas:
            replica.bridge.base = self._one_base.places
        self._log(f"learner and engine hold the frozen base once: {self._one_base.nbytes / 2**30:.2f} GiB")
        return self._one_base

    def _check_platform(self, platform: str) -> None:
        """Refuses transport=cuda_ipc from a learner that is not on a GPU."""
        if platform != "gpu" and self._config.transport == "cuda_ipc":
            raise UserError(
                f"rollout.engine.transport=cuda_ipc: the learner runs on {platform}, not on a GPU; set auto or host"
            )

    def _published(self, weights: PolicyWeights) -> PolicyWeights:
        """Returns the weights without those that no version has to send."""
        return weights if self._one_base is None else dataclasses.replace(weights, elsewhere=self._one_base.paths)

    # RolloutEngine ---------------------------------------------------------------------------------------------------

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        """Loads a version into the live engine, in place. Returns seconds per phase, bytes, and read-back counts.

        In a run of several processes all must call it, and an error of one is raised on all.

        Raises:
          UserError: model or scheme differ from the first publish, or the engine cannot serve them.
          BrokenPromiseError: a tensor is invalid, arrived damaged, or differs from the engine's.
          BridgeError: another fault of the first engine, if no engine serves the version.
        """
        model_json = engine_config(weights.graphdef)
        identity = (messages.model_fingerprint(model_json), messages.scheme_hash(model_json.get("quantization_config")))
        if self._model is not None and identity != self._model:
            raise UserError(
                "publish: model or scheme differ from the first publish; make a new engine for another model"
            )
        self._model, self._model_json = identity, model_json
        weights = self._published(weights)
        config = models.config_of(weights.graphdef)
        if config.lora is not None:
            weights = dataclasses.replace(weights, params=models.fold_adapters(weights.graphdef, weights.params))
            self._folded = weights.params  # a stager holds no arrays
        check_model(self._config, config)
        self._again += version == self.version
        self._numerics, self._shards = config.numerics.profile, config.numerics.shards
        self._schemes = _schemes(config)
        try:
            return self._publish(weights, version, self._transport)
        except BridgeError as error:
            if error.code in USER_CODES:
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
        if self._staged is None:  # nothing published lies in the stager's buffers
            self._close_stager()
        self._again += processes.count() > 1  # the engines of another process may have the version
        return self._publish(weights, version, "host")

    def _publish(self, weights: PolicyWeights, version: int, transport: str) -> dict[str, float]:
        over, paths = self._over(weights)
        staged = self._stage(weights, version, transport, over, paths)
        if over is None and self._may_hold_base and weights.fixed:
            paths = moving(models.config_of(weights.graphdef), weights.fixed)
            if paths:
                over, self._again = staged, self._again + 1
                staged = self._stage(weights, version, transport, over, paths)
        self._may_hold_base = False
        try:
            assert self._model_json is not None
            hosts.check_manifest(staged.manifest)
            with hosts.together():
                report = self.fleet.publish(staged, self._model_json)
            if self.version < 0:
                hosts.check_facts(self.facts)
        except BaseException as error:
            staged.close()
            if over is not None and over is not self._base:
                over.close()
            if over is None or getattr(error, "code", "") != "base":
                raise
            self._log(f"publishing all weights: {error}")
            self._fixed = frozenset()
            self._again += processes.count() > 1
            return self._publish(weights, version, transport)
        finally:
            if self._stager is not None:
                self._stager.forget()
        if isinstance(staged, sender.StagedVersion):
            staged.base = None  # closed with the next line; who has not asked for the changes by now gets the whole
        before, self._staged = (self._staged, self._base), staged
        if self._base is None and over is not None and not report["base_s"]:
            self._log("the engine holds the base already: adapters alone were published")
        if over is None or over is not self._base:
            self._base, self._fixed = (over or staged, weights.fixed) if weights.fixed else (None, frozenset())
        for old in before:
            if old is not None and old is not self._base:
                old.close()
        if self._transport == "host":  # the stager was left meanwhile: nothing lies in its buffers
            self._close_stager()
        first = self.fleet.first
        if first is not None and first.client is not None and (route := first.client.sent_over) != self.route:
            self.route = route
            self._log(f"publishing over {_TRANSPORTS[route]}")
        if self.version < 0:
            report = report | {"start_engine_s": max(replica.start_s for replica in self.fleet.replicas)}
        self.version = version
        return report

    def _stage(
        self,
        weights: PolicyWeights,
        version: int,
        transport: str,
        over: sender.Version | None,
        paths: frozenset[str] | None,
    ) -> sender.Version:
        """Stages the leaves `paths` of a version. over: the complete version with the others; None: all leaves."""
        assert self._model is not None
        identity: dict[str, Any] = {
            "version": messages.Version(run_id=self._run_id, incarnation=self._incarnation, step=self._step(version)),
            "model": self._model[0],
            "scheme": self._model[1],
        }
        if over is not None or transport == "host":
            staged = sender.stage(engine_tensors(weights, stacked=True, paths=paths), over=over, **identity)
            staged.base = self._staged if isinstance(self._staged, sender.StagedVersion) else None
            return staged
        stager = self._device_stager(weights)
        if self._config.staging_buffers < 2:
            self._close_versions()
        return stager.stage(weights, **identity)

    def _step(self, version: int) -> int:
        """Returns the wire step of a version: its number plus the count of repeated publishes of one version."""
        step = version + self._again
        self._policies[step] = version
        return step

    def _over(self, weights: PolicyWeights) -> tuple[sender.Version | None, frozenset[str] | None]:
        """Finds the base of a partial version and the paths to send; (None, None): send a complete version."""
        lost = any(getattr(replica.error, "code", "") == "base" for replica in self.fleet.replicas)
        if processes.any_of(lost) or self._base is None or not weights.fixed or weights.fixed != self._fixed:
            return None, None
        paths = moving(models.config_of(weights.graphdef), weights.fixed)
        return (self._base, paths) if paths else (None, None)

    def _close_versions(self) -> None:
        for version in (self._staged, self._base):
            if version is not None:
                version.close()
        self._staged = self._base = None

    def _close_stager(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _device_stager(self, weights: PolicyWeights) -> DeviceStager:
        if not self._config.stages_on_gpu:
            raise BridgeError("the bridge is reached over TCP", "unshared")
        if self._stager is None:
            gpus = gpus_of(weights, [self._config.gpus_of(number) for number in range(self._config.started)])
            pools = [sender.gpu_buffers(gpu) for gpu in gpus]
            self._stager = DeviceStager(pools, self._transport, chunked=self._config.staging_buffers == 0)
        return self._stager

    def status(self) -> messages.StatusReply:
        """Returns the state of the bridge and its engine.

        Raises:
          UserError: nothing was published yet.
        """
        if self._staged is None:
            raise UserError("status: nothing was published yet")
        return self.fleet.ask(lambda client: client.status())

    def probe(self, prompt: Sequence[int], modules: Sequence[str]) -> list[messages.Recorded]:
        """Records inputs and outputs of the engine's `modules` while it prefills `prompt`. The names are vLLM's.

        Raises:
          UserError: nothing was published yet. BridgeError: as `Engine.probe`.
        """
        if self._staged is None:
            raise UserError("probe: nothing was published yet")
        return self.fleet.ask(lambda client: client.probe([int(t) for t in prompt], list(modules)))

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        """Yields completions as vLLM ends them; replaces a bridge that dies meanwhile. See `RolloutEngine`.

        Raises:
          UserError: nothing was published yet, or as `Fleet.draw`.
          RuntimeError: the bridge returned tokens of another run, or a malformed completion.
        """
        if self._staged is None:
            raise UserError("generate: nothing was published yet")
        if not requests:
            return
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
            stop_token_ids=[int(token) for token in sampling.stop_token_ids],
        )

        routed = 2 * int(np.prod(self._routing_shape())) if self._config.record_routing else 0

        def ask(mine: Sequence[messages.Draw]) -> hosts.Drawn:
            drawn = self.fleet.draw(mine, common, routed_bytes=routed, on_progress=self._on_progress)
            with contextlib.closing(drawn), progress.task("sampling", len(mine), "responses") as task:
                yield from task.count(drawn)

        with contextlib.closing(hosts.draw(draws, ask)) as drawn:
            for index, one in drawn:
                yield index, self._completion(requests[index], one)

    def close(self) -> None:
        """Stops the bridges that this engine started, and frees the staged version. Idempotent."""
        self.fleet.close()
        self._close_versions()
        self._close_stager()

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
            spans.append(VersionSpan(version=self._policies[span.version.step], start=span.start, end=span.end))
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

    def _check_facts(self, facts: messages.Facts) -> None:
        if facts.engine != "fake" and self._numerics not in ("plain", facts.profile):
            raise UserError(
                f"the learner mirrors the arithmetic of {self._numerics}, the engine computes as {facts.profile}: "
                f"set quant.engine={facts.profile} (or plain)"
            )
        if facts.engine != "fake" and self._numerics != "plain" and facts.tensor_parallel_size != self._shards:
            raise UserError(
                f"the engine has {facts.tensor_parallel_size} shard(s), the learner mirrors {self._shards}: set "
                f"rollout.engine.tensor_parallel_size={facts.tensor_parallel_size}"
            )
        if facts.engine != "fake" and facts.records_routing != self._config.record_routing:
            needed = "true" if self._config.record_routing else "false"
            raise UserError(
                f"rollout.router_replay: start the bridges of rollout.engine.endpoints with record_routing"
                f" {needed} in their --options"
            )

    def _broken_promise(self, error: BridgeError, facts: messages.Facts | None) -> Exception | None:
        """Returns the error for a version that a bridge refused, if the refusal breaks a promise; else None."""
        if error.code not in _PROMISES:
            return None
        try:
            raise BrokenPromiseError(error, self._schemes, facts) from None
        except BrokenPromiseError as told:
            return told
