# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM: one engine, its versions, its kernels."""
