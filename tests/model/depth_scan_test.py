"""Scanned layers with one buffer of slots are the unrolled ones, and cost no program size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import ATTENTION, MODA, ROUTED, compiled, random_variables, small_hparams

BATCH, LENGTH, VOCABULARY = 2, 12, 32
ENTRY_QUERY = "['run_0']['layer_0']['stream']['query']['kernel']"
MASKED = {'model.depth.skipped_slots': 'masked'}
OWN_SLOT = {'model.depth.attention_slot_projection': True}
UNROTATED = {'model.depth.slot_keys': 'unrotated'}
BLOCK_SLOT, ATTENTION_SLOT = ({'model.depth.slots': slots} for slots in ('block', 'attention'))
HEAD, FULL = ({'model.qk_norm': norm} for norm in ('head', 'full'))
POST, REORDERED = ({'model.norm_placement': place} for place in ('post', 'reordered'))


def newest(slots):
    return {'model.depth.slot_window': slots}


# name: (what the model is, its rematerialisations)
CASES = {
    'projected': (MODA | ROUTED | HEAD | UNROTATED, ('block',)),
    'masked': (MODA | ROUTED | MASKED | OWN_SLOT | FULL | REORDERED, ('none',)),
    'attention stream': (ATTENTION | ROUTED | newest(3), ('none',)),
}
FLOAT32 = (MODA | BLOCK_SLOT | POST | newest(2), ('block',))
SLOW_CASES = {
    'block slots': FLOAT32,
    'projected': (CASES['projected'][0], ('none',)),
    'masked': (CASES['masked'][0], ('block',)),
    'dense model': (HEAD | {'model.windows': (3, 0)}, ('block', 'none')),
    'mod': (ROUTED | POST, ('block', 'none')),
    'moda': (MODA, ('block', 'none')),
    'windows': (MODA | ATTENTION_SLOT | {'model.windows': (3, 0)} | FULL, ('block', 'none')),
    'post': (MODA | ROUTED | POST, ('block', 'none')),
    'reordered': (MODA | ROUTED | REORDERED | UNROTATED | FULL, ('block', 'none')),
    'masked blocks': (MODA | ROUTED | MASKED | BLOCK_SLOT | newest(1), ('block', 'none')),
    'attention stream dense': (ATTENTION | HEAD, ('block', 'none')),
    'seven layers': (MODA | ROUTED | {'model.num_layers': 7}, ('block', 'none')),
}


def loss_and_gradient(hparams, variables, tokens_BT):
    """Of a loss on the logits and on every number of the records, compiled and run."""
    model, rng = Transformer(hparams), np.random.default_rng(7)
    segments_BT = np.array([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2])
    weights_BTV = rng.normal(size=(BATCH, LENGTH, VOCABULARY)).astype(hparams.model.dtype)
    weights_3BT = weights_BTV[:, :, :3].transpose(2, 0, 1)

    def loss(params):
        logits_BTV, records = model.apply(variables | {'params': params}, tokens_BT, segments_BT)
        total = jnp.mean(logits_BTV * weights_BTV)
        if records is not None:
            leaves = (
                records.routing.scores_BT,
                records.routing.rule_logits_BT,
                records.routing.gates_BT,
            )
            for leaf_RBT, weights_BT in zip(leaves, weights_3BT, strict=True):
                total += jnp.mean(jnp.tanh(leaf_RBT) * weights_BT[None])
        return total

    return compiled(jax.value_and_grad(loss), variables['params'])(variables['params'])


def check(make_config, knobs, remats, dtype, tolerance):
    rng = np.random.default_rng(1)
    tokens_BT = rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    shape = {'model.num_layers': 5, 'model.dtype': dtype}
    plain = {'model.layer_loop': 'unrolled', 'model.remat': 'none'}
    hparams = small_hparams(make_config, shape, knobs, plain)
    variables = random_variables(hparams, tokens_BT)
    expected, gradient = loss_and_gradient(hparams, variables, tokens_BT)
    for remat in remats:
        hparams = small_hparams(make_config, shape, knobs, {'model.remat': remat})
        found, mine = loss_and_gradient(hparams, variables, tokens_BT)
        np.testing.assert_allclose(found, expected, rtol=tolerance)
        leaves = jax.tree_util.tree_leaves_with_path(gradient)
        for (path, leaf), other in zip(leaves, jax.tree.leaves(mine), strict=True):
            largest, where = np.abs(leaf).max(), f'{remat} {jax.tree_util.keystr(path)}'
            # The first query of the attention stream finds one slot, whose weight is 1.
            if hparams.model.depth.stream == 'attention' and where.endswith(ENTRY_QUERY):
                assert np.abs(other).max() < tolerance
                continue
            assert largest > 1e-7 and leaf.dtype == other.dtype, where
            assert np.abs(leaf - other).max() <= tolerance * largest, where


@pytest.mark.parametrize(
    'name',
    [name if name == 'projected' else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_scanned_equals_unrolled(name, tiny_config):
    """Loss and all gradients, for a loss on logits and records, packing and padding: float64."""
    with jax.enable_x64(True):
        check(tiny_config, *CASES[name], 'float64', 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize('name', SLOW_CASES)
def test_scanned_equals_unrolled_in_every_placement(name, tiny_config):
    """As above, for the other streams, norm placements and write modes."""
    with jax.enable_x64(True):
        check(tiny_config, *SLOW_CASES[name], 'float64', 1e-9)


def test_scanned_equals_unrolled_in_float32(tiny_config):
    """As above, to 1e-5 of each array's largest gradient."""
    check(tiny_config, *FLOAT32, 'float32', 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES | SLOW_CASES)
