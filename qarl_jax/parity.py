# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.parity --model DIR --scheme w8a8 --engine cpu [--json]`: a ladder of promises."""

from qarl_jax.verify.ladder import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
