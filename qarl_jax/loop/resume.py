# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The place at which a run goes on: its newest whole checkpoint, or step 0 and why; or that there is nothing left to
train."""

from __future__ import annotations

import os
from typing import Any

from qarl_jax.loop import step_metrics
from qarl_jax.observe import recorder
from qarl_jax.run import on_disk, stamp
from qarl_jax.run.checkpoint import Checkpoints, DamagedCheckpointError, Restored
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import processes
from qarl_jax.types import UserError


def finished(cfg: RunConfig, *, on_gpu: bool) -> str:
    """The last word of a run that has trained all of its steps; empty: there are steps to train. Writes nothing.

    Args:
      on_gpu: True if the learner runs on a GPU; JAX is not asked.

    Raises:
      UserError: the run cannot go on under these settings (`stamp.check_same_policy`).
    """
    checkpoints = Checkpoints(os.path.join(cfg.run_dir, "checkpoints"), cfg.checkpoint)
    saved = stamp.of(checkpoints.directory)
    if saved is None:
        return ""
    stamp.check_same_policy(cfg, saved, on_gpu=on_gpu)
    if saved["step"] < cfg.train.steps or not on_disk.is_sound(checkpoints.path(saved["step"]), contents=False):
        return ""
    done = f"done: {cfg.run_dir} has trained step {saved['step']}, its last; a larger train.steps goes on from there"
    return "\n".join([done, *step_metrics.next_steps(cfg)])


def restore(
    cfg: RunConfig, checkpoints: Checkpoints, observer: recorder.Observer | recorder.Silent, state: dict[str, Any]
) -> Restored | None:
    """The run's newest whole checkpoint, read into `state`; None: it begins at step 0.

    Raises:
      UserError: there were checkpoints and none is whole, unless `checkpoint.start_over` says to begin anew.
    """
    latest = processes.from_first(observer.latest)
    if processes.from_first(checkpoints.steps):
        try:
            return checkpoints.restore(state)
        except DamagedCheckpointError as damage:
            lost = str(damage)
    elif latest is None:
        return None
    elif checkpoints.must_have_saved(latest + 1):
        lost = f"{cfg.run_dir} has records up to step {latest}, but its checkpoints are gone."
    else:
        observer.say(f"no checkpoint had been saved when this run ended at step {latest}: it begins at step 0 again")
        return None
    if not cfg.checkpoint.start_over:
        raise UserError(
            f"{lost} Put one back, or name another run_dir; checkpoint.start_over=true begins at step 0 and keeps the"
            " old records aside."
        )
    observer.set_aside()
    observer.say(f"{lost} The run begins at step 0; its old records will be kept as *.jsonl.old-*")
    return None
