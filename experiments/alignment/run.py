# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The experiment's runner. The same command, started again, goes on where the last one stopped.

    python -m experiments.alignment.run --all --jobs 4 --budget-s 570          # everything that is not done, in order
    python -m experiments.alignment.run --arm 4_qarl_tbpo --seed 0             # one run and its test accuracy
    python -m experiments.alignment.run --arm 4_qarl_tbpo --seed 0 --vllm      # the same with vLLM as the sampler
    python -m experiments.alignment.run --base                                 # the policy alone, and its hash
    python -m experiments.alignment.run --rtn                                  # what rounding costs it before any RL
    python -m experiments.alignment.run --timing                               # seconds per step, one arm at a time
    python -m experiments.alignment.run --warm-up --stages 1                   # compile, beside --base
    python -m experiments.alignment.run --all --runs 'w3a16_*' '*/seed2'       # these alone, in this order
    python -m experiments.alignment.run --list                                 # what is done, and what comes next
    python -m experiments.alignment.run --pack experiments/alignment/results.tar.xz
    python -m experiments.alignment.run --save-state OUT     (--load-state OUT: on the next machine, before the rest)

`--scale cpu` runs the same at the quickstart's size. Order: the base, its evaluation under every scheme of the ladder,
then `arms.stages`: the arms of one seed at a time, each run tested on the test split when it ends, and a stage complete
before the next one starts, so that a stretch that ends early leaves whole, paired stages behind. `--stages N` stops
after the first N. The stage with vLLM as the sampler is part of the large scale; `--all --vllm` adds it to the small
one.

