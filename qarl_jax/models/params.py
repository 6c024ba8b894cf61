# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that split a model into pytrees of masters and QTensors, and that make, merge and quantize these.

An optimizer updates `params`, the masters; the forward reads `qweights`, the QTensors; `quantize_params` makes
`qweights` from `params`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qarl_jax import quant
from qarl_jax.models.config import ModelConfig
from qarl_jax.models.families import ADAPTER, INDEX
from qarl_jax.models.layers import Quantized, folded, fresh_a
from qarl_jax.models.transformer import Transformer, quantizable, quantized
from qarl_jax.numerics.float32 import dtype_in, round_to
from qarl_jax.quant import Rules, splitting
from qarl_jax.runtime.mesh import launching, param_shardings
from qarl_jax.types import UserError


def split(model: Transformer) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Splits a model into graphdef (structure; hashable, static), params (masters) and qweights (empty under bf16)."""
    graphdef, *states = nnx.split(model, nnx.Param, Quantized)
    return graphdef, states[0], states[1]


def merge(graphdef: nnx.GraphDef, params: nnx.State, qweights: nnx.State) -> Transformer:
    """Makes a model of `split`'s parts. `qweights` must have the graphdef's scheme (`quantize_params`).

    `params` may lack masters that have a QTensor, because no forward reads them. Zeros take their place; jit removes
    these zeros.
    """
    there = {keys for keys, _ in nnx.to_flat_state(params)}
    dtype = config_of(graphdef).compute_dtype
    missing = [
        ((*keys[:-1], "kernel"), nnx.Param(jnp.zeros(held.get_value().shape, dtype), axes=held.get_metadata()["axes"]))
        for keys, held in nnx.to_flat_state(qweights)
        if (*keys[:-1], "kernel") not in there
    ]
    if missing:
        params = nnx.from_flat_state([*nnx.to_flat_state(params), *missing])
    return nnx.merge(graphdef, params, qweights)


def config_of(model: nnx.GraphDef | Transformer | ModelConfig) -> ModelConfig:
    """The ModelConfig of a model or of its graphdef."""
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, Transformer):
        return model.config
    for _, attribute in model.attributes:
        value = getattr(attribute, "value", None)
        if isinstance(value, ModelConfig):
            return value
    raise TypeError("this graphdef is not that of a qarl_jax model")


@functools.lru_cache(maxsize=128)
def abstract_model(config: ModelConfig) -> Transformer:
    """Makes the model of a config with `ShapeDtypeStruct`s for arrays. The result is cached: do not change it."""
    return nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), quant.blank))


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Makes a model with fresh weights: kernels normal with the config's `initializer_range`, norms one, biases zero.

    Weights are drawn on the host, so that a seed gives equal weights on every machine; `random_masters` draws on a
    mesh.
    """
    graphdef, abstract = split(abstract_model(config))[0], split(abstract_model(config.base))[1]
    params = {}
    for number, (keys, variable) in enumerate(nnx.to_flat_state(abstract)):
        like = variable.get_value()
        if keys[-1] == "kernel":
            draw = np.random.Generator(np.random.Philox(key=[seed, number])).standard_normal(like.shape, np.float32)
            value = (draw * np.float32(config.initializer_range)).astype(like.dtype)
        else:
            value = np.full(like.shape, 1 if keys[-1] == "weight" else 0, like.dtype)
        params[keys] = variable.replace(jnp.asarray(value))
    masters = nnx.from_flat_state(params)
    return finish(graphdef, masters if config.lora is None else united(masters, fresh_adapters(config, seed=seed)))


