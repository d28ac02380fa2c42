"""Initial parameters have the standard deviation of the knobs, and gates start near 1."""

import jax
import numpy as np
import pytest

from moddepth_jax.conversion.transfer_params import in_layer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.transformer import Transformer
from tests.model import cases

ROUTED = {'model.routing.router': 'learned'}
REORDERED = {'model.norm_placement': 'reordered', 'model.routing.layers': 'every:1'}
WIDE = {'model.d_model': 64, 'model.init_std': 0.125, 'model.embedding_init_std': 1.0}
# Without the parts that do not affect parameters, and without optimization, it compiles faster.
PLAIN = {'model.attention': 'reference', 'model.remat': 'none'}
NOT_OPTIMISED = {'xla_backend_optimization_level': 0}


def initialiser(tiny_config, **knobs):
    """Return the model, and its jitted function from a seed to parameters."""
    model = Transformer(from_config(tiny_config(**PLAIN | knobs)))

    def init(seed):
        return model.init(jax.random.key(seed), np.zeros((1, 8), int))['params']

    return model, jax.jit(init, compiler_options=NOT_OPTIMISED)


def truncated(stddev):
    """Return the standard deviation of a normal of `stddev` that is truncated at 3 sigma."""
    return stddev * 0.98658


@pytest.mark.parametrize('scale_residual_init', cases.parameters((True,), (True, False)))
def test_weights_have_the_spread_of_the_knobs(scale_residual_init, tiny_config):
    """Matrices are truncated normals. Writers to the residual have 1/sqrt(2 L) of the std."""
    knobs = {'model.num_layers': 8, 'model.d_model': 64, 'model.qk_norm': 'full'}
    knobs |= {'model.init_std': 0.05, 'model.embedding_init_std': 0.5, 'model.use_bias': True}
    knobs |= {'model.scale_residual_init': scale_residual_init}
    params = initialiser(tiny_config, **knobs)[1](0)
    block = params['stack']['run_0']['layer_0']
    attention, mlp = block['attention'], block['mlp']
    shrink = 16**-0.5 if scale_residual_init else 1
    spreads = [
        (params['embedding'], 0.5),
        (params['head']['kernel'], 0.05),
        *((attention[name]['kernel'], 0.05) for name in ('query', 'key', 'value')),
        *((mlp[name]['kernel'], 0.05) for name in ('w1', 'w3')),
        *((part['kernel'], 0.05 * shrink) for part in (attention['out'], mlp['w2'])),
    ]
    for matrix, stddev in spreads:
        matrix = np.asarray(matrix)
        layers = matrix if matrix.shape[0] == 8 else matrix[None]
        for layer in layers:
            np.testing.assert_allclose(layer.std(), truncated(stddev), rtol=0.08)
            assert abs(layer.mean()) < 0.1 * stddev
        assert 2.7 * stddev < np.abs(matrix).max() <= 3 * stddev * (1 + 1e-6)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ('scale', 'bias'):
            assert (np.asarray(leaf) == float(path[-1].key == 'scale')).all()


def test_no_two_matrices_start_alike(tiny_config):
    """Layers of a run and matrices of a layer have different draws, which the seed determines."""
    _, init = initialiser(tiny_config, **ROUTED, **{'model.num_layers': 5})
    params, same, other = init(0), init(0), init(1)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    starts = []
    for (path, leaf), other_leaf in zip(leaves, jax.tree.leaves(other), strict=True):
        if path[-1].key in ('kernel', 'w', 'embedding'):
            assert (np.asarray(leaf) != np.asarray(other_leaf)).mean() > 0.99
            layers = np.asarray(leaf if path[0].key == 'stack' else leaf[None])
            starts += [layer.flat[0] / layer.std() for layer in layers]
    assert len(np.unique(np.round(starts, 5))) == len(starts) > 40


