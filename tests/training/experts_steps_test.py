"""Micro-batches do not change a training step with losses that multiply sums over the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.training.train_step import TrainState, _gradients
from tests.model.cases import HALF_ROUTED, TOKEN_CHOICE, experts, random_variables, small_hparams

LENGTH, VOCABULARY = 12, 48
SIZES = {'model.vocab_size': VOCABULARY, 'model.num_layers': 1, 'data.sequence_length': LENGTH}
STEPS = {
    'staged': experts(num_noop=1, z_loss=0.1, balance_weight=0.5) | HALF_ROUTED,
    'experts choose': experts(choice='expert', z_loss=0.1),
    'z-loss alone': experts(z_loss=0.1, balance_weight=0.0),
    'experts choose, staged': experts(choice='expert', z_loss=0.1) | HALF_ROUTED,
}
FIRST = {'model.routing.layers': '0'}
LOOPS = {'model.num_layers': 3, 'model.routing.balance_weight': 0.5, 'model.routing.z_loss': 0.1}
STEPS = {name: FIRST | knobs for name, knobs in STEPS.items()}
CASES = [pytest.param(knobs, id=name, marks=pytest.mark.slow) for name, knobs in STEPS.items()]
CASES.append(pytest.param(TOKEN_CHOICE | LOOPS, id='tokens choose their last loop'))
UNBALANCED = TOKEN_CHOICE | LOOPS | {'model.routing.balance_weight': 0.0}
NAME = 'they choose it without a balance loss'
CASES.append(pytest.param(UNBALANCED, id=NAME, marks=pytest.mark.slow))


@pytest.mark.parametrize('knobs', CASES)
def test_micro_batches_do_not_change_the_step(knobs, tiny_config, monkeypatch):
    if knobs is UNBALANCED:  # regression: a forward pass over all tokens counted unused ends
        monkeypatch.setattr('moddepth_jax.training.train_step.count_ends', None)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, VOCABULARY, (4, LENGTH))
    segments_BT = np.ones_like(tokens_BT)
    segments_BT[0, 5:] = segments_BT[2, 1:] = 0
    batch = {'tokens_BT': tokens_BT, 'labels_BT': tokens_BT[::-1], 'segment_ids_BT': segments_BT}
    batch = jax.tree.map(jnp.asarray, batch)
    found = []
    for parts in (1, 2):
        micro_batches = {'training.accumulate_steps': parts}
        hparams = small_hparams(tiny_config, SIZES, knobs, micro_batches)
        variables = random_variables(hparams, tokens_BT)
        averages = variables.get('averages', {})
        state = TrainState(0, {}, averages, (), 0, 0, hparams, 4)

        def run(params, state=state, hparams=hparams):
            routing = hparams.model.routing.stages[-1].routing
            return _gradients(state.replace(params=params), hparams, routing, batch, None)

        found.append(jax.device_get(jax.jit(run)(variables['params'])))
    (gradient, metrics), (of_parts, metrics_of_parts) = found
    assert metrics.get('expert_z_loss', metrics['rule_loss']) > 0.01
    leaves = jax.tree_util.tree_leaves_with_path((metrics, gradient))
    others = jax.tree.leaves((metrics_of_parts, of_parts))
    for (path, one), two in zip(leaves, others, strict=True):
        most = max(np.abs(one).max(), 1e-6)
        np.testing.assert_allclose(
            two, one, rtol=1e-4, atol=1e-5 * most, err_msg=jax.tree_util.keystr(path)
        )
