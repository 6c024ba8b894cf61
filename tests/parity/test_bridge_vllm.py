# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The real vLLM behind the bridge: what it serves after a publish is what a fresh vLLM serves from the exported folder.

One bridge per scheme is started without weights and fed by publishes; a second one is started on a folder with the
weights of version 1. Everything else asks these two.
"""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import shm
from safetensors.numpy import save_file

from qarl_jax import models, quant
from qarl_jax.rollout import PolicyWeights, Request, SamplingConfig
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, engine_config, engine_tensors
from qarl_jax.types import Prompt
from tests.reference.bridge_world import connected, killed_in_a_publish
from tests.reference.qwen3 import qwen3

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


MODEL = qwen3(
    vocab=320,
    hidden=128,
    intermediate=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    rope_theta=1000000.0,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    attention_bias=False,
    torch_dtype="bfloat16",
)
SCHEMES = ("w8a8", "w4a16:g32", "nvfp4")
ENGINE = Config(kv_cache_gb=0.1, max_model_len=256, readback="full", threads=1)
GREEDY = SamplingConfig(max_response_len=24, temperature=0.0)
SAMPLED = SamplingConfig(max_response_len=24)
PROMPTS = [Prompt(uid=str(i), tokens=(1 + i, 2 + 3 * i, 5, 7), text="", answer="") for i in range(6)]


@functools.cache
def weights(scheme, seed):
    """A random model's weights, sharpened so that its distributions are far from flat."""
    config = _read(scheme)
    model = models.Transformer(config, nnx.Rngs(seed))
    graphdef, params, _ = models.split(model)
    params = jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, params)
    return PolicyWeights(graphdef=graphdef, params=params, qweights=models.quantizer(graphdef)(params))


def _read(scheme):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(MODEL, file)
        return models.read_config(
            folder,
            compute_dtype="bfloat16",
            param_dtype="float32",
            quant=models.parse_rules(scheme),
            numerics=quant.resolve("cpu"),
        )


@dataclasses.dataclass
class Served:
    scheme: str
    engine: VllmEngine
    first: dict  # report of publish 0
    second: dict  # report of publish 1
    zero: list  # greedy completions of version 0
    one: list  # of version 1

    @property
    def client(self):
        return self.engine.fleet.replicas[0].client

    def version(self, seed, step, replace=None):
        """A staged version, with tensors replaced (None: removed)."""
        w = weights(self.scheme, seed)
        named = dict(engine_tensors(w))
        for name, value in (replace or {}).items():
            if value is None:
                del named[name]
            else:
                named[name] = value
        return sender.stage(
            named.items(),
            version=messages.Version(run_id=self.engine._run_id, incarnation=self.engine._incarnation, step=step),
            model=self.client.facts.model,
            scheme=self.client.facts.scheme,
        )

    def still_serves_version_one(self):
        assert same(self.engine.generate(PROMPTS, num_samples=1, sampling=GREEDY, key=0), self.one)


def same(a, b):
    """Equal tokens and bit-equal log-probs."""
    return all(
        x.tokens == y.tokens and np.array_equal(x.logprobs, y.logprobs)
        for group, other in zip(a, b, strict=True)
        for x, y in zip(group, other, strict=True)
    )


@pytest.fixture(
    scope="module",
    params=[name if name == "w4a16:g32" else pytest.param(name, marks=pytest.mark.nightly) for name in SCHEMES],
)
def served(request, tmp_path_factory):
    """A bridge started without weights, after publishing versions 0 and 1 into it."""
    scheme = request.param
    log = tmp_path_factory.mktemp("bridge") / "log"
    engine = VllmEngine(dataclasses.replace(ENGINE, log_file=str(log)), run_id="parity", incarnation=1)
    try:
        first = engine.publish(weights(scheme, 0), 0)
        zero = engine.generate(PROMPTS, num_samples=1, sampling=GREEDY, key=0)
        second = engine.publish(weights(scheme, 1), 1)
        one = engine.generate(PROMPTS, num_samples=1, sampling=GREEDY, key=0)
        yield Served(scheme, engine, first, second, zero, one)
    finally:
        engine.close()


