"""How much of its attention a layer spends on the slots of earlier layers, and on first tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kernels_pallas import depth_attention
from kernels_pallas.reference import slot_visibility
from moddepth_jax.analysis.layer_walk import after, depth_of, walk
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.routing import gather_tokens
from moddepth_jax.model.streams import layer_kinds

_DEPTH, _FIRST = '#1f5f8b', '#f2b28a'
_HEAT = LinearSegmentedColormap.from_list('mass', ('#f3f1ec', '#8fb3c9', _DEPTH, '#0c2b42'))
_KINDS = ('a attention', 'f mlp', 'b block', 'e embedding')
_MOST_LABELS = 48


class DepthMass(NamedTuple):
    """Shares of the softmax: means over the heads and the real tokens that a layer processes.

    Attributes:
      layers: names of the L readers: the number of each block; `end`, the read for the final norm.
      slots: names of the S slots as written: the writer's number and a (attention), f (ffn) or b
        (block); `e`, the embedding's.
      slots_LS: float [L, S], the mass that a layer puts on a slot; 0 where it does not see it.
      depth_L: float [L], their sum; the rest is on the sequence.
      first_token_L: float [L], the mass on the first token of the query's own document, of a routed
        layer the first that entered; means without the queries of that token. 0 without a sequence.
    """

    layers: tuple[str, ...]
    slots: tuple[str, ...]
    slots_LS: np.ndarray
    depth_L: np.ndarray
    first_token_L: np.ndarray


def depth_mass(variables, hparams: Hparams, batch, routing: str) -> DepthMass:
    """The masses on a batch (method.md, section 4; Zhu et al. 2026, arXiv 2603.15619).

    A residual model has no slots and a depth mass of 0. In `moda` slots and sequence share one
    softmax. In `attention` a layer's read is a softmax of its own, over the slots alone, and the
    first token's mass is that of its block.

    Args:
      variables: of the Transformer.
      hparams: of the same.
      batch: `tokens_BT` and `segment_ids_BT`, int [B, T].
      routing: as `Transformer` takes it.

    Raises:
      ValueError: a stream that reads earlier layers without attention; a routing that the model
        cannot run.
    """
    model = hparams.model
    if model.depth.reads_outputs:
        raise ValueError(
            f'model.depth.stream={model.depth.stream!r}: has no attention over depth to measure; '
            'must be moda, attention or residual'
        )
    sums = _sums(variables, batch['tokens_BT'], batch['segment_ids_BT'], hparams, routing)
    layers, slots = _names(model)
    slots_LS = np.zeros((len(layers), len(slots)))
    first_token_L = np.zeros(len(layers))
    for i, (slots_S, queries, first, followers) in enumerate(sums):
        if len(slots):
            # A buffer may have more room than there are slots.
            slots_LS[i] = slots_S[: len(slots)] / max(queries, 1)
        first_token_L[i] = first / max(followers, 1)
    return DepthMass(layers, slots, slots_LS, slots_LS.sum(axis=1), first_token_L)


def _names(model: ModelHparams):
    """Of the layers that read, and of the slots."""
    letters = {'attention': 'a', 'attention+ffn': 'af'}.get(model.depth.slots, 'b')
    layers, slots, number = [], [], 0
    for kind in layer_kinds(model):
        if kind.part == 'entry':
            slots.append('e')
            continue
        layers.append('end' if kind.part == 'exit' else str(number))
        slots += [f'{number}{letter}' for letter in letters[: kind.slots]]
        number += 1
    return tuple(layers), tuple(slots)


def _sums(variables, tokens_BT, segment_ids_BT, hparams, routing):
    """Of each layer that reads: `_slot_sums` and `_first_sums`."""
    found, _ = walk(variables, hparams, tokens_BT, segment_ids_BT, routing, _layer)
    return jax.device_get([sums for kind, sums in found if kind.part != 'entry'])


@functools.partial(jax.jit, static_argnames=('stack', 'kind'))
def _layer(params, carry, count, tokens, told, *, stack, kind):
    """One layer on the stream and the buffers of slots, compiled once for all of its kind."""
    given = ({'params': params}, carry[0], depth_of(carry, count), tokens, told)
    output, sown = stack.layer(kind).apply(*given, mutable=['intermediates'])
    carry = after(carry, output, count)
    if kind.part == 'entry':
        return carry, None
    return carry, _layer_sums(sown['intermediates'], tokens.segment_ids_BT)


def _layer_sums(sown, segment_ids_BT):
    flat = traverse_util.flatten_dict(sown)
    calls = {path[-1]: _call(value, segment_ids_BT) for path, (value,) in flat.items()}
    sequence = calls.get('sequence')
    first = (0.0, 0) if sequence is None else _first_sums(*sequence)
    return *_slot_sums(*calls.get('depth', sequence)), *first


def _call(sown, segment_ids_BT):
    """What attention was called with: queries, keys, their logsumexp, which are real, the rest."""
    q_BTNH, k_BSKH, given, *own = sown
    _, lse_BNT = depth_attention(q_BTNH, k_BSKH, k_BSKH, return_lse=True, **given)
    # A routed block's places that no token took are of segment 0, as padding is.
    segment_ids_BT = own[0] if own else segment_ids_BT
    index_BT = jnp.broadcast_to(jnp.arange(q_BTNH.shape[1]), q_BTNH.shape[:2])
    positions_BT = index_BT if given.get('positions_BT') is None else given['positions_BT']
    given = {**given, 'segment_ids_BT': segment_ids_BT, 'positions_BT': positions_BT}
    return q_BTNH, k_BSKH, jnp.moveaxis(lse_BNT, 1, 2), segment_ids_BT > 0, given


def _weights(q_BTNH, k_LBTKH, lse_BTN):
    """Softmax weights [L, B, T, N] of each query on keys of its own; query head n reads n // G."""
    dtype, (batch, length, heads, width) = lse_BTN.dtype, q_BTNH.shape
    q_BTKGH = q_BTNH.astype(dtype).reshape(batch, length, k_LBTKH.shape[3], -1, width)
    k_LBTKH = k_LBTKH.astype(dtype)
    scores_LBTKG = jnp.einsum('btkgh,lbtkh->lbtkg', q_BTKGH, k_LBTKH, precision='highest')
    scores_LBTN = scores_LBTKG.reshape(-1, batch, length, heads)
    return jnp.exp(scores_LBTN * width**-0.5 - lse_BTN[None])


