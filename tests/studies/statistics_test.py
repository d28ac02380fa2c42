"""Intervals, p-values and power agree with scipy, textbooks and simulated studies."""

import math

import numpy as np
import pytest
import scipy.stats

from moddepth_jax.studies.statistics import (
    Sample,
    all_within,
    detectable,
    holm,
    interval,
    seeds_needed,
    seeds_to_decide,
)

VALUES = np.array([0.1, 0.3, 0.2, 0.25, 0.05])


def test_interval_equals_that_of_scipy():
    """Welch's of two samples, Student's of one; infinite for a single value."""
    a, b = [2.1, 2.3, 2.2, 2.25], [2.5, 2.4, 2.9]
    welch = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert interval([a, b], (1.0, -1.0))[1:] == pytest.approx(tuple(welch))
    student = scipy.stats.ttest_1samp(a, 0).confidence_interval(0.95)
    assert interval([a])[1:] == pytest.approx(tuple(student))
    assert interval([[1.0], b], (1.0, -1.0)).high == math.inf
    assert interval([[1.0, math.inf]]).low == -math.inf
    assert interval([[1.0] * 3]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ('low', 'high', 'holds', 'nearest'),
    [
        (0.0, math.inf, True, 0.0),
        (-math.inf, 0.0, False, 0.0),
        (0.0, 0.5, True, 0.0),  # both ends must be excluded: the nearer one is last
        (0.1, 0.2 - 1e-9, True, 0.2 - 1e-9),
        (0.3, 0.4, False, 0.3),
    ],
)
def test_p_is_the_smallest_level_at_which_the_interval_decides(low, high, holds, nearest):
    found = Sample(VALUES, low, high).decide()
    assert found.holds is holds
    assert found.p == pytest.approx(scipy.stats.ttest_1samp(VALUES, nearest).pvalue)
    for level, decided in ((found.p * 0.99, False), (found.p * 1.01, True)):
        ends = scipy.stats.ttest_1samp(VALUES, 0).confidence_interval(1 - level)
        inside = low < ends.low and ends.high < high
        outside = ends.high < low or high < ends.low
        assert bool(inside if holds else outside) is decided


def test_samples_without_a_spread_have_p_of_one_or_zero():
    assert Sample(VALUES[:1], low=0.0).decide().p == 1.0
    assert Sample(np.zeros(4), low=0.0).decide() == (False, 1.0)
    assert Sample(np.ones(4), low=0.0).decide() == (True, 0.0)


def test_all_samples_must_hold_and_one_of_n_fails_at_level_over_n():
    good, better, bad = (Sample(VALUES + shift, low=0.0) for shift in (0.0, 0.3, -0.6))
    assert all_within([good, better]) == (True, good.decide().p)
    assert all_within([good, bad, better]) == (False, pytest.approx(3 * bad.decide().p))


def test_holm_equals_the_textbook_and_counts_untested_claims():
    adjusted, levels = holm([0.01, 0.04, 0.03, 0.005], 4)
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert levels == pytest.approx([0.05 / 3, 0.05, 0.05 / 2, 0.05 / 4])
    assert holm([0.01, 0.5], 10)[0] == pytest.approx([0.1, 1.0])
    assert holm([], 10) == ([], [])


def test_power_is_the_share_of_simulated_studies_that_decide():
    difference = detectable(0.03, seeds=8, level=0.001)
    draws = difference + 0.03 * np.random.default_rng(0).standard_normal((20000, 8))
    decided = scipy.stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.001
    assert decided.mean() == pytest.approx(0.8, abs=0.01)
    assert seeds_needed(difference * 1.001, 0.03, 0.001) == 8
    assert seeds_needed(difference * 0.99, 0.03, 0.001) == 9
    assert seeds_needed(1e-6, 0.03, 0.001) is None


def test_one_sample_outside_its_bounds_is_enough_to_refute():
    """Regression: the seeds for all samples were asked for, also for one close to its bound."""
    clear, close = Sample(VALUES, high=0.0), Sample(VALUES - VALUES.mean() + 1e-9, high=0.0)
    inside = Sample(-VALUES, high=0.0)
    alone = seeds_needed(clear.margin, clear.spread, 0.05 / 3)
    assert seeds_to_decide([clear, close, inside], 0.05) == alone
    assert seeds_to_decide([close, inside], 0.05) is None
    nearer = Sample(-VALUES + 0.1, high=0.0)
    assert nearer.margin < inside.margin
    needed = seeds_needed(nearer.margin, nearer.spread, 0.05)
    assert seeds_to_decide([inside, nearer], 0.05) == needed