@pytest.mark.nightly  # one engine more; tests/test_vllm_run.py asks the same of an export
def test_a_published_engine_serves_what_a_fresh_engine_loads_from_the_folder(served, tmp_path):
    w = weights(served.scheme, 1)
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(engine_config(w.graphdef)))
    save_file(dict(engine_tensors(w)), str(folder / "model.safetensors"))
    socket, key = str(tmp_path / "s"), str(tmp_path / "key")
    command = [sys.executable, "-m", "qarl_bridge", "--socket", socket, "--model", str(folder), "--key-file", key]
    command += ["--options", messages.EngineOptions(max_model_len=256, kv_cache_gb=0.1, threads=1).to_json()]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        try:
            fresh = connected(socket, key, process, patience_s=400)
        except BridgeError as error:
            pytest.fail(f"{error}\n{(tmp_path / 'log').read_text()[-2000:]}")
        assert fresh.facts.kernels == served.client.facts.kernels
        assert (fresh.facts.model, fresh.facts.scheme) == (served.client.facts.model, served.client.facts.scheme)
        draws = [messages.Draw(prompt=list(p.tokens), seed=0) for p in PROMPTS]
        drawn = fresh.generate(draws, messages.Sampling(max_tokens=24, temperature=0.0))
        for one, (mine,) in zip(drawn, served.one, strict=True):
            assert one.tokens == np.asarray(mine.tokens, "<i4").tobytes()
            assert one.logprobs == np.asarray(mine.logprobs, "<f4").tobytes()
            assert one.spans[0].version.run_id == "initial"
        fresh.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert not os.path.exists(socket)
    finally:
        process.kill()
        process.wait()


def test_versions_differ_and_the_bytes_alone_decide(served):
    assert not same(served.zero, served.one)
    served.engine.publish(weights(served.scheme, 0), 2)
    again = served.engine.generate(PROMPTS, num_samples=1, sampling=GREEDY, key=0)
    assert same(again, served.zero)
    assert {c.policy_version for (c,) in again} == {2}
    served.engine.publish(weights(served.scheme, 1), 3)
    served.still_serves_version_one()


def test_an_engine_compiles_no_header_into_a_folder_that_ends_with_it(served):
    """Each engine's first request took seven CPU seconds longer so; the compiled kernels stay for the next engine."""
    held = pathlib.Path(f"/proc/{served.client.facts.pid}/fd").iterdir()
    (lock,) = (path for path in map(os.path.realpath, held) if "/qarl-engine-" in path and path.endswith("/.lock"))
    assert not list(pathlib.Path(lock).parent.rglob("*.gch"))


def test_every_weight_is_read_back_through_its_live_layer(served):
    report = served.second
    # Per layer qkv, o, gate_up, down (inputs 128, 128, 128, 256) and the head: one-hot rows for every input.
    assert report["rows_read_back"] == 2 * (128 + 128 + 128 + 256) + 128
    assert report["weights_read_back"] == 2 * (4 + 4) + 3  # + 4 norms per layer; embedding, final norm, head
    assert served.client.read_back("sampled", seed=5).rows == 9 * 16


def test_facts_name_the_arithmetic_and_the_kernels(served):
    facts = served.engine.facts
    assert facts.engine_version.startswith("0.")
    assert facts.profile == quant.resolve("cpu").profile
    assert facts.vocab_size == 320
    qkv = facts.kernels["model.layers.0.self_attn.qkv_proj"]
    assert {"w8a8": "Int8", "w4a16:g32": "WNA16", "nvfp4": "NvFp4"}[served.scheme] in qkv, qkv


def test_a_nan_is_refused_and_the_old_version_keeps_serving(served):
    name = "model.layers.1.mlp.down_proj.weight_scale"
    scale = dict(engine_tensors(weights(served.scheme, 1)))[name].copy()
    scale[3, 0] = np.nan
    with pytest.raises(BridgeError, match=f"{name} holds NaN"):
        served.client.publish(served.version(1, 50, {name: scale}))
    served.still_serves_version_one()


def test_a_missing_shard_of_a_fused_module_is_refused(served):
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    with pytest.raises(BridgeError, match=f"first: {name}"):
        served.client.publish(served.version(1, 50, {name: None}))
    served.still_serves_version_one()


def test_a_flipped_bit_is_refused(served):
    good = served.version(1, 50)
    data = bytearray(os.pread(good.fd, good.manifest.total_bytes, 0))
    data[good.manifest.tensors[7].offset] ^= 1
    fd = shm.create(len(data))
    shm.write(fd, memoryview(data), 0)
    shm.seal(fd)
    with pytest.raises(BridgeError, match=f"{good.manifest.tensors[7].name} is torn"):
        served.client.publish(sender.StagedVersion(good.manifest, fd, 0.0))
    served.still_serves_version_one()


