# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-wise progressive training (Bit-by-Bit, arXiv 2604.07888): one layer at a time, one scheme after the other.

    x_full ──► layer in full precision ──► target           e = |output - target|^2 / |target|^2 of each token
    x_low  ──► the same layer, low-bit ──► output           loss = the mean of e over tokens

    for each layer:  masters from the checkpoint
        for each scheme (w8 -> w4 -> w2, then activations):  epochs over all rows, a fresh optimizer
        x_full, x_low = target, the trained layer's output

A layer's inputs come from the quantized layers before it, so it also learns to correct their errors.

**Our reading.** A layer goes through all schemes before the next layer begins, so that it is trained on the outputs of
the final layers before it. The descriptions that we know leave open whether the whole model goes through a scheme
first. Each scheme starts from the masters of the one before. The error is relative per token, because in plain squares
a few tokens with activations a thousand times larger would outweigh all others.

**Memory.** Training needs memory for one layer with its optimizer, and for the rows of one update. Layers' inputs are
kept in files, one tensor [2, T, D] per row: the two tensors of `Transformer.through`. A GPU or TPU holds them in memory
if they take at most a quarter of it; files are then written every `Job.every` updates, from which a killed run resumes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from qarl_jax import models
from qarl_jax.memory.plan import capacity
from qarl_jax.models.hf import safetensors
from qarl_jax.models.hf.by_layer import layer_config, layer_tensors, read_layer
from qarl_jax.models.hf.weights import Checkpoint, hf_names, tensor_shapes
from qarl_jax.models.layers import RMSNorm
from qarl_jax.models.logprobs import token_logprobs
from qarl_jax.models.params import is_fixed, part_of, united
from qarl_jax.numerics.float32 import dtype_in, round_to
from qarl_jax.optim import build
from qarl_jax.qat.split import split
from qarl_jax.qat.updates import Plan, Trainer
from qarl_jax.quant.splitting import Splitting
from qarl_jax.run import on_disk
from qarl_jax.types import UserError

STREAMS = ("full", "trained", "rounded")
"""The streams between layers: of the model in full precision, of the trained one, and of the merely rounded one, which
only has the held-out rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The inputs of the training of all layers.

    Attributes:
      model: the model's folder. config: its config, in full precision.
      stages: rules of the schemes, in order; the result is meant for the last one.
      widths: as in `Trainer`; later layers are trained on the outputs of earlier layers at the narrowest width.
      splitting: splitting of outlier channels, done before a layer is trained; None: none.
      train, heldout: rows [R, T] and [H, T] int32.
      optimizer: the optimizer's config; its state is fresh in each stage. plan: the updates of a stage.
      every: updates between checkpoints.
      work: folder for work in progress.
    """

    model: str
    config: models.ModelConfig
    stages: tuple[Any, ...]
    widths: tuple[int, ...]
    train: np.ndarray
    heldout: np.ndarray
    optimizer: build.Config
    plan: Plan
    every: int
    work: pathlib.Path
    splitting: Splitting | None = None

    @property
    def served(self) -> Any:
        """The rules of the scheme under which trained layers run: the last stage, at its narrowest width."""
        return self.stages[-1].at_width(min(self.widths)) if self.widths else self.stages[-1]

    @property
    def trained(self) -> models.ModelConfig:
        """The config of the trained model, in full precision."""
        return dataclasses.replace(self.config, splitting=self.splitting)

    @property
    def updates(self) -> int:
        """The number of updates in all layers and stages."""
        return self.config.num_layers * len(self.stages) * self.plan.updates


# ------------------------------------------------------------------------------------------------------------- programs


@functools.lru_cache(maxsize=8)
def _layer(config: models.ModelConfig) -> tuple[Any, nnx.State]:
    """(graphdef, the leaves outside the layer) of a one-layer model."""
    graphdef, abstract, _ = models.split(models.abstract_model(config))
    rest = part_of(abstract, lambda path: not path.startswith("stacks."))
    return graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)


def _through(config: models.ModelConfig, params: Any, qweights: Any, stream: Float[Array, "B 2 T D"]) -> jax.Array:
    graphdef, rest = _layer(config)
    model = models.merge(graphdef, united(params, rest), qweights)
    return jnp.stack(model.through(stream[:, 0], stream[:, 1]), axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _run(config: models.ModelConfig, params: Any, stream: jax.Array) -> jax.Array:
    """A batch through a layer, under the config's scheme."""
    return _through(config, params, models.quantize_params(_layer(config)[0], params), stream)


@jax.jit
def _taken(whole: jax.Array, rows: jax.Array) -> jax.Array:
    return whole[rows]


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, rows: jax.Array, first: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, 0)


