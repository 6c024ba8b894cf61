# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""PLAN_noise.md can be run: its command is a config that loads, and its arms differ in base and noise alone."""

import pathlib
import re
import shlex

from qarl_jax.run import config

ROOT = pathlib.Path(__file__).parents[2]


SCHEMES = {"nvfp4_aqn": "nvfp4", "nvfp4": "nvfp4", "w4a16": "w4a16", "bf16": "bf16"}


def test_the_plans_arms_differ_in_base_and_noise_alone():
    plan = (ROOT / "experiments" / "qwen25_coder" / "PLAN_noise.md").read_text()
    (command,) = re.findall(r"```bash\n(.*?)```", plan, re.S)
    file, *words = shlex.split(command.replace("\\\n", " "))[4:]
    common, own = words[:-3], words[-3:]
    arms = {
        name: re.findall(r"[\w.]+=(?:\{.*?\}|[\w]+)", said)
        for name, said in re.findall(r"^\| `(\w+)` \| (.*)", plan, re.M)
    }
    assert arms["nvfp4_aqn"] == own
    for (name, given), (wanted, scheme) in zip(arms.items(), SCHEMES.items(), strict=True):
        assert name == wanted
        assert {word.partition("=")[0] for word in given} <= {"quant.forward", "quant.rollout", "rollout.norm_noise"}
        cfg = config.load(ROOT / file, [*common, *given])
        assert (cfg.quant.forward, cfg.quant.rollout_scheme) == (scheme, scheme)
        noise = cfg.rollout.norm_noise
        assert [bool(noise and noise.sigma(step, cfg.train.steps)) for step in (3, 4, 39)] == [
            False,
            *[name == "nvfp4_aqn"] * 2,
        ]
