# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts are pure functions of their index; the splits share nothing; a broken file is told by line."""

import gzip
import json
import os
import subprocess
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qarl_jax import data
from qarl_jax.data.sources import files, mix, reasoning_gym
from qarl_jax.data.sources.files import final_answer
from qarl_jax.data.sources.template import is_heldout
from qarl_jax.types import UserError

CHARACTERS = "".join(chr(c) for c in range(32, 127)) + "\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    return data.make_char_tokenizer(CHARACTERS, tmp_path_factory.mktemp("tokenizer"), chat_template=template)


def gym(template="{{ meta.expression }}=", holdout=0.2, max_prompt_len=200, **source):
    source = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 3, "max_digits": 2}, "size": 300} | source
    config = reasoning_gym.Config(**source)
    return data.Config(source=config, template=template, holdout=holdout, max_prompt_len=max_prompt_len)


# ---- reasoning-gym -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_package_may_warn_where_it_is_compiled_first(tmp_path):
    first = "import sys; from qarl_jax.data.sources import reasoning_gym as gym; sys.pycache_prefix = sys.argv[1]"
    words = f"{first}; gym.make_dataset('chain_sum', {{}}, seed=0, size=1)"
    subprocess.run([sys.executable, "-W", "error", "-c", words, str(tmp_path)], check=True)


def test_prompts_do_not_depend_on_the_order_of_asking(tokenizer):
    forward, backward = data.make_source(gym(), tokenizer), data.make_source(gym(), tokenizer)
    first = [forward.prompt(i) for i in range(40)]
    second = [backward.prompt(i) for i in reversed(range(40))][::-1]
    assert first == second


def test_the_answer_belongs_to_the_prompt(tokenizer):
    source = data.make_source(gym(), tokenizer)
    for i in range(50):
        prompt = source.prompt(i)
        assert eval(prompt.text.removesuffix("=")) == int(prompt.answer)
        assert tokenizer.decode(prompt.tokens) == prompt.text


def test_an_entry_is_the_same_whenever_it_is_asked_for():
    dataset = reasoning_gym.make_dataset("list_functions", {}, seed=0, size=60)
    first = [reasoning_gym.drawn(dataset, i) for i in range(60)]
    assert first == [reasoning_gym.drawn(dataset, i) for i in range(60)]


def test_questions_that_follow_pythons_hash_seed_are_refused_without_one(monkeypatch, tokenizer):
    monkeypatch.setattr(reasoning_gym, "sys", types.SimpleNamespace(flags=types.SimpleNamespace(hash_randomization=1)))
    for source in (
        {"dataset": "word_ladder"},
        {"dataset": "composite", "config": {"datasets": [{"name": "ransom_note"}]}},
    ):
        with pytest.raises(UserError, match="Start with the environment variable PYTHONHASHSEED=0"):
            data.make_source(gym(**({"config": {}} | source)), tokenizer)


# Prints whether the scorer, in a process of its own, gives a right answer of each data set 1.
RIGHT = """
from qarl_jax.data.sources.reasoning_gym import drawn, make_dataset
from qarl_jax.rewards import Sample, reasoning_gym
from qarl_jax.types import Prompt
reward = reasoning_gym.Reward(reasoning_gym.Config(workers=1, timeout_s=60.0, extract="whole"), 64)
samples = []
for name in ("polynomial_multiplication", "isomorphic_strings", "list_functions"):
    for index in range(4):
        origin = {"dataset": name, "config": {}, "seed": 5, "size": 4, "index": index}
        answer = str(drawn(make_dataset(name, {}, seed=5, size=4), index)["answer"])
        prompt = Prompt(uid="p", tokens=(1,), text="", answer=answer, meta={"origin": origin})
        samples.append(Sample(prompt=prompt, text=answer, num_tokens=1))
print(reward.score(samples).min())
"""


@pytest.mark.slow
def test_the_scorer_grades_the_question_that_was_asked():
    environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", RIGHT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "1.0"


ENTRIES = """
import json, sys, warnings
warnings.simplefilter("ignore")
from reasoning_gym.factory import DATASETS
from qarl_jax.data.sources.reasoning_gym import HASHED, drawn, make_dataset
for name in sorted(set(DATASETS) - {*HASHED, "composite"}):
    dataset = make_dataset(name, {}, seed=3, size=4)
    entries = [drawn(dataset, i) for i in range(4)]
    print("ENTRIES", name, json.dumps([[each["question"], str(each["answer"])] for each in entries]))
"""


