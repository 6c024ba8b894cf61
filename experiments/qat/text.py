# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/text.py OUT.jsonl`: Python's language reference, as its own help has it, one topic a row."""

import json
import pathlib
import pydoc_data.topics
import sys

if __name__ == "__main__":
    rows = [json.dumps({"text": text}) for _, text in sorted(pydoc_data.topics.topics.items())]
    pathlib.Path(sys.argv[1]).write_text("\n".join(rows) + "\n")
