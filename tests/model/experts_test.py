"""Experts equal a float64 loop over all tokens and experts, and choose as defined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.block import Block, LayerKind
from moddepth_jax.model.kv_cache import LayerCache
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs
from moddepth_jax.model.moe import experts as experts_module
from moddepth_jax.model.moe.experts import (
    Experts,
    ExpertState,
    experts_choose,
    normalize_weights,
    tokens_choose,
)
from tests.model import oracle
from tests.model.cases import HALF_ROUTED, experts, parameters, random_like, small_hparams

LENGTH, WIDTH = 8, 16
# Rows: one document, two documents, padding at the end, a single token, no tokens.
SEGMENTS = np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 5 + [0] * 3, [1] + [0] * 7, [0] * 8])
REAL = SEGMENTS > 0
ONE_TOKEN = np.ones((1, 1), bool)
POSITIONS = np.tile(np.arange(LENGTH), (5, 1))


def hparams_of(make_config, **knobs):
    """Return Hparams of a small model with these experts."""
    return small_hparams(make_config, experts(**knobs)).model


def test_ties_go_to_the_lower_number(tiny_config):
    """Of equal scores, the expert of the lower number is chosen."""
    hparams = hparams_of(tiny_config, num_routed=3, num_noop=1).experts
    scores_BTZ = np.array([[[1, 1, 1, 1], [1, 2, 1, 2], [0, 1, 3, 1], [5, 5, 6, 6]]], np.float32)
    choice = tokens_choose(hparams, scores_BTZ, np.ones((1, 4), bool), None)
    np.testing.assert_array_equal(np.sort(choice.expert_BTk[0]), [[0, 1], [1, 3], [1, 2], [2, 3]])


def test_weights_of_tiny_scores():
    """The gradient of a share is that of a softmax over logits, down to scores that underflow."""
    for logit, share in ((0.0, 0.5), (-60.0, 0.5), (-85.0, 0.5), (-200.0, 0.0)):
        logits_BTk = jnp.full((1, 1, 2), logit)
        first = jax.value_and_grad(lambda x: normalize_weights(jax.nn.sigmoid(x))[0, 0, 0])
        value, slope_BTk = first(logits_BTk)
        rest = share * (1 - share) * jax.nn.sigmoid(-logit)
        np.testing.assert_allclose(value, share)
        np.testing.assert_allclose(slope_BTk[0, 0], [rest, -rest], rtol=1e-5)


def test_a_score_that_equals_the_threshold_is_not_taken(tiny_config):
    """An expert takes only tokens with a score above its own threshold, and never padding."""
    hparams = hparams_of(tiny_config, choice='expert', num_routed=2).experts
    scores_BTE = np.array([[[0.5, 0.5], [0.25, 0.75], [0.5001, 0.1], [0.9, 0.9]]], np.float32)
    real_BT = np.array([[True, True, True, False]])
    choice = experts_choose(hparams, scores_BTE, real_BT, np.array([0.5, 0.1], np.float32))
    np.testing.assert_array_equal(
        choice.chosen_BTZ, [[[False, True], [False, True], [True, False], [False, False]]]
    )
    assert choice.lowest_E is None


CASES = {
    'softmax': {'route_scale': 2.5},
    'top one': {'top_k': 1, 'num_noop': 2, 'num_shared': 0},
    'no-op, sigmoid': {'num_noop': 2, 'top_k': 3, 'scores': 'sigmoid', 'num_shared': 0},
    'one expert': {'num_routed': 1, 'top_k': 1, 'num_shared': 2, 'route_scale': 3.0},
    'all of them': {'num_routed': 4, 'top_k': 4, 'scores': 'sigmoid', 'route_scale': 0.5},
    'more chosen than computed': {'num_routed': 1, 'num_noop': 3, 'top_k': 2},
    'row capacity': {'num_routed': 3, 'num_noop': 1, 'row_capacity': 2, 'scores': 'sigmoid'},
    'experts choose': {'choice': 'expert', 'num_routed': 3, 'route_scale': 1.5},
    'experts choose by sigmoid': {'choice': 'expert', 'scores': 'sigmoid', 'num_shared': 0},
    'thresholds': {'choice': 'expert', 'num_routed': 4, 'route_scale': 0.5},
}
THRESHOLDS = np.array([0.15, 0.25, 0.35, 0.9], np.float32)  # no score is above the last one


def stream(seed=1, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(*SEGMENTS.shape, WIDTH)).astype(dtype)


def module(hparams, looks_ahead=True, dtype=None):
    """Return the module and random parameters."""
    experts = Experts(hparams, looks_ahead)
    shapes = jax.eval_shape(experts.init, jax.random.key(0), stream(), REAL, ExpertState())
    return experts, random_like(shapes['params'], dtype=dtype)


def all_on(expert, params, x_BTD):
    """Change the inputs so that all tokens score one expert highest, then the others as before."""
    x_BTD, kernel_DZ = x_BTD.copy(), params['router']['kernel'].copy()
    x_BTD[..., 0], kernel_DZ[0] = 1, 0
    kernel_DZ[0, expert] = 6
    return params | {'router': {'kernel': kernel_DZ}}, x_BTD


def looped(params, x_BTD, hparams, thresholds_E=None):
    """Return the oracle's y_BTD, and what its router saw of all real tokens."""
    run = oracle.Pass(expert_thresholds={} if thresholds_E is None else {0: thresholds_E})
    rows = zip(x_BTD, SEGMENTS, POSITIONS, strict=True)
    outputs = [oracle.mixture(params, x, oracle.Row(*row, run), 0, hparams) for x, *row in rows]
    return np.stack(outputs), run.seen[0]


