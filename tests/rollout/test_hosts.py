# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Several processes with engines of their own are one run: what they draw, learn and survive.

A mesh of two devices is where bits can be asked for (tests/runtime/test_processes.py says why).
"""

import re
import signal
import sys

import pytest

from qarl_jax import doctor, train
from qarl_jax.memory import choose, plan
from qarl_jax.memory import engine as on_engine
from qarl_jax.rollout.vllm import gpu_staging, hosts
from qarl_jax.rollout.vllm.config import Config
from qarl_jax.run import config, description
from qarl_jax.types import UserError
from tests.reference import namespaces, processes, tiny
from tests.reference.bridge_world import alive, wait_for
from tests.reference.processes import assert_equal

STEPS = 3
FILES = ("metrics", "eval", "samples")


def of_two_devices(folder, engine, **model):
    """Three steps of one update each; engines of one process unless changed."""
    return tiny.World(folder, **model).changed(
        mesh={"fsdp": 2},
        optimizer={"name": "adamw", "lr": 0.003},
        rollout={"engine": {"name": "vllm", "max_model_len": 64, **engine}},
        train={"steps": STEPS, "prompts_per_update": 0},
        eval={"at_start": False, "at_end": True, "num_prompts": 3},
        log={"samples_per_step": 16},
    )


def trained(world, **options):
    """As `processes.trained`; all runs of a world keep their compiled programs."""
    return processes.trained(world, programs=str(world.folder / "programs"), **options)


def by_one_process(world, replicas=2):
    """The run by this process, with so many engines."""
    alone = world.changed(run_dir=str(world.folder / "alone"))
    alone.tree["rollout"]["engine"]["replicas"] = replicas
    assert train.main(alone.command()) == 0
    return alone


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Over toy engines, whose tokens depend on the published bytes and the request alone."""
    return of_two_devices(tmp_path_factory.mktemp("toys"), {"engine": "fake"})


@pytest.fixture(scope="module")
def toys_alone(toys):
    return by_one_process(toys)


def engines_of(said):
    """Process ids of the engines, of which each process of a run has said its own."""
    return [int(pid) for text in said for pid in re.findall(r"^engine (\d+)$", text, re.MULTILINE)]


def all_end(pids):
    """Waits until none of some processes is left."""
    wait_for(lambda: not any(map(alive, pids)))


# ---- without a process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "of"), [(0, 2), (1, 4), (16, 2), (7, 3)])
def test_every_request_is_drawn_by_one_process_and_shares_differ_by_one(count, of):
    shares = [hosts.share(count, number, of) for number in range(of)]
    assert [number for share in shares for number in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"endpoints": ["/run/a", "tcp://host1:7"], "key_file": "key"}, "name unix sockets, the same path on every"),
        ({"staging_buffers": 0}, "stages whole versions; set it to 1"),
    ],
)
def test_engines_that_cannot_be_of_several_processes_are_refused_in_one_sentence(tmp_path, engine, says):
    tree = tiny.World(tmp_path).tree | {"distributed": {"coordinator": "auto"}}
    tree["rollout"]["engine"] = {"name": "vllm"}
    assert isinstance(config.from_dict(tree).rollout.engine, Config)
    tree["rollout"]["engine"] = {"name": "vllm", **engine}
    with pytest.raises(UserError, match=says):
        config.from_dict(tree)


def test_plan_description_and_doctor_know_the_engines_of_each_process(tmp_path):
    many = tiny.World(tmp_path).changed(
        rollout={"engine": {"name": "vllm", "max_model_len": 64, "kv_cache_gb": 0.1}, "num_samples_per_prompt": 16},
        mesh={"fsdp": 4},
    )
    four = many.changed(distributed={"coordinator": "auto", "num_processes": 4}).config
    assert on_engine.at_once(many.config) == 64
    assert on_engine.at_once(four) == 16
    assert (plan.make(many.config, 2**34).engines, plan.make(four, 2**34).engines) == (1, 4)
    assert "1 of each of 4 processes, which draws 16 responses of a step" in description.describe(four)
    assert [line.status for line in doctor.engines(four)] == ["ok"]
    unknown = many.changed(distributed={"coordinator": "auto"}).config
    (line,) = doctor.engines(unknown)
    assert line.status == "warn"
    assert "distributed.num_processes" in line.todo
    assert not list(doctor.engines(many.config))


