# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The learner and the critic: their training state, and their compiled programs for gradients and updates."""
