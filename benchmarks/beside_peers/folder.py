# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the folder of `benchmarks.random_folder` with weights, and adds what TRL and verl read.

    python -m benchmarks.beside_peers.folder OUT --shapes 4b

A prompt is 64 words, a token each, in all three trainers. verl reads prompts from parquet, calls `compute_score`, and
asks the tokenizer for a newline. The chat template adds nothing.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from benchmarks import random_folder, shapes
from benchmarks.beside_peers.lines import PROMPT_LEN

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SCORE = """

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return graded(solution_str, ground_truth, extra_info)
"""


def make(folder: pathlib.Path, name: str) -> None:
    """Makes a folder of the shapes `name`; `train.parquet` comes last."""
    random_folder.make(folder, random_folder.config_of(name), prompt_len=PROMPT_LEN)
    (folder / "reward.py").write_text(random_folder.REWARD + SCORE)
    generation = {"eos_token_id": 1, "pad_token_id": 0, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    _newline(folder / "tokenizer.json")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    _parquet(folder, [json.loads(line)["prompt"] for line in lines])


def _newline(file: pathlib.Path) -> None:
    """Puts a newline in the place of the last word, so that the tokenizer stays as large as the model's vocabulary."""
    from tokenizers import AddedToken, Tokenizer

    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["\n"] = vocabulary.pop(f"w{len(vocabulary) - 1}")
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    tokenizer.save(str(file))


def _parquet(folder: pathlib.Path, prompts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": "parity",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, prompt in enumerate(prompts)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", choices=shapes.SIZES, default="4b")
    args = parser.parse_args(argv)
    make(args.out, args.shapes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
