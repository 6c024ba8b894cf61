# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training block by block: less is lost than by rounding, and a killed run goes on to equal bits."""

import copy
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file, save_file

from qarl_jax import models, qat, train
from qarl_jax.models.hf.by_layer import layer_config, layer_tensors, read_layer
from qarl_jax.models.hf.weights import Checkpoint
from qarl_jax.qat import blocks, command, distill, text, updates
from qarl_jax.quant import parse_scheme, quantize
from qarl_jax.run import export, made
from qarl_jax.runtime.progress import Task
from qarl_jax.typed_config import load
from qarl_jax.types import UserError
from tests.reference import tiny

SCHEME = "w2a16:g32"
ROWS, HELDOUT = 8, 3


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("qat"))


def tree(world, out, **sections):
    """A training over sums of digits, in seconds."""
    optimizer = {"name": "adamw", "lr": 0.003, "weight_decay": 0.0}
    return {
        "out": str(world.folder / out),
        "model": {"path": str(world.model)},
        "data": {"source": {"name": "jsonl", "path": str(world.data)}, "template": "raw", "holdout": 0.2},
        "text": {"rows": ROWS, "row_len": 16, "heldout": HELDOUT},
        "stages": ["w4a16:g32", SCHEME],
        "train": {"epochs": 3, "batch": 2, "optimizer": optimizer},
        "save_every": 5,
    } | sections


def run(world, values, *arguments):
    path = world.folder / f"{os.path.basename(values['out'])}.yaml"
    path.write_text(yaml.safe_dump(values))
    return qat.main(["--config", str(path), *arguments])


