"""Tokens are drawn as often as softmax, temperature, top_k and nucleus say, in this order."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams.flag_values import check_sampling
from moddepth_jax.inference.sampling import nucleus, sample

LOGITS_V = np.array([2.0, -1.0, 0.5, 1.5, -30.0], np.float32)
NUM_DRAWS = 20000  # one shape in all tests: a compilation takes longer than the draws


def keys(seed):
    return jax.random.split(jax.random.key(seed), NUM_DRAWS)


def random_logits(seed=1):
    return np.random.default_rng(seed).normal(0, 2, (NUM_DRAWS, 5)).astype(np.float32)


def draw(seed, logits_BV, temperature, *cuts):
    drawn_B = sample(keys(seed), jnp.asarray(logits_BV), temperature, *cuts)
    assert drawn_B.shape == (NUM_DRAWS,) and drawn_B.dtype == jnp.int32
    return np.asarray(drawn_B)


def frequencies(logits_V, temperature, *cuts):
    drawn_B = draw(0, np.tile(logits_V, (NUM_DRAWS, 1)), temperature, *cuts)
    return np.bincount(drawn_B, minlength=len(logits_V)) / NUM_DRAWS


def chances(logits_V, temperature, top_p=1.0, top_k=0):
    """Return the probability of each token in float64, after temperature, top_k and top_p."""
    odds_V = np.exp((logits_V - logits_V.max()).astype(np.float64) / temperature)
    order = sorted(range(len(logits_V)), key=lambda token: (-odds_V[token], token))
    chance_V = odds_V / odds_V[order[: top_k or None]].sum()
    kept, total = [], 0.0
    for token in order[: top_k or None]:
        if total >= top_p:
            break
        kept.append(token)
        total += chance_V[token]
    nucleus_V = np.zeros_like(chance_V)
    nucleus_V[kept] = chance_V[kept] / total
    return nucleus_V


@pytest.mark.parametrize(
    'how',
    [
        *((0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.9), (2.0, 0.6), (1, 0.2)),
        *((1.0, 1.0, 2), (2.0, 0.6, 3), (1.0, 0.9, 2)),  # 0.9 of two tokens is both, of five three
    ],
)
def test_frequencies_are_those_of_temperature_then_top_k_then_nucleus(how):
    """Tokens that are cut have a probability of exactly 0."""
    chance_V = chances(LOGITS_V, *how)
    error_V = np.sqrt(chance_V * (1 - chance_V) / NUM_DRAWS)
    share_V = frequencies(LOGITS_V, *how)
    assert np.all(np.abs(share_V - chance_V) <= 5 * error_V)
    assert share_V[4] == 0 and share_V[0] > 0.3


def test_nucleus_is_the_smallest_set_that_reaches_top_p():
    """Compared with NumPy on random logits; logits that are kept do not change."""
    # Not a Python number here, so that one program serves all of them.
    cut = jax.jit(nucleus)
    for seed in range(5):
        logits_V = np.random.default_rng(seed).normal(0, 2, 257).astype(np.float32)
        for top_p in (0.05, 0.3, 0.5, 0.75, 0.97):
            kept_V = np.asarray(cut(logits_V, top_p))
            assert np.array_equal(np.isfinite(kept_V), chances(logits_V, 1.0, top_p) > 0)
            assert np.array_equal(kept_V[np.isfinite(kept_V)], logits_V[np.isfinite(kept_V)])


def test_of_equal_logits_the_lower_index_is_kept():
    """Four tokens of a quarter each: the set grows in the order of their indices."""
    logits_V = jnp.array([-jnp.inf, 1.0, 1.0, -jnp.inf, 1.0, 1.0])
    cut = jax.jit(nucleus)
    for top_p, kept in ((0.1, [1]), (0.3, [1, 2]), (0.7, [1, 2, 4])):
        assert np.flatnonzero(np.isfinite(cut(logits_V, top_p))).tolist() == kept


@pytest.mark.parametrize('top_p', [1.0, 0.9])
@pytest.mark.parametrize('temperature', [0.0, 1e-30, 1e6])
def test_a_token_of_probability_0_is_never_drawn(temperature, top_p):
    logits_V = np.array([-np.inf, 1.0, 5.0, -np.inf, 3.0], np.float32)
    share_V = frequencies(logits_V, temperature, top_p)
    assert set(np.flatnonzero(share_V)) <= {1, 2, 4} and share_V[2] > 0.3


def test_keys_decide_and_rows_draw_independently():
    """Two rows of equal logits agree as often as two independent draws."""
    first, again, other = (draw(seed, np.zeros((NUM_DRAWS, 5)), 1.0) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    for one, two in ((first, other), first.reshape(-1, 2).T):
        error = np.sqrt(0.2 * 0.8 / len(one))
        assert abs((one == two).mean() - 0.2) < 5 * error


def test_temperature_zero_or_top_k_one_is_the_most_likely_token():
    """For any key; of equal logits the first. Also for temperatures too small for float32."""
    logits_BV = random_logits()
    logits_BV[:, 3] = logits_BV[:, 1]
    for seed, *how in ((0, 0.0), (1, 1e-45), (2, 9.0, 1.0, 1)):
        assert np.array_equal(draw(seed, logits_BV, *how), logits_BV.argmax(-1))


def test_top_k_of_all_tokens_or_more_changes_no_draw():
    logits_BV = random_logits()
    expected = draw(3, logits_BV, 1.0, 0.9)
    assert all(np.array_equal(draw(3, logits_BV, 1.0, 0.9, k), expected) for k in (5, 99))


@pytest.mark.parametrize(
    ('name', 'values', 'words'),
    [
        ('temperature', (-0.5, math.nan, math.inf), ': must be 0'),
        ('top_p', (0.0, 1.01, math.nan), r': must lie in \(0, 1\]'),
        ('top_k', (-1,), ': must be 0, for every token, or more'),
    ],
)
def test_invalid_settings_are_refused(name, values, words):
    for value in values:
        with pytest.raises(ValueError, match=f'^{name}={value}{words}[^\n]*$'):
            check_sampling(**{'temperature': 1.0, name: value})
    check_sampling(0.0)
