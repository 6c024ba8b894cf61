# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An objective is a formula: nothing that is claimed of one hangs on how its program is compiled."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_fast(compiled_programs):
    return
