# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Names, options, mistakes and the generated table."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss import LOSSES, MISMATCH, TERMS, get_loss, get_term, loss_from_config, normalized, tbpo
from qarl_jax.loss.__main__ import document
from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import denominator
from qarl_jax.loss.common.options import AGGREGATIONS
from qarl_jax.types import UserError
from tests.reference.loss_batches import inputs, make_batch, value_and_grad


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gropo", {}, "did you mean 'grpo'"),
        ("tbpo", {"clip_hihg": 1.0}, "did you mean 'clip_high'"),
        ("grpo", {"neg_clip_low": 1e-3}, "has no option 'neg_clip_low'.*Known: aggregation"),
        ("grpo", {"clip_high": "4e-4"}, "write 4.0e-4"),
        ("grpo", {"clip_high": -0.1}, "at least 0"),
        ("grpo", {"clip_low": float("nan")}, "finite number"),
        ("grpo", {"dual_clip": 1.0}, "greater than 1"),
        ("grpo", {"dual_clip": True}, "finite number"),
        ("grpo", {"positive_only": 1}, "true or false"),
        ("grpo", {"mismatch": "seq-tis"}, "did you mean 'seq_tis'"),
        ("grpo", {"mismatch_cap": 0}, "greater than 0"),
        ("grpo", {"mismatch_low": 0.5}, "mismatch = 'none' has no such bound; it belongs to mis"),
        ("grpo", {"mismatch": "mis", "mismatch_low": 2.0, "mismatch_high": 1.0}, "must be below"),
        ("grpo", {"mismatch": "mis", "mismatch_cap": 0.5}, "lower bound 2, which must be below its upper bound 0.5"),
        ("grpo", {"mismatch": "mis", "mismatch_low": 3.0}, "lower bound 3, which must be below its upper bound 2"),
        ("tbpo", {"mismatch_cap": 0.5}, "must be below"),
        ("grpo", {"mismatch": "icepop", "mismatch_low": 6.0}, "must be below its upper bound 5"),
        ("grpo", {"aggregation": "tokn-mean"}, "did you mean 'token-mean'"),
        ("gspo", {"aggregation": "seq-mean-token-sum"}, "Known: seq-mean-token-mean, token-mean"),
        ("cispo", {"ratio_min": 6.0}, "below ratio_max"),
    ],
    ids=lambda v: str(v),
)
def test_mistakes_name_what_is_wrong_and_what_is_known(name, options, message):
    with pytest.raises(UserError, match=message):
        get_loss(name, **options)


def test_terms_and_foreign_configs_are_refused_as_objectives():
    with pytest.raises(UserError, match="does not exist"):
        get_loss("kl")
    with pytest.raises(UserError, match="not the Config"):
        loss_from_config(get_term("kl").config)


def test_configs_are_hashable_plain_data_that_survive_a_round_trip():
    for config_type in LOSSES:
        config = config_type()
        assert hash(config) == hash(config_type(**dataclasses.asdict(config)))
        assert get_loss(config_type.name) == loss_from_config(config)
        assert all(isinstance(v, str | float | bool | None) for v in dataclasses.asdict(config).values())


def test_aggregation_may_be_spelled_short_or_with_underscores():
    assert get_loss("grpo", aggregation="seq").config.aggregation == "seq-mean-token-mean"
    assert get_loss("tbpo", aggregation="token").denominator == "tokens"
    assert get_loss("grpo", aggregation="seq_mean_token_sum").denominator == "sequences"


