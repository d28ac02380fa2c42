"""New routers and slots change a dense model as little as possible."""

import functools

import jax
import numpy as np
import pytest

from moddepth_jax.conversion import init_from_dense
from moddepth_jax.conversion.init_from_dense import (
    RIDGE,
    SLOTS,
    Moments,
    fit_routers,
    fit_slots,
    layer_moments,
)
from moddepth_jax.conversion.transfer_params import transfer_params
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from tests.conversion.transfer_params_test import random_params

DENSE = {'model.num_layers': 3, 'model.norm_placement': 'pre'}
ROUTED = {
    'model.routing.router': 'learned',
    'model.routing.layers': '1,2',
    'model.routing.capacity': 1.0,
    'model.routing.causal_rule': 'threshold',
}
MODA = {'model.depth.stream': 'moda', 'model.depth.attention_slot_projection': True}


@pytest.fixture(scope='module')
def dense(tiny_config):
    """Hyper-parameters, parameters, a batch, and logits of a dense model with a shared direction.

    As in a trained model, the common part of the tokens' streams is larger than their differences.
    """
    return make_dense(tiny_config)


def make_dense(tiny_config, **changes):
    hparams = from_config(tiny_config(**DENSE, **changes))
    params = random_params(hparams)
    params['embedding'] += 0.3
    tokens_BT = np.random.default_rng(2).integers(0, 257, (8, 32))
    batch = {'tokens_BT': tokens_BT, 'segment_ids_BT': np.ones_like(tokens_BT)}
    logits_BTV, _ = jax.jit(Transformer(hparams).apply)({'params': params}, tokens_BT)
    return hparams, params, batch, logits_BTV


def converted(dense, target):
    source, given, batch, _ = dense
    params, _ = transfer_params(source.model, given, target)
    return params, layer_moments(source.model, given, target.model, [batch])


@pytest.mark.parametrize(
    ('gate', 'part'),
    [
        ('raw', 'block'),
        pytest.param('sigmoid', 'block', marks=pytest.mark.slow),
        pytest.param('raw', 'attention', marks=pytest.mark.slow),
        pytest.param('raw', 'mlp', marks=pytest.mark.slow),
    ],
)
def test_fitted_gates_leave_the_model_near_to_itself(gate, part, dense, tiny_config):
    """Much nearer than with untrained routers; the error of each layer is measured."""
    tokens_BT, wanted_BTV = dense[2]['tokens_BT'], dense[3]
    knobs = {'model.routing.gate': gate, 'model.routing.part': part}
    target = from_config(tiny_config(**DENSE, **ROUTED, **knobs))
    params, moments = converted(dense, target)
    fitted, errors = fit_routers(params, target.model, moments)
    apply, averages = jax.jit(Transformer(target).apply), {'thresholds_R': np.zeros(2, np.float32)}
    before, after = (
        np.abs(apply({'params': p, 'averages': averages}, tokens_BT)[0] - wanted_BTV).mean()
        for p in (params, fitted)
    )
    assert after < min(0.1 * np.abs(wanted_BTV).mean(), before / 2)
    assert set(errors) == {1, 2} and all(0 < error < 0.5 for error in errors.values())


def test_gates_are_fitted_to_the_stream_that_routers_read(tiny_config):
    """Regression: the fit ignored the embedding residual, so gates were up to 2, with no error."""
    changes = {'model.embedding_residual': 'learned'}
    dense = make_dense(tiny_config, **changes)
    target = from_config(tiny_config(**DENSE, **ROUTED, **changes))
    params, moments = converted(dense, target)
    fitted, errors = fit_routers(params, target.model, moments)
    variables = {'params': fitted, 'averages': {'thresholds_R': np.zeros(2, np.float32)}}
    _, records = jax.jit(Transformer(target).apply)(variables, dense[2]['tokens_BT'])
    gates_RBT = np.asarray(records.routing.gates_BT)
    found_R = np.sqrt(np.mean((gates_RBT - 1) ** 2, axis=(1, 2)))
    assert found_R[0] == pytest.approx(errors[1], rel=1e-3)
    assert found_R[1] == pytest.approx(errors[2], rel=0.5)  # reads gated, not dense, output


