"""Which tokens enter a routed block: top-C, causal counts, static sizes, gathered rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.model.sharding import map_batch_shards

CAUSAL_RULES = ('predictor', 'aux_loss', 'threshold', 'dense')
ROUTINGS = ('top_c', *CAUSAL_RULES)
CHOICE = 'routing choice'  # name by which rematerialisation keeps what was chosen
PARTS = (8, 4, 2, 1)  # static sizes of a routed block: an eighth, a quarter, a half, all


class RoutingRecord(NamedTuple):
    """What a routed block decided, per token.

    Attributes:
      scores_BT: float32, the router's r.
      rule_logits_BT: float32, the causal rule lets a token enter where this is above 0.
      top_c_BT: bool, membership of the C highest scores of the row.
      selected_BT: bool, the tokens that did enter in this forward pass.
      dropped_BT: bool, the tokens that the causal rule let in and that found no room.
      gates_BT: float32, the factor on a token's delta if it enters; 0 for padding.
    """

    scores_BT: jax.Array
    rule_logits_BT: jax.Array
    top_c_BT: jax.Array
    selected_BT: jax.Array
    dropped_BT: jax.Array
    gates_BT: jax.Array


def select_top_c(scores_BT, num_selected: int):
    """The C highest scores of each row, exactly C on ties (the lower index wins), in time order.

    Args:
      scores_BT: float [B, T]. A NaN counts as the highest score.
      num_selected: C, from 1 to T.

    Returns:
      indices_BC: int32 [B, C], ascending.

    Raises:
      ValueError: C outside [1, T].
    """
    length = scores_BT.shape[1]
    if not 1 <= num_selected <= length:
        raise ValueError(f'num_selected={num_selected} must lie in [1, {length}]')
    # top_k ranks by bits: -0.0 below 0.0, and a NaN of negative sign below all.
    scores_BT = jnp.where(scores_BT == 0, 0.0, scores_BT)
    scores_BT = jnp.where(jnp.isnan(scores_BT), jnp.nan, scores_BT)
    indices_BC = map_batch_shards(lambda rows: jax.lax.top_k(rows, num_selected)[1], scores_BT)
    return jnp.sort(indices_BC, axis=1).astype(jnp.int32)


def segment_top_c(scores_BT, segment_ids_BT, num_selected: int):
    """Membership of the highest scores of each segment, so that packed documents do not compete.

    The C places of a row are dealt out along it: a segment of tokens [s, e) has
    floor(C e / T) - floor(C s / T) of them, whatever the scores.

    Args:
      scores_BT: float [B, T]. A NaN counts as the highest score.
      segment_ids_BT: int [B, T], equal within a segment, segments contiguous; 0 is padding.
      num_selected: C.

    Returns:
      bool [B, T], at most C in a row; padding never.
    """
    length = scores_BT.shape[1]
    index_T = jnp.arange(length)
    before_T = jnp.array(num_selected * np.arange(length + 1, dtype=np.int64) // length, jnp.int32)
    scores_BT = jnp.where(jnp.isnan(scores_BT), jnp.inf, scores_BT)

    def row(scores_T, segments_T):
        begins_T = jnp.concatenate([jnp.ones(1, bool), segments_T[1:] != segments_T[:-1]])
        number_T = jnp.cumsum(begins_T) - 1
        start_T = jax.lax.cummax(jnp.where(begins_T, index_T, 0))
        size_T = jnp.zeros(length, jnp.int32).at[number_T].add(1)[number_T]
        order_T = jnp.lexsort((index_T, -scores_T, number_T))
        rank_T = jnp.zeros(length, jnp.int32).at[order_T].set(index_T) - start_T
        places_T = before_T[start_T + size_T] - before_T[start_T]
        return (rank_T < places_T) & (segments_T > 0)

    return jax.vmap(row)(scores_BT, segment_ids_BT)


def mask_to_indices(selected_BT, size: int):
    """Indices of the first `size` entering tokens of each row; T and above name no token.

    Args:
      selected_BT: bool [B, T].
      size: static length of the result.

    Returns:
      indices_BC: int32 [B, size], ascending and distinct.
    """
    length = selected_BT.shape[1]
    slots_T = jnp.arange(length)

    def row(entered_T):
        place_T = jnp.where(entered_T, jnp.cumsum(entered_T) - 1, size)
        nothing_C = length + jnp.arange(size)
        return nothing_C.at[place_T].set(slots_T, mode='drop').astype(jnp.int32)

    return jax.vmap(row)(selected_BT)


def apply_capacity(wanted_BT, most: int):
    """The first `most` tokens of each row that want to enter: a causal count."""
    if most >= wanted_BT.shape[1]:
        return wanted_BT
    return wanted_BT & (jnp.cumsum(wanted_BT, axis=1) <= most)


def static_sizes(length: int, most: int) -> tuple[int, ...]:
    """Ascending sizes among which a causal-routed block takes the least that holds every row."""
    return tuple(sorted({min(most, length, -(-length // part)) for part in PARTS}))


def batch_buckets(batch: int) -> tuple[int, ...]:
    """Ascending sizes among which a decoding step takes the least that holds the entering rows."""
    return tuple(sorted({0, *(-(-batch // part) for part in PARTS)}))


def indices_to_mask(indices_BC, length: int):
    """bool [B, T]: which tokens the indices name."""
    rows = jnp.zeros((indices_BC.shape[0], length), bool)
    mark = jax.vmap(lambda row_T, index_C: row_T.at[index_C].set(True, mode='drop'))
    return mark(rows, indices_BC)


def gather_tokens(x_BTX, indices_BC):
    """[B, C, ...]: the named tokens of each row, 0 for an index of T or more.

    Indices are distinct and ascending.
    """

    def gather(x_TX, index_C):
        at = x_TX.at[index_C]
        return at.get(indices_are_sorted=True, unique_indices=True, mode='fill', fill_value=0)

    return jax.vmap(gather)(x_BTX, indices_BC)


def scatter_tokens(x_BTX, indices_BC, update_BCX):
    """x with the named tokens replaced. Indices are distinct and ascending."""

    def put(x_TX, index_C, update_CX):
        at = x_TX.at[index_C]
        return at.set(update_CX, indices_are_sorted=True, unique_indices=True, mode='drop')

    return jax.vmap(put)(x_BTX, indices_BC, update_BCX)


def scatter_add_tokens(x_BTD, indices_BC, update_BCD):
    """x with `update` added to the named tokens. Distinct indices make reruns bit-equal."""

    def scatter(x_TD, index_C, update_CD):
        at = x_TD.at[index_C]
        return at.add(update_CD, indices_are_sorted=True, unique_indices=True, mode='drop')

    return jax.vmap(scatter)(x_BTD, indices_BC, update_BCD)
