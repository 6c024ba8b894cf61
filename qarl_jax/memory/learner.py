# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of a learner at the fullest moment of an update, computed from shapes alone; no array is made.

    parts(cfg, per_device=True)       # {"masters": ..., "optimizer": ..., "gradients": ..., ...}

**Moments of an update.** The peak is in one of three. The layers' backward holds the saved activations, one layer's own
and all gradients. With bfloat16 gradients it also holds the head's float32 sum, and a rounded copy of float32 masters
that the forward reads. The log-probs' backward holds a chunk of logits with their gradient. If gradients are float32,
they have memory by then, and the head is there rounded. Else there are none but the head's float32 gradient, before and
after the chunk. Where micro-batches are summed, an upper bound is planned: the layers' gradients, float32 logits, the
head's gradient before and after the chunk, and a tied embedding's. The forward of log-probs (`logprob_moments`) has no
gradients beside an accumulator. "log-prob chunk" is what these moments need beyond the first.

An optimizer update in a program of its own is a fourth moment: after several micro-batches, or with an optimizer state
on the host. Activations are freed then, and the update's temporaries (`update_scratch`) are allocated.
"update (estimate)" is what this moment needs beyond the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from qarl_jax import models
from qarl_jax.kernels.attention_vendor import cudnn_workspace, runs_at_once
from qarl_jax.learning import critic, pieces
from qarl_jax.learning.trainable import NOTHING, Trainable, joined
from qarl_jax.models import logprobs
from qarl_jax.models import sums as accumulators
from qarl_jax.models.params import part_of
from qarl_jax.models.transformer import quantizable
from qarl_jax.optim import by_stack, leafwise
from qarl_jax.rollout.embedded.engine import Config as SamplerConfig
from qarl_jax.rollout.embedded.engine import footprint
from qarl_jax.rollout.vllm import one_base
from qarl_jax.run import build, reference
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import remat
from qarl_jax.runtime.mesh import AXIS_RULES, MESH_AXES, batch_shards, param_shardings

GIB = 2.0**30
_POLICY = ("masters", "QTensors", "frozen weights")  # the parts that are there when the base has been read


@dataclasses.dataclass(frozen=True, eq=False)
class Shapes:
    """The shapes of a run's policy, from its config.json; no weights are read. Equal settings share one object.

    Attributes:
      graphdef, params, qweights: the learner's, under `quant.forward`; qweights holds QTensors only.
      learned, frozen: the masters that learn, and the frozen leaves that are no QTensors.
      opt_state: the state of the policy's optimizer.
      served, published: graphdef and QTensors of the sampler, under `quant.rollout`.
    """

    graphdef: Any
    params: Any
    qweights: Any
    learned: Any
    frozen: Any
    opt_state: Any
    served: Any
    published: Any


_SHAPES: dict[str, Shapes] = {}


def shapes(cfg: RunConfig, trainable: Trainable | None = None) -> Shapes:
    """Returns the shapes of a run's policy, cached by the settings that they depend on.

    trainable: the leaves that learn; None: the run's.
    """
    trainable = cfg.trainable if trainable is None else trainable
    depends = {**vars(cfg.model), "remat": None}, type(cfg.optimizer), {**vars(cfg.optimizer), "offload": None}
    rest = cfg.quant, cfg.lora, cfg.numerics, cfg.policy_updates, trainable
    key = repr((depends, rest))  # as text: the sections hold dicts
    if key not in _SHAPES:
        graphdef, params, qweights = models.split(models.abstract_model(build.model_config(cfg, cfg.quant.forward)))
        served = build.rollout_graphdef(cfg, graphdef)
        optimizer = leafwise.Optimizer(cfg.optimizer, cfg.policy_updates)
        _SHAPES[key] = Shapes(
            graphdef,
            params,
            qweights,
            trainable.learned(params),
            joined(nnx.State({}), _held(trainable, graphdef, params))[0],
            jax.eval_shape(optimizer.init, trainable.learned(params)),
            served,
            models.split(models.abstract_model(models.config_of(served)))[2],
        )
    return _SHAPES[key]


