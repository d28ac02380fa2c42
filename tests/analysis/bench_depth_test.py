"""The depth benchmark compiles and times real steps, and memory grows with depth as it should."""

import json
import math

import pytest

from moddepth_jax.benchmarks import depth as bench_depth
from moddepth_jax.benchmarks.depth import CompiledStep, with_model
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops

pytestmark = pytest.mark.usefixtures('compiled_in_haste')


@pytest.fixture(scope='module')
def models(tiny_config):
    """The dense and the MoDA model of one shape, 2 layers."""
    streams = ({}, {'model.depth.stream': 'moda'})
    return [from_config(tiny_config(**stream)) for stream in streams]


@pytest.mark.slow
def test_memory_of_the_scanned_form_is_linear_in_depth(tiny_config):
    """Twice as many layers more, twice as many bytes more: each slot is stored once."""
    hparams = from_config(tiny_config(**{'model.depth.stream': 'moda'}))
    bytes_of = {
        depth: CompiledStep(with_model(hparams, num_layers=depth)).temp_bytes
        for depth in (4, 8, 16)
    }
    assert 0 < bytes_of[4] < bytes_of[8]
    growth = (bytes_of[16] - bytes_of[8]) / (bytes_of[8] - bytes_of[4])
    assert growth == pytest.approx(2, rel=0.1), bytes_of


def test_unrolled_forms_end_at_their_depth(models, monkeypatch):
    """Every form at a depth that allows it, the scanned ones beyond; their rows hold numbers."""
    compiled = []

    class Step:
        trace_seconds, compile_seconds, temp_bytes = 1.0, 2.0, 3

        def __init__(self, hparams):
            compiled.append(hparams.model)

        def __call__(self):
            return 0

    monkeypatch.setattr(bench_depth, 'CompiledStep', Step)
    result = bench_depth.bench_depth(*models, depths=[2, 4], unrolled_up_to=2, repeats=3)
    json.dumps(result)
    rows = result['rows']
    assert [row['depth'] for row in rows] == [2] * 6 + [4] * 3
    assert {row['layer_loop'] for row in rows[6:]} == {'scan'}
    for row, model in zip(rows, compiled, strict=True):
        stream = {'dense': 'residual', 'moda': 'moda'}[row['model']]
        assert model.depth.stream == stream
        knobs = ('layer_loop', 'remat', 'num_layers')
        said = (row['layer_loop'], row['remat'], row['depth'])
        assert tuple(getattr(model, knob) for knob in knobs) == said
    assert len({tuple(row.values())[:4] for row in rows}) == 9


@pytest.mark.slow
def test_a_deep_stack_is_measured(models):
    """Real steps: bytes, seconds and ratios are positive; the baseline is once itself."""
    result = bench_depth.bench_depth(*models, depths=[3], unrolled_up_to=2, repeats=2)
    numbers = ('temp_bytes', 'trace_seconds', 'compile_seconds', 'step_seconds', 'over_baseline')
    for row in result['rows']:
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in numbers)
    dense, moda_block, moda_none = result['rows']
    assert dense['over_baseline'] == 1
    # Slots are kept in the one case, and with them what the blocks computed in the other.
    assert dense['temp_bytes'] < moda_block['temp_bytes'] < moda_none['temp_bytes']


def test_cost_compares_time_with_flops(models, monkeypatch):
    """The quotient is of ratios moda / dense, at equal remat."""
    ticks = {('residual', 'block'): 2.0, ('moda', 'block'): 3.0}
    ticks |= {('residual', 'none'): 1.0, ('moda', 'none'): 4.0}
    monkeypatch.setattr(bench_depth, 'CompiledStep', lambda hparams: hparams.model)

    def in_turn(steps, repeats):
        return {key: ticks[model.depth.stream, model.remat] for key, model in steps.items()}

    monkeypatch.setattr(bench_depth, 'time_interleaved', in_turn)
    result = bench_depth.bench_cost(*models, repeats=3)
    json.dumps(result)
    dense, moda = map(train_step_flops, models)
    assert result['flops_ratio'] == moda / dense
    block, none = result['rows']
    assert (block['remat'], none['remat']) == ('block', 'none')
    assert (block['time_ratio'], none['time_ratio']) == (1.5, 4.0)
    assert block['time_over_flops'] == pytest.approx(1.5 * dense / moda)
