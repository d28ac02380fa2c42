"""Attention of new tokens over a cache, each other and their depth slots: one softmax."""

import functools

import jax
import jax.numpy as jnp

_QUERIES = 32  # of a row whose scores exist at a time


def check_slot_sides(slot_window: int, **sides):
    """Raises ValueError for slot keys without values or the reverse, or a negative window."""
    absent = [name for name, side in sides.items() if side is None]
    if len(absent) == 1:
        raise ValueError(f'depth slots need keys and values, and {absent[0]} is None')
    if slot_window < 0:
        raise ValueError(f'slot_window={slot_window} must be 0 (no limit) or more')


def decode_attention(
    q_CTNH,
    k_CTKH,
    v_CTKH,
    k_BKHS,
    v_BKHS,
    visible_CTS,
    visible_CTT=None,
    rows_C=None,
    k_depth_LCTKH=None,
    v_depth_LCTKH=None,
    slot_mask_LCT=None,
    slot_window: int = 0,
    q_depth_CTNH=None,
):
    """softmax over [q . k_cached, q . k_own, q_depth . k_depth] H^-1/2, applied to all values.

    In q's dtype, the softmax in float32. No array joins the cached keys with the others: XLA would
    copy the cache.

    Args:
      q_CTNH, k_CTKH, v_CTKH: of T new tokens of C rows.
      k_BKHS, v_BKHS: the cache, read only.
      visible_CTS: bool, the places of the cache that are visible to a token.
      visible_CTT: bool, the new tokens (last axis) that are visible to a token, itself always;
        None: itself alone, which needs T = 1.
      rows_C: int32, the row of the cache that tokens read, B and above (last) for none; None: C =
        B.
      k_depth_LCTKH, v_depth_LCTKH: the slots that earlier layers wrote at the new tokens, or None.
      slot_mask_LCT, slot_window, q_depth_CTNH: as in depth_attention.

    Raises:
      ValueError: one side of the slots is missing, or T > 1 without visible_CTT.
    """
    check_slot_sides(slot_window, k_depth_LCTKH=k_depth_LCTKH, v_depth_LCTKH=v_depth_LCTKH)
    rows, length = q_CTNH.shape[:2]
    if visible_CTT is None:
        if length > 1:
            raise ValueError(f'{length} new tokens of a row need visible_CTT, and it is None')
        visible_CTT = jnp.ones((rows, 1, 1), bool)
    by_row = [q_CTNH, k_CTKH, v_CTKH, visible_CTS, visible_CTT]
    if k_depth_LCTKH is not None:
        slots = [k_depth_LCTKH, v_depth_LCTKH]
        slots += [] if slot_mask_LCT is None else [slot_mask_LCT]
        by_row.append(q_CTNH if q_depth_CTNH is None else q_depth_CTNH)
        # Rows come first, as in all that is read row by row.
        by_row += [jnp.moveaxis(side[-slot_window:], 0, 1) for side in slots]
    if rows_C is None:
        return _attend(k_BKHS, v_BKHS, *by_row)
    if jax.default_backend() != 'cpu':
        k_CKHS, v_CKHS = (side.at[rows_C].get(mode='clip') for side in (k_BKHS, v_BKHS))
        return _attend(k_CKHS, v_CKHS, *by_row)

    row_of = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=1)

    def one(i, o_CTNH):
        cached = (row_of(side, rows_C[i]) for side in (k_BKHS, v_BKHS))
        o_1TNH = _attend(*cached, *(row_of(side, i) for side in by_row))
        return jax.lax.dynamic_update_slice_in_dim(o_CTNH, o_1TNH, i, axis=0)

    # On a CPU gathering would copy the rows; one at a time they are read in place.
    num_rows = jnp.sum(rows_C < k_BKHS.shape[0])
    return jax.lax.fori_loop(0, num_rows, one, jnp.zeros_like(q_CTNH))


