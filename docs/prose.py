# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks docstrings and pages against the rules of CONTRIBUTING.md; part of `make lint`.

    python docs/prose.py          # exit code 1 if a room or page in CLEAN breaks a rule
    python docs/prose.py --all    # every finding, and counts of rooms and pages that are not in CLEAN yet

A docstring begins with a verb or a noun. A page's sentence has at most 25 words, a docstring's first one at most 30.
Home-made words are named with the field's. Tables, code, headings, the log and generated pages are left out.
"""

from __future__ import annotations

import argparse
import ast
import collections
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
OPENING = re.compile(r"(What|Who|Whose|Of|Where|Which|How|Why|Those|Whether)\b|Attributes:|Args:")
WORDS = {
    r"\bunequal tokens?\b": "first mismatch, mismatched token",
    r"\bmixtures? of experts\b|\ba mixture\b|\bmixture's\b": "MoE model",
    r"\bby day\b": "in `make test`",
    r"\basked (nightly|by day)\b": "run",
    r"\bat the (loader's )?door\b": "when it loads",
    r"\bearly grades\b": "streaming rewards",
    r"\bfixed.order\b": "batch-invariant",
    r"\b(graphics|the|one|two|both|several|own) cards?\b": "GPU",
    r"\bthrough a window\b|\b(sent|goes?|travels?) in parts\b": "in chunks",
}
MOST_WORDS, MOST_WORDS_DOCSTRING = 25, 30
# Rooms and pages that keep the rules. The list grows; nothing leaves it.
CLEAN: tuple[str, ...] = (
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "bridge/README.md",
    "bridge/qarl_bridge/__init__.py",
    "bridge/qarl_bridge/__main__.py",
    "bridge/qarl_bridge/cli.py",
    "bridge/qarl_bridge/client",
    "bridge/qarl_bridge/engine",
    "bridge/qarl_bridge/protocol",
    "bridge/qarl_bridge/server",
    "bridge/qarl_bridge/transport",
    "configs/README.md",
    "docs/adding.md",
    "docs/api.md",
    "docs/asynchronous.md",
    "docs/comparison.md",
    "docs/concepts/engines.md",
    "docs/concepts/grids.md",
    "docs/concepts/verification.md",
    "docs/distillation.md",
    "docs/faults.md",
    "docs/first_gpu_run.md",
    "docs/glossary.md",
    "docs/index.md",
    "docs/install.md",
    "docs/lora.md",
    "docs/operate.md",
    "docs/operations/advise.md",
    "docs/operations/masters.md",
    "docs/operations/memory.md",
    "docs/operations/multi-host.md",
    "docs/operations/overlap.md",
    "docs/operations/performance.md",
    "docs/operations/steps.md",
    "docs/options.md",
    "docs/promises.md",
    "docs/qat.md",
    "docs/rewards.md",
    "docs/schemes.md",
    "docs/suites.md",
    "docs/tests.md",
    "docs/tour.md",
    "docs/turns.md",
    "qarl_jax/__init__.py",
    "qarl_jax/__main__.py",
    "qarl_jax/advise",
    "qarl_jax/convert.py",
    "qarl_jax/data",
    "qarl_jax/doctor.py",
    "qarl_jax/evaluate.py",
    "qarl_jax/export.py",
    "qarl_jax/kernels",
    "qarl_jax/learning",
    "qarl_jax/loop",
    "qarl_jax/loss",
    "qarl_jax/memory",
    "qarl_jax/metrics.py",
    "qarl_jax/models",
    "qarl_jax/numerics",
    "qarl_jax/observe",
    "qarl_jax/optim",
    "qarl_jax/parity.py",
    "qarl_jax/plot.py",
    "qarl_jax/qat",
    "qarl_jax/quant",
    "qarl_jax/rewards",
    "qarl_jax/rollout",
    "qarl_jax/run",
    "qarl_jax/runtime",
    "qarl_jax/sft.py",
    "qarl_jax/train.py",
    "qarl_jax/typed_config",
    "qarl_jax/types.py",
    "qarl_jax/verify",
)


def docstrings(file: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every docstring."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def prose(page: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (line, paragraph) of a page, without code, tables and headings."""
    fenced, paragraph, start = False, [], 0
    for number, line in enumerate([*page.read_text().splitlines(), ""], 1):
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        plain = line.strip()
        if fenced or not plain or plain.startswith(("|", "#", "```", "~~~", "!", "<", "- [", "---")):
            if paragraph:
                yield start, " ".join(paragraph)
            paragraph = []
        else:
            if re.match(r"([-*]|\d+\.) ", plain) and paragraph:
                yield start, " ".join(paragraph)
                paragraph = []
            start = number if not paragraph else start
            paragraph.append(re.sub(r"^([-*]|\d+\.) ", "", plain))


def sentences(text: str) -> Iterator[str]:
    """Splits a paragraph into sentences; code and links count as a word."""
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))
    yield from re.split(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z*(])", text)


def findings(path: pathlib.Path) -> Iterator[str]:
    """Yields what breaks a rule in a module or a page, each with its place."""
    where = path.relative_to(ROOT)
    if path.suffix == ".py":
        for line, text in docstrings(path):
            first = next(sentences(text.split("\n\n")[0].replace("\n", " ")))
            if OPENING.match(text):
                yield f"{where}:{line}: a docstring begins with a verb or a noun, not with {text.split()[0]!r}"
            if len(first.split()) > MOST_WORDS_DOCSTRING:
                yield f"{where}:{line}: {len(first.split())} words in a docstring's first sentence"
        blocks = [(line, text) for line, text in docstrings(path)]
    else:
        blocks = list(prose(path))
        for line, text in blocks:
            for sentence in sentences(text):
                if len(sentence.split()) > MOST_WORDS:
                    yield f"{where}:{line}: {len(sentence.split())} words in a sentence: {sentence[:60]} ..."
    for line, text in blocks:
        for pattern, better in WORDS.items():
            if found := re.search(pattern, text, re.IGNORECASE):
                yield f"{where}:{line}: {found[0]!r}; say {better}"


def checked() -> list[pathlib.Path]:
    """Lists the modules and pages that the rules are for."""
    modules = [*ROOT.glob("qarl_jax/**/*.py"), *ROOT.glob("bridge/qarl_bridge/**/*.py")]
    pages = [*ROOT.glob("*.md"), ROOT / "bridge" / "README.md", *ROOT.glob("configs/*.md"), *ROOT.glob("docs/**/*.md")]
    left_out = (ROOT / "docs" / "log", ROOT / "docs" / "appendix", ROOT / "docs" / "algorithms.md")
    return sorted(p for p in (*modules, *pages) if not any(p == out or out in p.parents for out in left_out))


def room(path: pathlib.Path) -> str:
    """Names the room of a module (two folders), or the page itself."""
    parts = path.relative_to(ROOT).parts
    deep = 3 if parts[0] == "bridge" else 2
    return "/".join(parts[:deep]) if path.suffix == ".py" else "/".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="print every finding, in rooms that are not clean yet, too")
    args = parser.parse_args(argv)
    counts: collections.Counter[str] = collections.Counter()
    broken = 0
    for path in checked():
        found = list(findings(path))
        counts[room(path)] += len(found)
        if args.all or room(path) in CLEAN:
            print(*found, sep="\n", end="\n" * bool(found))
        broken += len(found) if room(path) in CLEAN else 0
    if args.all:
        print(*(f"{count:5} {name}" for name, count in counts.most_common() if name not in CLEAN), sep="\n")
    print(f"prose: {broken} findings in {len(CLEAN)} clean rooms and pages of {len(counts)}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
