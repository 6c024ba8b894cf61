# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A calculator as a tool: computes the last expression between tags in a turn. A turn without one is the answer.

An expression has numbers, + - * / // % **, signs and brackets; anything else gives "error: not an expression".
"""

import ast
import operator
from typing import Any

_TWO: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ONE: dict[type, Any] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_LONGEST = 200  # characters of an expression
_LARGEST = 10**30  # of a number on the way, and 64 the largest exponent: nothing takes noticeable time


class Environment:
    """Computes a turn's expression; `rollout/environments/__init__.py` defines the interface of an environment.

    Args:
      opening, closing: the tags around an expression.
    """

    def __init__(self, opening, closing):
        self.opening, self.closing = opening, closing

    async def reset(self, task):
        return ""

    async def step(self, text):
        _, found, after = text.rpartition(self.opening)
        expression, ended, _ = after.partition(self.closing)
        if not found or not ended:
            return "", 0.0, True
        return compute(expression), 0.0, False


def compute(expression):
    """Evaluates arithmetic and returns the value as text, or "error: ...". Example: compute("12 * 3.5") = "42"."""
    try:
        if len(expression) > _LONGEST:
            raise ValueError("too long")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return str(value)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return "error: not an expression"


def _value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("exponent")
        return _bounded(_TWO[type(node.op)](left, right))
    raise ValueError("not arithmetic")


def _bounded(value):
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("too large")
    return value
