# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A suite is a set of overrides: it finds its questions, asks them in the chat format, and grades by its own rule."""

import base64
import json
import pathlib
import pickle
import zlib
from unittest import mock

import pytest

from qarl_jax import data
from qarl_jax.data import suites
from qarl_jax.data.sources import layouts
from qarl_jax.rewards import Sample
from qarl_jax.run import build, config, evaluation
from qarl_jax.types import UserError
from tests.reference import tiny

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "qwen25_coder_0p5b" / "bf16_grpo.yaml"


def questions(folder, rows):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(name, path, preset="greedy", extra=()):
    return config.load(CONFIG, [*suites.overrides(name, str(path), preset), *extra])


class EchoTokenizer:
    """A tokenizer whose tokens are characters, with a chat format that shows its parts."""

    chat_template = "yes"
    eos_token_id = 0
    unk_token_id = None
    name_or_path = "echo"

    def apply_chat_template(self, messages, **_):
        return "".join(f"[{m['role']}] {m['content']}\n" for m in messages)

    def __call__(self, text, **_):
        return {"input_ids": [ord(x) for x in text]}

    def encode(self, text, **_):
        return [ord(x) for x in text]

    def __len__(self):
        return 256

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


GSM = [
    {"id": "gsm8k-test-0013", "prompt": "How many eggs?", "expected": "18", "upstream_answer": "9 * 2 = 18\n#### 18"},
    {"id": "gsm8k-test-0432", "prompt": "How many dragons?", "expected": "1080"},
]


def graded(cfg, prompt, text):
    grader = build.make_grader(cfg)
    try:
        rewards, _ = grader.score([Sample(prompt=prompt, text=text, num_tokens=3)])
    finally:
        grader.close()
    return float(rewards[0])


def test_gsm8k_is_asked_with_its_system_message_and_graded_by_number(tmp_path):
    cfg = load("gsm8k", questions(tmp_path, GSM))
    asked = build.eval_prompts(cfg, EchoTokenizer())
    assert [prompt.answer for prompt in asked] == ["18", "1080"]
    assert asked[0].text.startswith(f"[system] {suites.STEP_BY_STEP}\n[user] How many eggs?")
    for text, right in (
        ("so \\boxed{1,080} dragons", 1.0),
        ("\\boxed{\\$1080.00}", 1.0),
        ("9 and then\n#### 1,080", 1.0),
        ("that makes 1080 dragons.", 1.0),
        ("1080 is wrong, it is \\boxed{12}", 0.0),
        ("1080, or 12", 0.0),
    ):
        assert graded(cfg, asked[1], text) == right, text


def test_the_clean_suite_leaves_out_what_training_has_templates_of(tmp_path):
    path = questions(tmp_path, GSM + [GSM[1] | {"id": name} for name in suites.IN_GSM_SYMBOLIC])
    asked = build.eval_prompts(load("gsm8k_clean", path), EchoTokenizer())
    assert [prompt.answer for prompt in asked] == ["18"]
    with pytest.raises(UserError, match=r"no row has the id 'gsm8k-test-0440' or"):  # not all of them, in silence
        build.eval_prompts(load("gsm8k_clean", questions(tmp_path, GSM)), EchoTokenizer())


def test_presets_are_the_papers_and_the_users_override_wins(tmp_path):
    path = questions(tmp_path, GSM)
    for preset, expected in (("greedy", (0.0, 1.0, 1)), ("qurl", (0.0, 1.0, 1)), ("qerl", (0.6, 0.95, 1))):
        e = load("gsm8k", path, preset).eval
        assert (e.temperature, e.top_p, e.num_samples) == expected, preset
    assert [load(name, path, "qarl").eval.num_samples for name in ("aime24", "aime25", "math500")] == [32, 32, 4]
    assert load("gsm8k", path, extra=["eval.max_response_len=64"]).eval.max_response_len == 64


