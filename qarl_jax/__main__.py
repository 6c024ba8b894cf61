# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`qarl VERB ...`, or `python -m qarl_jax VERB ...`: runs a command; without one, lists them.

The list imports no command: it parses each command's module and shows the first line of its docstring.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
from collections.abc import Sequence

import qarl_jax
from qarl_jax.runtime import progress

VERBS = {
    "init": "qarl_jax.run.init",
    "train": "qarl_jax.train",
    "doctor": "qarl_jax.doctor",
    "advise": "qarl_jax.advise.command",
    "evaluate": "qarl_jax.run.evaluation",
    "watch": "qarl_jax.observe.live",
    "plot": "qarl_jax.plot",
    "export": "qarl_jax.run.export",
    "convert": "qarl_jax.convert",
    "parity": "qarl_jax.parity",
    "sft": "qarl_jax.sft",
    "qat": "qarl_jax.qat.command",
}
"""Each verb's module, which has `main(argv) -> exit code`; in the order of a user's first day."""


def commands() -> list[str]:
    """Returns two lines per verb: its command line and its purpose."""
    lines = []
    for module in VERBS.values():
        file = pathlib.Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
        text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        called, _, purpose = text.strip("`").partition("`: ")
        lines += [
            f"  {called.removeprefix('qarl ').removeprefix('python -m qarl_jax.')}",
            f"      {purpose.rstrip('.')}",
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `qarl`; returns the verb's exit code."""
    verb, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in VERBS:
        with progress.shown(), progress.task("loading"):  # JAX and transformers: seconds, minutes from a network's disk
            module = importlib.import_module(VERBS[verb])
        return module.main(rest)
    if verb == "--version":
        print(f"qarl-jax {qarl_jax.__version__}")
        return 0
    lines = "\n".join(commands())
    usage = f"qarl VERB ..., or python -m qarl_jax VERB ...\n\n{lines}\n\n`qarl VERB --help` lists a verb's options."
    if verb in ("-h", "--help"):
        print(usage)
        return 0
    print(f"error: {verb}: no such verb.\n\n{usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
