# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Functional read-back: checks by one-hot inputs that live layers use the published weights."""
