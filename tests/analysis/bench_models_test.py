"""Models are compared with the dense one of the same rounds; one that fails stops nobody."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.benchmarks import steps, tables
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.model.moe.grouped_matmul import block_rows, num_blocks


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

    monkeypatch.setattr(steps, 'CompiledStep', Step)
    monkeypatch.setattr(steps, 'time_interleaved', in_turn)
    routed = {'model.routing.router': 'learned'}
    models = {'dense': {}, 'moda': {'model.depth.stream': 'moda'}, 'mod': routed}
    models = {name: from_config(tiny_config(**knobs)) for name, knobs in models.items()}
    result = steps.bench_models(models, repeats=3)
    json.dumps(result)
    dense, moda, mod = result['rows']
    assert moda == {'model': 'moda', 'failed': 'out of device memory'}
    assert dense['over_dense'] == dense['realised_saving'] == 1
    assert mod['over_dense'] == 0.5 and mod['parameters'] == 12
    flops = train_step_flops(models['dense']) / train_step_flops(models['mod'])
    assert mod['realised_saving'] == pytest.approx(2 / flops)
    assert mod['tokens_per_second'] == 4 * 32
    assert jax.default_backend() == 'cpu'


@pytest.mark.parametrize('product', ['blocked', 'batched', 'ragged_dot'])
def test_executed_over_active_is_places_over_pairs(product, tiny_config):
    """In blocks: what fills up the last one of each expert; with no-op experts, their places."""
    knobs = {'model.experts.choice': 'token', 'model.experts.num_routed': 4}
    knobs |= {'model.experts.d_ff': 16, 'model.experts.product': product}
    pairs, places = 4 * 32 * 2, 4 * 32 * 2
    if product != 'ragged_dot':
        rows = block_rows(pairs, 4, product)
        places = num_blocks(pairs, 4, rows) * rows
        assert places > pairs
    for noop, share in ((0, 1.0), (4, 0.5)) if product == 'ragged_dot' else ((0, 1.0),):
        hparams = from_config(tiny_config(**knobs, **{'model.experts.num_noop': noop}))
        told = steps.grouped_products(hparams)
        assert told['product'] == product
        assert told['executed_over_active'] == pytest.approx(places / (share * pairs))
        assert told['ragged_dot_expansion'] > 4  # this CPU multiplies each row by each matrix
    assert steps.grouped_products(from_config(tiny_config())) is None


def test_table_of_models_with_experts():
    """It says which product ran and what ragged_dot would be; without experts it does not."""
    row = dict.fromkeys(('seconds', 'tokens_per_second', 'flops_per_second', 'over_dense'), 1.0)
    row |= dict.fromkeys(('flops_over_dense', 'realised_saving', 'parameters', 'temp_bytes'), 1.0)
    row |= {'model': 'dense', 'compile_seconds': 1.0, 'experts': None}
    told = {'product': 'blocked', 'executed_over_active': 1.25, 'ragged_dot_expansion': 8.5}
    other = told | {'product': 'ragged_dot', 'ragged_dot_expansion': 1.0}
    rows = [row, row | {'model': 'moe', 'experts': told}, row | {'model': 'staged'}]
    rows[2] |= {'experts': other}
    rows += [{'model': 'integrated', 'failed': 'out of device memory'}]
    result = {'batch': 1, 'length': 8, 'dtype': 'float32', 'attention': 'auto', 'rows': rows}
    _, heads, lines = tables.models_table(result, '2x64')
    assert heads == ['', 'dense', 'experts', 'MoDE staged', 'MoDE integrated']
    cells = [line[:3] for line in list(lines.values())[-3:]]
    assert cells[0] == ['-', 'blocked', 'ragged_dot'] and cells[1] == ['-', '1.250', '1.250']
    assert cells[2] == ['-', 'expanded, 8.5 x', 'grouped']
    assert all(line[3] == 'out of device memory' for line in lines.values())
    plain = tables.models_table(result | {'rows': rows[:1]}, '2x64')[2]
    assert list(plain) == list(lines)[:-3]
