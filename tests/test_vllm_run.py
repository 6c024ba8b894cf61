# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run through the real vLLM: published in place after every step, nightly killed once, exported at the end.

What vLLM serves after the last publish must be what a fresh vLLM serves from the exported folder, to the bit.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models, train
from qarl_jax.data import packing
from qarl_jax.loop.session import Session
from qarl_jax.rollout import SamplingConfig
from qarl_jax.run import build, config, export
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.types import Prompt
from tests.reference import tiny
from tests.reference.bridge_world import alive, connected
from tests.reference.rollouts import group_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = SamplingConfig(max_response_len=16, temperature=0.0)
PROMPTS = [Prompt(uid=str(i), tokens=(3 + i, 13, 5, 14), text="", answer="") for i in range(6)]
LIMITS = {"max_model_len": 64, "kv_cache_gb": 0.1, "threads": 1}


class Run:
    """A two-step run, and what its engine served just before it was closed."""

    def __init__(self, folder, scheme, kill_at_step=None, rules=()):
        self.world = tiny.World(folder, hidden=128).changed(
            model={"dtype": "bfloat16"},
            quant={"forward": scheme, "engine": "cpu", "rules": [*rules]},
            rollout={"engine": {"name": "vllm", "readback": "full"} | LIMITS},
            eval={"at_start": False, "at_end": False},
        )
        self.kill_at_step, self.killed, self.restarts = kill_at_step, None, None
        self.served, self.facts, self.pids = None, None, []

    def train(self, monkeypatch):
        make = build.make_engine

        def watched(*args):
            engine = make(*args)
            generate, draw, close = engine.generate, engine.draw, engine.close

            def drawing(*requests, **options):
                if engine.version == self.kill_at_step and self.killed is None:
                    self.killed = engine.facts.pid
                    threading.Timer(0.02, os.kill, (self.killed, signal.SIGKILL)).start()
                return draw(*requests, **options)

            def closing():
                if self.served is None and engine.version == 2:
                    self.served = [group[0] for group in generate(PROMPTS, num_samples=1, sampling=GREEDY, key=0)]
                    self.facts, self.restarts = engine.facts, engine.restarts
                self.pids.append(engine.facts.pid if engine.facts else None)
                close()

            engine.draw, engine.close = drawing, closing
            return engine

        monkeypatch.setattr(build, "make_engine", watched)
        assert train.main(self.world.command()) == 0
        monkeypatch.undo()


TABLES = "w8a8", "w4a16:g64"  # embedding and head in four bits
NIGHTLY = ("w4a16:g32", ""), ("w8a8", "")


@pytest.fixture(scope="module", params=[TABLES, *(pytest.param(p, marks=pytest.mark.nightly) for p in NIGHTLY)])
def run(request, tmp_path_factory):
    scheme, tables = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill = 1 if scheme != "w8a8" else None  # one start more; toys are killed in tests/bridge/test_process.py
        rules = [{"match": "embed|head", "scheme": tables}] if tables else []
        made = Run(tmp_path_factory.mktemp("run"), scheme, kill, rules)
        made.train(monkeypatch)
        yield made


def ask_fresh(folder, tmp_path):
    """(greedy completions, facts) of a vLLM that loads `folder` itself, and that ends when asked to."""
    socket, key, log = str(tmp_path / "s"), str(tmp_path / "key"), tmp_path / "log"
    limits = ["--options", messages.EngineOptions(**LIMITS).to_json()]
    command = [sys.executable, "-m", "qarl_bridge", "--socket", socket, "--model", str(folder), "--key-file", key]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *limits], stdout=output, stderr=output)
    try:
        try:
            client = connected(socket, key, process, patience_s=400)
        except BridgeError as error:
            pytest.fail(f"{error}\n{log.read_text()[-2000:]}")
        draws = [messages.Draw(prompt=list(prompt.tokens), seed=0) for prompt in PROMPTS]
        drawn = client.generate(draws, messages.Sampling(max_tokens=GREEDY.max_response_len, temperature=0.0))
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert not os.path.exists(socket)
        return drawn, client.facts
    finally:
        process.kill()
        process.wait()


def test_what_vllm_serves_after_the_run_is_what_a_fresh_vllm_serves_from_the_export(run, tmp_path):
    out = tmp_path / "out"
    command = ["--checkpoint", str(run.world.run_dir), "--format", "compressed-tensors", "--out", str(out)]
    assert export.main(command) == 0
    fresh, facts = ask_fresh(out, tmp_path)
    assert facts.kernels == run.facts.kernels
    assert (facts.model, facts.scheme) == (run.facts.model, run.facts.scheme)
    assert len(fresh) == len(run.served) == len(PROMPTS)
    for theirs, ours in zip(fresh, run.served, strict=True):
        assert ours.policy_version == 2
        assert theirs.tokens == np.asarray(ours.tokens, "<i4").tobytes()
        assert theirs.logprobs == np.asarray(ours.logprobs, "<f4").tobytes()
    assert len({completion.tokens for completion in run.served}) > 1


