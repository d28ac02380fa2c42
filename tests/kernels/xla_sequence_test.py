"""The sequence by XLA: the equation's values and gradients in any blocks, and linear memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from kernels_pallas.reference import visibility
from kernels_pallas.xla import sequence
from moddepth_jax.benchmarks.kernel_cases import exact as slot_exact
from tests.kernels import hopper

SIZES = {'B': 2, 'T': 97, 'S': None, 'N': 2, 'K': 2, 'H': 8}
KINDS = {'window': 0, 'gaps': False, 'segments': False, 'scale': None}
# By the queries of a static block; those of `tiles` run in loops over tiles of 16 by 16.
CASES = {
    128: {
        'one_token': {'T': 1},
        'window_in_a_block': {'N': 6, 'window': 20, 'scale': 0.5},
        'segments_over_blocks': {'T': 200, 'N': 5, 'K': 1, 'segments': True},
        'window_over_gaps': {'T': 300, 'window': 150, 'gaps': True},
        'other_keys': {'S': 141, 'N': 6, 'window': 90, 'gaps': True, 'segments': True},
    },
    16: {
        'many_blocks': {'T': 103, 'N': 6, 'window': 50},
        'blocks_of_other_keys': {'T': 60, 'S': 75, 'window': 9, 'gaps': True},
    },
    'tiles': {
        'one_tile': {'T': 1},
        'odd_tiles': {'T': 97, 'N': 6},
        'segments_over_tiles': {'T': 60, 'N': 5, 'K': 1, 'segments': True},
        'window_over_gaps': {'T': 60, 'window': 40, 'gaps': True},
        'other_keys': {'T': 45, 'S': 83, 'N': 6, 'window': 90, 'gaps': True, 'segments': True},
    },
}


def in_blocks(monkeypatch, block):
    monkeypatch.setattr(sequence, 'QUERY_BLOCK', 128 if block == 'tiles' else block)
    if block == 'tiles':
        monkeypatch.setattr(sequence, 'is_long', lambda *shape: True)
        monkeypatch.setattr(sequence, 'TILE_SIZES', (16, 16))


def make_case(B, T, S, N, K, H, window, gaps, segments, scale):
    """Random q, k, v and cotangents of o and lse, the keyword arguments, and the drawn grid."""
    rng, others, S = np.random.default_rng(T + N + window), S is not None, S or T

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def places(length, room):
        return np.stack([np.sort(rng.choice(room, length, replace=False)) for _ in range(B)])

    inputs = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H)
    positions = key_positions = places(T, 3 * T) if gaps else np.tile(np.arange(T), (B, 1))
    ids = key_ids = np.sort(rng.integers(0, 4, (B, T)), axis=1)
    arguments = {'window': window, 'scale': scale}
    if gaps:
        arguments['positions_BT'] = positions
    if others:
        key_positions = rng.permuted(places(S, 3 * T), axis=1)
        key_ids = rng.integers(0, 4, (B, S))
        arguments['key_positions_BS'] = key_positions
    gaps_BTS = positions[:, :, None] - key_positions[:, None, :]
    grid = (gaps_BTS >= 0) & ((window == 0) | (gaps_BTS < window))
    if segments:
        arguments['segment_ids_BT'] = ids
        arguments['key_segment_ids_BS'] = key_ids if others else None
        grid &= ids[:, :, None] == key_ids[:, None, :]
    return inputs, (normal(B, T, N, H), normal(B, N, T)), arguments, grid


def exact(inputs, cotangents, grid, scale):
    """o, lse and the gradients of q, k, v in float64."""
    (q, k, _), (batch, length) = inputs, inputs[0].shape[:2]
    none = np.zeros((0, batch, length, *k.shape[2:]))
    rows, slots = np.zeros((batch, length), int), np.zeros((batch, length, 0), bool)
    o, lse, gradients = slot_exact((*inputs, none, none, q), cotangents, rows, grid, slots, scale)
    return o, lse, gradients[:3]


def values_and_gradients(function, inputs, cotangents):
    """o, lse and the gradients of q, k, v through both; under one jit."""

    def run(*inputs):
        (o, lse), pull = jax.vjp(function, *inputs)
        return o, lse, pull(tuple(cotangents))

    return jax.tree.map(np.asarray, jax.jit(run)(*inputs))


def attention(implementation, arguments):
    return functools.partial(
        depth_attention, implementation=implementation, return_lse=True, **arguments
    )


def check(implementation, inputs, cotangents, arguments, grid):
    """Output, logsumexp and gradients equal a float64 softmax over the pairs of the grid."""
    scale = arguments['scale'] or inputs[0].shape[-1] ** -0.5
    o, lse, gradients = exact(inputs, cotangents, grid, scale)
    function = attention(implementation, arguments)
    got_o, got_lse, got_gradients = values_and_gradients(function, inputs, cotangents)
    np.testing.assert_allclose(got_o, o, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got_lse, lse, rtol=5e-7, atol=2e-6)
    assert got_lse.dtype == np.float32 and not got_o[~grid.any(2)].any()
    for got, right in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-5)


def test_visibility_is_the_drawn_grid():
    """Causality, a window of 4 places, gaps between places and segments hide what is drawn as 0."""
    places, ids = np.array([[0, 1, 2, 5, 6, 7]]), np.array([[1, 1, 1, 1, 2, 2]])
    drawn = """
        1 0 0 0 0 0
        1 1 0 0 0 0
        1 1 1 0 0 0
        0 0 1 1 0 0
        0 0 0 0 1 0
        0 0 0 0 1 1
    """
    drawn = np.array(drawn.split(), int).reshape(1, 6, 6)
    np.testing.assert_array_equal(visibility(places, places, ids, ids, 4), drawn)
    before_and_after = visibility(places[:, 3:4], np.array([[5, 1, 6, 2]]), None, None, 4)
    np.testing.assert_array_equal(before_and_after, [[[1, 0, 0, 1]]])


@pytest.mark.parametrize(
    ('implementation', 'block', 'name'),
    [('xla', block, name) for block, cases in CASES.items() for name in cases]
    + [('reference', 128, name) for name in ('window_over_gaps', 'other_keys')],
)
def test_equals_float64_softmax(implementation, block, name, monkeypatch):
    """In static blocks, in loops over tiles, and by the equation."""
    case = SIZES | KINDS | CASES[block][name]
    inputs, cotangents, arguments, grid = make_case(**case)
    in_blocks(monkeypatch, block)
    assert (~grid.any(2)).any() == (case['S'] is not None)
    check(implementation, inputs, cotangents, arguments, grid)


def test_loops_take_any_segment_ids(monkeypatch):
    """Ids that descend, recur, or are of one token: no tile with a visible pair is skipped."""
    in_blocks(monkeypatch, 'tiles')
    inputs, cotangents, arguments, _ = make_case(**SIZES | KINDS | {'T': 70})
    ids = np.stack([np.arange(70)[::-1] // 20, np.arange(70) * 7 % 5])
    grid = np.tril(np.ones((70, 70), bool)) & (ids[:, :, None] == ids[:, None])
    check('xla', inputs, cotangents, arguments | {'segment_ids_BT': ids}, grid)


def test_loops_visit_only_tiles_with_visible_keys():
    """Tiles of keys for each tile of 16 queries: causal, in a window, of ascending documents."""
    places = jnp.arange(64)[None]
    ids = jnp.asarray(np.repeat(np.arange(3), [20, 28, 16]))[None]

    def bounds(ids=None, window=0):
        sides = (places, places), (places, places), None if ids is None else (ids, ids)
        first, end = sequence._bounds(*sides, window, (16, 16))
        return first.tolist(), end.tolist()

    assert bounds() == ([0, 0, 0, 0], [1, 2, 3, 4])
    assert bounds(window=18) == ([0, 0, 0, 1], [1, 2, 3, 4])
    assert bounds(window=17) == ([0, 0, 1, 2], [1, 2, 3, 4])
    assert bounds(window=1) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert bounds(ids) == ([0, 0, 1, 3], [1, 2, 3, 4])


@pytest.mark.parametrize('block', [16, 'tiles'])
def test_hidden_pairs_have_exactly_zero_gradient(block, monkeypatch):
    """The outputs of queries before 20 have no derivative, to the bit, by any token from 20 on."""
    in_blocks(monkeypatch, block)
    inputs, (do, dlse), arguments, _ = make_case(**SIZES | KINDS | {'T': 41, 'N': 6, 'gaps': True})
    do[:, 20:], dlse[:, :, 20:] = 0, 0
    for gradient in values_and_gradients(attention('xla', arguments), inputs, (do, dlse))[2]:
        assert not gradient[:, 20:].any()
        assert gradient[:, :20].any(axis=(2, 3)).all()


def test_bfloat16_error_is_near_the_plain_one():
    """In bfloat16 the error is at most twice that of JAX's attention, three times in gradients."""
    inputs, cotangents, arguments, grid = make_case(**SIZES | KINDS | {'N': 6, 'H': 16})
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in inputs]
    cotangents = [jnp.asarray(cotangents[0], jnp.bfloat16), jnp.zeros_like(cotangents[1])]
    wide = [np.asarray(x, float) for x in inputs], [np.asarray(x, float) for x in cotangents]
    right_o, _, right_gradients = exact(*wide, grid, 0.25)

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), jnp.zeros((2, 6, 97))

    def errors(function):
        o, _, gradients = values_and_gradients(function, inputs, cotangents)
        assert {x.dtype for x in (o, *gradients)} == {jnp.dtype(jnp.bfloat16)}
        pairs = zip((o, *gradients), (right_o, *right_gradients), strict=True)
        return np.array([np.abs(got.astype(float) - right).max() for got, right in pairs])

    allowed = [2, 3, 3, 3] * errors(plain)
    for implementation in ('reference', 'xla'):
        assert (errors(attention(implementation, arguments)) <= allowed).all()


