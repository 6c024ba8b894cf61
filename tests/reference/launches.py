# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether calls wait for a thread that is launching a program over several devices."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from qarl_jax.runtime.mesh import launching


def waiting(mesh: Mesh, calls: Sequence[Callable[[], Any]], seconds: float = 0.5) -> list[bool]:
    """Of each call, made in a thread of its own: whether it ends only after this one's launch over `mesh` has.

    Args:
      calls: made once before, so that nothing is compiled.
      seconds: that each is given.
    """
    for call in calls:
        call()
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    with launching(mesh):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        waited = [thread.is_alive() for thread in threads]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return waited
