"""Which token enters which block, as arrays and as a picture."""

import functools

import jax
import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.routing import RoutingRecord
from moddepth_jax.model.transformer import Transformer

ENTERED, LOOKAHEAD, SKIPPED, DENSE = 3, 2, 1, 0
MAX_LETTERS = 12  # of a token, below its column
_SHOWN = {'\n': '↵', ' ': '·', '\t': '→', '\ufffd': '□'}
_COLOURS = ('#c9ced6', '#f3f1ec', '#f2b28a', '#1f5f8b')
_MEANINGS = (
    'dense block: every token',
    'skips',
    'skips, but top-C of the whole row would take it',
    'enters',
)


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _records(variables, tokens_BT, segment_ids_BT, *, hparams, routing):
    _, records = Transformer(hparams).apply(variables, tokens_BT, segment_ids_BT, routing)
    return records.routing


def routing_record(variables, hparams: Hparams, batch, routing: str) -> RoutingRecord:
    """The decisions on a batch, as NumPy arrays [routed layers, B, T].

    Args:
      variables: of the Transformer.
      hparams: of the same; at least one block is routed.
      batch: `tokens_BT` and `segment_ids_BT`.
      routing: as `Transformer` takes it.
    """
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    records = _records(variables, tokens_BT, segment_ids_BT, hparams=hparams, routing=routing)
    return jax.tree.map(np.asarray, jax.device_get(records))


def routing_grid(record: RoutingRecord, hparams: Hparams, row: int) -> np.ndarray:
    """int [num_layers, T]: ENTERED, LOOKAHEAD (only top-C would take it), SKIPPED, or DENSE."""
    length = record.scores_BT.shape[2]
    grid_LT = np.full((hparams.model.num_layers, length), DENSE)
    for i, layer in enumerate(hparams.model.routed_layers):
        stayed_T = np.where(record.top_c_BT[i, row], LOOKAHEAD, SKIPPED)
        grid_LT[layer] = np.where(record.selected_BT[i, row], ENTERED, stayed_T)
    return grid_LT


@functools.cache
def _font():
    return font_manager.get_font(font_manager.findfont('monospace'))


def _letter(character: str) -> str:
    shown = _SHOWN.get(character, character)
    return shown if shown.isprintable() and _font().get_char_index(ord(shown)) else '□'


def _label(token: bytes) -> str:
    """What stands below a token; spaces and line ends can be seen, a long one is cut."""
    text = ''.join(map(_letter, token.decode('utf-8', 'replace'))) or '§'
    return text if len(text) <= MAX_LETTERS else f'{text[: MAX_LETTERS - 1]}…'


def plot_routing(
    grid_LT, tokens, title: str, path, what: str = 'held-out tokens', most: int | None = None
):
    """Writes the heatmap: tokens across, layers from the first at the bottom to the last.

    Args:
      grid_LT: of `routing_grid`.
      tokens: the text of each token as bytes, b'' for the separator.
      title: above the picture.
      path: of the PNG.
      what: the tokens are.
      most: tokens across; more are folded into strips, one below the other. None: one strip.
    """
    num_layers, length = grid_LT.shape
    most = min(most or length, length)
    strips = -(-length // most)
    labels = 0.09 * (_longest(tokens) - 1)  # inches that upright ones are higher
    height = 1.9 + labels + 0.3 * num_layers + (strips - 1) * (0.5 + labels + 0.3 * num_layers)
    figure = Figure(figsize=(max(8, 0.16 * most), height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(strips, 1, squeeze=False)[:, 0]
    for i, strip in enumerate(axes):
        part = slice(i * most, (i + 1) * most)
        _draw_strip(strip, grid_LT[:, part], tokens[part], most)
    axes[-1].set_xlabel(
        f'{what} (· space, ↵ line end, § document start, □ not whole, or not in this font)'
    )
    axes[0].set_title(title, loc='left', fontsize=10, parse_math=False)
    used = [value for value in (ENTERED, LOOKAHEAD, SKIPPED, DENSE) if (grid_LT == value).any()]
    handles = [axes[0].scatter([], [], marker='s', s=60, color=_COLOURS[value]) for value in used]
    labels = [_MEANINGS[value] for value in used]
    figure.legend(handles, labels, loc='lower left', ncols=len(used), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path)


def _longest(tokens):
    return max((len(_label(token)) for token in tokens), default=1)


def _draw_strip(axes, grid_LT, tokens, width):
    num_layers, length = grid_LT.shape
    colours = ListedColormap(_COLOURS)
    axes.pcolormesh(grid_LT, cmap=colours, vmin=-0.5, vmax=3.5, edgecolors='white', linewidth=0.5)
    labels = [_label(token) for token in tokens]
    axes.set_xlim(0, width)
    # Labels of several letters would run into each other side by side.
    how = {'fontfamily': 'monospace', 'fontsize': 8, 'parse_math': False}
    how['rotation'] = 90 if _longest(tokens) > 1 else 0
    axes.set_xticks(np.arange(length) + 0.5, labels, **how)
    axes.set_yticks(np.arange(num_layers) + 0.5, [str(layer) for layer in range(num_layers)])
    axes.tick_params(length=0)
    axes.set_ylabel('layer')
    for spine in axes.spines.values():
        spine.set_visible(False)
