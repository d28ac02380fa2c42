"""summary.json is whole, valid JSON; its FLOPs agree with the traced train step."""

import json
import math
import os
import types

import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import summary


@pytest.mark.parametrize('length', [64, 320])
@pytest.mark.parametrize('router', ['none', 'learned'])
def test_counted_flops_are_those_of_the_trace(tiny_config, router, length):
    """Counted FLOPs of a step are within 1% of the products in its trace without recomputation.

    What runs is dearer, since blocks are recomputed and attention is cut into blocks; XLA's
    estimate, which has elementwise work too, is of the same size.
    """
    config = tiny_config(**{'model.routing.router': router, 'data.sequence_length': length})
    flops = summary.step_flops_report(from_config(config), 4)
    counted = flops['flops_per_step']
    assert flops['flops_per_step_dot_general'] == pytest.approx(counted, rel=0.01)
    assert 1.1 < flops['flops_per_step_executed'] / counted < 2
    assert 1 < flops['flops_per_step_xla'] / counted < 2


@pytest.mark.slow
def test_places_of_experts_that_nobody_takes_are_not_counted(tiny_config):
    """Half of the choices fall on experts that do nothing; what is traced for them is left out.

    So is the forward pass that tells micro-batches the loads of the whole step; but it runs.
    """
    changes = {'model.experts.choice': 'token', 'model.experts.num_noop': 8}
    found = [
        summary.step_flops_report(from_config(tiny_config(**changes, **more)), 4)
        for more in ({}, {'training.accumulate_steps': 2})
    ]
    for flops in found:
        counted = flops['flops_per_step']
        assert flops['flops_per_step_dot_general'] == pytest.approx(counted, rel=0.01)
    assert found[1]['flops_per_step_executed'] > 1.2 * found[0]['flops_per_step_executed']


def test_ratios_are_told_by_layer():
    """Lists and arrays over layers become numbers and lists of each layer, by its index."""
    ratios = {'recall': [0.5, 0.25], 'load': np.float32([[0.5, 0.5], [1, 0]])}
    assert summary.by_layer((1, 11), ratios) == {
        'layer_01': {'recall': 0.5, 'load': [0.5, 0.5]},
        'layer_11': {'recall': 0.25, 'load': [1.0, 0.0]},
    }
    assert summary.by_layer((), {}) == {}


def test_routed_layers_and_layers_with_experts_are_told_apart(tiny_config, monkeypatch):
    """Each kind under its own name, by its own layers; `eval` keeps what is of the whole model."""
    changes = {'model.routing.router': 'learned', 'model.experts.choice': 'token'}
    hparams = from_config(tiny_config(**changes))
    for name in ('flops_of_a_step', 'state_sha256'):
        monkeypatch.setattr(summary, name, lambda *_: {})
    state = types.SimpleNamespace(step=4, num_steps=4, skipped=0, params={})
    dataset = types.SimpleNamespace(
        epochs=lambda step: 1.0, corpus=types.SimpleNamespace(sha256='')
    )
    metadata = {'train_loss': 1.0, 'seconds': 2.0, 'versions': {}}
    evaluation = {'loss': 1.5, 'routing': {'recall': [0.5]}, 'experts': {'unused': [0.0, 3.0]}}
    found = summary.summarize(hparams, state, evaluation, dataset, metadata)
    assert found['eval'] == {'loss': 1.5}
    assert found['routing'] == {'layer_01': {'recall': 0.5}}
    assert found['experts'] == {'layer_00': {'unused': 0.0}, 'layer_01': {'unused': 3.0}}


def test_numbers_that_are_not_finite_are_null(tmp_path):
    """Strict JSON readers can read every summary: NaN and infinities are null at any depth."""
    values = {'loss': math.nan, 'routing': {'layer_01': {'precision': -math.inf}}, 'steps': 3}
    summary.write_summary(tmp_path, values)

    def refuse(name):
        pytest.fail(f'{name} is no JSON')

    text = (tmp_path / 'summary.json').read_text()
    assert json.loads(text, parse_constant=refuse) == {
        'loss': None,
        'routing': {'layer_01': {'precision': None}},
        'steps': 3,
    }
    assert text.endswith('}\n') and os.listdir(tmp_path) == ['summary.json']


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path):
    """An error amid the content keeps the summary that was there."""
    summary.write_summary(tmp_path, {'final_step': 1})
    with pytest.raises(TypeError):
        summary.write_summary(tmp_path, {'final_step': object()})
    assert json.loads((tmp_path / 'summary.json').read_text()) == {'final_step': 1}


def test_versions_name_what_may_change_the_bits():
    """Packages, Python, device, their number and CPU threads are all there, as text."""
    found = summary.versions()
    assert {'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy'} < set(found)
    assert {'python', 'device', 'num_devices', 'cpu_threads'} < set(found)
    assert all(isinstance(value, str) and value for value in found.values())


def test_cpu_threads_are_those_pinned(monkeypatch):
    """NPROC, which decides the threads of XLA's CPU, is recorded where it is set."""
    monkeypatch.setenv('NPROC', '7')
    assert summary.versions()['cpu_threads'] == '7'
    monkeypatch.delenv('NPROC')
    assert summary.versions()['cpu_threads'] == str(os.cpu_count())


def test_parameters_are_elements():
    """num_parameters counts elements of all leaves."""
    assert summary.num_parameters({'a': jnp.zeros((2, 3)), 'b': {'c': jnp.zeros(4)}}) == 10
