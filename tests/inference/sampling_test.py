"""Tokens are drawn as often as the softmax of their logits over the temperature says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.inference.sampling import sample

LOGITS_V = np.array([2.0, -1.0, 0.5, 1.5, -30.0], np.float32)
NUM_DRAWS = 20000


def frequencies(key, temperature):
    logits_BV = jnp.broadcast_to(LOGITS_V, (NUM_DRAWS, 5))
    drawn_B = sample(key, logits_BV, temperature)
    assert drawn_B.shape == (NUM_DRAWS,) and drawn_B.dtype == jnp.int32
    return np.bincount(drawn_B, minlength=5) / NUM_DRAWS


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_frequencies_are_the_tempered_softmax(temperature):
    """Over 20000 draws each token's share lies within 5 standard errors of its probability."""
    odds_V = np.exp(LOGITS_V.astype(np.float64) / temperature)
    chance_V = odds_V / odds_V.sum()
    error_V = np.sqrt(chance_V * (1 - chance_V) / NUM_DRAWS)
    share_V = frequencies(jax.random.key(0), temperature)
    assert np.all(np.abs(share_V - chance_V) <= 5 * error_V)
    assert share_V[4] == 0 and share_V[3] > 0.1


def test_rows_draw_independently():
    """Two rows of equal logits agree as often as two independent draws do, not always."""
    logits_BV = jnp.zeros((NUM_DRAWS, 4))
    drawn = np.asarray(sample(jax.random.key(1), logits_BV, 1.0)).reshape(-1, 2)
    share = (drawn[:, 0] == drawn[:, 1]).mean()
    assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / len(drawn))


def test_temperature_zero_is_the_most_likely_token():
    """At 0 every row gets its argmax whatever the key; of equals the first."""
    logits_BV = jnp.array([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0], [2.0, 2.0, 1.0]])
    for seed in range(3):
        token_B = sample(jax.random.key(seed), logits_BV, 0.0)
        assert token_B.dtype == jnp.int32 and token_B.tolist() == [1, 0, 0]


def test_the_key_decides():
    """Equal keys draw equal tokens, another key others."""
    logits_BV = jnp.zeros((50, 257))
    first, again, other = (sample(jax.random.key(seed), logits_BV, 1.0) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
