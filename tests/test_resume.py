# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Nothing is lost: a run that is killed or interrupted, and started again with the same command, ends as if it had not.

Each kill happens in a process of its own, at a named point of the program or at a random moment, and each start uses
the same command. Most processes are forked from one that has imported the trainer and in which JAX has not begun. What
is compared is metrics.jsonl, eval.jsonl, samples.jsonl and the final checkpoint, bit for bit (except for what depends
on the clock).
"""

import contextlib
import dataclasses
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from qarl_jax import models, train
from qarl_jax.loop import resume, setup
from qarl_jax.observe import recorder
from qarl_jax.run import config
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.types import UserError
from tests.reference import forks, tiny

STEPS = 8
PATIENCE_S = 400  # for one process, on a machine that does other things as well

pytestmark = pytest.mark.usefixtures("shared_learners")  # of the runs in this process

# What a fork need not import again. No run leaves plots (tests/test_train.py has one that does).
IMPORTED = """
from transformers import PreTrainedTokenizerFast
from qarl_jax import plot, train
plot.leave = lambda run_dir: None
"""

# Runs the trainer, and sends it a signal when a function is entered, or has returned, for the n-th time.
KILLER = """
import importlib, os, signal, sys
number, module, path, when, nth = sys.argv[1:6]
*parents, name = path.split(".")
owner = importlib.import_module(module)
for parent in parents:
    owner = getattr(owner, parent)
function, calls = getattr(owner, name), [0]

def dying(*args, **kwargs):
    calls[0] += 1
    if when == "before" and calls[0] == int(nth):
        os.kill(os.getpid(), signal.Signals[number])
    out = function(*args, **kwargs)
    if when == "after" and calls[0] == int(nth):
        os.kill(os.getpid(), signal.Signals[number])
    return out

setattr(owner, name, dying)
from qarl_jax import train
sys.exit(train.main(sys.argv[6:]))
"""

# In this order on one run: (module, function, before or after, n-th call of this start).
KILLS = [
    ("qarl_jax.run.evaluation", "record", "after", 1),  # evaluated, nothing logged
    ("qarl_jax.run.checkpoint", "Checkpoints._start", "after", 1),  # arrays written, not yet a checkpoint
    ("qarl_jax.loop.updates", "Updates.run", "after", 2),  # updated, not published
    ("qarl_jax.run.on_disk", "write", "before", 2),  # a checkpoint without its manifest
    ("qarl_jax.observe.recorder", "Observer.log", "after", 2),  # a line whose step is not in any checkpoint
    ("qarl_jax.run.checkpoint", "Checkpoints._retire", "before", 2),  # one checkpoint too many
    ("qarl_jax.observe.recorder", "Observer.samples", "after", 1),
    ("qarl_jax.run.evaluation", "record", "after", 1),  # the last evaluation, not the last step
]
# A save in the background waits for the one before it, so that the fourth step begins when two are on disk.
LATE_KILLS = [("qarl_jax.run.on_disk", "write", "before", 4)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """That of the processes: programs are compiled once for all of them."""
    return tiny.environment(str(tmp_path_factory.mktemp("compiled")))


@pytest.fixture(scope="module")
def started(tmp_path_factory, environment):
    """As `start` and `wait`: (exit code, output) of the trainer, in a fork."""
    with forks.exits(IMPORTED, tmp_path_factory.mktemp("forks"), environment) as ended:

        def run(world, kill=None, number=signal.SIGKILL):
            killer = [] if kill is None else [number.name, *map(str, kill)]
            begin = KILLER if killer else "sys.exit(train.main(sys.argv[1:]))"
            return ended(f"import sys\nsys.argv = {['', *killer, *world.command()]}\n{begin}")

        yield run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = tiny.World(tmp_path_factory.mktemp("world"))
    return world.changed(train={"steps": STEPS}, eval={"every": 3}, log={"view": "lines"})


@pytest.fixture(scope="module")
def uninterrupted(world, started):
    """Records of the run that nobody disturbed."""
    whole = world.changed(run_dir=str(world.folder / "whole"))
    assert started(whole)[0] == 0
    return outcome(whole)


def start(world, environment, kill=None, number=signal.SIGKILL):
    """The trainer's process, which sends itself the signal where `kill` says."""
    command = ["-m", "qarl_jax.train"] if kill is None else ["-c", KILLER, number.name, *map(str, kill)]
    return subprocess.Popen(
        [sys.executable, *command, *world.command()],
        cwd=tiny.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process):
    """(exit code, output)."""
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, said


