# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training before RL: masters whose rounding loses little (Bit-by-Bit, arXiv 2604.07888).

text.py      rows of tokens: any data source, or what the model writes itself
updates.py   updates of some masters by one loss, resumable to the bit
blocks.py    a layer at a time, through ever coarser schemes, against the full-precision layer's output
distill.py   all layers at once, against the full-precision model's distribution
command.py   the verb: config, files of a run in progress, the folder
"""

from qarl_jax.qat.command import main
