# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Who holds the key comes in, on every kind of address; everybody else learns so at once; the dead are found out."""

import contextlib
import os
import queue
import socket
import struct
import threading
import time

import pytest
import zmq
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import strangers, zeromq

from tests.reference.bridge_world import PATIENCE_S, staged, wait_for, world

KEY, OTHER = bytes(32), bytes(range(32))


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "s")


@contextlib.contextmanager
def listening(address, key=KEY):
    """A listener whose peers are answered Ok, message by message; yields (listener, peers, gone peers)."""
    listener, peers, gone = zeromq.Listener(address, key), [], queue.SimpleQueue()

    def answer(peer):
        while peer.receive() is not None:
            peer.send(messages.Ok())

    def on_peer(peer):
        peers.append(peer)
        threading.Thread(target=answer, args=(peer,), daemon=True).start()

    listener.start(on_peer=on_peer, on_gone=gone.put, on_end=lambda: None)
    try:
        yield listener, peers, gone
    finally:
        listener.close()
        for peer in peers:
            peer.inbox.put(None)


def asked(channel):
    channel.send(messages.Status())
    return messages.decode(channel.receive(PATIENCE_S), messages.REPLY_DECODER)


def test_who_holds_the_key_is_answered(address):
    with listening(address) as (listener, _, _):
        channel = zeromq.Channel(listener.address, KEY, PATIENCE_S)
        assert asked(channel) == messages.Ok()
        channel.close()
        with pytest.raises(BridgeError, match="was closed"):
            channel.send(messages.Status())


def test_a_trainer_with_a_wrong_key_is_refused_at_once_by_name_of_the_setting(address):
    with listening(address) as (listener, peers, _):
        start = time.monotonic()
        with pytest.raises(BridgeError, match=r"does not hold this bridge's key.*key_file") as error:
            zeromq.Channel(listener.address, OTHER, 600)
        assert error.value.code == "auth"
        assert time.monotonic() - start < 60
        assert peers == []


def test_knowing_the_bridges_public_key_is_not_enough(address, monkeypatch):
    real = zeromq._key_pair
    with listening(address) as (listener, peers, _):
        monkeypatch.setattr(zeromq, "_key_pair", lambda key, owner: real(OTHER if owner == b"trainer" else key, owner))
        with pytest.raises(BridgeError) as error:
            zeromq.Channel(listener.address, KEY, PATIENCE_S)
        assert error.value.code == "auth"
        assert peers == []


def test_a_bridge_without_the_key_is_refused_by_the_trainer(address):
    # An impostor that lets anybody in, under a key pair of its own, which is all it can have.
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.curve_server = True
    impostor.curve_publickey, impostor.curve_secretkey = zmq.curve_keypair()
    impostor.bind(zeromq._endpoint(address))
    where = impostor.last_endpoint.decode().rstrip("\0").replace("ipc://", "")
    with pytest.raises(BridgeError) as error:
        zeromq.Channel(where, KEY, PATIENCE_S)
    assert error.value.code == "auth"
    assert not impostor.poll(100)
    impostor.close(linger=0)
    context.term()


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_a_client_that_does_not_encrypt_stays_outside(address, mechanism):
    with listening(address) as (listener, peers, _):
        context = zmq.Context()
        naked = context.socket(zmq.DEALER)
        naked.linger = 0
        if mechanism == "plain":
            naked.plain_username, naked.plain_password = b"a", b"b"
        naked.connect(zeromq._endpoint(listener.address))
        naked.send(messages.encode(messages.Status()))
        assert not naked.poll(300)
        assert peers == []
        naked.close()
        context.term()


def test_nobody_there_and_nobody_who_speaks_are_told_apart(address, tmp_path):
    nowhere = "tcp://127.0.0.1:9" if address.startswith("tcp") else str(tmp_path / "nothing")
    with pytest.raises(BridgeError, match="nobody is listening") as error:
        zeromq.Channel(nowhere, KEY, PATIENCE_S)
    assert error.value.code == "dead"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen()
        with pytest.raises(BridgeError, match="does not answer") as error:
            zeromq.Channel(str(tmp_path / "deaf"), KEY, 0.2)
    assert error.value.code == "timeout"


def test_a_bridge_that_ends_is_noticed_at_once_and_its_last_words_are_read(address):
    with listening(address) as (listener, peers, _):
        channel = zeromq.Channel(listener.address, KEY, PATIENCE_S)
        asked(channel)
        peers[0].send(messages.Error(code="dead", message="bye"))
        listener.close()
        assert messages.decode(channel.receive(PATIENCE_S), messages.REPLY_DECODER).message == "bye"
        start = time.monotonic()
        with pytest.raises(BridgeError, match="closed by the other side") as error:
            channel.receive(600)
        assert error.value.code == "dead"
        assert time.monotonic() - start < 60
        channel.close()


