# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Defines BridgeError, the one exception class of the bridge."""


class BridgeError(Exception):
    """An error of the bridge: a message for people, and a stable `code` for programs.

    Codes:
      auth: the key file is unusable, or the keys of trainer and bridge differ.
      bad_message: a malformed message, or an unexpected reply.
      bad_state: the request does not fit the bridge's state, e.g. Commit without a staged version.
      base: the engine does not hold a partial version's base. foreign_base: another trainer or the folder put it there.
      busy: another version is being loaded, or the engine is drawing.
      dead: the bridge or the trainer is gone or stopping.
      engine: the engine failed, or does not compute with the published weights.
      fenced: the engine has no good weights after a failed load.
      foreign_model, foreign_scheme: the engine was started for another model or scheme; fused layers differ in scheme.
      lease: the sender does not hold the lease.
      limits: a request exceeds what the bridge or the engine can do, or memory has no room for a version.
      read_back: live weights differ from published ones.
      setup: options, versions, model or machine do not fit, e.g. vLLM cannot be imported.
      stale: the engine serves a later version, or a later start of the run has been there.
      tensor: a tensor is not finite, or its dtype, shape or scale is wrong.
      timeout: an answer took too long. torn: data is incomplete or damaged.
      unshared: memory of the other process or GPU cannot be reached.
    """

    def __init__(self, message: str, code: str = "bad_message"):
        super().__init__(message)
        self.code = code
