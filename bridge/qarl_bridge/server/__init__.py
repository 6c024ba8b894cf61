# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge's server side: the state machine, checks of received versions, and the interface of an engine."""
