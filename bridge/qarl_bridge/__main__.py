# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs `python -m qarl_bridge`: calls `cli.main` and exits with its code."""

import os
import sys

from qarl_bridge.cli import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM and its OpenMP pool have been closed; skipping interpreter teardown avoids their at-exit races.
    os._exit(code)
