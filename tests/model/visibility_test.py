"""A layer sees only the slots that earlier layers wrote for its own token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import DepthSlots, KeysValues, TokenInfo
from moddepth_jax.model.layer import Layer, LayerArgs
from moddepth_jax.model.mod.mixture_of_depths import RoutingArgs
from moddepth_jax.model.streams import LayerKind
from tests.model.cases import MASKED, MODA, ROUTED, small_hparams

SLOTS, ROWS, LENGTH = 4, 2, 5
SEGMENTS_BT = np.array([[1, 1, 1, 1, 1], [1, 1, 2, 2, 0]])
POSITIONS_BT = np.tile(np.arange(LENGTH), (ROWS, 1))
ARGS = LayerArgs(RoutingArgs(np.int32(0), np.float32(0), np.bool_(False)))
HALF = ROUTED | {'model.routing.capacity': 0.6}
# name: (knobs, routed, how many of the newest slots are visible; 0: all)
READERS = {
    'xla': ({}, False, 0),
    'reference': ({'model.attention': 'reference'}, False, 0),
    'newest two': ({'model.depth.slot_window': 2}, False, 2),
    'unrotated': ({'model.depth.slot_keys': 'unrotated', 'model.qk_norm': 'head'}, False, 0),
    'routed': (HALF, True, 0),
    'masked': (HALF | MASKED, True, 0),
}


def draw(shapes, rng):
    return jax.tree.map(lambda leaf: 0.4 * rng.normal(size=leaf.shape).astype('f'), shapes)


@functools.cache
def probe(make_config, name):
    """Return a jitted (slots, count) -> (output of a layer, selected tokens, grids), and the slots.

    The grids say what each query [B, T] sees, by the gradients of its output: the inputs of tokens
    [B, T] and their slots [SLOTS, B, T]. The last output says whether all gradients are finite.
    """
    knobs, routed, _ = READERS[name]
    hparams = small_hparams(make_config, MODA, knobs).model
    layer, rng = Layer(hparams, LayerKind(routed, 0), 'top_c'), np.random.default_rng(3)
    x_BTD = rng.normal(size=(ROWS, LENGTH, hparams.d_model)).astype('f')
    shape = (SLOTS, ROWS, LENGTH, hparams.num_kv_heads, hparams.head_dim)
    slots = KeysValues(*rng.normal(size=(2, *shape)).astype('f'))
    valid_LBT = rng.random(shape[:3]) < 0.6 if hparams.masks_slots else None
    tokens, layer_args = TokenInfo(POSITIONS_BT, SEGMENTS_BT), ARGS if routed else LayerArgs()
    depth = DepthSlots(slots, valid_LBT, 3)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x_BTD, depth, tokens, layer_args)
    variables = draw(shapes, rng)

    @jax.jit
    def run(slots, count):
        def call(x_BTD, slots):
            depth = DepthSlots(slots, valid_LBT, count)
            output = layer.apply(variables, x_BTD, depth, tokens, layer_args)
            record = output.records.routing
            return output.x_BTD, record and record.selected_BT

        y_BTD, vjp, selected_BT = jax.vjp(call, x_BTD, slots, has_aux=True)

        def of_query(b, t):
            dx_BTD, dslots = vjp(jnp.zeros_like(x_BTD).at[b, t].set(jnp.arange(1.0, 17.0)))
            used_BT = jnp.any(dx_BTD != 0, axis=-1)
            used_LBT = [jnp.any(leaf != 0, axis=(3, 4)) for leaf in dslots]
            finite = jnp.all(jnp.isfinite(dx_BTD)) & jnp.isfinite(sum(jnp.sum(d) for d in dslots))
            return used_BT, used_LBT[0] | used_LBT[1], finite

        grids = jax.vmap(jax.vmap(of_query, (None, 0)), (0, None))
        return y_BTD, selected_BT, *grids(jnp.arange(ROWS), jnp.arange(LENGTH))

    return run, slots, valid_LBT


def expected_sight(count, newest, valid_LBT, selected_BT):
    """Return what a query sees by definition: keys [B, T, B, T] and slots [B, T, L, B, T]."""
    keys = np.zeros((ROWS, LENGTH, ROWS, LENGTH), bool)
    slots = np.zeros((ROWS, LENGTH, SLOTS, ROWS, LENGTH), bool)
    for b in range(ROWS):
        for t in range(LENGTH):
            keys[b, t, b, t] = True
            if selected_BT is not None and not selected_BT[b, t]:
                continue
            for s in range(t):
                there = selected_BT is None or selected_BT[b, s]
                keys[b, t, b, s] = SEGMENTS_BT[b, s] == SEGMENTS_BT[b, t] and there
            for slot in range(max(0, count - newest) if newest else 0, count):
                slots[b, t, slot, b, t] = valid_LBT is None or valid_LBT[slot, b, t]
    return keys, slots


@pytest.mark.parametrize('name', READERS)
def test_gradients_draw_the_mask(name, tiny_config):
    """Gradients are exactly 0 except for causal keys and the token's own slots, for any count."""
    run, slots, valid_LBT = probe(tiny_config, name)
    for count in (0, 1, 3, SLOTS):
        _, selected_BT, keys, sight, finite = run(slots, count)
        if selected_BT is not None:
            assert 4 <= np.asarray(selected_BT).sum() < 10 and not selected_BT[1, 4]
        expected = expected_sight(count, READERS[name][2], valid_LBT, selected_BT)
        np.testing.assert_array_equal(keys, expected[0])
        np.testing.assert_array_equal(sight, expected[1])
        assert np.all(finite)


def test_the_mask_as_drawn(tiny_config):
    """Four slots of five tokens: keys on the left, then the tokens' places in each slot."""
    run, slots, _ = probe(tiny_config, 'xla')
    _, _, keys, sight, _ = run(slots, SLOTS)
    grid = np.concatenate([keys[0, :, :1], sight[0, :, :, 0]], axis=1)
    assert [' '.join(''.join('01'[x] for x in part) for part in query) for query in grid * 1] == [
        '10000 10000 10000 10000 10000',
        '11000 01000 01000 01000 01000',
        '11100 00100 00100 00100 00100',
        '11110 00010 00010 00010 00010',
        '11111 00001 00001 00001 00001',
    ]


@pytest.mark.parametrize('name', READERS)
def test_hidden_slots_may_be_nan(name, tiny_config):
    """NaN in every slot that a token does not see changes no output and no finite gradient."""
    run, slots, valid_LBT = probe(tiny_config, name)
    before_BTD, selected_BT, *_ = run(slots, 2)
    _, sight = expected_sight(2, READERS[name][2], valid_LBT, None)
    seen_LBT = np.einsum('btlbt->lbt', sight)[..., None, None]
    hidden = jax.tree.map(lambda leaf: np.where(seen_LBT, leaf, np.nan).astype('f'), slots)
    assert all(np.isnan(leaf).mean() >= 0.5 for leaf in hidden)
    after_BTD, _, _, _, finite = run(hidden, 2)
    np.testing.assert_array_equal(after_BTD, before_BTD)
    assert np.all(finite)
