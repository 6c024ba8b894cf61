# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax` lists the commands, by the first line of each one's file. It imports none of them."""

import ast
import pathlib


def commands() -> list[str]:
    """A line per command, `train` first: how it is called, and what it does."""
    found = {}
    for file in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        if text.startswith("`python -m qarl_jax."):
            called, _, does = text.splitlines()[0].removeprefix("`").partition("`")
            found[file.stem] = f"{called}\n    {does.removeprefix(': ')}"
    return [found.pop("train"), *found.values()]


if __name__ == "__main__":
    print("\n".join([*commands(), "`--help` behind a command lists its options. docs/operate.md has examples."]))
