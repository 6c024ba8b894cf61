# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and arithmetic of LoRA adapters (arXiv 2106.09685) of linear layers in a version:

    P.lora_A.weight    bfloat16 [r, K]        P: the Hugging Face module of a linear layer [N, K]
    P.lora_B.weight    bfloat16 [N, r]        scaled by alpha / r already

With y the layer's output, bias included, and bf a rounding to bfloat16:

    h = bf(x A^T)    d = bf(h B^T)    y' = bf(y + d)

B = 0 leaves every bit of y unchanged: d is then +0 or -0, and the engine subtracts 0 - d, which is +0 for either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.messages import Expected

A, B = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Tells whether a tensor of this name is part of an adapter."""
    return name.endswith((A, B))


def module_of(name: str) -> str:
    """Returns the Hugging Face module name in an adapter tensor's name."""
    return name.removesuffix(A).removesuffix(B)


def words(shapes: Mapping[str, Sequence[int]]) -> str:
    """Describes the adapters in a {name: shape} map: "adapters of rank 8 of q_proj and v_proj", or "no adapters"."""
    own = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    ranks = sorted({shape[0 if name.endswith(A) else -1] for name, shape in own.items() if shape})
    targets = sorted({module_of(name).rpartition(".")[2] for name in own})
    said = (" and ".join(map(str, some)) for some in (ranks, targets))
    return "adapters of rank {} of {}".format(*said) if own else "no adapters"


def expected(tensors: Mapping[str, Expected], rank: int, targets: Sequence[str]) -> dict[str, Expected]:
    """Adds adapter tensors of the given rank to a list of a checkpoint's tensors; listed adapters stay unchanged.

    Args:
      tensors: the checkpoint's tensors, by name.
      rank: rank r of the adapters; 0: none are added.
      targets: last parts of the layers' names, as "q_proj".

    Raises:
      BridgeError("setup"): no linear layer has a target's name.
    """
    out = dict(tensors)
    left = set(targets) if rank else set()
    for name, one in tensors.items():
        module, _, leaf = name.rpartition(".")
        if not rank or module.rpartition(".")[2] not in targets or leaf not in ("weight", "weight_packed"):
            continue
        if len(one.shape) != 2 or ".layers." not in module:
            continue
        left.discard(module.rpartition(".")[2])
        n, k = one.shape[0], one.shape[1] * (8 if leaf == "weight_packed" else 1)
        for end, shape in ((A, [rank, k]), (B, [n, rank])):
            out.setdefault(module + end, Expected(name=module + end, dtype="bfloat16", shape=shape))
    if left:
        raise BridgeError(
            f"lora_targets: the model has no layer {sorted(left)[0]!r} that could have an adapter", "setup"
        )
    return out