def _attend(k_BKHS, v_BKHS, q_BTNH, k_BTKH, v_BTKH, *by_query):
    """`_attend_block` by _QUERIES of the T tokens at a time: their scores stay in a CPU's cache."""
    length = q_BTNH.shape[1]
    if length <= _QUERIES or length % _QUERIES:
        return _attend_block(k_BKHS, v_BKHS, q_BTNH, k_BTKH, v_BTKH, *by_query)
    axes = 1, 1, 1, 1, 2, 2, 2  # of the tokens: queries, two masks, slot queries, slots
    sides = list(zip((q_BTNH, *by_query), axes[: 1 + len(by_query)], strict=True))

    def block(i):
        q, *others = (
            jax.lax.dynamic_slice_in_dim(side, i * _QUERIES, _QUERIES, axis) for side, axis in sides
        )
        return _attend_block(k_BKHS, v_BKHS, q, k_BTKH, v_BTKH, *others)

    o_XBQNH = jax.lax.map(block, jnp.arange(length // _QUERIES))
    return jnp.moveaxis(o_XBQNH, 0, 1).reshape(q_BTNH.shape)


def _attend_block(
    k_BKHS, v_BKHS, q_BTNH, k_BTKH, v_BTKH, visible_BTS, visible_BTT, q_depth_BTNH=None, *slots
):
    """One softmax over a row's cache, its new tokens and their slots (keys, values, a mask).

    Places are the innermost axis of the cache, which is the left operand of the second product, and
    its result is transposed last: XLA on CPUs is several times slower otherwise.
    """
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BTKH.shape[2]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        k_BKHS, v_BKHS = k_BKHS.astype(wide), v_BKHS.astype(wide)

    def grouped(q_BTNH):
        return jnp.swapaxes(q_BTNH.reshape(batch, length, kv_heads, -1, width), 1, 2)

    def hide(scores_BKTGX, visible_BTX):
        return jnp.where(visible_BTX[:, None, :, None], scores_BKTGX, -jnp.inf)

    q_BKTGH = grouped(q_BTNH.astype(wide) * width**-0.5)
    own_BKTGX = jnp.einsum('bktgh,bxkh->bktgx', q_BKTGH, k_BTKH.astype(wide))
    parts = [hide(own_BKTGX, visible_BTT)]
    if slots and slots[0].shape[1]:
        k_depth_BLTKH, v_depth_BLTKH = (side.astype(wide) for side in slots[:2])
        q_depth_BKTGH = grouped(q_depth_BTNH.astype(wide) * width**-0.5)
        slots_BKTGL = jnp.einsum('bktgh,bltkh->bktgl', q_depth_BKTGH, k_depth_BLTKH)
        for mask_BLT in slots[2:]:
            slots_BKTGL = hide(slots_BKTGL, jnp.swapaxes(mask_BLT, 1, 2))
            # A hidden slot may hold NaN, and 0 times NaN is NaN.
            v_depth_BLTKH = jnp.where(mask_BLT[..., None, None], v_depth_BLTKH, 0)
        parts.append(slots_BKTGL)
    # The queries are scaled after the product: half-precision ones would be rounded by it.
    q_cache_BKTGH = grouped(q_BTNH).astype(k_BKHS.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    scores_BKTGS = product('bktgh,bkhs->bktgs', q_cache_BKTGH, k_BKHS) * width**-0.5
    parts = [hide(scores_BKTGS, visible_BTS), *parts]
    highest_BKTG = functools.reduce(jnp.maximum, [jnp.max(part, axis=-1) for part in parts])
    parts = [jnp.exp(part - highest_BKTG[..., None]) for part in parts]
    total_BKTG = sum(jnp.sum(part, axis=-1) for part in parts)
    weights_BKTGS, own_BKTGX, *of_slots = parts
    o_BKHTG = product('bkhs,bktgs->bkhtg', v_BKHS, weights_BKTGS.astype(v_BKHS.dtype))
    o_BKHTG += jnp.einsum('bxkh,bktgx->bkhtg', v_BTKH.astype(wide), own_BKTGX)
    for weights_BKTGL in of_slots:
        o_BKHTG += jnp.einsum('bltkh,bktgl->bkhtg', v_depth_BLTKH, weights_BKTGL)
    o_BTKGH = jnp.transpose(o_BKHTG / total_BKTG[:, :, None], (0, 3, 1, 4, 2))
    return o_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)
