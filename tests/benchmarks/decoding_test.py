"""The decoding benchmark times real steps on realistic caches."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moddepth_jax.benchmarks import decoding
from moddepth_jax.benchmarks.models import LOOPS, make_model
from moddepth_jax.hparams import from_config
from moddepth_jax.model.decoding import prefill


@pytest.fixture(scope='module')
def models(tiny_config):
    """The dense model and the randomly routed one of one shape."""
    shape = {'data.sequence_length': 64, 'model.vocab_size': 260}
    random = {'model.routing.router': 'random', 'model.routing.capacity': 0.25}
    return from_config(tiny_config(**shape)), from_config(tiny_config(**shape, **random))


@pytest.mark.parametrize('which', [0, 1])
def test_filled_caches_have_the_shape_of_real_ones(which, models):
    """As after a prefill, with the number of tokens that the rule selects in routed blocks."""
    hparams = models[which]
    unrolled = jax.eval_shape(lambda: decoding.random_weights(hparams))
    cache = decoding.filled_cache(hparams, unrolled, 3, 40)
    tokens_BT = np.zeros((3, 40), np.int32)
    fill = functools.partial(prefill, **decoding.cache_sizes(hparams))
    _, real = jax.eval_shape(fill, unrolled, tokens_BT, np.ones_like(tokens_BT))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (cache, real))
    assert shapes[0] == shapes[1]
    assert cache.lengths_B.tolist() == [40] * 3
    routed = [layer for layer in cache.layers if layer.lengths_B is not None]
    assert len(routed) == which
    for layer in routed:
        assert layer.positions_BS.shape[1] == 24 and layer.lengths_B.tolist() == [10] * 3


def test_cache_bytes_of_loops_follow_the_formula():
    """2 B S K H per block that runs, where S is the context, or the capacity of a routed loop."""
    batch, context = 2, 96
    dense, looped, mor = (
        make_model(name, '2x64', context, 1, dtype='float32', num_kv_heads=2)
        for name in ('dense', 'looped', 'mor')
    )
    head_dim, shared = dense.model.head_dim, 8 * batch + 4 * batch  # 3 int32 a row
    a_token = batch * 2 * 2 * head_dim * 4  # keys and values of two heads in float32
    found = {}
    for name, hparams in {'dense': dense, 'looped': looped, 'mor': mor}.items():
        unrolled = jax.eval_shape(lambda h=hparams: decoding.random_weights(h))
        cache = jax.eval_shape(
            lambda u, h=hparams: decoding.filled_cache(h, u, batch, 40), unrolled
        )
        found[name] = decoding.cache_bytes(cache) - shared
    assert found['dense'] == 2 * context * a_token
    assert found['looped'] == LOOPS * found['dense']
    first, *others = (mor.model.routing.cache_size(context, 'aux_loss', p) for p in (0, 0.5, 1))
    assert (first, *others) == (96, 96, 48)  # 1.5 times a third of 96 in the last
    positions = 4 * batch * sum(others) + 4 * batch * len(others)  # and a length of each row
    assert found['mor'] == 2 * ((first + sum(others)) * a_token + positions)


def test_loops_are_compared_at_equal_parameters_and_at_equal_depth():
    """The dense model has as many blocks as have parameters, or as many as run."""
    for against, layers in {'parameters': 2, 'depth': 2 * LOOPS}.items():
        dense, other = decoding._pair('mor', against, '2x64', 32, 1)
        assert dense.model.num_layers == layers and not dense.model.looped
        assert other.model.num_layers == 2 and other.model.num_blocks == 2 * LOOPS
        assert other.model.routing.routes_loops and dense.model.d_model == other.model.d_model


def test_exits_are_compared_with_the_looped_model():
    """With no token leaving and with all leaving; everything else is equal."""
    for against in decoding.AGAINST['exits']:
        looped, exits = decoding._pair('exits', against, '2x64', 32, 1)
        assert exits.model.loop_exit_threshold == decoding.EXIT_THRESHOLDS[against]
        never = dataclasses.replace(exits.model, loop_exit_threshold=0.0)
        assert looped == dataclasses.replace(exits, model=never) and looped.model.looped


def test_routed_loops_are_filled_with_their_shares():
    """Loops 2 and 3 hold two thirds and one third of the previous tokens, with positions."""
    mor = make_model('mor', '2x64', 96, 1, num_kv_heads=1)
    cache = decoding.filled_cache(mor, jax.eval_shape(lambda: decoding.random_weights(mor)), 2, 60)
    lengths = [None if one.lengths_B is None else int(one.lengths_B[0]) for one in cache.layers]
    assert lengths == [None, None, 40, 40, 20, 20]


@pytest.mark.slow
def test_loops_that_read_the_first_keys_have_no_cache():
    """There is one cache of all tokens per block with parameters, without selected fractions."""
    dense, first = (make_model(name, '1x64', 32, 1) for name in ('dense', 'mor_first'))
    result = decoding.bench_decoding(dense, first, [3], 8, 2)
    (row,) = result['rows']
    assert row['cache_ratio'] == 1 and 'selected_fraction' not in row


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match=r"^--models='mos': must be one of mod, looped, exits"):
        next(decoding.decode(models=['mos'], context=64, prompt=8, repeats=2))


@pytest.mark.parametrize('size', ['124m', '12', '12xwide'])
def test_a_named_size_is_refused_for_looped_models(size):
    """Regression: the message was that 124m is no integer."""
    right = f'^--size={size}: must be LAYERSxWIDTH for looped models$'
    with pytest.raises(ValueError, match=right):
        next(decoding.decode(models=['looped'], size=size, context=64, prompt=8, repeats=2))