def _held(trainable: Trainable, graphdef: Any, params: Any) -> Any:
    return jax.eval_shape(functools.partial(trainable.held, graphdef), params)


def model_of(cfg: RunConfig) -> models.ModelConfig:
    """Returns the config of the learner's model, with the run's `model.remat`."""
    return dataclasses.replace(models.config_of(shapes(cfg).graphdef), remat=cfg.model.remat_or_full)


def parameters(cfg: RunConfig) -> int:
    """Number of the policy's parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(cfg).params))


def planned_mesh(cfg: RunConfig) -> Mesh | AbstractMesh:
    """Returns the run's mesh; it needs no devices on this machine, unless an axis asks for all devices (-1)."""
    sizes = dataclasses.asdict(cfg.mesh)
    if -1 in sizes.values():
        return build.make_mesh(cfg)
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES)


def nbytes(tree: Any, mesh: Mesh | AbstractMesh | None = None, dtype: Any = None) -> int:
    """Bytes of all arrays (or their shapes) in a tree.

    Args:
      tree: params, qweights, or an optimizer state around them.
      mesh: count one device's shards; None: whole arrays.
      dtype: count as if the arrays had this dtype.
    """
    return sum(_counted(tree, mesh, dtype)[0])


def bytes_of_each(tree: Any, mesh: Mesh | AbstractMesh | None = None, dtype: Any = None) -> Any:
    """Counts the bytes of each array, as `nbytes` does: a tree of the same structure."""
    sizes, structure = _counted(tree, mesh, dtype)
    return jax.tree.unflatten(structure, sizes)


def _counted(tree: Any, mesh: Mesh | AbstractMesh | None, dtype: Any) -> tuple[list[int], Any]:
    leaves, structure = jax.tree.flatten(tree)
    kinds = tuple((leaf.shape, leaf.dtype if dtype is None else jnp.dtype(dtype)) for leaf in leaves)
    return _bytes(structure, kinds, mesh), structure


@functools.lru_cache(maxsize=256)  # a search for settings that fit asks for the same trees again and again
def _bytes(structure: Any, kinds: tuple[tuple[Any, Any], ...], mesh: Mesh | AbstractMesh | None) -> list[int]:
    shapes = [shape for shape, _ in kinds]
    if mesh is not None:
        leaves = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
        places = jax.tree.leaves(param_shardings(jax.tree.unflatten(structure, leaves), mesh))
        shapes = [place.shard_shape(shape) for place, shape in zip(places, shapes, strict=True)]
    return [math.prod(shape) * dtype.itemsize for shape, (_, dtype) in zip(shapes, kinds, strict=True)]


_CRITICS: dict[str, tuple[models.ModelConfig, Any, Any, Any]] = {}


