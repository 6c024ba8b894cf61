# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Defines BridgeError, the one exception class of the bridge."""


class BridgeError(Exception):
    """An error of the bridge: a message for people, and a stable `code` for programs.

    Codes: auth, bad_message, bad_state, base (the engine does not hold a partial version's base), busy, dead, engine,
    fenced (no good weights after a failed load), foreign_base (the engine's base is another trainer's), foreign_model,
    foreign_scheme, lease, limits, read_back (live weights differ from published ones), setup, stale, tensor, timeout,
    torn (incomplete or damaged), unshared (memory cannot be reached).
    """

    def __init__(self, message: str, code: str = "bad_message"):
        super().__init__(message)
        self.code = code