@pytest.fixture(scope="module")
def trained(world):
    """The folder of a training of all blocks, which reads no whole model; its receipt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load_masters", None)
        assert run(world, tree(world, "blocks")) == 0
    out = world.folder / "blocks"
    return out, made.read_receipt(out, "qat.json")


# ---- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_block_loses_less_than_by_rounding_on_held_out_rows(trained):
    records = trained[1]["blocks"]
    assert [record["layer"] for record in records] == [0, 1]
    for record in records:
        assert record["trained"] < 0.8 * record["rounded"]
        before, after = record["stages"][-1]
        assert after < before


@pytest.mark.slow
def test_what_flows_between_files_is_what_the_whole_model_computes(world, trained):
    out, receipt = trained
    cfg = load.load(command.Config, world.folder / "blocks.yaml")
    config = models.read_config(world.model)
    sizes = {"count": ROWS, "heldout": HELDOUT, "length": 16, "seed": 0}
    _, heldout = text.rows(cfg.data, str(world.model), config, **sizes)
    for kind, folder, scheme in (
        ("full", world.model, "bf16"),
        ("rounded", world.model, SCHEME),
        ("trained", out, SCHEME),
    ):
        model = models.read_config(folder, quant=models.parse_rules(scheme))
        whole = distill.perplexity(*models.load_masters(folder, model), heldout, 2)
        assert receipt["perplexity"][kind] == pytest.approx(whole, rel=1e-4), kind


@pytest.mark.slow
def test_what_is_outside_of_the_layers_stays_as_it_is(world, trained):
    before, after = (load_file(folder / "model.safetensors") for folder in (world.model, trained[0]))
    assert list(before) == list(after)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved
    assert all(".layers." in name for name in moved)
    assert {path.name for path in trained[0].iterdir()} == {path.name for path in world.model.iterdir()} | {"qat.json"}
    assert not pathlib.Path(f"{trained[0]}.work").exists()


@pytest.mark.slow
def test_a_folder_is_quantized_for_engines_as_it_was_trained(trained, tmp_path, capsys):
    out = tmp_path / "codes"
    assert export.main(["--model", str(trained[0]), "--scheme", SCHEME, "--out", str(out)]) == 0
    assert "was trained for" not in capsys.readouterr().out
    assert export.main(["--model", str(trained[0]), "--scheme", "w2a16_asym:g16", "--out", str(tmp_path / "g16")]) == 0
    assert f"was trained for {SCHEME}, and is written in w2a16_asym:g16" in capsys.readouterr().out
    name = "model.layers.1.mlp.down_proj"
    codes = load_file(out / "model.safetensors")
    master = load_file(trained[0] / "model.safetensors")[f"{name}.weight"]
    made_of = quantize(jnp.asarray(master), parse_scheme(SCHEME))
    np.testing.assert_array_equal(codes[f"{name}.weight_packed"], made_of.codes)
    with pytest.raises(SystemExit):
        export.main(["--model", str(trained[0]), "--out", str(tmp_path / "none")])
    assert export.main(["--model", str(trained[0]), "--scheme", "bf16", "--out", str(tmp_path / "none")]) == 2


@pytest.mark.nightly
def test_one_folder_is_trained_for_several_widths(world, capsys):
    widths = tree(world, "widths", stages=["w8a16_asym:g32"], widths=[8, 2], distill={"epochs": 1, "batch": 2})
    assert run(world, widths) == 0
    assert "quant.forward=w2a16_midpoint:g32\n" in capsys.readouterr().out
    receipt = made.read_receipt(world.folder / "widths", "qat.json")
    for record in receipt["blocks"]:  # both at two bits
        assert record["trained"] < 0.8 * record["rounded"]
    cfg = load.load(command.Config, world.folder / "widths.yaml")
    _, heldout = text.rows(
        cfg.data, str(world.model), models.read_config(world.model), count=ROWS, heldout=HELDOUT, length=16, seed=0
    )

    def at(scheme):
        model = models.read_config(cfg.out, quant=models.parse_rules(scheme))
        return distill.perplexity(*models.load_masters(cfg.out, model), heldout, 2)

    found = receipt["perplexity"]
    assert at("w2a16_midpoint:g32") == pytest.approx(found["distilled"], rel=1e-3)
    assert at("w2a16_midpoint:g32") == pytest.approx(found["distilled_2"], rel=1e-3)
    assert at("w8a16_asym:g32") == pytest.approx(found["distilled_8"], rel=1e-3)
    assert found["distilled_8"] != pytest.approx(found["distilled_2"], rel=1e-3)


def test_widths_are_of_one_grid(world, capsys):
    assert run(world, tree(world, "no_grid", widths=[8, 2])) == 2
    assert "stages=[w8a16_asym]" in capsys.readouterr().err
    assert run(world, tree(world, "no_width", stages=["w8a16_asym:g32"], widths=[8, 3])) == 2
    assert "no slice of 3 bits" in capsys.readouterr().err


@pytest.mark.nightly
def test_weights_go_down_to_two_bits_and_then_activations(world, capsys):
    stages = ["w8a16_asym", "w4a16_asym", "w2a16_asym", "w2a2"]
    assert run(world, tree(world, "activations", stages=stages)) == 0
    assert "quant.forward=w2a2:g32\n" in capsys.readouterr().out  # a run's own quant.group_size is 128
    for record in made.read_receipt(world.folder / "activations", "qat.json")["blocks"]:
        ends = [after for _, after in record["stages"]]
        assert len(ends) == 4
        assert ends[1] < ends[2] < ends[3]
        assert record["trained"] < record["rounded"]


@pytest.mark.parametrize(
    ("stages", "widths", "served"),
    [
        (["w8a16_asym", "w2a16_asym"], [], "w2a16_asym:g32"),
        (["w8a16_asym"], [2], "w2a16_midpoint:g32"),
        (["w8a16_asym:g16"], [4, 2], "w2a16_midpoint:g16"),
        (["w8a16_asym"], [8, 4], "w4a16_midpoint:g32"),
        (["w8a16_asym"], [8], "w8a16_asym:g32"),
    ],
)
def test_the_scheme_for_rl_has_the_width_and_the_group_that_were_trained(world, stages, widths, served):
    path = world.folder / "named.yaml"
    path.write_text(yaml.safe_dump(tree(world, "named", stages=stages, widths=widths)))
    assert load.load(command.Config, path).served == served


@pytest.mark.nightly
def test_rl_starts_from_the_trained_policy(world, trained):
    other = world.changed(model={"path": str(trained[0])}, quant={"forward": SCHEME}, train={"steps": 1})
    assert train.main(other.command()) == 0
    assert other.records()[-1]["mismatch/k3"] < 1e-6


# ---- the model's own text, and distillation --------------------------------------------------------------------------


@pytest.mark.slow
def test_distillation_on_the_models_own_text_brings_the_distributions_together(world):
    learned = {"epochs": 8, "batch": 2, "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.0}}
    values = tree(world, "distilled", data=None, distill=learned)
    assert run(world, values) == 0
    receipt = made.read_receipt(world.folder / "distilled", "qat.json")
    assert len(receipt["kl"]) == 32
    assert np.mean(receipt["kl"][-4:]) < 0.7 * np.mean(receipt["kl"][:4])
    before, after = receipt["heldout_kl"]
    assert after < 0.9 * before
    assert set(receipt["perplexity"]) == {"full", "trained", "rounded", "distilled"}


@pytest.mark.slow
def test_distillation_that_does_harm_says_so(world, capsys):
    learned = {"epochs": 1, "batch": 2, "optimizer": {"name": "adamw", "lr": 3.0, "weight_decay": 0.0}}
    values = tree(world, "harmed", data=None, distill=learned)  # its own text is likeliest in full precision
    assert run(world, values) == 0
    assert "did harm: lower distill.optimizer.lr, or set distill=null" in capsys.readouterr().out


@pytest.mark.slow
def test_distillation_alone_begins_with_the_model_and_stores_what_enters_a_layer(world, trained, monkeypatch):
    remat, run_distillation = [], distill.distill

    def distilled(teacher, student, *rest):
        remat.append(models.config_of(student[0]).remat)
        return run_distillation(teacher, student, *rest)

    monkeypatch.setattr(distill, "distill", distilled)
    learned = {"epochs": 6, "batch": 2, "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.0}}
    assert run(world, tree(world, "alone", train=None, distill=learned)) == 0
    assert remat == ["full"]
    receipt = made.read_receipt(world.folder / "alone", "qat.json")
    for kind in ("full", "rounded"):
        assert receipt["perplexity"][kind] == pytest.approx(trained[1]["perplexity"][kind], rel=1e-4)
    assert np.mean(receipt["kl"][-4:]) < 0.6 * np.mean(receipt["kl"][:4])


def test_the_divergence_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    low, full, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((7, 8), (7, 8), (30, 8)))
    log_p, log_q = (
        (z := x.astype(np.float64) @ head.T) - np.log(np.exp(z).sum(-1, keepdims=True)) for x in (full, low)
    )
    wanted = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    for chunk in (3, 1024):
        assert float(distill.kl(low, full, head, chunk)) == pytest.approx(wanted, rel=1e-5)
    assert float(distill.kl(full, full, head)) == 0


# ---- killed and resumed ----------------------------------------------------------------------------------------------


class KilledError(Exception):
    pass


# In the last stage of the second layer; behind a checkpoint of the first; where nothing but the start is in files.
@pytest.mark.parametrize(
    ("after", "every"),
    [
        pytest.param(41, 5, marks=pytest.mark.slow),
        pytest.param(8, 5, marks=pytest.mark.nightly),
        pytest.param(41, 1000, marks=pytest.mark.nightly),
    ],
)
def test_a_run_killed_in_a_block_goes_on_to_the_same_bits(world, trained, after, every, monkeypatch):
    step, left = updates.Trainer.fit, [after]

    def killed(self, params, inputs, folder, task):
        def counted(rows):
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
            return inputs(rows)

        return step(self, params, counted, folder, task)

    values = tree(world, f"killed_{after}_{every}", save_every=every)
    monkeypatch.setattr(blocks, "capacity", lambda: 1 << 30)  # rows of a layer are held at once, as on a GPU
    with monkeypatch.context() as patch:
        patch.setattr(updates.Trainer, "fit", killed)
        with pytest.raises(KilledError):
            run(world, values)
    out = pathlib.Path(values["out"])
    assert not out.exists()
    assert run(world, values) == 0
    assert (out / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()
    assert made.read_receipt(out, "qat.json")["blocks"] == trained[1]["blocks"]


@pytest.mark.nightly
def test_a_process_killed_in_a_block_goes_on_to_the_same_bits(world, tmp_path_factory):
    """kill -9 at the first checkpoint of the second layer."""
    outs = []
    for name in ("whole", "killed"):
        values = tree(world, name)
        path = world.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        line = [sys.executable, "-m", "qarl_jax.qat", "--config", str(path)]
        if name == "killed":
            process = subprocess.Popen(line, env=tiny.environment())
            mark = pathlib.Path(f"{values['out']}.work", "00001.stage_0", "step_00000005")
            while not mark.exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert subprocess.run(line, env=tiny.environment()).returncode == 0
        outs.append(pathlib.Path(values["out"], "model.safetensors").read_bytes())
    assert outs[0] == outs[1]


@pytest.fixture
def unfinished(world, request):
    """A training that was stopped in its first block: its settings, and the folder of what is in progress."""
    values = tree(world, f"unfinished_{request.node.name[:20]}")
    cfg = load.load(command.Config, _file(world, values))
    job = command._job(cfg)
    blocks.Blocks(job, Task("training", None, "updates"), say=str)._embed()
    return values, cfg, job


def with_own_text(world, folder, out):
    """A training in one stage on a copy of the text, and the copy's path."""
    path = folder / "text.jsonl"
    path.write_text(pathlib.Path(world.data).read_text())
    source = {"source": {"name": "jsonl", "path": str(path)}, "template": "raw", "holdout": 0.2}
    return tree(world, out, data=source, stages=[SCHEME], train={"epochs": 1, "batch": 2}), path


