# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3 and Qwen2.5 shapes with random weights, and rows of random tokens, for benchmarks of the learner alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from qarl_jax import models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.memory import learner as on_learner
from qarl_jax.optim import build, leafwise
from qarl_jax.quant import resolve
from qarl_jax.runtime.mesh import MESH_AXES
from qarl_jax.types import TrainBatch

SIZES = {
    "tiny": {"hidden": 128, "inter": 256, "layers": 2, "heads": 4, "kv": 2, "head_dim": 32, "vocab": 512, "tied": True},
    "100mb": {"hidden": 512, "inter": 2048, "layers": 12, "heads": 8, "kv": 4, "head_dim": 64, "vocab": 4096}
    | {"tied": False},
    # Qwen2.5-Coder-0.5B's widths, heads of 64 among them.
    "0.5b": {"hidden": 896, "inter": 4864, "layers": 24, "heads": 14, "kv": 2, "head_dim": 64, "vocab": 151936}
    | {"tied": True},
    "0.6b": {"hidden": 1024, "inter": 3072, "layers": 28, "heads": 16, "kv": 8, "vocab": 151936, "tied": True},
    "1.7b": {"hidden": 2048, "inter": 6144, "layers": 28, "heads": 16, "kv": 8, "vocab": 151936, "tied": True},
    "4b": {"hidden": 2560, "inter": 9728, "layers": 36, "heads": 32, "kv": 8, "vocab": 151936, "tied": True},
    "8b": {"hidden": 4096, "inter": 12288, "layers": 36, "heads": 32, "kv": 8, "vocab": 151936, "tied": False},
    "32b": {"hidden": 5120, "inter": 25600, "layers": 64, "heads": 64, "kv": 8, "vocab": 151936, "tied": False},
    # Qwen2.5's, with biases.
    "tiny-qwen2.5": {"hidden": 128, "inter": 256, "layers": 2, "heads": 4, "kv": 2, "head_dim": 32, "vocab": 512}
    | {"tied": False, "family": "qwen2"},
    "qwen2.5-7b": {"hidden": 3584, "inter": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064, "tied": False}
    | {"family": "qwen2"},
    "qwen2.5-14b": {"hidden": 5120, "inter": 13824, "layers": 48, "heads": 40, "kv": 8, "vocab": 152064, "tied": False}
    | {"family": "qwen2"},
    "qwen2.5-32b": {"hidden": 5120, "inter": 27648, "layers": 64, "heads": 40, "kv": 8, "vocab": 152064, "tied": False}
    | {"family": "qwen2"},
    "tiny-moe": {"hidden": 128, "inter": 256, "layers": 2, "heads": 4, "kv": 2, "head_dim": 32, "vocab": 512}
    | {"tied": False, "experts": 4, "experts_per_token": 2, "expert_inter": 256},
    "30b-a3b": {"hidden": 2048, "inter": 6144, "layers": 48, "heads": 32, "kv": 4, "vocab": 151936, "tied": False}
    | {"experts": 128, "experts_per_token": 8, "expert_inter": 768},
    # As many tensors, a CPU's size.
    "small-30b-a3b": {"hidden": 128, "inter": 256, "layers": 48, "heads": 2, "kv": 1, "head_dim": 64, "vocab": 512}
    | {"tied": False, "experts": 128, "experts_per_token": 8, "expert_inter": 128},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of one learner under test: shape, scheme, and all that decides memory and work of an update.

    Attributes:
      model: a key of SIZES. layers: its layers; 0: all.
      scheme, engine: as `quant.forward` and `quant.engine`.
      rows, seq: a batch [rows, seq] of real tokens.
      segments: responses to a row, of equal length; 1: one.
      master: dtype of parameters. grad: of gradients.
      remat, attention, chunk, optimizer: as in a run's config.
      moments: dtype of the optimizer's moments; "": the master's. offload: they rest on the host.
      cards: devices that it is spread over, as `mesh.fsdp`.
      backward: as `quant.backward`.
      kernels: of the scheme's forward on a Hopper GPU: "xla", or "" for our own.
    """

    model: str = "1.7b"
    layers: int = 0
    scheme: str = "w8a8"
    engine: str = "plain"
    rows: int = 4
    seq: int = 4096
    segments: int = 1
    master: str = "bfloat16"
    grad: str = "bfloat16"
    remat: str = "full"
    attention: str = "auto"
    chunk: int = 2048
    optimizer: str = "adamw"
    moments: str = ""
    offload: bool = False
    backward: str = "bf16"
    kernels: str = ""
    cards: int = 1


_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_config(setting: Setting) -> models.ModelConfig:
    """Returns the ModelConfig of a setting."""
    size = SIZES[setting.model]
    experts = (
        {
            "num_experts": size["experts"],
            "num_experts_per_tok": size["experts_per_token"],
            "moe_intermediate_size": size["expert_inter"],
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if "experts" in size
        else {}
    )
    family = "qwen3_moe" if experts else size.get("family", "qwen3")
    values = experts | {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": size["hidden"],
        "intermediate_size": size["inter"],
        "num_hidden_layers": setting.layers or size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "head_dim": size.get("head_dim", 128),
        "vocab_size": size["vocab"],
        "tie_word_embeddings": size["tied"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
    }
    return models.read_config(
        values,
        compute_dtype="bfloat16",
        param_dtype=setting.master,
        quant=models.parse_rules(setting.scheme, 128),
        remat=setting.remat,
        attention=setting.attention,
        numerics=dataclasses.replace(resolve(setting.engine), own_kernels=setting.kernels != "xla"),
    )


def optimizer_config(setting: Setting) -> build.Config:
    """Returns the config of AdamW or Muon, with both moments in one dtype."""
    dtype = setting.moments or setting.master
    dtypes: Any = {"moment_dtype": dtype, "second_moment_dtype": dtype, "offload": setting.offload}
    if setting.optimizer == "adamw":
        return build.AdamW(lr=1e-5, **dtypes)
    return build.Muon(lr=1e-5, **dtypes)


def make_learner(setting: Setting, mesh: Mesh) -> tuple[Learner, Any, Any]:
    """Makes (learner, abstract params, abstract QTensors): GRPO, one update of one micro-batch."""
    graphdef, params, qweights = models.split(models.abstract_model(model_config(setting)))
    options: dict[str, Any] = {"grad_dtype": setting.grad, "backward": setting.backward}
    made = Learner(
        graphdef,
        loss_fn=get_loss("grpo", aggregation="seq-mean-token-mean"),
        optimizer=leafwise.Optimizer(optimizer_config(setting)),
        mesh=mesh,
        options=Options(max_segments=setting.segments, logprob_chunk=setting.chunk, offload=setting.offload, **options),
    )
    return made, params, qweights


def opt_state_of(setting: Setting, params: Any) -> Any:
    """Returns the abstract optimizer state of a setting."""
    return jax.eval_shape(leafwise.Optimizer(optimizer_config(setting)).init, params)


def host_bytes(setting: Setting) -> int:
    """Counts the bytes of the optimizer state that rest on the host."""
    params = models.split(models.abstract_model(model_config(setting)))[1]
    return on_learner.nbytes(opt_state_of(setting, params)) if setting.offload else 0


def planned(setting: Setting) -> dict[str, int]:
    """Returns the memory plan of an update of `setting` on one device: bytes by part."""
    graphdef, params, qweights = models.split(models.abstract_model(model_config(setting)))
    opt_state = opt_state_of(setting, params)
    mesh = AbstractMesh((1, setting.cards, 1, 1), MESH_AXES)
    return on_learner.update_parts(
        models.config_of(graphdef),
        params,
        qweights,
        opt_state,
        rows=setting.rows // setting.cards,
        row_len=setting.seq,
        chunk=setting.chunk,
        grad_dtype=setting.grad,
        max_segments=setting.segments,
        offload=setting.offload,
        backward=setting.backward,
        mesh=mesh,
    )


def random_params(abstract: Any, shardings: Any) -> Any:
    """Draws parameters in their shardings: matrices normal with deviation 0.02, norms one."""

    @jax.jit
    def draw() -> Any:
        leaves, tree = jax.tree.flatten(abstract)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [
            jax.random.normal(key, x.shape, x.dtype) * jnp.asarray(0.02, x.dtype)
            if x.ndim > 2 or max(x.shape) > 50000
            else jnp.ones(x.shape, x.dtype)
            for key, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, drawn)

    return jax.jit(draw, out_shardings=shardings)()


def batch(setting: Setting, seed: int = 0) -> TrainBatch:
    """Makes rows full of random tokens, one prompt token to each response, on the host."""
    rng = np.random.default_rng(seed)
    shape = (setting.rows, setting.seq)
    length = setting.seq // setting.segments
    place = np.arange(setting.seq, dtype=np.int32)
    segment = np.minimum(place // length, setting.segments - 1)
    position = place - segment * length
    mask = np.broadcast_to(position > 0, shape).copy()
    vocab = SIZES[setting.model]["vocab"]
    advantages = rng.standard_normal((setting.rows, setting.segments)).astype(np.float32)[:, segment]
    return TrainBatch(
        tokens=rng.integers(2, vocab, shape, dtype=np.int32),
        positions=np.broadcast_to(position, shape).copy(),
        segment_ids=np.broadcast_to(segment + 1, shape).copy().astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=(-np.log(vocab) + 0.1 * rng.standard_normal(shape)).astype(np.float32),
        advantages=np.where(mask, advantages, 0).astype(np.float32),
    )


def lengths(setting: Setting) -> list[int]:
    """Returns the sequence lengths of `batch`."""
    each = setting.seq // setting.segments
    row = [each] * (setting.segments - 1) + [setting.seq - each * (setting.segments - 1)]
    return row * setting.rows
