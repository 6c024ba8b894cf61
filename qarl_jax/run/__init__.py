# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Configures a run, builds its objects, and reads and writes its files."""
