# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/answers.py OUT.jsonl CONFIG [section.field=value ...]`: a policy's own answers, for `qat`.

The answers are those of a first step of RL under the config: sampled from training prompts, and complete. A row has a
question as `prompt`, a response as `answer`. So `data.template=chat` with the config's system prompt gives RL's tokens.
"""

import json
import pathlib
import sys

import qarl_jax


def main(out: str, path: str, *overrides: str) -> None:
    """Writes the file of answers."""
    with qarl_jax.load(path, *overrides) as session:
        groups = session.sample()
    rows = [
        {"prompt": group.prompt.meta["question"], "answer": text}
        for group in groups
        for text, completion in zip(group.texts, group.completions, strict=True)
        if completion.finish_reason == "stop"
    ]
    pathlib.Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
