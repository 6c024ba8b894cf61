# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The questions that runs of PLAN_1p5b.md are judged by, in one file that `eval.data` can name.

    make data && python -m experiments.qwen25_coder.questions MODEL OUT.jsonl

First come HELD_OUT different questions of gsm_symbolic, kept from training by a hash of their text. Then come GSM8K's
100, SAMPLES times each, since a file's questions are all asked equally often. `id` tells them apart.
"""

from __future__ import annotations

import json
import pathlib
import sys

from qarl_jax import data
from qarl_jax.data import suites
from qarl_jax.run import config

HELD_OUT, SAMPLES = 2_000, 4
CONFIG = "configs/qwen25_coder_0p5b/qarl_w4a16.yaml"


def held_out(model: str) -> list[dict[str, str]]:
    """Returns different held-out questions of the config's source, which is enlarged so that it has enough of them."""
    cfg = config.load(CONFIG, [f"model.path={model}", f"data.source.size={25 * HELD_OUT}"])
    source = data.make_source(cfg.data, data.load_tokenizer(model), "heldout")
    found = {p.meta["question"]: p.answer for p in (source.prompt(i) for i in range(len(source)))}
    rows = [{"prompt": question, "answer": answer} for question, answer in found.items()][:HELD_OUT]
    assert len(rows) == HELD_OUT, f"{len(rows)} different questions"
    return [row | {"id": f"heldout-{i:04d}"} for i, row in enumerate(rows)]


def gsm8k() -> list[dict[str, str]]:
    """Returns GSM8K's questions, SAMPLES times each."""
    lines = (pathlib.Path(suites.QUESTIONS) / suites.SUITES["gsm8k"].file).read_text().splitlines()
    rows = [{"prompt": row["prompt"], "answer": row["expected"], "id": row["id"]} for row in map(json.loads, lines)]
    return rows * SAMPLES


def main(model: str, out: str) -> None:
    """Writes the file of questions."""
    pathlib.Path(out).write_text("".join(json.dumps(row) + "\n" for row in held_out(model) + gsm8k()))


if __name__ == "__main__":
    main(*sys.argv[1:])
