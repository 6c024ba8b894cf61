# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of PLAN_lora.md: a run beside its sampler's untrained model and the full-parameter run of its seed."""

import dataclasses

from experiments.qwen25_coder import report
from experiments.qwen25_coder import report_lora as plan
from tests.experiments.test_qwen_report_1p5b import HELD_OUT, ROWS, lines, run

QUESTIONS = report.Run(plan.QUESTIONS, {"questions.jsonl": lines(ROWS)})


def adapters(arm, right, quant, **more):
    """A run of 20 steps, judged at its end."""
    made = run(f"lora_{arm}_seed1", right, versions=(20,), steps=20, **more)
    config = f"quant: {quant}\nlora: {{rank: 32}}"
    return dataclasses.replace(made, files=made.files | {"config.yaml": config.encode()})


def untrained(scheme, right):
    answers = (
        {"uid": f"questions/{i}", "id": "", "num_correct": int(i <= right), "responses": [""]}
        for i in range(1, len(ROWS) + 1)
    )
    return report.Run(f"base_{scheme}", {"suite.jsonl": lines(answers)})


def made():
    both, sampler = "{forward: w4a16, rollout: null}", "{forward: bf16, rollout: w4a16}"
    return [
        adapters(plan.QARL, 55, both),
        adapters(plan.ROLLOUT, 52, sampler),
        untrained("w4a16", 31),
        untrained("bf16", 46),
    ]


def full():
    return [run(f"{plan.QARL}_seed1", 60), run(f"{plan.ROLLOUT}_seed1", 51), QUESTIONS]


def test_a_run_stands_beside_the_untrained_model_of_its_sampler_and_the_full_run_of_its_seed(tmp_path, capsys):
    archives = []
    beside = dataclasses.replace(full()[0], files=full()[0].files | {"config.yaml": b"lora: null"})  # in the same WORK
    for name, runs in {"adapters": [*made(), beside], "full": full()}.items():
        archives.append(tmp_path / f"{name}.tar.xz")
        report.write({one.name: one for one in runs}, archives[-1])
    assert plan.main([str(archives[0]), "--full", str(archives[1])]) == 0
    page = capsys.readouterr().out
    assert f"| `{plan.QARL}` | 1 | 20 | 20 | {31.0} | {55.0} |" in page
    assert f"| `{plan.ROLLOUT}` | 1 | 20 | 20 | {31.0} | {52.0} |" in page  # its learner's base is bf16
    assert f"| {plan.QARL} less {plan.ROLLOUT} | 1 | " in page
    assert "| +3.0 |" in page
    assert f"| {plan.QARL} less {plan.QARL}{plan.ALL} | 1 | " in page
    assert "| -5.0 |" in page


def test_a_run_that_was_cut_off_has_a_row_and_its_reward_and_no_accuracy():
    short = adapters(plan.QARL, HELD_OUT, "{forward: w4a16, rollout: null}")
    short = dataclasses.replace(short, files={key: short.files[key] for key in ("metrics.jsonl", "config.yaml")})
    page = plan.page(plan.adapters({short.name: short}), {one.name: one for one in full()})
    assert f"| `{plan.QARL}` | 1 | 20 | - | - | - |" in page
    accuracy, reward = page.split("## Reward")
    assert "less" not in accuracy
    assert f"| {plan.QARL} less {plan.QARL}{plan.ALL} | 1 | +0.0 |" in reward
