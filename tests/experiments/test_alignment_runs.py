# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The alignment experiment's runner: arms that are valid configs, and jobs that resume, share and stop in time.

Trainers are a fake command here, which logs a step now and then and obeys SIGTERM; the last test runs the real one.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from experiments.alignment import arms, assess, run
from experiments.alignment.arms import ARMS, SCALES, Run
from experiments.alignment.jobs import Budget, Job, run_jobs
from qarl_jax import sft
from qarl_jax.run import config
from qarl_jax.typed_config import load
from qarl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "alignment"
FAKE = pathlib.Path(__file__).with_name("fake_trainer.py")


# ---- arms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_run_is_a_valid_config_that_differs_only_in_what_its_arm_varies(scale):
    reference = load.to_dict(config.load(scale.config))
    varied = {"quant", "loss", "run_dir", "seed"}
    for stage in arms.stages(scale, vllm=True):
        for one in stage:
            cfg = config.load(scale.config, [*arms.overrides(one.arm, scale, one.rung, one.vllm), f"seed={one.seed}"])
            tree = load.to_dict(cfg)
            differing = {key for key in tree if tree[key] != reference[key]}
            also = {"rollout", "model"} if one.vllm else {"train"} if one.arm.name == "f_on_policy_grpo" else set()
            assert differing <= varied | also, one.name
            assert cfg.rollout.engine_name == ("vllm" if one.vllm else "jax")
            assert cfg.model.path == reference["model"]["path"]
            assert cfg.quant.forward == (one.rung if one.arm.learner == "low" else "bf16")
            assert cfg.quant.rollout_scheme == (one.rung if one.arm.sampler == "low" else "bf16")


def test_the_plan_s_arms_seeds_and_rungs_are_all_there():
    names = [one.name for stage in arms.stages(SCALES["gpu"]) for one in stage]
    assert len(names) == len(set(names))
    main = [arm for arm in ARMS.values() if arm.main]
    assert [arm.name[0] for arm in main] == ["1", "2", "3", "4"]
    for seed in (0, 1, 2):
        assert sum(name.endswith(f"w4a16_g128/{arm.name}/seed{seed}") for name in names for arm in main) == 3
        assert f"bf16/1_bf16_grpo/seed{seed}" in names
    assert {"w8a8/2_rollout_grpo/seed0", "w8a8/4_qarl_tbpo/seed0", "fp8/4_qarl_tbpo/seed0"} <= set(names)
    assert sum(name.startswith("w4a16_g128/") and name.split("/")[1][0] in "abcdefghi" for name in names) == 9


def test_vllm_confirms_the_main_arms_after_the_ablations():
    gpu = arms.stages(SCALES["gpu"])
    (number,) = (i for i, stage in enumerate(gpu) if stage[0].vllm)
    names = [one.name for one in gpu[number]]
    assert names[0] == "bf16_vllm/1_bf16_grpo/seed0"
    assert names[3] == "w4a16_g128_vllm/4_qarl_tbpo/seed0"
    assert len(names) == 4
    assert "a_grpo" in gpu[number - 1][0].name
    assert not any(one.vllm for stage in arms.stages(SCALES["cpu"]) for one in stage)
    assert sum(one.vllm for stage in arms.stages(SCALES["cpu"], vllm=True) for one in stage) == 4


@pytest.mark.parametrize(("name", "factor"), [("gpu", 4.9), ("cpu", 15.0)])
def test_bands_are_scaled_by_the_root_of_the_length(name, factor):
    scale = SCALES[name]
    assert scale.band_factor == factor  # sqrt(4096 / 173) = 4.87, sqrt(4096 / 19.4) = 14.5: two digits
    loss = config.load(scale.config, arms.overrides(ARMS["4_qarl_tbpo"], scale, scale.main)).loss
    expected = (4e-4 * factor, 3e-4 * factor, 7e-4 * factor)
    assert (loss.clip_high, loss.neg_clip_low, loss.neg_clip_high) == pytest.approx(expected)
    grpo = config.load(scale.config, arms.overrides(ARMS["1_bf16_grpo"], scale, scale.main)).loss
    assert (grpo.clip_low, grpo.clip_high, grpo.mismatch) == (0.2, 0.2, "tis")


def test_the_base_and_the_runs_read_the_same_tasks():
    base, cfg = load.load(sft.Config, FOLDER / "base_sft.yaml", []), config.load(FOLDER / "rl.yaml")
    assert base.data == cfg.data
    hidden, ffn = (base.model.init[key] for key in ("hidden_size", "intermediate_size"))
    heads = base.model.init["num_attention_heads"] * base.model.init["head_dim"]
    assert [width % 128 for width in (hidden, ffn, heads)] == [0, 0, 0]  # w4a16 with groups of 128 divides them