MASKS = {
    'documents and slots': {'slots': True},
    'documents': {},
    'window': {'window': 1000},
    'keys of other tokens': {'others': True},
}


def step(T, N, K, H, L, slots=False, window=0, others=False, implementation='xla'):
    """Output and gradients of all inputs, with segment ids, and the shapes of the arguments."""

    def run(q, k, v, ids, do, *sides):
        arguments = {'segment_ids_BT': ids, 'window': window, 'implementation': implementation}
        if others:
            places = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
            arguments |= {'key_positions_BS': places, 'key_segment_ids_BS': places // 1000}
        o, pull = jax.vjp(functools.partial(depth_attention, **arguments), q, k, v, *sides)
        return o, pull(do)

    shape = hopper.shape
    q, k = shape(1, T, N, H), shape(1, T + 1000 * others, K, H)
    sides = 2 * [shape(L, 1, T, K, H)] if slots else []
    return run, (q, k, k, shape(1, T, dtype=jnp.int32), q, *sides)


def compiled(function, arrays):
    return jax.jit(function).lower(*arrays).compile()


def largest_array(text):
    """Numbers of the largest array of a compiled program, within fusions too."""
    shapes = re.findall(r'\b(?:pred|[a-z]+\d+)\[([\d,]+)\]', text)
    return max(math.prod(map(int, shape.split(','))) for shape in shapes)


@pytest.fixture
def described(monkeypatch):
    """As on a machine with an H200, for which there is a compiler."""
    if reason := hopper.missing():
        pytest.skip(reason)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    with hopper.an_h200():
        yield hopper.on_hopper


@pytest.mark.parametrize('device', ['cpu', 'h200'])
@pytest.mark.parametrize(
    'kind',
    [
        kind if i == 0 else pytest.param(kind, marks=pytest.mark.slow)
        for i, kind in enumerate(MASKS)
    ],
)
def test_memory_grows_with_the_tokens(kind, device, request):
    """From 4096 tokens to 8192 temporaries grow by 2.2 at most; nothing is as large as T x S."""
    place = (lambda x: x) if device == 'cpu' else request.getfixturevalue('described')
    programs = (step(T, 8, 2, 32, 3, **MASKS[kind]) for T in (4096, 8192))
    small, large = (compiled(run, place(arrays)) for run, arrays in programs)
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (small, large)]
    assert 0 < sizes[1] <= 2.2 * sizes[0]
    assert largest_array(large.as_text()) < 8192**2


def test_no_array_of_static_blocks_holds_all_scores():
    """At T = 2048 no array has a sixth of the T^2 scores of a head; the equation's is found."""
    sizes = {'T': 2048, 'N': 1, 'K': 1, 'H': 8, 'L': 0}
    programs = (step(**sizes, implementation=name) for name in ('xla', 'reference'))
    blocks, equation = (largest_array(compiled(*program).as_text()) for program in programs)
    assert blocks < 2048**2 / 6 and equation >= 2048**2


@pytest.mark.parametrize('slots', [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_of_a_long_row_on_an_h200(described, slots):
    """65,536 tokens, 64 heads on 8 of width 64: 1.5 GB at most, without the slots' gradients."""
    run, arrays = step(65536, 64, 8, 64, 8, slots=slots)
    sizes = compiled(run, described(arrays)).memory_analysis()
    assert sizes.temp_size_in_bytes <= 1.5e9
