# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Sends messages over ZeroMQ: a ROUTER socket in the bridge, a DEALER in each trainer, encrypted by CURVE.

A message is msgpack (messages.py); a Chunk has raw bytes, too. A trainer sends frames of at most MAX_PART bytes, with
an empty frame between msgpack and raw bytes. MAX_PART and _HANDSHAKE_MS bound the memory of a peer that never completes
the handshake; `strangers` bounds the number of such peers. A reply is one frame; an empty frame is a keep-alive.

Authentication. Both ends derive two CURVE key pairs, the bridge's and the trainer's, from one 32-byte key. A trainer
without the key does not know the bridge's public key and cannot begin the handshake. The bridge checks the trainer's
public key as well. Everything after the handshake is encrypted, on unix sockets, too; these have mode 0600.

Detection of dead peers:

  * The trainer sees at once, as an event of its socket, that its connection closes or the handshake fails. It never
    reconnects by itself: the lease ends with the connection.
  * The bridge notices a dead peer when a send fails. It sends Progress during a request. It sends a keep-alive to every
    peer each SWEEP_S seconds, and before it refuses a peer because another one holds the lease.
  * Over TCP, where a host can vanish without closing anything, both ends exchange ZMTP heartbeats. On one host the
    kernel closes a dead process's sockets, and a trainer that is stopped in a debugger keeps its lease.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport.strangers import Strangers

SWEEP_S = 5.0
LINGER_MS = 1000  # for the last replies of a bridge that stops
MAX_PEERS = 64
MAX_AHEAD = 8  # requests a peer may send before the first is answered; ours send one
MAX_PART = 1 << 20
_HANDSHAKE_MS = 10_000  # for a stranger to become a peer
_BACKLOG = 1024  # connections that wait to be taken
_DOMAIN = "qarl_bridge"
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 25_000
_HANDSHAKE_ATTEMPTS = 3


def _key_pair(key: bytes, owner: bytes) -> tuple[bytes, bytes]:
    """Derives the CURVE key pair (public, secret), in Z85, of one end from the shared key."""
    secret = z85.encode(hmac.digest(key, b"qarl_bridge curve " + owner, "sha256"))
    return zmq.curve_public(secret), secret


def _endpoint(address: str) -> str:
    """Converts an address to ZeroMQ's form and resolves host names (ZeroMQ would retry an unknown one for ever)."""
    kind, where = messages.parse_address(address)
    if kind == "unix":
        return f"ipc://{where}" if where.startswith("/") else f"ipc://./{where}"  # "@x" and "*" mean other things
    host, port = where
    try:
        return f"tcp://{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise BridgeError(f"cannot resolve the host of {address}: {error}", "setup") from None


def _configure(sock: zmq.Socket, kind: str, most: int) -> None:
    # CURVE adds 33 bytes to a frame and may add more one day. Commands of the handshake are bounded by this as well.
    sock.setsockopt(zmq.MAXMSGSIZE, most + 1024)
    if kind == "tcp":
        sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _frames(message: bytes, data: bytes | memoryview | None) -> list[bytes | memoryview]:
    """Splits a trainer's message into frames of at most MAX_PART bytes."""
    split = [memoryview(message)[at : at + MAX_PART] for at in range(0, len(message), MAX_PART)]
    if data is None:
        return [*split]
    return [*split, b"", *(memoryview(data)[at : at + MAX_PART] for at in range(0, len(data), MAX_PART))]


def _joined(frames: list[bytes]) -> list[bytes]:
    """Joins the frames that `_frames` made: returns [message], or [message, data]."""
    if b"" not in frames:
        return [b"".join(frames)]
    between = frames.index(b"")
    return [b"".join(frames[:between]), b"".join(frames[between + 1 :])]


def encode(message: messages.Request | messages.Reply) -> bytes:
    """Encodes a message as msgpack; BridgeError("limits") above MAX_FRAME bytes, or MAX_REPLY for Completions."""
    payload = messages.encode(message)
    most = messages.MAX_REPLY if isinstance(message, messages.Completions) else messages.MAX_FRAME
    if len(payload) > most:
        raise BridgeError(f"{type(message).__name__} of {len(payload)} bytes exceeds a frame's {most}", "limits")
    return payload


