# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant operations that replace vLLM's on CUDA GPUs."""
