# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Trackers show what a run's files say, go on with the same run after a resume, and cannot harm the run.

TensorBoard's package is always there. The others run where theirs is: `pip install -e .[wandb,mlflow,trackio]`.
"""

import json
import logging
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from qarl_jax.observe.recorder import Config, Observer
from qarl_jax.observe.trackers import TRACKERS, watched
from qarl_jax.observe.trackers.tracker import COLUMNS, flat
from qarl_jax.types import Prompt, RolloutGroup, UserError
from tests.reference.rollouts import completion

CONFIG = {"seed": 3, "loss": {"name": "tbpo", "clip_high": 0.02}}


def group(step):
    prompt = Prompt(uid=f"sums/{step}", tokens=(1, 2), text="1+1=", answer="2")
    texts = ("half a character: \ud800", "2")
    completions = tuple(completion((3,) * (i + 1), prompt=(1, 2), version=step) for i in range(2))
    return RolloutGroup(prompt=prompt, completions=completions, rewards=np.array([1.0, 0.0], np.float32), texts=texts)


def train(folder, tracker, first, last, **more):
    """Steps `first` to `last` of a run, as the trainer records them."""
    with Observer(folder, Config(view="off", trackers=(tracker,), **more)) as observer:
        observer.start(config=CONFIG, facts={"step": first})
        observer.truncate_to(first - 1)
        for step in range(first, last + 1):
            reward = float("nan") if step == 1 else step / 8
            observer.log(step, {"reward/mean": reward, "time/step_s": 1.0, "name": "x", "n": 3})
            observer.samples(step, [group(step)])


def record(folder):
    return json.loads((folder / "run.json").read_text())


def events(folder):
    """(step, tag, value) of every scalar in a directory's event files, in order, and the purge marks."""
    from tensorboardX.proto.event_pb2 import Event

    out = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):  # record: uint64 length, 4 bytes of CRC, payload, 4 bytes of CRC
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                text = value.tensor.string_val
                out.append((event.step, value.tag, text[0].decode() if text else value.simple_value))
            if event.HasField("session_log"):
                out.append((event.step, "session", event.session_log.status))
    return out


# ---- every tracker: one process that reads the files -----------------------------------------------------------------


@pytest.mark.slow  # three seconds: two processes
def test_tensorboard_shows_numbers_and_samples_and_forgets_steps_that_are_run_again(tmp_path, caplog):
    run = tmp_path / "run"
    train(run, "tensorboard", 0, 2)
    found = events(run / "tensorboard")
    numbers = [event for event in found if not event[1].startswith("samples/")]
    assert numbers == [
        *((0, "n", 3.0), (0, "reward/mean", 0.0), (0, "time/step_s", 1.0)),
        *((1, "n", 3.0), (1, "time/step_s", 1.0)),
        *((2, "n", 3.0), (2, "reward/mean", 0.25), (2, "time/step_s", 1.0)),
    ]
    samples = [event for event in found if event[1].startswith("samples/")]
    assert [step for step, *_ in samples] == [0, 1, 2]
    assert '"uid": "sums/2"' in samples[-1][2]
    assert "half a character: ?" in samples[-1][2]
    train(run, "tensorboard", 2, 3)  # the checkpoint after two steps
    again = [event for event in events(run / "tensorboard")[len(found) :] if event[1] in ("session", "reward/mean")]
    assert again == [(2, "session", 1), (2, "reward/mean", 0.25), (3, "reward/mean", 0.375)]  # 1: START
    assert len(record(run)["starts"]) == 2
    assert caplog.messages == []


