# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks meant for a GPU run at toy size on a CPU, and say what they are meant to say."""

import gzip
import json
import pathlib
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from benchmarks import (
    attention,
    backward,
    engine_price,
    gemm,
    learner,
    masters,
    memory,
    packing,
    publish_adapters,
    random_folder,
    shapes,
    step_gpu,
    step_processes,
    trace_summary,
    watched,
)
from benchmarks.beside_peers import folder as peers_folder
from benchmarks.beside_peers import lines, trl_steps, verl_steps
from qarl_jax import models
from qarl_jax.data import load_tokenizer
from qarl_jax.run import config
from tests.reference import bridge_world

ROOT = pathlib.Path(__file__).parents[1]

SMALL = ["--model", "tiny", "--rows", "8", "--seq", "32", "--steps", "1"]


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.nightly
def test_the_learner_is_measured_beside_its_peer(capsys, tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text("print('RESULT peer=toy tokens_per_s=1000.0 steps=1')")
    command = ["--schemes", "bf16", "w8a8", "--peer", f"{sys.executable} {peer}", "--out", str(tmp_path / "out.json")]
    assert learner.main([*SMALL, *command]) == 0
    first, bf16, w8a8 = printed(capsys)
    assert first["peer"]["peer"] == "toy"
    for line in (bf16, w8a8):
        assert line["of_the_peer"] == pytest.approx(line["tokens_per_s"] / 1000)
        assert line["mfu"] is None  # no peak is known of a CPU
    assert w8a8["of_the_first"] == pytest.approx(w8a8["tokens_per_s"] / bf16["tokens_per_s"])
    assert json.loads((tmp_path / "out.json").read_text())["results"] == [bf16, w8a8]


@pytest.mark.nightly
def test_a_low_bit_backward_is_set_beside_bfloat16s(tmp_path):
    out = tmp_path / "out.json"
    tiny = ["products", "--model", "tiny", "--tokens", "64", "--repeats", "1", "--schemes", "w8a8", "--out", str(out)]
    assert backward.main(tiny) == 0
    rows = json.loads(out.read_text())["results"]
    assert len(rows) == 4 * (1 + 3 + 2)
    assert all(row["times_bf16"] == pytest.approx(row["xla_us"] / row["us"]) for row in rows)
    real = ["--model", "assets/tiny-qwen3", "--tokens", "24", "--rows", "2", "--schemes", "w8a8", "--group-size", "32"]
    assert backward.main(["gradients", *real, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    whole = {(row["backward"], row["against"]): row["cosine"] for row in found if row["path"] == "all"}
    assert 0.9 < whole["fp8.0", "bf16.0"] < whole["int8.0", "bf16.0"] < 1
    assert whole["int8.1", "int8.0"] < whole["int8.1", "bf16.0"]  # two roundings apart, and one


@pytest.mark.nightly
def test_a_peak_is_measured_in_a_process_of_its_own_and_set_beside_the_plan(capfd, tmp_path, monkeypatch):
    case = shapes.Setting(model="tiny", optimizer="muon", moments="int8", offload=True)
    monkeypatch.setattr(memory, "MEASURED", (shapes.Setting(), case))
    out = tmp_path / "out.json"
    assert memory.main(["--measure", "--only", "1", "--out", str(out), "--rows=8", "--seq=32"]) == 0
    (line,) = json.loads(out.read_text())["results"]
    assert (line["moments"], line["offload"], line["rows"], line["seq"]) == ("int8", True, 8, 32)
    assert line["planned_gb"] == pytest.approx(sum(line["planned"].values()))
    params = line["planned"]["masters"] / 2  # bfloat16
    assert params < line["host_gb"] < 2.1 * params  # a byte, or two of embedding and head, each
    assert "planned_over_measured" not in line  # a CPU does not say
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == line


@pytest.mark.parametrize("argv", [[], ["--out", "runs/benchmarks.memory /out.json"]], ids=len)
def test_a_memory_record_names_the_module_that_made_it(argv, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memory.py", *argv])
    found = json.loads(memory.report([{"case": 1}], "benchmarks.memory_adapters"))
    assert found["command"] == " ".join(["python -m benchmarks.memory_adapters", *argv])
    assert found["results"] == [{"case": 1}]


def test_a_peer_that_fails_is_told(tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text("raise SystemExit('no GPU')")
    with pytest.raises(SystemExit, match="no GPU"):
        learner.run_peer(f"{sys.executable} {peer}")


@pytest.mark.nightly
def test_products_and_layers_are_timed_at_every_shape(capsys):
    assert gemm.main(["--model", "tiny", "--tokens", "64", "--repeats", "1"]) == 0
    lines = printed(capsys)
    assert {line["layer"] for line in lines} == {"q", "kv", "up", "down"}
    assert {line["kind"] for line in lines} >= {"bf16", "int8", "int8_kn", "fp8", "dot/bf16", "dot/w8a8", "dot/w4a16"}
    assert all(line["tflops"] > 0 for line in lines)


@pytest.mark.slow
def test_attention_is_timed_plain_and_packed(capsys):
    sizes = ["--rows", "1", "--seq", "64", "--heads", "4", "--kv", "2", "--head_dim", "16", "--repeats", "1"]
    assert attention.main([*sizes, "--segments", "1", "4", "--implementations", "xla"]) == 0
    plain, packed = printed(capsys)
    assert (plain["segments"], packed["segments"]) == (1, 4)


@pytest.mark.vllm
@pytest.mark.nightly
def test_whole_steps_are_run_through_the_live_engine(capsys, tmp_path):
    pytest.importorskip("vllm")
    folder, out = str(tmp_path / "model"), tmp_path / "out.jsonl"
    sizes = ["--shapes", "tiny", "--folder", folder, "--batch", "16", "--response-len", "8", "--steps", "1"]
    more = ["model.attention=xla", "rollout.engine.kv_cache_gb=0.1", "rollout.engine.threads=1", "train.row_len=80"]
    assert step_gpu.main([*sizes, "--case", "w8a8", "--out", str(out), *more]) == 0
    (line,) = printed(capsys)
    assert line == json.loads(out.read_text())
    assert (line["code"], line["case"]) == (0, "w8a8")
    assert line["seconds"]["step"] >= line["seconds"]["rollout"] > 0
    assert line["tokens_per_s"] * line["seconds"]["step"] == pytest.approx(line["response_tokens"])
    assert line["k3"] == 0
    assert line["unequal_tokens"][0] == 0 < line["unequal_tokens"][1]
    assert (line["updates"], line["first_mismatches"]) == (4, [])
    assert any("execution eager" in said for said in line["said"])


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_case_goes_on_where_it_was_cut_short(capsys, tmp_path):
    pytest.importorskip("vllm")
    sizes = ["--shapes", "tiny", "--folder", str(tmp_path / "model"), "--batch", "16", "--response-len", "8"]
    more = ["model.attention=xla", "rollout.engine.kv_cache_gb=0.1", "rollout.engine.threads=1", "train.row_len=80"]
    for steps in ("1", "3"):
        assert step_gpu.main([*sizes, "--steps", steps, "--run-dir", str(tmp_path / "run"), *more]) == 0
    assert [line["updates"] for line in printed(capsys)] == [4, 8]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["time/start_s" in record for record in records] == [True, False, True, False]


def test_a_step_that_a_process_began_with_counts_for_no_mean(tmp_path):
    args = step_gpu.build_parser().parse_args(["--folder", "x", "--run-dir", "y"])
    cfg = config.load(step_gpu.CONFIG, step_gpu.overrides(args, "x", str(tmp_path)))
    assert (cfg.checkpoint.every, cfg.checkpoint.keep) == (1, 1)
    counted = {"train/tokens": 10.0, "train/updates": 2.0, "mismatch/exact": 1.0, "mismatch/max_abs": 0.0}
    counted["mismatch/checked"] = 1.0
    seconds = ((9.0, True), (1.0, False), (9.0, True), (2.0, False))
    records = [counted | {"time/step_s": s} | ({"time/start_s": 5.0} if began else {}) for s, began in seconds]
    records[2]["mismatch/max_abs"] = 0.25
    records[1]["time/publish/load_s"], records[3]["time/publish/load_s"] = 3.0, 5.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = step_gpu.summary(tmp_path)
    assert (found["seconds"]["step"], found["first_step_s"], found["updates"]) == (1.5, 9.0, 8)
    assert found["max_abs"] == 0.25
    assert found["publish"] == {"load_s": 4.0}


@pytest.mark.vllm
@pytest.mark.nightly
def test_the_price_of_batch_invariance_is_the_ratio_of_two_live_engines(capsys):
    pytest.importorskip("vllm")
    sizes = ["--shapes", "tiny", "--schemes", "w8a8", "--sequences", "2", "4", "--response-len", "8"]
    assert engine_price.main(sizes) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["sequences"] for line in lines] == [2, 4]
    for line in lines:
        assert line["ratio"] == pytest.approx(line["batch_invariant_tok_per_s"] / line["vllm_tok_per_s"], rel=0.1)
        assert line["bytes"] > 512 * 128 * 2  # the embedding alone, in bf16


@pytest.mark.vllm
@pytest.mark.nightly
def test_versions_of_adapters_are_timed_by_phase_while_the_engine_decodes(capsys, tmp_path):
    pytest.importorskip("vllm")
    sizes = ["--shapes", "tiny", "--scheme", "w8a8", "--rank", "8", "--kv-cache-gb", "0.1", "--threads", "1"]
    count = ["--publishes", "3", "--sequences", "4", "--response-len", "8", "--out", str(tmp_path / "out")]
    assert publish_adapters.main([*sizes, *count]) == 0
    (line,) = printed(capsys)
    assert (line["wrong_versions"], line["completions"]) == (0, 3 * 2 * 4)
    assert line["bytes"] >= 2 * 2 * 8 * 3328  # two layers, rank 8; the seven linear layers' inputs and outputs
    for name in publish_adapters.PHASES:
        assert len(line["each"][name]) == 3
    for load, readback, pause in zip(*(line["each"][name] for name in ("load", "readback", "pause")), strict=True):
        assert pause == pytest.approx(load + readback, abs=2e-5)
    assert json.loads((tmp_path / "out").read_text()) == line


def test_a_random_folder_is_a_model_whose_matrices_are_as_wide_as_asked(tmp_path):
    random_folder.make(tmp_path, random_folder.config_of("tiny"), deviation=0.05)
    model = models.load_hf(tmp_path)
    kernel = np.asarray(models.by_path(models.split(model)[1])["embed.kernel"])
    assert kernel.std() == pytest.approx(0.05, rel=0.02)
    again = random_folder.drawn((64, 64), 0.05, 0, 7).astype(np.float32)
    np.testing.assert_array_equal(again, again.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert len(load_tokenizer(tmp_path)) == 512


def test_a_peers_folder_is_read_by_our_run_too(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    peers_folder.make(tmp_path, "tiny")
    tokenizer = load_tokenizer(tmp_path)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert {len(tokenizer.encode(prompt)) for prompt in prompts[:50]} == {lines.PROMPT_LEN}
    assert len(tokenizer.encode("\n")) == 1
    assert len(tokenizer) == 512  # the model's vocabulary
    rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == prompts


def test_a_line_of_trl_leaves_out_the_first_steps_and_its_phases_add_up(tmp_path):
    args = trl_steps.build_parser().parse_args([str(tmp_path), "--steps", "3"])
    steps = [
        {"generate": 1.0, "old": 0.5, "prepare": 1.75},
        {"prepare": 9.0},
        {"generate": 2.0, "sync": 1.0, "prepare": 4},
    ]
    logs = [{"reward": n, "sampling/sampling_logp_difference/max": n / 10} for n in (9, 9, 9, 9, 0, 1)]
    line = trl_steps.summary(args, [0.0, 5.0, 20.0, 28.0], steps, logs)
    assert line["seconds"] == {"step": 8.0, "update": 4.0, "generate": 2.0, "sync": 1.0, "other": 1.0}
    assert (line["step_s"], line["tokens_per_s"]) == ([5.0, 15.0, 8.0], 65536 / 8)
    assert (line["reward"], line["mismatch"]["max_abs"]) == (0.5, 0.1)


def test_a_line_of_verl_is_made_of_the_metrics_that_it_wrote(tmp_path):
    words = [str(tmp_path), "--fp8", "--dtype", "bfloat16", "--micro", "8", "--set", "trainer.nnodes=2", "new.key=a=b"]
    args = verl_steps.build_parser().parse_args(words)
    values = dict(word.split("=", 1) for word in verl_steps.overrides(args))
    assert (values["trainer.nnodes"], values["new.key"]) == ("2", "a=b")
    assert values["actor_rollout_ref.rollout.quantization"] == "fp8"
    assert values["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == str(8 * 576)
    assert values["actor_rollout_ref.actor.ppo_mini_batch_size"] == "8"  # prompts: two updates
    rows = [{"timing_s/step": s, "timing_s/gen": s / 2, "rollout_corr/k3_kl": s / 100} for s in (40.0, 9.0, 3.0, 5.0)]
    line = verl_steps.summary(args, rows)
    assert line["seconds"] == {"step": 4.0, "gen": 2.0}
    assert (line["tokens_per_s"], line["generated_per_s"]) == (65536 / 4, 65536 / 2)
    assert (line["mismatch"], line["step_s"]) == ({"k3_kl": 0.04}, [40.0, 9.0, 3.0, 5.0])


def test_a_line_of_ours_has_the_means_of_the_steps_that_peers_lines_have():
    records = [
        {"time/step_s": s, "time/update_s": s / 2, "time/tok_per_s": 8 / s, "mismatch/max_abs": s}
        for s in (9.0, 8.0, 1.0, 3.0)
    ]
    line = lines.own(records, discard=2)
    assert line["seconds"] == {"step": 2.0, "update": 1.0}
    assert (line["step_s"], line["mismatch"]["max_abs"]) == ([9.0, 8.0, 1.0, 3.0], 3.0)


def test_unequal_tokens_are_counted_to_the_last_one_over_all_steps():
    whole = {"train/tokens": 131072.0, "mismatch/checked": 1.0}
    records = [whole | {"mismatch/exact": float(np.float32(1 - n / 131072))} for n in (0, 1, 77)]
    assert step_gpu.unequal_tokens(records) == (78, 3 * 131072)
    half = whole | {"mismatch/checked": 0.5, "mismatch/exact": 1.0}
    assert step_gpu.unequal_tokens([*records, half]) == (78, 3 * 131072 + 65536)


@pytest.mark.parametrize(
    ("recipe", "arm", "layers", "longest"),
    [
        ("configs/gpu/recipes.yaml", "1x80_lora", 64, 2048),
        ("configs/papers/qwen3_8b_base.yaml", "tbpo_w8a8", 36, 16384),
        ("configs/papers/qwen3_30b_a3b_base.yaml", "tbpo", 48, 16384),
    ],
)
def test_a_recipe_is_run_at_its_own_shapes_and_lengths(recipe, arm, layers, longest, tmp_path):
    args = step_gpu.build_parser().parse_args(["--recipe", recipe, "--folder", str(tmp_path), f"arm={arm}"])
    assert step_gpu.named(args).num_layers == layers
    cfg = config.load(recipe, step_gpu.of_recipe(args, str(tmp_path), str(tmp_path / "run")))
    assert (cfg.rollout.max_response_len, cfg.train.steps, cfg.model.init) == (longest, 3, "random")


@pytest.mark.parametrize("case", ["bf16", "w8a8", "w2a16_asym:g32", "nvfp4-rollout", "w4a16:g-1-rollout"])
def test_a_case_is_a_config_that_loads(tmp_path, case):
    args = step_gpu.build_parser().parse_args(["--folder", "x", "--case", case])
    cfg = config.load(step_gpu.CONFIG, step_gpu.overrides(args, "x", str(tmp_path)))
    scheme = case.removesuffix("-rollout")
    assert cfg.quant.rollout_scheme == scheme
    assert cfg.quant.forward == ("bf16" if "rollout" in case else scheme)
    assert (cfg.train.updates_per_step, cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt) == (2, 128)


@pytest.mark.parametrize("size", ["tiny-qwen2.5", "qwen2.5-32b"])
def test_a_case_with_adapters_freezes_the_base_and_clips_as_qerl(tmp_path, size):
    args = step_gpu.build_parser().parse_args(
        ["--folder", "x", "--shapes", size, "--case", "nvfp4", "--lora-rank", "32"]
    )
    cfg = config.load(step_gpu.CONFIG, step_gpu.overrides(args, "x", str(tmp_path)))
    assert (cfg.lora.rank, cfg.optimizer.clip_norm, cfg.optimizer.second_moment_dtype) == (32, 0.2, "int8")
    assert cfg.loss.name == "dapo"
    model = shapes.model_config(shapes.Setting(model=size, scheme="nvfp4"))
    assert (model.architecture, str(model.scheme_of("stacks.0.mlp.up.kernel"))) == ("Qwen2ForCausalLM", "nvfp4")


def test_responses_of_a_random_folder_end_once_in_as_many_tokens_as_asked(tmp_path):
    random_folder.make(tmp_path, random_folder.config_of("tiny"), weights=False, mean_len=8)
    ends = load_tokenizer(tmp_path).ends
    assert len(ends) == 512 // 8
    assert 1 in ends


@pytest.mark.parametrize("size", ["8b", "30b-a3b"])
def test_a_case_on_several_cards_has_an_engine_on_each_and_one_micro_batch_an_update(tmp_path, size):
    args = step_gpu.build_parser().parse_args(["--folder", "x", "--shapes", size, "--cards", "2", "--updates", "4"])
    cfg = config.load(step_gpu.CONFIG, step_gpu.overrides(args, "x", str(tmp_path)))
    engine = cfg.rollout.engine
    assert (cfg.mesh.fsdp, engine.started, [engine.gpus_of(n) for n in range(2)]) == (2, 2, ["0", "1"])
    assert (engine.has_own_gpu, engine.max_num_seqs) == (False, 64)
    assert (cfg.train.updates_per_step, cfg.micro_batches_per_update) == (4, (1, 1))
    assert cfg.rollout.router_replay == (size == "30b-a3b")


def test_a_trace_is_summed_over_the_devices_kernels_alone(tmp_path, capsys):
    def row(pid, tid, name, us):
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": us, "ts": 0}

    def named(kind, pid, name, tid=0):
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}

    events = [
        named("process_name", 1, "/device:GPU:0"),
        named("process_name", 2, "/host:CPU"),
        named("thread_name", 1, "Stream #7", 7),
        named("thread_name", 1, "XLA Modules", 8),
        row(1, 7, "nvjet_gemm", 300),
        row(1, 7, "loop_fusion", 100),
        row(1, 7, "nvjet_gemm", 200),
        row(1, 8, "jit_step", 600),  # encloses the kernels
        row(2, 1, "python", 9000),
    ]
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert trace_summary.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "0.60 ms" in said
    assert "0.500 ms  83.3%      2 x  nvjet_gemm" in said
    assert "python" not in said
    assert "jit_step" not in said
    assert trace_summary.main([str(tmp_path), "--by", "kind"]) == 0
    assert "GEMM" in capsys.readouterr().out


def test_a_folder_without_a_trace_is_told(tmp_path):
    with pytest.raises(SystemExit, match="profile_steps"):
        trace_summary.newest(tmp_path)


def test_rows_of_a_benchmark_are_full_and_their_lengths_add_up():
    setting = shapes.Setting(model="tiny", rows=2, seq=30, segments=4)
    batch = shapes.batch(setting)
    assert sum(shapes.lengths(setting)) == 60
    assert batch.loss_mask.sum() == 60 - 2 * 4  # all but the first token of each segment
    assert (batch.segment_ids > 0).all()
    assert batch.segment_ids.max() == 4


@pytest.mark.nightly
def test_an_update_on_ragged_lengths_is_timed_padded_and_packed(capsys, tmp_path):
    ragged = [(5 + n, 3 + 4 * n) for n in range(6)] * 7
    samples = [{"step": step, "prompt_len": p, "response_len": r} for step in (1, 2) for p, r in ragged]
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    lengths = tmp_path / "lengths.json"
    assert packing.main(["--samples", str(tmp_path / "samples.jsonl"), "--out", str(lengths)]) == 0
    assert json.loads(lengths.read_text())["lengths"] == [list(pair) for pair in ragged]  # of the first step
    command = ["--lengths", str(lengths), "--model=tiny", "--row-len=128", "--micro-tokens=128", "--steps=1"]
    assert packing.main([*command, "--out", str(tmp_path / "out.json")]) == 0
    padded, packed = printed(capsys)
    assert padded["responses"] == packed["responses"] == 42
    assert padded["tokens"] == packed["tokens"] == sum(map(sum, ragged))
    assert padded["row_len"] == 8 + 5 * 5
    assert padded["padding_share"] > packed["padding_share"]
    assert padded["recompiles"] == packed["recompiles"] == 0
    assert json.loads((tmp_path / "out.json").read_text())["results"] == [padded, packed]


def test_a_drawn_run_that_takes_too_long_is_gone_with_its_engine_and_leaves_its_last_words(tmp_path):
    child = "import subprocess, sys, time; print('loading', flush=True); "
    child += "print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    log = tmp_path / "log"
    assert watched.finished([sys.executable, "-c", child], str(log), 3.0) is None
    said, pid = log.read_text().split()
    assert said == "loading"
    deadline = time.monotonic() + 10
    while bridge_world.alive(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert watched.finished([sys.executable, "-c", "raise SystemExit(2)"], str(log), 60.0) == 2


@pytest.mark.nightly
def test_masters_are_compared_by_what_an_update_moves(capsys):
    assert masters.main(["--updates", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    full, nearest, stochastic = (rows[way] for way in masters.WAYS)
    assert full["moved"] > 0.9 > 0.1 > stochastic["moved"] > nearest["moved"]
    assert full["covered"] == pytest.approx(1, abs=0.01)
    assert nearest["covered"] < 0.1
    assert stochastic["covered"] == pytest.approx(1, abs=0.4)


@pytest.mark.slow  # the jobs' shells
def test_the_jobs_of_one_card_call_commands_that_exist(tmp_path):
    stub = '#!/bin/bash\nprintf "%s\\0" "$@" >>"$CALLS"; printf "\\n\\0" >>"$CALLS"\n'
    for name, text in {"python3": stub, "nvidia-smi": "#!/bin/bash\necho 143771\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    own = {name: str(tmp_path) for name in ("MODELS", "RESULTS", "QUEUE", "SITE")}
    env = own | {"CALLS": str(calls), "CARD": "0", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for job in sorted((ROOT / "benchmarks/sessions/card/0").glob("*.sh")):
        subprocess.run(["bash", str(job)], cwd=ROOT, env=env, check=True, timeout=60)
    lines = [line.split("\0")[:-1] for line in calls.read_text().split("\n\0")]
    steps = [line[2:] for line in lines if line[:2] == ["-m", "benchmarks.step_gpu"]]
    assert len(steps) == 4 + 3 + 5
    for words in steps:
        args = step_gpu.build_parser().parse_args(words)
        of = step_gpu.of_recipe if args.recipe else step_gpu.overrides
        cfg = config.load(args.recipe or step_gpu.CONFIG, of(args, "x", str(tmp_path)))
        assert cfg.rollout.engine_name == "vllm"
    gates = [line[2:] for line in lines if line[:2] == ["-m", "benchmarks.gate"]]
    help_text = subprocess.run(
        [sys.executable, "-m", "benchmarks.gate", "--help"], capture_output=True, text=True
    ).stdout
    assert len(gates) == 2
    assert not [word for words in gates for word in words if word.startswith("--") and word not in help_text]


def test_a_process_for_each_gpu_repeats_a_run_with_an_engine_of_its_own(tmp_path):
    words = ["quant.forward=w8a8", "run_dir=/r", "rollout.engine.replicas=4", "rollout.engine.visible_gpus=0;1;2;3"]
    made = step_processes.commands(words, 2, tmp_path, on_gpus=True)
    cfgs = [config.load(command[4], ["model.path=/m", "reward.name=exact", *command[5:]]) for command in made]
    assert [cfg.distributed.process_id for cfg in cfgs] == [0, 1]
    assert [cfg.distributed.local_devices for cfg in cfgs] == [(0,), (1,)]
    assert len({cfg.distributed.coordinator for cfg in cfgs}) == 1
    for cfg in cfgs:
        assert (cfg.rollout.engine.replicas, cfg.rollout.engine.visible_gpus) == (0, "")  # the process decides
        assert (cfg.run_dir, cfg.quant.forward) == (str(tmp_path), "w8a8")
