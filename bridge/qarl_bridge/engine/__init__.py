# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM: starts an engine, loads and reads back weights, and replaces kernels by batch-invariant ones."""
