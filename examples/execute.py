# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a notebook from top to bottom and saves it with its outputs, where Jupyter is not installed.

    python examples/execute.py examples/gpu_vllm.ipynb out.ipynb [NAME=VALUE ...]

NAME=VALUE, in YAML, replaces a value of the cell with the parameters. Outputs are what a cell prints and the value of
its last line, a figure as PNG. Exit code 1 where a cell raises; the outputs before it are saved.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import pathlib
import sys
import time
import traceback
from typing import Any

import yaml


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells with code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Runs the code cells and fills in their outputs; returns the names that they define.

    Args:
      notebook: as its JSON is.
      values: assigned after the cell that is tagged "parameters".

    Raises:
      Exception: of the first cell that raises; its outputs so far are filled in.
    """
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        cell["execution_count"], cell["outputs"] = number, []
        printed, value = io.StringIO(), None
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(tree, cell["id"], "exec"), space)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), space)
        finally:
            if printed.getvalue():
                text = printed.getvalue().splitlines(keepends=True)
                cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": text})
        if value is not None:
            shown = {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": shape_of(value),
            }
            cell["outputs"].append(shown)
        if "parameters" in cell["metadata"].get("tags", []):
            space |= values
    return space


def shape_of(value: Any) -> dict[str, Any]:
    """A value by MIME type: its text and, of a figure, its picture."""
    shown: dict[str, Any] = {"text/plain": [repr(value)]}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=72)
        shown["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return shown


def main() -> int:
    source, target, *words = sys.argv[1:]
    notebook = json.loads(pathlib.Path(source).read_text())
    values = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("agg")
    start, code = time.monotonic(), 0
    try:
        execute(notebook, values)
    except Exception:
        traceback.print_exc()
        code = 1
    pathlib.Path(target).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            print("".join(output.get("text", [])), end="")
    print(f"{target}: {time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
