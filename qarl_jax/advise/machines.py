# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Devices by name: the peaks that their vendors state, and whether whole steps were measured on them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qarl_jax.memory.learner import GIB
from qarl_jax.observe import flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The peaks of one device. Rates are per second.

    Attributes:
      name: as the command line takes it.
      kind: JAX's `device_kind`, or a part of it.
      size: bytes of memory that programs may use.
      bandwidth: bytes between memory and cores.
      product: FLOP of dense bfloat16 products.
      low_bit: FLOP of a product of codes over `product`, by `Scheme.kernel`; 1 for a kernel that is not listed.
      float32: FLOP of products of float32 matrices, by JAX's precision: "high" (TF32 on a GPU) or "highest".
      link: bytes to another device of the host, one way.
      host_link: bytes to the host's memory, one way.
      is_measured: whether the rates of `forecast.RATES` were measured on it, and not carried over.
    """

    name: str
    kind: str
    size: int
    bandwidth: float
    product: float
    low_bit: dict[str, float]
    float32: dict[str, float]
    link: float
    host_link: float = 55e9
    is_measured: bool = False

    def speed_of(self, kernel: str) -> float:
        """FLOP per second of products under a `Scheme.kernel`; "" is bfloat16."""
        return self.product * self.low_bit.get(kernel, 1.0)


def _machine(name: str, kind: str, gib: float, **rates: object) -> Machine:
    product = flops.peak(kind)
    assert product is not None
    return Machine(name=name, kind=kind, size=int(gib * GIB), product=product, **rates)  # type: ignore[arg-type]


_BOTH, _INT8 = {"int8": 2.0, "e4m3": 2.0}, {"int8": 2.0}
_HOPPER, _AMPERE = {"high": 495e12, "highest": 67e12}, {"high": 156e12, "highest": 19.5e12}
_L40S, _L4 = {"high": 183e12, "highest": 91.6e12}, {"high": 60e12, "highest": 30.3e12}
_BLACKWELL, _TPU = {"high": 1.1e15, "highest": 80e12}, {"high": 153e12, "highest": 76e12}
MACHINES = {
    machine.name: machine
    for machine in (
        _machine("h100", "H100", 79.1, bandwidth=3.35e12, low_bit=_BOTH, float32=_HOPPER, link=450e9, is_measured=True),
        _machine("h200", "H200", 139.8, bandwidth=4.8e12, low_bit=_BOTH, float32=_HOPPER, link=450e9, is_measured=True),
        _machine("a100", "A100", 79.1, bandwidth=2.04e12, low_bit=_INT8, float32=_AMPERE, link=300e9, host_link=25e9),
        _machine("l40s", "L40S", 44.4, bandwidth=864e9, low_bit=_BOTH, float32=_L40S, link=25e9, host_link=25e9),
        _machine("l4", "L4", 22.0, bandwidth=300e9, low_bit=_BOTH, float32=_L4, link=25e9, host_link=25e9),
        _machine("b200", "B200", 178.0, bandwidth=8.0e12, low_bit=_BOTH, float32=_BLACKWELL, link=900e9),
        _machine("tpu-v5p", "TPU v5p", 95.0, bandwidth=2.765e12, low_bit=_INT8, float32=_TPU, link=100e9),
    )
}


def this_cpu() -> Machine:
    """Times this machine's memory and float32 products for a second. Its rates are shared by all of its cores."""
    n = 2048
    square, long = jnp.ones((n, n), jnp.float32), jnp.ones(2**26, jnp.float32)
    product = 2.0 * n**3 / least(jax.jit(lambda x: x @ x), square)
    bandwidth = 2.0 * long.nbytes / least(jax.jit(lambda x: x + 1), long)
    return Machine(
        name="cpu",
        kind="cpu",
        size=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth=bandwidth,
        product=product,
        low_bit={},
        float32={"high": product, "highest": product},
        link=bandwidth,
        host_link=bandwidth,
    )


def least(function: Callable[..., Any], *arguments: Any) -> float:
    """Times a function: returns the seconds of the fastest of five calls, after one that compiles."""
    took = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        took.append(time.perf_counter() - start)
    return min(took[1:])
