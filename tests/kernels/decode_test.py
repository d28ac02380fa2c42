"""Attention over a cache and the new token is attention over the joined keys, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import decode_attention

BATCH, SLOTS, HEADS, WIDTH = 5, 11, 6, 4


def draw(kv_heads, dtype='float32', seed=0):
    """(q, k, v of new tokens, k, v of the cache, visible) at random."""
    rng = np.random.default_rng(seed)
    new = [rng.normal(size=(BATCH, 1, heads, WIDTH)) for heads in (HEADS, kv_heads, kv_heads)]
    cached = [rng.normal(size=(BATCH, kv_heads, WIDTH, SLOTS)) for _ in range(2)]
    visible = rng.random((BATCH, SLOTS)) < 0.5
    visible[0], visible[1] = False, True
    return [jnp.asarray(side, dtype) for side in new + cached] + [visible]


def joined(q, k, v, k_cache, v_cache, visible):
    """One softmax, row by row and head by head, over visible slots and the own key."""
    sides = [np.asarray(side, np.float64) for side in (q, k, v, k_cache, v_cache)]
    q, k, v, k_cache, v_cache = sides
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        kv = head // group
        seen = visible[row]
        keys = np.concatenate([k_cache[row, kv][:, seen].T, k[row, :, kv]])
        values = np.concatenate([v_cache[row, kv][:, seen].T, v[row, :, kv]])
        scores = keys @ q[row, 0, head] / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        out[row, 0, head] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize('kv_heads', [6, 3, 2, 1])
def test_two_parts_are_one_softmax(kv_heads):
    """Grouped heads, an empty cache and a full one among the rows."""
    given = draw(kv_heads)
    np.testing.assert_allclose(decode_attention(*given), joined(*given), rtol=0, atol=1e-6)


def test_large_scores_do_not_overflow():
    """A cached or an own score of several hundred wins and nothing is NaN."""
    q, *rest = draw(3)
    given = [q * 300, *rest]
    np.testing.assert_allclose(decode_attention(*given), joined(*given), rtol=0, atol=1e-5)


def test_rows_of_the_cache_by_index():
    """Three tokens read rows 4, 0 and 2 of the cache; places after them name no row."""
    q, k, v, k_cache, v_cache, visible = draw(3)
    rows = np.array([4, 0, 2])
    expected = joined(q[:3], k[:3], v[:3], k_cache[rows], v_cache[rows], visible[:3])
    padded = jnp.array([4, 0, 2, BATCH, BATCH + 1])
    result = decode_attention(q, k, v, k_cache, v_cache, visible, padded)
    assert result.shape == q.shape
    np.testing.assert_allclose(result[:3], expected, rtol=0, atol=1e-6)


def test_rows_are_gathered_where_there_is_no_cpu(monkeypatch):
    """The form for accelerators, which gathers the rows of the cache, gives the same."""
    given = draw(3)
    rows = jnp.array([4, 0, 2, 3, 1])
    one_by_one = decode_attention(*given, rows)
    monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
    np.testing.assert_allclose(decode_attention(*given, rows), one_by_one, rtol=0, atol=1e-6)


def test_bfloat16_comes_back_as_bfloat16():
    """Softmax in float32 on rounded inputs: as near as rounding the result once."""
    given = draw(3, 'bfloat16')
    result = decode_attention(*given)
    assert result.dtype == jnp.bfloat16
    expected = joined(*given)
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=2**-7, atol=2**-7)