A run's folder is <work>/runs/<scheme>/<arm>/seed<N>: that of `python -m qarl_jax.train`, with base.json (hash of the
policy it started from), a done.json when complete, and a test.json when tested. A run whose gradient is no longer
finite has diverged: failed.json says where, it counts as ended, and its last checkpoint is tested. The commands are in
<work>/log/*.log.

Exit codes: 0 complete, or stopped by the budget or an interrupt; 1 a job failed; 2 a mistake in the input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.alignment import archive, arms
from experiments.alignment.arms import Run, Scale
from experiments.alignment.assess import check_response_len, write
from experiments.alignment.jobs import Budget, Job, run_jobs
from qarl_jax.observe.recorder import read_lines
from qarl_jax.run import config
from qarl_jax.types import UserError, entry_point

HASH = arms.HERE / "base.sha256"
TIMING_STEPS = 8
TOY = ("train.updates=40",)  # of a policy to compile with
ONE_STEP = ("train.steps=1", "eval.at_start=false", "eval.at_end=true", "eval.every=0", "checkpoint.every=0")

DIVERGED = re.compile(r"^RuntimeError: step (\d+), update (\d+) of \d+: the gradient is not finite\..*", re.MULTILINE)
"""What `qarl_jax.train` says, and then exits with 1, when a run diverges."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment on one machine.

    Attributes:
      scale: its size.
      work: folder for everything it makes.
      settings: overrides for every run, and base_settings for the making of the policy (a toy, in the tests).
      python: the interpreter of the trainers.
      vllm: with the stage under vLLM at a scale that has none by itself.
      cache: folder of compiled programs; None: one in `work`.
      is_toy: its policy is of no worth and has no hash to keep to.
      devices, compiles: see `jobs.run_jobs`.
      patterns: of the names of runs (`fnmatch`): what matches one is a stage, in the order of the patterns, and nothing
        else is run. Empty: all stages.
      failed: names of the jobs that failed.
    """

    scale: Scale
    work: pathlib.Path
    settings: tuple[str, ...] = ()
    base_settings: tuple[str, ...] = ()
    python: str = sys.executable
    vllm: bool = False
    cache: pathlib.Path | None = None
    is_toy: bool = False
    devices: tuple[str, ...] = ("",)
    compiles: int = 1
    patterns: tuple[str, ...] = ()
    failed: list[str] = dataclasses.field(default_factory=list)

    @property
    def stages(self) -> list[list[Run]]:
        """Its runs in order.

        Raises:
          UserError: a pattern matches no run.
        """
        found = arms.stages(self.scale, self.vllm)
        if not self.patterns:
            return found
        runs, chosen = [run for stage in found for run in stage], {}
        for pattern in self.patterns:
            named = [run for run in runs if fnmatch.fnmatchcase(run.name, pattern)]
            if not named:
                raise UserError(f"--runs {pattern}: no run has such a name; --list shows them all.")
            chosen |= {run.name: run for run in named if run.name not in chosen}
        return [list(chosen.values())]

    @property
    def base(self) -> pathlib.Path | None:
        """Folder of the policy, where it is made here."""
        return None if self.scale.base is None else self.work / "base"

    @property
    def shared(self) -> list[str]:
        """Overrides of every run."""
        return [*([] if self.base is None else [f"model.path={self.base}"]), *self.settings]

    @property
    def environment(self) -> dict[str, str]:
        """Of every process: one compile cache for all, GPU memory taken as it is needed, sums in a fixed order."""
        out = {
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled.absolute()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if self.scale.name == "gpu":
            out["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
        return out

    @property
    def compiled(self) -> pathlib.Path:
        """Folder of compiled programs."""
        return self.work / "xla_cache" if self.cache is None else self.cache

    @property
    def toy(self) -> Experiment:
        """The same with a policy of no worth and a step per run, in a folder of its own: to compile with."""
        return dataclasses.replace(
            self,
            work=self.work / "warm",
            cache=self.compiled,
            is_toy=True,
            settings=(*self.settings, *ONE_STEP),
            base_settings=(*self.base_settings, *TOY),
        )

    def folder(self, run: Run) -> pathlib.Path:
        """A run's folder."""
        return self.work / "runs" / run.name

    def command(self, run: Run, folder: pathlib.Path | None = None, more: Sequence[str] = ()) -> list[str]:
        """The trainer's command line."""
        where = self.folder(run) if folder is None else folder
        settings = [*arms.overrides(run.arm, self.scale, run.rung, run.vllm), f"seed={run.seed}", f"run_dir={where}"]
        head = [self.python, "-m", "qarl_jax.train", "--config", str(self.scale.config)]
        return [*head, *self.shared, *settings, *more]

    def steps(self) -> int:
        """Steps of a run."""
        return config.load(self.scale.config, self.shared).train.steps

    def job(self, run: Run) -> Job:
        """A run as a job. It is done when the trainer has logged its last step and left with 0, or diverged."""
        folder, steps = self.folder(run), self.steps()
        return Job(
            name=run.name,
            command=self.command(run),
            log=self.work / "log" / f"{run.name.replace('/', '.')}.log",
            is_done=lambda: has_ended(folder, steps),
            program=run.program,
            is_warm=lambda: logged(folder) > 0,
            ends_with=lambda code, output: note_divergence(folder, code, output),
        )

    def run_jobs(self, jobs: Sequence[Job], budget: Budget, parallel: int = 1, warm: set[str] | None = None) -> bool:
        """`jobs.run_jobs` in this experiment's environment; what fails is added to `failed`."""
        return run_jobs(
            jobs,
            parallel=parallel,
            budget=budget,
            devices=self.devices,
            compiles=self.compiles,
            warm=warm,
            environment=self.environment,
            cwd=arms.ROOT,
            failed=self.failed,
        )

    def warm(self) -> set[str]:
        """Programs that some run has compiled on this machine: into the cache, which must still be there."""
        if not self.compiled.is_dir() or not any(self.compiled.iterdir()):
            return set()
        timing, found = self.work / "timing", []
        for runs in (self.work / "runs", self.work / "warm" / "runs"):
            found += [(path, path.parent.parent.relative_to(runs)) for path in runs.glob("*/*/seed*/metrics.jsonl")]
        found += [(path, path.parent.relative_to(timing)) for path in timing.glob("*/*/metrics.jsonl")]
        return {str(program) for path, program in found if path.stat().st_size}


