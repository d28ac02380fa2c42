"""Shared style of a study's figures: colours and markers by variant, axes, legends."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import LogLocator, NullFormatter

from moddepth_jax.studies.plan import VARIANTS, base_name

INK, PAPER, GRID = '#1d1f21', '#ffffff', '#d8dadc'
# A palette for colour-blind readers (Okabe and Ito); variants also differ in their marker.
COLOURS = {
    **{'black': INK, 'grey': '#8a8d90', 'blue': '#0072b2', 'sky': '#4aa3dd'},
    **{'green': '#009e73', 'orange': '#e69f00', 'red': '#d55e00', 'rose': '#c7679c'},
}
MARKER_SIZE = 6.5
SETTINGS = {
    'svg.hashsalt': 'study',
    'svg.fonttype': 'path',
    'text.parse_math': False,
    'font.family': 'DejaVu Sans',
    'font.size': 9,
    'axes.titlesize': 9.5,
    'grid.color': GRID,
    'grid.linewidth': 0.6,
    **dict.fromkeys(('axes.grid', 'axes.axisbelow'), True),
    **dict.fromkeys(('axes.spines.top', 'axes.spines.right', 'legend.frameon'), False),
    **{f'{name}.color': INK for name in ('text', 'xtick', 'ytick')},
    **dict.fromkeys(('axes.edgecolor', 'axes.labelcolor'), INK),
    **dict.fromkeys(('figure.facecolor', 'axes.facecolor', 'savefig.facecolor'), PAPER),
}


def budget_name(study: dict, budget: float) -> str:
    """Format a budget, such as '6·10¹¹ FLOPs' or '4,000 steps'."""
    return f'{budget:,.0f} steps' if study['kind'] == 'steps' else f'{scientific(budget)} FLOPs'


def scientific(value: float) -> str:
    """Format a number, such as '6·10¹¹'."""
    digits, power = f'{value:.3e}'.split('e')
    raised = str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))
    return ('' if float(digits) == 1 else f'{float(digits):g}·') + f'10{raised}'


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with sizes in inches."""
    return Figure(figsize=(width, height), dpi=150, layout='constrained')


def sentence(text: str) -> Figure:
    """Return a figure that only says why there is nothing to draw."""
    figure = new_figure(6.4, 1.2)
    figure.text(0.5, 0.5, text, ha='center', va='center')
    return figure


def check_look(variant: str):
    """Raise ValueError if the look of a variant is not a colour and a marker."""
    look = VARIANTS[base_name(variant)].look if base_name(variant) in VARIANTS else 'rose d'
    colour, _, marker = look.partition(' ')
    try:
        drawn = not MarkerStyle(marker).get_path().vertices.size == 0
    except ValueError:
        drawn = False
    if colour not in COLOURS or not drawn:
        right = f"must be one of {', '.join(COLOURS)}, and a marker of Matplotlib: 'rose h'"
        raise ValueError(f'variants={variant}: look={look!r}: {right}')


def style(variant: str) -> dict:
    """Return Matplotlib keywords of a variant; NAME_post and NAME_reordered have hollow markers."""
    base = base_name(variant)
    colour, marker = (VARIANTS[base].look if base in VARIANTS else 'rose d').split()
    face = COLOURS[colour] if variant == base else PAPER
    look = {'color': COLOURS[colour], 'marker': marker}
    # Squares are larger and drawn first, so that they stay visible under another marker.
    size, order = (1.5 * MARKER_SIZE, 2.8) if marker == 's' else (MARKER_SIZE, 3)
    return look | {'markerfacecolor': face, 'markersize': size, 'zorder': order}


def legend(figure: Figure, study: dict, variants, more=(), **line):
    """Add a legend of `variants` and of `more`, pairs (handle, label), below the panels."""
    line = {'linewidth': 0} | line
    pairs = [
        (Line2D([], [], **style(name) | line), details['label'])
        for name, details in study['variants'].items()
        if name in variants
    ]
    handles, labels = zip(*pairs, *more, strict=True)
    characters = figure.get_figwidth() * 13  # characters that fit in a line
    columns = int(characters // (max(map(len, labels)) + 6))
    columns = max(1, min(columns, 4, len(labels)))
    place = {'loc': 'outside lower center', 'ncols': columns}
    figure.set_figheight(figure.get_figheight() + 0.185 * -(-len(labels) // columns))
    figure.legend(handles, labels, **place, handlelength=1.8, columnspacing=1.4)


def log_axis(axes, values, formatter):
    """Set a logarithmic x axis around the values."""
    spread = max(values) / min(values)
    room = max(spread**0.15, 1.2)
    axes.set_xscale('log')
    axes.set_xlim(min(values) / room, max(values) * room)
    subs = (1, 2, 5) if spread * room**2 > 6 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.xaxis.set_major_formatter(formatter)
    axes.xaxis.set_minor_formatter(NullFormatter())


def set_y_limits(axes, values, most=np.inf):
    """Fit the y axis to the values up to `most`, with some room."""
    low, high = min(values), max(value for value in values if value <= most)
    room = max(0.06 * (high - low), 1e-3 * abs(high), 1e-9)
    axes.set_ylim(low - room, high + room)


def draw_point(axes, x: float, values, keywords: dict):
    """Draw the mean over seeds at `x` and, if there are several, each seed and their range."""
    if len(values) > 1:
        faint = {'color': keywords['color'], 'alpha': 0.6}
        axes.plot([x, x], [min(values), max(values)], linewidth=1.2, **faint)
        axes.plot([x] * len(values), values, '.', markersize=3.5, **faint)
    axes.plot([x], [np.mean(values)], linewidth=0, **keywords)
