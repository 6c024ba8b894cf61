# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Fused GPU and TPU kernels for operations of `numerics` and `quant`; each runs on one device."""
