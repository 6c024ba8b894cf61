# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Accuracy on the test split: of the base under every scheme of the ladder, and of a run's checkpoints.

    python -m experiments.alignment.assess --scale cpu --work runs/alignment --base
    python -m experiments.alignment.assess --scale cpu --work runs/alignment [RUN ...]

Splits. The training prompts, and what is held out by a hash of its question (`data.holdout`), have none in common. Of
the held-out prompts the first `eval.num_prompts` are the validation split, on which a run evaluates itself as it goes;
the test split are those after them, without any whose text occurs in the validation split.

Which checkpoint. *final*: the last. *selected*: that of the best validation accuracy (the earlier of two equal ones).
Each is evaluated in the precision its sampler has, and in bf16. All evaluations draw the same random numbers per prompt
and sample, and see the same prompts, so differences can be taken prompt by prompt.

A run that diverged (run.py's failed.json) is tested like any other; where it has no checkpoint, its last one is the
policy it started from, version 0. Runs that were sampled by vLLM are tested with the embedded sampler, as all are.

A run's result is <run>/test.json: {"final": {"version", "schemes": {"w4a16:g128": [correct responses per prompt]}},
"selected": ..., "num_samples": responses per prompt}; the base's is <work>/base_test.json, with "response_len" besides,
the mean tokens of its responses in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.alignment import arms
from qarl_jax import data, models
from qarl_jax.models import invariant_scaling
from qarl_jax.rollout import PolicyWeights
from qarl_jax.run import build, checkpoint, config, evaluation
from qarl_jax.run.config import RunConfig
from qarl_jax.types import Prompt, UserError, entry_point

LENGTH_TOLERANCE = 0.2
"""Share by which the base's mean response length may differ from the one that the bands are scaled to (PLAN.md)."""


def test_prompts(cfg: RunConfig, tokenizer: Any, count: int) -> list[Prompt]:
    """The first `count` prompts of the test split.

    Raises:
      UserError: there are fewer.
    """
    source = data.make_source(cfg.data, tokenizer, "heldout")
    validation = min(cfg.eval.num_prompts or len(source), len(source))
    seen = {source.prompt(i).text for i in range(validation)}
    out: list[Prompt] = []
    for i in range(validation, len(source)):
        prompt = source.prompt(i)
        if prompt.text not in seen:
            seen.add(prompt.text)
            out.append(prompt)
        if len(out) == count:
            return out
    raise UserError(f"the held-out split has {len(out)} different test prompts, not {count}: raise data.holdout.")


class Judge:
    """Evaluates weights under any scheme; programs are compiled once per scheme."""

    def __init__(self, cfg: RunConfig, scale: arms.Scale):
        self.cfg, self.scale = cfg, scale
        self.mesh = build.make_mesh(cfg)
        self.tokenizer = data.load_tokenizer(cfg.model.path)
        self.prompts = test_prompts(cfg, self.tokenizer, scale.test_prompts)
        self.stop = data.stop_token_ids(self.tokenizer, cfg.model.path)
        self.graphdef, self.params = build.load_model(cfg, self.mesh)
        self.engines: dict[str, Any] = {}
        self.learners: dict[str, Any] = {}

    def correct(self, params: Any, scheme: str, version: int) -> list[int]:
        """Correct responses of each test prompt, of `scale.test_samples`."""
        return _correct(self.measure(params, scheme, version))

    def measure(self, params: Any, scheme: str, version: int) -> evaluation.Evaluation:
        """`params` on the test prompts, `scale.test_samples` responses to each."""
        graphdef = models.with_scheme(self.graphdef, scheme, self.cfg.quant.group_size)
        if scheme not in self.engines:
            self.engines[scheme] = build.make_engine(self.cfg)
            self.learners[scheme] = build.make_learner(self.cfg, graphdef, self.mesh)
        engine, learner = self.engines[scheme], self.learners[scheme]
        engine.publish(PolicyWeights(graphdef=graphdef, params=params, qweights=learner.quantize(params)), version)
        sampling = dataclasses.replace(build.eval_sampling(self.cfg, self.stop), temperature=1.0)
        with contextlib.closing(build.make_grader(self.cfg)) as grader:
            return evaluation.evaluate(
                engine,
                self.prompts,
                grader,
                self.tokenizer,
                sampling=sampling,
                num_samples=self.scale.test_samples,
                key=build.seed_of(0, 0, "test"),
            )

    def run(self, folder: pathlib.Path) -> dict[str, Any]:
        """A run's checkpoints, in its sampler's precision and in bf16."""
        cfg = config.load(folder / "config.yaml")
        out: dict[str, Any] = {"num_samples": self.scale.test_samples}
        checkpoints = checkpoint.Checkpoints(folder / "checkpoints")
        failed = folder / "failed.json"
        diverged_at_once = failed.exists() and json.loads(failed.read_text())["checkpoint"] == 0
        saved = [0] if diverged_at_once else checkpoints.steps()
        for label, version in versions(evaluation.history(folder), saved).items():
            same = next((v for v in out.values() if isinstance(v, dict) and v["version"] == version), None)
            if same is None:
                if version == 0:
                    params = invariant_scaling.invariant_scaling(self.params, cfg.quant.uaq_scale)
                else:
                    params = checkpoints.restore({"params": self.params}, step=version).state["params"]
                schemes = dict.fromkeys((cfg.quant.rollout_scheme, "bf16"))
                same = {"version": version, "schemes": {s: self.correct(params, s, version) for s in schemes}}
            out[label] = same
        return out

    def close(self) -> None:
        """Lets go of the engines."""
        for engine in self.engines.values():
            engine.close()


