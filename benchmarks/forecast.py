# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Fits the rates of `qarl_jax.advise` to the recorded whole steps, and shows each step beside its forecast.

    python -m benchmarks.forecast       # prints RATES and ERRORS, and writes the tables of docs/operations/advise.md
    python -m benchmarks.headers        # once RATES are in the package: the forecasts in headers of configs

A row is a recorded step. Its run is loaded from the overrides in the record, with the shapes' config.json and no
weights, and counted by `advise.counts`. Rates are the least squares of phases' relative errors, with a bound where
a factor below the roofline would be impossible. Records of the learner alone and of the engine alone are rows that have
one phase. Each error is one of a fit without the rows of that model, machine and number of GPUs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import yaml
from scipy.optimize import lsq_linear

from benchmarks import random_folder, step_gpu
from qarl_jax.advise import command as advise
from qarl_jax.advise import counts, forecast
from qarl_jax.advise.machines import MACHINES, Machine
from qarl_jax.memory import choose, learner
from qarl_jax.memory.learner import GIB
from qarl_jax.models import published
from qarl_jax.run import config
from qarl_jax.run.config import RunConfig

RESULTS = pathlib.Path(__file__).parent / "results"
EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments" / "qwen25_coder"
STEPS = (
    "step_8b_rounded_h200.json",
    "step_8b_rows_h200.json",
    "step_8b_1024_h200.json",
    "step_8b_1024_int8_h200.json",
    "step_1.7b_plan_h200.json",
    "step_30b_a3b_two_h200.json",
    "step_30b_a3b_four_h200.json",
)
# Records of code that adds gradients in the backward; others held a second, whole copy of them.
SUMMED = (*STEPS[:4], "step_1.7b_plan_h200.json")
# Phases whose rates are fitted together; every other term belongs to one phase alone.
PHASES = (("rollout",), ("old_logprobs", "update"), ("publish",), ("other",))
# Least factors of a fit. A time at the roofline takes as long at least, but tokens that route alike touch fewer experts
# than random ones. A layer's programs of a micro-batch have gaps of 0.05 to 0.2 ms. Steps of 8B with one row and with
# four differ by some 50 ms a micro-batch: its gradients take 4 times their bytes.
BOUNDS: dict[str, tuple[float, float]] = {
    name: (1.0, float("inf"))
    for name in (
        "read", "prefill", "product", "grouped", "attention", "stream", "exchange", "orthogonalize",
        "stream_iterates", "stream_optimizer", "offload",
    )
} | {"read_experts": (0.8, float("inf")), "micro_batch": (5e-5, 2e-4), "stream_gradients": (1.0, 4.0)}  # fmt: skip
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "operations" / "advise.md"
EXAMPLE = ["model.param_dtype=bfloat16", "optimizer.moment_dtype=int8"]
TF32 = "optimizer.matmul_precision=high"
UNUSED = ("rollout.engine.execution", "data.source", "reward")  # gone, or of the machine that ran it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A recorded measurement of a whole step, or of a part of one.

    Attributes:
      where: file and place in it. case: schemes. shapes, layers, gpus, machine: what ran, on what.
      cfg: the run, settled for the machine; planned_gib: JAX's bytes by its plan.
      seconds: measured, by phase of `counts.of_step`.
      step: seconds of the whole step; 0: the record is of a part.
      peak_gib: the most that JAX held on a device; None: not recorded.
      mean_len: mean tokens of a response; 0: all have the most.
    """

    where: tuple[str, int]
    case: str
    shapes: str
    layers: int
    gpus: int
    machine: Machine
    cfg: RunConfig
    planned_gib: float
    seconds: dict[str, float]
    step: float = 0.0
    peak_gib: float | None = None
    mean_len: float = 0.0

    @property
    def is_fitted(self) -> bool:
        """Tells whether the rates are fitted to the row: nothing else ran on its host."""
        return not self.mean_len

    @property
    def group(self) -> tuple[str, str, int]:
        """The row's group (model, machine, GPUs), which is left out of a fit as a whole."""
        return self.shapes, self.machine.name, self.gpus

    @functools.cached_property
    def terms(self) -> dict[str, counts.Terms]:
        """The counts (`advise.counts`) of the phases that were measured."""
        counted = counts.of_step(self.cfg, self.machine, self.mean_len)
        return {name: terms for name, terms in counted.items() if name in self.seconds}


