# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores conversations by a reward model of transformers: a sequence classification with one label.

A grading process of the trainer runs it in the bridge's Python environment, because the learner never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

Messages = Sequence[dict[str, str]]


class NoRewardModelError(Exception):
    """The error for a folder that is no sequence classification with one label and a chat template."""


def load(path: str, dtype: str, max_len: int) -> Callable[[dict[str, list[Messages]]], list[float]]:
    """Loads a reward model onto the first GPU that the process sees, or the CPU.

    Args:
      dtype: torch's name of the compute dtype, e.g. "bfloat16".
      max_len: limit of a conversation's tokens; a longer one loses its beginning.

    Returns:
      A function that maps {"conversations": [messages, ...]} to a list with a score for each conversation.

    Raises:
      NoRewardModelError: the folder holds no reward model.
    """
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise NoRewardModelError("its tokenizer has no chat template, by which a question and its response are written")
    model, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=getattr(torch, dtype), output_loading_info=True
    )
    if model.config.num_labels != 1:
        raise NoRewardModelError(f"it has {model.config.num_labels} labels, and a reward model has one")
    if told["missing_keys"]:
        raise NoRewardModelError(
            f"it lacks {', '.join(sorted(told['missing_keys']))}: it is no sequence classification"
        )
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def score(task: dict[str, list[Messages]]) -> list[float]:
        texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in task["conversations"]]
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # half of a character is no text
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"][-max_len:] for text in texts]
        return scores(model, rows)

    return score


@torch.inference_mode()
def scores(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    """Computes the reward model's logit of each row of token ids; padding in a batch does not change it."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    if not hasattr(model, "score"):  # an encoder, which reads the mask
        return model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
    # At the last token, not in front of the first padding: padding may be the end token that a text ends in.
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    return model.score(hidden[torch.arange(len(rows)), mask.sum(1) - 1])[:, 0].float().tolist()
