# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM on CUDA: batch-invariant operations in the place of its own."""
