# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about what a run leaves behind: valid JSON, nothing torn, nothing twice, and comparable after a resume."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from qarl_jax.metrics import PERF, TIME, Max, Mean, phases
from qarl_jax.observe import recorder
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.observe.recorder import Config, Observer, read_lines
from qarl_jax.types import Prompt, RolloutGroup, UserError
from tests.reference.rollouts import completion

QUIET = Config(view="off", trackers=())


def group(uid="t/0", rewards=(0.0, 1.0), texts=("no", "yes")):
    completions = tuple(completion((3,) * (i + 1), prompt=(1, 2), version=4) for i in range(len(texts)))
    prompt = Prompt(uid=uid, tokens=(1, 2), text="1+1=", answer="2")
    return RolloutGroup(prompt=prompt, completions=completions, rewards=np.asarray(rewards, np.float32), texts=texts)


def without_time(record):
    """What an interrupted and an uninterrupted run have in common."""
    return {key: value for key, value in record.items() if not key.startswith((TIME, PERF))}


@pytest.fixture
def observer(tmp_path):
    with Observer(tmp_path / "run", QUIET) as opened:
        yield opened


# -------------------------------------------------------------------------------------------------------- metrics.jsonl


def test_each_step_is_one_json_object_with_means_and_maxima_reduced(observer):
    observer.log(1, {"a": Mean(jnp.float32(6), jnp.float32(4)), "b": Max(jnp.float32(3)), "c": 2, "d": None, "e": "x"})
    observer.log(2, {"a": np.float32(0.5), "b": jnp.int32(7), "c": True})
    assert read_lines(observer.metrics_path) == [
        {"step": 1, "a": 1.5, "b": 3.0, "c": 2, "d": None, "e": "x"},
        {"step": 2, "a": 0.5, "b": 7, "c": True},
    ]


def test_the_host_divides_a_mean(observer):
    counts = jnp.asarray(np.arange(1, 5000), jnp.float32)
    means = {str(i): Mean(count, count) for i, count in enumerate(counts)} | {
        "none": Mean(counts[0] * 0, counts[0] * 0)
    }
    with jax.transfer_guard_host_to_device("disallow"):  # a device's program is not rounded correctly on a GPU
        observer.log(0, means)
    (found,) = read_lines(observer.metrics_path)
    assert (found.pop("step"), found.pop("none")) == (0, 0)
    assert set(found.values()) == {1.0}


def test_numbers_that_are_not_finite_become_null_and_say_what_they_were(observer):
    observer.log(1, {"a": float("nan"), "b": jnp.float32(-jnp.inf), "c": np.float32(np.inf), "d": 1.0})
    line = observer.metrics_path.read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": None,
        "d": 1.0,
        "nonfinite": {"a": "nan", "b": "-inf", "c": "inf"},
    }


def test_a_line_is_on_disk_as_soon_as_log_returns(observer):
    observer.log(1, {"a": 1.0})
    assert observer.metrics_path.read_bytes().endswith(b"}\n")


def test_steps_must_rise_even_across_a_reopening(tmp_path):
    with Observer(tmp_path, QUIET) as observer:
        observer.log(3, {})
        with pytest.raises(ValueError, match="Step 3 follows step 3"):
            observer.log(3, {})
    with Observer(tmp_path, QUIET) as observer, pytest.raises(ValueError, match="truncate_to"):
        observer.log(2, {})


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    def steps(observer, first, last, time):
        for step in range(first, last + 1):
            observer.log(step, {"reward/mean": step / 7, "time/step_s": time})
            observer.samples(step, [group(uid=f"t/{step}")])

    with Observer(tmp_path / "whole", QUIET) as observer:
        observer.truncate_to(-1)
        steps(observer, 1, 6, time=1.0)
    with Observer(tmp_path / "killed", QUIET) as observer:
        observer.truncate_to(-1)
        steps(observer, 1, 5, time=2.0)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "killed" / name).open("a") as file:
            file.write('{"step": 6, "reward/me')  # killed in the middle of a line
    with Observer(tmp_path / "killed", QUIET) as observer:
        observer.truncate_to(3)  # the last checkpoint
        steps(observer, 4, 6, time=3.0)

    for name in ("metrics.jsonl", "samples.jsonl"):
        whole, killed = ([without_time(r) for r in read_lines(tmp_path / run / name)] for run in ("whole", "killed"))
        assert whole == killed
        assert [r["step"] for r in whole] == [1, 2, 3, 4, 5, 6]


