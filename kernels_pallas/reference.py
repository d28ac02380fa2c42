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


def reference_attention(q_BTNH, k_BSKH, v_BSKH, visible_BTS, scale):
    """softmax(q k^T scale) v over the visible keys, query head h reading key/value head h // G.

    Args:
      q_BTNH: queries [B, T, N, H].
      k_BSKH, v_BSKH: keys and values [B, S, K, H], K dividing N.
      visible_BTS: bool [B, T, S].
      scale: factor on the scores.

    Returns:
      o_BTNH in the dtype of q, and the natural-log logsumexp lse_BNT in float32. A query that sees
      no key gets zeros and -inf.
    """
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTNH, out_dtype = q_BTNH.astype(dtype), q_BTNH.dtype
    k_BSNH = jnp.repeat(k_BSKH.astype(dtype), group, axis=2)
    v_BSNH = jnp.repeat(v_BSKH.astype(dtype), group, axis=2)
    scores_BNTS = jnp.einsum('btnh,bsnh->bnts', q_BTNH, k_BSNH, precision='highest') * scale
    visible_B1TS = visible_BTS[:, None]
    scores_BNTS = jnp.where(visible_B1TS, scores_BNTS, -jnp.inf)
    highest_BNT1 = jnp.max(scores_BNTS, axis=-1, keepdims=True)
    highest_BNT1 = jnp.where(jnp.isfinite(highest_BNT1), highest_BNT1, 0.0)
    weights_BNTS = jnp.where(visible_B1TS, jnp.exp(scores_BNTS - highest_BNT1), 0.0)
    total_BNT1 = jnp.sum(weights_BNTS, axis=-1, keepdims=True)
    some_BNT1 = total_BNT1 > 0
    weights_BNTS /= jnp.where(some_BNT1, total_BNT1, 1.0)
    o_BTNH = jnp.einsum('bnts,bsnh->btnh', weights_BNTS, v_BSNH, precision='highest')
    lse_BNT1 = jnp.where(some_BNT1, jnp.log(jnp.where(some_BNT1, total_BNT1, 1.0)), -jnp.inf)
    return o_BTNH.astype(out_dtype), (highest_BNT1 + lse_BNT1)[..., 0]
