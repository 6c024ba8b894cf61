# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Device meshes, multi-process runs, compilation and progress."""
