# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A bridge that serves the embedded sampler in place of vLLM: an engine process for machines without vLLM.

    python -m benchmarks.jax_bridge --config FILE --socket PATH --key-file FILE [section.field=value ...]

serves the policy of a run's config under `quant.rollout`, and is published to as vLLM is: staged, validated, loaded,
read back. A trainer reaches it with `rollout.engine={name: vllm, endpoints: [PATH, ...], key_file: FILE}`. Draws depend
on weights, prompt and seed alone.

It is not exact. Masters without a QTensor (embedding, norms, head) travel as bfloat16, so that a learner in
float32 differs from it by their rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.bridge import Bridge
from qarl_bridge.server.engine_api import Finished, Parts
from qarl_bridge.server.fake_engine import compare
from qarl_bridge.server.staged import Copy
from qarl_bridge.transport.zeromq import Listener

from qarl_jax import models
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights, Request, SamplingConfig
from qarl_jax.rollout.embedded import engine as embedded
from qarl_jax.rollout.vllm.engine import engine_config
from qarl_jax.rollout.vllm.gpu_staging import layout
from qarl_jax.run import build, config
from qarl_jax.runtime import compilation
from qarl_jax.types import Prompt

_GATHER_S = 0.01  # requests of one batch arrive over several connections; a call draws what has come


