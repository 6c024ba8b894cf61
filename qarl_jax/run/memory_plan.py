# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run will hold in memory, computed from shapes alone: `--dry-run` prints it and no array is made."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from qarl_jax import models
from qarl_jax.learning import critic
from qarl_jax.learning.trainable import ALL, NOTHING, Trainable, joined
from qarl_jax.models.params import united
from qarl_jax.optim import by_stack, leafwise
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.embedded import engine as jax_sampler
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.run import build
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import mesh as sharding
from qarl_jax.runtime import remat

GIB = 2.0**30


def abstract_policy(cfg: RunConfig) -> tuple[Any, Any]:
    """(graphdef, abstract params) of the run's model from its config.json; reads no weights."""
    return models.split(models.abstract_model(build.model_config(cfg, cfg.quant.forward)))[:2]


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
    return sum(jax.tree.leaves(bytes_of_each(tree, mesh, dtype)))


def bytes_of_each(tree: Any, mesh: Mesh | AbstractMesh | None = None, dtype: Any = None) -> Any:
    """`nbytes` leaf by leaf: a tree like the given one."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in leaves]
    if mesh is not None:
        places = jax.tree.leaves(sharding.param_shardings(tree, mesh))
        shapes = [place.shard_shape(shape) for place, shape in zip(places, shapes, strict=True)]
    sizes = [jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize for leaf in leaves]
    return jax.tree.unflatten(structure, [math.prod(x) * size for x, size in zip(shapes, sizes, strict=True)])


def abstract_critic(cfg: RunConfig, graphdef: Any) -> tuple[models.ModelConfig, Any, Any]:
    """(config of the body, abstract params, abstract optimizer state) of the run's critic; reads no weights."""
    assert cfg.critic is not None
    body = build.critic_body(cfg, models.config_of(graphdef))
    policy = models.split(models.abstract_model(body))[1]
    params = jax.eval_shape(lambda p: critic.init_params(p, body.hidden_size), policy)
    transformation = leafwise.Optimizer(cfg.critic.optimizer, cfg.train.total_updates)
    return body, params, jax.eval_shape(transformation.init, params)


def _widths(model: models.ModelConfig) -> tuple[int, int, int, int]:
    """Elements per token of the residual, of all query heads, of q, k and v together, and of the MLP's inner width."""
    heads = model.num_heads * model.head_dim
    inner = model.intermediate_size
    if model.moe is not None:
        inner = model.moe.intermediate_size * model.moe.num_experts_per_tok
    return model.hidden_size, heads, heads + 2 * model.num_kv_heads * model.head_dim, inner


def _kept(model: models.ModelConfig, max_segments: int) -> int:
    """Bytes per token and layer that the recomputation policy keeps beyond the layer's two inputs."""
    width = model.compute_dtype.itemsize
    hidden, heads, projected, inner = _widths(model)
    # A fused kernel's statistics: a float32 per head and token, and per segment where rows are packed.
    statistics = 4 * model.num_heads * (max_segments + 1 if max_segments > 1 else 1)
    if model.remat == "none":  # every tensor that a backward reads, those in float32 too
        elements = 8 * hidden + 2 * heads + 3 * projected + 5 * inner
        return elements * width + 4 * (8 * hidden + 6 * inner) + statistics
    down = hidden
    if model.moe is not None:
        down *= model.moe.num_experts_per_tok
    elements = remat.saved_elements(
        model.remat, hidden=hidden, heads=heads, projected=projected, inner=inner, down=down
    )
    return elements * width + statistics if elements else 0


def saved_activations(model: models.ModelConfig, positions: int, max_segments: int = 1) -> int:
    """Bytes that the forward of `positions` tokens leaves for its backward: each layer's two inputs, and what the
    recomputation policy keeps (`runtime/remat.py`)."""
    inputs = 2 * model.hidden_size * model.compute_dtype.itemsize
    return model.num_layers * positions * (inputs + _kept(model, max_segments))


