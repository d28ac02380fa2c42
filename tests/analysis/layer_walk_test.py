"""Inputs and deltas of blocks add up to the model's stream and logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.analysis.layer_walk import entropies, layer_deltas, relative_change
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ATTENTION,
    AVERAGE,
    DENSE,
    FIRST_KEYS,
    GROWS,
    HYPER,
    MODA,
    MUDD,
    OF_ATTENTION,
    OF_MLP,
    RECURSIONS,
    ROUTED,
    SOURCES,
    VALUES,
    random_variables,
    small_hparams,
)

T = 12
SEGMENTS_BT = np.array([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4], np.int32)
TOKENS_BT = np.random.default_rng(0).integers(0, 32, (2, T)).astype(np.int32)
THREE = {'model.num_layers': 3}
CASES = {
    'pre': ({'model.routing.layers': '1,2'}, ROUTED, 'top_c'),
    'post': ({'model.norm_placement': 'post'}, ROUTED, 'predictor'),
    'reordered': ({'model.norm_placement': 'reordered', 'model.tie_embeddings': True}, {}, 'dense'),
    'moda': (MODA, ROUTED | {'model.depth.skipped_slots': 'masked'}, 'predictor'),
    'moda_random': (MODA, ROUTED | {'model.routing.router': 'random'}, 'top_c'),
    'dense': (DENSE, {}, 'dense'),
    'average': (AVERAGE, {}, 'dense'),
    'attention': (ATTENTION, {}, 'dense'),
    'values': (VALUES, ROUTED, 'predictor'),
    'sources': (SOURCES, ROUTED, 'predictor'),
    'hyper': (HYPER, ROUTED, 'predictor'),
    'mudd': (MUDD, {}, 'dense'),
    'attention alone': (ROUTED, OF_ATTENTION | {'model.norm_placement': 'post'}, 'top_c'),
    'mlp alone': (ROUTED, OF_MLP, 'predictor'),
    'recursions': (RECURSIONS, {'model.routing.loop_update': 'change'}, 'predictor'),
    'first keys': (
        RECURSIONS | FIRST_KEYS | GROWS,
        {'model.routing.loop_update': 'change'},
        'predictor',
    ),
}

RARE = ('pre', 'moda_random', 'dense', 'average', 'attention', 'values', 'sources', 'hyper', 'mudd')
RARE += ('attention alone', 'first keys')
SLOW = pytest.mark.slow


@pytest.mark.parametrize('name', [pytest.param(n, marks=SLOW if n in RARE else ()) for n in CASES])
def test_deltas_add_up_to_the_stream_and_the_logits(tiny_config, name):
    """Each block's input plus gated delta is the next input, and after the last the final stream.

    Logits and records are the model's; skipping tokens have no delta. Of a routed sublayer it is
    the input that its router reads, and only of an mlp the next stream.
    """
    *knobs, routing = CASES[name]
    hparams = small_hparams(tiny_config, THREE, *knobs)
    variables = random_variables(hparams, TOKENS_BT)
    found = jax.device_get(layer_deltas(variables, hparams, TOKENS_BT, SEGMENTS_BT, routing))

    def model(variables):
        return Transformer(hparams).apply(variables, TOKENS_BT, SEGMENTS_BT, routing)

    logits_BTV, records = jax.jit(model)(variables)
    np.testing.assert_allclose(found.logits_BTV, logits_BTV, atol=1e-5, rtol=1e-5)
    assert jax.tree.structure(found.records) == jax.tree.structure(records)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.records, records)

    selected_LBT = found.selected_LBT
    routed = list(hparams.model.routed_layers)
    dense = [layer for layer in range(3) if layer not in routed]
    assert (selected_LBT[dense] == (SEGMENTS_BT > 0)).all()
    gates_LBT = np.ones(selected_LBT.shape)
    if routed:
        assert (selected_LBT[routed] == records.routing.selected_BT).all()
        assert 0 < selected_LBT[routed].sum() < (SEGMENTS_BT > 0).sum() * len(routed)
        skipped = ~selected_LBT[routed]
        assert not found.deltas_LBTD[routed][skipped].any()
        gates_LBT[routed] = records.routing.gates_BT
    assert np.abs(found.deltas_LBTD).max(axis=-1)[selected_LBT].min() > 1e-3
    if hparams.model.depth.stream in ('residual', 'moda'):
        sums_LBTD = found.inputs_LBTD + gates_LBT[..., None] * found.deltas_LBTD
        following = np.concatenate([found.inputs_LBTD[1:], found.final_BTD[None]])
        part = hparams.model.routing.part
        other = {'block': [], 'attention': routed, 'mlp': [layer - 1 for layer in routed]}[part]
        known = [layer for layer in range(3) if layer not in other]
        np.testing.assert_allclose(sums_LBTD[known], following[known], atol=1e-5, rtol=1e-5)
        embedding_VD = variables['params']['embedding']
        np.testing.assert_array_equal(found.inputs_LBTD[0], embedding_VD[TOKENS_BT])


def test_entropies_of_known_distributions():
    """Equal logits have ln V nats, a certain one 0, two of four ln 2."""
    logits_BTV = np.array([[[7.0] * 4, [99, 0, 0, 0], [50, 50, 0, 0]]], np.float32)
    expected = [[np.log(4), 0, np.log(2)]]
    np.testing.assert_allclose(entropies(logits_BTV), expected, atol=1e-6)


def test_relative_change_is_a_ratio_of_norms():
    """A delta of (3, 4) on an input of (0, 10) is 0.5, also in bfloat16; no delta gives 0."""
    inputs_LBTD = np.array([[[[0, 10], [0, -10]]]], np.float32)
    deltas_LBTD = np.array([[[[3, 4], [0, 0]]]], np.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        change_LBT = relative_change(jnp.asarray(inputs_LBTD, dtype), deltas_LBTD)
        assert change_LBT.dtype == jnp.float32
        np.testing.assert_allclose(change_LBT, [[[0.5, 0]]], rtol=1e-6)
