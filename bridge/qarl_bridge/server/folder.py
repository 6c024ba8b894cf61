# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a model folder's weights in the form of a published version."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from qarl_bridge.protocol import adapters, expert_stacks, messages
from qarl_bridge.protocol.manifest import safetensors_header
from qarl_bridge.protocol.tensors import SAFETENSORS_DTYPES


def tensors(path: str, expected: Mapping[str, messages.Expected]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for each expected tensor, in its dtype and shape: experts stacked, adapters as zeros."""
    found = {}
    for file in sorted(name for name in os.listdir(path) if name.endswith(".safetensors")):
        begin, header = safetensors_header(os.path.join(path, file))
        data = np.memmap(os.path.join(path, file), np.uint8, "r", offset=begin)
        for name, info in header.items():
            part = data[slice(*info["data_offsets"])]
            found[name] = part.view(messages.DTYPES[SAFETENSORS_DTYPES[info["dtype"]]]).reshape(info["shape"])
    for name, one in expected.items():
        if adapters.is_adapter(name):
            yield name, np.zeros(one.shape, messages.DTYPES[one.dtype])
        elif name in found:
            yield name, found[name]
        else:
            yield name, np.stack([found[each] for each in expert_stacks.names(name, one.shape[0])])
