# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The character tokenizer is a Hugging Face tokenizer like any other."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qarl_jax.data.tokenizer import decode, load_tokenizer, make_char_tokenizer, stop_token_ids
from qarl_jax.types import UserError

ALPHABET = "0123456789+-*= \nabc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_char_tokenizer(ALPHABET, path, chat_template="{{ messages[-1].content }}=", extra_tokens=("<think>",))
    return path


@pytest.mark.slow
def test_nobody_is_told_that_torch_is_missing(folder):
    """A base install has no torch, which the learner does not need."""
    program = "import sys; sys.modules['torch'] = None; from qarl_jax import data; data.load_tokenizer(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert "PyTorch" not in done.stdout + done.stderr


def test_ids_are_padding_end_unknown_extra_then_the_alphabet_in_order(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer("0<think>c<eos>?").input_ids == [4, 3, 4 + ALPHABET.index("c"), 1, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 0, 2)
    assert len(tokenizer) == 4 + len(ALPHABET)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_every_text_over_the_alphabet_survives_the_round_trip(folder, text):
    tokenizer = load_tokenizer_once(folder)
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert decode(tokenizer, [*ids, 1]) == text


_loaded = {}


def load_tokenizer_once(folder):
    return _loaded.setdefault(folder, load_tokenizer(folder))


def test_the_chat_template_is_saved(folder):
    text = load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False)
    assert text == "1+2="


def test_stop_tokens_include_those_of_the_generation_config(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(tokenizer, tmp_path) == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert stop_token_ids(tokenizer, tmp_path) == (1, 7)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="not a valid generation config"):
        stop_token_ids(tokenizer, tmp_path)


def test_tags_are_text_and_what_ends_or_pads_a_response_is_not(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer("<think>1<think>").input_ids
    assert decode(tokenizer, [*ids, 1, 0, 0]) == decode(tokenizer, [*ids[:1], 0, *ids[1:]]) == "<think>1<think>"
    assert decode(tokenizer, [4, 1, 5, 1]) == "0<eos>1"  # in the middle it is no end
    assert decode(tokenizer, [1, 0]) == decode(tokenizer, []) == ""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert decode(load_tokenizer(tmp_path), ids) == "<think>1"


@pytest.mark.slow
def test_loading_a_tokenizer_imports_no_torch(folder):
    code = (
        "import sys; from qarl_jax.data.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(folder)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_autotokenizer_reads_the_same_tokens(folder):
    code = (
        "import sys; from transformers import AutoTokenizer;"
        f"print(AutoTokenizer.from_pretrained({str(folder)!r})('1 + 2=\\n<eos>').input_ids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(load_tokenizer(folder)("1 + 2=\n<eos>").input_ids)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such folder"),
        ({}, "no tokenizer here"),
        ({"tokenizer.json": "{"}, "cannot read the tokenizer"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "cannot read the tokenizer"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_refused_in_one_sentence(tmp_path, files, message):
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        if name == "tokenizer_config.json":
            config = json.loads(text)
            del config["eos_token"]
            text = json.dumps(config)
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="no eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("alphabet", "extra"), [("", ()), ("aba", ()), ("ab", ("<eos>",)), ("ab", ("<x>", "<x>"))])
def test_an_impossible_alphabet_is_refused(tmp_path, alphabet, extra):
    with pytest.raises(UserError):
        make_char_tokenizer(alphabet, tmp_path, extra_tokens=extra)
