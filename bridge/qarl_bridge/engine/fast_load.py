# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads weights into a live vLLM model module by module, faster than vLLM's loader, which takes tensors one by one.

vLLM's in-place reload buffers every call of every weight loader, runs each twice (once to count its elements) and looks
names up in Python: about 3 ms per module, which for Qwen3-8B is most of a publish. Here a module gets its parameters
whole, in checkpoint layout (q, k and v stacked as rows; all experts of a layer). vLLM's
`process_weights_after_loading` then packs them for its kernel, and the results are copied into the live storage.

The loader assumes nothing about a kernel's layout, and tests itself on each engine (`prove`). vLLM's loader loads two
modules of every kind, then this loader loads all modules. Every live tensor of the two must stay equal to the bit, and
every tensor of the model must keep its storage. Otherwise, or if a parameter cannot be built from published tensors,
vLLM's loader loads every version, and the engine's notes say why. Each load is followed by a functional read-back.

The test takes two modules of a kind because all would be too slow for MoE models. A 30B-A3B has 55,000 tensors. vLLM's
loader keeps each tensor until its layer is complete, which a layer of int4 experts never is: it has unpublished
parameters. From the second such layer on, vLLM 0.25 sums up the kept GPU tensors at every new tensor. So tensors come
from the host here. In three minutes vLLM's loader had not loaded a fifth of the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from qarl_bridge.engine.readback import experts as readback_experts
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.formats import stems
from qarl_bridge.server import staged_gpu

# The parameters of vLLM's fused experts -> the projections they hold, as rows, of every expert.
_EXPERTS = {"w13_": ("gate_proj", "up_proj"), "w2_": ("down_proj",)}
_UNUSED = "g_idx"  # in names of parameters for activation reordering, which vLLM makes whether or not they are used


class Unsupported(Exception):  # noqa: N818 (a finding, not an error)
    """The reason why a module cannot be loaded whole; vLLM's loader must load the model."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """The published tensors that make one parameter. `names`: in row order; is_stacked: stacks of experts."""

    parameter: str
    names: tuple[str, ...]
    is_stacked: bool


def _sources(prefix: str, parameters: Mapping[str, Any], published: Mapping[str, Any]) -> list[_Source]:
    """Lists the published sources of a module's parameters; empty if none of them is published.

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
    """Concatenates the published tensors of a parameter into a new tensor of `like`'s shape and dtype."""
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
    """Lists the names, as of `_owner`, of the published layers that a live module is made of."""
    experts = readback_experts.prefix_of(prefix)
    return [experts] if experts else stems(prefix)


def _load_module(module: Any, prefix: str, published: Mapping[str, Any]) -> None:
    """Loads one module's parameters whole, between the beginning and the end of a layerwise reload of vLLM."""
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
    """Loads a version into a live model module by module, faster than vLLM's loader (see the file's docstring).

    Args:
      model: vLLM's live model.
      model_config: vLLM's config of the model.
    """

    def __init__(self, model: Any, model_config: Any):
        self._model = model
        self._model_config = model_config
        self._names = {module: name for name, module in model.named_modules()}

    def load(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the weights of all modules in `parts` in place.

        Args:
          parts: torch tensors by Hugging Face name, on the host or on the model's device; a part has whole modules.
            The tensors are copied.

        Raises:
          Unsupported: a module cannot be loaded whole; vLLM's loader must load the model again.
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
        """Picks the first and the last module of every kind; maps live names to names of published tensors.

        Modules of one kind have equal classes, equal kernel classes, and tensors of equal shapes and dtypes.
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
        """Maps every live tensor's name to its address, and, if it belongs to `modules`, its fingerprint (else b"")."""
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
    """Loads a version whole after vLLM's loader has loaded `modules`, and compares those before and after.

    Returns "" if their bits and addresses did not change, else the reason; vLLM's loader must then load the model.
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
