# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration: what is accepted means what it says; what is refused is refused with where, what and what instead."""

import dataclasses
import glob
import os
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_jax import config, fields, schema, sft
from qarl_jax.loss import grpo, tbpo
from qarl_jax.quant import numerics
from qarl_jax.schema import Variants
from qarl_jax.types import UserError

MINIMAL = {
    "model": {"path": "m"},
    "data": {"source": {"name": "reasoning_gym", "dataset": "chain_sum"}, "max_prompt_len": 64},
    "rollout": {"max_response_len": 64},
}


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="run.yaml"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return str(path)

    return write_file


@pytest.fixture
def load(write):
    """Loads MINIMAL with overrides."""
    return lambda *overrides: config.load(write(MINIMAL), overrides)


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
    layer = schema.Layer(dict(tree or {}), {(): "test"}, "test")
    return schema.build(Thing, schema.apply_overrides(Thing, layer, overrides))


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("flag=true", "flag", True),
        ("count=-3", "count", -3),
        ("count=1_000", "count", 1000),
        ("ratio=3", "ratio", 3.0),
        ("ratio=1e-6", "ratio", 1e-6),
        ("ratio=4E+3", "ratio", 4000.0),
        ("ratio=.inf", "ratio", float("inf")),
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
        ("ratio=.nan", "ratio: expected a number, got nan."),
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
    assert schema.build(Thing, schema.Layer(schema.to_dict(built), {(): "dump"}, "dump")) == built
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(schema.to_yaml(built), encoding="utf-8")
    assert schema.load(Thing, path) == built