def _sum(stream: jax.Array) -> jax.Array:
    return stream[:, 0].astype(jnp.float32) + stream[:, 1].astype(jnp.float32)


@jax.jit
def as_stored(params: nnx.State) -> nnx.State:
    """Rounds masters to bfloat16 values, which the folder stores, and keeps their dtype."""
    return jax.tree.map(lambda x: round_to(x, dtype_in(x, jnp.bfloat16)).astype(x.dtype), params)


def relative_error(stream: Float[Array, "B 2 T D"], target: Float[Array, "B 2 T D"]) -> Float[Array, ""]:
    """Computes e = |output - target|^2 / |target|^2 of each token, and returns the mean of e over tokens."""
    ours, theirs = _sum(stream), _sum(target)
    return jnp.mean(jnp.sum((ours - theirs) ** 2, -1) / (jnp.sum(theirs**2, -1) + 1e-12))


_error = jax.jit(relative_error)


@functools.lru_cache(maxsize=32)
def _trainer(
    config: models.ModelConfig, optimizer: build.Config, plan: Plan, every: int, widths: tuple[int, ...]
) -> Trainer:
    def loss(params: Any, qweights: Any, fixed: Any, stream: jax.Array, target: jax.Array) -> jax.Array:
        return relative_error(_through(config, united(params, fixed), qweights, stream), target)

    return Trainer(_layer(config)[0], loss, optimizer, plan, every, widths)


@functools.partial(jax.jit, static_argnums=0)
def _nll(config: models.ModelConfig, norm: Any, head: Any, stream: jax.Array, tokens: jax.Array) -> jax.Array:
    """Summed negative log-likelihood of rows whose streams have left the last layer."""
    last = RMSNorm(config.hidden_size, config=config, stack={})
    last.weight.set_value(norm)
    hidden = last.add(stream[:, 0], stream[:, 1])[0]
    return -token_logprobs(hidden, head, tokens, jnp.ones_like(tokens))[0].sum()


# ---------------------------------------------------------------------------------------------------------------- files


_WRITTEN = 64  # rows that leave the device at once


class Progress:
    """The files of a training in progress, and the record of finished layers.

        progress.json               the finished layers' records; size and CRC-32 of every file that is needed
        00007.weights.safetensors   a finished layer, bfloat16
        00008.trained.safetensors   what flows into the next layer; likewise full and rounded
        00008.stage_1/              checkpoints of the layer that is being trained

    A file is written whole and renamed. It counts once progress.json lists it.

    Raises:
      UserError: a file that progress.json lists is missing or damaged.
    """

    def __init__(self, work: pathlib.Path):
        self.work, self.layers, self.files = work, list[dict[str, Any]](), dict[str, Any]()
        work.mkdir(parents=True, exist_ok=True)
        if (work / "progress.json").is_file():
            try:
                found = on_disk.load_json(work, "progress.json")
                self.layers, self.files = found["layers"], found["files"]
                on_disk.verify(work, self.files)
            except (on_disk.DamagedCheckpointError, KeyError, TypeError) as error:
                raise UserError(f"{work} cannot be gone on with: {error} Start over with --force.") from None

    def path(self, layer: int, kind: str) -> pathlib.Path:
        """Returns the path of a layer's file; kind: "weights", or a stream of `STREAMS`."""
        return self.work / f"{layer:05d}.{kind}.safetensors"

    def finish(self, records: Sequence[dict[str, Any]], layer: int) -> None:
        """Records that all files up to the inputs of `layer` are written, and removes the inputs of earlier layers."""
        self.layers += records
        kept = [self.path(layer, stream) for stream in STREAMS] + [self.path(i, "weights") for i in range(layer)]
        known = {path.name: self.files.get(path.name) or on_disk.fingerprint(path) for path in kept}
        part = self.work / "progress.json.partial"
        on_disk.write(part, json.dumps({"layers": self.layers, "files": known}))
        part.replace(self.work / "progress.json")
        on_disk.sync(self.work)
        self.files = known
        for path in self.work.glob("[0-9]" * 5 + ".*"):
            if path.name not in known:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_rows(path: pathlib.Path, rows: Sequence[int], like: Any, batches: Iterator[np.ndarray]) -> None:
    """Writes a stream: per row a tensor [2, T, D], from batches [B, 2, T, D] in the order of `rows`."""
    shapes = {str(row): (np.dtype(like.dtype), tuple(like.shape)) for row in rows}
    each = (one for batch in batches for one in batch)
    safetensors.write(path, shapes, zip(map(str, rows), each, strict=True))


