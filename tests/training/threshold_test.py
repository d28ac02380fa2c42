"""The threshold is a moving average that training keeps, and by which it may train in the end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.train_step import init_state, train_step

FAST = {'xla_backend_optimization_level': 0}  # these tests compile longer than they compute
NUM_STEPS = 60
RARE = 256  # a token that no batch holds unless a test puts it there
ROUTED = {
    'model.num_layers': 2,
    'model.routing.router': 'learned',
    'model.routing.layers': 'every:1',
    'model.routing.capacity': 0.25,
    'model.routing.causal_rule': 'threshold',
    'model.routing.threshold_decay': 0.7,
    'optimizer.warmup_fraction': 0.0,
    'model.remat': 'none',
    'model.attention': 'reference',
}
DECAY = 0.7


def make_batch(seed, rows=4, length=32):
    tokens_BT = np.random.default_rng(seed).integers(0, 64, (rows, length + 1)).astype(np.int32)
    segment_ids_BT = np.ones((rows, length), np.int32)
    segment_ids_BT[0, 20:] = 0
    return {
        'tokens_BT': tokens_BT[:, :-1].copy(),
        'labels_BT': tokens_BT[:, 1:].copy(),
        'segment_ids_BT': segment_ids_BT,
    }


def initial(hparams):
    return jax.jit(lambda: init_state(hparams, NUM_STEPS), compiler_options=FAST)()


jitted = jax.jit(train_step, static_argnums=2, compiler_options=FAST)


@pytest.fixture(scope='module')
def state(tiny_config):
    return initial(from_config(tiny_config(**ROUTED)))


def records_of(state, batch, routing):
    """What the routed blocks decide on a batch, by the variables of a state."""
    apply = jax.jit(
        lambda variables: (
            Transformer(state.hparams)
            .apply(variables, batch['tokens_BT'], batch['segment_ids_BT'], routing)[1]
            .routing
        ),
        compiler_options=FAST,
    )
    return jax.tree.map(np.asarray, apply(state.variables))


def lowest_scores(records, batch):
    """[routed layers]: the C-th largest score of each row, by sorting, averaged over rows."""
    lowest_RB = []
    for scores_BT in records.scores_BT:
        rows = zip(scores_BT, batch['segment_ids_BT'], strict=True)
        lowest_RB.append([np.sort(row_T[ids_T > 0])[::-1][7] for row_T, ids_T in rows])
    return np.mean(lowest_RB, axis=1, dtype=np.float64)


def test_average_is_the_recursion_in_numpy(state):
    """a = d a + (1 - d) lowest, d = min(decay, (n+1)/(n+10)) after n steps: early steps weigh more.

    The lowest score is that of the parameters before the step; the start is 0.
    """
    average_R = np.zeros(2)
    np.testing.assert_array_equal(state.averages['thresholds_R'], average_R)
    decays = []
    for step in range(30):
        batch = make_batch(step)
        decays.append(min(DECAY, (step + 1) / (step + 10)))
        after, metrics = jitted(state, batch)
        lowest_R = np.float64(metrics['routing']['lowest_selected_score'])
        if step in (0, 12):
            expected_R = lowest_scores(records_of(state, batch, 'top_c'), batch)
            np.testing.assert_allclose(lowest_R, expected_R, rtol=1e-4)
        average_R = decays[-1] * average_R + (1 - decays[-1]) * lowest_R
        np.testing.assert_allclose(after.averages['thresholds_R'], average_R, rtol=1e-4)
        state = after
    assert decays[0] == 0.1 and decays[-1] == DECAY and (np.abs(average_R) > 0.1).all()


def test_after_some_steps_about_the_capacity_enters(state):
    """On batches not seen yet, by r > average, strictly; the average stays what it is there."""
    for step in range(25):
        state, metrics = jitted(state, make_batch(step))
    batch = make_batch(1000, rows=32)
    records = records_of(state, batch, 'threshold')
    thresholds_R11 = np.asarray(state.averages['thresholds_R'])[:, None, None]
    real_BT = batch['segment_ids_BT'] > 0
    wanted_RBT = (records.scores_BT > thresholds_R11) & real_BT
    np.testing.assert_array_equal(records.selected_BT | records.dropped_BT, wanted_RBT)
    shares_R = wanted_RBT.sum(axis=(1, 2)) / real_BT.sum()
    assert ((0.12 < shares_R) & (shares_R < 0.4)).all(), shares_R
    np.testing.assert_array_equal(metrics['routing']['refused_fraction'], [0, 0])


def test_a_step_that_is_not_finite_does_not_move_the_average(state):
    """Nor does it count among the steps that the decay goes by."""
    state, _ = jitted(state, make_batch(0))
    embedding_VD = state.params['embedding'].at[RARE].set(jnp.nan)
    fragile = state.replace(params=state.params | {'embedding': embedding_VD})
    bad = make_batch(1)
    bad['tokens_BT'][2, 7] = RARE
    after, metrics = jitted(fragile, bad)
    assert metrics['skipped'] == 1
    np.testing.assert_array_equal(after.averages['thresholds_R'], state.averages['thresholds_R'])
    later, _ = jitted(after, make_batch(2))
    directly, _ = jitted(fragile, make_batch(2))
    moved_R = later.averages['thresholds_R']
    np.testing.assert_array_equal(moved_R, directly.averages['thresholds_R'])
    assert (moved_R != state.averages['thresholds_R']).all()


def test_a_batch_of_padding_does_not_move_the_average(state):
    """Where no row has a token there is no C-th score: the average stays, and stays finite."""
    state, _ = jitted(state, make_batch(0))
    batch = make_batch(1)
    batch['segment_ids_BT'][:] = 0
    after, _ = jitted(state, batch)
    np.testing.assert_array_equal(after.averages['thresholds_R'], state.averages['thresholds_R'])


def test_micro_batches_move_it_as_the_whole_batch_does(state):
    """Also where one of the parts has rows of nothing but padding."""
    training = dataclasses.replace(state.hparams.training, accumulate_steps=2)
    parts = state.replace(hparams=dataclasses.replace(state.hparams, training=training))
    batch = make_batch(3)
    batch['segment_ids_BT'][1] = 0
    whole, metrics = jitted(state, batch)
    divided, metrics_parts = jitted(parts, batch)
    expected_R = 0.9 * np.float64(metrics['routing']['lowest_selected_score'])
    for after in (whole, divided):
        np.testing.assert_allclose(after.averages['thresholds_R'], expected_R, rtol=1e-5)
    for name, values in metrics['routing'].items():
        np.testing.assert_allclose(metrics_parts['routing'][name], values, rtol=1e-5, err_msg=name)


@pytest.fixture(scope='module')
def by_threshold(tiny_config):
    """A state whose run trains by the threshold, with averages that let too many tokens in."""
    knobs = {'train_rule': 'threshold', 'threshold_warmup': 0.5, 'cache_capacity': 1.25}
    knobs = {f'model.routing.{name}': value for name, value in knobs.items()}
    state = initial(from_config(tiny_config(**ROUTED | knobs)))
    return state.replace(averages={'thresholds_R': jnp.float32([0.0, -1.0])})


def test_the_warm_up_trains_by_top_c(by_threshold):
    """The first stage lets in C of each row, whatever the average says."""
    first, last = by_threshold.hparams.stages
    assert (first.routing, last.routing, last.begins) == ('top_c', 'threshold', 0.5)
    _, metrics = jitted(by_threshold, make_batch(0), first)
    np.testing.assert_allclose(metrics['routing']['selected_fraction'], 32 / 116, rtol=1e-6)
    assert not metrics['routing']['refused_fraction'].any()


def test_training_by_threshold_is_capped_and_first_come(by_threshold):
    """At most 1.25 C tokens of a row, the first above the average from before the step.

    So trains the last stage, which is the one of a step that is told none.

    So trains the last stage, which is the one of a step that is told none.

    The average moves all the same, by the C-th score of top-C; the loss is that of this routing.
    """
    batch = make_batch(0)
    after, metrics = jitted(by_threshold, batch)
    records = records_of(by_threshold, batch, 'threshold')
    wanted_RBT = records.scores_BT > np.float32([0.0, -1.0])[:, None, None]
    wanted_RBT &= batch['segment_ids_BT'] > 0
    selected_RBT = wanted_RBT & (wanted_RBT.cumsum(axis=2) <= 10)
    real = (batch['segment_ids_BT'] > 0).sum()
    entered_R, refused_R = selected_RBT.sum((1, 2)), (wanted_RBT & ~selected_RBT).sum((1, 2))
    routing = metrics['routing']
    np.testing.assert_allclose(routing['selected_fraction'], entered_R / real, rtol=1e-6)
    np.testing.assert_allclose(routing['refused_fraction'], refused_R / real, rtol=1e-6)
    assert refused_R.all() and selected_RBT.sum(2).max() == 10
    moved_R = 0.1 * np.float64([0.0, -1.0]) + 0.9 * lowest_scores(records, batch)
    np.testing.assert_allclose(after.averages['thresholds_R'], moved_R, rtol=1e-4)
    assert metrics['rule_loss'] == 0


def test_training_by_threshold_learns(by_threshold):
    """Its loss falls on a repeated batch, and its router moves."""
    state, seen = by_threshold, []
    for _ in range(20):
        state, metrics = jitted(state, make_batch(0))
        seen.append(float(metrics['loss']))
    assert seen[-1] < 0.8 * seen[0] and state.skipped == 0
    router = state.params['stack']['run_0']['layer_0']['router']['w']
    assert (
        np.abs(router - by_threshold.params['stack']['run_0']['layer_0']['router']['w']).max() > 0
    )


@pytest.mark.parametrize('router', ['random', 'position', 'none'])
def test_who_has_no_average(router, tiny_config):
    """Controls and the dense model have none, and step without one."""
    knobs = {'model.routing.router': router, 'model.routing.causal_rule': 'auto'}
    hparams = from_config(tiny_config(**ROUTED | knobs))
    state = jax.eval_shape(lambda: init_state(hparams, NUM_STEPS))
    assert state.averages == {} and set(state.variables) == {'params'}
    after, metrics = jax.eval_shape(train_step, state, make_batch(0))
    assert after.averages == {} and ('routing' in metrics) == (router != 'none')


def test_random_choices_change_from_step_to_step(tiny_config):
    """The same batch again is routed otherwise, and the same step twice is the same."""
    knobs = {'model.routing.router': 'random', 'model.routing.causal_rule': 'auto'}
    state = initial(from_config(tiny_config(**ROUTED | knobs)))
    first, metrics = jitted(state, make_batch(0))
    _, again = jitted(state, make_batch(0))
    _, later = jitted(first.replace(params=state.params), make_batch(0))
    lowest = [m['routing']['lowest_selected_score'] for m in (metrics, again, later)]
    np.testing.assert_array_equal(lowest[0], lowest[1])
    assert (lowest[0] != lowest[2]).all()


def test_a_stage_trains_at_its_own_capacity(tiny_config):
    """One state goes through the stages: each lets in its own share of the tokens."""
    knobs = {'model.routing.capacity_stages': '1:0.3', 'model.routing.capacity': 0.125}
    state = initial(from_config(tiny_config(**ROUTED | knobs)))
    batch = make_batch(0) | {'segment_ids_BT': np.ones((4, 32), np.int32)}
    for stage, share in zip(state.hparams.stages, (1.0, 0.125), strict=True):
        state, metrics = jitted(state, batch, stage)
        np.testing.assert_array_equal(metrics['routing']['selected_fraction'], [share] * 2)