def test_an_engine_of_more_shards_than_a_process_has_gpus_is_refused_before_a_start(tmp_path):
    engine = {"name": "vllm", "max_model_len": 64, "memory": "auto", "tensor_parallel_size": 2}
    each = tiny.World(tmp_path).changed(mesh={"fsdp": 4}, rollout={"engine": engine})
    two, four = (each.changed(distributed={"coordinator": "auto", "num_processes": of}).config for of in (2, 4))
    assert choose.with_engines(two).rollout.engine.started == 1
    with pytest.raises(UserError, match=r"does not divide a process's 1 GPU.*start fewer processes"):
        choose.with_engines(four)


def test_engines_of_a_process_are_on_its_own_gpus_in_turn(monkeypatch):
    class Device:
        def __init__(self, number, platform="gpu"):
            self.local_hardware_id, self.platform = number, platform

    monkeypatch.setattr(gpu_staging.jax, "local_devices", lambda: [Device(2), Device(3)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_staging.own_gpus(3) == "2;3;2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert gpu_staging.own_gpus(2) == "6;7"
    assert gpu_staging.own_gpus(2, shards=2) == "6,7;6,7"
    with pytest.raises(UserError, match=r"each process has 2 GPU.*distributed.local_devices"):
        gpu_staging.own_gpus(1, shards=4)
    monkeypatch.setattr(gpu_staging.jax, "local_devices", lambda: [Device(0, "cpu")])
    assert gpu_staging.own_gpus(2) == ""


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_two_processes_with_an_engine_each_equal_one_with_two_to_the_bit(toys, toys_alone):
    two = toys.changed(run_dir=str(toys.folder / "two"), log={"view": "lines"})
    codes, said = trained(two)
    assert codes == [0, 0], said
    assert_equal(two, toys_alone, FILES)
    assert "process 1: fake 1" in said[1]
    assert len(set(engines_of(said))) == 2
    all_end(engines_of(said))


@namespaces.needed
@pytest.mark.nightly
def test_two_network_namespaces_with_an_engine_each_equal_one_host_to_the_bit(toys, toys_alone, tmp_path):
    two = toys.changed(run_dir=str(toys.folder / "apart"), log={"view": "lines"})
    code = (
        "import os, sys; from qarl_jax import train;"
        " sys.exit(train.main([*sys.argv[1:], 'distributed.process_id=' + os.environ['NUMBER']]))"
    )
    words = two.command("distributed.coordinator=first:7777", "distributed.num_processes=2")
    codes, said = namespaces.launch(tmp_path, code, *words, programs=str(toys.folder / "programs"))
    assert codes == [0, 0], said
    assert_equal(two, toys_alone, FILES)
    assert "process 1: fake 1" in said[1]


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_killed_process_takes_all_engines_with_it_and_the_same_command_goes_on(toys, toys_alone, victim):
    killed = toys.changed(run_dir=str(toys.folder / f"killed{victim}"), log={"view": "lines"})
    codes, said = trained(killed, victims=victim, name="SIGKILL", nth=2)
    assert codes == [-signal.SIGKILL, 1] if victim == "0" else [1, -signal.SIGKILL], said
    assert f"process {victim} of 2 has ended" in said[1 - int(victim)]
    assert len(killed.records()) == 1
    assert len(set(engines_of(said))) == 2
    all_end(engines_of(said))
    codes, said = trained(killed)
    assert codes == [0, 0], said
    assert "resuming" in said[0]
    assert_equal(killed, toys_alone, FILES)


@pytest.mark.nightly
def test_an_engine_that_dies_is_replaced_by_its_process_and_no_number_changes(toys, toys_alone):
    harmed = toys.changed(run_dir=str(toys.folder / "harmed"), log={"view": "lines"})
    codes, said = trained(harmed, victims="1", name="ENGINE", nth=2)
    assert codes == [0, 0], said
    assert "process 1: the vLLM bridge died" in said[1]
    assert_equal(harmed, toys_alone, FILES)


@pytest.mark.nightly
def test_an_engine_that_does_not_start_ends_all_processes_with_its_sentence(toys):
    python, broken = toys.folder / "python", toys.changed(run_dir=str(toys.folder / "broken"))
    taken = f'case "$*" in *--socket*) mkdir {toys.folder}/taken || {{ echo "error: no room" >&2; exit 2; }} ;; esac'
    python.write_text(f'#!/bin/sh\n{taken}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)  # of two bridges, the second does not start
    broken.tree["rollout"]["engine"] |= {"python": str(python)}
    codes, said = trained(broken)
    assert codes == [2, 2], said
    for text in said:
        assert "the vLLM bridge did not start: no room" in text
        assert "Traceback" not in text


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Over real engines, tiny ones."""
    engine = {"kv_cache_gb": 0.1, "threads": 1, "readback": "full", "max_num_seqs": 16}
    return of_two_devices(tmp_path_factory.mktemp("real"), engine, hidden=128).changed(
        model={"dtype": "bfloat16"}, quant={"forward": "w8a8", "engine": "cpu"}, log={"view": "lines"}
    )


@pytest.fixture(scope="module")
def real_alone(real):
    return by_one_process(real)


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_processes_with_a_real_vllm_each_equal_one_with_two_to_the_bit_and_outlive_a_kill(real, real_alone):
    two = real.changed(run_dir=str(real.folder / "two"))
    codes, said = trained(two, victims="1", name="SIGKILL", nth=2)
    assert codes == [1, -signal.SIGKILL], said
    assert len(two.records()) == 1
    assert len(set(engines_of(said))) == 2
    all_end(engines_of(said))
    codes, said = trained(two)
    assert codes == [0, 0], said
    assert_equal(two, real_alone, FILES)
    assert [line["mismatch/max_abs"] for line in two.records()] == [0, 0, 0]


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_four_processes_with_a_real_vllm_each_draw_what_one_draws_and_outlive_a_kill(real, real_alone):
    """A sum of four numbers has several orders: after an update four processes equal themselves alone to the bit."""
    four = real.changed(run_dir=str(real.folder / "four"), mesh={"fsdp": 4})
    codes, said = trained(four, count=4)
    assert codes == [0] * 4, said

    one, other = (world.records("samples")[:4] for world in (four, real_alone))
    assert [line["step"] for line in one] == [0] * 4
    assert [(line["uid"], line["response"]) for line in one] == [(line["uid"], line["response"]) for line in other]
    ours, theirs = four.records()[0], real_alone.records()[0]
    sampled = [key for key in theirs if key.startswith(("reward/", "response/", "rollout/", "mismatch/"))]
    assert len(sampled) > 10
    assert {key: ours[key] for key in sampled} == {key: theirs[key] for key in sampled}
    assert [line["mismatch/max_abs"] for line in four.records()] == [0, 0, 0]

    killed = real.changed(run_dir=str(real.folder / "killed"), mesh={"fsdp": 4})
    codes, said = trained(killed, count=4, victims="2", name="SIGKILL", nth=2)
    assert -signal.SIGKILL in codes, said
    assert 0 not in codes, said
    all_end(engines_of(said))
    codes, said = trained(killed, count=4)
    assert codes == [0] * 4, said
    assert_equal(killed, four, FILES)
