"""Attention of one new token over a cache, itself and its depth slots: one softmax."""

import functools

import jax
import jax.numpy as jnp


def check_slot_sides(slot_window: int, **sides):
    """Raises ValueError for slot keys without values or the reverse, or a negative window."""
    absent = [name for name, side in sides.items() if side is None]
    if len(absent) == 1:
        raise ValueError(f'depth slots need keys and values, and {absent[0]} is None')
    if slot_window < 0:
        raise ValueError(f'slot_window={slot_window} must be 0 (no limit) or more')


def decode_attention(
    q_C1NH,
    k_C1KH,
    v_C1KH,
    k_BKHS,
    v_BKHS,
    visible_CS,
    rows_C=None,
    k_depth_LC1KH=None,
    v_depth_LC1KH=None,
    slot_mask_LC1=None,
    slot_window: int = 0,
    q_depth_C1NH=None,
):
    """softmax over [q . k_cached, q . k_own, q_depth . k_depth] H^-1/2, applied to all values.

    In q's dtype, the softmax in float32. No array joins the cached keys with the others: XLA would
    copy the cache.

    Args:
      q_C1NH, k_C1KH, v_C1KH: of the new tokens, to which their own key is always visible.
      k_BKHS, v_BKHS: the cache, read only.
      visible_CS: bool, the places of the cache that are visible to a token.
      rows_C: int32, the row of the cache that a token reads, B and above (last) for none; None: C =
        B.
      k_depth_LC1KH, v_depth_LC1KH: the slots that earlier layers wrote at the new token, or None.
      slot_mask_LC1, slot_window, q_depth_C1NH: as in depth_attention.
    """
    check_slot_sides(slot_window, k_depth_LC1KH=k_depth_LC1KH, v_depth_LC1KH=v_depth_LC1KH)
    by_token = [q_C1NH, k_C1KH, v_C1KH, visible_CS]
    if k_depth_LC1KH is not None:
        slots = [k_depth_LC1KH, v_depth_LC1KH]
        slots += [] if slot_mask_LC1 is None else [slot_mask_LC1]
        by_token.append(q_C1NH if q_depth_C1NH is None else q_depth_C1NH)
        # Tokens come first, as in all that is read token by token.
        by_token += [jnp.moveaxis(side[-slot_window:], 0, 1)[:, :, 0] for side in slots]
    if rows_C is None:
        return _attend(k_BKHS, v_BKHS, *by_token)
    if jax.default_backend() != 'cpu':
        k_CKHS, v_CKHS = (side.at[rows_C].get(mode='clip') for side in (k_BKHS, v_BKHS))
        return _attend(k_CKHS, v_CKHS, *by_token)

    row_of = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=1)

    def one(i, o_C1NH):
        cached = (row_of(side, rows_C[i]) for side in (k_BKHS, v_BKHS))
        o_11NH = _attend(*cached, *(row_of(side, i) for side in by_token))
        return jax.lax.dynamic_update_slice_in_dim(o_C1NH, o_11NH, i, axis=0)

    # On a CPU gathering would copy the rows; one at a time they are read in place.
    num_rows = jnp.sum(rows_C < k_BKHS.shape[0])
    return jax.lax.fori_loop(0, num_rows, one, jnp.zeros_like(q_C1NH))


def _attend(k_BKHS, v_BKHS, q_B1NH, k_B1KH, v_B1KH, visible_BS, q_depth_B1NH=None, *slots):
    """One softmax over a row's cache, its new token and that token's slots (keys, values, a mask).

    Places are the innermost axis of the cache, which is the left operand of the second product, and
    its result is transposed last: XLA on CPUs is several times slower otherwise.
    """
    batch, _, heads, width = q_B1NH.shape
    kv_heads = k_B1KH.shape[2]
    wide = jnp.promote_types(q_B1NH.dtype, jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        k_BKHS, v_BKHS = k_BKHS.astype(wide), v_BKHS.astype(wide)

    def grouped(q_B1NH):
        return (q_B1NH.astype(wide) * width**-0.5).reshape(batch, kv_heads, -1, width)

    q_BKGH = grouped(q_B1NH)
    own_BKGX = jnp.einsum('bkgh,bxkh->bkgx', q_BKGH, k_B1KH.astype(wide))
    own_v_BXKH = v_B1KH.astype(wide)
    if slots:
        k_depth_BLKH, v_depth_BLKH = (side.astype(wide) for side in slots[:2])
        slots_BKGL = jnp.einsum('bkgh,blkh->bkgl', grouped(q_depth_B1NH), k_depth_BLKH)
        for mask_BL in slots[2:]:
            slots_BKGL = jnp.where(mask_BL[:, None, None], slots_BKGL, -jnp.inf)
            # A hidden slot may hold NaN, and 0 times NaN is NaN.
            v_depth_BLKH = jnp.where(mask_BL[:, :, None, None], v_depth_BLKH, 0)
        own_BKGX = jnp.concatenate([own_BKGX, slots_BKGL], axis=-1)
        own_v_BXKH = jnp.concatenate([own_v_BXKH, v_depth_BLKH], axis=1)
    # The queries are scaled after the product: half-precision ones would be rounded by it.
    q_cache_BKGH = q_B1NH.reshape(q_BKGH.shape).astype(k_BKHS.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    scores_BKGS = product('bkgh,bkhs->bkgs', q_cache_BKGH, k_BKHS) * width**-0.5
    scores_BKGS = jnp.where(visible_BS[:, None, None], scores_BKGS, -jnp.inf)
    highest_BKG = jnp.maximum(jnp.max(scores_BKGS, axis=-1), jnp.max(own_BKGX, axis=-1))
    weights_BKGS = jnp.exp(scores_BKGS - highest_BKG[..., None])
    own_BKGX = jnp.exp(own_BKGX - highest_BKG[..., None])
    total_BKG = jnp.sum(weights_BKGS, axis=-1) + jnp.sum(own_BKGX, axis=-1)
    o_BKHG = product('bkhs,bkgs->bkhg', v_BKHS, weights_BKGS.astype(v_BKHS.dtype))
    o_BKHG += jnp.einsum('bxkh,bkgx->bkhg', own_v_BXKH, own_BKGX)
    o_BKGH = jnp.swapaxes(o_BKHG / total_BKG[:, :, None], 2, 3)
    return o_BKGH.reshape(batch, 1, heads, width).astype(q_B1NH.dtype)
