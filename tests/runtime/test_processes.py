# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Several processes are one run: real processes on this machine, whose simulated devices make one mesh.

A mesh of two devices is where bits can be asked for: a sum of two numbers has one order, whoever adds them. On larger
meshes the collectives of one process and those of several add up in different orders, so that there the numbers agree
to rounding, and what is asked for to the bit is that a run of several processes continues itself.
"""

import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.runtime import processes
from qarl_jax.types import UserError
from tests.reference import namespaces, tiny
from tests.reference.bridge_world import free_port
from tests.reference.processes import assert_equal, launch, masters, trained

STEPS = 3


# ---- the parts -------------------------------------------------------------------------------------------------------

PARTS = """
import json, os, sys
from types import SimpleNamespace as Some
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from qarl_jax.loop import first_mismatch
from qarl_bridge.protocol.messages import BridgeError
from qarl_jax.rollout.vllm import all_gather, gpu_staging
from qarl_jax.rollout.vllm import hosts as engines
from qarl_jax.rollout.vllm.engine import BrokenPromiseError
from qarl_jax.runtime import processes as hosts
from qarl_jax.run.checkpoint import Checkpoints, Config, DamagedCheckpointError
from qarl_jax.types import UserError

def raised(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]

number, folder = int(sys.argv[1]), sys.argv[2]
told = {"auto": raised(lambda: hosts.start(hosts.Config(coordinator="auto")))}  # nothing here is a cluster
hosts.start(hosts.Config(coordinator="localhost:" + os.environ["PORT"], num_processes=2, process_id=number))
hosts.start(hosts.Config(coordinator="localhost:1", num_processes=2, process_id=number))  # joined already
first = number == 0
assert (hosts.count(), hosts.is_first(), jax.device_count()) == (2, first, 4)

mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))
split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
rows = np.arange(24, dtype=np.float32).reshape(8, 3)
x = hosts.put(rows, split)
assert not x.is_fully_replicated and len(x.addressable_shards) == 2
back, kept, text = hosts.fetch((x, hosts.put(rows, whole), "text"))
assert np.array_equal(back, rows) and np.array_equal(kept, rows) and text == "text"

sampled = rows.copy()
sampled[5, 1] += 1  # a row that the other process may hold
batch = Some(loss_mask=np.ones((8, 3), bool), rollout_logprobs=sampled, tokens=np.arange(24).reshape(8, 3))
packed = Some(batch=batch, segments=[Some(version=0, row=5, response=slice(0, 3), group=0, sample=0)])
group = Some(prompt=Some(uid="a"), completions=[Some(prompt_tokens=(1,), tokens=(15, 16, 17))])
token = first_mismatch.first([(packed, [group], [x])], 0)
told["unequal"] = [token.uid, token.position, token.token, token.learner, token.sampler, token.mismatched, token.tokens]

told["value"] = hosts.from_first(lambda: {"number": number, "text": "é" * 300, "float": 0.1, "inf": float("inf")})
def damaged():
    assert first  # nobody else is asked
    raise DamagedCheckpointError("a")
