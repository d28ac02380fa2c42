"""Draws selected tokens, expert loads, attention over depth, and block importance of a model."""

import functools
import textwrap
from typing import NamedTuple

import jax
import numpy as np
from matplotlib import font_manager
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm
from matplotlib.figure import Figure

from moddepth_jax.analysis.depth_mass import DepthMass
from moddepth_jax.analysis.source_mass import SourceMass
from moddepth_jax.hparams import Hparams
from moddepth_jax.model import ahead
from moddepth_jax.model.routing import RoutingRecord
from moddepth_jax.model.transformer import Transformer

DENSE, SKIPPED, LOOKAHEAD, NO_ROOM, SELECTED = range(5)
MAX_LETTERS = 12  # of the label of a token
_VISIBLE = {'\n': '↵', ' ': '·', '\t': '→', '\ufffd': '□'}
_MARKS = {
    '·': 'space',
    '→': 'tab',
    '↵': 'line end',
    '…': 'rest of a long token',
    '§': 'document start',
    '□': 'part of a character, or not in this font',
}
_ROUTING_COLOURS = ('#c9ced6', '#f3f1ec', '#f2b28a', '#6fb39b', '#1f5f8b')
_TOP_C = 'skips, but is in the top C of the row'
_NO_ROOM = 'skips: selected, but the cache is full'
_ROUTING_LABELS = ('dense block: every token', 'skips', _TOP_C, _NO_ROOM, 'selected')

_LOAD_MAP = LinearSegmentedColormap.from_list(
    'load', ('#b0531f', '#f2b28a', '#f3f1ec', '#6fa0bd', '#0c2b42')
)
_FURTHEST = 4  # the colour map covers 1/4 to 4 times an even load
_LOAD_TICKS = {1 / 4: '1/4 or less', 1 / 2: '1/2', 1: '1', 2: '2', 4: '4 or more'}
_MAX_LABELS = 40
_MAX_NUMBERS = 24  # with more experts the cells are too narrow for numbers

_DEPTH, _FIRST = '#1f5f8b', '#f2b28a'
_MASS_MAP = LinearSegmentedColormap.from_list('mass', ('#f3f1ec', '#8fb3c9', _DEPTH, '#0c2b42'))
_SLOT_KINDS = ('a attention', 'f mlp', 'b block', 'e embedding')


def _colour_bar(figure, mesh, axes, label):
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=8)
    return bar


def _rows(axes, names):
    """Label rows, the first at the bottom, without ticks and frame. Returns their y positions."""
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    middles = np.arange(len(names)) + 0.5
    axes.set_yticks(middles, names)
    axes.set_ylim(0, len(names))
    return middles


