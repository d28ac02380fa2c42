"""Who passes which expert, by hand and counted one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.model.moe.experts import experts_choose, normalize_weights, tokens_choose
from tests.model.cases import FAST, pairs_of_experts, small_experts

LENGTH = 8
# A row of one document, one packed, one with padding, one with a single token, one with none.
SEGMENTS = np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 5 + [0] * 3, [1] + [0] * 7, [0] * 8])
REAL = SEGMENTS > 0


def test_ties_go_to_the_lower_number(tiny_config):
    """All equal: experts 0 and 1; of two equal pairs the two best, then the earlier; by both."""
    hparams = small_experts(tiny_config, num_routed=3, num_noop=1).model.experts
    scores_BTZ = np.array([[[1, 1, 1, 1], [1, 2, 1, 2], [0, 1, 3, 1], [5, 5, 6, 6]]], np.float32)
    choice = tokens_choose(hparams, scores_BTZ, np.ones((1, 4), bool), None)
    np.testing.assert_array_equal(np.sort(choice.expert_BTk[0]), [[0, 1], [1, 3], [1, 2], [2, 3]])
    hparams = small_experts(tiny_config, choice='expert', num_routed=2, top_k=1).model.experts
    scores_BTE = np.zeros((2, 6, 2), np.float32)
    scores_BTE[0, :, 0], scores_BTE[1, :, 1] = [1, 3, 2, 3, 2, 2], [-0.0, 0, -0.0, 0, 0, -1]
    choice = experts_choose(hparams, scores_BTE, np.ones((2, 6), bool), None)
    taken = [[np.flatnonzero(choice.chosen_BTZ[b, :, e]) for e in (0, 1)] for b in (0, 1)]
    np.testing.assert_array_equal(taken, [[[1, 2, 3], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]])


def test_weights_of_the_chosen(tiny_config):
    """Softmax scores stay as they are; sigmoids are divided by the sum of all that was chosen."""
    scores_BTZ = np.array([[[0.1, 0.4, 0.2, 0.3]]], np.float32)
    for form, expected in (('softmax', [0.4, 0.3]), ('sigmoid', [4 / 7, 3 / 7])):
        knobs = {'num_routed': 3, 'num_noop': 1, 'scores': form, 'route_scale': 7.0}
        hparams = small_experts(tiny_config, **knobs).model.experts
        choice = tokens_choose(hparams, scores_BTZ, np.ones((1, 1), bool), None)
        np.testing.assert_array_equal(choice.expert_BTk, [[[1, 3]]])
        np.testing.assert_allclose(choice.weight_BTk, [[expected]], rtol=1e-6)


def test_shares_of_tiny_scores():
    """The gradient of a share is that of a softmax over logits, down to scores that underflow."""
    for logit, share in ((0.0, 0.5), (-60.0, 0.5), (-85.0, 0.5), (-200.0, 0.0)):
        logits_BTk = jnp.full((1, 1, 2), logit)
        first = jax.value_and_grad(lambda x: normalize_weights(jax.nn.sigmoid(x))[0, 0, 0])
        value, slope_BTk = first(logits_BTk)
        rest = share * (1 - share) * jax.nn.sigmoid(-logit)
        np.testing.assert_allclose(value, share)
        np.testing.assert_allclose(slope_BTk[0, 0], [rest, -rest], rtol=1e-5)


def test_experts_take_the_best_of_each_row(tiny_config):
    """Exactly C, or all real tokens where there are fewer, whatever the other rows hold."""
    hparams = small_experts(tiny_config, choice='expert').model.experts
    scores_BTE = np.random.default_rng(0).normal(size=(*SEGMENTS.shape, 5)).astype(np.float32)
    scores_BTE[~REAL] = 9
    choose = functools.partial(experts_choose, hparams, real_BT=REAL, thresholds_E=None)
    choose = jax.jit(choose, compiler_options=FAST)
    choice = choose(scores_BTE)
    taken = hparams.num_taken(LENGTH)
    assert taken == 3  # 2 x 8 / 5
    expected_BTE = pairs_of_experts(scores_BTE, REAL, taken)
    np.testing.assert_array_equal(choice.chosen_BTZ, expected_BTE)
    np.testing.assert_array_equal(choice.chosen_BTZ.sum(1), [[3] * 5] * 3 + [[1] * 5, [0] * 5])
    lowest_BE = np.where(expected_BTE, scores_BTE, np.inf).min(1)
    np.testing.assert_allclose(choice.lowest_E, lowest_BE[:4].sum(0), rtol=1e-5)
    mates_BTE = np.random.default_rng(1).normal(size=scores_BTE.shape).astype(np.float32)
    mates_BTE[1] = scores_BTE[1]
    np.testing.assert_array_equal(choose(mates_BTE).chosen_BTZ[1], choice.chosen_BTZ[1])


def test_a_threshold_itself_does_not_pass(tiny_config):
    """Only scores above it do, each expert by its own; padding never."""
    hparams = small_experts(tiny_config, choice='expert', num_routed=2).model.experts
    scores_BTE = np.array([[[0.5, 0.5], [0.25, 0.75], [0.5001, 0.1], [0.9, 0.9]]], np.float32)
    real_BT = np.array([[True, True, True, False]])
    choice = experts_choose(hparams, scores_BTE, real_BT, np.array([0.5, 0.1], np.float32))
    np.testing.assert_array_equal(
        choice.chosen_BTZ, [[[False, True], [False, True], [True, False], [False, False]]]
    )
    assert choice.lowest_E is None


def test_row_capacity_is_a_causal_count(tiny_config):
    """The first of each row, whatever their documents; counts from before go on; others lose."""
    hparams = small_experts(tiny_config, num_routed=2, top_k=1, row_capacity=2).model.experts
    first = np.array([[0, 0, 1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]])
    scores_BTZ = np.where(first[..., None] == np.arange(2), 2.0, 1.0).astype(np.float32)
    real_BT = np.ones(first.shape, bool)
    real_BT[1, 0] = False
    for taken_BE, expected in (
        (None, [[0, 0, 1, 2, 2, 1, 2, 2], [2, 1, 1, 0, 0, 2, 2, 2]]),
        (np.array([[1, 0], [0, 5]]), [[0, 2, 1, 2, 2, 1, 2, 2], [2, 2, 2, 0, 0, 2, 2, 2]]),
    ):
        choice = tokens_choose(hparams, scores_BTZ, real_BT, taken_BE)
        np.testing.assert_array_equal(choice.expert_BTk[..., 0], expected)
        assert choice.dropped == (np.array(expected) == 2).sum() - 1
        np.testing.assert_array_equal(choice.chosen_BTZ.sum(1), [[4, 4], [5, 2]])
        assert choice.most == 4
