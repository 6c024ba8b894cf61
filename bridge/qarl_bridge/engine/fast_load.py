# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading whole modules at once, where vLLM's loader would take their tensors one by one.

vLLM's in-place reload buffers every call of every weight loader, runs each twice (once to count its elements) and looks
names up in Python: about 3 ms per module, which for Qwen3-8B is most of a publish. Here a module gets its parameters in
one piece, in checkpoint layout (q, k and v stacked as rows; all experts of a layer), and then goes vLLM's own way: its
`process_weights_after_loading` packs them for its kernel, and the results are copied into the live storage.

Nothing is assumed about a kernel's layout, and the shortcut is not trusted before it has proved itself on this very
engine: two modules of every kind get the first version from vLLM's loader, then all modules get it from this one, and
every live tensor of those two must come out the same to the last bit, and all of the model's in the same storage
(`prove`). If not, or if a module has a parameter that cannot be put together from what is published, vLLM's loader does
it all, and the engine's notes say why. The functional read-back of every layer follows every load either way.

Two of a kind and not all of them, because of MoE models: the tensors of a 30B-A3B are 55,000, and vLLM's
loader keeps each until its layer is complete, which a layer of int4 experts never is (there are parameters nobody
publishes), and from the second such layer on vLLM 0.25 adds up at every tensor what it keeps (if it is on a GPU; hence
the detour over the host): in three minutes it was not through a fifth of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from qarl_bridge.engine.readback import experts as readback_experts
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.formats import FUSED
from qarl_bridge.server import staged_gpu

# The parameters of vLLM's fused experts -> the projections they hold, as rows, of every expert.
_EXPERTS = {"w13_": ("gate_proj", "up_proj"), "w2_": ("down_proj",)}
_UNUSED = "g_idx"  # in names of parameters for activation reordering, which vLLM makes whether or not they are used


class Unsupported(Exception):  # noqa: N818 (a finding, not an error)
    """Why these modules cannot be loaded whole."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """One parameter: where its rows come from. `names`: published tensors, shard by shard; stacks: of experts."""

    parameter: str
    names: tuple[str, ...]
    is_stacked: bool


def stems(prefix: str) -> list[str]:
    """Under which names the linear layers that a live module fuses are published."""
    parent, _, leaf = prefix.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in FUSED.get(leaf, (leaf,))]


def _sources(prefix: str, parameters: Mapping[str, Any], published: Mapping[str, Any]) -> list[_Source]:
    """Lists the sources of a module's parameters; empty: nothing of it is published.

    Raises:
      Unsupported: a part is published and a part is not.
    """
    fused = stems(prefix)
    found: list[_Source] = []
    missing: list[str] = []
    for name in parameters:
        names = tuple(f"{stem}.{name}" for stem in fused)
        stacked = False
        for start, parts in _EXPERTS.items():
            if name.startswith(start):
                own = name.removeprefix(start)
                names = tuple(f"{readback_experts.prefix_of(prefix)}.*.{part}.{own}" for part in parts)
                stacked = True
        if all(one in published for one in names):
            found.append(_Source(name, names, stacked))
        elif _UNUSED not in name:
            missing.append(name)
    if found and missing:
        raise Unsupported(f"{prefix} has a parameter {missing[0]} that is not published")
    return found


def _assemble(source: _Source, like: Any, published: Mapping[str, Any], where: Any) -> Any:
    """A tensor of `like`'s shape and dtype, in memory of its own: packing may write to it."""
    names = source.names
    if source.parameter.endswith("weight_shape"):  # each shard's own: vLLM keeps the last
        names = names[-1:]
    parts, dim = [published[name] for name in names], int(source.is_stacked)
    if source.is_stacked and parts[0].ndim == 3 and getattr(like, "is_transposed", False):
        parts, dim = [part.transpose(1, 2) for part in parts], 2  # as some kernels' int4 experts are before packing
    shape, found = tuple(like.shape), list(parts[0].shape)
    if len(parts) > 1:
        found[dim] = sum(part.shape[dim] for part in parts)
    out = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=where)
    into = out
    if tuple(found) != shape:
        if len(found) != len(shape) or tuple(found[1:]) != shape[1:] or found[0] > shape[0]:
            raise Unsupported(f"{source.names[0]}: {tuple(found)} does not make {source.parameter} {shape}")
        into = out.zero_()[: found[0]]  # a vocabulary is padded
    places = into.split([part.shape[dim] for part in parts], dim) if len(parts) > 1 else [into]
    for place, part in zip(places, parts, strict=True):  # not joined first: what lies on the host is copied once
        if place.shape != part.shape:
            raise Unsupported(f"{source.names[0]} and {tuple(part.shape)} do not make {source.parameter} {shape}")
        place.copy_(part)
    return out