@pytest.mark.parametrize('stream', ['hyper_connections', 'attention_residual'])
def test_routers_can_be_new_together_with_a_stream(stream, dense, tiny_config, monkeypatch):
    """Regression: the layers of the dense model were run with connections that they lack."""

    def traced(*args, model, kind):
        layer = functools.partial(_layer, model=model, kind=kind)
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(layer, *args))

    _layer = init_from_dense._layer
    monkeypatch.setattr(init_from_dense, '_layer', traced)
    target = from_config(tiny_config(**DENSE, **ROUTED, **{'model.depth.stream': stream}))
    source, params, batch, _ = dense
    moments = layer_moments(source.model, params, target.model, [batch])
    assert [layer.stream.count for layer in moments] == [0, 0, 0]


def test_scores_without_a_gate_have_unit_size(dense, tiny_config):
    """straight_through: w keeps its initial direction, and its sigmoid is not flat."""
    target = from_config(
        tiny_config(**DENSE | ROUTED | {'model.routing.router': 'straight_through'})
    )
    params, moments = converted(dense, target)
    fitted, errors = fit_routers(params, target.model, moments)
    before, after = (p['stack']['run_1']['layer_0']['router']['w'] for p in (params, fitted))
    assert errors == {}
    for i, layer in enumerate((1, 2)):
        assert moments[layer].stream.error(np.float64(after[i]), 0.0) == pytest.approx(1, rel=1e-4)
        ratio = after[i] / before[i]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)


@pytest.mark.parametrize('slots', ['attention+ffn', pytest.param('block', marks=pytest.mark.slow)])
def test_new_slots_have_values_of_0_and_little_weight(slots, dense, tiny_config):
    """Values are 0; a key meets the mean query of later layers with a logit near -strength."""
    changes = {**MODA, 'model.depth.slots': slots}
    changes['model.depth.attention_slot_projection'] = slots != 'block'
    target = from_config(tiny_config(**DENSE, **changes))
    params, moments = converted(dense, target)
    for strength in (0.0, 4.0):
        fitted = fit_slots(params, target.model, moments, strength)
        streams = fitted['stack']['run_0']['layer_0']['stream']
        assert streams.keys() == (
            {'block_slot'} if slots == 'block' else {'ffn_slot', 'attention_slot'}
        )
        for slot, leaves in streams.items():
            assert not leaves['value']['kernel'].any()
            for layer, key_DKH in enumerate(leaves['key']['kernel']):
                read = getattr(moments[layer], SLOTS[slot])
                k_KH = np.einsum('d,dkh->kh', read.first / read.count, key_DKH)
                for later in moments[layer + 1 :]:
                    q_KH = later.queries.first / later.queries.count
                    logit_K = np.sum(k_KH * q_KH, axis=1)
                    assert np.all((-1.3 * strength <= logit_K) & (logit_K <= -0.4 * strength))


def test_moments_give_the_ridge_solution():
    x_ND = np.random.default_rng(3).normal(1, 0.5, (50, 4))
    moments = Moments(x_ND.T @ x_ND, x_ND.sum(0), 50.0)
    w_D, ridge = moments.fit(2.0), RIDGE * np.mean(x_ND**2) * 50
    rows = np.concatenate([x_ND, np.sqrt(ridge) * np.eye(4)])
    wanted_D = np.linalg.lstsq(rows, np.concatenate([np.full(50, 2.0), np.zeros(4)]))[0]
    np.testing.assert_allclose(w_D, wanted_D, rtol=1e-9)
    error = np.sqrt(np.mean((x_ND @ w_D - 2) ** 2))
    assert moments.error(w_D, 2.0) == pytest.approx(error)
