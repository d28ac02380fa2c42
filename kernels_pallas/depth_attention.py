"""Attention over the sequence and the depth slots in one softmax: the one public function."""

import operator

import jax
import jax.numpy as jnp

from kernels_pallas.backends import IMPLEMENTATIONS, Shapes, choose
from kernels_pallas.joint_softmax import Parts, Static, joint_attention
from kernels_pallas.reference import reference_attention


def _check_sequence(q_BTNH, k_BSKH, v_BSKH, implementation, window, mask):
    if q_BTNH.ndim != 4 or k_BSKH.ndim != 4 or not k_BSKH.shape[2]:
        right = 'must be [B, T, N, H] and [B, S, K, H] with K of 1 or more'
        raise ValueError(f'queries {q_BTNH.shape} and keys {k_BSKH.shape} {right}')
    batch, length, heads, width = q_BTNH.shape
    if k_BSKH.shape != v_BSKH.shape or (k_BSKH.shape[0], k_BSKH.shape[3]) != (batch, width):
        raise ValueError(
            f'keys {k_BSKH.shape} and values {v_BSKH.shape} must both be [{batch}, S, K, {width}]'
        )
    if heads % k_BSKH.shape[2]:
        raise ValueError(f'{k_BSKH.shape[2]} key/value heads must divide {heads} query heads')
    if window < 0:
        raise ValueError(f'window={window} must be 0 (no limit) or more')
    known_parts = implementation is None or isinstance(implementation, Parts)
    if not known_parts and implementation not in IMPLEMENTATIONS:
        known = ', '.join(IMPLEMENTATIONS)
        raise ValueError(f'implementation={implementation!r} must be None or one of {known}')
    num_keys = k_BSKH.shape[1]
    if mask['key_positions_BS'] is None and num_keys not in (0, length):
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


def _check_sums(sums, k_depth_LBRKH):
    if sums is None:
        return
    dtypes = {'float32', 'float64', k_depth_LBRKH.dtype.name}
    found = [(getattr(side, 'shape', None), str(getattr(side, 'dtype', None))) for side in sums]
    right = [(k_depth_LBRKH.shape, found[0][1] if found else None)] * 2
    if found != right or found[0][1] not in dtypes:
        wanted = f'{k_depth_LBRKH.shape}, both float32 or both {k_depth_LBRKH.dtype.name}'
        raise ValueError(f'slot_sums {found} must be two arrays {wanted}')


