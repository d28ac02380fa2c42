"""The importance of a block is the loss increase without it."""

import jax
import numpy as np
import pytest

from moddepth_jax.analysis import importance
from moddepth_jax.analysis.importance import PARTS, block_importance, check_importance, skip_parts
from moddepth_jax.analysis.layer_walk import layer_deltas
from moddepth_jax.conversion.from_layers import take_layers, with_layers
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.training.evaluate import eval_step, evaluate
from moddepth_jax.training.mesh import make_mesh
from tests.model.cases import (
    ADAPTERS,
    LOOPED,
    REORDERED,
    ROUTED,
    experts,
    random_variables,
    small_hparams,
)

T = 16
SIZES = {'model.num_layers': 3, 'data.sequence_length': T}
TOKENS_BT = np.random.default_rng(0).integers(0, 32, (2, T)).astype(np.int32)


def test_the_cost_of_a_block_is_the_loss_without_it(tiny_config):
    """The loss equals that of a model without the layer, and one program serves all layers."""
    hparams, smaller = (from_config(tiny_config(**SIZES | {'model.num_layers': n})) for n in (3, 2))
    variables = random_variables(hparams, TOKENS_BT)
    dataset, mesh, passes = make_dataset(hparams.data, 0), make_mesh('data=1'), []
    traced = eval_step._cache_size(), skip_parts._cache_size()

    def loss(variables, hparams):
        return evaluate(variables, hparams, dataset, mesh, 2, 'dense')

    with jax.set_mesh(mesh):
        found = block_importance(
            variables, hparams, dataset, mesh, 2, 'dense', lambda: passes.append(1)
        )
        assert (eval_step._cache_size(), skip_parts._cache_size()) == (traced[0] + 1, traced[1] + 1)
        assert len(passes) == 1 + 3 * len(PARTS)
        base = loss(variables, hparams)
        assert {name: found[name] for name in ('loss', 'bits_per_byte', 'targets')} == {
            name: base[name] for name in ('loss', 'bits_per_byte', 'targets')
        }
        for layer, row in enumerate(found['blocks']):
            others = ','.join(str(n) for n in range(3) if n != layer)
            assert with_layers(hparams, smaller, others)[0] == smaller
            params = take_layers(hparams, variables['params'], smaller, others)
            wanted = loss({'params': params}, smaller)
            assert row['layer'] == layer and not row['routed']
            for name, cost in (('loss', 'cost'), ('bits_per_byte', 'cost_bits')):
                assert row['block'][name] == pytest.approx(wanted[name], abs=1e-5)
                for part in PARTS:
                    assert row[part][cost] == row[part][name] - base[name]
    costs = [row['block']['cost'] for row in found['blocks']]
    assert found['ranking'] == np.argsort(costs).tolist()
    assert all(
        row['block']['loss'] != row[part]['loss']
        for row in found['blocks']
        for part in ('attention', 'mlp')
    )


CASES = {
    'routed': (ROUTED | REORDERED | {'model.use_bias': True}, 'predictor'),
    'experts': (experts(layers='1', num_shared=1), 'dense'),
    'looped, with adapters': (LOOPED | ADAPTERS, 'dense'),
}


@pytest.mark.parametrize('name', CASES)
def test_a_skipped_block_adds_nothing(tiny_config, name):
    """For all kinds of blocks. A looped block is skipped in all loops; other blocks still add."""
    knobs, routing = CASES[name]
    hparams = small_hparams(tiny_config, SIZES, knobs)
    variables = random_variables(hparams, TOKENS_BT)
    kept_L2 = np.array([[True] * 2, [False] * 2, [True] * 2])
    params = skip_parts(variables['params'], kept_L2, model=hparams.model)
    found = layer_deltas(
        variables | {'params': params}, hparams, TOKENS_BT, np.ones_like(TOKENS_BT), routing
    )
    skipped = np.array(hparams.model.block_order) == 1
    assert not np.any(found.deltas_LBTD[skipped])
    assert np.abs(found.deltas_LBTD[~skipped]).max(axis=(1, 2, 3)).min() > 1e-3


def test_no_token_exits_the_loops(tiny_config, monkeypatch):
    """Regression: costs had the exits of the run, which a skipped part moves."""
    exits = LOOPED | {'model.loop_exit_threshold': 0.5}
    hparams, used = small_hparams(tiny_config, SIZES, exits), []

    def evaluate(variables, hparams, *others):
        used.append(hparams.model)
        return {'loss': 1.0, 'bits_per_byte': 1.0, 'targets': 1}

    monkeypatch.setattr(importance, 'evaluate', evaluate)
    block_importance({'params': {'stack': {}}}, hparams, None, None, 1, 'dense')
    assert {*used} == {small_hparams(tiny_config, SIZES, LOOPED).model}


def test_a_norm_after_a_skipped_part_is_refused(tiny_config):
    hparams = from_config(tiny_config(**{'model.norm_placement': 'post'}))
    with pytest.raises(ValueError, match="model.norm_placement='post': must be pre or reordered"):
        check_importance(hparams.model)