EVERY = {'model.routing.layers': 'every:1'}
ALL = (9, 9, 9, 9)
# name: (knobs of one model, knobs of the other, parameters that both have in each of 4 layers)
PAIRS = {
    'mod': ({}, cases.ROUTED, ALL),
    'routed otherwise': (cases.ROUTED, cases.ROUTED | EVERY, (9, 14, 9, 14)),
    'straight-through': (
        cases.ROUTED,
        cases.routed_by('straight_through', 'aux_loss'),
        (9, 10, 9, 10),
    ),
    'shallow': ({}, {'model.num_layers': 2}, (9, 9, 0, 0)),
    'unrolled': (cases.ROUTED, cases.ROUTED | cases.UNROLLED, (9, 14, 9, 14)),
    'moda': ({}, cases.MODA, ALL),
    'mod and moda': (
        cases.MODA,
        cases.MODA | cases.ROUTED | cases.MASKED,
        (11, 11, 11, 9),  # nothing reads what the last layer would write
    ),
    'slots': (cases.MODA, cases.MODA | cases.OWN_SLOT | cases.POST, (11, 11, 11, 9)),
    'average stream': (cases.ROUTED, cases.AVERAGE | cases.ROUTED, (9, 14, 9, 14)),
    'dense stream': ({}, cases.DENSE, ALL),
    'value residual': (cases.ROUTED, cases.VALUES | cases.ROUTED, (9, 14, 9, 14)),
    'embedding residual': (cases.ROUTED, cases.EMBEDDED | cases.ROUTED, (9, 14, 9, 14)),
    'value embeddings': (cases.ROUTED, cases.LOOKED_UP | cases.ROUTED, (9, 14, 9, 14)),
    'value embeddings, all': (cases.LOOKED_UP, cases.ALL_LOOKED_UP | cases.ROUTED, (9, 11, 9, 11)),
    'attention residual': ({}, cases.SOURCES, ALL),
    'attention residual, routed': (cases.SOURCES, cases.SOURCES | cases.ROUTED, (13, 13, 13, 13)),
    'mudd': ({}, cases.MUDD, ALL),
    'mudd, static': (cases.MUDD, cases.STATIC_WAYS, (10, 10, 10, 10)),
    'value attention': (cases.ROUTED, cases.MIXED | cases.ROUTED, (9, 14, 9, 14)),
    'shared values': (cases.VALUES, cases.SHARED, (9, 8, 8, 8)),
    'attention stream': (cases.AVERAGE, cases.ATTENTION, ALL),
    'attention streams': (cases.ATTENTION, cases.ATTENTION | cases.ROUTED, (12, 12, 12, 12)),
    'wider': ({}, {'model.d_ff': 24}, (6, 6, 6, 6)),
    'windows': ({}, cases.WINDOWS | cases.HEAD_NORM, ALL),
    'reordered': ({}, cases.REORDERED | cases.TIED, ALL),
    'experts': ({}, cases.experts(), (6, 6, 6, 6)),
    'staged': (cases.experts(), cases.experts() | cases.ROUTED, (13, 13, 13, 13)),
    'recursions': (cases.LOOPED, cases.RECURSIONS, ALL),
}


def by_layer(hparams, params):
    """Return each parameter by its layer's number and its name there; (None, path) outside."""
    numbers, found = Stack(hparams.model, 'top_c').layer_numbers, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = tuple(key.key for key in path)
        if keys[0] != 'stack':
            found[None, keys] = np.asarray(leaf)
            continue
        place, name = in_layer(keys)
        for number, one in zip(numbers[place], np.asarray(leaf), strict=True):
            found[int(number), name] = one
    return found


@pytest.mark.parametrize('name', cases.parameters(('mod', 'moda', 'shallow'), PAIRS))
def test_models_of_one_seed_start_alike(name, tiny_config):
    """Parameters of the same layer, name and shape have the same draw, scaled by the knobs.

    The scale of matrices that write to the residual depends on the number of layers, and that of
    routers on the stream that they read and on the capacity.
    """
    *pair, num_shared = PAIRS[name]
    found = []
    for knobs in pair:
        hparams = cases.small_hparams(tiny_config, PLAIN, {'model.num_layers': 4}, knobs)
        found.append(by_layer(hparams, cases.initial_params(hparams, seed=3)))
    one, other = found
    shared = [key for key in one.keys() & other.keys() if one[key].shape == other[key].shape]
    names = [[name for layer, name in shared if layer == number] for number in range(4)]
    assert tuple(map(len, names)) == num_shared, names
    assert {(None, ('embedding',)), (None, ('final_norm', 'scale'))} <= set(shared)
    for key in shared:
        first, second = one[key], other[key]
        if key[1][0] == 'router' or name == 'shallow' and {'out', 'w2'} & {*key[1]}:
            first, second = (leaf / max(leaf.std(), 1e-9) for leaf in (first, second))
        # Two programs may round differently.
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5, err_msg=str(key))


# name: (num_layers, capacity, the other knobs)
GATES = {
    'small': (3, 0.5, {'model.d_model': 32, 'model.routing.layers': 'every:1'}),
    'deep': (12, 0.125, WIDE),
    'post': (8, 0.125, {'model.norm_placement': 'post', 'model.d_model': 64}),
    'reordered': (8, 0.125, WIDE | REORDERED),
}


@pytest.mark.parametrize('name', cases.parameters(('deep', 'post'), GATES))
def test_selected_gates_average_about_one_in_every_layer(name, tiny_config):
    """At step 0 the mean raw gate of selected tokens is between 0.5 and 2 in each layer."""
    num_layers, capacity, knobs = GATES[name]
    sizes = {'model.num_layers': num_layers, 'model.routing.capacity': capacity}
    rule = {'model.routing.causal_rule': 'dense'}
    model, init = initialiser(tiny_config, **ROUTED | sizes | rule | knobs)
    tokens_BT = np.random.default_rng(0).integers(0, 257, (8, 128))
    apply = jax.jit(model.apply, compiler_options=NOT_OPTIMISED)
    gates = []
    for seed in range(3):
        _, records = apply({'params': init(seed)}, tokens_BT)
        found = records.routing
        gates.append(np.mean(found.scores_BT, axis=(1, 2), where=found.top_c_BT))
    assert np.shape(gates) == (3, len(model.hparams.model.routed_layers))
    assert 0.5 < np.min(gates) and np.max(gates) < 2, gates
