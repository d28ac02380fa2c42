"""Attention on depth slots and first tokens is the softmax of queries and keys."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from kernels_pallas import depth_attention
from moddepth_jax.analysis import depth_mass as module
from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.hparams import from_config
from moddepth_jax.model import attention, stack_scan
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import RECURSIONS, random_variables

T = 16
SEGMENTS_BT = np.array([[1] * 6 + [2] * 10, [1] * 11 + [0] * 5], np.int32)
TOKENS_BT = np.random.default_rng(0).integers(0, 257, (2, T)).astype(np.int32)
BATCH = {'tokens_BT': TOKENS_BT, 'segment_ids_BT': SEGMENTS_BT}
MODA = {'model.depth.stream': 'moda', 'model.num_layers': 3}
ROUTED = MODA | {
    'model.routing.router': 'position',
    'model.routing.capacity': 0.5,
    'model.routing.layers': '1,2',
}


def make_model(tiny_config, **changes):
    """(variables, hparams) with weights so large that no softmax is flat."""
    hparams = from_config(tiny_config(**changes))
    return random_variables(hparams, TOKENS_BT), hparams


def without_queries(variables):
    def scale(path, leaf):
        return 0 * leaf if any('query' in str(part) for part in path) else leaf

    return jax.tree_util.tree_map_with_path(scale, variables)


def uniform_masses(hparams, selected_LBT, masked=False):
    """(depth_LS, first_L) if all queries are 0, so that a softmax is uniform over what is visible.

    A loop over layers, rows and tokens; selected_LBT: the tokens that each layer processes. All
    layers but the last write `per_layer` slots.
    """
    model = hparams.model
    per_layer, window = model.depth.slots_per_layer, model.depth.slot_window
    writers = np.repeat(np.arange(model.num_layers - 1), per_layer)
    slots_LS = np.zeros((model.num_layers, len(writers)))
    first_L = np.zeros(model.num_layers)
    for layer, selected_BT in enumerate(selected_LBT):
        seen_S = writers < layer
        if window:
            seen_S &= np.arange(len(writers)) >= seen_S.sum() - window
        masses, firsts = [], []
        for b, t in zip(*np.nonzero(selected_BT), strict=True):
            mine_T = selected_BT[b] & (SEGMENTS_BT[b] == SEGMENTS_BT[b, t])
            keys = [s for s in np.flatnonzero(mine_T) if 0 <= t - s < (model.window(layer) or T)]
            slots_S = seen_S & (selected_LBT[writers, b, t] if masked else True)
            share = 1 / (len(keys) + slots_S.sum())
            masses.append(share * slots_S)
            first = np.flatnonzero(mine_T)[0]
            if first != t:
                firsts.append(share * (first in keys))
        slots_LS[layer], first_L[layer] = np.mean(masses, axis=0), np.mean(firsts)
    return slots_LS, first_L


def check_uniform(variables, hparams, routing, selected_LBT, masked=False):
    """With queries of 0 the masses are those of the loop."""
    mass = depth_mass(without_queries(variables), hparams, BATCH, routing)
    slots_LS, first_L = uniform_masses(hparams, selected_LBT, masked)
    np.testing.assert_allclose(mass.slots_LS, slots_LS, atol=1e-6)
    np.testing.assert_allclose(mass.first_token_L, first_L, atol=1e-6)
    np.testing.assert_allclose(mass.depth_L, slots_LS.sum(1), atol=1e-6)
    assert len(mass.slots) == slots_LS.shape[1]


@pytest.mark.parametrize('stream', ['value_residual', 'value_attention', 'hyper_connections'])
def test_slots_that_attention_does_not_see_have_no_mass(tiny_config, stream):
    """Regression: studies could not measure streams that change values."""
    changes = {'model.depth.stream': stream, 'model.num_layers': 3}
    variables, hparams = make_model(tiny_config, **changes)
    mass = depth_mass(variables, hparams, BATCH, 'dense')
    assert mass.slots == () and not mass.depth_L.any()
    assert (mass.first_token_L > 0).all() and len(mass.first_token_L) == 3


WINDOWS = {'model.depth.slots': 'block', 'model.windows': (0, 4), 'model.depth.slot_window': 1}


@pytest.mark.parametrize(
    ('changes', 'last_slot'),
    [(MODA, '1f'), (MODA | WINDOWS, '1b'), ({'model.num_layers': 3}, None)],
)
def test_uniform_attention_is_split_over_visible_keys_and_slots(tiny_config, changes, last_slot):
    variables, hparams = make_model(tiny_config, **changes)
    selected_LBT = np.broadcast_to(SEGMENTS_BT > 0, (3, 2, T))
    check_uniform(variables, hparams, 'dense', selected_LBT)
    layers, slots = module._names(hparams.model)
    assert layers == ('0', '1', '2') and (not slots or slots[-1] == last_slot)


def test_unused_slot_capacity_has_no_mass(tiny_config, monkeypatch):
    """On a GPU, a buffer may have capacity for more slots than are written."""
    monkeypatch.setattr(stack_scan, 'slot_buffer_size', lambda slots: slots + 3)
    variables, hparams = make_model(tiny_config, **MODA, **{'model.depth.slot_window': 3})
    check_uniform(variables, hparams, 'dense', np.broadcast_to(SEGMENTS_BT > 0, (3, 2, T)))


@pytest.mark.parametrize('skipped', ['projected', pytest.param('masked', marks=pytest.mark.slow)])
def test_only_selected_tokens_count(tiny_config, skipped):
    changes = {'model.routing.overflow': 'grow', 'model.depth.skipped_slots': skipped}
    variables, hparams = make_model(tiny_config, **ROUTED, **changes)
    selected_LBT = np.array(np.broadcast_to(SEGMENTS_BT > 0, (3, 2, T)))
    selected_LBT[1:, :, ::2] = False  # at capacity 0.5 the pattern selects odd positions
    check_uniform(variables, hparams, 'threshold', selected_LBT, skipped == 'masked')


def test_a_layer_without_tokens_has_no_shares(tiny_config):
    """Regression: the masses of a layer that processes no token were 0, as if it read no slot.

    At position 0, which the pattern skips, a row has one real token. If there are two, layers 1 and
    2 process the second, which is their first.
    """
    variables, hparams = make_model(tiny_config, **ROUTED, **{'model.routing.overflow': 'grow'})
    for num_real, known in ((1, [True, False, False]), (2, [True, True, True])):
        segments_BT = np.array([[1] * num_real + [0] * (T - num_real)] * 2, np.int32)
        batch = BATCH | {'segment_ids_BT': segments_BT}
        mass = depth_mass(variables, hparams, batch, 'threshold')
        assert np.isfinite(mass.depth_L).tolist() == known
        assert np.isfinite(mass.slots_LS).all(axis=1).tolist() == known
        assert not np.isfinite(mass.slots_LS[~np.array(known)]).any()
        assert np.isfinite(mass.first_token_L).tolist() == [num_real > 1, False, False]


def test_the_attention_stream_puts_all_mass_on_slots(tiny_config):
    """Each read, including that for the final norm, puts mass 1 on the slots written before."""
    changes = {'model.depth.stream': 'attention', 'model.num_layers': 2}
    variables, hparams = make_model(tiny_config, **changes)
    mass = depth_mass(variables, hparams, BATCH, 'dense')
    assert mass.layers == ('0', '1', 'end') and mass.slots == ('e', '0b', '1b')
    np.testing.assert_allclose(mass.depth_L, 1, atol=1e-5)
    assert np.array_equal(mass.slots_LS > 0, np.tri(3) > 0)
    assert (mass.first_token_L[:2] > 0).all() and mass.first_token_L[2] == 0


def test_streams_without_attention_over_depth_are_refused(tiny_config):
    changes = {'model.depth.stream': 'average', 'model.layer_loop': 'unrolled'}
    hparams = from_config(tiny_config(**changes))
    with pytest.raises(ValueError, match="'average'.*moda, attention or residual"):
        depth_mass({}, hparams, BATCH, 'dense')


def test_routed_loops_are_refused(tiny_config):
    """Regression: every loop ran on all tokens without its gate, which is another model."""
    hparams = from_config(tiny_config(**RECURSIONS, **{'model.num_layers': 3}))
    with pytest.raises(ValueError, match="routing.layers='loops': must not be loops here"):
        depth_mass({}, hparams, BATCH, hparams.model.routing.causal_rule)


@pytest.mark.parametrize('stream', ['moda', 'attention'])
def test_sowing_costs_nothing_in_training(tiny_config, monkeypatch, stream):
    """Only arguments of the kernel are sown: nothing is computed for the measurement."""
    hparams = from_config(tiny_config(**{'model.depth.stream': stream}))
    model, sown, used = Transformer(hparams), [], []

    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)
    assert set(variables) == {'params'}

    def kernel(*arrays, **named):
        used.extend(jax.tree.leaves((arrays, named)))
        return depth_attention(*arrays, **named)

    monkeypatch.setattr(nn.Module, 'sow', lambda _, *given: sown.extend(jax.tree.leaves(given)))
    monkeypatch.setattr(attention, 'depth_attention', kernel)
    jax.eval_shape(model.apply, variables, TOKENS_BT, SEGMENTS_BT)
    arrays = [leaf for leaf in sown if isinstance(leaf, jax.Array)]
    assert arrays and {id(array) for array in arrays} <= {id(array) for array in used}
