# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""From a config to the objects of a run, and what a resumed one is told of settings that changed."""

import json

import pytest

from qarl_jax.run import build, config
from qarl_jax.types import UserError
from tests.reference import tiny


def test_settings_changed_since_the_last_start_are_named_with_both_values(tmp_path):
    world = tiny.World(tmp_path)
    assert build.changed_settings(world.config) == []  # a new run
    world.run_dir.mkdir()
    recorded = json.loads(json.dumps(config.to_dict(world.config), default=str))
    del recorded["rollout"]["temperature"]  # as if this version had added it
    (world.run_dir / "run.json").write_text(json.dumps({"config": recorded, "starts": []}))
    assert build.changed_settings(world.config) == []
    other = world.changed(quant={"forward": "w8a8"}, train={"steps": 9}, log={"view": "lines"}).config
    assert build.changed_settings(other) == ["quant.forward w4a16:g32 -> w8a8", "train.steps 2 -> 9"]


def test_what_is_observed_is_written_with_the_arguments_that_prompts_are_written_with(tmp_path, monkeypatch):
    world = tiny.World(tmp_path)
    chat = {"template": "chat", "chat_args": {"enable_thinking": False}}
    cfg = world.changed(data=chat, rollout={"environment": {"name": "calculator"}}).config
    monkeypatch.setattr(build, "TurnTaking", lambda *args, **settings: settings)
    made = build.make_engine(cfg)
    assert (made["chat"], made["chat_args"]) == (True, {"enable_thinking": False})
    other = {**world.tree["data"], "template": "chat", "chat_args": {}}
    cfg = world.changed(data=chat, eval={"data": other}, rollout={"environment": {"name": "calculator"}}).config
    with pytest.raises(UserError, match=r"give eval\.data the same"):
        build.eval_prompts(cfg, None)