# ---------------------------------------------------------------------------------------------------------------------
# The bridge's end
# ---------------------------------------------------------------------------------------------------------------------


class Peer:
    """A connected trainer, with its queue of received messages. `Listener` makes one for each connection."""

    def __init__(self, listener: Listener, identity: bytes):
        self._listener = listener
        self.identity = identity
        self.inbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self.gone = False

    @property
    def shares_memory(self) -> bool:
        """Tells whether the peer is on this host (a unix socket), so that memory files can be shared."""
        return self._listener.kind == "unix"

    def receive(self) -> list[bytes] | None:
        """Waits for the next message: [msgpack], [msgpack, data], or [] if it was too long.

        Returns None when the peer is gone or the bridge stops."""
        return self.inbox.get()

    def send(self, message: messages.Reply) -> None:
        """Queues one message; BridgeError("limits") if it is too long. `gone` is set later if the peer has died."""
        self._listener.post(self, encode(message))


class _OnlyKey:
    """A credentials provider for pyzmq's authenticator that accepts one public key."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class Listener:
    """The bridge's listening socket. It accepts connections at once, and reads messages after `start`.

    Args:
      address: see `messages.parse_address`. A unix socket file without a listener is replaced.
      key: the 32-byte key that peers must hold.

    Raises:
      BridgeError("setup"): the address is taken or invalid.
    """

    def __init__(self, address: str, key: bytes):
        self._wake = os.eventfd(0)
        self.kind, self._where = messages.parse_address(address)
        self.address = address
        self._peers: dict[bytes, Peer] = {}
        self._outbox: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._closed = threading.Event()
        endpoint = _endpoint(address)
        if self.kind == "unix":
            _remove_stale(self._where, address)
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router, self.kind, MAX_PART)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._router.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._router.setsockopt(zmq.LINGER, LINGER_MS)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to who is gone is an error, not a silence
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.curve_publickey, self._router.curve_secretkey = _key_pair(key, b"bridge")
        self._router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no entrance
        trainer, _ = _key_pair(key, b"trainer")
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=_OnlyKey(trainer))
        self._authenticator.start()
        mask = os.umask(0o177)  # a unix socket is born 0600: no moment at which others could connect
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._router.close()
            self._authenticator.stop()
            self._context.term()
            raise BridgeError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}", "setup") from None
        finally:
            os.umask(mask)
        self._strangers: Strangers | None = None
        if self.kind == "tcp":
            self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)  # the port, where 0 was asked for
            self._strangers = Strangers(self._router, int(self.address.rpartition(":")[2]))
            self._strangers.start()

    def start(
        self, *, on_peer: Callable[[Peer], None], on_gone: Callable[[Peer], None], on_end: Callable[[], None]
    ) -> None:
        """Starts the thread that receives and sends. It calls the callbacks, which must not block."""

        def loop() -> None:
            try:
                self._loop(on_peer, on_gone)
            finally:
                self._router.close()
                on_end()

        self._thread = threading.Thread(target=loop, daemon=True, name="messages")
        self._thread.start()

    def post(self, peer: Peer, payload: bytes) -> None:
        """Queues bytes to be sent to a peer. Thread-safe."""
        self._call(lambda: self._transmit(peer, payload))

    def sweep(self) -> None:
        """Checks which peers have died, and returns after `on_gone` was called for each. For other threads."""
        done = threading.Event()

        def job() -> None:
            self._probe()
            done.set()

        self._call(job)
        while not done.wait(0.1) and not self._closed.is_set():
            pass

    def close(self) -> None:
        """Sends queued messages, closes all connections, and frees the address. Idempotent."""
        if self._closed.is_set():
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._router.close()
        for peer in self._peers.values():  # also those that came too late for anybody to have told them
            peer.gone = True
            peer.inbox.put(None)
        self._closed.set()
        if self._strangers is not None:
            self._strangers.join()
        self._authenticator.stop()
        self._context.term()
        if self.kind == "unix":
            with contextlib.suppress(OSError):
                os.unlink(self._where)

    def __del__(self) -> None:
        os.close(self._wake)  # only now: a peer's thread may post after close(), and must not hit a reused descriptor

    def _call(self, job: Callable[[], None]) -> None:
        self._outbox.append(job)
        os.eventfd_write(self._wake, 1)

    def _loop(self, on_peer: Callable[[Peer], None], on_gone: Callable[[Peer], None]) -> None:
        self._on_gone = on_gone
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_sweep = time.monotonic() + SWEEP_S
        while not self._closing:
            ready = dict(poller.poll(int(1000 * SWEEP_S)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._flush()
            if self._router in ready:
                self._take(on_peer)
            if time.monotonic() >= next_sweep:
                self._probe()
                next_sweep = time.monotonic() + SWEEP_S
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            self._outbox.popleft()()

    def _take(self, on_peer: Callable[[Peer], None]) -> None:
        """Receives one message and puts it into its peer's inbox."""
        try:
            connection, identity, *frames = self._receive()
        except zmq.Again:  # what was there went with its sender
            return
        peer = self._peers.get(identity)
        if peer is None:
            if self._strangers is not None:
                self._strangers.heard(connection)
            self._probe()  # the new one may be the successor of a dead one
            peer = Peer(self, identity)
            if len(self._peers) >= MAX_PEERS:
                self._transmit(
                    peer, encode(messages.Error(code="limits", message=f"{MAX_PEERS} clients are connected"))
                )
                return
            self._peers[identity] = peer
            on_peer(peer)
        if peer.inbox.qsize() >= MAX_AHEAD:
            message = f"more than {MAX_AHEAD} requests are waiting for an answer"
            self._transmit(peer, encode(messages.Error(code="limits", message=message)))
            return
        peer.inbox.put(frames)

    def _receive(self) -> tuple[Any, ...]:
        """Receives (descriptor, identity, message, data if any); message and data are missing if they are too long."""
        first = self._router.recv(zmq.NOBLOCK, copy=False)  # ROUTER hands out whole messages only: the rest is there
        origin = first.get(zmq.SRCFD), first.bytes
        frames: list[bytes] = []
        total = 0
        while self._router.getsockopt(zmq.RCVMORE):
            part = self._router.recv()
            total += len(part) + 1  # empty ones count as well
            if total <= messages.MAX_FRAME + 2 * messages.CHUNK_BYTES:
                frames.append(part)
            else:
                frames.clear()
        return (*origin, *_joined(frames)) if frames else origin

    def _transmit(self, peer: Peer, payload: bytes) -> None:
        try:
            self._router.send_multipart([peer.identity, payload], zmq.NOBLOCK)
        except zmq.Again:  # it lives, but does not read
            if payload:
                self._lose(peer)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)

    def _probe(self) -> None:
        for peer in list(self._peers.values()):
            self._transmit(peer, b"")

    def _lose(self, peer: Peer) -> None:
        if self._peers.pop(peer.identity, None) is not None:
            peer.gone = True
            self._on_gone(peer)
            peer.inbox.put(None)


