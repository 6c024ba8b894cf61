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
from qarl_jax.run import build, checkpoint, on_disk, stamp
from qarl_jax.types import UserError, entry_point

FORMATS = ("hf", "compressed-tensors")
RECEIPT = "sft.json"  # what `sft` notes of the weights it made
# Of the base model's folder, what an export takes along; whatever else lies there is no part of the policy.
KEPT = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v3"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates",
)


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
    cfg = stamp.config_of(source)
    mesh = build.make_mesh(cfg)
    # Under auto this machine's arithmetic may be another than the policy's, and may lack its scheme.
    graphdef = build.policy_graphdef(cfg, stamp.numerics_of(stamp.of(source)))
    learner = build.make_learner(cfg, graphdef, mesh)
    state = learner.init(*build.load_policy(cfg, learner))
    # The whole state is named, so that a checkpoint of another model is refused rather than half read.
    params = checkpoints.restore(state.entries(), step=step).state["params"]
    for kept in (pathlib.Path(cfg.model.path, name) for name in KEPT):
        if kept.is_dir():
            shutil.copytree(kept, out / kept.name)
        elif kept.is_file():
            shutil.copy2(kept, out / kept.name)
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
