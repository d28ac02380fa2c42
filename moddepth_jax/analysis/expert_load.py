"""How evenly tokens fall on the experts of each layer, as numbers and as a picture."""

import math
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

_HEAT = LinearSegmentedColormap.from_list(
    'load', ('#b0531f', '#f2b28a', '#f3f1ec', '#6fa0bd', '#0c2b42')
)
_FURTHEST = 4  # times or part of an even load; beyond it colours do not change
_TICKS = {1 / 4: '1/4 or less', 1 / 2: '1/2', 1: '1', 2: '2', 4: '4 or more'}
_MOST_LABELS = 40
_MOST_NUMBERS = 24  # choices; with more of them the cells are too narrow for numbers


class ExpertLoad(NamedTuple):
    """Loads over the mean of all choices: 1 everywhere where tokens are spread evenly.

    Attributes:
      layers: numbers of the X layers that have experts, ascending.
      num_routed: E; choices from there on do nothing.
      load_XZ: float [X, Z], pairs of token and choice over their mean; NaN where no token came.
      largest_load_X: float [X], the fullest routed expert over the mean of the routed ones alone.
    """

    layers: tuple[int, ...]
    num_routed: int
    load_XZ: np.ndarray
    largest_load_X: np.ndarray


def expert_load(experts: dict, num_routed: int) -> ExpertLoad:
    """The loads that an evaluation found.

    Args:
      experts: what summary.json has under that name, one entry a layer.
      num_routed: E.
    """
    load_XZ = np.array([values['load'] for values in experts.values()], float)
    largest_load_X = np.array([values['largest_load'] for values in experts.values()], float)
    layers = tuple(int(layer.removeprefix('layer_')) for layer in experts)
    return ExpertLoad(layers, num_routed, load_XZ * load_XZ.shape[1], largest_load_X)


def mean_ratio(experts: dict, name: str) -> float:
    """Mean of a ratio over the layers that have one; NaN where none has."""
    found = [values[name] for values in experts.values() if math.isfinite(values[name])]
    return sum(found) / len(found) if found else math.nan


def plot_expert_load(load: ExpertLoad, title: str, path):
    """Writes the picture: experts across, those that do nothing apart; layers from the bottom up.

    An expert that no token chose has a cross; a layer that no token reached stays white.

    Args:
      load: of `expert_load`.
      title: above the picture.
      path: of the PNG.
    """
    num_layers, num_choices = load.load_XZ.shape
    size = (min(max(6, 2.4 + 0.34 * num_choices), 16), max(2.4, 1.4 + 0.3 * num_layers))
    figure = Figure(figsize=size, dpi=150, layout='constrained')
    FigureCanvasAgg(figure)
    parts = {'routed expert': range(load.num_routed)}
    if num_choices > load.num_routed:
        parts['no-op expert'] = range(load.num_routed, num_choices)
    # A part of one column still has room for its name.
    widths = [max(len(columns), 0.14 * num_choices) for columns in parts.values()]
    axes = figure.subplots(1, len(parts), width_ratios=widths, squeeze=False)[0]
    for part, (name, columns) in zip(axes, parts.items(), strict=True):
        mesh = _draw(part, load.load_XZ, columns)
        part.set_xlabel(name)
        part.set_yticks([])
    axes[0].set_yticks(np.arange(num_layers) + 0.5, load.layers)
    axes[0].set_ylabel('layer')
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.set_ticks(list(_TICKS), labels=list(_TICKS.values()), fontsize=8)
    bar.minorticks_off()
    bar.ax.tick_params(length=0)
    bar.set_label('load, over the mean of all choices (×: none)', fontsize=8)
    bar.outline.set_visible(False)
    figure.suptitle(title, x=0.01, ha='left', fontsize=10, parse_math=False)
    figure.savefig(path)


def _draw(axes, load_XZ, columns):
    num_choices = load_XZ.shape[1]
    load_XZ = load_XZ[:, columns.start : columns.stop]
    shown_XZ = np.clip(load_XZ, 1 / _FURTHEST, _FURTHEST)
    norm = LogNorm(1 / _FURTHEST, _FURTHEST)
    mesh = axes.pcolormesh(shown_XZ, cmap=_HEAT, norm=norm, edgecolors='white', linewidth=0.5)
    every = -(-num_choices // _MOST_LABELS)
    places = np.arange(0, len(columns), every)
    axes.set_xticks(places + 0.5, columns[::every], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for (row, column), value in np.ndenumerate(load_XZ):
        if np.isnan(value) or (value and num_choices > _MOST_NUMBERS):
            continue
        dark = not 1 / 2.5 < value < 2.5
        axes.text(
            column + 0.5,
            row + 0.5,
            f'{value:.2f}' if value else '×',
            ha='center',
            va='center',
            fontsize=7,
            color='white' if dark else '#333333',
        )
    return mesh
