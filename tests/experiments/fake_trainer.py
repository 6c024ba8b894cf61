# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stands in for `python` in the runner's tests: three steps of training per start, and tests of what has ended.

A run ends with the text in the file `last_words` of its folder, where there is one, as an error.
"""

import json
import pathlib
import sys


def train(words):
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    folder, steps = pathlib.Path(settings["run_dir"]), int(settings["train.steps"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts").open("a") as file:
        file.write("x")
    words = folder / "last_words"
    if words.exists():
        sys.exit(words.read_text())
    metrics = folder / "metrics.jsonl"
    at = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    with metrics.open("a") as file:
        for step in range(at, min(at + 3, steps)):
            file.write(json.dumps({"step": step, "reward/mean": 0.5}) + "\n")
            at = step + 1
    (folder / "eval.jsonl").write_text(json.dumps({"version": at, "eval/reward/mean": 0.5}) + "\n")
    step = folder / "checkpoints" / f"step_{at:08d}"
    step.mkdir(parents=True, exist_ok=True)
    (step / "manifest.json").write_text("{}")


def assess(words):
    words = words[: words.index("--set")]
    if "--base" in words:
        work = pathlib.Path(words[words.index("--work") + 1])
        (work / "base_test.json").write_text('{"fake": true, "response_len": 19.0}')
    for word in words:
        if any((pathlib.Path(word) / file).exists() for file in ("done.json", "failed.json")):
            (pathlib.Path(word) / "test.json").write_text('{"fake": true}')


train(sys.argv[3:]) if sys.argv[2] == "qarl_jax.train" else assess(sys.argv[3:])
