# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware RL for LLMs in JAX: the policy that learns is the low-bit policy that samples.

In a notebook, these calls do what the commands do:

    import qarl_jax

    qt = qarl_jax.quantize(weight, qarl_jax.parse_scheme("w4a16:g32"))     # codes and scales of one weight [N, K]
    qarl_jax.dequantize(qt)                                                # the weight that is served
    with qarl_jax.load("configs/quickstart.yaml") as session:              # policy, learner, engine
        groups = session.sample()
        ours, theirs = session.score(groups)
        numbers = session.train_step()

Each name is imported on first use: `import qarl_jax` alone does not import JAX.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "QTensor": "qarl_jax.quant",
    "Session": "qarl_jax.loop.session",
    "UserError": "qarl_jax.types",
    "dequantize": "qarl_jax.quant",
    "load": "qarl_jax.loop.session",
    "parse_scheme": "qarl_jax.quant",
    "quantize": "qarl_jax.quant",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qarl_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
