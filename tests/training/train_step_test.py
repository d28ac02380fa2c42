"""A step is a pure function that learns, skips non-finite gradients, and is traced once."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.train_step import StepCounts, compile_step, loss_and_metrics, train_step
from tests.training.toy_steps import (
    ROUTED,
    batch_with_rare,
    forward,
    initial,
    make_batch,
    step,
    with_rare_nan,
)


def trained_part(state):
    names = ('params', 'optimizer_state', 'averages')
    return {name: getattr(state, name) for name in names}


def gradient(state):
    """Return the gradient of the first step: AdamW's running mean is then (1 - b1) times it."""
    mean = optax.tree_utils.tree_get(state.optimizer_state, 'mu')
    return jax.tree.map(lambda leaf: leaf / (1 - state.hparams.optimizer.b1), mean)


def assert_gradients_close(one, other, rtol, atol):
    pairs = zip(jax.tree.leaves(gradient(one)), jax.tree.leaves(gradient(other)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(b, a, rtol=rtol, atol=atol * float(jnp.abs(a).max()))


@pytest.fixture(scope='module')
def hparams(tiny_config):
    return from_config(tiny_config(**ROUTED))


@pytest.fixture(scope='module')
def state(hparams):
    return initial(hparams)


def losses_by_hand(hparams, params, batch):
    """Return (loss, z_loss, rule_loss) and the gradient of rule_loss, in float64."""
    logits_BTV, records = forward(hparams, {'params': params}, batch)
    logits_BTV = np.asarray(logits_BTV, np.float64)
    counted_BT = batch['labels_BT'] != -100
    log_z_BT = np.log(np.exp(logits_BTV).sum(-1))
    labels_BT1 = np.maximum(batch['labels_BT'], 0)[..., None]
    nll_BT = log_z_BT - np.take_along_axis(logits_BTV, labels_BT1, -1)[..., 0]
    z_loss = hparams.optimizer.z_loss * (log_z_BT[counted_BT] ** 2).mean()
    chance_LBT = 1 / (1 + np.exp(-np.asarray(records.routing.rule_logits_BT, np.float64)))
    rule_LBT = -np.log(np.where(records.routing.top_c_BT, chance_LBT, 1 - chance_LBT))
    real_BT = batch['segment_ids_BT'] > 0
    slopes = (chance_LBT - records.routing.top_c_BT)[:, real_BT]
    return (nll_BT[counted_BT].mean(), z_loss, rule_LBT[:, real_BT].mean()), slopes


def test_losses_and_their_gradient_by_hand(hparams, state):
    """loss, z_loss and rule_loss equal their definitions on the model's own logits in float64.

    Their sum is differentiated: the head's gradient is the slope of the first two along it, the
    predictor's bias has the mean slope of the third.
    """
    batch = make_batch(2)
    batch['labels_BT'][0, 5:9] = -100
    batch['segment_ids_BT'][3, 20:] = 0
    batch['labels_BT'][3, 20:] = -100
    after, metrics = step(state, batch)
    by_hand, slopes = losses_by_hand(hparams, state.params, batch)
    for name, value in zip(('loss', 'z_loss', 'rule_loss'), by_hand, strict=True):
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    gradients = gradient(after)
    bias = gradients['stack']['run_0']['layer_0']['predictor']['out']['bias']
    np.testing.assert_allclose(bias, [[slopes.mean()]], rtol=1e-4)

    slope_DV = gradients['head']['kernel']
    # The second direction moves all logits of a token equally: only the z-loss changes.
    equal_DV = jnp.broadcast_to(slope_DV.mean(1, keepdims=True), slope_DV.shape)
    for direction_DV in (slope_DV, equal_DV):
        direction_DV = direction_DV / optax.tree.norm(direction_DV)

        def total(distance, direction_DV=direction_DV):
            kernel_DV = state.params['head']['kernel'] + distance * direction_DV
            params = state.params | {'head': {'kernel': kernel_DV}}
            (loss, z_loss, _), _ = losses_by_hand(hparams, params, batch)
            return loss + z_loss

        expected = float(jnp.sum(slope_DV * direction_DV))
        np.testing.assert_allclose((total(0.1) - total(-0.1)) / 0.2, expected, rtol=2e-2)
        assert expected > 1e-3


def test_labels_of_padding_do_not_count(state):
    """Padding masks a target with any label: loss and step equal those with label -100."""
    padded, ignored = make_batch(3), make_batch(3)
    for batch in (padded, ignored):
        batch['segment_ids_BT'][1:3, 10:] = 0
    ignored['labels_BT'] = np.where(ignored['segment_ids_BT'] == 0, -100, ignored['labels_BT'])
    first, metrics = step(state, padded)
    second, expected = step(state, ignored)
    np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-6)
    assert state_sha256(first) == state_sha256(second)


def ignored_labels(batch):
    batch['labels_BT'][0, 3:] = batch['labels_BT'][1] = batch['labels_BT'][2, ::2] = -100


def padding(batch):
    ignored_labels(batch)
    batch['segment_ids_BT'][0, 4:] = batch['segment_ids_BT'][1] = 0


@pytest.mark.parametrize('spoil', [ignored_labels, padding])
def test_micro_batches_and_chunks_do_not_change_the_step(hparams, state, spoil):
    """Four micro-batches give the loss, gradient, routing and thresholds of the full batch.

    Their rows hold unequal numbers of ignored labels or of padding, one nothing else.
    """
    training = dataclasses.replace(hparams.training, accumulate_steps=4, loss_chunk=25)
    batch = make_batch(4)
    spoil(batch)
    whole, metrics = step(state, batch)
    divided = state.replace(hparams=dataclasses.replace(hparams, training=training))
    parts, metrics_parts = step(divided, batch)
    assert (whole.skipped, parts.skipped) == (0, 0)
    for name in ('loss', 'z_loss', 'rule_loss', 'grad_norm'):
        np.testing.assert_allclose(metrics_parts[name], metrics[name], rtol=1e-5, err_msg=name)
    for name, values in metrics['routing'].items():
        np.testing.assert_allclose(metrics_parts['routing'][name], values, rtol=1e-5, err_msg=name)
    assert_gradients_close(whole, parts, rtol=1e-4, atol=1e-5)
    threshold_R = 0.9 * np.float64(metrics['routing']['lowest_selected_score'])
    for after in (whole, parts):
        np.testing.assert_allclose(after.averages['thresholds_R'], threshold_R, rtol=1e-5)


def test_a_nonfinite_step_changes_only_counters(state):
    fragile = with_rare_nan(state)
    first, _ = step(fragile, make_batch(0))
    assert (first.skipped, first.skipped_in_a_row) == (0, 0)
    before = state_sha256(trained_part(first))
    assert before != state_sha256(trained_part(fragile))
    state = first
    for skips in (1, 2):
        state, metrics = step(state, batch_with_rare(skips))
        assert not np.isfinite(metrics['loss'])
        assert (metrics['skipped'], metrics['skipped_in_a_row']) == (skips, skips)
        assert (state.step, state.skipped, state.skipped_in_a_row) == (1 + skips, skips, skips)
        assert state_sha256(trained_part(state)) == before
    state, metrics = step(state, make_batch(5))
    assert (state.step, state.skipped, state.skipped_in_a_row) == (4, 2, 0)
    assert (metrics['skipped'], metrics['skipped_in_a_row']) == (2, 0)
    assert np.isfinite(metrics['loss'])
    directly, _ = step(first, make_batch(5))
    assert state_sha256(trained_part(state)) == state_sha256(trained_part(directly)) != before


def test_a_finite_loss_with_a_nonfinite_gradient_is_skipped(state):
    """Logits of 1e20 have a finite loss, but their squared log-partition overflows."""
    norm = {'scale': state.params['final_norm']['scale'] * 1e22}
    state = state.replace(params=state.params | {'final_norm': norm})
    after, metrics = step(state, make_batch(0))
    assert np.isfinite(metrics['loss']) and not np.isfinite(metrics['grad_norm'])
    assert state_sha256(trained_part(after)) == state_sha256(trained_part(state))
    assert (after.step, after.skipped, after.skipped_in_a_row) == (1, 1, 1)


def test_the_learning_rate_reported_is_the_one_applied(state):
    state = with_rare_nan(state)
    for seed in range(8):
        state, _ = step(state, batch_with_rare(seed))
    after, metrics = step(state, make_batch(0))
    moved = after.params['final_norm']['scale'] - state.params['final_norm']['scale']
    np.testing.assert_allclose(jnp.abs(moved).max(), metrics['learning_rate'], rtol=1e-3)


def test_bfloat16_computes_and_float32_is_stored(hparams, state):
    model = dataclasses.replace(hparams.model, dtype='bfloat16')
    lower = state.replace(hparams=dataclasses.replace(hparams, model=model))
    batch, counts = make_batch(0), StepCounts(jnp.float32(4 * 32), jnp.float32(4 * 32))

    @jax.jit
    def loss(params):
        return loss_and_metrics(params, lower, lower.hparams, 'top_c', batch, counts)[1]['loss']

    exact = step(state, batch)[1]['loss']
    found = loss(lower.params)
    assert found != exact and abs(found - exact) < 0.01 * exact
    after, _ = jax.eval_shape(train_step, lower, batch)
    for leaf in jax.tree.leaves(trained_part(after)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


def test_a_donated_state_is_updated_in_place(state):
    lowered = jax.jit(train_step, donate_argnums=0).lower(state, make_batch(0))
    assert lowered.as_text().count('tf.aliasing_output') == len(jax.tree.leaves(state))
    matrices = r' copy\(%state_optimizer_state_\w+kernel'
    assert re.search(matrices, lowered.compile().as_text())  # the names are still these
    assert not re.search(matrices, compile_step(lowered).as_text())
