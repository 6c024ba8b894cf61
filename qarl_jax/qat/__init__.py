# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training before RL: makes masters that lose little when quantized (Bit-by-Bit, arXiv 2604.07888).

text.py      rows of tokens, from any data source or sampled from the model
updates.py   optimizer updates of masters by one loss, resumable to the bit
blocks.py    training of one layer at a time, through ever coarser schemes, to match the full-precision layer's output
distill.py   training of all layers at once, to match the full-precision model's distribution
command.py   the command `python -m qarl_jax.qat`: its config, files in progress and result
"""

from qarl_jax.qat.command import main
