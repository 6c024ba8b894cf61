# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the fenced code blocks of a response, as CommonMark does (https://spec.commonmark.org/0.31.2, section 4.5).

A block may be indented in a list, stand in a quotation, be fenced by tildes, hold a shorter or indented fence, and end
with the response. Common deviations from its rules are read as meant:

    words, a tag or a stop token beside a fence     "So: ```python", "```</answer>", "``` That's it", "return x```"
    a block that begins before another has ended    a fence is missing between the two
    a block that is indented as a whole             it is given without the indentation
    a block in one that is labelled Markdown        it counts as well
    three quotes with a label, "'''python"          a fence, in a response that has no other

Linear time on any text. Imports nothing of qarl_jax: the environment `python` reads this file by its path.
"""

import functools
import re
import textwrap

from markdown_it import MarkdownIt

MAX_CHARS = 100_000  # of a response, from its end
PYTHON = ("python", "py", "python3", "py3")
_FENCE = re.compile(r"(?P<margin>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})(?P<rest>.*)")
_QUOTES = re.compile(r"([ \t]*)('''|\"\"\")(?:py|python)3?[ \t]*", re.IGNORECASE)
_INVISIBLE = re.compile("^[\ufeff\u200b\u2060]+", re.MULTILINE)  # byte order marks, and spaces of no width
_STOP = re.compile(r"\s*(?:<[|\uff5c][^\s<>]{1,40}[|\uff5c]>|</s>|<eos>|<end_of_turn>)$")


def blocks(text: str) -> list[tuple[str, str]]:
    """Returns (lower-case language, content) of each block. Example: blocks("~~~Py\\nx") = [("py", "x\\n")]."""
    found = []
    for token in _parser().parse(_fences_apart(_quotes_as_fences(without_stop_tokens(text[-MAX_CHARS:])))):
        if token.type == "fence":
            language = re.search(r"\w+", token.info)
            label = language[0].lower() if language else ""
            inside = blocks(token.content) if label in ("markdown", "md") else []
            found += inside or [(label, textwrap.dedent(token.content))]
        elif token.type == "code_block" and _FENCE.match(token.content):
            found += blocks(token.content)
    return found


def without_stop_tokens(text: str) -> str:
    """Removes stop tokens, such as <|im_end|>, from the end of a text."""
    while stop := _STOP.search(text, max(0, len(text) - 64)):
        text = text[: stop.start()]
    return text


def _quotes_as_fences(text: str) -> str:
    """Turns lines "'''python" and the last "'''" before the next of them into fences, where a text has no fence."""
    if "```" in text or "~~~" in text:
        return text
    lines = text.split("\n")
    end = len(lines)  # of the block that begins at the next match
    for number in range(end - 1, -1, -1):
        if match := _QUOTES.fullmatch(lines[number]):
            margin, quotes = match.groups()
            close = next((n for n in range(end - 1, number, -1) if lines[n].rstrip() == margin + quotes), -1)
            if close > 0:
                lines[close] = margin + "```"
            lines[number], end = f"{margin}```python", number
    return "\n".join(lines)


def _fences_apart(text: str) -> str:
    """Gives each fence a line of its own, and each block its closing fence."""
    out: list[str] = []
    opened, margin, stuck = "", "", -1  # the open block's fence, and its first line that has a fence at its end
    for line in _INVISIBLE.sub("", re.sub(r"\r\n?", "\n", text)).split("\n"):
        match = _FENCE.match(line)
        if not opened:
            if match is None or ("`" in match["fence"] and "`" in match["rest"]):
                words, fence, info = _beside(line)
                out.append(words)
                if not fence:
                    continue
                line = fence + info
                match = _FENCE.match(line)
                assert match is not None
            opened, margin, stuck = match["fence"], re.sub(r"[^\s>]", " ", match["margin"]), -1
        elif match is not None and match["fence"].startswith(opened):
            rest = match["rest"].strip()
            if not rest:
                opened = opened if len(match["margin"]) > len(margin) + 3 else ""
            elif len(match["margin"]) > len(margin):
                pass  # of a docstring
            elif re.fullmatch(r"\w+", match["rest"].rstrip()) or rest in PYTHON:  # the next block's
                _end(out, margin + opened, stuck)
                opened, stuck = match["fence"], -1
            else:
                out.append(match["margin"] + match["fence"])
                opened, line = "", rest
        elif stuck < 0 and line.rstrip().endswith(opened):
            stuck = len(out)
        out.append(line)
    if opened and stuck >= 0:
        _end(out, margin + opened, stuck)
    return "\n".join(out)


def _beside(line: str) -> tuple[str, str, str]:
    """(words, fence, label) of a line in which a block begins behind words, or behind a tag; else (line, "", "")."""
    for fence in ("```", "~~~"):
        words, mark, info = line.partition(fence)
        if mark and words.strip() and re.fullmatch(r"[ \t]*\w*[ \t]*", info) and (fence == "```" or words[-1] == ">"):
            return words, mark, info
    return line, "", ""


def _end(out: list[str], fence: str, stuck: int) -> None:
    """Ends a block that has no closing fence: behind the line that one sticks to, else here."""
    if stuck < 0:
        out.append(fence)
    else:
        out[stuck] = f"{out[stuck].rstrip().rstrip(fence[-1])}\n{fence}"


@functools.cache
def _parser() -> MarkdownIt:
    # Without HTML blocks: CommonMark ends one such as <answer> at an empty line, and sees no fence in it.
    return MarkdownIt("commonmark").disable(["inline", "html_block", "reference"])