def test_a_fresh_start_in_a_used_directory_starts_from_nothing(tmp_path):
    with Observer(tmp_path, QUIET) as observer:
        observer.log(0, {"eval": 0.1})
        observer.truncate_to(-1)
        observer.log(0, {"eval": 0.2})
    assert [r["eval"] for r in read_lines(tmp_path / "metrics.jsonl")] == [0.2]


def test_a_torn_last_line_is_left_out_but_a_broken_one_before_it_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_lines(path) == [{"step": 1}]
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 is not JSON"):
        read_lines(path)
    with pytest.raises(UserError, match="Cannot read"):
        read_lines(tmp_path / "none.jsonl")


# ------------------------------------------------------------------------------------------------- samples and manifest


def test_samples_show_one_completion_of_each_of_some_groups_spread_over_the_step(observer):
    observer.samples(5, [group(uid=f"t/{i}") for i in range(9)], {(3, 1): {"advantage": 0.5}})
    records = read_lines(observer.samples_path)
    assert [(r["step"], r["uid"], r["response"], r["reward"]) for r in records] == [
        (5, "t/1", "no", 0.0),
        (5, "t/3", "yes", 1.0),
        (5, "t/5", "no", 0.0),
        (5, "t/8", "yes", 1.0),
    ]
    assert records[1] == {
        "step": 5,
        "uid": "t/3",
        "prompt": "1+1=",
        "response": "yes",
        "answer": "2",
        "reward": 1.0,
        "finish_reason": "stop",
        "prompt_len": 2,
        "response_len": 2,
        "policy_version": 4,
        "advantage": 0.5,
    }


def test_hostile_text_in_a_sample_stays_on_one_valid_line(observer):
    text = 'a\nb\u2028c"\\\x00\ud800 é'
    observer.samples(1, [group(rewards=(1.0,), texts=(text,))])
    assert observer.samples_path.read_bytes().count(b"\n") == 1
    assert read_lines(observer.samples_path)[0]["response"] == text


def test_samples_can_be_switched_off_and_empty_groups_are_skipped(tmp_path):
    with Observer(tmp_path, Config(view="off", trackers=(), samples_per_step=0)) as observer:
        observer.samples(1, [group()])
    assert not (tmp_path / "samples.jsonl").exists()
    assert recorder.sample_records([group(rewards=(), texts=())], 4) == []


def test_the_manifest_keeps_the_config_and_one_entry_per_start(tmp_path):
    for start in range(2):
        with Observer(tmp_path, QUIET) as observer:
            observer.start(config={"seed": start}, facts={"resumed_step": 10 * start})
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["config"] == {"seed": 1}
    assert [s["resumed_step"] for s in manifest["starts"]] == [0, 10]
    first = manifest["starts"][0]
    assert first["versions"]["jax"]
    assert first["versions"]["python"] == sys.version.split()[0]
    assert first["devices"].startswith("8 x ")


def test_the_git_revision_is_a_commit_or_none():
    revision = recorder.git_revision()
    assert revision is None or len(revision.removesuffix("+changes")) == 40


