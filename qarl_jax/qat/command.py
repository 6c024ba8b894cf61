# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.qat FILE [section.field=value ...]`: quantization-aware training, so that rounding loses little.

Layers of a model folder are trained one at a time, through ever coarser schemes, on any text or on text sampled from
the model (`blocks.py`); then, with `distill`, all at once (`distill.py`). The result is a Hugging Face folder of
bfloat16 masters, trained to be quantized under the last scheme of `stages`. RL starts from it with `model.path`, and
`qarl export --model` writes its codes.

Work in progress is kept in OUT.work. The same command resumes it, with equal bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import shutil
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from flax import nnx

from qarl_jax import data, models
from qarl_jax.models.hf import safetensors
from qarl_jax.models.hf.weights import check_weights, write_hf
from qarl_jax.models.transformer import quantizable
from qarl_jax.optim import build, leafwise
from qarl_jax.qat import distill, split, text
from qarl_jax.qat.blocks import Blocks, Job, as_stored
from qarl_jax.qat.updates import Plan
from qarl_jax.quant import at_width, check_quantizable, parse_scheme
from qarl_jax.run import export, made, on_disk
from qarl_jax.runtime import locks, progress
from qarl_jax.typed_config import load
from qarl_jax.types import UserError, at_least, check_seed, entry_point

