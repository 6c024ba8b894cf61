# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans, facts and partial solutions are cut from a worked solution, and give no answer away."""

import dataclasses
import json

import pytest

from qarl_jax import data
from qarl_jax.data.sources import hints, reasoning_gym
from qarl_jax.data.sources.hints import Hint, solution_of, words
from qarl_jax.types import UserError

QUESTION = "Ada eats 3 pears, Bo 5 more than Ada and Cy 10 more than Bo. How many do they eat?"
GSM8K = {
    "question": QUESTION,
    "answer": "Bo eats 3+5=<<3+5=8>>8 pears.\nCy eats 8 + 10 = $18.\nThey eat 3 + 8 + 18 = 29 pears.\n#### 29",
}


def lines(hint, **row):
    return words(hint, QUESTION, GSM8K | row, "29").split("\n")[1:]


def test_a_plan_keeps_the_questions_numbers_and_hides_every_result():
    assert lines(Hint(kind="plan")) == [
        "Bo eats 3+5= ? pears.",
        "Cy eats ? + 10 = $?.",
        "They eat 3 + ? + ? = ? pears.",
    ]


def test_facts_are_equations_out_of_order_without_the_one_that_answers():
    assert lines(Hint(kind="knowledge")) == ["3+5=8", "8 + 10 = $18"]


@pytest.mark.parametrize(("share", "shown"), [(0.0, 0), (0.3, 1), (0.5, 2), (1.0, 2)])
def test_a_partial_solution_never_has_the_last_step(share, shown):
    assert len(lines(Hint(share=share))) == shown
    assert "29" not in "".join(lines(Hint(share=share)))


def test_every_form_of_a_solution_is_found_and_none_is_told():
    steps = solution_of(GSM8K)
    assert steps[0] == "Bo eats 3+5=8 pears."
    assert solution_of({"upstream_answer": GSM8K["answer"], "expected": "29"}) == steps
    assert solution_of({"solution": ["First.", "Then."], "final_answer": "1"}) == ["First.", "Then."]
    with pytest.raises(UserError, match="this row has none"):
        solution_of({"question": "1+1?", "answer": "2"})


def gym(hint, dataset="gsm_symbolic", limit=400, **fields):
    cfg = data.Config(
        source=reasoning_gym.Config(dataset=dataset, size=6), max_prompt_len=limit, template="raw", hint=hint, **fields
    )
    return data.make_source(cfg, Letters(), "all")


class Letters:
    """A tokenizer whose tokens are characters."""

    chat_template, eos_token_id, unk_token_id = "", 0, None

    def __call__(self, text, **_):
        return {"input_ids": [ord(x) for x in text]}

    def __len__(self):
        return 2**17


def test_a_hint_changes_no_set_of_questions_and_one_too_long_stays_out():
    plain, plan, cut = (gym(hint, limit=250) for hint in (None, Hint(kind="plan"), Hint(share=0.01)))
    asked = [plain.prompt(i) for i in range(6)]
    for source in (plan, cut):
        assert [source.prompt(i).answer for i in range(6)] == [prompt.answer for prompt in asked]
        found = [source.prompt(i).text for i in range(6)]
        assert all(text.startswith(prompt.text) for text, prompt in zip(found, asked, strict=True))
        assert all(len(source.prompt(i).tokens) <= 250 for i in range(6))
        assert any(text == prompt.text for text, prompt in zip(found, asked, strict=True))
    assert "stay without a hint" in plan.notes["hint"]
    assert len({plain.fingerprint, plan.fingerprint, cut.fingerprint}) == 3


def test_a_task_without_worked_solutions_is_refused():
    with pytest.raises(UserError, match="take gsm_symbolic or GSM8K"):
        gym(Hint(), dataset="chain_sum")


def test_hints_go_to_the_questions_that_the_base_does_not_solve(tmp_path):
    plain = gym(None, limit=4000)
    out = tmp_path / "base.jsonl"
    rows = [{"prompt": plain.prompt(i).text, "num_correct": i, "responses": [{}] * 4} for i in range(4)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hinted = gym(Hint(base=str(out), below=0.25, share=1.0), limit=4000)
    changed = [hinted.prompt(i).text != plain.prompt(i).text for i in range(6)]
    assert changed == [True, True, False, False, False, False]  # the last two are not in the file
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="not responses that"):
        hints.pass_rates(str(tmp_path / "other.jsonl"))


def test_a_file_of_gsm8k_is_hinted_and_split_by_its_bare_questions(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(GSM8K | {"question": f"{QUESTION} {i}"}) + "\n" for i in range(30)))
    cfg = data.Config(source=data.files.Jsonl(path=str(path)), template="raw", max_prompt_len=400, holdout=0.5)
    for split in ("train", "heldout"):
        plain = data.make_source(cfg, Letters(), split)
        hinted = data.make_source(dataclasses.replace(cfg, hint=Hint(kind="plan")), Letters(), split)
        assert len(plain) == len(hinted) > 5
        assert all("A plan" in hinted.prompt(i).text for i in range(len(hinted)))
        assert hinted.prompt(0).text.startswith(plain.prompt(0).text)


@pytest.mark.parametrize(("field", "value"), [("share", 1.5), ("below", -0.1)])
def test_shares_outside_the_unit_interval_are_refused(field, value):
    with pytest.raises(UserError, match=f"{field} must lie in"):
        Hint(**{field: value})
