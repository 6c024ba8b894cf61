# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.export --checkpoint DIR --format hf|compressed-tensors|peft --out DIR`: a policy as model files.

    hf                  the masters rounded to bfloat16: transformers, vLLM, or the start of another run
    compressed-tensors  the QTensors of the run's rollout scheme, byte for byte what was published to the sampler;
                        those with zero points as `pack-quantized` where it holds them, with the same values
    peft                the adapters of a run with `lora`, for transformers with PEFT, and vLLM

`--model DIR --scheme w2a16:g64` quantizes a model folder without a run and writes its codes. A folder that `qat` made
is quantized under the last of its schemes. `--format hf` writes the decoded weights in float32. Split channels are then
merged, so that transformers computes equal outputs; codes keep the duplicated inputs, for our engines.

`--tables w4a16:g64` gives the embedding and the head a scheme, too.

`--bits 4` writes the top four bits of a policy that was trained under `w8a16_asym` or a slice of it, in a run or, with
`--model DIR --scheme w8a16_asym`, by `qat` with `widths`.

For a run with `lora`, hf merges the adapters into the base's weights; compressed-tensors has the base alone.

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

import jax
from flax import nnx

from qarl_jax import models
from qarl_jax.learning.learner import Learner
from qarl_jax.learning.trainable import joined
from qarl_jax.models.hf import safetensors
from qarl_jax.models.hf.safetensors import MAX_SHARD_BYTES
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights
from qarl_jax.run import build, checkpoint, description, on_disk, stamp
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import progress
from qarl_jax.types import UserError, command, entry_point

FORMATS = ("hf", "compressed-tensors", "peft")
# Of the base model's folder, what an export takes along; whatever else lies there is no part of the policy.
KEPT = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v3"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates",
)


def export(source: str | os.PathLike[str], out: str | os.PathLike[str], kind: str, bits: int | None = None) -> None:
    """Writes the policy of a checkpoint as a model folder.

    Args:
      source: run folder or step folder. out: folder to make; must not exist, or be empty.
      kind: one of FORMATS.
      bits: with compressed-tensors: width to write, of the run's 8-bit grid; None: the rollout scheme's.

    Raises:
      UserError: unknown format, a width that the run's scheme does not have, no checkpoint, or `out` in use. Also for
        compressed-tensors of a bf16 run, and for peft of a run without adapters or with trainable gains.
    """
    if kind not in FORMATS:
        raise UserError(f"--format {kind}: choose one of {', '.join(FORMATS)}")
    if bits is not None and kind != "compressed-tensors":
        raise UserError(f"--bits {bits} is for --format compressed-tensors: {kind} has no codes.")
    with on_disk.whole_folder(out) as staging:
        _export(source, staging, kind, bits)


def export_model(
    model: str | os.PathLike[str], scheme: Any, out: str | os.PathLike[str], kind: str = "compressed-tensors"
) -> None:
    """Writes a model folder's weights under a scheme, rounded to nearest.

    Args:
      scheme: a name or rules (`models.parse_rules`).
      kind: "compressed-tensors" (codes) or "hf" (the decoded weights in float32, without duplicated inputs).

    Raises:
      UserError: `models.load_hf` fails, the scheme is bf16 and codes are asked for, or `out` is in use.
    """
    model, rules = pathlib.Path(model), models.parse_rules(scheme)
    grids, asked = description.trained_grids(model), [each for _, each in rules.rules]
    if grids and asked and not set(grids) & set(asked):
        names = " and ".join(map(str, grids))
        print(f"{model} was trained for {names}, and is written in {' and '.join(map(str, asked))}")
    if kind == "hf":
        with on_disk.whole_folder(out) as staging:
            copy_kept(model, staging)
            models.save_hf(models.merge_splits(models.load_hf(model, scheme=rules)), staging, "float32")
        return
    config = models.read_config(model, compute_dtype="bfloat16", param_dtype="bfloat16", quant=rules)
    if not config.quant.rules:
        raise UserError("--scheme bf16 quantizes nothing: name a low-bit scheme, for example w4a16.")
    with on_disk.whole_folder(out) as staging:
        graphdef, masters = models.load_masters(model, config)
        qweights = models.quantizer(graphdef)(masters)
        copy_kept(model, staging)
        write_quantized(graphdef, masters, qweights, staging)


