# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`make chaos`: things are broken on purpose, at random moments of real runs, and what is promised must hold.

    python -m tests.chaos --minutes 60 --seed 0 --out runs/chaos        # a table, table.json, and what broke

Every kind of trial has a number of tries that an hour on two cores is enough for (`KINDS`). Lanes, one process per
core, take turns among the kinds until the tries are made or the time is over. What a trial does is a function of (seed,
kind, number); the moment at which a signal strikes a process also depends on the machine. A trial holds if

  * killed        the same command, given again until it ends by itself, leaves the records and final parameters of a
                  run that nobody disturbed, bit for bit;
  * disk          the run that meets a full disk ends with exit code 2 and a sentence, and goes on to that same end
                  when there is room;
  * checkpoints   a restore returns a step that is whole, bit for bit, or says that none is;
  * fleet         every group comes once, drawn under the current version, equal to the bits one engine draws;
  * inputs        the command ends with exit code 2 and one sentence, within a minute. `bad_inputs.yaml` is the corpus:
                  every defect that is found becomes a line in it. Random mutations of good files are tried as well.

Processes are forked from one that has imported everything, before JAX looks for devices: a start takes less time so.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import yaml

from qarl_jax import data, models, train
from qarl_jax.run import config, description
from qarl_jax.run.checkpoint import Checkpoints, DamagedCheckpointError
from qarl_jax.types import UserError
from tests.reference import fleet_faults, tiny
from tests.reference.forked import (
    PATIENCE_S,
    BrokenError,
    ImpossibleError,
    children,
    computed,
    finish,
    fork,
    kill,
    own_mounts,
    wait,
)

