"""The sequence part by XLA: right values and gradients in any blocks, and linear memory."""

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
from tests.kernels import hopper
from tests.kernels.cases import draw, exact, in_blocks, program


def test_visibility_is_the_drawn_grid():
    """Causality, a window of 4, gaps between positions, and segments hide what is drawn as 0."""
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


def test_loops_visit_only_tiles_with_visible_keys():
    """Each tile of 16 queries has the right tiles of keys: causal, window, ascending documents."""
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


def test_rows_are_long_by_what_is_computed_at_once(monkeypatch):
    """On a CPU the batch size does not matter, since few heads run at a time."""
    few, many = (1, 512, 16, 64), (256, 512, 16, 64)
    for q_shape in (few, many):
        assert not sequence.is_long(q_shape, (q_shape[0], 512, 4, 64))
        assert sequence.is_long(q_shape, (q_shape[0], 2**18, 4, 64))
        assert not sequence.is_long((q_shape[0], 2048, 16, 64), (q_shape[0], 2048, 4, 64))
        assert sequence.is_long((q_shape[0], 2049, 16, 64), (q_shape[0], 2049, 4, 64))
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert not sequence.is_long(few, (1, 512, 4, 64))
    assert sequence.is_long((1, 513, 16, 64), (1, 513, 4, 64))
    assert sequence.is_long(many, (256, 512, 4, 64))


@pytest.mark.parametrize('empty', [{'B': 0}, {'T': 0}])
@pytest.mark.parametrize('implementation', ['xla', 'pallas'])
def test_no_tokens_have_no_outputs_and_no_gradients(implementation, empty):
    """An empty batch, or empty rows, with slots and their sums."""
    sizes = {'B': 2, 'T': 5} | empty
    q, k = (jnp.ones((sizes['B'], sizes['T'], heads, 8)) for heads in (4, 2))
    side = jnp.ones((3, *k.shape))

    def attention(q, k, side, total):
        options = {'return_lse': True, 'thread_slots': True, 'slot_sums': (total, total)}
        return depth_attention(q, k, k, side, side, implementation=implementation, **options)

    @jax.jit
    def both(*arrays):
        results, pull = jax.vjp(attention, *arrays)
        return results, pull(results)

    results, gradients = both(q, k, side, side)
    lse = jnp.zeros((sizes['B'], 4, sizes['T']))
    assert [x.shape for x in results] == [x.shape for x in (q, lse, *4 * [side])]
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, side, side)]


@pytest.mark.parametrize('block', [16, 'parts', 'tiles'])
def test_hidden_pairs_have_exactly_zero_gradient(block, monkeypatch):
    """Outputs before token 20 have a derivative of exactly 0 by every token from 20 on."""
    in_blocks(monkeypatch, block)
    inputs, (do, dlse), arguments, *_ = draw(T=41, L=0, num=0, gaps=True)
    do[:, 20:], dlse[:, :, 20:] = 0, 0
    run = program((do, dlse), implementation='xla', **arguments)
    for gradient in run(*inputs, 0)[2][:3]:
        assert not gradient[:, 20:].any()
        assert gradient[:, :20].any(axis=(2, 3)).all()


def test_bfloat16_error_is_near_the_plain_one():
    """In bfloat16 the error is at most twice that of JAX's attention; gradients: three times."""
    inputs, (do, dlse), _, *seen = draw(T=97, L=0, num=0, H=16)
    *inputs, do = (jnp.asarray(x, jnp.bfloat16) for x in (*inputs, do))
    o, _, gradients = exact(inputs, (do, 0 * dlse), *seen, 0.25)

    def errors(function):
        found, pull = jax.vjp(jax.jit(function), *inputs[:3])
        pairs = zip((found, *pull(do)), (o, *gradients), strict=False)
        return np.array([np.abs(np.asarray(got, float) - right).max() for got, right in pairs])

    plain = errors(functools.partial(jax.nn.dot_product_attention, is_causal=True))
    for implementation in ('reference', 'xla'):
        attention = functools.partial(depth_attention, implementation=implementation)
        assert (errors(attention) <= [2, 3, 3, 3] * plain).all()


MASKS = {
    'documents and slots': {'slots': True},
    'documents': {},
    'window': {'window': 1000},
    'keys of other tokens': {'others': True},
}


def step(T, N, K, H, L, slots=False, window=0, others=False, implementation='xla'):
    """Return the step with segment ids, for output and all gradients, and its argument shapes."""

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
    """Return the size of the largest array of a compiled program, including fusions."""
    shapes = re.findall(r'\b(?:pred|[a-z]+\d+)\[([\d,]+)\]', text)
    return max(math.prod(map(int, shape.split(','))) for shape in shapes)


@pytest.fixture
def described(monkeypatch):
    """Pretends to be a machine with an H200, for which there is a compiler."""
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
    """From 4096 to 8192 tokens temporaries grow by at most 2.2; no array is as large as T x S."""
    place = (lambda x: x) if device == 'cpu' else request.getfixturevalue('described')
    programs = (step(T, 8, 2, 32, 3, **MASKS[kind]) for T in (4096, 8192))
    small, large = (compiled(run, place(arrays)) for run, arrays in programs)
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (small, large)]
    assert 0 < sizes[1] <= 2.2 * sizes[0]
    assert largest_array(large.as_text()) < 8192**2


def test_no_array_of_static_blocks_holds_all_scores():
    """At T = 2048 no array has a sixth of T^2 numbers; those of the reference are found."""
    sizes = {'T': 2048, 'N': 1, 'K': 1, 'H': 8, 'L': 0}
    programs = (step(**sizes, implementation=name) for name in ('xla', 'reference'))
    blocks, equation = (largest_array(compiled(*program).as_text()) for program in programs)
    assert blocks < 2048**2 / 6 and equation >= 2048**2


@pytest.mark.parametrize('slots', [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_of_a_long_row_on_an_h200(described, slots):
    """65,536 tokens, 64 heads on 8 of width 64: at most 1.5 GB, without the slots' gradients."""
    run, arrays = step(65536, 64, 8, 64, 8, slots=slots)
    sizes = compiled(run, described(arrays)).memory_analysis()
    assert sizes.temp_size_in_bytes <= 1.5e9