def test_dotted_keys_name_every_field_once():
    keys = schema.dotted_keys(Thing)
    assert len(keys) == len(set(keys))
    assert {"count", "inner.x", "color.name", "color.shade", "color.depth", "second.name"} <= set(keys)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_an_error_in_a_file_names_file_and_line(write):
    path = write("count: 1\ninner:\n  x: 1\n  z: 2\n")
    with pytest.raises(UserError) as caught:
        schema.load(Thing, path)
    assert str(caught.value).startswith(f"{path}:4: inner.z: unknown key.")


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
        ("base: other.yaml\n", "other.yaml: no such config file"),
        ("inner:\n", "inner: expected a section with keys x, y, got nothing (null)"),
        ("free: " + "[" * 60 + "]" * 60 + "\n", "nested deeper than 50 levels"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(write, text, message):
    path = write(text)
    with pytest.raises(UserError) as caught:
        schema.load(Thing, path)
    assert message in str(caught.value)
    assert "run.yaml" in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(write):
    path = write("count: 1\n", "quickstart.yaml")
    with pytest.raises(UserError, match=r"no such config file\. Did you mean .*quickstart\.yaml\?"):
        schema.load(Thing, path.replace("quickstart", "quikstart"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_an_unreadable_file_is_refused(tmp_path, content):
    path = tmp_path / "x.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.yaml"):
        schema.load(Thing, path)


def test_base_lies_under_the_file_and_lines_are_those_of_the_file_that_said_it(write):
    write("count: 1\nratio: 2\ninner: {x: 1, y: 5}\nmany: [1, 2, 3]\n", "low.yaml")
    write("base: low.yaml\ncount: 2\ninner: {x: 3}\n", "middle.yaml")
    top = write("base: middle.yaml\nmany: [4]\n", "top.yaml")
    got = schema.load(Thing, top)
    assert (got.count, got.ratio, got.inner, got.many) == (2, 2.0, Inner(x=3, y=5.0), (4,))
    write("count: 1\nratio: x\n", "low.yaml")
    with pytest.raises(UserError, match=r"low\.yaml:2: ratio: expected a number"):
        schema.load(Thing, top)


def test_base_in_another_folder_is_found_from_the_file(write, tmp_path):
    (tmp_path / "sub").mkdir()
    write("count: 7\n", "low.yaml")
    path = write("base: ../low.yaml\n", "sub/top.yaml")
    assert schema.load(Thing, path).count == 7


def test_a_variant_of_the_base_does_not_leak_into_another(write):
    write("color: {name: red, shade: 0.1, size: 7}\n", "low.yaml")
    top = write("base: low.yaml\ncolor: {name: blue, depth: 1}\n", "top.yaml")
    assert schema.load(Thing, top).color == Blue(depth=1, size=2)


# ---- the config of a run --------------------------------------------------------------------------------------------


def test_a_run_gets_its_folder_from_the_name_of_its_file(write):
    assert config.load(write(MINIMAL, "abc.yaml")).run_dir == os.path.join("runs", "abc")
    assert config.load(write(MINIMAL, "abc.yaml"), ["run_dir=elsewhere"]).run_dir == "elsewhere"


def test_model_and_data_are_the_only_things_one_must_say(load):
    cfg = load()
    assert isinstance(cfg.loss, tbpo.Config)
    assert cfg.quant.rollout_scheme == cfg.quant.forward == "w4a16"
    for key in ("model", "data"):
        with pytest.raises(UserError, match=f"{key} is required"):
            config.from_dict({k: v for k, v in MINIMAL.items() if k != key})


def test_a_loss_is_chosen_by_name_with_its_own_fields(load):
    assert load("loss.name=grpo", "loss.dual_clip=3").loss == grpo.Config(dual_clip=3.0)
    with pytest.raises(UserError, match=r"loss\.w_mode: this field belongs to loss\.name=tbpo, and"):
        load("loss.name=grpo", "loss.w_mode=drop")


def test_derived_numbers_are_in_prompts_and_printed(load):
    cfg = load(
        "train.steps=10",
        "train.prompts_per_step=32",
        "train.prompts_per_update=8",
        "train.update_epochs=2",
        "rollout.num_samples_per_prompt=4",
    )
    # 32 / 8 = 4 updates per pass, two passes; 10 steps.
    assert (cfg.train.updates_per_step, cfg.train.total_updates, cfg.row_len) == (8, 80, 128)
    text = config.describe(cfg)
    for part in (
        "32 prompts x 4 samples = 128 responses",
        "8 prompts x 4 samples = 32 responses",
        "8 updates per step",
    ):
        assert part in text
    assert "10 steps = 80 updates = 1280 responses" in text


STAGES = "rollout.stages=[{until: 3, max_response_len: 16}, {until: 5, max_response_len: 32}]"


def test_stages_are_resolved_by_the_step_alone(load):
    cfg = load("train.steps=8", STAGES)
    assert [cfg.rollout.max_response_len_at(step) for step in range(8)] == [16] * 3 + [32] * 2 + [64] * 3
    assert [cfg.rollout.sampling((1,), step).max_response_len for step in (2, 3, 5)] == [16, 32, 64]
    assert cfg.rollout.sampling().max_response_len == 64  # evaluation's, and what is planned for
    assert [cfg.row_len_at(step) for step in (2, 3, 5)] == [80, 96, 128]
    assert cfg.row_len == 128
    fixed = load("train.row_len=130", STAGES)
    assert {fixed.row_len_at(step) for step in range(8)} == {130}
    assert [load().rollout.max_response_len_at(step) for step in (0, 10**6)] == [64, 64]


def test_stages_and_partial_rollouts_are_printed(load):
    text = config.describe(load("train.steps=8", STAGES))
    for part in (
        "stages       steps 0 to 2: response <= 16 tokens, rows of 80",
        "             steps 3 to 4: response <= 32 tokens, rows of 96",
        "             steps 5 to 7: response <= 64 tokens, rows of 128",
        "the learner's programs are compiled 3 times, once for each length of a row",
    ):
        assert part in text
    short = config.describe(load("train.steps=4", "train.row_len=130", STAGES))
    assert "steps 3 to 3: response <= 32 tokens, rows of 130" in short
    assert "steps 5" not in short  # never reached
    assert "compiled 1 time," in short
    text = config.describe(load("train.prompts_per_step=8", "rollout.partial={over_provision: 1.5, max_lag: 2}"))
    assert "12 prompts in hand; a step ends when 8 are complete, which is looked at every 8 tokens" in text
    assert "trained on at most 2 steps after" in text
    assert "stages" not in text
    assert "in hand" not in config.describe(load())


PPO = ("loss.name=ppo", "advantage.name=gae", "critic={}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.prompts_per_step=8", "train.prompts_per_update=3"], "prompts_per_step=8 is not a multiple of"),
        (
            ["train.prompts_per_step=8", "train.prompts_per_update=16"],
            "prompts_per_update=16 exceeds",
        ),
        (["train.steps=-1"], "steps must be at least 1, got -1"),
        (["train.steps=0"], "steps must be at least 1, got 0"),
        (
            ["train.row_len=100"],
            "train.row_len=100 is shorter than data.max_prompt_len=64 + rollout.",
        ),
        (["rollout.num_samples_per_prompt=1"], "a single response always gets advantage 0"),
        (["advantage.name=gae"], "the run has none: add `critic: {}`"),
        (["critic={}"], "advantage.name=grpo does not ask it; set advantage.name=gae, or critic=null"),
        (["loss.name=ppo"], "loss.name=ppo is the actor of a critic: set advantage.name=gae and `critic: {}`"),
        (["advantage.name=gae", "critic={}"], "loss.name=tbpo weighs a response by a single advantage"),
        ([*PPO, "critic.warmup_steps=10", "train.steps=10"], "critic.warmup_steps=10 leaves none of train.steps=10"),
        (["advantage.name=drgrpo", "advantage.gamma=1"], "this field belongs to advantage.name=gae"),
        (
            [*PPO, "rollout.num_samples_per_prompt=1", "rollout.dynamic.max_batches=2"],
            "rollout.dynamic.max_batches=2 keeps groups whose responses differ",
        ),
        (["rollout.top_p=0.9"], "training needs temperature > 0, top_p=1 and top_k=0"),
        (["rollout.top_k=5"], "training needs temperature > 0, top_p=1 and top_k=0"),
        (["rollout.temperature=0"], "training needs temperature > 0"),
        (["rollout.top_p=1.5"], "top_p must be in (0, 1]"),
        (
            ["train.micro_batch_rows=6", "mesh.fsdp=4"],
            "train.micro_batch_rows=6 is not a multiple of mesh.data x",
        ),
        (["mesh.data=0"], "data=0: a mesh axis has at least 1 device"),
        (["mesh.data=-1", "mesh.fsdp=-1"], "only one mesh axis may be -1"),
        (["quant.forward=w5a16"], "'w5a16'"),
        (["quant.rollout=int4"], "'int4'"),
        (["quant.rules=[{match: '(', scheme: w8a8}]"], "is not a regular expression"),
        (["quant.rules=[{match: mlp}]"], "quant.rules.0.scheme is required"),
        (["data.holdout=1.0"], "holdout is a share"),
        (["data.max_prompt_len=0"], "max_prompt_len must be at least 1"),
        (["seed=-1"], "seed must lie in"),
        (["eval.num_samples=4"], "greedy responses to a prompt are all the same"),
        (["eval.temperature=-1"], "temperature must not be negative"),
        (["reward.name=overlong", "reward.buffer_len=65"], "buffer_len=65 exceeds the limit of 64 tokens"),
        (["reward={name: sum, terms: []}"], "needs at least one entry in `terms`"),
        (
            ["data.source.name=jsonl", "data.source.path=x", "reward.name=reasoning_gym"],
            "reward.name=reasoning_gym asks the task's own scorer, but data.source is not reasoning_gym",
        ),
        (
            ["data.source.name=jsonl", "data.source.path=x", "data.source.prompt_key=q"],
            "give both prompt_key and",
        ),
        (["rollout.engine.name=vllm", "rollout.engine.max_model_len=100"], "rollout.engine.max_model_len=100 is below"),
        (
            ["rollout.stages=[{until: 5, max_response_len: 8}, {until: 5, max_response_len: 16}]"],
            "stages.1: until=5 does not come after the stage before it, which lasts until step 5",
        ),
        (
            ["rollout.stages=[{until: 5, max_response_len: 65}]"],
            "stages.0: max_response_len=65 exceeds rollout.max_response_len=64",
        ),
        (["rollout.stages=[{until: 0, max_response_len: 8}]"], "until must be at least 1, got 0"),
        (["rollout.stages=[{until: 5, max_response_len: 0}]"], "max_response_len must be at least 1, got 0"),
        (["rollout.stages=[{until: 5}]"], "rollout.stages.0.max_response_len is required"),
        (["rollout.stages={until: 5}"], "rollout.stages: expected a list"),
        (
            ["rollout.stages=[{until: 5, max_response_len: 8}]", "reward.name=overlong", "reward.buffer_len=9"],
            "buffer_len=9 exceeds the limit of 8 tokens (rollout.stages)",
        ),
        (["rollout.partial.over_provision=3"], "over_provision must lie in [1, 2] (1: off), got 3.0"),
        (
            ["rollout.partial.over_provision=1.5", "rollout.partial.chunk=64"],
            "chunk=64 is not below max_response_len=64",
        ),
        (["rollout.partial.chunk=8"], "chunk=8 decides nothing at over_provision=1"),
        (["rollout.partial.over_provision=2", "rollout.partial.max_lag=0"], "max_lag must be at least 1"),
        (["checkpoint.every=-1"], "every must be 0 (never) or more"),
        (["optimizer.lr=-1"], "lr"),
        (["loss.clip_high=-1"], "clip_high"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(load, overrides, message):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert message in str(caught.value)
    assert all(o.split("=")[0].split(".")[0] in str(caught.value) for o in overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.warmup_steps=-1", "warmup_steps must be at least 0, got -1"),
        ("critic.clip=0", "clip must be positive, or null"),
        ("critic.optimizer.name=sgd", "critic.optimizer.name: unknown name 'sgd'"),
        ("critic.lr=1e-5", "critic.lr: unknown key. Did you mean"),
        ("advantage.gamma=1.5", "gamma = 1.5: must be at most 1"),
    ],
)
def test_bad_settings_of_a_critic_are_told_where_they_stand(load, override, message):
    with pytest.raises(UserError) as caught:
        load(*PPO, override)
    assert f"override '{override}'" in str(caught.value)
    assert message in str(caught.value)


def test_a_critic_takes_groups_of_one_and_leaves_the_policy_the_rest_of_the_updates(load):
    cfg = load(*PPO, "rollout.num_samples_per_prompt=1", "train.steps=10", "critic={warmup_steps: 4}")
    assert cfg.policy_updates == 6 * cfg.train.updates_per_step
    assert "adamw at lr 1e-05; the policy waits 4 steps" in config.describe(cfg)
    assert "none" in next(line for line in config.describe(load()).splitlines() if line.startswith("critic"))
    assert load().policy_updates == load().train.total_updates


@pytest.mark.parametrize(
    ("engine", "sampler", "profile"),
    [
        ("auto", "jax", "plain"),
        ("auto", "vllm", "cpu_amx"),
        ("cpu", "jax", "cpu_amx"),
        ("cuda", "jax", "cuda"),
        *((name, "vllm", name) for name in numerics.PROFILES),  # as a bridge elsewhere may ask for it
    ],
)
def test_auto_mirrors_vllm_where_vllm_samples_and_nothing_else_does_so_unasked(
    load, monkeypatch, engine, sampler, profile
):
    monkeypatch.setattr(numerics, "cpu_has_amx", lambda: True)  # tests run on a CPU
    cfg = load(f"quant.engine={engine}", f"rollout.engine.name={sampler}")
    assert cfg.numerics.profile == profile
    assert cfg.quant.engine == engine


def test_the_resolved_config_of_a_run_reads_back(load, write):
    cfg = load(*PPO, "advantage.lam=0.9", "critic={path: x, optimizer: {name: muon, lr: 1.0e-4}}")
    assert config.load(write(config.to_yaml(cfg), "critic.yaml")) == cfg
    cfg = load(
        "reward={name: sum, terms: [{reward: {name: exact}}, {reward: {name: format}, coef: 0.1}]}",
        "quant.rules=[{match: 'layers.0', scheme: bf16}]",
        "loss.name=grpo",
        "optimizer.name=adamw",
        "rollout.engine.name=vllm",
        STAGES,
        "rollout.partial={over_provision: 1.5, chunk: 4}",
        "eval.data={source: {name: jsonl, path: x}, template: raw}",
    )
    assert config.load(write(config.to_yaml(cfg), "dump.yaml")) == cfg


@pytest.mark.parametrize("key", schema.dotted_keys(config.RunConfig))
def test_every_key_of_the_schema_has_words_for_its_type(key):
    # What an error message would say of this key; an annotation the machinery does not know would show up as its repr.
    *section, name = key.split(".")
    for cls in sections(config.RunConfig, section):
        hints = schema.field_types(cls)
        if name in hints:
            assert "typing." not in schema.type_words(hints[name])


def sections(cls, path):
    classes = [cls]
    for part in path:
        found = []
        for owner in classes:
            hint = schema.field_types(owner).get(part)
            found.extend(nested for nested, _ in fields._nested(hint) if hint is not None)
        classes = found
    return classes


CONFIGS = sorted(glob.glob(os.path.join(os.path.dirname(__file__), "..", "configs", "*.yaml")))


def is_sft(path):
    with open(path, encoding="utf-8") as handle:
        return "out" in yaml.safe_load(handle)


@pytest.mark.parametrize("path", CONFIGS, ids=os.path.basename)
def test_every_config_file_is_valid(path):
    if is_sft(path):
        assert schema.load(sft.Config, path).train.updates > 0
    else:
        assert config.describe(config.load(path))
