"""Attention as its equation: every score at once, in float32, slow and plain. The tests' ruler."""

import jax.numpy as jnp


def visibility(positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS, window):
    """Which keys a query sees: none later, none of another segment, none `window` or more before.

    Args:
      positions_BT: int [B, T], the queries' places in the original sequence.
      key_positions_BS: int [B, S], the keys' places.
      segment_ids_BT, key_segment_ids_BS: int [B, T] and [B, S], or None for one segment.
      window: keys seen, the query's own among them; 0 for no limit.

    Returns:
      visible_BTS: bool [B, T, S].
    """
    distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    visible_BTS = distance_BTS >= 0
    if window:
        visible_BTS &= distance_BTS < window
    if segment_ids_BT is not None:
        visible_BTS &= segment_ids_BT[:, :, None] == key_segment_ids_BS[:, None, :]
    return visible_BTS


def slot_visibility(shape_LBR, num_slots, slot_window, slot_mask_LBR, slot_rows_BT):
    """Which slots of its own token a query sees: those written, the newest, the unmasked.

    Args:
      shape_LBR: (L, B, R).
      num_slots: int, slots written.
      slot_window: newest slots seen; 0 for no limit.
      slot_mask_LBR: bool [L, B, R], slots of tokens to see, or None.
      slot_rows_BT: int [B, T], the queries' tokens, R and above for none, or None for T = R.

    Returns:
      visible_BTL: bool [B, T, L].
    """
    slots, batch, tokens = shape_LBR
    index_L = jnp.arange(slots)
    visible_L = index_L < num_slots
    if slot_window:
        visible_L &= index_L >= num_slots - slot_window
    visible_LBR = jnp.broadcast_to(visible_L[:, None, None], (slots, batch, tokens))
    if slot_mask_LBR is not None:
        visible_LBR &= slot_mask_LBR
    if slot_rows_BT is not None:
        visible_LBR = _own(visible_LBR, slot_rows_BT) & (slot_rows_BT < tokens)[None]
    return jnp.moveaxis(visible_LBR, 0, 2)


def _own(x_LBR, slot_rows_BT):
    """x_LBT..., each query's token along axis R; a query of no token gets some other's."""
    if slot_rows_BT is None:
        return x_LBR
    rows_LBT = jnp.minimum(slot_rows_BT, x_LBR.shape[2] - 1)[None]
    return jnp.take_along_axis(x_LBR, jnp.expand_dims(rows_LBT, tuple(range(3, x_LBR.ndim))), 2)


