# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes: the dtypes that travel, and digests of what is sent and of what it belongs to."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from qarl_bridge.protocol import fingerprint
from qarl_bridge.protocol.errors import BridgeError

DIGEST_BYTES = fingerprint.DIGEST_BYTES

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
SAFETENSORS_DTYPES = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}


@functools.cache  # asked for every tensor of every version
def dtype_name(dtype: Any) -> str:
    """Wire name of a numpy (or ml_dtypes) dtype."""
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise BridgeError(f"dtype {name} cannot be published; known: {', '.join(DTYPES)}", "tensor")
    return name


def digest(*parts: bytes | memoryview) -> bytes:
    """First 16 bytes of SHA-256 over the concatenation: for manifests and configs; tensors have a fingerprint."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.digest()[:DIGEST_BYTES]


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array of any wire dtype, without a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# Keys of config.json that do not change what the model computes, or that the scheme hash covers.
_VOLATILE_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures_version",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "quantization_config",
        "use_cache",
        "id2label",
        "label2id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
    }
)


def model_fingerprint(config: Mapping[str, Any]) -> bytes:
    """Digest of a config.json: the same network gives the same 16 bytes, whoever wrote the file."""
    kept = {k: v for k, v in config.items() if k not in _VOLATILE_CONFIG_KEYS and v is not None}
    return digest(b"model", _canonical(kept))


def scheme_hash(quantization_config: Mapping[str, Any] | None) -> bytes:
    """Digest of a quantization_config (None: unquantized)."""
    return digest(b"scheme", _canonical(dict(quantization_config) if quantization_config else None))
