# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers: AdamW, Muon and schedules, low-bit and offloaded moments, and updates stack by stack."""
