# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.export --checkpoint DIR --format hf|compressed-tensors --out DIR`: a policy as a model folder."""

from qarl_jax.run.export import main

if __name__ == "__main__":
    raise SystemExit(main())
