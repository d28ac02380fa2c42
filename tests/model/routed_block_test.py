"""A routed block is its equation, written over all tokens with explicit masks, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model import routing
from moddepth_jax.model.mod import mixture_of_depths
from tests.model.cases import parameters
from tests.model.masked_block import (
    CAPACITY,
    LENGTH,
    POSITIONS,
    SEGMENTS,
    WIDTH,
    assert_close,
    best_of_segments,
    equation,
    expert_choice,
    make_model,
    routed,
    scores,
    stream,
    value_and_gradients,
    visible_pairs,
)

TOP_C = {
    'pre': ('pre', 'raw', CAPACITY, 0, {}),
    'pre_all': ('pre', 'tanh', 1.0, 3, {'model.qk_norm': 'head', 'model.use_bias': True}),
    'post_ties': ('post', 'sigmoid', CAPACITY, 4, {}),
    'post_one': ('post', 'none', 1 / LENGTH, 0, {}),
    'reordered': ('reordered', 'raw', 0.125, 6, {'model.qk_norm': 'full'}),
    'segments': ('pre', 'raw', CAPACITY, 0, {'model.routing.select_per': 'segment'}),
}


@pytest.mark.parametrize('name', parameters(('post_ties', 'reordered', 'segments'), TOP_C))
def test_gathered_form_is_the_equation(name, tiny_config):
    """Outputs, and gradients of parameters and stream, equal the masked float64 equation's."""
    placement, gate, capacity, window, knobs = TOP_C[name]
    model = make_model(tiny_config, placement, gate, capacity, **knobs)
    params, apply = routed(model, window)
    x_BTD, weights_BTD = stream(ties='ties' in name), stream(seed=2)
    if 'ties' in name:
        params['router']['w'] = np.eye(WIDTH, dtype=np.float32)[0] * 0.75
    got, record = value_and_gradients(apply, params, x_BTD, weights_BTD)
    scores_BT = x_BTD.astype(float) @ params['router']['w']
    selected_BT = expert_choice(scores_BT, capacity, SEGMENTS)
    if model.routing.select_per == 'segment':
        rows = zip(scores_BT, SEGMENTS, strict=True)
        by_row_BT, selected_BT = selected_BT, np.array([best_of_segments(*row, 6) for row in rows])
        assert (selected_BT[1] != by_row_BT[1]).any() and selected_BT[2].sum() < 6
    np.testing.assert_array_equal(record.top_c_BT, selected_BT)
    np.testing.assert_array_equal(record.selected_BT, selected_BT)
    np.testing.assert_allclose(record.scores_BT, scores_BT, rtol=0, atol=1e-5)
    grid_BTS = visible_pairs(selected_BT, SEGMENTS, window)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        wide = jax.tree.map(np.float64, (params, x_BTD, weights_BTD))
        exact, _ = value_and_gradients(
            lambda params, x: (equation(params, x, selected_BT, grid_BTS, model), None), *wide
        )
    assert_close(got[0], exact[0], 1e-6)
    assert_close(got[1], exact[1], 2e-6)  # rounding reaches 1.4e-6 in the scale of a QK-norm
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.fixture(scope='module')
def plain(tiny_config):
    """The block of the remaining tests, jitted once: (params, apply, gradients of a fixed sum)."""
    params, apply = routed(make_model(tiny_config, 'pre', 'raw', CAPACITY))
    weights_BTD = stream(seed=3)

    def loss(params, x_BTD, segments_BT):
        return jnp.vdot(apply(params, x_BTD, segments_BT)[0], weights_BTD)

    return params, jax.jit(apply), jax.jit(jax.grad(loss, argnums=(0, 1)))


def bits(x):
    return np.asarray(x).view(np.uint32)


