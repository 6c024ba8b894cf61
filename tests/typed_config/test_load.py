# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading configs: what is accepted means what it says; what is refused is refused with place and remedy."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_jax.typed_config import load
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import UserError


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="run.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


# ---- a small schema with every kind of field ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Red:
    shade: float = 0.5
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blue:
    depth: int
    size: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    parts: tuple[Annotated[Any, Variants({"red": Red, "blue": Blue})], ...] = ()


Color = Annotated[Any, Variants({"red": Red, "blue": Blue, "mixed": Mixed})]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    x: int = 1
    y: float = 2.0

    def __post_init__(self):
        if self.x > self.y:
            raise UserError(f"x={self.x} exceeds y={self.y}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    flag: bool = False
    count: int = 0
    ratio: float = 1.0
    label: str = ""
    mode: Literal["fast", "slow"] = "fast"
    level: Literal[1, 2, "off"] = 1
    maybe: int | None = None
    many: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    either: int | str = 0
    free: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)
    color: Color = dataclasses.field(default_factory=Red)
    second: Color | None = None


def thing(tree=None, *overrides):
    layer = load.Layer(dict(tree or {}), {(): "test"}, "test")
    return load.build(Thing, load.apply_overrides(Thing, layer, overrides))


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("flag=true", "flag", True),
        ("count=-3", "count", -3),
        ("count=1_000", "count", 1000),
        ("ratio=3", "ratio", 3.0),
        ("ratio=1e-6", "ratio", 1e-6),
        ("ratio=4E+3", "ratio", 4000.0),
        ("label=1e-6", "label", "1e-6"),
        ("label=off", "label", "off"),
        ("label=", "label", ""),
        ("label=a=b c", "label", "a=b c"),
        ("mode=slow", "mode", "slow"),
        ("level=2", "level", 2),
        ("level=off", "level", "off"),
        ("maybe=3", "maybe", 3),
        ("maybe=null", "maybe", None),
        ("many=[1, 2]", "many", (1, 2)),
        ("many=[]", "many", ()),
        ("pair=[3, x]", "pair", (3, "x")),
        ("either=3", "either", 3),
        ("either=x", "either", "x"),
        ("free.a.b=3", "free", {"a": {"b": 3}}),
        ("free={a: [1, x]}", "free", {"a": [1, "x"]}),
        ("sizes.a=3", "sizes", {"a": 3}),
        ("inner.y=9", "inner", Inner(y=9.0)),
        ("inner={x: 2, y: 3}", "inner", Inner(x=2, y=3.0)),
        ("color.shade=0.1", "color", Red(shade=0.1)),
        ("second={name: blue, depth: 3}", "second", Blue(depth=3)),
        ("second=null", "second", None),
    ],
)
def test_an_override_has_the_type_of_its_field(override, field, value):
    got = getattr(thing(None, override), field)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("flag=1", "flag: expected true or false, got 1."),
        ("count=true", "count: expected an integer, got true."),
        ("count=3.0", "count: expected an integer, got 3.0. Write 3."),
        ("count=x", "count: expected an integer, got 'x'."),
        ("count=", "count: expected an integer, got nothing (null)."),
        ("ratio=fast", "ratio: expected a number, got 'fast'."),
        ("ratio=.nan", "ratio: expected a finite number, got nan."),
        ("ratio=.inf", "ratio: expected a finite number, got inf."),
        ("ratio=-.inf", "ratio: expected a finite number, got -inf."),
        ("ratio=yes", "ratio: expected a number, got true."),
        ("mode=fats", "mode: expected one of fast, slow, got 'fats'. Did you mean fast?"),
        ("level=3", "level: expected one of 1, 2, off, got '3'."),
        ("maybe=x", "maybe: expected an integer, got 'x'."),
        ("many=3", "many: expected a list, got 3."),
        ("many=[1, x]", "many.1: expected an integer, got 'x'."),
        ("pair=[1]", "pair: expected a list of 2 values, got 1."),
        ("sizes.a=x", "sizes.a: expected an integer, got 'x'."),
        ("free=3", "free: expected a mapping (key: value), got 3."),
        ("inner=3", "inner: expected a section with keys x, y, got 3."),
        ("inner.z=3", "inner.z: unknown key. Known keys of inner: x, y."),
        ("cuont=3", "cuont: unknown key. Did you mean count?"),
        ("shade=3", "shade: unknown key. Did you mean color.shade?"),
        ("size=3", "size: unknown key. Did you mean color.size?"),  # not `sizes`, which is only like it
        ("color=blue", "color: expected a section, got 'blue'; write color.name=blue."),
        ("color.name=bleu", "color.name: unknown name 'bleu'. Did you mean blue? Known: red, blue, mixed."),
        (
            "color.depth=3",
            "color.depth: this field belongs to color.name=blue, and color.name is red;",
        ),
        ("color.name=blue", "color.depth is required (an integer); add it to the file or pass color.depth=..."),
        ("second.size=3", "second: `name` is required here; known: red, blue, mixed."),
        ("inner.x=9", "inner: x=9 exceeds y=2.0."),
        ("count", "override 'count': expected key=value, for example train.steps=10."),
        ("--count=3", "override '--count=3': write it without dashes: count=3"),
        (".count=3", "is not a dotted key"),
        ("a..b=3", "is not a dotted key"),
        ("=3", "is not a dotted key"),
    ],
)
def test_a_wrong_override_is_refused_with_the_reason(override, message):
    with pytest.raises(UserError) as caught:
        thing(None, override)
    assert message in str(caught.value)
    assert override in str(caught.value)


