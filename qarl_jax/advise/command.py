# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.advise --model DIR --device h200`: does quantization pay here? Forecasts a step by scheme.

A forecast needs no device and no weights: a model's config.json is enough, or its name where its shapes are known. It
prints seconds of a step by phase, memory, expected mismatch, the batch up to which a scheme decodes faster than bf16,
and a config to start from. `--measure` runs steps of a few of the model's layers on this machine, and uses their times.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from qarl_jax import quant
from qarl_jax.advise import forecast, measure
from qarl_jax.advise.forecast import Forecast
from qarl_jax.advise.machines import MACHINES, Machine, this_cpu
from qarl_jax.memory.learner import GIB
from qarl_jax.models import published
from qarl_jax.run import config
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import progress
from qarl_jax.types import Parser, UserError, entry_point

# The step that is forecast without --config: 128 responses, two updates, and what fits the device.
START: dict[str, Any] = {
    "model": {"remat": "auto"},
    "quant": {},
    "data": {"source": {"name": "jsonl", "path": "data/questions.jsonl"}, "template": "chat", "max_prompt_len": 256},
    "reward": {"name": "math_verify"},
    "rollout": {"num_samples_per_prompt": 8, "max_response_len": 1024},
    "loss": {"name": "tbpo"},
    "optimizer": {"name": "muon", "offload": "auto"},
    "train": {"prompts_per_step": 16, "prompts_per_update": 8, "grad_dtype": "auto"},
    "eval": {"at_end": False},
}
ENGINES = {
    "vllm": {"name": "vllm", "memory": "auto"},
    "jax": {"name": "jax", "batch_size": 128},  # vLLM's CUDA build is the only one that advise lays out
}


