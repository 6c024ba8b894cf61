# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Several turns: an engine whose responses go on after what an environment says.

    engine = TurnTaking(engine, cfg, tokenizer, chat=True)      # an engine as any other; `draw` plays episodes

    prompt | turn 0 | observation | turn 1 | observation | turn 2
             drawn                  drawn                  drawn        -> Completion.turns, the rest is not trained on

A turn ends with a stop token. Its text goes to the episode's environment, and what that says is encoded once and goes
on behind the very tokens that were drawn: nothing is decoded and encoded again, so the learner scores what was sampled.
Every turn is a request with the whole context before it (`RolloutEngine.extend`), and draws with the randomness of its
place in the response. So with the embedded sampler an episode is a function of (weights, key, prompt, sample's number,
environment), and vLLM finds the context in its prefix cache.

All turns of one number are drawn together. The environment answers a turn that has ended while others are still drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from qarl_jax.data.tokenizer import Tokenizer, decode
from qarl_jax.rollout import Drawn, PolicyWeights, Request, RolloutEngine, SamplingConfig
from qarl_jax.rollout.environments import Config, Episodes, Said, plain
from qarl_jax.runtime import processes
from qarl_jax.types import Completion, Turn, UserError, VersionSpan


class Observations:
    """Observations as tokens that go on behind a turn.

    Args:
      cfg: of the environment.
      tokenizer: the policy's.
      chat: whether they are written by the tokenizer's chat template.
    """

    def __init__(self, cfg: Config, tokenizer: Tokenizer, chat: bool):
        self._cfg, self._tokenizer, self._chat = cfg, tokenizer, chat
        if chat:
            self._before = self._rendered([], False)
            # The end of the assistant's turn has been drawn: what the template writes behind it is observed.
            end = self._before.rfind(tokenizer.eos_token)
            self._cut = len(self._before) if end < 0 else end + len(tokenizer.eos_token)

    def tokens(self, observation: str | list[dict[str, str]], *, first: bool = False) -> tuple[int, ...]:
        """Token ids; none for an empty observation before the first turn. `first`: nothing was drawn before it.

        Raises:
          UserError: the chat template writes what was said before otherwise once something follows.
        """
        if first and not observation:
            return ()
        if not self._chat or first:
            text = observation if isinstance(observation, str) else "\n".join(m["content"] for m in observation)
            text = text if first else f"{self._cfg.before}{text}{self._cfg.after}"
        else:
            said = [{"role": self._cfg.role, "content": observation}] if isinstance(observation, str) else observation
            whole = self._rendered(said, True)
            if not whole.startswith(self._before):
                raise UserError(
                    f"rollout.environment: the tokenizer's chat template cannot be gone on with (role"
                    f" {self._cfg.role!r}); try another rollout.environment.role, or data.template=raw."
                )
            text = whole[self._cut :]
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])[: self._cfg.max_observation_len]

    def _rendered(self, said: list[dict[str, str]], more: bool) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *said]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=more)
        except Exception as error:  # a template is a program, and may fail in any way
            raise UserError(f"rollout.environment: the chat template fails on a second turn: {error}") from None


@dataclasses.dataclass
class Episode:
    """One response in the making. `index`: of its request in the call; `name`: among all episodes."""

    request: Request
    index: int
    name: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[VersionSpan] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    error: str = ""

    def draw(self, drawn: Completion) -> None:
        """A turn."""
        start = len(self.tokens)
        self.tokens += drawn.tokens
        self.logprobs.append(drawn.logprobs)
        self.versions += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end) for span in drawn.versions
        ]
        self.turns.append(Turn(start=start, end=len(self.tokens)))

    def observe(self, tokens: Sequence[int]) -> None:
        """What the environment said."""
        self.tokens += tokens
        self.logprobs.append(np.zeros(len(tokens), np.float32))

    def fail(self, error: str) -> None:
        """The environment failed: nothing of the episode is trained on."""
        self.finish_reason, self.error = "abort", error
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