def _remove_stale(path: str, address: str) -> None:
    """Deletes a socket file without a listener, as a crash leaves it; BridgeError("setup") if the path is in use."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # nothing there, or bind will say why
    if not stat.S_ISSOCK(mode):
        raise BridgeError(f"{address} exists and is not a socket", "setup")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:  # ZeroMQ itself would take the address over
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(OSError):
                os.unlink(path)
        except OSError as error:
            raise BridgeError(
                f"{address} exists and is not a free socket: {error.strerror or error}", "setup"
            ) from None
        else:
            raise BridgeError(f"{address} is taken: another bridge is listening there", "setup")


# ---------------------------------------------------------------------------------------------------------------------
# The trainer's end
# ---------------------------------------------------------------------------------------------------------------------

_EVENTS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_LOOK_AROUND_MS = 200


def _left_ms(deadline: float) -> int:
    return max(1, int(1000 * (deadline - time.monotonic())))


def _is_crowded(address: str) -> bool:
    """Tells whether a unix socket that refused a connection has a listener whose queue of connections is full."""
    kind, where = messages.parse_address(address)
    if kind != "unix":
        return False  # over TCP the kernel tries again by itself
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(where)
        except BlockingIOError:  # full
            return True
        except OSError:
            return False
    return True


class Channel:
    """The trainer's authenticated connection to a bridge. It never reconnects, and is not thread-safe.

    Args:
      address, key: as in `sender.Client`. timeout_s: seconds for the handshake.
      is_over: a callback, polled during waits; once it is true, the wait ends with BridgeError("dead").

    Raises:
      BridgeError: no bridge listens ("dead"), the keys differ ("auth"), or the handshake takes too long ("timeout").
    """

    def __init__(self, address: str, key: bytes, timeout_s: float, is_over: Callable[[], bool] = lambda: False):
        self._address = address
        self.is_over = is_over
        self._pid = os.getpid()
        self._open = False
        endpoint = _endpoint(address)
        deadline = time.monotonic() + timeout_s
        refusals = 0
        while refusals < _HANDSHAKE_ATTEMPTS:
            self._connect(endpoint, key)
            try:
                event = self._next_event(deadline)
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
            except BaseException:
                self.close()
                raise
            self.close()
            if event in (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED):
                if not _is_crowded(address) or time.monotonic() > deadline:
                    raise BridgeError(f"no bridge at {address}: nobody is listening there", "dead")
                time.sleep(0.05)
                continue
            # A bridge that meets a wrong key hangs up without a word, as does one that is killed at this moment; so
            # try again. A bridge that holds the key but was told another one for us says so: FAILED_AUTH.
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                break
            refusals += 1
            time.sleep(0.05)
        raise BridgeError(
            f"{address} refused the handshake: this trainer does not hold this bridge's key; "
            "rollout.engine.key_file and the bridge's --key-file must hold the same one",
            "auth",
        )

    def _connect(self, endpoint: str, key: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket, endpoint.partition(":")[0], messages.MAX_REPLY)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # our deadline counts: a bridge may be busy starting
        self._socket.curve_serverkey, _ = _key_pair(key, b"bridge")
        self._socket.curve_publickey, self._socket.curve_secretkey = _key_pair(key, b"trainer")
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._open, self._lost = True, False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)

    def _next_event(self, deadline: float) -> int:
        while not self._monitor.poll(self._patience_ms(deadline)):
            if time.monotonic() >= deadline:
                raise BridgeError(f"the bridge at {self._address} does not answer the handshake", "timeout")
        return int(recv_monitor_message(self._monitor)["event"])

    def _patience_ms(self, deadline: float) -> int:
        """Returns milliseconds to wait before `is_over` is polled again; BridgeError("dead") if it is true."""
        if self.is_over():
            raise BridgeError(f"the connection to {self._address} was given up", "dead")
        return min(_left_ms(deadline), _LOOK_AROUND_MS)

    def send(self, message: messages.Request, data: bytes | memoryview | None = None) -> None:
        """Sends one message, with the raw bytes of a Chunk if given; BridgeError("dead") if the connection is lost."""
        frames = _frames(encode(message), data)
        if not self._open:
            raise BridgeError("the connection was closed", "dead")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise BridgeError(f"connection lost while sending: {error}", "dead") from None

    def poll(self) -> bytes | None:
        """Returns the next message's bytes, or None if none has arrived; BridgeError("dead") if disconnected."""
        if not self._open or self.is_over():
            raise BridgeError("the connection was closed", "dead")
        if self._monitor in dict(self._poller.poll(0)):
            recv_monitor_message(self._monitor)
            self._lost = True
        with contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.NOBLOCK)[0] or None  # none: a sign of life
        if self._lost:
            raise BridgeError("connection closed by the other side", "dead")
        return None

    def receive(self, timeout_s: float) -> bytes:
        """Waits up to `timeout_s` seconds for the next message's bytes; BridgeError "dead" or "timeout"."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._open:
                raise BridgeError("the connection was closed", "dead")
            with contextlib.suppress(zmq.Again):
                if payload := self._socket.recv_multipart(zmq.NOBLOCK)[0]:
                    return payload
                continue  # a sign of life
            if self._lost:
                raise BridgeError("connection closed by the other side", "dead")
            if time.monotonic() >= deadline:
                raise BridgeError("timed out while waiting for the other side", "timeout")
            ready = dict(self._poller.poll(self._patience_ms(deadline)))
            if self._monitor in ready:  # after the handshake only an end can come; what came before it is read first
                recv_monitor_message(self._monitor)
                self._lost = True

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        if self._open and self._pid == os.getpid():  # a forked child must not touch its parent's sockets
            self._open = False
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()

    def __del__(self) -> None:
        self.close()
