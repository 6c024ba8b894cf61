# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.evaluate`: how good a policy is on data it was not trained on."""

from qarl_jax.run.evaluation import main

if __name__ == "__main__":
    raise SystemExit(main())
