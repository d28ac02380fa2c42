"""Manifold-constrained hyper-connections: their matrices for any logits, and their start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.streams.hyper_connections import sinkhorn
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    REORDERED,
    ROUTED,
    TOKENS_BT,
    random_variables,
    small_hparams,
)

CONSTRAINED = {'model.depth.stream': 'hyper_connections', 'model.depth.hyper_form': 'constrained'}


def spread(size):
    return size * np.random.default_rng(0).normal(size=(5, 4, 4)).astype(np.float32)


def test_sinkhorn_is_exp_then_columns_and_rows_in_turn():
    """20 times each, the rows last, by the formula in float64."""
    expected = np.exp(np.float64(spread(3)))
    for _ in range(20):
        expected /= expected.sum(axis=-2, keepdims=True)
        expected /= expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(sinkhorn(jnp.asarray(spread(3))), expected, atol=2e-6)


@pytest.mark.parametrize('size', [30, 100, 1000])
def test_sinkhorn_has_finite_gradients_for_any_logits(size):
    """float32 has no exp of -104 and less, so that sums of exps are 0."""
    weights = np.random.default_rng(1).normal(size=(5, 4, 4))

    def loss(logits):
        return jnp.sum(sinkhorn(logits) * weights)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(spread(size)))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    np.testing.assert_allclose(sinkhorn(jnp.asarray(spread(size))).sum(axis=-1), 1, rtol=1e-6)


FORMS = {'pre': {}, 'reordered': REORDERED, 'routed': ROUTED}


@pytest.mark.slow
@pytest.mark.parametrize('form', FORMS)
def test_the_model_starts_as_the_plain_one_whatever_reads_the_streams(form, tiny_config):
    """A pre-norm drops the sum of the weights that are read, a router and `reordered` do not."""
    plain = small_hparams(tiny_config, FORMS[form])
    hparams = small_hparams(tiny_config, FORMS[form], CONSTRAINED)
    given = random_variables(plain, TOKENS_BT)['params']
    old = dict(jax.tree_util.tree_leaves_with_path(given))
    start = Transformer(hparams).init(jax.random.key(0), TOKENS_BT)['params']
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(start))
    at = jax.tree_util.tree_map_with_path
    params = at(lambda path, leaf: old.get(path, leaf), start)
    with jax.numpy_rank_promotion('allow'):
        found, _ = Transformer(hparams).apply({'params': params}, TOKENS_BT)
        expected, _ = Transformer(plain).apply({'params': given}, TOKENS_BT)
    np.testing.assert_allclose(found, expected, atol=1e-4)