def outcome(world):
    """Everything that two equal runs have in common."""
    state = models.split(tiny.random_model())[1]
    back = Checkpoints(world.run_dir / "checkpoints").restore({"params": state})
    assert back.step == STEPS
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(back.state)]
    return {name: world.records(name) for name in ("metrics", "eval", "samples")} | {"params": bits}


def assert_equal(world, uninterrupted):
    found = outcome(world)
    for name, wanted in uninterrupted.items():
        assert len(found[name]) == len(wanted), name
        for number, (one, other) in enumerate(zip(found[name], wanted, strict=True)):
            assert one == other, (name, number)


def lines(world):
    with contextlib.suppress(FileNotFoundError):
        return (world.run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def wait_for_lines(world, process, count):
    """Until the run has logged `count` steps."""
    deadline = time.monotonic() + PATIENCE_S
    while lines(world) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [pytest.param(KILLS, marks=pytest.mark.nightly), LATE_KILLS], ids=["every-part-of-a-step", "two-saves"]
)
def test_a_run_killed_at_every_dangerous_point_equals_one_that_was_not(world, started, uninterrupted, kills):
    victim = world.changed(run_dir=str(world.folder / f"killed{len(kills)}"))
    for kill in kills:
        code, said = started(victim, kill)
        assert code == -signal.SIGKILL, (kill, said)
    code, said = started(victim)
    assert code == 0, said
    assert f"resuming {victim.run_dir} after step" in said
    assert_equal(victim, uninterrupted)
    left = sorted(path.name for path in (victim.run_dir / "checkpoints").iterdir())
    assert left == [f"step_{step:08d}" for step in (STEPS - 1, STEPS)]  # no debris


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_killed_at_random_moments_equals_one_that_was_not(world, environment, uninterrupted):
    victim = world.changed(run_dir=str(world.folder / "random"))
    for after in (1, 4):
        process = start(victim, environment)
        wait_for_lines(victim, process, after)
        delay_s = random.SystemRandom().uniform(0, 0.3)
        time.sleep(delay_s)
        process.kill()
        code, said = wait(process)
        assert code in (-signal.SIGKILL, 0), (delay_s, said)
    code, said = wait(start(victim, environment))
    assert code == 0, said
    assert_equal(victim, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)],
    ids=lambda number: number.name,
)
def test_an_interrupt_saves_exits_with_0_and_the_same_command_goes_on(
    world, environment, started, uninterrupted, number
):
    # Checkpoints are far apart, so that what is saved is saved because of the signal.
    section = {"checkpoint": {"every": 100}}
    victim = world.changed(run_dir=str(world.folder / number.name), **section)
    # From inside, because a signal from outside may come too late: after the last step.
    code, said = started(victim, ("qarl_jax.loop.updates", "Updates.run", "before", 3), number)
    assert code == 0, said
    assert f"{number.name}: saving" in said
    assert "interrupted: saved after step" in said
    assert "Traceback" not in said
    done = lines(victim)
    assert 2 <= done < STEPS
    assert Checkpoints(victim.run_dir / "checkpoints").steps() == [done]
    if number == signal.SIGINT:  # nor does it matter that every program is compiled anew
        anew = {key: value for key, value in environment.items() if key != "JAX_COMPILATION_CACHE_DIR"}
        code, said = wait(start(victim, anew))
    else:
        code, said = started(victim)
    assert code == 0, said
    assert f"after step {done}" in said
    assert_equal(victim, uninterrupted)