def record(name: str) -> Any:
    """Loads a JSON record of benchmarks/results."""
    return json.loads((RESULTS / name).read_text())


TODAY = {"train.packing=unpacked": "train.max_segments=1"}
"""Settings of older records, and what says the same today."""


def machine_of(device: str) -> Machine:
    return MACHINES["h200" if "H200" in device else "h100"]


class Folders:
    """Makes model folders of benchmark shapes, with config.json alone."""

    def __init__(self, root: str) -> None:
        self.root = pathlib.Path(root)

    def of(self, shapes: str, layers: int) -> str:
        folder = self.root / f"{shapes}-{layers}"
        if not folder.exists():
            random_folder.make(folder, random_folder.config_of(shapes, layers), weights=False)
        return str(folder)


def settled(
    words: Sequence[str], folder: str, machine: Machine, kv_cache_gb: float = 0.0, *, summed: bool = False
) -> tuple[RunConfig, float]:
    """Returns a recorded run's config with its memory settings chosen, and the GiB that JAX would hold on a device."""
    words = [TODAY.get(word, word) for word in words]
    kept = [word for word in words if word.split("=", 1)[0] not in (*UNUSED, "model.path")]
    # Of before train.proximal, and of Muon in TF32; other records have these among their own words.
    older = ["train.proximal=learner"]
    if not any(word.startswith("optimizer.name=") for word in kept):
        older.append(TF32)
    kept = [each for word in kept for each in ((word, TF32) if word == "optimizer.name=muon" else (word,))]
    cfg = config.on_a_gpu(config.load(step_gpu.CONFIG, [*older, *kept, f"model.path={folder}"]))
    beside = learner.beside_sums if summed else lambda model, *of: learner.nbytes(*of)
    with mock.patch.object(learner, "beside_sums", beside):
        cfg, plan = choose.settle(cfg, machine.size)
    assert plan is not None
    if kv_cache_gb:  # what the plan of that day gave
        cfg = config.replaced(cfg, {"rollout.engine.kv_cache_gb": kv_cache_gb})
    return cfg, sum(plan.learner.values()) / GIB


def overrides_of(row: dict[str, Any]) -> list[str]:
    """Returns the overrides of a recorded step; older records have the command line alone."""
    if "overrides" in row:
        return row["overrides"]
    words = ["--shapes", row["shapes"], "--folder", "-", "--case", row["case"], "--batch", str(row["batch"])]
    words += ["--proximal", "learner"]
    return step_gpu.overrides(step_gpu.build_parser().parse_args(words), "-", "-")


def steps(folders: Folders) -> Iterator[Row]:
    """Loads every recorded whole step as a row."""
    for name in STEPS:
        found = record(name)
        machine = machine_of(found["device"])
        for place, row in enumerate(found["rows"]):
            if "seconds" not in row:
                continue
            layers = row.get("layers") or 0
            words = overrides_of(row)
            cache = row.get("planned_gib", {}).get("engine: KV cache", 0.0)
            folder = folders.of(row["shapes"], layers)
            cfg, planned = settled(words, folder, machine, cache, summed=name in SUMMED)
            took = row["seconds"]
            seconds = {key: took[key] for key in ("rollout", "update", "publish")}
            # Older records have the wait for log-probs that were begun early under `pack`.
            if took["old_logprobs"] > 0.01:  # else the run took the sampler's
                seconds["old_logprobs"] = took["old_logprobs"] + took["pack"]
            parts = ("rollout", "old_logprobs", "pack", "update", "publish", "reward", "trace", "other")
            step = took.get("step") or sum(took.get(key, 0.0) for key in parts)
            yield Row(
                where=(name, place),
                case=row["case"],
                shapes=row["shapes"],
                layers=layers,
                gpus=row.get("cards") or 1,
                machine=machine,
                cfg=cfg,
                planned_gib=planned,
                seconds=seconds | {"other": step - sum(seconds.values())},
                step=step,
                peak_gib=max(row["learner_gib"]) if row.get("learner_gib") else None,
            )