@pytest.mark.parametrize("name", ["rl.yaml", "rl_cpu.yaml", "base_sft.yaml"])
def test_every_config_s_header_says_how_it_is_run(name):
    header = [line for line in (FOLDER / name).read_text().splitlines() if line.startswith("#")]
    assert any("command" in line and "experiments.alignment.run" in line for line in header)
    assert any("hardware" in line for line in header)
    assert yaml.safe_load((FOLDER / name).read_text())


# ---- jobs ----------------------------------------------------------------------------------------------------------


def job(tmp_path, name, code, program="p", warm=None):
    done = tmp_path / f"{name}.done"
    text = f"import pathlib, signal, sys, time\ndone = pathlib.Path({str(done)!r})\n{code}"
    is_warm = (lambda: True) if warm is None else (tmp_path / warm).exists
    command = [sys.executable, "-c", text]
    return Job(
        name=name, command=command, log=tmp_path / f"{name}.log", is_done=done.exists, program=program, is_warm=is_warm
    )


def test_jobs_run_until_they_are_done_and_not_again(tmp_path):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')\ndone.touch()"
    jobs = [job(tmp_path, "a", count), job(tmp_path, "b", count)]
    assert run_jobs(jobs, parallel=2, budget=Budget(None), poll_s=0.01)
    assert run_jobs(jobs, parallel=2, budget=Budget(None), poll_s=0.01)
    assert (tmp_path / "count").read_text() == "xx"


def test_only_one_process_compiles_at_a_time(tmp_path):
    # Both log when they start; the second, of another program, must not start before the first says it has compiled.
    log = tmp_path / "order"
    say = f"f = open({str(log)!r}, 'a')\nf.write(sys.argv[0] + '{{}} ')\nf.flush()\n"
    first = say.format("first") + (
        f"time.sleep(0.5)\nf.write('compiled ')\nf.flush()\npathlib.Path({str(tmp_path / 'warm')!r}).touch()\n"
        "time.sleep(0.5)\ndone.touch()"
    )
    second = say.format("second") + "done.touch()"
    jobs = [job(tmp_path, "first", first, "one", warm="warm"), job(tmp_path, "second", second, "two")]
    warm: set[str] = set()
    assert run_jobs(jobs, parallel=2, budget=Budget(None), warm=warm, poll_s=0.01)
    assert log.read_text().replace("-c", "").split() == ["first", "compiled", "second"]
    assert warm == {"one", "two"}


def test_a_job_that_waits_for_another_starts_as_soon_as_it_can(tmp_path):
    log = tmp_path / "order"

    def say(name):
        return f"open({str(log)!r}, 'a').write('{name} ')\ndone.touch()"

    first, second, last = (job(tmp_path, name, say(name)) for name in ("first", "second", "last"))
    last = dataclasses.replace(last, is_ready=first.is_done)
    assert run_jobs([last, first, second], parallel=1, budget=Budget(None), poll_s=0.01)
    assert log.read_text().split() == ["first", "last", "second"]


def test_what_waits_for_a_job_that_failed_is_not_waited_for(tmp_path):
    failing = job(tmp_path, "failing", "sys.exit(3)")
    waiting = dataclasses.replace(job(tmp_path, "waiting", "done.touch()"), is_ready=failing.is_done)
    failed: list[str] = []
    assert not run_jobs([waiting, failing], parallel=2, budget=Budget(None), poll_s=0.01, failed=failed)
    assert failed == ["failing"]
    assert not waiting.is_done()


def test_jobs_are_spread_over_devices(tmp_path):
    # Each waits until all three have started: two on the first device, one on the second.
    names = ("a", "b", "c")
    code = (
        "import os\n"
        "(done.parent / f'{done.stem}.on').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        f"while not all((done.parent / f'{{name}}.on').exists() for name in {names}):\n    time.sleep(0.01)\n"
        "done.touch()"
    )
    said = []
    jobs = [job(tmp_path, name, code) for name in names]
    options = {"parallel": 2, "devices": ("4", "7"), "compiles": 3, "warm": {"p"}}
    assert run_jobs(jobs, budget=Budget(60), say=said.append, poll_s=0.01, **options)
    assert [(tmp_path / f"{name}.on").read_text() for name in names] == ["4", "7", "4"]
    assert "b: started on GPU 7" in said


