# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Only what has changed travels, and what arrives is the version, or is refused."""

import contextlib
import hashlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qarl_bridge.client import sender
from qarl_bridge.protocol import delta, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.changed import Changes
from qarl_bridge.server.staged import HostCopy

from tests.reference.bridge_world import K_WEIGHT, SAMPLING, draws, staged, still_serves, tensors, world


def flipped(old, share, rng):
    """A copy in which about that share of all bytes is another."""
    new = old.copy()
    spots = np.flatnonzero(rng.random(len(old)) < share)
    new[spots] ^= rng.integers(1, 256, len(spots)).astype(np.uint8)
    return new


def applied(data, old):
    out = old.copy()
    delta.apply(data, out)
    return out


@pytest.mark.slow
@given(st.integers(0, 3000), st.sampled_from([0.0, 1e-3, 0.01, 0.1, 0.5, 1.0]), st.integers(0, 2**32 - 1))
def test_changes_applied_to_the_old_bytes_are_the_new_bytes(size, share, seed):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size).astype(np.uint8)
    new = flipped(old, share, rng)
    np.testing.assert_array_equal(applied(delta.difference(old, new, most=10 * size + 100), old), new)


@pytest.mark.parametrize("share", [0.0, 1e-7, 1e-5, 1e-3, 0.02, 0.3])
def test_pieces_are_written_in_whichever_way_is_shortest(share):
    """Two bytes and a 256th of the piece, or five, or the piece; a header of 17 for each piece that changed."""
    rng = np.random.default_rng(0)
    size = 3 * delta.PIECE + 1234
    old = rng.integers(0, 256, size).astype(np.uint8)
    new = flipped(old, share, rng)
    data = delta.difference(old, new, most=2 * size)
    changed = int((old != new).sum())
    assert len(data) <= min(5 * changed, 2 * changed + size // 256 + 4, size) + 4 * 17
    np.testing.assert_array_equal(applied(data, old), new)


def test_what_would_not_be_shorter_by_a_quarter_is_sent_whole():
    rng = np.random.default_rng(0)
    old, other = rng.integers(0, 256, (2, 100_000)).astype(np.uint8)
    assert delta.difference(old, other) is None
    assert delta.difference(old, old) == b""


@pytest.mark.parametrize("seed", range(40))
def test_torn_changes_are_refused_or_make_other_bytes(seed):
    """Never an index outside, never another error: whether the bytes are right is for the fingerprints to say."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, 5000).astype(np.uint8)
    data = bytearray(delta.difference(old, flipped(old, [1e-3, 0.05, 0.9][seed % 3], rng), most=10**6))
    if seed % 2:
        del data[rng.integers(len(data)) :]
    else:
        data[rng.integers(len(data))] ^= 1 + rng.integers(255)
    with contextlib.suppress(BridgeError):
        assert len(applied(bytes(data), old)) == len(old)


# ---- from trainer to bridge ------------------------------------------------------------------------------------------


@pytest.fixture
def remote(tmp_path):
    with world(tmp_path, tcp=True) as w:
        yield w


def near(step, base=0, code=7):
    """Version `step`: that of seed `base` with one code changed."""
    weight = tensors(base)[K_WEIGHT].copy()
    weight[3, 4] = code
    return staged(step, seed=base, replace={K_WEIGHT: weight})


def held(w):
    return {name: hashlib.sha256(messages.as_bytes(array)).hexdigest() for name, array in w.engine.held.items()}


def test_over_a_socket_only_what_changed_travels_and_the_engine_holds_the_version(remote):
    client = remote.trainer()
    first, second = staged(0), near(1)
    whole = client.publish(first, readback="full")
    assert whole["sent_bytes"] == first.manifest.total_bytes == whole["bytes"]
    second.base = first
    report = client.publish(second, readback="full")
    assert 0 < report["sent_bytes"] < 30  # a header and one change
    assert report["bytes"] == whole["bytes"]
    wanted = tensors(0)
    wanted[K_WEIGHT][3, 4] = 7
    assert held(remote) == {n: hashlib.sha256(messages.as_bytes(a)).hexdigest() for n, a in wanted.items()}
    still_serves(remote, client, 1)
    third = near(2, code=8)
    third.base = second
    assert client.publish(third, readback="full")["sent_bytes"] < 30  # what was made of changes is a base as well
    assert client.generate(draws(1), SAMPLING)


@pytest.mark.parametrize("case", ["another version", "no base", "closed"])
def test_where_changes_do_not_help_the_whole_is_sent(remote, case):
    client = remote.trainer()
    first = staged(0)
    client.publish(first)
    second = near(1)
    second.base = {"another version": near(0, code=3), "no base": None}.get(case, first)
    if case == "closed":
        first.close()
    assert client.publish(second, readback="full")["sent_bytes"] == second.manifest.total_bytes
    still_serves(remote, client, 1)


def test_changes_that_are_torn_on_their_way_are_refused_and_the_whole_is_sent_instead(remote, monkeypatch):
    client = remote.trainer()
    first, second = staged(0), near(1)
    client.publish(first)
    second.base = first
    good = second.changes_to(first.manifest.digest)
    monkeypatch.setattr(sender.StagedVersion, "changes_to", lambda self, digest: good[:-1] + bytes([good[-1] ^ 1]))
    report = client.publish(second, readback="full")
    assert report["sent_bytes"] == len(good) + second.manifest.total_bytes
    still_serves(remote, client, 1)


def test_changes_to_a_version_that_the_bridge_does_not_hold_are_refused(remote):
    client = remote.trainer()
    client.publish(staged(0))
    client.request(messages.Announce(manifest=near(1).manifest), messages.Ready)
    with pytest.raises(BridgeError, match="does not hold") as error:
        client.request(messages.Stage(memory=messages.Changes(base=bytes(16))), messages.Staged)
    assert error.value.code == "unshared"
    still_serves(remote, client, 0)


def test_on_one_host_memory_is_shared_and_nothing_travels(tmp_path):
    with world(tmp_path) as w:
        client = w.trainer()
        first, second = staged(0), near(1)
        second.base = first
        assert client.publish(first)["sent_bytes"] == client.publish(second)["sent_bytes"] == 0


def test_of_several_bridges_of_a_host_one_is_sent_a_version_and_the_others_map_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with world(tmp_path / "a", tcp=True) as a, world(tmp_path / "b", tcp=True) as b:
        first, second = staged(0), near(1)
        second.base = first
        for version in (first, second):
            sent = [w.trainer().publish(version, readback="full")["sent_bytes"] for w in (a, b) if not w.clients] or [
                w.clients[0].publish(version, readback="full")["sent_bytes"] for w in (a, b)
            ]
            assert sent[0] > 0
            assert sent[1] == 0
            assert held(a) == held(b)
        # Should its memory be gone, the version is sent as to a host of its own.
        third = near(2, code=9)
        third.base = second
        a.clients[0].publish(third)
        a.clients[0].publish(near(3))
        a.clients[0].read_back()  # the engine's thread lets go of the third before it comes to this
        assert b.clients[0].publish(third, readback="full")["sent_bytes"] > 0
        still_serves(b, b.clients[0], 2)


def test_no_memory_is_opened_for_a_stranger_to_this_host(remote):
    client = remote.trainer()
    version = staged(0)
    client.request(messages.Announce(manifest=version.manifest), messages.Ready)
    with pytest.raises(BridgeError, match="one host only"):
        client.request(messages.Stage(memory=version.memory()), messages.Staged)


@pytest.mark.parametrize("how", ["whole", "changes"])
def test_versions_that_came_over_a_socket_leave_no_descriptor_open(remote, how):
    client = remote.trainer()
    before = staged(0)
    client.publish(before)
    open_files = []
    for step in range(1, 21):
        version = near(step, code=step)
        version.base = before if how == "changes" else None
        client.publish(version)
        before.close()
        before = version
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[-1] <= open_files[4] + 6, "one left open per version would be 15; the last few are let go of soon"


# ---- fingerprints of what was changed --------------------------------------------------------------------------------


def moved(old, share, rng):
    """A manifest's tensors with about that share of all bytes changed; floats stay finite, scales above zero."""
    out = {}
    for name, array in old.items():
        raw = np.array(array).reshape(-1).view(np.uint8)
        if array.dtype.kind in "iu" and array.size:
            raw = flipped(raw, share, rng)
        elif array.size:
            spots = np.flatnonzero(rng.random(array.size) < share) * array.itemsize
            raw[spots] ^= np.uint8(1)  # the last bit of some floats
        out[name] = raw.view(array.dtype).reshape(array.shape)
    return out


def staged_tensors(named, step):
    version = messages.Version(run_id="run", incarnation=1, step=step)
    return sender.stage(named.items(), version=version, model=b"m" * 32, scheme=b"s" * 32)


def copy_of(version, base=None, data=None):
    """The bridge's copy of a staged version, validated: whole, or out of changes to another."""
    buffer = np.frombuffer(version.chunk(0, version.manifest.total_bytes), np.uint8)
    if base is None:
        copy = HostCopy(version.manifest, buffer)
    else:
        changes, own = Changes(base.manifest, base.sums, version.manifest), base.buffer.copy()
        delta.apply(data, own, changes)
        copy = HostCopy(version.manifest, own, changes=changes)
    copy.validate()
    return copy


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.02, 0.4, 1.0])
def test_the_sums_of_a_changed_version_are_those_of_reading_it_all(share):
    rng = np.random.default_rng(int(100 * share))
    sizes = ((3, 1000), (5, 70_001), (1, 7), (300, 4096))  # rows that two pieces share, and ends of odd length
    old = {f"t{i}.weight": rng.integers(-128, 128, size).astype(np.int8) for i, size in enumerate(sizes)}
    old["s.weight_scale"] = rng.uniform(0.1, 1, (40, 1)).astype(np.float32)
    old["e.weight"] = np.zeros((0, 4), np.int8)
    first = staged_tensors(old, 0)
    second = staged_tensors(moved(old, share, rng), 1)
    a, b = (np.frombuffer(one.chunk(0, one.manifest.total_bytes), np.uint8) for one in (first, second))
    base = copy_of(first)
    found = copy_of(second, base, delta.difference(a, b, most=10 * len(a) + 100))
    np.testing.assert_array_equal(found.sums.rows, copy_of(second).sums.rows)
    np.testing.assert_array_equal(found.buffer, b)