CORPUS = pathlib.Path(__file__).parent / "fixtures" / "bad_inputs.yaml"
LIMITS = {"max_model_len": 64, "kv_cache_gb": 0.1, "threads": 1}
# The worlds that runs live in: what differs from the tiny one.
WORLDS: dict[str, dict[str, Any]] = {
    "embedded": {},
    "toy": {"rollout": {"engine": {"name": "vllm", "engine": "fake", "max_model_len": 64}}},
    "fleet": {"rollout": {"engine": {"name": "vllm", "engine": "fake", "max_model_len": 64, "replicas": 3}}},
    "vllm": {
        "model": {"dtype": "bfloat16"},
        "quant": {"forward": "w4a16:g32", "engine": "cpu"},
        "rollout": {"engine": {"name": "vllm", **LIMITS}},
    },
}
WIDE = ("vllm",)  # whose layers are not too narrow for vLLM's kernels


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of trial.

    Attributes:
      what: its line in the table.
      tries: as many as an hour on two cores is enough for.
      trial: (lane, randomness) -> tries made; raises `BrokenError`.
    """

    what: str
    tries: int
    trial: Callable[[Lane, random.Random], int]


# ---- runs -----------------------------------------------------------------------------------------------------------


def outcome(world: tiny.World, hidden: int) -> dict[str, Any]:
    """Everything that two equal runs have in common."""
    state = models.split(tiny.random_model(hidden))[1]
    back = Checkpoints(world.run_dir / "checkpoints").restore({"params": state})
    records = {name: world.records(name) for name in ("metrics", "eval", "samples")}
    return records | {"step": back.step, "params": bits(back.state)}


def bits(tree: Any) -> str:
    """A hash of all arrays."""
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


class Lane:
    """One process's share: its folder, the undisturbed runs, and how long those took. `steps`: of every run."""

    def __init__(self, folder: pathlib.Path, steps: int):
        self.folder = folder
        self.steps = steps
        self.number = 0
        self._undisturbed: dict[str, tuple[Any, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= {name.upper(): str(value) for name, value in tiny.CACHE.items()}
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder.parent / "compiled")
        os.environ["TMPDIR"] = str(folder)
        self._bases: dict[int, tiny.World] = {}

    def world(self, name: str, run: str, **sections: Any) -> tiny.World:
        """A world of this lane, with a run folder of its own."""
        hidden = 128 if name in WIDE else 64
        if hidden not in self._bases:
            place = self.folder / f"hidden{hidden}"
            place.mkdir()
            self._bases[hidden] = computed(lambda: tiny.World(place, hidden), self.folder)
        common = {"train": {"steps": self.steps}, "eval": {"every": 3}, "log": {"view": "lines"}}
        other = self._bases[hidden].changed(**common).changed(**WORLDS[name]).changed(**sections)
        return other.changed(run_dir=str(self.folder / run))

    def start(self, world: tiny.World) -> int:
        """The trainer."""
        command = world.command()
        return fork(lambda: train.main(command), self.log(world))

    def log(self, world: tiny.World) -> pathlib.Path:
        return self.folder / f"{world.run_dir.name}.log"

    def undisturbed(self, name: str) -> tuple[Any, float]:
        """(outcome, seconds) of a run that nobody disturbs; its folder stays, as `whole-NAME`."""
        if name not in self._undisturbed:
            world = self.world(name, f"whole-{name}")
            finish(self.start(world))  # fills the compilation cache
            shutil.rmtree(world.run_dir)
            began = time.monotonic()
            code = finish(self.start(world))
            seconds = time.monotonic() - began
            if code:
                raise BrokenError(f"the undisturbed run ended with {code}: {self.log(world).read_text()[-2000:]}")
            self._undisturbed[name] = self.outcome(world, name), seconds
        return self._undisturbed[name]

    def outcome(self, world: tiny.World, name: str) -> dict[str, Any]:
        return computed(lambda: outcome(world, 128 if name in WIDE else 64), self.folder)

    def compare(self, world: tiny.World, name: str) -> None:
        """Raises unless a run ended as the undisturbed one."""
        found, wanted = self.outcome(world, name), self.undisturbed(name)[0]
        for part, value in wanted.items():
            if found[part] != value:
                raise BrokenError(f"{part} differ from those of the undisturbed run")

    def complete(self, world: tiny.World, name: str, tries: int) -> int:
        """Goes on until the run ends by itself, and compares. Returns `tries`; if it does not hold, all are broken."""
        try:
            for _ in range(3):  # a run may say that something was taken from it, once or twice
                code = finish(self.start(world))
                if code != 2:
                    break
            if code:
                raise BrokenError(f"the same command ended with {code}")
            self.compare(world, name)
        except BrokenError as error:
            raise BrokenError(f"{error}\n{self.log(world).read_text()[-3000:]}", max(1, tries)) from None
        shutil.rmtree(world.run_dir)
        self.log(world).unlink()
        return tries


def trainer_kills(name: str) -> Callable[[Lane, random.Random], int]:
    def trial(lane: Lane, rng: random.Random) -> int:
        _, seconds = lane.undisturbed(name)
        world = lane.world(name, f"killed-{name}-{lane.number}", checkpoint={"every": 1, "keep": 2})
        kills = 0
        for _ in range(rng.randint(2, 5)):
            pid = lane.start(world)
            code = wait(pid, rng.uniform(0.0, seconds))
            if code is not None:  # it was faster
                if code:
                    text = lane.log(world).read_text()[-3000:]
                    raise BrokenError(f"the same command ended with {code} after {kills} kills\n{text}", max(1, kills))
                break
            kill(pid)
            kills += 1
        return lane.complete(world, name, kills)

    return trial


def child_kills(name: str, word: str, like: str = "") -> Callable[[Lane, random.Random], int]:
    """Kills of what the trainer has started; `word` is in its command line. It must end as the world `like` does."""
    like = like or name

    def trial(lane: Lane, rng: random.Random) -> int:
        _, seconds = lane.undisturbed(like)
        world = lane.world(name, f"child-{name}-{lane.number}")
        kills, pid = 0, lane.start(world)
        for _ in range(rng.randint(1, 4)):
            code = wait(pid, rng.uniform(0.0, seconds))
            if code is not None:
                break
            for child in rng.sample(found := children(pid, word), min(1, len(found))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                    kills += 1
        else:
            code = finish(pid)
        if code not in (0, 2):
            raise BrokenError(f"the trainer ended with {code}\n{lane.log(world).read_text()[-3000:]}", max(1, kills))
        return lane.complete(world, like, kills)

    return trial


def faults_of_fleet(count: int) -> Callable[[Lane, random.Random], int]:
    """That many faults among four toy engines, in one process: see `fleet_faults`."""

    def trial(lane: Lane, rng: random.Random) -> int:
        def run() -> int:
            try:
                made = fleet_faults.run(count, rng, lane.folder)
            except AssertionError as error:
                raise BrokenError(f"a fleet under faults: {error}", count) from None
            return sum(made[kind] for kind in fleet_faults.KINDS)

        return int(computed(run, lane.folder))

    return trial


# ---- disks ----------------------------------------------------------------------------------------------------------


def full_disk(lane: Lane, rng: random.Random) -> int:
    whole = lane.world("embedded", "whole-embedded").run_dir
    lane.undisturbed("embedded")
    needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    disk = lane.folder / "disk"
    disk.mkdir(exist_ok=True)
    world = lane.world("embedded", f"disk/run-{lane.number}", checkpoint={"every": 1, "keep": 2})
    room = rng.randrange(int(1.2 * needed))
    lane.log(world).unlink(missing_ok=True)

    def run() -> int:
        own_mounts()
        size = 64 << 20
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
        if mount.returncode:
            raise ImpossibleError(f"no file system of a given size: {mount.stderr.decode().strip()}")
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            file.write(bytes(size - room))
        code = finish(lane.start(world))
        if code == 0:
            return 0  # there was room enough
        said = lane.log(world).read_text()
        if code != 2 or "Traceback" in said or said.count("error: ") != 1:
            raise BrokenError(f"{room} bytes of room: exit code {code}\n{said[-3000:]}")
        (disk / "filler").unlink()
        code = finish(lane.start(world))
        if code:
            raise BrokenError(f"with room again: exit code {code}\n{lane.log(world).read_text()[-3000:]}")
        lane.compare(world, "embedded")
        return 1

    return int(computed(run, lane.folder, 4 * PATIENCE_S))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def spoil(path: pathlib.Path, rng: random.Random) -> str:
    """Damages a file; returns how."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["flip", "flip", "cut", "zero", "append", "swap", "remove", "empty"])
    at = rng.randrange(len(content)) if content else 0
    if how == "remove":
        path.unlink()
        return how
    if how == "flip" and content:
        content[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "zero":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif how == "append":
        content += rng.randbytes(rng.randint(1, 64))
    elif how == "swap":
        half = len(content) // 2
        content = content[half:] + content[:half]
    elif how == "empty":
        content.clear()
    path.write_bytes(content)
    return how


def damaged(count: int) -> Callable[[Lane, random.Random], int]:
    """That many checkpoints, restored in one process."""

    def trial(lane: Lane, rng: random.Random) -> int:
        lane.undisturbed("embedded")
        source = lane.world("embedded", "whole-embedded").run_dir / "checkpoints"

        def run() -> int:
            whole = Checkpoints(source)
            manifest = json.loads((whole.path(lane.steps) / "manifest.json").read_text())
            wanted = {
                item: {key: jax.ShapeDtypeStruct(x["shape"], x["dtype"]) for key, x in arrays.items()}
                for item, arrays in manifest["arrays"].items()
            }
            known = {step: whole.restore(wanted, step=step) for step in whole.steps()}
            for number in range(count):
                copy = lane.folder / f"damaged-{lane.number}"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(source, copy)
                steps = [lane.steps] if rng.random() < 0.8 else sorted(known)
                done = []
                for step in steps:
                    files = sorted(path for path in Checkpoints(copy).path(step).rglob("*") if path.is_file())
                    weights = [20 if path.suffix == ".json" else 1 for path in files]
                    (victim,) = rng.choices(files, weights)
                    done.append(f"{spoil(victim, rng)} {victim.relative_to(copy)}")
                try:
                    back = Checkpoints(copy).restore(wanted)
                    good = known[back.step]
                    same = back.extra == good.extra and bits(back.state) == bits(good.state)
                    problem = "" if same else f"step {back.step} came back with other contents"
                except DamagedCheckpointError as error:
                    problem = "" if len(steps) == len(known) else f"nothing came back: {error}"
                except BaseException as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    raise BrokenError(f"{'; '.join(done)}: {problem} (number {number} of these)")
                shutil.rmtree(copy)
            return count

        return int(computed(run, lane.folder))

    return trial


# ---- inputs ---------------------------------------------------------------------------------------------------------


def corpus() -> list[dict[str, Any]]:
    """Known bad inputs: name, overrides, files to write (name -> text), and words that must be said."""
    return yaml.safe_load(CORPUS.read_text())


def bad_input(lane: Lane, rng: random.Random) -> int:
    """The next of the corpus."""
    known = corpus()
    case = known[lane.number % len(known)]
    world = lane.world("embedded", f"input-{lane.number}")
    folder = lane.folder / f"files-{lane.number}"
    folder.mkdir(exist_ok=True)
    for name, text in case.get("files", {}).items():
        (folder / name).write_text(text)
    overrides = [text.replace("FOLDER", str(folder)) for text in case["overrides"]]
    command = world.command(*overrides)
    if "config" in case:
        command = ["--config", str(folder / case["config"]), *overrides]
    log = lane.log(world)
    began = time.monotonic()
    code = finish(fork(lambda: train.main(command), log), 120)
    said = log.read_text()
    missing = [word for word in case["says"] if word not in said]
    if code != 2 or "Traceback" in said or said.count("error: ") != 1 or missing:
        raise BrokenError(f"{case['name']}: exit code {code} after {time.monotonic() - began:.0f} s\n{said[-2000:]}")
    log.unlink()
    shutil.rmtree(folder)
    shutil.rmtree(world.run_dir, ignore_errors=True)
    return 1


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A file with a few random changes."""
    out = bytearray(text)
    odd = [b"\xff", b"\0", b"NaN", b"-", b"1e999", b"9" * 5000, b"{", b"[", b'"', b"\n", b": ", b"{{ 1/0 }}", b"&a *a"]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(4):
            case 0:
                out[at : at + rng.randint(1, 8)] = b""
            case 1:
                out[at:at] = rng.choice(odd)
            case 2:
                out[at] ^= 1 << rng.randrange(8)
            case _:
                out[at:at] = out[at : at + rng.randint(1, 40)]
        if not out:
            return b""
    return bytes(out)


def mutations(count: int) -> Callable[[Lane, random.Random], int]:
    """That many mutated configs and data files, read in one process: each is good, or refused in a sentence."""

    def trial(lane: Lane, rng: random.Random) -> int:
        world = lane.world("embedded", f"mutated-{lane.number}")
        text = pathlib.Path(world.command()[1]).read_bytes()
        rows = world.data.read_bytes()[:400]
        file = lane.folder / "mutated"

        def run() -> int:
            tokenizer = data.load_tokenizer(str(world.model))
            for number in range(count):
                file.write_bytes(mutated(text if number % 2 else rows, rng))
                try:
                    if number % 2:
                        description.describe(config.load(str(file), []))
                    else:
                        overrides = [f"data.source.path={file}", "data.max_prompt_len=100"]
                        data.make_source(config.load(world.command()[1], overrides).data, tokenizer, "train")
                except UserError as error:
                    if not str(error).strip():
                        raise BrokenError(f"an empty sentence for {file.read_bytes()!r}") from None
                except BaseException as error:
                    raise BrokenError(f"{type(error).__name__}: {error} for {file.read_bytes()!r:.2000}") from None
            return count

        return int(computed(run, lane.folder))

    return trial


KINDS = {
    "trainer": Kind("trainer killed, embedded sampler", 110, trainer_kills("embedded")),
    "rewards": Kind("reward worker killed", 30, child_kills("embedded", "_worker.py")),
    "bridge": Kind("bridge killed, toy engine", 30, child_kills("toy", "qarl_bridge")),
    "fleet": Kind(
        "fault in a fleet of toy engines: killed, hung, slow, torn, garbled, cut, late", 1000, faults_of_fleet(50)
    ),
    "bridge-fleet": Kind("one bridge of three killed, toy engines", 30, child_kills("fleet", "qarl_bridge", "toy")),
    "trainer-bridge": Kind("trainer killed, toy engine behind a bridge", 20, trainer_kills("toy")),
    "bridge-vllm": Kind("bridge killed, vLLM", 8, child_kills("vllm", "qarl_bridge")),
    "trainer-vllm": Kind("trainer killed, vLLM", 8, trainer_kills("vllm")),
    "disk": Kind("disk full", 20, full_disk),
    "checkpoints": Kind("checkpoint damaged", 500, damaged(20)),
    "inputs": Kind("bad input of the corpus", 120, bad_input),
    "mutations": Kind("config or data file mutated", 2000, mutations(50)),
}


# ---- the hour -------------------------------------------------------------------------------------------------------


def run_lane(folder: pathlib.Path, index: int, lanes: int, args: argparse.Namespace) -> int:
    """Tries until all are made or the time is over; writes the counts after each trial."""
    lane = Lane(folder, args.steps)
    made: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in args.kinds}
    wanted = {name: math.ceil(KINDS[name].tries * args.scale / lanes) for name in args.kinds}
    notes: list[str] = []
    numbers: collections.Counter[str] = collections.Counter()
    while time.monotonic() < args.deadline:
        left = [name for name in args.kinds if made[name]["tries"] < wanted[name] and not made[name]["impossible"]]
        if not left:
            break
        name = min(left, key=lambda name: made[name]["tries"] / wanted[name])
        numbers[name] += 1
        lane.number = numbers[name] * lanes + index
        rng = random.Random(f"{args.seed}/{name}/{lane.number}")
        try:
            tries = KINDS[name].trial(lane, rng)
            made[name] += collections.Counter(tries=tries, held=tries)
        except BrokenError as broken:
            made[name] += collections.Counter(tries=broken.tries, broken=broken.tries)
            notes.append(f"{name} {lane.number}: {broken}")
            (folder / "broken.txt").write_text("\n\n".join(notes) + "\n")
        except ImpossibleError as why:
            made[name]["impossible"] = 1
            notes.append(f"{name} cannot be run here: {why}")
        counts = {name: dict(count) for name, count in made.items()}
        (folder / "counts.json").write_text(json.dumps({"made": counts, "notes": notes}))
    return 0


def table(total: dict[str, collections.Counter[str]]) -> Iterator[str]:
    """Markdown."""
    yield "| what was done | tries | held | broken |"
    yield "|---|---|---|---|"
    for name, count in total.items():
        if count["impossible"]:
            yield f"| {KINDS[name].what} | cannot be run here | | |"
        else:
            yield f"| {KINDS[name].what} | {count['tries']} | {count['held']} | {count['broken']} |"


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="no trial begins after that time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="processes that try at the same time")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the tries of an hour")
    parser.add_argument("--steps", type=int, default=8, help="of every run")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], metavar="KIND")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/chaos"), help="made anew")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    began = time.monotonic()
    args.deadline = began + 60 * args.minutes
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    folders = [(args.out / f"lane{index}").absolute() for index in range(args.lanes)]
    tasks = [lambda f=folder, i=index: run_lane(f, i, args.lanes, args) for index, folder in enumerate(folders)]
    pids = [fork(task, args.out / f"lane{index}.log") for index, task in enumerate(tasks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    total = {name: collections.Counter[str]() for name in args.kinds}
    notes = []
    for folder in folders:
        if (folder / "counts.json").exists():
            counts = json.loads((folder / "counts.json").read_text())
            notes += counts["notes"]
            for name, count in counts["made"].items():
                total[name] += collections.Counter(count)
    minutes = (time.monotonic() - began) / 60
    print("\n".join([*table(total), "", f"{minutes:.0f} minutes, seed {args.seed}, {args.lanes} lanes", *notes]))
    values = {"minutes": minutes, "seed": args.seed, "lanes": args.lanes, "notes": notes}
    made = {name: dict(count) for name, count in total.items()}
    (args.out / "table.json").write_text(json.dumps(values | {"made": made}, indent=1) + "\n")
    failed = any(codes) or any(count["broken"] for count in total.values())
    return 1 if failed or not any(count["tries"] for count in total.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
