# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The prose check finds what CONTRIBUTING.md rules out, and nothing in code and tables."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "docs" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(prose, monkeypatch, path, text):
    monkeypatch.setattr(prose, "ROOT", path.parent)
    path.write_text(text)
    return list(prose.findings(path))


LONG = " ".join(["word"] * 26)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", '"""What a module is."""\n', "not with 'What'"),
        ("a.py", 'def f():\n    """Of a mixture of experts."""\n', "not with 'Of'"),
        ("a.py", 'def f():\n    """Finds the unequal token."""\n', "first mismatch"),
        ("a.py", f'"""Finds {LONG} and {LONG}."""\n', "words in a docstring"),
        ("a.md", f"A line.\nThe {LONG}.\n", "27 words in a sentence"),
        ("a.md", "It is a mixture of experts.\n", "MoE model"),
    ],
)
def test_what_the_rules_exclude_is_found(prose, tmp_path, monkeypatch, name, text, said):
    assert any(said in one for one in found(prose, monkeypatch, tmp_path / name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Finds the first mismatch."""\n'),
        ("a.md", f"Short.\n\n```\n{LONG}.\n```\n\n| {LONG} |\n|---|\n\n# {LONG}\n"),
        ("a.md", f"One `{LONG}` is a word.\n"),
    ],
)
def test_good_prose_code_and_tables_are_left_alone(prose, tmp_path, monkeypatch, name, text):
    assert found(prose, monkeypatch, tmp_path / name, text) == []


def test_every_clean_room_is_there_and_is_clean(prose):
    assert set(prose.CLEAN) <= {prose.room(path) for path in prose.checked()}
    assert prose.main([]) == 0


def test_every_config_is_listed():
    listed = set(re.findall(r"\]\(([\w/.-]+\.yaml)\)", (ROOT / "configs" / "README.md").read_text()))
    there = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml")}
    assert listed | {"tiny_sft.yaml"} >= there
    assert {name for name in listed if not (ROOT / "configs" / name).exists()} == set()
