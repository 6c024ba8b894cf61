# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A source of prompts for tests that only count them."""

from qarl_jax.data.sources.template import Skipped
from qarl_jax.types import Prompt


class Source:
    """`size` prompts named by their index."""

    fingerprint = "numbers"

    def __init__(self, size):
        self.size, self.skipped, self.notes, self.longest = size, Skipped(), {}, 2

    def __len__(self):
        return self.size

    def prompt(self, i):
        return Prompt(uid=str(i), tokens=(3, 4), text="", answer="")
