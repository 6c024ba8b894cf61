# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts shared by every source of prompts: the protocol, templates, the length filter and the train / held-out split.

The split is by question: a prompt is held out when the hash of its question falls under the held-out share. So the two
splits can have no question in common, however often a procedural task repeats itself and whatever order a file is in.
The split stays the same when the data set grows, and under every template, system message and date.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from qarl_jax.data.sources import hints
from qarl_jax.data.sources.hints import Hint
from qarl_jax.data.tokenizer import Tokenizer, leading_ids
from qarl_jax.types import Prompt, UserError

Split = Literal["train", "heldout", "all"]
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass
class Skipped:
    """Counts of skipped prompts by reason. A run prints them at its start, so that no prompt vanishes in silence."""

    too_long: int = 0
    unknown_characters: int = 0

    @property
    def total(self) -> int:
        """The sum of all reasons."""
        return self.too_long + self.unknown_characters

    def __str__(self) -> str:
        parts = []
        if self.too_long:
            parts.append(f"{self.too_long} longer than max_prompt_len")
        if self.unknown_characters:
            parts.append(f"{self.unknown_characters} with characters the tokenizer does not know")
        return ", ".join(parts) or "none"


@runtime_checkable
class PromptSource(Protocol):
    """A finite, indexable set of prompts; `prompt(i)` is a pure function of `i`.

    `fingerprint` identifies the set (its parameters or bytes, template and split), so that a resumed run can tell that
    its data changed. `notes` are remarks for the run's log, by kind. `longest` is the number of tokens of the longest
    prompt, or the limit where prompts are made on demand.
    """

    fingerprint: str
    skipped: Skipped
    notes: dict[str, str]
    longest: int

    def __len__(self) -> int: ...

    def prompt(self, i: int) -> Prompt:
        """Returns prompt number i, 0 <= i < len(self), with text, token ids, answer and a unique uid."""


class Template:
    """Renders a question, text or chat messages, to text and tokens.

    `raw` is the question as it is; `chat` applies the tokenizer's chat template, and continues a last message of the
    assistant. Any text with "{{" is a Jinja template that sees `question`, `system`, `messages`, `tools` and `meta`
    (for reasoning-gym the metadata of the task). A row's own system message follows `system` in one message. A
    message or a tool that a template would leave out is refused.

    A `hint` is added to the last message of the user; the prompt may then exceed `max_len` by `hint_len` tokens.

    Attributes:
      section: the section of the config that the settings are from, for messages.
      notes: remarks on the prompts rendered so far, by kind.

    Raises:
      UserError: `chat` with a tokenizer that has no chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        system: str,
        chat_args: Mapping[str, Any],
        max_len: int,
        hint: Hint | None = None,
        hint_len: int = 0,
        section: str = "data",
    ):
        self.hint, self._hint_len, self.section = hint, hint_len, section
        self.tokenizer = tokenizer
        self.template = template
        self.system = system
        self.chat_args = dict(chat_args)
        self.max_len = max_len
        self.notes: dict[str, str] = {}
        if template == "chat" and not tokenizer.chat_template:
            raise UserError(
                f"{section}.template=chat, but the tokenizer has no chat template; set {section}.template=raw or a"
                f" Jinja template such as {section}.template='{{{{ question }}}}'."
            )
        self.compiled: Any = None
        self._names: set[str] = set()
        if template not in ("raw", "chat"):
            self.compiled, self._names = compiled(template, f"{section}.template")
        # A chat template writes its special tokens itself; in front of other text come the tokenizer's own.
        self._leading = () if template == "chat" else leading_ids(tokenizer)
        dated = "strftime_now" in str(tokenizer.chat_template) and "date_string" not in chat_args
        if template == "chat" and dated:
            self.notes["date"] = (
                "the chat template writes today's date, so prompts change from day to day; where it reads date_string,"
                f" {section}.chat_args={{date_string: 26 Jul 2024}} keeps them"
            )

    def render(self, question: str | Messages, meta: Mapping[str, Any], tools: Sequence[Any] = ()) -> str:
        """Renders a question to the prompt's text.

        Args:
          question: text, or chat messages.
          meta: the row's other columns.
          tools: JSON schemas of the functions that the policy may call.

        Raises:
          UserError: the template fails, or would leave out a message or the tools.
        """
        messages = said_in(question)
        said = list(itertools.dropwhile(is_system, messages))
        heads = [self.system, *(message["content"] for message in messages[: len(messages) - len(said)])]
        system = "\n\n".join(dict.fromkeys(head for head in heads if head))  # the same words once
        whole = [{"role": "system", "content": system}, *said] if system else said
        if self.template == "chat":
            return self._chat(whole, tools)
        setting = f"{self.section}.template"
        if tools and "tools" not in self._names:
            raise UserError(f"{setting}={self.template!r} leaves out a row's tools: use {setting}=chat.")
        if len(said) > 1 and "messages" not in self._names:
            raise UserError(
                f"{setting}={self.template!r} writes one message, and here are {len(said)}"
                f" ({', '.join(str(message['role']) for message in said)}): use {setting}=chat, or a Jinja template"
                " that writes {{ messages }}."
            )
        text = next((m["content"] for m in reversed(said) if m["role"] == "user"), said[-1]["content"])
        if not self.compiled:
            return f"{system}\n{text}" if system else text
        if system and not self._names & {"system", "messages"}:
            raise UserError(
                f"{setting}={self.template!r} leaves out the system message {system!r:.80}: add {{{{ system }}}}."
            )
        values = {"question": text, "system": system, "messages": whole, "meta": meta, "tools": tools}
        return rendered(self.compiled, f"{setting} {self.template!r}", **values)

    def _chat(self, messages: Messages, tools: Sequence[Any]) -> str:
        goes_on = messages[-1]["role"] == "assistant"
        ends = {"continue_final_message" if goes_on else "add_generation_prompt": True}
        given = {"tools": list(tools)} if tools else {}
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **ends, **given, **self.chat_args)
        except Exception as error:  # a template is a program, and may fail in any way
            raise UserError(
                f"the tokenizer's chat template fails on {messages!r:.200}: {type(error).__name__}: {error}"
            ) from None
        for message in messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                self.notes["left out"] = (
                    f"the chat template leaves out or changes a message: {message['role']}: {message['content']!r:.80}"
                )
        names = [(tool.get("function") or tool).get("name", "") for tool in tools]
        if lost := next((name for name in names if name not in text), ""):
            raise UserError(
                f"the tokenizer's chat template leaves out the tool {lost!r}: take a tokenizer that has tools."
            )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Encodes a text to token ids, with the tokenizer's leading ids (`leading_ids`) once and no end token."""
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if ids[: len(self._leading)] == self._leading else (*self._leading, *ids)

    def admit(self, text: str, skipped: Skipped) -> tuple[int, ...] | None:
        """Encodes a prompt. If it is too long or has unknown characters, returns None and counts it in `skipped`."""
        tokens = self.encode(text[: 64 * self.max_len])  # the start of a row of megabytes shows that it is too long
        if len(tokens) <= self.max_len and len(text) > 64 * self.max_len:
            tokens = self.encode(text)
        if len(tokens) > self.max_len:
            skipped.too_long += 1
            return None
        unknown = self.tokenizer.unk_token_id
        if not tokens or (unknown is not None and unknown in tokens):
            skipped.unknown_characters += 1
            return None
        if tokens[-1] == self.tokenizer.eos_token_id:
            self.notes["end"] = (
                f"prompts end in the end token, and the policy goes on after it: see {self.section}.template"
            )
        return tokens

    def prompt(
        self,
        question: str | Messages,
        meta: Mapping[str, Any],
        skipped: Skipped,
        *,
        row: Mapping[str, Any],
        answer: str,
        tools: Sequence[Any] = (),
    ) -> tuple[str, tuple[int, ...]]:
        """Renders and encodes a question, with its hint if there is one; returns no tokens if the question is left out.

        The length of the question alone decides whether it is left out, so that a hint changes no set of questions. A
        hint that would make the prompt too long is left out.

        Args:
          meta, tools: as for `render`.
          row: the row, with the worked solution. answer: the reference answer.
        """
        text = self.render(question, meta, tools)
        tokens = self.admit(text, skipped) or ()
        if not tokens or self.hint is None or not hints.wanted(self.hint, text):
            return text, tokens
        messages = said_in(question)
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
        help = hints.words(self.hint, messages[last]["content"], row, answer)
        if help:
            messages[last]["content"] += f"\n\n{help}"
            longer = self.render(messages, meta, tools)
            more = self.encode(longer)
            if len(more) <= self.max_len + self._hint_len:
                return longer, more
        self.notes["hint"] = "some questions stay without a hint: there is none to give, or it would be too long"
        return text, tokens

    def fingerprint(self) -> str:
        """Returns a hash of all that decides how a question is rendered, the size of the vocabulary included."""
        chat = self.tokenizer.chat_template if self.template == "chat" else ""
        args = sorted(self.chat_args.items())
        hint = () if self.hint is None else (self.hint, self._hint_len)
        return digest(self.template, self.system, args, self.max_len, len(self.tokenizer), chat, *hint)


