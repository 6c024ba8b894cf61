# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the bridge: it connects, publishes weights and asks for completions."""
