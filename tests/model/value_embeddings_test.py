"""Value embeddings: which layers have tables, initial values, gradients and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.conversion.transfer_params import check_convertible, transfer_params
from moddepth_jax.model.flops import forward_breakdown
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import run_stack
from moddepth_jax.model.transformer import Transformer, layer_args, token_info
from moddepth_jax.model.value_embeddings import ValueEmbedding, add_gated
from tests.model.cases import (
    ALL_LOOKED_UP,
    LOOKED_UP,
    LOOPED,
    ROUTED,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    by_name,
    equations,
    initial_params,
    random_variables,
    small_hparams,
)

B, T = SMALL_BT.shape


@pytest.mark.parametrize('layers', [1, 4])
def test_every_second_layer_has_a_table_and_the_last(layers, tiny_config):
    """Layers are scanned as one run of groups of two, or of one under `all`."""
    for knobs, expected in ((LOOKED_UP, {*range(layers - 1, -1, -2)}), (ALL_LOOKED_UP, None)):
        hparams = small_hparams(tiny_config, knobs, {'model.num_layers': layers})
        params = random_variables(hparams, SMALL_BT)['params']
        found = {i for i, name in by_name(hparams, params) if 'value_embedding' in name}
        assert found == ({*range(layers)} if expected is None else expected)
        if layers == 4:
            ((group, repeats),) = Stack(hparams.model, 'top_c').runs
            assert (len(group), repeats) == ((2, 2) if expected else (1, 4))


@pytest.mark.parametrize('routing', [{}, pytest.param(ROUTED, marks=pytest.mark.slow)])
def test_first_values_are_those_of_nanochat(routing, tiny_config):
    """Tables are uniform in +-sqrt(3 / D), with variance 1 / D, and gates in [0, 0.02).

    All are float32 with different draws.
    """
    hparams = small_hparams(tiny_config, ALL_LOOKED_UP, routing, {'model.dtype': 'bfloat16'})
    found = by_name(hparams, initial_params(hparams))
    found = {name: leaf for name, leaf in found.items() if 'value_embedding' in name[1]}
    limit, draws = (3 / 16) ** 0.5, set()
    assert len(found) == 2 * 4
    for (_, name), leaf in found.items():
        draws.add(float(leaf.ravel()[0]))
        assert leaf.dtype == np.float32
        low, high, shape = -limit, limit, (32, 2, 4)
        if 'gate' in name:
            low, high, shape = 0, 0.02, (12, 2)
        assert leaf.shape == shape and leaf.min() >= low and leaf.max() <= high
        assert leaf.max() - leaf.min() > 0.8 * (high - low)
        assert np.mean(leaf) == pytest.approx((low + high) / 2, abs=0.1 * (high - low))
    assert len(draws) == len(found)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rows_are_added_in_float32_and_rounded_once(dtype):
    """A gate near 1.003, which bfloat16 rounds to 1, has an effect. It is 1.5 at a logit of 0."""
    rng = np.random.default_rng(0)
    v, row = (jnp.asarray(rng.normal(size=(2, 3, 2, 4)), dtype) for _ in range(2))
    logit = np.full((2, 3, 2), -np.log(3 / 1.003 - 1), np.float32)
    logit[0, 0] = 0
    gate = np.where(logit == 0, 1.5, 1.003)[..., None]
    wide = np.asarray(v, np.float32) + np.float32(gate) * np.asarray(row, np.float32)
    found = add_gated(v, row, jnp.asarray(logit))
    assert found.dtype == dtype
    expected = np.asarray(jnp.asarray(wide, dtype), np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1e-6)


def test_gradients_of_a_token_are_summed_in_float32(tiny_config):
    """1024 equal tokens give a gradient of 1.5 * 1024. In bfloat16 it would stop at 256."""
    model = small_hparams(tiny_config, LOOKED_UP, {'model.dtype': 'bfloat16'}).model
    module, ids_BT = ValueEmbedding(model), jnp.full((1, 1024), 3)
    x_BTD = jnp.zeros((1, 1024, model.d_model), 'bfloat16')
    v_BTKH = jnp.zeros((1, 1024, model.num_kv_heads, model.head_dim), 'bfloat16')
    params = module.init(jax.random.key(0), v_BTKH, x_BTD, ids_BT)
    added_BTKH, vjp = jax.vjp(lambda params: module.apply(params, v_BTKH, x_BTD, ids_BT), params)
    assert added_BTKH.dtype == jnp.bfloat16
    slope_VKH = vjp(jnp.ones_like(added_BTKH))[0]['params']['embedding']
    assert slope_VKH.dtype == np.float32
    expected_VKH = np.zeros(slope_VKH.shape)
    expected_VKH[3] = 1.5 * 1024
    np.testing.assert_array_equal(slope_VKH, expected_VKH)


def stack_of(hparams):
    """Return the stack as a function of parameters and input [B, T, D]; and both, abstract."""
    variables = random_variables(hparams, SMALL_BT)
    args = layer_args(hparams.model, variables.get('averages'), 'top_c')
    tokens = token_info(hparams, jnp.asarray(SMALL_BT), jnp.asarray(SMALL_SEGMENTS_BT))

    def run(params, x_BTD):
        return run_stack(Stack(hparams.model, 'top_c'), params, tokens, args, x_BTD)[0]

    x_BTD = jax.ShapeDtypeStruct((B, T, hparams.model.d_model), 'float32')
    return run, variables['params']['stack'], x_BTD


@pytest.mark.parametrize('remat', ['block', 'none'])
@pytest.mark.parametrize('knobs', [{}, ROUTED, LOOPED], ids=['dense', 'routed', 'looped'])
def test_no_token_has_an_array_over_the_vocabulary(knobs, remat, tiny_config):
    """A lookup is not a product with one-hot rows. A gradient saves each table once."""
    wide = {'model.vocab_size': 37, 'model.remat': remat}
    run, params, x_BTD = stack_of(small_hparams(tiny_config, knobs, LOOKED_UP, wide))

    def slopes(params, x_BTD):
        y_BTD, vjp = jax.vjp(run, params, x_BTD)
        return vjp(y_BTD), vjp

    traced, (_, vjp) = jax.make_jaxpr(slopes, return_shape=True)(params, x_BTD)
    tables = [leaf for leaf in jax.tree.leaves(params) if 37 in leaf.shape]
    kept = [leaf for leaf in jax.tree.leaves(vjp) if 37 in leaf.shape]
    assert [leaf.shape for leaf in kept] == [leaf.shape for leaf in tables]
    shapes = [out.aval.shape for eqn in equations(traced.jaxpr) for out in eqn.outvars]
    assert any(37 in shape for shape in shapes)
    assert not [shape for shape in shapes if 37 in shape and {T, B * T} & {*shape}]


@pytest.mark.parametrize('routing', [{}, ROUTED])
def test_flops_grow_only_by_the_gates(routing, tiny_config):
    """2 * 12 * K for each token that a layer with a table processes."""
    plain, other = (small_hparams(tiny_config, routing, more) for more in ({}, LOOKED_UP))
    before, after = (forward_breakdown(hparams, B, T) for hparams in (plain, other))
    tokens = 2 * B * (T // 4 if routing else T)
    assert after.pop('projections') - before.pop('projections') == tokens * 2 * 12 * 2
    assert after == before


EVERY_TOKEN = ROUTED | {'model.routing.capacity': 1.0, 'model.routing.gate': 'none'}


@pytest.mark.parametrize('routing', [{}, EVERY_TOKEN])
def test_a_dense_model_converts_to_tables_of_zeros(routing, tiny_config):
    """New tables are 0 and gates are drawn. The logits stay those of the dense model."""
    plain, target = small_hparams(tiny_config), small_hparams(tiny_config, routing, ALL_LOOKED_UP)
    check_convertible(plain, target)
    params = random_variables(plain, SMALL_BT)['params']
    converted, new = transfer_params(plain.model, params, target)
    assert any(name.endswith('attention.value_embedding.embedding') for name in new)
    for (_, name), leaf in by_name(target, converted).items():
        if 'value_embedding' in name:
            assert np.any(leaf) == ('gate' in name) and leaf.dtype == np.float32
    expected_BTV, found_BTV = (
        jax.jit(Transformer(hparams).apply)({'params': given}, SMALL_BT, SMALL_SEGMENTS_BT)[0]
        for hparams, given in ((plain, params), (target, converted))
    )
    real_BT = SMALL_SEGMENTS_BT > 0
    np.testing.assert_allclose(found_BTV[real_BT], expected_BTV[real_BT], rtol=1e-5, atol=1e-5)