# Settings of a real policy's run that its step depends on; the other names in its config.yaml are of its own day.
CARRIED = {
    "model": ("param_dtype", "remat"),
    "data": ("max_prompt_len",),
    "rollout": ("num_samples_per_prompt", "max_response_len"),
    "train": (
        "prompts_per_step",
        "prompts_per_update",
        "update_epochs",
        "micro_batch_rows",
        "row_len",
        "max_segments",
        "logprob_chunk",
        "grad_dtype",
    ),
}


def real_runs() -> Iterator[Row]:
    """Loads steps of real policies on GSM-Symbolic, a row per arm's first seed: means over steps after the second."""
    for file, name in (("results", "Qwen2.5-0.5B-Instruct"), ("results_1p5b", "Qwen2.5-Math-1.5B")):
        with tarfile.open(EXPERIMENTS / f"{file}.tar.xz") as archive, published.folder(name) as folder:
            names = [n for n in archive.getnames() if re.fullmatch(r"runs/(?!code|qurl)\w+_seed0/metrics.jsonl", n)]
            for place, path in enumerate(sorted(names)):
                said, text = (
                    archive.extractfile(path),
                    archive.extractfile(path.replace("metrics.jsonl", "config.yaml")),
                )
                assert said is not None
                assert text is not None
                records, tree = [json.loads(line) for line in said][2:], yaml.safe_load(text)
                row = _real_run((f"{file}.tar.xz", place), tree, records, folder, name)
                assert row.terms  # while the folder is there
                yield row


def _real_run(where: tuple[str, int], tree: Any, records: Sequence[Any], folder: str, name: str) -> Row:
    def mean(key: str) -> float:
        return float(np.mean([record.get(key) or 0.0 for record in records]))

    engine, quant = tree["rollout"]["engine"], tree["quant"]
    words = [f"{section}.{key}={tree[section][key]}" for section, keys in CARRIED.items() for key in keys]
    words += [f"quant.forward={quant['forward']}", f"quant.rollout={quant['rollout'] or 'null'}"]
    words += [f"rollout.engine.{key}={engine[key]}" for key in ("max_num_seqs", "kv_cache_gb", "transport")]
    words += ["optimizer.name=adamw", "optimizer.lr=1e-6", f"model.path={folder}", "train.proximal=learner"]
    cfg = config.on_a_gpu(config.load(step_gpu.CONFIG, words))
    seconds = {phase: mean(f"time/{phase}_s") for phase in ("rollout", "update", "publish")}
    seconds["old_logprobs"] = mean("time/old_logprobs_s") + mean("time/pack_s")
    forward, sampler = cfg.quant.forward, cfg.quant.rollout_scheme
    return Row(
        where=where,
        case=forward if forward == sampler else f"{sampler}-rollout",
        shapes={"Qwen2.5-0.5B-Instruct": "0.5b", "Qwen2.5-Math-1.5B": "1.5b"}[name],
        layers=0,
        gpus=1,
        machine=MACHINES["h200"],
        cfg=cfg,
        planned_gib=0.0,
        seconds=seconds | {"other": mean("time/step_s") - sum(seconds.values())},
        step=mean("time/step_s"),
        mean_len=mean("response/length_mean"),
    )


def learners(folders: Folders) -> Iterator[Row]:
    """Loads updates of the learner alone (`benchmarks.learner`): one micro-batch, AdamW in bfloat16."""
    for name in ("learner_1.7b_h200.json", "learner_8b_h200.json", "learner_30b_a3b_h200.json"):
        found = record(name)
        for place, row in enumerate(found["results"]):
            words = [
                f"quant.forward={row['scheme']}",
                f"train.row_len={row['seq']}",
                f"train.micro_batch_rows={row['rows']}",
                f"train.prompts_per_step={row['rows'] // 2}",
                f"train.prompts_per_update={row['rows'] // 2}",
                "rollout.num_samples_per_prompt=2",
                "data.max_prompt_len=1",
                f"rollout.max_response_len={row['seq'] - 1}",
                f"model.remat={row['remat']}",
                "model.param_dtype=bfloat16",
                "optimizer.name=adamw",
                "optimizer.lr=1e-5",
                "optimizer.moment_dtype=bfloat16",
                "optimizer.second_moment_dtype=bfloat16",
                "rollout.engine={name: jax}",
                "loss.name=grpo",
                "advantage.name=drgrpo",
            ]
            machine = machine_of(found["device"])
            cfg = config.load(step_gpu.CONFIG, [*words, f"model.path={folders.of(row['model'], row['layers'])}"])
            yield Row(
                where=(name, place),
                case=row["scheme"],
                shapes=row["model"],
                layers=row["layers"],
                gpus=1,
                machine=machine,
                cfg=cfg,
                planned_gib=0.0,
                seconds={"update": row["step_s"]},
            )


