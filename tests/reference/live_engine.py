# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A bridge around a real vLLM whose insides a test can break: run as a process, `python live_engine.py SCHEME FOLDER`.
SCHEME may be rules, in JSON.

The engine runs in the main thread, as in a bridge; the trainer in another. Prints one JSON object, the findings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from qarl_bridge.client import sender
from qarl_bridge.engine import fast_load
from qarl_bridge.engine.engine import VllmEngine
from qarl_bridge.protocol import formats, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import bridge as server
from qarl_bridge.server import staged
from qarl_bridge.server.engine_api import Sweeps
from qarl_bridge.transport.zeromq import Listener

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm.engine import engine_config, engine_tensors
from qarl_jax.verify import ladder

MODEL = os.path.join(os.path.dirname(__file__), "..", "..", "assets", "tiny-qwen3")
KEY = bytes(range(32))
DRAWS = [messages.Draw(prompt=[1 + i, 5, 7], seed=i) for i in range(6)]


def moved(weights: PolicyWeights, scale: float) -> PolicyWeights:
    """Another version of the same policy."""
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, weights.params)
    return dataclasses.replace(weights, params=params, qweights=models.quantizer(weights.graphdef)(params))


class Trainer:
    """Publishes and samples over a connection of its own."""

    def __init__(self, address: str, facts: messages.Facts, policies: list[dict[str, Any]]):
        self.client = sender.Client(address, KEY, timeout_s=120)
        self.client.acquire("run", 1)
        self._facts, self._policies = facts, policies
        self.steps = 0

    def publish(self, which: int, readback: str = "full") -> dict[str, float]:
        version = messages.Version(run_id="run", incarnation=1, step=self.steps)
        self.steps += 1
        held = sender.stage(
            self._policies[which].items(), version=version, model=self._facts.model, scheme=self._facts.scheme
        )
        try:
            return self.client.publish(held, readback=readback)
        finally:
            held.close()

    def draw(self) -> list[tuple[bytes, bytes]]:
        drawn = self.client.generate(DRAWS, messages.Sampling(max_tokens=12, temperature=0.0))
        return [(one.tokens, one.logprobs) for one in drawn]


