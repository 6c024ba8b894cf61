# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes the masters once per optimizer update and publishes them to the engine once per step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.learning.learner import Learner
from qarl_jax.learning.state import TrainState
from qarl_jax.learning.trainable import joined
from qarl_jax.metrics import Mean
from qarl_jax.models import invariant_scaling
from qarl_jax.quant import QTensor
from qarl_jax.quant.qtensor import moved_codes
from qarl_jax.rollout import PolicyWeights, RolloutEngine, norm_noise
from qarl_jax.run import build
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import progress
from qarl_jax.runtime.mesh import launch_lock


class Publisher:
    """Quantizes the masters to QTensors once per update, and publishes them to the engine once per step.

    If learner and sampler share a scheme (QaRL), it publishes the tensors that the learner's forward reads in the next
    update. Else (quantized rollout, bf16 learner) it quantizes for the sampler alone. Under `rollout.norm_noise` the
    published norm gains have noise, a function of the run's seed and the version.

    Attributes:
      flips: shares of codes that the last publish changed (`by_layer`); empty before the second publish.
    """

    def __init__(self, cfg: RunConfig, learner: Learner, engine: RolloutEngine):
        self.learner, self.engine = learner, engine
        self.graphdef = build.rollout_graphdef(cfg, learner.graphdef)
        self._quantize = None if self.graphdef == learner.graphdef else learner.quantizer(self.graphdef)
        self._compares = cfg.quant.code_flips
        self._noise, self._seed, self._steps = cfg.rollout.norm_noise, cfg.seed, cfg.train.steps
        self._noise_served: dict[str, float] = {}
        self._qweights: Any = None
        self._published: Any = None
        self.flips: dict[str, list[float | None]] = {}

    def qweights(self, state: TrainState) -> Any:
        """Returns the learner's QTensors for `state`; reuses the published ones if the learner computes with them."""
        if self._qweights is None:
            self._qweights = self.learner.quantize(state.params)
        return self._qweights

    def updated(self) -> None:
        """Drops the current QTensors, because an update has changed the masters."""
        self._qweights = None

    def publish(self, state: TrainState, version: int) -> dict[str, float]:
        """Publishes `state` as `version`.

        Returns:
          Metrics: the engine's timings, the share of codes that changed, and the norm noise of the version served
          before (`norm_noise/sigma`, `norm_noise/moved`). A synchronous step's responses were drawn under that version.
        """
        qweights = self._quantized(state)
        learned = self.learner.trainable.learned(qweights)
        before = self._noise_served
        report = self._hand_over(state, qweights, version, self._sigma(version)) | before
        with launch_lock(self.learner.mesh.size):
            if jax.tree.leaves(learned):
                error = invariant_scaling.quantization_error(state.params, learned)
                report["quant/error"] = float(jax.device_get(error))
                if self._published is not None:
                    flips = jax.device_get(code_flips(self._published, learned))
                    # QuRL's "frozen actor" alarm: a policy whose codes do not change samples the same way for ever.
                    report["quant/code_flips"] = changed_share(flips)
                    self.flips = by_layer(flips, models.config_of(self.graphdef).stacks)
        self._published = learned if self._compares else None
        return report

    @contextlib.contextmanager
    def without_noise(self, state: TrainState, version: int) -> Iterator[None]:
        """Serves `state` without norm noise inside the block, for evaluation.

        Args:
          state, version: those of the last publish.
        """
        sigma = self._sigma(version)
        if not sigma:
            yield
            return
        with self.engine.reserved():
            self._hand_over(state, self._quantized(state), version, 0.0)
            yield
            self._hand_over(state, self._quantized(state), version, sigma)

    @contextlib.contextmanager
    def at_width(self, state: TrainState, version: int, bits: int) -> Iterator[None]:
        """Serves `state` quantized to `bits` bits, without noise, inside the block. Arguments as in `without_noise`."""
        graphdef, qweights = build.at_width(self.learner, self.graphdef, state.params, bits)
        with self.engine.reserved():
            self._hand_over(state, qweights, version, 0.0, graphdef)
            yield
            self._hand_over(state, self._quantized(state), version, self._sigma(version))

    def _sigma(self, version: int) -> float:
        return 0.0 if self._noise is None else self._noise.sigma(version, self._steps)

    def _quantized(self, state: TrainState) -> Any:
        return self.qweights(state) if self._quantize is None else self._quantize(state.params)

    def _hand_over(
        self, state: TrainState, qweights: Any, version: int, sigma: float, graphdef: Any = None
    ) -> dict[str, float]:
        params, qtensors = joined(state.params, qweights)
        fixed = frozenset(path for path in models.by_path(self.learner.frozen) if not models.is_fixed(path))
        weights = PolicyWeights(graphdef=graphdef or self.graphdef, params=params, qweights=qtensors, fixed=fixed)
        if self._noise is not None:
            weights = self._explore(self._noise, weights, version, sigma)
        with progress.task("publishing"):
            return timed(self.engine.publish(weights, version))

    def _explore(self, noise: norm_noise.Config, weights: PolicyWeights, version: int, sigma: float) -> PolicyWeights:
        """Adds the noise of a version; no gain that may have noise is fixed."""
        params, moved = weights.params, 0.0
        if sigma:
            seed = build.seed_of(self._seed, version, "norm noise")
            dtype = models.config_of(self.graphdef).compute_dtype
            params, moved = norm_noise.add(noise, params, sigma=sigma, seed=seed, dtype=dtype, mesh=self.learner.mesh)
        self._noise_served = {"norm_noise/sigma": sigma, "norm_noise/moved": moved}
        fixed = frozenset(path for path in weights.fixed if not noise.covers(path))
        return dataclasses.replace(weights, params=params, fixed=fixed)


