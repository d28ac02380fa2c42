"""The decoding benchmark times real steps on caches such as decoding has."""

import json

import jax
import numpy as np
import pytest

from moddepth_jax.benchmarks import decoding
from moddepth_jax.hparams import from_config

CONTEXT = 64


@pytest.fixture(scope='module')
def models(tiny_config):
    """The dense model and the randomly routed one of one shape."""
    shape = {'data.sequence_length': CONTEXT, 'model.vocab_size': 260}
    random = {'model.routing.router': 'random', 'model.routing.capacity': 0.25}
    return from_config(tiny_config(**shape)), from_config(tiny_config(**shape, **random))


@pytest.mark.parametrize('which', [0, 1])
def test_filled_caches_have_the_shape_of_real_ones(which, models):
    """As prefill would leave them, with the rule's share of entries in routed blocks."""
    hparams = models[which]
    unrolled = decoding._random_weights(hparams)
    cache = decoding.filled_cache(hparams, unrolled, 3, 40)
    tokens_BT = np.zeros((3, 40), np.int32)
    _, real = jax.eval_shape(lambda: decoding._prefill(hparams, unrolled, tokens_BT))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (cache, real))
    assert shapes[0] == shapes[1]
    assert cache.lengths_B.tolist() == [40] * 3
    routed = [layer for layer in cache.layers if layer.lengths_B is not None]
    assert len(routed) == which
    for layer in routed:
        assert layer.capacity == 24 and layer.lengths_B.tolist() == [10] * 3


@pytest.mark.slow
def test_result_says_what_was_timed(models):
    """Every batch has times, tokens, bytes and the share that entered; JSON can hold it."""
    result = decoding.bench_decode(*models, [1, 8], prompt=16, repeats=4)
    json.dumps(result)
    assert [row['batch'] for row in result['rows']] == [1, 8]
    for row in result['rows']:
        assert row['seconds']['dense'] > 0 and row['seconds']['routed'] > 0
        assert row['tokens_per_second']['dense'] == row['batch'] / row['seconds']['dense']
        # One of two blocks keeps 24 of 64 slots; positions and lengths add a little.
        share = row['cache_bytes']['routed'] / row['cache_bytes']['dense']
        assert (1 + 24 / 64) / 2 < share < (1 + 24 / 64) / 2 + 0.02
    assert 0.05 < result['rows'][1]['entered_fraction'] < 0.5
    assert result['time_to_first_token']['prompt'] == 16


def test_the_timed_models_have_the_weights_that_they_say(models):
    """Nothing but the router tells the routed model's parameters from the dense one's."""
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(decoding._random_weights(hparams)['layers']))
        for hparams in models
    ]
    assert sizes[0] == sizes[1]