def test_asking_for_the_git_revision_leaves_the_index_alone(tmp_path, monkeypatch):
    file = tmp_path / "recorder.py"
    file.write_text("x = 1\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", file.name], [*who, "commit", "-qm", "One"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    os.utime(file, (1, 1))  # so that git would like to write the index
    before = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(recorder, "__file__", str(file))
    assert len(recorder.git_revision()) == 40
    assert (tmp_path / ".git" / "index").read_bytes() == before


# ------------------------------------------------------------------------------------------------------------ one owner


def test_a_second_process_is_refused_while_the_first_lives_and_welcome_when_it_is_killed(tmp_path):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import time
                from qarl_jax.observe.recorder import Observer, Config
                observer = Observer({str(tmp_path)!r}, Config(view="off", trackers=()))
                print("mine", flush=True)
                time.sleep(60)
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match=f"in use by process {child.pid}"):
            Observer(tmp_path, QUIET)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    Observer(tmp_path, QUIET).close()


def test_a_run_directory_below_a_file_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write to the run directory"):
        Observer(tmp_path / "file" / "run", QUIET)


def test_a_full_disk_is_an_error_that_names_the_file(observer, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder.Path, "open", full)
    with pytest.raises(UserError, match=r"Cannot write .*metrics\.jsonl: No space left on device"):
        observer.log(1, {})


@pytest.mark.parametrize("options", [{"view": "rich"}, {"samples_per_step": -1}, {"sample_tokens": -1}])
def test_impossible_settings_are_refused_with_the_field_s_name(options):
    # Where annotations are checked (--jaxtyping-packages), a wrong Literal is caught before our sentence.
    with pytest.raises((UserError, TypeCheckError), match=next(iter(options))):
        Config(**options)


# ------------------------------------------------------------------------------------------------------------ full disk


def fill_the_disk(monkeypatch, pattern, room=0):
    """Files whose names match take `room` more bytes: as on Linux a write is first cut short, and then refused."""
    real, left = open, [room]

    class Full(io.FileIO):
        def write(self, data):
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = bytes(data[: left[0]])
            left[0] -= len(taken)
            return super().write(taken)

    def opened(path, mode="r", buffering=-1, **options):
        if "b" not in mode or not re.search(pattern, str(path)):
            return real(path, mode, buffering, **options)
        raw = Full(path, mode.replace("b", ""))
        return raw if buffering == 0 else io.BufferedWriter(raw)

    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("room", [0, 10])
def test_a_record_that_does_not_fit_on_the_disk_ends_the_run_in_one_sentence(room, tmp_path, monkeypatch):
    with Observer(tmp_path, QUIET) as observer:
        observer.log(0, {"a": 0.5})
        with monkeypatch.context() as patched:
            fill_the_disk(patched, r"metrics\.jsonl", room)
            with pytest.raises(UserError, match=r"Cannot write .*metrics.jsonl: No space left on device"):
                observer.log(1, {"a": 0.25})
    with Observer(tmp_path, QUIET) as observer:  # with room again it goes on, whatever part of a line was written
        observer.truncate_to(observer.latest())
        observer.log(1, {"a": 0.25})
        assert [record["step"] for record in read_lines(observer.metrics_path)] == [0, 1]


def test_a_run_goes_on_when_nobody_reads_what_it_shows(tmp_path, caplog):
    reading, writing = os.pipe()
    os.close(reading)
    with (
        open(writing, "w") as stream,
        Observer(tmp_path, Config(view="lines", trackers=()), stream=stream) as observer,
    ):
        for step in range(3):
            observer.log(step, {"a": 0.5})
        observer.end("done")
        print("what others print there is lost, too", file=stream)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    assert [r.getMessage() for r in caplog.records] == ["Cannot show progress any more: Broken pipe. The run goes on."]


# ----------------------------------------------------------------------------------------------------------- PhaseTimer


