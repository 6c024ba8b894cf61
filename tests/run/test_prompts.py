# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of a run knows its data: how many prompts there are, how long they are, and what that makes of the rows."""

import json

import pytest

from qarl_jax import data
from qarl_jax.data.sources import files, hints
from qarl_jax.run import config, description
from qarl_jax.run.prompts import open_prompts
from qarl_jax.types import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    data.make_char_tokenizer("0123456789+?x", folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def opened(model, tmp_path):
    """Opens the prompts of a run over so many sums, with settings over it."""

    def open_them(count, question="{}+1?", eval_settings=None, **settings):
        file = tmp_path / "sums.jsonl"
        file.write_text(
            "".join(json.dumps({"question": question.format(i), "answer": i + 1}) + "\n" for i in range(count))
        )
        tree = {
            "model": {"path": str(model)},
            "data": {"source": {"name": "jsonl", "path": str(file)}, "template": "raw"} | settings,
            "rollout": {"max_response_len": 20},
            "train": {"prompts_per_step": 1, "micro_batch_rows": 8},
            "eval": eval_settings or {},
        }
        cfg, prompts = open_prompts(config.from_dict(tree))
        return cfg, prompts, description.describe(cfg, prompts.lines)

    return open_them


def test_rows_have_the_size_of_the_longest_prompt(opened):
    cfg, prompts, plan = opened(150, holdout=0.3)  # of four to six tokens
    assert (cfg.data.max_prompt_len, cfg.row_len) == (16, 36)
    assert f"{len(prompts.stream.source)} to train on; the first 64 have 4 to 5 tokens" in plan
    assert "data.max_prompt_len" not in plan
    given, _, _ = opened(150, holdout=0.3, max_prompt_len=16)
    assert given.data == cfg.data  # so that a run resumes whichever way it is asked for


def test_the_longest_prompt_counts_of_both_splits_up_to_a_limit(opened):
    cfg, _, _ = opened(60, question="{}?" + "x" * 100, holdout=0.5)
    assert cfg.data.max_prompt_len == 112
    cfg, prompts, _ = opened(60, question="{0:x<1022}?", holdout=0.5)  # "0xxx...?": 1,023 tokens
    assert cfg.data.max_prompt_len == data.LONGEST == 1024
    assert len(prompts.stream.source) + len(prompts.held_out) == 60


def test_rows_that_are_mostly_room_for_longer_prompts_are_told(opened):
    _, _, plan = opened(60, max_prompt_len=200, holdout=0.0, eval_settings={"at_start": False, "at_end": False})
    assert "data.max_prompt_len=16 makes rows of 36 tokens, not 220, and leaves longer prompts out" in plan
    assert "evaluation   none" in plan


def test_prompts_of_tasks_have_a_limit_of_their_own(model):
    source = {"name": "reasoning_gym", "dataset": "chain_sum", "config": {"max_terms": 2}, "size": 80}
    source["question"] = "{{ meta.expression.replace(' ', '').replace('-', '+') }}?"
    cfg = config.from_dict({"model": {"path": str(model)}, "data": {"source": source, "template": "raw"}})
    cfg, prompts = open_prompts(cfg)
    assert (cfg.data.max_prompt_len, cfg.row_len) == (1024, 1024 + cfg.rollout.max_response_len)
    assert "makes rows of" in description.describe(cfg, prompts.lines)


def test_the_plan_counts_the_prompts_that_there_are_and_warns_of_few(opened):
    _, prompts, plan = opened(40)
    assert len(prompts.held_out) < 5
    assert f"evaluation   {len(prompts.held_out)} prompts (of 128 asked for) x 1 samples, before, after" in plan
    assert "eval.every=0 eval.at_start=false eval.at_end=false" in plan
    _, prompts, plan = opened(400, holdout=0.2, eval_settings={"num_prompts": 40})
    assert "evaluation   40 prompts x 1 samples" in plan
    assert "too few" not in plan
    _, _, plan = opened(60, question="{}?", holdout=0.9, eval_settings={"num_prompts": 29})
    assert "different ones are 29, too few" in plan
    with pytest.raises(UserError, match=r"leaves no held-out prompt .* turn evaluation off with eval\.every=0"):
        opened(40, holdout=0.0)


@pytest.mark.parametrize(
    ("trained", "forward", "said"),
    [
        ({"stages": ["w4a16_asym", "w2a16_asym"], "widths": []}, "w2a16_asym:g32", ""),
        ({"stages": ["w2a16_asym"], "widths": []}, "w2a16_asym", "w2a16_asym:g32, and is sampled in w2a16_asym:g128"),
        ({"stages": ["w2a16_asym"], "widths": []}, "bf16", "for w2a16_asym:g32, and is sampled in bf16"),
        ({"stages": ["w8a16_asym"], "widths": [8, 2]}, "w2a16_midpoint:g32", ""),
        (
            {"stages": ["w8a16_asym"], "widths": [8, 2]},
            "w4a16_midpoint:g32",
            "for w8a16_asym:g32 and w2a16_midpoint:g32, and is sampled in w4a16_midpoint:g32",
        ),
    ],
)
def test_a_plan_says_for_which_grid_qat_trained_the_policy(tmp_path, trained, forward, said):
    (tmp_path / "qat.json").write_text(json.dumps({"config": trained}))
    values = {"model": {"path": str(tmp_path)}, "quant": {"forward": forward}}
    plan = description.describe(config.from_dict(values | {"data": {"source": {"name": "jsonl", "path": "none"}}}))
    assert said in plan
    assert bool(said) == ("the policy was trained" in plan)


def test_a_plan_without_its_data_says_what_was_asked_for():
    cfg = config.from_dict({"model": {"path": "none"}, "data": {"source": {"name": "jsonl", "path": "none"}}})
    assert "evaluation   128 prompts x 1 samples, before, after" in description.describe(cfg)
    assert cfg.data.prompt_limit == 1024
    with pytest.raises(UserError, match="no such folder"):
        open_prompts(cfg)


def test_a_limit_that_is_given_is_kept(model, tmp_path):
    cfg = data.Config(source=files.Jsonl(path=str(tmp_path / "never read")), max_prompt_len=9)
    assert data.with_prompt_len(cfg, None) is cfg


def test_a_reward_that_needs_answers_is_refused_where_the_data_has_none(model, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "1+1?"}]}) + "\n")
    tree = {
        "model": {"path": str(model)},
        "data": {"source": {"name": "jsonl", "path": str(file)}, "template": "raw", "holdout": 0.0},
        "eval": {"every": 0, "at_start": False, "at_end": False},
        "train": {"prompts_per_step": 1},
    }
    with pytest.raises(UserError, match=r"reward.name=exact compares with a reference answer, and the data has none"):
        open_prompts(config.from_dict(tree | {"reward": {"name": "exact"}}))
    judged = {"name": "judge", "url": "http://127.0.0.1:1/v1", "model": "m"}
    assert len(open_prompts(config.from_dict(tree | {"reward": judged}))[1].stream.source) == 1


