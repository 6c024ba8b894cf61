# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A prompt loses and doubles no message, does not end, and is held out whatever stands around its question."""

import datetime
import json

import pytest
import transformers.utils.chat_template_utils as chat_templates
from tokenizers.processors import TemplateProcessing

from qarl_jax import data
from qarl_jax.data.sources import files, reasoning_gym
from qarl_jax.data.sources.template import Skipped, is_heldout
from qarl_jax.data.stream import PromptStream
from qarl_jax.types import UserError

CHARACTERS = "".join(chr(c) for c in range(32, 127)) + "\n"
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return data.make_char_tokenizer(CHARACTERS, tmp_path_factory.mktemp("tokenizer"), chat_template=CHAT)


def message(role, content, **more):
    return {"role": role, "content": content} | more


ASKED = [message("user", "1+1?")]
SET_UP = [message("system", "Think."), *ASKED]
TURNS = [message("user", "1+1?"), message("assistant", "2"), message("user", "+1?")]


# ---- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "system", "messages", "text"),
    [
        ("chat", "", SET_UP, "[system]Think.[user]1+1?[a]"),
        ("chat", "Add.", SET_UP, "[system]Add.\n\nThink.[user]1+1?[a]"),
        ("chat", "Think.", SET_UP, "[system]Think.[user]1+1?[a]"),
        ("chat", "Add.", TURNS, "[system]Add.[user]1+1?[assistant]2[user]+1?[a]"),
        ("chat", "", [*ASKED, message("assistant", "<think>")], "[user]1+1?[assistant]<think>"),
        ("raw", "", SET_UP, "Think.\n1+1?"),
        ("raw", "Add.", ASKED, "Add.\n1+1?"),
        ("{{ system }}|{{ question }}", "Add.", SET_UP, "Add.\n\nThink.|1+1?"),
        (
            "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}",
            "Add.",
            TURNS,
            "s:Add. u:1+1? a:2 u:+1? ",
        ),
        ("{{ question }}", "", ASKED, "1+1?"),
    ],
)
def test_every_message_stands_in_the_prompt_once(tokenizer, template, system, messages, text):
    assert data.Template(tokenizer, template, system, {}, 100).render(messages, {}) == text


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            "{{ question }}!",
            [message("system", "Add."), *ASKED],
            "leaves out the system message 'Add.': add {{ system }}",
        ),
        ("raw", TURNS, r"data.template='raw' writes one message, and here are 3 \(user, assistant, user\)"),
        ("{{ question }}", TURNS, "a Jinja template that writes {{ messages }}"),
        ("{{ question }}", SET_UP, "leaves out the system message 'Think.'"),
    ],
)
def test_a_template_that_would_leave_out_a_message_is_refused(tokenizer, template, messages, says):
    with pytest.raises(UserError, match=says):
        data.Template(tokenizer, template, "", {}, 100).render(messages, {})


def test_a_message_that_the_model_s_chat_template_drops_is_told(tmp_path):
    deaf = data.make_char_tokenizer(CHARACTERS, tmp_path, chat_template="{{ messages[-1].content }}")
    template = data.Template(deaf, "chat", "Add.", {}, 100)
    assert template.render("1+1?", {}) == "1+1?"
    assert "leaves out or changes a message: system: 'Add.'" in template.notes["left out"]


def test_what_else_a_message_says_reaches_the_chat_template(tmp_path):
    named = data.make_char_tokenizer(
        CHARACTERS, tmp_path, chat_template="{{ messages[0].name }}:{{ messages[0].content }}"
    )
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [message("user", "1+1?", name="Ada", tool_calls=None)], "answer": 2}))
    cfg = data.Config(source=files.Jsonl(path=str(file)), holdout=0.0)
    assert data.make_source(cfg, named).prompt(0).text == "Ada:1+1?"


# ---- ends ----------------------------------------------------------------------------------------------------------


