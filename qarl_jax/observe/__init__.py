# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Records, displays and reports what a run does. No result of a run depends on it."""