class Rows:
    """The rows of a stream (layer inputs), read from a file on demand or held in the device's memory."""

    def __init__(self, path: pathlib.Path, held: bool = False):
        file = safetensors.SafetensorsFile(path)
        self.numbers = [int(name) for name in file.entries]
        self.like = file.tensor(str(self.numbers[0]))
        self._read = lambda rows: jnp.asarray(np.stack([file.tensor(str(row)) for row in rows]))
        self.whole = self._read(self.numbers) if held else None

    def __call__(self, rows: Sequence[int]) -> jax.Array:
        """Reads rows by number: [B, 2, T, D]."""
        if self.whole is None:
            return self._read(rows)
        return _taken(self.whole, np.asarray(rows) - self.numbers[0])

    def behind(self, layer: Callable[[jax.Array], jax.Array], batch: int, path: pathlib.Path) -> Rows:
        """Runs all rows through a layer; writes the outputs to a file, or replaces the held rows, and returns them."""
        if self.whole is None:
            made = (np.asarray(layer(self(some))) for some in batches(self.numbers, batch))
            _write_rows(path, self.numbers, self.like, made)
            return Rows(path)
        for some in batches(self.numbers, batch):
            self.whole = _put(self.whole, layer(self(some)), some[0] - self.numbers[0])
        return self

    def save(self, rows: Sequence[int], path: pathlib.Path) -> None:
        """Writes some rows to a file, if rows are held in memory; otherwise they are in a file already."""
        if self.whole is not None:
            parts = (np.asarray(self(some)) for some in batches(rows, _WRITTEN))
            _write_rows(path, rows, self.like, parts)