def versions(history: Sequence[dict[str, Any]], saved: Sequence[int]) -> dict[str, int]:
    """Which checkpoints are evaluated. Example: {"final": 40, "selected": 30}.

    Args:
      history: a run's evaluations on the validation split.
      saved: its checkpoints.

    Raises:
      UserError: no checkpoint.
    """
    if not saved:
        raise UserError("the run has no checkpoint; its test accuracy cannot be measured any more.")
    scored = [(record["eval/reward/mean"], -record["version"]) for record in history if record["version"] in saved]
    return {"final": max(saved), "selected": -max(scored)[1] if scored else max(saved)}


def base_test(judge: Judge) -> dict[str, Any]:
    """The base under bf16 and under plain rounding to each rung's scheme, before any RL."""
    plain = judge.measure(judge.params, "bf16", 0)
    schemes = {scheme: judge.correct(judge.params, scheme, 0) for scheme in judge.scale.rungs}
    return {
        "num_samples": judge.scale.test_samples,
        "schemes": {"bf16": _correct(plain), **schemes},
        "response_len": plain.metrics["eval/response_len/mean"],
    }


def check_response_len(test: dict[str, Any], scale: arms.Scale) -> str:
    """Whether the bands are scaled to the length that the base's responses have, in words; the plan allows a fifth.

    Args:
      test: base_test.json. Those made by earlier versions do not say how long the responses are.

    Raises:
      UserError: the length is off by more than a fifth.
    """
    found, taken = test.get("response_len"), scale.response_len
    if found is None:
        return f"the base's mean response length is not known yet; the bands are scaled to {taken:g} tokens"
    if abs(found - taken) > LENGTH_TOLERANCE * taken:
        raise UserError(
            f"the base's responses have {found:.1f} tokens in the mean, more than {LENGTH_TOLERANCE:.0%} off the"
            f" {taken:g} that the bands are scaled to: set Scale.response_len of {scale.name!r} in"
            f" experiments/alignment/arms.py to {found:.1f} before the first RL run (PLAN.md, TBPO's bands)."
        )
    return f"the base's responses have {found:.1f} tokens in the mean; the bands are scaled to {taken:g}"


def _correct(result: evaluation.Evaluation) -> list[int]:
    return [int(record["num_correct"]) for record in result.prompts]


def write(path: pathlib.Path, value: dict[str, Any]) -> None:
    """Writes a JSON file, whole or not at all, whoever else writes it too."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(value) + "\n")
    fresh.replace(path)


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.alignment.assess", description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=sorted(arms.SCALES), default="gpu")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--base", action="store_true", help="evaluate the base under every scheme of the ladder")
    parser.add_argument("--prompts", type=int, help="test prompts (default: the scale's)")
    parser.add_argument("--samples", type=int, help="responses to each (default: the scale's)")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="overrides of the scale's config")
    parser.add_argument("runs", nargs="*", type=pathlib.Path)
    args = parser.parse_args(argv)
    scale = arms.SCALES[args.scale]
    prompts, samples = args.prompts or scale.test_prompts, args.samples or scale.test_samples
    scale = dataclasses.replace(scale, test_prompts=prompts, test_samples=samples)
    with contextlib.closing(Judge(config.load(scale.config, args.overrides), scale)) as judge:
        if args.base:
            write(args.work / "base_test.json", base_test(judge))
        for folder in args.runs:
            write(folder / "test.json", judge.run(folder))
            print(f"{folder}: tested", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
