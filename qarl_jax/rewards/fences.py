# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The fenced code blocks of a response, as CommonMark reads them (https://spec.commonmark.org/0.31.2, section 4.5).

A block may be indented in a list, stand in a quotation, be fenced by tildes, hold a shorter or indented fence, and end
with the response. Three things that models write are read as meant, where CommonMark would not see a block: a fence
beside a tag ("```</answer>"), a labelled fence behind words ("So: ```python"), and a block that is indented as a whole.
Linear time on any text. Imports nothing of qarl_jax: the environment `python` reads this file by its path.
"""

import functools
import re

from markdown_it import MarkdownIt

MAX_CHARS = 100_000  # of a response, from its end
PYTHON = ("python", "py", "python3", "py3")
_FENCE = r"(?:```|~~~)"
# What stands beside a fence gets a line of its own.
_APART = re.compile(
    rf"^(?P<tag>[ \t]*</?\w+>)[ \t]*(?={_FENCE})|(?P<words>[A-Za-z][:.,*]*)[ \t]*(?=```(?:{'|'.join(PYTHON)})[ \t]*$)"
    rf"|(?P<fence>^[ \t]*{_FENCE}+)[ \t]*(?=</\w+>)",
    re.MULTILINE,
)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, content) of each block, in order. Example: blocks("~~~Py\\nx") = [("py", "x\\n")]."""
    found = []
    for token in _parser().parse(_APART.sub(lambda match: f"{match[0]}\n", text[-MAX_CHARS:])):
        if token.type == "fence":
            language = re.search(r"\w+", token.info)
            found.append((language[0].lower() if language else "", token.content))
        elif token.type == "code_block" and re.match(_FENCE, token.content):
            found += blocks(token.content)
    return found


@functools.cache
def _parser() -> MarkdownIt:
    # Without HTML blocks: CommonMark ends one such as <answer> at an empty line, and sees no fence in it.
    return MarkdownIt("commonmark").disable(["inline", "html_block", "reference"])
