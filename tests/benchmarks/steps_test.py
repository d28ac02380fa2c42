"""Models are compared with the first model in the same rounds; a failure does not stop others."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.benchmarks import steps
from moddepth_jax.benchmarks.steps import CompiledStep, compare_steps, with_model
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops

VARIANTS = {
    'dense': {},
    'moda': {'model.depth.stream': 'moda'},
    'mod': {'model.routing.router': 'learned'},
}


@pytest.fixture
def models(tiny_config):
    return {name: from_config(tiny_config(**knobs)) for name, knobs in VARIANTS.items()}


@pytest.fixture
def fake_steps(monkeypatch):
    """Steps that are not compiled; their seconds, by hparams."""
    seconds = {}

    class Step:
        trace_seconds, compile_seconds, temp_bytes, instructions = 1.0, 2.0, 3, 4
        state = type('State', (), {'params': {'kernel': np.zeros((3, 4))}})

        def __init__(self, hparams):
            self.hparams = hparams
            if seconds[hparams] is None:
                raise RuntimeError('RESOURCE_EXHAUSTED: out of memory')

        def __call__(self):
            return jnp.zeros(1)

    def time_interleaved(calls, repeats):
        return {name: np.full(repeats, seconds[step.hparams]) for name, step in calls.items()}

    monkeypatch.setattr(steps, 'CompiledStep', Step)
    monkeypatch.setattr(steps, 'time_interleaved', time_interleaved)
    return seconds


def test_saving_is_flop_ratio_over_time_ratio(models, fake_steps):
    """MoD at half of the dense time; a model that runs out of memory has one line."""
    fake_steps |= {models['dense']: 2.0, models['mod']: 1.0, models['moda']: None}
    result = compare_steps(models, repeats=3)
    json.dumps(result)
    dense, moda, mod = result['rows']
    assert moda == {'model': 'moda', 'failed': 'out of device memory'}
    assert dense['time_ratio'] == dense['realised_saving'] == 1
    assert mod['time_ratio'] == 0.5 and mod['parameters'] == 12
    flops = train_step_flops(models['dense']) / train_step_flops(models['mod'])
    assert mod['realised_saving'] == pytest.approx(2 / flops)
    assert mod['tokens_per_second'] == 4 * 32
    table = steps.steps_table('a title', result['rows'])
    assert table.heads == ['', 'dense', 'MoDA', 'MoD']
    assert table.lines['time / dense'] == ['1.000', 'out of device memory', '0.500']
    with pytest.raises(ValueError, match='the moda model cannot run: out of device memory'):
        compare_steps({'moda': models['moda']}, repeats=1)


@pytest.mark.slow
def test_memory_of_the_scanned_form_is_linear_in_depth(models):
    """Each slot is stored once: equal differences of depth add equal numbers of bytes."""
    bytes_of = {
        depth: CompiledStep(with_model(models['moda'], num_layers=depth)).temp_bytes
        for depth in (4, 8, 16)
    }
    assert 0 < bytes_of[4] < bytes_of[8]
    growth = (bytes_of[16] - bytes_of[8]) / (bytes_of[8] - bytes_of[4])
    assert growth == pytest.approx(2, rel=0.1), bytes_of
