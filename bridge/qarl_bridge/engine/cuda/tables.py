# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant embeddings and heads with codes for vLLM on CUDA (`table_layers.py`).

The codes are held once, interleaved as layers multiply them. A head's logits are `ops.product` of words in one part,
left in float32, as those of a bf16 head are. An embedding gathers the words and scales of its tokens, which are again
interleaved, and decodes these. No table is decoded whole: at Qwen3-8B that would take 1.2 GB.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from qarl_bridge.engine.cuda import asym, asym_ops, ops
from qarl_bridge.engine.table_layers import Table
from qarl_bridge.protocol import split_k
from qarl_bridge.protocol.errors import BridgeError


class AsymmetricWords(asym.BatchInvariantAsymmetricLinear):
    """The weight of a table with zero points, which is never decoded whole."""

    decodes_whole = False


class BatchInvariantTable(Table):
    """vLLM method of embeddings and heads with codes on Hopper GPUs; see the module docstring."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Converts the published arrays to the kernel's layout, at every load: words int32 [K/128, V, 16] and scales
        bfloat16 [K/G, V], or those of `asym_ops.Words`.

        Raises:
          BridgeError("setup"): the kernel does not support this GPU, shape or group size.
        """
        if self.layer is not None:
            self.layer.process_weights_after_loading(layer)
            return
        words, scales = layer.weight_packed.data, layer.weight_scale.data
        inputs = 8 * words.shape[1]
        group = inputs // scales.shape[1]
        if not current_platform.is_device_capability(90):
            raise BridgeError(
                "an embedding or a head in four bits needs a Hopper GPU (sm90) or a CPU: leave it in bf16"
                " (quant.rules), or use the embedded sampler (rollout.engine.name=jax)",
                "setup",
            )
        if inputs % split_k.STEP or (group not in asym.GROUPS and group % split_k.STEP):
            raise BridgeError(
                f"a table of {inputs} inputs in groups of {group}: on CUDA inputs are a multiple of {split_k.STEP}, and"
                " groups 16, 32, 64, 128 or a row; leave it in bf16 (quant.rules), or take another group",
                "setup",
            )
        AsymmetricWords.keep(layer, "weight_packed", ops.interleaved(words))
        AsymmetricWords.keep(layer, "weight_scale", scales.t().contiguous())

    def _held(self, layer: torch.nn.Module) -> tuple[torch.Tensor | asym_ops.Words, torch.Tensor | None]:
        """Returns weight and scales as `ops.product` takes them."""
        if self.layer is None:
            return layer.weight_packed, layer.weight_scale
        assert isinstance(self.layer, AsymmetricWords)
        return self.layer.words(layer), None

    def rows(self, layer: torch.nn.Module, index: torch.Tensor) -> torch.Tensor:
        """Decodes the rows `index`, int64 [R], to bfloat16 [R, K]."""
        return ops.rows_of(*self._held(layer), index)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes float32 logits [..., V] of hidden states x [..., K]."""
        rows = x.reshape(-1, x.shape[-1])
        y = ops.product(rows, *self._held(layer), bias, out_dtype=torch.float32, splits=1)
        return y.view(*x.shape[:-1], y.shape[-1])