def test_a_trainer_that_ends_is_found_by_a_sweep(address):
    with listening(address) as (listener, peers, gone):
        first, second = (
            zeromq.Channel(listener.address, KEY, PATIENCE_S),
            zeromq.Channel(listener.address, KEY, PATIENCE_S),
        )
        asked(first)
        asked(second)
        first.close()
        wait_for(lambda: listener.sweep() or not gone.empty())
        assert gone.get_nowait() is peers[0]
        assert (peers[0].gone, peers[1].gone) == (True, False)
        listener.sweep()
        assert asked(second) == messages.Ok()  # signs of life are not taken for answers
        second.close()


def test_who_comes_last_is_told_that_the_bridge_has_ended(address):
    peers = queue.SimpleQueue()
    listener = zeromq.Listener(address, KEY)
    listener.start(on_peer=peers.put, on_gone=lambda peer: None, on_end=lambda: None)
    channel = zeromq.Channel(listener.address, KEY, PATIENCE_S)
    channel.send(messages.Status())
    peer = peers.get(timeout=PATIENCE_S)
    listener.close()
    assert peer.gone
    received = [peer.inbox.get(timeout=PATIENCE_S) for _ in range(2)]
    assert received == [[messages.encode(messages.Status())], None]
    channel.close()


def test_messages_beyond_a_frame_are_not_sent_and_not_taken(address):
    with listening(address) as (listener, _, _):
        channel = zeromq.Channel(listener.address, KEY, PATIENCE_S)
        asked(channel)
        with pytest.raises(BridgeError, match="exceeds a frame"):
            channel.send(messages.Error(code="x", message="x" * (messages.MAX_FRAME + 1)))
        assert asked(channel) == messages.Ok()
        channel._socket.send(bytes(zeromq.MAX_PART + 2000))
        with pytest.raises(BridgeError, match="closed by the other side"):
            channel.receive(PATIENCE_S)
        channel.close()


def test_a_long_message_travels_in_parts_and_arrives_whole(address):
    peers = queue.SimpleQueue()
    listener = zeromq.Listener(address, KEY)
    listener.start(on_peer=peers.put, on_gone=lambda peer: None, on_end=lambda: None)
    channel = zeromq.Channel(listener.address, KEY, PATIENCE_S)
    long = messages.Error(code="x", message="y" * (3 * zeromq.MAX_PART))
    data = os.urandom(2 * zeromq.MAX_PART + 17)
    channel.send(long, data)
    channel.send(messages.Status(), b"")
    channel.send(messages.Status())
    channel._socket.send_multipart([bytes(zeromq.MAX_PART)] * 81)
    peer = peers.get(timeout=PATIENCE_S)
    received = [peer.inbox.get(timeout=PATIENCE_S) for _ in range(4)]
    status = messages.encode(messages.Status())
    assert received == [[messages.encode(long), data], [status, b""], [status], []]
    channel.close()
    listener.close()


def test_a_stranger_cannot_make_the_bridge_hold_a_large_command():
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with listening("tcp://127.0.0.1:0") as (listener, _, _):
        _, where = messages.parse_address(listener.address)
        with socket.create_connection(where) as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.sendall(greeting + b"\x06" + struct.pack(">Q", 2 * zeromq.MAX_PART))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(64):  # its own greeting, then it hangs up without waiting for the rest
                    pass


def test_a_crowd_of_strangers_is_bounded_and_a_trainer_comes_in_meanwhile(monkeypatch):
    given_back = threading.Event()
    monkeypatch.setattr(strangers, "give_back", given_back.set)
    monkeypatch.setattr(strangers, "QUIET_MS", 50)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = greeting + b"\x06" + struct.pack(">Q", zeromq.MAX_PART) + bytes(1000)  # of a megabyte: the rest never comes
    with listening("tcp://127.0.0.1:0") as (listener, _, _), contextlib.ExitStack() as stack:
        _, where = messages.parse_address(listener.address)
        early = stack.enter_context(contextlib.closing(zeromq.Channel(listener.address, KEY, PATIENCE_S)))
        assert isinstance(asked(early), messages.Ok)
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(200)]
        for stranger in crowd:
            stranger.setblocking(False)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(hello)
        late = stack.enter_context(contextlib.closing(zeromq.Channel(listener.address, KEY, PATIENCE_S)))
        assert isinstance(asked(late), messages.Ok)
        wait_for(lambda: sum(map(is_open, crowd)) <= strangers.MOST)
        assert is_open(crowd[-1])
        assert isinstance(asked(early), messages.Ok)
        for stranger in crowd:
            stranger.close()
        assert given_back.wait(PATIENCE_S)


