# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends all processes of a run, with one sentence, soon after one of them ends.

JAX's health check takes 100 s, or aborts the process with a stack trace of C++; Python cannot intercept it. So each
process holds a TCP connection to the first one, on a free port published in JAX's key-value store. The kernel closes
the connections of a killed process, and keepalive detects a lost host. A process that ends by itself announces it, and
the others have `PATIENCE_S` to end, too.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jax._src import distributed  # has no public name

from qarl_jax.types import at_error

KEY = "qarl_jax/peers"
JOIN_S = 30
BYE, FAILED = b"finished", b"failed  "
PATIENCE_S = {BYE: 50, FAILED: 5}
"""Seconds that the other processes may take to end; shorter than `processes.SHUTDOWN_S`, after which JAX aborts."""
_TOKEN = 32  # characters, before the eight digits of a process's number


def watch() -> None:
    """Connects this process to the others and starts to watch them. Call it after `jax.distributed.initialize`."""
    state = distributed.global_state
    if state.num_processes == 1:
        return
    try:
        sockets = _accept(state) if state.process_id == 0 else {0: _connect(state)}
    except OSError as error:  # a firewall between the hosts, say
        print(f"warning: a killed process will be noticed late: {error}", file=sys.stderr, flush=True)
        return
    for peer in sockets.values():
        _keep_alive(peer)
    watcher = _Watcher(state.process_id, state.num_processes, sockets)
    atexit.register(watcher.leave)
    at_error.append(watcher.fail)
    sys.excepthook = watcher.excepthook(sys.excepthook)
    watcher.start()


def _accept(state: Any) -> dict[int, socket.socket]:
    """Accepts the other processes' connections to the first one; returns them by process."""
    token, joined = secrets.token_hex(_TOKEN // 2), dict[int, socket.socket]()
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        state.client.key_value_set(KEY, f"{server.getsockname()[1]} {token}")
        until = time.monotonic() + JOIN_S
        while len(joined) < state.num_processes - 1:
            server.settimeout(max(0.1, until - time.monotonic()))
            peer, _ = server.accept()
            peer.settimeout(5)
            with contextlib.suppress(TimeoutError):
                said = peer.recv(_TOKEN + 8, socket.MSG_WAITALL)
                if hmac.compare_digest(said[:_TOKEN], token.encode()):
                    joined[int(said[_TOKEN:])] = peer
                    continue
            peer.close()
    return joined


def _connect(state: Any) -> socket.socket:
    """Connects this process to the first one."""
    port, token = state.client.blocking_key_value_get(KEY, JOIN_S * 1000).split()
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    peer = socket.create_connection((host, int(port)), timeout=JOIN_S)
    peer.sendall(f"{token}{state.process_id:08d}".encode())
    return peer


def _keep_alive(peer: socket.socket) -> None:
    peer.settimeout(5)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on macOS
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Watcher(threading.Thread):
    """Ends this process when another ends unannounced, or does not follow one that ended in time."""

    def __init__(self, number: int, count: int, sockets: dict[int, socket.socket]):
        super().__init__(name="peers", daemon=True)
        self.number, self.count, self.sockets = number, count, sockets
        self.failed = False
        self.done: set[int] = set()  # processes that a failed one need not wait for

    def run(self) -> None:
        until: dict[int, float] = {}  # when this process is to have followed another
        with selectors.DefaultSelector() as selector:
            for number, peer in self.sockets.items():
                selector.register(peer, selectors.EVENT_READ, number)
            while True:
                for key, _ in selector.select(timeout=1):
                    word = self.word_of(key.data)
                    if word in PATIENCE_S:
                        until[key.data] = time.monotonic() + PATIENCE_S[word]
                    elif word:  # the first process says who ended
                        self.end(int(word))
                    else:
                        selector.unregister(key.fileobj)
                        if key.data not in until:
                            self.end(key.data)
                    if not word or (self.number and word != BYE):  # the first ends last: JAX needs it
                        self.done.add(key.data)
                for number, moment in until.items():
                    if time.monotonic() > moment:
                        self.end(number)

    def word_of(self, number: int) -> bytes:
        """Receives the next message of a process; empty: its connection has ended."""
        with contextlib.suppress(OSError):
            return self.sockets[number].recv(len(BYE), socket.MSG_WAITALL)
        return b""

    def leave(self) -> None:
        """Announces that this process ends without an error."""
        self.tell(BYE)

    def fail(self, code: int) -> None:
        """Ends this process after an error that it has printed; other processes get time to print theirs."""
        self.failed = True
        self.tell(FAILED)
        sys.stdout.flush()
        until = time.monotonic() + PATIENCE_S[FAILED] + 1
        while len(self.done) < len(self.sockets) and time.monotonic() < until:
            time.sleep(0.05)
        os._exit(code)

    def end(self, number: int) -> None:
        """Ends this process at once, with exit code 1 and a message, because process `number` ended. Does nothing if
        `fail` is ending it."""
        if self.failed:
            return  # `fail` ends it
        self.tell(b"%08d" % number)
        sentence = (
            f"error: process {number} of {self.count} has ended, so process {self.number} ends too: start all of them"
            " again with the same command, and the run resumes from its last checkpoint.\n"
        )
        cursor = "\x1b[?25h" * os.isatty(2)  # which the live view hides
        os.write(2, (cursor + sentence).encode())
        time.sleep(0 if self.number else 0.5)
        os._exit(1)

    def tell(self, word: bytes) -> None:
        """Sends a message to all connected processes."""
        for peer in self.sockets.values():
            with contextlib.suppress(OSError):
                peer.sendall(word)

    def excepthook(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Wraps `sys.excepthook` so that an error which another process's end caused is not printed."""

        def tell(*error: Any) -> None:
            time.sleep(1)  # a collective fails before the end of its partner is seen
            hook(*error)
            self.fail(1)

        return tell