def fails_once(function: Any, after: int) -> Any:
    """`function`, but its call number `after` (of this wrapper) raises."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise RuntimeError("broken for a test")
        return function(*args, **kwargs)

    return wrapped


def half_way(copy: Any) -> Any:
    """The tensors at the door, and an error in the middle of them."""
    pairs = [pair for part in staged.HostCopy.checked_parts(copy) for pair in part.items()]
    yield dict(pairs[: len(pairs) // 2])
    raise RuntimeError("broken for a test")


@contextlib.contextmanager
def chunked() -> Iterator[None]:
    """Versions come layer by layer meanwhile, and of a layer nothing is left when the next one is asked for."""

    def layers(sweep: Any) -> Any:
        def parts(copy: Any) -> Iterator[dict[str, Any]]:
            named = {name: array for part in sweep(copy) for name, array in part.items()}
            for _, names in itertools.groupby(named, formats.layer_of):
                held = {name: named[name].copy() for name in names}
                yield held
                for array in held.values():
                    array.reshape(-1).view(np.uint8)[:] = 0x55

        return parts

    own = staged.HostCopy.parts, staged.HostCopy.checked_parts, server._sweeps
    staged.HostCopy.parts, staged.HostCopy.checked_parts = layers(own[0]), layers(own[1])  # type: ignore[method-assign]
    server._sweeps = lambda copy, begin: Sweeps(begin, lasting=False)
    yield
    staged.HostCopy.parts, staged.HostCopy.checked_parts, server._sweeps = own  # type: ignore[method-assign]


def refusal(trainer: Trainer, which: int) -> tuple[str, float]:
    """(code and text of the error, seconds until it came: the engine serves again or is fenced)."""
    start = time.perf_counter()
    try:
        trainer.publish(which)
    except BridgeError as error:
        return f"{error.code}: {error}", time.perf_counter() - start
    return "none", 0.0


def scenario(trainer: Trainer, engine: VllmEngine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = trainer.publish(0)
    found["notes"] = trainer.client.status().facts.notes
    found["first_load_s"] = first["load_s"]
    zero = trainer.draw()
    found["whole_load_s"] = trainer.publish(1)["load_s"]
    one = trainer.draw()
    found["versions_differ"] = zero != one
    # A failure in the middle of loading whole modules: the last good version is back, to the last bit.
    assemble = fast_load._assemble
    fast_load._assemble = fails_once(assemble, 12)
    found["whole_failure"], found["whole_recovery_s"] = refusal(trainer, 0)
    fast_load._assemble = assemble
    found["restored_after_whole"] = trainer.draw() == one
    with chunked():
        engine._whole_is_proved = False  # as if it were the first
        found["parts"] = [trainer.publish(which)["weights_read_back"] for which in (0, 1, 0)]
        found["whole_chunked"] = trainer.draw() == zero and engine._whole_is_proved
    # Now vLLM's own loader, for the same versions.
    engine._whole = None
    found["vllm_load_s"] = trainer.publish(1)["load_s"]
    found["loaders_agree"] = trainer.draw() == one
    with chunked():
        trainer.publish(0)
        found["vllm_chunked"] = trainer.draw() == zero
    found["parts"].append(trainer.publish(1)["weights_read_back"])
    checked_parts = staged.HostCopy.checked_parts
    calls = []

    def breaks_first(copy: Any) -> Any:
        calls.append(copy)
        return half_way(copy) if len(calls) == 1 else checked_parts(copy)

    staged.HostCopy.checked_parts = breaks_first  # type: ignore[method-assign]
    found["loader_failure"], found["loader_recovery_s"] = refusal(trainer, 0)
    staged.HostCopy.checked_parts = checked_parts  # type: ignore[method-assign]
    found["restored_after_loader"] = trainer.draw() == one
    trainer.publish(0)
    found["back_to_zero"] = trainer.draw() == zero
    records = trainer.client.probe([3, 1, 4, 1, 5], ["model.layers.0.mlp.down_proj", "model.layers.1"])
    found["probed"] = [[record.module, [list(a.shape) for a in record.outputs]] for record in records]
    for modules in (["model.layers.0.nothing"], []):
        try:
            trainer.client.probe([1], modules)
        except BridgeError as error:
            found.setdefault("probe_errors", []).append(error.code)
    return found


def serve(folder: str, weights: PolicyWeights, expected: dict[str, messages.Expected], findings: Any) -> None:
    """Serves a model in this thread until `findings(address, engine)` returns in another; prints what it found."""
    config = engine_config(weights.graphdef)
    sender.write_folder(folder, config, expected.values())
    options = messages.EngineOptions(max_model_len=64, kv_cache_gb=0.1, max_num_seqs=8, threads=1)
    engine = VllmEngine(folder, config, expected, has_weights=False, options=options)
    bridge = server.Bridge(engine)
    listener = Listener(os.path.join(folder, "s"), KEY)
    bridge.serve(listener)
    found: dict[str, Any] = {}

    def train() -> None:
        try:
            found.update(findings(listener.address, engine))
        except BaseException as error:
            found["error"] = repr(error)
            raise
        finally:
            bridge.stop()

    thread = threading.Thread(target=train)
    thread.start()
    bridge.run()
    thread.join()
    print(json.dumps(found), flush=True)


def expected_of(tensors: dict[str, Any]) -> dict[str, messages.Expected]:
    """The entries that a model's tensors have in a manifest."""
    return {
        n: messages.Expected(name=n, dtype=messages.dtype_name(a.dtype), shape=list(a.shape))
        for n, a in tensors.items()
    }


def main(scheme: str, folder: str) -> None:
    weights = ladder.load(MODEL, json.loads(scheme) if scheme.startswith("[") else scheme, "cpu")
    policies = [dict(engine_tensors(weights)), dict(engine_tensors(moved(weights, 1.1)))]

    def findings(address: str, engine: VllmEngine) -> dict[str, Any]:
        trainer = Trainer(address, engine.facts, policies)
        with contextlib.closing(trainer.client):
            return scenario(trainer, engine)

    serve(folder, weights, expected_of(policies[0]), findings)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