def test_the_order_of_name_and_fields_does_not_matter():
    assert thing(None, "color.depth=3", "color.name=blue").color == Blue(depth=3)
    assert thing(None, "color.name=blue", "color.depth=3").color == Blue(depth=3)


def test_another_name_starts_the_section_anew():
    # `size` exists in both variants but is another quantity in each: red's must not leak into blue.
    tree = {"color": {"name": "red", "shade": 0.1, "size": 7}}
    assert thing(tree).color == Red(shade=0.1, size=7)
    assert thing({"color": dict(tree["color"])}, "color.name=blue", "color.depth=1").color == Blue(depth=1, size=2)
    assert thing({"color": dict(tree["color"])}, "color.name=red").color == Red(shade=0.1, size=7)


def test_items_of_lists_of_variants_can_be_overridden():
    tree = {"color": {"name": "mixed", "parts": [{"name": "red", "shade": 0.1}, {"name": "red"}]}}
    got = thing(tree, "color.parts.1.name=blue", "color.parts.1.depth=4", "color.parts.0.size=5").color
    assert got == Mixed(parts=(Red(shade=0.1, size=5), Blue(depth=4)))
    with pytest.raises(UserError, match="expected a list item, 0 to 1, got '2'"):
        thing({"color": {"name": "mixed", "parts": [{"name": "red"}] * 2}}, "color.parts.2.size=1")


def test_a_section_given_whole_does_not_undo_what_is_named_in_it_later():
    assert thing(None, "color={name: red}", "color.name=blue", "color.depth=3").color == Blue(depth=3)
    assert thing(None, "color.depth=3", "color.name=blue", "color={name: red}").color == Red()
    assert thing(None, "color.depth=3", "color.name=red", "color.name=blue").color == Blue(depth=3)


@pytest.mark.parametrize("number", ["010", "-017", "1:30"])
def test_a_number_that_yaml_takes_for_another_is_refused(number, write):
    for refused in (lambda: thing(None, f"count={number}"), lambda: load.load(Thing, write(f"count: {number}\n"))):
        with pytest.raises(UserError, match=rf"count: YAML reads {number} as -?\d+: write "):
            refused()
    assert thing(None, "count=0").count == 0
    assert thing(None, f"label={number}").label == number


def test_a_key_is_given_once_in_the_section_of_an_override_too():
    with pytest.raises(UserError, match=r"override 'inner=\{x: 1, x: 2\}': inner: key 'x' is given twice"):
        thing(None, "inner={x: 1, x: 2}")


def test_later_overrides_win():
    assert thing(None, "count=1", "count=2").count == 2
    assert thing(None, "inner={x: 0, y: 1}", "inner.y=5").inner == Inner(x=0, y=5.0)


leaves = st.fixed_dictionaries(
    {},
    optional={
        "flag": st.booleans(),
        "count": st.integers(-(2**40), 2**40),
        "ratio": st.floats(allow_nan=False),
        "label": st.text(),
        "mode": st.sampled_from(["fast", "slow"]),
        "maybe": st.none() | st.integers(),
        "many": st.lists(st.integers(), max_size=3),
        "either": st.integers() | st.text(),
        "free": st.dictionaries(st.text(), st.integers() | st.text() | st.booleans(), max_size=3),
        "color": st.builds(lambda d: {"name": "blue", "depth": d}, st.integers())
        | st.builds(lambda s: {"name": "mixed", "parts": [{"name": "red", "shade": s}]}, st.floats(0, 1)),
        "second": st.none() | st.builds(lambda s: {"name": "red", "shade": s}, st.floats(0, 1)),
    },
)


@pytest.mark.slow
@settings(deadline=None)
@given(tree=leaves)
def test_the_dumped_config_reads_back_as_the_same_config(tree, tmp_path_factory):
    built = thing(tree)
    assert load.build(Thing, load.Layer(load.to_dict(built), {(): "dump"}, "dump")) == built
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(load.to_yaml(built), encoding="utf-8")
    assert load.load(Thing, path) == built


def test_dotted_keys_name_every_field_once():
    keys = load.dotted_keys(Thing)
    assert len(keys) == len(set(keys))
    assert {"count", "inner.x", "color.name", "color.shade", "color.depth", "second.name"} <= set(keys)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_an_error_in_a_file_names_file_and_line(write):
    path = write("count: 1\ninner:\n  x: 1\n  z: 2\n")
    with pytest.raises(UserError) as caught:
        load.load(Thing, path)
    assert str(caught.value).startswith(f"{path}:4: inner.z: unknown key.")


