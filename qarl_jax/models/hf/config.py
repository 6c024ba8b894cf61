# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`HFConfig`, which reads a Hugging Face config.json key by key and refuses what is not supported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from qarl_jax.models.hf.released import rules_of
from qarl_jax.types import UserError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),  # Gemma 2
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),  # Granite
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "scale_emb": (1,),  # MiniCPM
    "scale_depth": (),
    "dim_model_base": (),
    "logit_scale": (1,),  # Cohere
    "clip_qkv": (),  # OLMo
    "use_qk_norm": (False,),
    "attn_output_gate": (False,),  # Qwen3-Next
    "dual_chunk_attention_config": (),  # Qwen2.5-1M
    "use_mrope": (False,),  # Qwen2-VL
    "partial_rotary_factor": (1,),  # Phi-3
    "no_rope_layers": (),  # SmolLM3; a list of ones is neutral, too
    "is_causal": (True,),  # embedding models
    "use_bidirectional_attention": (False,),
    "num_shared_experts": (0,),  # DeepSeek, GLM
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),  # Qwen2-MoE
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "n_group": (1,),
}
"""Keys of other architectures that change what a model computes, and the values that do not; null never does. Keys
that are neither here nor read (dropout, caches, token ids) change nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The MoE (mixture-of-experts) block (Qwen3-MoE; token-choice top-k routing, no shared expert).

    Attributes:
      num_experts: E. num_experts_per_tok: experts each token visits (top-k).
      intermediate_size: width F of one expert.
      norm_topk_prob: renormalize the chosen experts' probabilities to sum to one.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The stretching of rotary frequencies to longer contexts in Llama 3.1 (rope type "llama3").

    Attributes:
      factor: the factor by which the wavelengths of slow frequencies are multiplied.
      low_freq_factor, high_freq_factor: a wavelength longer than original_max_position_embeddings / low_freq_factor is
        slow; a wavelength shorter than original_max_position_embeddings / high_freq_factor does not change.
      original_max_position_embeddings: positions of the model before the stretch.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class HFConfig:
    """Reads config.json key by key; a missing, mistyped or unsupported key raises a UserError that names it."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        named = values.get("architectures")
        if not isinstance(named, list) or not named or not isinstance(named[0], str):
            raise UserError(
                f"config.json: 'architectures' is {named!r}; expected a list with the model's class, for example"
                ' ["Qwen3ForCausalLM"]'
            )
        self.architecture = named[0]

    def require(self, key: str, kind: type = int) -> Any:
        """Returns the value of a required key, checked to be of type `kind`."""
        if self.values.get(key) is None:
            raise UserError(f"config.json ({self.architecture}): key {key!r} is missing")
        return self.get(key, kind, None)

    def get(self, key: str, kind: type, default: Any) -> Any:
        """Returns the value of an optional key, checked to be of type `kind`; `default` if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"config.json ({self.architecture}): {key!r} is {value!r}, expected {kind.__name__}")
        return value

    def rope_theta(self) -> float:
        """Returns RoPE's base, from `rope_theta` or from transformers 5's `rope_parameters`."""
        theta = self.get("rope_theta", float, 10000.0)
        for key in ("rope_scaling", "rope_parameters"):
            rope = self.get(key, dict, {})
            theta = float(rope.get("rope_theta", theta))
            for name, value in rope.items():
                if (
                    name == "mrope_section"
                    or isinstance(value, dict)
                    or (name == "partial_rotary_factor" and value != 1)
                ):
                    raise UserError(f"config.json ({self.architecture}): {key!r}.{name!r} is not supported")
        return theta

    def rope_scaling(self) -> RopeScaling | None:
        """Returns Llama 3.1's RoPE scaling, from `rope_scaling` or `rope_parameters`; other kinds raise UserError."""
        found = None
        for key in ("rope_scaling", "rope_parameters"):
            rope = self.get(key, dict, {})
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind == "llama3":
                found = RopeScaling(
                    **{field.name: _number(self, key, rope, field.name) for field in dataclasses.fields(RopeScaling)}
                )
            elif kind != "default":
                raise UserError(
                    f"config.json ({self.architecture}): {key!r} asks for rope type {kind!r}; supported are plain RoPE"
                    " ('default') and 'llama3'. Remove the key to run without context extension."
                )
        return found

    def refuse_unsupported(self) -> None:
        """Raises UserError, with the key's name, for features that change the model's outputs and are not supported."""
        act = self.values.get("hidden_act", "silu")
        if act != "silu":
            raise UserError(f"config.json ({self.architecture}): 'hidden_act' is {act!r}; only 'silu' is supported")
        if any(kind != "full_attention" for kind in self.values.get("layer_types") or []):
            raise UserError(f"config.json ({self.architecture}): 'layer_types' has layers that are not full attention")
        window = self.get("use_sliding_window", bool, False) and self.values.get("sliding_window") is not None
        # Dense families slide only from layer `max_window_layers` on; often that is no layer at all.
        first = self.get("max_window_layers", int, 0) if self.architecture != "Qwen3MoeForCausalLM" else 0
        if window and first < self.require("num_hidden_layers"):
            raise UserError(
                f"config.json ({self.architecture}): 'use_sliding_window' is on for layers from {first}; sliding-window"
                " attention is not supported. Set it to false to run with full attention."
            )
        for key, neutral in _NEUTRAL.items():
            value = self.values.get(key)
            if value is not None and value not in neutral and not (key == "no_rope_layers" and all(value)):
                raise UserError(
                    f"config.json ({self.architecture}): {key!r} is {value!r}, which changes what the model computes,"
                    " and is not supported; take a model without it."
                )
        rules_of(self.values.get("quantization_config"))

    def common(self) -> dict[str, Any]:
        """Returns the fields of ModelConfig that have the same keys in every family; refuses unsupported features."""
        self.refuse_unsupported()
        heads, width = self.require("num_attention_heads"), self.require("hidden_size")
        head_dim = self.get("head_dim", int, None)
        if head_dim is None and width % heads:
            raise UserError(
                f"config.json ({self.architecture}): 'hidden_size' {width} is not a multiple of"
                f" 'num_attention_heads' {heads} and 'head_dim' is missing"
            )
        return {
            "architecture": self.architecture,
            "vocab_size": self.require("vocab_size"),
            "hidden_size": width,
            "intermediate_size": self.require("intermediate_size"),
            "num_layers": self.require("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.get("num_key_value_heads", int, heads),
            "head_dim": head_dim or width // heads,
            "rope_theta": self.rope_theta(),
            "rope_scaling": self.rope_scaling(),
            "rms_norm_eps": self.get("rms_norm_eps", float, 1e-6),
            "max_position_embeddings": self.get("max_position_embeddings", int, 32768),
            "initializer_range": self.get("initializer_range", float, 0.02),
            "tie_embeddings": self.get("tie_word_embeddings", bool, False),
            "hf_config": json.dumps(dict(self.values), sort_keys=True),
        }


def _number(hf: HFConfig, key: str, rope: Mapping[str, Any], name: str) -> Any:
    """A number above 0 out of `rope_scaling`."""
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"config.json ({hf.architecture}): {key!r}.{name!r} is {value!r}, expected a number above 0")
    return value
