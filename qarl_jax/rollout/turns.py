# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-turn rollouts: responses alternate between turns of the policy and observations of an environment.

    engine = TurnTaking(engine, cfg, tokenizer, chat=True)      # wraps an engine; `draw` plays episodes

    prompt | turn 0 | observation | turn 1 | observation | turn 2
             drawn                  drawn                  drawn        -> Completion.turns, the rest is not trained on

A turn ends with a stop token. Its text goes to the episode's environment, whose observation is tokenized and appended
to the drawn tokens. Drawn tokens are never decoded and tokenized again, so the learner scores what was sampled. Every
turn is a request with the whole context before it (`RolloutEngine.extend`). Its random numbers depend on its position
in the response: with the embedded sampler an episode is a function of (weights, key, prompt, sample's number,
environment). vLLM finds the context in its prefix cache.

The k-th turns of all episodes are drawn together. The environment answers a finished turn while others are still drawn.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from qarl_jax.data.sources.template import Messages, Template
from qarl_jax.data.tokenizer import Tokenizer, decode, ends
from qarl_jax.rollout import Around, Drawn, Request, RolloutEngine, SamplingConfig
from qarl_jax.rollout.environments import Config, Episodes, Said, plain
from qarl_jax.runtime import processes
from qarl_jax.types import Completion, Turn, UserError, VersionSpan

_NOTICE_S = 10.0  # a call that takes longer is spoken of

_DRAWN, _OBSERVED = "QARL-DRAWN", "QARL-OBSERVED"  # what a chat template is asked to write as a turn, and behind one


class Observations:
    """Tokenizes an environment's observations, to be appended to a turn that ended with a stop token.

    A chat template may render an earlier turn differently than it was drawn: Qwen3's drops its thoughts. So the
    template renders a conversation with a placeholder as the turn. The text after the placeholder, up to and with the
    opening of the next turn, is appended to the drawn tokens.

    Args:
      chat: whether observations are rendered by the tokenizer's chat template.
      chat_args: further arguments of the template, as for prompts.

    Raises:
      UserError: the chat template cannot render a message of `cfg.role` after a turn.
    """

    def __init__(self, cfg: Config, tokenizer: Tokenizer, chat: bool, chat_args: Mapping[str, Any] | None = None):
        self._cfg, self._tokenizer = cfg, tokenizer
        self._template = Template(tokenizer, "chat", "", chat_args or {}, 0) if chat else None
        self._ends = [tokenizer.decode([token]) for token in ends(tokenizer)]
        self._known: set[str] = set()  # roles that the template writes
        if chat:
            self._check(cfg.role)

    def tokens(self, observation: str | list[dict[str, str]], *, first: bool = False) -> tuple[int, ...]:
        """Returns an observation's token ids. `first`: before the first turn, where an empty one gives none.

        Raises:
          UserError: the chat template cannot render a message of an observation's role.
        """
        if first and not observation:
            return ()
        messages = observation
        if isinstance(messages, str):
            messages = [{"role": self._cfg.role, "content": messages}]
        messages = self._cut(messages)
        if self._template is None:
            text = "\n".join(message["content"] for message in messages)
            return self._ids(text) if first else self._ids(f"{self._cfg.before}{text}{self._cfg.after}", drawn=True)
        for message in messages:
            self._check(message["role"])
        text = self._behind(messages)
        if first:  # the policy has said nothing: an empty turn
            return self._ids(text)
        for end in self._ends:  # has been drawn
            if text.lstrip().startswith(end):
                text = text.lstrip().removeprefix(end)
                break
        return self._ids(text, drawn=True)

    def _cut(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Cuts contents to `max_observation_len` tokens in all; text that the template adds does not count."""
        out, left = [], self._cfg.max_observation_len
        for message in messages:
            content = message["content"]
            tokens = self._ids(content)
            if len(tokens) > left:
                # Without the beginning of a character that takes several tokens.
                content = self._tokenizer.decode(tokens[:left], clean_up_tokenization_spaces=False).rstrip("\ufffd")
            left -= min(left, len(tokens))
            out.append({"role": message["role"], "content": content})
        return out

    def _ids(self, text: str, *, drawn: bool = False) -> tuple[int, ...]:
        """Token ids of a text. `drawn`: as they are behind a stop token, where some tokenizers write no first space."""
        before = self._tokenizer.eos_token if drawn else ""
        return tuple(self._tokenizer(before + text, add_special_tokens=False)["input_ids"])[drawn:]

    def _behind(self, messages: Messages) -> str:
        """Renders the text that the template writes behind a turn that messages follow."""
        assert self._template is not None
        drawn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _DRAWN}]
        _, found, behind = self._template.render([*drawn, *messages], {}).partition(_DRAWN)
        if not found:
            raise UserError("it does not write what the assistant said")
        return behind

    def _check(self, role: str) -> None:
        if role not in self._known and (fault := self._fault(role)):
            others = [name for name in ("user", "tool", "system") if name != role and not self._fault(name)]
            raise UserError(
                f"rollout.environment: the chat template cannot go on with a message of role {role!r} behind a turn"
                f" ({fault}); set rollout.environment.role={' or '.join(others)}."
                if others
                else f"rollout.environment: the chat template writes no second turn ({fault}); set data.template=raw."
            )
        self._known.add(role)

    def _fault(self, role: str) -> str:
        """Returns the reason why the template cannot go on with a message of a role; empty where it can."""
        try:
            found = _OBSERVED in self._behind([{"role": role, "content": _OBSERVED}])
        except UserError as error:
            return str(error)
        return "" if found else "it leaves such messages out"


@dataclasses.dataclass
class Episode:
    """One response being made, turn by turn. `index`: of its request in the call; `name`: unique among all episodes."""

    request: Request
    index: int
    name: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[VersionSpan] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    error: str = ""  # with the turn that it came behind

    def draw(self, drawn: Completion) -> None:
        """Appends a turn of the policy."""
        start = len(self.tokens)
        self.tokens += drawn.tokens
        self.logprobs.append(drawn.logprobs)
        self.versions += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end) for span in drawn.versions
        ]
        self.turns.append(Turn(start=start, end=len(self.tokens)))

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends an observation of the environment."""
        self.tokens += tokens
        self.logprobs.append(np.zeros(len(tokens), np.float32))

    def fail(self, error: str) -> None:
        """Ends the episode as aborted, without tokens to train on, because its environment raised `error`."""
        place = f"turn {len(self.turns)}" if self.turns else "before the first turn"
        self.finish_reason, self.error = "abort", f"prompt {self.request.prompt.uid}, {place}: {error}"
        self.tokens, self.logprobs, self.versions, self.turns = [], [], [], []

    @property
    def completion(self) -> Completion:
        """The episode as one response: drawn and observed tokens in order, versions and turns by position."""
        return Completion(
            prompt_tokens=tuple(self.request.prompt.tokens),
            tokens=tuple(self.tokens),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self.logprobs]),
            finish_reason=self.finish_reason,
            versions=tuple(self.versions),
            turns=tuple(self.turns),
        )


