# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds files that come with the package, from any working folder: `configs/` and the quickstart's policy.

A wheel holds them beside its modules (`force-include` in pyproject.toml); a clone has them beside the package.
"""

from __future__ import annotations

import os
import pathlib

from qarl_jax.types import UserError, did_you_mean

_PACKAGE = pathlib.Path(__file__).parents[1]
ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent


def path(name: str) -> str:
    """Returns `name` if that path exists, else the path of the shipped file or folder of this name, else `name`."""
    inside = name.startswith(("assets/", "configs/")) and (ROOT / name).exists()
    return str(ROOT / name) if inside and not os.path.exists(name) else name


def config_file(name: str | os.PathLike[str]) -> str:
    """Finds a config by `name`: a file, a folder with a config.yaml, or a shipped config's path or name.

    Raises:
      UserError: there is no such config; the message lists shipped ones.
    """
    name = os.fspath(name)
    if os.path.isfile(name) or name.endswith((".yaml", ".yml")):
        return path(name)
    for known_file in (pathlib.Path(name, "config.yaml"), ROOT / "configs" / f"{name}.yaml"):
        if known_file.is_file():
            return str(known_file)
    known = sorted(str(file.relative_to(ROOT / "configs").with_suffix("")) for file in ROOT.glob("configs/**/*.yaml"))
    listed = ", ".join(one for one in known if "/" not in one)
    raise UserError(f"{name}: no such config.{did_you_mean(name, known)} Give a YAML file, or a name: {listed}.")
