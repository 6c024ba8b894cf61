# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A small policy learns by RL to use a tool, where the same run with one turn learns nothing."""

import pytest
import yaml

from qarl_jax import train
from qarl_jax.observe import recorder
from tests.reference import tool_policy

TOOL = {"name": "calculator", "opening": "[", "closing": "]", "before": "", "after": "=", "max_turns": 2}


def run(folder, name, environment):
    """Products of two-digit numbers, int4 weights, GRPO: (records of the steps, held-out rewards before and after)."""
    config = {
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
            "engine": {"name": "jax", "batch_size": 256},
        },
        "loss": {"name": "grpo"},
        "optimizer": {"name": "muon", "lr": 2.0e-3},
        "train": {
            "steps": 16,
            "prompts_per_step": 32,
            "prompts_per_update": 16,
            "micro_batch_rows": 32,
            "row_len": 48,
            "max_segments": 8,
        },
        "checkpoint": {"every": 0},
        "eval": {"num_prompts": 96, "temperature": 1.0},
        "log": {"view": "lines", "trackers": []},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    assert train.main(["--config", str(path)]) == 0
    records, held_out = (recorder.read_lines(folder / name / f"{file}.jsonl") for file in ("metrics", "eval"))
    return records, [record["eval/reward/mean"] for record in held_out]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_policy_learns_to_ask_and_to_answer_what_one_turn_cannot(tmp_path):
    tool_policy.make(tmp_path / "policy")
    tool_policy.tasks(tmp_path / "tasks.jsonl")
    records, (before, after) = run(tmp_path, "asking", TOOL)
    _, (alone_before, alone_after) = run(tmp_path, "alone", None)
    assert 0.2 < before < 0.6  # the teacher asks two times in five, and slips
    assert after > 0.9
    assert records[-1]["turns/mean"] > 1.9
    assert max(alone_before, alone_after) < 0.05  # no guess is right
    assert all(sample["turns"] for sample in recorder.read_lines(tmp_path / "asking" / "samples.jsonl"))
