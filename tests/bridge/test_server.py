# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The state machine around a fake engine: every transition, every refusal, every death."""

import concurrent.futures
import contextlib
import gc
import os
import threading
import time

import ml_dtypes
import msgspec
import numpy as np
import pytest
from qarl_bridge import sender, server, wire
from qarl_bridge import staged as staged_copies
from qarl_bridge.transport import shm, zeromq
from qarl_bridge.wire import BridgeError

from tests.reference import bridge_world
from tests.reference.bridge_world import PATIENCE_S, staged, wait_for, world

K_SCALE = "model.layers.0.self_attn.k_proj.weight_scale"
K_WEIGHT = "model.layers.0.self_attn.k_proj.weight"
SAMPLING = wire.Sampling(max_tokens=5)


def draws(n=3):
    return [wire.Draw(prompt=[1, 2, 3], seed=i) for i in range(n)]


def version_of(drawn):
    """The one version a completion was drawn under."""
    (span,) = drawn.spans
    assert (span.start, span.end) == (0, len(drawn.tokens) // 4)
    return span.version.step


@pytest.fixture(params=["unix", "tcp"])
def any_world(request, tmp_path):
    with world(tmp_path, tcp=request.param == "tcp") as w:
        yield w


@pytest.fixture
def bridge(tmp_path):
    with world(tmp_path) as w:
        yield w


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


# ---- the way things go ----------------------------------------------------------------------------------------------


def test_publish_then_generate_then_publish_again(any_world):
    client = any_world.trainer()
    first = client.publish(staged(0))
    assert first["tensors"] == 5
    assert first["bytes"] == staged(0).manifest.total_bytes
    before = client.generate(draws(), SAMPLING)
    assert [version_of(d) for d in before] == [0, 0, 0]
    client.publish(staged(1), readback="full")
    after = client.generate(draws(), SAMPLING)
    assert [version_of(d) for d in after] == [1, 1, 1]
    assert before[0].tokens != after[0].tokens  # the fake's tokens depend on the loaded bytes
    assert client.status().published == 2


def test_a_draw_does_not_depend_on_its_company(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    together = client.generate(draws(8), SAMPLING)
    for draw, drawn in zip(draws(8), together, strict=True):
        assert client.generate([draw], SAMPLING) == [drawn]


def test_generation_needs_no_lease_and_clients_share_the_engine(bridge):
    first = bridge.trainer()
    first.publish(staged(0))
    first.close()
    trainer = bridge.trainer(incarnation=2)
    trainer.publish(staged(1, incarnation=2))
    evaluator = bridge.client()
    assert version_of(evaluator.generate(draws(1), SAMPLING)[0]) == 1
    with refused("lease", "send Acquire first"):
        evaluator.publish(staged(2))


def test_an_engine_without_weights_draws_nothing(bridge):
    with refused("bad_state", "publish a version first"):
        bridge.client().generate(draws(), SAMPLING)


def test_requests_that_cannot_be_served_are_refused_at_once(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    with refused("limits", "max_model_len 4096"):
        client.generate(draws(), wire.Sampling(max_tokens=4094))
    with refused("limits", "token id 100 >= vocabulary 100"):
        client.generate([wire.Draw(prompt=[1, 100], seed=0)], SAMPLING)
    still_serves(bridge, client, 0)


# ---- leases and versions --------------------------------------------------------------------------------------------


def test_second_trainer_is_refused_while_the_first_lives_and_accepted_after(bridge):
    first, second = bridge.trainer("run"), bridge.client()
    with refused("lease", "run run, incarnation 1"):
        second.acquire("other", 1)
    first.close()
    wait_for(lambda: second.status().holder is None)
    second.acquire("other", 1)
    second.publish(staged(0, run="other"))
    still_serves(bridge, second, 0)


def test_a_resumed_trainer_may_step_back_but_not_its_ghost(bridge):
    first = bridge.trainer(incarnation=5)
    first.publish(staged(7, incarnation=5))
    first.close()
    resumed = _acquire_when_free(bridge, incarnation=6)
    resumed.publish(staged(3, incarnation=6))
    still_serves(bridge, resumed, 3)
    resumed.close()
    with refused("stale", "was resumed since"):
        _acquire_when_free(bridge, incarnation=5)


def _acquire_when_free(w, incarnation):
    client = w.client()
    wait_for(lambda: client.status().holder is None)
    client.acquire("run", incarnation)
    return client


def test_announce_refuses_a_stale_version_but_takes_the_same_one_again(bridge):
    client = bridge.trainer()
    client.publish(staged(4))
    with refused("stale", "already serves run/1/4"):
        client.publish(staged(3))
    with refused("stale"):
        client.publish(staged(4, seed=99))  # same number, other bytes
    client.publish(staged(4))
    still_serves(bridge, client, 4)


def test_announce_refuses_versions_of_others(bridge):
    client = bridge.trainer()
    with refused("lease", "not of the leased run/1"):
        client.publish(staged(0, run="other"))
    with refused("lease"):
        client.publish(staged(0, incarnation=2))


def test_announce_refuses_a_wrong_model_a_wrong_scheme_and_missing_shards(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    with refused("foreign_model"):
        client.publish(staged(1, model=bytes(16)))
    with refused("foreign_scheme"):
        client.publish(staged(1, scheme=bytes(16)))
    with refused("torn", f"first: {K_WEIGHT}.*fused module"):
        client.publish(staged(1, replace={K_WEIGHT: None}))
    with refused("tensor", "unknown.*extra"):
        client.publish(staged(1, replace={"extra": np.zeros(2, np.int8)}))
    with refused("tensor", f"{K_WEIGHT} is int32"):
        client.publish(staged(1, replace={K_WEIGHT: np.zeros((8, 8), np.int32)}))
    with refused("tensor", r"expects int8\[8, 8\]"):
        client.publish(staged(1, replace={K_WEIGHT: np.zeros((8, 7), np.int8)}))
    still_serves(bridge, client, 0)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def bent(step, edit):
    """A staged version whose bytes were changed after its manifest was made."""
    good = staged(step)
    data = bytearray(os.pread(good.fd, good.manifest.total_bytes, 0))
    edit(data, {entry.name: entry for entry in good.manifest.tensors})
    fd = shm.create(len(data))
    shm.write(fd, memoryview(data), 0)
    shm.seal(fd)
    return sender.StagedVersion(good.manifest, fd, 0.0)


def test_validation_refuses_one_flipped_bit_and_names_the_tensor(any_world):
    client = any_world.trainer()
    client.publish(staged(0))

    def flip(data, entries):
        data[entries[K_WEIGHT].offset + 5] ^= 1

    with refused("torn", f"{K_WEIGHT} is torn"):
        client.publish(bent(1, flip))
    still_serves(any_world, client, 0)
    client.publish(staged(1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, None])
def test_validation_refuses_nan_infinite_negative_and_zero_scales(bridge, bad):
    client = bridge.trainer()
    client.publish(staged(0))
    scale = bridge_world.tensors(1)[K_SCALE]
    if bad is None:
        scale[:] = 0
    else:
        scale[3] = bad
    with refused("tensor", K_SCALE):
        client.publish(staged(1, replace={K_SCALE: scale}))
    still_serves(bridge, client, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_nonfinite_values_are_found_in_every_float_dtype(dtype):
    array = np.linspace(-1, 1, 33, dtype=np.float32).astype(wire.DTYPES[dtype])
    assert not staged_copies.has_nonfinite(array)
    for bad in (np.nan, -np.nan) if dtype == "float8_e4m3fn" else (np.nan, np.inf, -np.inf):
        array[7] = bad
        assert staged_copies.has_nonfinite(array)
    assert not staged_copies.has_nonfinite(np.full(4, -1, np.int8))


@pytest.mark.parametrize("field", ["step", "digest of a tensor", "a tensor", "digest", "total_bytes"])
def test_announce_refuses_a_torn_manifest(bridge, field):
    client = bridge.trainer()
    client.publish(staged(0))
    good = staged(1)
    manifest = good.manifest
    replace = msgspec.structs.replace
    if field == "step":
        bad = replace(manifest, version=replace(manifest.version, step=2))
    elif field == "digest of a tensor":
        bad = replace(manifest, tensors=[replace(manifest.tensors[0], digest=bytes(16)), *manifest.tensors[1:]])
    elif field == "a tensor":
        bad = replace(manifest, tensors=manifest.tensors[:-1])
    elif field == "digest":
        bad = replace(manifest, digest=bytes(16))
    else:
        bad = replace(manifest, total_bytes=manifest.total_bytes - 1)
    with refused("torn", "its digest does not match its content"):
        client.publish(sender.StagedVersion(bad, os.dup(good.fd), 0.0))
    still_serves(bridge, client, 0)
    client.publish(good)


def test_swapped_rows_of_two_shards_are_found(bridge):
    client = bridge.trainer()
    client.publish(staged(0))

    def swap(data, entries):
        first, second = (entries[n].offset for n in (K_WEIGHT, K_WEIGHT.replace("k_proj", "q_proj")))
        data[first : first + 8], data[second : second + 8] = data[second : second + 8], data[first : first + 8]

    with refused("torn", "k_proj.weight is torn|q_proj.weight is torn"):
        client.publish(bent(1, swap))
    still_serves(bridge, client, 0)


def test_a_nan_norm_weight_is_refused_too(bridge):
    norm = np.full(8, np.nan, ml_dtypes.bfloat16)
    with refused("tensor", "model.norm.weight holds NaN"):
        bridge.trainer().publish(staged(0, replace={"model.norm.weight": norm}))


def test_chunks_must_come_whole_in_order_and_within_bounds(tmp_path):
    with world(tmp_path, tcp=True) as w:
        client, version = w.trainer(), staged(0)
        total = version.manifest.total_bytes
        assert not client.request(wire.Announce(manifest=version.manifest), wire.Ready).share_memory
        with refused("torn", "in order"):
            client.request(wire.Chunk(offset=64), wire.Ok, data=b"x")
        with refused("torn", "beyond"):
            client.request(wire.Chunk(offset=0), wire.Ok, data=bytes(total + 1))
        with refused("limits", "exceeds the 8388608 of a Chunk"):
            client.request(wire.Chunk(offset=0), wire.Ok, data=bytes(wire.CHUNK_BYTES + 1))
        with refused("unshared", "send Chunks"):
            client.request(wire.Stage(memory=shm.locate(version.fd)), wire.Staged)
        client.request(wire.Announce(manifest=version.manifest), wire.Ready)
        client.request(wire.Chunk(offset=0), wire.Ok, data=bytes(10))
        with refused("torn", f"10 of {total} bytes"):
            client.request(wire.Stage(memory=None), wire.Staged)
        with refused("bad_state", "send Announce first"):  # a torn version is dropped
            client.request(wire.Stage(memory=None), wire.Staged)
        client.publish(version)
        still_serves(w, client, 0)


def test_steps_out_of_order_are_refused(bridge):
    client, version = bridge.trainer(), staged(0)
    commit = wire.Commit(digest=version.manifest.digest)
    with refused("bad_state", "Announce first"):
        client.request(commit, wire.Published)
    client.request(wire.Announce(manifest=version.manifest), wire.Ready)
    with refused("bad_state", "not staged"):
        client.request(commit, wire.Published)
    with refused("torn", "0 of"):
        client.request(wire.Stage(memory=None), wire.Staged)
    client.request(wire.Announce(manifest=version.manifest), wire.Ready)
    client.request(wire.Stage(memory=shm.locate(version.fd)), wire.Staged)
    with refused("torn", "another manifest"):
        client.request(wire.Commit(digest=bytes(16)), wire.Published)


def test_a_trainer_whose_memory_cannot_be_reached_sends_its_bytes(bridge, monkeypatch):
    real = shm.locate
    client = bridge.trainer()
    for step, elsewhere in enumerate(
        (
            lambda fd: msgspec.structs.replace(real(fd), inode=1),  # another PID namespace: other files at that number
            lambda fd: msgspec.structs.replace(real(fd), fd=0),
            lambda fd: msgspec.structs.replace(real(fd), pid=1 << 30),
        )
    ):
        version = staged(step)
        with refused("unshared"):
            shm.open_located(elsewhere(version.fd))
        monkeypatch.setattr(shm, "locate", elsewhere)
        client.publish(version)
        still_serves(bridge, client, step)


def open_files():
    gc.collect()  # pytest keeps the tracebacks of refusals, and with them their versions
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_memory_files_do_not_leak(bridge):
    client = bridge.trainer()
    for step in range(3):
        client.publish(staged(step))
    before = open_files()
    for step in range(3, 13):
        version = staged(step)
        client.publish(version)
        with refused("stale"):
            client.publish(staged(0))
        version.close()
    wait_for(lambda: open_files() <= before)  # the bridge lets go of a version when it gets to it


# ---- failures while loading -----------------------------------------------------------------------------------------


def test_failed_load_restores_the_last_good_version(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    before = client.generate(draws(), SAMPLING)
    bridge.engine.fail_load = 1
    with refused("engine", "simulated loader failure.*run/1/0 was restored"):
        client.publish(staged(1))
    still_serves(bridge, client, 0)
    assert client.generate(draws(), SAMPLING) == before
    client.publish(staged(1))
    still_serves(bridge, client, 1)


def test_failed_read_back_restores_the_last_good_version(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.fail_read_back = 1
    with refused("engine", "simulated read-back.*restored"):
        client.publish(staged(1))
    still_serves(bridge, client, 0)


def test_an_engine_that_cannot_be_restored_is_fenced_until_a_complete_version(bridge):
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.fail_load = 2
    with refused("fenced", "so did restoring"):
        client.publish(staged(1))
    assert client.status().state == "fenced"
    with refused("fenced"):
        client.generate(draws(), SAMPLING)
    with refused("bad_state"):
        client.read_back()
    client.publish(staged(2))
    still_serves(bridge, client, 2)


def test_a_failed_first_load_goes_back_to_the_folders_weights_or_stays_fenced(tmp_path):
    for has_weights in (True, False):
        with world(tmp_path, has_weights=has_weights) as w:
            client = w.trainer()
            w.engine.fail_load = 1
            with refused("engine" if has_weights else "fenced"):
                client.publish(staged(0))
            assert client.status().state == ("serving" if has_weights else "fenced")


# ---- draining -------------------------------------------------------------------------------------------------------


def generate_in_background(client, results):
    thread = threading.Thread(target=lambda: results.append(client.generate(draws(), SAMPLING)))
    thread.start()
    return thread


def test_publishing_waits_for_running_requests_and_never_mixes_versions(bridge):
    trainer, sampler, other = bridge.trainer(), bridge.client(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    early, late = [], []
    first = generate_in_background(sampler, early)
    wait_for(lambda: trainer.status().running == 3)
    publish = threading.Thread(target=lambda: trainer.publish(staged(1)))
    publish.start()
    wait_for(lambda: bridge.bridge.state == "draining")
    second = generate_in_background(other, late)
    wait_for(lambda: len(bridge.bridge.draws.waiting) == 3)
    bridge.engine.stall = False
    for thread in (first, publish, second):
        thread.join(PATIENCE_S)
    assert [version_of(d) for d in early[0]] == [0, 0, 0]
    assert [version_of(d) for d in late[0]] == [1, 1, 1]


def test_drain_timeout_refuses_the_version_and_serving_goes_on(bridge):
    trainer, sampler = bridge.trainer(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    results = []
    thread = generate_in_background(sampler, results)
    wait_for(lambda: trainer.status().running == 3)
    with refused("timeout", "run/1/0 goes on serving"):
        trainer.publish(staged(1), drain_timeout_s=0.1)
    bridge.engine.stall = False
    thread.join(PATIENCE_S)
    assert [version_of(d) for d in results[0]] == [0, 0, 0]
    trainer.publish(staged(1))
    still_serves(bridge, trainer, 1)


# ---- deaths ---------------------------------------------------------------------------------------------------------


def test_a_trainer_that_dies_mid_publish_leaves_lease_and_engine_free(bridge):
    first = bridge.trainer()
    first.publish(staged(0))
    version = staged(1)
    first.request(wire.Announce(manifest=version.manifest), wire.Ready)
    first.request(wire.Stage(memory=shm.locate(version.fd)), wire.Staged)
    first.close()
    resumed = _acquire_when_free(bridge, incarnation=2)
    assert bridge.bridge._pending is None
    still_serves(bridge, resumed, 0)
    resumed.publish(staged(0, incarnation=2))


def test_requests_of_a_client_that_died_are_aborted(bridge, monkeypatch):
    monkeypatch.setattr(server, "PROGRESS_S", 0.05)
    trainer, sampler = bridge.trainer(), bridge.client()
    trainer.publish(staged(0))
    bridge.engine.stall = True
    sampler._channel.send(wire.Generate(draws=draws(), sampling=SAMPLING))
    wait_for(lambda: trainer.status().running == 3)
    sampler.close()
    wait_for(lambda: trainer.status().running == 0)
    bridge.engine.stall = False
    still_serves(bridge, trainer, 0)


def test_progress_is_reported_while_a_request_runs(bridge, monkeypatch):
    monkeypatch.setattr(server, "PROGRESS_S", 0.02)
    client = bridge.trainer()
    client.publish(staged(0))
    bridge.engine.stall = True
    seen = []

    def on_progress(progress):
        seen.append((progress.running, progress.waiting))
        bridge.engine.stall = progress.running != 3  # the first may come before the engine has begun

    client.generate(draws(), SAMPLING, on_progress=on_progress)
    assert (3, 0) in seen


def test_a_result_that_comes_as_the_wait_for_it_ends_is_not_lost(bridge):
    class JustInTime(concurrent.futures.Future):
        def result(self, timeout=None):
            if timeout is None:
                return super().result()
            self.set_result("here")
            raise concurrent.futures.TimeoutError

    assert bridge.bridge._wait(None, JustInTime()) == "here"


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


# ---- looking inside -------------------------------------------------------------------------------------------------


def test_a_probe_needs_an_idle_serving_engine_and_a_prompt_that_fits(bridge):
    client, sampler = bridge.trainer(), bridge.client()
    with refused("bad_state", "serving engine"):
        client.probe([1, 2], ["layer"])
    client.publish(staged(0))
    (record,) = client.probe([1, 2], ["layer"])
    assert (record.module, record.inputs[0].numpy().tolist()) == ("layer", [1, 2])
    with refused("limits", "vocabulary"):
        client.probe([100], ["layer"])
    bridge.engine.stall = True
    results = []
    thread = generate_in_background(sampler, results)
    wait_for(lambda: client.status().running == 3)
    with refused("busy", "idle"):
        client.probe([1, 2], ["layer"])
    bridge.engine.stall = False
    thread.join(PATIENCE_S)
    assert [version_of(d) for d in results[0]] == [0, 0, 0]


def test_loads_are_profiled_where_that_was_asked_for(bridge, tmp_path):
    client = bridge.trainer()
    bridge.bridge._profile = str(tmp_path / "profiles")
    client.publish(staged(7))
    assert "load" in (tmp_path / "profiles" / "publish-7.txt").read_text()
    assert (tmp_path / "profiles" / "publish-7.prof").stat().st_size > 0


# ---- fuzz -----------------------------------------------------------------------------------------------------------


def _mutated(rng, message):
    """A message's bytes after random damage: flips, cuts, insertions, or a random value somewhere inside."""
    kind = rng.integers(4)
    data = bytearray(wire.encode(message))
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
        wire.Status(),
        wire.Acquire(run_id="other", incarnation=3),
        wire.Announce(manifest=staged(1).manifest),
        wire.Stage(memory=wire.HostMemory(pid=os.getpid(), fd=1, inode=1)),
        wire.Stage(memory=None),
        wire.Chunk(offset=0),
        wire.Commit(digest=version.manifest.digest),
        wire.Generate(draws=draws(1), sampling=wire.Sampling(max_tokens=1)),
        wire.ReadBack(),
        wire.Shutdown(),
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
        assert isinstance(wire.decode(reply, wire.REPLY_DECODER), wire.REPLIES)
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
        flood._channel.send(wire.Generate(draws=draws(1), sampling=SAMPLING))
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
