# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Typed configuration: YAML text and dotted overrides in, frozen dataclasses out.

The dataclasses are the schema; there is no second list of keys. A value is checked against the annotation of its field:
bool, int, float, str, `Literal`, `X | None` and other unions, `tuple[X, ...]`, `dict[str, X]`, nested dataclasses, and
*variants*, which are chosen by a `name` key:

    loss: Annotated[Any, Variants({"tbpo": tbpo.Config, "grpo": grpo.Config})] = tbpo.Config()

    loss: {name: grpo, clip_high: 0.28}

Rules of layering, from weakest to strongest: defaults, the file named by `base:`, the file, an arm, the overrides.
Mappings merge key by key; lists and scalars are replaced. Setting another `name` starts that section anew, because the
fields of one variant mean something else (or nothing) in another: TBPO's clip_high is not GRPO's.

**Arms.** An arm is a run that differs from a file's in a few settings: a row of a table that the file names. The
override `arm=NAME` selects it:

    arms: [arms.yaml]                                                   # in the file; relative to it

    rollout_grpo: {about: what it is, set: {quant: {forward: bf16}}}    # in arms.yaml; only `set` is read here

Where several tables have the arm, each is laid over the one before it.

Every mistake is a `UserError` that says where the value came from (file:line or the override itself), what was expected
and what is close to it. Left out are environment variables, interpolation and several files on the command line:
each makes a run depend on something that its dumped config does not show.

`annotations.py` reads annotations; `misread.py` finds values that YAML misreads.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union

import yaml

from qarl_jax.typed_config.annotations import (
    Variants,
    dotted_keys,
    field_default,
    field_types,
    holds_variants,
    listing,
    type_words,
    variants_of,
)
from qarl_jax.typed_config.misread import misread, mistake_of
from qarl_jax.types import UserError, did_you_mean

T = TypeVar("T")
Path = tuple[str, ...]
MAX_VALUES = 100_000  # of a file: nested aliases can stand for billions
_composed = functools.lru_cache(64)(functools.partial(yaml.compose, Loader=yaml.SafeLoader))  # nothing changes a node


@dataclasses.dataclass(frozen=True)
class _Text:
    """A value as typed in an override; what it means depends on the field it lands in."""

    text: str


@dataclasses.dataclass
class Layer:
    """A tree of values and, per path, where each was written."""

    tree: dict[str, Any]
    origins: dict[Path, str]
    source: str

    def where(self, path: Path) -> str:
        """Returns the origin of `path`, else of a key below it, else of its longest known prefix."""
        if path in self.origins:
            return self.origins[path]
        within = [origin for known, origin in self.origins.items() if known[: len(path)] == path]
        return within[0] if within else self.where(path[:-1]) if path else self.source


# ---------------------------------------------------------------------------------------------------- reading