def fresh_adapters(config: ModelConfig, mesh: Mesh | None = None, seed: int = 0) -> nnx.State:
    """Draws the masters of fresh adapters on the devices of `mesh` (None: the default device): A uniform, B zero. A
    seed gives equal adapters on every mesh and for every base."""
    whole = split(abstract_model(config))[1]
    abstract = part_of(whole, lambda path: path.rpartition(".")[2] in ADAPTER)
    places = {} if mesh is None else by_path(part_of(param_shardings(whole, mesh), by_path(abstract).__contains__))
    made = {}
    for number, (keys, variable) in enumerate(nnx.to_flat_state(abstract)):
        like, place = variable.get_value(), places.get(".".join(map(str, keys)))
        draw = fresh_a if keys[-1] == "lora_a" else _zeros
        draw = jax.jit(draw, static_argnames=("shape", "dtype"), out_shardings=place)
        key = jax.random.fold_in(jax.random.key(seed), number)
        with contextlib.nullcontext() if mesh is None else launching(mesh):
            made[keys] = variable.replace(draw(key, shape=like.shape, dtype=like.dtype))
    return nnx.from_flat_state(made)


def _zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.zeros(shape, dtype)


def fold_adapters(graphdef: nnx.GraphDef, params: nnx.State) -> nnx.State:
    """Multiplies each adapter's B by its scale as an engine does (`layers.folded`); other leaves are unchanged."""
    config = config_of(graphdef)
    if config.lora is None:
        return params
    mine = lambda path: path.endswith(".lora_b")  # noqa: E731
    own = _folded(part_of(params, mine), scale=config.lora.scale, dtype=config.compute_dtype)
    return united(part_of(params, lambda path: not mine(path)), own)


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def _folded(state: nnx.State, *, scale: float, dtype: Any) -> nnx.State:
    return jax.tree.map(functools.partial(folded, scale=scale, dtype=dtype), state)


def merge_adapters(model: Transformer) -> Transformer:
    """Merges adapters into the kernels: W + B' A in float32, B' from `layers.folded`, rounded once to the kernels'
    dtype. The result has masters and no QTensors. A model without adapters is returned as it is."""
    config = model.config
    if config.lora is None:
        return model
    for linear in quantizable(model).values():
        if linear.lora_a is not None and linear.lora_b is not None:
            parts = (x.get_value() for x in (linear.kernel, linear.lora_a, linear.lora_b))
            linear.kernel.set_value(_merged(*parts, scale=config.lora.scale, dtype=config.compute_dtype))
    params = part_of(split(model)[1], lambda path: path.rpartition(".")[2] not in ADAPTER)
    base = dataclasses.replace(config.base, quant=Rules())
    return merge(split(abstract_model(base))[0], params, nnx.State({}))


def merge_splits(model: Transformer) -> Transformer:
    """Makes an ordinary model of one with duplicated inputs (`quant/splitting.py`): no QTensors, kernels in the
    masters' dtype. A kernel that has a QTensor becomes the dequantized weight."""
    config = dataclasses.replace(model.config, splitting=None, quant=Rules())
    for linear in quantizable(model).values():
        weight = linear.kernel.get_value()
        if linear.quantized is not None:
            weight = quant.dequantize(linear.quantized.get_value(), weight.dtype)
        if linear.index is not None:
            weight = jax.vmap(splitting.merged)(weight, linear.index.get_value()[:, 0])
        linear.kernel.set_value(weight)
    params = part_of(split(model)[1], lambda path: not is_fixed(path))
    return merge(split(abstract_model(config))[0], params, nnx.State({}))


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, *, scale: float, dtype: Any) -> jax.Array:
    def one(layer: tuple[jax.Array, ...]) -> jax.Array:
        weight, a, b = (x.astype(jnp.float32) for x in layer)
        return (weight + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)).astype(kernel.dtype)

    return jax.lax.map(one, (kernel, round_to(a, dtype), folded(b, scale, dtype)))


def random_masters(config: ModelConfig, mesh: Mesh, seed: int = 0) -> nnx.State:
    """Draws masters distributed like `random_model`'s on the devices, each device its shard and nothing on the host.
    A device needs room for its shard and one layer. A seed gives equal weights on every mesh."""
    return nnx.from_flat_state(list(random_leaves(config, mesh, seed=seed)))


