# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One verdict on learner and sampler: are they aligned, why not, what to do, and what is such a pair known for?"""

import pytest
from qarl_bridge.protocol import messages

from qarl_jax.run import config
from qarl_jax.verify import alignment

GIVEN = ["model.path=/m", "data.source={name: jsonl, path: /d.jsonl}"]


def run(*overrides):
    return config.load(None, [*GIVEN, "rollout.engine.name=vllm", "quant.engine=cuda", *overrides])


def facts(execution="graphs", **fields):
    given = {"model": bytes(16), "scheme": bytes(16), "vocab_size": 9, "max_model_len": 9, "threads": 0, "pid": 1}
    words = {"engine": "vllm", "engine_version": "1", "profile": "cuda", "isa": "sm90", "kernels": {}}
    return messages.Facts(**words, **given, execution=execution, **fields)


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "fp8", "w4a16:g64"])
@pytest.mark.parametrize("execution", ["eager", "graphs"])
def test_a_batch_invariant_engine_and_a_learner_that_mirrors_it_are_aligned(scheme, execution):
    for given in (None, facts(execution)):
        verdict = alignment.of_run(run(f"quant.forward={scheme}"), given)
        assert (verdict.kind, verdict.reason, verdict.known_k3) == ("aligned", "", 0.0)
        assert str(verdict) == "every log-prob is to be equal in learner and sampler, to the bit"
        assert verdict.remedy.endswith(f"python -m qarl_jax.parity --model /m --scheme {scheme} --engine cuda")


@pytest.mark.parametrize(
    ("overrides", "kind", "reason", "remedy"),
    [
        (["rollout.engine.arithmetic=vllm"], "apart", "vLLM's own kernels", "arithmetic=batch_invariant"),
        (["rollout.engine.engine=fake"], "apart", "computes nothing", "set rollout.engine.engine=vllm"),
        (["quant.engine=plain"], "apart", "does not round where vLLM does", "set quant.engine=auto"),
        (["model.dtype=float32"], "apart", "in float32, vLLM in bfloat16", "set model.dtype=bfloat16"),
        (["quant.forward=fp8", "quant.kernels=xla"], "apart", "quant.kernels=xla", "set quant.kernels=auto"),
        (["model.attention=xla"], "apart", "model.attention=xla", "set model.attention=auto"),
        (
            ["quant.forward=bf16", "quant.rollout=w8a8"],
            "baseline",
            "computes in bf16, the sampler",
            "quant.forward=w8a8",
        ),
    ],
)
def test_what_differs_is_named_with_the_setting_that_ends_it(overrides, kind, reason, remedy):
    verdict = alignment.of_run(run("quant.forward=w8a8", *overrides), None)
    assert (verdict.kind, verdict.is_aligned) == (kind, False)
    assert reason in verdict.reason
    assert remedy in verdict.remedy
    assert str(verdict) == f"log-probs may differ between learner and sampler: {verdict.reason}"


def test_a_noisy_sampler_is_not_the_learner_while_its_noise_lasts():
    noisy = run("quant.forward=w8a8", "rollout.norm_noise.stages=4", "train.steps=8")
    verdict = alignment.of_run(noisy, facts())
    assert (verdict.kind, verdict.is_aligned, verdict.known_k3) == ("baseline", False, None)
    assert "noise (rollout.norm_noise), for which loss.mismatch=geometric corrects" in verdict.reason
    assert [alignment.of_run(noisy, facts(), version).is_aligned for version in range(9)] == [True] * 2 + [
        False
    ] * 6 + [True]


def test_exact_sums_may_be_made_by_any_library_and_a_cpu_shows_no_order_at_all():
    assert alignment.of_run(run("quant.forward=w8a8", "quant.kernels=xla")).is_aligned
    assert alignment.of_run(run("quant.forward=fp8", "quant.engine=cpu", "quant.kernels=xla")).is_aligned


def test_a_live_engine_that_is_not_batch_invariant_says_so_itself():
    departures = ["linear layers are vLLM's own: need a Hopper GPU", "attention may split long sequences"]
    verdict = alignment.of_run(run("quant.forward=w8a8"), facts(departures=departures))
    assert (verdict.kind, verdict.reason) == ("apart", "; ".join(departures))
    assert alignment.of_run(run("quant.forward=w8a8"), facts("none")).reason == "this engine computes nothing"


def test_the_embedded_sampler_is_close_or_exact_in_float64_and_pairs_are_known_for_their_largest_k3():
    embedded = config.load(None, [*GIVEN, "quant.forward=w8a8"])
    verdict = alignment.of_run(embedded)
    assert (verdict.kind, verdict.known_k3) == ("close", alignment.CLOSE)
    assert "closeness" in verdict.reason
    exact = alignment.of_run(config.load(None, [*GIVEN, "quant.forward=w8a8", "quant.engine=cpu"]))
    assert (exact.kind, exact.known_k3) == ("aligned", 0.0)
    assert "samples.jsonl" in exact.remedy
    for apart in ("quant.rollout=fp8", "model.dtype=float32"):
        assert not alignment.of_run(
            config.load(None, [*GIVEN, "quant.forward=w8a8", "quant.engine=cpu", apart])
        ).is_aligned
    for sampler, known in {"w8a8": 6e-2, "fp8": 3e-1, "w4a16:g64": 1.2, "w2a16": None}.items():
        assert alignment.of_run(run("quant.forward=bf16", f"quant.rollout={sampler}")).known_k3 == known