def test_several_may_compile_but_not_the_same_program(tmp_path):
    # "a" and "c" compile side by side; "b" has the program of "a" and waits until that is compiled.
    both = (
        "while not ((done.parent / 'a.log2').exists() and (done.parent / 'c.log2').exists()):\n    time.sleep(0.01)\n"
    )
    start = "(done.parent / f'{done.stem}.log2').touch()\n"
    early = "assert (done.parent / 'warm').exists()\n"
    jobs = [
        job(tmp_path, "a", start + both + "(done.parent / 'warm').touch()\ndone.touch()", "one", "warm"),
        job(tmp_path, "b", early + "done.touch()", "one", "warm"),
        job(tmp_path, "c", start + both + "done.touch()", "two", "c.done"),
    ]
    assert run_jobs(jobs, parallel=3, compiles=2, budget=Budget(60), poll_s=0.01)


def test_a_failing_job_is_reported_and_the_others_go_on(tmp_path):
    said = []
    jobs = [job(tmp_path, "bad", "sys.exit('no such thing')"), job(tmp_path, "good", "done.touch()")]
    assert not run_jobs(jobs, parallel=1, budget=Budget(None), say=said.append, poll_s=0.01)
    assert jobs[1].is_done()
    assert any("bad: failed with exit code 1" in line and "no such thing" in line for line in said)


