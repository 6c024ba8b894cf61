# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders the web page of one or more runs: a self-contained `report.html`, or the page that `live.py` serves.

It shows curves, seconds of a step's phases, the loss's band, mismatch by position, changed codes by layer, and samples.
Tokens of a sample are shaded by importance ratio, mismatch weight, probability, or their fate in the loss (as table 6
of QaRL, arXiv 2604.07853). `run_data.py` computes the numbers; the scripts in `page/` draw them.

The page's content security policy forbids all requests; the live page may ask its server alone. Texts of a policy reach
it as JSON and are shown as plain text.

A report has samples of some steps, spread over the run, to stay small.
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
    """Renders a report as HTML.

    Args:
      runs: maps names to run directories (or their metrics.jsonl).
      steps: steps per run whose samples are shown.
      extra: further metrics to show, a chart each.

    Raises:
      UserError: a file is damaged.
    """
    parts = [RunData(folder_of(path), name, steps=steps).part({})[0] for name, path in runs.items()]
    return page(list(runs), {"live": False, "runs": parts, "panels": curves.specs(extra)})


def page(names: Sequence[str], data: Mapping[str, Any]) -> str:
    """Renders the page's template around `data`."""
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
    """Writes the page to a file. Raises UserError if it cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from None
