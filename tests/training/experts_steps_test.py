"""Steps of training with experts: the same in parts, and from the first to the thirtieth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.training.train_step import TrainState, _gradients, init_state, train_step
from tests.model.cases import (
    HALF_ROUTED,
    experts,
    random_variables,
    small_hparams,
)

LENGTH, VOCABULARY = 12, 48


def two_layer_hparams(make_config, knobs, **more):
    """Hparams of two layers, the second routed if any is; rows of 12 tokens out of 48."""
    sizes = {'model.vocab_size': VOCABULARY, 'model.num_layers': 2, 'data.sequence_length': LENGTH}
    return small_hparams(make_config, sizes, {'model.routing.layers': '1'}, knobs, more)


STEPS = {
    'staged': experts(num_noop=1, z_loss=0.1, balance_weight=0.5) | HALF_ROUTED,
    'experts choose': experts(choice='expert', z_loss=0.1),
    'z-loss alone': experts(z_loss=0.1, balance_weight=0.0),
    'experts choose, staged': experts(choice='expert', z_loss=0.1) | HALF_ROUTED,
}


@pytest.mark.slow
@pytest.mark.parametrize('name', STEPS)
def test_micro_batches_do_not_change_the_step(name, tiny_config):
    """Two with unequal numbers of tokens give losses, gradients and loads of the whole batch."""
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, VOCABULARY, (4, LENGTH))
    segments_BT = np.ones_like(tokens_BT)
    segments_BT[0, 5:] = segments_BT[2, 1:] = 0
    batch = {'tokens_BT': tokens_BT, 'labels_BT': tokens_BT[::-1], 'segment_ids_BT': segments_BT}
    batch = jax.tree.map(jnp.asarray, batch)
    found = []
    for parts in (1, 2):
        shape = {'training.accumulate_steps': parts, 'model.num_layers': 1}
        shape['model.routing.layers'] = '0'
        hparams = two_layer_hparams(tiny_config, STEPS[name], **shape)
        variables = random_variables(hparams, tokens_BT)
        averages = variables.get('averages', {})
        state = TrainState(0, {}, averages, (), 0, 0, hparams, 4)

        def run(params, state=state, hparams=hparams):
            return _gradients(state.replace(params=params), hparams, 'top_c', batch)

        found.append(jax.device_get(jax.jit(run)(variables['params'])))
    (gradient, metrics), (of_parts, metrics_of_parts) = found
    assert metrics['expert_z_loss'] > 0.01
    leaves = jax.tree_util.tree_leaves_with_path((metrics, gradient))
    others = jax.tree.leaves((metrics_of_parts, of_parts))
    for (path, one), two in zip(leaves, others, strict=True):
        most = max(np.abs(one).max(), 1e-6)
        np.testing.assert_allclose(
            two, one, rtol=1e-4, atol=1e-5 * most, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.slow
def test_thresholds_of_experts_that_choose_are_the_recursion_in_numpy(tiny_config):
    """a = d a + (1 - d) lowest taken, with d = min(decay, (n+1)/(n+10)); the loss falls."""
    knobs = {'model.vocab_size': 257, 'optimizer.learning_rate': 0.01, 'training.num_steps': 30}
    knobs |= {'model.num_layers': 1, 'model.routing.layers': '0', 'data.sequence_length': 32}
    hparams = two_layer_hparams(tiny_config, experts(choice='expert', threshold_decay=0.6), **knobs)
    dataset = make_dataset(hparams.data, hparams.seed)
    step = jax.jit(train_step)
    state = jax.jit(lambda: init_state(hparams, 30))()
    losses, thresholds_XE = [], 0.0
    for i in range(30):
        state, metrics = step(state, dataset.train_batch(i))
        losses.append(float(metrics['loss']))
        decay = min(0.6, (i + 1) / (i + 10))
        lowest_XE = np.asarray(metrics['experts']['lowest_taken'])
        thresholds_XE = decay * thresholds_XE + (1 - decay) * lowest_XE
        found_XE = state.averages['expert_thresholds_XE']
        np.testing.assert_allclose(found_XE, thresholds_XE, rtol=1e-4)
    assert step._cache_size() == 1 and state.skipped == 0
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.5
