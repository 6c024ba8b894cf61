# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The embedded sampler, which runs in the trainer's process."""
