# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The watch of a run's processes over each other, on sockets of this process."""

import socket
import threading
import time
import types

import pytest

from qarl_jax.runtime import peers


class Store:
    """JAX's key-value store, of one process."""

    def __init__(self):
        self.values, self.there = {}, threading.Event()

    def key_value_set(self, key, value):
        self.values[key] = value
        self.there.set()

    def blocking_key_value_get(self, key, timeout_ms):
        assert self.there.wait(timeout_ms / 1000)
        return self.values[key]


def test_only_processes_that_know_the_token_join():
    store, joined = Store(), {}
    first, second, third = (
        types.SimpleNamespace(client=store, coordinator_address="localhost:1", num_processes=3, process_id=number)
        for number in range(3)
    )
    accepting = threading.Thread(target=lambda: joined.update(peers._accept(first)), daemon=True)
    accepting.start()
    port = int(store.blocking_key_value_get(peers.KEY, 10_000).split()[0])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"x" * 40)
        assert not stranger.recv(1)  # closed
    with peers._connect(second) as one, peers._connect(third) as two:
        accepting.join(10)
        assert sorted(joined) == [1, 2]
        for number, mine in ((1, one), (2, two)):
            joined[number].sendall(b"%d" % number)
            assert mine.recv(1) == b"%d" % number
            joined[number].close()


class EndedError(Exception):
    pass


@pytest.mark.parametrize(
    ("words", "ended", "after_s"),
    [([], 1, 0), ([peers.BYE], 1, 0.2), ([peers.FAILED], 1, 0), ([b"00000007"], 7, 0)],
    ids=["killed", "finished long ago", "failed", "told of another"],
)
def test_a_process_follows_one_that_ended(words, ended, after_s, monkeypatch):
    monkeypatch.setattr(peers, "PATIENCE_S", {peers.BYE: 0.2, peers.FAILED: 0})
    mine, other = socket.socketpair()
    watcher = peers._Watcher(0, 8, {1: mine})

    def end(number):
        raise EndedError(number)

    monkeypatch.setattr(watcher, "end", end)
    with other:
        for word in words:
            other.sendall(word)
    since = time.monotonic()
    with mine, pytest.raises(EndedError, match=f"^{ended}$"):
        watcher.run()
    assert time.monotonic() - since >= after_s
