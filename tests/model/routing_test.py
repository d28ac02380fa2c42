"""Selection: exactly C, the best, the earlier of equals, in time order; and where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.routing import (
    apply_capacity,
    gather_tokens,
    indices_to_mask,
    mask_to_indices,
    scatter_add_tokens,
    segment_top_c,
    select_top_c,
    static_sizes,
)
from tests.model.oracle import best_of_segments

NAN = float('nan')


def best(scores_T, num_selected):
    """Indices of the C best, sorted by Python: NaN first, the earlier of equals."""

    def rank(t):
        score = float(scores_T[t])
        return (0, 0.0, t) if np.isnan(score) else (1, -score, t)

    return sorted(sorted(range(len(scores_T)), key=rank)[:num_selected])


@pytest.mark.parametrize('num_selected', [1, 2, 5, 11, 12])
def test_selection_is_exact_on_ties(num_selected):
    """Of scores with many ties, zeros and NaN of both signs, and infinities: C ascending int32.

    A NaN is selected before infinity.
    """
    rng = np.random.default_rng(num_selected)
    values = np.array([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf, NAN, -NAN], np.float32)
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


def test_bfloat16_ties_still_give_c():
    """Scores that coincide once rounded to bfloat16 still give exactly C distinct tokens."""
    noise_BT = np.random.default_rng(0).normal(size=(3, 64))
    scores_BT = jnp.asarray(1 + 1e-4 * noise_BT, jnp.bfloat16)
    assert len(np.unique(np.asarray(scores_BT, np.float32))) < 5
    chosen_BT = indices_to_mask(select_top_c(scores_BT, 8), 64)
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
    np.testing.assert_array_equal(gather_tokens(x_BTD, indices_BC), expected)
    marks = [[1, 0, 0, 1, 0], [0, 0, 1, 0, 1]]
    np.testing.assert_array_equal(indices_to_mask(indices_BC, 5), marks)
    added = scatter_add_tokens(x_BTD, indices_BC, np.full((2, 2, 3), 100, np.float32))
    np.testing.assert_array_equal(added - x_BTD, 100 * np.array(marks)[:, :, None] * np.ones(3))


def random_segments(rng, rows, length, padding):
    """Contiguous documents of random sizes, ids ascending from 1; padding at the end or not."""
    segments_BT = np.zeros((rows, length), np.int32)
    for row in range(rows):
        real = rng.integers(0, length + 1) if padding else length
        cuts = rng.choice(length, size=rng.integers(0, 6), replace=False)
        segments_BT[row, :real] = 1 + np.isin(np.arange(real), cuts).cumsum()
    return segments_BT


@pytest.mark.parametrize('num_selected', [1, 3, 10, 23, 24])
@pytest.mark.parametrize('padding', [False, True])
def test_segments_choose_their_own_best(num_selected, padding):
    """Membership is the loop's, for random documents, padding and ties of both zeros."""
    rng = np.random.default_rng(num_selected)
    segments_BT = random_segments(rng, 60, 24, padding)
    few = rng.choice(np.array([-1.5, -0.0, 0.0, 2.0], np.float32), (30, 24))
    scores_BT = np.concatenate([few, rng.normal(size=(30, 24)).astype(np.float32)])
    scores_BT = np.where(segments_BT > 0, scores_BT, -np.inf)
    chosen_BT = np.asarray(
        jax.jit(segment_top_c, static_argnums=2)(scores_BT, segments_BT, num_selected)
    )
    expected = [
        best_of_segments(scores_T, segments_T, num_selected)
        for scores_T, segments_T in zip(scores_BT, segments_BT, strict=True)
    ]
    np.testing.assert_array_equal(chosen_BT, expected)
    counts_B = chosen_BT.sum(1)
    assert (counts_B == num_selected).all() or (padding and (counts_B <= num_selected).all())
    assert not chosen_BT[segments_BT == 0].any()


def test_documents_do_not_compete():
    """Whatever scores one document has, the others choose as before; of a row they do compete."""
    rng = np.random.default_rng(0)
    segments_BT = np.repeat([[1, 2, 3, 0]], [5, 9, 7, 3], axis=1)
    scores_BT = rng.normal(size=(1, 24)).astype(np.float32)
    chosen_BT = np.asarray(segment_top_c(scores_BT, segments_BT, 8))
    for document in (1, 2, 3):
        inside_BT = segments_BT == document
        for changed in (100 + scores_BT, -scores_BT, np.full_like(scores_BT, np.nan)):
            other_BT = np.where(inside_BT, changed, scores_BT).astype(np.float32)
            again_BT = np.asarray(segment_top_c(other_BT, segments_BT, 8))
            np.testing.assert_array_equal(again_BT[~inside_BT], chosen_BT[~inside_BT])
            assert again_BT[inside_BT].sum() == chosen_BT[inside_BT].sum()
    louder_BT = np.where(segments_BT == 1, 100 + scores_BT, scores_BT)
    assert indices_to_mask(select_top_c(louder_BT, 8), 24)[0, :5].all()


