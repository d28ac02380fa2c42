"""A layer sees the slots that earlier layers wrote of its own token, and no other slot at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import DepthSlots, KeysValues, TokenInfo
from moddepth_jax.model.layer import Layer, LayerArgs
from moddepth_jax.model.layers import apply_rope
from moddepth_jax.model.mod.mixture_of_depths import RoutingArgs
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.streams import LayerKind
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import MASKED, MODA, ROUTED, parameters, random_variables, small_hparams

SLOTS, ROWS, LENGTH = 4, 2, 5
SEGMENTS_BT = np.array([[1, 1, 1, 1, 1], [1, 1, 2, 2, 0]])
POSITIONS_BT = np.tile(np.arange(LENGTH), (ROWS, 1))
ARGS = LayerArgs(RoutingArgs(np.int32(0), np.float32(0), np.bool_(False)))
HALF = ROUTED | {'model.routing.capacity': 0.6}
# name: (knobs, routed, the newest slots seen, 0 for all)
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
    """A jitted (slots, count) -> a layer's output, the selected tokens, the grids; and the slots.

    The grids are of what each query [B, T] sees, by the gradients of its output: the inputs of
    tokens [B, T] and their slots [SLOTS, B, T]. The last output: all gradients are finite.
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
    """What a query sees, by definition: keys [B, T, B, T] and slots [B, T, L, B, T]."""
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
    """Exact zeros but for the causal triangle of keys and the token's own slots, for any count."""
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
def test_what_is_hidden_may_be_nan(name, tiny_config):
    """NaN in every slot that its token does not see: the same output, and finite gradients."""
    run, slots, valid_LBT = probe(tiny_config, name)
    before_BTD, selected_BT, *_ = run(slots, 2)
    _, sight = expected_sight(2, READERS[name][2], valid_LBT, None)
    seen_LBT = np.einsum('btlbt->lbt', sight)[..., None, None]
    hidden = jax.tree.map(lambda leaf: np.where(seen_LBT, leaf, np.nan).astype('f'), slots)
    assert all(np.isnan(leaf).mean() >= 0.5 for leaf in hidden)
    after_BTD, _, _, _, finite = run(hidden, 2)
    np.testing.assert_array_equal(after_BTD, before_BTD)
    assert np.all(finite)


# In these models each token attends to itself alone, and the outputs of all layers but one are
# turned off: any other influence on the logits came through slots.
ALONE = {'model.windows': (1,), 'model.num_layers': 4}
TOKENS_BT = np.random.default_rng(0).permutation(32)[:16].reshape(2, 8)
# Of a slot: what projects its values, and how many of the layers have that.
OWN, FFN = ('attention', 4), ('ffn_slot', 3)
# name: (knobs, the layers' slots, how many layers' newest slots are seen, 0 for all)
WRITERS = {
    'attention': ({'model.depth.slots': 'attention'}, [OWN], 0),
    'ffn': ({'model.depth.slot_keys': 'unrotated', 'model.qk_norm': 'full'}, [OWN, FFN], 0),
    'own': ({'model.depth.attention_slot_projection': True}, [('attention_slot', 3), FFN], 0),
    'block': ({'model.depth.slots': 'block', 'model.depth.slot_window': 2}, [('block_slot', 3)], 2),
    'projected': (HALF, [OWN, FFN], 0),
    'masked': (HALF | MASKED, [OWN, FFN], 0),
}


def kernel_of(layer, source):
    """The array of a layer's parameters by which the values of a slot are projected."""
    if source == 'attention':
        return layer.get('block', layer)['attention']['value']['kernel']
    return layer['stream'][source]['value']['kernel']


def muted(params, model, loud):
    """The parameters of a stack of runs with the outputs of all layers but one turned off."""
    numbers, quiet = iter(range(99)), jax.tree.map(lambda leaf: leaf, params)
    for i, run in enumerate(Stack(model, 'top_c').runs):
        order = [[next(numbers) for _ in run.group] for _ in range(run.repeats)]
        for j in range(len(run.group)):
            is_loud = jnp.array([layers[j] for layers in order]) == loud

            def keep(path, leaf, is_loud=is_loud):
                if path[-2].key not in ('out', 'w2'):
                    return leaf
                return leaf * is_loud.reshape(-1, *[1] * (leaf.ndim - 1))

            layer = params[f'run_{i}'][f'layer_{j}']
            quiet[f'run_{i}'][f'layer_{j}'] = jax.tree_util.tree_map_with_path(keep, layer)
    return quiet