def test_run_config_fills_the_length_constant_but_does_not_override_it():
    assert loss_from_config(get_loss("drgrpo").config, max_response_len=64).config.max_response_len == 64
    assert (
        loss_from_config(get_loss("drgrpo", max_response_len=8).config, max_response_len=64).config.max_response_len
        == 8
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_normalized_divides_by_the_count_its_aggregation_names(mode):
    x = dataclasses.replace(inputs(make_batch()), num_tokens=jnp.float32(1000), num_sequences=jnp.float32(100))
    loss = get_loss("grpo", aggregation=mode)
    mean, _ = loss(x)
    count = {"tokens": 1000, "sequences": 100}[denominator(mode)]
    np.testing.assert_allclose(normalized(mean, x, loss), mean.total / count, rtol=1e-6)


def test_more_responses_than_max_segments_fail_loudly():
    x = inputs(make_batch(), max_segments=2)
    loss = get_loss("tbpo")
    with pytest.raises(UserError, match=r"segment_ids reaches 4.*max_segments is 2"):
        loss(x)
    value, grad = jax.jit(jax.value_and_grad(lambda p: loss(dataclasses.replace(x, logprobs=p))[0].total))(x.logprobs)
    assert np.isnan(value)
    assert np.isnan(grad).any()


def test_a_field_of_another_shape_is_refused():
    x = inputs(make_batch())
    with pytest.raises(UserError, match=r"advantages has shape \(8, 1\): expected logprobs' shape \(8, 12\)"):
        get_loss("grpo")(dataclasses.replace(x, advantages=x.advantages[:, :1]))


def test_bfloat16_inputs_are_computed_in_float32():
    x = inputs(make_batch())
    low = dataclasses.replace(x, **{f: getattr(x, f).astype(jnp.bfloat16) for f in ("logprobs", "old_logprobs")})
    mean, metrics = get_loss("tbpo")(low)
    assert mean.total.dtype == jnp.float32
    assert metrics["loss/ratio"].total.dtype == jnp.float32


def test_effective_sample_size_is_that_of_the_truncated_weights():
    metrics = value_and_grad(get_loss("grpo", mismatch="tis"), inputs(make_batch()))[3]
    batch = make_batch()
    with np.errstate(invalid="ignore"):
        w = np.minimum(np.exp(batch.lo - batch.ls), 2)[batch.mask]
    expected = 1 / np.mean((w / w.mean()) ** 2)
    mean, mean_of_squares = (float(metrics[name].value) for name in ("mismatch/w", "mismatch/w_squared"))
    assert mean**2 / mean_of_squares == pytest.approx(expected, rel=1e-5)
    assert 0 < expected < 1


def test_k3_of_small_differences_keeps_its_digits():
    d = np.linspace(-1e-4, 1e-4, 101, dtype=np.float32)
    wanted = np.expm1(d.astype(np.float64)) - d.astype(np.float64)
    np.testing.assert_allclose(diagnostics._k3(d), wanted, atol=1e-11)


def test_mismatch_metrics_follow_their_formulas():
    batch = make_batch()
    metrics = {k: float(m.value) for k, m in get_loss("grpo")(inputs(batch))[1].items()}
    d = np.where(batch.mask, batch.lo, 0) - np.where(batch.mask, batch.ls, 0)
    means = [d[b, ts].mean() for b, ts in batch.responses()]
    d = d[batch.mask]
    expected = {
        "mismatch/k1": (-d).mean(),
        "mismatch/k3": (np.exp(d) - 1 - d).mean(),
        "mismatch/max_abs": np.abs(d).max(),
        "mismatch/mean_abs": np.abs(d).mean(),
        "mismatch/prob_error": np.exp(np.abs(d)).mean(),
        "mismatch/seq_max_abs": np.abs(means).max(),
        "mismatch/seq_k1_high": -min(means),
        "mismatch/seq_k1_low": max(means),
    }
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5), key
    r = np.where(batch.mask, batch.lp, 0) - np.where(batch.mask, batch.lo, 0)
    noise = max(abs(r[b, ts].mean()) for b, ts in batch.responses())
    assert metrics["proximal/noise"] == pytest.approx(noise, abs=2e-7)
    assert metrics["proximal/max_abs"] == pytest.approx(np.abs(r).max(), rel=1e-5)


def test_every_option_is_documented_with_the_source_of_its_default():
    for config_type in [*LOSSES, *TERMS]:
        for field in dataclasses.fields(config_type):
            assert field.metadata["doc"], (config_type.name, field.name)
            if field.default is not None:
                assert field.metadata["source"], (config_type.name, field.name)
        assert config_type.formula
        assert config_type.source


def test_the_document_is_generated_from_the_code_and_up_to_date():
    """Regenerate with `python -m qarl_jax.loss > docs/algorithms.md`."""
    path = pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md"
    text = document()
    assert path.read_text() == text
    for name in [*(c.name for c in LOSSES), *MISMATCH]:
        assert f"`{name}`" in text


def test_table_2_of_the_paper_is_the_default():
    config = tbpo.Config()
    assert (config.clip_high, config.neg_clip_low, config.neg_clip_high, config.mismatch_cap) == (4e-4, 3e-4, 7e-4, 2.0)
