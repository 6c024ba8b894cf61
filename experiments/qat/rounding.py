# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/rounding.py CONFIG [--schemes S...] [--ties] [overrides]`: perplexity by rounding alone.

The model is rounded to nearest, not trained. A line of JSON per scheme has its held-out perplexity. `--ties` adds that
of ties that round to the even code, and the share of weights that differ.
"""

import argparse
import json

import jax
import jax.numpy as jnp

from qarl_jax import models
from qarl_jax.qat import command, distill, text
from qarl_jax.quant import dequantize
from qarl_jax.quant.schemes import asym_grid
from qarl_jax.typed_config import load

ROUNDED = {"up": asym_grid.round_half_up, "even": jnp.round}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--schemes", nargs="+", default=[f"w{bits}a16_asym:g32" for bits in (4, 3, 2)])
    parser.add_argument("--ties", action="store_true")
    args, overrides = parser.parse_known_args()
    cfg = load.load(command.Config, args.config, overrides)
    config = models.read_config(cfg.model.path, param_dtype="float32")
    sizes = {"count": cfg.text.rows, "heldout": cfg.text.heldout, "length": cfg.text.row_len}
    _, heldout = text.rows(cfg.data, cfg.model.path, config, **sizes, seed=cfg.seed)
    graphdef, masters = models.load_masters(cfg.model.path, config)
    print(json.dumps({"full": distill.perplexity(graphdef, masters, heldout, 4), "heldout": heldout.shape}))
    for scheme in args.schemes:
        own, line, decoded = models.with_scheme(graphdef, models.parse_rules(scheme)), {"scheme": scheme}, []
        if not args.ties:
            print(json.dumps(line | {"perplexity": distill.perplexity(own, masters, heldout, 4)}), flush=True)
            continue
        for name, rounding in ROUNDED.items():
            asym_grid.round_half_up = rounding
            jax.clear_caches()  # compiled programs round by the other
            line[name] = distill.perplexity(own, masters, heldout, 4)
            found = jax.tree.leaves(models.quantize_params(own, masters), is_leaf=lambda x: hasattr(x, "codes"))
            decoded.append([dequantize(x, jnp.float32) for x in found])
        moved = sum(int((up != even).sum()) for up, even in zip(*decoded, strict=True))
        print(json.dumps(line | {"moved": round(moved / sum(x.size for x in decoded[0]), 4)}), flush=True)


if __name__ == "__main__":
    main()
