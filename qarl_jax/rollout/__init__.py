# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout engines: what samples completions under a published policy version.

    engine.publish(PolicyWeights(graphdef, params, qweights), version=3)
    groups = engine.generate(prompts, num_samples=8, sampling=SamplingConfig(max_response_len=256), key=1234)
    groups[i][j]        # the j-th Completion of prompts[i]
    more = engine.extend(requests, sampling=SamplingConfig(max_response_len=64))    # goes on with some

Every engine computes with the QTensors it is given; none quantizes. Sampled tokens are a function of the published
weights, the key, the prompt and the sample's number, and never of which slot or batch a sequence landed in.

A new engine is one file with a `Config` and a class that satisfies `RolloutEngine`, and one line in `ENGINES`; the
battery in tests/rollout/test_protocol.py greets it.
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

    The logits are divided by `temperature`, and the tail outside the smallest set of mass `top_p` is masked. The rest
    is renormalized, drawn from, and reported as the token's log-probability.

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
      params: the masters. An engine reads those that have no QTensor (embedding, norms, head, biases), in its dtype.
        A master that has a QTensor may be missing.
      qweights: the QTensors, by path; empty for a bf16 policy.
      fixed: paths of the leaves that are the same in every version that the engine is given: it may keep what it has.
      elsewhere: paths of those that no version brings: the engine reads the learner's memory (`vllm.one_base`).
    """

    graphdef: Any
    params: Any
    qweights: Any
    fixed: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One response to begin, or to go on with. What is drawn depends on the weights and on these fields alone.

    Attributes:
      prompt: the prompt.
      number: number of the sample among the prompt's; `generate` counts from 0.
      key: as in `generate`.
      tokens: the response so far; empty: begin it.
      max_tokens: most tokens to add.
    """

    prompt: Prompt
    number: int
    key: int
    max_tokens: int
    tokens: tuple[int, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the next token."""
        return (*self.prompt.tokens, *self.tokens)


def requests_for(prompts: Sequence[Prompt], *, num_samples: int, sampling: SamplingConfig, key: int) -> list[Request]:
    """Lists the requests of `RolloutEngine.generate`, prompt by prompt. The samples of a prompt that is given twice are
    numbered on, so that its copies differ.

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

    An engine implements `draw`; `generate` and `extend` collect it. After `publish` the engine holds no reference to
    the caller's arrays, so the learner may donate them. Equal keys, weights and prompts give equal completions; `key`
    is any int in [0, 2**63).

    A request with tokens continues a response. Begun with the key and number of `generate`, a response draws as it does
    there. Whether a response made in pieces equals one made at once depends on the engine: the embedded sampler's does
    under equal weights; vLLM's randomness starts anew with every piece.

    Attributes:
      version: the version being served; -1: nothing was published.
    """

    version: int

    @property
    def facts(self) -> Any:
        """The report of a live vLLM about itself (`qarl_bridge.protocol.messages.Facts`); None where there is none."""
        return None

    def prepare(self, graphdef: Any) -> None:
        """The weights of this model will be published: what can be started before them may be. Returns at once."""

    def hold_once(self, graphdef: Any, mesh: Mesh) -> Any:
        """Memory for a frozen base, which learner and engine then hold once (`vllm.one_base.OneBase`); None: each holds
        a copy. Call it before `prepare`.

        Args:
          graphdef: of both, which agree on the scheme.
          mesh: the learner's.
        """
        del graphdef, mesh

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        """Serves `weights` as `version` from now on.

        Returns:
          Metrics by name: seconds of each phase (`*_s`), bytes and counts; none where an engine has nothing to tell.

        Raises:
          UserError: the model or its schemes are not those of the first publish, or the engine cannot serve them.
        """

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        """Yields (index of the request, its completion) once per request, as completions end, in any order.

        A completion holds the tokens added alone; "length" means that the request's `max_tokens`, or the limit of
        `sampling`, was reached.

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

    def close(self) -> None:
        """Lets go of weights, programs and processes. May be called twice."""


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
    """The engine `name` of `ENGINES`, built from its own Config (None: its defaults)."""
    if name not in ENGINES:
        raise UserError(f"rollout.engine: no engine {name!r}; there are {', '.join(ENGINES)}")
    return ENGINES[name](config, **options)