class TurnTaking(RolloutEngine):
    """A RolloutEngine whose `draw` plays episodes.

    Args:
      engine: what draws. It is closed with this one.
      cfg: of the environment.
      tokenizer: the policy's.
      chat: whether prompts are written by the tokenizer's chat template.
      log: is given a line when episodes fail.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        cfg: Config,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.engine, self._cfg, self._tokenizer, self._log = engine, cfg, tokenizer, log
        self._observations = Observations(cfg, tokenizer, chat)
        # Over several processes the first asks for all: an environment may answer each of them otherwise.
        self._episodes = Episodes(cfg, log) if processes.is_first() else None
        self._names = itertools.count()
        self.version = engine.version

    @property
    def facts(self) -> Any:
        return self.engine.facts

    def prepare(self, graphdef: Any) -> None:
        self.engine.prepare(graphdef)

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        report = self.engine.publish(weights, version)
        self.version = self.engine.version
        return report

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
        self.engine.close()

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        """Yields responses of several turns, each as soon as the turn that ends it is answered; see `RolloutEngine`.

        Raises:
          UserError: the environment failed in every one of them.
        """
        episodes = [Episode(request=one, index=i, name=next(self._names)) for i, one in enumerate(requests)]
        live = episodes
        self._begin(episodes, sampling.max_response_len)
        while live:
            yield from ((one.index, one.completion) for one in live if one.finish_reason)
            live = [one for one in live if not one.finish_reason]
            if live:
                self._turn(live, sampling)
        failed = [episode for episode in episodes if episode.error]
        if failed:
            which = f"{failed[0].request.prompt.uid}: {failed[0].error}"
            if len(failed) == len(episodes):
                raise UserError(f"rollout.environment failed in all {len(failed)} episodes of a batch; first {which}")
            self._log(f"the environment failed in {len(failed)} of {len(episodes)} episodes; first {which}")

    def _begin(self, episodes: Sequence[Episode], limit: int) -> None:
        calls = []
        for episode in episodes:
            prompt = episode.request.prompt
            task = {"uid": prompt.uid, "text": prompt.text, "answer": prompt.answer, "meta": plain(prompt.meta)}
            calls.append({"episode": episode.name, "reset": task})
        for episode, said in zip(episodes, self._answers(list(map(self._ask, calls))), strict=True):
            if "error" in said:
                episode.fail(said["error"])
                continue
            episode.observe(self._observations.tokens(said["observation"], first=True))
            if len(episode.tokens) >= limit:
                episode.fail(f"what it says before the first turn leaves no room in {limit} tokens")

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
        """The call that a turn is: the environment is told nothing of one that was cut off."""
        if drawn.finish_reason != "stop":
            return {"episode": episode.name}
        return {"episode": episode.name, "step": decode(self._tokenizer, drawn.tokens)}

    def _answered(self, episode: Episode, drawn: Completion, said: Said, limit: int) -> None:
        if "error" in said:
            episode.fail(said["error"])
        elif drawn.finish_reason != "stop":
            episode.finish_reason = "length"
        else:
            episode.turns[-1] = dataclasses.replace(episode.turns[-1], reward=said["reward"])
            if said["done"]:
                episode.finish_reason = "stop"
                return
            observed = self._observations.tokens(said["observation"])
            if not observed:
                episode.fail("it is not done, and said nothing to go on with")
                self._ask({"episode": episode.name})
            elif len(episode.turns) < self._cfg.max_turns and len(episode.tokens) + len(observed) < limit:
                episode.observe(observed)
            else:
                episode.finish_reason = "length"
                self._ask({"episode": episode.name})

    def _ask(self, call: dict[str, Any]) -> Future[Said] | None:
        return None if self._episodes is None else self._episodes.ask(call)

    def _answers(self, asked: Sequence[Future[Said] | None]) -> list[Said]:
        return processes.from_first(lambda: [dict(future.result()) for future in asked if future is not None])
