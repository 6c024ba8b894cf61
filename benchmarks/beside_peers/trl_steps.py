# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures whole steps of TRL's GRPOTrainer with vLLM on the same GPU: seconds by phase, tokens per second, memory.

    python -m benchmarks.beside_peers.trl_steps FOLDER --out results.jsonl [--liger --no-checkpointing --micro 8]

`benchmarks.beside_peers.folder` makes FOLDER. Every response has `--response-len` tokens (`ignore_eos`). The rest is
TRL's default: loss "dapo", beta 0, importance sampling corrected, so old log-probs are scored. A step lasts from the
beginning of its generation to the beginning of the next one. A clock that waits for the GPU wraps five methods of the
trainer; nothing of TRL is edited. `--engine hf --cpu` tries the script without vLLM on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.beside_peers import lines
from benchmarks.watched import most_used

PHASES = ("generate", "sync", "old", "reward")
SAMPLING = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class Clock:
    """Seconds by phase of each step.

    Attributes:
      began: when each step began; one more when the last one ended.
      steps: seconds by phase; "prepare" is all that precedes the updates.
    """

    def __init__(self, wait: Callable[[], None]):
        self.wait, self.preparing = wait, False
        self.began: list[float] = []
        self.steps: list[dict[str, float]] = []

    def now(self) -> float:
        """Waits for the GPU; returns the time."""
        self.wait()
        return time.perf_counter()

    def wrap(self, owner: Any, method: str, phase: str) -> None:
        """Adds the seconds of a method to a phase of the step, while it prepares its updates."""
        plain = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.preparing:
                return plain(*args, **kwargs)
            began = self.now()
            found = plain(*args, **kwargs)
            self.steps[-1][phase] = self.steps[-1].get(phase, 0.0) + self.now() - began
            return found

        setattr(owner, method, timed)

    def wrap_preparation(self, trainer: Any) -> None:
        """Begins a step with each generation."""
        plain = trainer._generate_and_score_completions

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.began.append(self.now())
            self.steps.append({})
            self.preparing = True
            try:
                return plain(*args, **kwargs)
            finally:
                self.preparing = False
                self.steps[-1]["prepare"] = self.now() - self.began[-1]

        trainer._generate_and_score_completions = timed


def parity(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
    """Rewards a response with an odd number of odd tokens: half of them, and nothing can be learned."""
    return [float(sum(token & 1 for token in tokens) & 1) for tokens in completion_ids]


def summary(
    args: argparse.Namespace,
    began: Sequence[float],
    steps: Sequence[Mapping[str, float]],
    logs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Summarizes a clock and the trainer's logs, an entry for each update, without the steps that are discarded."""
    whole = [end - begin for begin, end in itertools.pairwise(began)]
    kept = [
        {"step": seconds, "update": seconds - step["prepare"]}
        | {name: step[name] for name in PHASES if name in step}
        | {"other": step["prepare"] - sum(step.get(name, 0.0) for name in PHASES)}
        for seconds, step in zip(whole, steps, strict=True)
    ][args.discard :]
    logs = logs[args.discard * args.updates :]
    seconds = {name: lines.mean(kept, name) for name in kept[0]}
    return {
        "seconds": seconds,
        "step_s": [round(value, 4) for value in whole],
        **lines.speeds(args, seconds, "generate"),
        "response_tokens": lines.mean(logs, "completions/mean_length"),
        "mismatch": {
            "mean_abs": lines.mean(logs, f"{SAMPLING}/mean"),
            "max_abs": max((log[f"{SAMPLING}/max"] for log in logs if f"{SAMPLING}/max" in log), default=None),
            "ratio": {kind: lines.mean(logs, f"{RATIO}/{kind}") for kind in ("min", "mean", "max")},
        },
        "reward": lines.mean(logs, "reward"),
        "grad_norm": lines.mean(logs, "grad_norm"),
    }


def trained(args: argparse.Namespace, output: str, wait: Callable[[], None]) -> tuple[Clock, list[dict[str, Any]]]:
    """Trains; returns the clock and the logs of all updates."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line)["prompt"] for line in (args.folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(str(args.folder), padding_side="left")
    passes = args.prompts * args.samples // args.micro
    vllm = args.engine == "vllm"
    config = GRPOConfig(
        output_dir=output,
        max_steps=args.steps * args.updates,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=passes // args.updates,
        steps_per_generation=passes,
        num_generations=args.samples,
        max_completion_length=args.response_len,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=args.cpu,
        gradient_checkpointing=not args.no_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=args.liger,
        model_init_kwargs={"dtype": args.dtype, "attn_implementation": "sdpa"},
        use_vllm=vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.utilization,
        vllm_max_model_length=len(tokenizer(rows[0])["input_ids"]) + args.response_len,
        vllm_enable_sleep_mode=args.sleep,
        generation_kwargs={"ignore_eos": True} if vllm else {"min_new_tokens": args.response_len},
        seed=0,
    )
    clock, found = Clock(wait), []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:  # of an update, not of the whole run
                found.append(logs)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            clock.began.append(clock.now())

    trainer = GRPOTrainer(
        model=str(args.folder),
        reward_funcs=parity,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    clock.wrap_preparation(trainer)
    clock.wrap(trainer, "_get_per_token_logps_and_entropies", "old")
    clock.wrap(trainer, "_calculate_rewards", "reward")
    if vllm:
        clock.wrap(trainer.vllm_generation, "sync_weights", "sync")
        clock.wrap(trainer.vllm_generation, "generate", "generate")
    else:
        clock.wrap(trainer, "_generate_single_turn", "generate")
    trainer.train()
    return clock, found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    lines.add_options(parser)
    parser.add_argument("--sleep", action="store_true", help="vLLM gives its memory back while the learner updates")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--cpu", action="store_true")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.prompts * args.samples % (args.micro * args.updates):
        raise SystemExit("a step's responses must be a multiple of --micro times --updates")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    cuda = torch.cuda.is_available() and not args.cpu
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as output, most_used() as most:
        clock, logs = trained(args, output, torch.cuda.synchronize if cuda else lambda: None)
    line = lines.known("trl", args, ("trl", "vllm", "transformers", "torch", "liger-kernel"))
    line |= summary(args, clock.began, clock.steps, logs) | {
        "peak_torch_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "peak_gpu_gib": round(most[0] / 2**30, 2),
        "seconds_in_all": round(time.perf_counter() - began, 1),
    }
    lines.written(line, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
