"""Rows and summary of a run name each layer's routing and experts by its place in the model."""

import types

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop, trainer
from moddepth_jax.training.metrics import read_metrics

TIMES = {'tokens_per_second', 'flops_per_second', 'data_wait_fraction'}
pytestmark = pytest.mark.usefixtures('compiled_once')


@pytest.fixture
def staged(tiny_config):
    """loop, rows: that of a run with routed layer 2 and experts in layers 0 and 2, and its rows."""
    changes = {'num_layers': 3, 'routing.router': 'learned', 'routing.layers': '2'}
    changes |= {'experts.choice': 'token', 'experts.layers': '0,2'}
    hparams = from_config(tiny_config(**{f'model.{name}': v for name, v in changes.items()}))
    rows = []
    writer = types.SimpleNamespace(write=lambda step, row: rows.append(row))
    progress = types.SimpleNamespace(note=lambda line: None)
    state = types.SimpleNamespace(variables={})
    return trainer.Trainer(state, {}, hparams, 4, None, None, writer, progress, None, None), rows


LAYERS = {
    'routing': {'recall': [0.5]},
    'experts': {'load': [[0.25, 0.75], [1.0, 0.0]], 'unused': [0, 1]},
}
NAMED = {
    'routing/layer_02/recall': 0.5,
    'experts/layer_00/load': [0.25, 0.75],
    'experts/layer_00/unused': 0,
    'experts/layer_02/load': [1.0, 0.0],
    'experts/layer_02/unused': 1,
}


def test_a_row_names_layers_by_their_place_in_the_model(staged):
    """Routed layers and those with experts are counted apart, each under its own index."""
    arrays = jax.tree.map(np.float32, {'loss': 2.5, **LAYERS}, is_leaf=lambda x: type(x) is list)
    row = staged[0]._row(1, arrays)
    assert {name: value for name, value in row.items() if name not in TIMES} == {
        'loss': 2.5,
        **NAMED,
    }


def test_an_evaluation_names_layers_as_training_does(staged, monkeypatch):
    """Its row has the same names behind `eval/`; its result stays as it was."""
    result = {'loss': 2.5, 'bits_per_byte': 3.5, **LAYERS}
    monkeypatch.setattr(trainer, 'evaluate_causal', lambda *_, **__: result)
    assert staged[0].evaluate(2, 1) is result
    expected = {'loss': 2.5, 'bits_per_byte': 3.5, **NAMED}
    assert staged[1] == [{f'eval/{name}': value for name, value in expected.items()}]


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        {'experts.choice': 'token', 'experts.num_noop': 2, 'experts.row_capacity': 4},
        {'experts.choice': 'expert'},
        {'experts.choice': 'token', 'routing.router': 'learned', 'routing.causal_rule': 'dense'},
    ],
)
def test_a_run_with_experts_tells_their_loads(tiny_config, corpus, tmp_path, signals, changes):
    """In rows of training and evaluation and in the summary; stopped by a signal, it goes on."""
    changes = {f'model.{name}': value for name, value in changes.items()}
    changes |= {'data.source': corpus, 'data.held_out_fraction': 0.3}
    hparams = from_config(tiny_config(**changes))
    signals[1] = 'SIGTERM'
    assert loop.train(hparams, tmp_path / 'broken').signal == 'SIGTERM'
    broken, whole = (loop.train(hparams, tmp_path / name) for name in ('broken', 'whole'))
    assert broken.summary['state_sha256'] == whole.summary['state_sha256']
    names = {'load', 'largest_load', 'noop_fraction', 'dropped_fraction', 'unused'}
    for values in whole.summary['experts'].values():
        assert names <= values.keys() and sum(values['load']) == pytest.approx(1)
    assert list(whole.summary['experts']) == ['layer_00', 'layer_01']
    assert 'experts' not in whole.summary['eval']
    for row in read_metrics(whole.workdir):
        prefix = 'eval/' if 'eval/loss' in row else ''
        for layer in ('layer_00', 'layer_01'):
            assert {f'{prefix}experts/{layer}/{name}' for name in names} <= row.keys()
    assert ('routing_gap' in whole.summary['eval']) == hparams.model.looks_ahead