def by_row(pairs):
    """Return one array for each row with real tokens."""
    return np.split(np.array(pairs), np.cumsum(REAL.sum(1)))[:4]


def check(make_config, name, product, dtype, tolerance):
    knobs = experts(**CASES[name], product=product) | {'model.dtype': np.dtype(dtype).name}
    hparams = small_hparams(make_config, knobs).model
    state = ExpertState(THRESHOLDS) if name == 'thresholds' else ExpertState()
    layer, params = module(hparams, name != 'thresholds', dtype)
    rng, hparams = np.random.default_rng(3), hparams.experts
    weights_BTD = rng.normal(size=(*SEGMENTS.shape, WIDTH)).astype(dtype)
    weights_Z = rng.normal(size=hparams.num_choices).astype(dtype)

    def total(given):
        y_BTD, record, _ = layer.apply({'params': given[0]}, given[1], REAL, state)
        loss = jnp.sum(y_BTD * weights_BTD) + jnp.sum(record.scores_Z**2 * weights_Z)
        return loss, (y_BTD, record)

    ours, x_BTD = jax.jit(jax.grad(total, has_aux=True)), stream(dtype=dtype)
    for given in ((params, x_BTD), all_on(hparams.num_routed - 1, params, x_BTD)):
        gradients, (y_BTD, record) = jax.device_get(ours(given))
        wide = jax.tree.map(np.float64, given)
        expected_BTD, seen = looped(*wide, hparams, state.thresholds_E)
        for found, expected in ((y_BTD, expected_BTD), (record.scores_Z, np.sum(seen.scores, 0))):
            assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
        np.testing.assert_array_equal(record.pairs_Z, np.sum(seen.chosen, 0))
        assert (record.tokens, record.rows) == (REAL.sum(), REAL.any(1).sum())
        counts = [chosen_TZ[:, : hparams.num_routed].sum(0) for chosen_TZ in by_row(seen.chosen)]
        late = np.maximum(np.array(counts) - hparams.row_capacity, 0).sum()
        assert record.dropped == (late if hparams.row_capacity else 0)
        if name.startswith('experts choose'):
            taken = np.where(seen.chosen, seen.scores, np.inf)
            lowest_E = sum(scores_TE.min(0) for scores_TE in by_row(taken))
            np.testing.assert_allclose(record.lowest_E, lowest_E, rtol=1e-5)

        def loss(given):
            y_BTD, seen = looped(*given, hparams, state.thresholds_E)
            return np.sum(y_BTD * weights_BTD) + np.sum(np.sum(seen.scores, 0) ** 2 * weights_Z)

        oracle.assert_gradients(gradients, loss, wide, tolerance, rng)
    if name == 'top one':
        np.testing.assert_array_equal(record.pairs_Z, [0, 0, 0, 0, REAL.sum(), 0, 0])
    assert (record.lowest_E is None) == (not name.startswith('experts choose'))


FAST = ('top one', 'no-op, sigmoid', 'all of them', 'row capacity', 'experts choose', 'thresholds')


