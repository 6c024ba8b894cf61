# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that come with the package, found from any folder: `configs/` and the quickstart's policy.

A wheel holds them beside its modules (`force-include` in pyproject.toml); a clone has them beside the package.
"""

from __future__ import annotations

import os
import pathlib

from qarl_jax.types import UserError, did_you_mean

_PACKAGE = pathlib.Path(__file__).parents[1]
ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent


def path(name: str) -> str:
    """Finds a path: `name` where that exists, else the shipped file or folder of that name, else `name`."""
    inside = name.startswith(("assets/", "configs/")) and (ROOT / name).exists()
    return str(ROOT / name) if inside and not os.path.exists(name) else name


def config_file(name: str | os.PathLike[str]) -> str:
    """Finds the config that `name` means: a file, a folder with a config.yaml, or a shipped config by path or name.

    Raises:
      UserError: a name without ending that no shipped config has; the sentence lists some that are there.
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
