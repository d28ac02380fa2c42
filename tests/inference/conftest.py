"""Small models whose scores differ from token to token, and their logits row by row."""

import functools

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import random_variables

CONTEXT = 16
_ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
_MODA = {'model.depth.stream': 'moda', 'model.tie_embeddings': True, 'model.vocab_size': 300}
_LOOPS = {
    'model.routing.layers': 'loops',
    'model.looped_layers': 'all',
    'model.loops': 2,
    'model.routing.capacity': 0.5,
    'model.routing.cache_capacity': 2.0,
}
MODELS = {
    'both': _ROUTED | _MODA,
    'dense': {},
    # Three lengths of rows.
    'longer mod': _ROUTED | {'data.sequence_length': 40},
    'loops': _ROUTED | _LOOPS | {'model.num_layers': 1, 'data.sequence_length': 40},
}


@pytest.fixture(scope='module', autouse=True)
def unoptimised():
    """The programs of inference compile longer than they run, too."""
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='session')
def small_model(tiny_config):
    """(variables, hparams) by name; weights are large, so that some tokens are routed."""

    @functools.cache
    def make(name):
        hparams = from_config(tiny_config(**{'data.sequence_length': CONTEXT, **MODELS[name]}))
        return random_variables(hparams, np.zeros((1, CONTEXT), np.int32)), hparams

    return make


@pytest.fixture(scope='session')
def forward(small_model):
    """(logits, records) of a row of tokens, by the name of the model and its causal rule."""

    @functools.cache
    def compiled(name):
        _, hparams = small_model(name)
        routing = causal_routing(hparams)
        return jax.jit(
            lambda variables, tokens_BT: Transformer(hparams).apply(
                variables, tokens_BT, None, routing
            )
        )

    return lambda name, tokens_BT: compiled(name)(small_model(name)[0], tokens_BT)


@pytest.fixture(scope='session')
def log_p_of(small_model, forward):
    """float64 log p [T, V] of the tokens after each of `ids` in a padded row of its own."""

    def log_p(name, ids):
        length = small_model(name)[1].data.sequence_length
        row_BT = np.zeros((1, length), np.int32)
        row_BT[0, : len(ids)] = ids
        logits_TV = np.asarray(forward(name, row_BT)[0][0, : len(ids)], np.float64)
        return logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)

    return log_p