class JaxEngine:
    """A `qarl_bridge.server.engine_api.Engine` that samples with a `JaxSampler`.

    Args:
      graphdef: of the policy, under the scheme that is sampled.
      sampler: the sampler's own settings.
      max_model_len: longest prompt and response, in tokens.
    """

    def __init__(self, graphdef: Any, sampler: embedded.Config, *, max_model_len: int):
        model_config, json = models.config_of(graphdef), engine_config(graphdef)
        _, params, _ = models.split(models.abstract_model(model_config))
        qweights = jax.eval_shape(lambda p: models.quantize_params(graphdef, p), params)
        self._shapes = PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)
        self._places = layout(self._shapes)
        self.expected: Mapping[str, messages.Expected] = {
            place.name: messages.Expected(name=place.name, dtype=place.dtype, shape=list(place.shape))
            for place in self._places
        }
        self.facts = messages.Facts(
            engine="jax",
            engine_version=jax.__version__,
            profile=model_config.numerics.profile,
            isa=jax.default_backend(),
            kernels={},
            model=messages.model_fingerprint(json),
            scheme=messages.scheme_hash(json.get("quantization_config")),
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            threads=len(os.sched_getaffinity(0)),
            pid=os.getpid(),
        )
        self.met: dict[str, int] = {}
        self.has_weights = False
        self._sampler = embedded.JaxSampler(sampler)
        self._held: dict[str, np.ndarray] = {}
        self._requests: dict[str, tuple[messages.Draw, messages.Sampling]] = {}
        self._last = 0.0  # when one came

    def submit(self, request_id: str, draw: messages.Draw, sampling: messages.Sampling) -> None:
        self._requests[request_id] = draw, sampling
        self._last = time.monotonic()

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._requests[request_id]

    def running(self) -> int:
        return len(self._requests)

    def step(self) -> list[Finished]:
        """Samples all waiting requests to their end and returns them; waits a moment first to gather requests."""
        if time.monotonic() < self._last + _GATHER_S:
            time.sleep(_GATHER_S / 4)
            return []
        alike: dict[SamplingConfig, dict[str, Request]] = defaultdict(dict)
        for request_id, (draw, sampling) in self._requests.items():
            prompt = Prompt(uid="", tokens=tuple(draw.prompt), text="", answer="")
            how = SamplingConfig(
                max_response_len=self.facts.max_model_len,  # each request has its own limit
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=tuple(sampling.stop_token_ids),
            )
            alike[how][request_id] = Request(prompt=prompt, number=0, key=draw.seed, max_tokens=sampling.max_tokens)
        self._requests.clear()
        finished = []
        for how, requests in alike.items():
            longest = max(request.max_tokens for request in requests.values())
            drawn = self._sampler.extend(
                list(requests.values()), sampling=dataclasses.replace(how, max_response_len=longest)
            )
            for request_id, completion in zip(requests, drawn, strict=True):
                tokens = np.asarray(completion.tokens, np.int32)
                finished.append(Finished(request_id, tokens, completion.logprobs, completion.finish_reason))
        return finished

    def load(self, parts: Parts) -> None:
        """Loads published tensors, stacked in the layout of the model."""
        self._held = {name: np.array(array) for part in parts for name, array in part.items()}
        stacks: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
        for place in self._places:
            if place.source is not None:
                stacks[place.source].append(self._held[place.name])
        names = models.hf_names(models.config_of(self._shapes.graphdef))

        def array(path: str, part: str, like: Any) -> jax.Array:
            if (path, part) not in stacks:  # a master that only its codes stand for
                return jnp.zeros(like.shape, like.dtype)
            found = stacks[path, part]
            whole = np.stack(found) if names[path].ndim else found[0]
            return jnp.asarray(whole.astype(like.dtype) if part == "master" else whole)

        def filled(state: Any) -> Any:
            out = {}
            for keys, variable in nnx.to_flat_state(state):
                like = variable.get_value()
                if isinstance(like, QTensor):
                    path = ".".join(map(str, (*keys[:-1], "kernel")))
                    held = {name: array(path, name, one).reshape(one.shape) for name, one in like.arrays.items()}
                    out[keys] = variable.replace(QTensor(held, like.scheme))
                else:
                    out[keys] = variable.replace(array(".".join(map(str, keys)), "master", like))
            return nnx.from_flat_state(out)

        shapes = self._shapes
        weights = PolicyWeights(
            graphdef=shapes.graphdef, params=filled(shapes.params), qweights=filled(shapes.qweights)
        )
        self._sampler.publish(weights, self._sampler.version + 1)
        self.has_weights = True

    def read_back(self, parts: Parts, mode: str, seed: int) -> tuple[int, int]:
        """Compares all loaded tensors with the published ones."""
        return compare(self._held, parts)

    def restore_initial(self) -> bool:
        return False

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        raise BridgeError("the embedded sampler maps no GPU memory", "unshared")

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        raise BridgeError("the embedded sampler has no NCCL", "unshared")

    def forget_trainer(self) -> None:
        """Does nothing: the engine keeps no reference to the trainer's memory."""

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        raise BridgeError("the embedded sampler records no modules", "engine")

    def close(self) -> None:
        self._sampler.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jax_bridge", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="of the run that will publish here")
    parser.add_argument("--socket", required=True, help="path of a unix socket, or tcp://host:port")
    parser.add_argument("--key-file", required=True, help="64 hexadecimal digits, mode 0600")
    parser.add_argument("--slots", type=int, default=128, help="sequences decoded at once")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    args = parser.parse_args(argv)
    cfg = config.load(args.config, args.overrides)
    compilation.enable_cache(cfg.train.compile_cache)
    graphdef = build.rollout_graphdef(cfg, build.policy_graphdef(cfg))
    # One size of batch, and so one set of programs, whatever share of the requests comes here.
    sampler = embedded.Config(batch_size=args.slots, min_slots=args.slots)
    longest = cfg.data.prompt_limit + max(cfg.rollout.max_response_len, cfg.eval.max_response_len or 0)
    listener = Listener(args.socket, messages.read_key(args.key_file))
    bridge = Bridge(JaxEngine(graphdef, sampler, max_model_len=longest), lambda line: print(line, file=sys.stderr))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        bridge.stop()

    threading.Thread(target=watch, daemon=True).start()
    bridge.serve(listener)
    try:
        return bridge.run()
    finally:
        listener.close()


if __name__ == "__main__":
    raise SystemExit(main())
