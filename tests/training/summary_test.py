"""summary.json is complete and valid JSON."""

import json
import math
import os
import types

import jax
import pytest

from moddepth_jax.conversion.transfer_params import abstract_params
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import forward_flops
from moddepth_jax.training import summary
from moddepth_jax.training.mesh import make_mesh, replicated
from moddepth_jax.training.summary import step_flops_report
from moddepth_jax.training.train_step import init_state


def test_the_estimate_of_xla_counts_all_layers_and_no_recomputation(tiny_config):
    """It exceeds the formula only by elementwise work and masked pairs."""
    config = tiny_config(**{'model.routing.router': 'learned', 'data.sequence_length': 320})
    flops = step_flops_report(from_config(config), 4)
    assert 1 < flops['flops_per_step_xla'] / flops['flops_per_step'] < 2


def _summarize(hparams, evaluation, monkeypatch):
    """The summary after four steps, without what needs a trained state."""
    for name in ('step_flops_report', 'state_sha256'):
        monkeypatch.setattr(summary, name, lambda *_: {})
    step = jax.device_put(4, replicated(make_mesh('data=1')))
    state = types.SimpleNamespace(step=step, num_steps=4, skipped=0, params={})
    dataset = types.SimpleNamespace(
        epochs=lambda step: 1.0, corpus=types.SimpleNamespace(sha256='')
    )
    metadata = {'train_loss': 1.0, 'seconds': 2.0, 'versions': {}, 'extended': []}
    metadata['metrics_problems'] = []
    return summary.summarize(hparams, state, evaluation, dataset, metadata)


def test_routed_layers_and_layers_with_experts_have_separate_groups(tiny_config, monkeypatch):
    """Each group has the indices of its layers; `eval` has the values of the full model."""
    changes = {'model.routing.router': 'learned', 'model.experts.choice': 'token'}
    hparams = from_config(tiny_config(**changes))
    evaluation = {'loss': 1.5, 'routing': {'recall': [0.5]}, 'experts': {'unused': [0.0, 3.0]}}
    found = _summarize(hparams, evaluation, monkeypatch)
    assert found['flops_per_forward'] == forward_flops(hparams, 4, 32)
    assert found['eval'] == {'loss': 1.5}
    assert found['routing'] == {'layer_01': {'recall': 0.5}}
    assert found['experts'] == {'layer_00': {'unused': 0.0}, 'layer_01': {'unused': 3.0}}


def test_the_steps_of_a_run_that_draws_its_loops_cost_their_mean(tiny_config, monkeypatch):
    """Regression: a stage had the FLOPs of a step with all loops of the model."""
    changes = {'model.looped_layers': 'all', 'model.loops': 3, 'training.loops': (1, 3)}
    found = _summarize(from_config(tiny_config(**changes)), {'loss': 1.5}, monkeypatch)
    (stage,) = found['stages']
    assert 4 * stage['flops_per_step'] == found['total_flops'] < 12 * found['flops_per_forward']


@pytest.mark.parametrize(
    ('stream', 'words'),
    [
        ('residual', None),
        ('moda', 'MoDA with attention+ffn slots (projected where skipped)'),
        ('hyper_connections', 'dynamic hyper-connections of 4 streams'),
    ],
)
def test_a_run_names_its_stream(stream, words, tiny_config):
    """In the words of the class. A sum of blocks needs none."""
    changes = {'model.depth.stream': stream, 'model.routing.router': 'learned'}
    hparams = from_config(tiny_config(**changes))
    *_, last = summary._describe_model(hparams, hparams.stages[-1])
    assert last == words if words else ' of 32 tokens by ' in last


@pytest.mark.parametrize(
    ('gate', 'rule', 'noted'),
    [('none', 'predictor', 1), ('none', 'aux_loss', 0), ('sigmoid', 'predictor', 0)],
)
def test_a_router_that_nothing_trains_is_noted(gate, rule, noted, tiny_config):
    """Without a gate or an auxiliary loss no gradient reaches its parameters."""
    knobs = {'router': 'learned', 'gate': gate, 'causal_rule': rule}
    hparams = from_config(tiny_config(**{f'model.routing.{key}': x for key, x in knobs.items()}))
    dataset = types.SimpleNamespace(
        corpus=types.SimpleNamespace(description=''), domain_epochs=lambda steps: {}, epochs=float
    )
    lines = summary.describe(hparams, 2, abstract_params(hparams), dataset)
    assert sum('nothing trains the router' in line for line in lines) == noted


def test_numbers_that_are_not_finite_are_null(tmp_path):
    values = {'loss': math.nan, 'routing': {'layer_01': {'precision': [-math.inf]}}, 'steps': 3}
    summary.write_summary(tmp_path, values)
    with pytest.raises(TypeError):
        summary.write_summary(tmp_path, {'final_step': object()})
    text = (tmp_path / 'summary.json').read_text()
    expected = {'loss': None, 'routing': {'layer_01': {'precision': [None]}}, 'steps': 3}
    assert json.loads(text, parse_constant=pytest.fail) == expected
    assert text.endswith('}\n') and os.listdir(tmp_path) == ['summary.json']


def test_versions_name_what_may_change_the_bits(monkeypatch):
    monkeypatch.setenv('NPROC', '7')
    found = summary.versions()
    assert {'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy'} < set(found)
    assert {'python', 'device', 'num_devices'} < set(found) and found['cpu_threads'] == '7'
    assert all(isinstance(value, str) and value for value in found.values())
    monkeypatch.delenv('NPROC')
    # Regression: the CPUs of the machine were counted, while XLA has a thread per usable CPU.
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0, 3, 5})
    assert summary.versions()['cpu_threads'] == '3'
    monkeypatch.delattr(os, 'sched_getaffinity')  # as on macOS
    assert summary.versions()['cpu_threads'] == str(os.cpu_count())


def test_the_table_of_parameters_counts_each_once(tiny_config):
    """The model has six layers, three of them routed; the last one writes no slots."""
    changes = {'num_layers': 6, 'routing.router': 'learned', 'depth.stream': 'moda'}
    hparams = from_config(tiny_config(**{f'model.{name}': v for name, v in changes.items()}))
    params = jax.eval_shape(lambda: init_state(hparams, 1)).params
    _, *rows, last = summary.parameter_lines(params)
    layers = {row[:12].strip(): row[12:18].strip() for row in rows}
    assert layers == {
        'embedding': '', 'head': '', 'attention': '6', 'mlp': '6', 'norms': '6', 'router': '3',
        'predictor': '3', 'stream': '5',
    }  # fmt: skip
    sizes = [int(row[20:].split()[0].replace(',', '')) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(sizes) == total == summary.num_parameters(params) and f'{total:,}' in last
