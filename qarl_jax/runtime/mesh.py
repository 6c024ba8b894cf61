# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The device mesh, and rules that map logical axes of arrays to mesh axes.

Four mesh axes, all `Auto` (XLA's partitioner chooses shardings that are not given):

    data     batch rows; weights are replicated over it
    fsdp     batch rows too, and weights are stored sharded over it
    tensor   output features of every matrix, attention heads
    expert   experts of an MoE layer

Weights are stored [N, K] = [out, in] and sharded on N alone, experts by the expert. The forward pass never splits a
contraction over devices, so a mesh changes neither the order of a sum nor a quantization group (groups lie along K).
QTensors are bit-equal on every mesh. The price is an all-gather of activations in place of an all-reduce of equal size.

A weight declares its logical axes (`nnx.Param(..., axes=("layers", "heads", "embed"))`); `AXIS_RULES` maps them to mesh
axes. A dimension that its mesh axes do not divide is not sharded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from qarl_jax.types import UserError

MESH_AXES = ("data", "fsdp", "tensor", "expert")
BATCH_AXES = ("data", "fsdp")
_LAUNCHING = threading.RLock()


def _give_simulated_devices_threads() -> None:
    """Asks XLA for two threads per simulated CPU device, unless `PJRT_NPROC` is set.

    XLA has as many threads as devices or cores, for launching programs and for running them. A launch blocks its thread
    while 32 programs are in flight on its device. A device may then find no thread for its part of an earlier program,
    and the others wait for it in a collective forever. XLA reads the variable when it makes its devices.
    """
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if found and int(found[-1]) > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(2 * int(found[-1]), os.cpu_count() or 1)))


_give_simulated_devices_threads()


