# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's int4 kernel on Hopper (Machete) cuts the inner dimension, recomputed on the host.

Machete multiplies W x^T in tiles of weights x rows, 64 inputs at a time into one float32 accumulator. Where the tiles
do not fill the GPU, CUTLASS' stream-K scheduler cuts K among thread blocks, and the parts are added in float32, each
onto the sum of those before it, in ascending order of k:

    data-parallel   one part: 512 inputs or fewer (8 steps), a last wave at least half full, or no last wave
    split-K         the same number of parts for every tile, as equal as whole steps of 64 allow, longer ones first
    stream-K        thread blocks get equal runs of steps through all tiles, so that tiles are cut in different places

Which of them depends on N, K, the number of rows M (through the tile and the number of tiles) and the GPU's
multiprocessors. `parts` names the layers whose order does not depend on M; only those can be mirrored by a learner,
which never knows how many rows shared a sampler's step.

Read in vLLM 0.25's machete/generate.py (the tile) and CUTLASS 3's tile_scheduler_params.h and
sm90_tile_scheduler_stream_k.hpp (the cuts). On an H200 every output of every case of `benchmarks/kernel_order.py` was
the kernel's. CUTLASS' "M" is N here, its "N" the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Literal

STEP = 64  # inputs of one step of the main loop (128 bytes of bfloat16)
MULTIPROCESSORS = 132  # of an H100 SXM and an H200
_PER_GPC = 18  # multiprocessors of a graphics processing cluster, across which no cluster of thread blocks lies
_LEAST = 8  # steps of a thread block's share, at least
_MOST_GROUPS = 8

Part = tuple[int, int]  # steps of K: first, end


@dataclasses.dataclass(frozen=True)
class Tile:
    """Weights and rows of an output tile, and the thread blocks of a cluster, which lie side by side along N."""

    weights: int
    rows: int
    cluster: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one product is divided.

    Attributes:
      mode: see above.
      tile: the tile.
      steps: of K.
      grid: tiles along N (whole clusters) and along the rows.
      splits: parts of every tile (data-parallel: 1); of stream-K, of the tiles cut most.
      cuts: stream-K's parts of those tiles that are cut; all others are whole, or cut as `splits` says.
    """

    mode: Literal["data-parallel", "split-K", "stream-K"]
    tile: Tile
    steps: int
    grid: tuple[int, int]
    splits: int = 1
    cuts: dict[tuple[int, int], list[Part]] = dataclasses.field(default_factory=dict)

    def parts(self, weights: int, rows: int) -> list[Part]:
        """The parts, in the order in which they are added, of the tile at (along N, along the rows)."""
        if self.mode == "stream-K":
            return self.cuts.get((weights, rows), [(0, self.steps)])
        return equal_parts(self.steps, self.splits)


def equal_parts(steps: int, count: int) -> list[Part]:
    """`steps` in `count` parts, the first ones longer by one where they do not come out even."""
    ends = [steps // count * i + min(i, steps % count) for i in range(count + 1)]
    return list(itertools.pairwise(ends))


def inputs_of(k: int, count: int) -> list[Part]:
    """The inputs of `count` parts of K inputs, cut between steps."""
    return [(STEP * first, min(STEP * end, k)) for first, end in equal_parts(math.ceil(k / STEP), count)]


def tile_of(m: int, n: int, k: int) -> Tile:
    """vLLM's choice for M rows, N outputs and K inputs (a table tuned on an H100)."""
    if m > 256:
        return Tile(128, 128, 2) if k <= 16384 and n <= 4096 else Tile(128, 256, 2)
    if m > 128:
        if k <= 4096 and n <= 4096:
            return Tile(128, 64, 2)
        return Tile(128, 128, 2) if k <= 8192 and n <= 8192 else Tile(128, 256, 2)
    if m > 64:
        if k <= 4069 and n <= 8192:  # sic
            return Tile(128, 32, 2) if n <= 4069 else Tile(128, 64, 2)
        return Tile(256, 128, 2) if k >= 8192 and n >= 12288 else Tile(128, 128, 2)
    if m > 32:
        if k <= 6144 and n <= 6144:
            return Tile(128, 16, 1)
        return Tile(256, 64, 2) if k >= 16384 and n >= 12288 else Tile(128, 64, 2)
    if m > 16:
        return Tile(128, 32, 2) if k <= 12288 and n <= 8192 else Tile(256, 32, 2)
    return Tile(256, 16, 1) if n >= 26624 else Tile(128, 16, 1)