@pytest.mark.parametrize('name', parameters(FAST, CASES))
def test_experts_are_a_dense_loop(name, tiny_config):
    """Outputs, records and all gradients equal the loop to 1e-10 in float64.

    Softmax scores are used as they are; sigmoid scores are divided by the sum of the chosen ones.
    Experts choose in each row separately, and under a capacity take its first tokens. This also
    holds with every token on one expert, and with empty experts. Padding reaches only the shared
    experts.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        check(tiny_config, name, 'blocked', np.float64, 1e-10)


@pytest.mark.parametrize('product', parameters(('ragged_dot',), ('ragged_dot', 'batched')))
@pytest.mark.parametrize('name', parameters(('softmax',), CASES))
def test_experts_are_a_dense_loop_by_other_products(name, product, tiny_config):
    with jax.numpy_rank_promotion('allow'):
        check(tiny_config, name, product, np.float32, 1e-5)


def idle_router(width, num_choices, seed=4):
    """Return a router kernel [D, Z] whose two highest scores are among the last four experts.

    Apart from a little noise their logits are v, -v, 2v and -2v, and all other logits are 0.
    """
    rng = np.random.default_rng(seed)
    kernel_DZ = 0.001 * rng.normal(size=(width, num_choices))
    kernel_DZ[:, -4:] += rng.normal(size=(width, 1)) * np.array([1, -1, 2, -2])
    return kernel_DZ.astype(np.float32)


@pytest.mark.parametrize('form', parameters(('softmax',), ('softmax', 'sigmoid')))
@pytest.mark.parametrize('placement', parameters(('pre',), ('pre', 'reordered', 'post')))
def test_experts_that_do_nothing_add_nothing(placement, form, tiny_config):
    """The block's output is bit-equal to that of an mlp that adds 0. Gradients are finite."""
    knobs = experts(num_noop=4, num_shared=0, scores=form, row_capacity=1)
    hparams = small_hparams(tiny_config, knobs, {'model.norm_placement': placement}).model
    tokens = TokenInfo(POSITIONS, SEGMENTS, None)
    mixed, plain = (Block(hparams, LayerKind(False, 0, experts=some)) for some in (True, False))
    params = random_like(jax.eval_shape(mixed.init, jax.random.key(0), stream(), tokens)['params'])
    params['mlp']['router']['kernel'] = idle_router(WIDTH, 9)
    mlp = jax.eval_shape(plain.init, jax.random.key(0), stream(), tokens)['params']['mlp']
    mlp = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), mlp)

    def total(params, x_BTD):
        y_BTD, aux = mixed.apply({'params': params}, x_BTD, tokens)
        return jnp.sum(jnp.sin(y_BTD)) + aux.experts.log_z, (y_BTD, aux.experts)

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (y_BTD, record)), (gradient, dx_BTD) = run(params, stream())
    assert (record.tokens, record.dropped) == (REAL.sum(), 0)
    assert not np.any(record.pairs_Z[:5]) and record.pairs_Z[5:].sum() == 2 * REAL.sum()
    zeros = jax.jit(lambda x_BTD: plain.apply({'params': params | {'mlp': mlp}}, x_BTD, tokens)[0])
    np.testing.assert_array_equal(y_BTD, zeros(stream()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, dx_BTD)))
    assert not any(np.any(gradient['mlp'][name]['kernel']) for name in ('w1', 'w3', 'w2'))
    assert np.any(gradient['mlp']['router']['kernel'])


@pytest.fixture
def filled(monkeypatch):
    """Return a list to which every run of experts appends its number of blocks with an expert."""
    seen, make_layout = [], experts_module.make_layout

    def watched(expert_Nk, num_experts, *rest):
        layout = make_layout(expert_Nk, num_experts, *rest)
        count = (layout.expert_M < num_experts).sum()
        jax.debug.callback(lambda count: seen.append(int(count)), count)
        return layout

    monkeypatch.setattr(experts_module, 'make_layout', watched)
    return seen


def test_experts_that_do_nothing_run_nothing(filled, tiny_config):
    """No block of the layout has an expert if all tokens choose no-op experts.

    The same holds for an expert that has already taken `row_capacity` tokens.
    """
    x_BTD = np.random.default_rng(0).normal(size=(1, 1, 16)).astype(np.float32)
    for knobs, taken_BE, computed in (
        ({'num_noop': 4}, None, 0),
        ({'top_k': 5, 'row_capacity': 3}, np.array([[3, 4, 3, 2, 3]]), 1),
    ):
        layer, params = module(hparams_of(tiny_config, **knobs), looks_ahead=False)
        params['router']['kernel'] = idle_router(16, params['router']['kernel'].shape[1])
        del filled[:]
        state = ExpertState(None, taken_BE)
        jax.block_until_ready(jax.jit(layer.apply)({'params': params}, x_BTD, ONE_TOKEN, state))
        jax.effects_barrier()
        assert filled == [computed]


