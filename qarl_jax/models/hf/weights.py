# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face folders, tensor by tensor; each model family has a table of tensor names.

Loading fills every shard of every stacked parameter straight from the memory-mapped files: the host never holds more
than one parameter. Writing goes layer by layer (`export_tensors`); a publish through the bridge uses it too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from qarl_bridge.protocol import formats

from qarl_jax.models.config import ModelConfig, read_config
from qarl_jax.models.families import ADAPTER, MODELS, hf_template
from qarl_jax.models.hf import released, safetensors
from qarl_jax.models.hf.safetensors import INDEX, MAX_SHARD_BYTES, SINGLE
from qarl_jax.models.layers import Quantized
from qarl_jax.models.params import abstract_model, by_path, finish, parse_rules, split
from qarl_jax.models.transformer import Transformer, quantizable
from qarl_jax.numerics.float32 import dtype_in
from qarl_jax.quant import QTensor, Scheme, dequantize, resolve
from qarl_jax.runtime import processes, progress
from qarl_jax.runtime.mesh import param_shardings
from qarl_jax.types import UserError, check_model_folder

_FLOATS = {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)}
_OWN = ("dtype", "quantization_config", formats.SPLITTING)  # of config.json, written from the model
_PIECE_BYTES = 64 << 20  # of a cast that goes to the host


def hf_names(config: ModelConfig) -> dict[str, np.ndarray]:
    """Maps every parameter's path to an object array of its tensors' Hugging Face names, in model order.

    The array has the shape of the parameter's stack dims: () for the embedding, [L] for a layer's weight, [L, E] for
    an expert's. `params[path][index]` is the tensor `hf_names(config)[path][index]`.
    """
    return dict(_names(config))


@functools.lru_cache(maxsize=32)
def module_names(config: ModelConfig) -> tuple[str, ...]:
    """Lists the Hugging Face names of the modules that `quant.rules` may name: linear maps, embedding and head."""
    names = hf_names(config)
    linear = (str(name) for path in quantizable(abstract_model(config)) for name in names[path].reshape(-1))
    return (*formats.TABLES, *(name.removesuffix(".weight") for name in linear))


