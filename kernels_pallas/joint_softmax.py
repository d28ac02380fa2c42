"""Sequence and depth slots in one softmax, each part by a backend of its own.

The depth part continues the softmax that the sequence part began. With the joint output and
logsumexp, and delta = rowsum(do o) - dlse, the backward pass of either part is that of plain
attention, and no gradient passes through a merge of the two:
  P = exp(q k^T scale - lse),  dV = P^T do,  dS = P (do V^T - delta),  dQ = dS K scale.
"""

import functools
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.xla import sequence as xla_sequence


class Parts(NamedTuple):
    """What computes an attention.

    Attributes:
      sequence: xla | cudnn.
      depth: xla | pallas | mosaic_gpu.
      fused: the forward pass is one kernel for both.
      interpret: kernels run in their interpreter, for machines that cannot run them.
    """

    sequence: str = 'xla'
    depth: str = 'xla'
    fused: bool = False
    interpret: bool = False


class Static(NamedTuple):
    """What a program is compiled for.

    Attributes:
      window: keys seen, the query's own among them; 0 for no limit.
      ordered: key i belongs to query i and positions ascend, so that index order is time order.
      slot_window: newest slots seen; 0 for all.
      scale: factor on the scores.
      lse_returned: the logsumexp is a result too, and has a cotangent.
      parts: Parts.
    """

    window: int
    ordered: bool
    slot_window: int
    scale: float
    lse_returned: bool
    parts: Parts = Parts()


# Modules of depth_forward and depth_backward.
DEPTH = {
    'xla': ('xla_depth', 'xla_depth'),
    'pallas': ('pallas_depth', 'pallas_depth'),
    'mosaic_gpu': ('mosaic_depth', 'mosaic_depth_backward'),
}


def _module(name):
    """A backend. Imported when it is asked for: Pallas takes a second to import."""
    return importlib.import_module(f'kernels_pallas.{name}')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def joint_attention(
    static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask, slot_sums
):
    """Same result and shapes as reference_attention, and the slots and their sums as given.

    The cotangent of the returned sums, or of the returned slots where there are no sums, is what
    the slots' gradients are added to, in place. With sums, that of the slots is handed on.

    Args:
      static: Static.
      q_BTNH, k_BSKH, v_BSKH, q_depth_BTNH: as there; q_depth_BTNH None: q_BTNH.
      mask: (positions [B, T], key_positions [B, S], segment ids [B, T], key segment ids [B, S]),
        the last two None for one segment.
      slots: (k_depth_LBRKH, v_depth_LBRKH), or None.
      slot_mask: (num_slots, slot_mask_LBR or None, slot_rows_BT or None), or None with the slots.
      slot_sums: two arrays of the slots' shape whose values do not matter, or None.
    """
    given = (q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask, slot_sums)
    return _forward(static, *given)[0]


def _depth(static, way):
    """depth_forward or depth_backward."""
    name = DEPTH[static.parts.depth][way == 'backward']
    function = getattr(_module(name), f'depth_{way}')
    options = {} if static.parts.depth == 'xla' else {'interpret': static.parts.interpret}
    return functools.partial(function, window=static.slot_window, scale=static.scale, **options)


def _sequence_forward(static, q_BTNH, k_BSKH, v_BSKH, mask):
    if static.parts.sequence == 'cudnn' and mask[2] is not None:
        return _module('cudnn_packed').sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static)
    if static.parts.sequence == 'cudnn':
        cudnn = _module('cudnn')
        return cudnn.sequence_forward(q_BTNH, k_BSKH, v_BSKH, static.window, static.scale)
    return xla_sequence.sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static)


def _fused_forward(static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask):
    return _module('mosaic_fused').fused_forward(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask[2],
        q_depth_BTNH,
        slots,
        *slot_mask,
        static.window,
        static.slot_window,
        static.scale,
        interpret=static.parts.interpret,
    )


def _forward(static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask, slot_sums):
    given = (q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask)
    if static.parts.fused and slots is not None:
        o_BTNH, lse_BNT = _fused_forward(static, *given)
    else:
        o_BTNH, lse_BNT = _sequence_forward(static, q_BTNH, k_BSKH, v_BSKH, mask)
        if slots is not None:
            q = q_BTNH if q_depth_BTNH is None else q_depth_BTNH
            o_BTNH, lse_BNT, slots = _depth(static, 'forward')(
                q, o_BTNH, lse_BNT, slots, *slot_mask
            )
    o_BTNH = o_BTNH.astype(q_BTNH.dtype)
    return (o_BTNH, lse_BNT, slots, slot_sums), (*given, o_BTNH, lse_BNT)


def _backward(static, residuals, cotangents):
    q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_mask, o_BTNH, lse_BNT = residuals
    do_BTNH, dlse_BNT, dslots, dsums = cotangents
    product_BTN = jnp.sum(do_BTNH.astype(lse_BNT.dtype) * o_BTNH.astype(lse_BNT.dtype), axis=-1)
    delta_BNT = jnp.moveaxis(product_BTN, 2, 1) - dlse_BNT
    lse_BNT = jnp.where(lse_BNT == -jnp.inf, 0.0, lse_BNT)
    joint = (do_BTNH, lse_BNT, delta_BNT)
    # cuDNN computes its own delta, which knows of no dlse.
    by_cudnn = static.parts.sequence == 'cudnn' and not static.lse_returned
    if by_cudnn and mask[2] is not None:
        dq_BTNH, dk_BSKH, dv_BSKH = _module('cudnn_packed').sequence_backward(
            q_BTNH, k_BSKH, v_BSKH, mask, static, o_BTNH, *joint
        )
    elif by_cudnn:
        dq_BTNH, dk_BSKH, dv_BSKH = _module('cudnn').sequence_backward(
            q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BNT, do_BTNH, static.window, static.scale
        )
    else:
        dq_BTNH, dk_BSKH, dv_BSKH = xla_sequence.sequence_backward(
            q_BTNH, k_BSKH, v_BSKH, mask, static, *joint
        )
    dq_depth_BTNH = None
    if slots is not None:
        q = q_BTNH if q_depth_BTNH is None else q_depth_BTNH
        sums = dslots if dsums is None else dsums
        dq_depth_BTNH, *sums = _depth(static, 'backward')(q, *joint, slots, sums, *slot_mask)
        if q_depth_BTNH is None:
            wide = lse_BNT.dtype
            dq_BTNH = dq_BTNH.astype(wide) + dq_depth_BTNH.astype(wide)
            dq_depth_BTNH = None
        else:
            dq_depth_BTNH = dq_depth_BTNH.astype(q_depth_BTNH.dtype)
        dslots, dsums = (tuple(sums), None) if dsums is None else (dslots, tuple(sums))
    dq_BTNH = dq_BTNH.astype(q_BTNH.dtype)
    dk_BSKH, dv_BSKH = dk_BSKH.astype(k_BSKH.dtype), dv_BSKH.astype(v_BSKH.dtype)
    return dq_BTNH, dk_BSKH, dv_BSKH, None, dq_depth_BTNH, dslots, None, dsums


joint_attention.defvjp(_forward, _backward)