def test_a_mistyped_section_of_an_override_is_not_blamed_on_the_file(write):
    with pytest.raises(UserError) as caught:
        load.load(Thing, write("count: 1\n"), ["iner.x=3"])
    assert str(caught.value).startswith("override 'iner.x=3': iner: unknown key. Did you mean inner?")


def test_words_that_yaml_reads_as_true_or_false_are_taken_where_they_are_choices(write):
    assert load.load(Thing, write("level: off\n")).level == "off"
    assert load.load(Thing, write("inner: {x: 1}\n"), ["free={a: 1}", "level=off"]).level == "off"
    with pytest.raises(UserError, match="level: expected one of 1, 2, off, got true"):
        load.load(Thing, write("level: on\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("- 1\n", "expected `key: value` lines at the top, got a list"),
        ("hello\n", "expected `key: value` lines at the top, got 'hello'"),
        ("count: [1\n", "run.yaml:2: not valid YAML"),
        ("count: 1\n\tx: 2\n", "run.yaml:2: not valid YAML"),
        ("count: 1\ninner: {x: 1}\ncount: 2\n", "run.yaml:3: key 'count' is given twice"),
        ("inner:\n  x: 1\n  x: 1\n", "run.yaml:3: key 'inner.x' is given twice"),
        ("inner: &a\n  free: *a\n", "an alias contains itself"),
        ("inner:\n  <<: {x: 1}\n", "run.yaml:2: only plain words can be keys"),
        ("? [1, 2]\n: 3\n", "only plain words can be keys"),
        ("label: on\n", "label: expected text, got true. (YAML reads yes/no/on/off as true/false"),
        ("label: 12\n", "label: expected text, got 12. Put quotes around it."),
        ("count: !!python/object/apply:os.system ['true']\n", "python/object/apply:os.system is not accepted here"),
        ("count: !!python/name:os.system x\n", "could not determine a constructor"),
        ("count: 2024-99-99\n", "run.yaml:1: count: "),
        ("color:\n  size: 3\n", "run.yaml:1: color: `name` is required in this section"),
        ("base: 3\n", "base: expected a file name, got 3"),
        ("base: run.yaml\n", "goes round in a circle"),
        ("base: other.yaml\n", "other.yaml: no such config file, the `base` of "),
        ("inner:\n", "inner: expected a section with keys x, y, got nothing (null)"),
        ("free: " + "[" * 60 + "]" * 60 + "\n", "nested deeper than 50 levels"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(write, text, message):
    path = write(text)
    with pytest.raises(UserError) as caught:
        load.load(Thing, path)
    assert message in str(caught.value)
    assert "run.yaml" in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(write):
    path = write("count: 1\n", "quickstart.yaml")
    with pytest.raises(UserError, match=r"no such config file\. Did you mean .*quickstart\.yaml\?"):
        load.load(Thing, path.replace("quickstart", "quikstart"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_an_unreadable_file_is_refused(tmp_path, content):
    path = tmp_path / "x.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.yaml"):
        load.load(Thing, path)


def test_base_lies_under_the_file_and_lines_are_those_of_the_file_that_said_it(write):
    write("count: 1\nratio: 2\ninner: {x: 1, y: 5}\nmany: [1, 2, 3]\n", "low.yaml")
    write("base: low.yaml\ncount: 2\ninner: {x: 3}\n", "middle.yaml")
    top = write("base: middle.yaml\nmany: [4]\n", "top.yaml")
    got = load.load(Thing, top)
    assert (got.count, got.ratio, got.inner, got.many) == (2, 2.0, Inner(x=3, y=5.0), (4,))
    write("count: 1\nratio: x\n", "low.yaml")
    with pytest.raises(UserError, match=r"low\.yaml:2: ratio: expected a number"):
        load.load(Thing, top)


def test_base_in_another_folder_is_found_from_the_file(write, tmp_path):
    (tmp_path / "sub").mkdir()
    write("count: 7\n", "low.yaml")
    path = write("base: ../low.yaml\n", "sub/top.yaml")
    assert load.load(Thing, path).count == 7


def test_a_variant_of_the_base_does_not_leak_into_another(write):
    write("color: {name: red, shade: 0.1, size: 7}\n", "low.yaml")
    top = write("base: low.yaml\ncolor: {name: blue, depth: 1}\n", "top.yaml")
    assert load.load(Thing, top).color == Blue(depth=1, size=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamesItself:
    size: int = 1

    def __post_init__(self):
        if self.size < 1:
            raise UserError(f"part.size must be positive, got {self.size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HasPart:
    part: NamesItself = dataclasses.field(default_factory=NamesItself)


def test_a_section_that_is_named_in_the_sentence_is_not_named_again(write):
    with pytest.raises(UserError) as caught:
        load.load(HasPart, write("part: {size: 0}\n"))
    assert str(caught.value).endswith("run.yaml:1: part.size must be positive, got 0")