def layer_activations(model: models.ModelConfig, positions: int, max_segments: int = 1) -> int:
    """Bytes alive at once while one layer is recomputed and differentiated, without what is saved of it anyway.

    The three numbers are fitted to what XLA allocates for an H200 at Qwen3-0.6B, 1.7B and 8B under full recomputation
    (benchmarks/memory.py), those of experts at Qwen3-30B-A3B on two; everything else in the plan is counted.
    """
    hidden, _, projected, inner = _widths(model)
    whole = (14.0 * hidden + 2.5 * projected + 7.0 * inner) * model.compute_dtype.itemsize
    own = positions * max(whole - _kept(model, max_segments), whole / 4)
    if model.moe is not None:
        # Copies of tokens for their experts, wider where they are summed in float64; a layer's experts, gathered, and
        # dequantized.
        copies = (8 if model.numerics.float64_experts else 2) * positions * model.moe.num_experts_per_tok * hidden
        experts = 6 * model.moe.num_experts * model.moe.intermediate_size * hidden
        own += (copies + experts) * model.compute_dtype.itemsize
    return round(own)


def update_scratch(
    params: Any, opt_state: Any, *, offload: bool = False, mesh: Mesh | AbstractMesh | None = None
) -> int:
    """Bytes that an update outside of the gradient's program works with beside masters, gradients and a state that
    rests on the device (`by_stack.Update`).

    As one program: a float32 number per parameter, one more for those of the largest stack, and a state from the host.
    In groups: of the fullest one six layers in float32, or 2.5 float32 numbers per parameter where it is not a stack,
    and of a state from the host two neighbouring groups. So XLA allocates for an H200 at Qwen3-8B under Muon
    (benchmarks/memory.py), or less.
    """
    groups = by_stack.groups_of(params)
    sizes = jax.tree.leaves(bytes_of_each(params, mesh, jnp.float32))
    moments = [sum(jax.tree.leaves(x)) for x in leafwise.moments_of(params, bytes_of_each(opt_state, mesh))]
    if len(groups) == 1:
        return sum(sizes) + max(sizes) + (sum(moments) if offload else 0)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    own = [
        6 * sizes[first] // shapes[first][0]
        if not others and by_stack.is_stack(shapes[first])
        else 5 * sum(sizes[i] for i in (first, *others)) // 2
        for first, *others in groups
    ]
    if not offload:
        return max(own)
    here = [sum(moments[i] for i in group) for group in groups]
    beside = [max(before, after) for before, after in zip([0, *here], [*here[1:], 0], strict=False)]
    return max(map(sum, zip(own, here, beside, strict=True)))


def _read(params: Any, qweights: Any, mesh: Mesh | AbstractMesh | None, dtype: Any) -> int:
    """Bytes of the masters that a forward reads, in `dtype`: all but those that it has as QTensors."""
    low = models.by_path(qweights)
    flat = [(keys, leaf) for keys, leaf in nnx.to_flat_state(params) if ".".join(map(str, keys)) not in low]
    return nbytes(nnx.from_flat_state(flat), mesh, dtype)


def update_parts(
    model: models.ModelConfig,
    params: Any,
    qweights: Any,
    opt_state: Any,
    *,
    rows: int,
    row_len: int,
    chunk: int,
    grad_dtype: Any,
    max_segments: int = 1,
    one_program: bool = True,
    offload: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
) -> dict[str, int]:
    """Bytes by part at the fullest moment of an update.

    Two moments compete. In the layers' backward there are the saved activations, one layer's own and all gradients;
    where those are bfloat16, the head's float32 sum stands beside them, and a rounded copy of float32 masters that the
    forward reads. In the log-probs' backward there are a chunk of float32 logits and the head's float32 gradient,
    before and after the chunk, and a tied embedding's once more where it is added to other micro-batches'; one of them
    is the gradient itself where that is float32. XLA has made room for the layers' gradients by then, though they are
    still zero. "log-prob chunk" is what the second needs beyond the first.

    Where the update is not in the gradient's program, for its several micro-batches or because the optimizer's state
    rests on the host, it is a third: activations are gone, and what it works with (`update_scratch`) is here. "update
    (estimate)" is what it needs beyond the other two.

    Args:
      params, qweights, opt_state: abstract or not.
      rows, row_len: of one micro-batch on one device.
      chunk: tokens whose logits exist at once (`train.logprob_chunk`).
      grad_dtype: `train.grad_dtype`.
      max_segments: static bound on responses per row.
      one_program: whether an update is a single micro-batch; otherwise an accumulator stands beside the gradient.
      offload: `optimizer.offload`.
      mesh: count what one of its devices holds; None: everything.
    """
    positions, grad_dtype = rows * row_len, jnp.dtype(grad_dtype)
    own = grad_dtype if model.compute_dtype == grad_dtype else None  # None: the masters'
    gradient = nbytes(params, mesh, own)
    # Embedding and head get their gradients as float32 sums.
    ways = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in sharding.AXIS_RULES.vocab)
    vocabulary = model.vocab_size * model.hidden_size * 4 // ways
    saved = saved_activations(model, positions, max_segments)
    layers = saved + layer_activations(model, positions, max_segments)
    in_float32 = gradient == nbytes(params, mesh, jnp.float32)
    if not in_float32:
        layers += vocabulary
    # `Learner._gradient` rounds before it differentiates.
    rounded = 0 if own is None or gradient == nbytes(params, mesh) else _read(params, qweights, mesh, own)
    logits = min(chunk, positions) * model.vocab_size * 4
    sums = (1 if positions <= chunk else 2) + (model.tie_embeddings and not one_program) - in_float32
    chunks = max(0, saved + logits + sums * vocabulary - layers)
    state, apart = nbytes(opt_state, mesh), 0
    if offload or not one_program:
        gone = layers + rounded + chunks + (0 if one_program else gradient)
        apart = max(0, update_scratch(params, opt_state, offload=offload, mesh=mesh) - gone)
    return {
        "masters": nbytes(params, mesh),
        "optimizer": 0 if offload else state,
        "gradients": gradient + (0 if one_program else nbytes(params, mesh, grad_dtype)),
        "masters, rounded": rounded,
        "QTensors": nbytes(qweights, mesh),
        "activations (estimate)": layers,
        "log-prob chunk": chunks,
        "update (estimate)": apart,
    }


