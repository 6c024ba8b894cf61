# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs `python -m qarl_jax.qat` (`command.py`)."""

from qarl_jax.qat.command import main

if __name__ == "__main__":
    raise SystemExit(main())
