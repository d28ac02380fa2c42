"""Experts are a dense loop over all of them; padding and experts that do nothing add nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.block import Block
from moddepth_jax.model.moe.experts import Experts, ExpertState, routed_mlp
from tests.model.cases import (
    FAST,
    drawn_like,
    idle_router,
    looped,
    pairs_of_experts,
    pairs_of_tokens,
    scored,
    slope,
    small_experts,
)

LENGTH, WIDTH = 8, 16
# A row of one document, one packed, one with padding, one with a single token, one with none.
SEGMENTS = np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 5 + [0] * 3, [1] + [0] * 7, [0] * 8])
REAL = SEGMENTS > 0
CASES = {
    'softmax': {'route_scale': 2.5},
    'top one': {'top_k': 1, 'num_noop': 2, 'num_shared': 0},
    'noop sigmoid': {
        'num_routed': 3,
        'num_noop': 2,
        'top_k': 3,
        'scores': 'sigmoid',
        'num_shared': 0,
    },
    'one expert': {'num_routed': 1, 'top_k': 1, 'num_shared': 2, 'route_scale': 3.0},
    'all of them': {'num_routed': 4, 'top_k': 4, 'scores': 'sigmoid', 'route_scale': 0.5},
    'more chosen than computed': {'num_routed': 1, 'num_noop': 3, 'top_k': 2},
    'row capacity': {'num_routed': 3, 'num_noop': 1, 'row_capacity': 2, 'scores': 'sigmoid'},
    'experts choose': {'choice': 'expert', 'num_routed': 3, 'route_scale': 1.5},
    'experts choose by sigmoid': {'choice': 'expert', 'scores': 'sigmoid', 'num_shared': 0},
    'thresholds': {'choice': 'expert', 'num_routed': 4, 'route_scale': 0.5},
}
THRESHOLDS = np.array([0.15, 0.25, 0.35, 0.9], np.float32)  # nothing passes the last one


def jit(function):
    return jax.jit(function, compiler_options=FAST)


def stream(seed=1, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(*SEGMENTS.shape, WIDTH)).astype(dtype)


def module(hparams, ahead=True):
    """The module and the shapes of its parameters."""
    experts = Experts(hparams.model, ahead)
    shapes = jax.eval_shape(experts.init, jax.random.key(0), stream(), REAL, ExpertState())
    return experts, shapes['params']


def all_on(expert, params, x_BTD):
    """The same with one expert scored highest by every token, then the others as before."""
    x_BTD, kernel_DZ = x_BTD.copy(), params['router']['kernel'].copy()
    x_BTD[..., 0], kernel_DZ[0] = 1, 0
    kernel_DZ[0, expert] = 6
    return params | {'router': {'kernel': kernel_DZ}}, x_BTD


def expected_pairs(params, x_BTD, hparams, thresholds_E):
    """chosen_BTZ and computed_BTZ by counting."""
    scores_BTZ = scored(params, x_BTD, hparams.scores)
    if hparams.choice == 'token':
        given = (hparams.top_k, hparams.num_routed, hparams.row_capacity)
        return pairs_of_tokens(scores_BTZ, REAL, *given)
    taken = max(1, hparams.top_k * LENGTH // hparams.num_routed)
    pairs_BTE = pairs_of_experts(scores_BTZ, REAL, taken, thresholds_E)
    return pairs_BTE, pairs_BTE


def check(make_config, name, product, dtype, tolerance):
    wide = {'model.dtype': np.dtype(dtype).name}
    hparams = small_experts(make_config, wide, **CASES[name], product=product)
    knobs, limits = hparams.model.experts, ExpertState()
    if name == 'thresholds':
        limits = ExpertState(THRESHOLDS)
    experts, shapes = module(hparams, name != 'thresholds')
    rng = np.random.default_rng(3)
    weights_BTD = rng.normal(size=(*SEGMENTS.shape, WIDTH)).astype(dtype)
    weights_Z = rng.normal(size=knobs.num_choices).astype(dtype)

    def total(given):
        y_BTD, record, _ = experts.apply({'params': given[0]}, given[1], REAL, limits)
        loss = jnp.sum(y_BTD * weights_BTD) + jnp.sum(record.scores_Z**2 * weights_Z)
        return loss, (y_BTD, record)

    ours = jit(jax.grad(total, has_aux=True))
    params, x_BTD = drawn_like(shapes, dtype=dtype), stream(dtype=dtype)
    for given in ((params, x_BTD), all_on(knobs.num_routed - 1, params, x_BTD)):
        chosen_BTZ, computed_BTZ = expected_pairs(*given, knobs, limits.thresholds_E)

        def loop(*given, pairs=(chosen_BTZ, computed_BTZ)):
            return looped(*given, REAL, *pairs, knobs)

        def looped_total(*given, loop=loop):
            y_BTD, scores_Z = loop(*given)
            return np.sum(y_BTD * weights_BTD) + np.sum(scores_Z**2 * weights_Z)

        gradients, (y_BTD, record) = jax.device_get(ours(given))
        given = jax.tree.map(np.float64, given)
        for found, expected in zip((y_BTD, record.scores_Z), loop(*given), strict=True):
            assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
        for path, found in jax.tree_util.tree_leaves_with_path(gradients):
            along = rng.normal(size=found.shape)
            expected = slope(looped_total, given, path, along)
            # Where the gradient is zero but for rounding, its size is that of any other.
            most = max(np.linalg.norm(found), 1e-2) * np.linalg.norm(along) / along.size**0.5
            where = jax.tree_util.keystr(path)
            assert np.abs(np.sum(found * along) - expected) <= tolerance * most, where
        np.testing.assert_array_equal(record.pairs_Z, chosen_BTZ.sum((0, 1)))
        assert (record.tokens, record.rows) == (REAL.sum(), REAL.any(1).sum())
        lost_BTZ = chosen_BTZ & ~computed_BTZ
        assert record.dropped == lost_BTZ[..., : knobs.num_routed].sum()
        assert (record.dropped > 0) == (knobs.row_capacity > 0)
    if name == 'top one':
        np.testing.assert_array_equal(record.pairs_Z, [0, 0, 0, 0, REAL.sum(), 0, 0])
    assert (record.lowest_E is None) == (not name.startswith('experts choose'))


SLOW = ('softmax', 'more chosen than computed', 'experts choose by sigmoid')


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_experts_are_a_dense_loop(name, tiny_config):
    """Outputs, records, and gradients of tokens, router and all weights: to 1e-10 in float64.

    With every token on one expert (and others empty) too; padding passes the shared ones alone.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        check(tiny_config, name, 'blocked', np.float64, 1e-10)


