"""Models are compared with the dense one of the same rounds; one that fails stops nobody."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.analysis import bench_models
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops


def test_saving_is_time_ratio_over_flop_ratio(tiny_config, monkeypatch):
    """MoD at half of the dense time; a model that runs out of memory has one line."""
    seconds = {'residual': 2.0, 'routed': 1.0}

    class Step:
        trace_seconds, compile_seconds, temp_bytes = 1.0, 2.0, 3

        class state:
            params = {'kernel': np.zeros((3, 4))}

        def __init__(self, hparams):
            if hparams.model.depth.stream == 'moda':
                raise RuntimeError('RESOURCE_EXHAUSTED: out of memory')
            self.routed = bool(hparams.model.routed_layers)

        def __call__(self):
            return jnp.zeros(1)

    def in_turn(calls, repeats, settle):
        kinds = {name: 'routed' if step.routed else 'residual' for name, step in calls.items()}
        return {name: np.full(repeats, seconds[kind]) for name, kind in kinds.items()}

    monkeypatch.setattr(bench_models, 'CompiledStep', Step)
    monkeypatch.setattr(bench_models, 'in_turn', in_turn)
    routed = {'model.routing.router': 'learned'}
    models = {'dense': {}, 'moda': {'model.depth.stream': 'moda'}, 'mod': routed}
    models = {name: from_config(tiny_config(**knobs)) for name, knobs in models.items()}
    result = bench_models.bench_models(models, repeats=3)
    json.dumps(result)
    dense, moda, mod = result['rows']
    assert moda == {'model': 'moda', 'failed': 'out of device memory'}
    assert dense['over_dense'] == dense['realised_saving'] == 1
    assert mod['over_dense'] == 0.5 and mod['parameters'] == 12
    flops = train_step_flops(models['dense']) / train_step_flops(models['mod'])
    assert mod['realised_saving'] == pytest.approx(2 / flops)
    assert mod['tokens_per_second'] == 4 * 32
    assert jax.default_backend() == 'cpu'
