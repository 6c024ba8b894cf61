# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward model's score is transformers' own logit, whatever stands beside a response in its batch."""

import json

import pytest

from qarl_jax.rewards import Sample, reward_model
from qarl_jax.types import Prompt, UserError
from tests.reference import reward_servers

TEXTS = ["a", "bcd", "abcabcabc", "", "d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reward_servers.reward_model(tmp_path_factory.mktemp("reward_model"))


def sample(text, finish="stop"):
    said = ({"role": "user", "content": "a+b"},)
    prompt = Prompt(uid="p", tokens=(1, 2), text="-", answer="", messages=said)
    return Sample(prompt=prompt, text=text, num_tokens=len(text), finish_reason=finish)


@pytest.mark.slow
def test_scores_are_transformers_logits_in_any_batch(folder):
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def logit(text):
        said = [{"role": "user", "content": "a+b"}, {"role": "assistant", "content": text}]
        written = tokenizer.apply_chat_template(said, tokenize=False)
        ids = torch.tensor([tokenizer(written, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            return model(ids).logits[0, 0].item()

    cfg = reward_model.Config(path=str(folder), dtype="float32", batch=3, worst=-5.0, truncated="zero")
    made = reward_model.Reward(cfg, 8)
    try:
        found = made.score([*map(sample, TEXTS), sample("a", finish="length")])
    finally:
        made.close()
    expected = [logit(text) if text else -5.0 for text in TEXTS] + [-5.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert len(set(found.tolist())) == 5  # it tells responses apart


@pytest.mark.slow
def test_a_folder_that_is_no_reward_model_is_refused_at_once(folder, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        reward_model.Reward(reward_model.Config(path=str(tmp_path)), 8)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (tmp_path / "config.json").write_text(json.dumps(values | labels))
    with pytest.raises(UserError, match=r"reward model .* did not start: "):
        reward_model.Reward(reward_model.Config(path=str(tmp_path)), 8)
