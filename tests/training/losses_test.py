"""Losses equal their definitions in float64, and count exactly the tokens that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.routing import RoutingRecord, indices_to_mask, select_top_c
from moddepth_jax.training import losses


def record(selected_LBT, top_c_LBT, rule_logits_LBT, scores_LBT=None, refused_LBT=0, gates_LBT=0):
    shape = np.shape(top_c_LBT)
    scores_LBT = np.zeros(shape) if scores_LBT is None else scores_LBT
    return RoutingRecord(
        scores_BT=jnp.asarray(scores_LBT, jnp.float32),
        rule_logits_BT=jnp.asarray(rule_logits_LBT, jnp.float32),
        top_c_BT=jnp.asarray(top_c_LBT, bool),
        selected_BT=jnp.asarray(selected_LBT, bool),
        dropped_BT=jnp.broadcast_to(jnp.asarray(refused_LBT, bool), shape),
        gates_BT=jnp.broadcast_to(jnp.asarray(gates_LBT, jnp.float32), shape),
    )


def binary_cross_entropy(logits, targets):
    chance = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    return -np.where(targets, np.log(chance), np.log1p(-chance))


def test_rule_loss_is_the_mean_over_layers_and_real_tokens():
    """It equals the float64 sum by hand; what stands at padding changes nothing."""
    random = np.random.default_rng(1)
    logits_LBT = random.normal(size=(2, 3, 5), scale=3).astype(np.float32)
    targets_LBT = random.random((2, 3, 5)) < 0.4
    real_BT = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    per_token_LBT = binary_cross_entropy(logits_LBT, targets_LBT)
    expected = per_token_LBT[:, real_BT].mean()
    assert abs(expected - per_token_LBT.mean()) > 0.01
    loss, slope_LBT = jax.value_and_grad(losses.rule_loss)(logits_LBT, targets_LBT, real_BT)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(slope_LBT != 0, np.broadcast_to(real_BT, (2, 3, 5)))
    spoilt_LBT = np.where(real_BT, logits_LBT, 1e4)
    spoilt_targets_LBT = np.where(real_BT, targets_LBT, ~targets_LBT)
    assert losses.rule_loss(spoilt_LBT, spoilt_targets_LBT, real_BT) == loss


def test_targets_of_a_row_are_its_own():
    """A rule that foretells each row's own top-C has no loss, with its rows exchanged a large one.

    Targets written without the batch offset would put the positives of all rows into row 0.
    """
    scores_BT = jnp.array([[9.0, 0, 0, 0, 8, 0], [0, 7, 0, 6, 0, 0], [0, 0, 5, 0, 0, 4]])
    top_c_BT = indices_to_mask(select_top_c(scores_BT, 2), 6)
    np.testing.assert_array_equal(top_c_BT, scores_BT > 0)
    real_BT = jnp.ones((3, 6), bool)
    foretold_BT = jnp.where(scores_BT > 0, 20.0, -20.0)
    assert losses.rule_loss(foretold_BT[None], top_c_BT[None], real_BT) < 1e-6
    for shift in (1, 2):
        exchanged_LBT = jnp.roll(foretold_BT, shift, axis=0)[None]
        assert losses.rule_loss(exchanged_LBT, top_c_BT[None], real_BT) > 10


def test_targets_carry_no_gradient():
    """Scores that define the targets get none through them, even where targets are soft."""
    real_BT = jnp.ones((1, 2), bool)
    slope = jax.grad(lambda t: losses.rule_loss(jnp.array([[[1.0, -2.0]]]), t, real_BT))
    np.testing.assert_array_equal(slope(jnp.array([[[0.3, 0.6]]])), jnp.zeros((1, 1, 2)))


@pytest.mark.parametrize('rule', ['predictor', 'aux_loss', 'dense', 'threshold'])
def test_each_causal_rule_has_its_weight(tiny_config, rule):
    """predictor and aux_loss weigh the same mean by their own knob; the others train nothing."""
    weights = {'predictor': 3.0, 'aux_loss': 0.25, 'dense': 0.0, 'threshold': 0.0}
    config = tiny_config(
        **{
            'model.routing.router': 'learned',
            'model.routing.causal_rule': rule,
            'model.routing.predictor_loss_weight': weights['predictor'],
            'model.routing.aux_loss_weight': weights['aux_loss'],
        }
    )
    logits_LBT, top_c_LBT = np.array([[[2.0, -1.0, 3.0]]]), np.array([[[True, False, False]]])
    segment_ids_BT = np.array([[4, 5, 0]])
    expected = binary_cross_entropy(logits_LBT, top_c_LBT)[0, 0, :2].mean()
    records = record(top_c_LBT, top_c_LBT, logits_LBT)
    loss = losses.causal_rule_loss(from_config(config), records, segment_ids_BT)
    np.testing.assert_allclose(loss, weights[rule] * expected, rtol=1e-6)
    assert losses.causal_rule_loss(from_config(config), None, segment_ids_BT) == 0
