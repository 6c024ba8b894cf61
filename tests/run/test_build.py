# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""From a config to the objects of a run: what a resumed run is told of settings that changed."""

import json

from qarl_jax.run import build, config
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