def random_leaves(
    config: ModelConfig, mesh: Mesh, *, seed: int = 0, frozen: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[Any, nnx.Param]]:
    """Yields (keys, variable) of `random_masters`, one parameter at a time; `splits` of stacks do not change numbers.

    frozen: see `read_masters`.
    """
    config = config.base
    uncut = dataclasses.replace(config, splits=())
    abstract = split(abstract_model(config))[1]
    places = by_path(param_shardings(abstract, mesh))
    numbers = {keys: number for number, (keys, _) in enumerate(nnx.to_flat_state(split(abstract_model(uncut))[1]))}
    for keys, variable in nnx.to_flat_state(abstract):
        path, like = ".".join(map(str, keys)), variable.get_value()
        own, first = place_in(uncut, keys, config)
        place = places[path]
        if frozen(path):
            like = jax.ShapeDtypeStruct(like.shape, dtype_in(like, config.compute_dtype))
        deviation = config.initializer_range if keys[-1] == "kernel" else None
        value = 1.0 if keys[-1] == "weight" else 0.0
        draw = jax.jit(_drawn, static_argnames=("like", "place", "deviation", "value"), out_shardings=place)
        key = jax.random.fold_in(jax.random.key(seed), numbers[own])
        if own[0] == "stacks":
            key = jax.random.split(key, uncut.stacks[own[1]].length)[first : first + like.shape[0]]
        with launching(mesh):
            value_of = draw(key, like=like, place=place, deviation=deviation, value=value)
        yield keys, variable.replace(value_of)


