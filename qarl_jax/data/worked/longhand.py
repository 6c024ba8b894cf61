# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Worked answers written out in full, digit by digit and letter by letter: one to three hundred characters each.

The short traces of `answers.py` make a step of a whole sum. Here a step is what a small model can look up (two digits
and a carry, a letter and a shift), so that a policy of ten million parameters can learn tasks with twenty steps, and
responses get long enough for a sampler and a learner to drift apart. Reasoning-gym families, each with a worked part
and the answer alone in the last line:

    chain_sum        every operation digit by digit from the right, with carry or borrow
    products         long multiplication of two factors, then the sum of the partial products
    caesar_cipher    letter by letter; the prompt must give the rotation (`PROMPT` does)
    letter_counting  word by word: every occurrence marked, and the count so far
    number_sorting   the next number, and those that are left

`PROMPT` is a template for `data.source.question` that writes these questions in a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from qarl_jax.data.worked.mistakes import Slip

_TERM = re.compile(r"([+-]?)\s*(-?\d+)")  # the operation and a number with a sign of its own
_COUNTED = re.compile(r'letter "(.)" appear in the text: "(.*)"\?', re.DOTALL)
_A, _Z = ord("A"), ord("Z")

PROMPT = (
    "{% if meta.source_dataset in ('chain_sum', 'products') %}{{ meta.expression.replace(' ', '') }}="
    "{% elif meta.source_dataset == 'caesar_cipher' %}{{ meta.cipher_text }}<{{ meta.rotation }}:"
    "{% elif meta.source_dataset == 'letter_counting' %}{{ meta.target_letter }}?{{ meta.span | join(' ') }}:"
    "{% elif meta.source_dataset == 'number_sorting' %}{{ '<' if meta.direction == 'ascending' else '>' }}"
    "{{ meta.original_numbers | join(' ') }}:"
    "{% else %}{{ question }}{% endif %}"
)


def chain_sum(question: str, answer: str, slip: Slip) -> str:
    """Left to right. Example: "...: 36 + 47 =" -> "36+47\\n6+7=13\\n3+4+1=8\\n=83\\n83"."""
    terms = _TERM.findall(question.rpartition(":")[2])
    total, lines = int(f"{terms[0][0]}{terms[0][1]}"), []
    for sign, number in terms[1:]:
        step = -int(number) if sign == "-" else int(number)
        lines.append(f"{total}{step:+d}")
        if (total < 0) == (step < 0):
            size = _add(abs(total), abs(step), lines, slip)
            total = -size if step < 0 else size
        else:
            larger, smaller = (total, step) if abs(total) >= abs(step) else (step, total)
            size = _subtract(abs(larger), abs(smaller), lines, slip)
            total = -size if larger < 0 else size
        lines.append(f"={total}")
    return _closed(lines, str(total), question, answer, slip)


def products(question: str, answer: str, slip: Slip) -> str:
    """Long multiplication. Example: "...: 36 * 47." -> "36*7\\n6*7=42\\n3*7+4=25\\n=252\\n36*4\\n...\\n1692"."""
    left, right = (int(x) for x in re.findall(r"\d+", question)[:2])
    lines: list[str] = []
    total = 0
    for place, digit in enumerate(reversed(str(right))):
        lines.append(f"{left}*{digit}")
        partial = _times(left, int(digit), lines, slip) * 10**place
        lines.append(f"={partial}")
        if place:
            lines.append(f"{total}+{partial}")
            total = _add(total, partial, lines, slip)
            lines.append(f"={total}")
        else:
            total = partial
    return _closed(lines, str(total), question, answer, slip)


def caesar_cipher(question: str, answer: str, slip: Slip) -> str:
    """Word by word. Example: "...: MAX FK. ..." -> "MT AH XE=THE\\nFM KR=MR\\nTHE MR"."""
    cipher = question.partition(": ")[2].partition(". ")[0].split()
    lines, words = [], []
    for hidden, clear in zip(cipher, answer.split(), strict=True):
        letters = [slip.letter(x).upper() if _A <= ord(x) <= _Z else x for x in clear]
        words.append("".join(letters))
        lines.append(f"{' '.join(a + b for a, b in zip(hidden, letters, strict=True))}={words[-1]}")
    return _closed(lines, " ".join(words), question, answer, slip)


