# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Histograms of log-ratios by the sign of the advantage, and quantiles read from them."""

import dataclasses
import math

import numpy as np
import pytest

from qarl_jax.loss.common.diagnostics import EDGES, histograms, quantiles
from tests.reference.loss_batches import inputs, make_batch, rows


def test_histograms_count_every_signed_token_and_response_where_numpy_does():
    batch = make_batch()
    got = histograms(inputs(batch))
    with np.errstate(invalid="ignore"):
        tokens = {
            "ratio": np.float32(batch.lp) - np.float32(batch.lo),
            "weight": np.float32(batch.lo) - np.float32(batch.ls),
        }
    for sign, suffix in ((1, "pos"), (-1, "neg")):
        chosen = batch.mask & (sign * np.nan_to_num(batch.adv) > 0)
        for key, log in tokens.items():
            expected = np.bincount(np.searchsorted(np.float32(EDGES), log[chosen]), minlength=len(EDGES) + 1)
            np.testing.assert_array_equal(got[f"{key}_{suffix}"], expected)
        responses = sum(sign * batch.adv[b, ts[0]] > 0 for b, ts in batch.responses())
        assert int(got[f"seq_ratio_{suffix}"].sum()) == int(got[f"seq_weight_{suffix}"].sum()) == responses


def test_histograms_of_micro_batches_add():
    x = inputs(make_batch())
    whole, parts = histograms(x), [histograms(rows(x, np.array(i))) for i in ([0, 5], [1, 2], [3, 4], [6, 7])]
    for key, counts in whole.items():
        np.testing.assert_array_equal(sum(np.asarray(p[key]) for p in parts), counts)


def test_quantiles_fall_into_the_bin_of_the_true_quantile():
    rng = np.random.default_rng(0)
    log = rng.normal(0, 0.1, size=(8, 12)).astype(np.float32)
    batch = make_batch()
    batch = dataclasses.replace(
        batch,
        lp=log - 1.0,
        lo=np.full_like(log, -1.0),
        adv=np.ones_like(log),
        mask=np.ones_like(log, bool),
        seg=np.ones(log.shape, int),
    )
    levels = (0.05, 0.5, 0.95)
    got = quantiles(histograms(inputs(batch))["ratio_pos"], levels)
    for level, value in zip(levels, got, strict=True):
        true = np.quantile(log, level, method="inverted_cdf")
        assert abs(np.searchsorted(EDGES, value) - np.searchsorted(EDGES, true)) <= 1
    assert all(math.isnan(v) for v in quantiles(np.zeros(len(EDGES) + 1), levels))


@pytest.mark.parametrize(("bin_index", "edge"), [(0, EDGES[0]), (len(EDGES), EDGES[-1])])
def test_quantiles_of_the_open_bins_are_their_edges(bin_index, edge):
    counts = np.zeros(len(EDGES) + 1)
    counts[bin_index] = 5
    assert quantiles(counts, (0.5,)) == [edge]