def parts(cfg: RunConfig, *, per_device: bool = False, trainable: Trainable = ALL) -> dict[str, int]:
    """Bytes by part: what one update holds at once, over the whole mesh or on one of its devices.

    Policy and critic are updated in turn, so that gradients and activations are those of the larger of the two. What is
    frozen, and the reference policy of a KL term, are QTensors and values in the compute dtype. An optimizer state that
    rests on the host counts for its visit alone ("update (estimate)"); all of it is in `optimizer_states`.

    activations is an estimate (`update_parts`), an upper one where the tensor axis splits them. The embedded sampler
    keeps a copy of the policy and its keys and values between updates; vLLM's memory is its own (`rollout.engine`).
    """
    graphdef, params = abstract_policy(cfg)
    model = models.config_of(graphdef)
    learned = trainable.learned(params)
    codes = jax.eval_shape(lambda p: models.quantize_params(graphdef, p), learned)
    frozen, qweights = joined(nnx.State({}), united(codes, _held(trainable, graphdef, params)))
    opt_state = jax.eval_shape(leafwise.Optimizer(cfg.optimizer, cfg.policy_updates).init, learned)
    mesh = planned_mesh(cfg) if per_device else None
    batch_shards = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in sharding.BATCH_AXES)
    shape: dict[str, Any] = {
        "rows": cfg.train.micro_batch_rows // batch_shards,
        "row_len": cfg.row_len,
        "chunk": cfg.train.logprob_chunk,
        "grad_dtype": cfg.train.grad_dtype,
        "max_segments": build.max_segments(cfg),
        "one_program": cfg.micro_batches_per_update[1] == 1,
        "offload": cfg.optimizer.offload is True,
        "mesh": mesh,
    }
    out = update_parts(model, learned, qweights, opt_state, **shape)
    if trainable.freeze:
        out["frozen weights"] = nbytes(frozen, mesh)
    served = build.rollout_graphdef(cfg, graphdef)
    if cfg.quant.code_flips and (cfg.train.updates_per_step > 1 or served != graphdef):
        kept = nbytes(jax.eval_shape(lambda p: models.quantize_params(served, p), learned), mesh)
        out |= {"QTensors published before": kept} if kept else {}
    if cfg.kl.coef:
        out["reference policy"] = nbytes(_held(NOTHING, graphdef, params), mesh)
    if cfg.critic is not None:
        body, own, moments = abstract_critic(cfg, graphdef)
        # Its gradient is float32, with an accumulator of its own, and it has no logits.
        gradient = nbytes(own, mesh, jnp.float32)
        out["gradients"] = max(out["gradients"], 2 * gradient)
        positions = shape["rows"] * cfg.row_len
        segments = shape["max_segments"]
        needed = saved_activations(body, positions, segments) + layer_activations(body, positions, segments)
        out["activations (estimate)"] = max(out["activations (estimate)"], needed)
        held = nbytes(moments, mesh)
        if cfg.critic.optimizer.offload is True:
            held = max(0, update_scratch(own, moments, offload=True, mesh=mesh) - needed - gradient)
        out |= {"critic's masters": nbytes(own, mesh), "critic's optimizer": held}
    if isinstance(cfg.rollout.engine, jax_sampler.Config):
        sampled = build.rollout_graphdef(cfg, graphdef)
        prompts, partial = cfg.train.prompts_per_step, cfg.rollout.partial
        prompt_len, response_len = cfg.data.max_prompt_len, cfg.rollout.max_response_len
        if cfg.rollout.environment is not None:  # what was said before a turn is its prompt
            prompt_len = prompt_len + response_len - 1
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


