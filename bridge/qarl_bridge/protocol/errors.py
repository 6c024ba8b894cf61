# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The one exception of the bridge."""


class BridgeError(Exception):
    """An error that says what was wrong, where, and what to do. `code` is stable and machine-readable; the text is for
    people.

    Codes: auth, bad_message, bad_state, base (a partial version's base is not what the engine holds), busy, dead,
    engine, fenced, foreign_base (the engine's is not this trainer's), foreign_model, foreign_scheme, lease,
    limits, read_back (the live engine does not hold what was published), setup, stale, tensor, timeout, torn, unshared.
    """

    def __init__(self, message: str, code: str = "bad_message"):
        super().__init__(message)
        self.code = code
