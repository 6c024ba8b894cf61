# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's objects are made as its config says."""

import contextlib

import pytest

from qarl_jax import models
from qarl_jax.rollout.vllm.engine import VllmEngine
from qarl_jax.run import build
from qarl_jax.types import UserError
from tests.reference import tiny


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


def test_an_engine_over_a_bridge_is_built_from_its_section_before_any_bridge_starts(tmp_path):
    cfg = tiny.World(tmp_path).changed(rollout={"engine": {"name": "vllm", "engine": "fake"}}).config
    with contextlib.closing(build.make_engine(cfg, log_file=str(tmp_path / "bridge.log"))) as made:
        assert isinstance(made, VllmEngine)
        assert (made.version, made.facts) == (-1, None)
    assert not (tmp_path / "bridge.log").exists()


def test_a_scheme_asked_for_stands_for_one_that_cannot_quantize_the_model(tmp_path):
    cfg = tiny.World(tmp_path).changed(quant={"forward": "w4a16:g128"}).config
    with pytest.raises(UserError, match="not a multiple of the group size 128"):
        build.policy_graphdef(cfg)
    other = build.policy_graphdef(tiny.World(tmp_path).config)
    for scheme in ("bf16", "w8a8"):
        assert build.policy_graphdef(cfg, scheme=scheme) == models.with_scheme(other, scheme)
