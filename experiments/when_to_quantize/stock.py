# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An exported policy in vLLM as it comes, without the bridge and its operations, beside the policy that was trained.

    python -m experiments.when_to_quantize.stock RUN FOLDER OUT.jsonl [override ...]

FOLDER is what `export --format compressed-tensors` made of RUN. Questions and numbers are those of `evaluate`, and OUT
has every response. `stock/k3` compares vLLM's log-probs of the tokens that it drew with the trained policy's, in the
arithmetic of the run.
"""

import argparse
import contextlib
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import vllm

from qarl_jax import data
from qarl_jax.learning.trainable import joined
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.run import build, checkpoint, evaluation, stamp
from qarl_jax.types import Completion, Prompt, VersionSpan
from qarl_jax.verify import ladder


class Stock:
    """A vLLM that has loaded a folder by its own loader; `generate` is that of a `RolloutEngine`."""

    def __init__(self, folder: str, max_model_len: int, share: float, kv_cache_gb: float):
        cache = int(kv_cache_gb * 2**30)
        self.drawn: list[Completion] = []
        self._llm = vllm.LLM(
            folder, max_model_len=max_model_len, gpu_memory_utilization=share, kv_cache_memory_bytes=cache or None
        )

    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: SamplingConfig, key: int
    ) -> list[list[Completion]]:
        """Draws samples of each prompt with the log-probs of their tokens; `drawn` keeps them."""
        settings = [
            vllm.SamplingParams(
                n=num_samples,
                seed=(key + i) % 2**31,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_response_len,
                stop_token_ids=list(sampling.stop_token_ids),
                logprobs=0,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        groups = []
        for found in self._llm.generate([{"prompt_token_ids": list(p.tokens)} for p in prompts], settings):
            asked = tuple(found.prompt_token_ids)
            groups.append([_completion(asked, one) for one in sorted(found.outputs, key=lambda one: one.index)])
        self.drawn = [one for group in groups for one in group]
        return groups


def _completion(asked: tuple[int, ...], one: vllm.CompletionOutput) -> Completion:
    tokens = tuple(one.token_ids)
    drawn = [of[token].logprob for of, token in zip(one.logprobs, tokens, strict=True)]
    span = VersionSpan(version=0, start=0, end=len(tokens))
    return Completion(
        prompt_tokens=asked,
        tokens=tokens,
        logprobs=np.array(drawn, np.float32),
        finish_reason=one.finish_reason,
        versions=(span,),
    )


def trained(run: str) -> PolicyWeights:
    """Restores a run's policy in the arithmetic that it was trained in."""
    cfg = stamp.config_of(run)
    checkpoints, step = checkpoint.find(run)
    learner = build.make_learner(
        cfg, build.policy_graphdef(cfg, stamp.numerics_of(stamp.of(run))), build.make_mesh(cfg)
    )
    params, frozen = build.load_policy(cfg, learner, restored=True)
    if frozen is not None:
        learner.hold(frozen)
    params = checkpoints.restore({"params": params}, step=step).state["params"]
    params, qweights = joined(params, learner.quantize(params))
    return PolicyWeights(graphdef=learner.graphdef, params=params, qweights=qweights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run")
    parser.add_argument("folder")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # vLLM has its part of the device before JAX comes
    cfg = stamp.config_of(args.run, args.overrides)
    tokenizer = data.load_tokenizer(args.folder)
    prompts = build.eval_prompts(cfg, tokenizer)
    sampling = build.eval_sampling(cfg, data.stop_token_ids(tokenizer, args.folder))
    engine = cfg.rollout.engine
    stock = Stock(args.folder, engine.max_model_len, engine.gpu_memory_utilization, engine.kv_cache_gb)
    with contextlib.closing(build.make_grader(cfg)) as grader:
        result = evaluation.evaluate(
            stock,
            prompts,
            grader,
            tokenizer,
            sampling=sampling,
            num_samples=cfg.eval.num_samples,
            key=build.seed_of(cfg.seed, 0, "eval"),
        )
    args.out.write_text("".join(json.dumps(record) + "\n" for record in result.prompts))
    sampled = ladder.Sampled.of(stock.drawn)
    logprobs, entropy = ladder.score(trained(args.run), sampled, temperature=sampling.temperature)
    apart = ladder.mismatch(logprobs, sampled.logprobs, np.ones_like(entropy), sampled.response)
    print(json.dumps(result.metrics | {f"stock/{name}": value for name, value in apart.items()}))


if __name__ == "__main__":
    main()
