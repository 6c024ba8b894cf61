# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finding the final answer in a response. Linear time on any text: no regular expression that could backtrack."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Extraction = Literal["auto", "whole", "last_line", "last_number", "number", "choice", "tag", "boxed"]

_NUMBER = re.compile(r"[-+\u2212]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_PLAIN = re.compile(r"([-+]?)(\d{0,300})(?:\.(\d{1,300}))?(?:/(\d{1,300}))?")
_IS_LETTER = re.compile(r"answer is:? ?\**\(?([A-Z])\b", re.IGNORECASE)
_ANSWER_LETTER = re.compile(r"answer:\s*\**\s*\(?([A-Z])\b", re.IGNORECASE)
_LONE_LETTER = re.compile(r"\b[A-J]\b")
_ANSWER_MARKS = ("####", "answer is", "answer:")


def extract(text: str, how: Extraction = "auto") -> str | None:
    """The final answer in `text`, or None.

    Args:
      how: "whole" the text; "last_line" its last non-empty line; "last_number" the last number in it; "number"
        the last number in the last \\boxed{...}, else the first after the last "####" (GSM8K's mark), else the last;
        "choice" the letter of a multiple-choice answer: in the last \\boxed{...}, else MMLU-Pro's order: the first
        "answer is (X)", the last "Answer: X", the last capital letter from A to J that stands alone;
        "tag" what the last <answer>...</answer> holds; "boxed" what the last \\boxed{...} holds; "auto" the first of
        boxed, tag, the rest of the line after "####", "answer is" or "answer:", and the last line that gives something.
        An \\fbox{...} is a \\boxed{...}, as in MATH's own code.
    """
    if how == "whole":
        return text.strip() or None
    if how == "last_line":
        return _last_line(text)
    if how == "last_number":
        return _number(text, -1)
    if how == "number":
        _, mark, marked = text.rpartition("####")
        return _number(_boxed(text) or "", -1) or (_number(marked, 0) if mark else None) or _number(text, -1)
    if how == "choice":
        return _letter(text[-10_000:])
    if how == "tag":
        return _tag(text)
    if how == "boxed":
        return _boxed(text)
    found_answer = _boxed(text) or _tag(text)
    if found_answer:
        return found_answer
    lowered = text.lower()
    if len(lowered) == len(text):  # a few characters change length in lower case
        at, mark = max((lowered.rfind(mark), mark) for mark in _ANSWER_MARKS)
        if at >= 0:
            rest = text[at + len(mark) :].strip()
            if rest:
                return rest.splitlines()[0].strip(" :*") or None
    return _last_line(text)


def _last_line(text: str) -> str | None:
    stripped = text.rstrip()
    return stripped[max(stripped.rfind("\n"), stripped.rfind("\r")) + 1 :].strip() or None


def _number(text: str, which: int) -> str | None:
    found = _NUMBER.findall(text[-10_000:])
    return found[which].rstrip(",") if found else None


def _letter(text: str) -> str | None:
    boxed = _boxed(text)
    if boxed is not None:
        found = re.findall(r"\b[A-Z]\b", boxed)
        return found[0] if found else None
    for said in (_IS_LETTER.search(text), *list(_ANSWER_LETTER.finditer(text))[-1:]):
        if said:
            return said[1].upper()
    lone = _LONE_LETTER.findall(text)
    return lone[-1] if lone else None


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() or None if start >= 0 else None


def _boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for i in range(begin, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[begin:i].strip() or None
    return None


def number(text: str) -> Fraction | None:
    """The exact value of a plain number ("1,234.50", "-3/4", "$5", "12%" as 12), or None.

    No exponents and at most 300 digits: 1e999999999 would be a denial of service.
    """
    cleaned = text.strip().strip("$%").strip().replace(",", "").replace("\u2212", "-")
    match = _PLAIN.fullmatch(cleaned) if len(cleaned) <= 1000 and cleaned.isascii() else None
    if match is None:
        return None
    sign, whole, decimals, under = match.groups()
    if not whole and not decimals:
        return None
    value = Fraction(int((whole or "0") + (decimals or "")), 10 ** len(decimals or ""))
    if under is not None:
        if int(under) == 0:
            return None
        value /= int(under)
    return -value if sign == "-" else value


def normalize(text: str, *, ignore_case: bool = True) -> str:
    """Text for comparison: single spaces, no surrounding $...$ or quotes, no final full stop."""
    out = " ".join(text.split())
    if len(out) >= 2 and out[0] == out[-1] and out[0] in "$\"'`":
        out = out[1:-1].strip()
    out = out.removesuffix(".").rstrip()
    return out.casefold() if ignore_case else out


def same(given: str, expected: str, *, ignore_case: bool = True) -> bool:
    """Whether two answers are equal as numbers, or else as normalised text."""
    left, right = normalize(given, ignore_case=ignore_case), normalize(expected, ignore_case=ignore_case)
    if left == right:
        return True
    a, b = number(left), number(right)
    return a is not None and a == b
