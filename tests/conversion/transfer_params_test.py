"""A dense model's parameters find their layer in any stack that has it, bit for bit."""

import jax
import numpy as np
import pytest
from flax import traverse_util

from moddepth_jax.conversion.transfer_params import (
    check_convertible,
    keeps_adapters,
    transfer_params,
)
from moddepth_jax.hparams import from_config
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer
from tests.data.prepared_text import refusal

ROUTED = {'model.routing.router': 'learned'}
MOD = ROUTED | {'model.routing.layers': '1,2', 'model.routing.gate': 'none'}
MODA = {'model.depth.stream': 'moda'}
ADAPTERS = {'model.adapters.rank': 2}
SOURCES = {'model.depth.stream': 'attention_residual'}
MUDD = {'model.depth.stream': 'mudd'}
LOOKED_UP, ALL_LOOKED_UP = ({'model.value_embeddings': some} for some in ('alternate', 'all'))
UNROLLED = {'model.depth.stream': 'average', 'model.layer_loop': 'unrolled'}
SAME = {  # of the same parameters, with what may differ
    'mod': (ROUTED, {'model.routing.capacity': 0.5, 'model.routing.gate': 'sigmoid'}),
    'moda': (MODA, {'model.depth.slot_window': 1}),
    'adapters': (ROUTED | ADAPTERS, {'model.routing.capacity': 0.5}),
}
DENSE = {
    'windows': {'model.num_layers': 5, 'model.windows': (0, 8), 'model.norm_placement': 'post'},
    'olmo2': {
        'model.num_layers': 4,
        'model.norm_placement': 'reordered',
        'model.qk_norm': 'full',
        'model.use_bias': True,
        'model.tie_embeddings': True,
    },
    'experts': {
        'model.num_layers': 4,
        'model.experts.choice': 'token',
        'model.experts.layers': 'every:2',
        'model.experts.num_routed': 4,
        'model.experts.d_ff': 16,
    },
}


def random_params(hparams):
    tokens_BT = jax.ShapeDtypeStruct((1, 16), 'int32')
    shapes = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), tokens_BT)['params']
    draw = np.random.default_rng(0).normal
    return jax.tree.map(lambda leaf: jax.numpy.asarray(draw(0, 0.1, leaf.shape), 'float32'), shapes)


def by_layer(hparams, params):
    """Return the leaves of each layer by name, without the level of routed blocks; and others."""
    layers = []
    params = jax.tree.map(np.asarray, params)
    for kind, mine in unstack_layers(Stack(hparams.model, 'top_c'), params['stack']):
        if kind.part == 'block':
            leaves = jax.tree_util.tree_leaves_with_path(mine | mine.get('block', {}))
            names = [tuple(key.key for key in path) for path, _ in leaves]
            layers.append(
                {n: x for n, (_, x) in zip(names, leaves, strict=True) if n[0] != 'block'}
            )
    return layers, {name: leaf for name, leaf in params.items() if name != 'stack'}


def test_a_looped_model_becomes_one_of_routed_loops(tiny_config):
    """It keeps the blocks, wherever they are stored, and gets new routers."""
    looped = {'model.num_layers': 4, 'model.looped_layers': 'middle:1:1', 'model.loops': 2}
    source = from_config(tiny_config(**looped))
    target = from_config(tiny_config(**looped | ROUTED | {'model.routing.layers': 'loops'}))
    check_convertible(source, target)
    given = random_params(source)
    params, new = transfer_params(source.model, given, target)
    assert {name.split('.')[0] for name in new} == {'loop_routers'}
    (before, rest), (after, rest_after) = by_layer(source, given), by_layer(target, params)
    routers = rest_after.pop('loop_routers')
    assert routers['router']['w'].shape == (2, 32) and np.any(routers['router']['w'])
    jax.tree.map(np.testing.assert_array_equal, (before, rest), (after, rest_after))


@pytest.mark.parametrize(
    ('dense', 'changes'),
    [
        pytest.param('windows', MOD | MODA, marks=pytest.mark.slow),
        pytest.param('experts', MOD, marks=pytest.mark.slow),
        pytest.param('experts', MOD | SOURCES, marks=pytest.mark.slow),
        ('windows', MOD | LOOKED_UP),
        pytest.param('olmo2', MUDD, marks=pytest.mark.slow),
        pytest.param('olmo2', UNROLLED, marks=pytest.mark.slow),
    ],
)
def test_shared_leaves_are_transferred_bit_for_bit(dense, changes, tiny_config):
    """Every leaf of the dense model is in the new one, and exactly the new leaves are listed."""
    source = from_config(tiny_config(**DENSE[dense]))
    target = from_config(tiny_config(**DENSE[dense] | changes))
    check_convertible(source, target)
    given = random_params(source)
    params, new = transfer_params(source.model, given, target)
    (before, rest), (after, rest_after) = by_layer(source, given), by_layer(target, params)
    jax.tree.map(np.testing.assert_array_equal, rest, rest_after)
    assert len(before) == len(after) == source.model.num_layers
    pairs = list(zip(before, after, strict=True))
    for old, layer in pairs:
        for name, leaf in old.items():
            np.testing.assert_array_equal(leaf, layer[name], err_msg=str(name))
    fresh = [name for old, layer in pairs for name in layer.keys() - old.keys()]
    kinds = {'router', 'predictor', 'stream', 'attention_connection', 'mlp_connection'}
    kinds.add('value_embedding')
    assert all(kinds & {*name} for name in fresh)
    assert any('router' in name for name in fresh) == ('model.routing.router' in changes)
    assert new and all(kinds & set(name.split('.')) for name in new)
    shapes = jax.eval_shape(Transformer(target).init, jax.random.key(0), np.zeros((1, 16), int))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes['params'])