@pytest.fixture(scope="module")
def one_step(world):
    """A run of one step, to be left as it is."""
    changed = world.changed(run_dir=str(world.folder / "data"), train={"steps": 1})
    assert train.main(changed.command()) == 0
    return changed


@pytest.mark.slow
def test_a_run_resumes_over_the_same_data_only(one_step, capsys, monkeypatch):
    monkeypatch.setattr(setup.build, "make_engine", lambda *_: pytest.fail("refused only after the engine has started"))
    for override, name in [
        ("data.max_prompt_len=9", "the data set (its file, parameters, template or split)"),
        ("seed=4", "seed"),
    ]:
        assert train.main(one_step.command("train.steps=2", override)) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: cannot resume: {name} changed since the checkpoint")
        assert "Restore it, or start a new run_dir" in said
    assert lines(one_step) == 1


class Recorded(recorder.Silent):
    """An observer of a run whose records end at step `last`; keeps what it was told."""

    def __init__(self, last):
        self.last, self.said, self.aside = last, [], False

    def latest(self):
        return self.last

    def say(self, text):
        self.said.append(text)

    def set_aside(self):
        self.aside = True


@pytest.mark.parametrize("lost", ["manifests", "folders"])
def test_records_without_a_whole_checkpoint_are_refused_and_kept_aside_on_request(tmp_path, world, lost):
    cfg = config.load(world.command()[1], [f"run_dir={tmp_path}"])
    state = {"x": np.zeros(3)}
    at_once = dataclasses.replace(cfg.checkpoint, asynchronous=False)
    with Checkpoints(tmp_path / "checkpoints", at_once) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
        if lost == "folders":
            shutil.rmtree(checkpoints.directory)
        else:
            for step in checkpoints.steps():
                (checkpoints.path(step) / "manifest.json").unlink()
        with pytest.raises(UserError, match=r"Put one back.*checkpoint\.start_over=true"):
            resume.restore(cfg, checkpoints, Recorded(1), state)
        anew = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, start_over=True))
        observer = Recorded(1)
        assert resume.restore(anew, checkpoints, observer, state) is None
        assert observer.aside
        assert "old records" in observer.said[0]


def test_a_run_that_ended_before_its_first_checkpoint_says_that_it_begins_again(tmp_path, world):
    cfg = config.load(world.command()[1], [f"run_dir={tmp_path}", "checkpoint.every=2"])
    with Checkpoints(tmp_path / "checkpoints", cfg.checkpoint) as checkpoints:
        observer = Recorded(3)  # the save after step 2 may not have been over when the fourth step was
        assert resume.restore(cfg, checkpoints, observer, {}) is None
        assert "begins at step 0 again" in observer.said[0]
        with pytest.raises(UserError, match="checkpoints are gone"):
            resume.restore(cfg, checkpoints, Recorded(4), {})
        quiet = Recorded(None)
        assert resume.restore(cfg, checkpoints, quiet, {}) is None
        assert not quiet.said


@pytest.mark.slow
def test_a_run_whose_manifests_are_gone_is_begun_anew_only_when_asked(one_step, capsys):
    changed = one_step.changed(run_dir=str(one_step.folder / "lost"))
    shutil.copytree(one_step.run_dir, changed.run_dir)
    records = {name: changed.records(name) for name in ("metrics", "eval", "samples")}
    for step in (changed.run_dir / "checkpoints").iterdir():
        (step / "manifest.json").unlink()
    capsys.readouterr()
    assert train.main(changed.command()) == 2
    assert "error: Every checkpoint" in capsys.readouterr().err
    assert {name: changed.records(name) for name in records} == records
    assert train.main(changed.command("checkpoint.start_over=true")) == 0
    assert {name: changed.records(name) for name in records} == records
    assert (changed.run_dir / "metrics.jsonl.old-1").read_bytes().count(b"\n") == 1
