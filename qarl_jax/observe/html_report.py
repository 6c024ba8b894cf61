# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The page of one or more runs: `report.html`, which needs nothing else, or the same page live (`live.py`).

Curves, seconds of a step's phases, the band of the objective, mismatch by position, changed codes by layer, and samples
whose tokens are shaded by importance ratio, mismatch weight, probability, or what the loss did with them (QaRL, arXiv
2604.07853, table 6, on one's own data). The numbers are those of `run_data.py`; the page draws them (`page/`).

The page's own policy forbids it to load or send anything; live, it may ask its server for more. Texts of a policy reach
it as JSON and are shown as text alone.

Left out: the samples of every step. A report has those of some steps, spread over the run, to stay small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from qarl_jax.observe import curves
from qarl_jax.observe.recorder import folder_of
from qarl_jax.observe.run_data import RunData
from qarl_jax.types import UserError

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("store.js", "charts.js", "pictures.js", "samples.js", "main.js")


def render(runs: Mapping[str, str | Path], *, steps: int = 12, extra: Sequence[str] = ()) -> str:
    """The page as a report.

    Args:
      runs: name -> run directory (or its metrics.jsonl).
      steps: steps per run whose samples are shown.
      extra: more metrics to show, a chart each.

    Raises:
      UserError: a file is damaged.
    """
    parts = [RunData(folder_of(path), name, steps=steps).part({})[0] for name, path in runs.items()]
    return page(list(runs), {"live": False, "runs": parts, "panels": curves.specs(extra)})


def page(names: Sequence[str], data: Mapping[str, Any]) -> str:
    """The page around its data."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {}  # not sorted: the order of lines is that of curves.py
    style = markupsafe.Markup((PAGE / "page.css").read_text(encoding="utf-8"))
    script = markupsafe.Markup("\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS))
    return environment.get_template("page.html.jinja").render(
        names=names, style=style, script=script, data=data, live=data["live"]
    )


def write(path: str | Path, text: str) -> None:
    """Puts the page on disk."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from None
