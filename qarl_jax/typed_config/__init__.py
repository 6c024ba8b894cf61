# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads YAML files and overrides into frozen dataclasses."""
