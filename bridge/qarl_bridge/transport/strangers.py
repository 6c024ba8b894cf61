# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits unauthenticated TCP connections to a bridge, and thereby the memory that they can take.

Before ZeroMQ refuses a peer without the key, it holds up to MAX_PART bytes of the handshake, for up to _HANDSHAKE_MS
(zeromq.py). Two thousand such peers hold 2 GB. So at most `MOST` connections may have sent no message; one more closes
the oldest. A trainer sends its first message milliseconds after it connects. Memory of closed connections is returned
to the system.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading

import zmq

MOST = 32
QUIET_MS = 1000
"""Memory is given back so long after the last connection came or went."""


class Strangers(threading.Thread):
    """A thread that watches a ROUTER socket's connections and closes the oldest silent one when there are too many.

    Args:
      router: the bound socket; the caller closes it.
      port: the TCP port of the socket.
    """

    def __init__(self, router: zmq.Socket, port: int):
        super().__init__(name="strangers", daemon=True)
        watched = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._events = router.get_monitor_socket(watched)
        self._port = port
        self._lock = threading.Lock()
        self._silent: dict[int, None] = {}  # descriptors, oldest first
        self._early: set[int] = set()  # heard before their connection was told of

    def run(self) -> None:
        ended = False
        while True:
            if ended and not self._events.poll(QUIET_MS):
                ended = False
                give_back()
            event, descriptor = struct.unpack("=hi", self._events.recv_multipart()[0])
            if event == zmq.EVENT_MONITOR_STOPPED:
                self._events.close(linger=0)
                return
            ended |= event == zmq.EVENT_DISCONNECTED
            oldest = self._after(event, descriptor)
            if oldest is not None:
                _hang_up(oldest, self._port)

    def _after(self, event: int, descriptor: int) -> int | None:
        """Records an event; returns the descriptor of the connection to close, if there are too many."""
        with self._lock:
            if event == zmq.EVENT_DISCONNECTED:
                self._silent.pop(descriptor, None)
                self._early.discard(descriptor)
            elif descriptor in self._early:
                self._early.remove(descriptor)
            else:
                self._silent[descriptor] = None
            if len(self._silent) <= MOST:
                return None
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            return oldest

    def heard(self, descriptor: int) -> None:
        """Notes that a connection sent a message, and hence that its peer holds the key."""
        with self._lock:
            if descriptor in self._silent:
                del self._silent[descriptor]
            else:
                self._early.add(descriptor)


def _hang_up(descriptor: int, port: int) -> None:
    """Shuts down a connection to `port`. It checks the port: the descriptor may have been closed and reused."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return
    with connection:
        try:
            if connection.getsockname()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            return


def give_back() -> None:
    """Returns freed memory to the system, where the C library has malloc_trim (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
