"""Each router equals its definition and depends only on what it should."""

import fractions
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.mod.routers import (
    GATES,
    ROUTERS,
    fixed_threshold,
    linear_scores,
    selected_mean,
    token_seeds,
)
from moddepth_jax.model.routing import select_top_c

NORMAL = statistics.NormalDist()


def make_router(tiny_config, router, capacity=0.125):
    knobs = {'model.routing.router': router, 'model.routing.capacity': capacity}
    routing = from_config(tiny_config(**knobs)).model.routing
    return ROUTERS[router](routing), routing


def stream(rows, length, width, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, length, width)).astype(np.float32)


def test_gates_are_their_formulas():
    """raw, sigmoid, tanh and none at a few scores. The straight-through value is exactly 1."""
    r = np.array([[-30.0, -1.5, 0.0, 0.7, 30.0]], np.float32)
    expected = {
        'raw': r,
        'sigmoid': 1 / (1 + np.exp(-r)),
        'tanh': np.tanh(r),
        'none': np.ones_like(r),
        'straight_through': np.ones_like(r),
        'softmax': np.ones_like(r),  # over the loops; here there is one
    }
    assert GATES.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(GATES[name](r), values, rtol=1e-6)
    two = GATES['softmax'](np.concatenate([r, np.zeros_like(r)]))
    np.testing.assert_allclose(two[0], expected['sigmoid'][0], rtol=1e-6)
    many = 10 * stream(1, 10_000, 1)[..., 0]
    np.testing.assert_array_equal(GATES['straight_through'](many), np.ones_like(many))


@pytest.mark.parametrize('name', ['tanh', 'softmax', 'straight_through'])
def test_no_gate_of_the_project_is_replaced(name):
    """Gates that are JAX's own functions could be, since they are of no module of this project."""
    with pytest.raises(ValueError, match=f"routing.gate='{name}': .*routers has this name"):
        GATES.register(name)(lambda scores: scores)


def test_a_gate_depends_only_on_its_own_token():
    """Other scores of the row change no gate. A softmax over the row would leak the future."""
    r_BT = stream(2, 8, 1)[..., 0]
    other_BT = np.where(np.arange(8) == 3, r_BT, 5 * r_BT[:, ::-1] + 1)
    for gate in GATES.values():
        np.testing.assert_array_equal(gate(r_BT)[:, 3], gate(other_BT)[:, 3])


def test_straight_through_has_the_slope_of_a_sigmoid():
    """d gate / d r is sigmoid(r) (1 - sigmoid(r)), not 0, so the router learns."""
    r = np.array([[-3.0, -0.2, 0.0, 1.4]], np.float32)
    slope = jax.grad(lambda r: jnp.sum(GATES['straight_through'](r)))(r)
    chance = 1 / (1 + np.exp(-r.astype(float)))
    np.testing.assert_allclose(slope, chance * (1 - chance), rtol=1e-5)


@pytest.mark.parametrize('router', ['learned', 'straight_through'])
def test_linear_routers_are_a_product_in_float32(router, tiny_config):
    """r = w . x, plus b if there is one, in float32 also for a bfloat16 stream."""
    module, _ = make_router(tiny_config, router)
    x_BTD = jnp.asarray(stream(2, 16, 32), jnp.bfloat16)
    params = module.init(jax.random.key(0), x_BTD, None, 0)['params']
    assert {name: leaf.shape for name, leaf in params.items()} == (
        {'w': (32,)} if router == 'learned' else {'w': (32,), 'b': ()}
    )
    params['w'], bias = 1 + stream(1, 1, 32)[0, 0], 0.0
    if router == 'straight_through':
        assert params['b'] == 0
        params['b'] = bias = np.float32(0.75)
    r_BT = module.apply({'params': params}, x_BTD, None, 0)
    exact_BT = np.asarray(x_BTD, np.float64) @ params['w'] + bias
    assert r_BT.dtype == jnp.float32
    np.testing.assert_allclose(r_BT, exact_BT, rtol=0, atol=1e-5)


def test_straight_through_scores_start_normal(tiny_config):
    """Scores start with standard deviation 1 for any size of the stream."""
    module, _ = make_router(tiny_config, 'straight_through')
    for spread in (0.02, 30.0):
        x_BTD, deviations = spread * stream(4, 256, 64), []
        for seed in range(20):
            variables = module.init(jax.random.key(seed), x_BTD, None, 0)
            deviations.append(np.std(module.apply(variables, x_BTD, None, 0)))
        assert np.mean(deviations) == pytest.approx(1, abs=0.1)


def test_equal_scores_of_a_linear_router_are_bit_equal():
    """Tokens with equal vectors tie exactly at any position: the earlier one is selected."""
    x_BTD = np.tile(stream(1, 1, 96), (3, 130, 1))
    r_BT = np.asarray(jax.jit(linear_scores)(x_BTD, stream(1, 1, 96, seed=1)[0, 0]))
    assert len(np.unique(r_BT)) == 1
    np.testing.assert_array_equal(select_top_c(r_BT, 7), np.tile(np.arange(7), (3, 1)))