def by_layer(flips: Mapping[str, Mean], stacks: Sequence[Any]) -> dict[str, list[float | None]]:
    """Converts `code_flips` to a line of histograms.jsonl: `flips/attn.q` -> a share per layer.

    None stands for a layer without this weight. A weight outside the layers has one share.
    """
    out: dict[str, list[float | None]] = {}
    layers = max(stack.start + stack.length for stack in stacks)
    for path, mean in flips.items():
        shares = [float(f"{share:.4g}") for share in np.atleast_1d(mean.total / mean.count)]
        names = [part for part in path.split(".") if part not in ("kernel", "value")]
        if names[0] != "stacks":
            out["flips/" + ".".join(names)] = [*shares]
            continue
        stack = stacks[int(names[1])]
        row = out.setdefault("flips/" + ".".join(names[2:]), [None] * layers)
        row[stack.start : stack.start + stack.length] = shares
    return out


def timed(published: dict[str, float]) -> dict[str, float]:
    """Renames an engine's timings to `time/publish/...`, and `time/start_...` for its start."""
    names = {key: key.removeprefix("time/") for key in published}
    return {f"time/{'' if n.startswith('start_') else 'publish/'}{n}": published[key] for key, n in names.items()}


@jax.jit
def code_flips(before: Any, after: Any) -> dict[str, Mean]:
    """Computes per weight the share of integer (or fp8) codes that differ between two trees of QTensors.

    Returns:
      The weight's path in the tree -> Mean, of shape [layers] for a stacked weight, else [].
    """

    def is_qtensor(x: Any) -> bool:
        return isinstance(x, QTensor)

    out = {}
    pairs = zip(jax.tree.leaves_with_path(before, is_qtensor), jax.tree.leaves(after, is_leaf=is_qtensor), strict=True)
    for (path, old), new in pairs:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        inside = tuple(range(name.startswith("stacks."), old.ndim))
        rows = moved_codes(old, new).sum(-1, dtype=jnp.int32)  # a float32 counts to 2^24 alone
        changed = rows.astype(jnp.float32).sum(inside[:-1])
        count = math.prod(old.shape[axis] for axis in inside)
        out[name] = Mean(changed, jnp.full_like(changed, count))
    return out


def changed_share(flips: Mapping[str, Mean]) -> float:
    """Returns the share of all codes that differ, over all weights of `code_flips`."""
    changed, codes = (sum(float(np.sum(getattr(m, part))) for m in flips.values()) for part in ("total", "count"))
    return changed / codes
