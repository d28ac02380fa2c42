"""Measures how much attention each layer spends on depth slots and on first tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from kernels_pallas import depth_attention
from kernels_pallas.reference import slot_visibility
from moddepth_jax.analysis.layer_walk import walk
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model import ahead
from moddepth_jax.model.routing import gather_tokens
from moddepth_jax.model.streams import layer_kinds


class DepthMass(NamedTuple):
    """Shares of the softmax: means over heads and the real tokens that a layer processes.

    NaN if there is no such token.
    """

    layers: tuple[str, ...]  # names of L readers: block numbers; `end` reads for the final norm
    # Names of S slots in write order: the number of the writer and a (attention), f (ffn) or b
    # (block); `e` is the slot of the embedding.
    slots: tuple[str, ...]
    slots_LS: np.ndarray  # share of each slot; 0 if the slot is not visible
    depth_L: np.ndarray  # sum over slots; the rest is on the sequence
    # Share of the first token of the document that is in the row (in a routed layer, the first
    # selected one), averaged over the other queries; 0 for a layer that reads no sequence.
    first_token_L: np.ndarray


def depth_mass(variables, hparams: Hparams, batch, routing: str) -> DepthMass | None:
    """Measure the masses on a batch (docs/depth_attention.md; Zhu et al. 2026, arXiv 2603.15619).

    In the stream `attention`, a layer reads the slots with a separate softmax, and the mass of the
    first token is that of its block. With abstract variables, this only compiles and returns None.
    Raises ValueError for a stream that reads earlier layers without attention, for routed loops,
    and for a routing that the model cannot run.
    """
    model = hparams.model
    if model.depth.stream_class.reads_outputs:
        right = 'has no attention over depth to measure; must be moda, attention or residual'
        raise ValueError(f'model.depth.stream={model.depth.stream!r}: {right}')
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    found, _ = walk(variables, hparams, tokens_BT, segment_ids_BT, routing, _masses)
    if ahead.is_abstract(variables):
        return None
    sums = jax.device_get([sums for kind, sums in found if kind.part != 'entry'])
    layers, slots = _names(model)
    slots_LS = np.full((len(layers), len(slots)), np.nan)
    depth_L, first_token_L = np.full((2, len(layers)), np.nan)
    for i, (slots_S, queries, first, followers) in enumerate(sums):
        if queries:
            # A buffer may have more room than there are slots.
            slots_LS[i] = slots_S[: len(slots)] / queries
            depth_L[i] = slots_LS[i].sum()
        if followers:
            first_token_L[i] = first / followers
    return DepthMass(layers, slots, slots_LS, depth_L, first_token_L)


def _names(model: ModelHparams):
    """Name of the layers that read, and of the slots that attention sees."""
    letters = {'attention': 'a', 'attention+ffn': 'af'}.get(model.depth.slots, 'b')
    if not model.depth.stream_class.attends:  # in `value_residual`, slots only carry values
        letters = ''
    layers, slots = [], []
    for kind in layer_kinds(model):
        if kind.part == 'entry':
            slots.append('e')
            continue
        number = len(layers)
        layers.append('end' if kind.part == 'exit' else str(number))
        slots += [f'{number}{letter}' for letter in letters[: kind.slots]]
    return tuple(layers), tuple(slots)


class _Call(NamedTuple):
    """One call of attention."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    lse_BTN: jax.Array
    real_BT: jax.Array  # bool: the query is a real token
    options: dict  # other arguments


def _calls(sown, segment_ids_BT):
    """The attention calls of a layer: `sequence`, and `depth` if slots have a separate softmax."""
    calls = {}
    for path, (arguments,) in traverse_util.flatten_dict(sown).items():
        q_BTNH, k_BSKH, options, *own = arguments
        _, lse_BNT = depth_attention(q_BTNH, k_BSKH, k_BSKH, return_lse=True, **options)
        # Unused places of a routed block have segment 0, as padding has.
        call_segments_BT = own[0] if own else segment_ids_BT
        index_BT = jnp.broadcast_to(jnp.arange(q_BTNH.shape[1]), q_BTNH.shape[:2])
        positions_BT = index_BT if options.get('positions_BT') is None else options['positions_BT']
        options = {**options, 'segment_ids_BT': call_segments_BT, 'positions_BT': positions_BT}
        lse_BTN = jnp.moveaxis(lse_BNT, 1, 2)
        calls[path[-1]] = _Call(q_BTNH, k_BSKH, lse_BTN, call_segments_BT > 0, options)
    return calls


