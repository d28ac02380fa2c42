"""A run of several stages: each trains at its capacity and rule, also where a signal parted it."""

import json

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.plan import run_flops

pytestmark = [pytest.mark.usefixtures('compiled_once'), pytest.mark.slow]


@pytest.fixture(scope='module')
def hparams(tiny_config, corpus):
    """Five steps: two at capacity 1 by top-C, three at 1/4 by the threshold."""
    routing = {
        'router': 'learned',
        'capacity': 0.25,
        'capacity_stages': '1:0.4',
        'train_rule': 'threshold',
        'threshold_warmup': 0.4,
    }
    changes = {f'model.routing.{name}': value for name, value in routing.items()} | {
        'data.source': corpus,
        'data.held_out_fraction': 0.3,
        'training.num_steps': 5,
        'training.checkpoint_every': 5,
        'evaluation.every': 0,
    }
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def finished(hparams, tmp_path_factory, compiled_once):
    return loop.train(hparams, tmp_path_factory.mktemp('finished') / 'run')


def test_each_step_trains_by_its_stage(finished, hparams):
    """Rows show it, with a histogram a block; the summary names the stages and what they cost."""
    rows = [row for row in read_metrics(finished.workdir) if 'loss' in row]
    fractions = [row['routing/layer_01/selected_fraction'] for row in rows]
    refused = [row['routing/layer_01/refused_fraction'] for row in rows]
    assert fractions[:2] == [1.0] * 2 and refused[:2] == [0.0] * 2
    assert all(fraction <= 12 / 32 for fraction in fractions[2:])
    assert [len(row['routing/layer_01/sigmoid_histogram']) for row in rows] == [20] * 5
    summary = json.loads((finished.workdir / 'summary.json').read_text())
    stages = [(s['first_step'], s['capacity'], s['routing']) for s in summary['stages']]
    assert stages == [(0, 1.0, 'top_c'), (2, 0.25, 'threshold')]
    costs = [stage['flops_per_step'] for stage in summary['stages']]
    assert costs[0] > costs[1] == summary['flops_per_step']
    assert summary['total_flops'] == run_flops(hparams, 5) == 2 * costs[0] + 3 * costs[1]
    assert abs(summary['flops_per_step_dot_general'] / summary['flops_per_step'] - 1) < 0.01
    assert isinstance(summary['routing']['layer_01']['routing_gap'], float)


def test_stopped_between_stages_it_goes_on_alike(finished, hparams, tmp_path, signals):
    """Averages are saved with the rest: the resumed run ends in the same state."""
    signals[1] = 'SIGTERM'
    stopped = loop.train(hparams, tmp_path / 'broken')
    assert (stopped.signal, int(stopped.state.step)) == ('SIGTERM', 2)
    assert stopped.state.averages['thresholds_R'].shape == (1,)
    resumed = loop.train(hparams, tmp_path / 'broken')
    assert resumed.summary['state_sha256'] == finished.summary['state_sha256']
    assert resumed.summary['eval'] == finished.summary['eval']