def test_skipped_rows_keep_their_bits(plain):
    """A token that does not enter leaves with the bits it came with, padding with its values."""
    params, apply, _ = plain
    x_BTD = stream()
    x_BTD[:, :, 5] = -0.0
    y_BTD, record = apply(params, x_BTD, SEGMENTS)
    selected_BT = np.asarray(record.selected_BT)
    np.testing.assert_array_equal(selected_BT.sum(1), [6, 6, 6, 2, 0])
    same_BT, real_BT = (bits(y_BTD) == bits(x_BTD)).all(-1), SEGMENTS > 0
    np.testing.assert_array_equal(same_BT[real_BT], ~selected_BT[real_BT])
    np.testing.assert_array_equal(y_BTD[~real_BT], x_BTD[~real_BT])


def test_padding_is_never_attended(plain):
    """What stands in padded places changes no bit of a real token, and gets no gradient by one."""
    params, apply, gradients = plain
    x_BTD, padded_BT = stream(), SEGMENTS == 0
    other_BTD = np.where(padded_BT[..., None], 1e3 * stream(seed=9), x_BTD)
    y_BTD, _ = apply(params, x_BTD, SEGMENTS)
    other_y_BTD, _ = apply(params, other_BTD, SEGMENTS)
    np.testing.assert_array_equal(bits(y_BTD)[~padded_BT], bits(other_y_BTD)[~padded_BT])
    np.testing.assert_array_equal(other_y_BTD[padded_BT], other_BTD[padded_BT])
    dx_BTD = gradients(params, x_BTD, SEGMENTS)[1]
    np.testing.assert_array_equal(dx_BTD[padded_BT], stream(seed=3)[padded_BT])


def test_silent_router_learns_and_its_block_does_not(plain):
    """With w = 0 and a raw gate the block's gradient is exactly zero and the router's is not."""
    params, apply, gradients = plain
    silent = params | {'router': {'w': np.zeros_like(params['router']['w'])}}
    (gradient, _), x_BTD = gradients(silent, stream(), SEGMENTS), stream()
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient['block']))
    assert np.linalg.norm(gradient['router']['w']) > 1
    y_BTD, record = apply(silent, x_BTD, SEGMENTS)
    np.testing.assert_array_equal(y_BTD, x_BTD)
    np.testing.assert_array_equal(record.selected_BT[0], np.arange(LENGTH) < 6)


def test_gate_scales_the_delta_and_not_the_residual(plain):
    """Doubling the router doubles what is added; a block that adds nothing leaves x as it is."""
    params, apply, gradients = plain
    x_BTD = stream()
    once, _ = apply(params, x_BTD, SEGMENTS)
    twice, _ = apply(params | {'router': {'w': 2 * params['router']['w']}}, x_BTD, SEGMENTS)
    np.testing.assert_allclose(twice - x_BTD, 2 * (once - x_BTD), rtol=0, atol=1e-5)
    assert np.abs(once - x_BTD).max() > 1
    mute = jax.tree.map(np.copy, params)
    mute['block']['attention']['out']['kernel'][:] = 0
    mute['block']['mlp']['w2']['kernel'][:] = 0
    np.testing.assert_array_equal(apply(mute, x_BTD, SEGMENTS)[0], x_BTD)
    dx_BTD = gradients(mute, x_BTD, SEGMENTS)[1]
    np.testing.assert_array_equal(dx_BTD, stream(seed=3))


def test_predictor_and_model_do_not_touch_each_other(plain):
    """The output gives the predictor no gradient, and its logits give none to anything else."""
    params, apply, gradients = plain
    of_output, _ = gradients(params, stream(), SEGMENTS)
    of_logits, dx_BTD = jax.jit(
        jax.grad(lambda *inputs: jnp.sum(apply(*inputs)[1].rule_logits_BT), argnums=(0, 1))
    )(params, stream())
    assert set(of_output) == {'block', 'router', 'predictor'}
    assert not np.any(dx_BTD)
    for part in of_output:
        for gradient, reached in (
            (of_output, part != 'predictor'),
            (of_logits, part == 'predictor'),
        ):
            assert all(np.any(leaf) == reached for leaf in jax.tree.leaves(gradient[part]))


