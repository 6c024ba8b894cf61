# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The card's plan: a run that does not fit is refused before anything is loaded, with settings that fit."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from qarl_jax import train
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.run import card, config, memory_plan
from qarl_jax.types import UserError
from tests.reference.qwen3 import qwen3

GIB = 2**30
H200, H100 = int(140.4 * GIB), int(79.6 * GIB)
QWEN3_4B = qwen3(
    vocab=151936, hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8, head_dim=128, attention_bias=False
) | {"tie_word_embeddings": True}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("4b")
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    return [
        f"model.path={folder}", "model.remat=mixer", "quant.forward=w8a8", "data.max_prompt_len=64",
        "rollout.max_response_len=512", "rollout.engine.max_model_len=1024", "train.prompts_per_step=16",
        "train.prompts_per_update=16", "train.micro_batch_rows=2", "train.row_len=4608", "train.max_segments=16",
        "optimizer.offload=false", "rollout.engine.transport=auto", "rollout.engine.gpu_memory_utilization=0.3",
        "rollout.engine.kv_cache_gb=20",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """Nothing is set, and what a test or the plan sets is gone after it."""
    for name in (card.FRACTION, card.PREALLOCATE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run(overrides):
    def load(*more):
        return config.load("configs/one_h200_8b.yaml", [*overrides, *more])

    return load


def test_a_4b_run_with_muon_on_a_large_card_fits_and_keeps_its_settings(run):
    cfg = run()
    settled, made = card.settle(cfg, H200)
    assert settled == cfg
    assert made.missing == 0
    held = sum(made.learner.values()) + made.staging + made.reserved + card.JAX_CONTEXT
    assert held <= H200
    assert made.learner == memory_plan.parts(
        dataclasses.replace(cfg, quant=dataclasses.replace(cfg.quant, engine="cuda"))
    )
    assert made.fraction * H200 <= H200 - made.staging - made.reserved - card.JAX_CONTEXT


def test_on_a_smaller_card_it_is_refused_with_settings_that_fit(run):
    with pytest.raises(UserError, match=r"does not fit the card: it needs .* It fits with: ") as caught:
        card.settle(run(), H100)
    assert "\n" not in str(caught.value)
    advised = str(caught.value).split("It fits with: ")[1].split()
    taken = float(re.search(r"Smaller settings take (\d+\.\d) GiB of it\. It fits", str(caught.value))[1])
    assert taken == pytest.approx(card.settle(run(*advised), H100)[1].taken / GIB, abs=0.05)
    assert taken <= H100 / GIB
    assert advised, caught.value
    _, made = card.settle(run(*advised), H100)
    assert made.missing == 0
    for left_out in advised:  # nothing of it could be left out
        with pytest.raises(UserError):
            card.settle(run(*(word for word in advised if word != left_out)), H100)


def test_auto_takes_the_fastest_settings_that_fit(run):
    auto = ("optimizer.offload=auto", "rollout.engine.memory=auto", "model.remat=auto")
    large, _ = card.settle(run(*auto), H200)
    small, made = card.settle(run(*auto, "rollout.engine.transport=host"), int(70 * GIB))
    assert (large.model.remat, large.optimizer.offload) == ("dots", False)
    assert (small.optimizer.offload, made.missing) == (True, 0)
    engine = large.rollout.engine
    assert engine.kv_cache_gb * GIB >= card.kv_bytes(large, 128) > card.kv_bytes(large, 64)
    parts = card.make(large, H200).engine
    asked = sum(parts.values()) - parts["context (estimate)"]  # vLLM's context is there before it asks what is free
    assert asked <= engine.gpu_memory_utilization * H200 < asked + 0.002 * H200


def test_a_step_of_more_sequences_gets_a_larger_cache_up_to_what_is_left(run):
    auto = ("rollout.engine.memory=auto", "rollout.engine.transport=host", "optimizer.offload=true")
    caches = [
        card.settle(run(*auto, f"rollout.engine.max_num_seqs={n}"), H200)[0].rollout.engine.kv_cache_gb
        for n in (16, 32, 256)
    ]
    assert caches == sorted(set(caches))
    tight = card.settle(run(*auto, "rollout.engine.max_num_seqs=256"), int(72 * GIB))[0].rollout.engine
    assert 0 < tight.kv_cache_gb < caches[-1]


def test_graphs_come_on_top_of_a_cache_that_fills_the_engines_share(run):
    filling = card.make(run("rollout.engine.kv_cache_gb=0", "rollout.engine.gpu_memory_utilization=0.15"), H200)
    graphs = filling.engine["CUDA graphs (estimate)"]
    assert graphs > 0
    assert filling.reserved == int(0.15 * H200) + graphs
    # One H200, 4B fp8, two versions staged: the second found 3.1 GiB where it needed 4.1, before graphs were counted.
    sized = card.make(run("rollout.engine.kv_cache_gb=1", "rollout.engine.gpu_memory_utilization=0.15"), H200)
    assert filling.available == sized.available - graphs


def test_moments_leave_the_card_before_sequences_wait_for_a_place_in_the_cache(run):
    autos = "rollout.engine.memory=auto", "optimizer.offload=auto", "model.remat=auto", "train.micro_batch_rows=1"
    settled, made = card.settle(run("quant.forward=w4a16", *autos), H100)
    assert settled.optimizer.offload is True
    assert settled.rollout.engine.kv_cache_gb * GIB >= card.kv_bytes(settled, card.at_once(settled))
    assert made.missing == 0


def test_an_engine_on_a_card_of_its_own_is_planned_there(run):
    apart = ("rollout.engine.visible_gpus=1", "rollout.engine.gpu_memory_utilization=0.9")
    _, made = card.settle(run(*apart), H200)
    assert made.engine == {}
    assert made.reserved == 0
    assert made.apart[1]["KV cache"] == 20 * GIB
    with pytest.raises(UserError, match=r"on a card of its own, of which it may use 14\.0"):
        card.settle(run("rollout.engine.visible_gpus=1", "rollout.engine.gpu_memory_utilization=0.1"), H200)


def test_a_learner_on_two_cards_with_an_engine_on_each_has_half_of_its_weights_on_either(run):
    alone = card.make(run(), H200)
    both = card.make(
        run("mesh.fsdp=2", "rollout.engine.replicas=2", "rollout.engine.visible_gpus=0;1",
            "rollout.engine.shares_gpus=true", "rollout.engine.staging_buffers=1"),
        H200,
    )  # fmt: skip
    for part in ("masters", "gradients", "QTensors"):
        assert both.learner[part] == pytest.approx(alone.learner[part] / 2, rel=0.001)
    assert (both.cards, both.engines) == (2, 2)
    assert both.engine == alone.engine
    assert 2 * both.staging == alone.staging
    assert both.context == int(card.JAX_CONTEXT + card.COLLECTIVES)
    assert "2 such cards, an engine on each" in both.lines()[0]


def test_a_version_in_parts_takes_a_window_of_the_card(run):
    in_parts = "rollout.engine.staging_buffers=0"
    whole, parts = card.make(run("rollout.engine.staging_buffers=1"), H200), card.make(run(in_parts), H200)
    assert 0 < parts.staging <= max(gpu_staging.WINDOW_BYTES, whole.staging / 10)
    assert parts.learner == whole.learner
    assert parts.available - whole.available == whole.staging - parts.staging
    assert card.make(run(in_parts, "rollout.engine.transport=host"), H200).staging == 0
    # It is advised where it is enough, before the host's memory is.
    small = (
        "model.remat=full", "train.micro_batch_rows=1", "train.grad_dtype=bfloat16", "optimizer.offload=true",
        "rollout.engine.memory=auto",
    )  # fmt: skip
    least = next(size for size in range(40 * GIB, H200, GIB // 2) if card.fits(run(*small, in_parts), size))
    assert card.savings(run(*small), least) == [in_parts]
    assert card.savings(run(*small), least - GIB) == ["rollout.engine.transport=host"]


def test_what_a_run_lacks_is_what_it_lacks_as_it_is_and_not_what_its_largest_choice_does(run):
    autos = ("model.remat=auto", "optimizer.offload=auto", "rollout.engine.memory=auto")
    small = int(20 * GIB)
    least = min(card.make(choice, small).missing for choice in card._choices(run(*autos), small))
    with pytest.raises(UserError, match=rf"it needs {least / GIB:.1f} GiB more than the 20\.0 there are"):
        card.settle(run(*autos), small)


def test_what_makes_it_worse_is_not_advised(run):
    # Half of the rows would be two micro-batches, whose gradients are added up beside the new ones.
    words = ("train.packing=unpacked", "train.row_len=576", "train.micro_batch_rows=128", "model.remat=full")
    advised = card.savings(run(*words), int(75 * GIB))
    assert advised is not None
    assert card.fits(run(*words, *advised), int(75 * GIB))
    for word in advised:
        rest = [other for other in advised if other != word]
        assert not card.fits(run(*words, *rest), int(75 * GIB))


def test_without_a_gpu_nothing_is_planned_and_auto_does_not_offload(run, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert card.card_bytes() is None
    cfg, made = card.settle(run("optimizer.offload=auto"), None)
    assert (cfg.optimizer.offload, made) == (False, None)


def test_the_plan_sets_jaxs_allocator_unless_the_user_has(run, monkeypatch):
    _, made = card.settle(run(), H200)
    made.keep()
    assert float(os.environ[card.FRACTION]) == pytest.approx(made.fraction)
    assert os.environ[card.PREALLOCATE] == "true"
    monkeypatch.setenv(card.PREALLOCATE, "false")
    monkeypatch.delenv(card.FRACTION)
    made.keep()
    assert card.FRACTION not in os.environ


def test_a_learner_fits_what_the_user_lets_jax_take_or_is_refused(run, monkeypatch):
    needed = card.settle(run(), H200)[1].needed / H200
    monkeypatch.setenv(card.FRACTION, f"{needed + 0.002:.3f}")
    assert f"JAX takes {needed + 0.002:.1%}" in card.settle(run(), H200)[1].lines()[0]
    monkeypatch.setenv(card.FRACTION, f"{needed - 0.002:.3f}")
    with pytest.raises(
        UserError, match=rf"more than the \d+\.\d that {card.FRACTION}=0\.\d+ lets JAX take .*It fits with"
    ):
        card.settle(run(), H200)


def test_a_dry_run_says_for_any_card_whether_the_run_fits(overrides, capsys):
    command = ["--config", "configs/one_h200_8b.yaml", "--dry-run", *overrides]
    assert train.main([*command, "--card-gb", "140.4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"card +140.4 GiB: fits; JAX takes \d+\.\d% of it at once", out)
    assert "engine: KV cache                    20.00 GiB" in out
    assert card.FRACTION not in out  # nothing else says what JAX takes
    assert train.main([*command, "--card-gb", "79.6"]) == 2
    assert "It fits with: " in capsys.readouterr().err


@pytest.mark.slow
def test_planning_asks_jax_for_no_device(overrides):
    # Asked once, JAX's allocator is what it is: the plan must come first.
    code = f"""
from jax._src import xla_bridge
from qarl_jax.run import card
from qarl_jax.run import config
cfg = config.load("configs/one_h200_8b.yaml", {overrides!r})
card.settle(cfg, {H200})
raise SystemExit(xla_bridge.backends_are_initialized())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_int4_layers_are_counted_as_multiplied(run):
    w4a16 = ("quant.forward=w4a16", "rollout.engine.memory=auto")

    def held(*overrides):
        return card.make(run(*overrides), H200).engine["int4 layers as multiplied"]

    # q, k, v, o; gate, up, down: half a byte and a bfloat16 scale of 128; gate and up of one layer once more.
    numbers = 36 * 2560 * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 9728)
    assert held(*w4a16) == numbers // 2 + numbers // 128 * 2 + 2 * (2 * 9728) * 2560
    assert held(*w4a16, "rollout.engine.int4_kernel=machete") == 0
    assert held("quant.forward=w4a8", "rollout.engine.memory=auto") == numbers  # a byte each
    assert held("rollout.engine.memory=auto") == 0  # w8a8


def test_the_default_engine_is_not_chosen_for():
    assert vllm.Config().memory == "given"
