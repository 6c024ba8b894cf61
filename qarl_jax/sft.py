# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.sft FILE [section.field=value ...]`: supervised fine-tuning on prompts and answers.

It uses RL's learner, optimizers and low-bit forward pass; the objective is the negative log-likelihood of the answer
tokens. It makes the starting policy of an RL run: from a model folder (`model.path`), or from random weights
(`model.init`, a Hugging Face config) with a character tokenizer (`tokenizer.alphabet`) where nothing can be downloaded.

The result is a Hugging Face folder (config.json, bfloat16 safetensors, tokenizer), or with `lora` a PEFT folder. If
`out` holds the result of an equal resolved config already, nothing is done: `make quickstart` can be repeated.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np

from qarl_jax import data, metrics, models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.learning.lora import Config as LoraConfig
from qarl_jax.learning.trainable import ALL
from qarl_jax.metrics import Mean, Metric, masked_mean
from qarl_jax.models.params import united
from qarl_jax.optim import build, leafwise
from qarl_jax.run import made, on_disk
from qarl_jax.runtime import mesh, progress
from qarl_jax.typed_config import load
from qarl_jax.types import DivergedError, LossInputs, Prompt, TrainBatch, UserError, check_seed, entry_point

RECEIPT = "sft.json"

Answers = Callable[[Sequence[Prompt], np.random.Generator], Sequence[str]]
"""(the prompts of an update, random numbers that follow from seed and update) -> the answers to imitate."""

