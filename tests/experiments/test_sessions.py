# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Scripts that run the plans' cells on a host, with a stand-in for python: which commands they give, in which order."""

import json
import os
import pathlib
import re
import subprocess

import pytest
import yaml

from qarl_jax.qat import command as qat_command
from qarl_jax.run import config
from qarl_jax.typed_config import load

ROOT = pathlib.Path(__file__).parents[2]
STAND_IN = r"""#!/bin/bash
echo "$*" >>"$SAID"
case "$*" in
*qarl_jax.train*) dir=$(grep -o 'run_dir=[^ ]*' <<<"$*") && mkdir -p "${dir#run_dir=}/checkpoints" ;;
*--out*) out=$(sed 's/.*--out \([^ ]*\).*/\1/' <<<"$*") && printf 'a\nb\nc\n' >"$out" ;;
*when_to_quantize.cell*) echo "{\"arm\": \"$4\", \"grid\": \"$5\", \"seed\": $6, \"x\": 0}" >>"$3/cells.jsonl" ;;
esac
"""


@pytest.fixture
def bash(tmp_path):
    """Runs a script and returns the commands that it gave to python."""
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*command, **more):
        more |= {"PYTHON": str(python), "SAID": str(said), "QUEUE": str(tmp_path / "queue")}
        said.write_text("")
        subprocess.run(["bash", *command], cwd=ROOT, env=os.environ | more, check=True, timeout=60)
        return said.read_text().splitlines()

    return run


def test_views_are_asked_of_each_trained_policy_beside_the_untrained_models_answers(bash, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "questions.jsonl").touch()
    script = "experiments/qwen25_coder/plan_1p5b.sh"
    base, trains, views = bash(script, str(work), "900", "qarl_w4a16:1", MODEL="M", VIEWS="3")
    assert f"qarl_jax.evaluate --scheme bf16 --out {work}/base.jsonl" in base
    assert "eval.num_prompts=3" in base
    assert "checkpoint.at_end=true" in trains
    asked = yaml.safe_load(re.search(r"eval\.data=(\{.*?\}) checkpoint", trains).group(1))
    assert asked["system"] == config.load(ROOT / "configs/qwen25_coder_0p5b/qarl_w4a16.yaml").data.system
    assert (
        f"--checkpoint {work}/runs/qarl_w4a16_seed1 --base {work}/base.jsonl --json --view difficulty,plan,know"
        in views
    )
    assert "eval.data=null eval.num_prompts=3" in views
    assert (work / "runs/qarl_w4a16_seed1/views.jsonl").exists()
    assert not (work / "runs/qarl_w4a16_seed1/checkpoints").exists()
    (plain,) = bash(script, str(tmp_path / "work"), "900", "qarl_w4a16:2", MODEL="M", VIEWS="")
    assert "checkpoint.at_end=false" in plain


def test_runs_with_adapters_have_folders_beside_those_of_full_parameter_runs(bash, tmp_path):
    (tmp_path / "questions.jsonl").touch()
    command = ("experiments/qwen25_coder/plan_1p5b.sh", str(tmp_path), "900", "qarl_w4a16:1")
    for more, folder in (
        ({}, "qarl_w4a16_seed1"),
        ({"CONFIG": "lora"}, "lora_qarl_w4a16_seed1"),
        ({"CONFIG": "lora", "FORMAT": "w8a8"}, "lora_qarl_w4a16_w8a8_seed1"),
    ):
        (trains,) = bash(*command, MODEL="M", **more)  # none is taken for one that was judged
        assert f"run_dir={tmp_path}/runs/{folder} " in trains
        assert (tmp_path / "runs" / folder / "judged").exists()
    assert bash(*command, MODEL="M", CONFIG="lora") == []


def test_a_model_is_trained_on_answers_under_the_system_message_of_its_runs(bash, tmp_path):
    (tmp_path / "questions.jsonl").touch()
    _, qat, *_ = bash("experiments/qat/rl.sh", str(tmp_path), "900", "training", "qarl_w4a16:1", MODEL="M")
    asked = re.search(r"(data=\{.*?\}) model\.path", qat).group(1)  # as the command reads it, escapes included
    made = load.load(qat_command.Config, ROOT / "configs/qat/smollm2_135m_gpu.yaml", [asked]).data
    runs = config.load(ROOT / "configs/qwen25_coder_0p5b/qarl_w4a16.yaml").data
    assert (made.system, made.template, made.holdout) == (runs.system, runs.template, 0.1)
    assert made.source.path == str(tmp_path / "answers.jsonl")


def test_the_training_of_the_lowest_held_out_kl_is_the_beginning_of_rl(bash, tmp_path):
    arms = {"2:1e-3:1e-5": [0.1, 0.3], "2:1e-4:1e-5": [0.2, 0.1], "8:1e-4:1e-5": [0.1, float("nan")]}
    (tmp_path / "training").mkdir()
    (tmp_path / "training/answers.jsonl").touch()
    for arm, kl in arms.items():
        rows, layers, whole = arm.split(":")
        name = f"train.batch={rows}+distill.batch={rows}+train.optimizer.lr={layers}+distill.optimizer.lr={whole}"
        (tmp_path / "models/qat" / name).mkdir(parents=True)
        (tmp_path / "models/qat" / name / "arm").write_text(arm)
        (tmp_path / "rates").mkdir(exist_ok=True)
        (tmp_path / "rates" / f"qat_{name}.json").write_text(json.dumps({"heldout_kl": kl}))  # trained already
    more = {"TINY": "1", "RESULTS": str(tmp_path), "MODELS": str(tmp_path / "models"), "ARMS": " ".join(arms)}
    assert bash("benchmarks/sessions/qat/0/15-rates.sh", **more) == []
    assert (tmp_path / "training/model/arm").read_text() == "2:1e-4:1e-5"


