# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked weight transfer: versions that go to an engine part by part, through a buffer on its GPU."""

import ctypes
import os
import threading

import jax
import numpy as np
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import chunked
from qarl_bridge.transport import cuda_ipc

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm import all_gather, gpu_staging
from qarl_jax.rollout.vllm.engine import engine_tensors
from tests.reference import bridge_world
from tests.reference.device_versions import identity, policy, read, spread


def places(*layers, nbytes=4096):
    """Of a layout: an embedding, so many tensors in each of some layers, a norm."""
    names = [f"model.layers.{i}.w{n}.weight" for i, count in enumerate(layers) for n in range(count)]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight"]
    where = {"source": ("x", "master"), "dtype": "int8", "shape": (nbytes,), "nbytes": nbytes}
    return [gpu_staging._Place(name=name, offset=n * nbytes, **where) for n, name in enumerate(names)]


@pytest.mark.parametrize(
    ("pages", "ends"), [(100, [8]), (3, [3, 6, 8]), (2, [1, 3, 6, 8]), (1, [1, 3, 6, 7, 8]), (4, [3, 7, 8])]
)
def test_a_part_has_as_many_whole_layers_as_the_buffer_holds(pages, ends):
    found = places(2, 3, 1)
    assert gpu_staging.parts_of(found, 4096 * pages) == ends
    spans = gpu_staging.spans_of(found, ends)
    assert [start for start, _ in spans] == [4096 * first for first in [0, *ends[:-1]]]
    assert sum(size for _, size in spans) == 8 * 4096


@pytest.fixture
def stager(gpu, monkeypatch):
    """A chunked stager whose buffer holds a layer, or the embedding."""
    monkeypatch.setattr(gpu_staging, "CHUNK_BYTES", 2**14)
    stager = gpu_staging.DeviceStager([cuda_ipc.Buffers(gpu)], chunked=True)
    yield stager
    stager.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16:g32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_the_parts_in_the_buffer_make_the_version_of_the_host(stager, scheme):
    weights = policy(scheme, moe=True)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity())
    version = stager.stage(weights, **identity())
    assert version.manifest == host.manifest
    assert len(version.ends) > 2
    (buffer,) = version.buffers
    assert buffer.size < host.manifest.total_bytes
    tensors = host.manifest.tensors
    for part, end in reversed(list(enumerate(version.ends))):  # in any order
        first = version.ends[part - 1] if part else 0
        version.write(part, buffer)
        for entry in tensors[first:end]:
            found = read(buffer.pointer + entry.offset - tensors[first].offset, entry.nbytes)
            assert found == os.pread(host.fd, entry.nbytes, entry.offset), entry.name
    version.close()


@pytest.mark.slow
def test_a_learner_on_a_mesh_writes_parts_on_each_of_its_gpus(monkeypatch, library_path):
    monkeypatch.setattr(all_gather, "PIECE_BYTES", 2**12)
    monkeypatch.setattr(gpu_staging, "CHUNK_BYTES", 2**14)
    weights = policy("w8a8", moe=True)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity())
    pools = []
    for number in range(2):
        gpu = cuda_ipc.Device(0, cuda_ipc.load(library_path))
        gpu.ordinal, gpu.uuid = number, bytes([number]) * 16
        pools.append(cuda_ipc.Buffers(gpu))
    stager = gpu_staging.DeviceStager(pools, chunked=True)
    placed = spread(weights, fsdp=2)
    version = stager.stage(placed, **identity())
    assert version.manifest == host.manifest
    starts = [host.manifest.tensors[first].offset for first in [0, *version.ends[:-1]]]
    gathered, made = all_gather.gathered, []
    monkeypatch.setattr(all_gather, "gathered", lambda pieces: made.append(len(pieces)) or gathered(pieces))
    # The second is a part behind, as engines are at times: what was gathered for the first is still there.
    turns = [(number, part) for part in range(len(starts) + 1) for number in (0, 1)]
    for number, turn in turns:
        part = turn - number
        if not 0 <= part < len(starts):
            continue
        buffer = version.buffer(bytes([number]) * 16)
        version.write(part, buffer)
        last = host.manifest.tensors[version.ends[part] - 1]
        size = last.offset + last.nbytes - starts[part]
        assert read(buffer.pointer, size) == os.pread(host.fd, size, starts[part])
    assert len(made) == len(starts) > 3
    stager.forget()
    version.write(len(starts) - 1, version.buffers[0])
    assert len(made) == len(starts) + 1
    stager.close()


@pytest.mark.slow
def test_versions_go_through_the_buffer_and_nothing_can_be_restored(served, stager):
    w, _ = served
    client = w.trainer()
    for step in range(2):
        weights = policy("w8a8", seed=step)
        version = stager.stage(weights, **identity(step))
        report = client.publish(version, readback="full")
        assert (report["tensors"], report["bytes"]) == (len(version.manifest.tensors), version.manifest.total_bytes)
        assert report["weights_read_back"] == len(version.manifest.tensors)
        held = {name: messages.as_bytes(array) for name, array in engine_tensors(weights, stacked=True)}
        assert {name: messages.as_bytes(array) for name, array in w.engine.held.items()} == held
        version.close()
    client.publish(version)  # the same again, as after a failure elsewhere
    w.engine.fail_load = 1
    weights = policy("w8a8", seed=2)
    version = stager.stage(weights, **identity(2))
    with pytest.raises(BridgeError, match="no earlier version to restore"):
        client.publish(version)
    assert client.status().state == "fenced"
    client.publish(version)
    assert client.status().version.step == 2
    with pytest.raises(BridgeError, match="nothing published to compare with"):
        client.read_back()


