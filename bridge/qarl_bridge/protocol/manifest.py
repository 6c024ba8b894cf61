# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a version's manifest against the tensors that the engine's loader needs, and reads safetensors headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

from qarl_bridge.protocol import adapters, formats
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.messages import ALIGNMENT, MAX_STAGE_BYTES, Expected, Manifest
from qarl_bridge.protocol.tensors import DTYPES, SAFETENSORS_DTYPES


def check_manifest(
    manifest: Manifest, *, model: bytes, scheme: bytes, expected: Mapping[str, Expected] | None = None
) -> None:
    """Raises BridgeError for a manifest that is damaged ("torn"), of another model or scheme ("foreign_model",
    "foreign_scheme"), too large ("limits"), or lists other tensors than `expected` ("tensor", "torn", "setup")."""
    if manifest.computed_digest() != manifest.digest:
        raise BridgeError(f"manifest of {manifest.version} is torn: its digest does not match its content", "torn")
    if manifest.model != model:
        raise BridgeError(
            f"{manifest.version} belongs to another model: fingerprint {manifest.model.hex()[:12]}, "
            f"the engine serves {model.hex()[:12]}; start it with the run's model",
            "foreign_model",
        )
    if manifest.scheme != scheme:
        raise BridgeError(
            f"{manifest.version} is quantized under another scheme: hash {manifest.scheme.hex()[:12]}, "
            f"the engine was started for {scheme.hex()[:12]}; start it with a model folder of the run's scheme",
            "foreign_scheme",
        )
    if manifest.total_bytes > MAX_STAGE_BYTES:
        raise BridgeError(f"{manifest.total_bytes} bytes exceed the staging limit", "limits")
    seen: set[str] = set()
    end = 0
    for entry in manifest.tensors:
        if entry.name in seen:
            raise BridgeError(f"tensor {entry.name} is listed twice", "torn")
        seen.add(entry.name)
        if entry.dtype not in DTYPES:
            raise BridgeError(f"tensor {entry.name} has unknown dtype {entry.dtype!r}", "tensor")
        if math.prod(entry.shape) * DTYPES[entry.dtype].itemsize != entry.nbytes:
            raise BridgeError(
                f"tensor {entry.name}: {entry.nbytes} bytes do not hold {entry.dtype}{entry.shape}", "torn"
            )
        if entry.offset < end or entry.offset % ALIGNMENT or entry.offset + entry.nbytes > manifest.total_bytes:
            raise BridgeError(f"tensor {entry.name} overlaps another or lies outside the staged bytes", "torn")
        end = entry.offset + entry.nbytes
    if expected is not None:
        _check_tensors(manifest, seen, expected)


def _check_tensors(manifest: Manifest, seen: set[str], expected: Mapping[str, Expected]) -> None:
    ours, theirs = (adapters.words({one.name: one.shape for one in x}) for x in (manifest.tensors, expected.values()))
    if ours != theirs:
        raise BridgeError(
            f"{manifest.version} has {ours}, and the engine was started for {theirs}: start it with the run's rank and"
            " targets (lora_rank and lora_targets in its --options), or change the run's section lora",
            "setup",
        )
    wanted = set(expected)
    if manifest.base:
        modules = {formats.live_module(name) for name in seen}
        wanted = {n for n in wanted if adapters.is_adapter(n) or formats.live_module(n) in modules}
    if missing := sorted(wanted - seen):
        raise BridgeError(
            f"{manifest.version} lacks {len(missing)} tensor(s) the engine needs, first: {missing[0]} "
            "(a fused module given in part would silently become NaN)",
            "torn",
        )
    if foreign := sorted(seen - expected.keys()):
        raise BridgeError(f"{manifest.version} holds {len(foreign)} unknown tensor(s), first: {foreign[0]}", "tensor")
    for entry in manifest.tensors:
        want = expected[entry.name]
        if entry.dtype != want.dtype or entry.shape != want.shape:
            raise BridgeError(
                f"tensor {entry.name} is {entry.dtype}{entry.shape}, the engine expects {want.dtype}{want.shape}",
                "tensor",
            )


def expected_from_safetensors(path: str) -> dict[str, Expected]:
    """Reads names, dtypes and shapes from a safetensors file's header; BridgeError("setup") if it cannot."""
    try:
        return {
            name: Expected(name=name, dtype=SAFETENSORS_DTYPES[info["dtype"]], shape=info["shape"])
            for name, info in safetensors_header(path)[1].items()
        }
    except KeyError as error:
        raise BridgeError(f"cannot read the safetensors header of {path}: {error}", "setup") from None


def safetensors_header(path: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Reads a safetensors header: (file offset of tensor bytes, {name: {dtype, shape, data_offsets}}).

    Raises:
      BridgeError("setup"): the file cannot be read, or is no safetensors file.
    """
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > 256 << 20:
                raise ValueError("header too large")
            header = json.loads(file.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise BridgeError(f"cannot read the safetensors header of {path}: {error}", "setup") from None
    header.pop("__metadata__", None)
    return 8 + size, header
