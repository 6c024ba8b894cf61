# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/text.py OUT.jsonl`: Python's language reference, a topic a row, from its own help.

With `--stdlib` the docstrings of the standard library's modules follow, a module a row, and with `--packages numpy jax`
those of installed packages. All differ from one version to the next.
"""

import argparse
import ast
import importlib.util
import json
import pathlib
import pydoc_data.topics
import sysconfig
import warnings

SHORTEST = 400  # characters of a module's docstrings


def docstrings(file: pathlib.Path) -> str:
    """Lists the docstrings of a source file in order; empty if this Python cannot parse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except SyntaxError:
            return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in found if text)


def library(root: pathlib.Path) -> list[str]:
    """Returns one text of docstrings per module below a folder; tests and installed packages are left out."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "lib2to3"}
    files = [file for file in sorted(root.rglob("*.py")) if not left_out & set(file.relative_to(root).parts)]
    return [text for text in map(docstrings, files) if len(text) >= SHORTEST]


def main() -> None:
    """Writes the texts to a jsonl file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--stdlib", action="store_true")
    parser.add_argument("--packages", nargs="*", default=[])
    args = parser.parse_args()
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    roots = [pathlib.Path(sysconfig.get_path("stdlib"))] if args.stdlib else []
    for name in args.packages:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise SystemExit(f"{name} is not installed: leave it out of --packages.")
        roots.append(pathlib.Path(found.origin).parent)
    texts += [text for root in roots for text in library(root)]
    pathlib.Path(args.out).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    main()