class Clock:
    """A clock that a test moves; every look at it takes a tenth of a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.1
        return self.now


def test_nothing_starts_that_could_not_end_in_time(tmp_path):
    jobs = [job(tmp_path, "a", "done.touch()")]
    assert not run_jobs(jobs, parallel=1, budget=Budget(40, Clock()), least_s=45, grace_s=30, poll_s=0.01)
    assert not (tmp_path / "a.log").exists()


def test_at_the_end_of_the_budget_running_jobs_save_and_stop(tmp_path):
    started = tmp_path / "started"
    code = (
        f"saved = pathlib.Path({str(tmp_path / 'saved')!r})\n"
        "def stop(*_):\n    saved.touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(120)"
    )

    class Patient(Clock):  # time passes once the job is up
        def __call__(self):
            self.now += 1.0 if started.exists() else 0.0
            return self.now

    budget, said = Budget(100, Patient()), []
    assert not run_jobs(
        [job(tmp_path, "long", code)], parallel=1, budget=budget, least_s=45, grace_s=30, say=said.append, poll_s=0.01
    )
    assert (tmp_path / "saved").exists()
    assert any("told to save" in line for line in said)


def test_an_interrupted_runner_tells_its_jobs_to_save(tmp_path):
    started, saved = tmp_path / "started", tmp_path / "saved"
    code = (
        f"def stop(*_):\n    pathlib.Path({str(saved)!r}).touch()\n    sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, stop)\npathlib.Path({str(started)!r}).touch()\ntime.sleep(120)"
    )

    def clock():  # the terminal's Ctrl-C, or our SIGTERM, once the job is up
        if started.exists() and not saved.exists():
            started.unlink()
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path, "long", code)], parallel=1, budget=Budget(1000, clock), poll_s=0.01)
    assert saved.exists()


def test_sigterm_is_an_interrupt_and_only_inside():
    before = signal.getsignal(signal.SIGTERM)

    def terminated():
        with run.terminable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)  # the signal arrives in it

    with pytest.raises(KeyboardInterrupt):
        terminated()
    assert signal.getsignal(signal.SIGTERM) is before


# ---- the runner ----------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path):
    """The small scale, with trainers that only pretend: four steps, of which each start makes three."""
    scale = dataclasses.replace(SCALES["cpu"], seeds=(0, 1))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    python.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    return run.Experiment(scale=scale, work=work, settings=("train.steps=4", "eval.every=0"), python=str(python))


def starts(experiment, one):
    return (experiment.folder(one) / "starts").read_text().count("x")


def test_a_run_is_started_again_until_it_is_complete_and_then_tested(toy):
    one = Run(arm=ARMS["4_qarl_tbpo"], rung=toy.scale.main, seed=0)
    assert not run.train(toy, [one], 1, Budget(None))  # three steps, as if a budget had ended
    assert not (toy.folder(one) / "done.json").exists()
    assert not (toy.folder(one) / "test.json").exists()
    assert run.train(toy, [one], 1, Budget(None))
    assert run.logged(toy.folder(one)) == 4
    assert json.loads((toy.folder(one) / "test.json").read_text())["fake"]
    assert run.train(toy, [one], 1, Budget(None))
    assert starts(toy, one) == 2


@pytest.mark.slow
def test_everything_goes_on_where_it_stopped_stage_by_stage(toy):
    for _ in range(20):
        if run.everything(toy, 2, Budget(None), stages=2):
            break
    names = [one.name for stage in arms.stages(toy.scale)[:2] for one in stage]
    assert all((toy.work / "runs" / name / "test.json").exists() for name in names)
    assert (toy.work / "base_test.json").exists()
    assert len(list((toy.work / "runs").glob("*/*/seed*"))) == len(names) == 8
    assert json.loads((toy.work / "base.json").read_text())["sha256"]
    assert "tested" in run.listing(toy).splitlines()[0]


@pytest.mark.slow
def test_an_unfinished_stage_is_not_followed_by_the_next(toy):
    assert not run.everything(toy, 4, Budget(None))
    assert not list((toy.work / "runs").glob("*/*/seed1"))


@pytest.mark.slow
def test_some_runs_are_named_by_patterns_and_run_in_their_order(toy):
    chosen = dataclasses.replace(toy, patterns=("w2a16_*/4_*/seed0", "*/2_*/seed1", "*/seed1"))
    (stage,) = chosen.stages
    names = [one.name for one in stage]
    assert names[0] == "w2a16_g128/4_qarl_tbpo/seed0"
    assert names[1:4] == [f"{rung}/2_rollout_grpo/seed1" for rung in ("w4a16_g-1", "w3a16_g128", "w2a16_g128")]
    assert len(names) == len(set(names)) == 1 + 3 + 7  # a run is taken once, where it is named first
    with pytest.raises(UserError, match="no run has such a name; --list"):
        _ = dataclasses.replace(toy, patterns=("w2a16_g128",)).stages
    assert not run.everything(chosen, 2, Budget(None))
    assert {str(path.parent.relative_to(toy.work / "runs")) for path in toy.work.glob("runs/*/*/*/starts")} == set(
        names
    )


DIVERGENCE = (
    "Traceback (most recent call last):\n  ...\nRuntimeError: step 2, update 3 of 8: the gradient is not finite. The"
    " run stops here; its last checkpoint is intact. Lower optimizer.lr, or inspect samples.jsonl.\n"
)


@pytest.mark.slow
def test_a_diverged_arm_has_ended_is_tested_and_blocks_nothing(toy):
    stage = arms.stages(toy.scale)[0]
    run.train(toy, stage, 4, Budget(None))
    (toy.folder(stage[1]) / "last_words").write_text(DIVERGENCE)
    assert run.train(toy, stage, 4, Budget(None))
    assert toy.failed == []
    failed = json.loads((toy.folder(stage[1]) / "failed.json").read_text())
    assert (failed["step"], failed["update"], failed["checkpoint"]) == (2, 3, 3)
    assert failed["error"].startswith("RuntimeError: step 2, update 3")
    assert not (toy.folder(stage[1]) / "done.json").exists()
    assert (toy.folder(stage[1]) / "test.json").exists()
    assert "diverged, tested" in run.listing(toy)
    assert run.train(toy, stage, 4, Budget(None))
    assert starts(toy, stage[1]) == 2  # it is not started again


@pytest.mark.parametrize("words", ["MemoryError: no room\n", "the gradient is not finite\n"])
def test_another_failure_is_no_divergence(toy, words):
    one = Run(arm=ARMS["4_qarl_tbpo"], rung=toy.scale.main, seed=0)
    toy.folder(one).mkdir(parents=True)
    (toy.folder(one) / "last_words").write_text(words)
    assert not run.train(toy, [one], 1, Budget(None))
    assert toy.failed == [one.name]
    assert not (toy.folder(one) / "failed.json").exists()


def test_only_exit_code_one_is_a_divergence(tmp_path):
    assert not run.note_divergence(tmp_path, -9, DIVERGENCE)
    assert not list(tmp_path.iterdir())
    assert run.note_divergence(tmp_path, 1, DIVERGENCE)
    assert json.loads((tmp_path / "failed.json").read_text())["checkpoint"] == 0


def test_the_runner_s_exit_code_is_one_after_a_failure_and_the_results_are_packed(toy, tmp_path, monkeypatch, capsys):
    def execute(experiment, args, budget):
        one = Run(arm=ARMS["4_qarl_tbpo"], rung=toy.scale.main, seed=0)
        toy.folder(one).mkdir(parents=True, exist_ok=True)
        (toy.folder(one) / "last_words").write_text("MemoryError: no room\n")
        return experiment.run_jobs([toy.job(one)], budget)

    monkeypatch.setattr(run, "execute", execute)
    assert run.main(["--scale", "cpu", "--work", str(toy.work), "--pack", str(tmp_path / "x.tar.xz")]) == 1
    assert "failed: w4a16_g-1/4_qarl_tbpo/seed0" in capsys.readouterr().out
    assert (tmp_path / "x.tar.xz").exists()


# ---- the base ------------------------------------------------------------------------------------------------------


def test_another_base_is_refused_and_both_places_are_named(toy, tmp_path, monkeypatch):
    one = Run(arm=ARMS["4_qarl_tbpo"], rung=toy.scale.main, seed=0)
    assert run.make_base(toy, Budget(None))
    run.train(toy, [one], 1, Budget(None))
    assert run.base_hash(toy.folder(one)) == run.base_hash(toy.work)
    (toy.folder(one) / "base.json").write_text('{"sha256": "abc"}')
    with pytest.raises(UserError, match=r"4_qarl_tbpo/seed0: this run started from another policy \(sha256 abc\)"):
        run.train(toy, [one], 1, Budget(None))
    (toy.work / "base.json").write_text('{"sha256": "abc"}')
    with pytest.raises(
        UserError, match="tiny-qwen3: another policy .* than .*" + re.escape(f"{toy.work / 'base.json'} has (abc)")
    ):
        run.make_base(toy, Budget(None))
    (toy.work / "base.json").unlink()
    monkeypatch.setattr(run, "HASH", tmp_path / "base.sha256")
    run.HASH.write_text('{"cpu": "abc"}')
    with pytest.raises(UserError, match=r"than .*/base\.sha256 has \(abc\)"):
        run.make_base(toy, Budget(None))


def test_bands_for_another_length_are_refused_and_an_unknown_length_is_said(toy, capsys):
    run.check_length(toy)
    (toy.work / "base_test.json").write_text('{"num_samples": 4, "schemes": {}}')  # of an earlier version
    run.check_length(toy)
    assert capsys.readouterr().out.count("not known yet") == 2
    for length in (15.6, 23.2):  # within a fifth of 19.4
        assert f"{length} tokens" in assess.check_response_len({"response_len": length}, toy.scale)
    for length in (15.4, 23.4):
        with pytest.raises(UserError, match=r"Scale\.response_len"):
            assess.check_response_len({"response_len": length}, toy.scale)
    assert run.evaluate_base(toy, Budget(None))  # measures it
    run.check_length(toy)
    assert "19.0 tokens" in capsys.readouterr().out


def test_a_program_that_was_compiled_here_is_warm_as_long_as_its_cache_is(toy):
    one = Run(arm=ARMS["4_qarl_tbpo"], rung=toy.scale.main, seed=0)
    run.train(toy, [one], 1, Budget(None))
    assert toy.warm() == set()
    (toy.work / "xla_cache").mkdir()
    (toy.work / "xla_cache" / "entry").touch()
    assert toy.warm() == {one.program}


def test_programs_are_compiled_with_a_toy_policy_and_nothing_else_is_touched(toy, capsys, monkeypatch, tmp_path):
    (tmp_path / "base.sha256").write_text('{"cpu": "the hash of the real one"}')
    monkeypatch.setattr(run, "HASH", tmp_path / "base.sha256")
    assert run.warm_up(toy, 2, Budget(None), stages=2)
    stages = arms.stages(toy.scale)
    programs = [one.program for one in stages[0]]
    assert [one.program for one in stages[1]] == programs
    assert all(run.logged(toy.toy.folder(one)) == 1 for one in stages[0])
    assert not any(toy.toy.folder(one).exists() for one in stages[1])
    assert not (toy.work / "runs").exists()
    assert not (toy.work / "base.json").exists()
    assert capsys.readouterr().out.count("compiled; proximal/noise") == 4
    assert toy.toy.environment == toy.environment
    toy.compiled.mkdir()
    (toy.compiled / "entry").touch()
    assert toy.warm() == set(programs)


def test_a_stretch_makes_the_policy_compiles_beside_it_runs_and_packs(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    script = arms.HERE / "stretch.sh"
    names = ["w4a16_g128/[34]_*/seed2", "w3a16_g128/*"]
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "work"), "900", *names],
        env=os.environ | {"PYTHON": str(python), "GPUS": "2", "JOBS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {line[0] for line in calls[:2]} == {"0", "1"}  # the policy and the compiling, side by side
    assert all(" ".join(names) in line for line in calls if "--warm-up" in line or "--all" in line)
    assert "--all" in calls[2]
    assert "--devices 2 --jobs 3" in calls[2]
    assert calls[3].endswith(f"--pack {tmp_path / 'work' / 'results.tar.xz'}")
    assert "schemes" in json.loads((tmp_path / "work" / "base_test.json").read_text())


def test_arms_of_a_seed_share_all_but_their_overrides(toy):
    stage = arms.stages(toy.scale)[0]
    commands = [toy.command(one) for one in stage]
    kept = [{word for word in command if not word.startswith(("quant.", "loss=", "run_dir="))} for command in commands]
    assert all(words == kept[0] for words in kept)


def test_a_mistake_in_the_settings_is_told_before_anything_runs(tmp_path, capsys):
    assert run.main(["--scale", "cpu", "--work", str(tmp_path), "--all", "train.stepz=3"]) == 2
    assert "train.steps" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("rewards", "saved", "expected"),
    [
        ({0: 0.5, 10: 0.7, 20: 0.9, 30: 0.8}, [10, 20, 30], {"final": 30, "selected": 20}),
        ({0: 0.9, 10: 0.7, 20: 0.7}, [10, 20], {"final": 20, "selected": 10}),  # the earlier of equals; 0 is not saved
        ({}, [40], {"final": 40, "selected": 40}),
    ],
)
def test_the_checkpoint_is_selected_on_the_validation_split(rewards, saved, expected):
    history = [{"version": v, "eval/reward/mean": r} for v, r in rewards.items()]
    assert assess.versions(history, saved) == expected


def test_a_run_without_a_checkpoint_cannot_be_tested():
    with pytest.raises(UserError, match="no checkpoint"):
        assess.versions([], [])


@pytest.mark.slow
def test_validation_and_test_prompts_differ_and_stay_the_same():
    from qarl_jax import data
    from qarl_jax.run import build

    cfg = config.load(SCALES["cpu"].config)
    tokenizer = data.load_tokenizer(ROOT / cfg.model.path)
    validation = {prompt.text for prompt in build.eval_prompts(cfg, tokenizer)}
    test = [prompt.text for prompt in assess.test_prompts(cfg, tokenizer, 512)]
    assert len(set(test)) == 512
    assert not validation & set(test)
    assert test == [prompt.text for prompt in assess.test_prompts(cfg, tokenizer, 512)]
    train = data.make_source(cfg.data, tokenizer, "train")
    assert not set(test) & {train.prompt(i).text for i in range(2000)}
    with pytest.raises(UserError, match=r"data\.holdout"):
        assess.test_prompts(cfg, tokenizer, 10**6)


@pytest.mark.nightly
def test_the_large_scale_s_code_runs_from_the_base_to_the_test(tmp_path):
    """At toy size: a policy from scratch, two arms side by side, each tested in two precisions."""
    tiny = [
        "train.updates=2",
        "optimizer.schedule.warmup_updates=0",
        "train.rows=8",
        "train.row_len=464",
        "model.init.num_hidden_layers=1",
    ]
    tiny += ["model.init.hidden_size=128", "model.init.intermediate_size=128", "model.init.num_attention_heads=2"]
    settings = ["train.steps=2", "train.prompts_per_step=4", "train.prompts_per_update=2", "eval.num_prompts=4"]
    settings += ["eval.num_samples=2", "train.micro_batch_rows=4", "rollout.engine.batch_size=32"]
    settings += ["rollout.num_samples_per_prompt=2", "checkpoint.every=1"]
    scale = dataclasses.replace(SCALES["gpu"], rungs=("w4a16:g128",), test_prompts=4, test_samples=2)
    experiment = run.Experiment(scale=scale, work=tmp_path, settings=tuple(settings), base_settings=tuple(tiny))
    runs = [Run(arm=ARMS[name], rung=scale.main, seed=0) for name in ("2_rollout_grpo", "4_qarl_tbpo")]
    assert run.make_base(experiment, Budget(None))
    assert run.train(experiment, runs, 2, Budget(None)), "".join(
        path.read_text()[-2000:] for path in (tmp_path / "log").iterdir()
    )
    for one in runs:
        test = json.loads((experiment.folder(one) / "test.json").read_text())
        assert set(test["final"]["schemes"]) == {"w4a16:g128", "bf16"}
        assert len(test["final"]["schemes"]["bf16"]) == 4