def tree_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the run that is forecast without --config, as the mapping of a config file."""
    tree = {name: dict(section) for name, section in START.items()}
    tree["rollout"]["engine"] = ENGINES["jax" if args.device in ("cpu", "tpu-v5p") else "vllm"]
    return {"model": {"path": args.model, **tree.pop("model")}, **tree, "mesh": {"fsdp": args.gpus}}


def run_of(args: argparse.Namespace, folder: str) -> RunConfig:
    """Returns the config of the run whose step is forecast, with the model in `folder`."""
    words = [*args.overrides, f"model.path={folder}"]
    if args.config:
        return config.load(args.config, [*words, f"mesh.fsdp={args.gpus}"])
    return config.from_dict(tree_of(args), "advise", words)


def needs_training(name: str) -> bool:
    """Tells whether a policy has to be trained for a scheme first (`Scheme.needs_training`)."""
    scheme = quant.parse_scheme(name)
    return scheme is not None and scheme.needs_training


def best_of(forecasts: Mapping[str, Forecast]) -> str | None:
    """Returns the scheme of the shortest step; bf16 unless another saves more than 2 %. None: no run fits.

    Schemes that need training (`qarl_jax.qat`) are taken only where no other fits.
    """
    steps = {name: one.step * (0.98 if name == "bf16" else 1.0) for name, one in forecasts.items() if one.seconds}
    return min(steps, key=lambda name: (needs_training(name), steps[name]), default=None)


def start_from(args: argparse.Namespace, scheme: str, saved: Sequence[str]) -> str:
    """Returns a command line that starts the run under `scheme`; without --config, the text of a config file."""
    own = [word for word in args.overrides if not word.startswith(("quant.forward=", "quant.rollout="))]
    words = [*own, f"quant.forward={scheme}", *saved]
    if args.config:
        model = [f"model.path={args.model}"] if args.model else []
        forced = [*model, f"mesh.fsdp={args.gpus}", "quant.rollout=null"]  # as forecast, whatever the file says
        return shlex.join(["python", "-m", "qarl_jax.train", args.config, *words, *forced])
    tree = tree_of(args)
    for word in words:
        path, value = word.split("=", 1)
        *sections, field = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = yaml.safe_load(value)
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)


def table(forecasts: Mapping[str, Forecast]) -> list[str]:
    """Formats forecasts as lines of a table, with a row for each scheme."""
    base = forecasts["bf16"].step or None
    head = ["scheme", "step", "sampling", "scoring", "update", "publish", "tokens/s", "speed", "GiB"]
    rows = [[*head, "k3", "k3, bf16 learner", "pays up to"]]
    for name, one in forecasts.items():
        if not one.seconds:
            continue
        phases = [f"{one.seconds[phase]:.1f}" for phase in ("rollout", "old_logprobs", "update", "publish")]
        speed = "" if base is None else f"{base / one.step:.2f}"
        known = ["not known" if k3 is None else f"{k3:.2g}" for k3 in (one.k3, one.k3_bf16)]
        pays = f"{forecast.MOST_SEQUENCES}+" if one.stops_paying is None else str(one.stops_paying - 1)
        pays = "" if name == "bf16" or any(each.measured for each in forecasts.values()) else pays
        cells = [name, f"{one.step:.1f} s", *phases, f"{one.tokens_per_s:,.0f}", speed, f"{one.gib:.1f}", *known]
        rows.append([*cells, pays])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def verdict(forecasts: Mapping[str, Forecast], error: float) -> str:
    """Says whether quantization pays, by more than the forecast's error."""
    best = best_of(forecasts)
    if best is None:
        return "no scheme fits: use larger devices, more of them (--gpus), or a smaller model"
    if not forecasts["bf16"].seconds:
        return f"bf16 does not fit, and {best} does: quantization is what makes this run possible"
    speed = forecasts["bf16"].step / forecasts[best].step
    share = forecasts["bf16"].seconds["rollout"] / forecasts["bf16"].step
    made = f"sampling takes {share:.0%} of a bf16 step, and {best} makes the step {speed:.2f} times as fast"
    if best == "bf16":
        return f"no: sampling takes {share:.0%} of a bf16 step, and no scheme makes it faster by more than 2 %"
    if speed < 1.0 + error and not forecasts[best].measured:
        return f"a little: {made}, which is less than the forecast's error of {error:.0%}; measure it"
    return f"yes: {made}"


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = Parser(
        "advise",
        config="of the run whose step is forecast; default: 128 responses of 1,024 tokens",
        description="Forecasts a step of a run, scheme by scheme.",
    )
    parser.add_argument(
        "--model", default="", help=f"a Hugging Face folder, or one of {', '.join(sorted(published.CONFIGS))}"
    )
    parser.add_argument(
        "--device", required=True, choices=(*MACHINES, "cpu"), help="cpu: this machine's, which is timed"
    )
    parser.add_argument("--gpus", type=int, default=1, help="that the learner is spread over, with an engine on each")
    parser.add_argument("--mean-len", type=float, help="mean tokens of a response; default: the most")
    parser.add_argument("--measure", action="store_true", help="run steps of a few layers on this machine, minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 0, or 1 where no scheme's run is possible."""
    args = build_parser().parse_args(argv)
    if not (args.model or args.config):
        raise UserError("name a model (--model) or a run (--config).")
    if args.gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {args.gpus}.")
    machine = this_cpu() if args.device == "cpu" else MACHINES[args.device]
    path = args.model or config.load(args.config, args.overrides).model.path
    with published.folder(path) as folder:
        cfg = run_of(args, folder)
        if args.mean_len is not None and not 0 < args.mean_len <= cfg.rollout.max_response_len:
            raise UserError(
                f"--mean-len must be positive and at most rollout.max_response_len={cfg.rollout.max_response_len},"
                f" got {args.mean_len:g}."
            )
        forecasts = forecast.of_schemes(cfg, machine, args.mean_len or 0.0)
        error = forecast.error_of(forecasts["bf16"].cfg)
        best = best_of(forecasts)
        if args.measure and best is not None:
            own = cfg.quant.forward
            measured = own if own in forecasts and forecasts[own].seconds else best
            with progress.shown():
                forecasts = measure.corrected(forecasts, measured, machine)
            best = best_of(forecasts)
        report(args, forecasts, machine, path, error)
    return 0 if best is not None else 1


def report(
    args: argparse.Namespace, forecasts: Mapping[str, Forecast], machine: Machine, path: str, error: float
) -> None:
    """Prints the forecasts."""
    best, unknown = best_of(forecasts), forecast.unknown(forecasts, machine)
    answer = verdict(forecasts, error)
    if args.json:
        said = {"model": path, "device": machine.name, "gpus": args.gpus, "verdict": answer, "error": error}
        said |= {"unknown": unknown, "schemes": {name: as_json(one) for name, one in forecasts.items()}}
        print(json.dumps(said))
        return
    cfg, responses = forecasts["bf16"].cfg, forecasts["bf16"].responses
    print(
        f"{path} on {args.gpus} x {machine.name} ({machine.size / GIB:.1f} GiB): a step of {responses} responses of"
        f" {cfg.rollout.max_response_len} tokens, {cfg.train.updates_per_step} updates\n"
    )
    print("\n".join(table(forecasts)))
    lines: dict[str, list[str]] = {}  # schemes by what there is to say of them
    for name, one in forecasts.items():
        if one.problem:
            lines.setdefault(one.problem.replace(name, "it"), []).append(name)
        if one.saved:
            lines.setdefault(f"fits with {' '.join(one.saved)}", []).append(name)
        if one.seconds and needs_training(name):
            lines.setdefault("rounding alone spoils a policy: train it first (python -m qarl_jax.qat)", []).append(name)
        if one.seconds and one.cached[0] < one.cached[1]:
            waits = f"the KV cache holds {one.cached[0]} of {one.cached[1]} sequences, so sampling waits"
            lines.setdefault(waits, []).append(name)
    for line, names in lines.items():
        alone = forecasts[names[0]].problem if len(names) == 1 else ""
        print(f"{', '.join(names)}: {alone or line}")
    print(f"\nDoes quantization pay here? {answer}.")
    rests = f"Seconds are forecasts; whole steps differed from theirs by {error:.0%} in the mean."
    if any(one.measured for one in forecasts.values()):
        rests = "Seconds go by this machine; run it where nothing else runs."
    print(f"{rests} Not known:")
    print("\n".join(f"- {line}" for line in unknown))
    if best is not None:
        print(f"\nTo start from ({best}):\n\n{start_from(args, best, forecasts[best].saved)}")


def as_json(one: Forecast) -> dict[str, Any]:
    """Returns a forecast as plain values for JSON."""
    if not one.seconds:
        return {"problem": one.problem}
    return {
        "step_s": one.step,
        "seconds": one.seconds,
        "tokens_per_s": one.tokens_per_s,
        "gib": one.gib,
        "k3": one.k3,
        "k3_bf16_learner": one.k3_bf16,
        "stops_paying": one.stops_paying,
        "overrides": list(one.saved),
    }