def launch_lock(devices: int) -> contextlib.AbstractContextManager[Any]:
    """Serializes launches of programs over several devices between threads; a program over one device needs no lock.

    Programs that communicate over the same devices must reach all devices in one order. JAX promises no order between
    threads. Of two programs launched at once, each could wait on one device for a program queued behind the other.
    """
    return _LAUNCHING if devices > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def launching(mesh: Mesh) -> Iterator[None]:
    """Holds the launch lock for a program over `mesh`, and makes `mesh` the ambient mesh."""
    with launch_lock(mesh.size), jax.set_mesh(mesh):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The section `mesh` of a run's config: devices per mesh axis. One axis may be -1: all remaining devices.

    Attributes:
      data: copies of the policy (data parallel), each with different rows.
      fsdp: devices that share rows and shard a copy's weights, which are gathered layer by layer.
      tensor: devices that share each layer's matrix products (tensor parallel).
      expert: devices that share the experts of an MoE model.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"{axis}={size}: a mesh axis has at least 1 device (or -1: all that are left).")
        if sum(size == -1 for size in sizes.values()) > 1:
            raise UserError("only one mesh axis may be -1 (all devices that are left).")

    @property
    def size(self) -> int:
        """Returns the number of devices; negative if an axis takes all remaining ones."""
        return math.prod(dataclasses.asdict(self).values())

    def over(self, devices: int) -> Config:
        """Returns the config with -1 replaced for this number of devices."""
        sizes = dataclasses.asdict(self)
        rest = max(1, devices // math.prod(size for size in sizes.values() if size != -1))
        return Config(**{axis: rest if size == -1 else size for axis, size in sizes.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisRules:
    """Maps logical axes to mesh axes for stored arrays (weights, optimizer state). () = replicated.

    Attributes:
      vocab: rows of the embedding and of the head.
      heads: output features of q; kv_heads: of k and v.
      mlp: output features of gate and up (experts included).
      embed_out: output features of o and down (the model width as N).
      expert: the experts of a layer; also over `fsdp` if it divides their number (`for_experts`).
      layers: the layers of a stack. embed, norm: contraction dims (K) and norm weights, always whole.
    """

    vocab: tuple[str, ...] = ("fsdp", "tensor")
    heads: tuple[str, ...] = ("fsdp", "tensor")
    kv_heads: tuple[str, ...] = ("fsdp", "tensor")
    mlp: tuple[str, ...] = ("fsdp", "tensor")
    embed_out: tuple[str, ...] = ("fsdp", "tensor")
    expert: tuple[str, ...] = ("expert",)
    layers: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()

    def for_experts(self, count: int, sizes: Mapping[str, int]) -> AxisRules:
        """Returns the rules for arrays of `count` experts on a mesh of these sizes. If the mesh divides them, experts
        are sharded over `fsdp` by the expert, not within each. The all-gather of a layer then moves whole experts;
        along a later dimension XLA would transpose, and hold twice, whole stacks of weights and gradients.
        """
        over = (*self.expert, *(axis for axis in self.mlp if axis == "fsdp"))
        if count % math.prod(sizes.get(axis, 1) for axis in over):
            return self
        inside = {name: tuple(a for a in getattr(self, name) if a not in over) for name in ("mlp", "embed_out")}
        return dataclasses.replace(self, expert=over, **inside)

    def spec(self, axes: Sequence[str | None], name: str = "array") -> PartitionSpec:
        """Converts the logical axes of one array to its PartitionSpec.

        Raises:
          UserError: an axis name is unknown, or two axes map to one mesh axis; the message names the parameter.
        """
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        owner: dict[str, str] = {}
        entries: list[tuple[str, ...] | None] = []
        for axis in axes:
            if axis is not None and axis not in known:
                raise UserError(f"{name}: unknown logical axis {axis!r}; known: {', '.join(known)}")
            mesh_axes = () if axis is None else known[axis]
            for mesh_axis in mesh_axes:
                if mesh_axis in owner:
                    raise UserError(
                        f"{name}: logical axes {owner[mesh_axis]!r} and {axis!r} both map to mesh axis {mesh_axis!r};"
                        " one array cannot be split over it twice. Change one of the two sharding rules."
                    )
                owner[mesh_axis] = str(axis)
            entries.append(mesh_axes or None)
        return PartitionSpec(*entries)


AXIS_RULES = AxisRules()


def is_hopper() -> bool:
    """Tells whether JAX's backend is a Hopper GPU (compute capability 9.0)."""
    return jax.default_backend() == "gpu" and getattr(jax.local_devices()[0], "compute_capability", "") == "9.0"


def on_one_device() -> bool:
    """Tells whether a kernel may be called in the program being traced, because each call runs on one device.

    It may if the current mesh (without a mesh, the process) has one device, or inside `jax.shard_map`. Elsewhere
    XLA's partitioner would have to shard the kernel, and cannot.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or set(mesh.axis_types) == {AxisType.Manual}


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes a mesh of the first data x fsdp x tensor x expert of `devices`. One axis may be -1: all the rest.

    Raises:
      UserError: a size is not positive, or more devices are asked for than there are.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"mesh: only one axis may be -1 (all remaining devices), not {' and '.join(free)}")
    if free:
        sizes = dataclasses.asdict(Config(**sizes).over(len(devices)))
    for axis, size in sizes.items():
        if size < 1:
            raise UserError(f"mesh.{axis} is {size}; it must be at least 1 (or -1 for all remaining devices)")
    count = math.prod(sizes.values())
    if count > len(devices):
        wanted = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise UserError(f"the mesh {wanted} needs {count} devices, but there are {len(devices)}")
    grid = np.array(devices[:count]).reshape(tuple(sizes.values()))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _divisible(spec: PartitionSpec, shape: Sequence[int], sizes: dict[str, int]) -> PartitionSpec:
    """`spec` without the entries whose mesh axes do not divide the dimension, or are not in the mesh."""
    entries: list[Any] = []
    for dim, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        names = tuple(name for name in names if sizes.get(name, 1) > 1)
        ways = math.prod(sizes[name] for name in names)
        entries.append((names if len(names) > 1 else names[0]) if names and dim % ways == 0 else None)
    return PartitionSpec(*entries)


def named_sharding(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    name: str = "array",
) -> NamedSharding:
    """Returns the NamedSharding of an array of `shape`; a dimension that its mesh axes do not divide stays whole.

    Raises:
      UserError: there are more or fewer `axes` than dimensions; the message begins with `name`.
    """
    if len(axes) != len(shape):
        raise UserError(f"{name}: {len(axes)} logical axes {tuple(axes)} for an array of shape {tuple(shape)}")
    rules = AXIS_RULES
    if "expert" in axes:
        rules = rules.for_experts(shape[list(axes).index("expert")], dict(mesh.shape))
    return NamedSharding(mesh, _divisible(rules.spec(axes, name), shape, dict(mesh.shape)))


def param_shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the sharding of every array in a tree of model variables, in the tree's structure.

    Args:
      tree: a model, an abstract model (`nnx.eval_shape`), an `nnx.State` (params or qweights), or any pytree around
        such states (an optimizer state). A variable's `axes` metadata decide its sharding; all arrays of a QTensor
        ([.., N, K], [.., N, K/8], [.., N, G]) are sharded like its master. Arrays outside any variable are replicated.

    Returns:
      The pytree (a State for a model) with a NamedSharding in place of every array.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    replicated = NamedSharding(mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return replicated
        axes = leaf.get_metadata().get("axes")
        name = jax.tree_util.keystr(path)

        def sharding(array: Any) -> NamedSharding:
            shape = np.shape(array)
            if axes is None or len(shape) != len(axes):  # e.g. a factored or scalar optimizer statistic
                return replicated
            return named_sharding(axes, shape, mesh, name=name)

        return jax.tree.map(sharding, leaf)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def batch_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Counts the parts that a mesh cuts batch rows into; 1 where there is no mesh, or an empty one."""
    return 1 if mesh is None or mesh.empty else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batch rows (the first dim of [B, ...]) over data and fsdp, whose product divides B."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def spec_in_use(shape: Sequence[int], *axes: str | None) -> PartitionSpec:
    """Returns the PartitionSpec, on the current mesh (`jax.set_mesh`), of an activation or of a weight about to be
    multiplied.

    Args:
      shape: of the array.
      axes: per dim "batch", a mesh axis name, or None (not sharded). A dimension that does not divide is not sharded.
    """
    spec = PartitionSpec(*(BATCH_AXES if axis == "batch" else axis for axis in axes))
    return _divisible(spec, shape, dict(jax.sharding.get_abstract_mesh().shape))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an array's sharding on the current mesh; without a mesh returns x. axes: as in `spec_in_use`."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec_in_use(x.shape, *axes))
