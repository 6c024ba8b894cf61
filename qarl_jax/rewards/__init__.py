# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards: verifiers, shaping terms and their weighted sum.

    grader = Grader(cfg, max_response_len=256)
    groups, parts = grader.grade(tokenizer, prompts, completions)
    # RolloutGroups with rewards; {"exact": [...], ...}

Adding a reward: one file with `Config` and `Reward` (see `sample.BaseReward`), and a line in `total.REWARDS`. Every
text has a defined reward: empty and malformed responses score 0 with the verifiers, and so do unfinished ones unless
`truncated: score` says otherwise.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from qarl_jax.data.tokenizer import decode
from qarl_jax.rewards import total
from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.runtime import processes
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import Completion, Prompt, RolloutGroup, UserError

RewardConfig = Annotated[Any, Variants({**total.TERMS, "sum": total.Config, "by_source": total.BySource})]


class Grader:
    """Grades completions under a reward config; owns the rewards' worker processes."""

    def __init__(self, cfg: Any, *, max_response_len: int):
        """`cfg`: the Config of any reward. Raises `UserError` if a reward cannot start (a missing function, ...)."""
        # The source whose samples a term is for; None: all.
        self.sources: tuple[str | None, ...] = tuple(cfg.rewards) if isinstance(cfg, total.BySource) else ()
        if isinstance(cfg, total.BySource):
            terms = tuple(total.Term(reward=reward) for reward in cfg.rewards.values())
        else:
            terms = cfg.terms if isinstance(cfg, total.Config) else (total.Term(reward=cfg),)
            self.sources = (None,) * len(terms)
        names: list[str] = []
        self.rewards: list[BaseReward] = []
        for term in terms:
            name = next(name for name, cls in total.TERMS.items() if type(term.reward) is cls)
            self.rewards.append(total.REWARDS[name].Reward(term.reward, max_response_len))
            count = sum(known.split("#")[0] == name for known in names)
            names.append(name if not count else f"{name}#{count + 1}")
        self._lock = threading.Lock()  # a run may evaluate while it samples
        self.names = tuple(names)
        self.coefs = tuple(term.coef for term in terms)

    def score(self, samples: Sequence[Sample]) -> tuple[Float[np.ndarray, " n"], dict[str, Float[np.ndarray, " n"]]]:
        """Returns each sample's total reward, and the unweighted scores of each term by name. A lock serves threads.

        A score is nan where the term of another source grades.
        """
        with self._lock:
            terms = [self.terms_of(sample.prompt) for sample in samples]
            total_reward, parts = np.zeros(len(samples), np.float32), {}
            for number, (name, reward, coef) in enumerate(zip(self.names, self.rewards, self.coefs, strict=True)):
                chosen = [i for i, mine in enumerate(terms) if number in mine]
                parts[name] = np.full(len(samples), np.nan, np.float32)
                if chosen:
                    parts[name][chosen] = reward.score([samples[i] for i in chosen])
                    total_reward[chosen] += np.float32(coef) * parts[name][chosen]
        return total_reward, parts

    def terms_of(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the numbers of the terms that grade a prompt's responses.

        Raises:
          UserError: none does: the rewards are by source, and have none for the prompt's.
        """
        part = prompt.meta.get("mix_part")
        found = tuple(i for i, source in enumerate(self.sources) if source is None or source == part)
        if not found:
            raise UserError(
                f"reward.name=by_source has rewards for {', '.join(map(str, self.sources))}, and the prompt"
                f" {prompt.uid} is of {part or 'no mix'}: give all data, eval.data too, as a mix of these parts."
            )
        return found

    def grade(
        self,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        max_response_len: int = 0,
    ) -> tuple[list[RolloutGroup], dict[str, Float[np.ndarray, " n"]]]:
        """Decodes and grades the completions of each prompt.

        Args:
          prompts, completions: completions[i] belong to prompts[i].
          max_response_len: the completions' length limit in tokens; 0: the run's.

        Returns:
          One RolloutGroup per prompt, and per term its scores [samples], flat in the order of prompts and completions;
          nan where another source's term grades.
        """
        pairs = list(zip(prompts, completions, strict=True))
        texts = [decode(tokenizer, completion.tokens) for _, group in pairs for completion in group]
        samples: list[Sample] = []
        for prompt, group in pairs:
            for completion in group:
                text = texts[len(samples)]
                if completion.turns:  # what the environment said is not to be taken for the policy's answer
                    last = completion.turns[-1]
                    text = decode(tokenizer, completion.tokens[last.start : last.end])
                samples.append(
                    Sample(
                        prompt=prompt,
                        text=text,
                        num_tokens=len(completion.tokens),
                        finish_reason=completion.finish_reason,
                        max_tokens=max_response_len,
                        turn_rewards=tuple(turn.reward for turn in completion.turns),
                    )
                )
        rewards, parts = self._shared_score(samples, pairs)
        groups, at = [], 0
        for prompt, group in pairs:
            end = at + len(group)
            mine = rewards[at:end].copy()
            terms = self.terms_of(prompt)
            shared = tuple(self._by_turn(c, float(reward), terms) for c, reward in zip(group, mine, strict=True))
            whole, seen = tuple(texts[at:end]), tuple(sample.text for sample in samples[at:end])
            groups.append(RolloutGroup(prompt=prompt, completions=shared, rewards=mine, texts=whole, graded=seen))
            at = end
        return groups, parts

    def _by_turn(self, completion: Completion, reward: float, terms: Sequence[int]) -> Completion:
        """The completion with its reward in its turns: what the environment gave, weighed, and the rest in the last."""
        if not completion.turns:
            return completion
        weight = sum(self.coefs[i] for i in terms if self.names[i].startswith("environment"))
        before = [dataclasses.replace(turn, reward=weight * turn.reward) for turn in completion.turns[:-1]]
        rest = reward - sum(turn.reward for turn in before)
        return dataclasses.replace(completion, turns=(*before, dataclasses.replace(completion.turns[-1], reward=rest)))

    def _shared_score(
        self, samples: Sequence[Sample], pairs: Sequence[tuple[Prompt, Sequence[Completion]]]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """`score`, by the first process for all: a time limit may strike on one host and not on another."""
        if processes.count() == 1:
            return self.score(samples)
        drawn = [np.asarray(completion.tokens, np.int32) for _, group in pairs for completion in group]
        said = [np.asarray(completion.logprobs, np.float32) for _, group in pairs for completion in group]
        processes.check_same(b"".join(x.tobytes() for x in (*drawn, *said)), "the sampler's responses")

        def grade() -> Any:
            rewards, parts = self.score(samples)
            return [rewards.tolist(), {name: part.tolist() for name, part in parts.items()}]

        rewards, parts = processes.from_first(grade)
        return np.asarray(rewards, np.float32), {name: np.asarray(part, np.float32) for name, part in parts.items()}

    def close(self) -> None:
        """Ends the rewards' worker processes."""
        for reward in self.rewards:
            reward.close()
