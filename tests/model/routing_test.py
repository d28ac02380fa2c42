"""Selection: exactly C of the highest scores, the earlier of equals, in time order."""

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
    update_tokens,
)
from tests.model.oracle import best_of_segments

NAN = float('nan')


def best(scores_T, num_selected):
    """Return the indices of the C best, sorted by Python: NaN first, the earlier of equals."""

    def rank(t):
        score = float(scores_T[t])
        return (0, 0.0, t) if np.isnan(score) else (1, -score, t)

    return sorted(sorted(range(len(scores_T)), key=rank)[:num_selected])


@pytest.mark.parametrize('num_selected', [1, 5, 12])
def test_selection_is_exact_on_ties(num_selected):
    """Among ties, zeros and NaN of both signs and infinities, exactly C are selected.

    Indices are ascending int32, and a NaN is selected before infinity.
    """
    rng = np.random.default_rng(num_selected)
    values = np.array([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf, NAN, -NAN], np.float32)
    few = rng.choice(values[1:5], (40, 12)).astype(np.float32)
    scores_BT = np.concatenate([few, rng.choice(values, (40, 12)), rng.normal(size=(5, 12))])
    indices_BC = select_top_c(jnp.asarray(scores_BT, jnp.float32), num_selected)
    assert indices_BC.dtype == jnp.int32 and indices_BC.shape == (85, num_selected)
    np.testing.assert_array_equal(indices_BC, [best(row, num_selected) for row in scores_BT])


def test_bfloat16_ties_still_give_c():
    """Scores that are equal in bfloat16 still give exactly C distinct tokens."""
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
    with pytest.raises(ValueError, match=r'shape \(6,\) must have shape \[B, T\]'):
        select_top_c(jnp.zeros(6), num_selected)


def random_segments(rng, rows, length, padding):
    """Return documents of random sizes with ids ascending from 1, with or without padding."""
    segments_BT = np.zeros((rows, length), np.int32)
    for row in range(rows):
        real = rng.integers(0, length + 1) if padding else length
        cuts = rng.choice(length, size=rng.integers(0, 6), replace=False)
        segments_BT[row, :real] = 1 + np.isin(np.arange(real), cuts).cumsum()
    return segments_BT


@pytest.mark.parametrize('num_selected', [1, 10, 24])
@pytest.mark.parametrize('padding', [False, True])
def test_segments_choose_their_own_best(num_selected, padding):
    """Equals a loop, for random documents, padding, ties of both zeros, and NaN."""
    rng = np.random.default_rng(num_selected)
    segments_BT = random_segments(rng, 60, 24, padding)
    few = rng.choice(np.array([-1.5, -0.0, 0.0, 2.0, NAN], np.float32), (30, 24))
    scores_BT = np.concatenate([few, rng.normal(size=(30, 24)).astype(np.float32)])
    scores_BT = np.where(segments_BT > 0, scores_BT, -np.inf)
    choose = jax.jit(segment_top_c, static_argnums=2)
    chosen_BT = np.asarray(choose(scores_BT, segments_BT, num_selected))
    rows = zip(np.where(np.isnan(scores_BT), np.inf, scores_BT), segments_BT, strict=True)
    expected = [best_of_segments(*row, num_selected) for row in rows]
    np.testing.assert_array_equal(chosen_BT, expected)
    counts_B = chosen_BT.sum(1)
    assert (counts_B == num_selected).all() or (padding and (counts_B <= num_selected).all())
    assert not chosen_BT[segments_BT == 0].any()


def test_mask_to_indices_gives_the_first_and_then_no_token():
    """The first True indices in order, then indices of T or more, all distinct and ascending."""
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


@pytest.mark.parametrize('most', [1, 4, 12, 99])
def test_capacity_counts_along_the_row(most):
    wanted_BT = np.random.default_rng(most).random((40, 12)) < 0.6
    admitted_BT = np.asarray(apply_capacity(jnp.asarray(wanted_BT), most))
    for wanted_T, admitted_T in zip(wanted_BT, admitted_BT, strict=True):
        assert np.flatnonzero(admitted_T).tolist() == np.flatnonzero(wanted_T)[:most].tolist()


