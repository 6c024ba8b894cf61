# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run will hold in memory, computed from shapes alone: `--dry-run` prints it and no array is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from qarl_jax import build, critic, models, optimizer, sharding
from qarl_jax.config import RunConfig
from qarl_jax.rollout import jax_sampler

GIB = 2.0**30


def abstract_policy(cfg: RunConfig) -> tuple[Any, Any]:
    """(graphdef, abstract params) of the run's model from its config.json; reads no weights."""
    config = models.read_config(
        cfg.model.path,
        compute_dtype=cfg.model.dtype,
        param_dtype=cfg.model.param_dtype,
        quant=models.parse_rules(build.schemes(cfg, cfg.quant.forward), cfg.quant.group_size),
        remat=cfg.model.remat,
    )
    graphdef, params, _ = models.split(models.abstract_model(config))
    return graphdef, params


def planned_mesh(cfg: RunConfig) -> Mesh | AbstractMesh:
    """The run's mesh; its devices need not be here, unless an axis asks for all there are (-1)."""
    sizes = dataclasses.asdict(cfg.mesh)
    if -1 in sizes.values():
        return build.make_mesh(cfg)
    return AbstractMesh(tuple(sizes[axis] for axis in sharding.MESH_AXES), sharding.MESH_AXES)


def nbytes(tree: Any, mesh: Mesh | AbstractMesh | None = None, dtype: Any = None) -> int:
    """Bytes of all arrays (or their shapes) in a tree.

    Args:
      tree: params, qweights, or an optimizer state around them.
      mesh: count what one device of it holds; None: everything.
      dtype: count as if the arrays had this one.
    """
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.shape for leaf in leaves]
    if mesh is not None:
        places = jax.tree.leaves(sharding.param_shardings(tree, mesh))
        shapes = [place.shard_shape(shape) for place, shape in zip(places, shapes, strict=True)]
    sizes = [jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize for leaf in leaves]
    return sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))


def abstract_critic(cfg: RunConfig, graphdef: Any) -> tuple[models.ModelConfig, Any, Any]:
    """(config of the body, abstract params, abstract optimizer state) of the run's critic; reads no weights."""
    assert cfg.critic is not None
    body = build.critic_body(cfg, models.config_of(graphdef))
    policy = models.split(models.abstract_model(body))[1]
    params = jax.eval_shape(lambda p: critic.init_params(p, body.hidden_size), policy)
    transformation = optimizer.make_optimizer(cfg.critic.optimizer, cfg.train.total_updates)
    return body, params, jax.eval_shape(transformation.init, params)


def activations(model: models.ModelConfig, positions: int) -> int:
    """Bytes of what the backward of `positions` tokens keeps, roughly (see `parts`)."""
    width = model.compute_dtype.itemsize
    layer = positions * (16 * model.hidden_size + 3 * model.intermediate_size) * width
    kept = positions * model.hidden_size * width * 2 * model.num_layers
    return {
        "none": layer * model.num_layers,
        "dots": layer * (model.num_layers + 1) // 2,
        "full": kept + layer,
    }[model.remat]


