# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What every source of prompts shares: the protocol, templates, the length filter and the train / held-out split.

The split is by content: a prompt is held out when the hash of its text falls under the held-out share. So the two
splits can have no prompt in common, however often a procedural task repeats itself and whatever order a file is in,
and the split stays the same when the data set grows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from qarl_jax.data.tokenizer import Tokenizer
from qarl_jax.types import Prompt, UserError

Split = Literal["train", "heldout", "all"]
Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass
class Skipped:
    """How many candidate prompts were left out, and why. Printed at start, so that no prompt vanishes in silence."""

    too_long: int = 0
    unknown_characters: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.too_long + self.unknown_characters

    def __str__(self) -> str:
        parts = []
        if self.too_long:
            parts.append(f"{self.too_long} longer than data.max_prompt_len")
        if self.unknown_characters:
            parts.append(f"{self.unknown_characters} with characters the tokenizer does not know")
        return ", ".join(parts) or "none"


@runtime_checkable
class PromptSource(Protocol):
    """A finite, indexable set of prompts; `prompt(i)` is a pure function of `i`.

    `fingerprint` identifies the set (its parameters or bytes, template and split), so that a resumed run can tell that
    its data changed.
    """

    fingerprint: str
    skipped: Skipped

    def __len__(self) -> int: ...

    def prompt(self, i: int) -> Prompt:
        """Prompt number i, 0 <= i < len(self): text, token ids, answer and a uid of its own."""


class Template:
    """Renders a question to text and tokens.

    `raw` is the question as it is; `chat` applies the tokenizer's chat template with a generation prompt; any text with
    "{{" is a Jinja template that sees `question`, `system` and `meta` (for reasoning-gym: the metadata of the task, so
    "{{ meta.expression }}=" gives a bare sum).
    """

    def __init__(self, tokenizer: Tokenizer, template: str, system: str, chat_args: Mapping[str, Any], max_len: int):
        self.tokenizer = tokenizer
        self.template = template
        self.system = system
        self.chat_args = dict(chat_args)
        self.max_len = max_len
        if template == "chat" and not tokenizer.chat_template:
            raise UserError(
                "data.template=chat, but the tokenizer has no chat template; set data.template=raw or a Jinja template"
                " such as data.template='{{ question }}'."
            )
        self.compiled = None
        if template not in ("raw", "chat"):
            self.compiled = _compile(template)

    def render(self, question: str | Messages, meta: Mapping[str, Any]) -> str:
        """The prompt's text."""
        if self.template == "chat":
            messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
            if self.system:
                messages = [{"role": "system", "content": self.system}, *messages]
            try:
                return self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.chat_args
                )
            except Exception as error:  # a template is a program, and may fail in any way
                raise UserError(
                    f"the tokenizer's chat template fails on {messages!r:.200}: {type(error).__name__}: {error}"
                ) from None
        text = question if isinstance(question, str) else _last_user_message(question)
        if self.compiled is None:
            return f"{self.system}\n{text}" if self.system else text
        try:
            return self.compiled.render(question=text, system=self.system, meta=meta)
        except Exception as error:
            raise UserError(
                f"data.template {self.template!r} fails on {text!r:.200}: {type(error).__name__}: {error}."
            ) from None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; a chat template writes its special tokens itself, other text gets the tokenizer's own."""
        return tuple(self.tokenizer(text, add_special_tokens=self.template != "chat")["input_ids"])

    def admit(self, text: str, skipped: Skipped) -> tuple[int, ...] | None:
        """Token ids of a usable prompt; None, counted, for one that is too long or cannot be encoded."""
        tokens = self.encode(text)
        if len(tokens) > self.max_len:
            skipped.too_long += 1
            return None
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in tokens:
            skipped.unknown_characters += 1
            return None
        return tokens

    def fingerprint(self) -> str:
        """Hash of all that decides how a question is rendered, the size of the vocabulary included."""
        return digest(self.template, self.system, sorted(self.chat_args.items()), self.max_len, len(self.tokenizer))


def _compile(template: str) -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if "{{" not in template and "{%" not in template:
        raise UserError(
            f"data.template={template!r}: expected raw, chat or a Jinja template (one with {{{{ question }}}})."
        )
    try:
        return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(
            template
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"data.template {template!r}: not a valid Jinja template: {error}.") from None


def _last_user_message(messages: Messages) -> str:
    for message in reversed(messages):
        if message.get("role", "user") == "user":
            return message["content"]
    return messages[-1]["content"]


def digest(*parts: Any) -> str:
    """A short stable hash of printable values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def is_heldout(text: str, share: float) -> bool:
    """Whether a prompt belongs to the held-out split: a fixed hash of its text, as a fraction, is below `share`."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return number < share * 2.0**64


def wanted(text: str, split: Split, share: float) -> bool:
    """Whether a prompt belongs to `split`."""
    return split == "all" or is_heldout(text, share) == (split == "heldout")
