# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixed precision by rule, and which engine's arithmetic a run mirrors."""

import dataclasses
import pathlib

import pytest

from qarl_jax.numerics import engine
from qarl_jax.quant import PLAIN, Rules, resolve
from qarl_jax.quant.schemes import w4a16, w8a8
from qarl_jax.types import UserError

RULES = [
    {"match": r"layers\.0\.", "scheme": "bf16"},
    {"match": "self_attn", "scheme": "w8a8"},
    {"match": ".*", "scheme": "w4a16:g32"},
]


def test_the_first_rule_found_in_the_path_wins():
    rules = Rules.parse(RULES)
    assert rules.scheme_for("layers.0.self_attn.q_proj") is None
    assert rules.scheme_for("layers.1.self_attn.q_proj") == w8a8.Config()
    assert rules.scheme_for("layers.1.mlp.up_proj") == w4a16.Config(32)
    assert Rules().scheme_for("anything") is None
    assert Rules.uniform(w8a8.Config()).scheme_for("anything") == w8a8.Config()


def test_rules_are_hashable_and_take_the_default_group_size():
    assert hash(Rules.parse(RULES)) == hash(Rules.parse(RULES))
    assert Rules.parse([{"match": "x", "scheme": "w4a16"}], group_size=64).scheme_for("x") == w4a16.Config(64)


def test_another_width_keeps_the_scheme_of_embedding_and_head():
    tables = {"match": "embed|head", "scheme": "w4a16"}
    rules = Rules.parse([tables, {"match": "", "scheme": "w8a16_asym"}], 32)
    assert rules.at_width(2) == Rules.parse([tables, {"match": "", "scheme": "w2a16_midpoint"}], 32)
    with pytest.raises(UserError, match="w4a16:g32 has one width"):
        Rules.parse([{"match": "mlp", "scheme": "w4a16"}], 32).at_width(2)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"match": "x"}, "scheme"),
        ({"match": "x", "scheme": "w8a8", "group": 1}, "exactly the keys"),
        ({"match": "(", "scheme": "w8a8"}, "regular expression"),
        ({"match": "x", "scheme": "w9"}, "w9"),
        ("x", "exactly the keys"),
    ],
)
def test_a_bad_rule_is_named_by_its_number(rule, says):
    with pytest.raises(UserError, match=r"quant\.rules\[1\]") as error:
        Rules.parse([RULES[0], rule])
    assert says in str(error.value)


def test_engines_resolve_to_profiles_whatever_the_cpu():
    for name in ("plain", "cpu", "cuda"):
        assert resolve(name) == engine.of_profile(name)
        assert resolve(name).profile == name
    assert resolve("auto") == resolve("cpu")  # tests run on CPU
    assert resolve("plain") == PLAIN
    with pytest.raises(UserError, match="auto, cpu, cuda, plain"):
        resolve("tpu")
    with pytest.raises(UserError, match=r"'cpu_amx': use one of plain, cpu, cuda .* set quant\.engine=cpu"):
        engine.of_profile("cpu_amx")


def test_the_plain_profile_rounds_nothing_the_engine_rounds():
    assert not any(getattr(PLAIN, field.name) for field in dataclasses.fields(PLAIN) if field.name.startswith("round_"))


def test_the_document_has_the_records_as_they_are():
    """Regenerate the table with `python -m qarl_jax.numerics`."""
    document = (pathlib.Path(__file__).parents[2] / "docs" / "concepts" / "engines.md").read_text()
    assert engine.table() in document
