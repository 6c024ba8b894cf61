# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads folders that were released quantized in compressed-tensors' format: `quantization_config`, codes and scales.

The section `quantization_config` gives each linear layer a format, bits, groups and activations. A layer can be read if
one of our schemes has this layout (`Scheme.wire`), however its codes were chosen. Under nvfp4, weights that an engine
fuses may have different global scales: the bridge's layers keep each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from qarl_bridge.protocol import formats
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.quant import SCHEMES, QTensor, Rules, Scheme, parse_scheme
from qarl_jax.types import UserError

_HERE = "config.json: 'quantization_config'"
_INSTEAD = "load the unquantized weights and choose a scheme (quant.forward) instead"
# Keys of a section, or of a group of it, that change what a layer computes and have no place in a scheme.
_FOREIGN = ("kv_cache_scheme", "sparsity_config", "transform_config")


def rules_of(section: Mapping[str, Any] | None) -> Rules:
    """Translates a `quantization_config` to `Rules`, which are empty if it is None or empty.

    Raises:
      UserError: it is not compressed-tensors', or no scheme has a group's layout; the message names what was found.
    """
    if not section:
        return Rules()
    try:
        return _rules_of(section)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{_HERE} is not in compressed-tensors' form ({error}); {_INSTEAD}.") from None


def _rules_of(section: Mapping[str, Any]) -> Rules:
    if section.get("quant_method") != "compressed-tensors":
        raise UserError(
            f"{_HERE} is of method {section.get('quant_method')!r}, only 'compressed-tensors' is read; {_INSTEAD}."
        )
    for key in _FOREIGN:
        found = section.get(key) or {}
        if found and not (key == "sparsity_config" and found.get("format") == "dense"):
            raise UserError(f"{_HERE} has {key!r} {found!r}, which is not supported; {_INSTEAD}.")
    ignored = [(_pattern(target), None) for target in _listed(section, "ignore")]
    ranked: list[tuple[int, tuple[str, Scheme | None]]] = []
    for group in (section.get("config_groups") or {}).values():
        scheme = _scheme_of(group, section.get("format"))
        for target in _listed(group, "targets"):
            rank = 2 if target == "Linear" else 1 if target.startswith("re:") else 0
            ranked.append((rank, (_pattern(target), scheme)))
    return Rules((*ignored, *(rule for _, rule in sorted(ranked, key=lambda pair: pair[0]))))


def _listed(section: Mapping[str, Any], key: str) -> list[str]:
    """The strings of a list; TypeError where it is a string, which would be read as its letters."""
    found = section.get(key) or []
    if isinstance(found, str):
        raise TypeError(f"{key!r} is the string {found!r}, not a list")
    return list(found)


def _pattern(target: str) -> str:
    """A target of compressed-tensors as a pattern that `Rules` searches for."""
    pattern = f"^(?:{target[3:]})" if target.startswith("re:") else f"^{re.escape(target)}$"
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{_HERE}: {target!r} is no regular expression ({error}).") from None
    return "" if target == "Linear" else pattern


def _scheme_of(group: Mapping[str, Any], fallback: Any) -> Scheme:
    """The first scheme whose layout is the group's."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    form = group.get("format") or fallback
    order = weights.get("actorder")
    if weights.get("symmetric") is False:
        odd = "asymmetric weights (zero points)"
    elif order not in (None, False, "static", "weight"):  # these two leave groups in the order of the inputs
        odd = f"activation order {order!r} (weight_g_idx)"
    elif group.get("output_activations"):
        odd = "quantized output activations"
    else:
        found = form, _arguments(weights), _arguments(inputs)
        for scheme in _of_groups(found[1].get("group_size") or -1):
            wire = scheme.wire
            if found == (wire.format, _arguments(wire.weights), _arguments(wire.activations)):
                return scheme
        odd = f"format {form!r} with weights {_words(weights)} and input activations {_words(inputs)}"
    raise UserError(f"{_HERE} has {odd}, which no base can have here; {_INSTEAD}.")


def _of_groups(size: int) -> Iterator[Scheme]:
    """Every scheme that takes groups of this size; -1: one group to a row of inputs."""
    for name in SCHEMES:
        with contextlib.suppress(UserError):
            scheme = parse_scheme(name, size)
            assert scheme is not None
            yield scheme


def _arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part of quantization arguments that a layout says, with compressed-tensors' defaults filled in."""
    if not given:
        return {}
    size = given.get("group_size")
    strategy = given.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group" and size == -1:
        strategy = "channel"
    made = {key: given.get(key, default) for key, default in (("num_bits", 8), ("type", "int"), ("symmetric", True))}
    made |= {"strategy": strategy, "dynamic": given.get("dynamic") or False}
    return made | ({"group_size": size} if strategy.endswith("group") else {})


def _words(given: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in _arguments(given).items()) or "none"


def fits(held: Scheme | None, asked: Scheme | None) -> bool:
    """Tells whether weights under the scheme `held` have the layout of the scheme `asked`; None is bf16."""
    if held is None or asked is None:
        return held is asked
    return dataclasses.replace(held.wire, scheme="") == dataclasses.replace(asked.wire, scheme="")


def check_fits(module: str, held: Scheme | None, asked: Scheme | None) -> None:
    """Checks that a frozen layer was released under the scheme that the config asks for; it cannot be requantized.

    Raises:
      UserError: the schemes differ; the message names the setting that fits.
    """
    if not fits(held, asked):
        size, name = getattr(held, "group_size", None), "bf16" if held is None else held.name
        setting = f"quant.forward={name}" + (f":g{size}" if size is not None else "")
        raise UserError(
            f"the base's {module} was released as {held or 'bf16'}, and the config asks for {asked or 'bf16'}: a frozen"
            f" base keeps its codes; set {setting}, or, for this layer alone, a rule of quant.rules."
        )


def read(tensor: Callable[[str], np.ndarray | None], module: str, shape: tuple[int, int], scheme: Scheme) -> QTensor:
    """Reads a layer's codes and scales from a folder.

    Scales in another float dtype than the scheme's are converted if no value changes.

    Args:
      tensor: returns a tensor of the folder by name, or None if there is none. module: the layer. shape: its (N, K).

    Returns:
      A QTensor of numpy arrays, the codes views of their file.

    Raises:
      UserError: a tensor is missing, does not fit the layout, or is not finite.
    """
    tensors = {}
    for array in scheme.wire.arrays:
        name = scheme.wire.names(module)[array.name]
        if (found := tensor(name)) is None:
            raise UserError(f"tensor {name!r} is missing, which config.json's 'quantization_config' asks for")
        if array.is_scale and found.dtype != array.dtype and found.dtype.itemsize in (2, 4):
            cast = found.astype(array.dtype)
            if not np.array_equal(cast.astype(np.float32), found.astype(np.float32), equal_nan=True):
                raise UserError(f"tensor {name!r} is {found.dtype}, and in {array.dtype} its scales would be others")
            found = cast
        tensors[name] = found
    said = scheme.wire.names(module).get("")
    if said is not None and (found := tensor(said)) is not None:
        tensors[said] = found
    try:
        made = QTensor(formats.unpack(module, tensors, scheme.wire), scheme)
    except BridgeError as error:
        raise UserError(str(error)) from None
    if made.shape != shape:
        raise UserError(f"{module} has shape {made.shape}, but config.json asks for {shape}")
    if made.codes.dtype == formats.FLOAT8 and ((np.asarray(made.codes).view(np.uint8) & 0x7F) == 0x7F).any():
        raise UserError(f"the codes of {module} are not all finite")
    return made