RECEIPT = "qat.json"
Optimizer = Annotated[Any, load.Variants(build.OPTIMIZERS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model to quantize.

    Attributes:
      path: the model's Hugging Face folder, with its tokenizer.
      dtype: compute dtype. Masters are float32.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """The number and length of rows of tokens.

    Attributes:
      rows: number of training rows. row_len: tokens per row.
      heldout: number of held-out rows for perplexity, at most.
    """

    rows: int = 256
    row_len: int = 512
    heldout: int = 16

    def __post_init__(self) -> None:
        at_least(self, 1, "rows", "heldout")
        at_least(self, 2, "row_len")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The training of one layer under one scheme, or, in section `distill`, of the whole model.

    Attributes:
      epochs: number of passes over all rows. batch: rows per update.
      optimizer: the optimizer, with a fresh state for every layer and scheme.
    """

    epochs: int = 2
    batch: int = 4
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: build.AdamW(lr=1e-4, weight_decay=0.0, schedule=build.Schedule(kind="cosine"))
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The config of `python -m qarl_jax.qat`.

    Attributes:
      out: folder for the result.
      data: training text, by a source of `data`; null: text sampled from the model.
      stages: schemes in order ("w2a16_asym:g64"); the result is meant for the last one.
      widths: bit widths of `w8a16_asym` over which every loss is averaged ([8, 4, 2]), so that one folder serves all
        of them; (): the scheme's width alone.
      split: share of inputs that the last layer's linear maps duplicate, so that two weights share an outlier
        (`quant/splitting.py`); the share grows linearly with depth, from none in the first layer. 0: no splitting.
      train: training of each layer under each scheme; null: none, so that `distill` starts from the model.
      distill: training of all layers under the last scheme, after `train`; null: none.
      save_every: updates between checkpoints.
    """

    out: str
    model: Model
    data: data.Config | None = None
    text: Text = dataclasses.field(default_factory=Text)
    stages: tuple[str, ...] = ("w8a16_asym", "w4a16_asym", "w2a16_asym")
    widths: tuple[int, ...] = ()
    split: float = 0.0
    train: Train | None = dataclasses.field(default_factory=Train)
    distill: Train | None = None
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "save_every")
        check_seed(self.seed)
        if not self.stages or "bf16" in self.stages:
            raise UserError(
                "stages names one low-bit scheme or more, for example [w8a16_asym, w4a16_asym, w2a16_asym]."
            )
        for scheme in self.stages:
            rules = models.parse_rules(scheme)
            if self.widths and scheme.partition(":")[0] != "w8a16_asym":
                raise UserError(
                    f"widths={list(self.widths)} are slices of one 8-bit grid, and stages has {scheme}: set"
                    " stages=[w8a16_asym], or [w8a16_asym:g64] for groups of 64."
                )
            for bits in self.widths:
                rules.at_width(bits)
        for before, after in itertools.pairwise(self.stages):
            if _bits(after) > _bits(before):
                raise UserError(
                    f"stages goes up from {before} to {after}: list schemes from many bits to few. RL starts"
                    " under the last one."
                )
        if len(set(self.widths)) < len(self.widths):
            raise UserError(f"widths={list(self.widths)} names a width twice: name it once.")
        if self.split and (self.train is None or self.widths):
            raise UserError(f"split={self.split} is for layers that are trained one by one (train), and for one width.")
        if self.data is not None and self.data.stages:
            raise UserError("data.stages are of a run's steps, and rows are cut from all documents: leave them out.")
        if not self.parts:
            raise UserError("train and distill are both null, so that nothing would learn: set one of them.")
        for name, part in self.parts.items():
            part.optimizer.check_masters(f"{name}.optimizer")
            leafwise.Optimizer(part.optimizer, self.plan(part).updates)
            if part.batch > self.text.rows:
                raise UserError(f"{name}.batch={part.batch} is more than text.rows={self.text.rows}: lower it.")

    @property
    def parts(self) -> dict[str, Train]:
        """The sections `train` and `distill` that are not null, by name."""
        both = {"train": self.train, "distill": self.distill}
        return {name: part for name, part in both.items() if part is not None}

    @property
    def served(self) -> str:
        """The last scheme, at the narrowest of `widths`, with its group: a run has its own `quant.group_size`."""
        scheme = parse_scheme(self.stages[-1])
        return str(at_width(scheme, min(self.widths)) if self.widths else scheme)

    def plan(self, part: Train) -> Plan:
        """Returns the schedule of updates of a section."""
        return Plan(rows=self.text.rows, batch=part.batch, epochs=part.epochs, seed=self.seed)

    @property
    def work(self) -> pathlib.Path:
        """The folder for work in progress, OUT.work."""
        return pathlib.Path(f"{pathlib.Path(self.out)}.work")  # beside `out` even if that ends in a slash


def _bits(name: str) -> tuple[int, int]:
    """The bits of a low-bit scheme's weights and activations."""
    scheme = parse_scheme(name)
    assert scheme is not None
    weights, activations = scheme.wire.weights, scheme.wire.activations
    bits = getattr(scheme, "bits", weights["num_bits"])  # fewer than its container's
    return bits, activations["num_bits"] if activations else 16


def start_over(cfg: Config) -> None:
    """Removes work in progress."""
    with _owned(cfg):
        shutil.rmtree(cfg.work, ignore_errors=True)


def _owned(cfg: Config) -> contextlib.AbstractContextManager[None]:
    return locks.owned(cfg.work, f"The training in {cfg.work}", "name another out")


def _job(cfg: Config) -> Job:
    """Reads the config of the model and makes the rows, or finds those of a training in progress.

    Raises:
      UserError: a weight does not suit a scheme, channels are split already, rows are longer than the model's
        context, or the work in progress is another config's or other text's.
    """
    config = models.read_config(cfg.model.path, compute_dtype=cfg.model.dtype, param_dtype="float32")
    if config.splitting is not None:
        raise UserError(
            f"{cfg.model.path} is a model whose channels are split, which qat does not train further: take the folder"
            " that `qarl export --format hf` makes of it."
        )
    if cfg.text.row_len > (positions := config.max_position_embeddings):
        raise UserError(
            f"text.row_len={cfg.text.row_len} is more than the model's {positions} positions (max_position_embeddings"
            f" in its config.json): lower it to {positions} or less."
        )
    stages = tuple(models.parse_rules(scheme) for scheme in cfg.stages)
    splitting = split.asked(cfg.split, config, stages[-1]) if cfg.split else None
    _check_weights(dataclasses.replace(config, splitting=splitting), stages)
    check_weights(cfg.model.path, config)
    mark, receipt = made.fingerprint(cfg), made.read_receipt(cfg.work, RECEIPT)
    if receipt.get("fingerprint") not in (None, mark):
        raise UserError(
            f"{cfg.work} holds the unfinished training of another config: give it back its config, remove it with"
            " --force, or name another out."
        )
    file = cfg.work / "tokens.safetensors"
    if not file.is_file():
        rows = _rows(cfg, config)
        named = dict(zip(("train", "heldout"), rows, strict=True))
        cfg.work.mkdir(parents=True, exist_ok=True)
        made.write_receipt(cfg.work, RECEIPT, cfg, mark, rows=text.digest(*rows), weights=_weights(cfg))
        safetensors.write(file, {name: (x.dtype, x.shape) for name, x in named.items()}, named.items())
    elif changed := _changed(cfg, receipt):
        raise UserError(
            f"{cfg.work} holds the unfinished training with other {changed}: give it back its {changed}, remove it with"
            " --force, or name another out."
        )
    tokens, first = safetensors.SafetensorsFile(file), next(iter(cfg.parts.values()))
    return Job(
        model=cfg.model.path,
        config=config,
        stages=stages,
        widths=cfg.widths,
        train=np.array(tokens.tensor("train")),
        heldout=np.array(tokens.tensor("heldout")),
        optimizer=first.optimizer,
        plan=cfg.plan(first),
        every=cfg.save_every,
        work=cfg.work,
        splitting=splitting,
    )


def _rows(cfg: Config, config: models.ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    sizes = {"count": cfg.text.rows, "heldout": cfg.text.heldout, "length": cfg.text.row_len}
    return text.rows(cfg.data, cfg.model.path, config, **sizes, seed=cfg.seed)


def _weights(cfg: Config) -> str:
    return on_disk.sampled(pathlib.Path(cfg.model.path), "*.safetensors")


def _changed(cfg: Config, receipt: dict[str, Any]) -> str:
    """Names what differs from a receipt, weights or text; a receipt of an earlier version has neither."""
    if receipt.get("weights", weights := _weights(cfg)) != weights:
        return "weights"
    if cfg.data is None or "rows" not in receipt:
        return ""
    rows = _rows(cfg, models.read_config(cfg.model.path))
    return "" if receipt["rows"] == text.digest(*rows) else "text"


def _check_weights(config: models.ModelConfig, stages: Sequence[Any]) -> None:
    for path, linear in quantizable(models.abstract_model(config)).items():
        for rules in stages:
            scheme = dataclasses.replace(config, quant=rules).scheme_of(path)
            if scheme is not None:
                check_quantizable(linear.kernel.get_value().shape, scheme, config.describe(path))


def run(cfg: Config) -> None:
    """Trains the model of a config, or resumes it, and writes the resulting folder."""
    made.check_ours(cfg.out, RECEIPT)
    with _owned(cfg):
        try:
            _run(cfg, _job(cfg))
        except OSError as error:
            if not on_disk.is_full(error):
                raise
            what = f"{cfg.work} cannot be written: {error.strerror}"
            raise UserError(what, "free some space, and give the same command again.") from None


def _run(cfg: Config, job: Job) -> None:
    updates = job.updates if cfg.train is not None else 0
    updates += cfg.plan(cfg.distill).updates if cfg.distill is not None else 0
    perplexity, facts = dict[str, float](), dict[str, Any]()
    with progress.task("training", updates, "updates") as task:
        if cfg.train is not None:
            blocks = Blocks(job, task, say=lambda line: print(line, flush=True))
            blocks.run()
            perplexity, facts["blocks"] = blocks.perplexities(), blocks.progress.layers
            _tell(perplexity)
            layers = facts["blocks"]
            if harmed := sum(record["trained"] > record["rounded"] for record in layers):
                said = f"training made {harmed} of {len(layers)} layers worse than rounding: lower train.optimizer.lr"
                print(said, flush=True)
        with on_disk.whole_folder(cfg.out, "out=", replaces=True) as staging:
            export.copy_kept(cfg.model.path, staging)
            if cfg.train is not None:
                write_hf(staging, job.trained, blocks.tensors())
                blocks.streams.clear()  # whole models come
            if cfg.distill is not None:
                learned, found = _distill(cfg, cfg.distill, job, staging, task)
                facts |= learned
                perplexity |= found
                _tell(perplexity)
                before, after = learned["heldout_kl"]
                if after > before:
                    print("end-to-end training did harm: lower distill.optimizer.lr, or set distill=null", flush=True)
            facts |= {"perplexity": perplexity, "rows": text.digest(job.train, job.heldout), "weights": _weights(cfg)}
            made.write_receipt(staging, RECEIPT, cfg, made.fingerprint(cfg), **facts)
    shutil.rmtree(cfg.work)
    print(f"wrote {cfg.out}; RL starts from it with model.path={cfg.out} quant.forward={cfg.served}")


def _tell(perplexity: dict[str, float]) -> None:
    listed = ", ".join(f"{name} {value:.3f}" for name, value in perplexity.items())
    print(f"held-out perplexity: {listed}", flush=True)


def _distill(
    cfg: Config, part: Train, job: Job, folder: pathlib.Path, task: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Trains all layers of the model in `folder`, or without `train` of `model.path`, and writes them to `folder`.

    Returns:
      The KL of each update and of the held-out rows, and held-out perplexities; with widths one of each, `distilled_8`
      for eight bits.
    """
    full = dataclasses.replace(job.config, param_dtype=job.config.compute_dtype)
    teacher = models.load_masters(cfg.model.path, full)
    begun = cfg.model.path if cfg.train is None else folder
    # Without recomputation the activations of all layers are stored, of each width: 22 GiB for 135M, 3.6 with it.
    student = dataclasses.replace(job.trained, quant=job.stages[-1], remat="full")
    graphdef, masters = models.load_masters(begun, student)
    perplexity = functools.partial(distill.perplexity, tokens=job.heldout, batch=part.batch)
    served, found = models.with_scheme(graphdef, job.served), dict[str, float]()
    if cfg.train is None:
        found = {"full": perplexity(*teacher), "rounded": perplexity(served, masters)}
        _tell(found)
    plan, work = cfg.plan(part), cfg.work / "distill"
    masters, losses, (before, after) = distill.distill(
        teacher,
        (graphdef, masters),
        job.train,
        job.heldout,
        part.optimizer,
        plan,
        cfg.save_every,
        work,
        task,
        cfg.widths,
    )
    models.save_hf(models.merge(models.with_scheme(graphdef, "bf16"), masters, nnx.State({})), folder)
    first, last = np.mean(losses[:8]), np.mean(losses[-8:])
    print(f"qat distill  held-out KL {before:.4f} -> {after:.4f}; training rows {first:.4f} -> {last:.4f}", flush=True)
    masters = as_stored(masters)
    for bits in cfg.widths:
        found[f"distilled_{bits}"] = perplexity(models.with_scheme(graphdef, job.stages[-1].at_width(bits)), masters)
    found["distilled"] = found[f"distilled_{min(cfg.widths)}"] if cfg.widths else perplexity(served, masters)
    return {"kl": losses, "heldout_kl": [before, after]}, found


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit code."""
    try:
        return made.main("qat", Config, made.fingerprint, run, __doc__.split("\n")[0], argv, start_over, _changed)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", flush=True)
        return 130
