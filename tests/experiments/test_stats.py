# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Intervals over seeds and prompts, against textbook formulas; the archive holds what the results name."""

import pathlib
import re
import tarfile

import numpy as np
import pytest

from experiments.qwen25_coder import stats

ROOT = pathlib.Path(__file__).parents[2]


def test_one_seed_gives_the_textbook_interval_over_prompts():
    x = np.array([[0.0, 1.0, 1.0, 0.0, 1.0]])
    got = stats.estimate(x)
    # mean 3/5, sample variance 0.3, standard error sqrt(0.3 / 5), t(0.975, 4) = 2.776
    assert (got.mean, got.stderr, got.dof) == pytest.approx((0.6, 0.3**0.5 / 5**0.5, 4))
    assert got.half == pytest.approx(2.776 * got.stderr, rel=1e-3)


def test_seeds_and_prompts_both_count():
    x = np.array([[0.2, 0.4], [0.6, 0.8]])
    # seeds' means 0.3 and 0.7: variance 0.08 / 2; prompts' means 0.4 and 0.6: variance 0.02 / 2
    assert stats.estimate(x).stderr == pytest.approx((0.04 + 0.01) ** 0.5)
    # Welch and Satterthwaite with one degree of freedom each: 0.05^2 / (0.04^2 + 0.01^2)
    assert stats.estimate(x).dof == pytest.approx(0.0025 / 0.0017)


def test_intervals_over_seeds_alone_and_over_prompts_alone():
    x = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    over_seeds = stats.over_seeds(x)
    assert (over_seeds.mean, over_seeds.stderr, over_seeds.dof) == (0.625, pytest.approx(0.125), 1)
    assert stats.over_seeds(x[:1]) is None
    kept = stats.of_means(x.mean(1), np.array([0.3, 0.4]))
    assert kept.stderr == pytest.approx((0.125**2 + (0.09 + 0.16) / 4) ** 0.5)
    assert kept.dof == pytest.approx(kept.stderr**4 / 0.125**4)

    rng = np.random.default_rng(1)
    x = rng.binomial(1, 0.3, (1, 400)).astype(float)
    low, high = stats.bootstrap(lambda each: each.mean(0), x)
    assert (low, high) == pytest.approx(
        (x.mean() - stats.estimate(x).half, x.mean() + stats.estimate(x).half), abs=4e-3
    )
    # Both arguments are of the same draws: a difference of two that are equal has no spread.
    assert stats.bootstrap(lambda a, b: (a - b).mean(0), x, x) == (0, 0)


def test_a_known_share_of_the_gap_is_recovered():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.05, (3, 400))  # shared by the arms: pairing takes it out
    bf16, rollout, aligned = 0.9 + noise, 0.7 + noise, 0.85 + noise
    share = stats.recovered(bf16, rollout, aligned)
    assert share.mean == pytest.approx(0.75)
    assert share.half == pytest.approx(0.0, abs=1e-9)
    alone = stats.recovered(bf16, rollout + rng.normal(0, 0.05, (3, 400)), aligned)
    assert alone.mean == pytest.approx(0.75, abs=0.05)
    assert 0 < alone.half < 0.2


def test_within_two_standard_errors_there_is_no_gap():
    rng = np.random.default_rng(0)
    bf16, rollout = rng.normal(0.8, 0.3, (3, 100)), rng.normal(0.8, 0.3, (3, 100))
    assert stats.recovered(bf16, rollout, bf16) is None
    assert stats.recovered(rollout - 1, bf16, bf16) is None  # quantized rollout is clearly better: no gap either


def test_an_interval_needs_prompts():
    with pytest.raises(ValueError, match="at least 2"):
        stats.estimate(np.ones((3, 1)))


def test_the_archive_holds_every_run_that_the_results_name():
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("results.md", "appendix/results.md"))
    told = "\n".join(line for line in pages.splitlines() if not line.endswith("not run yet"))
    named = set(re.findall(r"`(\w[\w-]*/[1-4a-i]_\w+)(?:/seed\d)?`", told))
    with tarfile.open(ROOT / "experiments" / "alignment" / "results.tar.xz") as archive:
        kept = set(re.findall(r"/runs/([^/\n]+/[^/\n]+)/seed\d/test\.json", "\n".join(archive.getnames())))
    assert len(named) > 20
    assert not sorted(named - kept)
