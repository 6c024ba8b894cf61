# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""How fast: programs for one device that compute what `numerics` and `quant` define."""
