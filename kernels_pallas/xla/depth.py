"""The depth part by XLA: continues the sequence part's softmax over the slots of each token.

A loop reads only the visible slots, and adds their gradients in place. Sums over slots or queries
are written out term by term: einsum took 1.3 to 5 times as long on CPUs (JAX 0.10.2, float32).
The docstrings of depth_forward and depth_backward are the contract of every depth part.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax

# Numbers of q in a tile of tokens, for longer sequences: 32 MiB in float32.
TILE_NUMBERS = 2**23
# Forward only: 15 to 30% less CPU time a slot than one at a time; backward gained under a tenth.
SLOTS_PER_ROUND = 4


def order_before_writes(arrays, step):
    """Return the arrays; none is available before all are.

    Use it in a loop that reads a part of a large array and then adds to the array in place: pass
    both through here after the read. Otherwise XLA on CPUs may read last, and copy the array.
    `step` is any traced integer.
    """
    # XLA on CPUs drops a bare barrier before it decides on copies. It cannot see that this loop
    # runs no iteration.
    return lax.while_loop(
        lambda carry: carry[0] < step,
        lambda carry: lax.optimization_barrier((carry[0] + 1, carry[1])),
        (step, arrays),
    )[1]


def depth_forward(q_BTNH, o_BTNH, lse_BNT, slots, window, scale, interpret=False):
    """Continues the softmax of (o_BTNH, lse_BNT) over the slots, a `joint_softmax.Slots`.

    Args:
      q_BTNH: queries for the slots.
      o_BTNH, lse_BNT: output and natural-log logsumexp of the sequence part.
      slots: keys, values and their visibility.
      window: number of visible slots, the newest; 0: all.
      scale: factor on the scores.
      interpret: runs a kernel in its interpreter; no effect here.

    Returns:
      The joint o_BTNH and lse_BNT in the dtypes given, and the slots' (keys, values). These are
      available only after the slots have been read, so that later writes to them are in place.
    """
    del interpret
    kv_heads, wide = slots.k_LBRKH.shape[3], lse_BNT.dtype
    size, first = min(SLOTS_PER_ROUND, slots.k_LBRKH.shape[0]), first_slot(slots.num, window)
    rounds = (slots.num - first) // size
    rest = first + rounds * size

    def one_tile(tile, carry):
        whole_o, whole_lse, sides = carry
        q_BTKGH = _group(_cut(q_BTNH, tile), kv_heads, wide) * scale
        lse_BTKG = _by_token(_cut(whole_lse, tile, axis=2), kv_heads)
        rows_BT = _cut(slots.rows_BT, tile)

        def join(start, size, carry):
            o, highest, total, sides = carry
            visible = slots._replace(k_LBRKH=sides[0], v_LBRKH=sides[1], rows_BT=rows_BT)
            read = [_slot(visible, start + i, tile, wide) for i in range(size)]
            scores = [_hide(_dots(q_BTKGH, key), seen) for seen, key, _ in read]
            new = functools.reduce(jnp.maximum, scores, highest)
            finite = jnp.where(new == -jnp.inf, 0.0, new)
            weights, keep = [jnp.exp(score - finite) for score in scores], jnp.exp(highest - finite)
            values = [value[:, :, :, None] for _, _, value in read]
            terms = [w[..., None] * value for w, value in zip(weights, values, strict=True)]
            o, total = o * keep[..., None] + _sum(terms), total * keep + _sum(weights)
            # Without the barrier XLA would see that the loop returns the slots unchanged.
            return o, new, total, lax.optimization_barrier(sides)

        total_BTKG = (lse_BTKG > -jnp.inf).astype(wide)
        carry = _group(_cut(whole_o, tile), kv_heads, wide), lse_BTKG, total_BTKG, sides
        carry = lax.fori_loop(
            0, rounds, lambda i, carry: join(first + i * size, size, carry), carry
        )
        carry = lax.fori_loop(rest, slots.num, lambda slot, carry: join(slot, 1, carry), carry)
        o_BTKGH, highest_BTKG, total_BTKG, sides = carry
        o_BTKGH /= jnp.where(total_BTKG > 0, total_BTKG, 1.0)[..., None]
        lse_BNT = jnp.moveaxis(_joined(highest_BTKG + jnp.log(total_BTKG)), 2, 1)
        return _put(whole_o, tile, _joined(o_BTKGH)), _put(whole_lse, tile, lse_BNT, axis=2), sides

    return _by_tiles(q_BTNH.shape, one_tile, (o_BTNH, lse_BNT, slots[:2]))


def depth_backward(
    q_BTNH, o_BTNH, do_BTNH, lse_BNT, dlse_BNT, slots, sums, dq_BTNH, window, scale, interpret=False
):
    """Return dq_BTNH plus the gradient through the slots, and `sums` plus the slots' gradients.

    Args:
      q_BTNH, slots, window, scale, interpret: as in depth_forward.
      o_BTNH, lse_BNT: joint output and logsumexp; lse_BNT is finite.
      do_BTNH, dlse_BNT: their cotangents; dlse_BNT may be None for zeros.
      sums: two arrays of the slots' shape for keys and values, updated in place; None: zeros in
        the slots' dtype.
      dq_BTNH: gradient through the sequence; None: zeros. The result has q's dtype.
    """
    del interpret
    kv_heads, wide = slots.k_LBRKH.shape[3], lse_BNT.dtype
    sums = [jnp.zeros_like(side) for side in slots[:2]] if sums is None else sums

    def one_tile(tile, carry):
        whole_dq, *sums = carry
        read = slots._replace(rows_BT=_cut(slots.rows_BT, tile))
        q_BTKGH, o_BTKGH, do_BTKGH, before_BTKGH = (
            _group(_cut(x, tile), kv_heads, wide) for x in (q_BTNH, o_BTNH, do_BTNH, whole_dq)
        )
        q_BTKGH *= scale
        lse_BTKG = _by_token(_cut(lse_BNT, tile, axis=2), kv_heads)
        delta_BTKG = jnp.sum(do_BTKGH * o_BTKGH, axis=-1)
        if dlse_BNT is not None:
            delta_BTKG -= _by_token(_cut(dlse_BNT, tile, axis=2), kv_heads)

        def add(total, slot, weights_BTKG, x_BTKGH):
            heads = range(x_BTKGH.shape[3])
            terms = [weights_BTKG[..., g, None] * x_BTKGH[..., g, :] for g in heads]
            return _add(total, slot, read.rows_BT, tile, _sum(terms))

        def one(slot, carry):
            dq, dk_sum, dv_sum = carry
            visible, key, value = _slot(read, slot, tile, wide)
            weights = jnp.exp(_hide(_dots(q_BTKGH, key) - lse_BTKG, visible))
            dscores = weights * (_dots(do_BTKGH, value) - delta_BTKG)
            dq = dq + dscores[..., None] * key[:, :, :, None]
            return dq, add(dk_sum, slot, dscores, q_BTKGH), add(dv_sum, slot, weights, do_BTKGH)

        carry = jnp.zeros_like(q_BTKGH), *sums
        dq_BTKGH, *sums = lax.fori_loop(first_slot(slots.num, window), slots.num, one, carry)
        return _put(whole_dq, tile, _joined(before_BTKGH + dq_BTKGH * scale)), *sums

    dq_BTNH = jnp.zeros_like(q_BTNH) if dq_BTNH is None else dq_BTNH.astype(q_BTNH.dtype)
    return _by_tiles(q_BTNH.shape, one_tile, (dq_BTNH, *sums))


def first_slot(num_slots, window):
    """Return the index of the first visible slot."""
    return jnp.maximum(num_slots - window, 0) if window else 0


_sum = functools.partial(functools.reduce, operator.add)


def _dots(x_BTKGH, y_BTKH):
    return jnp.einsum('btkgh,btkh->btkg', x_BTKGH, y_BTKH)


def _hide(scores_BTKG, visible_BT11):
    return scores_BTKG if visible_BT11 is None else jnp.where(visible_BT11, scores_BTKG, -jnp.inf)


def _group(x_BTNH, kv_heads, wide):
    batch, length, heads, width = x_BTNH.shape
    return x_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, width).astype(wide)


def _joined(x_BTKG):
    return x_BTKG.reshape(*x_BTKG.shape[:2], -1, *x_BTKG.shape[4:])


def _by_token(x_BNT, kv_heads):
    batch, heads, length = x_BNT.shape
    return jnp.moveaxis(x_BNT, 1, 2).reshape(batch, length, kv_heads, heads // kv_heads)


def _slot(slots, slot, tile, wide):
    """Return (visible [B, T, 1, 1], None for all; key [B, T, K, H]; value) of one slot."""
    seen = [] if slots.rows_BT is None else [slots.rows_BT < slots.k_LBRKH.shape[2]]
    if slots.mask_LBR is not None:
        seen.append(_read(slots.mask_LBR, slot, slots.rows_BT, tile))
    sides = [_read(side, slot, slots.rows_BT, tile).astype(wide) for side in slots[:2]]
    if not seen:
        return None, *sides
    visible_BT11 = functools.reduce(operator.and_, seen)[:, :, None, None]
    # A hidden slot may hold NaN, and 0 times NaN is NaN.
    return visible_BT11, *(jnp.where(visible_BT11, side, 0) for side in sides)


def _box(side_LBR, slot, tile):
    """Return (start, sizes) of one slot of a tile of tokens (None: of all)."""
    start, size = tile or (0, side_LBR.shape[2])
    rest = side_LBR.shape[3:]
    return (slot, 0, start, *[0] * len(rest)), (1, side_LBR.shape[1], size, *rest)


def _place(slot, rows_BT):
    """Return the indices [B, T, 2] of a slot of the queries' tokens."""
    return jnp.stack([jnp.full_like(rows_BT, slot), rows_BT], axis=-1)


