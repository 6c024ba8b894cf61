# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Completions that were never sampled."""

import numpy as np

from qarl_jax.types import Completion, VersionSpan


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