def plan(m: int, n: int, k: int, *, tile: Tile | None = None, multiprocessors: int = MULTIPROCESSORS) -> Plan:
    """How Machete divides a product of M rows with a weight [N, K].

    Args:
      m, n, k: rows, outputs, inputs.
      tile: of a schedule that is asked for by name; None: vLLM's choice.
      multiprocessors: of the GPU.
    """
    tile = tile or tile_of(m, n, k)
    cluster, steps = tile.cluster, math.ceil(k / STEP)
    grid = (math.ceil(math.ceil(n / tile.weights) / cluster) * cluster, math.ceil(m / tile.rows))
    tiles, wave = grid[0] * grid[1], _wave(cluster, multiprocessors)
    whole = Plan("data-parallel", tile, steps, grid)
    full_waves, last = divmod(tiles, wave)
    if last == 0 or steps <= _LEAST or 2 * last >= wave:
        return whole
    # One full wave shares its work with the last one; those before it are left whole.
    shared = (tiles - max(full_waves - 1, 0) * wave) // cluster * cluster
    units = min(wave, steps * shared // _LEAST // cluster * cluster)
    if shared == 0 or units == 0:
        return whole
    if units > shared and units % shared == 0:
        return dataclasses.replace(whole, mode="split-K", splits=units // shared)
    cuts = _stream(grid, cluster, steps, shared // cluster, units // cluster)
    splits = max(len(parts) for parts in cuts.values())
    return dataclasses.replace(whole, mode="stream-K", splits=splits, cuts=cuts)


@functools.cache
def parts(n: int, k: int, *, rows: int = 2048) -> int:
    """Into how many parts K is cut, whatever the number of rows up to `rows`; 1, too, where that depends on the rows.

    Args:
      n, k: outputs and inputs of the layer as the engine fuses it (q, k and v; gate and up).
      rows: the most rows the engine multiplies at once: vLLM's max_num_batched_tokens, 2048 unless asked for more.
    """
    if k <= STEP * _LEAST:
        return 1
    first = plan(1, n, k)
    for m in range(1, rows + 1):
        other = plan(m, n, k)
        if other.mode == "stream-K" or other.splits != first.splits:
            return 1
    return first.splits


def _wave(cluster: int, multiprocessors: int) -> int:
    """Thread blocks that run at a time: whole clusters within every GPC, and within what is left of the last."""
    if cluster == 1:
        return multiprocessors
    gpcs, rest = divmod(multiprocessors, _PER_GPC)
    if gpcs == 0:
        gpcs, rest = 1, 0
    fitting = gpcs * (_PER_GPC - _PER_GPC % cluster) + rest - rest % cluster
    return min(multiprocessors, fitting) // cluster * cluster


def _groups(most: int, cluster: int, steps: int, tiles: int, units: int) -> int:
    """Into how many groups thread blocks and tiles are dealt; tiles and units are counted in clusters."""

    def fits(groups: int) -> bool:
        return units % groups == 0 and (tiles // groups) * cluster * steps // (units * cluster // groups) >= _LEAST

    candidates = range(min(most, _MOST_GROUPS), 1, -1)
    ideal = (g for g in candidates if fits(g) and tiles % g == 0)
    return next(ideal, next((g for g in candidates if fits(g)), 1))


def _stream(
    grid: tuple[int, int], cluster: int, steps: int, tiles: int, units: int
) -> dict[tuple[int, int], list[Part]]:
    """Parts of the tiles that share; tiles and units (thread blocks) are counted in clusters."""
    along_weights = grid[1] > grid[0]
    across = grid[0] // cluster
    groups = _groups(across if along_weights else grid[1], cluster, steps, tiles, units)
    found: dict[int, list[Part]] = {}
    for group in range(groups):
        work = (tiles // groups + (group < tiles % groups)) * steps
        share, longer = divmod(work, units // groups)
        for unit in range(units // groups):
            begin = _moved(share * unit + min(unit, longer), steps)
            end = _moved(share * (unit + 1) + min(unit + 1, longer), steps)
            while begin < end:
                tile = begin // steps
                stop = min(end, (tile + 1) * steps)
                found.setdefault(tile * groups + group, []).append((begin - tile * steps, stop - tile * steps))
                begin = stop
    cuts = {}
    for number, parts_of_it in found.items():
        at = (number % across, number // across) if along_weights else (number // grid[1], number % grid[1])
        for block in range(cluster):
            cuts[at[0] * cluster + block, at[1]] = sorted(parts_of_it)
    return cuts


def _moved(at: int, steps: int) -> int:
    """A cut, moved to a tile's border where it would leave a thread block fewer than the least number of steps."""
    tile, inside = divmod(at, steps)
    if inside < _LEAST:
        return tile * steps
    return (tile + 1) * steps if inside > steps - _LEAST else at
