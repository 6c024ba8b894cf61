# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Noise on the sampler's norm gains, so that it explores: adaptive quantization noise (AQN; QeRL, arXiv 2510.11696).

    gamma' = round(round(gamma) + round(z))        z ~ N(0, sigma^2) in float32, rounded to the compute dtype

z is drawn once per version, from the run's seed and the version alone. The learner keeps gamma, so sampler and learner
are two policies, and the loss has to correct for the difference. Evaluation samples under gamma.

A run is K equal stages, numbered from 0:

    schedule    stage 0     stage j
    code        no noise    start (end / start)^((j - 1) / (K - 2))
    paper       start       start (end / start)^(j / (K - 1))

bfloat16 swallows small noise: near a gain of 0.75, sigma = 1e-3 moves 5 % of the gains, and 1e-4 none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from qarl_jax import models
from qarl_jax.models.params import part_of, united
from qarl_jax.numerics.float32 import round_to
from qarl_jax.runtime.mesh import launching
from qarl_jax.types import UserError, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Adaptive quantization noise (AQN, QeRL): Gaussian noise on the sampler's norm gains.

    Attributes:
      start, end: standard deviation of the first and the last stage with noise.
      stages: number of equal parts of the run; each has one standard deviation.
      schedule: code (the first stage has no noise, as in QeRL's code) or paper (every stage has).
      final: also add noise to the last norm; false: only to the norms before attention and MLP.
    """

    start: float = 1e-2
    end: float = 1e-4
    stages: int = 10
    schedule: Literal["code", "paper"] = "code"
    final: bool = False

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise UserError(
                    f"{name} must be positive and finite, got {getattr(self, name)}; norm_noise=null is none."
                )
        if self.start > 1:
            raise UserError(f"start={self.start} is larger than the norm gains, which are near 1; QeRL's is 0.01.")
        if self.start < self.end:
            raise UserError(f"start={self.start} is below end={self.end}, but the noise shrinks: exchange the two.")
        at_least(self, 3 if self.schedule == "code" else 2, "stages")

    def check(self, loss: Any) -> None:
        """Refuses a section `loss` that assumes equal policies in sampler and learner.

        Raises:
          UserError: the loss corrects no mismatch, and its ratio is not the sampler's.
        """
        if loss.mismatch == "none" and loss.ratio != "sampler":
            raise UserError(
                f"rollout.norm_noise: the sampler is not the learner then, and loss.name={loss.name} does not correct"
                " for it; set loss.mismatch=tis, or loss.name=tbpo with its weight."
            )

    def sigma(self, version: int, steps: int) -> float:
        """Returns the noise's standard deviation for a version; 0 for the last one, which no training step samples."""
        silent = int(self.schedule == "code")
        stage = version * self.stages // steps - silent
        if stage < 0 or version >= steps:
            return 0.0
        return self.start * (self.end / self.start) ** (stage / (self.stages - 1 - silent))

    def covers(self, path: str) -> bool:
        """Tells whether the leaf at this path has noise."""
        return bool(re.search(models.BLOCK_NORMS, path)) or (self.final and path == models.FINAL_NORM)


def add(cfg: Config, params: nnx.State, *, sigma: float, seed: int, dtype: Any, mesh: Mesh) -> tuple[nnx.State, float]:
    """Adds noise to the norm gains among `params`.

    Args:
      params: masters or published weights. Leaves keep their dtype, shape and sharding.
      seed: in [0, 2^63).
      dtype: the sampler's compute dtype, in which gains and noise are added.

    Returns:
      The params, and the share of gain elements that changed.
    """
    gains = part_of(params, cfg.covers)
    places = jax.tree.map(lambda x: x.sharding, gains)
    program = _program(jnp.dtype(dtype), tuple(jax.tree.leaves(places)), jax.tree.structure(places))
    with launching(mesh):
        noisy, moved = program(gains, jax.random.key(seed % 2**32), jnp.float32(sigma))
        share = float(jax.device_get(moved)) / sum(x.size for x in jax.tree.leaves(gains))
    return united(part_of(params, lambda path: not cfg.covers(path)), noisy), share


@functools.lru_cache(maxsize=8)
def _program(dtype: Any, places: tuple[Any, ...], structure: Any) -> Any:
    return jax.jit(functools.partial(_noisy, dtype), out_shardings=(jax.tree.unflatten(structure, places), None))


def _noisy(dtype: Any, gains: nnx.State, key: jax.Array, sigma: jax.Array) -> tuple[nnx.State, jax.Array]:
    """(gains with noise, number of those that moved)."""
    leaves, structure = jax.tree.flatten(gains)
    out, moved = [], jnp.int32(0)
    for number, leaf in enumerate(leaves):
        draw = jax.random.normal(jax.random.fold_in(key, number), leaf.shape, jnp.float32) * sigma
        gain, noise = (round_to(x.astype(jnp.float32), dtype).astype(jnp.float32) for x in (leaf, draw))
        noisy = round_to(gain + noise, dtype).astype(jnp.float32)
        moved += (noisy != gain).sum(dtype=jnp.int32)
        out.append(noisy.astype(leaf.dtype))
    return jax.tree.unflatten(structure, out), moved
