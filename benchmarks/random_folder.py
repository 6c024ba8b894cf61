# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a model folder of Qwen3 shapes with random weights, tokenizer, prompts and reward: all that a run needs.

    python -m benchmarks.random_folder OUT --shapes 4b [--layers 8] [--deviation 0.02] [--seed 0] [--no-weights]

Every matrix is normal, every norm one, in bfloat16. Without weights any model's folder takes seconds and 5 MB: a run
with `model.init=random` draws them on its devices. The vocabulary's words are w3, w4, ...; a prompt is 32 of them. The
reward is one bit of a checksum of the response: half of the responses get it, and nothing can be learned.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import shapes
from qarl_jax import models

PROMPTS = 4000
_MOST_ENDS = 1024  # stop tokens of a request: the bridge's limit
REWARD = """import zlib


def graded(text, answer, meta):
    return float(zlib.crc32(text.encode()) & 1)
"""


def drawn(shape: tuple[int, ...], deviation: float, seed: int, number: int) -> np.ndarray:
    """Draws tensor `number` of a model in bfloat16: ones for a vector, else normal."""
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    generator = np.random.Generator(np.random.Philox(key=[seed, number]))
    values = generator.standard_normal(shape, np.float32) * np.float32(deviation)
    bits = values.view(np.uint32)  # rounded to nearest even by hand: ml_dtypes' own cast takes as long as the draw
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


def config_of(name: str, layers: int = 0) -> models.ModelConfig:
    """Returns the ModelConfig of a key of `shapes.SIZES`. layers: number of layers; 0: the model's own."""
    return shapes.model_config(shapes.Setting(model=name, scheme="bf16", layers=layers))


def make(
    folder: pathlib.Path,
    config: models.ModelConfig,
    deviation: float = 0.02,
    seed: int = 0,
    *,
    weights: bool = True,
    mean_len: int = 0,
    prompt_len: int = 32,
) -> None:
    """Writes the folder; config.json comes last.

    prompt_len: words of a prompt, a token each.
    mean_len: of responses, a geometric distribution: so many tokens of the vocabulary, evenly spaced, end one that a
    random model hits one in `mean_len` times. 0: a response ends with <eos> alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        _weights(folder, config, deviation, seed)
    words = ["<pad>", "<eos>", "<unk>"] + [f"w{number}" for number in range(3, config.vocab_size)]
    _tokenizer(folder, words)
    rng = np.random.default_rng(seed)
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(PROMPTS):
            prompt = " ".join(words[i] for i in rng.integers(3, len(words), prompt_len))
            file.write(json.dumps({"prompt": prompt, "answer": str(number)}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    if mean_len:
        ends = list(range(1, config.vocab_size, max(mean_len, -(-config.vocab_size // _MOST_ENDS))))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    values = models.hf_config_json(config) | {"eos_token_id": 1, "bos_token_id": None, "initializer_range": deviation}
    (folder / "config.json").write_text(json.dumps(values))


def _weights(folder: pathlib.Path, config: models.ModelConfig, deviation: float, seed: int) -> None:
    params = models.by_path(models.split(models.abstract_model(config))[1])
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for path, names in models.hf_names(config).items():
        own = tuple(params[path].shape[names.ndim :])
        tensors += [(str(tensor), own) for tensor in names.reshape(-1)]
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor() as threads:
        per_file = 96  # a few GB of an 8B model
        for start in range(0, len(tensors), per_file):
            part = tensors[start : start + per_file]
            made = threads.map(
                lambda item: drawn(item[1][1], deviation, seed, item[0]), enumerate(part, start), timeout=None
            )
            file = f"model-{start // per_file:05d}.safetensors"
            save_file(dict(zip([n for n, _ in part], made, strict=True)), folder / file, metadata={"format": "pt"})
            weight_map |= {n: file for n, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _tokenizer(folder: pathlib.Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    tokenizer = Tokenizer(kinds.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 40960}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", choices=shapes.SIZES, default="4b")
    parser.add_argument("--deviation", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="0: the model's own")
    parser.add_argument("--no-weights", action="store_true", help="for model.init=random")
    args = parser.parse_args(argv)
    make(args.out, config_of(args.shapes, args.layers), args.deviation, args.seed, weights=not args.no_weights)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
