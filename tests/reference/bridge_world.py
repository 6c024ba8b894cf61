# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A small world for the bridge's tests: a model folder of two tensors per layer, a bridge in threads, its clients."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import bridge as server
from qarl_bridge.server.fake_engine import FakeEngine
from qarl_bridge.transport.zeromq import Listener

PATIENCE_S = 60.0  # for what takes milliseconds, on a machine that does other things as well

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 8,
    "quantization_config": {"format": "int-quantized"},
}


def tensors(seed: int) -> dict[str, np.ndarray]:
    """A version's tensors, by name; the two shards of a fused module among them."""
    rng = np.random.default_rng(seed)
    named: dict[str, np.ndarray] = {"model.norm.weight": rng.normal(size=8).astype(ml_dtypes.bfloat16)}
    for shard in ("q_proj", "k_proj"):
        prefix = f"model.layers.0.self_attn.{shard}"
        named[f"{prefix}.weight"] = rng.integers(-128, 128, size=(8, 8)).astype(np.int8)
        named[f"{prefix}.weight_scale"] = rng.uniform(0.01, 1, size=(8, 1)).astype(np.float32)
    return named


def expected(named: dict[str, np.ndarray]) -> dict[str, messages.Expected]:
    """What the engine would demand."""
    return {
        n: messages.Expected(name=n, dtype=messages.dtype_name(a.dtype), shape=list(a.shape)) for n, a in named.items()
    }


def staged(step: int, *, seed: int | None = None, run: str = "run", incarnation: int = 1, **changes: Any):
    """A staged version; `changes` replace tensors (None removes)."""
    named = tensors(step if seed is None else seed)
    model = changes.pop("model", messages.model_fingerprint(CONFIG))
    scheme = changes.pop("scheme", messages.scheme_hash(CONFIG["quantization_config"]))
    for name, value in changes.pop("replace", {}).items():
        if value is None:
            del named[name]
        else:
            named[name] = value
    version = messages.Version(run_id=run, incarnation=incarnation, step=step)
    return sender.stage(named.items(), version=version, model=model, scheme=scheme)


@dataclasses.dataclass
class World:
    """A running bridge around a fake engine."""

    engine: FakeEngine
    bridge: server.Bridge
    thread: threading.Thread  # the one that drives the engine
    address: str
    key: bytes
    clients: list[sender.Client] = dataclasses.field(default_factory=list)

    def client(self, **options: Any) -> sender.Client:
        """A new authenticated connection."""
        self.clients.append(
            sender.Client(self.address, self.key, timeout_s=options.pop("timeout_s", PATIENCE_S), **options)
        )
        return self.clients[-1]

    def trainer(self, run: str = "run", incarnation: int = 1) -> sender.Client:
        """A connection that holds the lease."""
        client = self.client()
        client.acquire(run, incarnation)
        return client


def killed_in_a_publish(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, the first bridge that a version is published to dies in the middle of it: a list for its pid."""
    publish, killed = sender.Client.publish, []

    def dying(client: sender.Client, staged: Any, **options: Any) -> Any:
        if not killed:
            killed.append(client.facts.pid)
            client.request(messages.Announce(manifest=staged.manifest), messages.Ready)
            os.kill(client.facts.pid, signal.SIGKILL)
        return publish(client, staged, **options)

    monkeypatch.setattr(sender.Client, "publish", dying)
    return killed


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; fails after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def connected(
    address: str, key_file: os.PathLike[str] | str, process: subprocess.Popen | None = None, patience_s: float = 120.0
) -> sender.Client:
    """A client of a bridge that is starting, once it listens; fails if `process`, the bridge, ends before."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return sender.Client(address, messages.read_key(os.fspath(key_file)), timeout_s=patience_s)
        except BridgeError:
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                raise
            time.sleep(0.05)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return holder.getsockname()[1]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def world(path: os.PathLike[str], *, tcp: bool = False, has_weights: bool = False) -> Iterator[World]:
    """Start a bridge in threads of this process; stop it at the end."""
    key = bytes(range(32))
    engine = FakeEngine(CONFIG, expected(tensors(0)), has_weights=has_weights)
    bridge = server.Bridge(engine)
    listener = Listener("tcp://127.0.0.1:0" if tcp else os.path.join(path, "s"), key)
    bridge.serve(listener)
    running = threading.Thread(target=bridge.run)
    running.start()
    w = World(engine, bridge, running, listener.address, key)
    try:
        yield w
    finally:
        for client in w.clients:
            client.close()
        bridge.stop()
        running.join(PATIENCE_S)
        assert not running.is_alive()


# ---- what tests of the state machine say -----------------------------------------------------------------------------

SAMPLING = messages.Sampling(max_tokens=5)
K_SCALE = "model.layers.0.self_attn.k_proj.weight_scale"
K_WEIGHT = "model.layers.0.self_attn.k_proj.weight"


def draws(n=3):
    return [messages.Draw(prompt=[1, 2, 3], seed=i) for i in range(n)]


def version_of(drawn):
    """The one version a completion was drawn under."""
    (span,) = drawn.spans
    assert (span.start, span.end) == (0, len(drawn.tokens) // 4)
    return span.version.step


@contextlib.contextmanager
def refused(code, words=None):
    with pytest.raises(BridgeError, match=words) as error:
        yield
    assert error.value.code == code


def still_serves(w, client, step):
    """The engine serves version `step` as if nothing had happened."""
    status = client.status()
    assert (status.state, status.version.step) == ("serving", step)
    assert version_of(client.generate(draws(1), SAMPLING)[0]) == step
    assert client.read_back().weights == 5


def acquire_when_free(w, incarnation):
    client = w.client()
    wait_for(lambda: client.status().holder is None)
    client.acquire("run", incarnation)
    return client
