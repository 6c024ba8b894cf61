# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""For mkdocs: links that leave docs/ lead to files of the repository, which the site does not hold.

On a page of the site such a link becomes its text and the file's path. A path that does not exist stops the build.
"""

import pathlib
import re
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Rewrites the links of one page."""
    folder = pathlib.Path(page.file.abs_src_path).parent

    def inside(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match.group(0)
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: {target} does not exist.")
        name = str(path.relative_to(ROOT))
        plain = text.strip("`")
        return f"`{name}`" if plain in name or name.endswith(plain) else f"{text} (`{name}`)"

    return LINK.sub(inside, markdown)
