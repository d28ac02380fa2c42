"""Blocks are made from layers of a dense model: as means, or with the bits of one layer."""

import jax
import numpy as np
import pytest

from moddepth_jax.conversion.from_layers import explain_layers, take_layers, with_layers
from moddepth_jax.conversion.transfer_params import check_convertible, transfer_params
from moddepth_jax.hparams import from_config
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer
from tests.conversion.transfer_params_test import random_params

TOKENS_BT = np.random.default_rng(1).integers(0, 257, (2, 16))
MIDDLE = {'model.num_layers': 4, 'model.looped_layers': 'middle:1:1', 'model.loops': 3}
PATTERNS = {  # knobs of the looped model, the layers that each of its blocks stands for
    'middle cycle': (MIDDLE, [(0,), (1, 3, 5), (2, 4, 6), (7,)]),
    'middle sequence': (
        MIDDLE | {'model.loop_order': 'sequence'},
        [(0,), (1, 2, 3), (4, 5, 6), (7,)],
    ),
    'cycle': (
        {'model.num_layers': 2, 'model.looped_layers': 'all', 'model.loops': 2},
        [(0, 2), (1, 3)],
    ),
    'sequence': (
        {'model.num_layers': 2, 'model.looped_layers': 'all', 'model.loops': 2}
        | {'model.loop_order': 'sequence'},
        [(0, 1), (2, 3)],
    ),
}
EXPERTS = {'model.experts.choice': 'token', 'model.experts.layers': '1,2'}


def layers_of(hparams, params):
    on_host = jax.tree.map(np.asarray, params['stack'])
    return [layer for _, layer in unstack_layers(Stack(hparams.model, 'top_c'), on_host)]


def pair(make_config, knobs, **changes):
    target = from_config(make_config(**knobs))
    source = from_config(make_config(**{'model.num_layers': target.model.num_blocks} | changes))
    return source, target


def build(source, params, target, how):
    return with_layers(source, target, how)[0], take_layers(source, params, target, how)


@pytest.mark.parametrize('name', PATTERNS)
def test_blocks_are_means_or_picks_of_their_layers(name, tiny_config):
    """A picked block has the bits of its layer; the embedding, head and last norm are kept."""
    knobs, layers_of_block = PATTERNS[name]
    source, target = pair(tiny_config, knobs)
    assert with_layers(source, target, 'average')[1] == layers_of_block
    given = random_params(source)
    before, loops = layers_of(source, given), target.model.block_order
    every = ','.join(str(layers[1 % len(layers)]) for layers in layers_of_block)
    for how, pick in {'first': 0, 'last': -1, every: 1}.items():
        shared, params = build(source, given, target, how)
        check_convertible(shared, target)
        params, new = transfer_params(shared.model, params, target)
        assert not new
        for block, found in zip(loops, layers_of(target, params), strict=True):
            layers = layers_of_block[block]
            wanted = before[layers[pick % len(layers)]]
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
        rest = set(params) - {'stack'}
        jax.tree.map(
            np.testing.assert_array_equal, *({n: p[n] for n in rest} for p in (params, given))
        )
    _, params = build(source, given, target, 'average')
    for block, found in zip(loops, layers_of(target, params), strict=True):
        some = [before[layer] for layer in layers_of_block[block]]
        jax.tree.map(
            lambda leaf, *each: np.testing.assert_allclose(leaf, sum(each) / len(each), atol=1e-7),
            found,
            *some,
        )


