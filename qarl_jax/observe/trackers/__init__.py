# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Places beside the run's own files that show its metrics and samples: one file each, chosen by `log.trackers`.

A tracker reads metrics.jsonl and samples.jsonl as they grow, in a process of its own (`follower.py`; the trainer's end
of it is `watched.py`). So it can neither block the trainer nor end it, and what it missed it finds in the files.
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