def _slot_sums(q_BTNH, _, lse_BTN, real_BT, given):
    """Mass on each visible slot, mean over heads and sum over real queries; how many these are."""
    k_LBTKH, queries = given.get('k_depth_LBRKH'), jnp.sum(real_BT)
    if k_LBTKH is None:
        return 0.0, queries
    rows_BT, mask_LBR = given.get('slot_rows_BT'), given.get('slot_mask_LBR')
    slot_window, shape_LBR = given['slot_window'], k_LBTKH.shape[:3]
    seen_BTL = slot_visibility(shape_LBR, given['num_slots'], slot_window, mask_LBR, rows_BT)
    seen_LBT = jnp.moveaxis(seen_BTL & real_BT[..., None], 2, 0)
    if rows_BT is not None:
        k_LBTKH = jax.vmap(gather_tokens, in_axes=(0, None))(k_LBTKH, rows_BT)
    q_depth_BTNH = given.get('q_depth_BTNH')
    q_BTNH = q_BTNH if q_depth_BTNH is None else q_depth_BTNH
    weights_LBT = jnp.mean(_weights(q_BTNH, k_LBTKH, lse_BTN), axis=-1)
    return jnp.sum(jnp.where(seen_LBT, weights_LBT, 0.0), axis=(1, 2)), queries