def abstract_critic(cfg: RunConfig) -> tuple[models.ModelConfig, Any, Any, Any]:
    """Returns the run's critic: (config of its body, params, frozen weights that the policy lacks, optimizer state).

    All but the config are shapes, cached as `shapes` are; reads no weights.
    """
    assert cfg.critic is not None
    body, trainable = build.critic_body(cfg, model_of(cfg)), cfg.critic.trainable
    optimizer = dataclasses.replace(cfg.critic.optimizer, offload=False)
    depends = trainable, cfg.trainable, cfg.critic.path, optimizer, cfg.train.total_updates
    key = repr((dataclasses.replace(body, remat="full"), *depends))
    if key not in _CRITICS:
        graphdef, whole, _ = models.split(models.abstract_model(body))
        params = jax.eval_shape(lambda p: critic.init_params(p, body.hidden_size), trainable.learned(whole))
        held = _held(trainable, graphdef, whole)
        if cfg.critic.path is None:
            held = cfg.trainable.learned(held)
        transformation = leafwise.Optimizer(optimizer, cfg.train.total_updates)
        _CRITICS[key] = body, params, held, jax.eval_shape(transformation.init, params)
    return body, *_CRITICS[key][1:]


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
    # A fused kernel's statistics: a float32 per head and token, and per segment where rows are packed; none where the
    # backward recomputes another kernel's forward (`attention.choose`). Then the norms'.
    recomputed = model.numerics.block_attention and model.attention in ("auto", "flash3")
    statistics = 0 if recomputed else 4 * model.num_heads * (max_segments + 1 if max_segments > 1 else 1)
    statistics += 4 * (2 + (model.num_heads + model.num_kv_heads) * model.qk_norm)
    if model.remat == "none":  # every tensor that a backward reads, those in float32 too
        elements = 8 * hidden + 2 * heads + 3 * projected + 5 * inner
        return elements * width + 4 * (8 * hidden + 6 * inner) + statistics
    down = hidden
    if model.moe is not None:
        down *= model.moe.num_experts_per_tok * model.numerics.shards  # each shard's outputs
    elements = remat.saved_elements(
        model.remat, hidden=hidden, heads=heads, projected=projected, inner=inner, down=down
    )
    return elements * width + statistics if elements else 0


def saved_activations(model: models.ModelConfig, positions: int, max_segments: int = 1) -> int:
    """Bytes that the forward of `positions` tokens leaves for its backward: each layer's two inputs, and what the
    recomputation policy keeps (`runtime/remat.py`)."""
    inputs = 2 * model.hidden_size * model.compute_dtype.itemsize
    return model.num_layers * positions * (inputs + _kept(model, max_segments))


def attention_workspace(model: models.ModelConfig, positions: int, max_segments: int) -> int:
    """Bytes that cuDNN's backward of packed rows takes, which XLA does not plan."""
    if max_segments == 1 or model.attention in ("xla", "splash"):
        return 0
    size = (positions, model.num_heads, model.head_dim)
    return cudnn_workspace(*size, runs_at_once(*size, max_segments + 1))


def layer_activations(
    model: models.ModelConfig, positions: int, max_segments: int = 1, *, frozen_experts: bool = False
) -> int:
    """Peak bytes while one layer is recomputed and differentiated, besides its saved activations.

    Three factors are fitted to XLA's allocations for an H200: Qwen3-0.6B, 1.7B and 8B under full recomputation
    (benchmarks/memory.py). Factors of experts are fitted to Qwen3-30B-A3B on two, frozen ones on one
    (benchmarks/memory_adapters.py). Everything else in the plan is counted. Attention's backward is the peak where its
    workspace is larger than the rest: queries, keys, values and outputs, their gradients and copies.
    """
    hidden, heads, projected, inner = _widths(model)
    whole = (14.0 * hidden + 2.5 * projected + 7.0 * inner) * model.compute_dtype.itemsize
    own = positions * max(whole - _kept(model, max_segments), whole / 4)
    if model.moe is not None:
        # Copies of tokens for their experts, wider where they are summed in float64; a layer's experts, gathered, and
        # dequantized, twice where they learn.
        copies = 8 if model.numerics.float64_experts and not frozen_experts else 2
        copies *= positions * model.moe.num_experts_per_tok * hidden
        copies *= model.numerics.shards  # an upper bound: each shard of the engine has a sum of its own
        experts = (4 if frozen_experts else 6) * model.moe.num_experts * model.moe.intermediate_size * hidden
        own += (copies + experts) * model.compute_dtype.itemsize
    attention = positions * (12 * heads + 4 * hidden) * model.compute_dtype.itemsize
    return round(max(own, attention + attention_workspace(model, positions, max_segments)))


