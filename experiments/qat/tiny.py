# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/tiny.py OUT`: the quickstart's policy trained for two to four bits on its own text."""

import json
import pathlib
import sys

from qarl_jax import qat

STAGES = {
    "w4a16": ["w4a16"],
    "w3a16": ["w3a16"],
    "w2a16": ["w2a16"],
    "w2a16, by w4a16": ["w4a16", "w2a16"],
    "w2a16_asym": ["w2a16_asym"],
    "w2a16_asym, by 8 and 4 bits": ["w8a16_asym", "w4a16_asym", "w2a16_asym"],
}
OPTIMIZER = "{name: adamw, lr: 0.001, weight_decay: 0, schedule: {kind: cosine}}"


def main(out: str) -> None:
    """Trains a folder per entry of `STAGES`, block by block and then end to end; prints perplexities as JSON lines."""
    for number, (name, stages) in enumerate(STAGES.items()):
        folder = pathlib.Path(out, str(number))
        config = folder.with_suffix(".yaml")
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(
            f"out: {folder}\nmodel: {{path: assets/tiny-qwen3}}\ntext: {{rows: 256, row_len: 64, heldout: 64}}\n"
            f"stages: {json.dumps(stages)}\ntrain: {{epochs: 4, batch: 16, optimizer: {OPTIMIZER}}}\n"
            f"distill: {{epochs: 4, batch: 16, optimizer: {OPTIMIZER.replace('0.001', '0.00003')}}}\n"
        )
        if code := qat.main(["--config", str(config)]):
            raise SystemExit(code)
        receipt = json.loads((folder / "qat.json").read_text())
        print(json.dumps({"stages": name, **receipt["perplexity"], "blocks": receipt["blocks"]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