@pytest.mark.parametrize(
    ("own", "limit"), [([], 1500), (["eval.max_response_len=64"], 64), (["eval.max_response_len=0"], 0)]
)
def test_responses_may_be_as_long_as_the_runs_unless_told_otherwise(tmp_path, monkeypatch, own, limit):
    limits, load = [], mock.Mock(wraps=config.load)
    monkeypatch.setattr(config, "load", load)

    def run(*cfgs, **_):
        limits.extend(cfg.eval.max_response_len for cfg in cfgs)
        raise UserError("enough")

    monkeypatch.setattr(evaluation, "run", run)
    asked = ["--suite", "gsm8k", "--suite-data", str(questions(tmp_path, GSM))]
    longer = ["rollout.max_response_len=1500", "rollout.engine.max_model_len=0"]
    assert evaluation.main(["--config", str(CONFIG), *asked, *longer, *own]) == 2
    assert (limits, load.call_count) == ([limit], 1)


@pytest.mark.parametrize("own", ["eval={max_response_len: 64}", "eval.data=null"])
def test_an_override_that_takes_a_suites_questions_away_is_refused(tmp_path, monkeypatch, capsys, own):
    """The score of other questions would bear the suite's name."""
    monkeypatch.setattr(evaluation, "run", mock.Mock(return_value=[]))
    asked = ["--suite", "gsm8k", "--suite-data", str(questions(tmp_path, GSM))]
    assert evaluation.main(["--config", str(CONFIG), *asked, own]) == 2
    assert f"{own} would replace the questions and settings of --suite gsm8k: override" in capsys.readouterr().err


def test_minerva_and_olympiadbench_are_judged_with_their_own_errors(tmp_path):
    rows = [{"question": "n?", "final_answer": ["2.5"], "unit": None, "error": "1e-1"}]
    (prompt,) = build.eval_prompts(load("olympiadbench", questions(tmp_path, rows)), EchoTokenizer())
    for name, text, right in (("olympiadbench", "2.6", 1.0), ("minerva", "2.6", 0.0), ("minerva", "2.5001", 1.0)):
        assert graded(load(name, questions(tmp_path, rows)), prompt, f"\\boxed{{{text}}}") == right, (name, text)
    assert load("math500", questions(tmp_path, rows)).reward.tolerance == "none"


def test_of_a_file_with_several_suites_each_takes_its_own_rows(tmp_path):
    rows = [ROWS[name][0] for name in ("aime25", "gpqa_diamond", "supergpqa")]
    path = tmp_path / "ds4_eval_cases.json"
    path.write_text(json.dumps({"cases": rows}))
    for name in ("aime25", "gpqa_diamond", "supergpqa"):
        (asked,) = build.eval_prompts(load(name, path), EchoTokenizer())
        assert asked.answer == ROWS[name][2]


def test_a_suite_whose_answers_are_longer_than_trainings_gets_an_engine_that_takes_them(tmp_path, capsys):
    cfg = load("math500", questions(tmp_path, [{"problem": "x?", "answer": "1"}]))
    assert cfg.rollout.engine.max_model_len == 832
    (asked,) = build.eval_prompts(cfg, EchoTokenizer())
    longest = len(asked.tokens) + cfg.eval.max_response_len
    assert longest > 2048
    wider = evaluation.with_room(cfg, longest)
    assert wider.rollout.engine.max_model_len == longest
    assert f"rollout.engine.max_model_len={longest}" in capsys.readouterr().err
    assert evaluation.with_room(wider, longest) is wider
    assert evaluation.with_room(cfg, 832) is cfg


def test_unknown_suites_and_missing_questions_say_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="Did you mean gsm8k"):
        suites.overrides("gsm8")
    with pytest.raises(UserError, match="make data"):
        suites.overrides("gsm8k")
    with pytest.raises(UserError, match="preset"):
        suites.overrides("gsm8k", "x.jsonl", "qarrl")
    assert evaluation.main(["--config", str(CONFIG), "--suite", "gsm8k"]) == 2
    assert "make data" in capsys.readouterr().err