class TurnTaking(Around):
    """A RolloutEngine whose `draw` plays episodes: turns of the policy alternate with observations.

    Args:
      engine: the engine that draws turns; `close` closes it, too.
      chat: whether prompts are rendered by the tokenizer's chat template. chat_args: its further arguments.
      log: called with a line when episodes fail.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        cfg: Config,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        chat_args: Mapping[str, Any] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        super().__init__(engine)
        self._cfg, self._tokenizer, self._log = cfg, tokenizer, log
        self._name = f"environment {cfg.source()[0]}"
        self._observations = Observations(cfg, tokenizer, chat, chat_args)
        # Over several processes the first asks for all: an environment may answer each of them otherwise.
        self._episodes = Episodes(cfg, log) if processes.is_first() else None
        self._names = itertools.count()

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
        super().close()

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        """Yields multi-turn responses, each as soon as its last turn is answered; see `RolloutEngine`.

        Raises:
          UserError: the environment failed in every episode.
        """
        episodes = [Episode(request=one, index=i, name=next(self._names)) for i, one in enumerate(requests)]
        live = episodes
        try:
            self._begin(episodes, sampling.max_response_len)
            while live:
                yield from ((one.index, one.completion) for one in live if one.finish_reason)
                live = [one for one in live if not one.finish_reason]
                if live:
                    self._turn(live, sampling)
        finally:  # an engine may fail, too
            for episode in episodes:
                if not episode.finish_reason:
                    self._fail(episode, "the turn was not drawn")
        self._tell(episodes)

    def _tell(self, episodes: Sequence[Episode]) -> None:
        """Logs how many episodes failed. Raises UserError if all did."""
        errors = [episode.error for episode in episodes if episode.error]
        if not errors:
            return
        line = f"{self._name} failed in {len(errors)} of {len(episodes)} episodes; first {errors[0]}"
        if len(errors) == len(episodes):
            raise UserError(f"{line}. Mend it, and let `step` answer what a policy does wrong (docs/turns.md).")
        self._log(f"{line}. Their responses are left out.")

    def _begin(self, episodes: Sequence[Episode], limit: int) -> None:
        calls = []
        for episode in episodes:
            prompt = episode.request.prompt
            task = {"uid": prompt.uid, "text": prompt.text, "answer": prompt.answer, "meta": plain(prompt.meta)}
            calls.append({"episode": episode.name, "reset": task})
        for episode, said in zip(episodes, self._answers(list(map(self._ask, calls))), strict=True):
            observed = self._observed(episode, said, first=True)
            if observed is not None:
                episode.observe(observed)
                if len(observed) >= limit:
                    self._fail(episode, f"what reset says leaves no room in rollout.max_response_len={limit} tokens")

    def _turn(self, live: Sequence[Episode], sampling: SamplingConfig) -> None:
        """Draws a turn of every episode, and lets the environment answer."""
        limit = sampling.max_response_len
        longest = min(self._cfg.max_turn_len or limit, limit)
        requests = [
            dataclasses.replace(
                episode.request, tokens=tuple(episode.tokens), max_tokens=min(longest, limit - len(episode.tokens))
            )
            for episode in live
        ]
        turns: dict[int, Completion] = {}
        asked: dict[int, Future[Said] | None] = {}
        sampling = dataclasses.replace(sampling, max_response_len=longest)
        with contextlib.closing(self.engine.draw(requests, sampling=sampling)) as ended:
            for index, drawn in ended:
                turns[index], asked[index] = drawn, self._ask(self._step(live[index], drawn))
        order = range(len(live))
        answers = self._answers([asked[index] for index in order])
        for episode, drawn, said in zip(live, (turns[index] for index in order), answers, strict=True):
            episode.draw(drawn)
            self._answered(episode, drawn, said, limit)

    def _step(self, episode: Episode, drawn: Completion) -> dict[str, Any]:
        """Makes the environment's call for a turn; a turn that was cut off ends the episode without a step."""
        if drawn.finish_reason != "stop":
            return {"episode": episode.name}
        return {"episode": episode.name, "step": decode(self._tokenizer, drawn.tokens)}

    def _answered(self, episode: Episode, drawn: Completion, said: Said, limit: int) -> None:
        if "error" in said:
            self._fail(episode, said["error"])
        elif drawn.finish_reason != "stop":
            episode.finish_reason = "length"
        else:
            episode.turns[-1] = dataclasses.replace(episode.turns[-1], reward=said["reward"])
            if said["done"]:
                episode.finish_reason = "stop"
                return
            observed = self._observed(episode, said)
            if observed is None:
                return
            if not observed:
                self._fail(episode, "it is not done, and said nothing to go on with")
            elif len(episode.turns) < self._cfg.max_turns and len(episode.tokens) + len(observed) < limit:
                episode.observe(observed)
            else:
                episode.finish_reason = "length"
                self._ask({"episode": episode.name})

    def _observed(self, episode: Episode, said: Said, *, first: bool = False) -> tuple[int, ...] | None:
        """Tokenizes the environment's observation; None if the environment failed, or no turn can follow."""
        try:
            if "error" not in said:
                return self._observations.tokens(said["observation"], first=first)
            self._fail(episode, said["error"])
        except UserError as error:
            self._fail(episode, str(error))
        return None

    def _fail(self, episode: Episode, error: str) -> None:
        episode.fail(error)
        self._ask({"episode": episode.name})

    def _ask(self, call: dict[str, Any]) -> Future[Said] | None:
        return None if self._episodes is None else self._episodes.ask(call)

    def _answers(self, asked: Sequence[Future[Said] | None]) -> list[Said]:
        def wait() -> list[Said]:
            futures = [future for future in asked if future is not None]
            left = concurrent.futures.wait(futures, timeout=_NOTICE_S).not_done
            if left:
                self._log(f"waiting for {len(left)} answers of {self._name}, for {_NOTICE_S:g} s by now")
            while left:
                done, left = concurrent.futures.wait(left, timeout=self._cfg.timeout_s + _NOTICE_S)
                if not done and self._episodes is not None:  # a call has a time limit: nobody holds them to it
                    self._episodes.close()
            return [dict(future.result()) for future in futures]

        return processes.from_first(wait)
