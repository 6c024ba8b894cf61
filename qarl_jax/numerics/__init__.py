# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of each engine, which the learner mirrors."""
