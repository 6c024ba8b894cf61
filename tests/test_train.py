# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.train` end to end in miniature: what a run does and what it leaves behind.

The runs share one folder of compiled programs, because most of their time is XLA's.
"""

import json
import shutil
import signal

import numpy as np
import pytest
from qarl_bridge.protocol import formats

from qarl_jax import plot, train
from qarl_jax.loop import step_metrics, updates
from qarl_jax.loop.collector import Collector
from qarl_jax.observe import recorder
from qarl_jax.rollout.dynamic_sampling import Collected
from qarl_jax.run import build, config, stamp
from qarl_jax.types import UserError
from tests.reference import rewards, tiny

pytestmark = pytest.mark.usefixtures("shared_learners")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def run(world):
    """Two steps of two updates each: w4a16, TBPO, Muon, embedded sampler."""
    assert train.main(world.command()) == 0
    return world


def other(world, name, **sections):
    """Records of a run that differs from `world` in these sections."""
    changed = world.changed(run_dir=str(world.folder / name), **sections)
    assert train.main(changed.command()) == 0
    return changed.records()


# ---- what a run leaves behind --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_step_has_one_line_with_the_promised_keys(run):
    lines = recorder.read_lines(run.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    promised = {
        *("reward/mean", "reward/std", "response/length_mean", "response/truncated", "entropy/mean", "rollout/version"),
        *("mismatch/k1", "mismatch/k3", "mismatch/max_abs", "mismatch/mean_abs", "proximal/noise", "loss/total"),
        *("clip/seq_dropped", "clip/seq_pos_high", "clip/seq_neg_low", "clip/seq_neg_high", "later/clip/seq_dropped"),
        *("quant/code_flips", "optim/grad_norm", "optim/lr", "train/updates", "train/padding_share"),
        *(f"time/{phase}_s" for phase in ("rollout", "reward", "pack", "old_logprobs", "update", "publish", "step")),
        *("time/tok_per_s", "time/rollout_tok_per_s"),
    }
    for line in lines:
        assert promised <= line.keys(), promised - line.keys()
        numbers = {key: value for key, value in line.items() if isinstance(value, float)}
        assert all(np.isfinite(list(numbers.values()))), numbers
        assert "nonfinite" not in line
        assert line["train/updates"] == 2
    assert [line["rollout/version"] for line in lines] == [0, 1]  # step n samples from version n


@pytest.mark.slow
def test_sampler_and_learner_are_the_same_policy(run):
    for line in run.records():
        assert line["mismatch/max_abs"] < 1e-5
        assert -1e-12 < line["mismatch/k3"] < 1e-10  # half the square of the largest difference, and its rounding
        assert line["proximal/noise"] < 3e-5  # a tenth of the published band


@pytest.mark.slow
def test_the_policy_moves_and_its_codes_with_it(run):
    for line in run.records():
        assert 0 < line["quant/code_flips"] < 1
        assert line["optim/skipped"] == 0
        assert line["later/proximal/noise"] > 100 * line["proximal/noise"]


@pytest.mark.slow
def test_error_tokens_and_histograms_cover_every_response_token(run):
    for line, counts in zip(run.records(), run.records("histograms"), strict=True):
        assert counts["step"] == line["step"]
        assert 0 <= line["error/tok_learner"] < 1
        # Sampler and learner are one policy, so neither is surprised alone, but for a token right at the limit.
        assert line["error/tok_hidden"] < 0.01
        assert line["error/tok_sampler"] == pytest.approx(line["error/tok_learner"], abs=0.01)
        assert line["text/zlib_ratio"] > 0
        assert 0 < line["quant/weight_change"] < line["quant/error"] < 1
        signed = sum(counts["hist/weight_pos"]) + sum(counts["hist/weight_neg"])
        assert line["train/tokens"] * (1 - line["loss/seq_zero_adv"]) * 0.5 < signed <= line["train/tokens"]
        # The ratios are those of the second update alone: about half the tokens, and they have moved.
        assert 0 < sum(counts["hist/ratio_pos"]) + sum(counts["hist/ratio_neg"]) < signed
        assert line["quantile/ratio_pos/p01"] < line["quantile/ratio_pos/p99"]


@pytest.mark.slow
def test_a_step_leaves_its_timeline_and_the_codes_that_changed_in_each_layer(run):
    for line, picture, counts in zip(run.records(), run.records("timeline"), run.records("histograms"), strict=True):
        names = {name for name, _, _ in picture["spans"]}
        assert {"rollout", "update", "publish", "metrics"} <= names
        assert all(-1e-3 <= begin <= end <= picture["seconds"] + 1e-3 for _, begin, end in picture["spans"])
        flips = {key: row for key, row in counts.items() if key.startswith("flips/")}
        assert {len(row) for row in flips.values()} == {2}  # layers
        assert len(flips) == 7
        shares = [share for row in flips.values() for share in row]
        assert min(shares) < line["quant/code_flips"] < max(shares)


@pytest.mark.slow
def test_the_policy_is_evaluated_before_and_after(run):
    first, last = run.records("eval")
    assert (first["version"], last["version"]) == (0, 2)
    assert {"eval/reward/mean", "eval/reward/stderr", "eval/response_len/mean", "eval/truncated"} <= first.keys()
    assert run.records()[-1]["eval/reward/mean"] == last["eval/reward/mean"]


@pytest.mark.slow
def test_samples_tell_prompt_response_and_version(run):
    samples = run.records("samples")
    assert len(samples) == 2 * 4
    assert {sample["step"] for sample in samples} == {0, 1}
    for sample in samples:
        assert sample["policy_version"] == sample["step"]
        assert sample["reward"] == pytest.approx(rewards.digit_share(sample["response"], "", {}))


@pytest.mark.slow
def test_run_json_holds_the_resolved_config_and_the_facts(run):
    manifest = json.loads((run.run_dir / "run.json").read_text())
    assert config.from_dict(manifest["config"]) == run.config
    start = manifest["starts"][0]
    assert start["forward"] == start["rollout"] == "w4a16:g32"
    assert start["parameters"] == sum(leaf.size for leaf in tiny.leaves())
    assert start["versions"]["jax"]


def files(folder):
    """Every file of a run but its lock, and what is in it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["finished", "fails", "interrupted"])