MORE = [('softmax', 'ragged_dot', 'float32')]
SLOW_MORE = [('softmax', 'blocked', 'float32')] + [
    (name, product, dtype)
    for name in list(CASES)[1:]
    for product, dtype in (
        ('blocked', 'float32'),
        ('ragged_dot', 'float64'),
        ('batched', 'float64'),
    )
]


@pytest.mark.parametrize(
    ('name', 'product', 'dtype'),
    [*MORE, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_MORE)],
)
def test_experts_are_a_dense_loop_in_other_forms(name, product, dtype, tiny_config):
    """As above, by every grouped product; to 1e-5 in float32."""
    tolerance = {'float32': 1e-5, 'float64': 1e-10}[dtype]
    with jax.enable_x64(dtype == 'float64'), jax.numpy_rank_promotion('allow'):
        check(tiny_config, name, product, np.dtype(dtype).type, tolerance)


def test_padding_reaches_nothing(tiny_config):
    """Whatever stands there, real tokens keep their bits; it gets what the shared experts give."""
    hparams = small_experts(tiny_config, num_noop=1)
    experts, shapes = module(hparams)
    params, x_BTD = drawn_like(shapes), stream()
    other_BTD = np.where(REAL[..., None], x_BTD, 5 * stream(9))
    run = jit(lambda x_BTD: experts.apply({'params': params}, x_BTD, REAL, ExpertState())[:2])
    (y_BTD, record), (other_y_BTD, other_record) = run(x_BTD), run(other_BTD)
    np.testing.assert_array_equal(y_BTD[REAL], other_y_BTD[REAL])
    for one, other in zip(jax.tree.leaves(record), jax.tree.leaves(other_record), strict=True):
        np.testing.assert_array_equal(one, other)
    none = np.zeros((*SEGMENTS.shape, 6), bool)
    shared_BTD, _ = looped(params, other_BTD, REAL, none, none, hparams.model.experts)
    np.testing.assert_allclose(other_y_BTD[~REAL], shared_BTD[~REAL], rtol=1e-4, atol=1e-4)