def test_every_row_and_every_input_of_a_table_in_four_bits_is_read_back(run):
    tables = {name: run.facts.kernels.get(name) for name in ("model.embed_tokens", "lm_head")}
    if run.world.config.quant.rules:
        assert set(tables.values()) == {"Float64Linear"}
    for line in map(json.loads, (run.world.run_dir / "metrics.jsonl").read_text().splitlines()):
        assert line["time/publish/weights_read_back"] == 2 * (4 + 4) + 3  # + 4 norms per layer; embedding, norm, head
        # Per layer qkv, o, gate_up, down (inputs 128, 128, 128, 256) and the head.
        assert line["time/publish/rows_read_back"] == 2 * (128 + 128 + 128 + 256) + 128


def test_every_step_samples_from_the_version_before_it_and_moves_the_codes(run):
    lines = run.world.records()
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["rollout/version"] for line in lines] == [0, 1]
    for line in lines:
        assert 0 < line["quant/code_flips"] < 1
        assert np.isfinite(line["loss/total"])


def test_the_learner_is_the_policy_that_vllm_samples(run):
    """What is left is bfloat16: 8 bits of mantissa in every activation, and another order of sums."""
    for line in run.world.records():
        assert line["mismatch/k3"] < 1e-4
        assert line["mismatch/mean_abs"] < 1e-2
        assert line["mismatch/max_abs"] < 0.1


def test_its_log_probs_are_taken_for_those_of_the_learners_pass_and_checked(run):
    for line in run.world.records():
        assert line["mismatch/checked"] < 1
        assert (line["mismatch/exact"], line["proximal/exact"], line["proximal/noise"]) == (1, 1, 0)


@pytest.mark.nightly
def test_with_the_learners_pass_five_steps_have_the_same_masters_to_the_bit(tmp_path):
    found = {}
    for setting in ("auto", "learner"):
        world = Run(tmp_path, "w8a8").world.changed(
            run_dir=str(tmp_path / setting), train={"steps": 5, "proximal": setting}
        )
        assert train.main(world.command()) == 0
        cfg = world.config
        _, masters = tiny.load_model(cfg, build.make_mesh(cfg))
        saved = Checkpoints(world.run_dir / "checkpoints").restore({"params": masters}).state["params"]
        records = [{key: line[key] for key in line if key != "mismatch/checked"} for line in world.records()]
        found[setting] = records, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)]
        assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(masters)] != found[setting][1]
    assert found["auto"] == found["learner"]


def test_a_full_precision_learner_would_not_be_that_policy(run):
    """The log-probs that vLLM served under the last version, against the learner's, and against a bf16 forward's."""
    cfg = run.world.config
    graphdef, params = tiny.load_model(cfg, build.make_mesh(cfg))
    params = Checkpoints(run.world.run_dir / "checkpoints").restore({"params": params}).state["params"]
    groups = [group_of([served], prompt=prompt) for prompt, served in zip(PROMPTS, run.served, strict=True)]
    rows = packing.pack(groups, np.zeros((len(groups), 1)), row_len=tiny.ROW_LEN, max_segments=1)

    def error(graphdef):
        learner = build.make_learner(cfg, graphdef, build.make_mesh(cfg))
        logprobs, _ = learner.score(params, learner.quantize(params), learner.put(rows.batch))
        return np.abs(np.asarray(logprobs) - rows.batch.rollout_logprobs)[rows.batch.loss_mask].mean()

    aligned, unaligned = error(graphdef), error(models.with_scheme(graphdef, "bf16"))
    print(
        f"{cfg.quant.forward}: mean |difference of log-probs| {aligned:.2e} aligned, {unaligned:.2e} with bf16 forward"
    )
    assert aligned < 1e-2
    assert unaligned > 2 * aligned


def test_a_bridge_killed_while_it_samples_is_replaced_and_the_run_goes_on(run):
    if run.kill_at_step is None:
        assert run.restarts == 0
        return
    assert run.restarts == 1
    assert run.killed not in run.pids
    log = (run.world.run_dir / "engine.log").read_text()
    assert log
    assert not alive(run.killed)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["w2a16_asym:g32", "w2a2:g32", "w4a4:g32"])
