# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2/Qwen2.5, Qwen3, Qwen3-MoE and Llama models in Flax NNX.

    model = load_hf("/models/Qwen3-1.7B", dtype="bfloat16", scheme="w4a16")
    logits = model(tokens)                                   # [B, T] -> float32 [B, T, V]
    graphdef, params, qweights = split(model)                # structure, masters, QTensors
    qweights = quantize_params(graphdef, params)             # after every update

One file per family reads its config.json and names its tensors; `families.MODELS` lists the families.
"""

from qarl_jax.models.config import REMAT, Lora, ModelConfig, read_config
from qarl_jax.models.families import MODELS
from qarl_jax.models.hf.config import MoEConfig
from qarl_jax.models.hf.peft import check_peft, read_peft, write_peft
from qarl_jax.models.hf.weights import (
    check_released,
    checkpoint_order,
    export_tensors,
    hf_config_json,
    hf_names,
    load_hf,
    load_masters,
    module_names,
    read_masters,
    save_hf,
)
from qarl_jax.models.layers import Quantized
from qarl_jax.models.params import (
    abstract_model,
    at_width,
    by_path,
    config_of,
    fold_adapters,
    fresh_adapters,
    is_fixed,
    merge,
    merge_adapters,
    merge_splits,
    parse_rules,
    quantize_params,
    quantizer,
    random_leaves,
    random_masters,
    random_model,
    rules_with_tables,
    split,
    with_scheme,
)
from qarl_jax.models.transformer import BLOCK_NORMS, FINAL_NORM, KVCache, Transformer, attach_backward