def _read(side_LBR, slot, rows_BT, tile):
    """Return one slot [B, T, ...] of the queries' tokens; out of range: the last one."""
    if rows_BT is None:
        return lax.squeeze(lax.dynamic_slice(side_LBR, *_box(side_LBR, slot, tile)), [0])
    rest = tuple(range(2, side_LBR.ndim - 1))
    numbers = lax.GatherDimensionNumbers(rest, (0, 2), (0, 2), (1,), (0,))
    sizes = (1, 1, 1, *side_LBR.shape[3:])
    place = _place(slot, rows_BT)
    return lax.gather(side_LBR, place, numbers, sizes, indices_are_sorted=True, mode='clip')


def _add(total_LBRKH, slot, rows_BT, tile, update_BTKH):
    """Add to one slot of the queries' tokens; updates of rows out of range are dropped."""
    update_BTKH = update_BTKH.astype(total_LBRKH.dtype)
    if rows_BT is None:
        update_BTKH += _read(total_LBRKH, slot, None, tile)
        start, _ = _box(total_LBRKH, slot, tile)
        return lax.dynamic_update_slice(total_LBRKH, update_BTKH[None], start)
    numbers = lax.ScatterDimensionNumbers((2, 3), (0, 2), (0, 2), (1,), (0,))
    # depth_attention requires distinct tokens, so reruns on a GPU give equal bits.
    order = {'indices_are_sorted': True, 'unique_indices': True, 'mode': 'drop'}
    return lax.scatter_add(total_LBRKH, _place(slot, rows_BT), update_BTKH, numbers, **order)


def _by_tiles(shape_BTNH, step, carry):
    """Fold step(tile, carry) over tiles of tokens, (first, number); tile None: one has all."""
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
    # Heads and width are one axis: otherwise XLA transposes the whole array for the tiles.
    flat = x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x
    cut = lax.dynamic_slice_in_dim(flat, *tile, axis)
    return cut.reshape(x.shape[0], tile[1], *x.shape[2:]) if x.ndim == 4 else cut


def _put(whole, tile, part, axis=1):
    part = part.astype(whole.dtype)
    if tile is None:
        return part
    flat = [x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x for x in (whole, part)]
    return lax.dynamic_update_slice_in_dim(*flat, tile[0], axis).reshape(whole.shape)
