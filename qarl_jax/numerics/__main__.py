# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.numerics` prints the table of engines' arithmetic in docs/concepts/engines.md."""

from qarl_jax.numerics.engine import table

if __name__ == "__main__":
    print(table())