def logprob_moments(model: models.ModelConfig, positions: int, tokens: int) -> tuple[int, int]:
    """Bytes beside saved activations in the log-probs' forward, and in their backward without the head's gradient.

    Forward: float32 logits. Backward: these, and their gradient in the compute dtype. Both: the last layer's two
    outputs, and the final norm's output with a copy in chunks.
    """
    width = model.compute_dtype.itemsize
    ends, logits = 4 * positions * model.hidden_size * width, tokens * model.vocab_size
    return ends + 4 * logits, ends + (4 + width) * logits


def update_scratch(
    params: Any, opt_state: Any, *, offload: bool = False, mesh: Mesh | AbstractMesh | None = None
) -> int:
    """Temporary bytes of an optimizer update that is a program of its own (`by_stack.Update`). Masters, gradients and
    an optimizer state on the device are not counted.

    One group: a float32 number per parameter, one more for those of the largest stack, and an offloaded state. Several
    groups: six layers of the fullest stack in float32, or 2.5 float32 numbers per parameter of a group that is no
    stack. Of an offloaded state, two neighbouring groups are on the device. XLA allocates this or less on an H200 at
    Qwen3-8B under Muon (benchmarks/memory.py).
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


def held_once(cfg: RunConfig) -> frozenset[str]:
    """Returns the paths of weights of which learner and engine share one copy (`build.holds_base_once`)."""
    there = build.holds_base_once(cfg, planned_mesh(cfg).size)
    return one_base.paths_of(shapes(cfg).graphdef) if there else frozenset()


def one_base_bytes(cfg: RunConfig) -> int:
    """Bytes of the QTensors that learner and engine share (`held_once`), outside of JAX's memory pool."""
    shared = held_once(cfg)
    return nbytes(part_of(shapes(cfg).qweights, shared.__contains__))


@functools.lru_cache(maxsize=256)
def reading(model: models.ModelConfig, trainable: Trainable, mesh: Mesh | AbstractMesh | None) -> int:
    """Bytes of JAX's pool beside masters and frozen entries while a frozen base is read; 0 where nothing is frozen.

    An estimate: three times the masters that are there at once (`pieces.groups`), their codes and what making these
    takes included. XLA allocates for an H200 1.4 times them under w4a16, and 1.6 under nvfp4; in the layout that an
    engine reads 2.3 times gate and up, and 3.0 times down. Embedding and head are read before the stacks have memory.
    """
    params = models.split(models.abstract_model(model.base))[1]
    stacks = part_of(params, lambda path: path.startswith("stacks.") and not trainable.learns(path))
    return 3 * max((nbytes(piece, mesh) for piece, _ in pieces.groups(model.base, stacks)), default=0)


@functools.lru_cache(maxsize=256)
def _decoded(model: models.ModelConfig, trainable: Trainable, *, once: bool = False) -> int:
    """Bytes of a frozen base's weights that a layer's backward holds in the compute dtype; experts are counted apart.

    Of a base that is held once: the largest fused module, gate and up. Else three times the largest weight: XLA decodes
    gate and up once to recompute them and once more for dX, and holds three of the four on an H200.
    """
    linears = quantizable(whole := models.abstract_model(model))
    if once:
        modules = list(one_base.shareable(models.split(whole)[0]).values())
    else:
        layers = [path for path in linears if path.startswith("stacks.") and ".moe." not in path]
        frozen = [path for path in layers if not trainable.learns(path)]
        modules = [(path,) * 3 for path in frozen if model.scheme_of(path) is not None]
    sizes = [sum(math.prod(linears[path].kernel.get_value().shape[1:]) for path in paths) for paths in modules]
    return max(sizes, default=0) * model.compute_dtype.itemsize


def _decoded_head(model: models.ModelConfig, ways: int) -> int:
    """Bytes of the head that log-probs are computed with, if it has codes, on one of `ways` devices that share it."""
    coded = model.scheme_of("embed.kernel" if model.tie_embeddings else "head.kernel") is not None
    return coded * model.vocab_size * model.hidden_size * model.compute_dtype.itemsize // ways


def _frozen_experts(params: Any) -> bool:
    """Tells whether all experts are frozen."""
    return not any(path.endswith((".moe.gate.kernel", ".moe.down.kernel")) for path in models.by_path(params))