def test_norm_router_is_the_length_of_the_stream(tiny_config):
    """The L2 norm in float32, also of a bfloat16 stream, without parameters."""
    module, _ = make_router(tiny_config, 'norm')
    for dtype in (jnp.float32, jnp.bfloat16):
        x_BTD = jnp.asarray(3 * stream(2, 16, 32), dtype)
        assert not module.init(jax.random.key(0), x_BTD, None, 0)
        r_BT = module.apply({}, x_BTD, None, 0)
        assert r_BT.dtype == jnp.float32
        exact_BT = (np.asarray(x_BTD, np.float64) ** 2).sum(-1) ** 0.5
        np.testing.assert_allclose(r_BT, exact_BT, rtol=1e-6)
        # Regression: the derivative of the root is infinite at 0, and times a cotangent of 0 NaN.
        at_zero = jax.grad(lambda x_BTD: 0 * module.apply({}, x_BTD, None, 0).sum())(0 * x_BTD)
        assert not at_zero.any()


def random_scores(tiny_config, tokens_BT, number, key):
    module, _ = make_router(tiny_config, 'random')

    @jax.jit
    def scores(tokens_BT, number, key):
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        seeds_BT = token_seeds(key, tokens_BT, positions_BT)
        tokens = TokenInfo(positions_BT, jnp.ones_like(tokens_BT), seeds_BT)
        return module.apply({}, None, tokens, number)

    return np.asarray(scores(tokens_BT, jnp.int32(number), jax.random.key(key)))


def test_random_scores_are_standard_normal(tiny_config):
    """40,000 scores are uncorrelated along a row. The threshold selects the capacity."""
    tokens_BT = np.random.default_rng(0).integers(0, 257, (40, 1000))
    r_BT = random_scores(tiny_config, tokens_BT, 1, key=0).astype(float)
    assert abs((r_BT[:, 1:] * r_BT[:, :-1]).mean()) < 0.02
    normal = np.array([NORMAL.cdf(value) for value in np.sort(r_BT.ravel())[::40]])
    assert np.abs(normal - np.arange(0, 1, 1e-3)).max() < 0.01
    for capacity in (1.0, 0.5, 0.125, 0.02):
        threshold = fixed_threshold(make_router(tiny_config, 'random', capacity)[1])
        assert (r_BT > threshold).mean() == pytest.approx(capacity, abs=0.1 * capacity**0.5)
    assert threshold > 2 and fixed_threshold(make_router(tiny_config, 'random', 1.0)[1]) == -np.inf


def test_random_scores_differ_by_layer_key_and_content(tiny_config):
    """The same token at the same position has the same score in any row."""
    rng = np.random.default_rng(1)
    tokens_BT = rng.integers(0, 257, (2, 64))
    r_BT = random_scores(tiny_config, tokens_BT, 0, key=0)
    np.testing.assert_array_equal(random_scores(tiny_config, tokens_BT, 0, key=0), r_BT)
    for number, key in ((1, 0), (2, 0), (0, 1)):
        other_BT = random_scores(tiny_config, tokens_BT, number, key)
        assert (other_BT != r_BT).all() and abs(np.corrcoef(other_BT.flat, r_BT.flat)[0, 1]) < 0.4
    assert (r_BT[0] != r_BT[1])[tokens_BT[0] != tokens_BT[1]].all()
    mates_BT = np.stack([rng.integers(0, 257, 64), tokens_BT[1], tokens_BT[0]])
    mates = random_scores(tiny_config, mates_BT, 0, key=0)
    np.testing.assert_array_equal(mates[1:], r_BT[::-1])
    early_BT = random_scores(tiny_config, tokens_BT[:, :20], 0, key=0)
    np.testing.assert_array_equal(early_BT, r_BT[:, :20])
    assert len(np.unique(random_scores(tiny_config, np.full((1, 64), 7), 0, key=0))) == 64


@pytest.mark.parametrize('share', [(1, 10), (1, 3), (7, 10), (1, 1)], ids=str)
def test_position_router_is_its_pattern(share, tiny_config):
    """t is selected if floor((t+1) c) > floor(t c) in exact fractions, for positions up to 3000.

    The rule and top-C over a row of any length select the same tokens.
    """
    c = fractions.Fraction(*share)
    module, routing = make_router(tiny_config, 'position', float(c))
    positions_BT = jnp.arange(3000)[None]
    tokens = TokenInfo(positions_BT, jnp.ones_like(positions_BT))
    r_BT = np.asarray(module.apply({}, jnp.zeros((1, 3000, 4)), tokens, 0))
    pattern_T = [math.floor((t + 1) * c) > math.floor(t * c) for t in range(3000)]
    np.testing.assert_array_equal(r_BT[0] > fixed_threshold(routing), pattern_T)
    for length in (10, 3000):
        chosen_BC = select_top_c(r_BT[:, :length], routing.num_selected(length))
        np.testing.assert_array_equal(chosen_BC[0], np.flatnonzero(pattern_T[:length]))


@pytest.mark.parametrize('capacity', [0.02, 0.125, 0.9])
def test_mean_of_the_best_is_that_of_a_gaussian(capacity):
    """The top eighth averages 1.65 sigma. A small mean is replaced by 0.5."""
    ordered = np.sort([NORMAL.inv_cdf((i + 0.5) / 100_000) for i in range(100_000)])
    exact = ordered[-round(capacity * 100_000) :].mean()
    assert selected_mean(capacity) == pytest.approx(max(0.5, exact), rel=1e-3)
    if capacity == 0.125:
        assert selected_mean(capacity) == pytest.approx(1.647, abs=1e-3)
