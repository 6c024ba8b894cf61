# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared code of the commands that train a model folder from a config (`sft`, `qat`): command line and receipt.

A receipt is a file in the made folder (`sft.json`, `qat.json`) with the resolved config and its hash. If the hash
equals the config's, the folder is up to date. A folder without a receipt is never replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from qarl_jax.run import shipped
from qarl_jax.typed_config import load
from qarl_jax.types import Parser, UserError


def fingerprint(cfg: Any, absent: Sequence[str] = ()) -> str:
    """Hashes a resolved config: equal hashes mean equal models. absent: fields that are left out if None."""
    values = load.to_dict(cfg)
    values = {key: value for key, value in values.items() if value is not None or key not in absent}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_receipt(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Reads the receipt `name` of a folder; empty if it cannot be read."""
    try:
        found = json.loads(pathlib.Path(folder, name).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def write_receipt(folder: pathlib.Path, name: str, cfg: Any, mark: str, **facts: Any) -> None:
    """Writes the receipt of a folder made under `cfg`, whose `fingerprint` is `mark`, with further facts."""
    receipt = {"fingerprint": mark, "config": load.to_dict(cfg), **facts}
    (folder / name).write_text(json.dumps(receipt, indent=2, default=str), encoding="utf-8")


def check_ours(out: str, name: str) -> None:
    """Raises UserError if `out` exists and this command did not make it, because it would be replaced."""
    ours = os.path.isdir(out) and (not os.listdir(out) or os.path.isfile(os.path.join(out, name)))
    if os.path.exists(out) and not ours:
        raise UserError(
            f"out={out} exists and was not made by this command (no {name} in it): it would be replaced. Name"
            " another folder, or remove it yourself."
        )


def main(
    verb: str,
    config_type: type,
    mark: Callable[[Any], str],
    run: Callable[[Any], None],
    purpose: str,
    argv: Sequence[str] | None = None,
    again: Callable[[Any], None] = lambda cfg: None,
    changed: Callable[[Any, dict[str, Any]], str] = lambda cfg, receipt: "",
) -> int:
    """Runs `verb` on a config file and overrides, unless `out` is up to date; returns the exit code.

    Args:
      config_type: the command's config class, with a field `out`. mark: hashes a config (`fingerprint`).
      run: makes the folder.
      purpose: a line for --help.
      again: called first if --force is given.
      changed: names what differs from a receipt with the config's hash; "": nothing does.
    """
    parser = Parser(verb, config="YAML file", needed=True, description=purpose)
    parser.add_argument("--force", action="store_true", help="train from the start, even if `out` is up to date")
    args = parser.parse_args(argv)
    cfg: Any = load.load(config_type, shipped.config_file(args.config), args.overrides)
    receipt = read_receipt(cfg.out, f"{verb}.json")
    if args.force:
        again(cfg)
    elif receipt.get("fingerprint") == mark(cfg) and not changed(cfg, receipt):
        print(f"{cfg.out} is up to date (same config); --force trains it again")
        return 0
    run(cfg)
    return 0
