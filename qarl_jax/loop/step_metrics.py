# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes metrics of a step's responses, updates and seconds, and prints a run's summary."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from qarl_jax import metrics
from qarl_jax.data.tokenizer import Tokenizer, decode
from qarl_jax.loss.common import diagnostics
from qarl_jax.metrics import Metric
from qarl_jax.observe import error_tokens, recorder, terminal
from qarl_jax.run import evaluation
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.run.config import RunConfig
from qarl_jax.types import Completion, RolloutGroup, command

# Reported once more over the updates after a step's first, where alone the ratio bands can act (the first has ratio 1).
LATER = ("clip/", "loss/ratio", "loss/seq_ratio", "proximal/")
# Of these only the updates after the first count, where there are any.
MOVED = ("hist/ratio", "hist/seq_ratio")
# Of the first update alone: nothing has moved, so this is the noise between the scoring and the gradient program.
NOISE = ("proximal/noise", "proximal/exact")


@dataclasses.dataclass
class UpdateMetrics:
    """Accumulates the metrics of a step's updates.

    Attributes:
      total: metrics of all updates, the critic's among them.
      moved: histograms of ratios, of the updates after the first alone if there are any.
      first: the metrics named in `NOISE`, of the first update alone.
      later: metrics whose names begin as in `LATER`, of the updates after the first, under `later/`.
    """

    total: dict[str, Metric] = dataclasses.field(default_factory=dict)
    moved: dict[str, Metric] = dataclasses.field(default_factory=dict)
    first: dict[str, Metric] = dataclasses.field(default_factory=dict)
    later: dict[str, Metric] = dataclasses.field(default_factory=dict)

    def add_critic(self, fitted: dict[str, Metric]) -> None:
        """Adds the metrics of one update of the critic."""
        self.total = metrics.merge(self.total, fitted)

    def add(self, number: int, inner: dict[str, Metric]) -> None:
        """Adds the metrics of the policy's update `number` of the step, counted from 0."""
        self.total = metrics.merge(self.total, inner)
        ratios = {key: value for key, value in inner.items() if key.startswith(MOVED)}
        self.moved = ratios if number <= 1 else metrics.merge(self.moved, ratios)
        if number == 0:
            # Nothing has moved yet: what differs from the scored log-probs is the noise between the two programs.
            self.first = {key: inner[key] for key in NOISE if key in inner}
        else:
            later = {f"later/{key}": value for key, value in inner.items() if key.startswith(LATER)}
            self.later = metrics.merge(self.later, later)

    def reduced(self) -> tuple[dict[str, float], dict[str, list[int]]]:
        """Returns (value by metric, counts by histogram)."""
        return metrics.values(self.total | self.first | self.later), metrics.histograms(self.total | self.moved)


def quantiles(histograms: dict[str, list[int]]) -> dict[str, float]:
    """Computes log-ratios at the 1st, 50th and 99th percentile of every non-empty histogram."""
    out: dict[str, float] = {}
    for key, counts in histograms.items():
        if any(counts):
            found = diagnostics.quantiles(counts, (0.01, 0.5, 0.99))
            name = key.removeprefix("hist/")
            out |= {f"quantile/{name}/p{level}": value for level, value in zip(("01", "50", "99"), found, strict=True)}
    return out


