# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers: schedules, AdamW, Muon, where their moments live and how an update walks over the leaves."""
