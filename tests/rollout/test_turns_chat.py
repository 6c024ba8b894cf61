# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens between the turns of a chat: the text that the chat template writes behind the tokens that were drawn."""

import pytest

from qarl_jax.rollout.environments import Calculator
from qarl_jax.rollout.turns import Observations
from qarl_jax.types import UserError
from tests.reference import chat_templates
from tests.reference.chat_templates import tokenizer_of

THINK, NO_THINK = {"enable_thinking": True}, {"enable_thinking": False}
QWEN = {"QWEN25": [{}], "QWEN3": [{}, THINK, NO_THINK], "QWEN35": [{}, THINK, NO_THINK]}
QWEN |= {"QWEN3_INSTRUCT_2507": [{}], "QWEN3_THINKING_2507": [{}]}
CASES = [(name, role, args) for name, all_args in QWEN.items() for role in ("user", "tool") for args in all_args]
CASES += [("QWEN25", "system", {}), ("QWEN3", "system", NO_THINK)]
CASES += [("LLAMA3", role, {}) for role in ("user", "tool", "ipython", "system")]
# What the policy draws behind an opening: with its thought, where it thinks.
SAID = {"<think>\n": "hm\n</think>\n\nthe door", "assistant\n": "<think>\nhm\n</think>\n\nthe door"}


def made(name, role="user", args=None, **settings):
    ends = {"eos": "<|eot_id|>", "ends": ["<|eom_id|>"]} if name == "LLAMA3" else {"ends": ["<|endoftext|>"]}
    tokenizer = tokenizer_of(getattr(chat_templates, name), **ends)
    return tokenizer, Observations(Calculator(role=role, **settings), tokenizer, True, args)


def whole(tokenizer, messages, args):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(args or {}))


@pytest.mark.parametrize(("name", "role", "args"), CASES)
def test_behind_a_turn_stands_what_the_template_writes_there(name, role, args):
    tokenizer, observations = made(name, role, args)
    messages = [{"role": "user", "content": "where?"}]
    fed = whole(tokenizer, messages, args)
    for said, observed in (("the answer", "the other room"), ("the door", "it is open, über")):
        messages += [{"role": "assistant", "content": said}, {"role": role, "content": observed}]
        written = whole(tokenizer, messages, args)
        _, _, behind = written.rpartition(said)
        found = tokenizer.decode(observations.tokens(observed))
        assert tokenizer.eos_token + found == behind
        opening = fed[fed.rindex(messages[1]["role"]) :]
        assert found.endswith(opening)  # every turn is opened as the first was
        fed += said + tokenizer.eos_token + found
    assert fed.count(tokenizer.eos_token) == written.count(tokenizer.eos_token)


def is_steady(name, role, args):
    """Whether the template writes turns again as they were drawn: Qwen3's leaves out thoughts, and the empty one."""
    if name == "QWEN3":
        return role == "tool" and args is not NO_THINK
    return role == "tool" or name not in ("QWEN35", "QWEN3_THINKING_2507")


@pytest.mark.parametrize(("name", "role", "args"), [case for case in CASES if is_steady(*case)])
def test_a_conversation_has_the_very_tokens_that_a_steady_template_gives_it(name, role, args):
    tokenizer, observations = made(name, role, args)
    messages = [{"role": "user", "content": "where?"}]
    opened = whole(tokenizer, messages, args)
    fed = tokenizer(opened, add_special_tokens=False)["input_ids"]
    thinks = name in ("QWEN3", "QWEN35", "QWEN3_THINKING_2507")
    drawn = next((said for end, said in SAID.items() if thinks and opened.endswith(end)), "the door")
    for observed in ("the other room", "it is open, über"):
        fed += tokenizer(drawn, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        fed += observations.tokens(observed)
        said = f"<think>\n{drawn}" if opened.endswith("<think>\n") else drawn
        messages += [{"role": "assistant", "content": said}, {"role": role, "content": observed}]
    assert fed == tokenizer(whole(tokenizer, messages, args), add_special_tokens=False)["input_ids"]


def test_messages_of_a_tool_share_what_the_template_writes_around_them():
    tokenizer, observations = made("QWEN3", "tool")
    found = tokenizer.decode(observations.tokens([{"role": "tool", "content": text} for text in "12"]))
    around = "\n<tool_response>\n{}\n</tool_response>".format
    assert found == f"\n<|im_start|>user{around(1)}{around(2)}<|im_end|>\n<|im_start|>assistant\n"


def test_a_long_observation_is_cut_within_what_the_template_writes_around_it():
    tokenizer, observations = made("QWEN25", max_observation_len=5)
    found = tokenizer.decode(observations.tokens("ab" + "ü" * 1000))
    assert found == "\n<|im_start|>user\nabü<|im_end|>\n<|im_start|>assistant\n"  # two bytes each, and no half of one
    messages = [
        {"role": "user", "content": "abcd"},
        {"role": "user", "content": "efgh"},
        {"role": "user", "content": "i"},
    ]
    found = tokenizer.decode(observations.tokens(messages))
    assert found.split("<|im_start|>")[1:] == [f"user\n{x}<|im_end|>\n" for x in ("abcd", "e", "")] + ["assistant\n"]


def test_what_is_observed_first_is_a_message_behind_an_empty_turn():
    tokenizer, observations = made("QWEN25")
    assert observations.tokens("", first=True) == ()
    found = tokenizer.decode(observations.tokens("a room", first=True))
    assert found == "<|im_end|>\n<|im_start|>user\na room<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_that_the_policy_does_not_draw_is_written_and_one_that_it_draws_is_not():
    turn = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    for written, joined in (
        ("<|im_end|>\n", "<|im_end|>\n[user]x"),
        (" <|endoftext|>", "[user]x"),
        ("\n", "\n[user]x"),
    ):
        tokenizer = tokenizer_of(
            turn.replace("END", written), eos="<|endoftext|>"
        )  # a base model: its turns end with another token
        found = tokenizer.decode(Observations(Calculator(), tokenizer, True).tokens("x"))
        assert found == joined + written + "["


@pytest.mark.parametrize(
    ("name", "role", "why"),
    [
        ("QWEN25", "environment", "leaves such messages out.*role=user or tool or system"),
        ("QWEN35", "environment", "Unexpected message role.*role=user or tool"),
        ("QWEN35", "system", "must be at the beginning"),
    ],
)
def test_a_role_that_the_template_does_not_write_is_refused_with_those_that_it_writes(name, role, why):
    with pytest.raises(UserError, match=f"role '{role}'.*{why}"):
        made(name, role)
    _, observations = made(name)
    with pytest.raises(UserError, match=f"role '{role}'"):
        observations.tokens([{"role": role, "content": "x"}])


def test_a_template_without_earlier_turns_is_refused():
    with pytest.raises(UserError, match=r"writes no second turn.*data.template=raw"):
        Observations(Calculator(), tokenizer_of("{{ messages[-1].content }}"), True)
