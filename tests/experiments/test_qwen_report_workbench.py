# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of the workbench's plan: each objective is compared with its neighbour on the same questions."""

import pathlib

import pytest

from experiments.qwen25_coder import report
from experiments.qwen25_coder import report_workbench as plan
from qarl_jax.run import config
from qarl_jax.typed_config import load as schema
from tests.experiments.test_qwen_report_1p5b import HELD_OUT, ROWS, lines, run

CONFIGS = pathlib.Path("configs/qwen25_coder_0p5b")


def test_every_arm_of_the_workbench_has_a_neighbour_that_is_a_config():
    assert set(plan.NEIGHBOURS) == set(schema.arms_of(config.RunConfig, CONFIGS / "workbench.yaml"))
    assert all((CONFIGS / f"{name}.yaml").exists() for name in plan.NEIGHBOURS.values())


@pytest.mark.parametrize("arm", sorted(plan.NEIGHBOURS))
def test_an_arm_stands_beside_its_neighbour(tmp_path, capsys, arm):
    neighbour = plan.NEIGHBOURS[arm]
    runs = [run(f"{arm}_seed1", 60), run(f"{neighbour}_seed1", 52), run(f"{neighbour}_seed2", HELD_OUT)]
    report.write({one.name: one for one in runs}, tmp_path / "work.tar.xz")
    (tmp_path / "questions.jsonl").write_bytes(lines(ROWS))
    assert plan.main([str(tmp_path / "questions.jsonl"), str(tmp_path / "work.tar.xz")]) == 0
    said = capsys.readouterr().out
    assert f"| `{arm}` | 1 | 60.0 ± " in said
    assert "| 8.0 ± " in said
    assert f"(`{neighbour}`)" in said
    assert "| 0.5, 0.5 | 0, 0 | - |" in said
