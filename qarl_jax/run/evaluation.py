# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.evaluate FILE | --checkpoint RUN [setting ...]`: evaluates a policy on held-out data.

    python -m qarl_jax.evaluate --checkpoint runs/quickstart eval.num_samples=16 eval.temperature=1.0
    python -m qarl_jax.evaluate --config configs/quickstart.yaml --model Qwen/folder --scheme w8a8 --engine vllm --json
    python -m qarl_jax.evaluate --config configs/qwen25_coder_0p5b/bf16_grpo.yaml --suite gsm8k
    python -m qarl_jax.evaluate --checkpoint RUN --view difficulty,plan --base base.jsonl --json > RUN/views.jsonl

The policy is `model.path` (or --model) or a checkpoint of a run (--checkpoint RUN, or one step_* folder of it; the
config then defaults to the run's own). Data, number of samples and sampling are those of the config's `eval` section,
or of a public benchmark (--suite; see `suites.py`), and any of them can be overridden. Prints a table, or one JSON
object; --out FILE.jsonl holds one line per prompt with every response. `train.py` calls `evaluate` itself at the start,
the end and in between.

--view asks the same questions in several ways (`views.py`): by difficulty, with a plan, with facts.

What each number means, and how far it can be trusted: `run/estimators.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from qarl_jax import data
from qarl_jax.data import suites
from qarl_jax.data.sources.hints import pass_rates
from qarl_jax.learning.trainable import joined
from qarl_jax.observe.error_tokens import PROBABILITY
from qarl_jax.rewards import Grader, extract
from qarl_jax.rollout import PolicyWeights, RolloutEngine, SamplingConfig
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run import build, checkpoint, config, stamp, views
from qarl_jax.run.config import RunConfig
from qarl_jax.run.estimators import default_ks, effective, interval, maj_at_k, majority, pass_at_k, standard_error
from qarl_jax.run.rollout_config import ENGINE_CONFIGS
from qarl_jax.runtime import progress
from qarl_jax.types import Parser, Prompt, RolloutGroup, UserError, entry_point

FILES = ("eval.jsonl", "eval_correct.jsonl")  # of a run: see `record`
# Rewards that say whether an answer is right; the others shape it.
OWN = "own"  # among the names of --suite: the data of the config
VERIFIERS = ("exact", "math_verify", "reasoning_gym", "code", "python")


# ---- an evaluation -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The outcome of an evaluation.

    Attributes:
      metrics: name -> number (see `measure`).
      prompts: one record per prompt, JSON-ready: uid, id (the data set's own, if any), prompt, answer, num_correct,
        majority (the most frequent answer), majority_correct, and responses: text, answer (as extracted), reward,
        correct, finish_reason, length.
    """

    metrics: dict[str, float]
    prompts: list[dict[str, Any]]


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    grader: Grader,
    tokenizer: Any,
    *,
    sampling: SamplingConfig,
    num_samples: int,
    key: int,
) -> Evaluation:
    """Samples and grades `num_samples` responses to each prompt under the engine's published version.

    Args:
      key: seed of the draws, in [0, 2**63). tokenizer: the policy's, which decodes responses for the grader.
    """
    completions = engine.generate(prompts, num_samples=num_samples, sampling=sampling, key=key)
    with progress.task("grading"):
        groups, parts = grader.grade(tokenizer, prompts, completions)
    return measure(groups, parts, grader)


def measure(groups: Sequence[RolloutGroup], parts: dict[str, Float[np.ndarray, " n"]], grader: Grader) -> Evaluation:
    """Computes metrics and per-prompt records from graded responses, an equal number for every prompt.

    A response is correct if the reward's verifier (the first of `VERIFIERS` in a sum, or of its prompt's source) gives
    it 1 or more; without a verifier, if the total reward is 1 or more.

    Returns:
      Evaluation, with metrics: eval/reward/mean and eval/reward/best (mean over prompts of the best response);
      eval/avg_at_<n>, eval/pass_at_<k>, eval/maj_at_<k> (k > 1), each with `/low`, `/high` (`interval`) and `/stderr`
      (clustered by question; not of one), as has eval/reward; eval/response_len/mean (tokens), eval/truncated (share of
      responses without an end token), eval/no_answer (share that casts no vote), eval/error_tokens (share
      of tokens that were drawn though the policy gave them less than 0.001), eval/prompts, eval/different_prompts
      and eval/responses; eval/source/<part>/reward of each part of a mix.
    """
    rewards = np.array([group.rewards for group in groups], np.float64)
    num_samples = rewards.shape[1]
    scores, answers, by_part = rewards.copy(), [], dict[str, list[float]]()
    for number, group in enumerate(groups):
        own = (i for i in grader.terms_of(group.prompt) if grader.names[i].partition("#")[0] in VERIFIERS)
        verifier, settings = next(own, None), None
        if verifier is not None:
            scores[number] = np.reshape(parts[grader.names[verifier]], rewards.shape)[number]
            settings = getattr(grader.rewards[verifier], "cfg", None)
        answers.append([_answer(group, i, settings) for i in range(num_samples)])
        if (part := group.prompt.meta.get("mix_part")) is not None:
            by_part.setdefault(part, []).append(float(rewards[number].mean()))
    correct = scores >= 1.0
    votes = [[_vote(answer) for answer in row] for row in answers]

    questions = [(group.prompt.text, group.prompt.answer) for group in groups]
    asked = effective(questions)

    def mean(name: str, per_prompt: Float[np.ndarray, " P"], suffix: str = "") -> dict[str, float]:
        low, high = interval(per_prompt, asked, num_samples)
        found = {f"{name}{suffix}": float(per_prompt.mean()), f"{name}/low": low, f"{name}/high": high}
        if (error := standard_error(per_prompt, questions)) is not None:
            found[f"{name}/stderr"] = error
        return found

    flat = [completion for group in groups for completion in group.completions]
    num_correct = correct.sum(1)
    metrics = {
        **mean("eval/reward", rewards.mean(1), suffix="/mean"),
        "eval/reward/best": float(rewards.max(1).mean()),
        "eval/response_len/mean": float(np.mean([c.drawn.sum() for c in flat])),
        "eval/truncated": float(np.mean([c.finish_reason != "stop" for c in flat])),
        "eval/no_answer": float(np.mean([vote is None for row in votes for vote in row])),
        "eval/error_tokens": float(np.mean(np.concatenate([c.logprobs[c.drawn] for c in flat]) < np.log(PROBABILITY))),
        "eval/prompts": float(len(groups)),
        "eval/different_prompts": float(len(set(questions))),
        "eval/responses": float(len(flat)),
        **mean(f"eval/avg_at_{num_samples}", num_correct / num_samples),
        **{f"eval/source/{part}/reward": float(np.mean(values)) for part, values in by_part.items()},
    }
    for k in default_ks(num_samples):
        metrics |= mean(f"eval/pass_at_{k}", pass_at_k(num_correct, num_samples, k))
        if k > 1:
            metrics |= mean(f"eval/maj_at_{k}", maj_at_k(votes, correct, k))
    records = [_record(group, answers[i], votes[i], [bool(x) for x in correct[i]]) for i, group in enumerate(groups)]
    return Evaluation(metrics=metrics, prompts=records)


def over_widths(
    widths: Sequence[int],
    result: Evaluation,
    sampled: Callable[[], Evaluation],
    at_width: Callable[[int], contextlib.AbstractContextManager[None]],
) -> Evaluation:
    """Adds to an evaluation the metrics of slices (`eval.widths`): eval_w8/... is eval/... at eight bits.

    Args:
      sampled: evaluates the served policy. at_width: serves the slice of a number of bits inside the block.
    """
    metrics = dict(result.metrics)
    for bits in widths:
        with at_width(bits):
            found = sampled().metrics
        metrics |= {name.replace("eval/", f"eval_w{bits}/", 1): value for name, value in found.items()}
    return dataclasses.replace(result, metrics=metrics)


def of_width(bits: int, metrics: dict[str, float]) -> dict[str, float]:
    """Picks the metrics of a slice, under the names that they have without `over_widths`."""
    start = f"eval_w{bits}/"
    return {f"eval/{name.removeprefix(start)}": x for name, x in metrics.items() if name.startswith(start)}


def _answer(group: RolloutGroup, index: int, settings: Any) -> str | None:
    """The answer of a response, looked for where the verifier looks; none where it would not grade what is there."""
    unfinished = group.completions[index].finish_reason != "stop"
    if unfinished and getattr(settings, "truncated", "score") == "zero":
        return None
    return extract.extract(group.graded[index], getattr(settings, "extract", "auto"))


def _vote(answer: str | None) -> Hashable | None:
    """Returns the vote of an answer: numbers by value, everything else as normalised text."""
    if answer is None:
        return None
    text = extract.normalize(answer)
    value = extract.number(text)
    return text if value is None else value


def _record(
    group: RolloutGroup, answers: Sequence[str | None], votes: Sequence[Hashable | None], correct: Sequence[bool]
) -> dict[str, Any]:
    chosen = majority(votes)
    return {
        "uid": group.prompt.uid,
        "id": group.prompt.meta.get("id"),
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "num_correct": sum(correct),
        "majority": None if chosen is None else answers[chosen],
        "majority_correct": chosen is not None and correct[chosen],
        "responses": [
            {
                "text": text,
                "answer": answer,
                "reward": float(reward),
                "correct": right,
                "finish_reason": completion.finish_reason,
                "length": len(completion.tokens),
            }
            for text, answer, reward, right, completion in zip(
                group.texts, answers, group.rewards, correct, group.completions, strict=True
            )
        ],
    }


# ---- the evaluations of a run --------------------------------------------------------------------------------------


def history(run_dir: str | os.PathLike[str], up_to: int | None = None) -> list[dict[str, Any]]:
    """Reads a run's evaluations, oldest first: records with `version` and the metrics of `evaluate`.

    Args:
      up_to: first delete records of later versions from both files (a run resumes at this version); None: only read.
    """
    records, _ = (_records(Path(run_dir) / name, up_to) for name in FILES)
    return records


def _records(path: Path, up_to: int | None) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line torn by a kill
            records.append(json.loads(line))
    if up_to is not None:
        records = [record for record in records if record["version"] <= up_to]
        fresh = path.with_name(path.name + ".new")  # the old file stands until the new one is complete
        fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
        fresh.replace(path)
    return records


def record(run_dir: str | os.PathLike[str], version: int, result: Evaluation) -> None:
    """Appends an evaluation of policy `version` to `FILES`: its metrics, and each prompt's correct responses by uid."""
    correct = {prompt["uid"]: prompt["num_correct"] for prompt in result.prompts}
    of_version: dict[str, Any] = {"version": version}
    for name, line in zip(FILES, (of_version | result.metrics, of_version | {"num_correct": correct}), strict=True):
        with (Path(run_dir) / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


# ---- command line --------------------------------------------------------------------------------------------------


def run(
    cfg: RunConfig,
    *more: RunConfig,
    source: str | None = None,
    scheme: str | None = None,
    check: Callable[[int, Sequence[Prompt]], None] | None = None,
) -> Iterator[tuple[Evaluation, int]]:
    """Evaluates one policy, once for each config. Model and engine come from the first config and start once.

    A config's `eval.widths` are evaluated after its own width, unless a scheme is given.

    Args:
      cfg: gives model, rollout engine, reward and `eval` section. more: configs with other rewards and `eval` sections.
      source: run folder or step folder to take the weights from; None: `model.path`.
      scheme: the sampler's scheme for every weight; None: the config's (quant.rollout, quant.rules).
      check: called with each config's number and prompts before the model is loaded; may refuse them.

    Yields:
      (evaluation, version of the evaluated policy; 0 for `model.path`), as each is ready.

    Raises:
      UserError: `source` has no checkpoint, or a config's model, data, reward or engine is unusable.
    """
    with contextlib.ExitStack() as stack:
        found = None if source is None else checkpoint.find(source)
        saved = None if source is None else stamp.of(source)
        stamp.check_adapters(cfg, saved)
        mesh = build.make_mesh(cfg)
        tokenizer = data.load_tokenizer(cfg.model.path)
        asked = [build.eval_prompts(each, tokenizer, _say) for each in (cfg, *more)]
        if check is not None:
            for number, prompts in enumerate(asked):
                check(number, prompts)
        limits = [build.eval_sampling(each, ()).max_response_len for each in (cfg, *more)]
        lengths = [len(p.tokens) + limit for each, limit in zip(asked, limits, strict=True) for p in each]
        cfg = with_room(cfg, max(lengths, default=0))
        # Nothing is trained: there are no learners of other widths.
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, widths=()))
        graders = [stack.enter_context(contextlib.closing(build.make_grader(each))) for each in (cfg, *more)]
        numerics = None if source is None else stamp.learner_numerics(cfg, saved)
        graphdef = build.policy_graphdef(cfg, numerics, scheme)
        if scheme is None:
            graphdef = build.rollout_graphdef(cfg, graphdef)
        learner = build.make_learner(cfg, graphdef, mesh)
        params, frozen = build.load_policy(cfg, learner, restored=found is not None)
        if frozen is not None:
            learner.hold(frozen)
        version = 0
        if found is not None:
            restored = found[0].restore({"params": params}, step=found[1])
            params, version = restored.state["params"], restored.step
        engine = stack.enter_context(contextlib.closing(build.make_engine(cfg, _say)))

        publish = functools.partial(_publish, engine, version, params)
        publish(own := (learner.graphdef, learner.quantize(params)))

        @contextlib.contextmanager
        def at_width(bits: int) -> Iterator[None]:
            publish(build.at_width(learner, learner.graphdef, params, bits))
            yield
            publish(own)

        stop = data.stop_token_ids(tokenizer, cfg.model.path)
        for each, prompts, grader in zip((cfg, *more), asked, graders, strict=True):
            sampling = build.eval_sampling(each, stop)
            widths = () if scheme else each.other_widths["eval"]
            count = len(prompts) * each.eval.num_samples * (1 + len(widths))
            _say(f"sampling {count} responses of at most {sampling.max_response_len} tokens")  # silence follows
            sampled = functools.partial(
                evaluate,
                engine,
                prompts,
                grader,
                tokenizer,
                sampling=sampling,
                num_samples=each.eval.num_samples,
                key=build.seed_of(each.seed, 0, "eval"),
            )
            yield over_widths(widths, sampled(), sampled, at_width), version


def _publish(engine: RolloutEngine, version: int, params: Any, quantized: tuple[Any, Any]) -> None:
    """Publishes masters with the (graphdef, qweights) that they were quantized to."""
    params, qweights = joined(params, quantized[1])
    engine.publish(PolicyWeights(graphdef=quantized[0], params=params, qweights=qweights), version)


def with_room(cfg: RunConfig, longest: int) -> RunConfig:
    """Raises `max_model_len` of a vLLM that the run starts to `longest` tokens, if the config has fewer."""
    engine = cfg.rollout.engine
    if not isinstance(engine, VllmConfig) or engine.endpoints or not 0 < engine.max_model_len < longest:
        return cfg
    _say(f"rollout.engine.max_model_len={longest} for the longest prompt and response, not {engine.max_model_len}")
    engine = dataclasses.replace(engine, max_model_len=longest)
    return dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, engine=engine))


def table(metrics: dict[str, float]) -> str:
    """Formats the metrics as a table in text."""
    rows = [("", "mean", "stderr", "95 %")]

    def add(label: str, key: str, spec: str = ".4f") -> None:
        name = key.removesuffix("/mean")
        error, low, high = (metrics.get(f"{name}/{part}") for part in ("stderr", "low", "high"))
        between = "" if low is None or high is None else f"{low:{spec}} to {high:{spec}}"
        rows.append((label, format(metrics[key], spec), "" if error is None else format(error, spec), between))

    add("reward", "eval/reward/mean")
    add("best reward", "eval/reward/best")
    for key in metrics:
        name, _, k = key.removeprefix("eval/").partition("_at_")
        if k.isdigit():
            add(f"{name}@{k}", key)
        elif key.startswith("eval/difficulty_") and key.count("/") == 1:
            add(f"solved <={key.rpartition('_')[2]}%", key)
    add("response length", "eval/response_len/mean", ".1f")
    add("truncated", "eval/truncated")
    add("no answer", "eval/no_answer")
    return "\n".join(f"{label:<16}{mean:>10}{error:>10}{between:>20}".rstrip() for label, mean, error, between in rows)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _config(args: argparse.Namespace, suite: str | None, view: str) -> RunConfig:
    """The config of --config, else that of the run of --checkpoint, with every override.

    A run's limit on responses takes the place of a suite's shorter one.
    """
    overrides = [f"model.path={args.model}"] if args.model else []
    overrides += [f"rollout.engine.name={args.engine}"] if args.engine else []
    if suite:
        name, _, preset = suite.partition(":")
        overrides += suites.overrides(name, args.suite_data, preset or args.preset)
        if dropped := [override for override in args.overrides if override.startswith(("eval=", "eval.data="))]:
            raise UserError(
                f"{dropped[0]} would replace the questions and settings of --suite {name}",
                "override their single fields, as in eval.max_response_len=64.",
                ": ",
            )
    overrides += [*views.overrides(view), *args.overrides]
    if args.config:
        if not (args.checkpoint or args.model) and Path(args.config, "run.json").exists():
            raise UserError(
                f"{args.config} is a run: --checkpoint {args.config} evaluates its policy, and"
                f" {Path(args.config, 'config.yaml')} the model that it began with."
            )
        cfg = config.load(args.config, overrides)
    elif args.checkpoint:
        cfg, saved = stamp.config_of(args.checkpoint, overrides), stamp.of(args.checkpoint)
        assert saved is not None
        share = saved["config"]["data"]["holdout"]
        if cfg.eval.data is None and cfg.data.holdout > share:
            raise UserError(
                f"data.holdout={cfg.data.holdout:g} is above the run's {share:g}, and so holds prompts that it was"
                " trained on; lower it, or name other data in eval.data."
            )
    else:
        raise UserError("give --config FILE, --checkpoint RUN or both: nothing says what to evaluate on.")
    if suite and not any(override.startswith("eval.max_response_len=") for override in args.overrides):
        limit = max(cfg.eval.max_response_len, cfg.rollout.max_response_len)
        cfg = config.replaced(cfg, {"eval.max_response_len": limit})
    return cfg


def _out(path: Path | None, *several: str) -> Path | None:
    """Names the file of responses: --out, with the suite or view before its ending where there are several."""
    if path is None:
        return path
    return path.with_name(".".join([path.stem, *(name.replace(":", "_") for name in several)]) + path.suffix)


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = Parser(
        "evaluate", config="as for train; default: the run's of --checkpoint", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--checkpoint", help="a run folder, or one step_* of it; default: model.path itself")
    parser.add_argument("--model", help="Hugging Face folder, instead of model.path")
    parser.add_argument("--scheme", help="evaluate under this scheme, e.g. bf16 or w8a8; default: the config's")
    parser.add_argument("--engine", choices=sorted(ENGINE_CONFIGS), help="sample with this engine")
    parser.add_argument(
        "--suite",
        default=OWN,
        metavar="NAME[:PRESET][,...]",
        help=f"public benchmarks ({', '.join(suites.SUITES)}), or `{OWN}`: the config's own data, the default",
    )
    parser.add_argument("--suite-data", metavar="FILE", help="the questions of one suite, where `make data` has none")
    parser.add_argument("--preset", default="greedy", choices=suites.PRESETS, help="how suites sample that do not say")
    parser.add_argument(
        "--view", default="plain", metavar="NAME[,...]", help=f"ways to ask the questions: {', '.join(views.VIEWS)}"
    )
    parser.add_argument(
        "--base", metavar="FILE.jsonl", help="with --view difficulty: the base policy's --out for the same questions"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object (a line for each suite and view)")
    parser.add_argument(
        "--out", metavar="FILE.jsonl", help="write one line per prompt, with its responses; FILE.SUITE.jsonl if several"
    )
    args = parser.parse_args(argv)
    names = [None if name == OWN else name for name in args.suite.split(",")]
    if args.suite_data and len(names) > 1:
        raise UserError(
            f"--suite-data {args.suite_data} holds the questions of one suite, and {len(names)} are asked for."
        )
    asked = [(name, view) for name in names for view in args.view.split(",")]
    cfgs = [_config(args, name, view) for name, view in asked]
    if ("difficulty" in args.view.split(",")) != bool(args.base):
        raise UserError(
            "--view difficulty and --base FILE.jsonl go together: the base policy's responses say the level."
        )
    rates = pass_rates(args.base) if args.base else {}
    out = None if args.out is None else Path(args.out).absolute()
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out {out}: not a file in a folder that exists.")

    def check(number: int, prompts: Sequence[Prompt]) -> None:
        if asked[number][1] == "difficulty":
            views.check([prompt.text for prompt in prompts], rates)

    results = run(*cfgs, source=args.checkpoint, scheme=args.scheme, check=check)
    for (name, view), cfg, (result, version) in zip(asked, cfgs, results, strict=True):
        file = _out(out, *[name or OWN] * (len(names) > 1), *[view] * (len(asked) > len(names)))
        if file is not None:
            try:
                file.write_text("".join(json.dumps(record) + "\n" for record in result.prompts))
            except OSError as error:
                raise UserError(f"--out {file}: cannot be written ({error.strerror or error}).") from None
        levels = views.by_difficulty(result.prompts, rates) if view == "difficulty" else {}
        if args.json:
            said = ({"suite": name} if name else {}) | ({} if view == "plain" else {"view": view})
            print(json.dumps(said | result.metrics | levels), flush=True)
            continue
        e = cfg.eval
        policy = f"{args.checkpoint} version {version}" if args.checkpoint else cfg.model.path
        print(f"policy   {policy}, {args.scheme or cfg.quant.rollout_scheme}, engine {cfg.rollout.engine_name}")
        print(
            f"data     {f'{name}, ' if name else ''}{len(result.prompts)} prompts x {e.num_samples} samples,"
            f" temperature {e.temperature:g}, top_p {e.top_p:g}, at most"
            f" {e.max_response_len or cfg.rollout.max_response_len} tokens\n"
        )
        if view != "plain":
            print(f"view     {view}\n")
        print(table(result.metrics | levels))
        for bits in () if args.scheme else cfg.other_widths["eval"]:
            print(f"\nat {bits} bits\n{table(of_width(bits, result.metrics))}")
    return 0
