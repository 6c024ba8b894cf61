# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a step's forecast and the memory plan of every recipe into its header, and into the table of machines.

python -m benchmarks.headers        # after a fit of `benchmarks.forecast`, or a change of the plan
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import json
import pathlib
import re
import shutil
import tempfile
import textwrap
from typing import Any

import yaml

from qarl_jax.advise import forecast
from qarl_jax.memory import choose
from qarl_jax.memory.plan import Plan
from qarl_jax.models import published
from qarl_jax.run import config
from qarl_jax.run.config import RunConfig
from qarl_jax.typed_config import load as schema

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = ROOT / "configs" / "gpu" / "recipes.yaml"
MACHINES = RECIPES.with_name("arms.yaml")
PAGE = ROOT / "docs" / "first_gpu_run.md"
GIB_OF = {24: 22.0, 48: 44.4, 80: 79.1, 141: 139.8}  # that CUDA finds on a GPU of so many GB: L4, L40S, H100, H200
_HARDWARE = re.compile(r"hardware +(\d+) GPUs? of (\d+) GB")
_LINES = re.compile(r"(?:#             (?:\d+ (?:s|min)|not forecast)\b.* GiB.*\n(?:#               .*\n)*)+")


@functools.cache
def folders() -> pathlib.Path:
    """Makes model folders without weights: config.json of the published models and of the tests' fixtures."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="qarl_headers_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    fixtures = (ROOT / "tests" / "fixtures" / "models").glob("*.json")
    values = {path.stem: json.loads(path.read_text())["config"] for path in fixtures} | published.CONFIGS
    values["qwen25-coder-1.5b"] = values["Qwen2.5-Math-1.5B"]  # of the same shapes
    values["tiny-qwen3"] = json.loads((ROOT / "assets" / "tiny-qwen3" / "config.json").read_text())
    for stem, content in values.items():
        (root / stem).mkdir()
        (root / stem / "config.json").write_text(json.dumps(content))
    return root


def hardware(path: pathlib.Path) -> tuple[int, int] | None:
    """Returns the GPUs that a config's header names, and each one's GB; None: it names none."""
    said = _HARDWARE.search(path.read_text())
    return None if said is None else (int(said[1]), int(said[2]))


@functools.cache
def planned(path: pathlib.Path, gpus: int, size: int, *overrides: str) -> tuple[RunConfig, Plan]:
    """Settles a config on GPUs of `size` GB; returns the run and its plan. Raises UserError: it does not fit."""
    named = config.load(path, overrides)
    given = [f"model.path={folders() / pathlib.Path(named.model.path).name}"]
    if named.kl.is_folder:
        given += [f"kl.reference={folders() / pathlib.Path(named.kl.reference).name}"]
    cfg = config.load(path, [*overrides, *given])
    cfg = dataclasses.replace(cfg, mesh=cfg.mesh.over(gpus))
    return choose.settle(cfg, int(GIB_OF[size] * 2**30))


def took(settled: RunConfig, size: int) -> str:
    """Returns the time of a step as a dry run prints it, "160 min"; "": it prints none."""
    return (forecast.line(settled, int(GIB_OF[size] * 2**30)) or "").partition(" on ")[0]


def arms(path: pathlib.Path) -> list[str]:
    """Lists the arms of a config; [""]: it has none of its own."""
    return list(schema.arms_of(RunConfig, path)) if "arms" in yaml.safe_load(path.read_text()) else [""]


def header(path: pathlib.Path) -> str:
    """Returns a config's text with the forecasts and GiB of today's plan in its header."""
    groups: dict[str, list[str]] = {}
    gpus, size = hardware(path) or (1, 80)
    for arm in arms(path):
        settled, plan = planned(path, gpus, size, *([f"arm={arm}"] if arm else []))
        step = took(settled, size)
        step = step + " and more" * (not forecast.all_counted(settled)) if step else "not forecast"
        held = [str(round(part / 2**30)) for part in (plan.needed, plan.reserved, plan.one_base) if part]
        groups.setdefault(f"{step}, {' + '.join(held)} GiB", []).append(arm)
    indents: dict[str, Any] = {"initial_indent": f"#{' ' * 13}", "subsequent_indent": f"#{' ' * 15}"}
    lines = [f"{said}: {', '.join(names)}" if names[0] else said for said, names in groups.items()]
    text = "".join(textwrap.fill(line, 130, **indents) + "\n" for line in lines)
    return _LINES.sub(lambda _: text, path.read_text())


def machines() -> tuple[str, str]:
    """Returns the texts of the table of machines and of its page, with the plan of today."""
    table, page = MACHINES.read_text(), PAGE.read_text()
    for arm in yaml.safe_load(table):
        gpus, size = (int(part) for part in re.findall(r"\d+", arm)[:2])
        settled, plan = planned(RECIPES, gpus, size, f"arm={arm}")
        learner, engine = round(plan.needed / 2**30), round(plan.reserved / 2**30)
        step = took(settled, size)
        said = f"planned: {{learner: {learner}, engine: {engine}, step: {step}}}"
        table = re.sub(rf"(\n{arm}:\n(?:  .*\n)*?  )planned: .*", lambda m, said=said: m[1] + said, table)
        row = f"{learner} | {engine} | {step} |"
        page = re.sub(rf"(\n\| [^\n]*\| `{arm}` \|[^|\n]*\| )[^\n]*", lambda m, row=row: m[1] + row, page)
    return table, page


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    table, page = machines()
    texts = {path: header(path) for path in (ROOT / "configs").rglob("*.yaml") if hardware(path)}
    for path, text in (texts | {MACHINES: table, PAGE: page}).items():
        if text != path.read_text():
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
