# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge as a process, and the trainer's engine that supervises it. The engine inside is the fake one."""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import msgspec
import numpy as np
import pytest
from qarl_bridge import cli
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights, Request, SamplingConfig, make_engine
from qarl_jax.rollout.vllm import process
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, draw_seed, engine_config, engine_tensors
from qarl_jax.rollout.vllm.fleet import batches
from qarl_jax.runtime import progress
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import Prompt, UserError
from tests.reference import bridge_world
from tests.reference.bridge_world import connected, free_port, killed_in_a_publish
from tests.reference.fleet_world import MODEL, SAMPLING, weights

pytestmark = pytest.mark.slow

FAKE = Config(engine="fake", max_model_len=128, start_timeout_s=120, request_timeout_s=60)
PROMPTS = [Prompt(uid=f"p{i}", tokens=(1, 2, i), text="", answer="") for i in range(3)]


@contextlib.contextmanager
def engine(config=FAKE, **options):
    e = VllmEngine(config, **options)
    try:
        yield e
    finally:
        e.close()


def tokens(groups):
    return [[c.tokens for c in group] for group in groups]


def generate(e, key=1, n=2):
    return e.generate(PROMPTS, num_samples=n, sampling=SAMPLING, key=key)


# ---- the trainer's engine -------------------------------------------------------------------------------------------


def test_the_engine_publishes_samples_and_cleans_up():
    with engine() as e:
        report = e.publish(weights(0), 0)
        assert report["tensors"] == len(list(engine_tensors(weights(0))))
        groups = generate(e)
        assert [len(g) for g in groups] == [2, 2, 2]
        completion = groups[2][1]
        assert completion.prompt_tokens == (1, 2, 2)
        assert len(completion.tokens) == len(completion.logprobs) == 6
        assert completion.logprobs.dtype == np.float32
        assert completion.finish_reason == "length"
        assert completion.policy_version == 0
        e.publish(weights(1), 1)
        assert generate(e)[0][0].policy_version == e.version == 1
        process, folder = e.fleet.replicas[0].bridge.process, e.fleet.replicas[0].bridge.folder
    assert process.returncode == 0
    assert not os.path.exists(folder)


def test_a_bridge_started_ahead_of_the_weights_is_the_one_they_are_published_to():
    first = weights(0)
    with engine(dataclasses.replace(FAKE, log_file=os.devnull)) as e:
        e.prepare(first.graphdef)
        e.prepare(first.graphdef)
        pid = e.fleet.replicas[0].bridge.process.pid
        assert e.facts is None
        e.publish(first, 0)
        assert (e.facts.pid, e.restarts) == (pid, 0)
        assert len(generate(e)) == len(PROMPTS)


def test_a_bridge_that_ends_before_the_first_publish_is_told_in_its_own_words():
    with engine(dataclasses.replace(FAKE, engine="vllm", python="/bin/false")) as e:
        e.prepare(weights(0).graphdef)
        with pytest.raises(UserError, match="did not start"):
            e.publish(weights(0), 0)


def test_a_bridge_s_reason_is_told_whole_with_the_log_and_not_that_of_an_earlier_start(tmp_path):
    reason = "1 validation error for ModelConfig\n  Value error, max_model_len is too long"
    told = cli._told(BridgeError(reason))
    assert told == "error: 1 validation error for ModelConfig Value error, max_model_len is too long"
    log, python = tmp_path / "engine.log", tmp_path / "python"
    log.write_text("error: an earlier one\n")
    for words, expected in ((told, "is too long"), ("", "no output")):
        python.write_text(f"#!/bin/sh\necho '{words}' | grep .\nexit 2\n")
        python.chmod(0o755)
        says = rf"did not start: .*{expected} \(all that it said: {log}\)"
        starts = dataclasses.replace(FAKE, engine="vllm", python=str(python), log_file=str(log))
        with engine(starts) as e, pytest.raises(UserError, match=says):
            e.publish(weights(0), 0)


