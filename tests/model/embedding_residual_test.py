"""The embedding residual: initial values, gradients, memory and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.embedding_residual import blend_embedding, embedded_input
from moddepth_jax.model.flops import forward_breakdown
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import run_stack
from moddepth_jax.model.transformer import layer_args, token_info
from tests.model.cases import (
    EMBEDDED,
    LOOPED,
    MODA,
    ROUTED,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    UNROLLED,
    by_name,
    initial_params,
    parameters,
    random_variables,
    small_hparams,
    with_leaves,
)

B, T = SMALL_BT.shape
FLOAT64 = {'model.dtype': 'float64'}
IDENTITY = {'model.embedding_residual': 'identity'}


def test_identity_starts_as_the_plain_model(tiny_config):
    """The draws are bit-equal, and the scales are 1 and 0."""
    plain, other = (initial_params(small_hparams(tiny_config, some)) for some in ({}, IDENTITY))
    plain, found = (dict(jax.tree_util.tree_leaves_with_path(params)) for params in (plain, other))
    for path, leaf in plain.items():
        np.testing.assert_array_equal(found.pop(path), leaf)
    assert {path[-1].key for path in found} == {'residual_scale', 'embedding_scale'}
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, path[-1].key == 'residual_scale'))


@pytest.mark.parametrize('routing', [{}, pytest.param(ROUTED, marks=pytest.mark.slow)])
def test_scales_start_as_in_nanochat(routing, tiny_config):
    """r falls from 1.15 to 1.05 and a from 0.20 to 0.05 over four layers, in float32."""
    hparams = small_hparams(tiny_config, EMBEDDED, routing)
    found = by_name(hparams, initial_params(hparams))
    for name, first in (
        ('residual_scale', [1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05]),
        ('embedding_scale', [0.2, 0.15, 0.1, 0.05]),
    ):
        leaves = [found[i, f"['blend']['{name}']"] for i in range(4)]
        assert all(leaf.dtype == np.float32 for leaf in leaves)
        np.testing.assert_allclose(leaves, first, rtol=1e-6)


def stack_of(hparams, variables, **values):
    """Return the stack with these leaves as a function of its input [B, T, D]."""
    params = with_leaves(variables['params']['stack'], values)
    args = layer_args(hparams.model, variables.get('averages'), 'top_c')
    tokens = token_info(hparams, jnp.asarray(SMALL_BT), jnp.asarray(SMALL_SEGMENTS_BT))

    def run(x_BTD):
        return run_stack(Stack(hparams.model, 'top_c'), params, tokens, args, x_BTD)[0]

    return run


# name: (knobs, the stored layer of each block that runs)
LINEAR = {
    'scanned': ({}, (0, 1, 2, 3)),
    'unrolled': (UNROLLED, (0, 1, 2, 3)),
    'routed': (ROUTED | {'model.routing.layers': '1,3'}, (0, 1, 2, 3)),
    'looped': (LOOPED, (0, 1, 2, 1, 2, 1, 2, 3)),
    'moda': (MODA, (0, 1, 2, 3)),
}


@pytest.mark.parametrize('name', parameters(('unrolled', 'routed'), LINEAR))
def test_the_embedded_tokens_reach_the_end_through_every_layer(name, tiny_config):
    """If blocks add 0, the output is (prod r_i + sum_i a_i prod_{j>i} r_j) x_0.

    The gradient has the same factor for every token, also for tokens that skip all routed blocks.
    """
    knobs, order = LINEAR[name]
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        hparams = small_hparams(tiny_config, knobs, EMBEDDED, FLOAT64)
        variables = random_variables(hparams, SMALL_BT)
        found = by_name(hparams, variables['params'])
        run = stack_of(hparams, variables, kernel=0, bias=0)
        x_BTD, dy_BTD = np.random.default_rng(5).normal(size=(2, B, T, hparams.model.d_model))
        y_BTD, vjp = jax.vjp(jax.jit(run), jnp.asarray(x_BTD))
        (dx_BTD,) = vjp(jnp.asarray(dy_BTD))
    assert len(found) and len(order) == hparams.model.num_blocks
    total = 1.0
    for place in range(len(order)):
        r, a = (
            found[place, f"['blend']['{scale}']"] for scale in ('residual_scale', 'embedding_scale')
        )
        total = r * total + a
    np.testing.assert_allclose(y_BTD, total * x_BTD, rtol=1e-10)
    np.testing.assert_allclose(dx_BTD, total * dy_BTD, rtol=1e-10)


@pytest.mark.parametrize('loop', [{}, pytest.param(UNROLLED, marks=pytest.mark.slow)])
def test_gradients_of_the_embedded_tokens_are_summed_in_float32(loop, tiny_config):
    """40 layers with a = 2^-9 add up. Each is below half a unit of bfloat16 at 1."""
    knobs = {'model.num_layers': 40, 'model.dtype': 'bfloat16'}
    hparams = small_hparams(tiny_config, knobs, EMBEDDED, loop)
    variables = random_variables(hparams, SMALL_BT)
    values = {'residual_scale': 1, 'embedding_scale': 2.0**-9, 'kernel': 0}
    x_BTD = jnp.ones((B, T, hparams.model.d_model), jnp.bfloat16)
    run = stack_of(hparams, variables, **values)
    (dx_BTD,) = jax.vjp(jax.jit(run), x_BTD)[1](x_BTD)
    assert dx_BTD.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dx_BTD, jnp.bfloat16(1 + 40 * 2.0**-9))


@pytest.mark.parametrize('routing', [{}, ROUTED])
def test_no_layer_keeps_the_embedded_tokens(routing, tiny_config):
    """With recomputed blocks, a gradient saves x_0 once at any depth."""
    kept = []
    for knobs in ({}, EMBEDDED):
        hparams = small_hparams(tiny_config, routing, knobs)
        run = stack_of(hparams, random_variables(hparams, SMALL_BT))
        x_BTD = jax.ShapeDtypeStruct((B, T, hparams.model.d_model), 'float32')
        _, vjp = jax.eval_shape(lambda x_BTD, run=run: jax.vjp(run, x_BTD), x_BTD)
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(vjp) if T in leaf.shape))
    assert kept[1] - kept[0] == x_BTD.size


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_tokens_are_blended_in_float32_and_rounded_once(dtype, tiny_config):
    """A scale of 1.003, which bfloat16 rounds to 1, has an effect."""
    rng = np.random.default_rng(0)
    x, first = (jnp.asarray(rng.normal(size=(2, 3, 4)), dtype) for _ in range(2))
    embedded = embedded_input(small_hparams(tiny_config, EMBEDDED).model, first)
    assert embedded.dtype == np.float32
    found = blend_embedding(x, embedded, np.float32(1.003), np.float32(0.2))
    wide = np.asarray(x, np.float32) * np.float32(1.003)
    wide += np.asarray(first, np.float32) * np.float32(0.2)
    assert found.dtype == dtype
    expected = np.asarray(jnp.asarray(wide, dtype), np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1e-6)


@pytest.mark.parametrize('routing', [{}, ROUTED])
def test_flops_are_those_of_the_plain_model(routing, tiny_config):
    plain, embedded = (small_hparams(tiny_config, routing, more) for more in ({}, EMBEDDED))
    assert forward_breakdown(embedded, B, T) == forward_breakdown(plain, B, T)