def logged(folder: pathlib.Path) -> int:
    """Steps a run has logged."""
    path = folder / "metrics.jsonl"
    return len(read_lines(path)) if path.exists() else 0


def is_complete(folder: pathlib.Path, steps: int) -> bool:
    """Whether a run is at its end: last step, evaluation and checkpoint are there. done.json keeps the answer."""
    if (folder / "done.json").exists():
        return True
    if logged(folder) < steps or not (folder / "eval.jsonl").exists():
        return False
    if read_lines(folder / "eval.jsonl")[-1]["version"] != steps:
        return False
    if not (folder / "checkpoints" / f"step_{steps:08d}" / "manifest.json").exists():
        return False
    write(folder / "done.json", {"steps": steps})
    return True


def has_ended(folder: pathlib.Path, steps: int) -> bool:
    """Whether a run is complete or has diverged."""
    return (folder / "failed.json").exists() or is_complete(folder, steps)


def note_divergence(folder: pathlib.Path, code: int, output: str) -> bool:
    """Whether the trainer left because the run diverged; then failed.json says at which step, and the last checkpoint.

    Args:
      folder: of the run.
      code: the trainer's exit code. output: what it printed.
    """
    said = list(DIVERGED.finditer(output))
    if code != 1 or not said:
        return False
    saved = [int(path.parent.name.rpartition("_")[2]) for path in folder.glob("checkpoints/step_*/manifest.json")]
    where = {"step": int(said[-1][1]), "update": int(said[-1][2]), "checkpoint": max(saved, default=0)}
    write(folder / "failed.json", {**where, "error": said[-1][0]})
    return True


# ---- the base ------------------------------------------------------------------------------------------------------


def base_hash(work: pathlib.Path) -> str | None:
    """sha256 of the policy that the runs of a work folder start from; None before `make_base`."""
    path = work / "base.json"
    return json.loads(path.read_text())["sha256"] if path.exists() else None


def check_base(experiment: Experiment, folder: pathlib.Path) -> str:
    """The hash of the policy in `folder`.

    Raises:
      UserError: it is not the one that is recorded, or not that of the work folder's runs.
    """
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if experiment.is_toy:
        return found
    recorded = json.loads(HASH.read_text()).get(experiment.scale.name) if HASH.exists() else None
    for known, place, advice in (
        (recorded, HASH, "Restore it, or remove its entry there for another experiment."),
        (base_hash(experiment.work), experiment.work / "base.json", "Restore it, or take another --work folder."),
    ):
        if known not in (None, found):
            raise UserError(f"{folder}: another policy (sha256 {found}) than {place} has ({known}). {advice}")
    return found


def check_length(experiment: Experiment) -> None:
    """Says whether the bands suit the base's responses, as far as they have been measured.

    Raises:
      UserError: they do not.
    """
    path = experiment.work / "base_test.json"
    print(check_response_len(json.loads(path.read_text()) if path.exists() else {}, experiment.scale), flush=True)


def note_base(experiment: Experiment, folder: pathlib.Path) -> None:
    """Writes the base's hash beside a run. One of before this was done gets that of its work folder.

    Raises:
      UserError: the run started from another policy.
    """
    expected, found = base_hash(experiment.work), base_hash(folder)
    if found is not None and found != expected:
        raise UserError(
            f"{folder}: this run started from another policy (sha256 {found}) than {experiment.work / 'base.json'} has"
            f" ({expected}). Move the folder away, or take another --work folder."
        )
    if expected is not None and found is None:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "base.json", {"sha256": expected})


# ---- parts ---------------------------------------------------------------------------------------------------------


