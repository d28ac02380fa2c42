"""The pictures show each decision, load and mass in its place."""

import matplotlib.colors
import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from moddepth_jax.analysis import heatmaps
from moddepth_jax.analysis.depth_mass import DepthMass
from moddepth_jax.analysis.heatmaps import DENSE, LOOKAHEAD, NO_ROOM, SELECTED, SKIPPED
from moddepth_jax.analysis.source_mass import SourceMass
from moddepth_jax.hparams import from_config

LIGHT, FULL, EMPTY = (heatmaps._LOAD_MAP(place)[:3] for place in (0.5, 1.0, 0.0))


def near(picture, colour):
    """bool [height, width]: where the picture has this colour."""
    return np.abs(picture[..., :3] - matplotlib.colors.to_rgb(colour)).max(-1) < 0.02


def colour_of(value):
    return heatmaps._ROUTING_COLOURS[value]


def plot_routing(path, grid_LT, tokens=None, title='a title', **options):
    tokens = [b'x'] * np.shape(grid_LT)[1] if tokens is None else tokens
    heatmaps.plot_routing(np.asarray(grid_LT), tokens, title, path / 'routing.png', **options)
    return matplotlib.image.imread(path / 'routing.png')


def test_routing_grid_combines_top_c_and_selection(tiny_config):
    routing = {'model.routing.router': 'learned', 'model.routing.layers': '1,4'}
    hparams = from_config(tiny_config(**{'model.num_layers': 5} | routing))
    top_c_RT = np.array([[1, 0, 1, 0], [0, 1, 1, 0]]) > 0
    selected_RT = np.array([[1, 1, 0, 0], [0, 0, 0, 0]]) > 0
    dropped_RT = np.array([[0, 0, 0, 0], [1, 1, 0, 0]]) > 0
    dense = [DENSE] * 4
    assert heatmaps.routing_grid(top_c_RT, selected_RT, hparams, dropped_RT).tolist() == [
        dense,
        [SELECTED, SELECTED, LOOKAHEAD, SKIPPED],
        dense,
        dense,
        [NO_ROOM, NO_ROOM, LOOKAHEAD, SKIPPED],
    ]


def test_first_layer_is_at_the_bottom_and_first_token_on_the_left(tmp_path):
    """Each layer is a band in its colour; the second half of the last layer's tokens enter."""
    halves = [SKIPPED] * 20 + [SELECTED] * 20
    picture = plot_routing(tmp_path, [[DENSE] * 40, [LOOKAHEAD] * 40, [NO_ROOM] * 40, halves])
    bands = []
    for value in (DENSE, LOOKAHEAD, NO_ROOM, SELECTED):
        rows = np.flatnonzero(near(picture, colour_of(value)).mean(1) > 0.3)
        assert len(rows) > 10
        bands.append(rows)
    heights = [rows.mean() for rows in bands]
    assert heights == sorted(heights, reverse=True)
    columns = np.flatnonzero(near(picture, colour_of(SELECTED))[bands[-1]].mean(0) > 0.5)
    assert columns.min() > 0.4 * picture.shape[1] and columns.max() < picture.shape[1]


def test_any_bytes_have_a_label(tmp_path):
    """Characters that the font lacks give no warning."""
    tokens = [b' return', '中'.encode(), b'$x$', b'l' * 30, b'\x00', b'\xff', b'\\', b'_']
    assert plot_routing(tmp_path, np.full((2, 8), SELECTED), tokens, 'p$_$q').std() > 0.05
    assert heatmaps._label(b' return\n') == '·return↵'
    assert heatmaps._label(b'l' * 30) == 'l' * 11 + '…'
    assert heatmaps._label('中'.encode()) == heatmaps._label(b'\xe4') == '□'
    assert heatmaps._label(b'') == '§'
    drawn = {*heatmaps._VISIBLE.values(), '…', '§'}
    assert drawn <= {*heatmaps._MARKS}  # the picture explains them


def expert_layers(load_XZ, num_routed):
    experts = {}
    for i, load_Z in enumerate(load_XZ):
        routed_E = np.array(load_Z[:num_routed])
        largest = routed_E.max() / routed_E.mean()
        experts[f'layer_{2 * i + 1:02d}'] = {'load': list(load_Z), 'largest_load': largest}
    return experts


def plot_loads(load_XZ, num_routed, path, title='a title'):
    load = heatmaps.expert_load(expert_layers(load_XZ, num_routed), num_routed)
    heatmaps.plot_expert_load(load, title, path / 'load.png')
    return matplotlib.image.imread(path / 'load.png')[..., :3]


