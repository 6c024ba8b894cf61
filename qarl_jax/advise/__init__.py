# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Forecasts the time of a run's step, scheme by scheme.

`machines` has the devices' peaks, and `counts` what a step does at them. `forecast` turns counts into seconds by
measured rates, `measure` runs steps on this machine, and `command` prints it all.
"""

from qarl_jax.advise.command import main
