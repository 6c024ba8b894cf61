# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the final answer in a response, in linear time on any text: no regular expression can backtrack."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Extraction = Literal["auto", "whole", "last_line", "last_number", "number", "choice", "tag", "boxed"]

_MINUS = re.compile("[\u2212\u2013]")  # a typographic minus, and an en dash in its place
# Groups of three digits, with commas, LaTeX's {,} and \, or spaces that do not break between them.
_GROUPS = r"(?<!\d)\d{1,3}(?:(?:,|\{,\}|\\[,;! ]|[\u00a0\u2009\u202f])\d{3})+(?!\d)"
_FRACTION = r"\\[dt]?frac *(?:\{ *\d{1,300} *\} *\{ *\d{1,300} *\}|\d\d)"
# Behind a letter, a digit or a closing bracket, a minus is a hyphen or an operator.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+\u2212\u2013]\$?)?"
    rf"(?:(?:\d{{1,20}} ?)?{_FRACTION}|\d{{1,20}} \d+/\d+|(?:{_GROUPS}|\d+)(?:\.\d+)?(?:/\d+)?|\.\d+)"
)
_GROUPED = re.compile(_GROUPS.replace(r"\u00a0", r" \u00a0"))  # in what is one number, any space
_MIXED = re.compile(rf"(\d{{0,300}}) ?({_FRACTION})")
_PLAIN = re.compile(
    r"(?:(\d{1,300}) (?=\d+/))?(\d{0,300})(?:\.(\d{0,300})(?:\\overline\{(\d{1,100})\})?)?(?:/(\d{1,300}))?"
)
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?")
_MEASURED = re.compile(r"([$€£¥]?[-\d.,/{}\\]*\d) ([A-Za-z ]{1,60})")
# Behind a number these words make it another, or leave it open. A single letter is compared with its case: K is a unit.
_OTHER_VALUE = re.compile(
    r"\b(?:and|or|but|to|minus|plus|times|more|less|below|not|negative|wrong|incorrect|false"
    r"|(?:hundred|thousand|(?:m|b|tr|quadr)illion)(?:ths?|s)?|bn|lakhs?|crores?|dozens?|pairs?|[eikxyz]|pi"
    r"|hal(?:f|ves)|quarters?|(?:third|fourth|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie)th)(?:s|$| of)"
    r"|zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|forty|point one"
    r"|(?:thir|four|fif|six|seven|eigh|nine)(?:teen|ty)|factorial|doubled|tripled|halved)\b"
    r"|^(?:squared|cubed)\b"  # "3 metres squared" is a unit
)
_AROUND = [("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ('"', '"'), ("'", "'"), ("`", "`"), ("“", "”"), ("‘", "’")]
_AROUND += [("**", "**"), ("*", "*"), ("__", "__"), ("_", "_")]
STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox) ?\{([^{}]*)\}")
# A small letter counts in brackets or at a line's end: "the answer is a bit ..." names no choice.
_LETTER = r"(?:\(?([A-Z])\b|\(([a-j])\)|([a-j])(?=[.* ]*$))"
_IS_LETTER = re.compile(rf"(?i:answer is):? ?\**{_LETTER}", re.MULTILINE)
_ANSWER_LETTER = re.compile(rf"(?i:answer):\s*\**\s*{_LETTER}", re.MULTILINE)
_LONE_LETTER = re.compile(r"\b[A-J]\b")
_ONE_LETTER = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_ANSWER_MARKS = ("####", "answer is", "answer:", "answer**:")


def extract(text: str, how: Extraction = "auto") -> str | None:
    """Finds the final answer in `text`; returns None if there is none.

    Args:
      how: "whole" the text; "last_line" its last non-empty line; "last_number" the last number in it; "number"
        the last number in the last \\boxed{...}, else the first after the last "####" (GSM8K's mark), else the last;
        "choice" the letter of a multiple-choice answer: in the last \\boxed{...}, else in the first "answer is (X)",
        the last "Answer: X" (both as MMLU-Pro), a response of one letter, or the last capital letter from A to J that
        stands alone;
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
        return _last_or_marked_number(text)
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
                return _unbold(rest.splitlines()[0].strip(" :")).strip(" :") or None
    return _unbold(_last_line(text) or "") or None


def _unbold(line: str) -> str:
    """A line without the bold type around it, a half of which may lie before the line."""
    if line.count("**") % 2:
        line = line.removeprefix("**") if line.startswith("**") else line.removesuffix("**")
    if line.startswith("**") and line.removesuffix(".").endswith("**"):
        line = line.removesuffix(".")[2:-2]
    return line.strip()


def _last_line(text: str) -> str | None:
    stripped = text.rstrip()
    return stripped[max(stripped.rfind("\n"), stripped.rfind("\r")) + 1 :].strip() or None


def _last_or_marked_number(text: str) -> str | None:
    if boxed := _boxed(text):
        if number(boxed) is not None:
            return boxed
        if found := _number(_UNIT.sub(" ", boxed), -1) or _number(boxed, -1):
            return found
    _, mark, marked = text.rpartition("####")
    if mark:
        line = (marked.strip().splitlines() or [""])[0].rstrip(" .")
        if found := line if number(line) is not None else _number(marked, 0):
            return found
    return _number(text, -1)


def _number(text: str, which: int) -> str | None:
    found = _NUMBER.findall(text[-10_000:])
    return found[which] if found else None


def _letter(text: str) -> str | None:
    boxed = _boxed(text)
    if boxed is not None:
        words = re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", " ", boxed))
        letters = [word for word in words if len(word) == 1 and word.isupper()]
        if len(set(letters)) > 1 and all(word in (*letters, "and", "or") for word in words):
            return None  # two choices are none
        if not letters and len(words) == 1 and len(words[0]) == 1:
            return words[0].upper()
        return letters[0] if letters else None
    for said in (_IS_LETTER.search(text), *list(_ANSWER_LETTER.finditer(text))[-1:], _ONE_LETTER.fullmatch(text)):
        if said:
            return next(filter(None, said.groups())).upper()
    lone = _LONE_LETTER.findall(text)
    return lone[-1] if lone else None


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() or None if start >= 0 else None


def _boxed(text: str) -> str | None:
    begin = max((match.end() for match in re.finditer(r"\\f?box(?:ed)? ?\{", text)), default=0)
    if not begin:
        return None
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
    """Parses a number as people write it to its exact value; None if `text` is no number.

    Examples: "1,234.50", "1{,}234", "-3/4", "2 1/2", "\\frac{1}{2}", "0.\\overline{3}", "$5", "12%" as 12. No
    exponents and at most 300 digits: 1e999999999 would be a denial of service.
    """
    if len(text) > 1000:
        return None
    cleaned = _MINUS.sub("-", text).replace("\\$", "$").replace("\\%", "%").strip("$€£¥% ")
    is_negative, cleaned = cleaned.startswith("-"), cleaned[cleaned.startswith(("-", "+")) :].lstrip("$€£¥ ")
    cleaned = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), cleaned)
    if not cleaned.isascii():
        return None
    repeated = None
    if mixed := _MIXED.fullmatch(cleaned):
        whole, decimals = mixed[1], ""
        digits, under = re.findall(r"\d+" if "{" in mixed[2] else r"\d", mixed[2])
    elif plain := _PLAIN.fullmatch(cleaned):
        whole, digits, decimals, repeated, under = plain.groups("")
    else:
        return None
    if not (digits or decimals or repeated) or (under and int(under) == 0):
        return None
    value = Fraction(int((digits or "0") + decimals), 10 ** len(decimals))
    if repeated:
        value += Fraction(int(repeated), 10 ** len(decimals) * (10 ** len(repeated) - 1))
    value = int(whole or "0") + value / int(under or "1")
    return -value if is_negative else value


def normalize(text: str) -> str:
    """Normalizes text: lower case, single spaces, no quotes, bold type or math marks around it, no full stop."""
    return _bare(text).casefold()


def _bare(text: str) -> str:
    """Normalized text in its own case."""
    out = " ".join(text.split())
    for _ in range(8):
        before = out
        out = out.removesuffix(".").rstrip()
        for opening, closing in _AROUND:
            if len(out) > len(opening + closing) and out.startswith(opening) and out.endswith(closing):
                out = out[len(opening) : -len(closing)].strip()
        if styled := STYLED.fullmatch(out):
            out = styled[1].strip()
        if out == before:
            break
    return out


def same(given: str, expected: str) -> bool:
    """Tells whether two answers are equal as numbers, or else as normalized text.

    For an expected number, the given answer may have a unit: "18 apples", "18 km per hour" for 18. Words that make it
    another number are no unit: "2 thirds", "3 squared", "4 point five", "5 pairs", "7 wrong".
    """
    left, right = normalize(given), normalize(expected)
    if left == right:
        return True
    a, b = number(left), number(right)
    if a is None and b is not None and (measured := _MEASURED.fullmatch(_bare(given))):
        a = number(measured[1]) if len(measured[2].split()) <= 4 and not _makes_another(measured[2]) else None
    return a is not None and a == b


def is_other_number(given: str) -> bool:
    """Tells whether the words behind a number make it another: "2 thirds", "3 squared", "5 pairs", "7 wrong"."""
    measured = _MEASURED.fullmatch(_bare(given))
    return measured is not None and _makes_another(measured[2])


def _makes_another(words: str) -> bool:
    """Tells whether words behind a number make it another."""
    return bool(_OTHER_VALUE.search(" ".join(word if len(word) == 1 else word.lower() for word in words.split())))
