# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A saved policy keeps the settings that made it: a later start cannot rewrite them, and every verb reads them."""

import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.run import config, evaluation, stamp
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.types import UserError
from tests.reference import tiny

STEPS = 2
JAX = {
    "model.path": "assets/tiny-qwen3",
    "model.init": "random",
    "model.dtype": "bfloat16",
    "model.param_dtype": "bfloat16",
    "quant.forward": "w8a8",
    "quant.rollout": "bf16",
    "quant.group_size": "32",
    "quant.rules": "[{match: mlp, scheme: bf16}]",
    "quant.uaq_scale": "1.5",
    "quant.kernels": "xla",
    "lora": "{rank: 8}",
    "quant.engine": "cpu",
    "rollout.engine": "{name: vllm}",
}
VLLM = {
    "rollout.engine.arithmetic": "vllm",
    "rollout.engine.tensor_parallel_size": "2",
}
"""Settings that make another policy, of a run with either sampler; each with a value that such a run does not have."""
OTHERS = {
    "optimizer.lr": "0.5",
    "reward": "{name: exact}",
    "loss": "{name: grpo}",
    "rollout.max_response_len": "10",
    "rollout.temperature": "0.7",
    "data.system": "Add.",
    "eval": "{num_prompts: 2, num_samples: 2, temperature: 1.0}",
    "checkpoint.every": "7",
    "log.view": "lines",
    "seed": "9",
}
"""Settings that a run may change, or that others refuse (data, seed); each with a value of another run."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Finished runs by their sampler, with a checkpoint in place of a policy and records in place of training."""
    made = {}
    for name, engine in (("jax", {"name": "jax"}), ("vllm", {"name": "vllm"})):
        world = tiny.World(tmp_path_factory.mktemp(name)).changed(rollout={"engine": engine})
        del world.tree["quant"]["engine"]  # auto
        save(world, STEPS)
        (world.run_dir / "config.yaml").write_text(config.to_yaml(world.config))
        for file in ("metrics", "eval", "samples"):
            (world.run_dir / f"{file}.jsonl").write_text(
                json.dumps({"step": 1, "version": 2, "reward/mean": 0.5}) + "\n"
            )
        made[name] = world
    return made


def save(world, step, **changed):
    cfg = world.changed(**changed).config
    with Checkpoints(world.run_dir / "checkpoints") as checkpoints:
        checkpoints.save(step, {"params": np.zeros(3)}, stamp.make(cfg, cfg.numerics.profile))


