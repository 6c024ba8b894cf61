# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward 1 if the program in a response passes the problem's tests, else 0. Linux on x86-64 only.

The program is the last fenced block that defines the function asked for, else the last one labelled as Python, else the
last without a label, else the last (`fences.py`). It may use what the other blocks define. A response without a block
is the program, or continues the prompt's code. The program runs in a sandbox (`_sandbox.py`), apart from the process
that runs the tests; it has Python's standard library and numpy. The prompt's row has the tests, in one of the layouts
below. Under the last two a program may leave out the imports that the judges of these data sets supply (`SUPPLIED`).
Its function may then be a method of `class Solution`.

    HumanEval       columns prompt, entry_point and test, which defines check(candidate) (arXiv 2107.03374)
    LiveCodeBench   columns public_test_cases, private_test_cases, metadata (arXiv 2403.07974)
    APPS            column input_output: {"inputs": [...], "outputs": [...], "fn_name": optional} (arXiv 2105.09938)
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import pickle
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards import fences
from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.types import UserError

MAX_CHARS = 50_000  # of a program
# LiveCodeBench's judge begins a program with all names of these modules, and APPS' with a part of them and with numpy.
# What Python has built in comes behind those that hide it, such as math's pow.
_MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys"
SUPPLIED = "".join(f"import {m}\nfrom {m} import *\n" for m in [*_MODULES.split(), "json", "builtins", "typing"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PoolConfig):
    """Settings of the code reward, besides those of `PoolConfig`.

    Attributes:
      timeout_s: seconds that all tests of a response may take together.
      memory_mb: address space in MiB of the grading process, and of a program's process (at most 1024 there).
    """

    timeout_s: float = 10.0


class Reward(BaseReward):
    """Grades the program in a response by the problem's tests: 1 or 0."""

    pool: WorkerPool

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        self.pool = WorkerPool("code", cfg, setup=str(min(cfg.memory_mb or 1024, 1024)))
        self.pool.start()

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        """Grades samples. Raises `UserError` for a prompt whose row has no tests."""
        out = np.zeros(len(samples), np.float32)
        tasks = [task(sample.text, sample.prompt.meta, sample.prompt.uid) for sample in samples]
        asked = [i for i, each in enumerate(tasks) if len(each["program"]) <= MAX_CHARS]
        for i, value in zip(asked, self.pool.map([tasks[i] for i in asked]), strict=True):
            out[i] = value or 0.0
        return out


def program(text: str, name: str, before: str = "") -> tuple[str, list[str]]:
    """Extracts the program of a response, and the other code blocks, whose definitions the program may use.

    Args:
      text: the response. name: the function it should define; empty: any program.
      before: code at the prompt's end, which a response without a fenced block continues.
    """
    blocks, is_head = fences.blocks(text), _definition(name)
    if not blocks:
        alone = _without_prose(fences.without_stop_tokens(text))
        return (alone if name and is_head.search(alone) else before + _body(alone, before)), []
    defining = [i for i, (_, block) in enumerate(blocks) if name and is_head.search(block)]
    labelled = [i for i, (language, _) in enumerate(blocks) if language in fences.PYTHON]
    unlabelled = [i for i, (language, _) in enumerate(blocks) if not language]
    last = (defining or labelled or unlabelled or [len(blocks) - 1])[-1]
    beside = [blocks[i][1] for i in sorted({*labelled, *unlabelled} - {last})]
    if before and name and not defining:  # a body without its head: it belongs under the prompt's
        return before + _body(blocks[last][1], before), beside
    return blocks[last][1], beside


def _definition(name: str) -> re.Pattern[str]:
    """Matches where `name` is defined: as a function, a class or a value, or by an import."""
    name = re.escape(name)
    assigned = rf"{name}[ \t]*(?::[^=\n]+)?=(?!=)(?![ \t]*(?:await )?{name}\b)"
    imported = rf"from [\w.]+ import [^\n]*\b{name}\b"
    return re.compile(rf"^[ \t]*(?:(?:(?:async )?def|class) {name}\b|{assigned}|{imported})", re.MULTILINE)


# A sentence or an item of a list at the beginning of a line, but no assignment.
_PROSE = re.compile(r"(?:[A-Z][a-z'\u2019]*(?:[,.!?](?=\s|$)|:?\s|:$)|[*>]|[-+] |\d+[.)]\s)(?!.*=)")


# "<answer>" and the like before or behind code, or "[PYTHON]" on a line of its own.
_TAG = re.compile(r"^(?:</?\w+>)+|(?:</\w+>)+\s*$|^\[/?[A-Z]+\]\s*$", re.MULTILINE)


def _without_prose(text: str) -> str:
    """A text without its thoughts, sentences and tags, where code stands among them unfenced."""
    lines = _TAG.sub("", text.rpartition("</think>")[2]).split("\n")
    return "\n".join(line for line in lines if not _PROSE.match(line))


def _body(text: str, before: str) -> str:
    """A function's body, indented as `before` goes on with it."""
    last = before.rstrip().rsplit("\n", 1)[-1]
    margin = re.match(r"[ \t]*", last)[0] + ("    " if last.endswith(":") else "")  # type: ignore[index]
    text = text.strip("\n") + "\n"
    first, _, rest = text.partition("\n")
    if not first.startswith((" ", "\t")) and not first.endswith(":") and re.match(r"\n*[ \t]+\S", rest):
        text = margin + text  # the response's own white space was stripped
    even = textwrap.dedent(text)
    return textwrap.indent(even, margin) if even != text or not text.startswith((" ", "\t")) else text


def task(text: str, meta: Mapping[str, Any], uid: str) -> dict[str, Any]:
    """Makes the request to the sandbox (`_sandbox.passes`).

    Raises:
      UserError: the row has no tests, or broken ones.
    """
    try:
        if "test" in meta and "entry_point" in meta:
            name, prompt = str(meta["entry_point"]), str(meta.get("prompt", ""))
            head = "".join(line for line in prompt.splitlines(True) if re.match(r"(from|import)\b", line))
            is_head = re.search(rf"^(async )?def {re.escape(name)}\b", prompt, re.MULTILINE) is not None
            preamble = f"{prompt}\n    pass\n" if is_head else head
            found, beside = program(text, name, prompt if is_head else "")
            return {
                "program": f"{head}\n{found}",
                "beside": [preamble, *beside],
                "test": meta["test"],
                "entry_point": name,
                "preamble": preamble,
            }
        if "public_test_cases" in meta:
            cases = json.loads(meta["public_test_cases"]) + _private(str(meta.get("private_test_cases") or "[]"))
            function = json.loads(meta.get("metadata") or "{}").get("func_name", "")
            inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
        elif "input_output" in meta:
            tests = json.loads(meta["input_output"])
            inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name") or ""
            if function:  # a list of arguments, and a list that holds the value
                inputs = ["\n".join(map(json.dumps, arguments)) for arguments in inputs]
                outputs = [json.dumps(value[0] if isinstance(value, list) and value else value) for value in outputs]
        else:
            raise UserError(
                f"reward code: prompt {uid} has no tests; its row needs the columns of one of these layouts: prompt,"
                " entry_point, test; or public_test_cases; or input_output."
            )
    except (ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError, zlib.error) as error:
        raise UserError(f"reward code: the tests of prompt {uid} cannot be read: {error!r:.200}") from None
    found, beside = program(text, function)
    if function and re.search(r"^class Solution\b", found, re.MULTILINE):
        function = f"Solution.{function}" if not re.search(rf"^def {re.escape(function)}\b", found, re.M) else function
    supplied = SUPPLIED + "import numpy as np\n" * bool(re.search(r"\bnp\.", found))
    beside = [supplied, *beside]
    return {"program": found, "beside": beside, "inputs": inputs, "outputs": outputs, "function": function}


class _TextAlone(pickle.Unpickler):
    """LiveCodeBench packs its private tests as a pickle of a string; nothing else is made of one here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"private_test_cases asks for {module}.{name}")


def _private(packed: str) -> list[dict[str, str]]:
    if packed.lstrip().startswith("["):
        return json.loads(packed)
    return json.loads(_TextAlone(io.BytesIO(zlib.decompress(base64.b64decode(packed)))).load())
