# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU: the bridge's own operations, one arithmetic for every build."""
