# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Code blocks of a response: CommonMark's, and those that models write beside its rules."""

import time

import pytest

from qarl_jax.rewards import fences

BODY = "def f(x):\n    return x\n"


def indented(text, by):
    return "".join(" " * by + line for line in text.splitlines(True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"```python\n{BODY}```", [("python", BODY)]),
        (f"So:\n```python\n{BODY}", [("python", BODY)]),  # EleutherAI/lm-evaluation-harness#3710
        (f"So:\n```\n{BODY.rstrip()}", [("", BODY.rstrip())]),
        (f"~~~ Py3\n{BODY}~~~~", [("py3", BODY)]),
        (f"````python\n{BODY}```\n````", [("python", f"{BODY}```\n")]),  # a shorter fence ends nothing
        (f"```python\n{BODY}````", [("python", BODY)]),
        (f"```python title='a.py'\n{BODY}```", [("python", BODY)]),
        (f"```{{.python .numberLines}}\n{BODY}```", [("python", BODY)]),
        (f"1. So:\n{indented(f'```python{chr(10)}{BODY}```', 3)}", [("python", BODY)]),
        (f"- So:\n\n{indented(f'```python{chr(10)}{BODY}```', 4)}", [("python", BODY)]),
        (f"> ```python\n> {BODY.strip().replace(chr(10), chr(10) + '> ')}\n> ```", [("python", BODY)]),
        (f"- ```python\n{indented(BODY, 2)}  ```", [("python", BODY)]),
        (f"So:\n\n{indented(f'```python{chr(10)}{BODY}```', 4)}", [("python", BODY)]),
        (
            "```python\n'''\n    ```\n    f(1)\n    ```\n'''\n```",
            [("python", "'''\n    ```\n    f(1)\n    ```\n'''\n")],
        ),
        ("    '''\n    ```\n    f(1)\n    ```\n    '''\n    return x", []),  # a program's lines without a fence
        (f"<answer>\n```python\n{BODY}```\n</answer>", [("python", BODY)]),
        (f"<answer>```python\n{BODY}```</answer>", [("python", BODY)]),
        (f"So: ```python\n{BODY}```", [("python", BODY)]),
        (f"```\na\n```\nthen\n```python\n{BODY}```", [("", "a\n"), ("python", BODY)]),
        (f"```python\r\n{BODY}```\r\n", [("python", BODY)]),
        ("`x` and ```y``` in a line", []),
        ("```\n```", [("", "")]),
        ("", []),
    ],
)
def test_the_blocks_of_a_response(text, expected):
    assert fences.blocks(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "`" * 10**6,
        "```\n" * 10**5,
        "> " * 10**5,
        "- a\n" * 10**5,
        "> " * 20 + "a\n" + "b\n" * 10**5,
        "    ```\n" * 10**5,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_text_is_read_quickly(text):
    start = time.monotonic()
    fences.blocks(text)
    assert time.monotonic() - start < 20  # seconds; what is quadratic takes minutes
