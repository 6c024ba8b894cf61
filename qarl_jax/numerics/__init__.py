# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The floating-point arithmetic of each engine, which the learner mirrors to get the engine's bits."""
