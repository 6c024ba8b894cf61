# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.parity ... --modes`: does an engine compute the same op by op and in CUDA graphs?

Both engines get equal weights, prompts and seeds, and every number must be equal to the last bit. The numbers are
inputs and outputs of every block, log-probs of first tokens, and responses whose batch passes through every size.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from qarl_bridge.protocol import messages

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights, Request, SamplingConfig
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, leave_memory_to_vllm
from qarl_jax.types import Completion
from qarl_jax.verify import ladder, layers


@dataclasses.dataclass(frozen=True)
class Observed:
    """Everything that one engine computed for `compare_modes`.

    Attributes:
      execution: the engine's mode. tokens_per_s: speed of decoding the responses of equal length together.
      modules: what went into and came out of every block and of the picked linear layers in a prefill.
      prompts: a first token of every prompt and of every prompt cut short. equal: responses of equal length. ragged:
        responses whose lengths differ, so that the batch passes through every size below its largest.
    """

    execution: str
    tokens_per_s: float
    modules: list[messages.Recorded]
    prompts: list[Completion]
    equal: list[Completion]
    ragged: list[Completion]


def observe(weights: PolicyWeights, config: Config, options: ladder.Options) -> Observed:
    """Starts an engine, gives it `weights` and asks for everything that `compare_modes` compares."""
    model = models.config_of(weights.graphdef)
    prompts = ladder.random_prompts(model.vocab_size, options.prompts, options.prompt_len, options.seed)
    cut = [
        dataclasses.replace(prompt, uid=f"{prompt.uid}:{length}", tokens=prompt.tokens[:length])
        for prompt in prompts[:4]
        for length in range(1, options.prompt_len)
    ]
    blocks = (f"model.layers.{number}" for number in range(model.num_layers))
    names = [*layers.linear_names(model), *blocks]
    sampling = SamplingConfig(max_response_len=options.response_len)
    ragged = [
        Request(prompt=prompt, number=1, key=options.seed, max_tokens=1 + number * options.response_len // len(prompts))
        for number, prompt in enumerate(prompts)
    ]
    engine = VllmEngine(config, run_id="parity")
    try:
        engine.publish(weights, 0)
        assert engine.facts is not None
        modules = engine.probe(prompts[0].tokens, names)
        first = ladder.flat(
            engine.generate([*prompts, *cut], num_samples=1, sampling=ladder.ONE_TOKEN, key=options.seed)
        )
        engine.generate(prompts, num_samples=1, sampling=SamplingConfig(max_response_len=4), key=1)  # warm
        started = time.perf_counter()
        equal = ladder.flat(engine.generate(prompts, num_samples=1, sampling=sampling, key=options.seed))
        seconds = time.perf_counter() - started
        drawn = sum(len(c.tokens) for c in equal)
        rest = engine.extend(ragged, sampling=sampling)
        return Observed(engine.facts.execution, drawn / seconds, modules, first, equal, rest)
    finally:
        engine.close()


def same_bits(a: Observed, b: Observed) -> Iterator[ladder.Rung]:
    """Compares what two engines computed, bit by bit; yields a `ladder.Rung` per kind of number."""
    pairs = list(zip(a.modules, b.modules, strict=True))
    different = [x.module for x, y in pairs if x != y]
    detail = (
        f"first different: {different[0]}, {len(different)} of {len(pairs)}" if different else f"{len(pairs)} modules"
    )
    yield ladder.Rung("modules", not different, detail)
    for name, mine, theirs in (
        ("prompt log-probs", a.prompts, b.prompts),
        ("decoded", a.equal, b.equal),
        ("decoded, ragged", a.ragged, b.ragged),
    ):
        total, equal, worst = 0, 0, 0.0
        for x, y in zip(mine, theirs, strict=True):
            total += len(x.tokens)
            same = np.array(x.tokens) == np.array(y.tokens)
            together = len(same) if same.all() else int(np.argmin(same))  # a token apart, and the rest is another text
            d = np.abs(x.logprobs[:together] - y.logprobs[:together])
            equal += int((d == 0).sum())
            worst = max(worst, float(d.max(initial=0.0)))
        yield ladder.Rung(name, equal == total, f"{equal} of {total} log-probs equal, largest difference {worst:.1e}")
    routed: list[Any] = [(x.routed_experts, y.routed_experts) for x, y in zip(_all(a), _all(b), strict=True)]
    if routed[0][0] is not None:
        equal = sum(np.array_equal(x, y) for x, y in routed)
        yield ladder.Rung("routed experts", equal == len(routed), f"those of {equal} of {len(routed)} responses equal")


def _all(observed: Observed) -> list[Completion]:
    return [*observed.prompts, *observed.equal, *observed.ragged]


def compare_modes(
    path: str,
    scheme: str,
    engine_name: str,
    options: ladder.Options,
    show: Any = lambda rung: None,
) -> dict[str, Any]:
    """Compares one policy in two engines: op by op, and in the mode of a run (op by op again on a CPU).

    Args:
      path, scheme, engine_name, options: as in `ladder.climb`. show: called with each `Rung`.

    Returns:
      {"rungs": [...], "modes": [...], "tokens_per_s": [...], "first_broken": name or None, ...}
    """
    if engine_name == "cuda":
        leave_memory_to_vllm()
    weights = ladder.load(path, scheme, engine_name, options.attention, options.tensor_parallel_size, options.lora_rank)
    model, seen = models.config_of(weights.graphdef), []
    for eager in (True, False):
        seen.append(observe(weights, dataclasses.replace(options, eager=eager).engine(model), options))
        speed = f"{seen[-1].tokens_per_s:,.0f} tokens/s with {options.prompts} sequences"
        show(ladder.Rung(seen[-1].execution, None, speed))
    rungs = list(same_bits(*seen))
    for rung in rungs:
        show(rung)
    return {
        "model": path,
        "scheme": scheme,
        "modes": [x.execution for x in seen],
        "tokens_per_s": [x.tokens_per_s for x in seen],
        "rungs": [dataclasses.asdict(rung) for rung in rungs],
        "first_broken": next((rung.name for rung in rungs if rung.ok is False), None),
    }