def _check_slots(q_BTNH, k_BSKH, slots, options):
    batch, length, _, width = q_BTNH.shape
    absent = [name for name, side in slots.items() if side is None]
    if len(absent) == 1:
        raise ValueError(f'depth slots need keys and values, and {absent[0]} is None')
    if options['slot_window'] < 0:
        raise ValueError(f'slot_window={options["slot_window"]} must be 0 (no limit) or more')
    rows_BT = options['slot_rows_BT']
    wanted = {'slot_rows_BT': (batch, length), 'q_depth_BTNH': q_BTNH.shape}
    if absent:
        for name in ('num_slots', 'slot_mask_LBR', 'slot_sums', *wanted):
            if options[name] is not None:
                raise ValueError(f'{name} needs k_depth_LBRKH and v_depth_LBRKH, which are None')
        return
    (k_name, k_depth_LBRKH), (v_name, v_depth_LBRKH) = slots.items()
    tokens = length if rows_BT is None else 'R'
    shape = f'[L, {batch}, {tokens}, {k_BSKH.shape[2]}, {width}]'
    # Of L, and of R with rows, any number does.
    num_slots, _, num_tokens = (*k_depth_LBRKH.shape, 0, 0, 0)[:3]
    held = (num_slots, batch, length if rows_BT is None else num_tokens)
    if k_depth_LBRKH.shape != (*held, k_BSKH.shape[2], width):
        raise ValueError(f'{k_name} of shape {k_depth_LBRKH.shape} must be {shape}')
    wanted |= {v_name: k_depth_LBRKH.shape, 'slot_mask_LBR': held}
    _check_sums(options['slot_sums'], k_depth_LBRKH)
    for name, right in wanted.items():
        given = {v_name: v_depth_LBRKH, **options}[name]
        if given is not None and given.shape != right:
            raise ValueError(f'{name} of shape {given.shape} must be {right}')
    written = options['num_slots']
    if written is None:
        return
    if jnp.ndim(written) or not jnp.issubdtype(jnp.result_type(written), jnp.integer):
        given = f'shape {jnp.shape(written)} and dtype {jnp.result_type(written)}'
        raise ValueError(f'num_slots of {given} must be one integer')
    try:
        written = operator.index(written)
    except TypeError:  # traced
        return
    if not 0 <= written <= num_slots:
        raise ValueError(f'num_slots={written} must be from 0 to the {num_slots} slots given')


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
    """One softmax of each query over the sequence and over the depth slots of its own token.

    Args:
      q_BTNH: queries [B, T, N, H].
      k_BSKH, v_BSKH: keys and values [B, S, K, H]; query head h reads key/value head h // (N / K).
        S = 0: the slots alone.
      k_depth_LBRKH, v_depth_LBRKH: keys and values [L, B, R, K, H] that earlier layers wrote at
        R tokens; None or L = 0: the sequence alone. A query sees those of its own token only, by
        the same heads.
      num_slots: int, or a traced one: slots from this on are neither seen nor read; None: L.
      slot_window: only this many of the newest slots are seen; 0: no limit.
      slot_mask_LBR: bool [L, B, R], False hides a slot of a token; None hides none.
      slot_rows_BT: int32 [B, T], the place along R of each query's token, 0 or above, ascending and
        distinct in a row; R or above: no token, no slot is seen. None: R = T, each its own.
      q_depth_BTNH: queries [B, T, N, H] for the slots; None: q_BTNH.
      positions_BT: int [B, T], places in the original sequence, ascending in each row where
        key_positions_BS is None; default 0..T-1. Causality and window are taken between positions.
      key_positions_BS: int [B, S]; None: the keys are those of the queries' own tokens (S = T).
      segment_ids_BT: int [B, T], tokens of different ids do not see each other; None: one segment.
      key_segment_ids_BS: int [B, S], with key_positions_BS; None: the queries'.
      window: key s is seen by query t when 0 <= position_t - position_s < window; 0: no limit.
      scale: factor on the scores; None: H^-1/2.
      implementation: reference | xla | pallas | mosaic_gpu | mosaic_gpu_fused, or Parts; None: on a
        GPU what is fastest there (choice.py), as the log says once, else xla.
      return_lse: also return the natural-log logsumexp [B, N, T] in float32; differentiable. It
        costs: cuDNN's backward pass takes no cotangent of it, so that of XLA runs in its stead.
      thread_slots: also return the slots as given. Handed on to the next layer in their stead,
        their cotangents are the sums to which each layer's backward pass adds in place.
      slot_sums: two arrays of the slots' shape, of any floating dtype, whose values do not matter.
        They are returned as given, and it is their cotangents that the slots' gradients are added
        to, in their dtype; the slots themselves then have none. None: see thread_slots.

    Returns:
      o_BTNH in q's dtype (softmax in float32, or wider with q); a query that sees nothing gets
      zeros and a logsumexp of -inf. With more asked for: (o_BTNH, lse_BNT if return_lse,
      k_depth_LBRKH and v_depth_LBRKH if thread_slots, the two slot_sums if given).

    Raises:
      ValueError: shapes that do not fit, a negative window, num_slots beyond L, an implementation
        that is unknown or cannot do this.

    Source: Zhu et al. 2026, Mixture-of-Depths Attention, arXiv 2603.15619.
    """
    mask = {
        'positions_BT': positions_BT,
        'key_positions_BS': key_positions_BS,
        'segment_ids_BT': segment_ids_BT,
        'key_segment_ids_BS': key_segment_ids_BS,
    }
    _check_sequence(q_BTNH, k_BSKH, v_BSKH, implementation, window, mask)
    options = {
        'num_slots': num_slots,
        'slot_window': slot_window,
        'slot_mask_LBR': slot_mask_LBR,
        'slot_rows_BT': slot_rows_BT,
        'q_depth_BTNH': q_depth_BTNH,
        'slot_sums': slot_sums,
    }
    slots = {'k_depth_LBRKH': k_depth_LBRKH, 'v_depth_LBRKH': v_depth_LBRKH}
    _check_slots(q_BTNH, k_BSKH, slots, options)
    batch, length, _, width = q_BTNH.shape
    num_keys = k_BSKH.shape[1]
    ordered, consecutive = key_positions_BS is None, positions_BT is None
    if consecutive:
        positions_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if ordered:
        key_positions_BS = positions_BT[:, :num_keys]
    if key_segment_ids_BS is None and segment_ids_BT is not None:
        key_segment_ids_BS = segment_ids_BT[:, :num_keys]
    scale = width**-0.5 if scale is None else scale
    mask = (positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS)
    slots, slot_mask = None, None
    if k_depth_LBRKH is not None and k_depth_LBRKH.shape[0]:
        num_held = k_depth_LBRKH.shape[0]
        num_slots = num_held if num_slots is None else jnp.clip(num_slots, 0, num_held)
        slots = (k_depth_LBRKH, v_depth_LBRKH)
        slot_mask = (num_slots, slot_mask_LBR, slot_rows_BT)
    given = (q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH)
    if implementation == 'reference':
        read = slots
        if slot_sums is not None and slots is not None:
            read = [_through(slot, total) for slot, total in zip(slots, slot_sums, strict=True)]
        o, lse = reference_attention(*given, read, slot_mask, window, slot_window, scale)
    else:
        arrays = (q_BTNH, k_BSKH, v_BSKH, *(slots or ()))
        arrays += () if q_depth_BTNH is None else (q_depth_BTNH,)
        shapes = Shapes(
            q=q_BTNH.shape,
            k=k_BSKH.shape,
            num_slots=len(slots[0]) if slots else 0,
            dtypes=tuple(sorted({array.dtype.name for array in arrays})),
            ordered=ordered,
            consecutive=consecutive,
            segments=segment_ids_BT is not None,
            window=window,
            scale=scale,
            slot_window=slot_window if slots else 0,
            slot_rows=slots[0].shape[2] if slots and slot_rows_BT is not None else 0,
            slot_mask=slots is not None and slot_mask_LBR is not None,
            slot_queries=slots is not None and q_depth_BTNH is not None,
            sums='' if slot_sums is None or not slots else slot_sums[0].dtype.name,
            lse=return_lse,
        )
        parts = choose(implementation, shapes)
        static = Static(window, ordered, slot_window, scale, return_lse, parts)
        sums = None if slot_sums is None else tuple(slot_sums)
        o, lse, slots, slot_sums = joint_attention(static, *given, slots, slot_mask, sums)
    if slots is not None:
        k_depth_LBRKH, v_depth_LBRKH = slots
    result = (o, lse) if return_lse else (o,)
    result += (k_depth_LBRKH, v_depth_LBRKH) if thread_slots else ()
    result += () if slot_sums is None else tuple(slot_sums)
    return result if len(result) > 1 else o


@jax.custom_vjp
def _through(slot, total):
    """The slot, as wide as `total` at least: its gradient is that of `total`."""
    return slot.astype(jnp.promote_types(slot.dtype, total.dtype))


def _through_forward(slot, total):
    return _through(slot, total), (slot[:0], total[:0])


def _through_backward(residuals, cotangent):
    slot, total = (jnp.zeros((*cotangent.shape,), side.dtype) for side in residuals)
    return slot, cotangent.astype(total.dtype)


_through.defvjp(_through_forward, _through_backward)
