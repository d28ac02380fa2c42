"""The depth slots of each query's own token: they join the softmax that the sequence began.

Only the visible slots are read, in a loop of as many rounds as they need though `num_slots` is
traced, and their gradients are added in place into the arrays given for it.

The forms are the cheapest in CPU time of those tried for XLA on CPUs (JAX 0.10.2, float32, one run
of single operations at B, T, N, K, H = 4, 1024, 6, 2, 64 and 16, 256, 4, 2, 32). A product of the
queries with one slot's keys took 0.4 to 1 times as long per slot as one with several slots' keys,
and a fifth to a third of a multiply and sum over one slot. Sums over slots or over the queries of a
head are written out term by term: with two slots or more, einsum took 1.3 to 5 times as long.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax

# Longer rows are computed by tiles of tokens, of as many numbers in q: 32 MiB in float32.
TILE_NUMBERS = 2**23
# Forward only: 15 to 30% less CPU time per slot than one at a time; the backward pass gained
# under a tenth from 4 at the first of those shapes and is kept simple.
SLOTS_A_ROUND = 4


def _sum(terms):
    return functools.reduce(operator.add, terms)


def _first(num_slots, slot_window):
    return jnp.maximum(num_slots - slot_window, 0) if slot_window else 0


def _place(slot, rows_BT):
    """Indices [B, T, 2] of a slot and each query's token."""
    return jnp.stack([jnp.full_like(rows_BT, slot), rows_BT], axis=-1)


def _box(buffer_LBR, slot, tile):
    """Start and sizes of one slot of a tile's tokens."""
    start, size = tile
    rest = buffer_LBR.shape[3:]
    return (slot, 0, start, *(0 for _ in rest)), (1, buffer_LBR.shape[1], size, *rest)


def _read(buffer_LBR, slot, rows_BT, tile):
    """One slot [B, T, ...] of the queries' tokens; a token out of range gives that of the last."""
    if rows_BT is None and tile is None:
        return lax.dynamic_index_in_dim(buffer_LBR, slot, keepdims=False)
    if rows_BT is None:
        return lax.dynamic_slice(buffer_LBR, *_box(buffer_LBR, slot, tile))[0]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, buffer_LBR.ndim - 1)),
        collapsed_slice_dims=(0, 2),
        start_index_map=(0, 2),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(0,),
    )
    sizes = (1, 1, 1, *buffer_LBR.shape[3:])
    return lax.gather(
        buffer_LBR,
        _place(slot, rows_BT),
        numbers,
        sizes,
        indices_are_sorted=True,
        mode='clip',
    )


def _add(total_LBRKH, slot, rows_BT, tile, update_BTKH):
    """The update added to one slot of the queries' tokens; that of one out of range is dropped."""
    update_BTKH = update_BTKH.astype(total_LBRKH.dtype)
    if rows_BT is None:
        update_BTKH += _read(total_LBRKH, slot, None, tile)
        start, _ = _box(total_LBRKH, slot, tile or (0, total_LBRKH.shape[2]))
        return lax.dynamic_update_slice(total_LBRKH, update_BTKH[None], start)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    place = _place(slot, rows_BT)
    # Of distinct tokens, as depth_attention asks: reruns on a GPU then give equal bits.
    return lax.scatter_add(
        total_LBRKH,
        place,
        update_BTKH,
        numbers,
        indices_are_sorted=True,
        unique_indices=True,
        mode='drop',
    )


def _slot(slot, buffers, mask_LBR, rows_BT, tile, wide):
    """(visible [B, T, 1, 1] or None for all, key [B, T, K, H], value) of one slot."""
    visible_BT = None if rows_BT is None else rows_BT < buffers[0].shape[2]
    if mask_LBR is not None:
        mask_BT = _read(mask_LBR, slot, rows_BT, tile)
        visible_BT = mask_BT if visible_BT is None else visible_BT & mask_BT
    sides = [_read(buffer, slot, rows_BT, tile).astype(wide) for buffer in buffers]
    if visible_BT is None:
        return None, *sides
    visible_BT11 = visible_BT[:, :, None, None]
    # What a hidden slot holds may be NaN, and 0 times NaN is NaN.
    return visible_BT11, *(jnp.where(visible_BT11, side, 0) for side in sides)


