"""The picture of a routing shows each token's fate, layer by layer."""

import functools

import jax
import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from moddepth_jax.analysis import routing_maps
from moddepth_jax.analysis.routing_maps import DENSE, ENTERED, LOOKAHEAD, SKIPPED
from moddepth_jax.hparams import from_config
from moddepth_jax.model.routing import RoutingRecord
from moddepth_jax.model.transformer import Transformer

FAST = {'xla_backend_optimization_level': 0}


def routed(tiny_config, num_layers, layers):
    changes = {
        'model.num_layers': num_layers,
        'model.routing.router': 'learned',
        'model.routing.layers': layers,
        'model.routing.capacity': 0.25,
    }
    return from_config(tiny_config(**changes))


def colour(value):
    return matplotlib.colors.to_rgb(routing_maps._COLOURS[value])


def rows_of(picture, value):
    """Heights, in pixels from the top, at which a wide stretch has the colour of `value`."""
    near = np.abs(picture[..., :3] - colour(value)).max(-1) < 0.02
    return np.flatnonzero(near.mean(1) > 0.3)


def test_grid_of_a_hand_made_record(tiny_config):
    """Each token of each layer is what the record says of it, for the row that was asked for."""
    hparams = routed(tiny_config, 5, '1,4')
    top_c = [[[1, 0, 1, 0], [0, 0, 1, 1]], [[0, 1, 1, 0], [1, 1, 0, 0]]]
    entered = [[[1, 1, 0, 0], [0, 0, 0, 1]], [[0, 0, 0, 0], [1, 0, 0, 1]]]
    zeros_LBT = np.zeros((2, 2, 4), np.float32)
    marks = (np.array(top_c) > 0, np.array(entered) > 0, zeros_LBT > 0)
    record = RoutingRecord(zeros_LBT, zeros_LBT, *marks, zeros_LBT)
    dense = [DENSE] * 4
    assert routing_maps.routing_grid(record, hparams, 0).tolist() == [
        dense,
        [ENTERED, ENTERED, LOOKAHEAD, SKIPPED],
        dense,
        dense,
        [SKIPPED, LOOKAHEAD, LOOKAHEAD, SKIPPED],
    ]
    assert routing_maps.routing_grid(record, hparams, 1).tolist() == [
        dense,
        [SKIPPED, SKIPPED, LOOKAHEAD, ENTERED],
        dense,
        dense,
        [ENTERED, LOOKAHEAD, SKIPPED, ENTERED],
    ]


@pytest.mark.parametrize('routing', ['top_c', 'dense'])
def test_record_is_that_of_the_forward_pass(tiny_config, routing):
    """Decisions come as NumPy arrays of every routed layer, under the routing asked for."""
    hparams = routed(tiny_config, 1, '0')
    init = functools.partial(Transformer(hparams).init, jax.random.key(0))
    tokens_BT = np.random.default_rng(0).integers(0, 257, (2, 32)).astype(np.int32)
    variables = jax.jit(lambda: init(tokens_BT), compiler_options=FAST)()
    batch = {'tokens_BT': tokens_BT, 'segment_ids_BT': np.ones((2, 32), np.int32)}
    batch['segment_ids_BT'][1, 20:] = 0
    record = routing_maps.routing_record(variables, hparams, batch, routing)
    assert all(type(leaf) is np.ndarray and leaf.shape == (1, 2, 32) for leaf in record)
    assert record.top_c_BT.sum(-1).tolist() == [[8, 8]]
    assert record.selected_BT.sum(-1).tolist() == ([[8, 8]] if routing == 'top_c' else [[32, 20]])
    grid_LT = routing_maps.routing_grid(record, hparams, 0)
    assert np.array_equal(grid_LT[0] == ENTERED, record.selected_BT[0, 0])


