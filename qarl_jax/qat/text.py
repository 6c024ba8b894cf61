# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens for training and evaluation: documents are concatenated and cut into rows of one length.

Without a data source the text is sampled from the model at temperature 1, as in LLM-QAT (arXiv 2305.17888). This needs
memory for the whole model in the compute dtype.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int

from qarl_jax import data, models
from qarl_jax.data.tokenizer import leading_ids
from qarl_jax.rollout import PolicyWeights, SamplingConfig, make_engine
from qarl_jax.types import Prompt, UserError

_LONGEST = 1 << 20  # tokens of a document


def rows(
    cfg: data.Config | None, model: str, config: models.ModelConfig, *, count: int, heldout: int, length: int, seed: int
) -> tuple[Int[np.ndarray, "R T"], Int[np.ndarray, "H T"]]:
    """Makes rows of tokens for training, and held-out rows.

    Args:
      cfg: the data source, with its held-out share; None: sample text from the model.
      model: the model's folder. config: its config, in full precision.
      count: number of training rows. heldout: number of held-out rows, at most. length: tokens of a row.
      seed: seed of the order of the data, or of the sampled text.

    Raises:
      UserError: the source has too little text.
    """
    tokenizer = data.load_tokenizer(model)
    if cfg is None:
        made = _own_text(tokenizer, model, config, count + heldout, length, seed)
        return made[:count], made[count:]
    cfg = dataclasses.replace(cfg, max_prompt_len=cfg.max_prompt_len or _LONGEST)
    stop = data.stop_token_ids(tokenizer, model)[0]
    train = _cut(_tokens(cfg, tokenizer, "train", stop, seed), count, length)
    if not len(train):
        raise UserError(
            f"the data set is shorter than a row of {length} tokens: lower text.row_len, or name more text."
        )
    if len(train) < count:
        raise UserError(
            f"the data set has text for {len(train)} rows of {length} tokens, and text.rows asks for {count}: lower it,"
            " or name more text."
        )
    held = _cut(_tokens(cfg, tokenizer, "heldout", stop, seed), heldout, length)
    if not len(held):
        raise UserError(
            f"the held-out share of the data set is shorter than a row of {length} tokens: raise data.holdout, name"
            " more text, or lower text.row_len."
        )
    return train, held


def digest(*rows: Int[np.ndarray, "R T"]) -> str:
    """Hashes rows of tokens."""
    return hashlib.sha256(b"".join(each.tobytes() for each in rows)).hexdigest()[:16]


def _tokens(cfg: data.Config, tokenizer: Any, split: Any, stop: int, seed: int) -> Iterator[int]:
    """The tokens of all documents of a split, shuffled by `seed`, each with its answer and an end token."""
    source = data.make_source(cfg, tokenizer, split)
    for index in np.random.default_rng([seed, split == "heldout"]).permutation(len(source)):
        prompt = source.prompt(int(index))
        yield from (*prompt.tokens, *tokenizer.encode(prompt.whole_answer, add_special_tokens=False), stop)


def _cut(tokens: Iterator[int], count: int, length: int) -> np.ndarray:
    taken = np.fromiter(itertools.islice(tokens, count * length), np.int32)
    return taken[: len(taken) // length * length].reshape(-1, length)


def _own_text(
    tokenizer: Any, model: str, config: models.ModelConfig, count: int, length: int, seed: int
) -> Int[np.ndarray, "R T"]:
    """Rows that the model draws from its own distribution, each behind the tokens that begin a text."""
    config = dataclasses.replace(config, param_dtype=config.compute_dtype)
    graphdef, masters = models.load_masters(model, config)
    first = leading_ids(tokenizer) or (int(tokenizer.eos_token_id),)
    engine = make_engine("jax")
    engine.publish(PolicyWeights(graphdef=graphdef, params=masters, qweights=nnx.State({})), 0)
    del masters
    try:
        prompt = Prompt(uid="text", tokens=first, text="", answer="")
        sampling = SamplingConfig(max_response_len=length - len(first))
        (drawn,) = engine.generate([prompt], num_samples=count, sampling=sampling, key=seed)
    finally:
        engine.close()
    return np.array([[*first, *completion.tokens] for completion in drawn], np.int32)
