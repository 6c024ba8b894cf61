# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a model folder that this project loads: the weights of its blocks, its tokenizer, its ends."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from qarl_jax import convert, data, models
from tests.reference import gguf_files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with model.gguf and its parts, weights it stands for, converted folder)."""
    root = tmp_path_factory.mktemp("gguf")
    held = gguf_files.write(root / "model.gguf")
    whole = (root / "model.gguf").read_bytes()
    cut = len(whole) // 3
    for number, part in enumerate((whole[:cut], whole[cut : 2 * cut], whole[2 * cut :])):
        (root / f"part{number}.bin").write_bytes(part)
    parts = [str(root / f"part{number}.bin") for number in range(3)]
    digest = hashlib.sha256(whole).hexdigest()
    assert convert.main(["--gguf", *parts, "--sha256", digest, "--out", str(root / "hf")]) == 0
    return root, held, root / "hf"


def test_the_weights_are_those_the_blocks_stand_for_rounded_to_bfloat16(made):
    _, held, folder = made
    found = load_file(folder / "model.safetensors")
    assert found.keys() == held.keys()
    for name, value in held.items():
        np.testing.assert_array_equal(found[name], value.astype(ml_dtypes.bfloat16), err_msg=name)


def test_the_folder_loads_here_with_config_and_chat_template(made):
    _, _, folder = made
    model = models.load_hf(folder)
    assert (model.config.num_layers, model.config.rope_theta) == (gguf_files.LAYERS, 50000.0)
    assert model.config.qkv_bias
    assert not model.config.tie_embeddings
    tokenizer = data.load_tokenizer(folder)
    assert tokenizer.tokenize("hello") == ["he", "ll", "o"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|><|im_start|>"


def test_every_token_that_ends_an_answer_is_a_stop_token(made):
    _, _, folder = made
    ids = data.stop_token_ids(data.load_tokenizer(folder), folder)
    assert set(ids) == {gguf_files.TOKENS.index("<|im_end|>"), gguf_files.TOKENS.index("<|endoftext|>")}


def test_parts_out_of_order_or_damaged_are_refused_and_nothing_is_left(made, tmp_path, capsys):
    root, _, _ = made
    digest = hashlib.sha256((root / "model.gguf").read_bytes()).hexdigest()
    cases = {
        ("part0.bin", "part2.bin", "part1.bin"): "a part is missing, damaged or out of order",
        ("part0.bin", "part1.bin"): "a part is missing",
        ("part1.bin", "part0.bin"): "not a GGUF file",
        ("part0.bin", "gone.bin"): "no such file",
    }
    for names, message in cases.items():
        arguments = ["--gguf", *(str(root / name) for name in names), "--sha256", digest]
        assert convert.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_torn_file_without_a_checksum_is_refused_in_one_sentence(made, tmp_path, capsys):
    root, _, _ = made
    arguments = ["--gguf", str(root / "part0.bin"), "--out", str(tmp_path / "out")]
    assert convert.main(arguments) == 2
    assert "transformers cannot read this GGUF file" in capsys.readouterr().err


def test_a_folder_in_use_is_not_overwritten(made, capsys):
    root, _, folder = made
    before = (folder / "config.json").read_text()
    assert convert.main(["--gguf", str(root / "model.gguf"), "--out", str(folder)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert json.loads((folder / "config.json").read_text()) == json.loads(before)
