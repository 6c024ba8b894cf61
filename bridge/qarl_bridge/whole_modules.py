# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading whole modules at once, where vLLM's loader would take their tensors one by one.

vLLM's in-place reload buffers every call of every weight loader, runs each twice (once to count its elements) and looks
names up in Python: about 3 ms per module, which for Qwen3-8B is most of a publish. Here a module gets its parameters in
one piece, in checkpoint layout (q, k and v stacked as rows; all experts of a layer), and then goes vLLM's own way: its
`process_weights_after_loading` packs them for its kernel, and the results are copied into the live storage.

Nothing is assumed about a kernel's layout, and the shortcut is not trusted before it has proved itself on this very
engine: the first version is loaded by vLLM's loader and then, the same version, by this one, and every live tensor must
come out the same to the last bit, in the same storage (`prove`). If not, or if a module has a parameter that cannot be
put together from what is published, vLLM's loader does it all, and the engine's notes say why. The functional read-back
follows every load either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from qarl_bridge import device, fingerprint
from qarl_bridge.readback import FUSED

# The parameters of vLLM's fused experts -> the projections they hold, as rows, of every expert.
_EXPERTS = {"w13_": ("gate_proj", "up_proj"), "w2_": ("down_proj",)}
_UNUSED = "g_idx"  # in names of parameters for activation reordering, which vLLM makes whether or not they are used


class Unsupported(Exception):  # noqa: N818 (a finding, not an error)
    """Why these modules cannot be loaded whole."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """One parameter: where its rows come from. `names`: [experts][shards] of published tensors."""

    parameter: str
    names: tuple[tuple[str, ...], ...]
    is_stacked: bool


def _sources(prefix: str, parameters: Mapping[str, Any], published: Mapping[str, Any]) -> list[_Source]:
    """How a module's parameters are put together; empty: nothing of it is published.

    Raises:
      Unsupported: a part is published and a part is not.
    """
    parent, _, leaf = prefix.rpartition(".")
    stems = [f"{parent}.{part}" if parent else part for part in FUSED.get(leaf, (leaf,))]
    found: list[_Source] = []
    missing: list[str] = []
    for name in parameters:
        names: tuple[tuple[str, ...], ...] = (tuple(f"{stem}.{name}" for stem in stems),)
        stacked = False
        for start, parts in _EXPERTS.items():
            if name.startswith(start):
                own = name.removeprefix(start)
                experts = prefix[: prefix.rfind(".experts") + len(".experts")]
                count = 0
                while f"{experts}.{count}.{parts[0]}.{own}" in published:
                    count += 1
                names = tuple(tuple(f"{experts}.{e}.{part}.{own}" for part in parts) for e in range(count))
                stacked = True
        flat = [one for row in names for one in row]
        if flat and all(one in published for one in flat):
            found.append(_Source(name, names, stacked))
        elif _UNUSED not in name:
            missing.append(name)
    if found and missing:
        raise Unsupported(f"{prefix} has a parameter {missing[0]} that is not published")
    return found


def _assemble(source: _Source, like: Any, published: Mapping[str, Any], where: Any) -> Any:
    """A tensor of `like`'s shape and dtype, in memory of its own: packing may write to it."""
    rows = []
    for names in source.names:
        parts = [published[name] for name in names]
        if source.parameter.endswith("weight_shape"):  # each shard's own: vLLM keeps the last
            rows.append(parts[-1])
        else:
            rows.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    whole = torch.stack(rows) if source.is_stacked else rows[0]
    shape = tuple(like.shape)
    if source.is_stacked and whole.ndim == 3 and getattr(like, "is_transposed", False):
        whole = whole.transpose(1, 2)  # as the int4 experts of some kernels are held before packing
    out = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=where)
    if tuple(whole.shape) == shape:
        out.copy_(whole)
    elif whole.ndim == len(shape) and whole.shape[1:] == shape[1:] and len(whole) < shape[0]:
        out.zero_()  # a vocabulary is padded
        out[: len(whole)].copy_(whole)
    else:
        raise Unsupported(f"{source.names[0][0]}: {tuple(whole.shape)} does not make {source.parameter} {shape}")
    return out


class WholeModules:
    """The loader of one model.

    Args:
      model: the live model. model_config: vLLM's.
    """

    def __init__(self, model: Any, model_config: Any):
        self._model = model
        self._model_config = model_config
        self._names = {module: name for name, module in model.named_modules()}

    def load(self, published: Mapping[str, Any]) -> None:
        """Replace all weights in place.

        Args:
          published: torch tensors by Hugging Face name, on the host or on the model's device; not kept, not changed.

        Raises:
          Unsupported: some module cannot be loaded whole. The model then needs a load by vLLM's own loader.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        with torch.no_grad():
            layerwise.initialize_layerwise_reload(self._model)
            for module, prefix in self._names.items():
                info = layerwise.get_layerwise_info(module)
                tensors = layerwise.get_layer_tensors(module)
                parameters = {name: t for name, t in tensors.items() if name in module._parameters}
                sources = _sources(prefix, parameters, published) if info.can_load() else []
                if not sources:
                    continue
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
            layerwise.finalize_layerwise_reload(self._model, self._model_config)

    def state(self) -> dict[str, tuple[int, bytes]]:
        """Every live tensor that is used: its place in memory, and a fingerprint of its values."""
        out = {}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if _UNUSED in name:
                continue
            out[name] = (tensor.data_ptr(), _fingerprint(tensor.detach()))
        return out


def _fingerprint(tensor: Any) -> bytes:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    padded = torch.zeros(device.whole_rows(len(raw)), dtype=torch.uint8, device=raw.device)
    padded[: len(raw)] = raw
    return fingerprint.digest_of_sums(device.row_sums(padded))


def prove(loader: WholeModules, published: Mapping[str, Any]) -> str:
    """Load the version the model already holds once more, whole; "" if nothing changed, else what did.

    After a failure the model must be loaded again by vLLM's own loader.
    """
    before = loader.state()
    try:
        loader.load(published)
    except Unsupported as reason:
        return str(reason)
    except Exception as reason:  # a version of vLLM nobody tried: its own loader is still there
        return f"{type(reason).__name__}: {reason}"
    after = loader.state()
    for name, (place, value) in before.items():
        if name not in after or after[name][1] != value:
            return f"{name} came out otherwise than from vLLM's loader"
        if after[name][0] != place:
            return f"{name} changed its place in memory"
    return ""
