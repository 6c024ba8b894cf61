# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A model folder against transformers, in float32: logits, and the greedy answers to twenty chat prompts.

    python -m benchmarks.converted models/qwen25-coder-0.5b models/smollm2-135m --out converted.jsonl

transformers answers greedily. Then both models read prompts and answers, and every token of an answer has to be the
one that ours thinks likeliest after those before it: then our greedy answer is the same, token for token, since each
of its tokens depends on the ones before alone. Logits are compared at every position of the first prompts. One JSON
line per folder; the exit status is 1 where logits differ by more than 2e-4 of the largest, or one token is another.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from qarl_jax import models

TOLERANCE = 2e-4
AT_ONCE = 4  # rows of a forward, and prompts whose logits are compared
SUBJECTS = ("a prime number", "a binary search", "the sum of a list", "a leap year", "the word 'level'")
QUESTIONS = (
    "What is {}? Answer in one sentence.",
    "Write a Python function about {}.",
    "Explain {} to a child.",
    "Name a mistake that people make with {}.",
)
PROMPTS = tuple(question.format(subject) for question in QUESTIONS for subject in SUBJECTS)


def compare(folder: pathlib.Path, new_tokens: int) -> dict[str, Any]:
    """Numbers of one folder: `logits` (largest difference over the largest logit), `unequal` of `tokens`, `answers`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    asked = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        said = theirs.generate(**asked, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.0)
    ends = set(np.atleast_1d(theirs.generation_config.eos_token_id).tolist())
    sequences, starts = [], []
    width = asked["input_ids"].shape[1]
    for row, mask in zip(said.numpy(), asked["attention_mask"].numpy(), strict=True):
        prompt, answer = row[:width][mask == 1], row[width:]
        end = next((i for i, token in enumerate(answer) if token in ends), len(answer) - 1)
        sequences.append(np.concatenate([prompt, answer[: end + 1]]))
        starts.append(len(prompt))
    # Behind a sequence comes padding, which a causal model does not see.
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids[:AT_ONCE]).long()).logits.numpy()
    del theirs
    gc.collect()

    ours = models.load_hf(folder, dtype="float32")
    forward = nnx.jit(lambda model, tokens: model(tokens))
    found = np.asarray(forward(ours, jnp.asarray(ids[:AT_ONCE])))
    lengths = [len(sequence) for sequence in sequences[:AT_ONCE]]
    pairs = [(found[i, :n], wanted[i, :n]) for i, n in enumerate(lengths)]
    largest = max(float(np.abs(w).max()) for _, w in pairs)
    logits = max(float(np.abs(f - w).max()) for f, w in pairs) / largest
    del found, wanted, pairs
    unequal, equal_answers, tokens = 0, 0, 0
    for first in range(0, len(ids), AT_ONCE):
        likeliest = np.asarray(forward(ours, jnp.asarray(ids[first : first + AT_ONCE])).argmax(-1))
        for row, sequence, start in zip(likeliest, sequences[first:], starts[first:], strict=False):
            wrong = int((row[start - 1 : len(sequence) - 1] != sequence[start:]).sum())
            unequal, equal_answers, tokens = (
                unequal + wrong,
                equal_answers + (not wrong),
                tokens + len(sequence) - start,
            )
    return {
        "folder": folder.name,
        "logits": logits,
        "answers": equal_answers,
        "of": len(PROMPTS),
        "unequal": unequal,
        "tokens": tokens,
        "example": tokenizer.decode(sequences[0][starts[0] :]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--new-tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args(argv)
    results = [compare(folder, args.new_tokens) for folder in args.folders]
    lines = "".join(json.dumps(result) + "\n" for result in results)
    print(lines, end="")
    if args.out is not None:
        args.out.write_text(lines)
    return int(any(result["logits"] > TOLERANCE or result["unequal"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
