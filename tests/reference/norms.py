# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows whose RMSNorm lies between two float32 numbers, so that the last digit of float64 arithmetic decides."""

import numpy as np

UNIT = 2.0**-15  # of a row whose largest number is in [4, 8), whose squares are multiples of 2^(2 * 2 - 34)


def rows_beside_a_midpoint(rows: int, width: int, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Makes bfloat16-valued float32 rows [rows, width] whose 1 / sqrt(mean(x^2) + eps) is near a midpoint.

    eps is rounded to float32, as kernels take it. At most 64 numbers of a row are not 0.

    Returns:
      The rows, and the float32 roots [rows] by IEEE operations from exact sums.
    """
    rng, eps = np.random.default_rng(width), float(np.float32(eps))
    r = rng.uniform(0.8, 1.2, 1 << 21).astype(np.float32) * np.float32(np.sqrt(width / 64))
    middle = (r.astype(np.float64) + np.nextafter(r, np.float32(0))) / 2
    wanted = (1 / middle**2 - eps) * width / UNIT**2
    best = np.argsort(np.abs(wanted - np.rint(wanted)))[:rows]
    x, sums = np.zeros((rows, width)), np.rint(wanted[best]).astype(np.int64)
    for row, left in zip(x, sums.tolist(), strict=True):
        numbers = [int(4 / UNIT)]  # the largest, in units
        left -= numbers[0] ** 2
        while left:
            numbers.append(_of_eight_bits(min(np.sqrt(left / (1 + 2 * (len(numbers) < 20))), numbers[0])))
            left -= numbers[-1] ** 2
        row[: len(numbers)] = np.array(numbers) * UNIT * rng.choice([-1, 1], len(numbers))
        rng.shuffle(row)
    roots = (1 / np.sqrt(sums * UNIT**2 / width + eps)).astype(np.float32)
    return x.astype(np.float32), roots


def _of_eight_bits(x: float) -> int:
    """Rounds down to an integer with eight significant bits, as bfloat16 has."""
    shift = max(0, int(x).bit_length() - 8)
    return int(x) >> shift << shift
