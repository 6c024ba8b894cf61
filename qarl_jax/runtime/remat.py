# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Recomputation (remat) policies: which activations of a layer the forward stores; the backward recomputes the rest.

A layer names its activations (`checkpoint_name`), and a policy is the list of stored names. The models, the choices of
`model.remat` and the memory plan all read `SAVED`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

LINEAR_OUTPUT = "linear"  # what every linear layer stores
ATTENTION_INPUT, ATTENTION_OUTPUT, MIXER_OUTPUT = "qkv", "attention", "mixed"  # q, k, v as projected; softmax V; o
INVERSE_RMS = "inverse_rms"  # of each norm, four bytes a vector
ROW_ABSMAX = "row_absmax"  # of an activation's rows, where they are coded in eight bits

# What a reduction over a whole vector leaves: next to no memory, and the backward's own pass over the vector is spared.
_STATISTICS = (INVERSE_RMS, ROW_ABSMAX)
# Kept beyond the two tensors that enter a layer, by policy, from least memory to least recomputation.
SAVED = {
    "full": (),
    "attention": (ATTENTION_OUTPUT, *_STATISTICS),
    "mixer": (ATTENTION_INPUT, ATTENTION_OUTPUT, MIXER_OUTPUT, *_STATISTICS),
    "dots": (LINEAR_OUTPUT, ATTENTION_OUTPUT, *_STATISTICS),
}
POLICIES = (*SAVED, "none")  # none: nothing is computed again


def checkpointed(body: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Wraps the body of a layer scan in `jax.checkpoint` with one of `POLICIES`, without the CSE barrier."""
    if policy == "none":
        return body
    names = SAVED[policy]
    by_name = jax.checkpoint_policies.save_only_these_names(*names)

    def saved(prim: Any, *args: Any, **params: Any) -> Any:
        # cuDNN's backward needs row statistics beside the output; both are results of one primitive without a name of
        # ours (splash attention and XLA's name theirs).
        fused = ATTENTION_OUTPUT in names and prim.name.startswith("dot_product_attention_fwd")
        return fused or by_name(prim, *args, **params)

    return jax.checkpoint(body, policy=saved, prevent_cse=False)


def saved_elements(policy: str, *, hidden: int, heads: int, projected: int, inner: int, down: int) -> int:
    """Counts the elements of the compute dtype that a policy of `SAVED` stores per token and layer.

    Args:
      hidden: width of the residual; heads: of all query heads; projected: of q, k and v; inner: of the MLP.
      down: width of `down`'s outputs: the residual's width, times the experts per token.
    """
    elements = {
        LINEAR_OUTPUT: projected + hidden + down + 2 * inner,  # q, k, v; o; down; gate, up
        ATTENTION_INPUT: projected,
        ATTENTION_OUTPUT: heads,
        MIXER_OUTPUT: hidden,
    }
    return sum(elements.get(name, 0) for name in SAVED[policy])
