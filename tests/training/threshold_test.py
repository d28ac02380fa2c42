"""Thresholds are moving averages that training updates and may select tokens by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.train_step import StepCounts, loss_and_metrics
from tests.model.cases import experts
from tests.training.toy_steps import DECAY, ROUTED, forward, initial, make_batch, step


@pytest.fixture(scope='module')
def state(tiny_config):
    """The state of a model with a routed block whose experts choose their tokens."""
    return initial(from_config(tiny_config(**ROUTED | experts(choice='expert'))))


def records_of(state, batch, routing):
    _, records = forward(state.hparams, state.variables, batch, routing)
    return jax.tree.map(np.asarray, records.routing)


def lowest_scores(records, batch):
    """Return [routed layers]: the C-th largest score of each row by sorting, mean over rows."""
    lowest_RB = []
    for scores_BT in records.scores_BT:
        rows = zip(scores_BT, batch['segment_ids_BT'], strict=True)
        lowest_RB.append([np.sort(row_T[ids_T > 0])[::-1][7] for row_T, ids_T in rows])
    return np.mean(lowest_RB, axis=1, dtype=np.float64)


def test_average_is_the_recursion_in_numpy(state):
    """a = d a + (1 - d) lowest, with d = min(decay, (n+1)/(n+10)) after n steps, from 0.

    The lowest score is that of the parameters before the step. So are the thresholds of experts.
    """
    average_R, average_XE = np.zeros(1), np.zeros((1, 5))
    np.testing.assert_array_equal(state.averages['thresholds_R'], average_R)
    decays = []
    for n in range(30):
        batch = make_batch(n, padded=True)
        decays.append(min(DECAY, (n + 1) / (n + 10)))
        after, metrics = step(state, batch)
        lowest_R = np.float64(metrics['routing']['lowest_selected_score'])
        if n in (0, 12):
            expected_R = lowest_scores(records_of(state, batch, 'top_c'), batch)
            np.testing.assert_allclose(lowest_R, expected_R, rtol=1e-4)
        average_R = decays[-1] * average_R + (1 - decays[-1]) * lowest_R
        np.testing.assert_allclose(after.averages['thresholds_R'], average_R, rtol=1e-4)
        decay = (n + 1) / (n + 10)
        average_XE = decay * average_XE + (1 - decay) * metrics['experts']['lowest_taken']
        found_XE = after.averages['expert_thresholds_XE']
        np.testing.assert_allclose(found_XE, average_XE, rtol=1e-4)
        state = after
    assert decays[0] == 0.1 and decays[-1] == DECAY and (np.abs(average_R) > 0.1).all()
    assert (average_XE > 0).all()


def test_a_batch_of_padding_does_not_move_the_average(state):
    """No row then has a C-th score, so the average does not change and stays finite."""
    state, _ = step(state, make_batch(0))
    batch = make_batch(1)
    batch['segment_ids_BT'][:] = 0
    after, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after.averages, state.averages)


@pytest.fixture(scope='module')
def by_threshold(tiny_config):
    """A state whose run trains at capacity 1 by top-C, then at 1/4 by a threshold that is too low.

    The second stage therefore has to drop tokens.
    """
    knobs = {
        'train_rule': 'threshold',
        'threshold_warmup': 0.5,
        'causal_rule': 'threshold',
        'cache_capacity': 1.25,
        'capacity_stages': '1:0.5',
    }
    knobs = {f'model.routing.{name}': value for name, value in knobs.items()}
    state = initial(from_config(tiny_config(**ROUTED | knobs)))
    return state.replace(averages={'thresholds_R': jnp.float32([-1.0])})


def test_training_by_threshold_selects_the_first_tokens_above_it(by_threshold):
    """It selects at most 1.25 C tokens of a row, the first above the average before the step."""
    batch = make_batch(0, padded=True)
    after, metrics = step(by_threshold, batch)
    records = records_of(by_threshold, batch, 'threshold')
    real_BT = batch['segment_ids_BT'] > 0
    wanted_RBT = (records.scores_BT > -1) & real_BT
    selected_RBT = wanted_RBT & (wanted_RBT.cumsum(axis=2) <= 10)
    selected_R, dropped_R = selected_RBT.sum((1, 2)), (wanted_RBT & ~selected_RBT).sum((1, 2))
    routing = metrics['routing']
    np.testing.assert_allclose(routing['selected_fraction'], selected_R / real_BT.sum(), rtol=1e-6)
    np.testing.assert_allclose(routing['refused_fraction'], dropped_R / real_BT.sum(), rtol=1e-6)
    assert dropped_R.all() and selected_RBT.sum(2).max() == 10
    moved_R = 0.1 * -1.0 + 0.9 * lowest_scores(records, batch)
    np.testing.assert_allclose(after.averages['thresholds_R'], moved_R, rtol=1e-4)
    assert metrics['rule_loss'] == 0


def test_another_capacity_is_forgotten(by_threshold):
    """The decay counts the steps since the capacity changed: after 3 of them it is 4/13."""
    batch, begin = make_batch(0, padded=True), by_threshold.num_steps // 2
    lowest_R = lowest_scores(records_of(by_threshold, batch, 'threshold'), batch)
    after, _ = step(by_threshold.replace(step=jnp.int32(begin + 3)), batch)
    moved_R = 4 / 13 * -1.0 + 9 / 13 * lowest_R
    np.testing.assert_allclose(after.averages['thresholds_R'], moved_R, rtol=1e-4)


def test_random_choices_change_from_step_to_step(tiny_config):
    knobs = {'model.routing.router': 'random', 'model.routing.causal_rule': 'auto'}
    hparams = from_config(tiny_config(**ROUTED | knobs))
    state, batch = initial(hparams), make_batch(0)
    counts = StepCounts(jnp.float32(128), jnp.float32(128))

    def lowest(number):
        at = state.replace(step=number)
        metrics = loss_and_metrics(state.params, at, hparams, 'top_c', batch, counts)[1]
        return metrics['routing']['lowest']

    lowest = jax.jit(lowest)
    assert lowest(0) == lowest(0) != lowest(1)
