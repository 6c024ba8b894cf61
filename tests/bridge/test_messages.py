# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages are strict, keys are private, manifests cannot lie, staged bytes cannot change."""

import os

import ml_dtypes
import msgspec
import numpy as np
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.manifest import check_manifest, expected_from_safetensors
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import shm

from qarl_jax.rollout.vllm.engine import Config
from tests.reference import bridge_world


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"t": "Nonsense"}),
        msgspec.msgpack.encode({"t": "Status", "extra": 1}),
        msgspec.msgpack.encode({"t": "Acquire", "run_id": "r", "incarnation": "1"}),
        msgspec.msgpack.encode({"t": "Acquire", "run_id": "r", "incarnation": -1}),
        msgspec.msgpack.encode({"t": "Acquire", "run_id": "r" * 200, "incarnation": 1}),
        msgspec.msgpack.encode({"t": "Generate", "draws": [], "sampling": {"max_tokens": 1}}),
        msgspec.msgpack.encode({"t": "Generate", "draws": [{"prompt": [1], "seed": 0}], "sampling": {"max_tokens": 0}}),
        msgspec.msgpack.encode({"t": "Ok"}),
        b"\x91" * 100_000,
        b"\x80\x04\x95.",
    ],
    ids=str,
)
def test_anything_but_a_well_formed_request_is_a_bridge_error(payload):
    with pytest.raises(BridgeError) as error:
        messages.decode(payload)
    assert error.value.code == "bad_message"


def test_a_draw_may_lower_the_limit_and_never_raise_it():
    sampling = messages.Sampling(max_tokens=5, temperature=0.5)
    limits = {own: messages.Draw(prompt=[1], seed=0, max_tokens=own).under(sampling) for own in (0, 3, 5, 9)}
    assert {own: limit.max_tokens for own, limit in limits.items()} == {0: 5, 3: 3, 5: 5, 9: 5}
    assert {limit.temperature for limit in limits.values()} == {0.5}
    draws = [{"prompt": [1], "seed": 0, "max_tokens": -1}]
    with pytest.raises(BridgeError):
        messages.decode(msgspec.msgpack.encode({"t": "Generate", "draws": draws, "sampling": {"max_tokens": 1}}))


def test_key_files_are_private_and_well_formed(tmp_path):
    path = str(tmp_path / "key")
    key = messages.create_key(path)
    assert messages.read_key(path) == key
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(BridgeError, match="cannot create"):
        messages.create_key(path)
    os.chmod(path, 0o644)
    with pytest.raises(BridgeError, match="chmod 600"):
        messages.read_key(path)
    for text in ("zz" * 32, "00" * 31):
        bad = tmp_path / f"bad{len(text)}"
        bad.write_text(text)
        bad.chmod(0o600)
        with pytest.raises(BridgeError, match="64 hexadecimal digits"):
            messages.read_key(str(bad))


@pytest.mark.parametrize("address", ["", "tcp://nohost", "tcp://h:99999", "http://x", "/" + "a" * 120])
def test_a_bad_address_is_an_error(address):
    with pytest.raises(BridgeError):
        messages.parse_address(address)


@pytest.mark.parametrize("name", sorted(messages.DTYPES))
def test_staged_tensors_come_back_bit_for_bit(name):
    array = np.random.default_rng(0).integers(0, 256, 6 * messages.DTYPES[name].itemsize, np.uint8)
    array = array.view(messages.DTYPES[name]).reshape(2, 3)
    staged = sender.stage(
        {"a": array, "b": array[:, ::2], "empty": array[:0]}.items(),
        version=messages.Version(run_id="r", incarnation=0, step=0),
        model=bytes(16),
        scheme=bytes(16),
    )
    buffer = shm.map_sealed(staged.fd, staged.manifest.total_bytes)
    for entry, want in zip(staged.manifest.tensors, (array, array[:, ::2], array[:0]), strict=True):
        raw = buffer[entry.offset : entry.offset + entry.nbytes]
        assert raw.tobytes() == want.tobytes()
        assert entry.digest == fingerprint.digest(want.tobytes())
        assert entry.offset % messages.ALIGNMENT == 0


def test_an_unpublishable_dtype_is_an_error():
    with pytest.raises(BridgeError, match="float64"):
        bridge_world.staged(0, replace={"model.norm.weight": np.zeros(8)})