def _file(world, values):
    path = world.folder / f"{os.path.basename(values['out'])}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_work_of_another_config_is_refused_and_force_removes_it(world, unfinished, capsys):
    values, cfg, _ = unfinished
    assert run(world, values, "seed=1") == 2
    assert "unfinished training of another config" in capsys.readouterr().err
    command.start_over(cfg)
    assert not cfg.work.exists()


def test_work_on_other_text_is_refused_until_its_text_is_back(world, tmp_path, capsys):
    values, path = with_own_text(world, tmp_path, "other_text")
    cfg = load.load(command.Config, _file(world, values))
    before = command._job(cfg)
    lines = path.read_text()
    path.write_text("".join(reversed(lines.splitlines(keepends=True))))
    assert run(world, values) == 2
    said = capsys.readouterr().err
    assert "other_text.work holds the unfinished training with other text: give it back its text" in said
    path.write_text(lines)
    np.testing.assert_array_equal(command._job(cfg).train, before.train)


def test_work_with_other_weights_is_refused(world, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(world.model, model)
    values = tree(world, "other_weights", model={"path": str(model)})
    command._job(load.load(command.Config, _file(world, values)))
    weights = load_file(model / "model.safetensors")
    save_file({name: x * 2 for name, x in weights.items()}, model / "model.safetensors", {"format": "pt"})
    assert run(world, values) == 2
    said = capsys.readouterr().err
    assert "other_weights.work holds the unfinished training with other weights: give it back its weights" in said


@pytest.mark.slow
def test_layers_that_training_made_worse_than_rounding_are_told(world, capsys):
    harmful = {"epochs": 1, "batch": 2, "optimizer": {"name": "adamw", "lr": 3.0, "weight_decay": 0.0}}
    assert run(world, tree(world, "worse", stages=["w8a16_asym:g32"], train=harmful)) == 0
    said = capsys.readouterr().out
    assert "training made 2 of 2 layers worse than rounding: lower train.optimizer.lr" in said


@pytest.mark.slow
def test_a_finished_folder_is_made_again_from_other_text(world, tmp_path, capsys):
    values, path = with_own_text(world, tmp_path, "new_text")
    receipt = pathlib.Path(values["out"], "qat.json")

    def rows():
        capsys.readouterr()
        assert run(world, values) == 0
        return json.loads(receipt.read_text()).get("rows"), "is up to date (same config)" in capsys.readouterr().out

    first, _ = rows()
    assert rows() == (first, True)
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    second, kept = rows()
    assert first != second
    assert not kept
    earlier = json.loads(receipt.read_text())
    del earlier["rows"]  # as earlier versions wrote it
    receipt.write_text(json.dumps(earlier))
    path.write_text("")
    assert rows() == (None, True)


def test_work_lies_beside_an_out_that_ends_in_a_slash(world):
    cfg = load.load(command.Config, _file(world, tree(world, "slash")), [f"out={world.folder}/slash/"])
    assert cfg.work == world.folder / "slash.work"


@pytest.mark.parametrize("arguments", [(), ("--force",)])
def test_a_second_process_is_refused_while_the_first_trains(world, unfinished, arguments, capsys):
    values, cfg, _ = unfinished
    code = "from qarl_jax.qat import command; from qarl_jax.typed_config import load; "
    code += f"held = command._owned(load.load(command.Config, {str(_file(world, values))!r}))"
    code += "; held.__enter__(); print(1, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=tiny.environment(), **pipes) as first:
        assert first.stdout.readline() == b"1\n"
        assert run(world, values, *arguments) == 2
        assert f"{cfg.work} is in use by process {first.pid}: stop it, or name another out." in capsys.readouterr().err
        assert list(cfg.work.iterdir())
        first.kill()
    assert run(world, values) == 0


def test_a_folder_below_a_file_is_refused(world, capsys):
    (world.folder / "file").write_text("")
    assert run(world, tree(world, "file/out")) == 2
    assert "file/out.work cannot be written: File exists. Name a folder of yours." in capsys.readouterr().err


def test_a_disk_that_is_full_while_layer_inputs_are_written_is_told(world, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blocks, "_write_rows", full)
    assert run(world, tree(world, "full")) == 2
    said = capsys.readouterr().err
    assert "full.work cannot be written: No space left on device; free some space, and give the same command" in said
    assert "Traceback" not in said


def test_damaged_work_is_told(unfinished):
    _, cfg, job = unfinished
    blocks.Progress(cfg.work).finish([], 0)
    file = blocks.Progress(cfg.work).path(0, "trained")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"00000\.trained\.safetensors have changed\. Start over with --force"):
        blocks.Blocks(job, Task("training", None, "updates"))


