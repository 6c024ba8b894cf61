# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json of published models by name, so that a dry run can plan memory without a model folder.

with folder("models/Qwen3-8B-Base") as path:      # the folder if it exists, else a temporary one with config.json
    config = read_config(path)
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from qarl_jax.types import UserError, check_model_folder

# Hidden size, width of the MLP, layers, query heads, key and value heads, whether the head is the embedding, positions.
_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, True, 40960),
    "1.7B": (2048, 6144, 28, 16, 8, True, 40960),
    "4B": (2560, 9728, 36, 32, 8, True, 40960),
    "8B": (4096, 12288, 36, 32, 8, False, 40960),
    "14B": (5120, 17408, 40, 40, 8, False, 40960),
    "32B": (5120, 25600, 64, 64, 8, False, 40960),
}
_MOE = {  # with the width of an expert
    "30B-A3B": (2048, 6144, 48, 32, 4, False, 40960, 768),
    "235B-A22B": (4096, 12288, 94, 64, 4, False, 40960, 1536),
}
_QWEN2 = {  # with the vocabulary
    "Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, True, 32768, 151936),
    "Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, True, 32768, 151936),
    "Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, False, 32768, 152064),
    "Qwen2.5-14B-Instruct": (5120, 13824, 48, 40, 8, False, 32768, 152064),
    "Qwen2.5-32B-Instruct": (5120, 27648, 64, 40, 8, False, 32768, 152064),
    "Qwen2.5-Math-1.5B": (1536, 8960, 28, 12, 2, True, 4096, 151936),
    "Qwen2.5-Math-7B": (3584, 18944, 28, 28, 4, False, 4096, 152064),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1536, 8960, 28, 12, 2, False, 131072, 151936),
}


def _config(sizes: tuple[Any, ...], architecture: str, **fields: Any) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, tied, positions = sizes
    return {
        "architectures": [f"{architecture.title().replace('_', '')}ForCausalLM"],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        **fields,
    }


def _experts(width: int) -> dict[str, Any]:
    return {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "norm_topk_prob": True}


def _all() -> dict[str, dict[str, Any]]:
    """The contents of config.json by name. A base model has fewer positions than the one made of it."""
    own = {"head_dim": 128, "attention_bias": False, "vocab_size": 151936, "rope_theta": 1e6}
    qwen3 = {f"Qwen3-{name}": _config(sizes, "qwen3", **own) for name, sizes in _QWEN3.items()}
    qwen3 |= {
        f"Qwen3-{name}": _config(sizes[:-1], "qwen3_moe", **own, **_experts(sizes[-1])) for name, sizes in _MOE.items()
    }
    based = {f"{name}-Base": values | {"max_position_embeddings": 32768} for name, values in qwen3.items()}
    for name in ("Qwen3-32B-Base", "Qwen3-235B-A22B-Base"):  # not published
        del based[name]
    qwen2 = {}
    for name, (*sizes, vocab) in _QWEN2.items():
        theta = 1e4 if sizes[-1] != 32768 else 1e6
        qwen2[name] = _config(tuple(sizes), "qwen2", vocab_size=vocab, rope_theta=theta)
    return qwen3 | based | qwen2


CONFIGS = _all()


@contextlib.contextmanager
def folder(path: str) -> Iterator[str]:
    """Yields `path` if it is a folder, else a temporary folder with the config.json of the model that it names.

    Raises:
      UserError: there is neither a folder nor a known model of this name; the message lists the known names.
    """
    name = os.path.basename(path.rstrip("/"))
    if os.path.isdir(path) or name not in CONFIGS:
        try:
            check_model_folder(path)
        except UserError as error:
            raise UserError(f"{error} A dry run also takes a name: {', '.join(sorted(CONFIGS))}.") from None
        yield path
        return
    with tempfile.TemporaryDirectory() as made:
        with open(os.path.join(made, "config.json"), "w") as file:
            json.dump(CONFIGS[name], file)
        yield made
