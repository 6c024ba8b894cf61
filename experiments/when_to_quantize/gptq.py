# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""GPTQ of a bf16 model folder by llm-compressor, in an environment of its own: `pip install llmcompressor`.

    PYTHON gptq.py MODEL OUT GRID RESPONSES.jsonl

GRID is w8a8 (int8 weights per channel, int8 activations per token), w4a16 or w3a16 (groups of 128, symmetric). Head and
embedding stay in bf16, as in QaRL. RESPONSES is what `evaluate --out` wrote for the same model: GPTQ's Hessians come
from the policy's own prompts and responses. OUT is a compressed-tensors folder; three-bit codes are written as four-bit
ones of which not all are used, which is what the project's w3a16 is.
"""

import json
import pathlib
import sys

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SAMPLES, LENGTH = 512, 1024  # of calibration: responses, tokens of each


def grid_of(name: str) -> QuantizationScheme:
    weights = {"num_bits": int(name[1]), "symmetric": True, "strategy": "group", "group_size": 128}
    inputs = None
    if name == "w8a8":
        weights |= {"strategy": "channel", "group_size": None}
        inputs = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)


def calibration(tokenizer, file: str) -> Dataset:
    rows = []
    for line in pathlib.Path(file).read_text().splitlines()[:SAMPLES]:
        record = json.loads(line)
        ids = tokenizer(record["prompt"] + record["responses"][0]["text"], add_special_tokens=False)["input_ids"]
        rows.append({"input_ids": ids[:LENGTH], "attention_mask": [1] * len(ids[:LENGTH])})
    return Dataset.from_list(rows)


def main(model: str, out: str, grid: str, responses: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    data = calibration(tokenizer, responses)
    longest = max(len(row) for row in data["input_ids"])
    recipe = GPTQModifier(config_groups={"group_0": grid_of(grid)}, ignore=["lm_head"])
    oneshot(
        model=policy,
        dataset=data,
        recipe=recipe,
        processor=tokenizer,
        max_seq_length=longest,
        num_calibration_samples=len(data),
        batch_size=1,
    )
    for module in policy.modules():  # codes of three bits, in the four that w3a16 has everywhere
        if grid == "w3a16" and (scheme := getattr(module, "quantization_scheme", None)) is not None:
            scheme.weights.num_bits = 4
    policy.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