@pytest.mark.nightly
def test_every_other_data_set_asks_the_same_in_every_process():
    def entries(seed):
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", ENTRIES], env=environment, capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line.startswith("ENTRIES")]

    first = entries(1)
    assert len(first) > 90
    assert first == entries(2)


def test_no_held_out_prompt_is_ever_trained_on(tokenizer):
    train, heldout = data.make_source(gym(), tokenizer), data.make_source(gym(), tokenizer, "heldout")
    assert (len(train), len(heldout)) == (300, 60)
    train_texts = {train.prompt(i).text for i in range(len(train))}
    heldout_texts = {heldout.prompt(i).text for i in range(len(heldout))}
    assert len(heldout_texts) > 30
    assert not train_texts & heldout_texts
    assert {train.prompt(i).uid for i in range(300)}.isdisjoint(heldout.prompt(i).uid for i in range(60))


def test_the_held_out_share_of_texts_is_the_one_asked_for():
    # 20,000 draws at 0.2: the standard error is sqrt(0.16 / 20000) = 0.0028.
    share = sum(is_heldout(f"prompt {i}", 0.2) for i in range(20_000)) / 20_000
    assert abs(share - 0.2) < 5 * 0.0028


def test_white_space_around_a_question_moves_it_into_no_other_split():
    for i in range(200):
        question, spaced = f"How many? {i}", f"\n How many? {i} \n"
        forms = (question, spaced, [{"role": "user", "content": spaced}])
        assert len({is_heldout(form, 0.5) for form in forms}) == 1


def test_a_mix_draws_tasks_by_weight(tokenizer):
    mix = (
        reasoning_gym.Task(dataset="gcd", weight=3.0, config={"max_numbers": 2}),
        reasoning_gym.Task(dataset="chain_sum", config={"max_terms": 2}),
    )
    source = data.make_source(gym(dataset="", config={}, mix=mix, template="raw"), tokenizer)
    kinds = [source.prompt(i).meta["origin"]["dataset"] for i in range(200)]
    # 200 draws at 0.75: standard deviation 6.1 around 150.
    assert abs(kinds.count("gcd") - 150) < 31


def test_over_long_prompts_are_replaced_and_counted(tokenizer):
    source = data.make_source(gym(max_prompt_len=7), tokenizer)
    assert all(len(source.prompt(i).tokens) <= 7 for i in range(50))
    assert source.skipped.too_long > 0


def test_characters_that_the_tokenizer_lacks_are_never_fed_as_unknown_tokens(tmp_path):
    digits = data.make_char_tokenizer("0123456789+= ", tmp_path)
    source = data.make_source(gym(), digits)
    assert all("-" not in source.prompt(i).text for i in range(50))
    assert source.skipped.unknown_characters > 0


def test_meta_says_how_to_make_the_task_again(tokenizer):
    source = data.make_source(gym(), tokenizer, "heldout")
    prompt = source.prompt(3)
    origin = prompt.meta["origin"]
    again = reasoning_gym.make_dataset(origin["dataset"], origin["config"], seed=origin["seed"], size=origin["size"])[
        origin["index"]
    ]
    assert (again["question"], again["answer"]) == (prompt.meta["question"], prompt.answer)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dataset": "chain_summ"}, "unknown reasoning_gym data set 'chain_summ'. Did you mean chain_sum"),
        ({"config": {"min_term": 2}}, "chain_sum has no parameter 'min_term'. Did you mean min_terms?"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "chain_sum refuses .*max_terms must be >= min_terms"),
        ({"dataset": ""}, "either `dataset`"),
        ({"size": 0}, "size must be at least 1"),
    ],
)
def test_a_wrong_task_is_refused_in_one_sentence(tokenizer, source, message):
    with pytest.raises(UserError, match=message):
        data.make_source(gym(**source), tokenizer)


def test_a_task_that_never_fits_gives_up_with_the_reason(tokenizer, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "MAX_CANDIDATES", 20)
    with pytest.raises(UserError, match=r"no usable train prompt in 20 .*: .* longer than max_prompt_len\)"):
        data.make_source(gym(max_prompt_len=2), tokenizer)


# ---- templates -----------------------------------------------------------------------------------------------------