def reference_attention(
    q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask, window, slot_window, scale
):
    """One softmax over visible keys and visible slots, query head h reading key/value head h // G.

    With k, v, k_depth, v_depth repeated G times along the heads, and hidden scores at -inf,
      s = concat(einsum('btnh,bsnh->btns', q, k), einsum('btnh,lbtnh->btnl', q_depth, k_depth))
      p, p_depth = split(softmax(s * scale), [S])
      o = einsum('btns,bsnh->btnh', p, v) + einsum('btnl,lbtnh->btnh', p_depth, v_depth)

    Args:
      q_BTNH: queries [B, T, N, H].
      k_BSKH, v_BSKH: keys and values [B, S, K, H], K dividing N.
      mask: (positions [B, T], key_positions [B, S], segment ids [B, T], key segment ids [B, S]),
        the last two None for one segment.
      q_depth_BTNH: queries for the slots; None: q_BTNH.
      slots: (k_depth_LBRKH, v_depth_LBRKH), or None.
      slot_mask: (num_slots, slot_mask_LBR or None, slot_rows_BT or None), or None with the slots.
      window, slot_window: keys and newest slots seen; 0 for no limit.
      scale: factor on the scores.

    Returns:
      o_BTNH in the dtype of q, and the natural-log logsumexp lse_BNT in float32 or wider. A query
      that sees nothing gets zeros and -inf.
    """
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    if slots is None:
        none_LBTKH = jnp.zeros((0, *q_BTNH.shape[:2], *k_BSKH.shape[2:]), k_BSKH.dtype)
        slots, slot_mask = (none_LBTKH, none_LBTKH), (0, None, None)
    num_slots, slot_mask_LBR, slot_rows_BT = slot_mask
    visible_BTL = slot_visibility(
        slots[0].shape[:3], num_slots, slot_window, slot_mask_LBR, slot_rows_BT
    )
    visible_BTX = jnp.concatenate([visibility(*mask, window), visible_BTL], axis=2)
    slots = [jnp.moveaxis(_own(x, slot_rows_BT), 0, 2) for x in slots]
    # What a hidden slot holds may be NaN, and 0 times NaN is NaN.
    slots = [jnp.where(visible_BTL[..., None, None], x, 0) for x in slots]
    k_BTLNH, v_BTLNH = (jnp.repeat(x.astype(dtype), group, axis=3) for x in slots)
    k_BSNH, v_BSNH = (jnp.repeat(x.astype(dtype), group, axis=2) for x in (k_BSKH, v_BSKH))
    q = q_BTNH.astype(dtype)
    q_depth = q if q_depth_BTNH is None else q_depth_BTNH.astype(dtype)
    by_key_BTNS = jnp.einsum('btnh,bsnh->btns', q, k_BSNH, precision='highest')
    by_slot_BTNL = jnp.einsum('btnh,btlnh->btnl', q_depth, k_BTLNH, precision='highest')
    visible_BT1X = visible_BTX[:, :, None]
    scores_BTNX = jnp.concatenate([by_key_BTNS, by_slot_BTNL], axis=-1) * scale
    scores_BTNX = jnp.where(visible_BT1X, scores_BTNX, -jnp.inf)
    highest_BTN1 = jnp.max(scores_BTNX, axis=-1, keepdims=True, initial=-jnp.inf)
    highest_BTN1 = jnp.where(jnp.isfinite(highest_BTN1), highest_BTN1, 0.0)
    weights_BTNX = jnp.where(visible_BT1X, jnp.exp(scores_BTNX - highest_BTN1), 0.0)
    total_BTN1 = jnp.sum(weights_BTNX, axis=-1, keepdims=True)
    some_BTN1 = total_BTN1 > 0
    weights_BTNX /= jnp.where(some_BTN1, total_BTN1, 1.0)
    weights_BTNS, weights_BTNL = jnp.split(weights_BTNX, [k_BSKH.shape[1]], axis=-1)
    o_BTNH = jnp.einsum('btns,bsnh->btnh', weights_BTNS, v_BSNH, precision='highest')
    o_BTNH += jnp.einsum('btnl,btlnh->btnh', weights_BTNL, v_BTLNH, precision='highest')
    lse_BTN1 = jnp.where(some_BTN1, jnp.log(jnp.where(some_BTN1, total_BTN1, 1.0)), -jnp.inf)
    lse_BNT = jnp.moveaxis((highest_BTN1 + lse_BTN1)[..., 0], 2, 1)
    return o_BTNH.astype(q_BTNH.dtype), lse_BNT


# Times the error of XLA's form, and the least, relative to the largest value.
_OUTPUTS, _GRADIENTS = (2, 2e-6), (3, 1e-5)
# Whatever XLA's error is: three roundings of bfloat16, or of the tensor cores' float32.
_MOST = {'bfloat16': 0.02, 'float16': 0.02, 'float32': 4e-3}


def allowed_error(dtype: str, gradient: bool, plain_error: float, largest: float) -> float:
    """The largest absolute error that a result may have.

    Args:
      dtype: of the inputs, such as bfloat16.
      gradient: the result is a gradient, not an output.
      plain_error: largest absolute error of XLA's form in that dtype; NaN counts as no bound.
      largest: largest absolute value of the exact result; below 1 it counts as 1.
    """
    factor, least = _GRADIENTS if gradient else _OUTPUTS
    largest = max(1.0, largest)
    return min(_MOST[dtype] * largest, factor * plain_error + least * largest)