def load(cls: type[T], file: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> T:
    """Builds `cls` from a YAML file and dotted overrides.

    Args:
      cls: a frozen dataclass.
      file: YAML file, or None to start from the defaults.
      overrides: "a.b=c" strings, later ones win.

    Raises:
      UserError: for anything wrong with the file, an override, a key, a type or a combination of values.
    """
    layer = read_yaml(cls, file) if file is not None else Layer({}, {(): "defaults"}, "defaults")
    tables = layer.tree.pop("arms", [])
    if (arm := arm_of(overrides)) is not None:
        lay_arm(cls, layer, tables, arm)
    return build(cls, apply_overrides(cls, layer, [o for o in overrides if not o.startswith(_ARM)]))


_ARM = "arm="


def arm_of(overrides: Sequence[str]) -> str | None:
    """Returns the arm that the last `arm=NAME` asks for; None if there is no such override."""
    return next((o.removeprefix(_ARM) for o in reversed(overrides) if o.startswith(_ARM)), None)


def arms_of(cls: type, file: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Reads the arms of a file's tables: name -> its rows, weakest first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for table in read_yaml(cls, file).tree.get("arms", []):
        for name, row in read_yaml(cls, table).tree.items():
            rows.setdefault(name, []).append(row)
    return rows


def lay_arm(cls: type, layer: Layer, tables: Sequence[str], arm: str) -> None:
    """Lays the settings of an arm over `layer`, in place. Raises `UserError` if no table has the arm."""
    known: list[str] = []
    for name in tables:
        table = read_yaml(cls, name)
        known += [other for other in table.tree if other not in known]
        if arm not in table.tree:
            continue
        row = table.tree[arm]
        settings = row.get("set") if isinstance(row, dict) else None
        if not isinstance(settings, dict):
            raise UserError(f"{table.where((arm,))}: {arm}: expected a mapping with `set`, the settings of this arm.")
        origins = {path[2:]: origin for path, origin in table.origins.items() if path[:2] == (arm, "set")}
        merge(cls, layer, Layer(settings, origins, name))
    if arm not in known:
        hint = did_you_mean(arm, known)
        others = f"Its arms: {listing(known)}." if known else "It names no table of `arms`."
        raise UserError(f"override '{_ARM}{arm}': {layer.source} has no such arm.{hint} {others}")


def read_yaml(cls: type, file: str | os.PathLike[str], _seen: tuple[str, ...] = ()) -> Layer:
    """Reads a YAML mapping with its line numbers, over the file that its top-level `base:` names, if there is one."""
    name = os.fspath(file)
    real = os.path.realpath(name)
    if real in _seen:
        raise UserError(
            f"{name}: `base` goes round in a circle: {' -> '.join((*_seen, real))}. Remove one of the links."
        )
    text = _read_text(name, _seen[-1] if _seen else None)
    try:
        root = _composed(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{place}: not valid YAML: {problem}.") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply to be read.") from None
    layer = Layer({}, {(): name}, name)
    if root is None:
        raise UserError(f"{name}: the file is empty.")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name}: expected `key: value` lines at the top, got {_describe_node(root)}.")
    layer.tree = _convert(root, (), layer, name, ())
    _find_arms(layer)
    base = layer.tree.pop("base", None)
    if base is None:
        return layer
    if not isinstance(base, str):
        raise UserError(f"{layer.where(('base',))}: base: expected a file name, got {_show(base)}.")
    below = read_yaml(cls, os.path.join(os.path.dirname(name), base), (*_seen, real))
    merge(cls, below, layer)
    below.source = name
    return below


def _find_arms(layer: Layer) -> None:
    """Makes the names of a file's tables of arms paths, seen from where the run is started."""
    if "arms" in layer.tree:
        names = layer.tree["arms"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{layer.where(('arms',))}: arms: expected a list of files, got {_show(names)}.")
        layer.tree["arms"] = [os.path.join(os.path.dirname(layer.source), name) for name in names]


def _read_text(name: str, by: str | None) -> str:
    """Reads a config file, which the file `by` names as its base."""
    try:
        with open(name, encoding="utf-8") as handle:
            return handle.read()
    except FileNotFoundError:
        known = sorted(p.name for p in pathlib.Path(name).parent.glob("*.y*ml") if os.path.realpath(p) != by)
        near = difflib.get_close_matches(os.path.basename(name), known, n=1)
        hint = f" Did you mean {os.path.join(os.path.dirname(name), near[0])}?" if near else ""
        role = f", the `base` of {by}" if by else ""
        raise UserError(f"{name}: no such config file{role}.{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not a UTF-8 text file ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise UserError(f"{name}: cannot read the config file: {error.strerror or error}.") from None


def _convert(node: yaml.Node, path: Path, layer: Layer, name: str, open_nodes: tuple[int, ...]) -> Any:
    """YAML node -> plain values, noting each line and refusing duplicate keys (PyYAML keeps the last one silently)."""
    layer.origins[path] = f"{name}:{node.start_mark.line + 1}" if path else name
    if len(layer.origins) > MAX_VALUES:
        raise UserError(f"{name}: more than {MAX_VALUES:,} values, counting what an alias stands for each time.")
    if id(node) in open_nodes:
        raise UserError(f"{name}:{node.start_mark.line + 1}: an alias contains itself.")
    if len(open_nodes) > 50:
        raise UserError(f"{name}:{node.start_mark.line + 1}: nested deeper than 50 levels.")
    if said := misread(node):
        raise UserError(f"{name}:{node.start_mark.line + 1}: {_dotted(path)}: {said}")
    inside = (*open_nodes, id(node))
    if isinstance(node, yaml.CollectionNode) and node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        raise UserError(f"{name}:{node.start_mark.line + 1}: {_dotted(path)}: the tag {node.tag} is not accepted here.")
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = f"{name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                raise UserError(f"{line}: only plain words can be keys here.")
            key = key_node.value
            if key in out:
                raise UserError(f"{line}: key {_dotted((*path, key))!r} is given twice; keep one.")
            out[key] = _convert(value_node, (*path, key), layer, name, inside)
            layer.origins[(*path, key)] = line
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, (*path, str(i)), layer, name, inside) for i, item in enumerate(node.value)]
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"{name}:{node.start_mark.line + 1}: {_dotted(path)}: {problem}.") from None


