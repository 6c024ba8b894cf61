# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.evaluate FILE | --checkpoint RUN [section.field=value ...]`: how good a policy is.

Evaluates on prompts that the policy was not trained on. `run/evaluation.py` defines the options.
"""

from qarl_jax.run.evaluation import main

if __name__ == "__main__":
    raise SystemExit(main())
