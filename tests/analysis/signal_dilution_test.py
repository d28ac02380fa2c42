"""A linear probe finds exactly what is linear in the stream, and nothing in noise."""

import functools
import operator

import numpy as np
import pytest

from moddepth_jax.analysis.signal_dilution import moments, probe_r2

B, T, D, E = 8, 128, 6, 4
RNG = np.random.default_rng(0)
STREAM_BTD = (RNG.normal(size=(B, T, D)) * np.geomspace(0.1, 10, D) + 5).astype(np.float32)
WEIGHTS_DE = RNG.normal(size=(D, E)) / np.geomspace(0.1, 10, D)[:, None]
PLANTED_BTE = (STREAM_BTD @ WEIGHTS_DE + 3).astype(np.float32)
NOISE_BTE = RNG.normal(size=(B, T, E)).astype(np.float32)
ALL_BT = np.ones((B, T), bool)
MIXED_BTE = PLANTED_BTE / PLANTED_BTE.std(axis=(0, 1), keepdims=True) + NOISE_BTE
HALVES = slice(0, B // 2), slice(B // 2, B)


def _r2(y_BTE, counted_BT=ALL_BT):
    return probe_r2(*(moments(STREAM_BTD[at], y_BTE[at], counted_BT[at]) for at in HALVES))


def test_planted_signal_is_recovered_and_noise_is_not():
    """R^2 is 1 for linear functions of the stream, near 0 for noise, and 0.5 for equal parts."""
    assert _r2(PLANTED_BTE) == pytest.approx(1, abs=1e-3)
    assert _r2(NOISE_BTE) == pytest.approx(0, abs=0.05)
    assert _r2(MIXED_BTE) == pytest.approx(0.5, abs=0.05)


def test_tokens_outside_the_mask_do_not_count():
    counted_BT = RNG.random((B, T)) < 0.3
    broken_BTE = np.where(counted_BT[..., None], PLANTED_BTE, 1e4 * NOISE_BTE)
    assert _r2(broken_BTE, counted_BT) == pytest.approx(1, abs=1e-3)
    assert moments(STREAM_BTD, broken_BTE, counted_BT).count == counted_BT.sum()


def test_scales_and_unused_inputs_do_not_matter():
    """R^2 does not change with the units of an input, a constant input, or a duplicate input."""
    copies = [STREAM_BTD * np.geomspace(1e-3, 1e3, D).astype(np.float32)]
    copies.append(np.concatenate([STREAM_BTD, STREAM_BTD[..., :1], 0 * STREAM_BTD[..., :1]], -1))
    for stream_BTD in copies:
        parts = [moments(stream_BTD[at], MIXED_BTE[at], ALL_BT[at]) for at in HALVES]
        assert probe_r2(*parts) == pytest.approx(_r2(MIXED_BTE), abs=1e-3)


def test_a_shifted_mean_lowers_r2():
    fitted, scored = (moments(STREAM_BTD, NOISE_BTE + shift, ALL_BT) for shift in (0, 2))
    assert probe_r2(fitted, fitted) - probe_r2(fitted, scored) == pytest.approx(4, rel=0.05)


def test_moments_add_up():
    counted_BT = RNG.random((B, T)) < 0.5
    counted_BT[0] = False
    rows = [[side[i : i + 1] for side in (STREAM_BTD, PLANTED_BTE, counted_BT)] for i in range(B)]
    parts = functools.reduce(operator.add, (moments(*row) for row in rows))
    x_ND, y_NE = (side[counted_BT].astype(np.float64) for side in (STREAM_BTD, PLANTED_BTE))
    x_D, y_E = x_ND.mean(axis=0), y_NE.mean(axis=0)
    x_ND, y_NE = x_ND - x_D, y_NE - y_E
    expected = (len(x_ND), x_D, y_E, x_ND.T @ x_ND, x_ND.T @ y_NE, np.sum(y_NE**2))
    for found in (parts, moments(STREAM_BTD, PLANTED_BTE, counted_BT)):
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_r2_is_undefined_without_variance():
    some, none = moments(STREAM_BTD, PLANTED_BTE, ALL_BT), ~ALL_BT
    assert probe_r2(some, moments(STREAM_BTD, PLANTED_BTE, none)) is None
    assert probe_r2(moments(STREAM_BTD, PLANTED_BTE, none), some) is None
    assert probe_r2(some, moments(STREAM_BTD, np.ones_like(PLANTED_BTE), ALL_BT)) is None