@functools.lru_cache(maxsize=32)
def _names(config: ModelConfig) -> dict[str, np.ndarray]:
    out = {}
    for path in by_path(split(abstract_model(config))[1]):
        if not path.startswith("stacks."):
            out[path] = np.array(hf_template(path, config.architecture), dtype=object)
            continue
        _, number, own = path.split(".", 2)
        template, stack = hf_template(own, config.architecture), config.stacks[int(number)]
        layers = range(stack.start, stack.start + stack.length)
        if "{expert}" in template:
            assert config.moe is not None
            experts = range(config.moe.num_experts)
            names: list[Any] = [[template.format(layer=layer, expert=expert) for expert in experts] for layer in layers]
        else:
            names = [template.format(layer=layer) for layer in layers]
        out[path] = np.array(names, dtype=object)
    return out


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of a stacked parameter that one layer owns, or a parameter outside of the layers.

    Attributes:
      path: path of the parameter.
      index: the layer's index in its stack; None: the parameter is not stacked.
      names: Hugging Face names of its tensors: one, or one per expert.
      experts: whether `names` has a name per expert.
    """

    path: str
    index: int | None
    names: tuple[str, ...]
    experts: bool = False


def checkpoint_order(config: ModelConfig) -> Iterator[list[Place]]:
    """Yields all parameters, a list per layer, in the order of files and of publishing: embedding, layers, final norm,
    head (if not tied), and adapters, layer by layer."""
    names = hf_names(config)

    def top(path: str) -> Iterator[list[Place]]:
        if path in names:
            yield [Place(path, None, (str(names[path]),))]

    def layers(adapters: bool) -> Iterator[list[Place]]:
        for number, stack in enumerate(config.stacks):
            here = [path for path in names if path.startswith(f"stacks.{number}.")]
            members = {path: names[path] for path in here if (path.rpartition(".")[2] in ADAPTER) == adapters}
            for layer in range(stack.length if members else 0):
                yield [
                    Place(path, layer, tuple(np.atleast_1d(own[layer]).tolist()), own.ndim > 1)
                    for path, own in members.items()
                ]

    yield from top("embed.kernel")
    yield from layers(adapters=False)
    yield from top("norm.weight")
    yield from top("head.kernel")
    yield from layers(adapters=True)


class Checkpoint:
    """The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json lists.

    Raises:
      UserError: weights or a shard are missing or damaged, a tensor is in two files, or the index disagrees with them.
    """

    def __init__(self, folder: str | pathlib.Path, config: ModelConfig):
        check_model_folder(folder)
        self.released = released_schemes(config)
        self.folder = pathlib.Path(folder)
        index = self.folder / INDEX
        if index.is_file():
            try:
                weight_map = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index}: not a safetensors index ({error!r})") from error
        elif (self.folder / SINGLE).is_file():
            weight_map = None
        else:
            raise UserError(f"{self.folder}: no weights there ({SINGLE} or {INDEX}); other formats are not read")
        self._file_of: dict[str, safetensors.SafetensorsFile] = {}
        for name in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            file = safetensors.SafetensorsFile(self.folder / name)
            for tensor in file.entries:
                if tensor in self._file_of:
                    raise UserError(f"tensor {tensor!r} is in two files, {self._file_of[tensor].path} and {file.path}")
                self._file_of[tensor] = file
        for tensor, name in (weight_map or {}).items():
            if tensor not in self._file_of:
                raise UserError(f"{index} lists tensor {tensor!r} in {name}, but it is not there")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a float tensor as a view of its file; a quantized layer's weight is dequantized. Raises UserError if
        the tensor has another shape than `shape` or is no float tensor."""
        if name in self.released:
            return np.asarray(dequantize(self.codes(name, shape), jnp.float32))
        file = self._file_of[name]
        dtype, found, _ = file.entries[name]
        if found != shape:
            raise UserError(f"{file.path}: tensor {name!r} has shape {found}, but config.json asks for {shape}")
        if dtype not in _FLOATS and not name.endswith(formats.INDEX):
            raise UserError(
                f"{file.path}: tensor {name!r} is {dtype}; masters are read from bfloat16, float16 or float32"
            )
        return file.tensor(name)

    def codes(self, name: str, shape: tuple[int, ...], scheme: Scheme | None = None) -> QTensor:
        """Returns the QTensor of a quantized layer's weight [N, K], as views of the files, under `scheme` (None: the
        folder's). Raises UserError if the tensors do not fit it."""
        n, k = shape
        scheme = scheme or self.released[name]
        file = lambda tensor: self._file_of[tensor].tensor(tensor) if tensor in self._file_of else None  # noqa: E731
        try:
            return released.read(file, formats.module_name(name), (n, k), scheme)
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None