def make_base(experiment: Experiment, budget: Budget) -> bool:
    """Makes the policy where the scale has one to make, and writes its hash to <work>/base.json.

    Raises:
      UserError: it is another one than before; see `check_base`.
    """
    if experiment.scale.base is None:
        folder = arms.ROOT / config.load(experiment.scale.config, experiment.shared).model.path
    else:
        assert experiment.base is not None
        folder = experiment.base
        receipt = folder / "sft.json"
        job = Job(
            name="base",
            command=[
                experiment.python,
                "-m",
                "qarl_jax.sft",
                "--config",
                str(experiment.scale.base),
                *experiment.base_settings,
                f"out={folder}",
            ],
            log=experiment.work / "log" / "base.log",
            is_done=receipt.exists,
        )
        if not experiment.run_jobs([job], budget):
            return False
    found = check_base(experiment, folder)
    write(experiment.work / "base.json", {"sha256": found})
    print(f"base: sha256 {found}", flush=True)
    return True


def evaluate_base(experiment: Experiment, budget: Budget) -> bool:
    """What rounding to each scheme of the ladder costs the base, on the test split."""
    path = experiment.work / "base_test.json"

    def is_done() -> bool:  # one made by an earlier version has no response_len, and is made again
        return path.exists() and "response_len" in json.loads(path.read_text())

    return experiment.run_jobs([_assess(experiment, ["--base"], is_done, "base_test")], budget)


def test_job(experiment: Experiment, run: Run) -> Job:
    """Test accuracy of a run, as soon as it has ended."""
    folder, steps = experiment.folder(run), experiment.steps()
    job = _assess(experiment, [str(folder)], (folder / "test.json").exists, f"test.{run.name.replace('/', '.')}")
    return dataclasses.replace(job, name=f"test of {run.name}", is_ready=lambda: has_ended(folder, steps))


def _assess(experiment: Experiment, what: list[str], is_done: Callable[[], bool], name: str) -> Job:
    head = [experiment.python, "-m", "experiments.alignment.assess", "--scale", experiment.scale.name]
    size = ["--prompts", str(experiment.scale.test_prompts), "--samples", str(experiment.scale.test_samples)]
    command = [*head, *size, "--work", str(experiment.work), *what, "--set", *experiment.shared]
    return Job(name=name, command=command, log=experiment.work / "log" / f"{name}.log", is_done=is_done)


def train(experiment: Experiment, runs: Sequence[Run], jobs: int, budget: Budget) -> bool:
    """Trains the runs, `jobs` at a time, and tests each when it has ended, before another one starts."""
    for run in runs:
        note_base(experiment, experiment.folder(run))
        job = experiment.job(run)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("a") as log:
            log.write(f"$ {shlex.join(job.command)}\n")
    tests = [test_job(experiment, run) for run in runs]
    return experiment.run_jobs([*tests, *(experiment.job(run) for run in runs)], budget, jobs, experiment.warm())


def timing(experiment: Experiment, budget: Budget) -> bool:
    """A few steps of every main arm with the machine to itself, for seconds per step and phase."""
    runs = [Run(arm=arm, rung=experiment.scale.main, seed=0) for arm in arms.ARMS.values() if arm.main]
    more = [f"train.steps={TIMING_STEPS}", "eval.at_start=false", "eval.at_end=false", "eval.every=0"]
    jobs = []
    for run in runs:
        folder = experiment.work / "timing" / run.program
        note_base(experiment, folder)
        job = experiment.job(run)
        command = experiment.command(run, folder, [*more, "checkpoint.every=0"])
        jobs.append(
            dataclasses.replace(
                job,
                name=f"timing/{run.program}",
                command=command,
                is_done=lambda folder=folder: logged(folder) >= TIMING_STEPS,
                is_warm=lambda folder=folder: logged(folder) > 0,
                log=experiment.work / "log" / f"timing.{run.arm.name}.log",
                ends_with=lambda code, output: False,
            )
        )
    return experiment.run_jobs(jobs, budget)


