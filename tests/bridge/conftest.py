# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A bridge around a fake engine, in a thread of this process."""

import pytest

from tests.reference.bridge_world import world


@pytest.fixture(params=["unix", "tcp"])
def any_world(request, tmp_path):
    with world(tmp_path, tcp=request.param == "tcp") as w:
        yield w


@pytest.fixture
def bridge(tmp_path):
    with world(tmp_path) as w:
        yield w
