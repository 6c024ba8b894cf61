# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K responses under lm-eval's rules beside ours, and every response on which they differ.

    python experiments/qwen25_coder/beside_lm_eval.py RUN/suite.gsm8k.jsonl

The file is what `python -m qarl_jax.evaluate --suite gsm8k --out FILE` writes. The rules are lm-eval's own code with
the settings of its gsm8k.yaml. The strict filter takes the first "####", the flexible one the last number, and some
texts end a response (`until`). Needs lm_eval (0.4.13 was used) in an environment of its own.
"""

from __future__ import annotations

import json
import pathlib
import sys

import lm_eval
import yaml
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

TASK = pathlib.Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"


def main(file: str) -> None:
    task = yaml.safe_load(TASK.read_text())
    metric = {key: value for key, value in task["metric_list"][0].items() if key.startswith(("ignore", "regexes"))}
    filters = {
        entry["name"]: RegexFilter(**{key: value for key, value in entry["filter"][0].items() if key != "function"})
        for entry in task["filter_list"]
    }
    records = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]
    responses = [(record, response) for record in records for response in record["responses"]]
    rights: dict[str, list[bool]] = {"ours": [response["correct"] for _, response in responses]}
    found: dict[str, list[str]] = {}
    for name, rule in filters.items():
        texts = []
        for _, response in responses:
            ends = [response["text"].find(end) for end in task["generation_kwargs"]["until"]]
            texts.append(response["text"][: min([end for end in ends if end >= 0], default=None)])
        found[name] = [each[0] for each in rule.apply([[text] for text in texts], [])]
        rights[name] = [
            bool(exact_match_hf_evaluate([answer], [str(record["answer"])], **metric)["exact_match"])
            for answer, (record, _) in zip(found[name], responses, strict=True)
        ]
    for name, right in rights.items():
        equal = sum(a == b for a, b in zip(right, rights["ours"], strict=True))
        print(f"{name:<18}{sum(right):>5} of {len(right)} right; as ours: {equal}")
    for index, (record, response) in enumerate(responses):
        if rights["flexible-extract"][index] != rights["ours"][index]:
            print(
                f"\n{record['uid']}: {record['answer']}; ours {response['answer']} ({response['finish_reason']}),",
                end="",
            )
            print(f" flexible {found['flexible-extract'][index]}\n  ... {response['text'][-200:]!r}")


if __name__ == "__main__":
    main(sys.argv[1])
