"""The equation of the attention, with which every backend is compared, and the allowed errors."""

import jax.numpy as jnp

# (factor on the error of XLA's form, error that is always allowed, relative to the largest value)
_OUTPUTS, _GRADIENTS = (2, 2e-6), (3, 1e-5)
# Upper limit by dtype: three roundings in bfloat16, or in the TF32 of the tensor cores.
_MOST = {'bfloat16': 0.02, 'float16': 0.02, 'float32': 4e-3}


def allowed_error(dtype: str, gradient: bool, plain_error: float, largest: float) -> float:
    """Return the largest error that a kernel's result may have.

    Args:
      dtype: of the kernel's inputs: bfloat16, float16 or float32.
      gradient: whether the result is a gradient.
      plain_error: largest error of XLA's form in the same dtype.
      largest: largest absolute value of the exact result.
    """
    factor, least = _GRADIENTS if gradient else _OUTPUTS
    largest = max(1.0, largest)
    return min(_MOST[dtype] * largest, factor * plain_error + least * largest)


def visibility(positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS, window):
    """Return bool [B, T, S]: the key is not later, in the same segment and inside the window."""
    distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    visible_BTS = distance_BTS >= 0
    if window:
        visible_BTS &= distance_BTS < window
    if segment_ids_BT is not None:
        visible_BTS &= segment_ids_BT[:, :, None] == key_segment_ids_BS[:, None, :]
    return visible_BTS


def slot_visibility(shape_LBR, num_slots, slot_window, slot_mask_LBR, slot_rows_BT):
    """Return bool [B, T, L]: the query's own slot is visible; `shape_LBR` is (L, B, R)."""
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
    """Return x_LBT..., each query's token along axis R; without a token, the last one."""
    if slot_rows_BT is None:
        return x_LBR
    rows_LBT = jnp.minimum(slot_rows_BT, x_LBR.shape[2] - 1)[None]
    return jnp.take_along_axis(x_LBR, jnp.expand_dims(rows_LBT, tuple(range(3, x_LBR.ndim))), 2)


def reference_attention(
    q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, window, slot_window, scale
):
    """Compute one softmax over visible keys and visible slots; head h reads key/value head h // G.

    With k, v, k_depth, v_depth repeated G times along the heads, and hidden scores at -inf,

        s = concat(einsum('btnh,bsnh->btns', q, k), einsum('btnh,lbtnh->btnl', q_depth, k_depth))
        p, p_depth = split(softmax(s * scale), [S])
        o = einsum('btns,bsnh->btnh', p, v) + einsum('btnl,lbtnh->btnh', p_depth, v_depth)

    Returns o_BTNH in the dtype of q, and the natural-log logsumexp lse_BNT in float32 or wider. A
    query with nothing visible returns o = 0 and lse = -inf.
    """
    (batch, length, heads, _), kv_heads = q_BTNH.shape, k_BSKH.shape[2]
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    visible_BTX = visibility(*mask, window)
    k_BTLKH = v_BTLKH = jnp.zeros((batch, length, 0, *k_BSKH.shape[2:]), dtype)
    if slots is not None:
        visible_BTL = slot_visibility(
            slots.k_LBRKH.shape[:3], slots.num, slot_window, slots.mask_LBR, slots.rows_BT
        )
        visible_BTX = jnp.concatenate([visible_BTX, visible_BTL], axis=2)
        sides = [jnp.moveaxis(_own(x, slots.rows_BT), 0, 2) for x in slots[:2]]
        # A hidden slot may hold NaN, and 0 times NaN is NaN.
        k_BTLKH, v_BTLKH = (jnp.where(visible_BTL[..., None, None], x, 0) for x in sides)
    group = heads // kv_heads
    k_BTLNH, v_BTLNH = (jnp.repeat(x.astype(dtype), group, axis=3) for x in (k_BTLKH, v_BTLKH))
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