def routed_block(hparams, tokens, routing='top_c'):
    """Return a routed block with experts whose router reads component 0, and its RoutingArgs."""
    kind = LayerKind(routed=True, window=0, experts=True)
    block = MixtureOfDepths(hparams, routing, kind)
    layer = RoutingArgs(np.int32(0), np.float32(0), np.bool_(True))
    by_top_c = MixtureOfDepths(hparams, 'top_c', kind)
    x_BTD = np.zeros((*tokens.positions_BT.shape, hparams.d_model), np.float32)
    init = functools.partial(by_top_c.init, jax.random.key(0), x_BTD, tokens, layer)
    params = random_like(jax.eval_shape(init)['params'])
    params['router']['w'] = np.eye(hparams.d_model, dtype=np.float32)[0]
    return block, {'params': params}, layer


@pytest.mark.parametrize('batch', [1, 9])
def test_a_skipped_row_runs_no_expert(batch, filled, tiny_config):
    """If no row is selected, no expert runs. If one of nine is, only its experts run."""
    one = {'model.routing.layers': '0', 'model.num_layers': 1}
    hparams = small_hparams(tiny_config, HALF_ROUTED, one, experts()).model
    tokens = TokenInfo(np.full((batch, 1), 3), np.ones((batch, 1), np.int32))
    block, variables, layer = routed_block(hparams, tokens, 'aux_loss')
    keys_BKHS = np.zeros((batch, hparams.num_kv_heads, hparams.head_dim, 4), np.float32)
    none_B = np.zeros(batch, np.int32)
    cache = LayerCache(keys_BKHS, keys_BKHS, np.zeros((batch, 4), np.int32), none_B)
    args = (tokens, layer, cache, none_B[:, None], None)
    args = jax.tree.map(jnp.asarray, args)
    step = jax.jit(lambda x_B1D: block.apply(variables, x_B1D, *args, method='extend')[::2])
    x_B1D = np.random.default_rng(0).normal(size=(batch, 1, hparams.d_model)).astype(np.float32)
    for selected, expected in (([], []), ([batch - 1], [2])):
        del filled[:]  # tracing the shapes runs nothing
        x_B1D[..., 0] = np.where(np.isin(np.arange(batch), selected), 1, -1)[:, None]
        _, update = jax.block_until_ready(step(x_B1D))
        jax.effects_barrier()
        assert filled == expected
        assert np.flatnonzero(update.selected_BT).tolist() == selected


@pytest.mark.parametrize('choice', ['token', pytest.param('expert', marks=pytest.mark.slow)])
def test_experts_of_a_routed_block_count_only_selected_tokens(choice, tiny_config):
    """Padding and tokens that skip the block are not counted."""
    length, noop = 12, {'num_noop': 2} if choice == 'token' else {}
    hparams = small_hparams(tiny_config, HALF_ROUTED, experts(choice=choice, **noop)).model
    segments_BT = np.where(np.arange(length) < np.array([[12], [4]]), 1, 0)  # 4 are fewer than C
    tokens = TokenInfo(np.tile(np.arange(length), (2, 1)), segments_BT, None)
    block, variables, layer = routed_block(hparams, tokens)

    x_BTD = np.random.default_rng(0).normal(size=(2, length, 16)).astype(np.float32)
    x_BTD[1, 4:, 0] = 9  # padding scores highest
    run = jax.jit(lambda x_BTD: block.apply(variables, x_BTD, tokens, layer)[1::2])
    aux, record = run(x_BTD)
    counts, selected_BT = aux.experts, np.asarray(record.selected_BT)
    np.testing.assert_array_equal(selected_BT.sum(1), [6, 4])
    assert not selected_BT[segments_BT == 0].any()
    assert (counts.tokens, counts.rows) == (10, 2)
    # Under expert choice, each takes 2 x 6 / 5 of the 6 places of a row.
    assert counts.pairs_Z.sum() == (2 * 10 if choice == 'token' else 2 * 5 * 2)