def samplers(folders: Folders) -> Iterator[Row]:
    """Loads batches of an engine alone (`benchmarks.engine_price`): prompts of 64 tokens, responses of 256."""
    for name in ("engine_price_4b_h100.json", "engine_price_8b_h100.json", "engine_price_h200.json"):
        for place, row in enumerate(record(name)["results"]):
            if row["scheme"] == "w4a16" and "H100" in row["device"]:
                continue  # int4 kernels of before 59db35a, which engine_price_h200.json has
            words = [
                f"quant.forward={row['scheme']}",
                f"train.prompts_per_step={row['sequences'] // 2}",
                f"train.prompts_per_update={row['sequences'] // 2}",
                "rollout.num_samples_per_prompt=2",
                "advantage.name=drgrpo",
                "loss.name=grpo",
                "data.max_prompt_len=64",
                "rollout.max_response_len=256",
                f"rollout.engine.max_num_seqs={row['sequences']}",
                "rollout.engine.kv_cache_gb=60",
            ]
            machine = machine_of(row["device"])
            cfg = config.load(step_gpu.CONFIG, [*words, f"model.path={folders.of(row['shapes'], 0)}"])
            made = Row(
                where=(name, place),
                case=row["scheme"],
                shapes=row["shapes"],
                layers=0,
                gpus=1,
                machine=machine,
                cfg=config.on_a_gpu(cfg),
                planned_gib=0.0,
                seconds={"rollout": 256 * row["sequences"] / row["contract_tok_per_s"]},
            )
            made.terms["rollout"]["prefill"] *= 2  # no two sequences have the same prompt
            yield made


def all_rows() -> list[Row]:
    """Loads all rows, with the terms of their models counted."""
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0,1,2,3"):
        folders = Folders(scratch)
        rows = [*steps(folders), *real_runs(), *learners(folders), *samplers(folders)]
        for row in rows:
            assert row.terms  # while the folders are there
    return rows


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Fits rates by least squares of the phases' relative errors; every group has equal weight."""
    rows = [row for row in rows if row.is_fitted]
    counts = collections.Counter(row.group for row in rows)
    out: dict[str, float] = {}
    for phases in PHASES:
        lines = [(row.terms[p], row.seconds[p], counts[row.group]) for row in rows for p in phases if p in row.seconds]
        names = sorted({name for terms, _, _ in lines for name, value in terms.items() if value})
        matrix = np.array([[terms.get(name, 0.0) / took for name in names] for terms, took, _ in lines])
        weights = np.array([count**-0.5 for *_, count in lines])
        low, high = zip(*(BOUNDS.get(name, (0.0, np.inf)) for name in names), strict=True)
        found = lsq_linear(matrix * weights[:, None], weights, bounds=(low, high)).x
        out |= dict(zip(names, map(float, found), strict=True))
    return out


def left_out(rows: Sequence[Row]) -> dict[tuple[str, str, int], dict[str, float]]:
    """Fits rates for each group on the rows of all other groups."""
    return {group: fit([row for row in rows if row.group != group]) for group in {row.group for row in rows}}


def forecasts(rows: Sequence[Row], fits: Mapping[tuple[str, str, int], dict[str, float]]) -> list[float]:
    """Forecasts the seconds of each row's step with the rates of the row's group."""
    return [sum(forecast.seconds(row.terms, fits[row.group]).values()) for row in rows]