def through_a_buffer(version, torch, spoil=lambda sweep, part, buffer: None):
    """A ChunkedCopy of a host version whose buffer is a tensor of torch's, and a thread that fills it."""
    from qarl_bridge.server import staged_gpu

    tensors = version.manifest.tensors
    ends = [2, 3, len(tensors)]
    starts = [tensors[first].offset for first in [0, *ends[:-1]]]
    buffer = torch.full((sender.align(version.manifest.total_bytes),), 0x55, dtype=torch.uint8)

    def open_part(part):
        return staged_gpu.DeviceCopy(part, buffer[: staged_gpu.whole_rows(part.total_bytes)])

    copy = chunked.ChunkedCopy(version.manifest, ends, open_part)
    copy.fetches.begin()
    fetched = []

    def serve():
        while (part := copy.fetches.wanted(60)) is not None:
            last = tensors[ends[part] - 1]
            raw = os.pread(version.fd, last.offset + last.nbytes - starts[part], starts[part])
            buffer.zero_()
            buffer[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            spoil(len(fetched) // len(ends), part, buffer)
            fetched.append(part)
            copy.fetches.bring()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return copy, fetched, thread


def test_parts_are_checked_on_the_engines_side_each_time_they_are_read():
    torch = pytest.importorskip("torch")
    version = bridge_world.staged(3)
    copy, fetched, thread = through_a_buffer(version, torch)
    copy.validate()
    for sweep in (copy.checked_parts, copy.parts):
        found = {name: tensor.clone() for part in sweep() for name, tensor in part.items()}
        for name, want in bridge_world.tensors(3).items():
            assert np.array_equal(found[name].float().numpy(), want.astype(np.float32))
    copy.confirm()
    assert fetched == 3 * [0, 1, 2]
    copy.fetches.stop()
    thread.join()
    copy.fetches.end(BridgeError("over", "dead"))
    with pytest.raises(BridgeError, match="over"):
        next(copy.parts())

    def another_byte(sweep, part, buffer):
        if (sweep, part) == (1, 1):
            buffer[7] ^= 1

    copy, fetched, thread = through_a_buffer(version, torch, another_byte)
    copy.validate()
    with pytest.raises(BridgeError, match=r"torn.*after it was staged"):
        list(copy.checked_parts())
    assert fetched == [0, 1, 2, 0, 1]
    copy.fetches.stop()
    thread.join()
    copy.close()


@pytest.mark.parametrize("ends", [[], [2], [2, 2, 5], [3, 2, 5], [5, 6], [0, 5]])
def test_parts_that_do_not_make_the_version_are_refused(ends):
    version = bridge_world.staged(3)
    assert len(version.manifest.tensors) == 5
    with pytest.raises(BridgeError, match="do not make the version"):
        chunked.ChunkedCopy(version.manifest, ends, lambda part: None)


@pytest.mark.slow
def test_a_part_that_is_not_what_was_announced_is_found_before_anything_is_replaced(served, stager):
    w, _ = served
    client = w.trainer()
    weights = policy("w8a8")
    client.publish(stager.stage(weights, **identity(0)))
    loaded = dict(w.engine.held)
    other = policy("w8a8", seed=1)
    version = stager.stage(other, **identity(1))
    write, entry = version.write, version.manifest.tensors[version.ends[0]]

    def torn(part, buffer):
        write(part, buffer)
        if part == 1:
            ctypes.memset(buffer.pointer + 3, 0x55, 1)

    version.write = torn
    with pytest.raises(BridgeError, match=f"{entry.name} is torn"):
        client.publish(version)
    assert client.status().state == "serving"
    assert all(loaded[name] is array for name, array in w.engine.held.items())
    version.write = write
    client.publish(version)


@pytest.mark.slow
def test_a_version_whose_weights_are_gone_is_given_up_and_the_engine_serves_on(served, stager):
    w, _ = served
    client = w.trainer()
    weights = policy("w8a8")
    client.publish(stager.stage(weights, **identity(0)))
    graphdef, params, qweights = models.split(models.random_model(models.config_of(weights.graphdef), 7))
    version = stager.stage(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), **identity(1))
    for leaf in jax.tree.leaves((params, qweights)):
        leaf.delete()  # as an update does that takes the old ones' memory
    with pytest.raises(BridgeError, match="the learner holds the weights of run/1/1 no longer") as error:
        client.publish(version)
    assert error.value.code == "bad_state"
    assert client.status().version.step == 0
    assert client.status().state == "serving"


@pytest.mark.slow
def test_a_trainer_that_dies_while_its_parts_are_loaded_leaves_an_engine_that_is_fenced(served, stager):
    w, _ = served
    client = w.trainer()
    weights = policy("w8a8")
    version = stager.stage(weights, **identity(0))
    write, calls = version.write, []

    def dying(part, buffer):
        calls.append(part)
        if len(calls) > len(version.ends):  # checked; now it is loaded
            raise KeyboardInterrupt
        write(part, buffer)

    version.write = dying
    with pytest.raises(KeyboardInterrupt):
        client.publish(version)
    client.close()
    other = w.client()
    bridge_world.wait_for(lambda: other.status().holder is None)
    bridge_world.wait_for(lambda: other.status().state == "fenced")
    other.acquire("run", 2)
    again = {"version": messages.Version(run_id="run", incarnation=2, step=0)}
    other.publish(stager.stage(weights, **(identity(0) | again)))
    assert other.status().state == "serving"


def test_an_engine_elsewhere_takes_no_parts(gpu, stager):
    client = sender.Client.__new__(sender.Client)
    client.facts = type("Facts", (), {"device": b"another GPU....."})()
    with pytest.raises(BridgeError, match="staging_buffers to 1 or 2") as error:
        client.route(stager.stage(policy("bf16"), **identity()))
    assert error.value.code == "unshared"