def check_names(config: ModelConfig, found: set[str], where: str) -> None:
    """Checks that `found` has every tensor that the config needs, and no other.

    Raises:
      UserError: tensors are missing or unexpected; the message names the first ones.
    """
    schemes = released_schemes(config)
    plain = {str(name) for names in hf_names(config).values() for name in names.reshape(-1)} - set(schemes)
    wanted = plain.union(*(scheme.wire.names(name).values() for name, scheme in schemes.items()))
    # A tied head may be written out (it equals the embedding); old exports also carry RoPE's constant frequencies.
    allowed = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(wanted - found)
    extra = sorted(name for name in found - wanted - allowed if not name.endswith("rotary_emb.inv_freq"))

    def listed(names: list[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    if missing:
        raise UserError(f"{where}: {len(missing)} tensor(s) missing that config.json asks for: {listed(missing)}")
    if extra:
        raise UserError(f"{where}: {len(extra)} tensor(s) that config.json leaves no place for: {listed(extra)}")


def check_head(checkpoint: Checkpoint, config: ModelConfig, where: str) -> None:
    """Checks that a tied head, where a folder has one, is the embedding.

    Raises:
      UserError: the head has other values.
    """
    tied = json.loads(config.hf_config).get("tie_word_embeddings")  # a critic's config has no head whatever this says
    if not tied or "lm_head.weight" not in checkpoint:
        return
    embedding = str(hf_names(config)["embed.kernel"])
    shape = config.vocab_size, config.hidden_size
    head, table = (checkpoint.tensor(name, shape) for name in ("lm_head.weight", embedding))
    if not np.array_equal(head, table):
        raise UserError(
            f"{where}: config.json has tie_word_embeddings, and lm_head.weight differs from {embedding}: set"
            " tie_word_embeddings to false there, or remove lm_head.weight."
        )


def check_weights(folder: str | pathlib.Path, config: ModelConfig) -> None:
    """Checks names, shapes and dtypes of a folder's tensors against `config`; of the tensors it reads only scales.

    Raises:
      UserError: as `load_masters`, except for weights that are not finite.
    """
    checkpoint = Checkpoint(folder, config)
    check_names(config, set(checkpoint), str(folder))
    check_head(checkpoint, config, str(folder))
    names = hf_names(config)
    for path, like in by_path(split(abstract_model(config))[1]).items():
        for name in names[path].reshape(-1):
            read = checkpoint.codes if name in checkpoint.released else checkpoint.tensor
            read(str(name), like.shape[names[path].ndim :])


def load_hf(
    path: str | pathlib.Path,
    dtype: Any = "float32",
    scheme: Any = "bf16",
    mesh: Mesh | None = None,
    param_dtype: Any = None,
    engine: str = "plain",
    attention: str = "auto",
    splits: tuple[int, ...] = (),
    shards: int = 1,
) -> Transformer:
    """Loads a Hugging Face folder (config.json and safetensors, bf16, f16 or f32) straight into its sharding.

    Args:
      path: the folder.
      dtype: compute dtype, "float32" or "bfloat16".
      scheme: quantization of the linear layers: a name ("bf16", "w8a8", "w4a16:g64") or rules (`parse_rules`).
      mesh: the devices over which the weights are sharded (`mesh.make_mesh`); None: the default device.
      param_dtype: dtype of the masters; None: `dtype`.
      engine: the engine whose arithmetic the forward mirrors: "plain", "cpu", "cuda" or "auto" (`quant.resolve`).
      attention: one of `config.ATTENTION`. splits: extra stack boundaries.
      shards: tensor-parallel shards of the mirrored engine (`Numerics.shards`).

    Raises:
      UserError: something is wrong with the folder; the message names the file, key or tensor.
    """
    config = read_config(
        path,
        compute_dtype=dtype,
        param_dtype=dtype if param_dtype is None else param_dtype,
        quant=parse_rules(scheme),
        numerics=dataclasses.replace(resolve(engine), shards=shards),
        attention=attention,
        splits=splits,
    )
    return finish(*load_masters(path, config, mesh))


def load_masters(path: str | pathlib.Path, config: ModelConfig, mesh: Mesh | None = None) -> tuple[Any, nnx.State]:
    """Loads (graphdef, masters) of a folder whose config.json was read; it makes no QTensors and no adapters.

    Raises:
      UserError: as `load_hf`.
    """
    masters = nnx.from_flat_state(list(read_masters(path, config, mesh)))
    return split(abstract_model(config))[0], masters


def read_masters(
    path: str | pathlib.Path,
    config: ModelConfig,
    mesh: Mesh | None = None,
    frozen: Callable[[str], bool] = lambda path: False,
) -> Iterator[tuple[Any, nnx.Variable]]:
    """Yields (keys, variable) of `load_masters`, one parameter at a time, so that the host holds only one.

    Args:
      path: the model folder. mesh: devices to load onto; None: the default device.
      frozen: tells from a leaf's path whether it is frozen. Frozen leaves have the compute dtype, others the config's
        `param_dtype`. For a frozen weight that the folder holds quantized, its QTensor is yielded instead of a master.

    Raises:
      UserError: as `load_hf`, or a frozen weight was released under another scheme than the config's.
    """
    config = config.base
    check_released(config, frozen)
    checkpoint = Checkpoint(path, config)
    check_names(config, set(checkpoint), str(path))
    check_head(checkpoint, config, str(path))
    abstract = split(abstract_model(config))[1]
    shardings = None if mesh is None else by_path(param_shardings(abstract, mesh))
    default = SingleDeviceSharding(jax.devices()[0])
    names = hf_names(config)
    flat = nnx.to_flat_state(abstract)
    if any(str(names[own].flat[0]) in checkpoint.released and not frozen(own) for own in by_path(abstract)):
        warnings.warn(
            f"{path} was released quantized: its masters are what codes and scales stand for, and quantizing these"
            " again may give other codes and scales.",
            stacklevel=2,
        )
    with progress.task("reading weights", len(flat), "parameters") as task:
        for keys, variable in task.count(flat):
            name, like = ".".join(map(str, keys)), variable.get_value()
            sharding = default if shardings is None else shardings[name]
            if frozen(name):
                like = jax.ShapeDtypeStruct(like.shape, dtype_in(like, config.compute_dtype))
                if str(names[name].flat[0]) in checkpoint.released:  # and so all of the stack, as was checked
                    scheme = config.scheme_of(name)
                    assert scheme is not None
                    held = _read_codes(checkpoint, names[name], like, scheme, variable, mesh)
                    yield (*keys[:-1], "quantized"), held
                    continue
            yield keys, variable.replace(read_parameter(checkpoint, names[name], like, sharding))


@functools.lru_cache(maxsize=32)
def released_schemes(config: ModelConfig) -> dict[str, Scheme]:
    """Maps the Hugging Face names of weights that the config's folder holds quantized to their schemes."""
    if not config.released.rules:
        return {}
    paths = quantizable(abstract_model(config), config.released)
    names = [str(name) for path in paths for name in hf_names(config)[path].reshape(-1)]
    found = {name: config.released.scheme_for(formats.module_name(name)) for name in names}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def check_released(config: ModelConfig, frozen: Callable[[str], bool]) -> None:
    """Checks that frozen weights of a quantized folder have the config's schemes; it reads config.json alone.

    Raises:
      UserError: a weight for whose path `frozen` is true was released under another scheme than the config's.
    """
    schemes = released_schemes(config)
    for path in quantizable(abstract_model(config)) if schemes else ():
        for name in map(str, hf_names(config)[path].reshape(-1)) if frozen(path) else ():
            released.check_fits(formats.module_name(name), schemes.get(name), config.scheme_of(path))


def _read_codes(
    checkpoint: Checkpoint, names: np.ndarray, like: Any, scheme: Scheme, master: nnx.Variable, mesh: Mesh | None
) -> Quantized:
    """Reads the QTensor of one stacked weight from a folder's codes and scales, sharded as its master would be."""
    lead = names.shape
    n, k = like.shape[len(lead) :]
    qtensors = {index: checkpoint.codes(str(names[index]), (n, k), scheme) for index in np.ndindex(*lead)}
    axes = master.get_metadata()["axes"]
    shapes = {a.name: jax.ShapeDtypeStruct((*lead, *a.shape(n, k)), a.dtype) for a in scheme.wire.arrays}
    abstract = nnx.State({"weight": Quantized(QTensor(shapes, scheme), axes=axes)})
    default = SingleDeviceSharding(jax.devices()[0])
    places = None if mesh is None else param_shardings(abstract, mesh)["weight"].get_value().arrays

    def array(name: str) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            stack, inner = index[: len(lead)], index[len(lead) :]
            inside = np.arange(int(np.prod(lead))).reshape(lead)[stack]
            parts = [qtensors[np.unravel_index(i, lead)].arrays[name][inner] for i in inside.reshape(-1)]
            return np.stack(parts).reshape(*inside.shape, *parts[0].shape)

        return jax.make_array_from_callback(shapes[name].shape, default if places is None else places[name], shard)

    return Quantized(QTensor({name: array(name) for name in shapes}, scheme), axes=axes)


def read_parameter(checkpoint: Checkpoint, names: np.ndarray, like: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    """Reads one (stacked) parameter from its tensors, one device's shard after another.

    Args:
      names: names of its tensors, in the shape of the stack dims. like: shape and dtype of the parameter.
      sharding: sharding of the result; None: the default device.

    Raises:
      UserError: a tensor is missing, has another shape, or holds numbers that are not finite.
    """
    lead = names.ndim

    def shard(index: Any) -> np.ndarray:
        stack, inner = index[:lead], index[lead:]
        ranges = [range(*part.indices(size)) for part, size in zip(stack, names.shape, strict=True)]
        shape = [len(range(*part.indices(size))) for part, size in zip(index, like.shape, strict=True)]
        out = np.empty(shape, like.dtype)
        for place in np.ndindex(*shape[:lead]):
            name = str(names[tuple(r[p] for r, p in zip(ranges, place, strict=True))])
            out[place] = _cast(checkpoint.tensor(name, like.shape[lead:])[inner], like.dtype)
            if not _is_finite(out[place]):
                raise UserError(
                    f"{checkpoint.folder}: the weights of {name} are not all finite (NaN or infinite numbers); get the"
                    " model again, or an earlier checkpoint of it."
                )
        return out

    return jax.make_array_from_callback(like.shape, sharding, shard)


def _is_finite(x: np.ndarray) -> bool:
    """Tells whether no number is NaN or infinite."""
    if x.dtype == ml_dtypes.bfloat16:
        return not ((np.ascontiguousarray(x).view(np.uint16) & 0x7F80) == 0x7F80).any()
    with np.errstate(all="ignore"):  # one number tells of them all, and fast; that it overflows is possible
        return bool(np.isfinite(x.sum(dtype=np.float32))) or bool(np.isfinite(x).all())


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if x.dtype == ml_dtypes.bfloat16 and dtype == np.float32:  # exact, and many times faster than ml_dtypes' own cast
        return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _layer_of(stacks: dict[str, Any], layer: jax.Array, dtype: Any) -> dict[str, Any]:
    def one(stack: Any) -> Any:
        sliced = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stack)
        return sliced if isinstance(stack, QTensor) else sliced.astype(dtype_in(sliced, dtype))

    return {path: one(stack) for path, stack in stacks.items()}


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def _rows_of(table: jax.Array, start: jax.Array, count: int, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(table, start, count).astype(dtype)


def _on_host(table: jax.Array, dtype: np.dtype) -> np.ndarray:
    """Fetches an embedding, head or norm in `dtype` by pieces, so that the device holds no cast copy of all of it."""
    rows = max(1, min(table.shape[0], _PIECE_BYTES // max(1, table.nbytes // table.shape[0])))
    if table.dtype == dtype or rows == table.shape[0] or not table.is_fully_addressable:
        return np.asarray(processes.fetch(table.astype(dtype)))
    out = np.empty(table.shape, dtype)
    for start in range(0, table.shape[0], rows):
        start = min(start, table.shape[0] - rows)  # the last piece repeats rows of the one before
        out[start : start + rows] = _rows_of(table, jnp.int32(start), rows, dtype)
    return out


def export_tensors(
    params: nnx.State,
    qweights: nnx.State,
    config: ModelConfig,
    dtype: Any = "bfloat16",
    *,
    stacked: bool = False,
    paths: Collection[str] | None = None,
) -> Iterator[tuple[str, np.ndarray | QTensor]]:
    """Yields (Hugging Face name, tensor), layer by layer: embedding, layers in order, final norm, head (if not tied).

    Args:
      params: masters. qweights: their QTensors, or an empty State.
      dtype: the dtype to which masters are cast.
      stacked: whether the experts of a layer are yielded as one tensor [E, ...], under the name of the first.
      paths: paths of the wanted parameters; None: all.

    Yields:
      For a weight with a QTensor, its name ("...q_proj.weight") and a QTensor of numpy arrays ([N, K] logically); for
      everything else a numpy array.
    """
    dtype = jnp.dtype(dtype)
    tensors: dict[str, Any] = by_path(params) | by_path(qweights)

    def sent(places: list[Place]) -> dict[str, Any] | None:
        """Starts to copy a layer to the host, so that the caller can use the layer before it meanwhile."""
        layer = places[0].index if places else None
        if layer is None:
            return None
        found = _layer_of({place.path: tensors[place.path] for place in places}, jnp.int32(layer), dtype)
        for leaf in jax.tree.leaves(found):
            if leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        return found

    every = checkpoint_order(config)
    wanted = ([place for place in places if paths is None or place.path in paths] for places in every)
    order = [places for places in wanted if places]
    under_way = sent(order[0]) if order else None
    for places, following in zip(order, [*order[1:], []], strict=True):
        arriving, under_way = under_way, sent(following)
        host = processes.fetch(arriving)
        for place in places:
            if host is None and isinstance(tensors[place.path], QTensor):
                yield place.names[0], jax.tree.map(np.asarray, processes.fetch(tensors[place.path]))
            elif host is None:
                yield place.names[0], _on_host(tensors[place.path], dtype)
            elif stacked or not place.experts:
                yield place.names[0], host[place.path]
            else:
                for expert, name in enumerate(place.names):
                    yield name, jax.tree.map(lambda x, expert=expert: x[expert], host[place.path])


def hf_config_json(config: ModelConfig, dtype: Any = "bfloat16") -> dict[str, Any]:
    """Makes the config.json of a model: the one that was read, or, for a model made here, one from its fields."""
    values = json.loads(config.hf_config)
    if not values:
        values = {
            "architectures": [config.architecture],
            "model_type": MODELS[config.architecture].MODEL_TYPE,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rope_theta": config.rope_theta,
            "rms_norm_eps": config.rms_norm_eps,
            "max_position_embeddings": config.max_position_embeddings,
            "initializer_range": config.initializer_range,
            "tie_word_embeddings": config.tie_embeddings,
            "use_sliding_window": False,
        }
        if config.rope_scaling is not None:
            values["rope_scaling"] = {"rope_type": "llama3"} | dataclasses.asdict(config.rope_scaling)
        if config.architecture != "Qwen2ForCausalLM":
            values["attention_bias"] = config.qkv_bias
        if config.moe is not None:
            values |= {
                "num_experts": config.moe.num_experts,
                "num_experts_per_tok": config.moe.num_experts_per_tok,
                "moe_intermediate_size": config.moe.intermediate_size,
                "norm_topk_prob": config.moe.norm_topk_prob,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in config.moe_layers],
            }
    values = {key: value for key, value in values.items() if key not in _OWN}
    if config.splitting is not None:
        values[formats.SPLITTING] = dataclasses.asdict(config.splitting)
    return values | {"torch_dtype": str(jnp.dtype(dtype))}


def save_hf(
    model: Transformer,
    path: str | pathlib.Path,
    dtype: Any = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the masters as a Hugging Face folder that transformers and vLLM can load.

    Args:
      model: the model; its QTensors are not written.
      path: the folder, made if needed. A safetensors file is renamed into place when complete; config.json is last.
      dtype: dtype of the tensors.
      max_shard_bytes: a new file begins when one would grow beyond this.
    """
    dtype = jnp.dtype(dtype)
    tensors: Any = export_tensors(split(model)[1], nnx.State({}), model.config, dtype)  # without QTensors, arrays alone
    write_hf(path, model.config, tensors, dtype, max_shard_bytes)


def tensor_shapes(config: ModelConfig, dtype: np.dtype) -> safetensors.Shapes:
    """Computes dtype and shape of every tensor of a written folder, by Hugging Face name, in `checkpoint_order`."""
    masters = by_path(split(abstract_model(config))[1])
    shape_of = {
        str(name): (np.dtype(dtype_in(masters[own], dtype)), masters[own].shape[names.ndim :])
        for own, names in hf_names(config).items()
        for name in names.reshape(-1)
    }
    return {name: shape_of[name] for places in checkpoint_order(config) for place in places for name in place.names}


def write_hf(
    path: str | pathlib.Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: Any = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes (name, tensor) pairs, given in `checkpoint_order`, as a Hugging Face folder; arguments as in `save_hf`."""
    folder, dtype = pathlib.Path(path), jnp.dtype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    # Two passes over the same order: shapes first (a header needs them all), bytes second.
    safetensors.write_sharded(folder, tensor_shapes(config, dtype), tensors, max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(hf_config_json(config, dtype), indent=2) + "\n")
