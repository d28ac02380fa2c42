"""Tokens are drawn as often as the softmax of their logits, temperature and nucleus say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.inference.sampling import check_sampling, nucleus, sample

LOGITS_V = np.array([2.0, -1.0, 0.5, 1.5, -30.0], np.float32)
NUM_DRAWS = 20000


def keys(seed, num_rows):
    return jax.random.split(jax.random.key(seed), num_rows)


def frequencies(logits_V, temperature, top_p=1.0):
    logits_BV = jnp.broadcast_to(logits_V, (NUM_DRAWS, len(logits_V)))
    drawn_B = sample(keys(0, NUM_DRAWS), logits_BV, temperature, top_p)
    assert drawn_B.shape == (NUM_DRAWS,) and drawn_B.dtype == jnp.int32
    return np.bincount(drawn_B, minlength=len(logits_V)) / NUM_DRAWS


def chances(logits_V, temperature, top_p=1.0):
    """Of each token, in float64: sorted by chance, then index, and cut once the sum is top_p."""
    odds_V = np.exp((logits_V - logits_V.max()).astype(np.float64) / temperature)
    chance_V = odds_V / odds_V.sum()
    kept, total = [], 0.0
    for token in sorted(range(len(logits_V)), key=lambda token: (-chance_V[token], token)):
        if total >= top_p:
            break
        kept.append(token)
        total += chance_V[token]
    nucleus_V = np.zeros_like(chance_V)
    nucleus_V[kept] = chance_V[kept] / total
    return nucleus_V


@pytest.mark.parametrize(
    ('temperature', 'top_p'), [(0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.9), (2.0, 0.6), (1, 0.2)]
)
def test_frequencies_are_those_of_the_tempered_nucleus(temperature, top_p):
    """Over 20000 draws each token's share lies within 5 standard errors of its probability."""
    chance_V = chances(LOGITS_V, temperature, top_p)
    error_V = np.sqrt(chance_V * (1 - chance_V) / NUM_DRAWS)
    share_V = frequencies(LOGITS_V, temperature, top_p)
    assert np.all(np.abs(share_V - chance_V) <= 5 * error_V)
    assert share_V[4] == 0 and share_V[0] > 0.3


def test_the_nucleus_is_cut_after_temperature():
    """A top_p that keeps one token of a cold distribution keeps several of a hot one."""
    kept = [np.count_nonzero(frequencies(LOGITS_V, t, 0.8)) for t in (0.25, 1.0, 4.0)]
    assert kept == [np.count_nonzero(chances(LOGITS_V, t, 0.8)) for t in (0.25, 1.0, 4.0)]
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize('top_p', [0.05, 0.3, 0.5, 0.75, 0.97])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p):
    """Against NumPy on random logits; the logits that stay are as they were."""
    for seed in range(5):
        logits_V = np.random.default_rng(seed).normal(0, 2, 257).astype(np.float32)
        kept_V = np.asarray(jax.jit(nucleus, static_argnums=1)(logits_V, top_p))
        assert np.array_equal(np.isfinite(kept_V), chances(logits_V, 1.0, top_p) > 0)
        assert np.array_equal(kept_V[np.isfinite(kept_V)], logits_V[np.isfinite(kept_V)])


@pytest.mark.parametrize(('top_p', 'kept'), [(0.1, [1]), (0.3, [1, 2]), (0.7, [1, 2, 4])])
def test_of_equals_the_lower_index_stays(top_p, kept):
    """Four tokens of a quarter each: the set grows in the order of their indices."""
    logits_V = jnp.array([-jnp.inf, 1.0, 1.0, -jnp.inf, 1.0, 1.0])
    assert np.flatnonzero(np.isfinite(nucleus(logits_V, top_p))).tolist() == kept


def test_top_p_of_one_is_no_top_p():
    """The same keys draw the same tokens from a wide vocabulary, bit for bit."""
    logits_BV = jax.random.normal(jax.random.key(1), (500, 2048)) * 3
    plain_B = sample(keys(2, 500), logits_BV, 1.3)
    assert np.array_equal(sample(keys(2, 500), logits_BV, 1.3, 1.0), plain_B)