def compiled(template: str, name: str) -> tuple[Any, set[str]]:
    """Compiles the Jinja template of setting `name`; returns it and the variables that it reads. Raises `UserError`."""
    import jinja2
    import jinja2.meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if "{{" not in template and "{%" not in template:
        kinds = "raw, chat or " if name.endswith(".template") else ""
        raise UserError(f"{name}={template!r}: expected {kinds}a Jinja template (one with {{{{ question }}}}).")
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template), jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{name} {template!r}: not a valid Jinja template: {error}.") from None


def rendered(template: Any, name: str, **values: Any) -> str:
    """Renders a compiled template with `values`. Raises `UserError`, which names the setting `name`, if this fails."""
    try:
        return template.render(**values)
    except Exception as error:
        raise UserError(f"{name} fails on {values['question']!r:.200}: {type(error).__name__}: {error}.") from None


def said_in(question: str | Messages) -> list[dict[str, Any]]:
    """Returns a question as a list of chat messages."""
    return [{"role": "user", "content": question}] if isinstance(question, str) else [dict(m) for m in question]


def is_system(message: Mapping[str, Any]) -> bool:
    """Tells whether a chat message is an instruction (system or developer) and no part of the question."""
    return message["role"] in ("system", "developer")


def asked(question: str | Messages) -> str:
    """Returns the text that the train / held-out split hashes: the question, without system messages.

    A single message of the user counts as its text. White space around the text is stripped.
    """
    if isinstance(question, str):
        return question.strip()
    said = [message for message in question if not is_system(message)]
    if len(said) == 1 and said[0]["role"] == "user":
        return asked(said[0]["content"])
    return json.dumps([[message["role"], message["content"]] for message in said])


def digest(*parts: Any) -> str:
    """A short stable hash of printable values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def is_heldout(question: str | Messages, share: float) -> bool:
    """Tells whether a question belongs to the held-out split: its fixed hash, as a fraction, is below `share`."""
    number = int.from_bytes(hashlib.blake2b(asked(question).encode(), digest_size=8).digest(), "big")
    return number < share * 2.0**64


def wanted(question: str | Messages, split: Split, share: float) -> bool:
    """Tells whether a question belongs to `split`."""
    return split == "all" or is_heldout(question, share) == (split == "heldout")
