"""Memory of one attention, forward and backward, by XLA: it grows with T, and no array is T x S."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import depth_attention
from tests.kernels import hopper

HEADS = {'N': 8, 'K': 2, 'H': 32, 'L': 3}
KINDS = {
    'documents': {},
    'documents and slots': {'slots': True},
    'window': {'window': 1000},
    'keys of other tokens': {'others': True},
}


def program(T, N, K, H, L, slots=False, window=0, others=False, implementation='xla'):
    """Output and gradients of all inputs, with segment ids, and the shapes of the arguments."""

    def run(q, k, v, ids, do, *sides):
        arguments = {'segment_ids_BT': ids, 'window': window, 'implementation': implementation}
        if others:
            places = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
            arguments |= {'key_positions_BS': places, 'key_segment_ids_BS': places // 1000}

        def attention(q, k, v, *sides):
            return depth_attention(q, k, v, *sides, **arguments)

        o, pull = jax.vjp(attention, q, k, v, *sides)
        return o, pull(do)

    def shape(*sides, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sides, dtype)

    q, k = shape(1, T, N, H), shape(1, T + 1000 * others, K, H)
    sides = 2 * [shape(L, 1, T, K, H)] if slots else []
    return run, (q, k, k, shape(1, T, dtype=jnp.int32), q, *sides)


def compiled(function, arrays, **options):
    return jax.jit(function, **options).lower(*arrays).compile()


def largest(text):
    """Numbers of the largest array of a compiled program, within fusions too."""
    shapes = re.findall(r'\b(?:pred|[a-z]+\d+)\[([\d,]+)\]', text)
    return max(math.prod(map(int, shape.split(','))) for shape in shapes)


def check_growth(place, **kind):
    """From 4096 tokens to 8192 temporaries grow by 2.2 at most; nothing is as large as T x S."""
    small, large = (
        compiled(run, place(x)) for run, x in (program(t, **kind) for t in (4096, 8192))
    )
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (small, large)]
    assert 0 < sizes[1] <= 2.2 * sizes[0]
    assert largest(large.as_text()) < 8192**2


@pytest.mark.parametrize('kind', KINDS)
def test_grows_with_the_tokens(kind):
    """On a CPU."""
    check_growth(lambda arrays: arrays, **HEADS | KINDS[kind])


def test_all_scores_are_seen():
    """The equation does hold T x S scores: the search finds them."""
    text = compiled(*program(2048, 1, 1, 8, 0, implementation='reference')).as_text()
    assert largest(text) >= 2048**2


@pytest.fixture
def described(monkeypatch):
    """As on a machine with an H200, for which there is a compiler."""
    reason = hopper.missing()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    with hopper.an_h200():
        yield hopper.on_hopper


@pytest.mark.parametrize('kind', KINDS)
def test_grows_with_the_tokens_on_an_h200(described, kind):
    check_growth(described, **HEADS | KINDS[kind])


@pytest.mark.parametrize('slots', [False, True])
def test_a_long_row_on_an_h200(described, slots):
    """65,536 tokens, 64 heads on 8 of width 64: 1.5 GB at most, without the slots' gradients."""
    run, arrays = program(65536, 64, 8, 64, 8, slots=slots)
    sizes = compiled(run, described(arrays)).memory_analysis()
    assert sizes.temp_size_in_bytes <= 1.5e9
