# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/text.py OUT.jsonl [--stdlib]`: Python's language reference, a topic a row, from its own help.

With `--stdlib` the docstrings of the standard library's modules follow, a module a row. Both differ from one version of
Python to the next.
"""

import ast
import json
import pathlib
import pydoc_data.topics
import sys
import sysconfig

SHORTEST = 400  # characters of a module's docstrings


def docstrings(file: pathlib.Path) -> str:
    """The docstrings of a source file, in its order."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in found if text)


def library() -> list[str]:
    """One text per module of the standard library, tests and installed packages left out."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "lib2to3"}
    files = [file for file in sorted(root.rglob("*.py")) if not left_out & set(file.relative_to(root).parts)]
    return [text for text in map(docstrings, files) if len(text) >= SHORTEST]


if __name__ == "__main__":
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    if "--stdlib" in sys.argv:
        texts += library()
    pathlib.Path(sys.argv[1]).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
