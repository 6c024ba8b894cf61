# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: read from a Hugging Face folder, or made from an alphabet for models trained from scratch.

A character tokenizer is a Hugging Face fast tokenizer (tokenizer.json and tokenizer_config.json) with one token per
character of its alphabet. So this project, transformers and vLLM all read its folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from qarl_jax.types import AbsentError, UserError, check_model_folder

# The learner needs no torch, and transformers advises whoever lacks it at import.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"

Tokenizer = Any  # transformers.PreTrainedTokenizerBase; named here so that nothing imports transformers for a type


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model folder (a local path; nothing is downloaded).

    A folder with a tokenizer.json is read by the fast tokenizer class itself. `AutoTokenizer` would give equal
    tokens, but takes seconds to import torch where torch is installed. It is the fallback for folders that have only a
    sentencepiece model.

    Raises:
      AbsentError: no folder, or no tokenizer in it.
      UserError: files that transformers cannot read.
    """
    folder = os.fspath(path)
    check_model_folder(folder)
    names = set(os.listdir(folder))
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}:
        raise AbsentError(
            f"{folder}: no tokenizer here (neither tokenizer.json nor tokenizer.model)",
            "copy the tokenizer files of the model into this folder.",
        )
    try:
        if "tokenizer.json" in names:
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise bare Exceptions for a broken file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{folder}: cannot read the tokenizer: {reason}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{folder}: the tokenizer has no eos_token, so no response could ever end", "set it in its config."
        )
    tokenizer.ends = stop_token_ids(tokenizer, folder)
    return tokenizer


def stop_token_ids(tokenizer: Tokenizer, path: str | os.PathLike[str] | None = None) -> tuple[int, ...]:
    """Returns the ids that end a response: the tokenizer's eos token and those of generation_config.json in `path`.

    Raises:
      UserError: generation_config.json cannot be read, or its eos_token_id is no number or list of numbers.
    """
    ids = [int(tokenizer.eos_token_id)]
    file = os.path.join(os.fspath(path), "generation_config.json") if path is not None else ""
    if file and os.path.isfile(file):
        try:
            with open(file, encoding="utf-8") as handle:
                listed = json.load(handle).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file}: not a valid generation config: {error}") from None
        for token in listed if isinstance(listed, list) else [listed]:
            if token is None or token in ids:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise UserError(f"{file}: eos_token_id is {listed!r}, where a token's number or a list is expected.")
            ids.append(token)
    return tuple(ids)


def leading_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids that the tokenizer puts in front of every text: the beginning-of-sequence token, or none."""
    bare, whole = (list(tokenizer("1", add_special_tokens=added)["input_ids"]) for added in (False, True))
    starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return tuple(whole[: next(starts, 0)])


def ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of the stop tokens that `load_tokenizer` stored; for another tokenizer, its eos token."""
    return getattr(tokenizer, "ends", None) or (int(tokenizer.eos_token_id),)


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Decodes a response for rewards, environments and records, without padding and the stop tokens at its end.

    Other special tokens stay in the text: a tokenizer may declare tags such as <think> or <tool_call> special.
    """
    kept = [token for token in tokens if token != tokenizer.pad_token_id]
    while kept and kept[-1] in ends(tokenizer):
        kept.pop()
    return tokenizer.decode(kept, clean_up_tokenization_spaces=False)


_LONGEST = 8  # tokens waited for; a character has at most four bytes, garbage never becomes one


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token of a response, special tokens included; joined they are the whole text.

    A character of several tokens is the text of its last token; its other tokens are "". An incomplete character (a
    response was cut in the middle of one) is "\ufffd".
    """

    def text(start: int, end: int) -> str:
        return tokenizer.decode(list(tokens[start:end]), clean_up_tokenization_spaces=False)

    out: list[str] = []
    # Decoded together with what came before it, a token keeps its leading space. [start, done): that context.
    start = done = 0
    for end in range(1, len(tokens) + 1):
        before, after = text(start, done), text(start, end)
        if after.endswith("\ufffd") and end < len(tokens) and end - done < _LONGEST:
            out.append("")
            continue
        out.append(after[len(before) :])
        start, done = done, end
    return out


def make_char_tokenizer(
    alphabet: str, path: str | os.PathLike[str], *, chat_template: str | None = None, extra_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Writes a character-level tokenizer folder and returns the tokenizer.

    Ids: 0 padding, 1 end of sequence, 2 unknown, then `extra_tokens`, then the characters in the order given.
    Example: make_char_tokenizer("0123456789+=", "/tmp/tok") encodes "1+2=" as [4, 13, 5, 14].

    Args:
      alphabet: the characters, each once; anything else becomes the unknown token (prompts holding it are refused).
      path: the folder to write; created if needed, other files in it are kept.
      chat_template: optional Jinja chat template.
      extra_tokens: further special tokens, for example ("<think>", "</think>").

    Raises:
      UserError: an empty alphabet or a character given twice, or a folder that cannot be written.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise UserError("a character tokenizer needs at least one character in its alphabet.")
    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if twice:
        raise UserError(f"the alphabet of a character tokenizer repeats {twice}; give each character once.")
    words = [PAD, EOS, UNKNOWN, *extra_tokens, *alphabet]
    if len(set(words)) != len(words):
        raise UserError(f"extra_tokens {tuple(extra_tokens)} repeat one another or {PAD}, {EOS}, {UNKNOWN}.")
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(extra_tokens),
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    folder = os.fspath(path)
    try:
        os.makedirs(folder, exist_ok=True)
        tokenizer.save_pretrained(folder)
        _name_class(os.path.join(folder, "tokenizer_config.json"))
    except OSError as error:
        raise UserError(f"{folder}: cannot write the tokenizer: {error.strerror or error}.") from None
    return tokenizer


def _name_class(file: str) -> None:
    """Names the class by the name every transformers since 4.x knows; 5.x writes one that older readers lack."""
    with open(file, encoding="utf-8") as handle:
        config = json.load(handle)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    with open(file, "w", encoding="utf-8") as handle:
        json.dump(config, handle, indent=2, ensure_ascii=False)
        handle.write("\n")
