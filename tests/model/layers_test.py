"""Norm, rotary positions and mlp are their equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.layers import SwiGLU, apply_rope, rms_norm


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('spread', [1e-3, 1.0, 100.0])
def test_rms_norm_is_its_equation(spread):
    """x / sqrt(mean(x^2) + epsilon) scale: not centred, epsilon inside the root, per last axis."""
    x, scale = spread * (normal(0, 2, 3, 16) + 0.5), normal(1, 16)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_of_bfloat16_is_taken_in_float32():
    """A bfloat16 input is normalised in float32 and rounded once, so squares do not lose bits."""
    x, scale = jnp.asarray(normal(0, 4, 64), jnp.bfloat16), normal(1, 64)
    result = rms_norm(x, scale, 1e-6)
    assert result.dtype == jnp.bfloat16
    once = rms_norm(x.astype(jnp.float32), scale, 1e-6).astype(jnp.bfloat16)
    np.testing.assert_array_equal(result, once)


def test_rotation_is_the_half_split_form():
    """Components i and i + H/2 turn as a complex number by position theta^(-2i/H) radians."""
    x, theta = normal(0, 2, 5, 3, 8), 100.0
    positions = np.array([[0, 1, 2, 3, 4], [0, 3, 7, 50, 99]])
    angles = positions[:, :, None, None] * theta ** (-2 * np.arange(4) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    got = apply_rope(x, positions, theta)
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(got[:, 0], x[:, 0])


def test_rotated_products_depend_on_differences_of_positions_only():
    """<q at p, k at s> stays the same when both move on together, and not when one does."""
    q, k = normal(0, 1, 6, 1, 16), normal(1, 1, 6, 1, 16)
    query_places, key_places = np.array([[0, 4, 9, 2, 30, 11]]), np.array([[5, 4, 0, 2, 7, 12]])

    def products(query_shift, key_shift):
        turned_q = apply_rope(q, query_places + query_shift, 1e4)
        turned_k = apply_rope(k, key_places + key_shift, 1e4)
        return np.einsum('btnh,bsnh->ts', turned_q, turned_k)

    np.testing.assert_allclose(products(0, 0), products(37, 37), rtol=0, atol=3e-5)
    assert np.abs(products(0, 0) - products(1, 0)).max() > 0.1


@pytest.mark.parametrize('use_bias', [False, True])
def test_mlp_is_its_equation(use_bias, tiny_config):
    """w2(silu(w1 x) * (w3 x)), with a bias on each of the three where asked and else none."""
    model = from_config(tiny_config(**{'model.use_bias': use_bias})).model
    x = normal(0, 1, 5, model.d_model)
    params = SwiGLU(model, model.d_ff).init(jax.random.key(0), x)['params']
    keys = {'kernel', 'bias'} if use_bias else {'kernel'}
    assert {name: set(value) for name, value in params.items()} == dict.fromkeys(
        ('w1', 'w2', 'w3'), keys
    )
    params = jax.tree.map(lambda leaf: normal(leaf.size, *leaf.shape), params)

    def affine(name, y):
        return y @ params[name]['kernel'].astype(float) + params[name].get('bias', 0)

    gate = affine('w1', x.astype(float))
    expected = affine('w2', gate / (1 + np.exp(-gate)) * affine('w3', x.astype(float)))
    got = SwiGLU(model, model.d_ff).apply({'params': params}, x)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
