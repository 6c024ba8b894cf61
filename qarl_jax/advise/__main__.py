# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs `python -m qarl_jax.advise` (`command.py`)."""

from qarl_jax.advise.command import main

if __name__ == "__main__":
    raise SystemExit(main())
