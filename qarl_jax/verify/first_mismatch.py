# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.parity ... --at RUN/first_mismatch.jsonl`: which block makes a token's log-prob differ?

The last sequence that the run recorded (`loop/first_mismatch.py`) is prefilled in a live engine, and the first block
that differs is named. With that block a report says which operation to look at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from qarl_jax import models
from qarl_jax.observe.recorder import read_lines
from qarl_jax.rollout.vllm.engine import VllmEngine, leave_memory_to_vllm
from qarl_jax.types import UserError
from qarl_jax.verify import ladder, layers


def at(path: str, scheme: str, engine_name: str, options: ladder.Options, file: str) -> dict[str, Any]:
    """Finds the block of the model in which the last mismatch that a run recorded begins, with a live engine.

    Args:
      path: model folder of the policy, exported at that step. file: the run's first_mismatch.jsonl.
      scheme, engine_name, options: as `ladder.climb` takes them.

    Returns:
      {"found": the run's record without the sequence, "where": `layers.first_difference`, "first_broken": name or None}

    Raises:
      UserError: no such file, or none with a sequence.
    """
    records = [record for record in read_lines(file) if record.get("sequence")]
    if not records:
        raise UserError(f"--at {file}: no record of a mismatch with its sequence")
    sequence = records[-1].pop("sequence")[:-1]  # a token's log-prob comes from those before it
    if engine_name == "cuda":
        leave_memory_to_vllm()
    weights = ladder.load(path, scheme, engine_name, options.attention, options.tensor_parallel_size)
    model = models.config_of(weights.graphdef)
    if max(sequence) >= model.vocab_size:
        raise UserError(f"--at {file}: token {max(sequence)} is none of {path}'s; name the model of that run")
    room = len(sequence) + 256  # tokens, with a page to spare
    kv = 4 * room * model.num_layers * model.num_kv_heads * model.head_dim
    sizes: dict[str, Any] = {"prompts": 1, "prompt_len": len(sequence), "response_len": 1}
    options = dataclasses.replace(options, **sizes, kv_cache_gb=max(options.kv_cache_gb, kv / 2**30))
    engine = VllmEngine(options.engine(model), run_id="parity-at")
    try:
        engine.publish(weights, 0)
        where = layers.first_difference(engine.probe, weights, sequence)
    finally:
        engine.close()
    return {"found": records[-1], "where": where, "first_broken": where.partition(",")[0] or None}
