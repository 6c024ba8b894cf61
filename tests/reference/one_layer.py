# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One quantized layer with its gradient, for tests of the kernels that may take its place (`kernels/products.py`).

Nothing here is jitted by the library, so that nothing was traced before a test chose its kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.kernels import products
from qarl_jax.quant import resolve
from qarl_jax.runtime import mesh

CUDA = resolve("cuda")
on_hopper = pytest.mark.skipif(not mesh.is_hopper(), reason="needs JAX on a Hopper GPU (JAX_PLATFORMS=cuda,cpu)")


def assert_equal_bits(got: Any, want: Any) -> None:
    """All leaves have the same shapes, dtypes and bytes."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def interpreter() -> Any:
    """What a kernel of `product_hopper.py` gets as `interpret`."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # has no public name

    return InterpretGPUParams()


def interpreted(monkeypatch: Any) -> None:
    """Every layer takes its kernels, interpreted, as it would on a Hopper GPU."""

    def choose(*args: Any, default: Any, cpu: Any = None, cuda: Any = None) -> Any:
        return cuda(*args, interpret=interpreter()) if cuda is not None else (cpu or default)(*args)

    monkeypatch.setattr(products, "serves", lambda *_: True)
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)


def with_gradient(qt: quant.QTensor, numerics: quant.Numerics = CUDA) -> Any:
    """A function of (x, master, bias): the layer's output, and its gradients for a cotangent made of it."""
    dot = quant.dot.__wrapped__

    def run(x: jax.Array, master: jax.Array, bias: jax.Array | None) -> Any:
        y, vjp = jax.vjp(lambda x, master, bias: dot(x, master, qt, bias, numerics=numerics), x, master, bias)
        return y, vjp(jnp.sin(y.astype(jnp.float32)).astype(y.dtype))

    return run


def traced(
    rows: int, n: int, k: int, config: Any, groups: tuple[int, ...] = (), numerics: quant.Numerics = CUDA
) -> Any:
    """The trace of a layer [rows, K] -> [rows, N] with its gradient; `groups`: the rows of each of its experts."""
    shape = (len(groups), n, k) if groups else (n, k)
    qt = quant.quantize(jnp.zeros(shape), config)

    def loss(x: jax.Array, master: jax.Array) -> jax.Array:
        if groups:
            y = quant.expert_dot.__wrapped__(x, master, qt, jnp.array(groups, jnp.int32), numerics=numerics)
        else:
            y = quant.dot.__wrapped__(x, master, qt, numerics=numerics)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))  # its gradient takes y

    x, master = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.jit(jax.grad(loss, (0, 1))).trace(x, master)
