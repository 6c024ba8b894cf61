# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.train FILE [section.field=value ...]`: quantization-aware RL, top to bottom.

     prompts -> rollout engine -> completions + rollout_logprobs -> rewards -> advantages -> packed rows
                  ^                                                                             |
             publish(v + 1) <- quantize <- optimizer <- STE gradient <- loss <- low-bit forward <-+

Step n consumes completions drawn under version n and publishes version n + 1. Everything random is a function of
(seed, step), and the whole state is in the checkpoint. So the same command continues a killed run as if nothing had
happened. Ctrl-C and SIGTERM finish or drop the step in hand, save, and exit with 0.

Over several hosts the same command is started once per process (`runtime/processes.py`). All processes run this file
in step; the first one alone writes files, computes rewards and shows the live view.

Exit codes: 0 done or interrupted after saving; 1 an internal error, a diverged run, or the end of another process of
the run; 2 a mistake in the input, explained in one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from qarl_jax import doctor, plot
from qarl_jax.advise import forecast
from qarl_jax.loop import resume, step_metrics
from qarl_jax.loop.setup import Run
from qarl_jax.loop.updates import advantages_of
from qarl_jax.memory import choose, plan
from qarl_jax.models import published
from qarl_jax.observe import flops, recorder
from qarl_jax.observe.token_trace import Follower
from qarl_jax.run import build, config, description
from qarl_jax.run.config import RunConfig
from qarl_jax.run.prompts import Prompts, open_prompts
from qarl_jax.runtime import compilation, processes, progress
from qarl_jax.types import AbsentError, Parser, UserError, entry_point

DRY_RUN = (
    "print the resolved config and the plans, then stop. A mistake in config, tokenizer or data: exit code 2."
    " Data or a package that is not on this machine is no mistake: the last line names it. No weights are needed."
    " Reward and engine are not started; qarl_jax.doctor starts them."
)

GPU_GB = (
    "with --dry-run: plan for a GPU of that many GiB, as CUDA finds them: 22 of 24 GB (L4), 44.4 of 48 (L40S),"
    " 79.1 of 80 (H100), 139.8 of 141 (H200)"
)


def run(cfg: RunConfig, prompts: Prompts) -> None:
    """Trains from the last checkpoint, or from the start, until `train.steps`, an interrupt or an error."""
    with contextlib.ExitStack() as stack:
        run = Run(cfg, prompts, stack)
        observer, checkpoints, timer = run.observer, run.checkpoints, run.timer
        recompiles, peak_flops = compilation.Recompiles(), flops.of_devices(run.mesh.devices.flat)

        for step in range(run.start, cfg.train.steps):
            done, last = step + 1, step + 1 == cfg.train.steps
            checkpoints.check()
            timer.take()
            if step == run.start + 1:
                recompiles.take()  # a process's first step warms up
            with profiled(cfg, step):
                # ---- sample and grade: an interrupt drops the step, unless it has moved the masters already ----------
                collected = run.updates.arriving(run.collector.collect, run.state, step)
                if not run.updates.has_begun and run.interrupt.agreed():
                    if step > run.start:
                        run.save(step)
                    return run.end_interrupted(step)
                run.collector.keep()
                if step == run.start:
                    run.programs_are_ready()

                # ---- learn, publish ----------------------------------------------------------------------------------
                groups, advantages = advantages_of(cfg, collected.groups)
                follow = Follower(
                    recorder.picks(groups, cfg.log.samples_per_step),
                    run.learner.loss_fn,
                    most=cfg.log.sample_tokens,
                    rows=cfg.log.samples_per_step,
                )
                run.state, learning = run.updates.run(run.state, groups, advantages, step, follow)
                with timer("publish"):
                    published = run.publisher.publish(run.state, done)
                with timer("metrics"):  # what is left to read of them
                    learned = learning.result()
                if step == run.start:
                    run.begin_record()

            # ---- record and save -------------------------------------------------------------------------------------
            relative = advantages if cfg.critic is None else None
            record = step_metrics.rollout_metrics(collected.sampled, collected.parts, relative, run.tokenizer)
            record |= collected.metrics | learned.metrics | published | (run.begun if step == run.start else {})
            if (cfg.eval.every and done % cfg.eval.every == 0 and not last) or (last and cfg.eval.at_end):
                with timer("eval"), recompiles.paused():
                    record |= run.evaluate(done)
            with timer("trace"):
                traces = follow.records(groups, run.tokenizer)
            record |= {"perf/recompiles": float(recompiles.take()) if step > run.start else 0.0}
            record |= step_metrics.most_memory(jax.local_devices())
            with processes.together():
                speed = step_metrics.speed(record, timer.take(), run.mesh.devices.size, peak_flops)
                observer.log(step, record | speed)
                observer.samples(step, collected.groups, traces, run.tokenizer)
                observer.histograms(step, {**learned.histograms, **run.publisher.flips})
                observer.timeline(step, timer.taken)
            run.remark(step, record, learned.first_mismatch)
            stopping = run.interrupt.agreed()
            if checkpoints.should_save(done) or (last and cfg.checkpoint.at_end) or stopping:
                with recompiles.paused():
                    run.save(done)
            if stopping and not last:
                return run.end_interrupted(done)
        checkpoints.wait()
        processes.from_first(lambda: plot.leave(cfg.run_dir))
        processes.from_first(lambda: observer.end(step_metrics.summary(cfg)))


