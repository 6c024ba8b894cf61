# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Observation of a run: records, views, reports. No result depends on it."""
