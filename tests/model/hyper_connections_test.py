"""Hyper-connections: initial values, what their matrices conserve, and precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.streams.hyper_connections import HyperConnection, sinkhorn
from tests.model.cases import (
    CONSTRAINED,
    HYPER,
    STATIC,
    initial_params,
    random_like,
    small_hparams,
)

TOKENS_BT = np.random.default_rng(1).integers(0, 32, (2, 8))
SEGMENTS_BT = np.array([[1] * 5 + [2] * 3, [1] * 7 + [0]])
PARTS = ('attention_connection', 'mlp_connection')


def streams(number):
    return {'model.depth.num_streams': number}


def test_sublayers_read_stream_after_stream(tiny_config):
    """The first and the fifth sublayer read only stream 0 of four."""
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


def spread(size):
    return size * np.random.default_rng(0).normal(size=(5, 4, 4)).astype(np.float32)


def test_sinkhorn_is_exp_then_columns_and_rows_in_turn():
    """20 times each, with rows last, by the formula in float64."""
    expected = np.exp(np.float64(spread(3)))
    for _ in range(20):
        expected /= expected.sum(axis=-2, keepdims=True)
        expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(sinkhorn(jnp.asarray(spread(3))), expected, atol=2e-6)


@pytest.mark.parametrize('size', [30, 100, 1000])
def test_sinkhorn_has_finite_gradients_for_any_logits(size):
    """In float32, exp(-104) and less is 0, so that sums of exps would be 0."""
    weights = np.random.default_rng(1).normal(size=(5, 4, 4))

    def loss(logits):
        return jnp.sum(sinkhorn(logits) * weights)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(spread(size)))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    np.testing.assert_allclose(sinkhorn(jnp.asarray(spread(size))).sum(axis=-1), 1, rtol=1e-6)


def test_constrained_mixtures_keep_the_mean_and_equal_streams(tiny_config):
    """With an output of 0, for random parameters and tokens, in float64.

    With far logits, 20 steps make rows sum to 1 but not columns. Streams stay equal nevertheless.
    """
    x_BTE = np.random.default_rng(0).normal(size=(2, 3, 4 * 16))
    zeros_BTD = np.zeros((2, 3, 16))
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        hparams = small_hparams(tiny_config, CONSTRAINED, {'model.dtype': 'float64'}).model
        module = HyperConnection(hparams)
        init = functools.partial(module.init, method='add')
        shapes = jax.eval_shape(init, jax.random.key(0), x_BTE, zeros_BTD)['params']
        params = random_like(shapes, dtype='float64')

        @jax.jit
        def mixed(x_BTE, distance):
            far = params | {'mix_bias': distance * params['mix_bias']}
            return module.apply({'params': far}, x_BTE, zeros_BTD, method='add')

        equal_BTE = np.tile(x_BTE[..., :16], 4)
        near_BTE, far_BTE, kept_BTE = jax.device_get(
            (mixed(x_BTE, 1.0), mixed(x_BTE, 40.0), mixed(equal_BTE, 40.0))
        )

    def mean(x_BTE):
        return x_BTE.reshape(2, 3, 4, 16).mean(axis=2)

    assert np.abs(near_BTE - x_BTE).max() > 1
    np.testing.assert_allclose(mean(near_BTE), mean(x_BTE), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kept_BTE, equal_BTE, rtol=1e-12, atol=1e-12)
    assert np.abs(mean(far_BTE) - mean(x_BTE)).max() > 1e-3


@pytest.mark.parametrize('form', [HYPER, STATIC, CONSTRAINED], ids=['dynamic', 'static', 'mhc'])
def test_weights_and_sums_are_float32_in_a_bfloat16_model(form, tiny_config):
    """The input of a sublayer and the new streams equal those of a float32 model, rounded once."""
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
