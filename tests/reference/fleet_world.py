# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Fleets of toy engines: a tiny policy, bridges in threads of this process that a test can break, their draws."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import tempfile
import threading
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.server import bridge as server
from qarl_bridge.server.fake_engine import FakeEngine
from qarl_bridge.transport.zeromq import Listener

from qarl_jax import models, quant
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.vllm.engine import VllmEngine, engine_config, engine_tensors
from qarl_jax.types import Prompt
from tests.reference.qwen3 import qwen3

MODEL = qwen3(vocab=64, hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=16)
SAMPLING = SamplingConfig(max_response_len=6)
PROMPTS = [Prompt(uid=f"p{i}", tokens=(1, 2, i), text="", answer="") for i in range(12)]
KEY = bytes(range(32))


def config(scheme: str = "w4a16:g32", profile: str = "plain") -> models.ModelConfig:
    """Two layers of a Qwen3."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(MODEL))
        return models.read_config(
            folder,
            compute_dtype="float32",
            param_dtype="float32",
            quant=models.parse_rules(scheme),
            numerics=quant.resolve(profile),
        )


@functools.cache
def weights(seed: int = 0, scheme: str = "w4a16:g32", profile: str = "plain") -> PolicyWeights:
    """Random weights of `config`, quantized."""
    graphdef, params, qweights = models.split(models.random_model(config(scheme, profile), seed))
    return PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)


def key_file(folder: pathlib.Path) -> str:
    """A file with `KEY`."""
    path = folder / "key"
    if not path.exists():
        path.write_text(KEY.hex())
        path.chmod(0o600)
    return str(path)


class Bridge:
    """A bridge around a toy engine in threads of this process, which `stop` ends as abruptly as a process dies.

    Args:
      address: a path, or tcp://127.0.0.1:port. seed: of the weights whose tensors it expects.
    """

    def __init__(self, address: str, has_weights: bool = False):
        w = weights()
        expected = {
            name: messages.Expected(name=name, dtype=messages.dtype_name(array.dtype), shape=list(array.shape))
            for name, array in engine_tensors(w, stacked=True)
        }
        self.engine = FakeEngine(engine_config(w.graphdef), expected, has_weights=has_weights, max_model_len=128)
        self.asked: list[str] = []  # every request it was sent
        submit = self.engine.submit

        def counted(request_id: str, *draw: Any) -> None:
            self.asked.append(request_id)
            submit(request_id, *draw)

        self.engine.submit = counted  # type: ignore[method-assign]
        self.bridge = server.Bridge(self.engine)
        self._listener = Listener(address, KEY)
        self.address = self._listener.address
        self.bridge.serve(self._listener)
        self._thread = threading.Thread(target=self.bridge.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self.bridge.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()


def drawn(engine: VllmEngine, key: int = 1, n: int = 2, prompts: list[Prompt] = PROMPTS) -> list[list[Any]]:
    """(tokens, bytes of log-probs, version) of every completion."""
    groups = engine.generate(prompts, num_samples=n, sampling=SAMPLING, key=key)
    return [[(c.tokens, c.logprobs.tobytes(), c.policy_version) for c in group] for group in groups]


def short_path(folder: pathlib.Path, name: str) -> str:
    """A socket's path, which must be short."""
    return os.path.relpath(folder / name) if len(str(folder)) > 80 else str(folder / name)
