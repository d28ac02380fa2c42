"""A prompt and then token by token with a depth stream: the full forward, no cache of slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model import kv_cache as cache_lib
from moddepth_jax.model.decoding import decode_step, prefill, unroll
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ATTENTION,
    AVERAGE,
    DENSE,
    FAST,
    MODA,
    ROUTED,
    random_variables,
    small_hparams,
)

LENGTH, PROMPT = 12, 4
PROMPTS_B = np.array([3, 1, 4])  # tokens of each row's prompt
MASKED = {'model.depth.skipped_slots': 'masked'}
BLOCK_SLOT = {'model.depth.slots': 'block'}
OWN_SLOT = {'model.depth.attention_slot_projection': True}
UNROTATED = {'model.depth.slot_keys': 'unrotated', 'model.qk_norm': 'head'}
NEWEST = {'model.depth.slot_window': 2}
# The middle layer is routed, so that a routed layer reads slots and its own are read.
MIDDLE = ROUTED | {'model.routing.layers': '1', 'model.routing.cache_capacity': 2.0}
CASES = {'projected': MODA | MIDDLE | UNROTATED, 'masked': MODA | MIDDLE | MASKED | OWN_SLOT}
SLOW_CASES = {
    'attention': ATTENTION | MIDDLE | NEWEST,
    'dense': DENSE | MIDDLE,
    'average': AVERAGE | MIDDLE | {'model.windows': (3, 0)},
    'moda': MODA | {'model.norm_placement': 'post', 'model.qk_norm': 'full'} | NEWEST,
    'moda unrotated': MODA | UNROTATED | {'model.windows': (3, 0)},
    'projected block': MODA | MIDDLE | BLOCK_SLOT,
    'masked block': MODA | MIDDLE | BLOCK_SLOT | MASKED | UNROTATED,
    'masked reordered': MODA | MIDDLE | MASKED | {'model.norm_placement': 'reordered'},
    'projected own': MODA | MIDDLE | OWN_SLOT | {'model.norm_placement': 'post'},
    'projected grows': MODA | MIDDLE | {'model.routing.overflow': 'grow'},
}


def decoded(hparams, variables, tokens_BT, rule):
    """Logits of a prompt's last token and of each token after it, NaN before."""
    rows, how = np.arange(len(tokens_BT)), {'hparams': hparams, 'routing': rule}
    slots = hparams.model.routing.cache_size(LENGTH, rule)
    first = functools.partial(prefill, **how, capacity=LENGTH, routed_capacity=slots)
    first, step, write = (
        jax.jit(program, compiler_options=FAST)
        for program in (first, functools.partial(decode_step, **how), cache_lib.update_cache)
    )
    real_BT = np.arange(PROMPT)[None] < PROMPTS_B[:, None]
    unrolled = unroll(variables, hparams, rule)
    logits_BV, cache = first(
        unrolled, np.where(real_BT, tokens_BT[:, :PROMPT], 0), real_BT.astype(np.int32)
    )
    out = np.full((*tokens_BT.shape, hparams.model.vocab_size), np.nan, np.float32)
    out[rows, PROMPTS_B - 1] = logits_BV
    place_B, none_B = PROMPTS_B.copy(), np.zeros(len(rows), bool)
    while (place_B < LENGTH).any():
        active_B = place_B < LENGTH
        token_B = tokens_BT[rows, np.minimum(place_B, LENGTH - 1)]
        logits_BV, entries, dropped_B = step(unrolled, cache, token_B, none_B, active_B)
        cache = write(cache, entries, none_B, dropped_B, active_B)
        out[rows[active_B], place_B[active_B]] = np.asarray(logits_BV)[active_B]
        place_B += active_B
    return out


def check(make_config, knobs):
    sizes = {'model.num_layers': 3, 'data.sequence_length': LENGTH}
    hparams = small_hparams(make_config, sizes, knobs)
    rule = 'predictor' if hparams.model.routed_layers else 'dense'
    tokens_BT = np.random.default_rng(5).integers(0, 32, (3, LENGTH)).astype(np.int32)
    model, variables = Transformer(hparams), random_variables(hparams, tokens_BT, seed=2)
    full = jax.jit(functools.partial(model.apply, routing=rule), compiler_options=FAST)
    full_BTV, records = full(variables, tokens_BT)
    if records is not None:
        for layers in variables['params']['stack'].values():
            for layer in layers.values():
                if 'predictor' in layer:  # about a third of the tokens is let in
                    layer['predictor']['out']['bias'] -= np.quantile(
                        records.routing.rule_logits_BT, 0.65
                    )
        full_BTV, records = full(variables, tokens_BT)
        selected_BT = np.asarray(records.routing.selected_BT)[0]
        assert 0.1 <= selected_BT.mean() <= 0.6
        later_B = [selected_BT[b, start:].mean() for b, start in enumerate(PROMPTS_B)]
        assert 0 < np.mean(later_B) < 1  # while decoding some enter and some do not
    found_BTV = decoded(hparams, variables, tokens_BT, rule)
    known_BT = np.arange(LENGTH)[None] >= PROMPTS_B[:, None] - 1
    assert np.isnan(found_BTV[~known_BT]).all() and 0.5 < np.abs(full_BTV).max() < 16
    np.testing.assert_allclose(found_BTV[known_BT], full_BTV[known_BT], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    'name',
    [name if name == 'projected' else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_prompt_and_steps_equal_the_full_forward(name, tiny_config):
    """At most 1e-5 apart at every token of rows of different lengths, whoever enters."""
    check(tiny_config, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize('name', SLOW_CASES)
def test_every_stream_and_write_mode_decodes(name, tiny_config):
    """As above, for the other streams and kinds of slots."""
    check(tiny_config, SLOW_CASES[name])


def cache_shapes(make_config, *knobs):
    """Shapes of the cache that a prompt leaves."""
    hparams = small_hparams(make_config, {'model.num_layers': 3}, *knobs)
    rule = 'predictor' if hparams.model.routed_layers else 'dense'

    def first(tokens_BT):
        variables = Transformer(hparams).init(jax.random.key(0), tokens_BT)
        unrolled = unroll(variables, hparams, rule)
        how = {'hparams': hparams, 'routing': rule, 'capacity': 9, 'routed_capacity': 5}
        return prefill(unrolled, tokens_BT, jnp.ones_like(tokens_BT), **how)[1]

    cache = jax.eval_shape(first, jax.ShapeDtypeStruct((3, 8), jnp.int32))
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]


@pytest.mark.parametrize('routing', [{}, pytest.param(MIDDLE, marks=pytest.mark.slow)])
def test_no_slot_outlives_its_token(routing, tiny_config):
    """The cache of every stream is that of the residual model: slots are read at once, or never."""
    expected = cache_shapes(tiny_config, routing)
    for stream in (ATTENTION, AVERAGE, DENSE, MODA):
        assert cache_shapes(tiny_config, routing, stream) == expected