def test_more_tokens_than_the_model_has_positions_are_refused_before_vllm_is_started(monkeypatch):
    monkeypatch.setattr(process.BridgeProcess, "start", lambda *args: pytest.fail("started"))
    model = weights(0)
    positions = models.config_of(model.graphdef).max_position_embeddings
    with engine(dataclasses.replace(FAKE, engine="vllm", max_model_len=positions + 1)) as e:
        for begin in (lambda: e.prepare(model.graphdef), lambda: e.publish(model, 0)):
            with pytest.raises(UserError, match=f"max_model_len={positions + 1} is more than the model's {positions}"):
                begin()


def test_device_memory_is_refused_on_a_cpu_before_vllm_is_started(monkeypatch):
    """Also where learner and engine could share no base: these weights are in int8."""
    monkeypatch.setattr(process.BridgeProcess, "start", lambda *args: pytest.fail("started"))
    graphdef = weights(0).graphdef
    with engine(dataclasses.replace(FAKE, transport="cuda_ipc")) as e:
        for begin in (lambda: e.hold_once(graphdef, make_mesh()), lambda: e.prepare(graphdef)):
            with pytest.raises(UserError, match=r"transport=cuda_ipc: the learner runs on cpu.*; set auto or host"):
                begin()


def test_a_line_for_a_log_on_a_full_disk_ends_no_bridge(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        cli._log("serving version 1")
        with contextlib.suppress(OSError):
            full.close()


def test_it_is_the_registrys_vllm_engine():
    e = make_engine("vllm", FAKE)
    assert isinstance(e, VllmEngine)
    with pytest.raises(UserError, match="nothing was published"):
        generate(e)
    e.close()


def test_a_killed_bridge_is_replaced_and_answers_as_the_dead_one_would_have():
    lines = []
    with engine(log=lines.append) as e:
        e.publish(weights(0), 3)
        before = generate(e)
        e.fleet.replicas[0].bridge.process.kill()
        after = generate(e)
        assert tokens(after) == tokens(before)
        assert after[0][0].policy_version == 3
        assert e.restarts == 1
        assert any("died" in line and "exit code -9" in line for line in lines)
        e.fleet.replicas[0].bridge.process.kill()
        e.publish(weights(1), 4)
        assert generate(e)[0][0].policy_version == 4


def test_a_bridge_killed_while_it_samples_is_replaced():
    with engine() as e:
        e.publish(weights(0), 0)
        before = generate(e)
        # Stopped, so that the request is surely in flight when it dies.
        os.kill(e.fleet.replicas[0].bridge.process.pid, signal.SIGSTOP)
        killer = threading.Timer(0.3, e.fleet.replicas[0].bridge.process.kill)
        killer.start()
        assert tokens(generate(e)) == tokens(before)
        assert e.restarts == 1


def test_a_bridge_killed_in_the_middle_of_a_publish_is_replaced(monkeypatch):
    with engine() as e:
        e.publish(weights(0), 0)
        before = generate(e)
        killed = killed_in_a_publish(monkeypatch)
        e.publish(weights(1), 1)
        assert e.restarts == 1
        assert e.facts.pid != killed[0]
        after = generate(e)
        assert tokens(after) != tokens(before)
        assert after[0][0].policy_version == 1


def test_a_bridge_that_hangs_is_replaced():
    with engine(dataclasses.replace(FAKE, request_timeout_s=3.0)) as e:
        e.publish(weights(0), 0)
        before = generate(e)
        os.kill(e.fleet.replicas[0].bridge.process.pid, signal.SIGSTOP)
        assert tokens(generate(e)) == tokens(before)


def test_a_bridge_that_keeps_dying_is_reported(monkeypatch):
    with engine(dataclasses.replace(FAKE, max_restarts=1)) as e:
        e.publish(weights(0), 0)

        def die(client, *args, **options):
            os.kill(client.facts.pid, signal.SIGKILL)
            return client.status()

        monkeypatch.setattr(sender.Client, "generate", die)
        with pytest.raises(UserError, match=r"died 2 times in a row.*exit code -9"):
            generate(e)


def test_what_stops_a_bridge_from_starting_is_told_in_its_own_words():
    with (
        engine(dataclasses.replace(FAKE, python="/nowhere/python")) as e,
        pytest.raises(UserError, match=r"cannot start.*/nowhere/python.*rollout\.engine\.python"),
    ):
        e.publish(weights(0), 0)
    with engine(dataclasses.replace(FAKE, python="/bin/false")) as e, pytest.raises(UserError, match="did not start"):
        e.publish(weights(0), 0)


def test_a_bridge_without_vllm_says_what_to_install(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tensors.json").write_text("[]")
    code = "import sys; sys.modules['torch'] = None; from qarl_bridge import cli; sys.exit(cli.main(sys.argv[1:]))"
    paths = {"--socket": "socket", "--key-file": "key", "--model": "model"}
    words = [word for option, name in paths.items() for word in (option, str(tmp_path / name))]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {sys.executable} has no torch; install")
    assert "Traceback" not in done.stderr


def test_limits_of_the_engine_are_the_users_to_fix():
    with engine() as e:
        e.publish(weights(0), 0)
        with pytest.raises(UserError, match="max_model_len 128"):
            e.generate(PROMPTS, num_samples=1, sampling=SamplingConfig(max_response_len=126), key=0)
        assert e.restarts == 0
        generate(e)


def test_another_model_or_scheme_needs_another_engine():
    with engine() as e:
        e.publish(weights(0), 0)
        with pytest.raises(UserError, match="another model"):
            e.publish(weights(0, "w8a8"), 1)
        assert generate(e)[0][0].policy_version == 0


def test_a_learner_that_mirrors_another_arithmetic_is_refused():
    other = VllmEngine(FAKE)
    other._numerics = "cuda"
    facts = bridge_world.FakeEngine(bridge_world.CONFIG, {}, has_weights=False).facts
    real = msgspec.structs.replace(facts, engine="vllm", profile="cpu")
    with pytest.raises(UserError, match=r"set quant\.engine=cpu"):
        other._check_facts(real)
    other._numerics = "cpu"
    other._check_facts(real)


def test_copies_of_a_prompt_and_samples_draw_differently_and_keys_decide():
    seeds = {draw_seed(key, uid, number) for key in (0, 1) for uid in ("a", "b", "1/a") for number in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    with engine() as e:
        e.publish(weights(0), 0)
        twice = e.generate([PROMPTS[0], PROMPTS[0]], num_samples=2, sampling=SAMPLING, key=1)
        once = e.generate([PROMPTS[0]], num_samples=4, sampling=SAMPLING, key=1)
        assert tokens(twice)[0] + tokens(twice)[1] == tokens(once)[0]
        assert len(set(tokens(once)[0])) == 4
        assert tokens(generate(e, key=1)) == tokens(generate(e, key=1)) != tokens(generate(e, key=2))
        assert e.generate([], num_samples=2, sampling=SAMPLING, key=0) == []


def test_a_response_is_gone_on_with_from_its_tokens_over_the_bridge():
    asked = [
        Request(prompt=prompt, number=j, key=1, tokens=(9,) * (3 * j), max_tokens=6 - 3 * j)
        for prompt in PROMPTS
        for j in (0, 1)
    ]
    with engine() as e:
        e.publish(weights(0), 0)
        e.publish(weights(1), 1)
        begun = generate(e, key=1, n=1)
        added = e.extend(asked, sampling=SAMPLING)
        assert [len(c.tokens) for c in added] == [6, 3] * 3
        assert [c.tokens for c in added[::2]] == [group[0].tokens for group in begun]
        for request, completion in zip(asked, added, strict=True):
            assert completion.prompt_tokens == request.prompt.tokens
            assert completion.finish_reason == "length"
            assert [(s.version, s.start, s.end) for s in completion.versions] == [(1, 0, len(completion.tokens))]
        short = e.extend(asked[:1], sampling=dataclasses.replace(SAMPLING, max_response_len=2))
        assert short[0].tokens == added[0].tokens[:2]
        # A response of 120 tokens has room for 5 more, whatever the limit of a whole one is.
        long = dataclasses.replace(asked[0], tokens=(9,) * 120, max_tokens=5)
        assert len(e.extend([long], sampling=SAMPLING)[0].tokens) == 5
        with pytest.raises(UserError, match="max_model_len 128"):
            e.extend([dataclasses.replace(long, max_tokens=6)], sampling=SAMPLING)


def test_a_piece_that_goes_on_draws_with_other_numbers_than_the_beginning():
    seeds = [draw_seed(1, "a", number, start) for number in (0, 1) for start in (0, 1, 2, 10)]
    assert len(set(seeds)) == 8
    assert draw_seed(1, "a", 0, 0) == draw_seed(1, "a", 0)


def test_requests_are_split_so_that_they_and_their_replies_fit_a_frame():
    def draw(prompt, limit):
        return messages.Draw(prompt=[1] * prompt, seed=0, max_tokens=limit)

    draws = [draw(2, 1), draw(100, 1), draw(100, 1), draw(2, 400), draw(2, 400), draw(5000, 5000)]
    split = list(batches(draws, most=8000, most_back=8000))
    assert [len(batch) for batch in split] == [4, 1, 1]  # 8 x 400 + 512 twice is too much, and one is sent whatever
    assert [one for batch in split for one in batch] == draws
    routed = list(batches(draws, most_back=8000, routed_bytes=100))  # 100 a position: 10,200 and more for the second
    assert [len(batch) for batch in routed] == [1, 1, 1, 1, 1, 1]
    assert len(list(batches(draws))) == 1
    assert list(batches([])) == []
    assert len(list(batches([draw(1000, 1000)] * 4096))) == 1  # 4,096 responses of 1,024 tokens, as messages.py says


def test_the_engine_holds_no_reference_to_the_learners_arrays():
    with engine() as e:
        w = weights(0)
        copy = PolicyWeights(graphdef=w.graphdef, params=jax.tree.map(lambda x: x + 0, w.params), qweights=w.qweights)
        e.publish(copy, 0)
        jax.tree.map(lambda x: x.delete(), copy.params)  # as donation does
        e.fleet.replicas[0].bridge.process.kill()
        generate(e)  # republished from the staged copy
        assert e.restarts == 1


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16:g32"])
def test_the_exported_config_lists_the_scheme_and_the_tensors_fit_it(scheme):
    w = weights(0, scheme)
    section = engine_config(w.graphdef).get("quantization_config")
    named = dict(engine_tensors(w))
    suffixes = {name.rpartition(".")[2] for name in named if "q_proj" in name}
    if scheme == "bf16":
        assert section is None
        assert suffixes == {"weight"}
    else:
        assert section["config_groups"]["group_0"]["weights"]["num_bits"] == (8 if scheme == "w8a8" else 4)
        wanted = {"weight", "weight_scale"} if scheme == "w8a8" else {"weight_packed", "weight_scale", "weight_shape"}
        assert suffixes == wanted
    assert "lm_head.weight" not in named  # tied
    layers = [int(n.split(".")[2]) for n in named if n.startswith("model.layers")]
    assert layers == sorted(layers)  # layer by layer: the loader holds one module at a time


def test_bad_settings_are_refused():
    for options in (
        {"endpoints": ("tcp://h:1",)},
        {"gpu_memory_utilization": 0.0},
        {"max_num_seqs": 0},
        {"threads": -1},
    ):
        with pytest.raises(UserError, match=r"rollout\.engine\."):
            Config(**options)


# ---- the process ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_hand(tmp_path, *extra, address=None):
    """A bridge a user started, on a model folder without weights; yields (process, address, key file)."""
    w = weights(0)
    expected = [
        messages.Expected(name=n, dtype=messages.dtype_name(a.dtype), shape=list(a.shape)) for n, a in engine_tensors(w)
    ]
    sender.write_folder(str(tmp_path / "model"), engine_config(w.graphdef), expected)
    address = address or str(tmp_path / "s")
    process = subprocess.Popen(
        [sys.executable, "-m", "qarl_bridge", "--socket", address, "--model", str(tmp_path / "model"),
         "--key-file", str(tmp_path / "key"), "--options", '{"engine": "fake", "max_model_len": 128}', *extra],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process, address, str(tmp_path / "key")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_bridge_started_by_hand_serves_trainers_and_outlives_them(tmp_path):
    with by_hand(tmp_path) as (process, address, key_file):
        connected(address, key_file).close()
        config = dataclasses.replace(FAKE, endpoints=(address,), key_file=key_file)
        with engine(config, run_id="a", incarnation=1) as e:
            e.publish(weights(0), 5)
            before = generate(e)
            with engine(config, run_id="b") as second, pytest.raises(UserError, match="another trainer"):
                second.publish(weights(1), 0)
        assert process.poll() is None
        time.sleep(0.1)
        with engine(config, run_id="a", incarnation=2) as resumed:  # steps back
            resumed.publish(weights(0), 2)
            assert tokens(generate(resumed)) == tokens(before)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not os.path.exists(address)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_trainer_that_was_killed_leaves_its_lease_to_the_next_at_once(tmp_path, kind):
    messages.create_key(str(tmp_path / "key"))
    address = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else str(tmp_path / "s")
    with by_hand(tmp_path, address=address) as (_, _, key_file):
        connected(address, key_file).close()
        code = f"""
import time
from qarl_bridge import cli
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
client = sender.Client({address!r}, messages.read_key({key_file!r}))
client.acquire("run", 1)
print("holds", flush=True)
time.sleep(600)
"""
        trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert trainer.stdout.readline() == "holds\n"
        trainer.stdout.close()
        second = connected(address, key_file)
        with pytest.raises(BridgeError, match="another trainer"):
            second.acquire("run", 2)
        trainer.kill()
        trainer.wait()
        # As soon as the operating system has told the bridge that the connection is gone: no time-out has to pass.
        deadline = time.monotonic() + 60
        while True:
            try:
                second.acquire("run", 2)
                break
            except BridgeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        assert second.status().holder == "run"
        second.close()


def test_over_tcp_the_key_is_a_must_and_bytes_travel_in_chunks(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    with by_hand(tmp_path, address=address) as (process, _, _):
        assert process.wait(60) == 2  # no key file yet: a TCP bridge does not make one up
        assert "needs an existing key file" in process.stderr.read()
    messages.create_key(str(tmp_path / "key"))
    with by_hand(tmp_path, address=address) as (process, _, key_file):
        connected(address, key_file).close()
        with engine(dataclasses.replace(FAKE, endpoints=(address,), key_file=key_file)) as e:
            e.publish(weights(0), 0)
            generate(e)
        wrong = tmp_path / "wrong"
        messages.create_key(str(wrong))
        config = dataclasses.replace(FAKE, endpoints=(address,), key_file=str(wrong))
        with engine(config) as e, pytest.raises(UserError, match="does not hold this bridge's key"):
            e.publish(weights(0), 0)


def test_a_taken_socket_a_bad_folder_and_an_open_key_exit_with_two_and_a_sentence(tmp_path):
    with by_hand(tmp_path) as (_, address, key_file):
        connected(address, key_file).close()
        with by_hand(tmp_path) as (second, _, _):
            assert second.wait(60) == 2
            assert second.stderr.read() == f"error: {address} is taken: another bridge is listening there\n"
    os.chmod(tmp_path / "key", 0o644)
    with by_hand(tmp_path) as (process, _, _):
        assert process.wait(60) == 2
        assert "chmod 600" in process.stderr.read()
    os.chmod(tmp_path / "key", 0o600)
    with by_hand(tmp_path, "--model", str(tmp_path / "nothing")) as (process, _, _):
        assert process.wait(60) == 2
        assert "is not a model folder" in process.stderr.read()


@pytest.mark.parametrize("stage", [False, True])
def test_a_trainer_killed_in_the_middle_of_a_publish_leaves_the_engine_as_it_was(tmp_path, stage):
    with by_hand(tmp_path) as (_, address, key_file):
        connected(address, key_file).close()
        config = dataclasses.replace(FAKE, endpoints=(address,), key_file=key_file)
        with engine(config, run_id="run", incarnation=1) as e:
            e.publish(weights(0), 0)
            before = tokens(generate(e))
        (tmp_path / "tensors").write_bytes(pickle.dumps(list(engine_tensors(weights(1)))))
        code = f"""
import pickle, time
from qarl_bridge import cli
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.transport import shm
client = sender.Client({address!r}, messages.read_key({key_file!r}))
client.acquire("run", 2)
with open({str(tmp_path / "tensors")!r}, "rb") as file:  # JAX would take its time to make them
    tensors = pickle.load(file)
staged = sender.stage(tensors, version=messages.Version(run_id="run", incarnation=2, step=1),
                      model=client.facts.model, scheme=client.facts.scheme)
client.request(messages.Announce(manifest=staged.manifest), messages.Ready)
if {stage}:
    client.request(messages.Stage(memory=shm.locate(staged.fd)), messages.Staged)
print("in the middle", flush=True)
time.sleep(600)
"""
        trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert trainer.stdout.readline() == "in the middle\n"
        trainer.stdout.close()
        trainer.kill()
        trainer.wait()
        with engine(config, run_id="run", incarnation=3) as resumed:
            resumed.publish(weights(0), 0)
            assert tokens(generate(resumed)) == before
            assert resumed.status().version.step == 0


def test_a_bridge_does_not_outlive_the_trainer_that_started_it(tmp_path):
    code = f"""
import subprocess, sys, time, os
p = subprocess.Popen([sys.executable, "-m", "qarl_bridge", "--socket", {str(tmp_path / "s")!r},
    "--model", {str(tmp_path / "model")!r}, "--key-file", {str(tmp_path / "key")!r},
    "--options", '{{"engine": "fake"}}', "--parent-pid", str(os.getpid())], start_new_session=True)
print(p.pid, flush=True)
time.sleep(600)
"""
    with by_hand(tmp_path):
        pass  # writes the folder
    (tmp_path / "s").unlink(missing_ok=True)
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    trainer.stdout.close()
    connected(str(tmp_path / "s"), str(tmp_path / "key")).close()
    trainer.kill()
    trainer.wait()
    bridge_world.wait_for(lambda: not bridge_world.alive(pid))
    assert not os.path.exists(tmp_path / "s")


def test_an_address_where_nobody_listens_is_spoken_of_with_the_most_that_is_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    said = []
    key = tmp_path / "key"
    messages.create_key(str(key))
    config = Config(endpoints=(str(tmp_path / "mistyped"),), key_file=str(key), start_timeout_s=1.0)
    refused = pytest.raises(UserError, match=r"nobody is listening .*waited 1 s")
    with engine(config) as e, refused, progress.reporting(said.append):
        e.publish(weights(), 0)
    where = f"{tmp_path}/mistyped (rollout.engine.endpoints)"
    assert said[0] == f"waiting for the bridge at {where} to answer, 1 s at most (rollout.engine.start_timeout_s): 0 s"


@pytest.fixture
def short_folder():
    """A folder whose path is short enough for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def test_what_a_killed_trainer_and_its_bridge_leave_is_removed_by_the_next(short_folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = f"""
import os, time
from qarl_jax.rollout.vllm.process import BridgeProcess
bridge = BridgeProcess(arguments=["--options", '{{"engine": "fake"}}'])
bridge.start({MODEL!r}, [])
while not os.path.exists(os.path.join(bridge.folder, "socket")):
    time.sleep(0.01)
time.sleep(0.2)
print(bridge.process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        bridge = int(trainer.stdout.readline())
        os.kill(bridge, signal.SIGKILL)
        trainer.kill()
    (key,) = short_folder.glob("qarl-bridge-*/key")
    with engine() as e:
        e.publish(weights(), 0)
        assert not key.exists()
        assert len(list(short_folder.iterdir())) == 2  # the folders of this engine and of its bridge
    assert not list(short_folder.iterdir())
