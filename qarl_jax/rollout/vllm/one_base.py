# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Shares one copy of a frozen nvfp4 base between learner and vLLM: both read buffers that the trainer allocates.

    held = OneBase(graphdef, mesh)               # before the engine starts: it is started on `held.places`
    held.put({path: QTensor, ...}, first_layer)  # as the base is read; weights that the engine fuses come in one call
    held.finish(frozen)                          # `qweights` of the learner, over the same memory

JAX sees a buffer through DLPack, as a view. Programs do not copy views, and views must not be donated.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from qarl_bridge.client import one_base as buffers
from qarl_bridge.protocol import formats
from qarl_bridge.protocol import one_base as layout

from qarl_jax import models
from qarl_jax.models.params import part_of, path_keys, united
from qarl_jax.models.transformer import quantizable
from qarl_jax.quant import QTensor, quantize
from qarl_jax.quant.schemes import nvfp4, nvfp4_words
from qarl_jax.rollout import PolicyWeights


def shareable(graphdef: Any) -> dict[tuple[int, str], tuple[str, ...]]:
    """Finds weights that learner and engine can share: (stack, fused module) -> paths of its kernels, in order.

    These are nvfp4 weights in dense layers, with shapes that are multiples of the shared layout's blocks.
    """
    config = models.config_of(graphdef)
    names, kernels = models.hf_names(config), quantizable(models.abstract_model(config))
    found: dict[tuple[int, str], dict[str, str]] = {}
    for path in kernels:
        if path.startswith("stacks.") and names[path].ndim == 1 and config.scheme_of(path) == nvfp4.Config():
            module = formats.module_name(str(names[path][0]))
            fused = formats.live_module(f"{module}.weight")
            found.setdefault((int(path.split(".")[1]), fused), {})[module.rpartition(".")[2]] = path
    made = {}
    for (stack, fused), parts in found.items():
        wanted = formats.FUSED.get(fused.rpartition(".")[2], tuple(parts))
        shapes = [kernels[path].kernel.get_value().shape for path in parts.values()]
        whole = sum(n for _, n, _ in shapes) % layout.OUTPUTS == 0 and shapes[0][-1] % layout.INPUTS == 0
        if whole and set(wanted) == set(parts):
            made[stack, fused] = tuple(parts[part] for part in wanted)
    return made


def paths_of(graphdef: Any) -> frozenset[str]:
    """Lists the leaves of `shareable` weights: kernels, and biases of their modules."""
    there = models.hf_names(models.config_of(graphdef))
    kernels = [path for paths in shareable(graphdef).values() for path in paths]
    return frozenset([*kernels, *(bias for path in kernels if (bias := _bias(path)) in there)])


def _bias(kernel: str) -> str:
    return kernel.removesuffix("kernel") + "bias"


class _Buffer:
    """The buffer of a fused module of a stack: its place, and JAX's view of its arrays."""

    def __init__(self, modules: list[str], outputs: list[int], inputs: int, *, has_bias: bool, ordinal: int | None):
        self._arrays = layout.arrays(len(modules), outputs, inputs, has_bias=has_bias)
        size = layout.size(self._arrays)
        self._memory = buffers.HostMemory(size) if ordinal is None else buffers.GpuMemory(size, ordinal)
        self.place = layout.Place(
            modules=modules, outputs=outputs, inputs=inputs, has_bias=has_bias, memory=self._memory.place
        )

    def write(self, name: str, values: jax.Array, first: int = 0) -> None:
        """Copies values [layers, ...] to an array, from layer `first` on."""
        array = self._arrays[name]
        assert values.shape[1:] == array.shape[1:]
        assert values.dtype == array.dtype
        values = jax.block_until_ready(values)
        step = array.nbytes // array.shape[0]
        source = values.addressable_data(0).unsafe_buffer_pointer()
        self._memory.write(array.offset + first * step, source, values.shape[0] * step)

    def view(self, name: str, sharding: NamedSharding) -> jax.Array:
        """An array in place."""
        array = self._arrays[name]
        pointer, device = self._memory.pointer + array.offset, self._memory.dlpack
        own = jax.dlpack.from_dlpack(_Foreign(pointer, array.dtype, array.shape, device))
        if own.unsafe_buffer_pointer() != pointer:
            raise RuntimeError("JAX copied the base where it was to read it in place")
        return jax.make_array_from_single_device_arrays(array.shape, sharding, [own])