def batches(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yields the row numbers in batches of `size`."""
    yield from (rows[at : at + size] for at in range(0, len(rows), size))


# ------------------------------------------------------------------------------------------------------------- training


class Blocks:
    """Trains a model's layers one by one, resuming from the files in `Job.work`.

    Args:
      task: counts updates (`progress.Task`).
      say: function that prints a line.
    """

    def __init__(self, job: Job, task: Any, say: Callable[[str], None] = print):
        self.job, self.task, self.say = job, task, say
        self.checkpoint = Checkpoint(job.model, job.config)
        self.progress = Progress(job.work)
        self.every_row = range(len(job.train) + len(job.heldout))
        self.heldout = range(len(job.train), len(self.every_row))
        task.done += len(self.progress.layers) * len(job.stages) * job.plan.updates
        self.streams = dict[str, Rows]()
        self.began, self.before = time.monotonic(), task.done

    def run(self) -> None:
        """Trains every layer that is not finished."""
        if not self.progress.files:
            self._embed()
            self.progress.finish([], 0)
        done, last, records = len(self.progress.layers), self.job.config.num_layers, list[dict[str, Any]]()
        paths = {kind: self.progress.path(done, kind) for kind in STREAMS}
        held = done < last and 8 * paths["full"].stat().st_size < (capacity() or 0)
        self.streams = {kind: Rows(path, held) for kind, path in paths.items()}
        for layer in range(done, last):
            records.append(self._block(layer))
            updates = len(records) * len(self.job.stages) * self.job.plan.updates
            if not held or updates >= self.job.every or layer + 1 == last:
                for kind, rows in self.streams.items():
                    rows.save(self.heldout if layer + 1 == last else rows.numbers, self.progress.path(layer + 1, kind))
                self.progress.finish(records, layer + 1)
                records = []

    def _embed(self) -> None:
        config, tokens = self.job.config, np.concatenate([self.job.train, self.job.heldout])
        table = self.checkpoint.tensor(str(hf_names(config)["embed.kernel"]), (config.vocab_size, config.hidden_size))
        like = jax.ShapeDtypeStruct((2, tokens.shape[1], config.hidden_size), config.compute_dtype)
        for stream in STREAMS:
            rows = self.heldout if stream == "rounded" else self.every_row
            found = (table[tokens[list(some)]].astype(like.dtype) for some in batches(rows, self.job.plan.batch))
            both = (np.stack([rows, np.zeros_like(rows)], axis=1) for rows in found)
            _write_rows(self.progress.path(0, stream), rows, like, both)

    def _send(self, config: models.ModelConfig, params: Any, layer: int, stream: str) -> None:
        """Runs a stream through a layer."""
        through, path = functools.partial(_run, config, params), self.progress.path(layer + 1, stream)
        self.streams[stream] = self.streams[stream].behind(through, self.job.plan.batch, path)

    def _block(self, layer: int) -> dict[str, Any]:
        """Trains a layer and writes its weights and what leaves it; returns its record."""
        job, own = self.job, layer_config(self.job.config, layer)
        params = read_layer(self.checkpoint, job.config, layer)
        self._send(own, params, layer, "full")
        self._send(dataclasses.replace(own, quant=job.served), params, layer, "rounded")
        low, target = self.streams["trained"], self.streams["full"]
        if job.splitting is not None:
            rows = map(low, batches(range(len(job.train)), job.plan.batch))
            params = split(own, params, rows, job.splitting, job.served, layer, job.config.num_layers)
            own = dataclasses.replace(own, splitting=job.splitting)
        configs = [dataclasses.replace(own, quant=rules) for rules in job.stages]
        served = dataclasses.replace(own, quant=job.served)
        fixed, params = (part_of(params, wanted) for wanted in (is_fixed, lambda path: not is_fixed(path)))
        inputs = lambda rows: (fixed, low(rows), target(rows))  # noqa: E731

        def heldout(trainer: Trainer, params: nnx.State) -> float:
            return self._heldout(lambda rows: trainer.measure(params, *inputs(rows)))

        stages = []
        for number, config in enumerate(configs):
            trainer = _trainer(config, job.optimizer, job.plan, job.every, job.widths)
            before = heldout(trainer, params)
            params, _ = trainer.fit(params, inputs, job.work / f"{layer:05d}.stage_{number}", self.task)
            stages.append([before, heldout(trainer, params)])
        params = united(params, fixed)
        tensors = dict(layer_tensors(params, job.trained, layer, jnp.bfloat16))
        shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
        safetensors.write(self.progress.path(layer, "weights"), shapes, tensors.items())
        self._send(served, as_stored(params), layer, "trained")
        record = {"layer": layer, "stages": stages}
        for kind in STREAMS[1:]:
            ours = self.streams[kind]
            record[kind] = self._heldout(lambda rows: _error(ours(rows), target(rows)))  # noqa: B023
        self._tell(record)
        return record

    def _heldout(self, error: Callable[[Sequence[int]], jax.Array]) -> float:
        """The mean of an error over the held-out rows."""
        found = [(len(rows), error(rows)) for rows in batches(self.heldout, self.job.plan.batch)]
        return float(sum(n * float(one) for n, one in found) / len(self.heldout))

    def _tell(self, record: dict[str, Any]) -> None:
        seconds, done = time.monotonic() - self.began, self.task.done - self.before
        left = seconds / done * (self.job.updates - self.task.done) if done else 0.0
        through = ", ".join(f"{before:.5f} -> {after:.5f}" for before, after in record["stages"])
        self.say(
            f"qat block {record['layer'] + 1} of {self.job.config.num_layers}  held out {through};"
            f" rounded {record['rounded']:.5f}  {seconds:.0f} s, {left:.0f} s left"
        )

    def tail(self) -> tuple[jax.Array, jax.Array]:
        """Returns the output head [V, D] in the compute dtype, and the final norm's gains [D] in float32."""
        config, names = self.job.config, hf_names(self.job.config)
        head_name = str(names["embed.kernel" if config.tie_embeddings else "head.kernel"])
        table = self.checkpoint.tensor(head_name, (config.vocab_size, config.hidden_size))
        norm = self.checkpoint.tensor(str(names["norm.weight"]), (config.hidden_size,))
        return jnp.asarray(table, config.compute_dtype), jnp.asarray(norm, jnp.float32)

    def perplexities(self) -> dict[str, float]:
        """Computes held-out perplexities of the full-precision, the trained, and the only rounded model."""
        config = self.job.config
        head, norm = self.tail()
        out = {}
        for stream in STREAMS:
            given, total = self.streams[stream], 0.0
            for some in batches(self.heldout, self.job.plan.batch):
                tokens = jnp.asarray(self.job.heldout[[row - self.heldout.start for row in some]])
                total += float(_nll(config, norm, head, given(some), tokens))
            count = len(self.heldout) * (self.job.heldout.shape[1] - 1)
            out[stream] = float(np.exp(total / count))
        return out

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the trained model's bfloat16 tensors in `checkpoint_order`; only layers differ from the model's."""
        config, dtype = self.job.trained, np.dtype(jnp.bfloat16)
        files = [safetensors.SafetensorsFile(self.progress.path(i, "weights")) for i in range(config.num_layers)]
        trained = {name: file for file in files for name in file.entries}
        for name, (_, shape) in tensor_shapes(config, dtype).items():
            found = trained[name].tensor(name) if name in trained else self.checkpoint.tensor(name, shape)
            yield name, np.asarray(found).astype(dtype_in(found, dtype))