def _beyond(out: dict[str, int], needed: int, *there: str) -> int:
    """Bytes by which `needed` exceeds the parts in `out` other than `there`; 0 if it does not."""
    return max(0, needed - sum(size for name, size in out.items() if name not in there))


def _read(params: Any, qweights: Any, mesh: Mesh | AbstractMesh | None, dtype: Any) -> int:
    """Bytes of the masters that a forward reads, in `dtype`: all but those that it has as QTensors."""
    low = models.by_path(qweights)
    flat = [(keys, leaf) for keys, leaf in nnx.to_flat_state(params) if ".".join(map(str, keys)) not in low]
    return nbytes(nnx.from_flat_state(flat), mesh, dtype)


def beside_sums(model: models.ModelConfig, params: Any, mesh: Mesh | AbstractMesh | None, dtype: Any) -> int:
    """Bytes of a micro-batch's gradient besides the accumulator: one layer's, and those outside of the stacks.

    See `models.sums`. dtype: the gradient's; None: the masters'.
    """
    stacks = nbytes(part_of(params, lambda path: path.startswith("stacks.")), mesh, dtype)
    return nbytes(params, mesh, dtype) - stacks + stacks // model.num_layers


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
    backward: str = "bf16",
    decoded: int = 0,
    mesh: Mesh | AbstractMesh | None = None,
) -> dict[str, int]:
    """Counts bytes by part at the peak of an update (see the module docstring).

    Args:
      params, qweights, opt_state: abstract or not.
      rows, row_len: of one micro-batch on one device.
      chunk: tokens whose logits exist at once (`train.logprob_chunk`).
      grad_dtype: `train.grad_dtype`.
      max_segments: static bound on responses per row.
      one_program: whether an update is a single micro-batch; otherwise an accumulator stands beside a layer's gradient
        and those of embedding, head and norm.
      offload: `optimizer.offload`.
      backward: `quant.backward`; a low-bit one has two bytes of codes beside each element of the widest dY.
      decoded: bytes of a frozen base's weights that a layer's backward decodes.
      mesh: count what one of its devices holds; None: everything.
    """
    positions, grad_dtype = rows * row_len, jnp.dtype(grad_dtype)
    own = grad_dtype if model.compute_dtype == grad_dtype else None  # None: the masters'
    gradient = nbytes(params, mesh, own)
    # Embedding and head get their gradients as float32 sums.
    ways = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in AXIS_RULES.vocab)
    learned = {"embed.kernel", "head.kernel"} & models.by_path(params).keys()
    vocabulary = model.vocab_size * model.hidden_size * 4 // ways if learned else 0
    saved = saved_activations(model, positions, max_segments)
    layers = saved + decoded + layer_activations(model, positions, max_segments, frozen_experts=_frozen_experts(params))
    if backward != "bf16":
        layers += 2 * positions * max(_widths(model))
    in_float32 = gradient == nbytes(params, mesh, jnp.float32)
    beside = gradient
    if not one_program and accumulators.gradient_dtype(model, grad_dtype) == grad_dtype:
        beside = beside_sums(model, params, mesh, own)
    if not in_float32:
        layers += vocabulary
    # `Learner._gradient` rounds before it differentiates.
    rounded = 0 if own is None or gradient == nbytes(params, mesh) else _read(params, qweights, mesh, own)
    tokens = rows * logprobs.cut(max(1, rows * batch_shards(mesh)), max(2, row_len), chunk)[1]  # of a device, at once
    scored, differentiated = logprob_moments(model, positions, tokens)
    # Results of a program have memory from its start; XLA gives it to float32 gradients, too.
    absent = 0 if one_program and (offload or in_float32) else beside
    head = vocabulary // 2 if in_float32 and model.compute_dtype.itemsize == 2 else 0  # rounded
    if vocabulary:
        scored, sums = scored + head, 1 if positions <= chunk else 2
        if one_program:
            differentiated += head if in_float32 else sums * vocabulary - absent
        else:
            sums += model.tie_embeddings - in_float32
            differentiated = min(chunk, positions) * model.vocab_size * 4 + sums * vocabulary
    decoded_head = 0 if head else _decoded_head(model, ways)
    scored, differentiated = scored + decoded_head, differentiated + decoded_head
    chunks = max(0, saved + max(scored - absent, differentiated) - layers)
    state, apart = nbytes(opt_state, mesh), 0
    if offload or not one_program:
        gone = layers + rounded + chunks + (0 if one_program else beside)
        apart = max(0, update_scratch(params, opt_state, offload=offload, mesh=mesh) - gone)
    return {
        "masters": nbytes(params, mesh),
        "optimizer": 0 if offload else state,
        "gradients": gradient if one_program else beside + nbytes(params, mesh, grad_dtype),
        "masters, rounded": rounded,
        "QTensors": nbytes(qweights, mesh),
        "activations (estimate)": layers,
        "log-prob chunk": chunks,
        "update (estimate)": apart,
    }


