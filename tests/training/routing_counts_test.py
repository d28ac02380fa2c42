"""What is said of routing in metrics: counts by eye and by loops, and the ratios of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.routing import RoutingRecord
from moddepth_jax.training import losses

COUNTED = {
    # 2 layers x 2 rows x 4 tokens; the last token of row 1 is padding.
    'scores': [[[1, 7, 7, 2], [4, 6, 7, 9]], [[7, 3, 5, 7], [7, 7, 7, 7]]],
    'rule': [[[2, 2, 2, -2], [2, -2, -2, 9]], [[-1, -1, -1, -1], [-1, -1, -1, 9]]],
    'top_c': [[[1, 0, 0, 1], [1, 1, 0, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]]],
    'entered': [[[1, 1, 1, 1], [1, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]],
    'refused': [[[0, 0, 0, 0], [0, 0, 1, 0]], [[1, 0, 0, 1], [0, 0, 1, 0]]],
}
SEGMENT_IDS = np.array([[1, 1, 2, 2], [1, 1, 1, 0]])


def record(scores, rule, top_c, entered, refused, gates):
    numbers = (jnp.asarray(values, jnp.float32) for values in (scores, rule, gates))
    marks = (jnp.asarray(values, bool) for values in (top_c, entered, refused))
    scores_BT, rule_logits_BT, gates_BT = numbers
    return RoutingRecord(scores_BT, rule_logits_BT, *marks, gates_BT)


def hand_grids(factor=10):
    return record(*COUNTED.values(), factor * np.array(COUNTED['scores']))


def test_counts_of_hand_made_grids():
    """Every count equals one made by eye, per layer; padding is in none of them."""
    counts = losses.routing_counts(hand_grids(), SEGMENT_IDS)
    expected = {
        'real': [7, 7],
        'entered': [5, 0],
        'chosen': [4, 2],
        'said': [4, 0],
        'both': [2, 0],
        'refused': [1, 3],
        'above_half': [7, 7],
        'gate': [10 * (1 + 2 + 4 + 6), 10 * (3 + 5)],
        'rows': [2, 1],
        'lowest': [1 + 4, 3],
        'histogram': counts['histogram'].tolist(),
    }
    assert {name: values.tolist() for name, values in counts.items()} == expected
    assert all(values.dtype == jnp.float32 for values in counts.values())


def test_ratios_follow_from_counts():
    """By hand; no precision where the rule is silent, and no error either."""
    counts = losses.routing_counts(hand_grids(1), SEGMENT_IDS)
    ratios = losses.routing_ratios(counts)
    expected = {
        'selected_fraction': [5 / 7, 0],
        'rule_fraction': [4 / 7, 0],
        'refused_fraction': [1 / 7, 3 / 7],
        'precision': [2 / 4, np.nan],
        'recall': [2 / 4, 0],
        'selected_gate': [13 / 4, 4],
        'lowest_selected_score': [5 / 2, 3],
        'sigmoid_above_half': [1, 1],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(ratios[name], values, rtol=1e-6, err_msg=name)
    assert ratios.keys() == expected.keys() | {'sigmoid_histogram'}


def random_record(rng, shape):
    """Scores of all sizes; the rest of the record from fair coins."""
    scores = 4 * rng.normal(size=shape)
    scores[..., 0] = 0.0
    coins = rng.random((3, *shape)) < 0.5
    return record(scores, rng.normal(size=shape), *coins, rng.random(shape))


def test_histogram_and_lowest_scores_are_those_of_loops():
    """Shares of sigmoid(r) by 20 bins, those above a half, and the mean lowest score of top-C.

    A score of exactly 0 lies in the upper half of the bins, and not above a half. A row of padding
    has no lowest score.
    """
    rng = np.random.default_rng(0)
    records = random_record(rng, (2, 5, 30))
    segment_ids_BT = np.ones((5, 30), np.int32)
    segment_ids_BT[1, 11:] = segment_ids_BT[4] = 0
    records = records._replace(top_c_BT=records.top_c_BT & (segment_ids_BT > 0)[None])
    ratios = losses.routing_ratios(losses.routing_counts(records, segment_ids_BT))
    for layer in range(2):
        scores_BT = np.asarray(records.scores_BT[layer], np.float64)
        real = scores_BT[segment_ids_BT > 0]
        shares, _ = np.histogram(1 / (1 + np.exp(-real)), bins=20, range=(0, 1))
        np.testing.assert_allclose(ratios['sigmoid_histogram'][layer], shares / 101, atol=1e-6)
        above = ratios['sigmoid_above_half'][layer]
        assert above == pytest.approx((real > 0).sum() / 101, rel=1e-6)
        top_c_BT = np.asarray(records.top_c_BT[layer])
        lowest = [scores_BT[row][top_c_BT[row]].min() for row in range(4)]
        assert ratios['lowest_selected_score'][layer] == pytest.approx(np.mean(lowest), rel=1e-5)
    assert ratios['sigmoid_histogram'].shape == (2, 20)
    np.testing.assert_allclose(ratios['sigmoid_histogram'].sum(1), 1, rtol=1e-6)


def test_extreme_scores_are_counted_in_the_outer_bins():
    """sigmoid = 0 and = 1 in float32 lie in the first and the last bin."""
    zeros = np.zeros((1, 1, 4))
    scores = np.array([[[-200.0, 200.0, np.inf, -np.inf]]])
    records = record(scores, zeros, zeros, zeros, zeros, zeros)
    histogram = losses.routing_counts(records, np.ones((1, 4), int))['histogram'][0]
    assert histogram[0] == histogram[19] == 2 and histogram.sum() == 4


def test_counts_of_parts_add_up():
    """Counts of two halves of a batch sum to those of the whole, so micro-batches lose nothing."""
    records = random_record(np.random.default_rng(1), (2, 2, 4))
    whole = losses.routing_counts(records, SEGMENT_IDS)
    halves = [
        losses.routing_counts(
            jax.tree.map(lambda x, row=row: x[:, row : row + 1], records),
            SEGMENT_IDS[row : row + 1],
        )
        for row in (0, 1)
    ]
    for name, values in whole.items():
        np.testing.assert_allclose(halves[0][name] + halves[1][name], values, rtol=1e-6)
