# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.export --checkpoint DIR --format hf|compressed-tensors --out DIR`: a policy as a model folder.

    hf                  the masters rounded to bfloat16: transformers, vLLM, or the start of another run
    compressed-tensors  the QTensors of the run's rollout scheme, byte for byte what was published to the sampler

DIR is a run folder (runs/quickstart: its newest checkpoint) or one step of it (runs/quickstart/checkpoints/step_...).
The folder written holds the tokenizer and everything else that a model folder needs. It appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from qarl_jax import models
from qarl_jax.models.hf import safetensors
from qarl_jax.models.hf.safetensors import MAX_SHARD_BYTES
from qarl_jax.rollout import PolicyWeights
from qarl_jax.run import build, checkpoint, config, on_disk
from qarl_jax.run.config import RunConfig
from qarl_jax.types import UserError, entry_point

FORMATS = ("hf", "compressed-tensors")
# Of a model folder, what the weights do not replace: tokenizer, chat template, generation settings.
RECEIPT = "sft.json"  # what `sft` notes of the weights it made
_OTHERS = ("config.json", RECEIPT)
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".gguf")
# Settings of `rollout.engine` in older records, with the values of batch-invariant arithmetic; others meant vLLM's own.
_RETIRED: dict[str, tuple[Any, ...]] = {
    "execution": ("auto", "eager", "graphs"),
    "kernels": ("contract",),
    "int4_kernel": ("auto",),
    "split_attention": (False,),
    "loader": ("auto", "vllm"),
}


def run_config(directory: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved config of the run that a run folder, checkpoints folder or step folder belongs to.

    Args:
      directory: one of these. overrides: "section.field=value" strings laid over it.

    Raises:
      UserError: no run.json at or above the folder.
    """
    found = build.run_record(directory)
    if found is not None:
        file, record = found
        if not isinstance(record, dict) or "config" not in record:
            raise UserError(f"{file} holds no config: it is not the record of a run, or was altered.")
        return config.from_dict(_as_today(record["config"]), str(file), overrides)
    start = pathlib.Path(directory).absolute()
    if not start.exists():
        raise UserError(f"{start}: no such folder; give the folder of a run, or one step_* of it.")
    raise UserError(f"{start} is not inside a run folder: no run.json in it or in the two folders above it.")


def _as_today(recorded: dict[str, Any]) -> dict[str, Any]:
    """The config of a record, with the settings that have been retired since put into those that took their place."""
    engine = dict(recorded.get("rollout", {}).get("engine", {}))
    retired = {name: engine.pop(name) for name in _RETIRED if name in engine}
    if not retired:
        return recorded
    if any(value not in _RETIRED[name] for name, value in retired.items()):
        engine["arithmetic"] = "vllm"
    return recorded | {"rollout": recorded["rollout"] | {"engine": engine}}


def export(source: str | os.PathLike[str], out: str | os.PathLike[str], kind: str) -> None:
    """Writes the policy of a checkpoint as a model folder.

    Args:
      source: run folder or step folder. out: folder to make; must not exist, or be empty.
      kind: one of FORMATS.

    Raises:
      UserError: unknown format, no checkpoint, `out` in use, or a bf16 run asked for compressed-tensors.
    """
    if kind not in FORMATS:
        raise UserError(f"--format {kind}: choose one of {', '.join(FORMATS)}")
    with on_disk.whole_folder(out) as staging:
        _export(source, staging, kind)


def _export(source: str | os.PathLike[str], out: pathlib.Path, kind: str) -> None:
    """`export` into an existing folder."""
    checkpoints, step = checkpoint.find(source)
    cfg = run_config(source)
    mesh = build.make_mesh(cfg)
    # Under auto this machine's arithmetic may be another than the run's, and may lack its scheme.
    recorded = build.recorded_numerics(source) if cfg.quant.engine == "auto" else None
    graphdef, params = build.load_model(cfg, mesh, recorded)
    state = build.make_learner(cfg, graphdef, mesh).init(params)
    # The whole state is named, so that a checkpoint of another model is refused rather than half read.
    params = checkpoints.restore(state.entries(), step=step).state["params"]
    for file in sorted(pathlib.Path(cfg.model.path).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in _OTHERS:
            shutil.copy2(file, out / file.name)
    if kind == "hf":
        models.save_hf(models.merge(models.with_scheme(graphdef, "bf16"), params, build.no_qweights()), out)
    else:
        write_quantized(build.rollout_graphdef(cfg, graphdef), params, out)


def write_quantized(graphdef: Any, params: Any, folder: pathlib.Path) -> None:
    """config.json and safetensors of a quantized policy, as vLLM's loader (compressed-tensors) expects them.

    Raises:
      UserError: the scheme of `graphdef` quantizes nothing.
    """
    # The tensors are those the engine is sent.
    from qarl_jax.rollout.vllm.engine import engine_config, engine_tensors
    from qarl_jax.rollout.vllm.gpu_staging import shapes_apart

    values = engine_config(graphdef)
    if "quantization_config" not in values:
        raise UserError("this run's rollout scheme is bf16, so there is nothing quantized to write: use --format hf.")
    qweights = models.quantize_params(graphdef, params)
    weights = PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)
    safetensors.write_sharded(folder, shapes_apart(weights), engine_tensors(weights), MAX_SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m qarl_jax.export", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="run folder, or one step_* folder of its checkpoints")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--out", required=True, help="folder to write")
    args = parser.parse_args(argv)
    export(args.checkpoint, args.out, args.format)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