# ---- rows, layers, mistakes ------------------------------------------------------------------------------------------


MOE = models.MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    """A dense layer and one of experts."""
    folder = tmp_path_factory.mktemp("moe")
    config = tiny.model_config(architecture="Qwen3MoeForCausalLM", moe=MOE, moe_layers=(1,))
    models.save_hf(models.random_model(config), folder)
    return folder


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_read_and_written_is_the_checkpoints(moe_folder, layer):
    config = models.read_config(moe_folder)
    params = read_layer(Checkpoint(moe_folder, config), config, layer)
    found = dict(layer_tensors(params, config, layer, jnp.bfloat16))
    tensors = load_file(moe_folder / "model.safetensors")
    assert set(found) == {name for name in tensors if f".layers.{layer}." in name}
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, tensors[name])


@pytest.mark.slow
def test_layers_one_by_one_are_the_model(moe_folder):
    config = models.read_config(moe_folder)
    graphdef, masters = models.load_masters(moe_folder, config)
    model, rng = models.merge(graphdef, masters, nnx.State({})), np.random.default_rng(0)
    stream = jnp.asarray(rng.standard_normal((2, 2, 8, 64)), jnp.float32)
    whole = jnp.stack(model.through(stream[:, 0], stream[:, 1]), axis=1)
    checkpoint = Checkpoint(moe_folder, config)
    for layer in range(2):
        stream = blocks._run(layer_config(config, layer), read_layer(checkpoint, config, layer), stream)
    np.testing.assert_allclose(stream, whole, rtol=1e-5, atol=1e-5)


