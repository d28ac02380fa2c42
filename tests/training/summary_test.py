"""summary.json is complete, valid JSON; FLOPs equal the trace; each parameter is counted once."""

import json
import math
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import summary
from moddepth_jax.training.summary import parameter_lines, parameter_parts
from moddepth_jax.training.train_step import init_state


@pytest.mark.parametrize(
    ('router', 'length'),
    [
        ('learned', 320),
        ('none', 64),
        pytest.param('none', 320, marks=pytest.mark.slow),
        pytest.param('learned', 64, marks=pytest.mark.slow),
    ],
)
def test_counted_flops_are_those_of_the_trace(tiny_config, router, length):
    """Counted FLOPs of a step are within 1% of the products in its trace without recomputation.

    The executed step costs more, since blocks are recomputed and attention is cut into blocks;
    XLA's estimate, with elementwise work, is similar.
    """
    config = tiny_config(**{'model.routing.router': router, 'data.sequence_length': length})
    flops = summary.step_flops_report(from_config(config), 4)
    counted = flops['flops_per_step']
    assert flops['flops_per_step_dot_general'] == pytest.approx(counted, rel=0.01)
    assert 1.1 < flops['flops_per_step_executed'] / counted < 2
    assert 1 < flops['flops_per_step_xla'] / counted < 2


@pytest.mark.slow
def test_unused_places_of_experts_are_not_counted(tiny_config):
    """Half of the choices fall on experts that do nothing; their traced products do not count.

    Nor does the forward pass that counts the loads of a step of micro-batches; but it is executed.
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


def test_ratios_are_grouped_by_layer():
    """Lists and arrays over layers become numbers and lists of each layer, by its index."""
    ratios = {'recall': [0.5, 0.25], 'load': np.float32([[0.5, 0.5], [1, 0]])}
    assert summary.by_layer((1, 11), ratios) == {
        'layer_01': {'recall': 0.5, 'load': [0.5, 0.5]},
        'layer_11': {'recall': 0.25, 'load': [1.0, 0.0]},
    }
    assert summary.by_layer((), {}) == {}


def test_routed_layers_and_layers_with_experts_have_separate_groups(tiny_config, monkeypatch):
    """Each by the indices of its layers; `eval` has the values of the whole model."""
    changes = {'model.routing.router': 'learned', 'model.experts.choice': 'token'}
    hparams = from_config(tiny_config(**changes))
    for name in ('step_flops_report', 'state_sha256'):
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


def test_a_summary_that_cannot_be_written_does_not_replace_the_old_one(tmp_path):
    """An error inside the content keeps the previous summary."""
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


@pytest.fixture(scope='module')
def params(tiny_config):
    """Of six layers, three of them routed, with MoDA slots that the last layer does not write.

    Layers fall into several runs, so that a part's layers have to be summed over them.
    """
    changes = {'num_layers': 6, 'routing.router': 'learned', 'depth.stream': 'moda'}
    hparams = from_config(tiny_config(**{f'model.{name}': v for name, v in changes.items()}))
    return jax.eval_shape(lambda: init_state(hparams, 1)).params


def test_each_parameter_is_counted_once(params):
    assert sum(part.parameters for part in parameter_parts(params)) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )


def test_parts_name_their_layers_and_arrays(params):
    found = {part.name: part for part in parameter_parts(params)}
    layers = {name: part.layers for name, part in found.items()}
    assert layers == {
        'embedding': 0, 'head': 0, 'attention': 6, 'mlp': 6, 'norms': 6, 'router': 3,
        'predictor': 3, 'stream': 5,
    }  # fmt: skip
    assert set(found['attention'].arrays) == {'query', 'key', 'value', 'out'}
    mlp = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params)
           if 'mlp' in [getattr(key, 'key', None) for key in path]]  # fmt: skip
    assert found['mlp'].parameters == sum(mlp)


def test_lines_fall_by_size_and_end_with_the_sum(params):
    header, *rows, last = parameter_lines(params)
    sizes = [int(row[20:].split()[0].replace(',', '')) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert f'{sum(sizes):,}' in last and 'share' in header
    assert all(line == line.rstrip() for line in (header, *rows, last))