def test_logprobs_are_those_of_the_distribution_drawn_from(served):
    def first_token(**options):
        sampling = SamplingConfig(max_response_len=1, **options)
        groups = served.engine.generate(PROMPTS[:1], num_samples=64, sampling=sampling, key=3)
        return {c.tokens[0]: float(c.logprobs[0]) for c in groups[0]}

    plain, cold = first_token(), first_token(temperature=0.5)
    # p_cold = p^2 / sum p^2: the difference of log-probs between two tokens doubles.
    tokens = sorted(plain.keys() & cold.keys())
    assert len(tokens) > 3
    a, b = np.array([plain[t] for t in tokens]), np.array([cold[t] for t in tokens])
    np.testing.assert_allclose(b - b[0], 2 * (a - a[0]), atol=1e-4)
    (top, logprob), *others = first_token(top_p=1e-6).items()
    assert (logprob, others) == (0.0, [])
    nucleus = first_token(top_p=0.5)
    assert top in nucleus
    assert len(nucleus) < len(plain)
    # Renormalised over a nucleus of mass in [0.5, 1): every log-prob is shifted by the same -log(mass) in (0, log 2].
    shifts = np.array([nucleus[t] - plain[t] for t in nucleus.keys() & plain.keys()])
    np.testing.assert_allclose(shifts, shifts[0], atol=1e-4)
    assert 0 < shifts[0] <= np.log(2) + 1e-4


def test_stop_tokens_end_a_response_and_are_part_of_it(served):
    (greedy,) = served.one[0]
    stop = greedy.tokens[4]
    at = greedy.tokens.index(stop)
    sampling = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    ((short,),) = served.engine.generate(PROMPTS[:1], num_samples=1, sampling=sampling, key=0)
    assert short.tokens == greedy.tokens[: at + 1]
    assert (short.finish_reason, greedy.finish_reason) == ("stop", "length")
    assert len(short.logprobs) == at + 1


def test_equal_keys_give_equal_draws_and_others_differ(served):
    one = served.engine.generate(PROMPTS, num_samples=4, sampling=SAMPLED, key=1)
    assert same(one, served.engine.generate(PROMPTS, num_samples=4, sampling=SAMPLED, key=1))
    assert not same(one, served.engine.generate(PROMPTS, num_samples=4, sampling=SAMPLED, key=2))
    assert len({c.tokens for c in one[0]}) == 4


def _rss_mb(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


def test_publishing_again_and_again_takes_no_more_memory(served):
    engine, version = served.engine, 100
    sizes = []
    for i in range(30):
        engine.publish(weights(served.scheme, i % 2), version + i)
        engine.generate(PROMPTS[:2], num_samples=1, sampling=dataclasses.replace(GREEDY, max_response_len=4), key=0)
        sizes.append(_rss_mb(engine.facts.pid))
    assert sizes[-1] - sizes[9] < 20  # the version is 1 MB: a copy leaked per publish would show as 20 MB
    served.still_serves_version_one()


@pytest.mark.nightly  # one engine more; with a toy engine in tests/bridge/test_process.py
def test_a_bridge_killed_in_the_middle_of_a_publish_is_replaced(served, monkeypatch):
    engine = served.engine
    killed = killed_in_a_publish(monkeypatch)
    engine.publish(weights(served.scheme, 0), 1000)
    assert engine.restarts == 1
    assert engine.facts.pid != killed[0]
    again = engine.generate(PROMPTS, num_samples=1, sampling=GREEDY, key=0)
    assert same(again, served.zero)
    assert {c.policy_version for (c,) in again} == {1000}


def test_a_response_is_gone_on_with_from_its_tokens(served):
    """Greedy, against the rest of the uninterrupted response: a prefill and a decode may round to other neighbours."""
    served.engine.publish(weights(served.scheme, 1), 1001)
    cut = 9
    asked = [
        Request(prompt=prompt, number=0, key=0, tokens=whole.tokens[:cut], max_tokens=5 + i)
        for i, (prompt, (whole,)) in enumerate(zip(PROMPTS, served.one, strict=True))
    ]
    added = served.engine.extend(asked, sampling=GREEDY)
    equal = []
    for request, piece, (whole,) in zip(asked, added, served.one, strict=True):
        count = min(request.max_tokens, GREEDY.max_response_len)
        assert len(piece.tokens) == len(piece.logprobs) == count
        assert (piece.prompt_tokens, piece.finish_reason) == (request.prompt.tokens, "length")
        assert [(span.version, span.start, span.end) for span in piece.versions] == [(1001, 0, count)]
        rest = whole.tokens[cut : cut + count]
        equal += [a == b for a, b in zip(piece.tokens, rest, strict=False)]
        assert piece.tokens[0] == rest[0]
        assert abs(piece.logprobs[0] - whole.logprobs[cut]) < 0.1
    assert np.mean(equal) > 0.8