def _hide(scores_BTKG, visible_BT11):
    return scores_BTKG if visible_BT11 is None else jnp.where(visible_BT11, scores_BTKG, -jnp.inf)


def _dots(x_BTKGH, y_BTKH):
    return jnp.einsum('btkgh,btkh->btkg', x_BTKGH, y_BTKH)


def _group(x_BTNH, kv_heads, wide):
    batch, length, heads, width = x_BTNH.shape
    return x_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, width).astype(wide)


def _by_token(x_BNT, kv_heads):
    batch, heads, length = x_BNT.shape
    return jnp.moveaxis(x_BNT, 1, 2).reshape(batch, length, kv_heads, heads // kv_heads)


def _by_tiles(shape_BTNH, step, carry):
    """step(tile, carry) over the tiles of tokens, (first, number); one tile of all is None."""
    batch, length, heads, width = shape_BTNH
    size = max(1, TILE_NUMBERS // (batch * heads * width))
    if length <= size:
        return step(None, carry)
    carry = lax.fori_loop(0, length // size, lambda i, carry: step((i * size, size), carry), carry)
    rest = length % size
    return step((length - rest, rest), carry) if rest else carry


def _cut(x, tile, axis=1):
    if x is None or tile is None:
        return x
    # Heads and width as one axis: else XLA transposes all of an array for the tiles' sake.
    flat = x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x
    cut = lax.dynamic_slice_in_dim(flat, *tile, axis)
    return cut.reshape(x.shape[0], tile[1], *x.shape[2:]) if x.ndim == 4 else cut


def _put(whole, tile, part, axis=1):
    part = part.astype(whole.dtype)
    if tile is None:
        return part
    flat = [x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x for x in (whole, part)]
    return lax.dynamic_update_slice_in_dim(*flat, tile[0], axis).reshape(whole.shape)


def depth_forward(q_BTNH, o_BTNH, lse_BNT, buffers, num_slots, mask_LBR, rows_BT, window, scale):
    """Continue the softmax of (o, lse) over the slots.

    Args:
      q_BTNH: queries for the slots.
      o_BTNH, lse_BNT: of the sequence alone, lse float32 or wider.
      buffers: (k_depth_LBRKH, v_depth_LBRKH).
      num_slots, mask_LBR, rows_BT, window, scale: as in depth_attention, num_slots from 0 to L.

    Returns:
      The joint (o_BTNH, lse_BNT), in the dtypes given, and the buffers, available only when they
      have been read: what is then written into them is written in place.
    """

    def step(tile, carry):
        whole_o, whole_lse, buffers = carry
        o, lse, buffers = _forward_tile(
            _cut(q_BTNH, tile),
            _cut(whole_o, tile),
            _cut(whole_lse, tile, axis=2),
            buffers,
            num_slots,
            mask_LBR,
            _cut(rows_BT, tile),
            tile,
            window,
            scale,
        )
        return _put(whole_o, tile, o), _put(whole_lse, tile, lse, axis=2), buffers

    return _by_tiles(q_BTNH.shape, step, (o_BTNH, lse_BNT, buffers))


def _forward_tile(
    q_BTNH, o_BTNH, lse_BNT, buffers, num_slots, mask_LBR, rows_BT, tile, window, scale
):
    """As depth_forward, of a tile of tokens of the buffers; o as wide as lse."""
    kv_heads, wide = buffers[0].shape[3], lse_BNT.dtype
    q_BTKGH = _group(q_BTNH, kv_heads, wide) * scale
    lse_BTKG = _by_token(lse_BNT, kv_heads)

    def join(start, size, carry):
        o, highest, total, buffers = carry
        slots = [_slot(start + i, buffers, mask_LBR, rows_BT, tile, wide) for i in range(size)]
        scores = [_hide(_dots(q_BTKGH, key), visible) for visible, key, _ in slots]
        new = functools.reduce(jnp.maximum, scores, highest)
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        weights, keep = [jnp.exp(score - finite) for score in scores], jnp.exp(highest - finite)
        values = [value[:, :, :, None] for _, _, value in slots]
        terms = [w[..., None] * value for w, value in zip(weights, values, strict=True)]
        o, total = o * keep[..., None] + _sum(terms), total * keep + _sum(weights)
        # Without the barrier the loop would be seen to return its buffers unread.
        return o, new, total, lax.optimization_barrier(buffers)

    size, first = min(SLOTS_A_ROUND, buffers[0].shape[0]), _first(num_slots, window)
    rounds = (num_slots - first) // size
    rest = first + rounds * size
    total_BTKG = (lse_BTKG > -jnp.inf).astype(wide)
    carry = _group(o_BTNH, kv_heads, wide), lse_BTKG, total_BTKG, buffers
    carry = lax.fori_loop(0, rounds, lambda i, carry: join(first + i * size, size, carry), carry)
    carry = lax.fori_loop(rest, num_slots, lambda slot, carry: join(slot, 1, carry), carry)
    o_BTKGH, highest_BTKG, total_BTKG, buffers = carry
    o_BTKGH /= jnp.where(total_BTKG > 0, total_BTKG, 1.0)[..., None]
    lse_BTN = (highest_BTKG + jnp.log(total_BTKG)).reshape(q_BTNH.shape[:3])
    return o_BTKGH.reshape(q_BTNH.shape), jnp.moveaxis(lse_BTN, 2, 1), buffers


def depth_backward(
    q_BTNH, do_BTNH, lse_BNT, delta_BNT, buffers, sums, num_slots, mask_LBR, rows_BT, window, scale
):
    """Gradients through the slots' part of the softmax.

    Args:
      q_BTNH, buffers, num_slots, mask_LBR, rows_BT, window, scale: as in depth_forward.
      do_BTNH: the output's cotangent.
      lse_BNT, delta_BNT: the joint logsumexp, finite, and rowsum(do o) - dlse.
      sums: (dk_depth_LBRKH, dv_depth_LBRKH) to add to.

    Returns:
      dq_BTNH in q's dtype, and the two sums.
    """

    def step(tile, carry):
        whole_dq, *sums = carry
        dq, *sums = _backward_tile(
            _cut(q_BTNH, tile),
            _cut(do_BTNH, tile),
            _cut(lse_BNT, tile, axis=2),
            _cut(delta_BNT, tile, axis=2),
            buffers,
            sums,
            num_slots,
            mask_LBR,
            _cut(rows_BT, tile),
            tile,
            window,
            scale,
        )
        return _put(whole_dq, tile, dq), *sums

    return _by_tiles(q_BTNH.shape, step, (jnp.zeros_like(q_BTNH), *sums))


def _backward_tile(
    q_BTNH,
    do_BTNH,
    lse_BNT,
    delta_BNT,
    buffers,
    sums,
    num_slots,
    mask_LBR,
    rows_BT,
    tile,
    window,
    scale,
):
    """As depth_backward, of a tile of tokens of the buffers and sums; dq as wide as lse."""
    kv_heads, wide = buffers[0].shape[3], lse_BNT.dtype
    q_BTKGH, do_BTKGH = _group(q_BTNH, kv_heads, wide) * scale, _group(do_BTNH, kv_heads, wide)
    lse_BTKG, delta_BTKG = _by_token(lse_BNT, kv_heads), _by_token(delta_BNT, kv_heads)
    heads = range(q_BTKGH.shape[3])

    def add(total, slot, weights_BTKG, x_BTKGH):
        terms = [weights_BTKG[..., g, None] * x_BTKGH[..., g, :] for g in heads]
        return _add(total, slot, rows_BT, tile, _sum(terms))

    def one(slot, carry):
        dq, dk_sum, dv_sum = carry
        visible, key, value = _slot(slot, buffers, mask_LBR, rows_BT, tile, wide)
        weights = jnp.exp(_hide(_dots(q_BTKGH, key) - lse_BTKG, visible))
        dscores = weights * (_dots(do_BTKGH, value) - delta_BTKG)
        dq = dq + dscores[..., None] * key[:, :, :, None]
        return dq, add(dk_sum, slot, dscores, q_BTKGH), add(dv_sum, slot, weights, do_BTKGH)

    carry = jnp.zeros_like(q_BTKGH), *sums
    carry = lax.fori_loop(_first(num_slots, window), num_slots, one, carry)
    dq_BTKGH, dk_sum, dv_sum = carry
    return (dq_BTKGH * scale).reshape(q_BTNH.shape), dk_sum, dv_sum
