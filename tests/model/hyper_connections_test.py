"""Hyper-connections: what they equal at first, what their matrices conserve, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.streams.hyper_connections import HyperConnection, sinkhorn
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    CONSTRAINED,
    HYPER,
    MODA,
    POST,
    STATIC,
    initial_params,
    random_like,
    random_variables,
    small_hparams,
)

TOKENS_BT = np.random.default_rng(1).integers(0, 32, (2, 8))
SEGMENTS_BT = np.array([[1] * 5 + [2] * 3, [1] * 7 + [0]])
PARTS = ('attention_connection', 'mlp_connection')


def streams(number):
    return {'model.depth.num_streams': number}


def split(params):
    """(parameters of the plain model, those of the connections), the rest of each tree None."""
    at = jax.tree_util.tree_map_with_path
    new = at(lambda path, _: any(key.key in PARTS for key in path), params)
    plain = jax.tree.map(lambda leaf, is_new: None if is_new else leaf, params, new)
    return plain, jax.tree.map(lambda leaf, is_new: leaf if is_new else None, params, new)


def loss_and_gradient(hparams, variables):
    """Logits, and the gradient by the parameters that the plain model has too, as a list."""
    weights_BTV = np.random.default_rng(7).normal(size=(*TOKENS_BT.shape, 32))

    def loss(params):
        logits_BTV, _ = Transformer(hparams).apply({'params': params}, TOKENS_BT, SEGMENTS_BT)
        return jnp.sum(jnp.tanh(logits_BTV) * weights_BTV), logits_BTV

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, logits_BTV), gradient = jax.device_get(run(variables['params']))
    return logits_BTV, split(gradient)[0]


def with_connections(hparams, params, change):
    """Variables whose connections are those of the start, changed leaf by leaf by their name."""
    start = initial_params(hparams)
    at = jax.tree_util.tree_map_with_path

    def pick(path, first, leaf):
        is_new = any(key.key in PARTS for key in path)
        return change(path[-1].key, np.float64(first)) if is_new else leaf

    return {'params': at(pick, start, params)}


@pytest.mark.parametrize(
    ('form', 'number'),
    [
        pytest.param(HYPER, 4, id='dynamic'),
        pytest.param(STATIC, 3, id='static', marks=pytest.mark.slow),
        pytest.param(HYPER, 1, id='one stream', marks=pytest.mark.slow),
        pytest.param(CONSTRAINED, 4, id='constrained', marks=pytest.mark.slow),
        pytest.param(CONSTRAINED, 1, id='constrained, one stream', marks=pytest.mark.slow),
    ],
)
def test_the_model_starts_as_the_plain_one(form, number, tiny_config):
    """Logits, and gradients of all that both have; constrained for any read and mix, no epsilon."""
    more = {'model.dtype': 'float64', 'model.norm_eps': 1e-14}
    hparams = small_hparams(tiny_config, form, streams(number), more)
    rng = np.random.default_rng(3)

    def change(name, first):
        if form is CONSTRAINED and name in ('read_bias', 'mix_bias'):
            return first + rng.normal(size=first.shape)
        return first

    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        params = random_variables(hparams, TOKENS_BT)['params']
        found, gradient = loss_and_gradient(hparams, with_connections(hparams, params, change))
        plain = small_hparams(tiny_config, more)
        given = random_variables(plain, TOKENS_BT)
        shared = dict(jax.tree_util.tree_leaves_with_path(split(params)[0]))
        at = jax.tree_util.tree_map_with_path
        given = {'params': at(lambda path, _: shared[path], given['params'])}
        expected, wanted = loss_and_gradient(plain, given)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    wanted = dict(jax.tree_util.tree_leaves_with_path(wanted))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        np.testing.assert_allclose(leaf, wanted[path], rtol=1e-7, atol=1e-9 * abs(leaf).max())


def test_sublayers_read_stream_after_stream(tiny_config):
    """The first sublayer reads stream 0, the fifth of four streams too; others read nothing."""
    (layer,) = initial_params(small_hparams(tiny_config, HYPER))['stack']['run_0'].values()
    read = np.stack([layer[part]['read_bias'] for part in PARTS], axis=1).reshape(8, 4)
    np.testing.assert_array_equal(read, np.eye(4)[np.arange(8) % 4])


def test_rows_of_a_sinkhorn_matrix_are_exact_and_its_columns_nearly():
    """Each new stream is a weighted mean of the old ones, and the mean of all is kept."""
    with jax.enable_x64(True):
        matrix = np.asarray(sinkhorn(np.random.default_rng(0).normal(size=(5, 4, 4))))
        one = np.asarray(sinkhorn(np.array([[37.0]])))
        far = np.asarray(sinkhorn(np.array([[300.0, -300.0], [0.0, 500.0]])))
    np.testing.assert_allclose(matrix.sum(axis=-1), 1, rtol=1e-14)
    np.testing.assert_allclose(matrix.sum(axis=-2), 1, rtol=1e-6)
    assert (matrix > 0).all() and np.abs(matrix - matrix.swapaxes(-1, -2)).max() > 0.1
    assert one == 1.0 and np.isfinite(far).all()
    x_SD = np.random.default_rng(1).normal(size=(4, 3))
    np.testing.assert_allclose((matrix @ x_SD).mean(axis=1), [x_SD.mean(axis=0)] * 5, atol=1e-6)


@pytest.mark.parametrize('form', [HYPER, STATIC, CONSTRAINED], ids=['dynamic', 'static', 'mhc'])
def test_weights_and_sums_are_float32_in_a_bfloat16_model(form, tiny_config):
    """What is read, and the new streams, are those of a float32 model, rounded once."""
    rng = np.random.default_rng(0)
    x_BTE, output_BTD = (
        jnp.asarray(rng.normal(size=(2, 3, width)), jnp.bfloat16) for width in (4 * 16, 16)
    )

    def run(dtype):
        module = HyperConnection(small_hparams(tiny_config, form, {'model.dtype': dtype}).model)
        x, output = x_BTE.astype(dtype), output_BTD.astype(dtype)
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, output, method='add'))
        more = jax.eval_shape(lambda: module.init(jax.random.key(0), x, None, method='read'))
        params = random_like(shapes['params'] | more['params'])
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype('float32')}
        read, add = (
            module.apply({'params': params}, x, other, method=method)
            for method, other in (('read', None), ('add', output))
        )
        assert read[0].dtype == add.dtype == dtype
        return read[0], add

    for rounded, wide in zip(run('bfloat16'), run('float32'), strict=True):
        np.testing.assert_array_equal(rounded, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ('knobs', 'message'),
    [
        (HYPER | POST, "norm_placement='post': must be pre or reordered: post norms the sum"),
        (HYPER | streams(-1), 'model.depth.num_streams=-1'),
        (MODA | streams(2), 'num_streams=2: must be 0: the moda stream has no such knob; use'),
        (HYPER | {'model.depth.hyper_form': 'mhc'}, "hyper_form='mhc': must be one of"),
        ({'model.depth.hyper_form': 'static'}, "hyper_form='static': must be auto: the residual"),
    ],
)
def test_bad_knobs_are_one_line(knobs, message, tiny_config):
    with pytest.raises(ValueError, match=r'^[^\n]*$') as error:
        small_hparams(tiny_config, knobs)
    assert message in str(error.value)
