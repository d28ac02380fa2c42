"""The selection of tokens for a routed block, and `route`, which routes any function of tokens.

Indices of tokens [B, C] are distinct and ascending. An index of T or more names no token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moddepth_jax.model.sharding import check_axis_types, map_batch_shards

CHOICE = 'routing choice'  # checkpoint name: rematerialization keeps the choice
PARTS = (8, 4, 2, 1)  # static sizes of a routed block: an eighth, a quarter, a half, all


class TokenInfo(NamedTuple):
    """What a block needs to know about its tokens; gathered with them when they are routed."""

    positions_BT: jax.Array  # int32, in the original row, ascending
    segment_ids_BT: jax.Array  # int32; tokens of the same id see each other; 0 is padding
    seeds_BT: jax.Array | None = None  # uint32, seeds of the `random` router
    ids_BT: jax.Array | None = None  # int32, vocabulary ids, if layers look up values by them
    turns: tuple | None = None  # `rope_turns` of the positions; None: each layer computes them


class RoutingRecord(NamedTuple):
    """What a routed block decided for each token."""

    scores_BT: jax.Array  # float32, the router's score r
    rule_logits_BT: jax.Array  # float32, above 0 if the causal rule selects the token
    top_c_BT: jax.Array  # bool, the score is among the C highest of the row
    selected_BT: jax.Array  # bool, the block processed the token in this forward pass
    dropped_BT: jax.Array  # bool, the causal rule selected the token beyond the capacity
    gates_BT: jax.Array  # float32, factor on the change of a selected token; 0 for padding


class Selection(NamedTuple):
    """The tokens that a block processes."""

    indices_BC: jax.Array  # int32, ascending; may name padding (top-C) or no token (causal rules)
    selected_BT: jax.Array  # bool, the real tokens among them
    dropped_BT: jax.Array  # bool, wanted tokens beyond the capacity


class Routed(NamedTuple):
    """What `route` returns."""

    x_BTD: jax.Array  # after the block
    selection: Selection


def route(
    block_fn: Callable,
    x_BTD,
    scores_BT,
    capacity: int,
    *,
    gate: Callable | None = lambda scores: scores,
    wanted_BT=None,
    positions_BT=None,
    segment_ids_BT=None,
) -> Routed:
    """Apply any block to at most `capacity` tokens of each row. The others keep their bits.

    x'_t = x_t + gate(score_t) block_fn(x_selected)_t for the selected tokens (Mixture-of-Depths,
    Raposo et al. 2024, equation 1). The scores get gradients only through the gate.

    Args:
      block_fn: called as block_fn(x_BCD, tokens) with the selected tokens in time order. Returns
        what it adds to them, [B, C, D]. It must use the positions and the segment ids in the
        TokenInfo. Places with id 0 are unused: its result there is dropped, but must be finite,
        or the gradients of its parameters are NaN.
      x_BTD, scores_BT: the residual stream, and float32 router scores.
      capacity: C, a static number of tokens in [1, T].
      gate: maps scores to factors on the block's output. The default is the score itself. None: 1,
        with which the scores get no gradient.
      wanted_BT: bool, the choice of a causal rule, such as scores_BT > threshold. The first C of
        each row are processed. None: the C highest scores, a choice that depends on later tokens.
      positions_BT: int32; None: 0 to T - 1.
      segment_ids_BT: int32, 0 for padding, which is never selected; None: no padding.

    Returns:
      x_BTD after the block, and the Selection.

    Raises:
      ValueError: capacity is no int in [1, T], a shape or the dtype of wanted_BT is wrong, or the
        mesh of `jax.set_mesh` has an axis of another type than Auto.
    """
    check_axis_types()
    sides = {'scores_BT': scores_BT, 'wanted_BT': wanted_BT}
    _check_sides(x_BTD, sides | {'positions_BT': positions_BT, 'segment_ids_BT': segment_ids_BT})
    check_capacity(capacity, x_BTD.shape[1], 'capacity')
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2])
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
    real_BT = segment_ids_BT > 0
    if wanted_BT is None:
        selection = select_highest(scores_BT, segment_ids_BT, capacity)
        # In a row with fewer than C real tokens the highest scores include padding.
        real_BC = mask_to_indices(selection.selected_BT, capacity)
        selection = selection._replace(indices_BC=real_BC)
    else:
        selection = select_first(wanted_BT & real_BT, capacity)
    gates_BT = jnp.where(real_BT, 1.0 if gate is None else gate(scores_BT), 0)
    tokens = TokenInfo(positions_BT, segment_ids_BT)

    def without_aux(x_BCD, tokens):
        delta_BCD = block_fn(x_BCD, tokens)
        if (found := getattr(delta_BCD, 'shape', type(delta_BCD).__name__)) != x_BCD.shape:
            raise ValueError(f'block_fn returned {found}; must be an array of shape {x_BCD.shape}')
        return delta_BCD, None

    x_BTD, _ = update_tokens(without_aux, x_BTD, tokens, gates_BT, selection.indices_BC)
    return Routed(x_BTD, selection)


def _check_sides(x_BTD, sides):
    """Raise ValueError if arrays by name are not [B, T], or `wanted_BT` is not bool."""
    for name, side in sides.items():
        if side is not None and side.shape != x_BTD.shape[:2]:
            right = f'{x_BTD.shape[:2]}, the first two axes of x_BTD'
            raise ValueError(f'{name} of shape {side.shape} must have shape {right}')
    wanted_BT = sides['wanted_BT']
    if wanted_BT is not None and wanted_BT.dtype != bool:
        raise ValueError(f'wanted_BT of dtype {wanted_BT.dtype} must be bool, as scores_BT > 0 is')


def update_tokens(block_fn, x_BTD, tokens: TokenInfo, gates_BT, indices_BC):
    """Return x with gate * delta added at the indices, and the second output of the block."""
    picked = jax.tree.map(lambda side_BT: gather_tokens(side_BT, indices_BC), tokens)
    delta_BCD, aux = block_fn(gather_tokens(x_BTD, indices_BC), picked)
    update_BCD = gather_tokens(gates_BT, indices_BC)[..., None] * delta_BCD
    return scatter_add_tokens(x_BTD, indices_BC, update_BCD.astype(x_BTD.dtype)), aux


def select_highest(scores_BT, segment_ids_BT, num_selected: int, per_segment=False) -> Selection:
    """Select the C highest scores of each row, or share C among its segments; never padding."""
    length = scores_BT.shape[1]
    real_BT = segment_ids_BT > 0
    eligible_BT = jnp.where(real_BT, scores_BT, -jnp.inf)
    if per_segment:
        best_BT = segment_top_c(eligible_BT, segment_ids_BT, num_selected)
        indices_BC = mask_to_indices(best_BT, num_selected)
    else:
        indices_BC = select_top_c(eligible_BT, num_selected)
    indices_BC = checkpoint_name(indices_BC, CHOICE)
    selected_BT = indices_to_mask(indices_BC, length) & real_BT
    return Selection(indices_BC, selected_BT, jnp.zeros_like(selected_BT))


def select_first(wanted_BT, capacity: int) -> Selection:
    """Select the first `capacity` wanted tokens of each row, which is causal."""
    selected_BT = checkpoint_name(apply_capacity(wanted_BT, capacity), CHOICE)
    indices_BC = mask_to_indices(selected_BT, capacity)
    return Selection(indices_BC, selected_BT, wanted_BT & ~selected_BT)


def check_capacity(capacity: int, length: int, name: str = 'num_selected'):
    """Raise ValueError if C tokens cannot be selected from a row of `length`."""
    if not isinstance(capacity, int | np.integer) or not 1 <= capacity <= length:
        raise ValueError(f'{name}={capacity} must lie in [1, {length}], as a static int')


def select_top_c(scores_BT, num_selected: int):
    """Return the indices of the C highest scores, int32 [B, C], in time order.

    Of equal scores the earlier one counts as higher, and NaN as the highest score. Raises
    ValueError for scores of another shape and for C outside [1, T].
    """
    if jnp.ndim(scores_BT) != 2:
        raise ValueError(f'scores_BT of shape {jnp.shape(scores_BT)} must have shape [B, T]')
    check_capacity(num_selected, scores_BT.shape[1])
    # top_k compares bits: -0.0 ranks below 0.0, and a negative NaN below all.
    scores_BT = jnp.where(scores_BT == 0, 0.0, scores_BT)
    scores_BT = jnp.where(jnp.isnan(scores_BT), jnp.nan, scores_BT)
    indices_BC = map_batch_shards(lambda rows: jax.lax.top_k(rows, num_selected)[1], scores_BT)
    return jnp.sort(indices_BC, axis=1).astype(jnp.int32)


def segment_top_c(scores_BT, segment_ids_BT, num_selected: int):
    """Return a bool mask [B, T] of the highest scores of each contiguous segment, without padding.

    A segment of tokens [s, e) gets floor(C e / T) - floor(C s / T) places. NaN counts as highest.
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