def profiled(cfg: RunConfig, step: int) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that writes a JAX profiler trace to RUN/profile if `step` is in `train.profile_steps`."""
    if step in cfg.train.profile_steps and processes.is_first():
        return jax.profiler.trace(os.path.join(cfg.run_dir, "profile"))
    return contextlib.nullcontext()


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = Parser(
        "train", config="YAML file, or the name of one in configs/", needed=True, description=__doc__.split("\n")[0]
    )
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    parser.add_argument("--gpu-gb", type=float, help=GPU_GB)
    parser.add_argument("--gpus", type=int, help="with --dry-run: plan for so many GPUs (all of mesh.fsdp=-1)")
    args = parser.parse_args(argv)
    if not args.dry_run and (args.gpus, args.gpu_gb) != (None, None):
        raise UserError("--gpus and --gpu-gb are for --dry-run: a run takes the GPUs that are here.")
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: plan for at least one GPU.")
    if args.gpu_gb is not None and not 0 < args.gpu_gb < math.inf:
        raise UserError(f"--gpu-gb {args.gpu_gb:g}: give the GiB of a GPU's memory, for example 79.1.")
    cfg = config.load(args.config, args.overrides)
    if args.dry_run:
        return dry_run(cfg, args.gpus, None if args.gpu_gb is None else int(args.gpu_gb * 2**30))
    processes.start(cfg.distributed)  # before anything asks JAX for its devices
    size = plan.capacity()
    if said := processes.from_first(lambda: resume.finished(cfg, on_gpu=size is not None)):
        if processes.is_first():
            print(said)
        return 0
    with progress.shown() if processes.is_first() else contextlib.nullcontext():
        with progress.task("checking machine and config"):
            doctor.ask(doctor.before_a_run(cfg))
        with progress.task("reading prompts"):
            cfg, prompts = open_prompts(cfg)  # before the plan: it sizes the rows
        cfg, made = choose.settle(cfg, size)  # a run that does not fit ends here
    if made is not None:
        made.keep()
    build.check_backward(cfg)  # after the plan: JAX's first use fixes how much memory JAX takes
    if processes.is_first():
        print_plan(cfg, made, prompts.lines)
    run(cfg, prompts)
    return 0


def dry_run(cfg: RunConfig, gpus: int | None, size: int | None) -> int:
    """Prints the resolved config and the memory plan, also for GPUs that this machine lacks; returns exit code 0.

    Args:
      gpus: number of GPUs; None: those of this machine.
      size: bytes of memory of each; None: as this machine's first device; a CPU has no plan.

    Raises:
      UserError: the run does not fit, the mesh has more devices than `gpus`, or data, model or adapters cannot be
        read. Prompts and adapters that are not on this machine are no error.
    """
    if gpus is not None:
        cfg = dataclasses.replace(cfg, mesh=cfg.mesh.over(gpus))
        if cfg.mesh.size > gpus:
            raise UserError(f"--gpus {gpus}: the mesh has {cfg.mesh.size} devices; set mesh.fsdp=-1 to take all GPUs.")
    absent, path = None, cfg.model.path
    try:
        cfg, prompts = open_prompts(cfg)
        lines = prompts.lines
        doctor.ask([doctor.tokenizer(cfg)])
    except AbsentError as error:
        absent, lines = error, [("prompts", "not read: see the last line"), ("evaluation", cfg.eval.words())]
    with published.folder(cfg.model.path) as folder:  # its shapes are all that is needed
        cfg = config.replaced(cfg, {"model.path": folder})
        doctor.ask([doctor.positions(cfg)])
        size = size or plan.capacity()
        build.policy_graphdef(config.on_a_gpu(cfg) if size else cfg)  # a released base has the config's scheme
        critic = None if cfg.critic is None else cfg.critic.lora
        starts = [lora.init for lora in (cfg.lora, critic) if lora is not None and lora.init is not None]
        away = [folder for folder in starts if not os.path.isdir(folder)]
        if starts and not away:
            doctor.ask(doctor.adapters(cfg))
        lines = [*lines, *(("adapters", f"not checked: {folder} is not on this machine") for folder in away)]
        settled, made = choose.settle(cfg, size)
        print(config.to_yaml(config.replaced(settled, {"model.path": path})))
        if size is not None and (step := forecast.line(settled, size)):
            lines = [*lines, ("a step", step)]
        print_plan(settled, made, lines)
        print(plan.describe(settled))
    if absent is not None:
        print(f"not on this machine, so the prompts are not checked: {absent}")
    return 0


def print_plan(cfg: RunConfig, made: plan.Plan | None, lines: list[tuple[str, str]]) -> None:
    """Prints a run's sizes, its prompts' description (`lines`), and its memory plan, if there is one."""
    print(description.describe(cfg, lines))
    if made is not None:
        print("\n".join(made.lines()))


if __name__ == "__main__":
    raise SystemExit(main())