def _owner(name: str) -> str:
    """Names the owner of a published tensor: a linear layer, or all experts of a layer."""
    return readback_experts.prefix_of(name) or name.rpartition(".")[0]


def _owners(prefix: str) -> list[str]:
    """Likewise, what a live module is put together from."""
    experts = readback_experts.prefix_of(prefix)
    return [experts] if experts else stems(prefix)


def _load_module(module: Any, prefix: str, published: Mapping[str, Any]) -> None:
    """Between the beginning and the end of a reload of vLLM's."""
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(module)
    tensors = layerwise.get_layer_tensors(module)
    parameters = {name: t for name, t in tensors.items() if name in module._parameters}
    sources = _sources(prefix, parameters, published) if info.can_load() else []
    if not sources:
        return
    for source in sources:
        meta = parameters[source.parameter]
        value = _assemble(source, meta, published, info.restore_device)
        if meta.is_meta:
            value.__class__ = meta.__class__
            value.__dict__ = meta.__dict__.copy()
            setattr(module, source.parameter, value)
        else:  # kept alive through a reload (a bias)
            meta.data.copy_(value)
    # Buffers, and processing, and the copy into the live storage, as after vLLM's own loaders.
    layerwise._layerwise_process(module, info)


class WholeModules:
    """Loads a version into a live model module by module, faster than vLLM's own loader (see the file's docstring).

    Args:
      model: vLLM's live model.
      model_config: vLLM's config of it.
    """

    def __init__(self, model: Any, model_config: Any):
        self._model = model
        self._model_config = model_config
        self._names = {module: name for name, module in model.named_modules()}

    def load(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Replace all weights in place.

        Args:
          parts: torch tensors by Hugging Face name, on the host or on the model's device, whole modules together; not
            kept, not changed.

        Raises:
          Unsupported: some module cannot be loaded whole. The model then needs a load by vLLM's own loader.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        with torch.no_grad():
            layerwise.initialize_layerwise_reload(self._model)
            for published in parts:
                owners = {_owner(name) for name in published}
                for module, prefix in self._names.items():
                    if not owners.isdisjoint(_owners(prefix)):
                        _load_module(module, prefix, published)
            layerwise.finalize_layerwise_reload(self._model, self._model_config)

    def sample(self, published: Mapping[str, messages.Expected]) -> dict[str, list[str]]:
        """The first and the last module of every kind: live name -> names of the tensors published for it.

        Of one kind are modules of one class, with the same classes computing, and tensors of the same shapes.
        """
        owned: dict[str, list[str]] = {}
        for name in published:
            owned.setdefault(_owner(name), []).append(name)
        kinds: dict[Any, list[tuple[str, list[str]]]] = {}
        for module, prefix in self._names.items():
            names = [name for stem in _owners(prefix) for name in owned.get(stem, ())]
            if not names or not module._parameters:
                continue
            method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
            computing = tuple(type(part) for part in (module, method, scheme, getattr(scheme, "kernel", None)))
            tensors = frozenset(
                (*name.split(".")[-2:], tuple(published[name].shape), published[name].dtype) for name in names
            )
            kinds.setdefault((computing, len(names), tensors), []).append((prefix, names))
        return dict(found for same in kinds.values() for found in (same[0], same[-1]))

    def state(self, modules: Collection[str]) -> dict[str, tuple[int, bytes]]:
        """Every live tensor that is used: its place in memory, and of `modules` a fingerprint of its values."""
        out = {}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if _UNUSED in name:
                continue
            value = _fingerprint(tensor.detach()) if name.rpartition(".")[0] in modules else b""
            out[name] = (tensor.data_ptr(), value)
        return out


def _fingerprint(tensor: Any) -> bytes:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    padded = torch.zeros(staged_gpu.whole_rows(len(raw)), dtype=torch.uint8, device=raw.device)
    padded[: len(raw)] = raw
    return fingerprint.digest_of_sums(staged_gpu.on_the_host(staged_gpu.row_sums(padded)))


def prove(loader: WholeModules, parts: Iterable[Mapping[str, Any]], modules: Collection[str]) -> str:
    """Load a version whole, of which vLLM's own loader has loaded `modules`; "" if they did not change, else what did.

    After a failure the model must be loaded again by vLLM's own loader.
    """
    before = loader.state(modules)
    try:
        loader.load(parts)
    except Unsupported as reason:
        return str(reason)
    except Exception as reason:  # a version of vLLM nobody tried: its own loader is still there
        return f"{type(reason).__name__}: {reason}"
    after = loader.state(modules)
    for name, (place, value) in before.items():
        if name not in after or after[name][1] != value:
            return f"{name} came out otherwise than from vLLM's loader"
        if after[name][0] != place:
            return f"{name} changed its place in memory"
    return ""