def mask_to_indices(mask_BT, size: int):
    """Return the indices of the first True entries, int32 [B, size]; T or more names no token."""
    length = mask_BT.shape[1]
    index_T = jnp.arange(length)

    def row(mask_T):
        place_T = jnp.where(mask_T, jnp.cumsum(mask_T) - 1, size)
        nothing_C = length + jnp.arange(size)
        return nothing_C.at[place_T].set(index_T, mode='drop').astype(jnp.int32)

    return jax.vmap(row)(mask_BT)


def indices_to_mask(indices_BC, length: int):
    """Return a bool mask [B, T] that is True at the indices."""
    mask_BT = jnp.zeros((indices_BC.shape[0], length), bool)
    mark = jax.vmap(lambda mask_T, index_C: mask_T.at[index_C].set(True, mode='drop'))
    return mark(mask_BT, indices_BC)


def apply_capacity(wanted_BT, capacity: int):
    """Keep the first `capacity` wanted tokens of each row, which is causal."""
    if capacity >= wanted_BT.shape[1]:
        return wanted_BT
    return wanted_BT & (jnp.cumsum(wanted_BT, axis=1) <= capacity)


def mask_tokens(tokens: TokenInfo, keep_BT) -> TokenInfo:
    """Return the tokens with all but `keep_BT` turned into padding."""
    return tokens._replace(segment_ids_BT=jnp.where(keep_BT, tokens.segment_ids_BT, 0))


