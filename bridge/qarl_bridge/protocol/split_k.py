# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Split-K rule of the CUDA engine and the learner: the parts into which a matrix product cuts its inputs K.

The order of a float sum decides its bits. A kernel that chooses the order by the number of rows gives a token other
bits in another batch. Here the shape of the weight alone decides the order:

    y = sum over parts p, ascending, of acc_p         acc_p: one float32 accumulator of the tensor cores through the
                                                      inputs of part p, ascending

With more than one part a product of few rows can use the whole GPU. The engine computes parts in parallel for few rows
and one after the other for many (`engine/cuda/ops.py`); the learner adds up products of slices.
"""

from __future__ import annotations

import itertools

STEP = 128  # inputs; parts are whole steps
OUTPUTS = 128  # of a tile
NARROW = 40  # tiles of outputs, which leave many of an H100's 132 multiprocessors idle when there are few rows
LEAST_STEPS = 8  # of an inner dimension worth cutting
MOST_PARTS = 8  # of an adapter's product
PART_STEPS = 4  # of an adapter's part, at least


def splits_of(outputs: int, inputs: int) -> int:
    """Decides the number of parts into which a matrix product cuts its inputs: 2 for few outputs and long inputs, or 1.

    Args:
      outputs, inputs: shape [N, K] of the engine's fused weight (q, k and v together).
    """
    tiles, steps = -(-outputs // OUTPUTS), -(-inputs // STEP)
    return 2 if tiles <= NARROW and steps >= LEAST_STEPS else 1


def splits_of_adapter(inputs: int) -> int:
    """Decides the number of parts into which an adapter's first product, h = x A^T, cuts its inputs: eight at most.

    An adapter has so few outputs that one or two multiprocessors would do all the work. Parts are equally long, of at
    least four steps.
    """
    steps = -(-inputs // STEP)
    least = max(PART_STEPS, -(-steps // MOST_PARTS))
    return next((steps // length for length in range(least, steps) if steps % length == 0), 1)


def cuts(inputs: int, splits: int) -> list[tuple[int, int]]:
    """Lists the input range (first, end) of each part, in whole steps of 128, longer parts first.

    Example: cuts(1280, 3) is [(0, 512), (512, 896), (896, 1280)].
    """
    steps = -(-inputs // STEP)
    ends = [steps // splits * i + min(i, steps % splits) for i in range(splits + 1)]
    return [(STEP * a, min(STEP * b, inputs)) for a, b in itertools.pairwise(ends)]
