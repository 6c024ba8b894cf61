# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Names under which recomputation policies know what a layer computes."""

LINEAR_OUTPUT = "linear"  # what every linear layer stores
ATTENTION_INPUT, ATTENTION_OUTPUT, MIXER_OUTPUT = "qkv", "attention", "mixed"  # q, k, v as projected; softmax V; o
INVERSE_RMS = "inverse_rms"  # of each norm, four bytes a vector
ROW_ABSMAX = "row_absmax"  # of an activation's rows, where they are coded in eight bits