def around(folder, single):
    """A tokenizer that puts special tokens around every text."""
    made = data.make_char_tokenizer(CHARACTERS, folder, extra_tokens=("<bos>",), chat_template=f"<bos>{CHAT}")
    made._tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<bos>", 3), ("<eos>", 1)])
    return made


@pytest.mark.parametrize("single", ["$A", "$A <eos>", "<bos> $A", "<bos> $A <eos>"])
@pytest.mark.parametrize("template", ["raw", "{{ question }}", "<bos>{{ question }}", "chat"])
def test_a_prompt_begins_once_and_does_not_end(tmp_path, single, template):
    found = data.Template(around(tmp_path, single), template, "", {}, 100)
    ids = found.encode(found.render("7", {}))
    begins = "<bos>" in single or "<bos>" in template or template == "chat"
    assert ids.count(3) == int(begins) == int(ids[0] == 3)
    assert 1 not in ids


def test_a_prompt_whose_template_ends_it_is_told(tokenizer):
    template = data.Template(tokenizer, "{{ question }}<eos>", "", {}, 100)
    assert template.admit(template.render("7", {}), Skipped())
    assert "prompts end in the end token" in template.notes["end"]


def test_a_row_of_megabytes_is_left_out_without_being_read_whole(tokenizer):
    template, seen = data.Template(tokenizer, "raw", "", {}, 100), []
    template.tokenizer = lambda text, **more: seen.append(len(text)) or tokenizer(text, **more)
    skipped = Skipped()
    assert template.admit("7" * 10_000_000, skipped) is None
    assert (skipped.too_long, max(seen)) == (1, 6400)


# ---- the split -----------------------------------------------------------------------------------------------------


def rows(folder, count=300):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"What is {i}?", "answer": str(i)}) + "\n" for i in range(count)))
    return files.Jsonl(path=str(file))


def held_out(cfg, tokenizer, split="heldout", **settings):
    source = data.make_source(data.Config(source=cfg, holdout=0.3, **settings), tokenizer, split)
    return {(prompt.uid, prompt.answer) for prompt in map(source.prompt, range(len(source)))}


def test_a_question_is_held_out_whatever_stands_around_it(tokenizer, tmp_path):
    cfg = rows(tmp_path)
    found = held_out(cfg, tokenizer)
    assert 60 < len(found) < 120
    assert found == {(f"rows/{i + 1}", str(i)) for i in range(300) if is_heldout(f"What is {i}?", 0.3)}
    for settings in ({"system": "Add."}, {"template": "raw"}, {"template": "{{ question }}\n"}, {"max_prompt_len": 40}):
        assert held_out(cfg, tokenizer, **settings) == found
    assert held_out(cfg, tokenizer, "train").isdisjoint(found)


def test_a_task_is_held_out_whatever_stands_around_it(tokenizer):
    cfg = reasoning_gym.Config(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=60)

    def asked(split, **settings):
        source = data.make_source(data.Config(source=cfg, holdout=0.3, **settings), tokenizer, split)
        return [source.prompt(i).meta["question"] for i in range(len(source))]

    plain = asked("heldout")
    assert asked("heldout", system="Add.") == asked("heldout", template="{{ meta.expression }}=") == plain
    assert set(asked("train", template="raw")).isdisjoint(plain)


def test_a_source_says_what_of_a_task_is_the_question(tokenizer):
    cfg = reasoning_gym.Config(dataset="chain_sum", config={"max_terms": 3}, size=20, question="{{ meta.expression }}=")
    source = data.make_source(data.Config(source=cfg, template="chat", holdout=0.5), tokenizer)
    texts = [source.prompt(i).text for i in range(20)]
    assert all(text.startswith("[user]") and text.endswith("=[a]") and len(text) < 50 for text in texts)
    assert not any(is_heldout(text.removeprefix("[user]").removesuffix("[a]"), 0.5) for text in texts)


def test_messages_are_held_out_as_their_text_is(tokenizer):
    questions = [f"What is {i}?" for i in range(50)]
    expected = [is_heldout(question, 0.5) for question in questions]
    for around_it in ([], [message("system", "Think.")], [message("developer", "Add.")]):
        assert [is_heldout([*around_it, message("user", question)], 0.5) for question in questions] == expected
    turns = [is_heldout([*TURNS, message("user", question)], 0.5) for question in questions]
    assert turns != expected


