# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a run: `learner` and `engine` count bytes from shapes, `plan` adds them up on a device, `choose` makes them
fit."""
