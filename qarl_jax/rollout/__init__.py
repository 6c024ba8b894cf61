# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: programs that sample completions from a published version of the policy.

    engine.publish(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), version=3)
    groups = engine.generate(prompts, num_samples=8, sampling=SamplingConfig(max_response_len=256), key=1234)
    groups[i][j]        # the j-th Completion of prompts[i]
    more = engine.extend(requests, sampling=SamplingConfig(max_response_len=64))    # continues responses

An engine computes with the quantized weights (QTensors) that the learner publishes, and never quantizes. Sampled tokens
depend on the published weights, the key, the prompt and the sample's number alone, never on the batch.

A new engine is one file with a `Config` and a class that satisfies `RolloutEngine`, and one line in `ENGINES`. The
tests in tests/rollout/test_protocol.py then run against the new engine.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from qarl_jax.types import Completion, Prompt, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution tokens are drawn from.

    The logits are divided by `temperature`; tokens outside the smallest set of probability `top_p` are masked. A
    token's reported log-probability is under the renormalized distribution that it was drawn from.

    Attributes:
      max_response_len: most tokens of a response, the end token included.
      temperature: 1.0 samples the policy itself. 0 is greedy: the most likely token, with its log-probability under the
        undivided logits (evaluation only: there is no distribution to correct for).
      top_p: in (0, 1]; 1 is off.
      stop_token_ids: a response ends with the first of these, which is part of it.
    """

    max_response_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_response_len < 1:
            raise UserError(f"sampling: max_response_len must be at least 1, got {self.max_response_len}")
        if not self.temperature >= 0:
            raise UserError(f"sampling: temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p must be in (0, 1], got {self.top_p} (1 turns it off)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyWeights:
    """The policy to publish: a split model (`models.split`), with QTensors made under `quant.rollout`.

    Attributes:
      graphdef: the model's static half (`models.split`), carrying config and scheme.
      params: the masters. An engine casts masters without a QTensor (embedding, norms, head, biases) to its dtype. A
        master with a QTensor may be missing.
      qweights: the QTensors, by path; empty for a bf16 policy.
      fixed: paths of leaves that never change between versions; the engine may keep its first copy.
      elsewhere: paths of leaves that are never sent: the engine reads them in the learner's memory (`vllm.one_base`).
    """

    graphdef: Any
    params: Any
    qweights: Any
    fixed: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to begin or continue one response. The drawn tokens depend on the weights and on these fields alone.

    Attributes:
      prompt: the prompt.
      number: number of the sample among the prompt's; `generate` counts from 0.
      key: seed of the random numbers, an int in [0, 2**63).
      tokens: the response so far; empty for a response that begins.
      max_tokens: most tokens to add.
    """

    prompt: Prompt
    number: int
    key: int
    max_tokens: int
    tokens: tuple[int, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        """Returns the prompt's tokens and the response so far: everything before the next token."""
        return (*self.prompt.tokens, *self.tokens)


def requests_for(prompts: Sequence[Prompt], *, num_samples: int, sampling: SamplingConfig, key: int) -> list[Request]:
    """Lists the requests of `RolloutEngine.generate`, prompt by prompt. A second copy of a prompt continues the sample
    numbers of the first, so that the copies get different responses.

    Raises:
      UserError: `num_samples` is below 1.
    """
    if num_samples < 1:
        raise UserError(f"rollout: num_samples must be at least 1, got {num_samples}")
    seen: collections.Counter[str] = collections.Counter()
    requests = []
    for prompt in prompts:
        for number in range(seen[prompt.uid], seen[prompt.uid] + num_samples):
            requests.append(Request(prompt=prompt, number=number, key=key, max_tokens=sampling.max_response_len))
        seen[prompt.uid] += num_samples
    return requests


# Completions as they end, each with the index of its request.
Drawn = Generator[tuple[int, Completion], None, None]


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions under the last published version.

    An engine implements `draw`; `generate` and `extend` collect its results. After `publish` the engine holds no
    reference to the caller's arrays, so the learner may donate them. Equal keys, weights and prompts give equal
    completions; `key` is any int in [0, 2**63).

    A request with tokens continues a response. A response drawn in pieces equals one drawn at once with the embedded
    sampler, if the weights are equal. With vLLM it may differ: vLLM seeds its random numbers anew for every request.

    Attributes:
      version: the policy version being served; -1 before the first publish.
    """

    version: int

    @property
    def facts(self) -> Any:
        """A live vLLM's report about itself (`qarl_bridge.protocol.messages.Facts`); None for other engines."""
        return None

    def prepare(self, graphdef: Any) -> None:
        """Starts early whatever does not need weights, for a model whose weights will be published. Returns at once."""

    def hold_once(self, graphdef: Any, mesh: Mesh) -> Any:
        """Allocates a frozen base that learner and engine share in one copy (`vllm.one_base.OneBase`). Returns None
        where each holds a copy. Call it before `prepare`.

        Args:
          graphdef: the model's static half; learner and engine must agree on the scheme.
          mesh: the learner's mesh.
        """
        del graphdef, mesh

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        """Serves `weights` as `version` from now on.

        Returns:
          Metrics by name: seconds of each phase (`*_s`), bytes and counts; empty if an engine measures nothing.

        Raises:
          UserError: the model or its schemes differ from those of the first publish, or the engine cannot serve them.
        """

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        """Yields (index of the request, its completion) once per request, as completions end, in any order.

        A completion holds only the tokens that this call added. Its finish_reason is "length" if the request's
        `max_tokens` or the limit of `sampling` was reached.

        Raises:
          UserError: nothing was published yet, or a prompt has a token that the model does not know.
        """

    def extend(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> list[Completion]:
        """Returns the completions of `draw`, in the order of the requests."""
        found: dict[int, Completion] = {}
        with contextlib.closing(self.draw(requests, sampling=sampling)) as drawn:
            found.update(drawn)
        return [found[index] for index in range(len(requests))]

    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: SamplingConfig, key: int
    ) -> list[list[Completion]]:
        """Returns `num_samples` completions of every prompt, in the order of the prompts. Raises as `draw` does."""
        requests = requests_for(prompts, num_samples=num_samples, sampling=sampling, key=key)
        drawn = self.extend(requests, sampling=sampling)
        return [drawn[i : i + num_samples] for i in range(0, len(drawn), num_samples)]

    def reserved(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other threads from sampling inside the block, for a policy that no batch may be drawn from."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Releases weights, programs and processes. May be called twice."""


class Around(RolloutEngine):
    """An engine around another one, to which it passes every call on. engine: the other; `close` closes it, too."""

    def __init__(self, engine: RolloutEngine):
        self.engine, self.version = engine, engine.version

    @property
    def facts(self) -> Any:
        return self.engine.facts

    def prepare(self, graphdef: Any) -> None:
        self.engine.prepare(graphdef)

    def hold_once(self, graphdef: Any, mesh: Mesh) -> Any:
        return self.engine.hold_once(graphdef, mesh)

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        report = self.engine.publish(weights, version)
        self.version = self.engine.version
        return report

    def reserved(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.reserved()

    def close(self) -> None:
        self.engine.close()


def _jax(config: Any = None, **options: Any) -> RolloutEngine:
    from qarl_jax.rollout.embedded import engine

    return engine.JaxSampler(config or engine.Config(), **options)


def _vllm(config: Any = None, **options: Any) -> RolloutEngine:
    # the client of the bridge; the embedded sampler must not need its dependencies
    from qarl_jax.rollout.vllm import engine

    return engine.VllmEngine(config or engine.Config(), **options)


# Name in the config -> engine(config, **options). Imported when asked for.
ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "jax": _jax,
    "vllm": _vllm,
}


def make_engine(name: str, config: Any = None, **options: Any) -> RolloutEngine:
    """Builds the engine that `ENGINES` lists under `name`, from that engine's Config (None: its defaults).

    Raises:
      UserError: `ENGINES` has no such name.
    """
    if name not in ENGINES:
        raise UserError(f"rollout.engine: no engine {name!r}; there are {', '.join(ENGINES)}")
    return ENGINES[name](config, **options)
