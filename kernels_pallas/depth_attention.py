"""The public function: attention over the sequence and the depth slots in one softmax."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.backends import IMPLEMENTATIONS, Parts, Shapes, choose
from kernels_pallas.decode import check_arrays, check_slot_sides, check_window
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static, joint_attention
from kernels_pallas.reference import reference_attention


def _check(arrays, num_slots, slot_sums, window, slot_window, scale, implementation):
    """Raise a ValueError of one line if `arrays`, by name, or other arguments do not fit."""
    check_window('window', window)
    _check_scale(scale)
    if not isinstance(implementation, Parts | None) and implementation not in IMPLEMENTATIONS:
        known = ', '.join(IMPLEMENTATIONS)
        raise ValueError(f'implementation={implementation!r} must be None or one of {known}')
    sides = {name: arrays[name] for name in ('k_depth_LBRKH', 'v_depth_LBRKH')}
    check_slot_sides(slot_window, **sides)
    own_rows = arrays['slot_rows_BT'] is None
    sizes = check_arrays(arrays, {'R': 'T'} if own_rows else {})
    own_keys = arrays['key_positions_BS'] is None
    if own_keys and sizes['S'] not in (0, sizes['T']):
        raise ValueError(f'{sizes["S"]} keys for {sizes["T"]} queries need key_positions_BS')
    queries, keys = (arrays[name] is not None for name in ('segment_ids_BT', 'key_segment_ids_BS'))
    if keys and not queries:
        raise ValueError('key_segment_ids_BS need segment_ids_BT too')
    if keys and own_keys:
        raise ValueError('key_segment_ids_BS need key_positions_BS; own keys have segment_ids_BT')
    if queries and not keys and not own_keys:
        raise ValueError('segment_ids_BT with key_positions_BS need key_segment_ids_BS too')
    if (slots := arrays['k_depth_LBRKH']) is not None:
        if slot_sums is not None:
            _check_sums(slot_sums, slots.shape, slots.dtype.name)
        if num_slots is not None:
            _check_num_slots(num_slots, len(slots))
        return
    others = {name: arrays[name] for name in ('slot_mask_LBR', 'slot_rows_BT', 'q_depth_BTNH')}
    for name, value in (others | {'num_slots': num_slots, 'slot_sums': slot_sums}).items():
        if value is not None:
            raise ValueError(f'{name} needs k_depth_LBRKH and v_depth_LBRKH, which are None')


def _check_scale(scale):
    if isinstance(scale, jax.core.Tracer):
        raise ValueError('scale is traced and must be a number; multiply q by a traced factor')
    try:
        fits = scale is None or math.isfinite(scale)
    except (TypeError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f'scale={scale!r} must be a finite number, or None for H^-1/2')


def _check_sums(sums, shape, own):
    found = [(getattr(side, 'shape', None), str(getattr(side, 'dtype', None))) for side in sums]
    if found not in [[(shape, dtype)] * 2 for dtype in ('float32', 'float64', own)]:
        wanted = f'{shape}, both float32 or both {own}'
        raise ValueError(f'slot_sums {found} must be two arrays {wanted}')


def _check_num_slots(num_slots, most):
    if jnp.ndim(num_slots) or not jnp.issubdtype(jnp.result_type(num_slots), jnp.integer):
        given = f'shape {jnp.shape(num_slots)} and dtype {jnp.result_type(num_slots)}'
        raise ValueError(f'num_slots of {given} must be one integer')
    if not isinstance(num_slots, jax.core.Tracer) and not 0 <= num_slots <= most:
        raise ValueError(f'num_slots={num_slots} must be from 0 to the {most} slots given')


def depth_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    k_depth_LBRKH=None,
    v_depth_LBRKH=None,
    *,
    num_slots=None,
    slot_window: int = 0,
    slot_mask_LBR=None,
    slot_rows_BT=None,
    q_depth_BTNH=None,
    positions_BT=None,
    key_positions_BS=None,
    segment_ids_BT=None,
    key_segment_ids_BS=None,
    window: int = 0,
    scale: float | None = None,
    implementation: str | Parts | None = None,
    return_lse: bool = False,
    thread_slots: bool = False,
    slot_sums=None,
):
    """Compute one softmax of each query over the sequence and the depth slots of its own token.

    Mixture-of-Depths Attention (Zhu et al. 2026, arXiv 2603.15619).

    Args:
      q_BTNH: queries [B, T, N, H].
      k_BSKH, v_BSKH: keys and values [B, S, K, H]; query head h reads key/value head h // (N / K).
        S = 0: only the slots.
      k_depth_LBRKH, v_depth_LBRKH: keys and values [L, B, R, K, H] that earlier layers wrote at R
        tokens. A query sees those of its own token. None or L = 0: only the sequence.
      num_slots: int, may be traced. Slots from this index on are hidden and not read. None: L.
      slot_window: number of visible slots, the newest; 0: no limit.
      slot_mask_LBR: bool [L, B, R], False hides a slot of a token. None hides none.
      slot_rows_BT: int32 [B, T], index along R of each query's token, ascending and distinct in a
        batch row, 0 or above. R or above: no token, and no visible slot. None: R = T, each its own.
      q_depth_BTNH: queries [B, T, N, H] for the slots. None: q_BTNH.
      positions_BT: int [B, T], positions in the original sequence; causality and window compare
        positions. Ascending in each row if key_positions_BS is None. None: 0..T-1.
      key_positions_BS: int [B, S]. None: the keys are those of the queries' own tokens (S = T).
      segment_ids_BT: int [B, T]; keys of other segments are hidden. None: one segment.
      key_segment_ids_BS: int [B, S], with key_positions_BS. None: those of the queries.
      window: key s is visible to query t if 0 <= position_t - position_s < window; 0: no limit.
      scale: number, not traced, by which scores are multiplied. None: H^-1/2.
      implementation: reference | xla | pallas | mosaic_gpu | mosaic_gpu_fused, or Parts. None: xla,
        or on a GPU the fastest (backends.py); the log names it once.
      return_lse: also return the natural-log logsumexp [B, N, T] in float32. It is differentiable;
        XLA's backward pass then replaces cuDNN's.
      thread_slots: also return the slots unchanged. Pass these to the next layer: the gradients of
        all layers are then added in one buffer. Without it, and without slot_sums, Hopper kernels
        overwrite the slots' gradients instead of adding to them.
      slot_sums: two arrays of the slots' shape, in float32 or wider or in the slots' dtype, whose
        values do not matter. They are returned, and the slots' gradients are added to the
        cotangents of those returned.

    Returns:
      o_BTNH in q's dtype. A query with nothing visible returns o = 0 and lse = -inf. If more is
      requested: (o_BTNH, lse_BNT if return_lse, k_depth_LBRKH and v_depth_LBRKH if thread_slots,
      the two slot_sums if given).

    Raises:
      ValueError: shapes, dtypes or numbers do not fit, or the implementation does not support them.

    Forward-mode differentiation (`jax.jvp`) works with implementation='reference' only.
    """
    arrays = {
        'q_BTNH': q_BTNH,
        'k_BSKH': k_BSKH,
        'v_BSKH': v_BSKH,
        'k_depth_LBRKH': k_depth_LBRKH,
        'v_depth_LBRKH': v_depth_LBRKH,
        'slot_mask_LBR': slot_mask_LBR,
        'slot_rows_BT': slot_rows_BT,
        'q_depth_BTNH': q_depth_BTNH,
        'positions_BT': positions_BT,
        'key_positions_BS': key_positions_BS,
        'segment_ids_BT': segment_ids_BT,
        'key_segment_ids_BS': key_segment_ids_BS,
    }
    _check(arrays, num_slots, slot_sums, window, slot_window, scale, implementation)
    (batch, length, _, width), num_keys = q_BTNH.shape, k_BSKH.shape[1]
    ordered, consecutive = key_positions_BS is None, positions_BT is None
    if consecutive:
        positions_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if ordered:
        key_positions_BS = positions_BT[:, :num_keys]
    if key_segment_ids_BS is None and segment_ids_BT is not None:
        key_segment_ids_BS = segment_ids_BT[:, :num_keys]
    mask = SequenceMask(positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS)
    scale, window = float(width**-0.5 if scale is None else scale), int(window)
    sums = None if slot_sums is None else tuple(slot_sums)
    sides, held = (k_depth_LBRKH, v_depth_LBRKH), 0 if k_depth_LBRKH is None else len(k_depth_LBRKH)
    if num_slots is None:
        num_slots = held
    else:
        if jnp.result_type(num_slots).name not in ('int32', 'int64'):  # loops count in these
            num_slots = jnp.asarray(num_slots, jnp.int32)
        num_slots = jnp.clip(num_slots, 0, held)
    slots = Slots(*sides, num_slots, slot_mask_LBR, slot_rows_BT) if held else None
    slot_window = int(slot_window) if held else 0
    if implementation == 'reference' or not batch * length:  # kernels need at least one token
        read = slots
        if sums is not None and slots is not None:
            wide = (_through(side, total) for side, total in zip(sides, sums, strict=True))
            read = Slots(*wide, *slots[2:])
        o, lse = reference_attention(
            q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, read, window, slot_window, scale
        )
    else:
        arrays = q_BTNH, k_BSKH, v_BSKH, q_depth_BTNH, *(sides if held else ())
        shapes = Shapes(
            q=q_BTNH.shape,
            k=k_BSKH.shape,
            num_slots=held,
            dtypes=tuple(sorted({x.dtype.name for x in arrays if x is not None})),
            ordered=ordered,
            consecutive=consecutive,
            segments=segment_ids_BT is not None,
            window=window,
            scale=scale,
            slot_window=slot_window,
            slot_rows=k_depth_LBRKH.shape[2] if held and slot_rows_BT is not None else 0,
            slot_mask=bool(held) and slot_mask_LBR is not None,
            slot_queries=bool(held) and q_depth_BTNH is not None,
            sums=_sums_dtype(k_depth_LBRKH, thread_slots, sums) if held else '',
            lse=return_lse,
        )
        parts = choose(implementation, shapes)
        static = Static(window, ordered, slot_window, scale, return_lse, parts, thread_slots)
        o, lse, read, sums = joint_attention(
            static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, sums
        )
        sides = read if held and thread_slots else sides
    results = (o, *((lse,) if return_lse else ()), *(sides if thread_slots else ()), *(sums or ()))
    return results if len(results) > 1 else o


def _sums_dtype(slots_LBRKH, threaded, sums):
    """Return the dtype of the sums to which the slots' gradients are added, or '' without sums."""
    if sums is None and not threaded:
        return ''
    return (slots_LBRKH if sums is None else sums[0]).dtype.name


@jax.custom_vjp
def _through(slot, total):
    """Return the slot, at least as wide as `total`, which receives its cotangent."""
    return slot.astype(jnp.promote_types(slot.dtype, total.dtype))


_through.defvjp(
    lambda slot, total: (_through(slot, total), total[:0]),
    lambda empty, cotangent: (None, cotangent.astype(empty.dtype)),
)