def _columns(axes, names, total):
    """Label the columns of a heatmap, leaving some out if it has many in total."""
    every = -(-total // _MAX_LABELS)
    axes.set_xticks(np.arange(0, len(names), every) + 0.5, names[::every], fontsize=8)


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _records(variables, tokens_BT, segment_ids_BT, *, hparams, routing):
    _, records = Transformer(hparams).apply(variables, tokens_BT, segment_ids_BT, routing)
    return records.routing


def routing_record(variables, hparams: Hparams, batch, routing: str) -> RoutingRecord | None:
    """Return the routing decisions on a batch: NumPy arrays [routed layers, B, T].

    With abstract variables, this only compiles and returns None.
    """
    sides = batch['tokens_BT'], batch['segment_ids_BT']
    records = ahead.call(_records, variables, *sides, hparams=hparams, routing=routing)
    return None if ahead.is_abstract(records) else jax.device_get(records)


def routing_grid(top_c_RT, selected_RT, hparams: Hparams, dropped_RT=False) -> np.ndarray:
    """Return int [L, T]: SELECTED, NO_ROOM, LOOKAHEAD (in the top C only), SKIPPED or DENSE.

    The arguments are those of RoutingRecord. Without `dropped_RT`, no token is NO_ROOM.
    """
    grid_LT = np.full((hparams.model.num_blocks, np.shape(top_c_RT)[1]), DENSE)
    skipped_RT = np.where(dropped_RT, NO_ROOM, np.where(top_c_RT, LOOKAHEAD, SKIPPED))
    chosen_RT = np.where(selected_RT, SELECTED, skipped_RT)
    for layer, router in enumerate(hparams.model.router_of_block):
        if router is not None:
            grid_LT[layer] = chosen_RT[router]
    return grid_LT


@functools.cache
def _font():
    return font_manager.get_font(font_manager.findfont('monospace'))


def _letter(character):
    shown = _VISIBLE.get(character, character)
    return shown if shown.isprintable() and _font().get_char_index(ord(shown)) else '□'


def _label(token: bytes) -> str:
    """The label of a token: spaces and line ends are made visible, long ones are cut."""
    text = ''.join(map(_letter, token.decode('utf-8', 'replace'))) or '§'
    return text if len(text) <= MAX_LETTERS else f'{text[: MAX_LETTERS - 1]}…'


def plot_routing(
    grid_LT,
    tokens,
    title: str,
    path,
    what: str = 'held-out tokens',
    width: int | None = None,
    names: list[str] | None = None,
):
    """Write the heatmap of a `routing_grid`, with the first layer at the bottom.

    Args:
      grid_LT: values of `routing_grid`.
      tokens: the bytes of each token; b'' for the separator.
      title: above the heatmap.
      path: of the file.
      what: describes the tokens, below the heatmap.
      width: tokens in a strip. Default: all.
      names: of the layers. Default: their numbers.
    """
    num_layers, length = grid_LT.shape
    width = min(width or length, length)
    strips = -(-length // width)
    labels = [_label(token) for token in tokens]
    longest = max(map(len, labels), default=1)
    strip_height = 0.09 * (longest - 1) + 0.3 * num_layers  # upright labels take height
    height = 2.05 + strip_height + (strips - 1) * (0.5 + strip_height)
    figure = Figure(figsize=(max(8, 0.16 * width), height), dpi=150)
    axes = figure.subplots(strips, 1, squeeze=False)[:, 0]
    font = {'fontfamily': 'monospace', 'fontsize': 8, 'parse_math': False}
    font['rotation'] = 90 if longest > 1 else 0  # horizontal ones would overlap
    cells = {'cmap': ListedColormap(_ROUTING_COLOURS), 'vmin': -0.5, 'vmax': 4.5}
    for i, strip in enumerate(axes):
        part = slice(i * width, (i + 1) * width)
        strip.pcolormesh(grid_LT[:, part], **cells, edgecolors='white', linewidth=0.5)
        strip.set_xlim(0, width)
        strip.set_xticks(np.arange(len(labels[part])) + 0.5, labels[part], **font)
        _rows(strip, names or [str(layer) for layer in range(num_layers)])
        strip.set_ylabel('layer')
    shown = ''.join(labels)
    marks = ', '.join(f'{mark} {meaning}' for mark, meaning in _MARKS.items() if mark in shown)
    axes[-1].set_xlabel(textwrap.fill(what + f' ({marks})' * bool(marks), 90))
    axes[0].set_title(title, loc='left', fontsize=10, parse_math=False)
    used = [value for value in range(SELECTED, DENSE - 1, -1) if (grid_LT == value).any()]
    square = functools.partial(axes[0].scatter, [], [], marker='s', s=60)
    handles = [square(color=_ROUTING_COLOURS[value]) for value in used]
    labels = [_ROUTING_LABELS[value] for value in used]
    columns = 3 if figure.get_figwidth() < 13 else len(used)  # more would be cut off
    figure.legend(handles, labels, loc='lower left', ncols=columns, frameon=False, fontsize=8)
    lines = -(-len(used) // columns)
    figure.tight_layout(rect=(0, (0.1 + 0.2 * lines) / figure.get_figheight(), 1, 1))
    figure.savefig(path)


class ExpertLoad(NamedTuple):
    """Loads relative to the mean of all choices: 1 everywhere if tokens are spread evenly."""

    layers: tuple[int, ...]  # numbers of the X layers that have experts, ascending
    num_routed: int  # E; later choices are no-op experts
    load_XZ: np.ndarray  # float, by choice; NaN if the layer processed no token
    largest_load_X: np.ndarray  # float, fullest routed expert over the mean of the routed experts


def expert_load(experts: dict, num_routed: int) -> ExpertLoad:
    """Return the loads from `experts` in summary.json, with `num_routed` routed experts."""
    shares = np.array([values['load'] for values in experts.values()], float)
    largest = np.array([values['largest_load'] for values in experts.values()], float)
    layers = tuple(int(layer.removeprefix('layer_')) for layer in experts)
    return ExpertLoad(layers, num_routed, shares * shares.shape[1], largest)


def plot_expert_load(load: ExpertLoad, title: str, path):
    """Write the heatmap of loads: experts across, the first layer at the bottom."""
    num_layers, num_choices = load.load_XZ.shape
    size = (min(max(6, 2.4 + 0.34 * num_choices), 16), max(2.4, 1.4 + 0.3 * num_layers))
    figure = Figure(figsize=size, dpi=150, layout='constrained')
    parts = {'routed expert': range(load.num_routed)}
    if num_choices > load.num_routed:
        parts['no-op expert'] = range(load.num_routed, num_choices)
    # Leave room for the name of a part with only one column.
    widths = [max(len(columns), 0.14 * num_choices) for columns in parts.values()]
    axes = figure.subplots(1, len(parts), width_ratios=widths, squeeze=False)[0]
    for part, (name, columns) in zip(axes, parts.items(), strict=True):
        mesh = _draw_loads(part, load.load_XZ, columns)
        _rows(part, load.layers if part is axes[0] else [''] * num_layers)
        part.set_xlabel(name)
    axes[0].set_ylabel('layer')
    bar = _colour_bar(figure, mesh, axes, 'load relative to the\nmean of all choices (×: 0)')
    bar.set_ticks(list(_LOAD_TICKS), labels=list(_LOAD_TICKS.values()), fontsize=8)
    bar.minorticks_off()
    figure.suptitle(title, x=0.01, ha='left', fontsize=10, parse_math=False)
    figure.savefig(path)


def _draw_loads(axes, load_XZ, columns):
    num_choices = load_XZ.shape[1]
    load_XZ = load_XZ[:, columns.start : columns.stop]
    shown_XZ = np.clip(load_XZ, 1 / _FURTHEST, _FURTHEST)
    norm = LogNorm(1 / _FURTHEST, _FURTHEST)
    mesh = axes.pcolormesh(shown_XZ, cmap=_LOAD_MAP, norm=norm, edgecolors='white', linewidth=0.5)
    _columns(axes, columns, num_choices)
    for (row, column), value in np.ndenumerate(load_XZ):
        if np.isnan(value) or (value and num_choices > _MAX_NUMBERS):
            continue
        text = f'{value:.2f}' if value else '×'
        colour = '#333333' if 1 / 2.5 < value < 2.5 else 'white'
        style = {'ha': 'center', 'va': 'center', 'fontsize': 7, 'color': colour}
        axes.text(column + 0.5, row + 0.5, text, **style)
    return mesh


def plot_depth_mass(mass: DepthMass, title: str, path):
    """Write a heatmap of depth mass, slots across and the first layer at the bottom, with bars."""
    num_layers, num_slots = mass.slots_LS.shape
    width = min(max(0.32 * num_slots, 3), 16)
    size = (width + 6.5 if num_slots else 6, max(2.8, 1.6 + 0.34 * num_layers))
    figure = Figure(figsize=size, dpi=150)
    if num_slots:
        first, bars = figure.subplots(1, 2, width_ratios=(width + 1, 4))
        mesh = _draw_weights(first, mass.slots_LS, mass.layers, mass.slots)
        first.set_xlabel(f'slot, named after its writing layer ({_kinds(mass.slots)})')
        _colour_bar(figure, mesh, first, '% of the attention')
    else:
        first = bars = figure.subplots()
    _draw_bars(bars, mass)
    first.set_ylabel('reading layer')
    first.set_title(title, loc='left', fontsize=10, pad=12, parse_math=False)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc='lower right', ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path)


def _draw_weights(axes, weights_RS, rows, columns, most=None):
    """Draw percentages, up to `most`, as a heatmap; weights of 0 and NaN are empty cells."""
    percent_RS = np.ma.masked_equal(np.ma.masked_invalid(100 * weights_RS), 0.0)
    style = {'edgecolors': 'white', 'linewidth': 0.5}
    mesh = axes.pcolormesh(percent_RS, cmap=_MASS_MAP, vmin=0, vmax=most, **style)
    _rows(axes, rows)
    _columns(axes, columns, len(columns))
    return mesh


def _kinds(names):
    return ', '.join(kind for kind in _SLOT_KINDS if any(kind[0] in name for name in names))


def _draw_bars(axes, mass):
    middle_L = _rows(axes, mass.layers)
    on_first = "on the document's first token in the row"
    sides = [(mass.first_token_L, -0.18, _FIRST, on_first)]
    if mass.slots:
        sides.insert(0, (mass.depth_L, 0.18, _DEPTH, 'on depth slots'))
    for mass_L, shift, colour, label in sides:
        known_L = np.isfinite(mass_L)  # of layers that processed a token
        places, widths = middle_L[known_L] + shift, 100 * mass_L[known_L]
        bars = axes.barh(places, widths, 0.34, color=colour, label=label)
        axes.bar_label(bars, fmt='%.1f', padding=2, fontsize=7)
    axes.margins(x=0.12)
    axes.set_xlabel('% of the attention')


def plot_source_mass(mass: SourceMass, title: str, path):
    """Write a heatmap of weights of sources, these across and the first read at the bottom."""
    num_reads, num_sources = mass.weights_RS.shape
    size = min(max(0.32 * num_sources, 3) + 2.5, 18), min(max(2.8, 1.6 + 0.26 * num_reads), 18)
    figure = Figure(figsize=size, dpi=150, layout='constrained')
    axes = figure.subplots()
    # The first read has one source, whose 100% would leave the others pale.
    most = 100 * np.nanmax(mass.weights_RS[1:])
    mesh = _draw_weights(axes, mass.weights_RS, mass.reads, mass.sources, most)
    axes.set_ylabel('reading sublayer')
    axes.set_xlabel(f'source, named after the sublayer that opens it ({_kinds(mass.sources)})')
    axes.set_title(title, loc='left', fontsize=10, pad=12, parse_math=False)
    _colour_bar(figure, mesh, axes, '% of the softmax')
    figure.savefig(path)


def plot_importance(importance: dict, title: str, path):
    """Write bars of `block_importance`: the loss increase from skipping each block and part."""
    blocks = importance['blocks']
    figure = Figure(figsize=(7, max(2.4, 1.4 + 0.5 * len(blocks))), dpi=150, layout='constrained')
    axes = figure.subplots()
    middle_L = _rows(axes, [row['layer'] for row in blocks])
    colours = {'block': '#0c2b42', 'attention': _DEPTH, 'mlp': _FIRST}
    for shift, (part, colour) in zip((0.28, 0, -0.28), colours.items(), strict=True):
        costs = [row[part]['cost'] for row in blocks]
        bars = axes.barh(middle_L + shift, costs, 0.26, color=colour, label=part)
        axes.bar_label(bars, fmt='%+.3f', padding=2, fontsize=7)
    axes.margins(x=0.12)
    axes.set_ylabel('skipped layer')
    axes.set_xlabel('loss increase, nats per token')
    axes.set_title(title, loc='left', fontsize=10, parse_math=False)
    figure.legend(loc='outside lower right', ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)
