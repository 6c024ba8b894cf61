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
        # Three quotes for a fence, where there is no other.
        (f"So:\n'''python\n{BODY}'''\nIt is x.", [("python", BODY)]),
        (f'"""py\n{BODY}"""', [("python", BODY)]),
        (f"'''Python3\n{BODY}", [("python", BODY)]),
        (f"'''python\n'''\nA text.\n'''\n{BODY}'''", [("python", f"'''\nA text.\n'''\n{BODY}")]),
        (f"'''python\nx\n'''\nthen\n'''python\n{BODY}'''", [("python", "x\n"), ("python", BODY)]),
        (f"```python\n'''python\n{BODY}'''\n```", [("python", f"'''python\n{BODY}'''\n")]),
        # What stands beside a fence, or where one is missing.
        (f"```python\n{BODY}```<|im_end|>", [("python", BODY)]),
        (f"```python\n{BODY}```</s>\n", [("python", BODY)]),
        (f"```python\n{BODY}<|im_end|>", [("python", BODY.rstrip())]),
        (f"```python\n{BODY}``` That's it", [("python", BODY)]),
        (f"```python\n{BODY}```Explanation: it\n\nis x.", [("python", BODY)]),
        (f"```python\n{BODY}```.\n```python\n{BODY}```", [("python", BODY)] * 2),
        (f"- ```python\n{indented(BODY, 2)}  ``` so\n- b", [("python", BODY)]),
        (f"> ```python\n> {BODY.strip().replace(chr(10), chr(10) + '> ')}\n> ```</answer>", [("python", BODY)]),
        (f"```python\n{BODY.rstrip()}```\nThat's it.", [("python", BODY)]),
        (f"```python\n{BODY.rstrip()}```\nRun it:\n```bash\nls\n```", [("python", BODY), ("bash", "ls\n")]),
        (f"So:```\n{BODY}```", [("", BODY)]),
        (f"<answer>~~~python\n{BODY}~~~</answer>", [("python", BODY)]),
        (f"\ufeff```python\n\ufeff{BODY}```", [("python", BODY)]),
        (f"\u200b```python\n{BODY}\u200b```", [("python", BODY)]),
        (f"```python\n{BODY}\n```python\n{BODY}```", [("python", f"{BODY}\n"), ("python", BODY)]),
        (f"```python\n{BODY}```output\n3\n```", [("python", BODY), ("output", "3\n")]),
        (f"````markdown\n```python\n{BODY}```\n````", [("python", BODY)]),
        (f"```markdown\n```python\n{BODY}```\n```", [("markdown", ""), ("python", BODY), ("", "")]),
        (f"```python\n{indented(BODY, 4)}```", [("python", BODY)]),
        ("```python\n'''\n    ```text x\n    ```\n'''\n```", [("python", "'''\n    ```text x\n    ```\n'''\n")]),
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
        "```python\n" * 10**5,
        "<|a|>" * 10**5,
        "```a\n" + "x```\n" * 10**5,
        "````markdown\n" * 10**5,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_text_is_read_quickly(text):
    start = time.monotonic()
    fences.blocks(text)
    assert time.monotonic() - start < 20  # seconds; what is quadratic takes minutes
