"""Streams that change the values of attention: equal models, and what they do not read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import DepthSlots, KeysValues
from moddepth_jax.model.decoding import prefill, unroll
from moddepth_jax.model.flops import forward_breakdown
from moddepth_jax.model.kv_cache import cache_bytes
from moddepth_jax.model.layer import LayerArgs
from moddepth_jax.model.layers import apply_rope
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.stack import Stack, run_unrolled, unstack_layers
from moddepth_jax.model.streams.value_attention import mix_values
from moddepth_jax.model.streams.value_residual import add_first_values
from tests.model.cases import (
    HEAD_NORM,
    MIXED,
    SHARED,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    VALUES,
    gradient,
    random_variables,
    small_hparams,
)

B, T = SMALL_BT.shape


def test_shared_values_are_only_those_of_the_first_layer(tiny_config):
    """Later layers have no value projection and cache only keys: 5/8 of the bytes of 4 layers."""
    plain, hparams = (small_hparams(tiny_config, HEAD_NORM, some) for some in ({}, SHARED))
    caches = [empty_cache(some) for some in (plain, hparams)]
    sizes = [sum(map(cache_bytes, cache.layers)) for cache in caches]
    assert [layer.v_BKHS is None for layer in caches[1].layers] == [False, True, True, True]
    assert sizes[1] / sizes[0] == 5 / 8


@pytest.mark.parametrize(('knobs', 'has_own'), [(SHARED, False), (VALUES, True)])
def test_shared_values_of_a_later_layer_do_not_depend_on_its_input(knobs, has_own, tiny_config):
    """It has no value projection. With queries of 0, attention depends only on values."""
    hparams = small_hparams(tiny_config, knobs)
    stack = Stack(hparams.model, 'dense')
    params = random_variables(hparams, SMALL_BT)['params']['stack']
    kind, layer = [*unstack_layers(stack, params)][2]
    assert ('value' in layer['attention']) == has_own
    off = {'query': jax.tree.map(jnp.zeros_like, layer['attention']['query'])}
    layer = layer | {'attention': layer['attention'] | off}
    layer = layer | {'mlp': jax.tree.map(jnp.zeros_like, layer['mlp'])}
    rng, heads = np.random.default_rng(2), (hparams.model.num_kv_heads, hparams.model.head_dim)
    depth = DepthSlots(jnp.float32(rng.normal(size=(1, B, T, *heads))))
    tokens = TokenInfo(jnp.tile(jnp.arange(T), (B, 1)), jnp.asarray(SMALL_SEGMENTS_BT))

    @functools.partial(jax.grad, has_aux=True)
    def change(x_BTD):
        y_BTD = stack.apply(kind, layer, x_BTD, depth, tokens, LayerArgs()).x_BTD - x_BTD
        return jnp.sum(jnp.tanh(y_BTD)), y_BTD

    inputs = jnp.float32(rng.normal(size=(2, B, T, hparams.model.d_model)))
    slopes, outputs = zip(*map(jax.jit(change), inputs), strict=True)
    real_BT = SMALL_SEGMENTS_BT > 0
    difference = np.abs(outputs[0] - outputs[1])[real_BT].max()
    assert difference > 0.1 if has_own else difference < 1e-5
    assert np.abs(outputs[0])[real_BT].max() > 0.1
    assert all(np.any(slope_BTD) == has_own for slope_BTD in slopes)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_values_are_mixed_in_float32_and_rounded_once(dtype):
    """A weight of 1.003, which bfloat16 rounds to 1, has an effect."""
    rng = np.random.default_rng(0)
    first, own = (jax.numpy.asarray(rng.normal(size=(2, 3, 2, 4)), dtype) for _ in range(2))
    found = add_first_values(first, own, np.float32([0.5, 1.003]))
    wide = np.asarray(first, np.float32) * 0.5 + np.asarray(own, np.float32) * np.float32(1.003)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, jax.numpy.asarray(wide, dtype))


# mix_values for two rows of three tokens, four slots, two key heads and six query heads.
SIZE = {'q': (2, 3, 6, 4), 'own': (2, 3, 2, 4), 'slots': (4, 2, 3, 2, 4)}


def draw_mixture(dtype='float32'):
    """Return q_BTNH, own KeysValues, and DepthSlots, some of them hidden."""
    rng = np.random.default_rng(3)

    def draw(name):
        return jnp.asarray(rng.normal(size=SIZE[name]), dtype)

    own, slots = (KeysValues(draw(name), draw(name)) for name in ('own', 'slots'))
    return draw('q'), own, DepthSlots(slots, jnp.asarray(rng.random((4, 2, 3)) < 0.6))


def test_queries_of_zero_read_the_mean_of_the_visible_values():
    """The own value is one of them, and the only one if no slot is visible.

    Each gets an equal part of the gradient. Hidden values and their keys get none.
    """
    q_BTNH, own, depth = draw_mixture()
    dv_BTKH = np.float32(np.random.default_rng(4).normal(size=SIZE['own']))

    def mix(q_BTNH, own, slots, valid_LBT):
        return mix_values(q_BTNH, own, depth._replace(slots=slots, valid_LBT=valid_LBT))[0]

    @jax.jit
    def differentiate(q_BTNH, valid_LBT):
        mixed, vjp = jax.vjp(lambda *of: mix(*of, valid_LBT), q_BTNH, own, depth.slots)
        return mixed, *vjp(dv_BTKH)

    found_BTKH, dq_BTNH, down, dslots = differentiate(0 * q_BTNH, depth.valid_LBT)
    assert np.any(dq_BTNH)
    for b, t in np.ndindex(2, 3):
        sees_L = np.asarray(depth.valid_LBT[:, b, t])
        seen = [depth.slots.v_BTKH[i, b, t] for i in range(4) if sees_L[i]]
        mean_KH = np.mean([*seen, own.v_BTKH[b, t]], axis=0)
        np.testing.assert_allclose(found_BTKH[b, t], mean_KH, rtol=1e-5, atol=1e-6)
        part_KH = dv_BTKH[b, t] / (len(seen) + 1)
        np.testing.assert_allclose(down.v_BTKH[b, t], part_KH, rtol=1e-5, atol=1e-6)
        parts_LKH = sees_L[:, None, None] * part_KH
        np.testing.assert_allclose(dslots.v_BTKH[:, b, t], parts_LKH, rtol=1e-5, atol=1e-6)
    found_BTKH, *slopes = differentiate(q_BTNH, jnp.zeros((4, 2, 3), bool))
    np.testing.assert_array_equal(found_BTKH, own.v_BTKH)
    np.testing.assert_array_equal(slopes[1].v_BTKH, dv_BTKH)
    assert not any(map(np.any, (slopes[0], slopes[1].k_BTKH, *slopes[2])))


def test_mixtures_do_not_depend_on_the_position():
    """Queries and keys of a token are rotated alike at any distance from the start."""
    q_BTNH, own, depth = draw_mixture()

    def mixed(first):
        def turned(x_BTNH):
            return apply_rope(x_BTNH, first + jnp.array([[5, 0, 2], [1, 7, 3]]), 100.0)

        slots = depth.slots._replace(k_BTKH=jax.vmap(turned)(depth.slots.k_BTKH))
        own_keys = own._replace(k_BTKH=turned(own.k_BTKH))
        return mix_values(turned(q_BTNH), own_keys, depth._replace(slots=slots))[0]

    np.testing.assert_allclose(mixed(0), mixed(1000), rtol=1e-3, atol=1e-4)
    unrotated, _ = mix_values(q_BTNH, own, depth)
    np.testing.assert_allclose(mixed(0), unrotated, rtol=1e-4, atol=1e-5)


def test_two_layers_do_not_depend_on_the_position(tiny_config):
    """With norms of queries and keys before RoPE, in float64: outputs and all gradients.

    With a norm after RoPE, its scale of each dimension would act at another angle.
    """
    knobs = {'model.dtype': 'float64', 'model.num_layers': 2}
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        hparams = small_hparams(tiny_config, MIXED, HEAD_NORM, knobs)
        params = random_variables(hparams, SMALL_BT)['params']['stack']
        rng = np.random.default_rng(2)
        x_BTD, weights_BTD = rng.normal(size=(2, B, T, hparams.model.d_model))

        def loss(params, x_BTD, first):
            tokens = TokenInfo(first + jnp.tile(jnp.arange(T), (B, 1)), SMALL_SEGMENTS_BT)
            stack = Stack(hparams.model, 'dense')
            y_BTD, _ = run_unrolled(stack, params, tokens, LayerArgs(), x_BTD)
            return jnp.sum(y_BTD * weights_BTD), y_BTD

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        near, far = (jax.device_get(run(params, x_BTD, first)) for first in (0, 1000))
    assert all(map(np.any, jax.tree.leaves(near)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, far, near)


def test_mixtures_are_formed_in_float32_and_rounded_once():
    """Values in bfloat16 give the result of the same values in float32, rounded."""
    narrow = draw_mixture('bfloat16')
    wide = jax.tree.map(lambda x: x if x.dtype == bool else x.astype('float32'), narrow)
    found, _ = mix_values(*narrow)
    assert found.dtype == 'bfloat16'
    np.testing.assert_array_equal(found, mix_values(*wide)[0].astype('bfloat16'))


def test_one_layer_without_sources_is_the_plain_model(tiny_config):
    plain, mixed = (
        small_hparams(tiny_config, {'model.num_layers': 1}, some) for some in ({}, MIXED)
    )
    variables = random_variables(mixed, SMALL_BT)
    for found, expected in zip(
        *(jax.tree.leaves(gradient(some, variables)) for some in (mixed, plain)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def empty_cache(hparams):
    """Return the shapes of the cache of SMALL_BT."""
    routed = bool(hparams.model.routed_layers)
    how = {'hparams': hparams, 'routing': hparams.model.routing.causal_rule if routed else 'dense'}
    how |= {'capacity': T, 'routed_capacity': 6 if routed else None}
    unrolled = unroll(random_variables(hparams, SMALL_BT), hparams, how['routing'])
    return jax.eval_shape(lambda u: prefill(u, SMALL_BT, SMALL_SEGMENTS_BT, **how)[1], unrolled)


@pytest.mark.parametrize(
    ('knobs', 'pairs'),
    [
        # Six layers: the number of slots that layers 1 to 5 read, and the layer itself.
        ({}, 2 + 2 + 2 + 3 + 3),  # layers 0 and 3
        ({'value_stride': 2}, 2 + 2 + 3 + 3 + 4),
        ({'value_stride': 1}, 2 + 3 + 4 + 5 + 6),
        ({'value_stride': 4, 'recent_layers': 2}, 2 + 3 + 4 + 5 + 6),  # hidden slots are read
    ],
)
def test_mixtures_are_counted_by_hand(knobs, pairs, tiny_config):
    """4 K H for each token, slot read and layer."""
    knobs = {f'model.depth.{name}': value for name, value in knobs.items()}
    hparams = small_hparams(tiny_config, MIXED, {'model.num_layers': 6}, knobs)
    parts, model = forward_breakdown(hparams, 2, T), hparams.model
    assert parts['depth_attention'] == 2 * T * 4 * model.num_kv_heads * model.head_dim * pairs
    assert not parts['depth_projections']
