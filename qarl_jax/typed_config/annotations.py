# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the annotations of config dataclasses: which keys there are, which sections a `name` key chooses, and a type in
words for messages. `load.py` reads and writes configs by them."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: typing needs a hash, a dict has none
class Variants:
    """Marks a field whose type is chosen by its `name` key. Example: Annotated[Any, Variants({"exact": exact.Config})].

    Attributes:
      types: variant name -> dataclass.
      default: variant taken when the section has no `name` and the field has no default of its own.
    """

    types: Mapping[str, type]
    default: str | None = None

    def name_of(self, value: Any) -> str:
        """Returns the variant name of a built config."""
        return next(name for name, cls in self.types.items() if type(value) is cls)


def dotted_keys(cls: type, prefix: str = "", _inside: tuple[type, ...] = ()) -> list[str]:
    """Lists every key that a config of type `cls` may hold, in order, variants' fields included, for suggestions."""
    if cls in _inside:  # a variant may contain itself (a sum of rewards)
        return []
    keys: list[str] = []
    for name, hint in field_types(cls).items():
        dotted = f"{prefix}{name}"
        keys.append(dotted)
        for section, is_variant in nested(hint):
            if is_variant and f"{dotted}.name" not in keys:
                keys.append(f"{dotted}.name")
            keys.extend(k for k in dotted_keys(section, f"{dotted}.", (*_inside, cls)) if k not in keys)
    return keys


def nested(hint: Any) -> list[tuple[type, bool]]:
    """Lists the dataclasses that an annotation names, and whether a `name` key chooses each."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        marks = variants_of(hint)
        return [(cls, True) for cls in marks[0].types.values()] if marks else nested(hint.__origin__)
    if origin in (Union, types.UnionType):
        return [item for option in typing.get_args(hint) for item in nested(option)]
    return [(typing.cast(type, hint), False)] if dataclasses.is_dataclass(hint) else []


def holds_variants(cls: type, path: Sequence[str]) -> bool:
    """Tells whether the section at `path` of a config of type `cls` is chosen by a `name` key."""
    hints: list[Any] = [cls]
    for key in path:
        below: list[Any] = []
        for hint in _alternatives(hints):
            if typing.get_origin(hint) is tuple:
                below.extend(arg for arg in typing.get_args(hint) if arg is not Ellipsis)
            elif typing.get_origin(hint) is dict:
                below.append(typing.get_args(hint)[1])
            elif typing.get_origin(hint) is Annotated:
                for variant in variants_of(hint):
                    below.extend(t[key] for t in map(field_types, variant.types.values()) if key in t)
            elif dataclasses.is_dataclass(hint) and key in field_types(typing.cast(type, hint)):
                below.append(field_types(typing.cast(type, hint))[key])
        hints = below
    return any(typing.get_origin(hint) is Annotated and variants_of(hint) for hint in _alternatives(hints))


def _alternatives(hints: list[Any]) -> list[Any]:
    out: list[Any] = []
    for hint in hints:
        is_union = typing.get_origin(hint) in (Union, types.UnionType)
        out.extend(_alternatives(list(typing.get_args(hint))) if is_union else [hint])
    return out


def variants_of(hint: Any) -> list[Variants]:
    """Lists the `Variants` of an `Annotated` field, none or one."""
    return [mark for mark in hint.__metadata__ if isinstance(mark, Variants)]


INTERNAL = {"internal": True}
"""Metadata of a field that code sets and no config does: it is no option. The bridge's dataclasses spell it out."""


def internal(default: Any) -> Any:
    """Makes a dataclass field with this default that no config can set."""
    return dataclasses.field(default=default, metadata=INTERNAL)


def field_types(cls: type) -> Mapping[str, Any]:
    """Returns field name -> resolved annotation, in order, of the fields that a config can set."""
    return _field_types(cls)


@functools.cache  # a large part of the time to read a config; nobody changes the result
def _field_types(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    options = [field for field in dataclasses.fields(cls) if field.init and not field.metadata.get("internal")]
    return {field.name: hints[field.name] for field in options}


def type_words(hint: Any) -> str:
    """Describes an annotation in words. Example: `int | None` -> "an integer or null"."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        marks = variants_of(hint)
        return f"a section with name {listing(marks[0].types)}" if marks else type_words(hint.__origin__)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(option) for option in typing.get_args(hint))
    if origin is Literal:
        return "one of " + listing(typing.get_args(hint))
    if origin is tuple:
        return "a list"
    if origin is dict or hint is dict:
        return "a mapping"
    if dataclasses.is_dataclass(hint):
        return "a section"
    words = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        type(None): "null",
        Any: "any value",
    }
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def field_default(cls: type, name: str) -> Any:
    """Returns the default of a field; `dataclasses.MISSING`: it must be set."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def listing(names: Iterable[Any]) -> str:
    """Joins names with commas."""
    return ", ".join(str(name) for name in names)
