"""Initial parameters have the spread that the knobs name, and gates that start near 1."""

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

ROUTED = {'model.routing.router': 'learned'}
REORDERED = {'model.norm_placement': 'reordered', 'model.routing.layers': 'every:1'}
WIDE = {'model.d_model': 64, 'model.init_std': 0.125, 'model.embedding_init_std': 1.0}
# What says nothing of parameters is left out, and so is optimisation: it compiles far sooner.
PLAIN = {'model.attention': 'reference', 'model.remat': 'none'}
NOT_OPTIMISED = {'xla_backend_optimization_level': 0}


def initialiser(tiny_config, **knobs):
    """The model, and its jitted seed -> parameters."""
    model = Transformer(from_config(tiny_config(**PLAIN | knobs)))

    def init(seed):
        return model.init(jax.random.key(seed), np.zeros((1, 8), int))['params']

    return model, jax.jit(init, compiler_options=NOT_OPTIMISED)


def truncated(stddev):
    """Standard deviation of a normal of `stddev` once truncated at 3 sigma."""
    return stddev * 0.98658


@pytest.mark.parametrize('scale_residual_init', [True, False])
def test_weights_have_the_spread_of_the_knobs(scale_residual_init, tiny_config):
    """Matrices are normal, cut at 3 sigma; those that write to the residual 1/sqrt(2 L) of that."""
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
            np.testing.assert_allclose(layer.std(), truncated(stddev), rtol=0.05)
            assert abs(layer.mean()) < 0.1 * stddev
        assert 2.7 * stddev < np.abs(matrix).max() <= 3 * stddev * (1 + 1e-6)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ('scale', 'bias'):
            assert (np.asarray(leaf) == float(path[-1].key == 'scale')).all()


def test_no_two_matrices_start_alike(tiny_config):
    """Layers of a scanned run, and matrices of a layer, are drawn apart; the seed decides them."""
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


# name: (num_layers, capacity, the other knobs)
GATES = {
    'small': (3, 0.5, {'model.d_model': 32, 'model.routing.layers': 'every:1'}),
    'deep': (12, 0.125, WIDE),
    'post': (8, 0.125, {'model.norm_placement': 'post', 'model.d_model': 64}),
    'reordered': (8, 0.125, WIDE | REORDERED),
}


@pytest.mark.parametrize('name', GATES)
def test_selected_gates_average_about_one_in_every_layer(name, tiny_config):
    """At step 0 the mean raw gate of the selected tokens lies between 0.5 and 2, layer by layer."""
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