def test_templates_render_raw_chat_and_jinja(tokenizer):
    def text(template, system=""):
        return data.Template(tokenizer, template, system, {}, 100).render("1+1?", {"n": 7})

    assert text("raw") == "1+1?"
    assert text("raw", "Add.") == "Add.\n1+1?"
    assert text("chat", "Add.") == "[system]Add.[user]1+1?[a]"
    assert text("{{ system }}|{{ question }}|{{ meta.n }}", "S") == "S|1+1?|7"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatt", "expected raw, chat or a Jinja template"),
        ("{{ question", "not a valid Jinja template"),
        ("{{ meta.nothing }}", "nothing"),
        ("{{ ''.__class__ }}", "unsafe"),
    ],
)
def test_a_broken_template_is_refused(tokenizer, template, message):
    with pytest.raises(UserError, match=message):
        data.make_source(gym(template=template), tokenizer)


def test_a_tokenizer_without_chat_template_asks_for_another_template(tmp_path):
    plain = data.make_char_tokenizer(CHARACTERS, tmp_path)
    with pytest.raises(UserError, match="no chat template; set data"):
        data.make_source(gym(template="chat"), plain)


# ---- files ---------------------------------------------------------------------------------------------------------

LAYOUT_ROWS = {
    "gsm8k": ({"question": "2 apples and 3?", "answer": "2+3=<<2+3=5>>5\n#### 1,005"}, "2 apples and 3?", "1005"),
    "deepscaler": ({"problem": "2+3?", "answer": "5", "solution": "..."}, "2+3?", "5"),
    "dapo": (
        {
            "prompt": [{"role": "user", "content": "2+3?"}],
            "reward_model": {"ground_truth": "5", "style": "rule"},
            "data_source": "math_dapo",
        },
        "2+3?",
        "5",
    ),
    "openr1-46k": (
        {
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+3?"}],
            "target": [{"role": "assistant", "content": "5"}],
            "reward_model": {"ground_truth": "5"},
        },
        "Think.\n2+3?",
        "5",
    ),
    "plain": ({"prompt": "2+3?", "answer": 5}, "2+3?", "5"),
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def file_config(cls, path, template="raw", holdout=0.0, **options):
    return data.Config(source=cls(path=str(path), **options), template=template, holdout=holdout)


@pytest.mark.parametrize("layout", LAYOUT_ROWS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_known_layouts_are_recognised(tokenizer, tmp_path, layout, kind):
    row, question, answer = LAYOUT_ROWS[layout]
    path = tmp_path / f"set.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [row])
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    cls = files.Jsonl if kind == "jsonl" else files.Parquet
    source = data.make_source(file_config(cls, path), tokenizer)
    assert len(source) == 1
    prompt = source.prompt(0)
    assert (prompt.text, prompt.answer, prompt.uid) == (question, answer, "set/1")


def test_system_messages_of_a_file_reach_the_chat_template(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [LAYOUT_ROWS["openr1-46k"][0]])
    prompt = data.make_source(file_config(files.Jsonl, path, "chat"), tokenizer).prompt(0)
    assert prompt.text == "[system]Think.[user]2+3?[a]"


def test_named_columns_win_and_may_reach_inside(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": {"text": "1?"}, "answer": "no", "prompt": "no", "gold.value": 1}])
    cfg = file_config(files.Jsonl, path, prompt_key="q.text", answer_key="gold.value")
    prompt = data.make_source(cfg, tokenizer).prompt(0)
    assert (prompt.text, prompt.answer) == ("1?", "1")


def test_file_splits_are_disjoint_and_complete(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}?", "answer": i} for i in range(300)])
    train = data.make_source(file_config(files.Jsonl, path, holdout=0.3), tokenizer)
    heldout = data.make_source(file_config(files.Jsonl, path, holdout=0.3), tokenizer, "heldout")
    left, right = ({s.prompt(i).text for i in range(len(s))} for s in (train, heldout))
    assert not left & right
    assert left | right == {f"{i}?" for i in range(300)}
    assert 50 < len(right) < 130


def test_over_long_rows_are_left_out_and_counted(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n, "answer": 1} for n in (5, 2000, 6)])
    source = data.make_source(file_config(files.Jsonl, path), tokenizer)
    assert (len(source), source.skipped.too_long) == (2, 1)


HALVES = [
    (r'"a \ud83d"', '""'),
    (r'[{"role": "user", "content": "\ud83d"}]', '""'),
    ('"a"', r'"\ud83d"'),
    ('"\xed\xa0\xbd"', '""'),
]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["", "\n"], "the data set is empty"),
        (
            ['{"prompt": "a", "answer": "1"}\n', '{"prompt": "b",\n'],
            r"a.jsonl:2: not a JSON object: .* where the line ends\.$",
        ),
        (['{"prompt": "a", "answer": "1"}\n', '{"prompt": "b" "answer": 1}\n'], r"a.jsonl:2: .* at column 16\.$"),
        (['{"prompt": "a", "answer": "1"}\n', '{"prompt": "b"}\n'], r"a.jsonl:2: this row has no 'answer', which the"),
        (["[1, 2]\n"], r"a.jsonl:1: expected a JSON object with columns, got list. A jsonl file is text with one"),
        (["prompt,answer\n"], r"a.jsonl:1: not a JSON object: .* one JSON object per line"),
        (['{"words": "a", "label": "1"}\n'], r"a.jsonl:1: cannot tell which columns .* among words, label"),
        (['{"prompt": "a", "answer": "1"}\n', '{"prompt": "", "answer": "1"}\n'], r"a.jsonl:2: column 'prompt'"),
        (['{"prompt": "a", "answer": null}\n'], r"a.jsonl:1: column 'answer': expected an answer"),
        (['{"prompt": [{"role": "user"}], "answer": "1"}\n'], r"a.jsonl:1: .* chat messages with"),
        (
            ['{"prompt": [{"role": "system", "content": "a"}], "answer": "1"}\n'],
            "a.jsonl:1: .* last message asks nothing",
        ),
        (
            ['{"prompt": [{"role": "user", "content": " "}], "answer": "1"}\n'],
            "a.jsonl:1: .* last message asks nothing",
        ),
        (['{"prompt": "a", "answer": "so #### "}\n'], "a.jsonl:1: column 'answer': expected an answer"),
        (['{"prompt": "a", "prompt": "b", "answer": "1"}\n'], "a.jsonl:1: .* the key 'prompt' stands there twice"),
        *(
            ([f'{{"prompt": {asked}, "answer": "1", "note": {note}}}\n'], r"a.jsonl:1: '.ud83d' is half of a character")
            for asked, note in HALVES
        ),
        (["\xff\xfe\n"], r"a.jsonl:1: not a JSON object"),
        (['{"prompt": "' + "x" * 3000 + '", "answer": "1"}\n'], "none of its 1 rows is usable .*1 longer than"),
    ],
)
def test_a_broken_jsonl_names_file_and_line(tokenizer, tmp_path, lines, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(lines).encode("latin-1"))
    with pytest.raises(UserError, match=message):
        data.make_source(file_config(files.Jsonl, path), tokenizer)


