"""Attention over a cache, the new token and its slots equals one float64 softmax over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import decode_attention as decode_eagerly
from tests.kernels.cases import exact

BATCH, PLACES, HEADS, WIDTH = 5, 11, 6, 4


def decode_attention(*arrays, slot_window=0, **named):
    """Jits decode_attention as a new function, since backends differ from test to test."""
    options = {'slot_window': slot_window}
    *new_and_cache, visible = arrays[:6]
    arrays = *new_and_cache, visible[:, None], None, *arrays[6:]
    return jax.jit(lambda *x, **named: decode_eagerly(*x, **named, **options))(*arrays, **named)


def draw(kv_heads, dtype='float32'):
    """Return random (q, k, v of new tokens, k, v of the cache, visible); one row is empty."""
    rng = np.random.default_rng(0)
    new = [rng.normal(size=(BATCH, 1, heads, WIDTH)) for heads in (HEADS, kv_heads, kv_heads)]
    cached = [rng.normal(size=(BATCH, kv_heads, WIDTH, PLACES)) for _ in range(2)]
    visible = rng.random((BATCH, PLACES)) < 0.5
    visible[0], visible[1] = False, True
    return [jnp.asarray(side, dtype) for side in new + cached] + [visible]


def draw_slots(kv_heads, num_slots=6):
    """Return random (keys, values of slots [L, C, 1, K, H], mask [L, C, 1])."""
    rng = np.random.default_rng(7)
    shape = (num_slots, BATCH, 1, kv_heads, WIDTH)
    slots = [jnp.asarray(rng.normal(size=shape), 'float32') for _ in range(2)]
    return *slots, rng.random(shape[:3]) < 0.5


def joined(q, k, v, k_cache, v_cache, visible, slots=None, q_depth=None):
    """Compute one float64 softmax over visible places, the token's own key and the slots.

    `slots`: (k, v, bool mask) of those that draw_slots gives; q_depth None: q.
    """
    tokens, _, heads, width = q.shape
    keys, values = (
        np.concatenate([np.moveaxis(cache, 3, 1), own], axis=1)
        for cache, own in ((k_cache, k), (v_cache, v))
    )
    grid = np.concatenate([visible, np.ones((tokens, 1), bool)], axis=1)[:, None]
    *sides, mask = slots or [np.zeros((0, *k.shape))] * 2 + [np.zeros((0, tokens, 1), bool)]
    inputs = q, keys, values, *sides, q if q_depth is None else q_depth
    cotangents, rows = (np.zeros(q.shape), np.zeros((tokens, heads, 1))), np.zeros((tokens, 1), int)
    return exact(inputs, cotangents, rows, grid, np.moveaxis(mask, 0, 2), width**-0.5)[0]


@pytest.fixture(params=['cpu', 'gpu'])
def backend(request, monkeypatch):
    """Select the form for CPUs, or that for accelerators, which gathers the cache rows."""
    monkeypatch.setattr('jax.default_backend', lambda: request.param)


@pytest.mark.parametrize('kv_heads', [6, 2, 1])
@pytest.mark.parametrize(('dtype', 'error'), [('float32', 1e-6), ('bfloat16', 2**-7)])
def test_two_parts_are_one_softmax(kv_heads, dtype, error):
    """With grouped heads, an empty cache and a full one; bfloat16 errs by one rounding of o."""
    arrays = draw(kv_heads, dtype)
    found = decode_attention(*arrays)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), joined(*arrays), rtol=2 * error, atol=error)


def test_large_scores_do_not_overflow():
    """A score of several hundred, of a cached or the own key, wins, and nothing is NaN."""
    q, *rest = draw(3)
    arrays = [q * 300, *rest]
    np.testing.assert_allclose(decode_attention(*arrays), joined(*arrays), rtol=0, atol=1e-5)


@pytest.mark.parametrize('slots', [False, True])
def test_rows_of_the_cache_by_index(slots, backend):
    """Three tokens read rows 4, 0 and 2; further indices name no row. Slots are by token."""
    q, k, v, *cache, visible = draw(3)
    rows, (k_depth, v_depth, mask) = np.array([4, 0, 2]), draw_slots(3)
    sides = [k_depth[:, :3], v_depth[:, :3], mask[:, :3] | True] if slots else None
    new = q[:3], k[:3], v[:3]
    expected = joined(*new, *(side[rows] for side in cache), visible[:3], sides)
    padded = jnp.array([4, 0, 2, BATCH, BATCH + 1])
    result = decode_attention(q, k, v, *cache, visible, padded, *[k_depth, v_depth] * slots)
    assert result.shape == q.shape
    np.testing.assert_allclose(result[:3], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize('magnitude', [1, 3])
def test_gpu_scores_are_float32(magnitude, monkeypatch):
    """In bfloat16 the GPU form errs at most twice as much as the float32 form, in norm and maximum.

    Bug: scores and scaled queries were rounded to bfloat16 before the softmax, off the CPU.
    """
    batch, heads, kv_heads, width, places = 3, 8, 2, 128, 700  # 128**-0.5 is no power of two
    rng, new = np.random.default_rng(magnitude), (batch, 1, kv_heads, width)
    cached = batch, kv_heads, width, places
    q, *sides = (rng.normal(size=x) for x in ((batch, 1, heads, width), new, new, cached, cached))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (magnitude * q, *sides)]
    arrays.append(rng.random((batch, places)) < 0.9)
    expected = joined(*arrays)
    float32 = np.asarray(decode_attention(*arrays), np.float64) - expected
    monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
    gpu = np.asarray(decode_attention(*arrays), np.float64) - expected
    assert (gpu != float32).any()  # it is another form
    assert np.linalg.norm(gpu) <= 2 * np.linalg.norm(float32)
    assert np.abs(gpu).max() <= 2 * np.abs(float32).max()


@pytest.mark.parametrize(
    ('kv_heads', 'slot_window', 'num_slots', 'masked'),
    [(3, 0, 6, False), (1, 2, 6, False), (3, 9, 6, False), (3, 0, 0, False), (3, 0, 6, True)],
)
def test_slots_join_the_softmax(kv_heads, slot_window, num_slots, masked):
    """All slots, the newest, or none, with other queries; NaN in masked slots does not leak."""
    arrays, (k, v, mask) = draw(kv_heads), draw_slots(kv_heads, num_slots)
    q_depth, shown = arrays[0][::-1], mask & (not masked)
    if slot_window:
        shown[:-slot_window] = False
    slots = [jnp.where(shown[..., None, None], side, jnp.nan) for side in (k, v)]
    options = {'slot_window': slot_window, 'q_depth_CTNH': q_depth}
    result = decode_attention(*arrays, None, *slots, mask & (not masked), **options)
    expected = joined(*arrays, (k, v, shown), q_depth)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ('slots', 'named'),
    [
        ({'k_depth_LCTKH': np.zeros((7, 2, 1, 3, 4))}, r'v_depth_LCTKH is None'),
        ({'slot_window': -1}, r'slot_window=-1'),
        (
            {'visible_CTS': np.ones((5, 1, 1), bool)},
            r'visible_CTS of shape .* must be \[5, 1, 11\]',
        ),
        ({'visible_CTS': np.ones((5, 1, 11))}, r'visible_CTS of dtype float64 must be bool'),
        ({'visible_CTT': np.ones((5, 3, 1), bool)}, r'visible_CTT of shape .* must be \[5, 1, 1\]'),
        ({'k_BKHS': np.zeros((5, 11, 3, 4))}, r'k_BKHS of shape .* must be \[5, 3, 4, S\]'),
        ({'k_BKHS': np.zeros((4, 3, 4, 11))}, r'k_BKHS of shape .* must be \[5, 3, 4, S\]'),
        (
            dict.fromkeys(('k_BKHS', 'v_BKHS'), np.zeros((5, 3, 4, 0)))
            | {'visible_CTS': np.ones((5, 1, 0), bool)},
            'C=5, T=1, S=0: rows, new tokens and places of the cache must be at least 1',
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(slots, named):
    """Regression: one place or row of the cache was broadcast, others gave a traceback."""
    names = 'q_CTNH', 'k_CTKH', 'v_CTKH', 'k_BKHS', 'v_BKHS', 'visible_CTS'
    *arrays, visible = draw(3)
    given = dict(zip(names, (*arrays, visible[:, None]), strict=True))
    with pytest.raises(ValueError, match=named):
        decode_eagerly(**given | slots)


def test_a_token_is_visible_to_itself_whatever_its_entry_says():
    """Regression: it was hidden by its entry; with an empty cache the result was NaN."""
    *arrays, visible = draw(3)
    hidden = np.zeros((BATCH, 1, 1), bool)
    found = decode_eagerly(*arrays, visible[:, None], hidden)
    np.testing.assert_array_equal(found, decode_eagerly(*arrays, visible[:, None]))
    assert not hidden.any()


@pytest.mark.parametrize('block', [(1, 2), (64, 128)])
def test_tokens_of_a_row_see_each_other_as_masked(block, backend, monkeypatch):
    """Three tokens at once, or in blocks, equal three single steps over a cache."""
    monkeypatch.setattr('kernels_pallas.decode._block', lambda: block)
    monkeypatch.setattr('kernels_pallas.decode._IN_PLACE', 1)
    q, k, v, *cache, visible = draw(3)
    one_row = [jnp.swapaxes(side[:3], 0, 1) for side in (q, k, v)]
    cache, visible = [side[:1] for side in cache], visible[:1]
    visible_CTS, own_CTT = jnp.tile(visible[:, None], (1, 3, 1)), np.tri(3, dtype=bool)[None]
    own_CTT[0, 2, 0] = False
    k_depth, v_depth, mask = (jnp.moveaxis(side[:, :3], 1, 2) for side in draw_slots(3))
    slots = k_depth, v_depth, jnp.asarray(mask)
    found = decode_eagerly(*one_row, *cache, visible_CTS, own_CTT, None, *slots)
    for token in range(3):
        earlier = [jnp.moveaxis(side[:, :token], 1, 3) for side in one_row[1:]]
        grown = [jnp.concatenate(sides, axis=3) for sides in zip(cache, earlier, strict=True)]
        seen = np.concatenate([visible, own_CTT[:, token, :token]], axis=1)
        now = [side[:, :, token : token + 1] for side in slots]
        alone = decode_attention(
            *(side[:, token : token + 1] for side in one_row), *grown, seen, None, *now
        )
        np.testing.assert_allclose(found[:, token], alone[:, 0], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match='3 new tokens of a row need visible_CTT'):
        decode_eagerly(*one_row, *cache, visible_CTS)