@pytest.mark.parametrize('how', ['average', 'first', '0,3,2,7'])
@pytest.mark.parametrize('name', ['middle cycle', 'middle sequence'])
def test_norms_of_a_loop_are_those_of_the_layer_that_it_replaces(name, how, tiny_config):
    """Or of the layer in the list; everything else is as without norms of each loop."""
    knobs, layers_of_block = PATTERNS[name]
    own = {'model.loop_norms': 'own', 'model.loop_embeddings': 'learned', 'model.qk_norm': 'head'}
    source, target = pair(tiny_config, knobs | own, **{'model.qk_norm': 'head'})
    _, plain = pair(tiny_config, knobs | {'model.qk_norm': 'head'})
    given = random_params(source)
    before = layers_of(source, given)
    shared, params = build(source, given, target, how)
    check_convertible(shared, target)
    params, new = transfer_params(shared.model, params, target)
    assert not new and not np.asarray(params['loop_embeddings']).any()
    expected = layers_of(plain, build(source, given, plain, how)[1])
    pick = [int(layer) for layer in how.split(',')] if ',' in how else None
    for place, block in enumerate(target.model.block_order):
        found = layers_of(target, params)[place]
        layer = place if pick is None else pick[block]
        norms = {name: before[layer][name] for name in ('attention_norm', 'mlp_norm')}
        attention = expected[place]['attention'] | {
            name: before[layer]['attention'][name] for name in ('query_norm', 'key_norm')
        }
        wanted = expected[place] | norms | {'attention': attention}
        if block not in target.model.looped_range:
            wanted = expected[place]
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize('how', ['average', 'last', '0,2,5,7'])
def test_a_model_of_equal_layers_becomes_the_same_function(how, tiny_config):
    """Its parameters are equal bit for bit, its logits up to rounding."""
    source, target = pair(tiny_config, MIDDLE)
    given = random_params(source)
    given['stack'] = jax.tree.map(
        lambda leaf: jax.numpy.broadcast_to(leaf[:1], leaf.shape), given['stack']
    )
    shared, params = build(source, given, target, how)
    params, _ = transfer_params(shared.model, params, target)
    for found, wanted in zip(layers_of(target, params), layers_of(source, given), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    expected_BTV, _ = jax.jit(Transformer(source).apply)({'params': given}, TOKENS_BT)
    found_BTV, _ = jax.jit(Transformer(target).apply)({'params': params}, TOKENS_BT)
    np.testing.assert_allclose(found_BTV, expected_BTV, atol=1e-6 * np.abs(expected_BTV).max())


def test_the_blocks_of_a_list_need_no_layer_for_each_place(tiny_config):
    """A run of six layers becomes one of four blocks, of which eight run."""
    source, target = pair(tiny_config, MIDDLE, **{'model.num_layers': 6})
    given = random_params(source)
    shared, params = build(source, given, target, '0,2,3,5')
    before, after = layers_of(source, given), layers_of(shared, params)
    picked = [before[layer] for layer in (0, 2, 3, 2, 3, 2, 3, 5)]
    jax.tree.map(np.testing.assert_array_equal, after, picked)


def test_blocks_can_be_dropped(tiny_config):
    """The others stay in order, also if windows differ, and if some have experts.

    Regression: the layers with experts were those of the source.
    """
    several = {'model.num_layers': 5, 'model.windows': (0, 8, 0, 8, 0)}
    fewer = {'model.num_layers': 3, 'model.windows': (8, 0, 0)}
    source = from_config(tiny_config(**EXPERTS | several | {'model.experts.layers': '1,4'}))
    target = from_config(tiny_config(**EXPERTS | fewer | {'model.experts.layers': '0,2'}))
    given = random_params(source)
    smaller, params = build(source, given, target, '1,2,4')
    check_convertible(smaller, target)
    params, new = transfer_params(smaller.model, params, target)
    before, after = layers_of(source, given), layers_of(target, params)
    assert not new
    jax.tree.map(np.testing.assert_array_equal, after, [before[layer] for layer in (1, 2, 4)])


def test_the_words_name_the_layers():
    text = explain_layers([(0,), (1, 3)])
    assert text == 'block 0 is layer 0, block 1 the mean of layers 1, 3 of the run'


LOOPED = {'model.looped_layers': 'all', 'model.loops': 2}
REFUSED = {
    'depth': ('average', {'model.num_layers': 6}, {}, 'has 6 layers; it must have 8, as many'),
    'a word': ('mean', {}, {}, 'must be average, first, last, or 4 layers'),
    'a layer': ('0,1,2,8', {}, {}, 'from 0 to 7'),
    'too few': ('0,1,2', {}, {}, 'or 4 layers (model.num_layers) from 0 to 7'),
    'no loops': (
        'first',
        {},
        {'model.looped_layers': 'none', 'model.loops': 1},
        'set model.looped',
    ),
    'looped already': ('first', LOOPED, {}, 'must be without loops'),
    'routed': ('first', {'model.routing.router': 'norm'}, {}, 'must be dense, with depth.stream'),
    'windows': (
        'average',
        {'model.windows': (0, 8, 0, 8, 0, 8, 0, 0)},
        {'model.windows': (0, 8)},
        'block 3 cannot be layer 7 of the run: they differ in window',
    ),
    'experts': ('average', EXPERTS | {'model.num_layers': 8}, EXPERTS, 'cannot be averaged'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_shared_is_refused_in_one_line(name, tiny_config):
    how, of_source, of_target, words = REFUSED[name]
    target = from_config(tiny_config(**MIDDLE | of_target))
    source = from_config(tiny_config(**{'model.num_layers': 8} | of_source))
    with pytest.raises(ValueError, match=r'^--from_layers=[^\n]*$') as caught:
        with_layers(source, target, how)
    assert words in str(caught.value)
