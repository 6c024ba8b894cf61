# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts that objectives share: options, masks, sampler corrections, aggregation and metrics."""