def _masses(seen):
    """Sum over queries of the mass on each slot and on first tokens, and numbers of queries."""
    if seen.kind.part == 'entry':
        return None
    calls = _calls(seen.sown, seen.tokens.segment_ids_BT)
    sequence = calls.get('sequence')
    reader = calls.get('depth', sequence)
    slots_L = jnp.sum(jnp.mean(_slot_weights(reader), -1), axis=(1, 2))
    queries = jnp.sum(reader.real_BT)
    first, followers = (0.0, queries) if sequence is None else _first_token_sums(sequence)
    return slots_L, queries, first, followers


def _weights(q_BTNH, k_LBTKH, lse_BTN):
    """Softmax weights [L, B, T, N] of each query on its L slots; query head n reads head n // G."""
    dtype, (batch, length, heads, width) = lse_BTN.dtype, q_BTNH.shape
    q_BTKGH = q_BTNH.astype(dtype).reshape(batch, length, k_LBTKH.shape[3], -1, width)
    k_LBTKH = k_LBTKH.astype(dtype)
    scores_LBTKG = jnp.einsum('btkgh,lbtkh->lbtkg', q_BTKGH, k_LBTKH, precision='highest')
    scores_LBTN = scores_LBTKG.reshape(-1, batch, length, heads)
    return jnp.exp(scores_LBTN * width**-0.5 - lse_BTN[None])


def _slot_weights(call: _Call):
    """Weights [L, B, T, N] on the slots; 0 if a slot is not visible."""
    options, k_LBTKH = call.options, call.options.get('k_depth_LBRKH')
    if k_LBTKH is None:
        return jnp.zeros((0, *call.lse_BTN.shape))
    rows_BT, mask_LBR = options.get('slot_rows_BT'), options.get('slot_mask_LBR')
    seen_BTL = slot_visibility(
        k_LBTKH.shape[:3], options['num_slots'], options['slot_window'], mask_LBR, rows_BT
    )
    seen_LBT = jnp.moveaxis(seen_BTL & call.real_BT[..., None], 2, 0)
    if rows_BT is not None:
        k_LBTKH = jax.vmap(gather_tokens, in_axes=(0, None))(k_LBTKH, rows_BT)
    q_depth_BTNH = options.get('q_depth_BTNH')
    q_BTNH = call.q_BTNH if q_depth_BTNH is None else q_depth_BTNH
    return jnp.where(seen_LBT[..., None], _weights(q_BTNH, k_LBTKH, call.lse_BTN), 0.0)


def _first_token_sums(call: _Call):
    """Sum over queries of the mass on the first key of their document, and number of queries."""
    options, real_BT = call.options, call.real_BT
    segment_ids_BT, positions_BT = options['segment_ids_BT'], options['positions_BT']
    index_BT = jnp.broadcast_to(jnp.arange(real_BT.shape[1]), real_BT.shape)
    changes_BT = segment_ids_BT != jnp.roll(segment_ids_BT, 1, axis=1)
    first_BT = jax.lax.cummax(jnp.where(changes_BT, index_BT, 0), axis=1)
    follows_BT = real_BT & (first_BT < index_BT)
    seen_BT = follows_BT
    if options['window']:
        distance_BT = positions_BT - jnp.take_along_axis(positions_BT, first_BT, axis=1)
        seen_BT &= distance_BT < options['window']
    first_k_BTKH = jnp.take_along_axis(call.k_BSKH, first_BT[..., None, None], axis=1)
    weights_BT = jnp.mean(_weights(call.q_BTNH, first_k_BTKH[None], call.lse_BTN)[0], axis=-1)
    return jnp.sum(jnp.where(seen_BT, weights_BT, 0.0)), jnp.sum(follows_BT)