def graded(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Returns the rewards of all responses whose environment did not fail, float64 [n]; one 0 if there is none."""
    found = np.concatenate([group.rewards[group.valid] for group in groups]).astype(np.float64)
    return found if found.size else np.zeros(1)


def rollout_metrics(
    groups: list[RolloutGroup], parts: dict[str, np.ndarray], advantages: np.ndarray | None, tokenizer: Tokenizer
) -> dict[str, float]:
    """Measures sampled responses and their rewards. `advantages`: of each response in its group; None with a critic."""
    rewards, valid = graded(groups), np.concatenate([group.valid for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    whole = [completion for completion, kept in zip(completions, valid, strict=True) if kept] or completions
    lengths = np.array([int(completion.drawn.sum()) for completion in whole])
    texts = [text for group in groups for text in group.texts]
    said = [
        decode(tokenizer, np.array(completion.tokens)[completion.drawn].tolist()) if completion.turns else text
        for completion, text, kept in zip(completions, texts, valid, strict=False)
        if kept
    ]
    drawn_under = [completion.policy_version for completion in completions if completion.versions]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/best": float(np.mean([graded([group]).max() for group in groups if group.valid.any()] or [0.0])),
        **(
            {}
            if advantages is None
            else {"reward/zero_advantage_groups": float((advantages == 0).reshape(len(advantages), -1).all(1).mean())}
        ),
        **_term_metrics({name: values[valid] for name, values in parts.items()}),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(np.mean([c.finish_reason != "stop" for c in whole])),
        **({"rollout/version": float(min(drawn_under))} if drawn_under else {}),
        "response/tokens": float(lengths.sum()),
        **_turn_metrics(completions),
        **_source_metrics(groups),
        **error_tokens.text_metrics([np.array(c.tokens)[c.drawn] for c in whole], said),
    }


def _term_metrics(parts: dict[str, np.ndarray]) -> dict[str, float]:
    """Measures each of several reward terms by its mean over the responses that it graded."""
    graded = {name: values[~np.isnan(values)] for name, values in parts.items()}
    return {f"reward/{name}": float(values.mean()) for name, values in graded.items() if values.size and len(parts) > 1}


def _source_metrics(groups: list[RolloutGroup]) -> dict[str, float]:
    """Measures each part of a mix: its share of the prompts, and their mean reward."""
    names = [group.prompt.meta.get("mix_part") for group in groups]
    out: dict[str, float] = {}
    for name in dict.fromkeys(names):
        mine = [group for group, source in zip(groups, names, strict=True) if source == name]
        out |= {f"source/{name}/share": len(mine) / len(groups), f"source/{name}/reward": float(graded(mine).mean())}
    return out if None not in names else {}


def _turn_metrics(completions: list[Completion]) -> dict[str, float]:
    """Measures responses of several turns; others give no metric."""
    kept = [completion for completion in completions if completion.finish_reason != "abort"]
    turns = np.array([len(completion.turns) for completion in kept])
    if not turns.any():
        return {}
    return {
        "turns/mean": float(turns.mean()),
        "turns/max": float(turns.max()),
        "turns/observed_tokens": float(np.mean([(~completion.drawn).sum() for completion in kept])),
        "turns/failed": float(np.mean([completion.finish_reason == "abort" for completion in completions])),
    }


def speed(
    record: dict[str, float], times: dict[str, float], devices: int = 1, peak_flops: float | None = None
) -> dict[str, float]:
    """Adds to `times` tokens per second of the sampler and of the step, and model FLOP/s of the updates.

    Args:
      devices: number of devices of the mesh; FLOP/s are per device.
      peak_flops: peak FLOP/s of all devices, if known; MFU is then reported, too.
    """
    tokens = record["response/tokens"]
    drawn = record.get("rollout/partial_tokens", tokens)
    out = times | {
        "time/rollout_tok_per_s": drawn
        / max(record.get("time/ahead_rollout_s", times.get("time/rollout_s", 0.0)), 1e-9),
        "time/tok_per_s": tokens / max(times["time/step_s"], 1e-9),
    }
    if times.get("time/update_s", 0.0) > 0 and "train/flops" in record:
        achieved = record["train/flops"] / (times["time/update_s"] + record.get("time/update/hidden_s", 0.0))
        out["perf/model_tflops"] = achieved / devices / 1e12
        if peak_flops is not None:
            out["perf/mfu"] = achieved / peak_flops
    return out


def most_memory(devices: Sequence[Any]) -> dict[str, float]:
    """Returns JAX's peak memory on each device so far, in GiB; leaves out devices that do not report it (CPUs)."""
    stats = {int(device.local_hardware_id): device.memory_stats() or {} for device in devices}
    return {
        f"perf/most_gib_{number}": found["peak_bytes_in_use"] / 2**30
        for number, found in stats.items()
        if "peak_bytes_in_use" in found
    }


def summary(cfg: RunConfig) -> str:
    """Summarizes a run in a few lines: reward of the first and last five steps, held-out evaluations, a sparkline."""
    records = recorder.read_lines(os.path.join(cfg.run_dir, "metrics.jsonl"))
    rewards = [record["reward/mean"] for record in records]
    curves = ", its curves in report.html" if os.path.isfile(os.path.join(cfg.run_dir, "report.html")) else ""
    saved = bool(Checkpoints(os.path.join(cfg.run_dir, "checkpoints")).steps())
    policy = "its policy in checkpoints/" if saved else "its policy not saved (checkpoint.at_end=true saves it)"
    lines = [
        f"done: {cfg.run_dir}, its numbers in metrics.jsonl{curves}, {policy}",
        f"reward/mean       {np.mean(rewards[:5]):.3f} (first five steps) -> {np.mean(rewards[-5:]):.3f} (last five)",
        f"                  {terminal.sparkline(rewards)}",
    ]
    held_out = evaluation.history(cfg.run_dir)
    if len(held_out) > 1:
        first, last = held_out[0], held_out[-1]
        lines.append(
            f"held-out reward   version {first['version']}: {terminal.held_out_score(first)} -> version"
            f" {last['version']}: {terminal.held_out_score(last)}"
        )
    dropped = [record["later/clip/seq_dropped"] for record in records if "later/clip/seq_dropped" in record]
    if dropped:
        lines.append(f"sequences dropped {np.mean(dropped):.1%} (after each step's first update)")
    return "\n".join([*lines, *next_steps(cfg, saved)])


def next_steps(cfg: RunConfig, saved: bool = True) -> list[str]:
    """Lists the commands that most users want after a run: watch, and, if its policy was saved, evaluate and export."""
    run = shlex.quote(cfg.run_dir)
    out = shlex.quote(os.path.join("models", os.path.basename(os.path.normpath(cfg.run_dir))))
    kind, what = "hf", "as a model folder"
    if cfg.lora is not None and not cfg.lora.train_norms:
        kind, what = "peft", "its adapters as a PEFT folder"
    lines = {f"{command('watch')} {run}": "its page; report.html in its folder is the same as a file"}
    of_policy = {
        f"{command('evaluate')} --checkpoint {run}": "its policy on held-out prompts",
        f"{command('export')} --checkpoint {run} --format {kind} --out {out}": what,
    }
    lines |= of_policy if saved else {}
    width = max(map(len, lines))
    return ["next:", *(f"  {line:<{width}}   # {purpose}" for line, purpose in lines.items())]
