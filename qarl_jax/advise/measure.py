# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures a run's step on this machine: the trainer makes a few steps of a model of few layers, twice.

A step's phases grow linearly with the number of layers. So two models, of two layers and of eight, say what all layers
take. The runs have the real config's batch, lengths, schemes, optimizer and engine. Weights and prompts are random, and
the reward is always 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from qarl_jax.advise.forecast import Forecast
from qarl_jax.models import published
from qarl_jax.run import config
from qarl_jax.run.config import RunConfig, replaced
from qarl_jax.types import UserError

LAYERS = (2, 8)  # of the two models, where the whole one has more
STEPS = 3  # of a run, after one that compiles
LIMIT_S = 300.0  # of a run
PROMPT_WORDS = 32


def corrected(forecasts: Mapping[str, Forecast], scheme: str) -> dict[str, Forecast]:
    """Measures the step of one scheme, and corrects each phase of all schemes by the same factor.

    Raises:
      UserError: the trainer failed on this machine, or took too long; the sentence has its last line.
    """
    one = forecasts[scheme]
    measured = whole_step(one.cfg)
    factors = {phase: measured.get(phase, took) / took if took else 1.0 for phase, took in one.seconds.items()}
    return {
        name: dataclasses.replace(
            each, seconds={phase: took * factors[phase] for phase, took in each.seconds.items()}, is_measured=True
        )
        for name, each in forecasts.items()
    }


def whole_step(cfg: RunConfig) -> dict[str, float]:
    """Seconds of a step of the whole model by phase, from steps of two models of few layers."""
    layers = _config_json(cfg)["num_hidden_layers"]
    few, more = LAYERS
    if layers <= more:
        return steps_of(cfg, layers)
    less, took = steps_of(cfg, few), steps_of(cfg, more)
    beyond = (layers - more) / (more - few)
    return {phase: took[phase] + beyond * max(0.0, took[phase] - less[phase]) for phase in took}


def steps_of(cfg: RunConfig, layers: int) -> dict[str, float]:
    """Median seconds of a step by phase, of a run whose model has so many layers."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        _model_folder(cfg, layers, folder)
        run_dir = folder / "run"
        (folder / "run.yaml").write_text(yaml.safe_dump(config.to_dict(_short(cfg, folder, run_dir))))
        command = [sys.executable, "-m", "qarl_jax.train", "--config", str(folder / "run.yaml")]
        _finish(command, folder / "log", f"steps of {layers} layers")
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    took = {
        name: float(np.median([record.get(f"time/{name}_s") or 0.0 for record in records]))
        for name in ("rollout", "old_logprobs", "update", "publish", "step")
    }
    whole = took.pop("step")
    return took | {"other": whole - sum(took.values())}


def _finish(command: list[str], log: pathlib.Path, task: str) -> None:
    """Runs a command to its end; on an error, too late or at Ctrl-C it is gone with all that it began."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{task} were not measured within {LIMIT_S:g} s; measure a smaller run.") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"{task} could not be measured: {' '.join(last)}")


def _config_json(cfg: RunConfig) -> dict[str, Any]:
    with published.folder(cfg.model.path) as folder, open(os.path.join(folder, "config.json")) as file:
        return json.load(file)


def _short(cfg: RunConfig, folder: pathlib.Path, run_dir: pathlib.Path) -> RunConfig:
    """The run on the model in `folder`, for a few steps that leave nothing behind."""
    tree = config.to_dict(cfg)
    tree["model"] |= {"path": str(folder), "init": "random"}
    tree["data"] |= {
        "source": {"name": "jsonl", "path": str(folder / "prompts.jsonl")},
        "template": "raw",
        "holdout": 0,
    }
    tree["reward"] = {"name": "exact"}
    tree["run_dir"] = str(run_dir)
    made = config.from_dict(tree, "measure")
    off = {
        "eval.every": 0,
        "eval.at_start": False,
        "eval.at_end": False,
        "checkpoint.every": 0,
        "checkpoint.at_end": False,
    }
    return replaced(made, off | {"train.steps": 1 + STEPS, "log.view": "lines", "rollout.stages": ()})


def _model_folder(cfg: RunConfig, layers: int, folder: pathlib.Path) -> None:
    """Writes config.json, a tokenizer of words that has every id of the model's vocabulary, and prompts."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    values = _config_json(cfg) | {"num_hidden_layers": layers, "eos_token_id": 1, "bos_token_id": None}
    values.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(values))
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, values["vocab_size"]))]
    tokenizer = Tokenizer(kinds.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    draws = np.random.default_rng(0).integers(3, len(words), (4 * cfg.train.prompts_per_step, PROMPT_WORDS))
    length = min(PROMPT_WORDS, cfg.data.prompt_limit)
    lines = [{"prompt": " ".join(words[i] for i in row[:length]), "answer": "-"} for row in draws]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