told["user"] = raised(lambda: hosts.from_first(damaged))
told["bug"] = raised(lambda: hosts.from_first(lambda: 1 // 0))
def inside(error):
    with hosts.together():
        if error:
            raise error
told["together"] = raised(lambda: inside(None if first else UserError("disk")))
told["nothing"] = raised(lambda: inside(None))
told["any"] = [hosts.any_of(not first), hosts.any_of(False)]
long = bytes(range(200 + 50 * number)) * 2
hosts.PIECE_BYTES = 128
told["gathered"] = hosts.gather(long) == [bytes(range(200)) * 2, bytes(range(250)) * 2]
told["empty"] = [len(said) for said in hosts.gather(b"" if first else b"ab")]
def at_publishing(error):
    with engines.together():
        if error:
            raise error
told["bridge"] = raised(lambda: at_publishing(None if first else BridgeError("no such base", "base")))
torn = BrokenPromiseError(BridgeError("a", "torn"), ["bf16"], None)
told["broken"] = raised(lambda: at_publishing(torn if first else None))
told["kept"] = raised(lambda: at_publishing(None))

# What an engine on a GPU is given: the whole of a stack on every device of this process, cast as it travels.
layers = hosts.put(rows.reshape(2, 4, 3), NamedSharding(mesh, PartitionSpec(None, "x")))
stack = all_gather.Stack(layers, np.dtype(jax.numpy.bfloat16), 1)
(made,) = all_gather.gathered([all_gather.Piece(stack, range(1, 2))])
assert sorted(made) == [int(device.local_hardware_id) for device in jax.local_devices()]
assert all(np.array_equal(np.asarray(each).astype(np.float32), rows.reshape(2, 4, 3)[1:]) for each in made.values())
weights = Some(params={"w": x}, qweights={})
assert gpu_staging.gpus_of(weights, [""], platform="cpu") == [min(made)]

told["same"] = raised(lambda: hosts.check_same(b"a", "the config's values"))
told["other"] = raised(lambda: hosts.check_same(str(number).encode(), "the config's values"))

# Checkpoints: in the foreground, in the background, one that fails, one that is damaged.
state = {"params": {"w": x, "b": hosts.put(np.float32(2), whole)}}
checkpoints = Checkpoints(folder + "/two", Config(keep=3, asynchronous=False))
with checkpoints:
    checkpoints.save(1, state, {"cursor": 1})
with Checkpoints(folder + "/two", Config(keep=3)) as later:
    for step in (2, 3):
        moved = jax.tree.map(lambda leaf: leaf * step, state)
        later.save(step, moved, {"cursor": step})
        jax.tree.map(lambda leaf: leaf.delete(), moved)  # as a donation would
if first:
    files = (checkpoints.path(3) / "state/params").rglob("*")
    victim = next(path for path in files if path.is_file() and path.stat().st_size)
    victim.write_bytes(b"x" * victim.stat().st_size)
hosts.any_of(True)
told["damaged"] = raised(lambda: checkpoints.restore(state, step=3))
found = checkpoints.restore(state)
told["fallback"] = [found.step, found.extra]
w = found.state["params"]["w"]
assert np.array_equal(hosts.fetch(w), 2 * rows), (w.sharding, hosts.fetch(w))
assert w.sharding == split, w.sharding
told["one"] = hosts.fetch(Checkpoints(folder + "/one").restore(state).state["params"]["w"]).tolist()
if first:
    open(folder + "/file", "w").close()
hosts.any_of(True)
told["blocked"] = raised(lambda: Checkpoints(folder + "/file/checkpoints").save(1, state))
print("TOLD" + json.dumps(told))
"""


@pytest.mark.slow
def test_processes_share_values_errors_arrays_and_checkpoints(tmp_path):
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    alone = {"params": {"w": jax.numpy.asarray(rows + 100), "b": jax.numpy.float32(2)}}
    Checkpoints(tmp_path / "one").save(5, alone)

    codes, said = launch(lambda number: ["-c", PARTS, number, tmp_path], devices=2)
    assert codes == [0, 0], said
    first, second = (json.loads(text.split("TOLD")[1]) for text in said)
    assert first["auto"][0] == "UserError"
    assert "no SLURM, Open MPI, Cloud TPU or GKE says which process this is" in first["auto"][1]
    assert first["unequal"] == ["a", 1, 16, 16.0, 17.0, 1, 3]
    assert first["value"] == {"number": 0, "text": "é" * 300, "float": 0.1, "inf": float("inf")}
    assert first["user"] == ["DamagedCheckpointError", "a"]
    assert first["bug"] == ["ZeroDivisionError", "integer division or modulo by zero"]
    assert second["bug"] == ["RuntimeError", "process 0: ZeroDivisionError: integer division or modulo by zero"]
    assert first["together"] == ["UserError", "disk"]
    assert first["nothing"] is None
    assert first["any"] == [True, False]
    assert first["gathered"]
    assert first["empty"] == [0, 2]
    assert first["bridge"] == ["BridgeError", "process 1: no such base"]
    assert second["bridge"] == ["BridgeError", "no such base"]
    assert first["broken"][0] == "BrokenPromiseError"
    assert first["kept"] is None
    assert first["same"] is None
    assert first["other"] == ["UserError", "the config's values: process 1 of 2 has others than process 0."]
    assert "have changed" in first["damaged"][1]
    assert first["fallback"] == [2, {"cursor": 2}]
    assert first["one"] == (rows + 100).tolist()  # one process wrote, two read
    assert first["blocked"][0] == "UserError"
    assert "a file stands where a directory is needed" in first["blocked"][1]
    own = {"bug": None, "bridge": None}
    assert first | own == second | own  # everything else is the same for both

    # Two processes wrote, one reads.
    back = Checkpoints(tmp_path / "two").restore(alone, step=2)
    assert np.array_equal(back.state["params"]["w"], 2 * rows)
    assert back.extra == {"cursor": 2}
    assert not [path.name for path in (tmp_path / "two").iterdir() if not path.name.startswith("step_")]


def test_in_a_run_of_one_process_everything_is_itself():
    assert (processes.count(), processes.is_first(), processes.any_of(False), processes.any_of(True)) == (
        1,
        True,
        False,
        True,
    )
    value = object()
    assert processes.from_first(lambda: value) is value
    with pytest.raises(ZeroDivisionError), processes.together():
        1 // 0  # noqa: B018
    processes.check_same(b"", "nothing")
    processes.start(processes.Config())
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"coordinator": "host"}, "must be host:port of the first process"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "count from 0 below num_processes=2"),
        ({"coordinator": "a:1", "process_id": -2}, "process_id=-2"),
        ({"coordinator": "auto", "num_processes": -1}, "num_processes must be at least 0"),
        ({"num_processes": 2}, "without a coordinator would start runs of one process each"),
    ],
)
def test_what_cannot_start_is_refused_in_one_sentence(fields, says):
    with pytest.raises(UserError, match=says):
        processes.Config(**fields)


@pytest.mark.slow
def test_processes_that_wait_in_vain_end_with_a_sentence():
    code = (
        "import sys; from qarl_jax.runtime import processes; processes.WAIT_S = 2;"
        " processes.start(processes.Config(**eval(sys.argv[1])))"
    )
    for number in range(2):  # the first waits for the second, and the second for the first
        fields = {"num_processes": 2, "process_id": number, "coordinator": f"localhost:{free_port()}"}
        done = subprocess.run([sys.executable, "-c", code, str(fields)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert "did not all meet within 2 s" in done.stderr
        assert "stack trace" not in done.stderr


ENDING = """
import os, signal, sys
import numpy as np
from qarl_jax.runtime import processes
from qarl_jax.types import UserError, entry_point
number, victim, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

@entry_point
def main(argv=None):
    processes.start(processes.Config(coordinator="localhost:" + os.environ["PORT"], num_processes=3, process_id=number))
    processes.any_of(True)
    if number == victim and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == victim and how == "mistaken":
        raise UserError("a mistake")
    if how == "agreed":
        processes.agree(UserError("a mistake") if number == victim else None)
    processes.any_of(True)

sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how", "ends"),
    [
        (0, "killed", -9),
        (2, "killed", -9),
        (1, "mistaken", 2),
        (1, "agreed", 2),
        pytest.param(-1, "none", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_process_whose_partner_ends_says_so_in_one_sentence(victim, how, ends):
    codes, said = launch(lambda number: ["-c", ENDING, number, victim, how], count=3)
    for number, (code, text) in enumerate(zip(codes, said, strict=True)):
        sentences = [line for line in text.splitlines() if line.startswith("error:")]
        if number == victim or how in ("agreed", "none"):
            assert code == ends, text
            assert sentences == ["error: a mistake"] * (how in ("agreed", "mistaken")), text
        else:
            assert code == 1, text
            assert len(sentences) == 1, text
            assert f"process {victim} of 3 has ended, so process {number} ends too" in sentences[0]
            assert "again with the same command" in sentences[0]
        assert "stack trace" not in text
        assert "Traceback" not in text


ON_TWO_HOSTS = """
import os, sys, time
from qarl_jax.runtime import processes
from qarl_jax.types import entry_point
number = int(os.environ["NUMBER"])

@entry_point
def main(argv=None):
    processes.start(processes.Config(coordinator="10.7.0.1:7777", num_processes=2, process_id=number))
    assert processes.gather(f"host {number}".encode()) == [b"host 0", b"host 1"]
    print("met", flush=True)
    if number:
        open(sys.argv[1], "w").close()
    time.sleep(300)

sys.exit(main())
"""


@namespaces.needed
@pytest.mark.nightly
def test_a_host_that_is_cut_off_is_noticed_within_a_minute(tmp_path):
    began = time.monotonic()
    codes, said = namespaces.launch(tmp_path, ON_TWO_HOSTS, tmp_path / "pulled", patience_s=150)
    assert codes == [1, 1], said
    assert time.monotonic() - began < 60 + 30  # for the start
    for number, text in enumerate(said):
        assert f"process {1 - number} of 2 has ended, so process {number} ends too" in text
        assert text.startswith("met") or "\nmet" in text
        assert "Traceback" not in text


@namespaces.needed
@pytest.mark.slow
def test_hosts_whose_names_lead_to_themselves_are_told_so(tmp_path):
    names = "127.0.0.1 localhost\n127.0.1.1 first second\n"  # as Debian writes a host's own name
    codes, said = namespaces.launch(tmp_path, ON_TWO_HOSTS, tmp_path / "pulled", names=names, patience_s=150)
    assert 0 not in codes
    assert any("address of its host's name, here" in text for text in said), said
    assert not any("Traceback" in text for text in said), said


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Three steps of one update each, with as few programs as a run can have."""
    world = tiny.World(tmp_path_factory.mktemp("world"))
    return world.changed(
        mesh={"fsdp": 2},
        optimizer={"name": "adamw", "lr": 0.01},
        train={"steps": STEPS, "prompts_per_update": 0},
        eval={"at_start": False, "at_end": False},
        log={"samples_per_step": 0},
    )


@pytest.fixture(scope="module")
def alone(world):
    """The run by one process, which is this one."""
    alone = world.changed(run_dir=str(world.folder / "alone"))
    assert train.main(alone.command()) == 0
    return alone


@pytest.mark.nightly
def test_two_processes_stopped_by_one_signal_and_gone_on_with_by_one_equal_one_to_the_bit(world, alone):
    mixed = world.changed(run_dir=str(world.folder / "mixed"), checkpoint={"every": 0}, log={"view": "lines"})
    # The second process alone is told to stop, in its second step; both save together and leave.
    codes, said = trained(mixed, slurm=True, victims="1", nth=2)
    assert codes == [0, 0], said
    assert "interrupted: saved after step 2" in said[0]
    assert "step" not in said[1]  # the second process shows nothing but the signal it got
    assert len(mixed.records()) == 2
    assert train.main(mixed.command()) == 0
    assert_equal(mixed, alone)
    starts = json.loads((mixed.run_dir / "run.json").read_text())["starts"]
    assert [start["processes"] for start in starts] == [2, 1]


@pytest.mark.nightly
def test_on_eight_devices_two_processes_come_to_the_numbers_of_one_and_outlive_a_kill(world, tmp_path):
    """Two updates a step, evaluations, traces, Muon; weights, rows and heads split over both processes."""
    eight = world.changed(
        run_dir=str(tmp_path / "alone"),
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        optimizer={"name": "muon", "lr": 0.02},
        train={"steps": 2, "prompts_per_update": 2},
        eval={"at_start": True, "at_end": True},
        log={"samples_per_step": 4, "view": "lines"},
    )
    assert train.main(eight.command()) == 0
    two = eight.changed(run_dir=str(tmp_path / "two"))
    codes, said = trained(two, devices=4)
    assert codes == [0, 0], said

    # Collectives of one process and of several add up in other orders: float32's rounding, and nothing else.
    for one, other in zip(eight.records(), two.records(), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if key.startswith(("reward/", "response/", "rollout/", "train/")):
                assert one[key] == other[key], key
        assert other["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-5)
    assert two.records("eval") == eight.records("eval")
    words = [[(record["uid"], record["response"]) for record in run.records("samples")] for run in (eight, two)]
    assert words[0] == words[1]
    # Of a tensor's norm: AdamW, which updates the embedding here, divides by a gradient's own size, so where that is
    # nothing but rounding, so is the update.
    for a, b in zip(masters(eight), masters(two), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)

    killed = eight.changed(run_dir=str(tmp_path / "killed"))
    codes, said = trained(killed, devices=4, victims="01", name="SIGKILL", nth=2)
    assert -signal.SIGKILL in codes, said  # the other may be ended by this one's end, before its own signal
    assert 0 not in codes, said
    assert len(killed.records()) == 1
    codes, said = trained(killed, devices=4)
    assert codes == [0, 0], said
    assert_equal(killed, two, ("metrics", "eval", "samples", "histograms"))


@pytest.mark.nightly
def test_two_processes_go_on_with_what_one_began_and_end_when_one_of_them_dies(world, alone, tmp_path):
    begun = world.changed(run_dir=str(tmp_path / "begun"), train={"steps": 1}, log={"view": "lines"})
    assert train.main(begun.command()) == 0
    on = world.changed(run_dir=begun.tree["run_dir"], log={"view": "lines"})
    # One of the two is killed: the other cannot go on, notices, and ends. Nothing is lost.
    codes, said = trained(on, victims="1", name="SIGKILL", nth=1)
    assert codes == [1, -signal.SIGKILL], said
    assert "process 1 of 2 has ended, so process 0 ends too" in said[0]
    codes, said = trained(on)
    assert codes == [0, 0], said
    assert "resuming" in said[0]
    assert_equal(on, alone)


@pytest.mark.nightly
def test_processes_with_other_configs_or_devices_to_spare_are_refused_by_all(world, tmp_path):
    spare = world.changed(run_dir=str(tmp_path / "spare"))
    codes, said = trained(spare, devices=2)
    assert codes == [2, 2], said
    for text in said:
        assert "the mesh has 2 devices, but the 2 processes have 4 together" in text

    def arguments(number):
        where = "distributed.coordinator=auto", f"seed={number}"
        return ["-m", "qarl_jax.train", *spare.command(*where)]

    codes, said = launch(arguments, slurm=True)
    assert codes == [2, 2], said
    for text in said:
        assert "the config's values: process 1 of 2 has others than process 0." in text