def test_a_missing_named_column_lists_the_columns(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": "2"}])
    cfg = file_config(files.Jsonl, path, prompt_key="q", answer_key="gold")
    with pytest.raises(UserError, match=r"a.jsonl:1: column 'gold' is missing; the columns are q, a"):
        data.make_source(cfg, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.parquet", None, "no such file"),
        ("bad.parquet", b"PAR1 not really", "not a readable parquet file"),
        ("*.parquet", None, "no file matches this pattern"),
        (".", None, "it is a folder"),
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"prompt": "a", "answer": 1}\n', mtime=0)[:-9],
            "cannot read the data set: .* ended before",
        ),
        ("bad.jsonl.gz", gzip.compress(b"a", mtime=0)[:10] + b"\xff" * 9, "cannot read the data set: .* decompressing"),
    ],
)
def test_an_unreadable_data_file_is_named(tokenizer, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        data.make_source(file_config(files.Jsonl if "jsonl" in name else files.Parquet, path), tokenizer)


def test_parquet_text_that_is_no_text_is_refused(tokenizer, tmp_path):
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"prompt": broken, "answer": ["1"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"not a readable parquet file: .* can't decode byte"):
        data.make_source(file_config(files.Parquet, tmp_path / "a.parquet"), tokenizer)


def test_a_pattern_reads_files_in_sorted_order(tokenizer, tmp_path):
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": 1}])
    source = data.make_source(file_config(files.Jsonl, tmp_path / "*.jsonl"), tokenizer)
    assert [source.prompt(i).text for i in range(2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "uids"),
    [
        (("a/train.jsonl", "b/train.jsonl"), ["a/train.jsonl/1", "b/train.jsonl/1"]),
        (("a/x/train.jsonl", "b/x/train.jsonl", "b/x/test.jsonl"), None),
        (("a/rows.jsonl", "a/rows.jsonl.gz", "a/rows.json"), None),
        (("a/one.jsonl", "b/two.jsonl"), ["one/1", "two/1"]),
    ],
)
def test_prompts_of_files_that_share_a_name_have_names_of_their_own(tokenizer, tmp_path, names, uids):
    row = b'{"prompt": "1", "answer": 1}\n'  # the same row in every file
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"[" + row + b"]" if name.endswith("json") else (gzip.compress(row) if ".gz" in name else row))
    source = data.make_source(file_config(files.Jsonl, tmp_path / "**" / "*.*"), tokenizer)
    found = [source.prompt(i).uid for i in range(len(source))]
    assert len(set(found)) == len(names)
    assert uids is None or found == uids


