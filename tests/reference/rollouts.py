# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions that were never sampled, and groups of them."""

import numpy as np

from qarl_jax.types import Completion, Prompt, RolloutGroup, VersionSpan


class Characters:
    """A tokenizer that decodes token i to character i."""

    eos_token_id, pad_token_id = -1, None

    def decode(self, tokens, clean_up_tokenization_spaces):
        return "".join(map(chr, tokens))


def completion(tokens, logprobs=None, *, prompt=(3,), finish_reason="stop", version=0, routed_experts=None):
    """One response, drawn wholly under `version`.

    Args:
      tokens: token ids.
      logprobs: [len(tokens)]; None: zeros.
    """
    tokens = tuple(map(int, tokens))
    return Completion(
        prompt_tokens=tuple(prompt),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        finish_reason=finish_reason,
        versions=(VersionSpan(version=version, start=0, end=len(tokens)),) if tokens else (),
        routed_experts=routed_experts,
    )


def group_of(completions, rewards=None, *, uid="0", prompt=None):
    """Some completions of one prompt, graded.

    Args:
      completions: of `completion`.
      rewards: [len(completions)]; None: zeros.
      uid: of a prompt with their tokens; prompt: instead of it.
    """
    return RolloutGroup(
        prompt=prompt or Prompt(uid=uid, tokens=completions[0].prompt_tokens, text="", answer=""),
        completions=tuple(completions),
        rewards=np.zeros(len(completions), np.float32) if rewards is None else np.asarray(rewards, np.float32),
    )
