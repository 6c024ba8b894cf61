# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`qarl init DIR`: writes a config, a reward and a data file that run as they are, to be changed."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
from collections.abc import Sequence

from qarl_jax.run import shipped
from qarl_jax.types import UserError, command, entry_point

_FILES = ("config.yaml", "reward.py", "data.jsonl")


def write(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Copies `configs/init` into `folder`, replaces its path in the copies, and returns the files.

    Raises:
      UserError: one of the files exists already, or the folder cannot be written. Nothing is replaced.
    """
    out = pathlib.Path(folder)
    files = [out / name for name in _FILES]
    for file in files:
        if file.exists():
            raise UserError(f"{file} is there already; give the name of a new folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            text = (shipped.ROOT / "configs" / "init" / file.name).read_text(encoding="utf-8")
            text = text.replace("configs/init/", f"{out.as_posix()}/").replace("runs/init", f"{out.as_posix()}/run")
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}).") from None
    return files


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="qarl init", description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("folder", metavar="DIR", help="folder to make")
    folder = parser.parse_args(argv).folder
    for file in write(folder):
        print(file)
    print(f"next: {command('train')} {shlex.quote(pathlib.Path(folder).as_posix())}")
    return 0
