# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels: programs for one device that compute the operations of `numerics` and `quant`."""