def warm_up(experiment: Experiment, jobs: int, budget: Budget, stages: int | None = None) -> bool:
    """Compiles what the first `stages` stages need (all: None) with a toy policy, one step each, `jobs` at a time, so
    that their runs may start side by side as soon as the policy is there. Uses nothing of the policy: goes beside
    `make_base`."""
    toy = experiment.toy
    toy.work.mkdir(parents=True, exist_ok=True)
    if not make_base(toy, budget):
        return False
    programs: dict[str, Job] = {}
    for run in (run for stage in experiment.stages[:stages] for run in stage):
        job = toy.job(run)  # warm from its first step on, and then done
        job = dataclasses.replace(job, is_done=job.is_warm, ends_with=lambda code, output: False)
        programs.setdefault(run.program, job)
    complete = toy.run_jobs(list(programs.values()), budget, jobs, experiment.warm())
    for program in programs:
        for path in (toy.work / "runs" / program).glob("seed*/metrics.jsonl"):
            if steps := read_lines(path):
                print(
                    f"{program}: compiled; proximal/noise {steps[0].get('proximal/noise', float('nan')):.1e}",
                    flush=True,
                )
    return complete


def everything(experiment: Experiment, jobs: int, budget: Budget, stages: int | None = None, together: int = 1) -> bool:
    """All of it, or the first `stages` stages, `together` of them at a time; stops at the first part that the budget
    does not let finish."""
    if not make_base(experiment, budget):
        return False
    if not (experiment.work / "base_test.json").exists() and not evaluate_base(experiment, budget):
        return False
    check_length(experiment)
    todo = experiment.stages[:stages]
    parts = [[run for stage in todo[i : i + together] for run in stage] for i in range(0, len(todo), together)]
    return all(train(experiment, runs, jobs, budget) for runs in parts)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is an interrupt, so that what runs is told to save before we go."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def listing(experiment: Experiment) -> str:
    """One line per run: how far it is."""
    steps = experiment.steps()
    lines = []
    for number, stage in enumerate(experiment.stages):
        for run in stage:
            folder = experiment.folder(run)
            states = {"failed.json": "diverged", "test.json": "tested"}
            state = ", ".join(word for file, word in states.items() if (folder / file).exists())
            lines.append(f"stage {number:2d}  {run.name:44s} {logged(folder):4d} of {steps} steps  {state}")
    return "\n".join(lines)


def execute(experiment: Experiment, args: argparse.Namespace, budget: Budget) -> bool:
    """What the command line asks for; whether all of it is complete."""
    complete = True
    if args.warm_up:
        complete &= warm_up(experiment, args.jobs, budget, args.stages)
    if args.base:
        complete &= make_base(experiment, budget)
    if args.rtn:
        complete &= make_base(experiment, budget) and evaluate_base(experiment, budget)
    if args.arm:
        run = Run(arm=arms.ARMS[args.arm], rung=args.rung or experiment.scale.main, seed=args.seed, vllm=args.vllm)
        if make_base(experiment, budget):
            check_length(experiment)
            complete &= train(experiment, [run], 1, budget)
        else:
            complete = False
    if args.timing:
        complete &= make_base(experiment, budget) and timing(experiment, budget)
    if args.all:
        complete &= everything(experiment, args.jobs, budget, args.stages, args.together)
    return complete