@pytest.mark.parametrize(
    ('length', 'most', 'sizes'),
    [
        (16, 16, (2, 4, 8, 16)),
        (16, 99, (2, 4, 8, 16)),
        (16, 9, (2, 4, 8, 9)),
        (16, 8, (2, 4, 8)),
        (16, 1, (1,)),
        (17, 17, (3, 5, 9, 17)),
        (3, 3, (1, 2, 3)),
        (1, 5, (1,)),
    ],
)
def test_static_sizes(length, most, sizes):
    """T / 8, T / 4, T / 2 and T, rounded up; none is above the capacity, which is one of them."""
    assert static_sizes(length, most) == sizes


def test_indices_of_t_and_more_name_no_token():
    """They gather 0, mark nothing and add nothing, and do not stand for token T - 1.

    Token T - 1 keeps its value and gradient: a clamped index would read it or lose its cotangent.
    """
    rng = np.random.default_rng(0)
    x_BTD, weights_BTD = rng.normal(size=(2, 2, 5, 3)).astype(np.float32)
    update_BCD, weights_BCD = rng.normal(size=(2, 2, 4, 3)).astype(np.float32)
    indices_BC = jnp.array([[1, 4, 5, 6], [2, 6, 7, 8]], jnp.int32)
    named, there = ([0, 0, 1], [1, 4, 2]), ([0, 0, 1], [0, 1, 0])
    expected_BCD, gradient_BTD = np.zeros_like(update_BCD), np.zeros_like(x_BTD)
    expected_BCD[there], gradient_BTD[named] = x_BTD[named], weights_BCD[there]
    gathered_BCD, pull = jax.vjp(lambda x_BTD: gather_tokens(x_BTD, indices_BC), x_BTD)
    np.testing.assert_array_equal(gathered_BCD, expected_BCD)
    np.testing.assert_array_equal(pull(weights_BCD)[0], gradient_BTD)
    marks = [[0, 1, 0, 0, 1], [0, 0, 1, 0, 0]]
    np.testing.assert_array_equal(indices_to_mask(indices_BC, 5), marks)

    expected_BTD, gradient_BCD = x_BTD.copy(), np.zeros_like(update_BCD)
    expected_BTD[named] += update_BCD[there]
    gradient_BCD[there] = weights_BTD[named]
    added_BTD, pull = jax.vjp(
        lambda *both: scatter_add_tokens(both[0], indices_BC, both[1]), x_BTD, update_BCD
    )
    np.testing.assert_array_equal(added_BTD, expected_BTD)
    for found, right in zip(pull(weights_BTD), (weights_BTD, gradient_BCD), strict=True):
        np.testing.assert_array_equal(found, right)


def test_tokens_without_an_update_keep_their_bits():
    """Also negative zeros, infinities, and NaNs with a payload."""
    x_BTD = np.full((1, 4, 3), -0.0, np.float32)
    x_BTD[0, 2] = [np.inf, -np.inf, 1e-45]
    x_BTD.view(np.uint32)[0, 3] = [0x7FC00001, 0xFFC00000, 0x80000000]
    indices_BC = jnp.array([[1, 4]], jnp.int32)
    y_BTD = jax.jit(scatter_add_tokens)(x_BTD, indices_BC, jnp.ones((1, 2, 3)))
    same = np.asarray(y_BTD).view(np.uint32) == x_BTD.view(np.uint32)
    np.testing.assert_array_equal(same.all(-1), [[True, False, True, True]])


def test_a_gate_is_not_rounded_before_it_scales():
    """A gate of 1.003, which bfloat16 rounds to 1, has an effect on a bfloat16 stream."""
    change_BTD = jnp.linspace(50, 200, 64, dtype=jnp.bfloat16).reshape(1, 4, 16)
    indices_BC, gates_BT = jnp.arange(4)[None], jnp.full((1, 4), 1.003, jnp.float32)
    found_BTD, _ = update_tokens(
        lambda x, _: (change_BTD, None), 0 * change_BTD, None, gates_BT, indices_BC
    )
    wide_BTD = np.asarray(change_BTD, np.float32) * np.float32(1.003)
    np.testing.assert_array_equal(found_BTD, wide_BTD.astype(jnp.bfloat16))
    assert (found_BTD != change_BTD).any()