def _held(trainable: Trainable, graphdef: Any, params: Any) -> Any:
    return jax.eval_shape(lambda p: trainable.held(graphdef, p), params)


def optimizer_states(cfg: RunConfig) -> dict[str, tuple[Any, bool]]:
    """Whole abstract optimizer states by owner, and whether they rest on the host."""
    graphdef, params = abstract_policy(cfg)
    state = jax.eval_shape(leafwise.Optimizer(cfg.optimizer, cfg.policy_updates).init, params)
    out = {"optimizer": (state, cfg.optimizer.offload is True)}
    if cfg.critic is not None:
        out["critic's optimizer"] = (abstract_critic(cfg, graphdef)[2], cfg.critic.optimizer.offload is True)
    return out


def device_bytes(cfg: RunConfig) -> int | None:
    """What the learner may take of a device, beside vLLM where they share it; None where a device does not say (a CPU).

    Asks JAX for its devices, so that from here on it is settled whether it preallocates.
    """
    build.leave_memory_to_vllm(cfg)
    found = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if not found:
        return None
    engine = cfg.rollout.engine
    if isinstance(engine, vllm.Config):
        card = found / learner_share()
        theirs = 0.0 if engine.has_own_gpu else engine.gpu_memory_utilization
        found = min(found, card * (1 - theirs) - staging_bytes(cfg))
    return int(found)


def with_remat(cfg: RunConfig, limit: int | None) -> RunConfig:
    """`cfg` with `model.remat=auto` replaced: the policy that recomputes least among those whose plan fits.

    Nothing but time and memory depends on it. "none" is not considered: it keeps float32 intermediates as well.

    Args:
      limit: bytes of a device (`device_bytes`); None: unknown, everything is recomputed. A tenth is left free, for
        compiled programs and fragmentation.
    """
    if cfg.model.remat != "auto":
        return cfg
    for policy in ("dots", "mixer", "attention"):
        choice = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat=policy))
        if limit is not None and sum(parts(choice, per_device=True).values()) <= 0.9 * limit:
            return choice
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat="full"))


JAX_SHARE = 0.75  # of a card, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (JAX's documentation)


def learner_share(otherwise: float = JAX_SHARE) -> float:
    """The largest share of a card that JAX will take: what the user has set, or else `otherwise`."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or otherwise)


def staging_bytes(cfg: RunConfig) -> int:
    """Of the versions in buffers on the learner's card, where they are published from its memory (with NCCL: as many
    on the engine's)."""
    engine = cfg.rollout.engine
    assert isinstance(engine, vllm.Config)
    if not engine.stages_on_gpu:
        return 0
    return engine.staging_buffers * published_bytes(cfg) or window_bytes(cfg)


def _published(cfg: RunConfig) -> PolicyWeights:
    """A version, as shapes."""
    graphdef, params = abstract_policy(cfg)
    graphdef = build.rollout_graphdef(cfg, graphdef)
    qweights = jax.eval_shape(lambda p: models.quantize_params(graphdef, p), params)
    return PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)


def window_bytes(cfg: RunConfig) -> int:
    """Of a buffer through which versions go in parts (`rollout.engine.staging_buffers=0`)."""
    places = gpu_staging.layout(_published(cfg))
    return max(size for _, size in gpu_staging.spans_of(places, gpu_staging.parts_of(places)))


def published_bytes(cfg: RunConfig) -> int:
    """Bytes of one version as the engine is given it: QTensors, and the rest of the policy in bfloat16."""
    weights = _published(cfg)
    covered = models.by_path(weights.qweights)
    rest = {path: leaf for path, leaf in models.by_path(weights.params).items() if path not in covered}
    return nbytes(weights.qweights) + nbytes(rest, dtype=jnp.bfloat16)


