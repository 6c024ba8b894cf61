# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Low-bit weights and the arithmetic of the engines that serve them.

    qt = quantize(master, parse_scheme("w4a16"))            # codes and scales: the bytes that are published
    y = dot(x, master, qt, numerics=resolve("auto"))        # forward in low bit, gradient to the master

One file per scheme; `schemes.SCHEMES` is the registry.
"""

from qarl_jax.numerics.engine import PLAIN, PROFILES, Numerics, resolve
from qarl_jax.numerics.float32 import divide, pack_int4, round_to, unpack_int4
from qarl_jax.quant.backward import Backward, misrounded
from qarl_jax.quant.dot import dot, expert_dot, sum_of_shards
from qarl_jax.quant.qtensor import Coded, QTensor, inputs_of, rows_of
from qarl_jax.quant.rules import Rules
from qarl_jax.quant.scheme import Scheme
from qarl_jax.quant.schemes import (
    SCHEMES,
    WIDTHS,
    at_width,
    blank,
    check_quantizable,
    decoded,
    dequantize,
    on_engine,
    over_widths,
    parse_scheme,
    quantize,
    quantizes_activations,
    scheme_names,
)
