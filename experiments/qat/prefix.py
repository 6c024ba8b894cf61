# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/prefix.py CONFIG [overrides]`: perplexity of an unfinished training's held-out rows.

The finished layers are low-bit, trained or merely rounded, and the rest of the model is in full precision.
"""

import json
import sys

import jax.numpy as jnp
import numpy as np

from qarl_jax.models.hf.by_layer import layer_config, read_layer
from qarl_jax.qat import blocks, command
from qarl_jax.runtime.progress import Task
from qarl_jax.typed_config import load


def main(file: str, overrides: list[str]) -> None:
    """Prints one JSON line with the perplexity on held-out rows."""
    job = command._job(load.load(command.Config, file, overrides))
    made = blocks.Blocks(job, Task("training", None, "updates"))
    done, last = len(made.progress.layers), job.config.num_layers
    config = layer_config(job.config, done)
    streams = {kind: np.asarray(blocks.Rows(made.progress.path(done, kind))(made.heldout)) for kind in blocks.STREAMS}
    for layer in range(done, last):
        params = read_layer(made.checkpoint, job.config, layer)
        streams = {kind: np.asarray(blocks._run(config, params, jnp.asarray(x))) for kind, x in streams.items()}
    head, norm = made.tail()
    count = job.heldout.size - len(job.heldout)
    found = {
        kind: float(np.exp(blocks._nll(job.config, norm, head, jnp.asarray(x), jnp.asarray(job.heldout)) / count))
        for kind, x in streams.items()
    }
    print(json.dumps({"low-bit layers": done, "of": last, "perplexity": found, "blocks": made.progress.layers}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