def test_a_nested_session_trains_all_widths(bash, tmp_path):
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested/questions.jsonl").touch()
    more = {"TINY": "1", "START": "nested", "RESULTS": str(tmp_path), "MODELS": "M"}
    said = bash("benchmarks/sessions/qat/0/20-rl.sh", RUNS="qarl_w4a16:1 base:w2a16_midpoint:g32", **more)
    (made,), (trained,) = ([line for line in said if f"qarl_jax.{verb} " in line] for verb in ("qat", "train"))
    (judged,) = (line for line in said if "--suite own" in line)
    assert re.findall(r"eval\.num_prompts=(\d+)", judged)[-1] == "2"  # not 2,400: a CPU has hours of them
    assert "widths=[8, 4, 2]" in made
    assert "quant.forward=w2a16_midpoint:g32" in trained
    assert trained.endswith("train.widths=[8,4,2]")


def test_runs_of_qat_are_scored_at_widths_not_sampled_and_without_a_run_the_model_is_made_alone(bash, tmp_path):
    (tmp_path / "questions.jsonl").touch()
    command = ("experiments/qat/rl.sh", str(tmp_path), "900")
    alone = bash(*command, "nested", MODEL="M")
    assert [("answers.py" in line, "qarl_jax.qat" in line) for line in alone] == [(True, False), (False, True)]
    said = bash(*command, "nested", "qarl_w4a16:1", "qarl_w4a16:2", MODEL="M")
    scored = re.findall(r"_seed(\d) --scheme (\w+):g32", "\n".join(said))
    assert sorted(scored) == [(s, w) for s in "12" for w in ("w4a16_midpoint", "w8a16_asym")]
    with pytest.raises(subprocess.CalledProcessError):
        bash(*command, "rounding", MODEL="M")


def test_a_session_makes_each_cell_of_when_to_quantize_once(bash, tmp_path):
    script, results = "benchmarks/sessions/quantize/all/10-cells.sh", tmp_path / "quantize"
    more = {"TINY": "1", "RESULTS": str(tmp_path), "MODELS": "M"}
    bash(script, **more)
    cells = [json.loads(line) for line in (results / "cells.jsonl").read_text().splitlines()]
    made = {(cell["arm"], cell["grid"]) for cell in cells}
    arms = ("untrained", "rtn", "gptq", "qarl", "qarl_elsewhere")
    assert made == {(arm, grid) for arm in arms for grid in ("w8a8", "w4a16", "w3a16")} | {("stock", "w4a16")}
    assert len(cells) == len(made)
    again = bash(script, **more)
    assert [line for line in again if "when_to_quantize.cell" in line] == []


def test_the_workbench_runs_every_objective_and_its_teacher(bash, tmp_path):
    results = tmp_path / "results"
    more = {"TINY": "1", "RESULTS": str(results), "MODELS": "M"}
    said = bash("benchmarks/sessions/workbench/all/10-arms.sh", **more)
    arms = [word.removeprefix("arm=") for line in said for word in line.split() if word.startswith("arm=")]
    assert arms == ["bands_spread", "bands_length", "dppo_tv", "dppo_kl", "ais", "self_distillation", "distillation"]
    assert ["kl.reference=" in line for line in said if "arm=" in line] == [False] * 6 + [True]


def test_simulated_devices_of_a_session_have_the_patience_of_those_of_the_tests():
    common = ROOT / "benchmarks/sessions/tp/common.sh"
    assert [file for file in ROOT.glob("benchmarks/**/*.sh") if "device_count" in file.read_text()] == [common]
    script = f"source {common} && simulated 8 && echo $PJRT_NPROC $XLA_FLAGS"
    said = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    threads, *flags = said.split()
    assert threads == os.environ["PJRT_NPROC"]
    assert len(flags) == 3
    assert set(flags) <= set(os.environ["XLA_FLAGS"].split())


@pytest.mark.parametrize(("mib", "fraction"), [("81559", "0.352"), ("143771", "0.199")], ids=["H100", "H200"])
def test_32b_in_60_gib_gives_jax_28_on_any_gpu(tmp_path, mib, fraction):
    """The plan refuses a pool of a fifth of 80 GB: it is too small for the learner."""
    for name, text in (("python3", 'echo "$XLA_PYTHON_CLIENT_MEM_FRACTION" >>"$SAID"'), ("nvidia-smi", f"echo {mib}")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    more = {"TINY": "1", "RESULTS": str(tmp_path), "MODELS": "M", "SAID": str(tmp_path / "said"), "ONLY": "full_in_60"}
    more["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "benchmarks/sessions/onebase/0/20-32b.sh"], cwd=ROOT, env=os.environ | more, check=True, timeout=60
    )
    assert (tmp_path / "said").read_text().split() == [fraction]


def test_curves_of_a_low_bit_backward_differ_in_it_alone(bash, tmp_path):
    said = bash("benchmarks/sessions/backward/0/40-curves.sh", TINY="1", RESULTS=str(tmp_path / "results"), MODELS="M")
    full, low = (
        line.replace(f"curves/{form}", "curves").replace(f"backward={form}", "backward=FORM")
        for form, line in zip(("bf16", "int8"), [line for line in said if "qarl_jax.train" in line], strict=True)
    )
    assert full == low
    assert all(word in full for word in ("quant.backward=FORM", "quant.forward=w8a8", "seed=1"))
