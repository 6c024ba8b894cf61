# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Base class of embeddings and heads whose weights are codes, and their registration in vLLM.

cpu/linear.py and cuda/tables.py compute. A table [V, K] has a row for each token: the embedding returns rows, bf16(q s)
or bf16((q - z) s t), and the head returns float32 logits of hidden states. Its parameters are the published arrays, in
int4 with group scales (`w4a16`) or with zero points (asym_layers.py). vLLM rounds logits and ties plain weights only.

Where a model ties its head to its embedding, the embedding is both: it looks up and multiplies the same codes.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import vocab_parallel_embedding as vocabulary
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter

from qarl_bridge.engine.asym_layers import AsymmetricLayer
from qarl_bridge.protocol import formats

_EMBEDDING = "model.embed_tokens"


class Table(QuantizeMethodBase):
    """An abstract vLLM method of an embedding or a head whose weight is codes.

    Args:
      group_size: inputs per scale; 0: a scale per row.
      layer: computes weights with zero points; None: the codes are int4.
      multiplies: whether logits are computed with the table; an embedding that is not tied is only looked up.
    """

    is_table = True

    def __init__(self, group_size: int, layer: AsymmetricLayer | None, multiplies: bool):
        self.group_size, self.layer, self.multiplies = group_size, layer, multiplies

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *unused: Any,
        weight_loader: Callable[..., Any],
        **unnamed: Any,
    ) -> None:
        """Creates parameters in published layout: of int4 words int32 [V, K/8], scales bfloat16 [V, K/G] and shape
        int64 [2]; of zero points those of `AsymmetricLayer`."""
        rows, inputs = sum(output_partition_sizes), input_size_per_partition
        if self.layer is not None:
            self.layer.create_weights(layer, output_partition_sizes, inputs, weight_loader)
            return
        made: dict[str, Any] = {"weight_loader": weight_loader, "input_dim": 1, "output_dim": 0}
        words = torch.empty(rows, inputs // 8, dtype=torch.int32)
        scales = torch.empty(rows, inputs // self.group_size if self.group_size else 1, dtype=torch.bfloat16)
        shape = BasevLLMParameter(data=torch.empty(2, dtype=torch.int64), weight_loader=weight_loader)
        layer.register_parameter("weight_packed", ModelWeightParameter(data=words, **made))
        layer.register_parameter("weight_scale", ModelWeightParameter(data=scales, **made))
        layer.register_parameter("weight_shape", shape)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Looks up tokens, int64 [...]: returns their rows, bfloat16 [..., K]."""
        return self.rows(layer, input_.reshape(-1)).view(*input_.shape, -1)

    @abc.abstractmethod
    def rows(self, layer: torch.nn.Module, index: torch.Tensor) -> torch.Tensor:
        """Decodes the rows `index`, int64 [R], to bfloat16 [R, K]."""

    @abc.abstractmethod
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes float32 logits [..., V] of hidden states x [..., K]."""


class Tied(QuantizeMethodBase):
    """The method of a head that has no weights, because its embedding takes its place (`serve`)."""

    def create_weights(self, layer: torch.nn.Module, *unused: Any, **unnamed: Any) -> None:
        """Creates nothing."""

    def apply(self, layer: torch.nn.Module, *unused: Any, **unnamed: Any) -> torch.Tensor:
        """Raises NotImplementedError: the embedding computes the logits."""
        raise NotImplementedError


def _codes(found: Mapping[str, Any] | None) -> Any:
    """Returns the arguments of a table's weights if the bridge has a layer for them; None: it is vLLM's."""
    weights = (found or {}).get("weights")
    if found is None or weights is None or found.get("input_activations") is not None or weights.num_bits != 4:
        return None
    return weights if found.get("format") in formats.ASYMMETRIC or weights.symmetric else None


def serve(kind: type[Table], asymmetric: type[AsymmetricLayer]) -> None:
    """Makes vLLM compute embeddings and heads that have codes by `kind`; only the first call has an effect.

    asymmetric: computes the device's layers with zero points.
    """
    config, head = compressed_tensors.CompressedTensorsConfig, vocabulary.ParallelLMHead
    original, tie = config.get_quant_method, head.tie_weights
    if getattr(original, "is_own", False):
        return

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, vocabulary.VocabParallelEmbedding):
            return original(self, layer, prefix)
        is_head = isinstance(layer, head)
        tied = getattr(get_current_vllm_config().model_config.hf_config, "tie_word_embeddings", False)
        found = self.get_scheme_dict(layer, _EMBEDDING if is_head and tied else prefix)
        weights = _codes(found)
        if weights is None:
            return original(self, layer, prefix)
        if is_head and tied:
            return Tied()
        inner = None
        if found["format"] in formats.ASYMMETRIC:
            midpoint = formats.ASYMMETRIC.index(found["format"]) == 1
            inner = asymmetric(weights.num_bits, weights.group_size, midpoint)
        return kind(weights.group_size or 0, inner, is_head or tied)

    @functools.wraps(tie)
    def tie_weights(self: Any, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        return embed_tokens if isinstance(embed_tokens.quant_method, Table) else tie(self, embed_tokens)

    get_quant_method.is_own = True  # type: ignore[attr-defined]
    config.get_quant_method, head.tie_weights = get_quant_method, tie_weights