def test_a_staged_version_can_no_longer_change():
    staged = bridge_world.staged(0)
    with pytest.raises(PermissionError):
        os.pwrite(staged.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(staged.fd, 1)
    buffer = shm.map_sealed(staged.fd, staged.manifest.total_bytes)
    with pytest.raises(ValueError, match="read-only"):
        buffer[0] = 1


def test_unsealed_short_or_foreign_files_are_refused(tmp_path):
    fd = shm.create(10)
    with pytest.raises(BridgeError, match="not sealed"):
        shm.map_sealed(fd, 10)
    shm.seal(fd)
    with pytest.raises(BridgeError, match="holds 10 bytes"):
        shm.map_sealed(fd, 11)
    os.close(fd)
    with open(tmp_path / "f", "wb+") as file:
        with pytest.raises(BridgeError, match="not a memory file"):
            shm.map_sealed(file.fileno(), 0)
        with pytest.raises(BridgeError, match="not a staged version"):
            shm.open_located(shm.locate(file.fileno()))


def check(manifest, **changes):
    """check_manifest against the fake world, after `changes` to the manifest (its digest is made to fit)."""
    check_manifest(
        msgspec.structs.replace(manifest, **changes).sealed(),
        model=messages.model_fingerprint(bridge_world.CONFIG),
        scheme=messages.scheme_hash(bridge_world.CONFIG["quantization_config"]),
        expected=bridge_world.expected(bridge_world.tensors(0)),
    )


def test_a_manifest_that_contradicts_itself_is_torn():
    manifest = bridge_world.staged(0).manifest
    check(manifest)
    first, second, *rest = manifest.tensors

    def changed(entry, **fields):
        return msgspec.structs.replace(entry, **fields)

    for tensors, words in [
        ([first, first, second, *rest], "listed twice"),
        ([changed(first, offset=second.offset), second, *rest], "overlaps"),
        ([changed(first, offset=1), second, *rest], "overlaps"),
        ([changed(first, nbytes=first.nbytes + 2), second, *rest], "do not hold"),
        ([first, *rest, changed(second, offset=1 << 40)], "outside"),
        ([changed(first, dtype="complex64"), second, *rest], "unknown dtype"),
        ([changed(first, shape=[1 << 40, 1 << 40]), second, *rest], "do not hold"),
    ]:
        with pytest.raises(BridgeError, match=words):
            check(manifest, tensors=tensors)
    with pytest.raises(BridgeError, match="its digest does not match"):
        check_manifest(
            msgspec.structs.replace(manifest, total_bytes=manifest.total_bytes + 64),
            model=manifest.model,
            scheme=manifest.scheme,
        )


def test_the_fingerprint_ignores_what_does_not_change_the_model():
    config = {"model_type": "qwen3", "hidden_size": 8, "rope_theta": 1e6}
    same = dict(reversed(config.items())) | {"torch_dtype": "bfloat16", "transformers_version": "9", "extra": None}
    assert messages.model_fingerprint(config) == messages.model_fingerprint(same)
    assert messages.model_fingerprint(config) != messages.model_fingerprint(config | {"rope_theta": 1e4})
    assert messages.scheme_hash(None) != messages.scheme_hash({"format": "int-quantized"})


def test_expected_tensors_are_read_from_a_safetensors_header(tmp_path):
    from safetensors.numpy import save_file

    path = str(tmp_path / "m.safetensors")
    save_file({"a": np.zeros((2, 3), np.int8), "b": np.zeros(4, ml_dtypes.bfloat16)}, path)
    assert expected_from_safetensors(path) == {
        "a": messages.Expected(name="a", dtype="int8", shape=[2, 3]),
        "b": messages.Expected(name="b", dtype="bfloat16", shape=[4]),
    }
    with open(path, "r+b") as file:
        file.truncate(20)
    with pytest.raises(BridgeError, match="safetensors header"):
        expected_from_safetensors(path)


def test_engine_options_cross_as_json_and_a_subclass_adds_nothing():
    options = messages.EngineOptions(max_num_seqs=8, kv_cache_gb=20, eager=True, record_routing=True)
    assert messages.EngineOptions.from_json(options.to_json()) == options
    assert messages.EngineOptions.from_json("{}") == messages.EngineOptions()
    config = Config(transport="host", profile="/p")
    assert messages.EngineOptions.from_json(config.to_json()) == messages.EngineOptions(profile="/p")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "engine options"),
        ('{"max_num_seq": 3}', "there is no 'max_num_seq'"),
        ('{"arithmetic": "fast"}', "arithmetic"),
        ('{"max_num_seqs": 0}', "must be positive"),
        ('{"record_routing": true, "arithmetic": "vllm"}', "cannot record routed experts"),
    ],
)
def test_engine_options_that_cannot_be_meant_are_refused(text, said):
    with pytest.raises(BridgeError, match=said) as caught:
        messages.EngineOptions.from_json(text)
    assert caught.value.code == "setup"
