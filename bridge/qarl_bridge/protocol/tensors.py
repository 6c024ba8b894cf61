# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts tensors to bytes and dtypes to names on the wire, and computes digests of manifests and configs."""

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
    """Names a numpy or ml_dtypes dtype as messages do; BridgeError("tensor") if it is not in `DTYPES`."""
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise BridgeError(f"dtype {name} cannot be published; known: {', '.join(DTYPES)}", "tensor")
    return name


def digest(*parts: bytes | memoryview) -> bytes:
    """Computes the first 16 bytes of SHA-256 over the concatenated parts; for tensors see fingerprint.py."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.digest()[:DIGEST_BYTES]


def as_bytes(array: np.ndarray) -> memoryview:
    """Views a contiguous array as bytes, without a copy; an array that is not contiguous is copied."""
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
    """Computes 16 bytes that identify the network in a config.json; keys such as token ids do not change them."""
    kept = {k: v for k, v in config.items() if k not in _VOLATILE_CONFIG_KEYS and v is not None}
    return digest(b"model", _canonical(kept))


def scheme_hash(quantization_config: Mapping[str, Any] | None) -> bytes:
    """Computes the 16-byte digest of a quantization_config (None: unquantized)."""
    return digest(b"scheme", _canonical(dict(quantization_config) if quantization_config else None))