def test_a_renamed_file_or_an_edited_column_is_other_data(tokenizer, tmp_path):
    """The name begins the uids, which decide the draws; a column may hold what a reward looks at."""
    found = set()
    for name, note in (("a", "x"), ("b", "x"), ("a", "y")):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "1", "answer": 1, "note": note}])
        found.add(data.make_source(file_config(files.Jsonl, path), tokenizer).fingerprint)
    assert len(found) == 3


def test_parts_of_a_mix_have_names_without_a_slash():
    with pytest.raises(UserError, match="'a/b' names its prompts"):
        mix.Config(parts={"a/b": files.Jsonl(path="x")})


@pytest.mark.parametrize(("text", "answer"), [("a\n#### 1,234 ", "1234"), ("#### -3", "-3"), (" x + 1 ", "x + 1")])
def test_final_answer_of_gsm8k(text, answer):
    assert final_answer(text) == answer


def test_an_answer_is_kept_with_the_solution_before_it(tokenizer, tmp_path):
    solution = "1+2=<<1+2=3>>3\n#### 1,003"
    rows = [{"question": "1+2", "answer": solution}, {"question": "3", "answer": "4 "}, {"question": "5", "answer": 6}]
    source = data.make_source(file_config(files.Jsonl, write_jsonl(tmp_path / "a.jsonl", rows)), tokenizer)
    found = {p.meta["question"]: p for p in map(source.prompt, range(3))}
    assert (found["1+2"].answer, found["1+2"].whole_answer) == ("1003", solution)
    assert [(found[q].answer, found[q].whole_answer, "whole_answer" in found[q].meta) for q in "35"] == [
        ("4", "4", False),
        ("6", "6", False),
    ]


def test_an_answer_with_headings_stays_whole():
    text = "In short.\n\n#### Method\nCount.\n\n#### Result\nThere are 1,234."
    assert final_answer(f"{text}\n") == text


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("12,345,678.9", "12345678.9"),
        ("-$1,234", "-$1234"),
        ("1,234, 5,678", "1234, 5678"),
        *((text, text) for text in ("(3, 4)", "1, 2, 3", "1,2,3", "[0, 1)", "x=1, y=2", "1,234,5", "5,1,234")),
        *((text, text) for text in ("(100,200)", "[0,100)", "\\{100,200\\}", "0.25,100", "1,2345")),
    ],
)
def test_a_final_answer_loses_the_commas_of_thousands_and_no_others(written, answer):
    assert final_answer(f"so\n#### {written}") == answer


def test_ids_to_leave_out_are_compared_as_text_and_each_must_be_there(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": i, "prompt": str(i), "answer": i} for i in (1, 2, 3)])
    kept = data.make_source(file_config(files.Jsonl, path, leave_out=("3", "1")), tokenizer)
    assert [kept.prompt(i).answer for i in range(len(kept))] == ["2"]
    with pytest.raises(UserError, match=r"a\.jsonl: no row has the id '03' or '4' in its column `id`; correct"):
        data.make_source(file_config(files.Jsonl, path, leave_out=("4", "3", "03")), tokenizer)
    # An id of a row that `where` drops is there; rows behind the limit are not read.
    data.make_source(file_config(files.Jsonl, path, leave_out=("3",), where={"answer": "2"}), tokenizer)
    assert len(data.make_source(file_config(files.Jsonl, path, leave_out=("3",), limit=1), tokenizer)) == 1


def test_a_text_file_is_cut_at_empty_lines(tmp_path):
    paragraphs = [f"Paragraph {i}. " + "word " * 200 for i in range(9)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs) + "\n")
    rows = list(files.Jsonl(path=str(tmp_path / "book.txt")).parts().__next__()[1])
    texts = [row["text"] for _, _, row in rows]
    assert "\n\n".join(texts) == "\n\n".join(paragraphs)
    assert len(texts) == 3
    assert all(len(text) >= 4000 for text in texts[:-1])