@pytest.mark.parametrize('name', parameters(('block', 'masked'), WRITERS))
def test_layers_see_those_below(name, tiny_config):
    """Layer l sees what layers 0..l-1 wrote of its own token, in every write mode, and no other.

    Under `masked` a token that skipped a routed layer has no slot there; under `projected` it has.
    """
    knobs, sources, newest = WRITERS[name]
    hparams = small_hparams(tiny_config, MODA, ALONE, {'model.remat': 'none'}, knobs)
    model, variables = Transformer(hparams), random_variables(hparams, TOKENS_BT)

    def used(loud, token):
        """Whether a token's logits use the embedding of each, and each layer's slot values."""

        def logit(params):
            params = params | {'stack': muted(params['stack'], hparams.model, loud)}
            logits_BTV, records = model.apply({'params': params}, TOKENS_BT)
            selected_RT = None if records is None else records.routing.selected_BT[:, 0]
            return jnp.sum(logits_BTV[0, token] * jnp.arange(1.0, 33.0)), selected_RT

        gradient, selected_RT = jax.grad(logit, has_aux=True)(variables['params'])
        layers = [
            mine for _, mine in unstack_layers(Stack(hparams.model, 'top_c'), gradient['stack'])
        ]
        by_source = [
            jnp.stack([jnp.any(kernel_of(mine, source) != 0) for mine in layers[:writers]])
            for source, writers in sources
        ]
        return jnp.any(gradient['embedding'] != 0, axis=1), by_source, selected_RT

    used = jax.jit(used)
    for loud, token in np.ndindex(4, 8):
        embeddings, found, selected_RT = used(loud, token)
        selected_L = np.ones(4, bool)
        if selected_RT is not None:
            selected_L[[1, 3]] = selected_RT[:, token]
            assert 0 < np.mean(selected_RT) < 1
        there_L = selected_L if name == 'masked' else np.ones(4, bool)
        first = max(0, loud - newest) if newest else 0
        seen_L = there_L & selected_L[loud] & (first <= np.arange(4)) & (np.arange(4) < loud)
        np.testing.assert_array_equal(np.flatnonzero(embeddings), [TOKENS_BT[0, token]])
        for (source, writers), found_L in zip(sources, found, strict=True):
            own_L = (np.arange(4) == loud) & selected_L & (source == 'attention')
            np.testing.assert_array_equal(found_L, (seen_L | own_L)[:writers])


def rms_normed(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize('place', parameters(('pre',), ('pre', 'post', 'reordered')))
def test_slots_of_skipped_tokens(place, tiny_config):
    """`projected`: of the stream as if the block added nothing; `masked`: none, and 0 is stored.

    Selected tokens have the same slots either way.
    """
    written = {}
    for skipped in ('projected', 'masked'):
        knobs = {'model.depth.skipped_slots': skipped, 'model.norm_placement': place}
        hparams = small_hparams(tiny_config, MODA, HALF, knobs).model
        layer, rng = Layer(hparams, LayerKind(True, 0, 2), 'top_c'), np.random.default_rng(4)
        x_BTD = rng.normal(size=(ROWS, LENGTH, hparams.d_model)).astype('f')
        given = (x_BTD, None, TokenInfo(POSITIONS_BT, SEGMENTS_BT), ARGS)
        variables = draw(jax.eval_shape(layer.init, jax.random.key(0), *given), rng)
        output = jax.jit(layer.apply)(variables, *given)
        written[skipped] = output.written
        selected_BT = np.asarray(output.records.routing.selected_BT)
    assert 4 <= selected_BT.sum() <= 6
    block, stream = variables['params']['block'], variables['params']['stream']
    norms = [block[name]['scale'] for name in ('attention_norm', 'mlp_norm')]
    first_BTD = x_BTD if place == 'reordered' else rms_normed(x_BTD, norms[0])
    second_BTD = rms_normed(x_BTD, norms[1]) if place == 'pre' else first_BTD
    made = [(first_BTD, block['attention']), (second_BTD, stream['ffn_slot'])]
    assert written['projected'].valid_BT is None
    np.testing.assert_array_equal(written['masked'].valid_BT, selected_BT)
    slots = zip(made, written['projected'].slots, written['masked'].slots, strict=True)
    for (source_BTD, weights), projected, masked in slots:
        key_BTKH, value_BTKH = (
            np.tensordot(source_BTD, weights[name]['kernel'], 1) for name in ('key', 'value')
        )
        by_hand = apply_rope(jnp.asarray(key_BTKH), POSITIONS_BT, hparams.rope_theta), value_BTKH
        for hand, side, hidden in zip(by_hand, projected, masked, strict=True):
            np.testing.assert_allclose(side[~selected_BT], hand[~selected_BT], rtol=0, atol=1e-5)
            np.testing.assert_allclose(side[selected_BT], hidden[selected_BT], rtol=0, atol=1e-6)
            assert not np.any(hidden[~selected_BT]) and np.all(side[~selected_BT])
    # The mlp of a selected token read what attention had added to.
    selected = np.tensordot(second_BTD, stream['ffn_slot']['value']['kernel'], 1)[selected_BT]
    assert np.abs(selected - written['masked'].slots[1].v_BTKH[selected_BT]).max() > 0.1
