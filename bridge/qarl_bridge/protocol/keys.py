# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and creates key files, which authenticate trainer and bridge, and parses the bridge's address."""

from __future__ import annotations

import os
import secrets
from typing import Any

from qarl_bridge.protocol.errors import BridgeError


def read_key(path: str) -> bytes:
    """Reads the 32-byte key from a file; BridgeError("auth") if it is malformed or anyone but its owner may read it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096).strip()
    except OSError as error:
        raise BridgeError(f"cannot read the key file {path}: {error.strerror}", "auth") from None
    if mode & 0o077:
        raise BridgeError(f"key file {path} is readable by others: run `chmod 600 {path}`", "auth")
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        raise BridgeError(f"key file {path} does not hold 64 hexadecimal digits", "auth") from None
    if len(key) != 32:
        raise BridgeError(f"key file {path} holds {len(key)} bytes, expected 32 (64 hexadecimal digits)", "auth")
    return key


def create_key(path: str) -> bytes:
    """Creates a key file of mode 0600 and returns its random 32-byte key; BridgeError("auth") if the file exists."""
    key = secrets.token_bytes(32)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise BridgeError(f"cannot create the key file {path}: {error.strerror}", "auth") from None
    with os.fdopen(fd, "w") as file:
        file.write(key.hex() + "\n")
    return key


def parse_address(address: str) -> tuple[str, Any]:
    """Parses "unix:/path" or a path to ("unix", path), "tcp://host:port" to ("tcp", (host, port)); BridgeError("setup")
    for other addresses, and for a socket path of more than 100 bytes."""
    if address.startswith("tcp://"):
        host, _, port = address[len("tcp://") :].rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 65536:
            raise BridgeError(f"bad address {address!r}: expected tcp://host:port", "setup")
        return "tcp", (host, int(port))
    path = address.removeprefix("unix:")
    if not path or "://" in path:
        raise BridgeError(f"bad address {address!r}: expected a path, unix:/path or tcp://host:port", "setup")
    if len(os.fsencode(path)) > 100:
        raise BridgeError(f"socket path {path!r} is longer than the 100 bytes a unix socket allows", "setup")
    return "unix", path