# A row of each public layout, what its question must hold, its reference answer, and a right and a wrong response.
ROWS = {
    "aime24": ({"id": 60, "problem": "Find $x$.", "solution": "..", "answer": "204"}, "Find", "204"),
    "aime25": (
        {"source": "AIME2025", "choices": [], "question": "Sum?", "answer": "70", "kind": "integer"},
        "Sum",
        "70",
    ),
    "amc": ({"id": 0, "problem": "Cities?", "answer": 27.0, "url": ""}, "Cities", "27.0"),
    "math500": ({"problem": "Point?", "solution": "", "answer": "\\left( 3, 2 \\right)", "level": 2}, "Point", None),
    "minerva": ({"question": "Speed?", "answer": "4.5e33"}, "Speed", "4.5e33"),
    "olympiadbench": ({"question": "n?", "final_answer": ["2", "3"], "unit": None}, "n?", "2, 3"),
    "arc_challenge": (
        {"id": "M", "question": "Why?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
        "A. x\nB. y",
        "B",
    ),
    "gpqa_diamond": (
        {"source": "GPQA Diamond", "choices": ["p", "q"], "question": "Q?", "answer": "B", "kind": "choice"},
        "A. p\nB. q",
        "B",
    ),
    "supergpqa": (
        {"source": "SuperGPQA", "choices": ["p", "q"], "question": "Q?", "answer": "A", "kind": "choice"},
        "A. p",
        "A",
    ),
    "mmlu_pro": ({"question": "Q?", "options": ["u", "v", "w"], "answer": "C", "answer_index": 2}, "C. w", "C"),
    "hellaswag": ({"id": "h", "ctx": "They", "endings": ["go", "stay"], "expected_index": 1}, "They ...", "B"),
    "truthfulqa": ({"id": "t", "question": "Q?", "choices": ["true", "false"], "expected_index": 0}, "true", None),
    "humaneval": (
        {
            "task_id": "H/0",
            "prompt": "def one():\n",
            "entry_point": "one",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
        },
        "def one",
        "one",
    ),
    "livecodebench": (
        {
            "question_content": "Add.",
            "question_id": "1_A",
            "starter_code": "",
            "metadata": "{}",
            "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]',
            "private_test_cases": "[]",
        },
        "standard input",
        "1_A",
    ),
}


# The same questions as their publishers have them; above, as `make data` has them.
PUBLISHED = {
    "gsm8k": ({"question": "How many?", "answer": "9 * 2 = 18\n#### 18"}, "How many?", "18"),
    "aime25": ({"problem_idx": 1, "problem": "Sum?", "answer": 70, "problem_type": ["Algebra"]}, "Sum?", "70"),
    "gpqa_diamond": (
        {
            "Question": "Q?",
            "Correct Answer": "r",
            "Incorrect Answer 1": "p",
            "Incorrect Answer 2": "q",
            "Incorrect Answer 3": "s",
        },
        ". r\n",
        None,
    ),
    "hellaswag": ({"ind": 4, "ctx": "They", "endings": ["go", "stay"], "label": "1"}, "B. stay", "B"),
    "truthfulqa": (
        {"question": "Q?", "mc1_targets": {"choices": ["yes", "no"], "labels": [1, 0]}, "mc2_targets": {}},
        ". yes",
        None,
    ),
}


# LiveCodeBench's private tests: JSON in a pickle, compressed, in base64.
PRIVATE = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "2 2", "output": "4", "testtype": "stdin"}])))
).decode()
# All columns and the file's form of what a user fetches; the content is invented.
FETCHED = {
    "math500": ("jsonl", {
        "problem": "How many apples?", "solution": "Two and two.\\boxed{4}", "answer": "4", "subject": "Prealgebra",
        "level": 1, "unique_id": "test/prealgebra/1.json",
    }),
    "aime24": ("parquet", {
        "id": 60, "problem": "Find it.", "solution": "..", "answer": "204", "url": "https://example.org",
        "year": "2024", "__index_level_0__": 24,
    }),
    "amc": ("parquet", {"id": 0, "problem": "Cities?", "answer": 27.0, "url": "https://example.org"}),
    "olympiadbench": ("parquet", {
        "id": 1606, "question": "Find n.", "solution": ["It is 6."], "final_answer": ["6"], "context": None,
        "image_1": None, "modality": "Text-only", "difficulty": "Competition", "is_multiple_answer": False,
        "unit": None, "answer_type": "Numerical", "error": None, "question_type": "Open-ended",
        "subfield": "Algebra", "subject": "Math", "language": "English",
    }),
    "minerva": ("jsonl", {"question": "How bright?", "answer": "4.5e33"}),
    "mmlu_pro": ("parquet", {
        "question_id": 70, "question": "Which?", "options": ["u", "v", "w"], "answer": "C", "answer_index": 2,
        "cot_content": "", "category": "business", "src": "ori_mmlu",
    }),
    "livecodebench": ("jsonl", {
        "question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder",
        "question_id": "abc301_a", "contest_id": "abc301", "contest_date": "2023-05-13T00:00:00", "starter_code": "",
        "difficulty": "easy", "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]',
        "private_test_cases": PRIVATE, "metadata": "{}",
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FETCHED)
def test_a_file_as_its_publisher_has_it_is_read_asked_and_graded(name, tmp_path):
    form, row = FETCHED[name]
    if form == "parquet":
        path = tmp_path / "test-00000-of-00001.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").Table.from_pylist([row]), path
        )
    else:
        path = questions(tmp_path, [row])
    cfg = load(name, path)
    (asked,) = build.eval_prompts(cfg, EchoTokenizer())
    assert next(row[key] for key in ("problem", "question", "question_content") if key in row) in asked.text
    right, wrong = f"so \\boxed{{{asked.answer}}}", "so \\boxed{Q}"
    if name == "livecodebench":
        right = "```python\nprint(sum(map(int, input().split())))\n```"
        wrong = "```python\nprint(3)\n```"  # passes the public test, and not the private one
    assert (graded(cfg, asked, right), graded(cfg, asked, wrong)) == (1.0, 0.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_suite_reads_its_publishers_layout_too(name, tmp_path):
    row, holds, answer = PUBLISHED[name]
    (asked,) = build.eval_prompts(load(name, questions(tmp_path, [row])), EchoTokenizer())
    assert holds in asked.text
    if answer is None:  # a letter, wherever the right choice stands
        answer = asked.text[asked.text.index(holds.rstrip()) - 1]
    assert asked.answer == answer


def test_every_suite_is_tried_below():
    assert set(ROWS) | {"gsm8k", "gsm8k_clean"} == set(suites.SUITES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_suite_reads_its_public_layout_and_tells_right_from_wrong(name, tmp_path):
    row, holds, answer = ROWS[name]
    cfg = load(name, questions(tmp_path, [row]))
    (asked,) = build.eval_prompts(cfg, EchoTokenizer())
    assert holds in asked.text
    assert suites.SUITES[name].system in asked.text
    assert answer is None or asked.answer == answer
    right, wrong = f"so \\boxed{{{asked.answer}}}", "so \\boxed{Q}"
    if name == "humaneval":
        right, wrong = "```python\ndef one():\n    return 1\n```", "```python\ndef one():\n    return 2\n```"
    if name == "livecodebench":
        right, wrong = "```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(4)\n```"
    assert (graded(cfg, asked, right), graded(cfg, asked, wrong)) == (1.0, 0.0)


def test_the_code_task_learns_from_programs_that_pass_and_keeps_a_quarter_of_the_problems_apart(tmp_path):
    rows = []
    for i in range(40):
        test = f"def check(candidate):\n    assert candidate() == {i}\n"
        rows.append({"task_id": f"H/{i}", "prompt": f"def f{i}():\n", "entry_point": f"f{i}", "test": test})
    path = questions(tmp_path, rows)
    cfg = config.load(CONFIG.with_name("code_qarl_w4a16.yaml"), [f"data.source.path={path}"])
    held_out = {prompt.answer for prompt in build.eval_prompts(cfg, EchoTokenizer())}
    source = data.make_source(cfg.data, EchoTokenizer(), "train")
    learned = [source.prompt(i) for i in range(len(source))]
    assert 4 <= len(held_out) <= 16
    assert {prompt.answer for prompt in learned} == {f"f{i}" for i in range(40)} - held_out
    number = learned[0].answer.removeprefix("f")
    program = f"```python\ndef f{number}():\n    return {number}\n```"
    assert (graded(cfg, learned[0], program), graded(cfg, learned[1], program)) == (1.0, 0.0)


def test_choices_whose_row_marks_the_right_one_by_its_place_are_put_in_an_order_that_stays():
    asked = [layouts.shuffled(f"Question {i}?", ["a", "b", "c", "d"], 0) for i in range(200)]
    assert asked == [layouts.shuffled(f"Question {i}?", ["a", "b", "c", "d"], 0) for i in range(200)]
    counts = [sum(letter == x for _, letter in asked) for x in "ABCD"]
    assert min(counts) > 25
    for text, letter in asked:
        assert f"{letter}. a" in text


@pytest.mark.slow
def test_math_grading_takes_the_last_box(tmp_path):
    cfg = load("math500", questions(tmp_path, [{"problem": "x?", "answer": "42"}]))
    (asked,) = build.eval_prompts(cfg, EchoTokenizer())
    assert graded(cfg, asked, "First \\boxed{7}. No. \\boxed{42}") == 1.0
    assert graded(cfg, asked, "First \\boxed{42}. No. \\boxed{7}") == 0.0
    assert graded(cfg, asked, "First \\boxed{7}. No. \\boxed{\\frac{84}{2}}") == 1.0


def test_a_row_that_only_looks_like_a_layout_names_it(tmp_path):
    broken = {"id": "h", "ctx": "They", "endings": ["go"], "expected_index": None}
    with pytest.raises(UserError, match=r"looks like hellaswag"):
        build.eval_prompts(load("hellaswag", questions(tmp_path, [broken])), EchoTokenizer())


@pytest.mark.slow
def test_suites_run_from_the_command_line_on_one_engine(tmp_path, capsys, monkeypatch):
    world = tiny.World(tmp_path)
    ids = ["0", "1", *suites.IN_GSM_SYMBOLIC]
    rows = [{"id": name, "prompt": f"{i}+1=", "expected": str(i + 1)} for i, name in enumerate(ids)]
    monkeypatch.setattr(suites, "QUESTIONS", str(tmp_path))
    where = tmp_path / suites.SUITES["gsm8k"].file
    where.parent.mkdir(parents=True)
    questions(tmp_path, rows).rename(where)
    asked = ["--suite", "gsm8k,own,gsm8k_clean:sampled", "--json", "--out", str(tmp_path / "said.jsonl")]
    settings = world.model / "tokenizer_config.json"
    chat = {"chat_template": "{{ messages[-1]['content'] }}"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | chat))
    assert evaluation.main([*world.command(), *asked, "eval.max_response_len=8"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    held_out = len((tmp_path / "said.own.jsonl").read_text().splitlines())
    assert [(line.get("suite"), line["eval/prompts"]) for line in said] == [
        ("gsm8k", 8),
        (None, held_out),
        ("gsm8k_clean:sampled", 2),
    ]
    responses = (tmp_path / "said.gsm8k_clean_sampled.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["responses"]) for line in responses] == [4, 4]