def merge(cls: type, below: Layer, above: Layer) -> None:
    """Merges `above` into `below`: mappings merge, other values are replaced, and a new `name` empties its section."""

    def lay(low: dict[str, Any], high: dict[str, Any], path: Path) -> None:
        if "name" in high and high["name"] != low.get("name") and holds_variants(cls, path):
            low.clear()
        for key, value in high.items():
            if isinstance(value, dict) and isinstance(low.get(key), dict):
                lay(low[key], value, (*path, key))
            else:
                low[key] = value

    lay(below.tree, above.tree, ())
    below.origins.update({path: origin for path, origin in above.origins.items() if path})


def apply_overrides(cls: type, layer: Layer, overrides: Sequence[str]) -> Layer:
    """Applies "a.b=c" overrides in order, in place; a section's `name` is applied before its other fields."""
    ordered: list[tuple[Path, _Text, str]] = []
    for item in map(_parse_override, overrides):
        own, section = item[0], item[0][:-1]
        inside = [i for i, (path, *_) in enumerate(ordered) if path != own and path[:-1][: len(section)] == section]
        ordered.insert(inside[0] if own[-1] == "name" and inside else len(ordered), item)
    for path, value, origin in ordered:
        at: Any = layer.tree
        for depth, key in enumerate(path[:-1], start=1):
            place: Any = _list_index(at, key, path[:depth], origin) if isinstance(at, list) else key
            inner = at[place] if isinstance(at, list) else at.get(place)
            if isinstance(inner, _Text):
                inner = _read_text_value(inner)
            at[place] = inner if isinstance(inner, dict | list) else {}
            at = at[place]
        if isinstance(at, list):
            at[_list_index(at, path[-1], path, origin)] = value
        else:
            if path[-1] == "name" and at.get("name") != value.text and holds_variants(cls, path[:-1]):
                at.clear()
            at[path[-1]] = value
        layer.origins = {p: o for p, o in layer.origins.items() if p[: len(path)] != path}
        layer.origins[path] = origin
    return layer