def is_open(connection):
    """Whether the other side has not hung up yet."""
    try:
        while connection.recv(64):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_a_bridge_whose_queue_of_connections_is_full_is_waited_for(tmp_path):
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        crowded = stack.enter_context(socket.socket(socket.AF_UNIX))
        crowded.bind(path)
        crowded.listen(0)
        for _ in range(2):  # one more than it takes
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(path)
        came = []
        thread = threading.Thread(target=lambda: came.append(zeromq.Channel(path, KEY, PATIENCE_S)))
        thread.start()
        time.sleep(0.3)
        crowded.close()
        os.unlink(path)
        with listening(path):
            thread.join(PATIENCE_S)
            assert asked(came[0]) == messages.Ok()
            came[0].close()


def test_another_protocol_is_refused_in_words(tmp_path):
    with world(tmp_path) as w:
        client = w.client()
        with pytest.raises(BridgeError, match="install matching versions") as error:
            client.request(messages.Hello(protocol=messages.PROTOCOL + 1), messages.Welcome)
        assert error.value.code == "setup"
        client.status()


def test_over_tcp_tensors_cross_the_network_encrypted(tmp_path):
    with world(tmp_path, tcp=True) as w:
        seen = bytearray()
        with eavesdropped(w.address, seen) as address:
            client = sender.Client(address, w.key, timeout_s=PATIENCE_S)
            client.acquire("run", 1)
            version = staged(0)
            client.publish(version)
            client.close()
        data = os.pread(version.fd, version.manifest.total_bytes, 0)
        assert len(seen) > len(data)
        assert not any(data[i : i + 16] in seen for i in range(0, len(data) - 16, 16) if any(data[i : i + 16]))
        assert b"q_proj" not in seen


@pytest.mark.slow
def test_over_tcp_a_host_that_vanishes_is_noticed_by_both_ends(monkeypatch):
    monkeypatch.setattr(zeromq, "_HEARTBEAT_MS", 200)
    monkeypatch.setattr(zeromq, "_HEARTBEAT_TIMEOUT_MS", 2500)  # a busy machine's silence is no death either
    cable = threading.Event()
    with (
        listening("tcp://127.0.0.1:0") as (listener, peers, gone),
        eavesdropped(listener.address, bytearray(), cut=cable) as address,
    ):
        channel = zeromq.Channel(address, KEY, PATIENCE_S)
        asked(channel)
        time.sleep(3)
        assert asked(channel) == messages.Ok()  # silence alone is no death
        cable.set()
        with pytest.raises(BridgeError, match="closed by the other side"):
            channel.receive(PATIENCE_S)
        wait_for(lambda: listener.sweep() or not gone.empty())
        assert gone.get_nowait() is peers[0]
        channel.close()


@contextlib.contextmanager
def eavesdropped(address, seen, cut=None):
    """A relay in front of `address` that keeps all bytes that pass; once `cut` is set, none do."""
    kind, where = messages.parse_address(address)
    assert kind == "tcp"
    with socket.create_server(("127.0.0.1", 0)) as front:

        def pump(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    seen.extend(data)
                    if cut is None or not cut.is_set():
                        target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def relay():
            near, _ = front.accept()
            with near, socket.create_connection(where) as far:
                back = threading.Thread(target=pump, args=(far, near))
                back.start()
                pump(near, far)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        yield f"tcp://127.0.0.1:{front.getsockname()[1]}"
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_taken_address_is_an_error_and_a_stale_socket_is_not(tmp_path):
    path = str(tmp_path / "s")
    first = zeromq.Listener(path, KEY)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(BridgeError, match="taken"):
        zeromq.Listener(path, KEY)
    first.close()
    assert not os.path.exists(path)
    with socket.socket(socket.AF_UNIX) as crashed:  # the file stays behind, as after a crash
        crashed.bind(path)
    zeromq.Listener(path, KEY).close()
    (tmp_path / "s").write_text("precious")
    with pytest.raises(BridgeError, match="not a socket"):
        zeromq.Listener(path, KEY)
    assert (tmp_path / "s").read_text() == "precious"
    with pytest.raises(BridgeError, match="cannot listen"):
        zeromq.Listener(str(tmp_path / "no" / "s"), KEY)
    port = zeromq.Listener("tcp://127.0.0.1:0", KEY)
    with pytest.raises(BridgeError, match=r"cannot listen on .*in use"):
        zeromq.Listener(port.address, KEY)
    port.close()
