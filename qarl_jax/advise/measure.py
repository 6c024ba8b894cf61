# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures a run's step on this machine: steps of the trainer under one scheme, and every scheme's products of a layer.

A step's phases grow linearly with the number of layers. So two models, of two layers and of eight, say what all layers
take. The runs have the real config's batch, lengths, schemes, optimizer and engine. Weights and prompts are random, and
the reward is always 0.

Steps under other schemes differ by their products. Those of one layer are timed under bf16 and under every scheme that
has a `baseline_k3`, as `quant.dot` has them: for a token of every sequence, and for a micro-batch forward and backward.
What vLLM computes is its own, so its sampling differs by the recorded rates, and so does all of a scheme that was not
timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from qarl_jax import models, quant
from qarl_jax.advise import counts
from qarl_jax.advise.forecast import Forecast
from qarl_jax.advise.machines import Machine, least
from qarl_jax.memory import costs, learner
from qarl_jax.models import published
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run import build, config
from qarl_jax.run.config import RunConfig, replaced
from qarl_jax.runtime import progress
from qarl_jax.types import UserError

LAYERS = (2, 8)  # of the two models, where the whole one has more
STEPS = 3  # of a run, after one that compiles
LIMIT_S = 300.0  # of a run
PROMPT_WORDS = 32
MOST_TOKENS = 1024  # that a layer's products are timed with; more take as much longer
WORDS = 256  # of the vocabulary where one layer is timed


@dataclasses.dataclass(frozen=True)
class Layer:
    """Seconds of one layer's products under a scheme.

    Attributes:
      token: for one token of each sequence of the embedded sampler.
      forward, both: for a micro-batch of the learner, without and with the backward.
      quantize: to quantize all weights of the layer.
    """

    token: float
    forward: float
    both: float
    quantize: float


def corrected(forecasts: Mapping[str, Forecast], scheme: str, machine: Machine) -> dict[str, Forecast]:
    """Measures the step of one scheme, and corrects the forecasts of all schemes by it.

    Raises:
      UserError: the trainer failed on this machine, or took too long; the message has the trainer's last line.
    """
    base = forecasts[scheme]
    timed = [name for name, each in forecasts.items() if each.seconds and (name == scheme or each.k3_bf16 is not None)]
    measured = whole_step(base.cfg)
    with progress.task("timing schemes", len(timed), "schemes") as task:
        terms = counts.of_step(base.cfg, machine, base.mean_len)
        sequences = round(terms["rollout"]["sequence"] * _layers(base.cfg) / terms["rollout"]["layer"])
        layers = {name: layer_of(forecasts[name].cfg, sequences) for name in task.count(timed)}
    factors = {phase: took / base.seconds[phase] if base.seconds[phase] else 1.0 for phase, took in measured.items()}
    known = products(base.cfg, terms, layers[scheme])
    out = {}
    for name, each in forecasts.items():
        seconds = {phase: took * factors.get(phase, 1.0) for phase, took in each.seconds.items()}
        own = products(each.cfg, terms, layers[name]) if name in layers else {}
        for phase, took in own.items():
            if phase not in ("rollout", "publish") or not isinstance(each.cfg.rollout.engine, VllmConfig):
                seconds[phase] = max(took, measured[phase] + took - known[phase])
        out[name] = dataclasses.replace(each, seconds=seconds, measured=scheme if name in layers else "")
    return out


def products(cfg: RunConfig, terms: Mapping[str, Mapping[str, float]], layer: Layer) -> dict[str, float]:
    """Computes the seconds of a step's matrix products by phase from one layer's. terms: `counts.of_step`."""
    again = costs.REPEATED[cfg.model.remat_or_full]
    quantized = cfg.train.updates_per_step * _layers(cfg) * layer.quantize
    return {
        "rollout": terms["rollout"]["layer"] * layer.token,
        "old_logprobs": terms["old_logprobs"]["micro_batch"] * layer.forward,
        "update": terms["update"]["micro_batch"] * (again * layer.forward + layer.both) + quantized,
        "publish": 0.0,
    }


def layer_of(cfg: RunConfig, sequences: int) -> Layer:
    """Times the products of one layer of a run's model, experts left out, on this machine."""
    config = build.model_config(cfg, cfg.quant.forward)
    config = dataclasses.replace(config, num_layers=1, vocab_size=WORDS)
    graphdef, params, _ = models.split(models.random_model(config, 0))
    low, masters = models.by_path(models.quantizer(graphdef)(params)), models.by_path(params)
    # A stack of one layer; experts have a dimension more.
    names = [name for name, w in masters.items() if name.endswith(".kernel") and w.ndim == 3]
    first = functools.partial(jax.tree.map, lambda x: x[0])
    weights = {name: first(masters[name]) for name in names}
    codes = {name: first(low[name]) if low.get(name) is not None else None for name in names}
    rows = cfg.micro_batch_rows // learner.planned_mesh(cfg).size or 1
    tokens = rows * cfg.row_len
    timed = min(tokens, MOST_TOKENS)

    @jax.jit
    def forward(inputs: Any, weights: Any, codes: Any) -> list[Any]:
        return [quant.dot(inputs[w.shape[1]], w, codes[name], numerics=cfg.numerics) for name, w in weights.items()]

    @jax.jit
    def both(inputs: Any, weights: Any, codes: Any, outer: Any) -> Any:
        def total(inputs: Any, weights: Any) -> Any:
            return sum(jnp.vdot(outer[y.shape[-1]], y).astype(jnp.float32) for y in forward(inputs, weights, codes))

        return jax.grad(total, (0, 1))(inputs, weights)

    def drawn(widths: set[int], count: int) -> dict[int, Any]:
        draw = np.random.default_rng(0)
        return {k: jnp.asarray(draw.normal(size=(count, k)), cfg.model.dtype) for k in widths}

    ins, outs = ({w.shape[axis] for w in weights.values()} for axis in (1, 0))
    learned = drawn(ins, timed)
    return Layer(
        token=least(forward, drawn(ins, sequences), weights, codes),
        forward=least(forward, learned, weights, codes) * tokens / timed,
        both=least(both, learned, weights, codes, drawn(outs, timed)) * tokens / timed,
        quantize=least(models.quantizer(graphdef), params) if any(each is not None for each in codes.values()) else 0.0,
    )


def _layers(cfg: RunConfig) -> int:
    return learner.model_of(cfg).num_layers


def whole_step(cfg: RunConfig) -> dict[str, float]:
    """Extrapolates the seconds of a whole model's step, by phase, from runs of two models of few layers."""
    layers = _config_json(cfg)["num_hidden_layers"]
    few, more = LAYERS
    if layers <= more:
        return steps_of(cfg, layers)
    less, took = steps_of(cfg, few), steps_of(cfg, more)
    beyond = (layers - more) / (more - few)
    return {phase: took[phase] + beyond * max(0.0, took[phase] - less[phase]) for phase in took}


def steps_of(cfg: RunConfig, layers: int) -> dict[str, float]:
    """Runs the trainer on a model of `layers` layers; returns the median seconds of a step by phase."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        _model_folder(cfg, layers, folder)
        run_dir = folder / "run"
        (folder / "run.yaml").write_text(yaml.safe_dump(config.to_dict(_short(cfg, folder, run_dir))))
        command = [sys.executable, "-m", "qarl_jax.train", "--config", str(folder / "run.yaml")]
        with progress.task(f"measuring steps of {layers} layers"):
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
