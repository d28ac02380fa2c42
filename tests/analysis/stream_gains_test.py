"""Gains of products of mixtures: those of a product by hand, and of doubly stochastic matrices."""

import jax
import numpy as np
import pytest

from moddepth_jax.analysis.stream_gains import stream_gains
from tests.model.cases import (
    CONSTRAINED,
    HYPER,
    MODA,
    ROUTED,
    STATIC,
    random_variables,
    small_hparams,
)

TOKENS_BT = np.random.default_rng(1).integers(0, 32, (2, 8))
BATCH = {'tokens_BT': TOKENS_BT, 'segment_ids_BT': np.ones_like(TOKENS_BT)}
TWO = {'model.num_layers': 2}


def test_gains_are_sums_of_the_product_by_hand(tiny_config):
    """Rows of a static A_r are the old streams; later sublayers multiply from the left."""
    hparams = small_hparams(tiny_config, STATIC, TWO)
    variables = random_variables(hparams, TOKENS_BT)
    (run,) = variables['params']['stack'].values()
    mixtures = [
        run['layer_0'][f'{part}_connection']['mix_bias'][block]
        for block in range(2)
        for part in ('attention', 'mlp')
    ]
    last = (mixtures[2] @ mixtures[3]).T  # new, old
    both = (mixtures[0] @ mixtures[1] @ mixtures[2] @ mixtures[3]).T
    found = stream_gains(variables, hparams, BATCH, 'dense')
    for axis, gains_L in ((1, found.forward_L), (0, found.backward_L)):
        expected = [np.abs(product.sum(axis)).max() for product in (both, last)]
        np.testing.assert_allclose(gains_L, expected, rtol=1e-5)
    assert np.abs(np.log(found.forward_L / found.backward_L)).min() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize('form', [CONSTRAINED, HYPER])
def test_gains_of_constrained_mixtures_are_1(form, tiny_config):
    """Backward as far as the columns converge; others amplify. Padding does not count."""
    hparams = small_hparams(tiny_config, form, TWO)
    variables = random_variables(hparams, TOKENS_BT)
    found = stream_gains(variables, hparams, BATCH, 'dense')
    if form == CONSTRAINED:
        np.testing.assert_allclose(found.forward_L, 1, rtol=1e-5)
        np.testing.assert_allclose(found.backward_L, 1, rtol=1e-3)
    else:
        assert np.abs(np.log([*found.forward_L, *found.backward_L])).max() > 0.1
    tokens_BT = np.concatenate([TOKENS_BT, TOKENS_BT], axis=1)
    segment_ids_BT = np.where(np.arange(tokens_BT.shape[1]) < TOKENS_BT.shape[1], 1, 0)
    padded = {'tokens_BT': tokens_BT, 'segment_ids_BT': segment_ids_BT + 0 * tokens_BT}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        stream_gains(variables, hparams, padded, 'dense'),
        found,
    )


@pytest.mark.parametrize('knobs', [MODA, HYPER | ROUTED])
def test_models_without_mixtures_of_every_token_are_refused(knobs, tiny_config):
    hparams = small_hparams(tiny_config, knobs)
    with pytest.raises(ValueError, match=r'^model.depth.stream=.*: must be hyper_con[^\n]*$'):
        stream_gains({}, hparams, BATCH, 'dense')