def test_auxiliary_rule_is_the_router_itself(tiny_config):
    """Under aux_loss the rule's logits are the scores, whose gradient reaches router and trunk."""
    knobs = {'model.routing.causal_rule': 'aux_loss'}
    params, apply = routed(make_model(tiny_config, 'pre', 'raw', CAPACITY, **knobs))
    _, record = jax.jit(apply)(params, stream())
    np.testing.assert_array_equal(record.rule_logits_BT, record.scores_BT)
    gradient, dx_BTD = jax.jit(
        jax.grad(lambda *inputs: jnp.sum(apply(*inputs)[1].rule_logits_BT), argnums=(0, 1))
    )(params, stream())
    assert set(params) == {'block', 'router'}
    np.testing.assert_allclose(gradient['router']['w'], stream().sum((0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx_BTD, np.tile(params['router']['w'], (5, LENGTH, 1)))


CAUSAL_CAPACITY = 0.25  # C = 4, and 6 slots: sizes 2, 4, 6, or 2, 4, 8, 16 under grow
BIASED = {'model.qk_norm': 'head', 'model.use_bias': True}
# rule, gate, placement, overflow, window, other knobs
CAUSAL = {
    'learned_threshold': ('threshold', 'raw', 'pre', 'skip', 0, BIASED),
    'learned_predictor': ('predictor', 'sigmoid', 'post', 'grow', 4, {}),
    'learned_aux_loss': ('aux_loss', 'tanh', 'reordered', 'skip', 6, {'model.qk_norm': 'full'}),
    'learned_dense': ('dense', 'none', 'pre', 'skip', 5, {}),
    'norm_threshold': ('threshold', 'none', 'post', 'grow', 0, {}),
    'norm_dense': ('dense', 'none', 'reordered', 'grow', 0, {}),
    'norm_predictor': ('predictor', 'none', 'pre', 'skip', 0, {'model.routing.predictor_width': 0}),
    'random_threshold': ('threshold', 'none', 'pre', 'skip', 0, {}),
    'position_threshold': ('threshold', 'none', 'post', 'skip', 3, {}),
    'straight_through_threshold': ('threshold', 'straight_through', 'pre', 'grow', 5, {}),
    'straight_through_predictor': ('predictor', 'straight_through', 'reordered', 'skip', 0, {}),
    'straight_through_aux_loss': ('aux_loss', 'straight_through', 'post', 'skip', 0, BIASED),
}


def build(tiny_config, name):
    """(model, params, apply, rule, window) of a case."""
    rule, gate, placement, overflow, window, knobs = CAUSAL[name]
    router = name.removesuffix('_' + rule)
    routed_by = {'router': router, 'causal_rule': rule, 'overflow': overflow}
    routed_by = {f'model.routing.{knob}': value for knob, value in routed_by.items()}
    model = make_model(tiny_config, placement, gate, CAUSAL_CAPACITY, **routed_by, **knobs)
    sizes = routing.static_sizes(LENGTH, LENGTH if rule == 'dense' or overflow == 'grow' else 6)
    return model, *routed(model, window, rule, len(name), sizes), rule, window


def rule_logits(params, x_BTD, model, rule, threshold, given_scores_BT):
    """What the rule compares with 0, in NumPy; random scores are the library's own."""
    if rule == 'dense':
        return np.ones(x_BTD.shape[:2])
    if rule == 'predictor':
        predictor, hidden_BTX = params['predictor'], x_BTD
        if 'hidden' in predictor:
            before_BTX = x_BTD @ predictor['hidden']['kernel'] + predictor['hidden']['bias']
            hidden_BTX = before_BTX / (1 + np.exp(-before_BTX))
        return (hidden_BTX @ predictor['out']['kernel'] + predictor['out']['bias'])[..., 0]
    if model.routing.router == 'random':
        return given_scores_BT - threshold
    if model.routing.router == 'position':
        share = model.routing.capacity
        return np.floor((POSITIONS + 1) * share) - np.floor(POSITIONS * share) - 0.5
    return np.asarray(scores(params, x_BTD, model)) - (0 if rule == 'aux_loss' else threshold)


def first_come(wanted_BT, most):
    """bool [B, T]: of each row the first `most`, counted one by one."""
    selected_BT = np.zeros_like(wanted_BT)
    for row, wanted_T in enumerate(wanted_BT):
        selected_BT[row, [t for t in range(LENGTH) if wanted_T[t]][:most]] = True
    return selected_BT


@functools.cache
def exact_block(model):
    """The jitted equation of a model, to be called in float64."""
    return jax.jit(functools.partial(equation, model=model))


def in_float64(function, *inputs):
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        return np.asarray(function(*jax.tree.map(np.float64, inputs[:2]), *inputs[2:]))


def check(built, run, x_BTD, segments_BT=SEGMENTS, threshold=0.0):
    """One call against the oracle; returns bool [B, T]: selected, and dropped."""
    model, params, _, rule, window = built
    y_BTD, record = run(params, x_BTD, segments_BT, threshold=threshold)
    wide_params, wide_x_BTD = jax.tree.map(np.float64, (params, x_BTD))
    logits_BT = rule_logits(
        wide_params, wide_x_BTD, model, rule, threshold, np.float64(record.scores_BT)
    )
    wanted_BT = (logits_BT > 0) & (segments_BT > 0)
    most = LENGTH if model.routing.overflow == 'grow' or rule == 'dense' else 6
    selected_BT = first_come(wanted_BT, most)
    np.testing.assert_array_equal(record.selected_BT, selected_BT)
    np.testing.assert_array_equal(record.dropped_BT, wanted_BT & ~selected_BT)
    np.testing.assert_array_equal(np.asarray(record.rule_logits_BT) > 0, logits_BT > 0)
    top_c_BT = expert_choice(np.asarray(record.scores_BT), CAUSAL_CAPACITY, segments_BT)
    np.testing.assert_array_equal(record.top_c_BT, top_c_BT)
    grid_BTS = visible_pairs(selected_BT, segments_BT, window)
    exact_BTD = in_float64(exact_block(model), params, x_BTD, selected_BT, grid_BTS)
    assert_close(np.asarray(y_BTD), exact_BTD, 1e-6)
    same_BT = (np.asarray(y_BTD).view(np.uint32) == x_BTD.view(np.uint32)).all(-1)
    np.testing.assert_array_equal(same_BT, ~selected_BT)
    return selected_BT, wanted_BT & ~selected_BT


FAST = ('learned_predictor', 'learned_dense', 'norm_threshold', 'random_threshold')
FAST += ('position_threshold', 'straight_through_aux_loss')


@pytest.mark.parametrize('name', parameters(FAST, CAUSAL))
def test_selected_tokens_are_those_of_the_rule_and_the_capacity(name, tiny_config):
    """Every rule of every router: which tokens are selected and dropped, and the block's output.

    The block runs in the least static size that holds every row; the oracle has no sizes.
    """
    built = build(tiny_config, name)
    model, _, apply, rule, _ = built
    threshold = {'norm': 5.5, 'random': 0.6745}.get(model.routing.router, 0.0)
    selected_BT, dropped_BT = check(built, jax.jit(apply), stream(seed=4), threshold=threshold)
    if rule == 'dense':
        assert (selected_BT == (SEGMENTS > 0)).all()
    else:
        assert 0.1 < selected_BT[0].mean() < 0.9
    if model.routing.overflow == 'grow' or rule == 'dense':
        assert not dropped_BT.any()


@pytest.mark.parametrize(
    'name', parameters(('norm_threshold',), ['learned_threshold', 'norm_threshold'])
)
def test_any_number_of_tokens_in_each_static_size(name, tiny_config):
    """From no token to all of them the equation holds, through each size; some are dropped."""
    built = build(tiny_config, name)
    model, params, apply, _, _ = built
    run, x_BTD, fullest, dropped = jax.jit(apply), stream(seed=4), [], 0
    scores_BT = np.asarray(scores(params, x_BTD, model))
    ordered = np.sort(scores_BT[0])
    for count in (0, 1, 2, 3, 4, 6, 8, 9, 16):
        places = [2 * ordered[0] - ordered[-1], *ordered, 2 * ordered[-1] - ordered[0]]
        threshold = (places[LENGTH - count] + places[LENGTH - count + 1]) / 2
        alone_BT = SEGMENTS * 0 + np.eye(5, dtype=int)[0][:, None]
        selected_BT, dropped_BT = check(built, run, x_BTD, alone_BT, np.float32(threshold))
        fullest.append(selected_BT.sum(1).max())
        dropped += dropped_BT.sum()
        check(built, run, x_BTD, threshold=np.float32(threshold))
    if model.routing.overflow == 'grow':
        assert fullest == [0, 1, 2, 3, 4, 6, 8, 9, 16] and dropped == 0
    else:
        assert fullest == [0, 1, 2, 3, 4, 6, 6, 6, 6] and dropped == 2 + 3 + 10


@pytest.mark.slow
def test_the_block_runs_in_the_least_size_that_holds_every_row(tiny_config, monkeypatch):
    """The fullest row decides: 2 entering tokens take T / 8, 3 take T / 4, 8 T / 2 and 9 T."""
    _, params, apply, _, _ = build(tiny_config, 'norm_threshold')
    taken = []

    def first_entering(selected_BT, size):
        taken.append(size)
        return routing.mask_to_indices(selected_BT, size)

    def switch(which, branches, *inputs):
        return branches[int(which)](*inputs)

    monkeypatch.setattr(mixture_of_depths, 'mask_to_indices', first_entering)
    monkeypatch.setattr(mixture_of_depths.nn, 'switch', switch)
    x_BTD = stream(seed=4)
    for fullest in (2, 3, 8, 9):
        x_BTD = x_BTD / np.sqrt((x_BTD**2).sum(-1, keepdims=True))
        x_BTD[2, LENGTH - fullest :] *= 2
        x_BTD[0, 0] *= 2  # a row that is not the fullest one
        apply(params, x_BTD, np.ones_like(SEGMENTS), threshold=1.5)
    assert taken == [2, 4, 8, 16]


@pytest.mark.parametrize(
    'name',
    parameters(
        ('straight_through_threshold',), ['learned_threshold', 'straight_through_threshold']
    ),
)
def test_gradients_pass_through_the_sizes(name, tiny_config):
    """Gradients of parameters and stream are the equation's; the last token is selected too."""
    model, params, apply, _, window = build(tiny_config, name)
    threshold = np.float32(0.1)
    x_BTD, weights_BTD = stream(seed=4), stream(seed=2)
    x_BTD[:, -1] = 8 * params['router']['w']
    segments_BT = np.ones_like(SEGMENTS)
    segments_BT[1] = SEGMENTS[1]
    if model.routing.overflow == 'skip':
        segments_BT[2:, : LENGTH - 6] = 0  # or the last token would find no room
    given = functools.partial(apply, segments_BT=segments_BT, threshold=threshold)
    got, record = value_and_gradients(given, params, x_BTD, weights_BTD)
    selected_BT = np.asarray(record.selected_BT)
    assert selected_BT[2:, -1].all() and 0.1 < selected_BT.mean() < 0.9
    grid_BTS = visible_pairs(selected_BT, segments_BT, window)
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        wide = jax.tree.map(np.float64, (params, x_BTD, weights_BTD))
        exact, _ = value_and_gradients(
            lambda params, x: (equation(params, x, selected_BT, grid_BTS, model), None), *wide
        )
    assert_close(got[0], exact[0], 1e-6)
    assert_close(got[1], exact[1], 3e-6)


def test_a_layer_that_is_not_causal_selects_by_top_c(tiny_config):
    """It gives what top-C gives; no token is dropped."""
    model, params, apply, _, _ = build(tiny_config, 'learned_threshold')
    _, by_top_c = routed(model)
    y_BTD, record = jax.jit(apply)(params, stream(), threshold=0.3, causal=False)
    expected_BTD, expected = jax.jit(by_top_c)(params, stream())
    np.testing.assert_array_equal(record.selected_BT, expected.top_c_BT)
    np.testing.assert_allclose(y_BTD, expected_BTD, rtol=0, atol=1e-5)
    assert not np.any(record.dropped_BT)
    causal_BTD, causal = jax.jit(apply)(params, stream(), threshold=0.3)
    assert (np.asarray(causal.selected_BT) != expected.top_c_BT).any()
    assert np.abs(causal_BTD - expected_BTD).max() > 0.1


def test_the_threshold_is_strict(tiny_config):
    """A score that equals the threshold is not selected; above the next float below, it is."""
    _, params, apply, _, _ = build(tiny_config, 'learned_threshold')
    run, x_BTD = jax.jit(apply), stream(seed=4)
    params['router']['w'] = np.eye(WIDTH, dtype=np.float32)[0]  # r is exact: a component of x
    threshold = x_BTD[0, 3, 0] = x_BTD[0, 9, 0] = np.float32(1.1)
    _, record = run(params, x_BTD, threshold=threshold)
    assert not record.selected_BT[0, 3] and not record.selected_BT[0, 9]
    _, record = run(params, x_BTD, threshold=np.nextafter(threshold, np.float32(0)))
    assert record.selected_BT[0, 3] and record.selected_BT[0, 9]


def test_straight_through_forward_has_no_gate(tiny_config):
    """Its value is the block's own delta, as under gate none; gradients differ in the router's."""
    model, params, apply, _, _ = build(tiny_config, 'straight_through_threshold')
    plain = make_model(
        tiny_config, 'pre', 'none', CAUSAL_CAPACITY, **{'model.routing.layers': 'every:1'}
    )
    _, without_gate = routed(plain, window=5)
    _, by_top_c = routed(model, window=5)
    params['router']['b'] = np.zeros((), np.float32)
    of_plain = {'block': params['block'], 'router': {'w': params['router']['w']}}
    of_plain['predictor'] = routed(plain)[0]['predictor']
    y_BTD, record = jax.jit(by_top_c)(params, stream())
    expected_BTD, expected = jax.jit(without_gate)(of_plain, stream())
    np.testing.assert_array_equal(record.selected_BT, expected.selected_BT)
    np.testing.assert_array_equal(y_BTD, expected_BTD)

    weights_BTD = stream(seed=2)
    gradient, _ = jax.jit(
        jax.grad(lambda *given: jnp.vdot(by_top_c(*given)[0], weights_BTD), (0, 1))
    )(params, stream())
    chance_BT = 1 / (1 + np.exp(-np.float64(record.scores_BT)))
    inner_BT = ((np.float64(y_BTD) - stream()) * weights_BTD).sum(-1)
    slope_BT = chance_BT * (1 - chance_BT) * inner_BT * np.asarray(record.selected_BT)
    assert abs(slope_BT.sum()) > 0.1
    np.testing.assert_allclose(gradient['router']['b'], slope_BT.sum(), rtol=1e-4)
    of_w_D = np.einsum('bt,btd->d', slope_BT, stream().astype(float))
    np.testing.assert_allclose(gradient['router']['w'], of_w_D, rtol=0, atol=1e-4)
