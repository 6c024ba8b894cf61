# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward functions, good and bad. They are imported by worker processes: nothing heavy here."""

import os
import sys
import time
from typing import Any


def nothing(text: str, answer: str, meta: dict[str, Any]) -> float:
    """A reward that is always 0."""
    return 0.0


def digit_share(text: str, answer: str, meta: dict[str, Any]) -> float:
    """A reward that a random policy already varies in: the share of digits in the response."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def equal(text: str, answer: str, meta: dict[str, Any], bonus: float = 0.0) -> float:
    """Whether text and answer are equal, and what options and prompt add."""
    return (text == answer) + bonus + meta.get("extra", 0.0)


def bad(text: str, answer: str, meta: dict[str, Any]) -> Any:
    """Does what the response says, where that is a misdeed; else 1."""
    if text == "raise":
        raise KeyError("oops")
    if text == "exit":
        sys.exit(0)
    if text == "_exit":
        os._exit(0)
    if text == "hang":
        time.sleep(1000)
    if text == "read":
        return len(sys.stdin.read())
    if text.startswith("fork "):  # a copy that does not end, in a session of its own, and one that comes back
        if not (child := os.fork()):
            os.setsid()
            time.sleep(1000)
        with open(text.removeprefix("fork "), "a") as file:
            file.write(f"{child}\n")
        os.fork()
    return {
        "1e300": 1e300,
        "inf": float("inf"),
        "nan": float("nan"),
        "text": "many",
        "none": None,
        "list": [1.0],
    }.get(text, 1.0)