Example = tuple[np.ndarray, np.ndarray]
"""The token ids of a prompt with its answer, and per token whether it is trained on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model to start from: exactly one of `path` and `init`.

    Attributes:
      path: a Hugging Face model folder, tokenizer included.
      init: a Hugging Face config.json as a mapping; the weights are random (`seed`), vocab_size is the tokenizer's.
      dtype: compute dtype. Masters are float32.
    """

    path: str | None = None
    init: dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A character tokenizer for models from scratch. Attributes: alphabet: its characters, each once."""

    alphabet: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The length of the training and the size of its batches.

    Attributes:
      updates: optimizer updates.
      rows: examples per update.
      row_len: tokens per row (a row holds one example).
      log_every: updates between printed losses.
    """

    updates: int = 100
    rows: int = 128
    row_len: int = 256
    log_every: int = 10

    def __post_init__(self) -> None:
        for field in ("updates", "rows", "row_len", "log_every"):
            if getattr(self, field) < 1:
                raise UserError(f"train.{field} must be at least 1, got {getattr(self, field)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a fine-tuning run.

    Attributes:
      out: folder for the result.
      quant: scheme of the forward pass; "bf16": no quantization.
      lora: adapters that learn on the frozen model of model.path; `out` is then a PEFT folder, for a run's `lora.init`.
    """

    out: str
    data: data.Config
    model: Model = dataclasses.field(default_factory=Model)
    tokenizer: Tokenizer = dataclasses.field(default_factory=Tokenizer)
    quant: str = "bf16"
    lora: LoraConfig | None = None
    train: Train = dataclasses.field(default_factory=Train)
    optimizer: Annotated[Any, load.Variants(build.OPTIMIZERS)] = dataclasses.field(
        default_factory=lambda: build.AdamW(lr=1e-5)
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        self.optimizer.check_masters("optimizer")
        if (self.model.path is None) == (self.model.init is None):
            raise UserError(
                "give exactly one of model.path (a model folder) and model.init (a config for random weights)."
            )
        if (self.model.init is not None) != bool(self.tokenizer.alphabet):
            raise UserError(
                "model.init and tokenizer.alphabet go together; with model.path the folder's tokenizer is used."
            )
        if self.lora is not None and (self.model.path is None or self.lora.train_norms or self.lora.init is not None):
            raise UserError("lora: fresh adapters learn on model.path; leave out model.init, train_norms and init.")
        for number, stage in enumerate(self.data.stages):
            if stage.reach is not None:
                raise UserError(f"data.stages.{number}: sft has no reward to reach; end the stage by `until`.")


@dataclasses.dataclass(frozen=True)
class NegativeLogLikelihood:
    """An objective for `Learner`: the mean negative log-likelihood of the response tokens."""

    denominator: str = "tokens"

    def __call__(self, x: LossInputs) -> tuple[Mean, dict[str, Metric]]:
        mean = masked_mean(-x.logprobs, x.loss_mask)
        return mean, {"loss/nll": mean}


def rows_of(examples: Sequence[Example], row_len: int) -> TrainBatch:
    """Pads each example to one row of a batch of numpy arrays [len(examples), row_len].

    Raises:
      UserError: an example is longer than a row.
    """
    shape = (len(examples), row_len)
    tokens, positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for row, (ids, learned) in enumerate(examples):
        length = len(ids)
        if length > row_len:
            raise UserError(f"an example has {length} tokens, but train.row_len is {row_len}: raise it.")
        tokens[row, :length], mask[row, :length] = ids, learned
        positions[row, :length], segments[row, :length] = np.arange(length), 1
    zeros = np.zeros(shape, np.float32)
    return TrainBatch(
        tokens=tokens,
        positions=positions,
        segment_ids=segments,
        loss_mask=mask,
        rollout_logprobs=zeros,
        advantages=zeros,
    )


def fingerprint(cfg: Config) -> str:
    """Returns a hash of the resolved config; configs of equal hashes make equal models."""
    return made.fingerprint(cfg, absent=["lora"])  # folders made before there were adapters


def example(prompt: Prompt, answer: str, tokenizer: data.Tokenizer, stop: int) -> Example:
    """Tokenizes an answer and puts it behind its prompt.

    Raises:
      UserError: the answer is empty, so that the stop token alone would be learned, or has unknown characters.
    """
    if not answer:
        raise UserError(
            f"prompt {prompt.uid} has no answer to imitate: name the answers' column in data.source.answer_key, or let"
            " the row's conversation end with a message of the assistant."
        )
    said = tokenizer.encode(answer, add_special_tokens=False)
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in said:
        raise UserError(
            f"prompt {prompt.uid}: its answer has characters that the tokenizer does not know; add them to"
            " tokenizer.alphabet, or remove the row."
        )
    ids = np.array([*prompt.tokens, *said, stop], np.int32)
    return ids, np.arange(len(ids)) >= len(prompt.tokens)


def own_answers(prompts: Sequence[Prompt], rng: np.random.Generator) -> list[str]:
    """Returns the prompts' reference answers, as the data has them."""
    del rng
    return [prompt.whole_answer for prompt in prompts]


def run(cfg: Config, answers: Answers = own_answers) -> None:
    """Trains the model and writes it to the folder `cfg.out`."""
    made.check_ours(cfg.out, RECEIPT)
    with on_disk.whole_folder(cfg.out, "out=", replaces=True) as staging:
        _run(cfg, answers, staging)
    print(f"wrote {cfg.out}")


def _run(cfg: Config, answers: Answers, staging: pathlib.Path) -> None:
    # ---- tokenizer and model ----------------------------------------------------------------------------------------
    if cfg.model.init is not None:
        tokenizer = data.make_char_tokenizer(cfg.tokenizer.alphabet, staging)
        stop = int(tokenizer.eos_token_id)
        values = cfg.model.init | {"vocab_size": len(tokenizer), "eos_token_id": stop, "bos_token_id": None}
        model_config = models.read_config(
            values, compute_dtype=cfg.model.dtype, param_dtype="float32", quant=models.parse_rules(cfg.quant)
        )
    else:
        assert cfg.model.path is not None
        tokenizer = data.load_tokenizer(cfg.model.path)
        tokenizer.save_pretrained(staging)
        stop = data.stop_token_ids(tokenizer, cfg.model.path)[0]
        model_config = models.read_config(
            cfg.model.path,
            compute_dtype=cfg.model.dtype,
            param_dtype="float32",
            quant=models.parse_rules(cfg.quant),
            lora=None if cfg.lora is None else cfg.lora.adapters,
        )
        model_config = model_config if cfg.lora is None else model_config.with_ignored

    # ---- data, learner ----------------------------------------------------------------------------------------------
    source = data.make_source(cfg.data, tokenizer, "train")
    stream = data.PromptStream(source, cfg.seed, cfg.train.rows, cfg.data.stages, setting="train.rows")
    own: list[Example] = []
    if answers is own_answers:
        for prompt in map(source.prompt, range(len(source))):  # every mistake is told before the first update
            own.append(example(prompt, prompt.whole_answer, tokenizer, stop))
            rows_of(own[-1:], cfg.train.row_len)
    learner = Learner(
        models.split(models.abstract_model(model_config))[0],
        loss_fn=NegativeLogLikelihood(),
        optimizer=leafwise.Optimizer(cfg.optimizer, cfg.train.updates),
        schedule=build.make_schedule(cfg.optimizer.lr, cfg.optimizer.schedule, cfg.train.updates),
        mesh=mesh.make_mesh(),
        options=Options(max_segments=1, offload=cfg.optimizer.offload is True),
        trainable=ALL if cfg.lora is None else cfg.lora.trainable,
    )
    if cfg.model.path is None:
        params, frozen = models.split(models.random_model(model_config, cfg.seed))[1], None
    else:
        params, frozen = learner.read(models.read_masters, cfg.model.path)
    if cfg.lora is not None:
        params = united(params, models.fresh_adapters(model_config, learner.mesh, cfg.seed))
    state = learner.init(params, frozen)

    # ---- loop -------------------------------------------------------------------------------------------------------
    started, unread = time.monotonic(), list[Any]()
    for update in range(cfg.train.updates):
        if own:
            examples = [own[index] for index in stream.indices(update)]
        else:
            prompts = stream.batch(update)
            texts = answers(prompts, np.random.default_rng([cfg.seed, update]))
            examples = [example(*each, tokenizer, stop) for each in zip(prompts, texts, strict=True)]
        batch = rows_of(examples, cfg.train.row_len)
        qweights = learner.quantize(state.params)
        counts = batch.loss_mask.sum(), len(examples)
        state, measured = learner.update(state, qweights, [learner.put(batch)], [None], *counts)
        unread.append(measured)
        if update % cfg.train.log_every == 0 or update == cfg.train.updates - 1:
            for number, one in enumerate(unread, update + 1 - len(unread)):
                now = metrics.values(one)
                if not np.isfinite(now["loss/nll"]) or now["optim/nonfinite"]:
                    raise DivergedError(f"update {number}: the loss is {now['loss/nll']}; lower optimizer.lr.")
            unread.clear()
            print(f"sft {update:5d}  nll {now['loss/nll']:.4f}  {time.monotonic() - started:.1f} s", flush=True)

    if cfg.lora is not None:
        assert cfg.model.path is not None
        alpha, rslora = cfg.lora.alpha, cfg.lora.rslora
        models.write_peft(staging, model_config, state.params, alpha=alpha, rslora=rslora, base=cfg.model.path)
    else:
        models.save_hf(learner.model(state.params), staging)
    made.write_receipt(staging, RECEIPT, cfg, fingerprint(cfg))


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return made.main("sft", Config, fingerprint, run, __doc__.split("\n")[0], argv)


if __name__ == "__main__":
    jax.config.update("jax_transfer_guard", "allow")
    raise SystemExit(main())