def test_a_tiny_top_p_is_the_most_likely_token():
    """Whatever the temperature, as long as the best one is alone in reaching it."""
    logits_BV = jax.random.normal(jax.random.key(1), (200, 257))
    for temperature in (0.1, 1.0, 100.0):
        token_B = sample(keys(3, 200), logits_BV, temperature, 1e-6)
        assert np.array_equal(token_B, jnp.argmax(logits_BV, axis=-1))


def test_a_smaller_top_p_changes_only_the_draws_it_forbids():
    """The keys decide, as without it, wherever the token drawn is still allowed."""
    logits_BV = jnp.broadcast_to(LOGITS_V, (2000, 5))
    free_B, cut_B = (np.asarray(sample(keys(4, 2000), logits_BV, 1.0, p)) for p in (1.0, 0.8))
    allowed = np.flatnonzero(chances(LOGITS_V, 1.0, 0.8))
    same_B = np.isin(free_B, allowed)
    assert 0.7 < same_B.mean() < 0.99 and np.array_equal(free_B[same_B], cut_B[same_B])


@pytest.mark.parametrize('top_p', [1.0, 0.9])
@pytest.mark.parametrize('temperature', [0.0, 1e-30, 1e6])
def test_a_token_of_no_probability_is_never_drawn(temperature, top_p):
    """Logits of -inf, which stand for ids of no meaning, stay out at any temperature."""
    logits_V = np.full(64, -np.inf, np.float32)
    logits_V[[7, 20, 33]] = 1.0, 5.0, 3.0
    share_V = frequencies(logits_V, temperature, top_p)
    assert set(np.flatnonzero(share_V)) <= {7, 20, 33} and share_V[20] > 0.3


def test_rows_draw_independently():
    """Two rows of equal logits agree as often as two independent draws do, not always."""
    drawn = np.asarray(sample(keys(1, NUM_DRAWS), jnp.zeros((NUM_DRAWS, 4)), 1.0)).reshape(-1, 2)
    share = (drawn[:, 0] == drawn[:, 1]).mean()
    assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / len(drawn))


@pytest.mark.parametrize('top_p', [1.0, 0.7])
def test_a_row_does_not_depend_on_its_batch_mates(top_p):
    """Alone, in another place and among others, a row of one key and one logits draws the same."""
    logits_BV, keys_B = jax.random.normal(jax.random.key(5), (40, 257)), keys(6, 40)
    draw = jax.jit(functools.partial(sample, temperature=1.0, top_p=top_p))
    together_B = np.asarray(draw(keys_B, logits_BV))
    assert np.array_equal(draw(keys_B[::-1], logits_BV[::-1])[::-1], together_B)
    for row in (0, 17, 39):
        assert draw(keys_B[row][None], logits_BV[row][None]) == together_B[row]


def test_temperature_zero_is_the_most_likely_token():
    """At 0 every row gets its argmax whatever the key; of equals the first."""
    logits_BV = jnp.array([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0], [2.0, 2.0, 1.0]])
    for seed in range(3):
        for temperature in (0.0, 1e-45):
            token_B = sample(keys(seed, 3), logits_BV, temperature)
            assert token_B.dtype == jnp.int32 and token_B.tolist() == [1, 0, 0]


def test_the_keys_decide():
    """Equal keys draw equal tokens, others others."""
    logits_BV = jnp.zeros((50, 257))
    first, again, other = (sample(keys(seed, 50), logits_BV, 1.0) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize(
    ('temperature', 'top_p', 'words'),
    [
        (-0.5, 1.0, 'temperature=-0.5: must be 0'),
        (float('nan'), 1.0, 'temperature=nan: must be 0'),
        (float('inf'), 1.0, 'temperature=inf: must be 0'),
        (1.0, 0.0, r'top_p=0.0: must lie in \(0, 1\]'),
        (1.0, 1.01, r'top_p=1.01: must lie in \(0, 1\]'),
        (1.0, float('nan'), r'top_p=nan: must lie in \(0, 1\]'),
    ],
)
def test_values_without_a_meaning_are_refused(temperature, top_p, words):
    """One line with the value; the ends of both ranges pass."""
    with pytest.raises(ValueError, match=words) as caught:
        check_sampling(temperature, top_p)
    assert '\n' not in str(caught.value)
    check_sampling(0.0, 1.0), check_sampling(5.0, 1e-9)
