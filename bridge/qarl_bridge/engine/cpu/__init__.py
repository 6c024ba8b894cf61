# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that replace vLLM's on a CPU; they give equal bits on every CPU build."""
