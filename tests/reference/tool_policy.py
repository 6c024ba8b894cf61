# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A small policy that multiplies two numbers badly: now and then it asks a calculator, mostly it guesses.

It is made from random weights by imitation of a teacher, and what it has to learn by RL is to ask:

    prompt 37*48=   asked: [37*48] <eos>   observed: 1776=   answered: 1776 <eos>
                    or guessed: 5203 <eos>
"""

from __future__ import annotations

import json
import pathlib
import warnings

import numpy as np

from qarl_jax import data, models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime import mesh
from qarl_jax.sft import NegativeLogLikelihood, rows_of
from tests.reference import tiny

ALPHABET = "0123456789*=[]"
PROMPT_LEN, ROW_LEN = 6, 24
ASKS = 0.4  # share of the teacher's answers that ask
SLIPS = 0.1  # share of its turns with a digit that is wrong


def slipped(text: str, rng: np.random.Generator) -> str:
    """The text, now and then with another digit in it."""
    at = [i for i, c in enumerate(text) if c.isdigit()]
    if rng.random() >= SLIPS:
        return text
    i = at[rng.integers(len(at))]
    return text[:i] + str(rng.integers(10)) + text[i + 1 :]


def dialogue(rng: np.random.Generator) -> tuple[str, list[tuple[str, bool]]]:
    """(prompt, parts): texts, and whether the policy says them."""
    a, b = rng.integers(10, 100, 2)
    if rng.random() >= ASKS:
        return f"{a}*{b}=", [(str(rng.integers(100, 9802)), True)]
    asked = slipped(f"[{a}*{b}]", rng)
    left, right = asked[1:-1].split("*")
    product = str(int(left) * int(right))
    return f"{a}*{b}=", [(asked, True), (f"{product}=", False), (slipped(product, rng), True)]


def spoken(tokenizer: data.Tokenizer, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """A dialogue's tokens, and which of them the policy says."""
    prompt, parts = dialogue(rng)
    ids, said = list(tokenizer.encode(prompt)), [False] * len(prompt)
    for text, mine in parts:
        part = [*tokenizer.encode(text), *([tokenizer.eos_token_id] if mine else [])]
        ids, said = [*ids, *part], [*said, *[mine] * len(part)]
    return ids, said


def make(folder: pathlib.Path, updates: int = 300) -> pathlib.Path:
    """Trains the policy and writes it as a Hugging Face folder."""
    tokenizer = data.make_char_tokenizer(ALPHABET, folder)
    config = tiny.model_config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, initializer_range=0.05
    )
    graphdef, params, _ = models.split(models.random_model(config, 0))
    chosen = build.Muon(lr=0.02, adamw_lr=0.002)
    learner = Learner(
        graphdef,
        loss_fn=NegativeLogLikelihood(),
        optimizer=leafwise.Optimizer(chosen, updates),
        mesh=mesh.make_mesh(),
        options=Options(),
    )
    state, rng = learner.init(params), np.random.default_rng(0)
    for update in range(updates):
        batch = rows_of([spoken(tokenizer, rng) for _ in range(96)], ROW_LEN)
        counts = batch.loss_mask.sum(), len(batch.tokens)
        state, said = learner.update(state, learner.quantize(state.params), [learner.put(batch)], [None], *counts)
        if update % 100 == 0:
            print(f"imitation {update}: nll {float(said['loss/nll'].value):.3f}", flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models.save_hf(learner.model(state.params), folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"model_type": "qwen3", "eos_token_id": tokenizer.eos_token_id}
    path.write_text(json.dumps(values))
    return folder


def tasks(path: pathlib.Path, count: int = 4000) -> pathlib.Path:
    """{"prompt": "37*48=", "answer": "1776"}, all different."""
    chosen = np.random.default_rng(1).permutation(8100)[:count]
    pairs = [(10 + int(i) // 90, 10 + int(i) % 90) for i in chosen]
    path.write_text("".join(json.dumps({"prompt": f"{a}*{b}=", "answer": str(a * b)}) + "\n" for a, b in pairs))
    return path
