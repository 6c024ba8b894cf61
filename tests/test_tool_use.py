# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A small policy learns by RL to use a tool, where the same run with one turn learns nothing."""

import json

import pytest

from qarl_jax import train
from tests.reference import tiny, tool_policy

TOOL = {"name": "calculator", "opening": "[", "closing": "]", "before": "", "after": "=", "max_turns": 2}


def config(folder, name, environment):
    """Products of two-digit numbers, int4 weights, TBPO."""
    world = object.__new__(tiny.World)
    world.folder = folder
    world.tree = {
        "seed": 1,
        "run_dir": str(folder / name),
        "model": {"path": str(folder / "policy"), "dtype": "float32", "remat": "none"},
        "quant": {"forward": "w4a16:g32", "engine": "plain"},
        "data": {
            "source": {"name": "jsonl", "path": str(folder / "tasks.jsonl")},
            "template": "raw",
            "max_prompt_len": tool_policy.PROMPT_LEN,
        },
        "reward": {"name": "exact", "extract": "last_number"},
        "rollout": {
            "num_samples_per_prompt": 8,
            "max_response_len": 18,
            "environment": environment,
            "engine": {"name": "jax", "batch_size": 256, "prompt_bucket": 8, "response_bucket": 18},
        },
        "loss": {"name": "tbpo", "clip_high": 0.02, "neg_clip_low": 0.02, "neg_clip_high": 0.02},
        "optimizer": {"name": "muon", "lr": 2.0e-3},
        "train": {
            "steps": 20,
            "prompts_per_step": 32,
            "prompts_per_update": 16,
            "micro_batch_rows": 32,
            "row_len": 48,
            "max_segments": 8,
        },
        "checkpoint": {"every": 0},
        "eval": {"num_prompts": 128, "temperature": 1.0},
        "log": {"view": "lines", "tensorboard": False},
    }
    return world


def run(folder, name, environment):
    """(records of the steps, held-out rewards before and after)."""
    world = config(folder, name, environment)
    assert train.main(world.command()) == 0
    return world.records(), [record["eval/reward/mean"] for record in world.records("eval")]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_policy_learns_to_ask_and_to_answer_what_one_turn_cannot(tmp_path):
    tool_policy.make(tmp_path / "policy")
    tool_policy.tasks(tmp_path / "tasks.jsonl")
    records, (before, after) = run(tmp_path, "asking", TOOL)
    _, (alone_before, alone_after) = run(tmp_path, "alone", None)
    assert 0.1 < before < 0.35  # the teacher asks one time in four
    assert after > 0.85
    assert records[-1]["turns/mean"] > 1.9
    assert max(alone_before, alone_after) < 0.05
    samples = [json.loads(line) for line in (tmp_path / "asking" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["turns"] for sample in samples)
