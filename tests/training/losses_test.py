"""Losses equal their definitions in float64; counts and ratios equal values computed by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.routing import RoutingRecord, indices_to_mask, select_top_c
from moddepth_jax.training import losses
from moddepth_jax.training.losses import expert_counts, expert_loss, expert_ratios


def routing_record(scores, rule, top_c, selected, dropped, gates):
    numbers = (jnp.asarray(values, jnp.float32) for values in (scores, rule, gates))
    marks = (jnp.asarray(values, bool) for values in (top_c, selected, dropped))
    scores_BT, rule_logits_BT, gates_BT = numbers
    return RoutingRecord(scores_BT, rule_logits_BT, *marks, gates_BT)


def binary_cross_entropy(logits, targets):
    chance = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    return -np.where(targets, np.log(chance), np.log1p(-chance))


def rule_loss(hparams, logits_LBT, targets_LBT, real_BT):
    zeros_LBT = jnp.zeros(jnp.shape(logits_LBT))
    record = RoutingRecord(zeros_LBT, logits_LBT, targets_LBT, zeros_LBT, zeros_LBT, zeros_LBT)
    return losses.causal_rule_loss(hparams, record, real_BT.astype(int), real_BT.sum())


@pytest.fixture
def by_rule(tiny_config):

    def build(rule, weight=1.0):
        knobs = {'router': 'learned', 'causal_rule': rule}
        knobs |= {f'{name}_loss_weight': 7.0 for name in ('predictor', 'aux')}
        knobs[{'predictor': 'predictor_loss_weight'}.get(rule, 'aux_loss_weight')] = weight
        return from_config(tiny_config(**{f'model.routing.{k}': v for k, v in knobs.items()}))

    return build


@pytest.mark.parametrize(
    ('rule', 'weight'), [('predictor', 3.0), ('aux_loss', 0.25), ('dense', 0), ('threshold', 0)]
)
def test_rule_loss_is_the_weighted_mean_over_layers_and_real_tokens(by_rule, rule, weight):
    random = np.random.default_rng(1)
    logits_LBT = random.normal(size=(2, 3, 5), scale=3).astype(np.float32)
    targets_LBT = random.random((2, 3, 5)) < 0.4
    real_BT = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    per_token_LBT = binary_cross_entropy(logits_LBT, targets_LBT)
    hparams = by_rule(rule, weight)
    loss, slope_LBT = jax.value_and_grad(rule_loss, 1)(hparams, logits_LBT, targets_LBT, real_BT)
    np.testing.assert_allclose(loss, weight * per_token_LBT[:, real_BT].mean(), rtol=1e-6)
    seen_LBT = np.broadcast_to(real_BT, (2, 3, 5)) & bool(weight)
    np.testing.assert_array_equal(slope_LBT != 0, seen_LBT)
    changed_LBT = np.where(real_BT, logits_LBT, 1e4)
    changed_targets_LBT = np.where(real_BT, targets_LBT, ~targets_LBT)
    assert rule_loss(hparams, changed_LBT, changed_targets_LBT, real_BT) == loss
    assert losses.causal_rule_loss(hparams, None, real_BT, 1) == 0


def test_targets_of_a_row_are_its_own(by_rule):
    """A rule that predicts each row's own top-C has no loss; with rows exchanged, a large one.

    Targets written without the batch offset would put the positives of all rows into row 0.
    """
    scores_BT = jnp.array([[9.0, 0, 0, 0, 8, 0], [0, 7, 0, 6, 0, 0], [0, 0, 5, 0, 0, 4]])
    top_c_LBT = indices_to_mask(select_top_c(scores_BT, 2), 6)[None]
    predicted_LBT = jnp.where(scores_BT > 0, 20.0, -20.0)[None]
    given = top_c_LBT, jnp.ones((3, 6), bool)
    assert rule_loss(by_rule('predictor'), predicted_LBT, *given) < 1e-6
    assert rule_loss(by_rule('predictor'), jnp.roll(predicted_LBT, 1, axis=1), *given) > 10


def test_targets_carry_no_gradient(by_rule):
    """Scores that define the targets get no gradient through them, even if targets are soft."""
    given = by_rule('predictor'), jnp.array([[[1.0, -2.0]]]), jnp.array([[[0.3, 0.6]]])
    slope_LBT = jax.grad(rule_loss, 2)(*given, jnp.ones((1, 2), bool))
    np.testing.assert_array_equal(slope_LBT, jnp.zeros((1, 1, 2)))


COUNTED = {
    # 2 layers x 2 rows x 4 tokens; the last token of row 1 is padding.
    'scores': [[[1, 7, 7, 2], [4, 6, -np.inf, 9]], [[7, 3, 5, 7], [7, 7, 7, 7]]],
    'rule': [[[2, 2, 2, -2], [2, -2, -2, 9]], [[-1, -1, -1, -1], [-1, -1, -1, 9]]],
    'top_c': [[[1, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]]],
    'selected': [[[1, 1, 1, 1], [1, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]],
    'dropped': [[[0, 0, 0, 0], [0, 0, 1, 0]], [[1, 0, 0, 1], [0, 0, 1, 0]]],
}
SEGMENT_IDS = np.array([[1, 1, 2, 2], [1, 1, 1, 0]])


def test_losses_of_token_choice_are_their_sums_over_real_tokens(tiny_config):
    """They equal values by hand; padding and the shares f_n have no gradient."""
    knobs = {'router': 'token_choice', 'layers': 'loops', 'balance_weight': 0.7, 'z_loss': 0.03}
    knobs = {f'model.routing.{name}': value for name, value in knobs.items()}
    hparams = from_config(tiny_config(**{'model.looped_layers': 'all', 'model.loops': 3}, **knobs))
    random = np.random.default_rng(1)
    scores_NBT = random.normal(size=(3, 2, 6), scale=2).astype(np.float32)
    scores_NBT[0] += 2  # not balanced
    real_BT = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], bool)

    def loss(scores_NBT):
        record = routing_record(scores_NBT, *[np.zeros((3, 2, 6))] * 5)
        return losses.causal_rule_loss(hparams, record, real_BT.astype(int), real_BT.sum())

    found, slope_NBT = jax.value_and_grad(loss)(scores_NBT)
    of_loops, last_of = np.zeros(3), np.zeros(3)
    squares, count = 0.0, 0
    for b, t in np.argwhere(real_BT):
        exp_N = np.exp(scores_NBT[:, b, t].astype(np.float64))
        of_loops += exp_N / exp_N.sum()
        last_of[np.argmax(exp_N)] += 1
        squares, count = squares + np.log(exp_N.sum()) ** 2, count + 1
    balance = 3 * sum(last_of / count * of_loops / count)
    assert balance > 1.1  # it is 1 at an even load
    np.testing.assert_allclose(found, 0.7 * balance + 0.03 * squares / count, rtol=1e-6)
    np.testing.assert_array_equal((slope_NBT != 0).all(axis=0), real_BT)
    assert loss(np.where(real_BT, scores_NBT, 50)) == found


def test_routing_ratios_of_a_hand_made_record():
    """Padding counts nowhere. If the rule selects no token, precision is NaN."""
    record = routing_record(*COUNTED.values(), COUNTED['scores'])
    counts = losses.routing_counts(record, SEGMENT_IDS, of_loops=False)
    assert all(values.dtype == jnp.float32 for values in counts.values())
    ratios = losses.routing_ratios(counts)
    expected = {
        'selected_fraction': [5 / 7, 0],
        'rule_fraction': [4 / 7, 0],
        'refused_fraction': [1 / 7, 3 / 7],
        'precision': [2 / 4, np.nan],
        'recall': [2 / 4, 0],
        'selected_gate': [13 / 4, 4],
        'lowest_selected_score': [5 / 2, 3],
        'sigmoid_above_half': [6 / 7, 1],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(ratios[name], values, rtol=1e-6, err_msg=name)
    assert ratios.keys() == expected.keys() | {'sigmoid_histogram'}
    histogram = ratios['sigmoid_histogram']  # sigmoid is 0, 0.73, 0.88, 0.98 and above 0.99
    expected = np.zeros((2, 20))
    expected[0, [0, 14, 17, 19]] = np.array([1, 1, 1, 4]) / 7
    expected[1, [19]] = 1
    np.testing.assert_allclose(histogram, expected, rtol=1e-6)


@pytest.mark.parametrize('of_loops', [False, True])
def test_dead_tokens_are_real_tokens_that_nothing_selects(of_loops):
    """No routed layer selects them, or no loop after the first, which selects all tokens."""
    selected_LBT = [[[1, 1, 0, 0], [1, 1, 0, 0]], [[1, 0, 0, 0]] * 2, [[0, 0, 1, 0], [0] * 4]]
    zeros_LBT = np.zeros((3, 2, 4))
    of_selected = [selected_LBT, zeros_LBT, zeros_LBT]
    record = routing_record(zeros_LBT, zeros_LBT, zeros_LBT, *of_selected)
    counts = losses.routing_counts(record, SEGMENT_IDS, of_loops)
    twice = jax.tree.map(lambda x: x + x, counts)
    assert float(losses.dead_tokens(twice)) == pytest.approx([2 / 7, 4 / 7][of_loops])


# 2 layers; top-2 of 3 routed experts and 1 that does nothing. Layer 0 saw 8 tokens, layer 1 four.
TOKENS = [8, 4]
PAIRS = [[8, 4, 0, 4], [2, 2, 2, 2]]
SCORES = [[4.0, 2.0, 0.5, 1.5], [1.0, 1.0, 0.5, 1.5]]
LOG_Z = [16.0, 2.0]


def experts_record(
    pairs=PAIRS, scores=SCORES, tokens=TOKENS, log_z=LOG_Z, dropped=(0, 0), **lowest
):
    return types.SimpleNamespace(
        tokens=jnp.asarray(tokens, jnp.int32),
        pairs_Z=jnp.asarray(pairs, jnp.int32),
        dropped=jnp.asarray(dropped, jnp.int32),
        scores_Z=jnp.asarray(scores, jnp.float32),
        log_z=jnp.asarray(log_z, jnp.float32),
        lowest_E=jnp.asarray(lowest['lowest_E']) if lowest else None,
        rows=jnp.asarray(lowest.get('rows', [1, 1]), jnp.int32),
    )


@pytest.fixture
def hparams(tiny_config):
    """Hyper-parameters with 3 + 1 experts, balance weight 0.5 and z-loss 0.25."""

    def build(**changes):
        knobs = {'choice': 'token', 'num_routed': 3, 'num_noop': 1, 'top_k': 2}
        knobs |= {'balance_weight': 0.5, 'z_loss': 0.25} | changes
        config = tiny_config(**{f'model.experts.{knob}': value for knob, value in knobs.items()})
        return from_config(config)

    return build


def test_losses_of_hand_made_counts(hparams):
    """sum f_i P_i is 23/16 and 1 in the two layers; the experts that do nothing count among the Z.

    Layer 0: f = 4 / (2 x 8) (8, 4, 0, 4) = (2, 1, 0, 1), P = (4, 2, 0.5, 1.5) / 8.
    Layer 1: f = 4 / (2 x 4) (2, 2, 2, 2) = (1, 1, 1, 1), P = (1, 1, 0.5, 1.5) / 4.
    """
    balance, z = expert_loss(hparams(), experts_record())
    assert balance == 0.5 * (1.4375 + 1) / 2
    assert z == 0.25 * (16 / 8 + 2 / 4) / 2
    # Loads are even if experts choose.
    assert expert_loss(hparams(choice='expert', num_noop=0), experts_record()) == (0, z)


def test_a_layer_without_tokens_costs_nothing(hparams):
    """No division by 0, and no NaN in the gradient."""

    def total(scores_XZ):
        record = experts_record([[0] * 4], [[0.0] * 4], [0], [0.0])
        record.scores_Z = scores_XZ
        return sum(expert_loss(hparams(), record))

    loss, slope_XZ = jax.value_and_grad(total)(jnp.zeros((1, 4)))
    assert loss == 0 and not slope_XZ.any()


def test_gradient_reaches_only_scores_and_log_partitions(hparams):
    """d balance / d scores is weight f_i / (X n), so f_i / 32 and f_i / 16; soft pairs get none."""

    def total(scores_XZ, pairs_XZ, log_z_X):
        record = experts_record()
        record.scores_Z, record.pairs_Z, record.log_z = scores_XZ, pairs_XZ, log_z_X
        return sum(expert_loss(hparams(), record))

    given = (jnp.asarray(values, jnp.float32) for values in (SCORES, PAIRS, LOG_Z))
    slopes = jax.grad(total, argnums=(0, 1, 2))(*given)
    expected_XZ = np.array([[2, 1, 0, 1], [1, 1, 1, 1]]) / np.array([[32], [16]])
    np.testing.assert_array_equal(slopes[0], expected_XZ)
    np.testing.assert_array_equal(slopes[1], np.zeros((2, 4)))
    np.testing.assert_array_equal(slopes[2], 0.25 / 2 / np.array(TOKENS))


RATIOS = {
    'load': [[0.5, 0.25, 0, 0.25], [0.25] * 4],
    'largest_load': [2, 1],
    'noop_fraction': [0.25, 0.25],
    'dropped_fraction': [3 / 16, 0],
    'computed_fraction': [9 / 16, 6 / 8],
    'unused': [1, 0],
}


def test_expert_ratios_follow_from_counts():
    """By hand: the fullest expert of layer 0 has 8 pairs, twice the mean of 12 / 3."""
    ratios = expert_ratios(expert_counts(experts_record(dropped=[3, 0])), 2, 3)
    assert {name: values.tolist() for name, values in ratios.items()} == RATIOS


def test_ratios_of_experts_that_choose():
    """The lowest scores are averaged over rows, and there are no no-op experts."""
    record = experts_record(
        [[4, 4, 4]], [[1.0] * 3], [6], [1.0], [0], lowest_E=[[1.0, 0.5, 2.0]], rows=[2]
    )
    ratios = expert_ratios(expert_counts(record), 2, 3)
    assert ratios['lowest_taken'].tolist() == [[0.5, 0.25, 1.0]]
    assert (ratios['noop_fraction'], ratios['computed_fraction']) == (0, 1)


@pytest.mark.parametrize('float64', [False, True])
def test_a_ratio_without_a_denominator_is_nan(float64):
    """A layer that no token reached has NaN shares, in JAX and NumPy; other layers do not."""
    counts = expert_counts(experts_record([PAIRS[0], [0] * 4], tokens=[8, 0]))
    if float64:
        counts = {name: np.asarray(count, np.float64) for name, count in counts.items()}
    with np.errstate(invalid='ignore', divide='ignore'):
        ratios = expert_ratios(counts, 2, 3)
    assert ratios.pop('unused').tolist() == [1, 3]
    for name, values in ratios.items():
        assert np.isfinite(values[0]).all() and np.isnan(values[1]).all(), name
