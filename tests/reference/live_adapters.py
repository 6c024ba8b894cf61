# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with adapters behind a bridge: run as a process, `python live_adapters.py SCHEME FOLDER PUBLISHES`.

Prints one JSON object, the findings. The engine's layers are compared with the formula of an adapter in numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from typing import Any

import ml_dtypes
import numpy as np
import torch
from qarl_bridge.client import sender
from qarl_bridge.engine.adapters import Adapters
from qarl_bridge.engine.engine import VllmEngine
from qarl_bridge.protocol import adapters, messages
from qarl_bridge.protocol.formats import FUSED
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.rollout.vllm.engine import engine_tensors
from qarl_jax.verify import ladder
from tests.reference import quant_reference as ref
from tests.reference.live_engine import DRAWS, KEY, MODEL, expected_of, serve

RANK = 16
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a fused layer, k has none
NORM = "model.layers.2.input_layernorm.weight"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Tensors = dict[str, np.ndarray]


def some(expected: dict[str, messages.Expected], norm: np.ndarray, seed: int, *, zero: bool = False) -> Tensors:
    """Adapters (zero: that change nothing) and a norm."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, one in expected.items():
        if adapters.is_adapter(name):
            spread = 0.0 if zero and name.endswith(adapters.B) else 0.2
            made[name] = (spread * rng.normal(size=one.shape)).astype(ml_dtypes.bfloat16)
    return made | {NORM: norm if zero else (norm * rng.uniform(0.5, 1.5, norm.shape)).astype(norm.dtype)}


class Trainer:
    """Publishes over a connection of its own."""

    def __init__(self, address: str, facts: messages.Facts):
        self.client = sender.Client(address, KEY, timeout_s=120)
        self.client.acquire("run", 1)
        self._facts = facts
        self.steps = 0

    def publish(self, named: Tensors, over: sender.Version | None = None, readback: str = "full") -> Any:
        """(the staged version, the report)."""
        version = messages.Version(run_id="run", incarnation=1, step=self.steps)
        self.steps += 1
        identity: dict[str, Any] = {"version": version, "model": self._facts.model, "scheme": self._facts.scheme}
        staged = sender.stage(named.items(), over=over, **identity)
        return staged, self.client.publish(staged, readback=readback)

    def draw(self, temperature: float = 0.0) -> list[Any]:
        """The tokens and log-probs of one draw, with the version's step."""
        drawn = self.client.generate(DRAWS, messages.Sampling(max_tokens=12, temperature=temperature))
        return [(one.tokens, one.logprobs, one.spans[0].version.step) for one in drawn]


def bits(drawn: list[Any]) -> list[Any]:
    """Tokens and log-probs, whatever their version."""
    return [one[:2] for one in drawn]


def base_layer(published: Tensors, module: str, x: np.ndarray) -> np.ndarray:
    """bf(W x) of a published linear layer in numpy, [T, K] -> [T, N]."""
    scale = published.get(f"{module}.weight_scale")
    if scale is None:
        wide = x.astype(np.float64) @ published[f"{module}.weight"].astype(np.float64).T
        return ref.bf(wide.astype(np.float32))
    if f"{module}.weight" in published:
        return ref.bf(ref.w8a8_layer(x, published[f"{module}.weight"], scale, "cpu"))
    weight = ref.int4_value(ref.unpack(published[f"{module}.weight_packed"]), scale)
    return ref.bf((x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32))


def layer(published: Tensors, module: str, x: np.ndarray) -> np.ndarray:
    """The same with its adapter, by the definition in qarl_bridge/protocol/adapters.py."""
    y = base_layer(published, module, x)
    if module + adapters.A not in published:
        return y
    a, b = (published[module + end].astype(np.float64) for end in (adapters.A, adapters.B))
    h = ref.bf((x.astype(np.float64) @ a.T).astype(np.float32))
    d = ref.bf((h.astype(np.float64) @ b.T).astype(np.float32))
    return ref.bf(y + d)


