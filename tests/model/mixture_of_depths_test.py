"""A routed block is its equation, written over all tokens with explicit masks, in float64.

What causal rules let in is in causal_block_test.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.masked_block import (
    CAPACITY,
    LENGTH,
    SEGMENTS,
    WIDTH,
    assert_close,
    best_of_segments,
    equation,
    expert_choice,
    jit,
    make_model,
    routed,
    stream,
    value_and_gradients,
    visible_pairs,
)

CASES = {
    'pre': ('pre', 'raw', CAPACITY, 0, {}),
    'pre_all': ('pre', 'tanh', 1.0, 3, {'model.qk_norm': 'head', 'model.use_bias': True}),
    'post_ties': ('post', 'sigmoid', CAPACITY, 4, {}),
    'post_one': ('post', 'none', 1 / LENGTH, 0, {}),
    'reordered': ('reordered', 'raw', 0.125, 6, {'model.qk_norm': 'full'}),
    'segments': ('pre', 'raw', CAPACITY, 0, {'model.routing.select_per': 'segment'}),
}


@pytest.mark.parametrize('name', CASES)
def test_gathered_form_is_the_equation(name, tiny_config):
    """Outputs, and gradients of parameters and stream, equal the masked float64 equation's."""
    placement, gate, capacity, window, knobs = CASES[name]
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


def test_rows_do_not_depend_on_batch_mates(plain):
    """Other sequences beside it change no bit of a row's output, choice or input gradient."""
    params, apply, gradients = plain
    x_BTD, mates_BTD = stream(), stream(seed=8)
    mates_BTD[1] = x_BTD[1]
    segments_BT = SEGMENTS[[0, 1, 0, 0, 0]]
    y_BTD, record = apply(params, x_BTD, SEGMENTS)
    mates_y_BTD, mates_record = apply(params, mates_BTD, segments_BT)
    np.testing.assert_array_equal(bits(y_BTD)[1], bits(mates_y_BTD)[1])
    np.testing.assert_array_equal(record.selected_BT[1], mates_record.selected_BT[1])
    assert (bits(y_BTD)[0] != bits(mates_y_BTD)[0]).any()
    one, other = gradients(params, x_BTD, SEGMENTS)[1], gradients(params, mates_BTD, segments_BT)[1]
    np.testing.assert_array_equal(bits(one)[1], bits(other)[1])


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
    of_logits, dx_BTD = jit(
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
    _, record = jit(apply)(params, stream())
    np.testing.assert_array_equal(record.rule_logits_BT, record.scores_BT)
    gradient, dx_BTD = jit(
        jax.grad(lambda *inputs: jnp.sum(apply(*inputs)[1].rule_logits_BT), argnums=(0, 1))
    )(params, stream())
    assert set(params) == {'block', 'router'}
    np.testing.assert_allclose(gradient['router']['w'], stream().sum((0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx_BTD, np.tile(params['router']['w'], (5, LENGTH, 1)))
