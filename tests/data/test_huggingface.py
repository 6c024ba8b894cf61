# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face data sets by folder, by saved folder, and by name from a cache without a network."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qarl_jax import data
from qarl_jax.data.sources import huggingface
from qarl_jax.types import UserError

ROWS = {"question": [f"{i}+1=" for i in range(6)], "answer": [f"so #### {i + 1}" for i in range(6)]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return data.make_char_tokenizer("0123456789+=", tmp_path_factory.mktemp("tokenizer"))


def opened(tokenizer, split="all", **settings):
    cfg = data.Config(source=huggingface.Config(**settings), template="raw", max_prompt_len=16)
    source = data.make_source(cfg, tokenizer, split)
    return [source.prompt(i) for i in range(len(source))]


def test_what_cannot_be_read_says_what_to_set(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="streaming=true needs limit"):
        huggingface.Config(path="a/b", streaming=True)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'qarl-jax\[data\]'"):
        opened(tokenizer, path=str(tmp_path))


@pytest.mark.slow
def test_folders_of_files_and_saved_ones_have_the_same_prompts(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(ROWS)
    made.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=made, test=made.select([0])).save_to_disk(str(tmp_path / "both"))
    (tmp_path / "files").mkdir()
    pq.write_table(pa.table(ROWS), tmp_path / "files" / "train-00000-of-00001.parquet")
    found = [opened(tokenizer, path=str(tmp_path / name)) for name in ("saved", "both", "files")]
    streamed = opened(tokenizer, path=str(tmp_path / "files"), streaming=True, limit=4)
    for prompts in (*found, streamed):
        texts = [(prompt.text, prompt.answer) for prompt in prompts]
        assert texts == [(f"{i}+1=", str(i + 1)) for i in range(len(prompts))]
    assert [len(prompts) for prompts in (*found, streamed)] == [6, 6, 6, 4]
    assert found[2][0].uid == "files-train/1"
    with pytest.raises(UserError, match=r"nothere: cannot read the data set: .*See the source's path"):
        opened(tokenizer, path=str(tmp_path / "nothere"))


@pytest.mark.slow
def test_by_name_without_a_network_the_hubs_cache_is_read_and_torch_is_not_imported(tokenizer, tmp_path):
    pytest.importorskip("datasets")
    repository = tmp_path / "hub" / "datasets--org--sums"
    folder = repository / "snapshots" / ("a" * 40) / "data"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    pq.write_table(pa.table(ROWS), folder / "train-00000-of-00001.parquet")
    code = (
        "import sys, json\nfrom qarl_jax.data.sources import huggingface\n"
        "rows = [row for _, reader in huggingface.Config(path='org/sums').parts() for _, _, row in reader]\n"
        "print(json.dumps([rows, sorted({'torch', 'vllm'} & set(sys.modules))]))"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    rows, imported = json.loads(done.stdout.splitlines()[-1])
    assert [row["question"] for row in rows] == ROWS["question"]
    assert not imported