def test_scanned_equals_unrolled_in_float32_too(name, tiny_config):
    """Every case above as well."""
    check(tiny_config, *(CASES | SLOW_CASES)[name], 'float32', 1e-5)


@pytest.mark.parametrize(
    ('dtype', 'remat'),
    [
        ('float32', 'block'),
        pytest.param('float32', 'none', marks=pytest.mark.slow),
        pytest.param('model', 'block', marks=pytest.mark.slow),
    ],
)
def test_gradients_of_bfloat16_slots(dtype, remat, tiny_config):
    """With sums of the slots' dtype or another, every one is near that of the unrolled layers."""
    tokens_BT = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    shape = MODA | ROUTED | MASKED | {'model.num_layers': 4, 'model.routing.router': 'position'}
    shape |= {'model.dtype': 'bfloat16', 'model.remat': remat}
    unrolled = small_hparams(tiny_config, shape, {'model.layer_loop': 'unrolled'})
    variables = random_variables(unrolled, tokens_BT)
    _, gradient = loss_and_gradient(unrolled, variables, tokens_BT)
    scanned = small_hparams(tiny_config, shape, {'model.depth.gradient_dtype': dtype})
    _, mine = loss_and_gradient(scanned, variables, tokens_BT)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(mine), strict=True):
        error = np.linalg.norm(leaf - other) / np.linalg.norm(leaf)
        assert error < 0.03, (jax.tree_util.keystr(path), error)


def equations(jaxpr):
    """Equations of a jaxpr and of every one inside it."""
    total = len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(value, 'eqns'):
                total += equations(getattr(value, 'jaxpr', value))
    return total


@pytest.mark.parametrize(
    ('remat', 'stream'),
    [
        ('block', 'moda'),
        pytest.param('none', 'moda', marks=pytest.mark.slow),
        pytest.param('block', 'residual', marks=pytest.mark.slow),
        pytest.param('none', 'residual', marks=pytest.mark.slow),
    ],
)
def test_program_does_not_grow_with_depth(remat, stream, tiny_config):
    """The gradient of a scanned model has as many equations at 24 layers as at 6."""

    def count(num_layers, loop):
        knobs = {'model.num_layers': num_layers, 'model.layer_loop': loop, 'model.remat': remat}
        knobs |= {'model.depth.stream': stream, 'model.routing.router': 'learned'}
        model = Transformer(from_config(tiny_config(**knobs)))
        tokens_BT = jnp.zeros((1, 16), jnp.int32)

        def loss(params):
            return jnp.sum(model.apply({'params': params}, tokens_BT)[0])

        params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)['params']
        return equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)

    assert count(6, 'scan') == count(24, 'scan')
    if stream == 'residual':
        assert count(6, 'unrolled') > 2 * count(6, 'scan')


@pytest.mark.parametrize('stream', ['residual', 'moda'])
def test_initialisation_does_not_grow_with_depth(stream, tiny_config):
    """Drawing the parameters of 24 layers takes as many equations as of 6."""

    def count(num_layers):
        knobs = {'model.num_layers': num_layers, 'model.routing.router': 'learned'}
        knobs['model.depth.stream'] = stream
        model = Transformer(from_config(tiny_config(**knobs)))
        tokens_BT = jnp.zeros((1, 16), jnp.int32)
        return equations(jax.make_jaxpr(model.init)(jax.random.key(0), tokens_BT).jaxpr)

    assert count(6) == count(24)