def letter_counting(question: str, answer: str, slip: Slip) -> str:
    """Word by word. Example: '... letter "h" ...: "the hat"?' -> "th*e 1\\nh*at 2\\n2"."""
    found = _COUNTED.search(question)
    if found is None:
        raise ValueError(f"not a question of letter_counting: {question!r}")
    target, text = found.groups()
    lines, total = [], 0
    for word in text.split():
        marked = "".join(f"{x}*" if x.lower() == target.lower() else x for x in word)
        total = slip.number(total + marked.count("*"), least=0)
        lines.append(f"{marked} {total}")
    return _closed(lines, str(total), question, answer, slip)


def number_sorting(question: str, answer: str, slip: Slip) -> str:
    """The next one and what is left. Example: "... ascending order: 7.0, 5.0" -> "5.0|7.0\\n7.0|\\n['5.0', '7.0']"."""
    heading, _, numbers = question.partition("order: ")
    left = sorted(numbers.splitlines()[0].split(", "), key=float, reverse="descending" in heading)
    asked = numbers.splitlines()[0].split(", ")
    lines, out = [], []
    while left:
        chosen = slip.choice(left[0], [x for x in left if float(x) != float(left[0])])
        for remaining in (left, asked):
            remaining.remove(chosen)
        out.append(chosen)
        lines.append(f"{chosen}|{' '.join(asked)}")
    expected = str([str(x) for x in ast.literal_eval(answer)])
    return _closed(lines, str(out), question, expected, slip)


def _closed(lines: list[str], result: str, question: str, answer: str, slip: Slip) -> str:
    if result != answer and not slip.made:
        raise ValueError(f"the trace of {question!r} gives {result}, the task says {answer}")
    return "\n".join([*lines, result])


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of digits from the right, the shorter number filled up with zeros."""
    width = max(len(str(a)), len(str(b)))
    return [(int(x), int(y)) for x, y in zip(f"{a:0{width}d}"[::-1], f"{b:0{width}d}"[::-1], strict=True)]


def _add(a: int, b: int, lines: list[str], slip: Slip) -> int:
    """a + b for a, b >= 0, a line per digit: "6+7=13", and with a carry "3+4+1=8"."""
    total, carry, place = 0, 0, 1
    for x, y in _digits(a, b):
        value = slip.number(x + y + carry, least=0)
        lines.append(f"{x}+{y}{'+1' if carry else ''}={value}")
        carry, digit = min(value // 10, 1), value % 10
        total, place = total + digit * place, place * 10
    return total + carry * place


def _subtract(a: int, b: int, lines: list[str], slip: Slip) -> int:
    """a - b for a >= b >= 0, a line per digit: "7-1=6", and with a borrow "16-7=9" or "6-1-1=4"."""
    total, borrow, place = 0, 0, 1
    for x, y in _digits(a, b):
        owed = y + borrow
        digit = slip.digit((x - owed) % 10)
        lines.append(f"{x + 10 if x < owed else x}-{y}{'-1' if borrow else ''}={digit}")
        borrow = int(x < owed)
        total, place = total + digit * place, place * 10
    return total


def _times(a: int, digit: int, lines: list[str], slip: Slip) -> int:
    """a x digit for a >= 0, a line per digit of a: "6*7=42", and with a carry "3*7+4=25"."""
    total, carry, place = 0, 0, 1
    for x in (int(x) for x in reversed(str(a))):
        value = slip.number(x * digit + carry, least=0)
        lines.append(f"{x}*{digit}{f'+{carry}' if carry else ''}={value}")
        carry, total, place = value // 10, total + value % 10 * place, place * 10
    return total + carry * place


# reasoning-gym data set -> tracer.
TRACES: dict[str, Callable[[str, str, Slip], str]] = {
    "chain_sum": chain_sum,
    "products": products,
    "caesar_cipher": caesar_cipher,
    "letter_counting": letter_counting,
    "number_sorting": number_sorting,
}
