# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a run's objects from a RunConfig, for `train`, `evaluate`, `export` and notebooks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qarl_jax import data, models, quant, rollout
from qarl_jax.data.sources import mix
from qarl_jax.learning import pieces
from qarl_jax.learning.critic import Critic, body_config, init_params, of_policy
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.learning.lora import Config as LoraConfig
from qarl_jax.loss import get_term, loss_from_config
from qarl_jax.models import invariant_scaling
from qarl_jax.models.params import united
from qarl_jax.optim import build, leafwise
from qarl_jax.quant.schemes import nested_grid
from qarl_jax.rewards import Grader
from qarl_jax.rollout import RolloutEngine, SamplingConfig
from qarl_jax.rollout.asynchronous import Schedule, SharedEngine
from qarl_jax.rollout.turns import TurnTaking
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run import estimators
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import mesh as sharding
from qarl_jax.runtime import processes
from qarl_jax.types import UserError


def seed_of(seed: int, step: int, purpose: str) -> int:
    """Derives a seed in [0, 2^63) from (run seed, step, purpose) alone."""
    words = np.random.SeedSequence([seed, step, zlib.crc32(purpose.encode())]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def leave_memory_to_vllm(cfg: RunConfig) -> None:
    """Turns off JAX's memory preallocation if the run samples with vLLM. Call it before JAX's first use."""
    if cfg.rollout.engine_name == "vllm":
        vllm.leave_memory_to_vllm()


def make_mesh(cfg: RunConfig) -> Mesh:
    """Makes the device mesh of `cfg.mesh`.

    Raises:
      UserError: as `mesh.make_mesh`; or the mesh of a run of several processes leaves devices out.
    """
    leave_memory_to_vllm(cfg)
    mesh = sharding.make_mesh(**dataclasses.asdict(cfg.mesh))
    if processes.count() > 1 and mesh.size < jax.device_count():
        raise UserError(
            f"the mesh has {mesh.size} devices, but the {processes.count()} processes have {jax.device_count()}"
            " together, and each must have its place: set one axis to -1 (all that are left)."
        )
    return mesh


def schemes(cfg: RunConfig, fallback: str) -> list[dict[str, str]]:
    """Returns `quant.rules` plus a rule that gives other layers the scheme `fallback`, for `models.parse_rules`."""
    return [*(dataclasses.asdict(rule) for rule in cfg.quant.rules), {"match": "", "scheme": fallback}]


def model_config(
    cfg: RunConfig, scheme: str, numerics: quant.Numerics | None = None, attention: str = "auto"
) -> models.ModelConfig:
    """Makes the policy's model config under `quant.rules` and `scheme`, from config.json. numerics: None: `cfg`'s.

    With `lora`, layers that the base's folder leaves unquantized stay in bf16, unless a rule of `quant.rules` matches.

    Raises:
      UserError: no such model folder, a rule for no weight, or a low-bit backward of a MoE model.
    """
    made = models.read_config(
        cfg.model.path,
        compute_dtype=cfg.model.dtype,
        param_dtype=cfg.model.param_dtype,
        quant=models.parse_rules(schemes(cfg, scheme), cfg.quant.group_size),
        numerics=numerics or cfg.numerics,
        attention=attention,
        lora=None if cfg.lora is None else cfg.lora.adapters,
        remat=cfg.model.remat_or_full,
    )
    if cfg.quant.backward != "bf16" and made.moe is not None:
        raise UserError(
            f"quant.backward={cfg.quant.backward} has no products of experts, and {cfg.model.path} is a MoE model: set"
            " quant.backward=bf16."
        )
    names = models.module_names(made) if cfg.quant.rules else ()
    for number, rule in enumerate(cfg.quant.rules):
        if not any(re.search(rule.match, name) for name in names):
            raise UserError(
                f"quant.rules[{number}]: {rule.match!r} is found in no name of {cfg.model.path}'s weights; layer 0 has"
                f" {', '.join(name for name in names if '.layers.0.' in name)[:300]}."
            )
    return made if cfg.lora is None else made.with_ignored


def check_backward(cfg: RunConfig) -> None:
    """Rounds some numbers on this host's first device, as the gradients of `quant.backward` are.

    Raises:
      UserError: a code is wrong.
    """
    form = cfg.quant.backward
    if form == "bf16":
        return
    leave_memory_to_vllm(cfg)
    numerics = dataclasses.replace(quant.PLAIN, own_kernels=cfg.quant.kernels == "auto")
    wrong, rounded = quant.misrounded(form, numerics)
    if wrong:
        raise UserError(
            f"quant.backward={form}: {wrong:,} of {rounded:,} numbers are rounded wrongly on this device, by a fault of"
            f" its compiler (jax {jax.__version__}): set quant.backward=bf16."
        )


def policy_graphdef(cfg: RunConfig, numerics: quant.Numerics | None = None, scheme: str | None = None) -> Any:
    """Makes the policy's graphdef (the model's static half) under `quant.forward`, from config.json alone.

    Args:
      numerics: the learner's arithmetic; None: the config's.
      scheme: of every weight; None: `quant.forward` and `quant.rules`.

    Raises:
      UserError: config.json is missing or unsupported, a frozen weight was released under another scheme, or
        `rollout.router_replay` is on and the model is no MoE model.
    """
    numerics = dataclasses.replace(
        numerics or cfg.numerics, own_kernels=cfg.quant.kernels == "auto", shards=cfg.numerics.shards
    )
    model = model_config(cfg, cfg.quant.forward, numerics, cfg.model.attention)
    models.check_released(model, lambda path: not cfg.trainable.learns(path))
    if cfg.rollout.router_replay and model.moe is None:
        raise UserError(
            f"rollout.router_replay=true, but {cfg.model.path} is no MoE model: there is no routing to replay."
        )
    if scheme is not None:
        return models.with_scheme(model, scheme, cfg.quant.group_size)
    return models.split(models.abstract_model(model))[0]


def load_policy(cfg: RunConfig, learner: Learner, *, restored: bool = False) -> tuple[Any, Any]:
    """Loads the initial policy onto the mesh. Returns (masters, frozen weights), as `Learner.init` takes them.

    restored: a checkpoint's masters replace these, so that adapters are fresh and nothing reads `lora.init`.
    """
    config, mesh = learner.config, learner.mesh
    lora = dataclasses.replace(cfg.lora, init=None) if cfg.lora is not None and restored else cfg.lora
    adapters = None if lora is None else _adapters(lora, config, mesh, seed_of(cfg.seed, 0, "adapters"))
    if cfg.model.init == "random":
        seed = seed_of(cfg.seed, 0, "masters") % 2**32
        params, frozen = learner.read(functools.partial(models.random_leaves, seed=seed))
    else:
        params, frozen = learner.read(models.read_masters, cfg.model.path)
    if adapters is not None:
        return united(adapters, params), frozen
    return invariant_scaling.invariant_scaling(params, cfg.quant.uaq_scale), frozen


def _adapters(lora: LoraConfig, config: models.ModelConfig, mesh: Mesh, seed: int) -> Any:
    """The adapters that a policy or a critic starts with."""
    fresh = models.fresh_adapters(config, mesh, seed % 2**32)
    return fresh if lora.init is None else models.read_peft(lora.init, config, fresh)


def compile_ahead(cfg: RunConfig, learner: Learner, step: int) -> list[jax.stages.Compiled]:
    """Compiles the learner's programs of a step before the first call; see `Learner.compile_ahead`."""
    moe = learner.config.moe
    return learner.compile_ahead(
        cfg.micro_batch_rows,
        cfg.row_len_at(step),
        scored=cfg.train.updates_per_step > 1,
        routed=(learner.config.num_layers, moe.num_experts_per_tok) if moe and cfg.rollout.router_replay else None,
    )


def rollout_graphdef(cfg: RunConfig, graphdef: Any) -> Any:
    """Returns the model under `quant.rollout`; the learner's graphdef itself if both schemes are equal (QaRL)."""
    if cfg.quant.rollout_scheme == cfg.quant.forward:
        return graphdef
    return models.with_scheme(graphdef, schemes(cfg, cfg.quant.rollout_scheme), cfg.quant.group_size)


def at_width(learner: Learner, graphdef: Any, params: Any, bits: int) -> tuple[Any, Any]:
    """Quantizes masters to `bits` bits of the nested grid of `graphdef`. Returns (graphdef to publish, qweights)."""
    narrow = models.at_width(graphdef, bits)
    qweights = learner.quantizer(narrow)(params)
    rules = models.config_of(graphdef).quant
    if rules.at_width(8) != rules:
        return narrow, qweights
    with sharding.launch_lock(learner.mesh.size):  # arrays keep the shapes that a vLLM has room for
        return graphdef, jax.tree.map(nested_grid.filled, qweights, is_leaf=lambda x: isinstance(x, quant.QTensor))


def make_learner(cfg: RunConfig, graphdef: Any, mesh: Mesh) -> Learner:
    """Makes the learner with the run's loss and optimizer, and under `train.widths` a learner for each other width."""
    widths = max(1, len(cfg.train.widths))
    options = Options(
        temperature=cfg.rollout.temperature,
        logprob_chunk=cfg.train.logprob_chunk,
        grad_dtype=cfg.train.grad_dtype_or_float32,
        one_program=cfg.one_program,
        offload=cfg.optimizer.offload is True,
        max_segments=cfg.train.max_segments,
        entropy_coef=cfg.train.entropy_coef,
        kl_coef=cfg.kl.coef * widths,  # at the width of quant.forward alone, and `share` divides it
        kl=get_term("kl", kind=cfg.kl.kind, aggregation=cfg.kl.aggregation),
        diagnostics=True,
        backward=cfg.quant.backward,
        token_logprobs=bool(cfg.log.samples_per_step and cfg.log.sample_tokens),
        share=1 / widths,
    )
    make = functools.partial(
        Learner,
        loss_fn=loss_from_config(cfg.loss, max_response_len=cfg.rollout.max_response_len),
        optimizer=leafwise.Optimizer(cfg.optimizer, cfg.policy_updates),
        schedule=build.make_schedule(cfg.optimizer.lr, cfg.optimizer.schedule, cfg.policy_updates),
        mesh=mesh,
        trainable=cfg.trainable,
    )
    theirs = dataclasses.replace(options, kl_coef=0.0, diagnostics=False, token_logprobs=False)
    beside = {f"w{bits}": make(models.at_width(graphdef, bits), options=theirs) for bits in cfg.other_widths["train"]}
    return make(graphdef, options=options, beside=beside)


def critic_body(cfg: RunConfig, policy: models.ModelConfig) -> models.ModelConfig:
    """Makes the model config of the critic's transformer body; reads no weights.

    Raises:
      UserError: `critic.path` is no model folder, or its vocabulary is smaller than the policy's.
    """
    assert cfg.critic is not None
    dtype, lora = cfg.critic.dtype or cfg.model.dtype, None if cfg.critic.lora is None else cfg.critic.lora.adapters
    if cfg.critic.path is None:
        if policy.splitting is not None:
            raise UserError("a critic cannot begin as a policy whose channels are split: name a folder as critic.path.")
        return body_config(policy, dtype, lora, shared=cfg.lora is not None)
    own = models.read_config(cfg.critic.path, remat=cfg.model.remat_or_full, attention=cfg.model.attention)
    if own.vocab_size < policy.vocab_size:
        raise UserError(
            f"critic.path={cfg.critic.path} has a vocabulary of {own.vocab_size} tokens, the policy one of"
            f" {policy.vocab_size}; a critic reads the policy's tokens, so take a model of the same family."
        )
    return body_config(own, dtype, lora)


def make_critic(cfg: RunConfig, graphdef: Any, params: Any, frozen: Any, mesh: Mesh) -> Critic | None:
    """Makes the run's critic; None without one.

    Args:
      graphdef, params, frozen: the initial policy (`load_policy`), which the critic copies without `critic.path`.
    """
    if cfg.critic is None:
        return None
    config, trainable = critic_body(cfg, models.config_of(graphdef)), cfg.critic.trainable
    if cfg.critic.path is None:
        params, frozen = of_policy(trainable, config, params, frozen, mesh)
    else:
        read: Any = functools.partial(models.read_masters, cfg.critic.path)
        if config.released.rules:  # decoded, because the critic computes without codes
            read = lambda body, mesh, frozen: models.read_masters(cfg.critic.path, body, mesh)  # noqa: E731
        params, frozen = pieces.read(trainable, config, mesh, read)
    if cfg.critic.lora is not None:
        params = united(params, _adapters(cfg.critic.lora, config, mesh, seed_of(cfg.seed, 0, "critic's adapters")))
    chosen, updates = cfg.critic.optimizer, cfg.train.total_updates
    return Critic(
        config,
        init_params(params, config.hidden_size),
        frozen,
        term=get_term("value", clip=cfg.critic.clip),
        advantage=cfg.advantage,
        optimizer=leafwise.Optimizer(chosen, updates),
        schedule=build.make_schedule(chosen.lr, chosen.schedule, updates),
        mesh=mesh,
        max_segments=cfg.train.max_segments,
        offload=chosen.offload is True,
    )


def make_grader(cfg: RunConfig) -> Grader:
    """Makes the grader that computes the run's rewards."""
    return Grader(cfg.reward, max_response_len=cfg.rollout.max_response_len)


def holds_base_once(cfg: RunConfig, devices: int) -> bool:
    """Tells whether learner and engine share one copy of the run's frozen base where possible (`vllm.one_base`).

    They do for adapters with one learner device and one vLLM on it, started by the run. With
    `rollout.engine.transport=host` each holds a copy.

    Args:
      devices: number of devices of the learner's mesh.
    """
    engine = cfg.rollout.engine
    if not isinstance(engine, VllmConfig) or cfg.lora is None or cfg.critic is not None:
        return False
    there = engine.engine == "vllm" and engine.started == 1 and not engine.endpoints and not engine.has_own_gpu
    plain = engine.arithmetic == "batch_invariant" and engine.tensor_parallel_size == 1 and engine.transport != "host"
    alone = devices == 1 and processes.planned(cfg.distributed) == 1
    return there and plain and alone and cfg.quant.rollout_scheme == cfg.quant.forward


def make_schedule(cfg: RunConfig) -> Schedule | None:
    """Makes the schedule of asynchronous training; None for a synchronous run."""
    ahead = cfg.train.asynchronous
    return Schedule(ahead.max_staleness, cfg.is_lockstep, cfg.train.steps) if ahead.is_on else None


def make_engine(
    cfg: RunConfig, log: Callable[[str], None] = print, schedule: Schedule | None = None, log_file: str = ""
) -> RolloutEngine:
    """Makes the rollout engine. `log`: called with a line on each new bridge. `schedule`: for use by two threads.

    log_file: file for the output of the bridges that it starts.

    In a run of several processes each starts its engines, on its GPUs if the config names none. Processes other than
    the first print to standard error and write a separate log.

    The run's id is a hash of its folder: a bridge accepts a resumed trainer of the run, and refuses a second run.
    """
    options: dict[str, Any] = {}
    engine = cfg.rollout.engine
    if cfg.rollout.engine_name == "vllm":
        engine = dataclasses.replace(
            engine,
            record_routing=cfg.rollout.router_replay or engine.record_routing,
            log_file=log_file,
        )
        if processes.count() > 1 and not engine.visible_gpus and engine.started:
            own = gpu_staging.own_gpus(engine.started, engine.tensor_parallel_size)
            engine = dataclasses.replace(engine, visible_gpus=own, shares_gpus=True)
        if not processes.is_first():
            place = f"process {processes.number()}"
            log = functools.partial(print, f"{place}:", file=sys.stderr, flush=True)
            named = engine.log_file and f"{engine.log_file}.{place.replace(' ', '')}"
            engine = dataclasses.replace(engine, log_file=named)
        folder = os.path.abspath(cfg.run_dir)
        options = {"run_id": hashlib.blake2b(folder.encode(), digest_size=8).hexdigest(), "log": log}
    made = rollout.make_engine(cfg.rollout.engine_name, engine, **options)
    if schedule is not None:
        made = SharedEngine(made, schedule, cfg.train.asynchronous.chunk)
    if cfg.rollout.environment is None:
        return made
    try:
        tokenizer = data.load_tokenizer(cfg.model.path)
        chat = cfg.data.template == "chat"
        return TurnTaking(made, cfg.rollout.environment, tokenizer, chat=chat, chat_args=cfg.data.chat_args, log=log)
    except BaseException:
        made.close()
        raise


HINT_LEN = 1024
"""Tokens by which a hint may exceed the longest prompt in an evaluation, which gives the engine room for it."""


def eval_prompts(cfg: RunConfig, tokenizer: Any, say: Callable[[str], None] = lambda text: None) -> list[Any]:
    """Lists the first `eval.num_prompts` evaluation prompts (all if that is 0 or there are fewer).

    Of a mix these are the first prompts of each part, in proportion to its size.

    Args:
      say: called with remarks for the user, as on prompts left out.

    Raises:
      UserError: there is no prompt, or `eval.data` and the run's environment differ in template or chat_args.
    """
    if cfg.eval.data is not None:
        of_prompts, of_turns = ((each.template == "chat", dict(each.chat_args)) for each in (cfg.eval.data, cfg.data))
        if cfg.rollout.environment is not None and of_prompts != of_turns:
            raise UserError(
                "rollout.environment: what is observed between turns is written by data.template and data.chat_args;"
                " give eval.data the same (a suite: data.template=chat), or evaluate without an environment."
            )
    chosen = dataclasses.replace(cfg.eval.data or cfg.data, hint=cfg.eval.hint)
    own = cfg.eval.data is not None
    source = data.make_source(
        chosen, tokenizer, "all" if own else "heldout", HINT_LEN, section="eval.data" if own else "data"
    )
    order = source.interleaved() if isinstance(source, mix.Source) else range(len(source))
    prompts = [source.prompt(i) for i in sorted(order[: cfg.eval.num_prompts or len(source)])]
    if not prompts:
        raise UserError(
            f"data.holdout={cfg.data.holdout} leaves no held-out prompt to evaluate on; raise it, name other data in"
            f" eval.data, or turn evaluation off with {data.NO_EVALUATION}."
        )
    if source.skipped.total:
        say(f"prompts to evaluate on that are left out: {source.skipped}")
    if (different := len({(prompt.text, prompt.answer) for prompt in prompts})) < estimators.FEW:
        say(
            f"different ones are {different}, too few for a score to say much: raise data.holdout, name other data in"
            f" eval.data, or turn evaluation off with {data.NO_EVALUATION}"
        )
    return prompts


def eval_sampling(cfg: RunConfig, stop: tuple[int, ...]) -> SamplingConfig:
    """Makes the sampling settings of evaluation."""
    return SamplingConfig(
        max_response_len=cfg.eval.max_response_len or cfg.rollout.max_response_len,
        temperature=cfg.eval.temperature,
        top_p=cfg.eval.top_p,
        stop_token_ids=stop,
    )
