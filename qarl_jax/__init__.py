# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware RL for LLMs in JAX: the policy that learns is the low-bit policy that samples."""

__version__ = "0.1.0"