def test_a_run_at_few_bits_trains_the_policy_that_vllm_samples(tmp_path, monkeypatch, scheme):
    made = Run(tmp_path, scheme)
    made.train(monkeypatch)
    assert made.facts.kernels["model.layers.0.mlp.down_proj"] == "Float64AsymmetricLinear"
    for line in made.world.records():
        assert (line["mismatch/exact"], line["proximal/exact"], line["mismatch/k3"]) == (1, 1, 0)
        assert 0 < line["quant/code_flips"] < 1
        assert np.isfinite(line["loss/total"])


def test_no_bridge_outlives_the_run(run):
    assert run.pids
    for pid in run.pids:
        assert pid is not None
        assert not alive(pid)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_of_adapters_publishes_them_alone_and_no_token_differs(tmp_path, shards):
    """The base travels with the first version; norms learn, too."""
    world = Run(tmp_path, "w4a16:g32").world
    engine = world.tree["rollout"]["engine"] | {"tensor_parallel_size": shards}
    world = world.changed(
        rollout={"engine": engine},
        lora={"rank": 8, "alpha": 12, "train_norms": True},
        optimizer={"name": "adamw", "lr": 0.01},
        train={"steps": 3},
    )
    assert train.main(world.command()) == 0
    lines = world.records()
    assert [line["mismatch/max_abs"] for line in lines] == [0, 0, 0]
    raw = [json.loads(line) for line in (world.run_dir / "metrics.jsonl").read_text().splitlines()]
    layers, norms = 2 * 7, 2 * 2
    assert [line["time/publish/tensors"] for line in raw] == [2 * layers + norms] * 3
    assert [line["time/publish/weights_read_back"] for line in raw] == [2 * 4 + norms] * 3  # four fused layers of seven
    assert len({line["reward/mean"] for line in lines}) > 1


@pytest.mark.nightly
def test_a_noisy_sampler_travels_as_plain_norms_and_the_learner_sees_it(tmp_path):
    """Stage 0 is silent and aligned; later ones are not. Evaluation publishes the same version twice more."""
    world = Run(tmp_path, "w4a16:g32").world.changed(
        lora={"rank": 8, "alpha": 12},
        optimizer={"name": "adamw", "lr": 0.0},
        train={"steps": 3},
        eval={"at_start": True, "at_end": True, "every": 1},
    )
    world.tree["rollout"]["norm_noise"] = {"start": 0.3, "end": 0.1, "stages": 3}
    assert train.main(world.command()) == 0
    lines = world.records()
    assert [line["norm_noise/sigma"] for line in lines] == pytest.approx([0, 0.3, 0.1])
    assert [line["mismatch/max_abs"] > 1e-3 for line in lines] == [False, True, True]
    assert lines[0]["mismatch/max_abs"] == 0
    assert [line["rollout/version"] for line in lines] == [0, 1, 2]
    raw = [json.loads(line) for line in (world.run_dir / "metrics.jsonl").read_text().splitlines()]
    layers, norms = 2 * 7, 2 * 2
    assert [line["time/publish/tensors"] for line in raw] == [2 * layers + norms] * 3
    assert [line["time/publish/weights_read_back"] for line in raw] == [2 * 4 + norms] * 3
    scores = [{key: value for key, value in line.items() if key != "version"} for line in world.records("eval")]
    assert scores == [scores[0]] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["all", "the second shard", "the first shard"])
def test_an_engine_of_two_shards_that_is_killed_leaves_nothing_in_the_next_ones_way(who):
    """vLLM names what its shards meet in alike for every engine: of a killed one, it was in the way of the next. One
    shard that is gone takes the other with it."""
    pytest.importorskip("vllm")
    settings = ["quant.forward=w8a8", "train.prompts_per_step=8", "train.prompts_per_update=8"]
    settings += [f"rollout.engine.{name}" for name in ("tensor_parallel_size=2", "kv_cache_gb=0.1", "threads=1")]
    with Session(config.load("quickstart_vllm", settings)) as session:
        before = session.sample()
        first = session.engine.facts.pid
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"qarl-shards-{first}-")]
        pids = [first, *shards_of(first)]
        for pid in {"all": pids, "the first shard": pids[:1], "the second shard": pids[1:]}[who]:
            os.kill(pid, signal.SIGKILL)
        after = session.sample()
        assert session.engine.restarts == 1
        assert [group.texts for group in after] == [group.texts for group in before]
        assert not any(map(alive, pids))


def shards_of(pid):
    """The children that run an engine, without multiprocessing's own."""
    return [child for child in children(pid) if b"spawn_main" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes()]


def children(pid):
    text = "".join(path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(each) for each in text.split()]