def int4_copies(cfg: RunConfig) -> dict[str, int]:
    """Bytes that a vLLM on CUDA holds beside the published tensors of its int4 layers, by `int4_kernel`.

    The bridge's kernels multiply what is made at each load from tensors that stay: words and scales, with room for the
    largest layer, gate and up, as bf16(q s); and for 8-bit activations one byte per weight. Experts are made in their
    place.
    """
    qweights = models.by_path(_published(cfg).qweights)
    dense = [(str(q.scheme), q) for path, q in qweights.items() if ".moe." not in path]
    layers = [q for scheme, q in dense if "a16" in scheme]
    largest = max((2 * q.shape[-2] * q.shape[-1] for q in layers), default=0)  # of a matrix, bfloat16
    own = nbytes([q.qvalue for q in layers]) + nbytes([q.scale for q in layers]) + 2 * largest
    codes = 2 * nbytes([q.qvalue for scheme, q in dense if scheme.startswith("w4a8_fp8")])
    return {"auto": own + codes, "machete": codes, "marlin": codes}


def _apart(cfg: RunConfig, engine: vllm.Config) -> list[str]:
    """Lines on a vLLM with a GPU of its own."""
    named = ", ".join(engine.endpoints)
    where = f"GPU {engine.visible_gpus}" if engine.visible_gpus else f"the GPU of the bridge at {named}"
    lines = [f"vLLM         on {where}: {engine.gpu_memory_utilization:.0%} of it at most (gpu_memory_utilization)"]
    if not engine.stages_on_gpu:
        return [*lines, "  weights go over host memory"]
    staged, version = staging_bytes(cfg) / GIB, published_bytes(cfg) / GIB
    how = f"weights go over NCCL; staging takes {staged:.3f} GiB of either card for versions of {version:.3f} GiB"
    return [*lines, f"  {how}"]


def colocation(cfg: RunConfig) -> list[str]:
    """Lines on how learner and vLLM share one card, where they do; none without vLLM."""
    if not isinstance(cfg.rollout.engine, vllm.Config):
        return []
    engine = cfg.rollout.engine
    if engine.is_remote and not engine.stages_on_gpu:
        return ["vLLM         on another host: weights go over the socket"]
    if engine.has_own_gpu:
        return _apart(cfg, engine)
    learner, staged = learner_share(), staging_bytes(cfg)
    cache = f"{engine.kv_cache_gb:g} GiB" if engine.kv_cache_gb else "what that leaves"
    share, version = engine.gpu_memory_utilization, published_bytes(cfg) / GIB
    rows = {
        "vLLM": f"{share:.0%} of the card at most (gpu_memory_utilization), KV cache {cache} (kv_cache_gb)",
        "learner": f"as it needs, up to {learner:.0%} of the card (XLA_PYTHON_CLIENT_MEM_FRACTION)",
        "staging": f"{staged / GIB:.3f} GiB for versions of {version:.3f} GiB, or none over host memory",
    }
    lines = ["vLLM         where it shares a GPU with the learner (rollout.engine):"]
    lines += [f"  {name:<24}{what}" for name, what in rows.items()]
    if share + learner > 1:
        lines.append(
            f"  the limits add up to {share + learner:.0%}: the learner's sum above must fit beside vLLM's share"
        )
    return lines


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


def describe(cfg: RunConfig, *, card_planned: bool = False) -> str:
    """The plan as lines: parameters, bytes by part (whole mesh and per device), and which weights are quantized.

    Args: card_planned: a `card.CardPlan` has said already who takes what of the card.
    """
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
    resting = {name: state for name, (state, on_host) in optimizer_states(cfg).items() if on_host}
    if resting:
        lines.append("host         pinned memory, group by group on the devices for an update (optimizer.offload)")
    for name, state in resting.items():
        a, b = nbytes(state), nbytes(state, planned_mesh(cfg))
        lines.append(f"  {name:<24}{a / GIB:9.3f} GiB{b / GIB:10.3f} GiB")
    lines += [] if card_planned else colocation(cfg)
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
        "numerics": {"profile": config.numerics.profile},  # the rest is a layer's own
        "devices": [str(device) for device in jax.devices()],
        "forward": cfg.quant.forward,
        "rollout": cfg.quant.rollout_scheme,
    }