def test_a_start_that_trains_nothing_writes_nothing(run, ends, monkeypatch, capsys):
    def fails(self, step, add):
        raise UserError("no engine")

    def is_interrupted(self, step, add):
        signal.raise_signal(signal.SIGTERM)
        return Collected(groups=[], sampled=[], parts={}, metrics={})

    before, more = files(run.run_dir), ["train.steps=3", "optimizer.lr=0.5"]
    if ends == "finished":
        assert train.main(run.command("optimizer.lr=0.5")) == 0
        assert f"done: {run.run_dir} has trained step 2" in capsys.readouterr().out
    else:
        monkeypatch.setattr(Collector, "collect", fails if ends == "fails" else is_interrupted)
        assert train.main(run.command(*more)) == (2 if ends == "fails" else 0)
    assert files(run.run_dir) == before


@pytest.mark.slow
def test_a_run_that_goes_on_says_from_which_step_on_a_setting_changed(run):
    gone_on = run.changed(run_dir=str(run.folder / "gone_on"))
    shutil.copytree(run.run_dir, gone_on.run_dir)
    assert train.main(gone_on.command("train.steps=3", "optimizer.lr=0.5")) == 0
    starts = json.loads((gone_on.run_dir / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 2]
    assert starts[1]["changed"] == ["optimizer.lr 0.02 -> 0.5", "train.steps 2 -> 3"]
    assert [record["step"] for record in gone_on.records()] == [0, 1, 2]
    assert [record["version"] for record in gone_on.records("eval")] == [0, 2, 3]
    assert stamp.config_of(gone_on.run_dir / "checkpoints" / "step_00000002").optimizer.lr == 0.02


# ---- variants ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grpo_runs_with_token_level_clipping(world):
    for line in other(world, "grpo", loss={"name": "grpo", "mismatch": "tis"}):
        assert line["mismatch/max_abs"] < 1e-5
        assert "clip/frac" in line


@pytest.mark.slow
def test_the_limit_grows_by_stages_and_a_resumed_run_is_at_its_place(world, monkeypatch):
    rows, limits, pack, grade = [], [], updates.packing.pack, build.Grader.grade

    def packing(*args, **options):
        rows.append(options["row_len"])
        return pack(*args, **options)

    def grading(self, tokenizer, prompts, completions, max_response_len=0):
        if max_response_len not in limits:  # a step's groups may be graded in several calls
            limits.append(max_response_len)
        return grade(self, tokenizer, prompts, completions, max_response_len)

    monkeypatch.setattr(updates.packing, "pack", packing)
    monkeypatch.setattr(build.Grader, "grade", grading)
    sections = {
        "rollout": {"stages": [{"until": 1, "max_response_len": 4}]},
        "train": {"row_len": 0, "prompts_per_update": 0},
        "eval": {"at_start": False},
    }
    whole = other(world, "stages", **sections)
    assert (rows, limits) == ([8 + 4, 8 + 12], [4, 12, 0])  # and evaluation, with the run's own limit
    assert whole[0]["response/length_max"] == 4
    assert 4 < whole[1]["response/length_max"] <= 12
    changed = world.changed(run_dir=str(world.folder / "stages_cut"), **sections)
    assert train.main(changed.command("train.steps=1", "eval.at_end=false")) == 0
    assert train.main(changed.command()) == 0
    assert changed.records() == whole


@pytest.mark.slow
def test_a_bf16_learner_under_a_low_bit_sampler_shows_its_mismatch(world, run):
    """As QuRL has it: its correction, its aggregation, its scale."""
    sections = {
        "quant": {"forward": "bf16", "rollout": "w4a16:g32", "uaq_scale": 1.5},
        "loss": {"name": "grpo", "mismatch": "acr", "aggregation": "seq-mean-token-mean"},
    }
    for line in other(world, "baseline", **sections):
        assert "nonfinite" not in line
        assert line["optim/update_norm"] > 0
        assert line["mismatch/mean_abs"] > 1e-2  # int4 against full precision; the aligned run has 1e-6
        assert 0 < line["quant/code_flips"] < 1  # the sampler's codes


@pytest.mark.slow
def test_a_single_update_per_step_needs_no_scoring_pass(world, run):
    changed = world.changed(run_dir=str(world.folder / "single"), train={"prompts_per_update": 0})
    assert train.main(changed.command()) == 0
    for line in recorder.read_lines(changed.run_dir / "metrics.jsonl"):
        assert "time/old_logprobs_s" not in line
        assert not any(key.startswith("later/") for key in line)
        assert line["train/updates"] == 1
        assert line["proximal/max_abs"] == 0
        assert line["mismatch/max_abs"] < 1e-5


@pytest.mark.slow
def test_what_cannot_be_compiled_ahead_is_compiled_when_it_is_needed(world, run, monkeypatch, capsys):
    def failing(*args):
        raise RuntimeError("INTERNAL: Failed to launch ptxas")

    monkeypatch.setattr(build, "compile_ahead", failing)
    (late,), first = other(world, "late", train={"steps": 1}, log={"view": "lines"}), run.records()[0]
    assert {key: value for key, value in late.items() if not key.startswith("eval/")} == first
    assert "not compiled ahead, but when needed: INTERNAL: Failed to launch ptxas" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reward_that_never_differs_moves_nothing(world):
    for line in other(world, "constant", reward={"name": "python", "path": f"{rewards.__file__}:nothing"}):
        assert line["reward/zero_advantage_groups"] == 1
        assert line["optim/skipped"] == 1
        assert line["quant/code_flips"] == 0


@pytest.mark.slow
def test_a_diverged_run_stops_names_the_step_and_keeps_its_checkpoint(world, run, capsys):
    changed = world.changed(run_dir=str(world.folder / "diverged"), train={"steps": 1})
    assert train.main(changed.command()) == 0
    capsys.readouterr()
    assert train.main(changed.command("train.steps=2", "optimizer.lr=1.0e+37")) == 1
    assert capsys.readouterr().err.startswith("error: step 1, update 2 of 2: the gradient is not finite")
    assert [path.name for path in (changed.run_dir / "checkpoints").iterdir()] == ["step_00000001"]


@pytest.mark.nightly  # the same question as of a learner, in tests/learning and tests/models
def test_a_mesh_of_devices_gives_the_same_first_step(world, run):
    (line,) = other(world, "mesh", train={"steps": 1, "micro_batch_rows": 4}, mesh={"fsdp": 2, "tensor": 2})
    one = run.records()[0]
    assert line["reward/mean"] == one["reward/mean"]
    assert line["mismatch/max_abs"] < 1e-5
    assert line["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_fresh_masters_need_no_weights_in_the_folder_and_a_run_may_end_without_a_checkpoint(world, monkeypatch, capsys):
    monkeypatch.setattr(plot, "leave", plot.leave.__wrapped__)
    changed = world.changed(
        run_dir=str(world.folder / "fresh"),
        model=world.tree["model"] | {"init": "random"},
        quant=world.tree["quant"] | {"code_flips": False},
        checkpoint={"every": 0, "at_end": False},
        train={"steps": 1},
    )
    weights = world.model / "model.safetensors"
    weights.rename(world.folder / "elsewhere")
    try:
        assert train.main(changed.command()) == 0
    finally:
        (world.folder / "elsewhere").rename(weights)
    (line,) = changed.records()
    assert line["mismatch/max_abs"] < 1e-5
    assert line["optim/grad_norm"] > 0
    assert "quant/code_flips" not in line
    assert not list((changed.run_dir / "checkpoints").glob("step_*"))
    assert {"curves.png", "report.html"} <= {path.name for path in changed.run_dir.iterdir()}
    said = step_metrics.summary(changed.config)
    assert "its policy not saved (checkpoint.at_end=true saves it)" in said
    assert "qarl_jax watch" in said
    assert "--checkpoint" not in said  # evaluate and export would find none


def test_a_dry_run_prints_config_and_plans_and_writes_nothing(world, capsys):
    changed = world.changed(run_dir=str(world.folder / "dry"))
    assert train.main([*changed.command(), "--dry-run"]) == 0
    said = capsys.readouterr().out
    for part in ("forward: w4a16:g32", "micro-batch", "masters", "QTensors", "one device", "mlp.down_proj.weight"):
        assert part in said
    assert not changed.run_dir.exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.source={name: jsonl, path: ROWS}"], "rows.jsonl:2: not a JSON object"),
        (["data.template='{{ nothing }}'"], "data.template"),
        (["train.prompts_per_step=9998"], "train.prompts_per_step=9998 is more than the"),
        (["rollout.engine={name: vllm, max_model_len: 9999}"], "max_model_len=9999 is more than the model's"),
    ],
)
def test_a_dry_run_refuses_what_no_machine_could_train_on(world, tmp_path, capsys, overrides, said):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\nno\n')
    asked = [override.replace("ROWS", str(tmp_path / "rows.jsonl")) for override in overrides]
    assert train.main([*world.command(*asked), "--dry-run"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err


@pytest.mark.parametrize(("scheme", "code"), [("w8a8", 2), ("w2a16_asym:g16", 0)])
def test_a_dry_run_refuses_split_channels_that_vllm_has_no_layer_for(tmp_path, capsys, scheme, code):
    world = tiny.World(tmp_path)
    file = world.model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {formats.SPLITTING: {"share": 0.25, "group": 16}}))
    engine = "rollout.engine={name: vllm, max_model_len: 128}"
    assert train.main([*world.command(f"quant.forward={scheme}", engine), "--dry-run"]) == code
    told = capsys.readouterr().err
    assert ("vLLM has no layer for model.layers" in told and "rollout.engine.name=jax" in told) == (code == 2)


def test_a_dry_run_without_its_data_plans_and_says_what_was_not_checked(world, capsys):
    assert train.main([*world.command("data.source={name: jsonl, path: /no/rows.jsonl}"), "--dry-run"]) == 0
    *plan, last = capsys.readouterr().out.splitlines()
    assert "micro-batch" in "\n".join(plan)
    assert last.startswith("not on this machine, so the prompts are not checked: /no/rows.jsonl")