@pytest.mark.parametrize("case", ["byte", "lost", "nan", "scale"])
def test_changes_that_make_another_version_than_announced_are_refused(case):
    rng = np.random.default_rng(0)
    old = {
        "a.weight": rng.integers(-9, 9, (64, 64)).astype(np.int8),
        "a.weight_scale": np.full((64, 1), 0.5, np.float32),
    }
    new = {name: array.copy() for name, array in old.items()}
    new["a.weight"][3, 4] += 1
    new["a.weight_scale"][7] = {"nan": np.nan, "scale": -0.5}.get(case, 0.25)
    first, second = staged_tensors(old, 0), staged_tensors(new, 1)
    a, b = (np.frombuffer(one.chunk(0, one.manifest.total_bytes), np.uint8) for one in (first, second))
    if case in ("byte", "lost"):
        b = b.copy()
        place = second.manifest.tensors[0].offset + 3 * 64 + 4
        b[place] = a[place] if case == "lost" else b[place] ^ 0x10
    said = {"nan": "NaN", "scale": ">= 0"}.get(case, "a.weight is torn")
    with pytest.raises(BridgeError, match=said):
        copy_of(second, copy_of(first), delta.difference(a, b, most=10**6))


def test_a_copy_for_the_next_changes_is_made_while_a_version_serves(remote):
    """From the second version on that comes as changes; what comes whole gives it up."""
    client, versions = remote.trainer(), [staged(0), near(1), near(2, code=8), near(3, code=9)]
    spare = remote.bridge._spare
    for step, version in enumerate(versions):
        version.base = versions[step - 1] if step else None
        assert (spare._made is not None) == (step > 1)
        made = spare._made.result()[0] if step > 1 else -1  # the file that this version is written into
        client.publish(version, readback="full")
        assert step < 2 or remote.bridge._good.last.fd == made
        still_serves(remote, client, step)
    made = spare._made.result()[0]
    client.publish(staged(4), readback="full")
    assert spare._made is None
    with pytest.raises(OSError):
        os.fstat(made)