def parts(cfg: RunConfig, *, per_device: bool = False, trainable: Trainable | None = None) -> dict[str, int]:
    """Counts the learner's peak bytes in an update by part, over the whole mesh or on one of its devices.

    Policy and critic are updated in turn, so that gradients and activations are those of the larger of the two. What is
    frozen, and the reference policy of a KL term, are QTensors and values in the compute dtype. An optimizer state on
    the host counts only while it is on the device ("update (estimate)"); all of it is in `optimizer_states`.

    Activations are an estimate (`update_parts`), an upper bound where the tensor axis splits them. The embedded sampler
    keeps a copy of the policy and a KV cache between updates; vLLM's memory is counted in `engine.py`.

    Args:
      per_device: count one device's bytes, not the mesh's.
      trainable: the parameters that are trained; None: as `cfg` says.
    """
    trainable = cfg.trainable if trainable is None else trainable
    made, model = shapes(cfg, trainable), model_of(cfg)
    mesh = planned_mesh(cfg) if per_device else None
    shared = held_once(cfg)
    shape: dict[str, Any] = {
        "rows": cfg.micro_batch_rows // batch_shards(mesh),
        "row_len": cfg.row_len,
        "chunk": cfg.train.logprob_chunk,
        "grad_dtype": cfg.train.grad_dtype_or_float32,
        "max_segments": cfg.train.max_segments,
        "one_program": cfg.one_program,
        "offload": cfg.optimizer.offload is True,
        "backward": cfg.quant.backward,
        "decoded": _decoded(model, trainable, once=bool(shared)) if trainable.freeze else 0,
        "mesh": mesh,
    }
    own = part_of(made.qweights, lambda path: path not in shared)
    out = update_parts(model, made.learned, made.qweights, made.opt_state, **shape) | {"QTensors": nbytes(own, mesh)}
    others = [models.config_of(models.at_width(made.graphdef, bits)) for bits in cfg.other_widths["train"]]
    if others:  # one after the other
        each = (models.split(models.abstract_model(config))[2] for config in others)
        out["QTensors of another width"] = max(nbytes(qweights, mesh) for qweights in each)
    if trainable.freeze:
        out["frozen weights"] = nbytes(made.frozen, mesh)
        needed = reading(dataclasses.replace(model, remat="none"), trainable, mesh)
        out["reading the base (estimate)"] = _beyond(out, needed, *_POLICY)
        if made.served != made.graphdef:  # `Learner.quantizer` keeps the frozen ones
            learned = nbytes(trainable.learned(made.published), mesh)
            out["QTensors of the sampler"] = nbytes(made.published, mesh) - learned
    if cfg.quant.code_flips and (cfg.train.updates_per_step > 1 or made.served != made.graphdef):
        kept = nbytes(trainable.learned(made.published), mesh)
        out |= {"QTensors published before": kept} if kept else {}
    if cfg.kl.coef and cfg.kl.reference != "masters":
        theirs = shapes(reference.of_teacher(cfg)) if cfg.kl.is_folder else made
        out["reference policy"] = nbytes(_held(NOTHING, theirs.graphdef, theirs.learned), mesh)
    if cfg.critic is not None:
        _add_critic(out, cfg, mesh)
    if isinstance(cfg.rollout.engine, SamplerConfig):
        out |= _sampler_parts(cfg, cfg.rollout.engine, made, mesh)
    return out