def test_each_epoch_visits_every_row_once():
    plan = updates.Plan(rows=6, batch=4, epochs=2, seed=1)
    visited = [row for update in range(plan.updates) for row in plan.of(update)]
    assert plan.updates == 3
    assert sorted(visited[:6]) == sorted(visited[6:]) == list(range(6))
    assert visited[:6] != visited[6:]


def test_too_little_text_is_told(world, capsys):
    values = tree(world, "little")
    values["text"] = {"rows": 500, "row_len": 64, "heldout": 1}
    assert run(world, values) == 2
    assert "lower it, or name more text" in capsys.readouterr().err
    assert not pathlib.Path(f"{values['out']}.work").exists()  # so that another config may be tried at once


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4+5=", r"shorter than a row of 16 tokens: lower text\.row_len, or name more text\.$"),
        # One piece of a text, which is trained on.
        ("1+2=" * 200, r"a row of 16 tokens: raise data\.holdout, name more text, or lower text\.row_len\.$"),
    ],
)
def test_a_text_of_one_piece_is_told_with_what_qat_can_change(world, tmp_path, text, said, capsys):
    path = tmp_path / "one.txt"
    path.write_text(text)
    source = {"source": {"name": "jsonl", "path": str(path)}, "template": "raw", "holdout": 0.2}
    assert run(world, tree(world, "one_piece", data=source)) == 2
    assert re.search(said, capsys.readouterr().err.strip())
    assert not pathlib.Path(world.folder, "one_piece.work").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"stages": ["w4a16:g40"]}, r"cannot quantize model\.layers\..*not a multiple of the group size 40"),
        ({"stages": []}, "stages names one low-bit scheme or more"),
        ({"stages": ["bf16"]}, "stages names one low-bit scheme or more"),
        ({"stages": ["w2a16", "w4a16"]}, "stages goes up from w2a16 to w4a16: list schemes from many bits to few"),
        ({"stages": ["w2a2", "w2a16_asym"]}, "stages goes up from w2a2 to w2a16_asym"),
        ({"stages": ["w8a16_asym:g32"], "widths": [8, 8]}, r"widths=\[8, 8\] names a width twice"),
        (
            {"text": {"rows": ROWS, "row_len": 129}},
            r"text\.row_len=129 is more than the model's 128 positions .*: lower it to 128 or less\.$",
        ),
        ({"seed": -1}, r"seed must lie in \[0, 2\^31\), got -1"),
        (
            {
                "data": {
                    "source": {"name": "mix", "parts": {"a": {"name": "jsonl", "path": "a"}}},
                    "stages": [{"weights": {"a": 1}}],
                }
            },
            r"data\.stages are of a run's steps",
        ),
        ({"train": None}, "train and distill are both null"),
        ({"train": {"batch": 64}}, r"train\.batch=64 is more than text\.rows=8"),
        (
            {"train": {"optimizer": {"name": "adamw", "master_rounding": "stochastic"}}},
            r"train\.optimizer\.master_rounding=stochastic is for bfloat16 masters: these are float32",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(world, changed, said, capsys):
    assert run(world, tree(world, "mistake") | copy.deepcopy(changed)) == 2
    assert re.search(said, capsys.readouterr().err.strip())
    assert not pathlib.Path(world.folder, "mistake.work").exists()
