# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Describes a run's plan in words, printed at its start: sizes, schedules and other derived numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from qarl_jax import quant
from qarl_jax.learning.critic import Config as CriticConfig
from qarl_jax.optim.build import OPTIMIZERS
from qarl_jax.quant.config import Config as QuantConfig
from qarl_jax.rollout.environments import ENVIRONMENTS
from qarl_jax.rollout.vllm import config as vllm
from qarl_jax.run import made
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import processes


def describe(cfg: RunConfig, prompts: Sequence[tuple[str, str]] = ()) -> str:
    """Formats the plan of a run as aligned lines of text. prompts: `Prompts.lines`, if the prompts are open."""
    samples = cfg.rollout.num_samples_per_prompt
    per_step, per_update = cfg.train.prompts_per_step, cfg.train.mini_batch_prompts
    schemes = cfg.quant.forward
    if cfg.quant.rollout_scheme != cfg.quant.forward:
        schemes = f"{cfg.quant.forward} in the learner, {cfg.quant.rollout_scheme} in the sampler"
    if cfg.quant.backward != "bf16":
        schemes += f"; gradients of linear layers in {cfg.quant.backward} codes"
    arm = _arm(cfg.quant)
    rows = "several responses each" if cfg.train.max_segments > 1 else "one response each"
    updates = f"{cfg.train.updates_per_step} updates per step ({cfg.train.update_epochs}x over its responses)"
    responses = cfg.train.steps * per_step * samples
    least, most = cfg.micro_batches_per_update
    passes = f"{most} per update" if least == most else f"{least} to {most} per update"
    mesh = ", ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(cfg.mesh).items() if size != 1)
    at_end = "at the end" if cfg.checkpoint.at_end else "when it is interrupted"
    saved = f"every {cfg.checkpoint.every} steps" if cfg.checkpoint.every else at_end
    lines = [
        ("scheme", schemes),
        *[("", text) for text in _trained_for(cfg)],
        *([("adapters", cfg.lora.words)] if cfg.lora is not None else []),
        *[("" if number else "note", text) for number, text in enumerate(arm)],
        ("step", f"{per_step} prompts x {samples} samples = {per_step * samples} responses"),
        ("update", f"{per_update} prompts x {samples} samples = {per_update * samples} responses; {updates}"),
        ("micro-batch", f"{cfg.micro_batch_rows} rows of {cfg.row_len} tokens, {rows}; {passes}"),
        ("run", f"{cfg.train.steps} steps = {cfg.train.total_updates} updates = {responses} responses"),
        ("lengths", f"prompt <= {cfg.data.prompt_limit}, response <= {cfg.rollout.max_response_len} tokens"),
        *[("" if number else "stages", text) for number, text in enumerate(_stages(cfg))],
        *[("" if number else "partial", text) for number, text in enumerate(_partial(cfg))],
        *[("ahead", text) for text in _ahead(cfg)],
        *[("environment", text) for text in _environment(cfg)],
        ("critic", "none" if cfg.critic is None else _critic_words(cfg.critic)),
        ("mesh", (mesh or "one device") + f"{', over the processes of all hosts' * cfg.distributed.is_on}"),
        *[("engines", text) for text in engines(cfg)],
        *(prompts or [("evaluation", cfg.eval.words())]),
        ("checkpoints", f"{saved}, {cfg.checkpoint.keep or 'all'} kept, in {cfg.run_dir}/checkpoints"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _trained_for(cfg: RunConfig) -> list[str]:
    """Warns in one line of a policy that `qat` trained for another grid than the sampler's, mostly in other groups."""
    sampler = quant.parse_scheme(cfg.quant.rollout_scheme, cfg.quant.group_size)
    grids = trained_grids(cfg.model.path)
    names = " and ".join(map(str, grids))
    wrong = grids and sampler not in grids
    return [f"the policy was trained for {names}, and is sampled in {sampler or 'bf16'}"] if wrong else []


def trained_grids(folder: str | os.PathLike[str]) -> list[quant.Scheme | None]:
    """Returns the schemes for which `qat` trained a model folder; empty if it did not make the folder."""
    trained = made.read_receipt(folder, "qat.json").get("config")
    if not trained:
        return []
    served = quant.parse_scheme(trained["stages"][-1])
    return [quant.at_width(served, bits) for bits in trained["widths"]] or [served]


def _arm(cfg: QuantConfig) -> list[str]:
    """Words the purpose of a run whose learner and sampler are different policies; empty where they are one (QaRL)."""
    learner, sampler = cfg.forward, cfg.rollout_scheme
    if quant.parse_scheme(learner, cfg.group_size) == quant.parse_scheme(sampler, cfg.group_size):
        return []
    if learner == "bf16":
        return [
            "learner and sampler are different policies by intent: quantized rollouts under an unquantized learner,",
            f"the baseline that QaRL is compared with. For QaRL set quant.forward={sampler}",
        ]
    purpose = (
        "a low-bit learner on an unquantized policy's samples"
        if sampler == "bf16"
        else "two low-bit policies on different grids"
    )
    return [
        f"learner and sampler are different policies by intent: {purpose}.",
        "The arm is a control: do low bits in the learner's forward help by themselves, or by being the sampler's?",
        "What the difference comes to is measured as mismatch/*.",
        f"For QaRL leave quant.rollout out, or set it to {learner}",
    ]


def _stages(cfg: RunConfig) -> list[str]:
    """A line per stage that the run reaches, and what changing costs."""
    if not cfg.rollout.stages:
        return []
    lines, begin = [], 0
    for end in [*(stage.until for stage in cfg.rollout.stages), cfg.train.steps]:
        end = min(end, cfg.train.steps)
        if begin < end:
            limit, row = cfg.rollout.max_response_len_at(begin), cfg.row_len_at(begin)
            samples = cfg.rollout.num_samples_at(begin)
            fewer = f", {samples} samples" if samples != cfg.rollout.num_samples_per_prompt else ""
            lines.append(f"steps {begin} to {end - 1}: response <= {limit} tokens, rows of {row}{fewer}")
            begin = end
    rows = len({cfg.row_len_at(step) for step in range(cfg.train.steps)})
    return [*lines, f"the learner's programs are compiled {rows} time{'s' * (rows > 1)}, once for each length of a row"]


def _partial(cfg: RunConfig) -> list[str]:
    partial = cfg.rollout.partial
    if not partial.is_on:
        return []
    per_step, chunk = cfg.train.prompts_per_step, partial.tokens(cfg.rollout.max_response_len)
    hand = f"{partial.groups(per_step)} prompts in hand"
    return [
        f"{hand}; a step ends when {per_step} are complete, which is looked at every {chunk} tokens",
        f"a group is trained on at most {partial.max_lag} steps after it was begun",
    ]


def _ahead(cfg: RunConfig) -> list[str]:
    ahead = cfg.train.asynchronous
    if not ahead.is_on:
        return []
    when = f"every {ahead.chunk} tokens" if ahead.chunk else "between batches"
    order = "by count: the run is a function of its config" if cfg.is_lockstep else "by the clock"
    return [f"sampling is at most {ahead.max_staleness} versions behind; new ones come in {when}, {order}"]


def engines(cfg: RunConfig) -> list[str]:
    """Describes, in at most one line, the vLLM engines of a run of several processes; empty for a run of one."""
    engine, hosts = cfg.rollout.engine, processes.planned(cfg.distributed)
    if not cfg.distributed.is_on or not isinstance(engine, vllm.Config):
        return []
    each = engine.started + len(engine.endpoints)
    requests = cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt
    if hosts == 1:
        return [f"{each} of each process; without distributed.num_processes the plan takes the run for one process"]
    return [f"{each} of each of {hosts} processes, which draws {-(-requests // hosts)} responses of a step"]


def _environment(cfg: RunConfig) -> list[str]:
    environment = cfg.rollout.environment
    if environment is None:
        return []
    name = next(name for name, cls in ENVIRONMENTS.items() if type(environment) is cls)
    return [f"{name}: at most {environment.max_turns} turns, in the tokens of a response"]


def _critic_words(cfg: CriticConfig) -> str:
    name = next(name for name, cls in OPTIMIZERS.items() if type(cfg.optimizer) is cls)
    waits = f"; the policy waits {cfg.warmup_steps} steps" if cfg.warmup_steps else ""
    learns = f", adapters of {cfg.lora.words}" if cfg.lora is not None else ""
    return f"from {cfg.path or 'the policy itself'}{learns}, {name} at lr {cfg.optimizer.lr:g}{waits}"
