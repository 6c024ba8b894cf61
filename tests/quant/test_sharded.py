# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The same bytes and the same outputs on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qarl_jax import quant

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
CONFIGS = ["w8a8", "fp8", "w4a16:g32", "w4a8:g32"]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"))


def data():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 4, 64)), jnp.bfloat16)
    return x, jnp.asarray(rng.normal(size=(3, 32, 64)) * 0.1, jnp.float32)


def placed(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*CONFIGS, "nvfp4", "w3a16_asym:g32"])
def test_quantizing_a_sharded_weight_keeps_its_sharding_and_its_bytes(mesh, scheme):
    _, w = data()
    config = quant.parse_scheme(scheme)
    one = quant.quantize(w, config)
    many = jax.jit(lambda w: quant.quantize(w, config))(placed(mesh, w, None, ("fsdp", "tensor"), None))
    for name, a in one.arrays.items():
        b = many.arrays[name]
        assert b.shape[1] == 1 or b.sharding.spec[1] == ("fsdp", "tensor"), b.sharding
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", CONFIGS)
def test_quantizing_needs_no_communication(mesh, scheme):
    _, w = data()
    config = quant.parse_scheme(scheme)
    sharding = NamedSharding(mesh, P(None, ("fsdp", "tensor"), None))
    text = jax.jit(lambda w: quant.quantize(w, config), in_shardings=sharding).lower(w).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*CONFIGS, "nvfp4", "w2a2:g32"])
def test_forward_and_gradients_on_a_mesh_equal_one_device(mesh, scheme):
    x, w = data()
    config = quant.parse_scheme(scheme)

    def run(x, w):
        qt = quant.quantize(w[0], config)
        y, vjp = jax.vjp(lambda x, w: quant.dot(x, w, qt), x, w[0])
        return y, *vjp(jnp.ones_like(y))

    one = jax.jit(run)(x, w)
    many = jax.jit(run)(placed(mesh, x, ("data", "fsdp")), placed(mesh, w, None, ("fsdp", "tensor"), None))
    # Contraction over K is whole on every device, so the forward is the same sum in the same order.
    if scheme in ("w8a8", "w4a8:g32"):
        np.testing.assert_array_equal(np.asarray(one[0], np.float32), np.asarray(many[0], np.float32))
    else:
        np.testing.assert_allclose(np.asarray(one[0], np.float32), np.asarray(many[0], np.float32), rtol=2.0**-7)
    for a, b in zip(one[1:], many[1:], strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-3)