class OneBase:
    """Buffers of a run's frozen base for learner and engine; complete after `put` of all weights and `finish`.

    Args:
      graphdef: the model's static half; learner and engine must agree on the scheme.
      mesh: the learner's mesh, of one device.

    Attributes:
      paths: leaves that are never published, because the engine reads them here.

    Raises:
      BridgeError: the device has no room for them ("limits"), or their memory cannot be exported ("unshared").
    """

    def __init__(self, graphdef: Any, mesh: Mesh):
        self._config = models.config_of(graphdef)
        self._sharding = NamedSharding(mesh, PartitionSpec())
        names, kernels = models.hf_names(self._config), quantizable(models.abstract_model(self._config))
        device = mesh.devices.reshape(-1)[0]
        ordinal = None if device.platform == "cpu" else device.local_hardware_id
        self.paths = paths_of(graphdef)
        self._kernels = {path: linear.kernel for path, linear in kernels.items()}
        self._groups: dict[tuple[str, ...], _Buffer] = {}
        for paths in shareable(graphdef).values():
            shapes = [self._kernels[path].get_value().shape for path in paths]
            modules = [formats.live_module(str(name)) for name in names[paths[0]]]
            self._groups[paths] = _Buffer(
                modules,
                [n for _, n, _ in shapes],
                shapes[0][-1],
                has_bias=_bias(paths[0]) in self.paths,
                ordinal=ordinal,
            )

    @property
    def places(self) -> list[layout.Place]:
        """The buffers' descriptions (layout and memory handle) that an engine is started with."""
        return [buffer.place for buffer in self._groups.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layout.size(layout.arrays_of(place)) for place in self.places)

    def put(self, weights: Mapping[str, Any], first: int) -> None:
        """Writes some layers of weights into the buffers, quantizing masters.

        Args:
          weights: masters or nvfp4 QTensors [layers, N, K] by path in the whole model. Weights that the engine fuses
            must come in one call.
          first: index of their first layer in the stack.
        """
        for paths, buffer in self._groups.items():
            if paths[0] in weights:
                for name, values in _as_held([weights[path] for path in paths]).items():
                    buffer.write(name, values, first)

    def finish(self, frozen: nnx.State) -> nnx.State:
        """Writes the base's biases. Returns the whole base: `frozen` (all but the buffers' weights) with `entries`."""
        values = models.by_path(frozen)
        for paths, buffer in self._groups.items():
            if buffer.place.has_bias:
                bias = jnp.concatenate([values[_bias(path)] for path in paths], axis=-1)
                buffer.write("bias", bias.astype(jnp.bfloat16))
        return united(frozen, self.entries())

    def entries(self) -> nnx.State:
        """Returns the learner's QTensors as views of the buffers, without a copy."""
        found: dict[tuple[Any, ...], Any] = {}
        for paths, buffer in self._groups.items():
            codes, scales, divisors = (buffer.view(name, self._sharding) for name in ("words", "scales", "divisors"))
            for number, (path, scheme) in enumerate(_schemes(paths, buffer.place)):
                divisor = jax.device_put(divisors[:, number, None, None], self._sharding)
                arrays = {"codes": codes, "scales": scales, "divisor": divisor}
                found |= self._entry(path, QTensor(arrays, scheme))
        return nnx.from_flat_state(found)

    def abstract(self) -> nnx.State:
        """Returns the shapes and shardings of `entries`, without arrays."""
        found: dict[tuple[Any, ...], Any] = {}
        for paths, buffer in self._groups.items():
            arrays = layout.arrays_of(buffer.place)
            shapes = {"codes": arrays["words"], "scales": arrays["scales"]}
            for path, scheme in _schemes(paths, buffer.place):
                own = {key: self._like(array.shape, array.dtype) for key, array in shapes.items()}
                own["divisor"] = self._like((len(buffer.place.modules), 1, 1), np.dtype(np.float32))
                found |= self._entry(path, QTensor(own, scheme))
        return nnx.from_flat_state(found)

    def _like(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def _entry(self, path: str, qtensor: QTensor) -> dict[tuple[Any, ...], Any]:
        axes = self._kernels[path].get_metadata()["axes"]
        return {(*path_keys(path)[:-1], "quantized"): models.Quantized(qtensor, axes=axes)}


def moved_into(held: OneBase, weights: PolicyWeights) -> PolicyWeights:
    """Writes a policy's base into `held`; returns the policy with views of `held` in place of its copy."""
    made = models.by_path(weights.qweights)
    held.put({path: qtensor for path, qtensor in made.items() if path in held.paths}, 0)
    held.finish(weights.params)
    rest = part_of(weights.qweights, lambda path: path not in held.paths)
    return dataclasses.replace(weights, qweights=united(rest, held.entries()))


def _schemes(paths: Collection[str], place: layout.Place) -> list[tuple[str, nvfp4_words.Config]]:
    """The rows of each weight of a fused module."""
    ends = np.cumsum(place.outputs).tolist()
    rows = zip([0, *ends], ends, strict=False)
    return [(path, nvfp4_words.Config(first=first, end=end)) for path, (first, end) in zip(paths, rows, strict=True)]


@jax.jit
def _as_held(weights: list[Any]) -> dict[str, jax.Array]:
    """Masters or QTensors of nvfp4 [layers, N, K] that an engine fuses -> the arrays of a buffer."""
    masters = [weight for weight in weights if not isinstance(weight, QTensor)]
    made = [
        weight if isinstance(weight, QTensor) else quantize(weight, nvfp4.Config(), beside=masters)
        for weight in weights
    ]
    codes, scales = (jnp.concatenate([getattr(qt, name) for qt in made], axis=-2) for name in ("codes", "scales"))
    divisors = jnp.concatenate([qt.arrays["divisor"][..., 0] for qt in made], axis=-1)
    return {"words": nvfp4_words.words(codes), "scales": nvfp4_words.turned(scales), "divisors": divisors}


# ---- DLPack ----------------------------------------------------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CODES = {"i": 0, "u": 1, "f": 2}  # of DLPack, by numpy's kind
_NOTHING = ctypes.pythonapi.Py_IsInitialized  # what JAX calls when it lets go: C that needs no interpreter
_LENT: list[Any] = []  # what JAX was given points to these; a buffer lives as long as its process


class _Foreign:
    """Memory that JAX did not allocate, as an array (the DLPack protocol)."""

    def __init__(self, pointer: int, dtype: np.dtype, shape: tuple[int, ...], device: tuple[int, int]):
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        kind = _Type(_CODES[dtype.kind], 8 * dtype.itemsize, 1)
        tensor = _Tensor(pointer, _Device(*device), len(shape), kind, self._shape, None, 0)
        self._managed = _Managed(tensor, None, ctypes.cast(_NOTHING, ctypes.c_void_p))
        self._device = device
        _LENT.append(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self._managed), b"dltensor", None)
