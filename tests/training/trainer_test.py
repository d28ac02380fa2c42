"""Rows of metrics name the routing and experts of a layer by its index in the model."""

import types

import jax
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import trainer

TIMES = {'tokens_per_second', 'flops_per_second', 'data_wait_fraction'}


@pytest.fixture
def staged(tiny_config):
    """A Trainer of a model with routed layer 2 and experts in layers 0 and 2, and its rows."""
    changes = {'num_layers': 3, 'routing.router': 'learned', 'routing.layers': '2'}
    changes |= {'experts.choice': 'token', 'experts.layers': '0,2'}
    hparams = from_config(tiny_config(**{f'model.{name}': v for name, v in changes.items()}))
    rows = []
    writer = types.SimpleNamespace(write=lambda step, row: rows.append(row))
    progress = types.SimpleNamespace(note=lambda line: None)
    state = types.SimpleNamespace(variables={}, hparams=hparams, num_steps=4)
    return trainer.Trainer(state, {}, None, None, None, progress, writer, None), rows


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


def test_a_row_names_layers_by_their_index(staged):
    """Routed layers and those with experts each by the index in the model."""
    arrays = jax.tree.map(np.float32, {'loss': 2.5, **LAYERS}, is_leaf=lambda x: type(x) is list)
    row = staged[0]._row(1, arrays)
    assert {name: value for name, value in row.items() if name not in TIMES} == {
        'loss': 2.5,
        **NAMED,
    }


def test_an_evaluation_has_the_same_names(staged, monkeypatch):
    """With the prefix `eval/`; the returned result is unchanged."""
    result = {'loss': 2.5, 'bits_per_byte': 3.5, **LAYERS}
    monkeypatch.setattr(trainer, 'evaluate_causal', lambda *_, **__: result)
    assert staged[0].evaluate(2, 1) is result
    expected = {'loss': 2.5, 'bits_per_byte': 3.5, **NAMED}
    assert staged[1] == [{f'eval/{name}': value for name, value in expected.items()}]