def keep(experiment: Experiment, args: argparse.Namespace) -> None:
    """Packs what the command line asks for."""
    if args.pack:
        print(f"{args.pack}: {archive.pack(experiment.work, args.pack, experiment.scale.name)} runs")
    if args.save_state:
        archive.save_state(experiment.work, args.save_state, int(args.part_mib * 2**20), args.parts)


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.alignment.run", description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=sorted(arms.SCALES), default="gpu")
    parser.add_argument("--work", type=pathlib.Path, help="folder for everything (default: runs/alignment/<scale>)")
    parser.add_argument("--all", action="store_true", help="everything that is not done yet, in order")
    parser.add_argument(
        "--runs", nargs="+", default=[], metavar="NAME", help="only runs of these names, with wildcards"
    )
    parser.add_argument("--stages", type=int, help="with --all and --warm-up: only the first so many stages")
    parser.add_argument("--base", action="store_true", help="make the policy")
    parser.add_argument("--rtn", action="store_true", help="test the policy under every scheme of the ladder")
    parser.add_argument("--arm", choices=list(arms.ARMS), help="one run: this arm")
    parser.add_argument("--seed", type=int, default=0, help="of the one run")
    parser.add_argument("--rung", help="scheme of the one run (default: the scale's main rung)")
    parser.add_argument("--vllm", action="store_true", help="vLLM samples: the one run, or with --all a stage more")
    parser.add_argument("--timing", action="store_true", help="a few steps of each main arm alone")
    parser.add_argument("--warm-up", action="store_true", help="compile the programs of the runs with a toy policy")
    parser.add_argument("--list", action="store_true", help="show what is done")
    parser.add_argument("--jobs", type=int, default=1, help="trainers at a time on a device")
    parser.add_argument("--devices", type=int, default=0, help="GPUs to spread the trainers over (0: do not choose)")
    parser.add_argument("--compiles", type=int, default=1, help="trainers that may compile at a time")
    parser.add_argument("--together", type=int, default=1, help="with --all: stages that run side by side")
    parser.add_argument("--budget-s", type=float, help="seconds after which everything has stopped")
    parser.add_argument("--pack", type=pathlib.Path, help="add the raw results to this .tar.xz")
    parser.add_argument("--save-state", type=pathlib.Path, help="pack the work folder into small files in this folder")
    parser.add_argument("--part-mib", type=float, default=archive.PART_BYTES / 2**20, help="largest of these files")
    parser.add_argument("--parts", type=int, default=archive.MOST_PARTS, help="most of these files")
    parser.add_argument("--load-state", type=pathlib.Path, help="unpack such files into the work folder first")
    parser.add_argument("--base-set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of base_sft.yaml")
    parser.add_argument("settings", nargs="*", help="section.field=value for every run")
    args = parser.parse_args(argv)
    for name, least in (("jobs", 1), ("compiles", 1), ("together", 1), ("devices", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(args, name)}.")
    if args.part_mib <= 0 or args.parts < 1:
        raise UserError(f"--part-mib and --parts must be positive, got {args.part_mib:g} and {args.parts}.")
    work = (args.work or arms.ROOT / "runs" / "alignment" / args.scale).absolute()
    work.mkdir(parents=True, exist_ok=True)
    settings, base_settings = tuple(args.settings), tuple(args.base_set)
    experiment = Experiment(
        scale=arms.SCALES[args.scale],
        work=work,
        settings=settings,
        base_settings=base_settings,
        vllm=args.vllm,
        devices=tuple(str(number) for number in range(args.devices)) or ("",),
        compiles=args.compiles,
        patterns=tuple(args.runs),
    )
    config.load(experiment.scale.config, experiment.settings)  # a mistake in the settings shows before anything runs
    budget, complete = Budget(args.budget_s), False
    if args.load_state:
        archive.load_state(work, args.load_state)
    try:
        with terminable(), contextlib.suppress(KeyboardInterrupt):
            complete = execute(experiment, args, budget)
    finally:
        keep(experiment, args)
    if args.list:
        print(listing(experiment))
    if experiment.failed:
        print(f"failed: {', '.join(experiment.failed)}; the logs are in {work / 'log'}", flush=True)
        return 1
    asked = args.warm_up or args.base or args.rtn or args.arm or args.timing or args.all
    if asked:
        print("complete" if complete else "not complete: the same command goes on", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