def middle_of(picture, colour):
    """Height and breadth, from the upper left, of the middle of what has this colour."""
    found = near(picture, colour)
    found[:, int(0.8 * found.shape[1]) :] = False  # the colour bar
    assert found.sum() > 100
    rows, columns = np.nonzero(found)
    return rows.mean() / found.shape[0], columns.mean() / found.shape[1]


def test_loads_are_relative_to_the_mean_of_all_choices():
    """The largest load is among the routed experts."""
    found = heatmaps.expert_load(expert_layers([[0.3, 0.1, 0.6], [0.2, 0.2, 0.6]], 2), 2)
    np.testing.assert_allclose(found.load_XZ, [[0.9, 0.3, 1.8], [0.6, 0.6, 1.8]])
    np.testing.assert_allclose(found.largest_load_X, [1.5, 1])
    assert found.layers == (1, 3) and found.num_routed == 2


def test_each_load_is_drawn_in_its_cell(tmp_path):
    """Layers from the bottom up, experts from the left; colours end at 4 times the mean."""
    load_XZ = np.full((4, 30), 1 / 30)
    load_XZ[3, 2], load_XZ[0, 24] = 20 / 30, 0.1 / 30
    shown = plot_loads(load_XZ, 30, tmp_path)
    full, empty = middle_of(shown, FULL), middle_of(shown, EMPTY)
    assert full[0] < 0.4 and full[1] < 0.2
    assert 0.6 < empty[0] < 0.8 and 0.65 < empty[1] < 0.8
    middle_of(shown, LIGHT)
    few = plot_loads(load_XZ[:2], 30, tmp_path)
    assert (few[[0, 1, -2, -1]] == 1).all()  # no text is cut at the edges of a low picture


@pytest.mark.parametrize('num_slots', [0, 4])
def test_depth_mass_has_layers_from_the_bottom_up(tmp_path, num_slots):
    slots_LS = np.zeros((3, num_slots))
    slots_LS[2] = 0.2
    mass = DepthMass(
        ('0', '1', '2'), ('0a', '0f', '1a', '1f')[:num_slots], slots_LS, slots_LS.sum(1),
        np.array([0.6, 0, 0]),
    )  # fmt: skip
    heatmaps.plot_depth_mass(mass, 'p$_$q', tmp_path / 'depth_mass.png')
    picture = matplotlib.image.imread(tmp_path / 'depth_mass.png')
    first_token, depth = (
        np.flatnonzero(near(picture, colour).mean(1) > 0.15)
        for colour in (heatmaps._FIRST, heatmaps._DEPTH)
    )
    assert len(first_token) > 10 and bool(len(depth)) == bool(num_slots)
    assert not num_slots or depth.max() < first_token.min()


def test_layers_without_tokens_are_left_empty(tmp_path):
    """NaN in one layer changes nothing of the others and has no bar; it may be all there is."""
    nan = np.nan
    for slots_LS in (np.array([[nan, nan], [0.5, 0.25]]), np.full((2, 2), nan)):
        mass = DepthMass(('0', '1'), ('0a', '0f'), slots_LS, slots_LS.sum(1), np.array([nan] * 2))
        heatmaps.plot_depth_mass(mass, 'p', tmp_path / 'depth_mass.png')
    figure = matplotlib.figure.Figure()
    bars, weights = figure.subplots(1, 2)
    mass = mass._replace(depth_L=np.array([nan, 0.75]))
    heatmaps._draw_bars(bars, mass)
    assert [(bar.get_width(), round(bar.get_y())) for bar in bars.patches] == [(75, 2)]
    assert [text.get_text() for text in bars.texts] == ['75.0']
    weights_RS = np.array([[1, 0], [nan, nan], [0.25, 0.75]])
    sources = SourceMass(('0a', '0f', 'end'), ('e', '0a'), weights_RS, np.arange(3))
    heatmaps.plot_source_mass(sources, 'p', tmp_path / 'source_mass.png')
    mesh = heatmaps._draw_weights(weights, weights_RS, sources.reads, sources.sources, 75)
    assert np.ma.getmaskarray(mesh.get_array()).tolist() == [[False, True], [True] * 2, [False] * 2]


def test_weights_of_sources_have_reads_from_the_bottom_up(tmp_path):
    """The last read has all its weight on the second of six sources; others have none at all."""
    weights_RS = np.zeros((5, 6))
    weights_RS[4, 1] = 1
    mass = SourceMass(('0a', '0f', '1a', '1f', 'end'), tuple('e01234'), weights_RS, np.arange(5))
    heatmaps.plot_source_mass(mass, 'p$_$q', tmp_path / 'source_mass.png')
    picture = matplotlib.image.imread(tmp_path / 'source_mass.png')
    height, breadth = middle_of(picture, heatmaps._MASS_MAP(1.0)[:3])
    assert height < 0.3 and 0.15 < breadth < 0.4
