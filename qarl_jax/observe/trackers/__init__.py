# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Trackers (TensorBoard, W&B, MLflow, Trackio) that show a run's metrics and samples; `log.trackers` chooses them.

A tracker reads metrics.jsonl and samples.jsonl as they grow, in a separate process (`follower.py`), which the trainer
starts and watches (`watched.py`). So it cannot block or end the trainer, and the files hold what it missed.
"""

from qarl_jax.observe.trackers import mlflow, tensorboard, trackio, wandb
from qarl_jax.observe.trackers.tracker import Tracked, Tracker

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": tensorboard.Tracker,
    "wandb": wandb.Tracker,
    "mlflow": mlflow.Tracker,
    "trackio": trackio.Tracker,
}
"""`log.trackers` -> tracker. It needs the package of the same name, or that of `PACKAGES`."""

PACKAGES = {"tensorboard": "tensorboardX"}
