# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Peers of a bridge that die, stall, lie or flood, and a bridge that dies itself."""

import concurrent.futures
import contextlib
import os
import threading
import time

import msgspec
import numpy as np
import pytest
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import bridge as server
from qarl_bridge.server import waits
from qarl_bridge.transport import shm, zeromq

from tests.reference.bridge_world import (
    PATIENCE_S,
    SAMPLING,
    acquire_when_free,
    draws,
    refused,
    staged,
    still_serves,
    wait_for,
    world,
)

# ---- deaths ---------------------------------------------------------------------------------------------------------


def test_a_trainer_that_dies_mid_publish_leaves_lease_and_engine_free(bridge):
    first = bridge.trainer()
    first.publish(staged(0))
    version = staged(1)
    first.request(messages.Announce(manifest=version.manifest), messages.Ready)
    first.request(messages.Stage(memory=shm.locate(version.fd)), messages.Staged)
    first.close()
    resumed = acquire_when_free(bridge, incarnation=2)
    assert bridge.bridge._pending is None
    still_serves(bridge, resumed, 0)
    resumed.publish(staged(0, incarnation=2))


def test_requests_of_a_client_that_died_are_aborted(bridge, monkeypatch):
    monkeypatch.setattr(waits, "PROGRESS_S", 0.05)
    trainer, sampler = bridge.trainer(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    sampler._channel.send(messages.Generate(draws=draws(), sampling=SAMPLING))
    wait_for(lambda: trainer.status().running == 3)
    sampler.close()
    wait_for(lambda: trainer.status().running == 0)
    bridge.engine.stall = False
    still_serves(bridge, trainer, 0)


def test_progress_is_reported_while_a_request_runs(bridge, monkeypatch):
    monkeypatch.setattr(waits, "PROGRESS_S", 0.02)
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.stall = True
    seen = []

    def on_progress(progress):
        seen.append((progress.running, progress.waiting))
        bridge.engine.stall = progress.running != 3  # the first may come before the engine has begun

    client.generate(draws(), SAMPLING, on_progress=on_progress)
    assert (3, 0) in seen


def test_completions_that_end_early_are_told_before_the_reply_and_are_those_of_the_reply(bridge, monkeypatch):
    monkeypatch.setattr(waits, "PROGRESS_S", 0.02)
    client = bridge.trainer()
    client.publish(staged(0))
    step = bridge.engine.step
    monkeypatch.setattr(bridge.engine, "step", lambda: time.sleep(0.01) or step())
    mixed = [messages.Draw(prompt=[1, 2], seed=i, max_tokens=n) for i, n in enumerate((40, 1, 2))]
    told: list[messages.Ended] = []
    drawn = client.generate(mixed, SAMPLING, on_progress=lambda progress: told.extend(progress.ended))
    assert sorted(one.index for one in told)[-2:] == [1, 2]
    assert len(told) == len({one.index for one in told})
    assert all(one.drawn == drawn[one.index] for one in told)


def test_a_result_that_comes_as_the_wait_for_it_ends_is_not_lost(bridge):
    class JustInTime(concurrent.futures.Future):
        def result(self, timeout=None):
            if timeout is None:
                return super().result()
            self.set_result("here")
            raise concurrent.futures.TimeoutError

    assert bridge.bridge._waits.result(None, JustInTime()) == "here"


def test_a_failing_engine_step_ends_the_bridge_and_tells_everybody(bridge):
    client = bridge.trainer()
    client.publish(staged(0))

    def broken():
        raise RuntimeError("kernel panic")

    bridge.engine.step = broken
    with refused("dead"):
        client.generate(draws(), SAMPLING)
    wait_for(lambda: bridge.bridge.exit_code == 3)


def test_stopping_answers_what_is_waiting(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.stall = True
    errors = []

    def ask():
        try:
            bridge.client().generate(draws(), SAMPLING)
        except BridgeError as error:
            errors.append(error.code)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: client.status().running == 3)
    with refused("lease"):
        bridge.client().shutdown()
    client.shutdown()
    thread.join(PATIENCE_S)
    assert errors == ["dead"]


# ---- fuzz -----------------------------------------------------------------------------------------------------------


def _mutated(rng, message):
    """A message's bytes after random damage: flips, cuts, insertions, or a random value somewhere inside."""
    kind = rng.integers(4)
    data = bytearray(messages.encode(message))
    if kind == 0:
        for _ in range(rng.integers(1, 8)):
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == 1:
        del data[rng.integers(len(data)) :]
    elif kind == 2:
        at = rng.integers(len(data))
        data[at:at] = rng.bytes(rng.integers(1, 20))
    else:
        tree = msgspec.msgpack.decode(bytes(data))
        node = tree
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else int(rng.integers(len(node)))
            if not isinstance(node[key], dict | list) or rng.random() < 0.3:
                odd = [None, -1, 1 << 62, 1e308, "", "x" * 300, b"", [], {}, True, [[]] * 9, {"t": "Shutdown"}]
                node[key] = odd[rng.integers(len(odd))]
                break
            node = node[key]
        data = bytearray(msgspec.msgpack.encode(tree))
    return bytes(data)


@pytest.mark.slow
def test_ten_thousand_random_and_mutated_messages_do_no_harm(bridge):
    rng = np.random.default_rng(0)
    trainer = bridge.trainer()
    version = staged(0)
    trainer.publish(version)
    good = [
        messages.Status(),
        messages.Acquire(run_id="other", incarnation=3),
        messages.Announce(manifest=staged(1).manifest),
        messages.Stage(memory=messages.HostMemory(pid=os.getpid(), fd=1, inode=1)),
        messages.Stage(memory=None),
        messages.Chunk(offset=0),
        messages.Commit(digest=version.manifest.digest),
        messages.Generate(draws=draws(1), sampling=messages.Sampling(max_tokens=1)),
        messages.ReadBack(),
        messages.Shutdown(),
    ]
    raw = bridge.client()._channel._socket  # a DEALER behind the handshake: frames as they come
    answered = 0
    for i in range(10_000):
        if i % 50 == 0:  # without the key: bytes at the endpoint, after a true greeting or not
            _throw(bridge.address, GREETING * (i % 100 == 0) + rng.bytes(int(rng.integers(1, 200))))
            continue
        payload = rng.bytes(int(rng.integers(0, 100))) if i % 3 == 0 else _mutated(rng, good[rng.integers(len(good))])
        more = [rng.bytes(int(rng.integers(0, 100))) for _ in range(rng.choice([0, 0, 0, 1, 2, 3, 50]))]
        raw.send_multipart([payload, *more])
        while True:
            assert raw.poll(60_000), f"message {i} was not answered"
            (reply,) = raw.recv_multipart()
            if reply:
                break
        assert isinstance(messages.decode(reply, messages.REPLY_DECODER), messages.Reply)
        answered += 1
    assert answered == 9_800
    assert bridge.bridge.exit_code == 0
    still_serves(bridge, trainer, 0)
    trainer.publish(staged(1))
    still_serves(bridge, trainer, 1)


# ZMTP 3.1: signature, version, mechanism, as-server, filler (https://rfc.zeromq.org/spec/37/).
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def _throw(address, data):
    """Send bytes to the bridge without speaking its protocol."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
        sock.connect(address)
        sock.sendall(data)


def test_a_peer_that_floods_is_told_so_and_hurts_nobody(bridge):
    trainer, flood = bridge.trainer(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    for _ in range(100):
        flood._channel.send(messages.Generate(draws=draws(1), sampling=SAMPLING))
    wait_for(lambda: trainer.status().running == 1)
    with refused("limits", "waiting for an answer"):
        flood.status()
    flood.close()
    bridge.engine.stall = False
    still_serves(bridge, trainer, 0)


def test_a_client_that_arrives_while_the_bridge_stops(tmp_path, monkeypatch):
    """run() waits for the peers' threads: a peer is on its list only once its thread can be waited for."""
    starting = threading.Event()
    with world(tmp_path) as w:

        class SlowThread(threading.Thread):
            def start(self):
                starting.set()
                w.bridge.stop()
                time.sleep(0.3)
                super().start()

        trainer = w.trainer()
        trainer.publish(staged(0))
        monkeypatch.setattr(server.threading, "Thread", SlowThread)
        with contextlib.suppress(BridgeError):  # it may be told so, or find nobody
            w.client()
        assert starting.is_set()
        monkeypatch.undo()
        w.thread.join(PATIENCE_S)
        assert not w.thread.is_alive()
        assert w.bridge.exit_code == 0


def test_more_clients_than_the_bridge_takes_are_turned_away(bridge, monkeypatch):
    monkeypatch.setattr(zeromq, "MAX_PEERS", 2)
    first, second = bridge.trainer(), bridge.client()
    with refused("limits", "2 clients"):
        bridge.client()
    second.close()
    bridge.client().status()
    first.publish(staged(0))
