"""Causal grouped-query attention: one function, one implementation by name."""

import jax.numpy as jnp

from kernels_pallas.reference import reference_attention, visibility
from kernels_pallas.xla import xla_attention

IMPLEMENTATIONS = ('reference', 'xla')


def _check(q_BTNH, k_BSKH, v_BSKH, implementation, window, mask):
    batch, length, heads, width = q_BTNH.shape
    if k_BSKH.shape != v_BSKH.shape or (k_BSKH.shape[0], k_BSKH.shape[3]) != (batch, width):
        raise ValueError(
            f'keys {k_BSKH.shape} and values {v_BSKH.shape} must both be [{batch}, S, K, {width}]'
        )
    if heads % k_BSKH.shape[2]:
        raise ValueError(f'{k_BSKH.shape[2]} key/value heads must divide {heads} query heads')
    if window < 0:
        raise ValueError(f'window={window} must be 0 (no limit) or more')
    if implementation not in ('auto', *IMPLEMENTATIONS):
        known = ', '.join(IMPLEMENTATIONS)
        raise ValueError(f'implementation={implementation!r} must be one of auto, {known}')
    num_keys = k_BSKH.shape[1]
    if mask['key_positions_BS'] is None and num_keys != length:
        raise ValueError(f'{num_keys} keys for {length} queries need key_positions_BS')
    if mask['segment_ids_BT'] is None and mask['key_segment_ids_BS'] is not None:
        raise ValueError('key_segment_ids_BS need segment_ids_BT beside them')
    if mask['key_segment_ids_BS'] is None and mask['segment_ids_BT'] is not None:
        if mask['key_positions_BS'] is not None:
            raise ValueError('segment_ids_BT with key_positions_BS need key_segment_ids_BS too')
    for name, ids in mask.items():
        wanted = (batch, num_keys if name.endswith('BS') else length)
        if ids is not None and ids.shape != wanted:
            raise ValueError(f'{name} of shape {ids.shape} must be {wanted}')


def attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    *,
    positions_BT=None,
    key_positions_BS=None,
    segment_ids_BT=None,
    key_segment_ids_BS=None,
    window: int = 0,
    scale: float | None = None,
    implementation: str = 'auto',
    return_lse: bool = False,
):
    """softmax(q k^T scale) v over the keys that causality, window and segments leave visible.

    Args:
      q_BTNH: queries [B, T, N, H].
      k_BSKH, v_BSKH: keys and values [B, S, K, H]; query head h reads key/value head h // (N / K).
      positions_BT: int [B, T], places in the original sequence, ascending in each row where
        key_positions_BS is None; default 0..T-1. Causality and window are taken between positions.
      key_positions_BS: int [B, S]; None: the keys are those of the queries' own tokens (S = T).
      segment_ids_BT: int [B, T], tokens of different ids do not see each other; None: one segment.
      key_segment_ids_BS: int [B, S], with key_positions_BS; None: the queries'.
      window: key s is seen by query t when 0 <= position_t - position_s < window; 0: no limit.
      scale: factor on the scores; None: H^-1/2.
      implementation: auto (xla) | reference | xla.
      return_lse: also return the natural-log logsumexp [B, N, T] in float32; differentiable.

    Returns:
      o_BTNH in q's dtype (softmax in float32), or (o_BTNH, lse_BNT).

    Raises:
      ValueError: shapes that do not fit, a negative window, an unknown implementation.
    """
    mask = {
        'positions_BT': positions_BT,
        'key_positions_BS': key_positions_BS,
        'segment_ids_BT': segment_ids_BT,
        'key_segment_ids_BS': key_segment_ids_BS,
    }
    _check(q_BTNH, k_BSKH, v_BSKH, implementation, window, mask)
    ordered = key_positions_BS is None
    batch, length = q_BTNH.shape[:2]
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if ordered:
        key_positions_BS = positions_BT
    if key_segment_ids_BS is None:
        key_segment_ids_BS = segment_ids_BT
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    mask = (positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS)
    if implementation == 'reference':
        result = reference_attention(q_BTNH, k_BSKH, v_BSKH, visibility(*mask, window), scale)
    else:
        result = xla_attention(q_BTNH, k_BSKH, v_BSKH, mask, window, ordered, scale)
    return result if return_lse else result[0]
