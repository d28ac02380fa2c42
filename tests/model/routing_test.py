"""Who is selected: exactly C, the best, the earlier of equals, in time order; and where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import RoutingHparams, from_config
from moddepth_jax.model.routing import gather_rows, membership, scatter_add_rows, select_top_c

LAYERS = {
    'every:1': (0, 1, 2, 3, 4, 5, 6),
    'every:2': (1, 3, 5),
    'every:3': (2, 5),
    'every:7': (6,),
    'middle:0:0': (0, 1, 2, 3, 4, 5, 6),
    'middle:1:0': (1, 2, 3, 4, 5, 6),
    'middle:3:2': (3, 4),
    'middle:5:1': (5,),
    '4': (4,),
    '5,0, 3': (0, 3, 5),
}
NAN = float('nan')


def best(scores_T, num_selected):
    """Indices of the C best, sorted by Python: NaN first, the earlier of equals."""

    def rank(t):
        score = float(scores_T[t])
        return (0, 0.0, t) if np.isnan(score) else (1, -score, t)

    return sorted(sorted(range(len(scores_T)), key=rank)[:num_selected])


@pytest.mark.parametrize('num_selected', [1, 2, 5, 11, 12])
def test_selection_is_exact_on_ties(num_selected):
    """Of scores with many ties, zeros of both signs, infinities and NaN, C ascending int32 come."""
    rng = np.random.default_rng(num_selected)
    values = np.array([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf, NAN], np.float32)
    few = rng.choice(values[1:5], (40, 12)).astype(np.float32)
    scores_BT = np.concatenate([few, rng.choice(values, (40, 12)), rng.normal(size=(5, 12))])
    indices_BC = select_top_c(jnp.asarray(scores_BT, jnp.float32), num_selected)
    assert indices_BC.dtype == jnp.int32 and indices_BC.shape == (85, num_selected)
    np.testing.assert_array_equal(indices_BC, [best(row, num_selected) for row in scores_BT])


def test_equal_scores_select_the_first():
    """Where nothing tells the tokens apart the first C are selected: zeros, -0.0 in front, NaN."""
    rows = [[0.0] * 6, [-0.0, -0.0, 0.0, 0.0, 0.0, 0.0], [NAN] * 6, [-np.inf] * 6, [3.25] * 6]
    for dtype in (jnp.float32, jnp.bfloat16):
        indices_BC = jax.jit(select_top_c, static_argnums=1)(jnp.array(rows, dtype), 4)
        np.testing.assert_array_equal(indices_BC, np.tile(np.arange(4), (5, 1)))


def test_any_nan_ranks_highest():
    """A NaN is selected before infinity, whatever its sign bit says."""
    minus_nan = np.copysign(np.float32(NAN), np.float32(-1))
    scores_BT = jnp.array([[np.inf, 1.0, NAN, 2.0], [np.inf, 1.0, 3.0, minus_nan]])
    np.testing.assert_array_equal(select_top_c(scores_BT, 1), [[2], [3]])


def test_bfloat16_ties_still_give_c():
    """Scores that coincide once rounded to bfloat16 still give exactly C distinct tokens."""
    noise_BT = np.random.default_rng(0).normal(size=(3, 64))
    scores_BT = jnp.asarray(1 + 1e-4 * noise_BT, jnp.bfloat16)
    assert len(np.unique(np.asarray(scores_BT, np.float32))) < 5
    chosen_BT = membership(select_top_c(scores_BT, 8), 64)
    np.testing.assert_array_equal(chosen_BT.sum(1), [8, 8, 8])


@pytest.mark.parametrize('num_selected', [0, -1, 7, 100])
def test_impossible_c_is_refused(num_selected):
    """C outside [1, T] is refused in one line with both numbers."""
    with pytest.raises(ValueError, match=f'num_selected={num_selected} .*6') as error:
        select_top_c(jnp.zeros((2, 6)), num_selected)
    assert '\n' not in str(error.value)


def test_gather_and_scatter_use_each_row_by_itself():
    """Row b of the indices picks from, marks and adds to row b alone."""
    x_BTD = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
    indices_BC = jnp.array([[0, 3], [2, 4]], jnp.int32)
    expected = np.stack([x_BTD[0, [0, 3]], x_BTD[1, [2, 4]]])
    np.testing.assert_array_equal(gather_rows(x_BTD, indices_BC), expected)
    marks = [[1, 0, 0, 1, 0], [0, 0, 1, 0, 1]]
    np.testing.assert_array_equal(membership(indices_BC, 5), marks)
    added = scatter_add_rows(x_BTD, indices_BC, np.full((2, 2, 3), 100, np.float32))
    np.testing.assert_array_equal(added - x_BTD, 100 * np.array(marks)[:, :, None] * np.ones(3))


def routing(**changes):
    values = {
        'router': 'learned',
        'layers': 'every:2',
        'capacity': 0.125,
        'gate': 'raw',
        'initial_gate': 1.0,
        'causal_rule': 'predictor',
        'predictor_width': 0,
        'predictor_loss_weight': 1.0,
        'aux_loss_weight': 0.0,
    }
    return RoutingHparams(**values | changes)


@pytest.mark.parametrize(
    ('capacity', 'length', 'selected'),
    [
        (0.125, 2048, 256),
        (0.125, 7, 1),
        (0.125, 1, 1),
        (0.125, 8, 1),
        (0.125, 17, 2),
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        (0.57, 100, 57),  # 0.57 * 100 is 56.99999999999999
        (0.999, 10, 9),
        (1.0, 97, 97),
        (1e-9, 2048, 1),
    ],
)
def test_num_selected(capacity, length, selected):
    """C is max(1, floor(capacity T + 1e-6)): 256 of 2048, and rounding loses no token."""
    assert routing(capacity=capacity).num_selected(length) == selected


def test_every_nth_of_a_fraction_is_whole():
    """Where capacity T is whole in exact arithmetic, C is that whole number, and never above T."""
    for length in range(1, 130):
        for selected in range(1, length + 1):
            assert routing(capacity=selected / length).num_selected(length) == selected


@pytest.mark.parametrize('layers', LAYERS)
def test_routed_layers(layers, tiny_config):
    """every:N starts at layer N - 1, middle leaves out both ends, a list is sorted."""
    assert routing(layers=layers).routed_layers(7) == LAYERS[layers]
    assert routing(layers=layers, router='none').routed_layers(7) == ()
    knobs = {'model.num_layers': 7, 'model.routing.router': 'learned'}
    config = tiny_config(**knobs, **{'model.routing.layers': layers})
    assert from_config(config).model.routed_layers == LAYERS[layers]