def test_first_entering_names_the_first_and_then_nothing():
    """The loop's first indices in order, then indices of T and more, all distinct and ascending."""
    rng = np.random.default_rng(0)
    selected_BT = rng.random((50, 12)) < rng.random((50, 1))
    selected_BT[:2] = [[False] * 12, [True] * 12]
    for size in (1, 5, 11, 12):
        indices_BC = np.asarray(mask_to_indices(jnp.asarray(selected_BT), size))
        assert indices_BC.dtype == np.int32 and indices_BC.shape == (50, size)
        for selected_T, indices_C in zip(selected_BT, indices_BC, strict=True):
            wanted = [t for t in range(12) if selected_T[t]][:size]
            assert indices_C[: len(wanted)].tolist() == wanted
            assert (indices_C[len(wanted) :] >= 12).all() and (np.diff(indices_C) > 0).all()


@pytest.mark.parametrize('most', [1, 4, 11, 12, 99])
def test_admission_counts_along_the_row(most):
    """The first `most` wanted tokens are selected; none depends on later ones."""
    wanted_BT = np.random.default_rng(most).random((40, 12)) < 0.6
    admitted_BT = np.asarray(apply_capacity(jnp.asarray(wanted_BT), most))
    for wanted_T, admitted_T in zip(wanted_BT, admitted_BT, strict=True):
        assert np.flatnonzero(admitted_T).tolist() == np.flatnonzero(wanted_T)[:most].tolist()
    later_BT = wanted_BT ^ (np.arange(12) >= 7)[None]
    again_BT = apply_capacity(jnp.asarray(later_BT), most)
    np.testing.assert_array_equal(again_BT[:, :7], admitted_BT[:, :7])


@pytest.mark.parametrize(
    ('length', 'most', 'sizes'),
    [
        (16, 16, (2, 4, 8, 16)),
        (16, 99, (2, 4, 8, 16)),
        (16, 9, (2, 4, 8, 9)),
        (16, 8, (2, 4, 8)),
        (16, 3, (2, 3)),
        (16, 1, (1,)),
        (17, 17, (3, 5, 9, 17)),
        (3, 3, (1, 2, 3)),
        (1, 5, (1,)),
    ],
)
def test_static_sizes(length, most, sizes):
    """T / 8, T / 4, T / 2 and T, rounded up, none above the most that may enter, which is one."""
    assert static_sizes(length, most) == sizes


def test_indices_of_t_and_more_name_no_token():
    """They gather zeros, mark nothing and add nothing; token T - 1 does not take their place.

    Its value and its gradient are its own: a clamped index would read it, or lose its cotangent.
    """
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(2, 5, 3)).astype(np.float32)
    indices_BC = jnp.array([[1, 4, 5, 6], [5, 6, 7, 8]], jnp.int32)
    update_BCD, weights_BCD = rng.normal(size=(2, 2, 4, 3)).astype(np.float32)
    gathered_BCD = gather_tokens(x_BTD, indices_BC)
    np.testing.assert_array_equal(gathered_BCD[0, :2], x_BTD[0, [1, 4]])
    assert not np.any(gathered_BCD[0, 2:]) and not np.any(gathered_BCD[1])
    np.testing.assert_array_equal(indices_to_mask(indices_BC, 5), [[0, 1, 0, 0, 1], [0] * 5])
    expected = x_BTD.copy()
    expected[0, [1, 4]] += update_BCD[0, :2]
    np.testing.assert_array_equal(scatter_add_tokens(x_BTD, indices_BC, update_BCD), expected)

    def gathered(x_BTD):
        return jnp.vdot(gather_tokens(x_BTD, indices_BC), weights_BCD)

    dx_BTD = np.zeros_like(x_BTD)
    dx_BTD[0, [1, 4]] = weights_BCD[0, :2]
    np.testing.assert_array_equal(jax.grad(gathered)(x_BTD), dx_BTD)
    weights_BTD = rng.normal(size=x_BTD.shape).astype(np.float32)

    def scattered(x_BTD, update_BCD):
        return jnp.vdot(scatter_add_tokens(x_BTD, indices_BC, update_BCD), weights_BTD)

    dx_BTD, du_BCD = jax.grad(scattered, argnums=(0, 1))(x_BTD, update_BCD)
    np.testing.assert_array_equal(dx_BTD, weights_BTD)
    np.testing.assert_array_equal(du_BCD[0, :2], weights_BTD[0, [1, 4]])
    assert not np.any(du_BCD[0, 2:]) and not np.any(du_BCD[1])


def test_rows_that_nothing_is_added_to_keep_their_bits():
    """Also negative zeros, infinities and NaNs with a payload."""
    x_BTD = np.full((1, 4, 3), -0.0, np.float32)
    x_BTD[0, 2] = [np.inf, -np.inf, 1e-45]
    x_BTD.view(np.uint32)[0, 3] = [0x7FC00001, 0xFFC00000, 0x80000000]
    indices_BC = jnp.array([[1, 4]], jnp.int32)
    y_BTD = jax.jit(scatter_add_tokens)(x_BTD, indices_BC, jnp.ones((1, 2, 3)))
    same = np.asarray(y_BTD).view(np.uint32) == x_BTD.view(np.uint32)
    np.testing.assert_array_equal(same.all(-1), [[True, False, True, True]])