def _parse_override(text: str) -> tuple[Path, _Text, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        hint = f" (`{text.lstrip('-')}` without a value?)" if text.startswith("-") else ""
        raise UserError(f"override {text!r}: expected key=value, for example train.steps=10{hint}.")
    if key.startswith("-"):
        raise UserError(f"override {text!r}: write it without dashes: {key.lstrip('-')}={value}")
    path = tuple(key.split("."))
    if not all(path) or any(part != part.strip() for part in path):
        raise UserError(f"override {text!r}: {key!r} is not a dotted key such as train.steps.")
    return path, _Text(value), f"override {text!r}"


def _read_text_value(value: _Text) -> Any:
    try:
        return yaml.safe_load(value.text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return value.text


def _list_index(items: list[Any], key: str, path: Path, origin: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise UserError(f"{origin}: {_dotted(path)}: expected a list item, 0 to {len(items) - 1}, got {key!r}.")
    return int(key)


# ---------------------------------------------------------------------------------------------------- building


def build(cls: type[T], layer: Layer) -> T:
    """Checks a layer against the dataclass `cls` and builds it.

    Raises:
      UserError: unknown key, wrong type, missing required key, or a sentence from a `__post_init__`.
    """
    return _Builder(cls, layer).dataclass(cls, layer.tree, ())


class _Builder:
    """Walks the schema and the values together."""

    def __init__(self, root: type, layer: Layer):
        self.root = root
        self.layer = layer

    def section(self, path: Path, message: str = "") -> str:
        """Names, as a prefix, where the values of a section come from that a message names; else where it begins."""
        words = [tuple(word.split(".")) for word in re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", message)]
        blamed = [origin for word in words for field in ((*path, *word), word) for origin in self._set(field, path)]
        keys = re.findall(r"(?<![\w.])(\w+)=", message)  # "buffer_len=65", of a section below
        blamed += [o for at, o in self.layer.origins.items() if at[: len(path)] == path and at and at[-1] in keys]
        given = [origin for origin in blamed if origin.startswith("override ")]
        return ", ".join(dict.fromkeys(given or blamed or [self.layer.where(path)])) + ": "

    def _set(self, field: Path, path: Path) -> list[str]:
        """Lists where a field, or a section ("rollout.environment"), below `path` was set; empty: it was not."""
        known = {at: origin for at, origin in self.layer.origins.items() if at[: len(path)] == path and at}
        is_section = len(field) > 1  # a single word may be one of the sentence
        inside = [origin for at, origin in known.items() if at == field or (is_section and at[: len(field)] == field)]
        # An override may set a section as a whole.
        return inside or [o for at, o in known.items() if at == field[: len(at)] and o.startswith("override ")]

    def error(self, path: Path, message: str) -> UserError:
        prefix = f"{_dotted(path)}: " if path else ""
        return UserError(f"{self.layer.where(path)}: {prefix}{message}")

    def dataclass(self, cls: type, value: Any, path: Path, siblings: Variants | None = None, variant: str = "") -> Any:
        value = self.read(value, path)
        if not isinstance(value, Mapping):
            raise self.error(path, f"expected a section with keys {listing(field_types(cls))}, got {_show(value)}.")
        hints = field_types(cls)
        given: dict[str, Any] = {}
        for key, item in value.items():
            if key == "name" and siblings is not None:
                continue
            if key not in hints:
                raise self.unknown_key(hints, (*path, key), siblings, variant)
            given[key] = self.value(hints[key], item, (*path, key), field_default(cls, key))
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in given:
                dotted = _dotted((*path, field.name))
                words = type_words(hints[field.name])
                advice = f"add it to the file or pass {dotted}=..."
                raise UserError(f"{self.section(path, 'name')}{dotted} is required ({words}); {advice}")
        try:
            return cls(**given)
        except (UserError, ValueError) as error:
            dotted, text = _dotted(path), str(error)
            prefix = f"{dotted}: " if path and not text.startswith(f"{dotted}.") else ""  # some name their field whole
            raise UserError(f"{self.section(path, text)}{prefix}{text}") from None

    def unknown_key(self, hints: Mapping[str, Any], path: Path, siblings: Variants | None, variant: str) -> UserError:
        key = path[-1]
        if siblings is not None:
            owners = [name for name, other in siblings.types.items() if key in field_types(other)]
            if owners:
                section = _dotted(path[:-1])
                return self.error(
                    path,
                    f"this field belongs to {section}.name={' or '.join(owners)}, and {section}.name is {variant};"
                    f" remove it or set {section}.name={owners[0]}.",
                )
        section = _dotted(path[:-1]) or "the top level"
        if siblings is not None:
            section += f" (name={variant})"
        near = difflib.get_close_matches(key, hints, n=1)
        elsewhere, exact = self.elsewhere(key)  # a top-level `lr` is optimizer's, however like `lora` it looks
        suggestion = elsewhere if (exact and len(path) == 1) or not near else _dotted((*path[:-1], near[0]))
        hint = f" Did you mean {suggestion}?" if suggestion else ""
        if len(path) == 1 and sum(other not in hints for other in self.layer.tree) > 1:
            hint = " Several sections are unknown: is this a config of another command? Its header names the one."
        return self.error(path, f"unknown key.{hint} Known keys of {section}: {listing(hints) or 'none'}.")

    def elsewhere(self, key: str) -> tuple[str | None, bool]:
        """The full path of a key that ends like `key` (`clip_high` -> `loss.clip_high`), and whether it ends in it."""
        known = sorted(dotted_keys(self.root), key=lambda dotted: dotted.count("."))  # optimizer.lr before a critic's
        last = {dotted.rsplit(".", 1)[-1]: dotted for dotted in reversed(known)}
        near = difflib.get_close_matches(key, last, n=1, cutoff=0.8)
        return (last[near[0]] if near else None), key in last

    def plain(self, value: Any) -> Any:
        """An override's text read as YAML, for fields whose values are not plain text."""
        return _read_text_value(value) if isinstance(value, _Text) else value

    def read(self, value: Any, path: Path) -> Any:
        """`plain`, but for a value that is certainly YAML: what it would read amiss is refused."""
        plain = self.plain(value)
        if isinstance(value, _Text) and not isinstance(plain, str):
            node = yaml.compose(value.text, Loader=yaml.SafeLoader)
            if node is not None and (mistake := mistake_of(node)):
                raise self.error(path, mistake)
        return plain

    def deep(self, value: Any) -> Any:
        """Applies `plain` to a value and all it contains, for fields of any type; keys become str, tuples lists."""
        value = self.plain(value)
        if isinstance(value, Mapping):
            return {str(key): self.deep(item) for key, item in value.items()}
        return [self.deep(item) for item in value] if isinstance(value, list | tuple) else value

    def value(self, hint: Any, value: Any, path: Path, default: Any = dataclasses.MISSING) -> Any:
        origin = typing.get_origin(hint)
        if origin is Annotated:
            marks = variants_of(hint)
            return self.variant(marks[0], value, path, default) if marks else self.value(hint.__origin__, value, path)
        if hint is Any or hint is object:
            return self.deep(value)
        if origin in (Union, types.UnionType):
            return self.union(hint, value, path, default)
        if origin is Literal:
            return self.literal(hint, value, path)
        if origin is tuple:
            return self.tuple(hint, value, path)
        if origin is dict or hint is dict:
            return self.mapping(hint, value, path)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(typing.cast(type, hint), value, path)
        value = value.text if hint is str and isinstance(value, _Text) else self.read(value, path)
        if isinstance(value, str) and value.startswith("~/"):
            return os.path.expanduser(value)  # a shell expands it at the beginning of a word only, not after key=
        if hint is float:
            return self.float(value, path)
        if hint is type(None) and value is None:
            return None
        if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
            return value
        raise self.error(path, f"expected {type_words(hint)}, got {_show(value)}.{_type_hint(hint, value)}")

    def variant(self, variants: Variants, value: Any, path: Path, default: Any) -> Any:
        value = self.read(value, path)
        names = listing(variants.types)
        if isinstance(value, str):
            raise self.error(path, f"expected a section, got {value!r}; write {_dotted(path)}.name={value}.")
        if not isinstance(value, Mapping):
            raise self.error(path, f"expected a section with a `name` ({names}), got {_show(value)}.")
        if "name" in value:
            name = value["name"].text if isinstance(value["name"], _Text) else value["name"]
        elif value and path in self.layer.origins:
            # Otherwise `loss: {clip_high: ...}` would change its meaning when another layer names another loss.
            raise self.error(path, f"`name` is required in this section; known: {names}.")
        elif default is not dataclasses.MISSING and default is not None:
            name = variants.name_of(default)
        elif variants.default is not None:
            name = variants.default
        else:
            raise UserError(f"{self.section(path)}{_dotted(path)}: `name` is required here; known: {names}.")
        if name not in variants.types:
            hint = did_you_mean(str(name), variants.types)
            raise self.error((*path, "name"), f"unknown name {name!r}.{hint} Known: {names}.")
        return self.dataclass(variants.types[name], value, path, variants, name)

    def union(self, hint: Any, value: Any, path: Path, default: Any) -> Any:
        options = typing.get_args(hint)
        if type(None) in options and self.plain(value) is None:
            return None
        options = tuple(option for option in options if option is not type(None))
        if len(options) == 1:
            return self.value(options[0], value, path, default)
        # Text last: an override is always text, and "3" for `int | str` means the number.
        for option in sorted(options, key=lambda option: option is str):
            try:
                return self.value(option, value, path, default)
            except UserError:
                continue
        raise self.error(path, f"expected {type_words(hint)}, got {_show(self.plain(value))}.")

    def literal(self, hint: Any, value: Any, path: Path) -> Any:
        allowed = typing.get_args(hint)
        plain = self.plain(value)
        text = value.text if isinstance(value, _Text) else plain
        read_as = ("on", "yes", "true") if plain is True else ("off", "no", "false") if plain is False else ()
        for candidate in (text, plain, *read_as):  # YAML 1.1 reads a bare `off` as false
            for option in allowed:
                if type(option) is type(candidate) and option == candidate:
                    return option
        hint_text = did_you_mean(str(text), map(str, allowed))
        raise self.error(path, f"expected one of {listing(allowed)}, got {_show(text)}.{hint_text}")

    def tuple(self, hint: Any, value: Any, path: Path) -> tuple[Any, ...]:
        args = typing.get_args(hint)
        value = self.read(value, path)
        if not isinstance(value, list | tuple):
            raise self.error(path, f"expected {type_words(hint)}, got {_show(value)}.")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(self.value(args[0], item, (*path, str(i))) for i, item in enumerate(value))
        if len(args) != len(value):
            raise self.error(path, f"expected a list of {len(args)} values, got {len(value)}.")
        return tuple(
            self.value(arg, item, (*path, str(i))) for i, (arg, item) in enumerate(zip(args, value, strict=True))
        )

    def mapping(self, hint: Any, value: Any, path: Path) -> dict[str, Any]:
        args = typing.get_args(hint) or (str, Any)
        value = self.read(value, path)
        if not isinstance(value, Mapping):
            raise self.error(path, f"expected a mapping (key: value), got {_show(value)}.")
        return {str(key): self.value(args[1], item, (*path, str(key))) for key, item in value.items()}

    def float(self, value: Any, path: Path) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        elif isinstance(value, str):
            try:  # YAML 1.1 reads 1e-6 (no dot) as text
                number = float(value)
            except ValueError:
                raise self.error(path, f"expected a number, got {_show(value)}.") from None
        else:
            raise self.error(path, f"expected a number, got {_show(value)}.")
        if not math.isfinite(number):
            raise self.error(path, f"expected a finite number, got {number}.")
        return number


# ---------------------------------------------------------------------------------------------------- writing


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a built config to plain values, variants with `name` first. `build` makes an equal config of them."""
    return {key: _plain_out(hint, getattr(config, key)) for key, hint in field_types(type(config)).items()}


def _plain_out(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is Annotated:
        marks = variants_of(hint)
        if marks and value is not None:
            return {"name": marks[0].name_of(value), **to_dict(value)}
        return _plain_out(hint.__origin__, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = [option for option in typing.get_args(hint) if typing.get_origin(option) is Annotated]
        return _plain_out(options[0], value) if options else to_dict(value)
    if isinstance(value, tuple | list):
        args = typing.get_args(hint)
        many = len(args) == 2 and args[1] is Ellipsis
        return [_plain_out(args[0] if many else args[i] if args else Any, item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        args = typing.get_args(hint) or (str, Any)
        return {key: _plain_out(args[1], item) for key, item in value.items()}
    return value


def to_yaml(config: Any) -> str:
    """Writes the resolved config as YAML, which `load` reads back to an equal config."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, width=120)


def _type_hint(hint: Any, value: Any) -> str:
    if hint is str and isinstance(value, bool):
        return " (YAML reads yes/no/on/off as true/false: put quotes around it.)"
    if hint is str and value is not None:
        return " Put quotes around it."
    if hint is int and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    return ""


def _describe_node(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(node.value)


def _dotted(path: Path) -> str:
    return ".".join(path)


def _show(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