def _drawn(key: jax.Array, *, like: Any, place: NamedSharding, deviation: float | None, value: float) -> jax.Array:
    """An array of normal numbers, or of one `value`. key: one per layer where layers are stacked."""
    if deviation is None:
        return jnp.full(like.shape, value, like.dtype)
    scale = deviation

    def normal(key: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        drawn = (jax.random.normal(key, shape, jnp.float32) * jnp.float32(scale)).astype(like.dtype)
        return jax.lax.with_sharding_constraint(drawn, NamedSharding(place.mesh, spec))

    if key.ndim == 0:
        return normal(key, like.shape, place.spec)
    return jax.lax.map(lambda one: normal(one, like.shape[1:], PartitionSpec(*place.spec[1:])), key)


def finish(graphdef: nnx.GraphDef, params: nnx.State) -> Transformer:
    """Makes a model of masters: quantizes them under the graphdef's rules and merges both."""
    if not config_of(graphdef).quant.rules:
        return merge(graphdef, params, nnx.State({}))
    return merge(graphdef, params, quantizer(graphdef)(params))


def parse_rules(scheme: Any, group_size: int | None = None) -> Rules:
    """Turns any way of naming a scheme into `Rules`.

    Args:
      scheme: a name ("bf16", "w8a8", "w4a16:g64"), a scheme Config, None (bf16), `Rules`, or a list of {match, scheme}
        mappings; patterns are searched in Hugging Face module names ("model.layers.3.mlp.up_proj").
      group_size: group size of schemes whose name has none.
    """
    if isinstance(scheme, Rules):
        return scheme
    if isinstance(scheme, (tuple, list)):
        return Rules.parse(scheme, group_size)
    parsed = quant.parse_scheme(scheme, group_size) if isinstance(scheme, str) else scheme
    return Rules() if parsed is None else Rules.uniform(parsed)


def rules_with_tables(scheme: str, tables: str) -> Any:
    """Returns rules, for `parse_rules`, that give embedding and head the scheme `tables` and other weights `scheme`; if
    `tables` is empty, `scheme` alone."""
    return [{"match": "embed|head", "scheme": tables}, {"match": "", "scheme": scheme}] if tables else scheme


def with_scheme(
    model: nnx.GraphDef | Transformer | ModelConfig, scheme: Any, group_size: int | None = None
) -> nnx.GraphDef:
    """Returns the model's graphdef under another scheme (see `parse_rules`); the model's params fit it.

    Raises:
      UserError: the scheme treats layers differently that this model stacks together.
    """
    config, rules = config_of(model), parse_rules(scheme, group_size)
    starts = tuple(stack.start for stack in config.stacks)
    other = dataclasses.replace(config, quant=rules, splits=starts)
    extra = [stack.start for stack in other.stacks if stack.start not in starts]
    if extra:
        raise UserError(
            f"this scheme treats layers {extra} unlike the layers before them, but the model stacks them together:"
            f" load it with splits={tuple(extra)}"
        )
    return split(abstract_model(other))[0]


def at_width(model: nnx.GraphDef | Transformer, bits: int) -> nnx.GraphDef:
    """Returns the model's graphdef at another bit width of its 8-bit grid (`quant.at_width`)."""
    return with_scheme(model, config_of(model).quant.at_width(bits))


def quantize_params(model: nnx.GraphDef | Transformer, params: nnx.State) -> nnx.State:
    """Quantizes the masters of every weight that the model's rules cover, once per optimizer update. It can be jitted.

    Args:
      model: graphdef (or model) whose config.quant holds the rules.
      params: the model's masters, or some of them.

    Returns:
      An nnx.State of Quantized variables, empty under bf16, that `merge` takes.

    Raises:
      UserError: a weight does not fit its scheme (K not a multiple of the group), or the master of a weight that shares
        its scale is missing; the message names the weight.
    """
    config = config_of(model)
    masters = dict(nnx.to_flat_state(params))
    paths = list(quantizable(abstract_model(config)))
    there = {path: keys for path in paths if (keys := path_keys(path)) in masters}
    made = quantized(config, {path: masters[keys].get_value() for path, keys in there.items()}, paths)
    out: dict[tuple[Any, ...], Any] = {}
    for path, qtensor in made.items():
        keys = there[path]
        out[(*keys[:-1], "quantized")] = Quantized(qtensor, axes=masters[keys].get_metadata()["axes"])
    return nnx.from_flat_state(out)


@functools.lru_cache(maxsize=32)
def quantizer(graphdef: nnx.GraphDef) -> Any:
    """Returns `quantize_params` of a graphdef under jit, cached, so that all callers share the compiled programs."""
    return jax.jit(functools.partial(quantize_params, graphdef))


def path_keys(path: str) -> tuple[str | int, ...]:
    """Splits a path into a State's keys: "stacks.0.attn.q.kernel" -> ("stacks", 0, "attn", "q", "kernel")."""
    return tuple(int(key) if key.isdigit() else key for key in path.split("."))


def place_in(whole: ModelConfig, keys: tuple[Any, ...], parts: ModelConfig) -> tuple[tuple[Any, ...], int]:
    """Finds an entry of `parts`, a config with more `splits` than `whole`, in `whole`: its keys there, and the layer of
    the stack at which it begins."""
    if keys[0] != "stacks":
        return keys, 0
    start = parts.stacks[keys[1]].start
    number = next(n for n, stack in enumerate(whole.stacks) if stack.start <= start < stack.start + stack.length)
    return ("stacks", number, *keys[2:]), start - whole.stacks[number].start


def path_of(keys: tuple[Any, ...], variable: Any) -> str:
    """Joins the keys of an entry of params or qweights to a path. A QTensor gets its master's path (".kernel")."""
    leaf = "kernel" if isinstance(variable, Quantized) else keys[-1]
    return ".".join(map(str, (*keys[:-1], leaf)))


def part_of(state: nnx.State, wanted: Callable[[str], bool]) -> nnx.State:
    """Returns the entries of a params or qweights State for whose path `wanted` returns true."""
    return nnx.from_flat_state([(keys, leaf) for keys, leaf in nnx.to_flat_state(state) if wanted(path_of(keys, leaf))])


def is_fixed(path: str) -> bool:
    """Tells whether a leaf can never learn: an index of duplicated inputs (`quant/splitting.py`)."""
    return path.endswith(f".{INDEX}")


def united(*states: nnx.State) -> nnx.State:
    """Joins several States with different entries into one."""
    return nnx.from_flat_state([leaf for state in states for leaf in nnx.to_flat_state(state)])


def by_path(state: nnx.State) -> dict[str, Any]:
    """Converts a params or qweights State to {path: array or QTensor}."""
    return {path_of(keys, variable): variable.get_value() for keys, variable in nnx.to_flat_state(state)}
