# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures whole GRPO steps of verl with vLLM on the same GPU: seconds by phase, tokens per second, memory.

    python -m benchmarks.beside_peers.verl_steps FOLDER --out results.jsonl [--liger --no-checkpointing --micro 8 --fp8]

`benchmarks.beside_peers.folder` makes FOLDER. Every response has `--response-len` tokens (`ignore_eos`). Beyond the
defaults of verl: FSDP, a fused head, batches by tokens, weights per token for the mismatch. vLLM gives its memory back
while the learner updates. Attention is torch's own flash kernel: flash-attn has no wheel for this torch. `--set`
overrides its config. `--print-only` prints all overrides, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.beside_peers import lines
from benchmarks.beside_peers.lines import PROMPT_LEN
from benchmarks.watched import finished, most_used

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def overrides(args: argparse.Namespace) -> list[str]:
    """Returns the overrides of verl's config; those of the command line come last and win."""
    longest = PROMPT_LEN + args.response_len
    folder = args.folder.absolute()
    actor = {
        "strategy": "fsdp",
        "fsdp_config.model_dtype": {"float32": "fp32", "bfloat16": "bf16"}[args.dtype],
        "optim.lr": 1e-6,
        "optim.weight_decay": 0.01,
        "ppo_mini_batch_size": args.prompts // args.updates,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": args.micro * longest,
        "use_kl_loss": False,
        "entropy_coeff": 0,
    }
    rollout = {
        "name": "vllm",
        "n": args.samples,
        "tensor_model_parallel_size": 1,
        "gpu_memory_utilization": args.utilization,
        "enforce_eager": False,
        "free_cache_engine": True,
        "max_model_len": longest,
        "max_num_seqs": args.prompts * args.samples,
        "max_num_batched_tokens": 16384,
        "ignore_eos": True,
        "calculate_log_probs": True,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": 2 * args.micro * longest,
        "agent.num_workers": 4,
    } | ({"quantization": "fp8"} if args.fp8 else {})
    model = {
        "path": folder,
        "use_remove_padding": False,
        "enable_gradient_checkpointing": not args.no_checkpointing,
        "use_liger": args.liger,
        "use_fused_kernels": True,
        "fused_kernel_options.impl_backend": "torch",
    }
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.rollout_is": "token",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": PROMPT_LEN,
        "data.max_response_length": args.response_len,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": args.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": '["console","file"]',
        "ray_kwargs.ray_init.num_cpus": max(8, os.cpu_count() or 8),
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    for section, settings in {"actor": actor, "rollout": rollout, "model": model}.items():
        values |= {f"actor_rollout_ref.{section}.{key}": value for key, value in settings.items()}
    values |= dict(word.split("=", 1) for word in args.overrides)
    return [f"{key}={value}" for key, value in values.items()]


def summary(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarizes the metrics that verl wrote, a row for each step, without the steps that are discarded."""
    kept = rows[args.discard :]
    seconds = {key.removeprefix("timing_s/"): lines.mean(kept, key) for key in kept[0] if key.startswith("timing_s/")}
    compared = [key for key in kept[0] if "rollout_probs_diff" in key or key.startswith("rollout_corr/")]
    return {
        "seconds": seconds,
        "step_s": [round(row["timing_s/step"], 4) for row in rows],
        **lines.speeds(args, seconds, "gen"),
        "response_tokens": lines.mean(kept, "response_length/mean"),
        "mismatch": {key.rpartition("/")[2]: lines.mean(kept, key) for key in compared},
        "mfu": lines.mean(kept, "perf/mfu/actor"),
        "reward": lines.mean(kept, "critic/rewards/mean"),
        "grad_norm": lines.mean(kept, "actor/grad_norm"),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    lines.add_options(parser)
    parser.add_argument("--fp8", action="store_true", help="the sampler multiplies in FP8, the learner in bf16")
    parser.add_argument("--limit-s", type=float, default=500.0)
    parser.add_argument("--log", default="", help="where verl's output goes")
    parser.add_argument("--print-only", action="store_true")
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", metavar="KEY=VALUE", help="of verl's config")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    words = overrides(args)
    if args.print_only:
        print("\n".join(words))
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, most_used() as most:
        metrics, log = pathlib.Path(scratch) / "metrics.jsonl", args.log or f"{scratch}/log"
        words += [f"hydra.run.dir={scratch}", f"trainer.default_local_dir={scratch}/run"]
        env = ENVIRONMENT | os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics), "TOKENIZERS_PARALLELISM": "true"}
        command = ["timeout", "-k", "15", str(args.limit_s)]  # a TERM first: ray ends what it has begun
        command += [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        code = finished(command, log, args.limit_s + 20, env)
        rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        text = pathlib.Path(log).read_text(errors="replace")
    rows = [row for row in rows if "timing_s/step" in row]
    line = lines.known("verl", args, ("verl", "vllm", "transformers", "torch", "ray", "liger-kernel"))
    line |= {"code": code, "peak_gpu_gib": round(most[0] / 2**30, 2)}
    line["seconds_in_all"] = round(time.perf_counter() - began, 1)
    if len(rows) > args.discard:
        line |= summary(args, rows)
    if code != 0:
        line["tail"] = text.splitlines()[-25:]
    lines.written(line, args.out)
    return 0 if code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