def parts(cfg: RunConfig, *, per_device: bool = False) -> dict[str, int]:
    """Bytes by part: what one update holds at once, over the whole mesh or on one of its devices.

    Policy and critic are updated in turn, so that gradients and activations are those of the larger of the two. The
    reference policy of a KL term is a copy in the compute dtype with QTensors of its own.

    activations is an estimate, an upper one where the tensor axis splits them: under full recomputation the input of
    every layer plus the working set of one layer; with nothing recomputed about sixteen [rows, row_len, hidden] tensors
    per layer and three of the MLP's width; with dots half of that, and one layer's other half. The embedded sampler
    keeps a copy of the policy and its keys and values between updates; vLLM's memory is its own (`rollout.engine`).
    """
    graphdef, params = abstract_policy(cfg)
    model = models.config_of(graphdef)
    qweights = jax.eval_shape(lambda p: models.quantize_params(graphdef, p), params)
    opt_state = jax.eval_shape(optimizer.make_optimizer(cfg.optimizer, cfg.policy_updates).init, params)
    mesh = planned_mesh(cfg) if per_device else None
    batch_shards = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in sharding.BATCH_AXES)
    positions = cfg.train.micro_batch_rows // batch_shards * cfg.row_len
    chunk = min(cfg.train.logprob_chunk, positions) * model.vocab_size * 4 * 2
    out = {
        "masters": nbytes(params, mesh),
        "optimizer": nbytes(opt_state, mesh),
        "gradients": nbytes(params, mesh, jnp.float32),
        "QTensors": nbytes(qweights, mesh),
        "activations (estimate)": activations(model, positions),
        "log-prob chunk": chunk,
    }
    if cfg.kl.coef:
        out["reference policy"] = nbytes(params, mesh, model.compute_dtype) + nbytes(qweights, mesh)
    if cfg.critic is not None:
        body, own, moments = abstract_critic(cfg, graphdef)
        out |= {"critic's masters": nbytes(own, mesh), "critic's optimizer": nbytes(moments, mesh)}
        out["gradients"] = max(out["gradients"], nbytes(own, mesh, jnp.float32))
        out["activations (estimate)"] = max(out["activations (estimate)"], activations(body, positions))
    if isinstance(cfg.rollout.engine, jax_sampler.Config):
        sampled = build.rollout_graphdef(cfg, graphdef)
        prompts, partial = cfg.train.prompts_per_step, cfg.rollout.partial
        prompt_len, response_len = cfg.data.max_prompt_len, cfg.rollout.max_response_len
        if partial.is_on:  # what goes on with a response takes it for a prompt, and adds a chunk
            prompts = partial.groups(prompts)
            prompt_len, response_len = prompt_len + response_len - 1, partial.tokens(response_len)
        weights, cache = jax_sampler.footprint(
            cfg.rollout.engine,
            sampled,
            params,
            jax.eval_shape(lambda p: models.quantize_params(sampled, p), params),
            prompt_len=prompt_len,
            response_len=response_len,
            sequences=prompts * cfg.rollout.num_samples_per_prompt,
        )
        out |= {"sampler's policy": nbytes(weights, mesh), "sampler's KV cache": nbytes(cache)}
    return out


def quantized(cfg: RunConfig, *, rollout: bool = False) -> list[str]:
    """A line per stacked weight that has a QTensor: scheme, how many matrices, name, shape of one matrix.

    In the learner's forward, or (`rollout`) in what is published to the sampler.
    """
    graphdef, params = abstract_policy(cfg)
    graphdef = build.rollout_graphdef(cfg, graphdef) if rollout else graphdef
    model = models.config_of(graphdef)
    qweights = jax.eval_shape(lambda p: models.quantize_params(graphdef, p), params)
    return [
        f"{model.scheme_of(path)!s:<10} {math.prod(q.shape[:-2]):>6} x {model.describe(path)} {list(q.shape[-2:])}"
        for path, q in models.by_path(qweights).items()
    ]


def describe(cfg: RunConfig) -> str:
    """The plan as lines: parameters, bytes by part (whole mesh and per device), and which weights are quantized."""
    whole, own = parts(cfg), parts(cfg, per_device=True)
    _, params = abstract_policy(cfg)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    devices = math.prod(planned_mesh(cfg).shape.values())
    lines = [
        f"model        {count / 1e6:,.1f} M parameters on {devices} device(s)",
        f"{'whole mesh':>39}{'one device':>14}",
    ]
    rows = [(name, whole[name], own[name]) for name in whole]
    rows.append(("sum", sum(whole.values()), sum(own.values())))
    lines += [f"  {name:<24}{a / GIB:9.3f} GiB{b / GIB:10.3f} GiB" for name, a, b in rows]
    split = cfg.quant.rollout_scheme != cfg.quant.forward
    for rollout in (False, True) if split else (False,):
        names = quantized(cfg, rollout=rollout)
        where = ("in the sampler" if rollout else "in the learner's forward") if split else "in learner and sampler"
        lines.append(f"quantized    {len(names) or 'no'} stacks of weights {where}; everything else stays as it is")
        lines += [f"  {name}" for name in names]
    return "\n".join(lines)


def facts(cfg: RunConfig, graphdef: Any) -> dict[str, Any]:
    """What run.json says of the policy: resolved once, at the start."""
    config = models.config_of(graphdef)
    _, params = abstract_policy(cfg)
    return {
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "numerics": str(config.numerics),
        "devices": [str(device) for device in jax.devices()],
        "forward": cfg.quant.forward,
        "rollout": cfg.quant.rollout_scheme,
    }