def test_a_run_goes_on_the_next_day_where_the_template_writes_the_date(tmp_path, monkeypatch):
    dated = "{{ strftime_now('%d %b %Y') }}" + CHAT
    tokenizer = data.make_char_tokenizer(CHARACTERS, tmp_path, chat_template=dated)

    class Day(datetime.datetime):
        number = 26

        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 11, cls.number, 12)

    monkeypatch.setattr(chat_templates, "datetime", Day)
    cfg = data.Config(source=rows(tmp_path), holdout=0.3)
    before = data.make_source(cfg, tokenizer)
    assert "today's date" in before.notes["date"]
    Day.number = 27
    after = data.make_source(cfg, tokenizer)
    assert before.prompt(0).text != after.prompt(0).text
    PromptStream(after, 0, 8).check_state(PromptStream(before, 0, 8).state(3))


def test_another_chat_template_is_other_data(tokenizer, tmp_path):
    cfg = data.Config(source=rows(tmp_path), holdout=0.3)
    other = data.make_char_tokenizer(CHARACTERS, tmp_path, chat_template=CHAT + " ")
    assert data.make_source(cfg, tokenizer).fingerprint != data.make_source(cfg, other).fingerprint


# ---- tools, and messages as people have them -------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": None}}}
WITH_TOOLS = "{% if tools %}<{{ tools | tojson }}>{% endif %}" + CHAT


def prompts_of(tokenizer, path, rows, **settings):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = data.Config(source=files.Jsonl(path=str(path), **settings), max_prompt_len=400, holdout=0.0)
    source = data.make_source(cfg, tokenizer)
    return [source.prompt(i) for i in range(len(source))]


def test_a_rows_tools_reach_the_chat_template_and_never_vanish(tokenizer, tmp_path):
    knows = data.make_char_tokenizer(CHARACTERS, tmp_path / "knows", chat_template=WITH_TOOLS)
    rows = [{"prompt": "1+1?", "answer": 2, "tools": tools} for tools in ([TOOL], json.dumps([TOOL]), [], "")]
    texts = [prompt.text for prompt in prompts_of(knows, tmp_path / "a.jsonl", rows)]
    assert texts[0] == texts[1]
    assert json.loads(texts[0].split(">")[0][1:])[0]["function"]["name"] == "add"
    assert "required" not in texts[0]  # a table's None is no key
    assert texts[2] == texts[3] == "[user]1+1?[a]"
    with pytest.raises(UserError, match=r"chat template leaves out the tool 'add'"):
        prompts_of(tokenizer, tmp_path / "b.jsonl", rows[:1])
    with pytest.raises(UserError, match=r"b.jsonl:1: column 'tools'"):
        prompts_of(tokenizer, tmp_path / "b.jsonl", [{"prompt": "1", "answer": 2, "tools": {"a": 1}}])


def test_conversations_parts_and_calls_are_read_as_they_are_published(tokenizer, tmp_path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    rows = [
        {"messages": [message("user", parts), message("assistant", " 2 ")]},
        {"messages": [*SET_UP, called, message("tool", "2", name=None)]},
        {"messages": TURNS},
    ]
    found = prompts_of(tokenizer, tmp_path / "a.jsonl", rows)
    assert [prompt.answer for prompt in found] == ["2", "", ""]
    assert [prompt.text for prompt in found] == [
        "[user]1+1?[a]",
        "[system]Think.[user]1+1?[assistant][tool]2[a]",
        "[user]1+1?[assistant]2[user]+1?[a]",
    ]
    assert found[1].messages[2]["tool_calls"] == called["tool_calls"]
    (asked,) = prompts_of(tokenizer, tmp_path / "b.jsonl", [{"q": "1+1?"}], prompt_key="q")
    assert (asked.text, asked.answer) == ("[user]1+1?[a]", "")
