# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop: collects, scores, updates and publishes, one module for each part of a step."""
