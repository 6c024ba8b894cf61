# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that samples with vLLM, in another process behind the bridge."""