def static_sizes(length: int, capacity: int) -> tuple[int, ...]:
    """Return ascending sizes; under a causal rule a block runs at the smallest that is enough."""
    return tuple(sorted({min(capacity, length, -(-length // part)) for part in PARTS}))


def batch_buckets(batch: int) -> tuple[int, ...]:
    """Return ascending sizes; a decoding step runs at the smallest that holds the selected rows."""
    return (0, *static_sizes(batch, batch))


def smallest_size(needed, sizes: tuple[int, ...]):
    """Return the place in the ascending sizes of the smallest that is at least `needed`."""
    return jnp.sum(needed > jnp.array(sizes[:-1], needed.dtype))


def pad_tokens(tree, length: int):
    """Return arrays [B, C, ...] with zeros after their tokens, up to [B, length, ...]."""

    def pad(side):
        return jnp.pad(side, ((0, 0), (0, length - side.shape[1]), *[(0, 0)] * (side.ndim - 2)))

    return jax.tree.map(pad, tree)


def run_on_rows(run, skip, some_B, sides):
    """Run on some rows only: skip(sides), with the rows of `some_B` replaced by those of `run`.

    Args:
      run: called as run(sides of C rows, rows_C), with the smallest of `batch_buckets` for C. The
        rows are int32; B or more, at the end, names none. None: all rows, in order.
      skip: called as skip(sides); returns arrays [B, ...], as `run` does for its rows.
      some_B: bool, the rows to run on.
      sides: arrays [B, ...].
    """
    batch = some_B.shape[0]
    indices_B = mask_to_indices(some_B[None], batch)[0]

    def run_at(size):
        rows_C = indices_B[:size]

        def bucket(sides):
            if size == batch:
                return run(sides, None)
            if not size:
                return skip(sides)
            some = jax.tree.map(lambda side: side.at[rows_C].get(mode='clip'), sides)
            return jax.tree.map(
                lambda old, new: old.at[rows_C].set(new, mode='drop'),
                skip(sides),
                run(some, rows_C),
            )

        return bucket

    sizes = batch_buckets(batch)
    which = smallest_size(jnp.sum(some_B), sizes)
    return jax.lax.switch(which, [run_at(size) for size in sizes], sides)


_SORTED = {'indices_are_sorted': True, 'unique_indices': True}


def gather_tokens(x_BTX, indices_BC):
    """Return the tokens at the indices, [B, C, ...]; 0 for an index of T or more."""
    gather = jax.vmap(lambda x, index: x.at[index].get(**_SORTED, mode='fill', fill_value=0))
    return gather(x_BTX, indices_BC)


def scatter_tokens(x_BTX, indices_BC, update_BCX):
    """Return x with the tokens at the indices replaced."""
    scatter = jax.vmap(lambda x, index, new: x.at[index].set(new, **_SORTED, mode='drop'))
    return scatter(x_BTX, indices_BC, update_BCX)


def scatter_add_tokens(x_BTD, indices_BC, update_BCD):
    """Return x with `update` added at the indices. Distinct indices make reruns bit-equal."""
    scatter = jax.vmap(lambda x, index, new: x.at[index].add(new, **_SORTED, mode='drop'))
    return scatter(x_BTD, indices_BC, update_BCD)
