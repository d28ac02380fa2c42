"""ROC areas: the rank statistic by hand, and the routers of small models."""

import jax
import numpy as np
import pytest

from configs import recall as recall_config
from moddepth_jax.analysis.router_roc import roc_area, router_roc
from moddepth_jax.data import recall
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.training.train_step import init_state, train_step
from tests.training.toy_steps import forward


@pytest.mark.parametrize(
    ('scores', 'positives', 'area'),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1),
        ([1, 2, 3, 4], [1, 1, 0, 0], 0),
        ([1, 2, 3, 4], [0, 1, 0, 1], 0.75),
        ([5, 5, 5, 5], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 1, 0, 1], 0.875),
    ],
)
def test_area_by_hand(scores, positives, area):
    """The share of (positive, negative) pairs in the right order; a tie is half a pair."""
    assert roc_area(np.array(scores, np.float32), np.array(positives, bool)) == area


def test_no_batch_is_refused():
    with pytest.raises(ValueError, match='num_batches=0: must be 1 or more'):
        router_roc({}, None, None, 0)


@pytest.fixture(scope='module')
def toy(tiny_config):
    knobs = {'data.source': 'recall', 'data.sequence_length': 128, 'data.batch_size': 32}
    knobs |= {'model.routing.router': 'learned', 'model.routing.layers': '0,1'}
    hparams = from_config(tiny_config(**knobs))
    init = jax.jit(lambda: init_state(hparams, 1))
    return hparams, make_dataset(hparams.data, 0), init()


def test_every_routed_layer_is_reported(toy):
    """Areas and selected shares are those of the records of a forward pass."""
    hparams, dataset, state = toy
    result = router_roc(state.variables, hparams, dataset, 2)
    assert list(result['layers']) == [0, 1]
    batches = [dataset.held_out_batch(index) for index in range(2)]
    batch = {name: np.concatenate([side[name] for side in batches]) for name in batches[0]}
    _, records = forward(hparams, state.variables, batch)
    real_BT = batch['segment_ids_BT'] > 0
    needed_N = recall.needs_far_context(batch['tokens_BT'])[real_BT]
    for layer, found in result['layers'].items():
        scores_N, selected_N = (
            np.asarray(side_RBT[layer])[real_BT]
            for side_RBT in (records.routing.scores_BT, records.routing.selected_BT)
        )
        assert found['area'] == pytest.approx(roc_area(scores_N, needed_N), abs=1e-4)
        assert found['entered'] == pytest.approx(selected_N[needed_N].mean(), abs=1e-4)
    areas = [found['area'] for found in result['layers'].values()]
    assert abs(areas[0] - areas[1]) > 1e-3
    assert result['recall_accuracy'] < 0.5
    assert result['recall_nats'] == pytest.approx(np.log(257), abs=0.5)


class _OneBatch:
    num_held_out_batches = 1

    def __init__(self, batch):
        self.held_out_batch = [batch].__getitem__


def test_padding_does_not_count(toy):
    hparams, dataset, state = toy
    batch = dataset.held_out_batch(dataset.num_held_out_batches - 1)
    padding_B = batch['segment_ids_BT'][:, 0] == 0
    assert 0 < padding_B.sum() < len(padding_B)
    filled = {**batch, 'tokens_BT': batch['tokens_BT'].copy()}
    filled['tokens_BT'][padding_B] = np.resize([*b'(aY) '], 128)
    results = [router_roc(state.variables, hparams, _OneBatch(b), 1) for b in (batch, filled)]
    assert results[0] == results[1]


def test_dense_blocks_of_the_experiment_do_not_reach_an_answer():
    model = from_config(recall_config.get_config()).model
    dense = set(range(model.num_layers)) - set(model.routed_layers)
    assert 0 not in [model.window(layer) for layer in dense]
    reach = sum(model.window(layer) - 1 for layer in dense)
    assert recall.NEAR - 1 <= reach < recall.MIN_DISTANCE


@pytest.mark.slow
def test_the_learned_router_finds_the_needed_positions():
    hparams = from_config(recall_config.get_config())
    dataset = make_dataset(hparams.data, hparams.seed)
    num_steps = hparams.training.num_steps
    state = jax.jit(lambda: init_state(hparams, num_steps))()
    step_fn = jax.jit(train_step, donate_argnums=0)
    for step in range(num_steps):
        state, _ = step_fn(state, dataset.train_batch(step))
    result = router_roc(state.variables, hparams, dataset, 16)
    assert max(layer['area'] for layer in result['layers'].values()) > 0.9
    assert result['recall_accuracy'] > 0.9
    assert 0.42 < result['loss'] < 0.48  # the ideal is 0.441 on average