def test_a_run_keeps_its_id_when_it_goes_on_and_gets_another_when_it_begins_anew(tmp_path):
    ids = []
    for first in (0, 3, 5, 0):
        with Observer(tmp_path, Config(view="off", trackers=())) as observer:
            observer.start(config=CONFIG, facts={"step": first})
        ids.append(record(tmp_path)["id"])
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert len(record(tmp_path)["starts"]) == 4


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where its folder should be")
    with Observer(tmp_path, Config(view="off")) as observer:
        observer.start(config=CONFIG)
        observer.log(0, {"a": 0.5})
        assert observer._trackers[0]._process.wait(30) == 1
        for step in range(1, 4):
            observer.log(step, {"a": 0.5})
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1
    assert told[0].startswith("tensorboard: FileExistsError: ")
    assert "The run goes on without it" in told[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_hangs_blocks_no_step_and_holds_up_the_end_for_a_while_only(tmp_path, monkeypatch, caplog):
    """Stopped by a signal it is as one that waits for a network for ever."""
    monkeypatch.setattr(watched, "PATIENCE_S", 0.2)
    observer = Observer(tmp_path, Config(view="off"))
    observer.start(config=CONFIG)
    observer.log(0, {"a": 0.5})
    process = observer._trackers[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        for step in range(1, 200):
            observer.log(step, {f"a{i}": 0.5 for i in range(50)})
        observer.close()
        assert time.monotonic() - start < 5
        assert "tensorboard is still busy and finishes by itself" in caplog.messages[-1]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        os.kill(process.pid, signal.SIGCONT)
        process.wait()


@pytest.mark.slow  # two seconds: a trainer and its tracker
def test_what_a_killed_trainer_wrote_is_handed_on(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal
        from qarl_jax.observe.recorder import Config, Observer
        observer = Observer({str(tmp_path)!r}, Config(view="off"))
        observer.start(config={{}})
        for step in range(3):
            observer.log(step, {{"a": 0.5}})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == -signal.SIGKILL
    state = tmp_path / "trackers" / f"tensorboard-{record(tmp_path)['id']}.json"
    deadline = time.monotonic() + 60
    while not (state.exists() and json.loads(state.read_text())["metrics"] == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [step for step, *_ in events(tmp_path / "tensorboard")] == [0, 1, 2]


def test_no_package_of_a_tracker_is_imported_by_a_trainer(tmp_path):
    script = "import sys, qarl_jax.observe.recorder; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"wandb", "mlflow", "trackio", "tensorboardX"} & set(loaded)
    script = "import sys, qarl_jax.observe.trackers.follower; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"wandb", "mlflow", "trackio", "tensorboardX", "jax", "numpy"} & set(loaded)


def test_unknown_and_repeated_trackers_are_refused():
    with pytest.raises(UserError, match="trackers has 'comet'; it may have any of tensorboard, wandb, mlflow, trackio"):
        Config(trackers=("comet",))
    with pytest.raises(UserError, match="names one twice"):
        Config(trackers=("wandb", "wandb"))


def test_a_missing_package_is_found_without_an_import(monkeypatch):
    monkeypatch.setitem(watched.PACKAGES, "wandb", "no_such_package")
    assert watched.missing(("tensorboard", "wandb")) == ["wandb"]


def test_a_config_becomes_dotted_parameters():
    assert flat(CONFIG) == {"seed": 3, "loss.name": "tbpo", "loss.clip_high": 0.02}
    assert set(TRACKERS) == {"tensorboard", "wandb", "mlflow", "trackio"}


# ---- their own packages, offline -------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder; what trackers keep elsewhere goes beside it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def offline_records(file):
    """The records of W&B's offline file: blocks of 32 KiB of LevelDB's log, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]  # after 4 bytes of CRC
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow  # five seconds
def test_weights_and_biases_gets_one_run_of_all_starts(run, caplog):
    pytest.importorskip("wandb")
    train(run, "wandb", 0, 2, project="sums")
    train(run, "wandb", 2, 3, project="sums")
    assert caplog.messages == []
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert [file.stem for file in files] == [f"run-{record(run)['id']}"] * 2
    seen = []
    for one in (each for file in files for each in offline_records(file)):
        if one.WhichOneof("record_type") == "run":
            assert (one.run.project, one.run.display_name) == ("sums", "run")
        if one.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
            seen.append((int(items["_step"]), items))
    assert [step for step, _ in seen] == [0, 1, 2, 3]  # no step twice
    assert [items["reward/mean"] for step, items in seen if step != 1] == [0.0, 0.25, 0.375]
    assert str(seen[1][1]["reward/mean"]).lower() == "nan"
    assert all("samples" in {key.split("/")[0] for key in items} for _, items in seen)
    tables = [json.loads(file.read_text())["data"] for file in run.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(row[COLUMNS.index("uid")] for table in tables for row in table) == [
        f"sums/{step}" for step in range(4)
    ]


@pytest.mark.slow  # ten seconds
def test_mlflow_gets_one_run_of_all_starts(run, caplog):
    mlflow = pytest.importorskip("mlflow")
    train(run, "mlflow", 0, 2, project="sums")
    train(run, "mlflow", 2, 3, project="sums")
    assert [r.getMessage() for r in caplog.records if r.name.startswith("qarl_jax")] == []
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.tags["qarl.id"] == record(run)["id"]
    assert found.data.params["loss.clip_high"] == "0.02"
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history if m.step != 1] == [(0, 0.0), (2, 0.25), (3, 0.375)]
    assert [math.isnan(m.value) for m in history if m.step == 1] == [True]
    table = mlflow.artifacts.load_dict(f"runs:/{found.info.run_id}/samples.json")
    assert table["columns"] == list(COLUMNS)
    assert [row[1] for row in table["data"]] == [f"sums/{step}" for step in range(4)]


@pytest.mark.slow  # five seconds
def test_trackio_gets_one_run_of_all_starts(run, caplog, tmp_path):
    pytest.importorskip("trackio")
    train(run, "trackio", 0, 2, project="sums")
    train(run, "trackio", 2, 3, project="sums")
    assert caplog.messages == []
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, *_ in rows} == {f"run-{record(run)['id']}"}
    values = [(step, json.loads(text)) for _, step, text in rows]
    rewards = [(step, found["reward/mean"]) for step, found in values if "reward/mean" in found]
    assert [rewards[0], *rewards[2:]] == [(0, 0.0), (2, 0.25), (3, 0.375)]
    assert "nan" in str(rewards[1][1]).lower()
    tables = [found["samples"] for _, found in values if "samples" in found]
    assert [row["uid"] for table in tables for row in table["_value"]] == [f"sums/{step}" for step in range(4)]