def test_hints_by_a_file_that_has_no_training_question_are_refused(model, tmp_path):
    file, base = tmp_path / "sums.jsonl", tmp_path / "base.jsonl"
    rows = [{"question": f"{i}+1?", "answer": i + 1, "solution": f"{i}+1\n{i + 1}"} for i in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"path": str(model)},
        "data": {"source": {"name": "jsonl", "path": str(file)}, "template": "raw", "holdout": 0.5},
        "eval": {"every": 0, "at_start": False, "at_end": False},
        "train": {"prompts_per_step": 1},
    }
    asked = open_prompts(config.from_dict(tree))[1].stream.source
    own = {asked.prompt(i).text for i in range(len(asked))}
    tree["data"]["hint"] = {"base": str(base)}
    cfg = config.from_dict(tree)
    for known, is_refused in ((False, True), (True, False)):
        hints.pass_rates.cache_clear()
        chosen = [row["question"] for row in rows if (row["question"] in own) == known]  # else: the held-out ones
        lines = [json.dumps({"prompt": text, "num_correct": 0, "responses": [{}]}) for text in chosen]
        base.write_text("\n".join(lines) + "\n")
        if is_refused:
            with pytest.raises(UserError, match=rf"none of the first {len(own)} training questions is in it"):
                open_prompts(cfg)
        else:
            open_prompts(cfg)


def test_an_error_in_the_data_of_an_evaluation_names_its_own_section(model, tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n')
    other = tmp_path / "data.template.jsonl"
    other.write_text('{"asked": "1+1?"}\n')
    tree = {
        "model": {"path": str(model)},
        "data": {"source": {"name": "jsonl", "path": str(file)}, "template": "raw", "holdout": 0.0},
        "train": {"prompts_per_step": 1},
    }
    for source, template, said in (
        (file, "chat", r"^eval\.data\.template=chat, .* set eval\.data\.template=raw"),
        (file, "{{ answers }}", r"sums\.jsonl:1: eval\.data\.template '\{\{ answers \}\}' fails"),
        (file, "{{ data.template }}", r"eval\.data\.template '\{\{ data\.template \}\}' fails"),
        (other, "raw", r"/data\.template\.jsonl:1: .* Set eval\.data\.source\.prompt_key and eval\.data\.source"),
    ):
        own = {"source": {"name": "jsonl", "path": str(source)}, "template": template}
        with pytest.raises(UserError, match=said):
            open_prompts(config.from_dict(tree | {"eval": {"data": own}}))
        with pytest.raises(UserError, match=said.replace(r"eval\.", "")):
            open_prompts(config.from_dict(tree | {"data": own}))