def test_picture_shows_layers_from_the_bottom_up(tmp_path):
    """Each layer is a band in its colour, the first at the bottom of the PNG."""
    grid_LT = np.repeat([[DENSE], [SKIPPED], [LOOKAHEAD], [ENTERED]], 40, axis=1)
    path = tmp_path / 'routing.png'
    routing_maps.plot_routing(grid_LT, [b'x'] * 40, 'a title', path)
    assert path.read_bytes().startswith(b'\x89PNG')
    picture = matplotlib.image.imread(path)
    bands = [rows_of(picture, value) for value in (DENSE, SKIPPED, LOOKAHEAD, ENTERED)]
    assert all(len(band) > 10 for band in bands)
    heights = [band.mean() for band in bands]
    assert heights == sorted(heights, reverse=True)


def test_picture_shows_tokens_from_left_to_right(tmp_path):
    """Of a layer whose second half enters, the right half has the colour of entering."""
    grid_LT = np.array([[SKIPPED] * 20 + [ENTERED] * 20])
    path = tmp_path / 'routing.png'
    routing_maps.plot_routing(grid_LT, [b'x'] * 40, '', path)
    picture = matplotlib.image.imread(path)
    near = np.abs(picture[..., :3] - colour(ENTERED)).max(-1) < 0.02
    band = near[near.mean(1) > 0.3]
    columns = np.flatnonzero(band.mean(0) > 0.5)
    assert columns.min() > 0.4 * picture.shape[1] and columns.max() < picture.shape[1]


@pytest.mark.parametrize('title', ['runs/a: routing', 'p$_$q'])
def test_any_bytes_and_any_title_can_be_drawn(tmp_path, title):
    """Control, high and markup characters of text and directory names are drawn, not parsed."""
    tokens = [b'', b'\n', b' ', b'\t', b'\x00', b'\x1b', b'\xff', b'$', b'\\', b'_', b'^', b'{']
    grid_LT = np.tile([SKIPPED, ENTERED], (2, 6))
    routing_maps.plot_routing(grid_LT, tokens, title, tmp_path / 'routing.png')
    assert matplotlib.image.imread(tmp_path / 'routing.png').std() > 0.05


def test_tokens_of_several_letters_stand_upright(tmp_path):
    """Side by side they would hide each other. Letters that no font has give no warning."""
    grid_LT = np.full((2, 40), ENTERED)
    heights = []
    for tokens in ([b'a'] * 40, [b' return', '中'.encode(), b'$x$', b'l' * 30] * 10):
        routing_maps.plot_routing(grid_LT, tokens, 'a', tmp_path / 'a.png')
        heights.append(matplotlib.image.imread(tmp_path / 'a.png').shape[0])
    assert heights[1] > heights[0] + 100
    assert routing_maps._label(b' return\n') == '·return↵'
    assert routing_maps._label(b'l' * 30) == 'l' * 11 + '…'
    assert routing_maps._label('中'.encode()) == routing_maps._label(b'\xe4') == '□'
    assert routing_maps._label(b'') == '§'


def test_long_texts_are_folded(tmp_path):
    """Of 100 tokens, 40 across, the picture is as wide as one of 40, and each strip shows its own.

    The first two strips skip, the third, of 20 tokens, enters on its left half alone.
    """
    grid_LT = np.array([[SKIPPED] * 80 + [ENTERED] * 20])
    for name, most in (('folded', 40), ('wide', None)):
        part = grid_LT if most else grid_LT[:, :40]
        path = tmp_path / f'{name}.png'
        routing_maps.plot_routing(part, [b'x'] * part.shape[1], '', path, 'tokens', most)
    folded, wide = (
        matplotlib.image.imread(tmp_path / f'{name}.png') for name in ('folded', 'wide')
    )
    assert folded.shape[1] == wide.shape[1] and folded.shape[0] > wide.shape[0]
    near = np.abs(folded[..., :3] - colour(ENTERED)).max(-1) < 0.02
    band = near[near.mean(1) > 0.3]
    columns = np.flatnonzero(band.mean(0) > 0.5)
    assert columns.max() < 0.6 * folded.shape[1]
    assert np.flatnonzero(near.any(1)).min() > 0.5 * folded.shape[0]