def contents(world):
    return {path: path.read_bytes() for path in world.run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("setting", [*JAX, *VLLM, *OTHERS])
def test_a_finished_run_started_again_with_another_setting_changes_nothing(worlds, setting, capsys):
    world = worlds["vllm" if setting in VLLM else "jax"]
    before = contents(world)
    value = (JAX | VLLM | OTHERS)[setting]
    code = train.main(world.command(f"{setting}={value}"))
    told = capsys.readouterr()
    assert contents(world) == before
    assert stamp.config_of(world.run_dir) == world.config
    assert code == (0 if setting in OTHERS else 2), told
    if setting in OTHERS:
        assert told.out.startswith(f"done: {world.run_dir} has trained step {STEPS}, its last")
        assert told.out.count("\n") == 5  # nothing that an "auto" came to is told as another setting
        for command in (" watch", ".evaluate --checkpoint", ".export --checkpoint"):
            assert f"python -m qarl_jax{command} {world.run_dir}" in told.out
    else:
        name = "quant.engine" if setting == "rollout.engine" else setting
        assert f"{name} " in told.err
        assert "start a new run_dir" in told.err


@pytest.mark.parametrize("setting", [*JAX, *VLLM, *OTHERS])
def test_a_run_goes_on_under_settings_that_leave_its_policy_what_it_is_and_no_others(worlds, setting):
    world = worlds["vllm" if setting in VLLM else "jax"]
    found, value = stamp.of(world.run_dir), (JAX | VLLM | OTHERS)[setting]
    other = config.load(world.command()[1], [f"{setting}={value}", "train.steps=9"])
    if setting in OTHERS:
        stamp.check_same_policy(other, found, on_gpu=False)
        return
    with pytest.raises(UserError, match=r"cannot resume .* would make another policy") as refused:
        stamp.check_same_policy(other, found, on_gpu=False)
    if setting not in ("quant.engine", "rollout.engine"):
        old = stamp._flat(found["config"])[setting]
        assert f"{setting} {old} -> " in str(refused.value)


def test_adapters_that_a_run_began_with_stay_where_they_are_its_reference_policy(worlds):
    of = lambda init, coef: worlds["jax"].changed(lora={"rank": 8, "init": init}, kl={"coef": coef}).config  # noqa: E731
    found = {"step": STEPS, "config": stamp._plain(of("one", 0.0)), "numerics": None}
    stamp.check_same_policy(of("other", 0.0), found, on_gpu=False)
    stamp.check_same_policy(of("one", 0.1), found, on_gpu=False)
    for other in ("other", None):
        with pytest.raises(UserError, match=r"lora rank 8, .*one -> rank 8.* would make another policy"):
            stamp.check_same_policy(of(other, 0.1), found, on_gpu=False)


def test_a_reference_policy_has_the_adapters_that_its_folder_held_at_the_start(worlds, tmp_path):
    adapters = tmp_path / "adapter_model.safetensors"
    adapters.write_bytes(b"at the start")
    cfg = worlds["jax"].changed(lora={"rank": 8, "init": str(tmp_path)}, kl={"coef": 0.1}).config
    found = stamp.make(cfg, "plain") | {"step": STEPS, "numerics": None}
    stamp.check_same_policy(cfg, found, on_gpu=False)
    adapters.write_bytes(b"then others.")
    with pytest.raises(UserError, match="has others now"):
        stamp.check_same_policy(cfg, found, on_gpu=False)
    without = config.replaced(cfg, {"kl.coef": 0.0})
    stamp.check_same_policy(without, found | {"config": stamp._plain(without)}, on_gpu=False)


@pytest.mark.parametrize("alpha", [8, None])
def test_a_policy_is_not_evaluated_with_other_adapters(worlds, tmp_path, alpha):
    world = worlds["jax"].changed(run_dir=str(tmp_path / "run"))
    save(world, STEPS, lora={"rank": 8, "alpha": 16})
    other = world.changed(lora=alpha and {"rank": 8, "alpha": alpha}).config
    with pytest.raises(UserError, match=r"step 2 saved a policy with lora: rank 8, alpha 16.0, and the config has"):
        next(evaluation.run(other, source=str(world.run_dir)))


def test_every_setting_that_makes_a_policy_is_one_of_the_config_and_is_tried_here(worlds):
    known = {key for world in worlds.values() for key in stamp._flat(config.to_dict(world.config))}
    assert set(stamp.POLICY) <= known
    assert set(stamp.POLICY) == {*JAX, *VLLM} - {"quant.engine", "rollout.engine"}


@pytest.mark.parametrize("change", ["name muon -> adamw", "moment_dtype float32 -> int8"])
def test_a_run_goes_on_with_the_optimizer_whose_state_it_saved(worlds, change):
    """Refused before weights are read, by the name of the setting."""
    found, (name, _, _, value) = stamp.of(worlds["jax"].run_dir), change.split()
    other = config.load(worlds["jax"].command()[1], [f"optimizer.{name}={value}", "train.steps=9"])
    with pytest.raises(UserError, match=rf"cannot resume .*: optimizer\.{change} would make another optimizer"):
        stamp.check_same_policy(other, found, on_gpu=False)


def test_a_critic_cannot_join_a_run_and_may_leave_it(worlds):
    critic = {"critic": {}, "advantage": {"name": "gae"}, "loss": {"name": "ppo"}}
    without, judged = worlds["jax"].config, worlds["jax"].changed(**critic).config
    with pytest.raises(UserError, match=r"cannot resume .*: step 2 saved no critic\. Set critic=null"):
        stamp.check_same_policy(judged, stamp.of(worlds["jax"].run_dir), on_gpu=False)
    found = stamp.make(judged, judged.numerics.profile) | {"step": STEPS}
    for cfg in (judged, without):
        stamp.check_same_policy(cfg, found, on_gpu=False)


def test_what_means_the_same_and_another_machine_are_no_change(worlds):
    world = worlds["vllm"]
    found = stamp.of(world.run_dir)
    moved = world.model.parent / "link"
    moved.symlink_to(world.model)
    same = [f"model.path={moved}", f"quant.rollout={world.config.quant.forward}", "rollout.engine.eager=true"]
    stamp.check_same_policy(config.load(world.command()[1], same), found, on_gpu=False)
    stamp.check_same_policy(world.config, found, on_gpu=True)  # begun on a CPU: auto follows vLLM's machine
    with pytest.raises(UserError, match=r"quant\.engine cpu -> cuda"):
        stamp.check_same_policy(config.load(world.command()[1], ["quant.engine=cuda"]), found, on_gpu=True)


@pytest.mark.parametrize("changed", ["", "model.safetensors", "config.json", "tokenizer.json"])
def test_a_run_goes_on_with_a_copy_of_its_model_and_with_no_other(tmp_path, changed):
    world = tiny.World(tmp_path)
    save(world, 1)
    found, copy = stamp.of(world.run_dir), shutil.copytree(world.model, tmp_path / "copy")
    other = config.load(world.command()[1], [f"model.path={copy}"])
    if not changed:
        stamp.check_same_policy(other, found, on_gpu=False)
        del found["model"]  # a checkpoint of before
    else:
        held = (copy / changed).read_bytes()
        (copy / changed).write_bytes(held[::-1])
    with pytest.raises(UserError, match=r"model\.path .*copy would make another policy.*with a link to a model folder"):
        stamp.check_same_policy(other, found, on_gpu=False)


def test_each_step_is_read_with_the_settings_that_made_it(tmp_path):
    world = tiny.World(tmp_path)
    save(world, 1)
    save(world, 2, reward={"name": "exact"}, optimizer={"lr": 0.5})
    steps = world.run_dir / "checkpoints"
    assert stamp.config_of(steps / "step_00000001") == world.config
    assert stamp.config_of(steps / "step_00000002") == stamp.config_of(world.run_dir) != world.config
    assert stamp.changes(world.config, stamp.of(steps)) == [
        *("reward.name exact -> python", "optimizer.lr 0.5 -> 0.02"),
    ]
    truncated = steps / "step_00000002" / "extra.json"
    truncated.write_text(truncated.read_text()[:9])
    assert stamp.config_of(world.run_dir) == world.config


def test_an_evaluation_reads_a_checkpoints_config_once(worlds, monkeypatch):
    read = mock.Mock(wraps=config.from_dict)
    monkeypatch.setattr(config, "from_dict", read)
    monkeypatch.setattr(evaluation, "run", mock.Mock(side_effect=UserError("enough")))
    assert evaluation.main(["--checkpoint", str(worlds["jax"].run_dir)]) == 2
    assert read.call_count == 1


def test_settings_that_this_version_added_are_no_change(tmp_path):
    world = tiny.World(tmp_path)
    found = {"step": 1, "config": stamp._plain(world.config), "numerics": {"profile": "plain"}}
    del found["config"]["rollout"]["temperature"], found["config"]["quant"]["kernels"]
    other = world.changed(quant={"forward": "w8a8"}, train={"steps": 9}, log={"view": "lines"}).config
    assert stamp.changes(other, found) == ["quant.forward w4a16:g32 -> w8a8", "train.steps 2 -> 9"]


def test_weights_are_read_for_a_stamp_once(tmp_path, monkeypatch):
    cfg = tiny.World(tmp_path).changed(lora={"rank": 8}, optimizer={"name": "adamw"}).config
    opened, read = [], pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, "open", lambda self, *mode: opened.append(self.name) or read(self, *mode))
    assert stamp.make(cfg, "plain")["base"]
    assert opened.count("model.safetensors") == 1


def test_adapters_go_on_upon_the_base_that_they_learned_on_alone(tmp_path):
    world = tiny.World(tmp_path / "world")
    cfg = world.changed(lora={"rank": 8}, optimizer={"name": "adamw"}).config
    found = {"step": 1} | stamp.make(cfg, "plain")
    stamp.check_same_policy(cfg, found, on_gpu=False)
    weights = world.model / "model.safetensors"
    held = bytearray(weights.read_bytes())
    half = len(held) // 2
    held[half:] = held[half:][::-1]
    weights.write_bytes(held)
    with pytest.raises(UserError, match=r"adapters that step 1 saved learned on other weights .* as it was, or start"):
        stamp.check_same_policy(cfg, found, on_gpu=False)
    del found["base"]  # a checkpoint of before
    stamp.check_same_policy(cfg, found, on_gpu=False)
