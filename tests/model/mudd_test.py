"""MUDD connections: initial values, which outputs they read, gradients and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.conversion.transfer_params import transfer_params
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams.mudd import Mudd, mix_outputs, weights_of_slots
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    AVERAGE,
    MUDD,
    SMALL_BT,
    STATIC_WAYS,
    by_name,
    gradient,
    initial_params,
    parameters,
    random_variables,
    small_hparams,
)

EXACT = {'model.dtype': 'float64'}
ONE_WAY = {'model.depth.mudd_ways': 'one'}


def weights_by_layer(hparams, params):
    """Return the parameters of every read, from the first block to the final norm."""
    layers = unstack_layers(Stack(hparams.model, 'top_c'), params['stack'])
    return [layer['stream'] for kind, layer in layers if kind.part != 'entry']


def test_weights_start_as_said(tiny_config):
    """W_1 is normal with variance 1/D, W_2 is 0, and a is 1 on the newest output."""
    hparams = small_hparams(tiny_config, MUDD, {'model.d_model': 256, 'model.num_heads': 4})
    reads = weights_by_layer(hparams, initial_params(hparams))
    assert [read['bias'].shape for read in reads] == [(4, 5)] * 4 + [(1, 5)]
    for read in reads:
        np.testing.assert_array_equal(read['bias'], np.eye(5)[[0] * len(read['bias'])])
        assert read['inner'].shape == (256, 20) and not np.any(read['outer'])
        np.testing.assert_allclose(np.std(read['inner']), 1 / 16, rtol=0.05)
    assert np.any(reads[0]['inner'] != reads[1]['inner'])


def test_one_static_way_is_the_average_of_the_same_numbers(tiny_config):
    """Logits and all gradients are equal. `average` counts from the oldest output."""
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        average = small_hparams(tiny_config, EXACT, AVERAGE)
        mudd = small_hparams(tiny_config, EXACT, STATIC_WAYS, ONE_WAY)
        given = random_variables(average, SMALL_BT)['params']
        params, _ = transfer_params(average.model, given, mudd)
        params = jax.tree.map(np.float64, params)
        weights = [read['weights'] for read in weights_by_layer(average, given)]
        by_age = np.zeros((5, 1, 5))
        for layer, of_layer in enumerate(weights):
            by_age[layer, 0, : layer + 1] = of_layer[::-1]
        params['stack']['run_1']['layer_0']['stream']['bias'] = by_age[:4]
        params['stack']['run_2']['layer_0']['stream']['bias'] = by_age[4:]
        expected_BTV, expected = gradient(average, {'params': given})
        logits_BTV, slopes = gradient(mudd, {'params': params})
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-11, atol=1e-11)
    reads = weights_by_layer(mudd, slopes), weights_by_layer(average, expected)
    for layer, (one, other) in enumerate(zip(*reads, strict=True)):
        np.testing.assert_allclose(one['bias'][0, layer::-1], other['weights'], rtol=1e-9)
        assert not np.any(one['bias'][0, layer + 1 :])
    slopes, expected = by_name(mudd, slopes), by_name(average, expected)
    for key in (key for key in expected if 'stream' not in key[1]):
        np.testing.assert_allclose(slopes[key], expected[key], rtol=1e-9, atol=1e-12)


def test_weights_of_ages_are_those_of_slots():
    """The newest slot has age 0, and unwritten slots have weight 0."""
    by_age = np.array([[10.0, 20, 30, 40], [1, 2, 3, 4]])
    found = weights_of_slots(by_age, 3, 4)
    np.testing.assert_array_equal(found, [[30, 20, 10, 0], [3, 2, 1, 0]])
    np.testing.assert_array_equal(weights_of_slots(by_age[0], 4, 4), by_age[0, ::-1])
    np.testing.assert_array_equal(weights_of_slots(by_age[0], jnp.int32(1), 4), [10, 0, 0, 0])
    np.testing.assert_array_equal(weights_of_slots(by_age[0], 2, 2), [20, 10])


@pytest.mark.parametrize('loop', parameters(('scan',), ('scan', 'unrolled')))
def test_padded_sources_have_no_weight_and_no_gradient(loop, tiny_config):
    """A layer uses only the ages of a and W_2 that exist. Others change no bit and do not learn."""
    hparams = small_hparams(tiny_config, MUDD, {'model.layer_loop': loop})
    params = random_variables(hparams, SMALL_BT)['params']
    logits_BTV, slopes = gradient(hparams, {'params': params})
    for layer, read in enumerate(weights_by_layer(hparams, slopes)):
        for leaf in (read['bias'], read['outer']):
            assert (leaf[..., : layer + 1] != 0).all() and not np.any(leaf[..., layer + 1 :])

    def change(path, leaf):
        if path[-1].key not in ('bias', 'outer'):
            return leaf
        leaf = np.array(leaf)
        if path[1].key == 'run_1':
            for layer in range(len(leaf)):
                leaf[layer, ..., layer + 1 :] = 9
        return leaf

    changed = jax.tree_util.tree_map_with_path(change, params)
    other_BTV, _ = gradient(hparams, {'params': changed})
    np.testing.assert_array_equal(logits_BTV, other_BTV)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('static', [False, True])
def test_outputs_are_summed_in_float32(static, dtype):
    """So are their gradients, for any dtype of the slots, with and without `sums`."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 4) if static else (2, 5, 3, 4)).astype(np.float32)
    slots = jnp.asarray(rng.normal(size=(4, 2, 5, 8)), dtype)
    wide = np.asarray(slots, np.float64)
    of_token = np.broadcast_to(weights, (2, 5, 3, 4))

    def mix(weights, depth):
        return mix_outputs(weights, depth)[0]

    found, vjp = jax.vjp(mix, weights, DepthSlots(slots, sums=np.zeros(slots.shape, 'f4')))
    expected = np.zeros((3, 2, 5, 8))
    dx = rng.normal(size=expected.shape).astype(np.float32)
    dslots, dweights = np.zeros(wide.shape), np.zeros(of_token.shape)
    for b, t, c, i in np.ndindex(*of_token.shape):
        expected[c, b, t] += of_token[b, t, c, i] * wide[i, b, t]
        dslots[i, b, t] += of_token[b, t, c, i] * dx[c, b, t]
        dweights[b, t, c, i] += wide[i, b, t] @ dx[c, b, t]
    assert found.dtype == 'float32'
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    got, depth = vjp(dx)
    assert depth.sums.dtype == 'float32' and not np.any(depth.slots)
    np.testing.assert_allclose(depth.sums, dslots, rtol=1e-5, atol=1e-5)
    dweights = dweights.sum(axis=(0, 1)) if static else dweights
    np.testing.assert_allclose(got, dweights, rtol=1e-4, atol=1e-4)
    _, vjp = jax.vjp(mix, weights, DepthSlots(slots))
    of_slots = vjp(dx)[1].slots
    assert of_slots.dtype == dtype
    np.testing.assert_array_equal(of_slots, depth.sums.astype(dtype))


def test_readers_have_the_ways_that_are_named(tiny_config):
    """a has one row for each reader with its own way, and one for all others."""
    sizes, known = {}, Mudd.choices['mudd_ways']
    for ways in known:
        hparams = small_hparams(tiny_config, STATIC_WAYS, {'model.depth.mudd_ways': ways})
        shapes = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), SMALL_BT)
        sizes[ways] = [len(read['bias']) for read in weights_by_layer(hparams, _zeros(shapes))]
    rows = {'qkvr': 4, 'one': 1} | {ways: len(ways) + 1 for ways in known if len(ways) < 3}
    assert sizes == {ways: [rows[ways]] * 4 + [1] for ways in known}
    assert len(known) == 12


def _zeros(shapes):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes['params'])
