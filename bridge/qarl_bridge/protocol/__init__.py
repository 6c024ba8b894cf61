# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages, tensor formats and checksums that trainer and bridge exchange."""