def differing(trainer: Trainer, published: Tensors) -> tuple[int, int]:
    """(outputs of live linear layers that differ from the formula, outputs)."""
    names = [
        f"model.layers.{i}.{name}"
        for i in range(4)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    wrong = count = 0
    for record in trainer.client.probe(PROMPT, names):
        parent, _, leaf = record.module.rpartition(".")
        x, got = (array.numpy().astype(np.float32) for array in (record.inputs[0], record.outputs[0]))
        want = np.concatenate([layer(published, f"{parent}.{part}", x) for part in FUSED.get(leaf, (leaf,))], axis=1)
        wrong += int((got != want).sum())
        count += got.size
    return wrong, count


class Mallinfo2(ctypes.Structure):
    """The statistics of glibc's allocator."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def held() -> int:
    """Bytes that this process has allocated and not freed, and those of shared memory that it maps.

    Not its size in memory: Python takes 1 MiB at a time, and glibc gives back what is free when it likes.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    said = libc.mallinfo2()
    with open("/proc/self/maps") as file:
        places = [line.split()[0] for line in file if line.split()[1].endswith("s")]
    ends = [[int(end, 16) for end in place.split("-")] for place in places]
    return said.uordblks + said.hblkhd + sum(last - first for first, last in ends)


def slots(engine: VllmEngine) -> set[int]:
    """Addresses of all adapters' matrices."""
    assert engine._adapters is not None
    return {x.data_ptr() for one in engine._adapters._of.values() for x in (one.a, one.b)}


def in_a_row(
    trainer: Trainer, engine: VllmEngine, expected: Any, norm: np.ndarray, base: sender.Version, publishes: int
) -> dict[str, Any]:
    """Many publishes, each of which is drawn from."""
    found: dict[str, Any] = {"versions": [], "held": [], "files": [], "load_s": [], "readback_s": []}
    places = slots(engine)
    least = min(tensor.nbytes for name, tensor in some(expected, norm, 0).items() if adapters.is_adapter(name))
    before, kept = held(), [torch.empty(least, dtype=torch.uint8) for _ in range(100)]
    found |= {"least": least, "seen": held() - before, "kept": len(kept)}
    del kept
    for number in range(publishes):
        staged, report = trainer.publish(some(expected, norm, number), base, "sampled")
        staged.close()
        found["versions"] += {one[2] - staged.manifest.version.step for one in trainer.draw()}
        places |= slots(engine)
        found["held"].append(held())
        found["files"].append(len(os.listdir("/proc/self/fd")))
        found["load_s"].append(report["load_s"])
        found["readback_s"].append(report["readback_s"])
    return found | {"bytes": report["bytes"], "tensors": report["tensors"], "slots": len(places)}


def refusals(trainer: Trainer, engine: VllmEngine, good: Tensors, base: sender.Version) -> list[list[Any]]:
    """(error, whether the last good version is served to the bit) of bad versions."""
    q = "model.layers.1.self_attn.q_proj"
    nan = good[q + adapters.A].copy()
    nan[0, 0] = np.nan
    before, out = trainer.draw(), []

    def breaks(self: Adapters) -> None:
        Adapters.switch = switch  # type: ignore[method-assign]
        self.switch()
        next(iter(self._of.values())).b[3, 1] += 1

    switch = Adapters.switch
    for changes, own in (
        ({q + adapters.A: nan}, switch),
        ({q + adapters.A: np.zeros((2 * RANK, 256), ml_dtypes.bfloat16)}, switch),
        ({"model.layers.1.self_attn.k_proj" + adapters.A: good[q + adapters.A]}, switch),
        ({}, breaks),
    ):
        Adapters.switch = own  # type: ignore[method-assign]
        try:
            trainer.publish(good | changes, base)
            out.append(["none", False])
        except BridgeError as error:
            out.append([f"{error.code}: {error}", trainer.draw() == before])
        finally:
            Adapters.switch = switch  # type: ignore[method-assign]
    return out


def scenario(trainer: Trainer, engine: VllmEngine, base: Tensors, expected: Any, publishes: int) -> dict[str, Any]:
    """Runs it."""
    found: dict[str, Any] = {}
    norm = base[NORM]
    first, report = trainer.publish(base | some(expected, norm, 0, zero=True))
    found["first"] = [report["tensors"], report["weights_read_back"]]
    zero = [bits(trainer.draw(t)) for t in (0.0, 1.0)]
    wrapped = {name: engine._modules[name].forward for name in engine._adapters._of}
    for name, forward in wrapped.items():
        engine._modules[name].forward = forward.__wrapped__
    found["zero_is_the_base"] = [bits(trainer.draw(t)) for t in (0.0, 1.0)] == zero
    for name, forward in wrapped.items():
        engine._modules[name].forward = forward
    one = some(expected, norm, 1)
    trainer.publish(one, first)
    found["outputs"] = [differing(trainer, base | one)]
    drawn = [bits(trainer.draw(t)) for t in (0.0, 1.0)]
    found["adapters_matter"] = drawn != zero
    found["refused"] = refusals(trainer, engine, one, first)
    trainer.publish(base | some(expected, norm, 2))  # complete
    again, _ = trainer.publish(base | one)
    found["partial_is_whole"] = [bits(trainer.draw(t)) for t in (0.0, 1.0)] == drawn
    found["row"] = in_a_row(trainer, engine, expected, norm, again, publishes)
    trainer.publish(one, again)
    found["partial_is_whole_again"] = [bits(trainer.draw(t)) for t in (0.0, 1.0)] == drawn
    found["outputs"].append(differing(trainer, base | one))
    found["read_back"] = trainer.client.read_back().weights
    found["notes"] = trainer.client.status().facts.notes
    return found


def main(scheme: str, folder: str, publishes: str) -> None:
    weights = ladder.load(MODEL, scheme, "cpu")
    base = dict(engine_tensors(weights))
    expected = adapters.expected(expected_of(base), RANK, TARGETS)

    def findings(address: str, engine: VllmEngine) -> dict[str, Any]:
        trainer = Trainer(address, engine.facts)
        with contextlib.closing(trainer.client):
            return scenario(trainer, engine, base, expected, int(publishes))

    serve(folder, weights, expected, findings)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
