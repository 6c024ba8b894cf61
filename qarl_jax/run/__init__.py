# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run is: its configuration, the objects it is made of, and the files it leaves."""
