"""Norms, their spread and their ranks are those of NumPy and SciPy."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moddepth_jax.analysis.wasted_compute import QUANTILES, delta_ratios, rank_correlation, spread


def test_ratios_are_those_of_norms():
    """A delta of 3, 4 on an input of 0, 10 is a half of it, in bfloat16 too; no delta is 0."""
    inputs_LBTD = np.array([[[[0, 10], [0, -10]]]], np.float32)
    deltas_LBTD = np.array([[[[3, 4], [0, 0]]]], np.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        ratios_LBT = delta_ratios(jnp.asarray(inputs_LBTD, dtype), deltas_LBTD)
        assert ratios_LBT.dtype == jnp.float32
        np.testing.assert_allclose(ratios_LBT, [[[0.5, 0]]], rtol=1e-6)


def test_spread_is_mean_and_quantiles():
    """Of 0 to 100 each quantile is its own percentage; of nothing there is none."""
    found = spread(np.arange(101.0))
    assert found['mean'] == 50
    for quantile in QUANTILES:
        assert found['quantiles'][str(quantile)] == pytest.approx(100 * quantile)
    assert spread(np.array([])) is None


def test_rank_correlation_is_scipys_on_ties():
    """With ties on both sides; of ranks alone, so that a monotone curve has 1 and its mirror -1."""
    a_N, b_N = np.random.default_rng(0).integers(0, 4, (2, 50))
    expected = np.corrcoef(scipy.stats.rankdata(a_N), scipy.stats.rankdata(b_N))[0, 1]
    assert rank_correlation(a_N, b_N) == pytest.approx(expected)
    gaps_N = np.array([1.0, 2.0, 30.0, np.nan, 4.0])  # what is not finite does not count
    assert rank_correlation(gaps_N, gaps_N**3) == pytest.approx(1)
    curve_N = np.exp(np.arange(9.0))
    assert rank_correlation(np.arange(9), curve_N) == pytest.approx(1)
    assert rank_correlation(np.arange(9), -curve_N) == pytest.approx(-1)


def test_what_does_not_vary_has_no_rank():
    """A constant side, or no token at all, is None, not NaN: JSON has no NaN."""
    for sides in (([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [1, 1, 1]), ([], []), ([1, 2], [1, 2])):
        assert rank_correlation(*map(np.array, sides)) is None