def test_room_for_a_row_is_no_limit(tiny_config):
    """Bit for bit, gradients too, with every token on one expert."""
    found = []
    for row_capacity in (0, LENGTH):
        hparams = small_experts(tiny_config, num_noop=1, row_capacity=row_capacity)
        experts, shapes = module(hparams)
        given = all_on(2, drawn_like(shapes), stream())

        def loss(params, x_BTD, experts=experts):
            y_BTD, record, _ = experts.apply({'params': params}, x_BTD, REAL, ExpertState())
            return jnp.sum(jnp.sin(y_BTD)), (y_BTD, record)

        found.append(jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*given))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    ('placement', 'form'),
    [
        ('pre', 'softmax'),
        ('reordered', 'sigmoid'),
        pytest.param('post', 'softmax', marks=pytest.mark.slow),
        pytest.param('pre', 'sigmoid', marks=pytest.mark.slow),
    ],
)
def test_experts_that_do_nothing_add_nothing(placement, form, tiny_config):
    """The block's output is bit for bit that of an mlp that adds zeros, with finite gradients."""
    knobs = {'num_noop': 4, 'num_shared': 0, 'scores': form, 'row_capacity': 1}
    hparams = small_experts(tiny_config, {'model.norm_placement': placement}, **knobs).model
    tokens = TokenInfo(np.tile(np.arange(LENGTH), (5, 1)), SEGMENTS, None)
    mixed, plain = (Block(hparams, 0, experts=experts) for experts in (True, False))
    shapes = jax.eval_shape(mixed.init, jax.random.key(0), stream(), tokens)['params']
    params = drawn_like(shapes)
    params['mlp']['router']['kernel'] = idle_router(WIDTH, 9)
    mlp = jax.eval_shape(plain.init, jax.random.key(0), stream(), tokens)['params']['mlp']
    mlp = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), mlp)

    def total(params, x_BTD):
        y_BTD, left = mixed.apply({'params': params}, x_BTD, tokens)
        return jnp.sum(jnp.sin(y_BTD)) + left.experts.log_z, (y_BTD, left.experts)

    run = jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (y_BTD, record)), (gradient, dx_BTD) = run(params, stream())
    assert (record.tokens, record.dropped) == (REAL.sum(), 0)
    assert not np.any(record.pairs_Z[:5]) and record.pairs_Z[5:].sum() == 2 * REAL.sum()
    zeros = jit(lambda x_BTD: plain.apply({'params': params | {'mlp': mlp}}, x_BTD, tokens)[0])
    np.testing.assert_array_equal(y_BTD, zeros(stream()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, dx_BTD)))
    assert not any(np.any(gradient['mlp'][name]['kernel']) for name in ('w1', 'w3', 'w2'))
    assert np.any(gradient['mlp']['router']['kernel'])


def test_a_pair_that_goes_nowhere_costs_nothing(tiny_config):
    """Its number may be any outside of the experts', its weight NaN: nothing is added."""
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(2, 3, 4)).astype(np.float32)
    w1_EDF, w3_EDF = rng.normal(size=(2, 2, 4, 5)).astype(np.float32)
    w2_EFD = rng.normal(size=(2, 5, 4)).astype(np.float32)
    expert_BTk = np.array([[[2, -1], [0, 7], [-3, 1]], [[9, 9], [2, 2], [-1, -1]]])
    weight_BTk = np.where((expert_BTk >= 0) & (expert_BTk < 2), 1.5, np.nan).astype(np.float32)
    given = (x_BTD, expert_BTk, weight_BTk, w1_EDF, w3_EDF, w2_EFD)
    y_BTD = jit(lambda *given: routed_mlp(*given, 'blocked', 2))(*given)
    expected_BTD = np.zeros_like(x_BTD)
    for t, e in ((1, 0), (2, 1)):
        gate_F = x_BTD[0, t] @ w1_EDF[e]
        value_F = gate_F / (1 + np.exp(-gate_F)) * (x_BTD[0, t] @ w3_EDF[e])
        expected_BTD[0, t] = 1.5 * value_F @ w2_EFD[e]
    np.testing.assert_allclose(y_BTD, expected_BTD, rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(y_BTD)[expected_BTD == 0])