def table(rows: Sequence[Row]) -> list[str]:
    """Formats whole steps beside their forecasts, by fits without their group, as lines of a Markdown table."""
    head = [
        "model",
        "machine",
        "GPUs",
        "learner, sampler",
        "responses",
        "step",
        "forecast",
        "error",
        "JAX, GiB",
        "planned",
    ]
    lines = [head, ["---"] * len(head)]
    whole = [row for row in rows if row.step]
    for row, seconds in zip(whole, forecasts(whole, left_out(rows)), strict=True):
        scheme, _, kind = row.case.partition("-")
        cfg = row.cfg
        count = cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt
        peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        lines.append(
            [
                row.shapes.upper() + (f", {row.layers} layers" if row.layers and row.shapes == "30b-a3b" else ""),
                row.machine.name.upper(),
                str(row.gpus),
                f"bf16, `{scheme}`" if kind else f"`{scheme}`",
                f"{count} x {row.mean_len or cfg.rollout.max_response_len:.0f}",
                f"{row.step:.1f} s",
                f"{seconds:.1f} s",
                f"{seconds / row.step - 1:+.0%}",
                peak,
                f"{row.planned_gib:.1f}" if peak else "",
            ]
        )
    return [f"| {' | '.join(line)} |" for line in lines]


def example() -> list[str]:
    """Returns the lines that the first command on the page prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        advise.main(["--model", "Qwen3-8B", "--device", "h200", *EXAMPLE])
    return ["```", *printed.getvalue().split("\n\n")[1].splitlines(), "```"]


def page(text: str, rows: Sequence[Row]) -> str:
    """Returns the text of docs/operations/advise.md with its three tables made anew."""
    for start, lines in (
        (r"```\n *scheme", example()),
        (r"\| model \| machine \| GPUs \| steps", summary(rows)),
        (r"\| model \| machine \| GPUs \| learner", table(rows)),
    ):
        before, rest = re.split(start, text, maxsplit=1)
        end = rest.index("\n\n")
        text = before + "\n".join(lines) + rest[end:]
    return text


def summary(rows: Sequence[Row]) -> list[str]:
    """Formats mean and largest error by model, machine and GPUs, in the fit and left out of it, as a Markdown table."""
    rates, fits = fit(rows), left_out(rows)
    lines = ["| model | machine | GPUs | steps | in the fit | left out | largest |", "|---|---|---|---|---|---|---|"]
    whole = [row for row in rows if row.step and row.is_fitted]
    for group in sorted({row.group for row in whole}):
        own = [row for row in whole if row.group == group]
        inside, outside = errors(own, dict.fromkeys(fits, rates)), errors(own, fits)
        lines.append(
            f"| {group[0].upper()} | {group[1].upper()} | {group[2]} | {len(own)} | {np.mean(inside):.0%} |"
            f" {np.mean(outside):.0%} | {max(outside):.0%} |"
        )
    inside, outside = errors(whole, dict.fromkeys(fits, rates)), errors(whole, fits)
    lines.append(f"| all | | | {len(whole)} | {np.mean(inside):.0%} | {np.mean(outside):.0%} | {max(outside):.0%} |")
    return lines


def errors(rows: Sequence[Row], fits: Mapping[tuple[str, str, int], dict[str, float]]) -> list[float]:
    """Returns the absolute relative error of each whole step's forecast."""
    return [abs(took / row.step - 1.0) for row, took in zip(rows, forecasts(rows, fits), strict=True)]


def errors_by_kind(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean error of steps by kind of model, left out of the fit: `forecast.ERRORS`."""
    fits, out = left_out(rows), {}
    for kind in forecast.ERRORS:
        own = [r for r in rows if r.step and r.is_fitted and (kind == "MoE") == (r.shapes == "30b-a3b")]
        out[kind] = round(float(np.mean(errors(own, fits))), 2)
    return out


def rounded(rates: Mapping[str, float]) -> dict[str, float]:
    """Rounds rates to two digits, as in `forecast.RATES`, and drops rates of zero."""
    return {name: float(f"{value:.2g}") for name, value in sorted(rates.items()) if value > 1e-9}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__.split("\n")[0])
    parser.parse_args(argv)
    rows = all_rows()
    print("RATES:", rounded(fit(rows)))
    print("ERRORS:", errors_by_kind(rows))
    PAGE.write_text(page(PAGE.read_text(), rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