def _first_sums(q_BTNH, k_BTKH, lse_BTN, real_BT, given):
    """As `_slot_sums`, on the first key of each query's document, over the document's others."""
    segment_ids_BT, positions_BT = given['segment_ids_BT'], given['positions_BT']
    index_BT = jnp.broadcast_to(jnp.arange(real_BT.shape[1]), real_BT.shape)
    changes_BT = segment_ids_BT != jnp.roll(segment_ids_BT, 1, axis=1)
    first_BT = jax.lax.cummax(jnp.where(changes_BT, index_BT, 0), axis=1)
    follows_BT = real_BT & (first_BT < index_BT)
    seen_BT = follows_BT
    if given['window']:
        distance_BT = positions_BT - jnp.take_along_axis(positions_BT, first_BT, axis=1)
        seen_BT &= distance_BT < given['window']
    first_k_BTKH = jnp.take_along_axis(k_BTKH, first_BT[..., None, None], axis=1)
    weights_BT = jnp.mean(_weights(q_BTNH, first_k_BTKH[None], lse_BTN)[0], axis=-1)
    return jnp.sum(jnp.where(seen_BT, weights_BT, 0.0)), jnp.sum(follows_BT)


def plot_depth_mass(mass: DepthMass, title: str, path):
    """Writes the picture: slots across, layers from the first at the bottom; beside it their sums.

    A model without slots has the bars of first tokens alone.

    Args:
      mass: of `depth_mass`.
      title: above the picture.
      path: of the PNG.
    """
    num_layers, num_slots = mass.slots_LS.shape
    width = min(max(0.32 * num_slots, 3), 16)
    size = (width + 6.5 if num_slots else 6, max(2.8, 1.6 + 0.34 * num_layers))
    figure = Figure(figsize=size, dpi=150)
    FigureCanvasAgg(figure)
    if num_slots:
        first, bars = figure.subplots(1, 2, width_ratios=(width + 1, 4))
        _draw_heat(first, mass)
    else:
        first = bars = figure.subplots()
    _draw_bars(bars, mass)
    first.set_ylabel('layer that reads')
    first.set_title(title, loc='left', fontsize=10, pad=12, parse_math=False)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc='lower right', ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path)


def _tidy(axes, names):
    places = np.arange(len(names)) + 0.5
    axes.set_yticks(places, names)
    axes.set_ylim(0, len(names))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return places


def _draw_heat(axes, mass):
    percent_LS = np.ma.masked_equal(100 * mass.slots_LS, 0.0)
    mesh = axes.pcolormesh(percent_LS, cmap=_HEAT, vmin=0, edgecolors='white', linewidth=0.5)
    _tidy(axes, mass.layers)
    every = -(-len(mass.slots) // _MOST_LABELS)
    places = np.arange(0, len(mass.slots), every) + 0.5
    axes.set_xticks(places, mass.slots[::every], fontsize=8)
    kinds = [kind for kind in _KINDS if any(kind[0] in name for name in mass.slots)]
    axes.set_xlabel(f'slot: layer that wrote it ({", ".join(kinds)})')
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.set_label('% of the attention')
    bar.ax.tick_params(length=0, labelsize=8)
    bar.outline.set_visible(False)


def _draw_bars(axes, mass):
    middle_L = _tidy(axes, mass.layers)
    sides = [(mass.first_token_L, -0.18, _FIRST, "on the document's first token")]
    if mass.slots:
        sides.insert(0, (mass.depth_L, 0.18, _DEPTH, 'on depth slots'))
    for mass_L, shift, colour, label in sides:
        bars = axes.barh(middle_L + shift, 100 * mass_L, 0.34, color=colour, label=label)
        axes.bar_label(bars, fmt='%.1f', padding=2, fontsize=7)
    axes.margins(x=0.12)
    axes.set_xlabel('% of the attention')