def test_phases_add_up_within_a_step_and_start_anew_with_the_next():
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def spend(phase, seconds):
        with timer(phase):
            now[0] += seconds

    spend("rollout", 2.0)
    spend("update", 1.0)
    spend("rollout", 0.5)
    now[0] += 0.25
    assert timer.take() == {"time/rollout_s": 2.5, "time/update_s": 1.0, "time/other_s": 0.25, "time/step_s": 3.75}
    spend("update", 1.0)
    assert timer.take() == {"time/update_s": 1.0, "time/other_s": 0.0, "time/step_s": 1.0}


def test_a_phase_inside_another_is_taken_out_of_it_and_another_threads_is_beside_the_step():
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def grade():
        with timer("reward"):
            now[0] += 1.0

    with timer("rollout"):
        now[0] += 2.0
        with timer("compile"):
            now[0] += 4.0
        thread = threading.Thread(target=grade)
        thread.start()
        thread.join()
    found = timer.take()
    assert found.pop("time/beside/reward_s") == 1.0
    assert phases(found) == {"rollout": 3.0, "compile": 4.0, "other": 0.0}
    assert sum(phases(found).values()) == found["time/step_s"]


def test_a_phase_that_raises_is_still_counted():
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def fail():
        with timer("rollout"):
            now[0] += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timer.take()["time/rollout_s"] == 1.0


def test_spans_of_a_step_are_kept_for_a_picture(observer):
    now = [10.0]
    timer = PhaseTimer(clock=lambda: now[0])
    for _ in range(3):  # 5 ms apart: one span
        with timer("rollout"):
            now[0] += 1.0
        now[0] += 0.005
    with timer("update"):
        with timer("compile"):
            now[0] += 0.5
        now[0] += 0.5
    observer.timeline(7, (timer.take(), timer.taken)[1])
    (line,) = read_lines(observer.run_dir / "timeline.jsonl")
    ended = line.pop("ended")
    assert abs(ended - time.time()) < 60
    assert line == {
        "step": 7,
        "seconds": 4.015,
        "spans": [["rollout", 0.0, 3.01], ["compile", 3.015, 3.515], ["update", 3.015, 4.015]],
    }
    for _ in range(2000):  # more than any picture shows: the last one goes on
        with timer("reward"):
            now[0] += 0.02
        now[0] += 0.02
    timer.take()
    assert len(timer.taken.spans) == 500
    assert timer.taken.spans[-1][2] == pytest.approx(79.98)


def test_a_timer_beside_another_shows_its_phases_in_that_ones_picture():
    """Sampling ahead: it begins in one step and ends in the next, and counts in neither."""
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])
    behind = PhaseTimer(clock=lambda: now[0], beside=timer)
    now[0] = 1.0
    sampling = behind("rollout")
    sampling.__enter__()
    with timer("update"):
        now[0] = 3.0
    assert phases(timer.take()) == {"update": 2.0, "other": 1.0}
    assert timer.taken.spans == [("update", 1.0, 3.0), ("beside/rollout", 1.0, 3.0)]
    behind.take()  # as the thread does between batches: the picture is the other's
    now[0] = 4.0
    sampling.__exit__(None, None, None)
    now[0] = 5.0
    assert phases(timer.take()) == {"other": 2.0}
    assert timer.taken.spans == [("beside/rollout", 0.0, 1.0)]
    assert behind.take()["time/rollout_s"] == 3.0


def test_records_are_set_aside_once_there_is_something_to_record(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "eval.jsonl").write_text('{"version": 0}\n')
    with recorder.Observer(tmp_path, recorder.Config(view="off")) as observer:
        observer.set_aside()
    assert not list(tmp_path.glob("*.old-*")), "a start that trained nothing"
    with recorder.Observer(tmp_path, recorder.Config(view="off", trackers=())) as observer:
        observer.set_aside()
        observer.truncate_to(-1)
        observer.log(0, {"reward/mean": 1.0})
    assert {path.name for path in tmp_path.glob("*.old-*")} == {"metrics.jsonl.old-1", "eval.jsonl.old-1"}
    assert len(recorder.read_lines(tmp_path / "metrics.jsonl")) == 1