def _export(source: str | os.PathLike[str], out: pathlib.Path, kind: str, bits: int | None) -> None:
    """`export` into an existing folder."""
    checkpoints, step = checkpoint.find(source)
    cfg = stamp.config_of(source)
    mesh = build.make_mesh(cfg)
    # Under auto this machine's arithmetic may be another than the policy's, and may lack its scheme.
    graphdef = build.policy_graphdef(cfg, stamp.numerics_of(stamp.of(source)))
    learner = build.make_learner(cfg, graphdef, mesh)
    state = learner.init(*build.load_policy(cfg, learner, restored=True))
    # The whole state is named, so that a checkpoint of another model is refused rather than half read.
    params = checkpoints.restore(state.entries(), step=step).state["params"]
    if kind == "peft":
        _write_adapters(cfg, learner, params, out)
        return
    copy_kept(cfg.model.path, out)
    gains = cfg.lora is not None and cfg.lora.train_norms
    exact = "no format has them and the gains that learned (train_norms)" if gains else "--format peft writes these"
    if kind == "hf":
        if cfg.lora is not None and models.config_of(graphdef).quant.rules:
            print(
                "The adapters are merged into what the base's codes stand for. The run's policy is not this folder in"
                f" {cfg.quant.forward}, which rounds the sum again; it is the base with its adapters: {exact}."
            )
        bare = models.with_scheme(graphdef, "bf16")
        whole = learner.model(params) if learner.trainable.freeze else models.merge(bare, params, nnx.State({}))
        models.save_hf(models.merge_adapters(whole), out)
    else:
        if cfg.lora is not None:
            print(f"This folder is the base without the run's adapters: {exact}.")
        rollout = build.rollout_graphdef(cfg, graphdef)
        rollout = rollout if bits is None else models.at_width(rollout, bits)
        write_quantized(rollout, *joined(params, learner.quantizer(rollout)(params)), out)


def copy_kept(model: str | os.PathLike[str], out: pathlib.Path) -> None:
    """Copies a model folder's files other than weights and config.json: tokenizer, chat template and so on (`KEPT`)."""
    for kept in (pathlib.Path(model, name) for name in KEPT):
        if kept.is_dir():
            shutil.copytree(kept, out / kept.name)
        elif kept.is_file():
            shutil.copy2(kept, out / kept.name)


def _write_adapters(cfg: RunConfig, learner: Learner, params: Any, out: pathlib.Path) -> None:
    if cfg.lora is None:
        raise UserError("--format peft: this run has no adapters (lora), all of its policy learned: use --format hf.")
    if cfg.lora.train_norms:
        raise UserError("--format peft: with lora.train_norms gains learned too, for which PEFT has no place: use hf.")
    if learner.config.quant.rules and not learner.config.released.rules:
        print(
            f"These adapters belong to the base in {cfg.quant.forward}, and not to the weights in {cfg.model.path}:"
            " serve them over what --format compressed-tensors writes."
        )
    alpha, rslora = cfg.lora.alpha, cfg.lora.rslora
    models.write_peft(out, learner.config, params, alpha=alpha, rslora=rslora, base=cfg.model.path)


def write_quantized(graphdef: Any, params: Any, qweights: Any, folder: pathlib.Path) -> None:
    """Writes config.json and safetensors of a quantized policy for vLLM's compressed-tensors loader, without adapters.

    Raises:
      UserError: the scheme of `graphdef` quantizes nothing.
    """
    # The tensors are those the engine is sent.
    from qarl_jax.rollout.vllm.engine import engine_config, engine_tensors
    from qarl_jax.rollout.vllm.gpu_staging import shapes_apart

    portable = models.config_of(graphdef).splitting is None
    values = engine_config(graphdef, exported=portable)
    if "quantization_config" not in values:
        raise UserError("this run's rollout scheme is bf16, so there is nothing quantized to write: use --format hf.")
    graphdef = models.split(models.abstract_model(models.config_of(graphdef).base))[0]
    if portable:
        qweights = jax.tree.map(_exported, qweights, is_leaf=lambda x: isinstance(x, QTensor))
    weights = PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)
    safetensors.write_sharded(folder, shapes_apart(weights), engine_tensors(weights), MAX_SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


@jax.jit
def _exported(tensor: QTensor) -> QTensor:
    return tensor.scheme.exported(tensor)


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog=command("export"), description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", help="run folder, or one step_* folder of its checkpoints")
    source.add_argument("--model", help="model folder, to be quantized under --scheme")
    parser.add_argument(
        "--format", choices=FORMATS, help="needed with --checkpoint; with --model compressed-tensors if not given"
    )
    parser.add_argument("--scheme", help="with --model: w4a16, w2a16:g64, ...")
    parser.add_argument("--tables", default="", help="with --model: w4a16 or w4a16_asym for embedding and head")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--bits", type=int, help="8, 4 or 2 bits of a policy on the 8-bit grid (w8a16_asym)")
    args = parser.parse_args(argv)
    if args.model is not None:
        if args.format == "peft" or (args.scheme is None and args.format != "hf"):
            parser.error("--model is quantized: give --scheme, and no --format but compressed-tensors or hf")
        if args.bits is not None and args.scheme in (None, "bf16"):
            parser.error("--bits takes the top bits of an 8-bit grid: give --scheme w8a16_asym")
        rules = models.parse_rules(models.rules_with_tables(args.scheme or "bf16", args.tables))
        rules = rules if args.bits is None else rules.at_width(args.bits)
        export_model(args.model, rules, args.out, args.format or "compressed-tensors")
    elif args.format is None or args.scheme is not None or args.tables:
        parser.error("--checkpoint needs --format, and takes no --scheme and no --tables: its run has them")
    else:
        export(args.checkpoint, args.out, args.format, args.bits)
    print(f"wrote {args.out}")
    return 0
