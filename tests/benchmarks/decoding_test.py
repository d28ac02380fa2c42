"""The decoding benchmark times real steps on caches such as decoding has."""

import jax
import numpy as np
import pytest

from moddepth_jax.benchmarks import decoding
from moddepth_jax.hparams import from_config


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
    unrolled = decoding.random_weights(hparams)
    cache = decoding.filled_cache(hparams, unrolled, 3, 40)
    tokens_BT = np.zeros((3, 40), np.int32)
    _, real = jax.eval_shape(lambda: decoding._prefill(hparams, unrolled, tokens_BT))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (cache, real))
    assert shapes[0] == shapes[1]
    assert cache.lengths_B.tolist() == [40] * 3
    routed = [layer for layer in cache.layers if layer.lengths_B is not None]
    assert len(routed) == which
    for layer in routed:
        assert layer.positions_BS.shape[1] == 24 and layer.lengths_B.tolist() == [10] * 3