def _add_critic(out: dict[str, int], cfg: RunConfig, mesh: Mesh | AbstractMesh | None) -> None:
    """Adds the critic's parts to the policy's; gradients and activations become those of the larger of the two."""
    assert cfg.critic is not None
    body, own, frozen, moments = abstract_critic(cfg)
    # Its gradient is float32, a layer's beside an accumulator of its own, and it has no logits.
    beside = beside_sums(body, own["body"], mesh, jnp.float32) + nbytes(own["head"], mesh)
    out["gradients"] = max(out["gradients"], nbytes(own, mesh, jnp.float32) + beside)
    positions = cfg.micro_batch_rows // batch_shards(mesh) * cfg.row_len
    segments = cfg.train.max_segments
    needed = layer_activations(body, positions, segments, frozen_experts=_frozen_experts(own["body"]))
    needed += saved_activations(body, positions, segments)
    if cfg.critic.lora is not None:
        needed += _decoded(body, cfg.critic.trainable)
    out["activations (estimate)"] = max(out["activations (estimate)"], needed)
    held = nbytes(moments, mesh)
    if cfg.critic.optimizer.offload is True:
        held = max(0, update_scratch(own, moments, offload=True, mesh=mesh) - needed - beside)
    out |= {"critic's masters": nbytes(own, mesh), "critic's optimizer": held}
    if jax.tree.leaves(frozen):
        out["critic's frozen weights"] = nbytes(frozen, mesh)
    if cfg.critic.lora is not None and cfg.critic.path is not None:
        needed = reading(dataclasses.replace(body, remat="none"), cfg.critic.trainable, mesh)
        beyond = _beyond(out, needed, *_POLICY, "critic's masters", "critic's frozen weights")
        out["reading the critic's base (estimate)"] = beyond


def _sampler_parts(
    cfg: RunConfig, engine: SamplerConfig, made: Shapes, mesh: Mesh | AbstractMesh | None
) -> dict[str, int]:
    """Counts the embedded sampler's copy of the policy, and its KV cache."""
    prompts, partial = cfg.train.prompts_per_step, cfg.rollout.partial
    prompt_len, response_len = cfg.data.prompt_limit, cfg.rollout.max_response_len
    if cfg.rollout.environment is not None:  # what was said before a turn is its prompt
        prompt_len = prompt_len + response_len - 1
    if partial.is_on:  # what goes on with a response takes it for a prompt, and adds a chunk
        prompts = partial.groups(prompts)
        prompt_len, response_len = prompt_len + response_len - 1, partial.tokens(response_len)
    weights, cache = footprint(
        engine,
        made.served,
        made.params,
        made.published,
        prompt_len=prompt_len,
        response_len=response_len,
        sequences=prompts * cfg.rollout.num_samples_per_prompt,
    )
    return {"sampler's policy": nbytes(weights, mesh), "sampler's KV cache": nbytes(cache)}


def optimizer_states(cfg: RunConfig) -> dict[str, tuple[Any, bool]]:
    """Returns, by owner, the unsharded shapes of the optimizer state, and whether it rests on the host."""
    out = {"optimizer": (shapes(cfg).opt_state, cfg.optimizer.offload is True)}
    if cfg.critic is not None:
        out["critic's optimizer"] = (abstract_critic(cfg)[3], cfg.critic.optimizer.offload is True)
    return out
