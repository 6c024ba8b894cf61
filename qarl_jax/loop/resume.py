# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Decides where a run resumes: at its newest whole checkpoint, at step 0, or nowhere because all steps are trained."""

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
    """Returns the closing message of a run that has trained all of its steps; empty if steps are left. Writes nothing.

    Args:
      on_gpu: True if the learner runs on a GPU; passed in so that JAX is not initialized.

    Raises:
      UserError: the run cannot resume under these settings (`stamp.check_same_policy`).
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
    """Reads the run's newest whole checkpoint into `state`; returns None if the run begins at step 0.

    Raises:
      UserError: the run had checkpoints and none is whole, unless `checkpoint.start_over` is set.
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