@pytest.mark.parametrize('kind', SAME)
def test_a_model_with_the_same_parameters_gets_all_of_them(kind, tiny_config):
    knobs, changes = SAME[kind]
    source, target = (from_config(tiny_config(**each)) for each in (knobs, knobs | changes))
    check_convertible(source, target)
    given = random_params(source)
    params, new = transfer_params(source.model, given, target)
    jax.tree.map(np.testing.assert_array_equal, given, params)
    assert not new


@pytest.mark.parametrize(
    'changes', [{}, pytest.param(MOD, marks=pytest.mark.slow)], ids=['dense', 'routed']
)
def test_new_adapters_add_nothing(changes, tiny_config):
    """Other leaves are as in a conversion without adapters; each adapter is listed as new."""
    source = from_config(tiny_config(**DENSE['olmo2']))
    target = from_config(tiny_config(**DENSE['olmo2'] | changes | ADAPTERS))
    check_convertible(source, target)
    given = random_params(source)
    params, new = transfer_params(source.model, given, target)
    plain, others = transfer_params(source.model, given, target.without_adapters)
    params, plain = (traverse_util.flatten_dict(side, sep='.') for side in (params, plain))
    for name, leaf in plain.items():
        np.testing.assert_array_equal(leaf, params[name])
    assert set(new) - set(others) == params.keys() - plain.keys()
    added = {name for name in new if '.adapter.' in name}
    matrices = {name for name in plain if name.endswith('.kernel') and '.predictor.' not in name}
    assert len(added) == 2 * sum(name.startswith('stack.') for name in matrices)
    assert all(np.any(params[name]) == name.endswith('.a') for name in added)


def test_adapters_are_kept_if_all_parameters_are(tiny_config):
    """For another rank, other matrices or a new router, the old ones are merged first."""
    source, same, rank, routed, some = (
        from_config(tiny_config(**ADAPTERS | changes))
        for changes in (
            {},
            {'optimizer.learning_rate': 1e-4},
            {'model.adapters.rank': 3},
            ROUTED,
            {'model.adapters.params': ('*/mlp/*',)},
        )
    )
    assert keeps_adapters(source, same)
    for target in (rank, routed, some, source.without_adapters):
        assert not keeps_adapters(source, target)
        check_convertible(source.without_adapters, target)


def test_capacity_one_without_a_gate_is_the_dense_model(tiny_config):
    """The logits of both models are equal to the last bits of a float32."""
    source = from_config(tiny_config(**DENSE['olmo2']))
    target = from_config(tiny_config(**DENSE['olmo2'] | MOD | {'model.routing.capacity': 1.0}))
    given = random_params(source)
    params, _ = transfer_params(source.model, given, target)
    tokens_BT = np.random.default_rng(1).integers(0, 257, (2, 16))
    dense_BTV, _ = jax.jit(Transformer(source).apply)({'params': given}, tokens_BT)
    routed_BTV, _ = jax.jit(Transformer(target).apply)({'params': params}, tokens_BT)
    np.testing.assert_allclose(routed_BTV, dense_BTV, atol=1e-5 * np.abs(dense_BTV).max())


def test_backends_losses_and_exits_may_differ(tiny_config):
    """Regression: those of experts and loops were refused, though no parameter depends on them."""
    experts = {'model.experts.choice': 'token'}
    looped = {'model.looped_layers': 'all', 'model.loops': 2}
    others = {'model.experts.product': 'batched', 'model.experts.balance_weight': 0.5}
    others |= {'model.experts.z_loss': 0.1, 'model.experts.threshold_decay': 0.5}
    for before, after in ((experts, others), (looped, {'model.loop_exit_threshold': 0.1})):
        source, target = (from_config(tiny_config(**each)) for each in (before, before | after))
        check_convertible(source, target)


@pytest.mark.parametrize(
    ('before', 'after', 'words'),
    [
        (ROUTED, {}, "model.routing.router='none' (was 'learned')"),
        (ROUTED, ROUTED | {'model.d_model': 64}, 'model.d_model=64 (was 32): only a run with ro'),
        (MODA, {}, 'the run that is converted has router none and stream moda'),
        ({}, {'model.d_ff': 96}, 'model.d_ff=96: is 64 in the run that is converted'),
        ({}, {'model.windows': (8,)}, 'model.windows=(8,): is (0,)'),
        (ALL_LOOKED_UP, LOOKED_UP, "model.value_embeddings='alternate': is 'all'"),
        (LOOKED_UP, {}, "model.value_embeddings='none': is 'alternate'"),
        ({'model.embedding_residual': 'learned'}, {}, "embedding_residual='none': is 'learned'"),
        ({}, {'model.experts.choice': 'token'}, "model.experts.choice='token': is 'none'"),
        ({}, {'model.experts.row_capacity': 8}, 'model.experts.row_capacity=8: is 0'),
    ],
    ids=str,
)
def test_what_cannot_be_converted_is_refused_by_name(before, after, words, tiny_config):
    source, target = (from_config(tiny_config(**changes)) for changes in (before, after))
    assert words in refusal(check_convertible, source, target)
