# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The policy's and the critic's state, and their compiled programs."""
