# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What trainer and bridge agree on: messages, formats, hashes."""
