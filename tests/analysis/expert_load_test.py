"""The loads of experts are those of the evaluation, and the picture shows where they are."""

import math

import matplotlib.image
import numpy as np
import pytest

from moddepth_jax.analysis import expert_load

LIGHT, FULL, EMPTY = (expert_load._HEAT(place)[:3] for place in (0.5, 1.0, 0.0))


def layers_of(load_XZ, num_routed):
    """What summary.json has under `experts` for layers 1, 3, ..."""
    experts = {}
    for i, load_Z in enumerate(load_XZ):
        routed_E = np.array(load_Z[:num_routed])
        largest = routed_E.max() / routed_E.mean()
        experts[f'layer_{2 * i + 1:02d}'] = {'load': list(load_Z), 'largest_load': largest}
    return experts


def picture(load_XZ, num_routed, tmp_path, title='a title'):
    load = expert_load.expert_load(layers_of(load_XZ, num_routed), num_routed)
    expert_load.plot_expert_load(load, title, tmp_path / 'load.png')
    return matplotlib.image.imread(tmp_path / 'load.png')[..., :3]


def middle_of(picture, colour):
    """Height and breadth, from the upper left, of the middle of what has this colour."""
    near = np.abs(picture - np.asarray(colour)).max(-1) < 0.02
    near[:, int(0.8 * near.shape[1]) :] = False  # the colour bar
    assert near.sum() > 100
    rows, columns = np.nonzero(near)
    return rows.mean() / near.shape[0], columns.mean() / near.shape[1]


def test_loads_are_over_the_mean_of_all_choices():
    """Shares times the number of choices; the largest load is among the routed experts alone."""
    found = expert_load.expert_load(layers_of([[0.3, 0.1, 0.6], [0.2, 0.2, 0.6]], 2), 2)
    np.testing.assert_allclose(found.load_XZ, [[0.9, 0.3, 1.8], [0.6, 0.6, 1.8]])
    np.testing.assert_allclose(found.largest_load_X, [1.5, 1])
    assert found.layers == (1, 3) and found.num_routed == 2


def test_mean_ratio_is_over_layers_that_have_one():
    """A layer that no token reached has NaN, and is left out; with none left the mean is NaN."""
    layers = {name: {'a': a} for name, a in zip('xyz', (0.25, math.nan, 0.75), strict=True)}
    assert expert_load.mean_ratio(layers, 'a') == 0.5
    assert math.isnan(expert_load.mean_ratio({'y': layers['y']}, 'a'))


def test_each_load_has_its_place(tmp_path):
    """Layers from the bottom up, experts from the left; beyond 4 times the mean colours stay."""
    load_XZ = np.full((4, 30), 1 / 30)
    load_XZ[3, 2], load_XZ[0, 24] = 20 / 30, 0.1 / 30
    shown = picture(load_XZ, 30, tmp_path)
    full, empty = middle_of(shown, FULL), middle_of(shown, EMPTY)
    assert full[0] < 0.4 and full[1] < 0.2
    assert 0.6 < empty[0] < 0.8 and 0.65 < empty[1] < 0.8
    middle_of(shown, LIGHT)


def test_experts_that_do_nothing_stand_apart(tmp_path):
    """Between them and the routed ones the picture is white over its whole height."""
    loads = [[1 / 12] * 12] * 2
    gaps = []
    for num_routed in (12, 8):
        near = np.abs(picture(loads, num_routed, tmp_path) - np.asarray(LIGHT)).max(-1) < 0.02
        columns = np.flatnonzero(near.sum(0) > 0.3 * near.shape[0])
        columns = columns[columns < 0.85 * near.shape[1]]
        breaks = np.diff(columns)
        assert (breaks > 8).sum() == (num_routed < 12)
        gaps.append(columns[breaks.argmax()] / columns.max())
    assert 0.6 < gaps[1] < 0.72


@pytest.mark.parametrize(('num_routed', 'num_noop'), [(1, 0), (2, 1), (64, 0), (64, 64)])
def test_any_number_of_experts_can_be_drawn(tmp_path, num_routed, num_noop):
    """Without warnings, as wide as can be looked at; also layers without tokens, and odd titles."""
    num_choices = num_routed + num_noop
    load_XZ = [[1 / num_choices] * num_choices, [math.nan] * num_choices]
    shown = picture(load_XZ, num_routed, tmp_path, 'p$_$q')
    assert 300 < shown.shape[0] < shown.shape[1] < 2500 and shown.std() > 0.05
