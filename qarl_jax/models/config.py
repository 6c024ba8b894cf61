# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`, a frozen, hashable record of all that a model's structure depends on; it is static under jit."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from qarl_bridge.protocol import formats

from qarl_jax.models.families import MODELS, hf_template
from qarl_jax.models.hf.config import HFConfig, MoEConfig, RopeScaling
from qarl_jax.models.hf.released import rules_of
from qarl_jax.numerics.engine import NormOrder
from qarl_jax.quant import SCHEMES, Numerics, Rules, Scheme, on_engine, quantizes_activations
from qarl_jax.quant.splitting import Splitting
from qarl_jax.runtime import remat
from qarl_jax.types import UserError, check_model_folder

REMAT = remat.POLICIES
ATTENTION = ("auto", "xla", "cudnn", "splash", "flash3")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Consecutive layers [start, start + length) of equal structure and schemes, stacked and run by one `lax.scan`."""

    start: int
    length: int
    is_moe: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685) of linear maps: y = W x + scale B A x.

    Attributes:
      rank: r; A is [r, K], B is [N, r].
      scale: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732).
      targets: names of linear maps in all layers, the last part of their Hugging Face names ("q_proj"); empty: every
        linear map that may have an adapter.
    """

    rank: int
    scale: float
    targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder-only transformer of the Qwen and Llama families.

    Attributes:
      architecture: Hugging Face architecture, a key of `MODELS`.
      vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: V, D, F, L, N, K, H.
      rope_theta, rms_norm_eps, max_position_embeddings, initializer_range: as in config.json.
      rope_scaling: Llama 3.1's stretched frequencies; None: plain RoPE.
      tie_embeddings: the head is the embedding.
      qkv_bias, o_bias: attention projections carry a bias. qk_norm: RMSNorm over H on q and k, before RoPE.
      moe: the expert block, None for a dense model. moe_layers: which layers have it.
      hf_config: config.json as read (JSON text), the source of everything not named here when a model is written back.
      compute_dtype: dtype of activations. param_dtype: dtype of the masters.
      quant: which weight has which scheme, by Hugging Face module name ("model.layers.3.mlp.up_proj"). No rule: bf16.
      splits: layers at which a new stack begins even if the signature does not change, so that the parameters also fit
        a scheme that treats these layers differently.
      numerics: the engine's arithmetic that the forward mirrors (`numerics.engine.Numerics`).
      attention: "xla" (anywhere), "cudnn" (bf16 on a GPU), "splash" (TPU), "flash3" (bf16 on Hopper, in vLLM's order),
        or "auto" (`attention.choose`).
      lora: adapters beside linear maps; None: none.
      splitting: splitting of outlier channels in all linear maps (`quant/splitting.py`); None: none.
      remat: activations of a layer that are saved for the backward: "full" its inputs, everything is recomputed;
        "attention" also the output of softmax attention; "mixer" the whole attention half, so that only the MLP is
        recomputed; "dots" the outputs of linear layers and attention; "none" all: nothing is recomputed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None
    moe_layers: tuple[int, ...] = ()
    hf_config: str = "{}"
    compute_dtype: Any = "float32"
    param_dtype: Any = "float32"
    quant: Rules = dataclasses.field(default_factory=Rules)
    splits: tuple[int, ...] = ()
    numerics: Numerics = dataclasses.field(default_factory=Numerics)
    attention: str = "auto"
    lora: Lora | None = None
    splitting: Splitting | None = None
    remat: str = "none"

    def __post_init__(self) -> None:
        for field in ("compute_dtype", "param_dtype"):
            value = getattr(self, field)
            if str(jnp.dtype(value) if not isinstance(value, str) else value) not in DTYPES:
                raise UserError(f"{field} is {value!r}; supported: {', '.join(DTYPES)}")
            object.__setattr__(self, field, jnp.dtype(value))
        for field, known in (("remat", REMAT), ("attention", ATTENTION)):
            if getattr(self, field) not in known:
                raise UserError(f"{field} is {getattr(self, field)!r}; known: {', '.join(known)}")
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.lora is not None:
            self._check_targets(self.lora.targets)
        if self.splitting is not None and (self.moe or self.lora or self.numerics.shards > 1):
            raise UserError(
                "a model whose channels are split has no experts, no adapters and no tensor-parallel engine: take the"
                " folder that `qarl export --format hf` makes of it."
            )

        for module, means in formats.TABLES.items():
            scheme = self.quant.scheme_for(module)
            if scheme is not None and not scheme.of_tables:
                fit = ", ".join(name for name, scheme in SCHEMES.items() if scheme.of_tables)
                raise UserError(
                    f"quant.rules give {module} the scheme {scheme}, and a table of tokens can be held in {fit} or"
                    f" bf16 alone: take one of them for the rule with {means!r}."
                )

    def _check_targets(self, targets: tuple[str, ...]) -> None:
        attention, others = self.linear_names
        for name in targets:
            if name in others and self.moe is not None:
                raise UserError(
                    f"lora.targets: {name} belongs to the experts of a MoE model, which have no adapters; take some of"
                    f" {', '.join(attention)}."
                )
            if name not in (*attention, *others):
                known = (*attention, *(others if self.moe is None else ()))
                raise UserError(f"lora.targets: the model has no linear map {name!r}; take some of {', '.join(known)}.")

    @property
    def linear_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Hugging Face names of a layer's linear maps: the attention's ("q_proj", ...), and the MLP's or experts'."""
        of = lambda room, parts: tuple(self._module_name(f"{room}.{x}.kernel", 0).rpartition(".")[2] for x in parts)  # noqa: E731
        return of("attn", "qkvo"), of("mlp", ("gate", "up", "down"))

    def has_adapter(self, path: str) -> bool:
        """Tells whether the stacked kernel at `path` has an adapter: `lora` targets it, and it is no expert's."""
        own, _ = self._place(path)
        attention, others = self.linear_names
        if self.lora is None or own == path or own.startswith("moe."):
            return False
        targets = self.lora.targets or attention + (others if self.moe is None else ())
        return self._module_name(own, 0).rpartition(".")[2] in targets

    @property
    def base(self) -> ModelConfig:
        """This config without adapters."""
        return self if self.lora is None else dataclasses.replace(self, lora=None)

    @property
    def with_ignored(self) -> ModelConfig:
        """This config with bf16 for layers that the folder ignores, unless a rule before the last matches."""
        ignored = tuple(rule for rule in self.released.rules if rule[1] is None)
        return dataclasses.replace(self, quant=Rules((*self.quant.rules[:-1], *ignored, *self.quant.rules[-1:])))

    @functools.cached_property
    def released(self) -> Rules:
        """The schemes under which the folder's weights are stored, by module name; empty if they are not quantized."""
        return rules_of(json.loads(self.hf_config).get("quantization_config"))

    def scheme_of(self, path: str) -> Scheme | None:
        """The scheme of the kernel at `path` ("stacks.0.attn.q.kernel", "embed.kernel"), None for bf16."""
        return self._scheme(*self._place(path))

    def _place(self, path: str) -> tuple[str, int]:
        """Splits a path into the path within its stack and the stack's first layer; a table is in no stack."""
        if not path.startswith("stacks."):
            return path, 0
        _, number, own = path.split(".", 2)
        return own, self.stacks[int(number)].start

    def module_of(self, path: str) -> str:
        """Returns the Hugging Face name of the module of the kernel at `path`, in the first layer of its stack."""
        return self._module_name(*self._place(path))

    def _scheme(self, own: str, layer: int) -> Scheme | None:
        return on_engine(self.quant.scheme_for(self._module_name(own, layer)), self.numerics)

    def describe(self, path: str) -> str:
        """Returns the Hugging Face name of the stacked kernel at `path`: "model.layers.{0..27}.mlp.up_proj.weight"."""
        if not path.startswith("stacks."):
            return hf_template(path, self.architecture)
        stack = self.stacks[int(path.split(".")[1])]
        layers = f"{{{stack.start}..{stack.start + stack.length - 1}}}"
        return hf_template(path.split(".", 2)[2], self.architecture).format(layer=layers, expert="*")

    def _module_name(self, own: str, layer: int) -> str:
        return hf_template(own, self.architecture).format(layer=layer, expert=0).removesuffix(".weight")

    def signature(self, layer: int) -> tuple[Any, ...]:
        """Returns the key by which layers share a stack: the kind of MLP and the scheme of every kernel."""
        is_moe = layer in self.moe_layers
        kernels = [
            *(f"attn.{x}.kernel" for x in "qkvo"),
            *(f"{'moe' if is_moe else 'mlp'}.{x}.kernel" for x in ("gate", "up", "down")),
        ]
        return is_moe, *(self._scheme(kernel, layer) for kernel in kernels)

    @functools.cached_property
    def norm_order(self) -> NormOrder:
        """The order in which RMSNorm adds: the engine's, or torch's where it has none and activations are quantized.

        One ulp in a norm changes some codes of quantized activations. With one order of sums the sampler, the scoring
        pass and the gradient pass, which are three programs, quantize equal numbers.
        """
        order = self.numerics.norm_order
        quantized = any(quantizes_activations(scheme) for _, scheme in self.quant.rules)
        return "torch" if order == "any" and quantized else order

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers as runs of equal `signature`, in order; a layer in `splits` begins a new run."""
        out: list[Stack] = []
        for layer in range(self.num_layers):
            if out and layer not in self.splits and self.signature(layer) == self.signature(layer - 1):
                out[-1] = dataclasses.replace(out[-1], length=out[-1].length + 1)
            else:
                out.append(Stack(start=layer, length=1, is_moe=layer in self.moe_layers))
        return tuple(out)


def read_config(source: str | pathlib.Path | Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """Reads config.json into a ModelConfig.

    Args:
      source: a model folder, or the contents of config.json.
      overrides: fields of ModelConfig that config.json does not decide (dtypes, quant, numerics, attention, remat).

    Raises:
      UserError: no or broken config.json, an architecture not in `MODELS`, a key missing, mistyped or unsupported.
    """
    if not isinstance(source, Mapping):
        check_model_folder(source)
        path = pathlib.Path(source) / "config.json"
        if not path.is_file():
            raise UserError(f"{source}: no config.json there; give a Hugging Face model folder")
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: expected a JSON object, found a {type(values).__name__}")
        try:
            return _read_values(values, overrides)
        except UserError as error:  # which of several folders, if there is a critic or a base model
            said = str(error)
            raise UserError(f"{path.parent}/{said}" if said.startswith(path.name) else f"{path}: {said}") from None
    return _read_values(source, overrides)


def _read_values(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    hf = HFConfig(values)
    if split := hf.get(formats.SPLITTING, dict, {}):
        overrides = {"splitting": Splitting(**split)} | dict(overrides)
    if hf.architecture not in MODELS:
        raise UserError(
            f"config.json: architecture {hf.architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    config = ModelConfig(**MODELS[hf.architecture].fields(hf) | overrides)
    head = config.quant.scheme_for("lm_head")
    if config.tie_embeddings and head is not None and head != config.quant.scheme_for("embed_tokens"):
        raise UserError(
            f"quant.rules give lm_head the scheme {head}, and the model's head is its embedding (tie_word_embeddings):"
            " write the rule for 'embed', which holds for both."
        )
    return config
