"""What blocks read and add is what makes the model's stream and its logits."""

import jax
import numpy as np
import pytest

from moddepth_jax.analysis import layer_deltas as module
from moddepth_jax.analysis import layer_walk
from moddepth_jax.analysis.layer_deltas import entropies, layer_deltas
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ATTENTION,
    AVERAGE,
    DENSE,
    FAST,
    MODA,
    ROUTED,
    compiled,
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
}

RARE = ('moda_random', 'dense', 'average', 'attention')
SLOW = pytest.mark.slow


@pytest.fixture(scope='module', autouse=True)
def fast():
    """Programs that run once are compiled the quick way."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, static in (
            (module, '_visit', ('stack', 'kind')),
            (layer_walk, '_begin', ('hparams', 'routing')),
        ):
            slow = getattr(place, name).__wrapped__
            patch.setattr(place, name, jax.jit(slow, static_argnames=static, compiler_options=FAST))
        yield


@pytest.mark.parametrize('name', [pytest.param(n, marks=SLOW if n in RARE else ()) for n in CASES])
def test_deltas_make_the_stream_and_the_logits(tiny_config, name):
    """Each block's input and gated delta sum up to the next one's input, the last to the final
    stream; logits and records are the model's; who did not enter has no delta.
    """
    *knobs, routing = CASES[name]
    hparams = small_hparams(tiny_config, THREE, *knobs)
    variables = random_variables(hparams, TOKENS_BT)
    found = jax.device_get(layer_deltas(variables, hparams, TOKENS_BT, SEGMENTS_BT, routing))

    def model(variables):
        return Transformer(hparams).apply(variables, TOKENS_BT, SEGMENTS_BT, routing)

    logits_BTV, records = compiled(model, variables)(variables)
    np.testing.assert_allclose(found.logits_BTV, logits_BTV, atol=1e-5, rtol=1e-5)
    assert jax.tree.structure(found.records) == jax.tree.structure(records)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.records, records)

    selected_LBT = found.selected_LBT
    routed = list(hparams.model.routed_layers)
    dense = [layer for layer in range(3) if layer not in routed]
    assert (selected_LBT[dense] == (SEGMENTS_BT > 0)).all() and (found.gates_LBT[dense] == 1).all()
    if routed:
        assert (selected_LBT[routed] == records.routing.selected_BT).all()
        assert 0 < selected_LBT[routed].sum() < (SEGMENTS_BT > 0).sum() * len(routed)
        left_out = ~selected_LBT[routed]
        assert not found.deltas_LBTD[routed][left_out].any()
        assert not found.gates_LBT[routed][left_out].any()
    assert np.abs(found.deltas_LBTD).max(axis=-1)[selected_LBT].min() > 1e-3
    if hparams.model.depth.stream in ('residual', 'moda'):
        sums_LBTD = found.inputs_LBTD + found.gates_LBT[..., None] * found.deltas_LBTD
        following = np.concatenate([found.inputs_LBTD[1:], found.final_BTD[None]])
        np.testing.assert_allclose(sums_LBTD, following, atol=1e-5, rtol=1e-5)
        embedding_VD = variables['params']['embedding']
        np.testing.assert_array_equal(found.inputs_LBTD[0], embedding_VD[TOKENS_BT])


def test_entropies_of_known_distributions():
    """Equal logits have ln V nats whatever their height, a certain one 0, two of four ln 2."""
    logits_BTV = np.array([[[7.0] * 4, [99, 0, 0, 0], [50, 50, 0, 0]]], np.float32)
    expected = [[np.log(4), 0, np.log(2)]]
    np.testing.assert_allclose(entropies(logits_BTV), expected, atol=1e-6)
