"""The softmax over sequence and depth slots, and its gradient, from the backends of the two parts.

docs/depth_attention.md, section 5, has the equations.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.backends import DEPTH, SEQUENCE, Parts, load_module

ATTENDED = 'attended'  # checkpoint name of the output and logsumexp, which the backward pass reads


class SequenceMask(NamedTuple):
    """Which keys are visible to a query; see `reference.visibility`."""

    positions_BT: jax.Array  # int, positions in the original sequence
    key_positions_BS: jax.Array
    segment_ids_BT: jax.Array | None = None  # None: one segment
    key_segment_ids_BS: jax.Array | None = None


class Slots(NamedTuple):
    """Depth slots, and which are visible to a query; see `reference.slot_visibility`."""

    k_LBRKH: jax.Array
    v_LBRKH: jax.Array
    num: jax.Array | int  # number of slots written, 0 to L; the others are hidden and not read
    mask_LBR: jax.Array | None = None
    # Index along R of each query's token; R and above: no token. None: R = T, each its own.
    rows_BT: jax.Array | None = None


class Static(NamedTuple):
    """Parameters that are static in a compiled program."""

    window: int  # number of visible keys, including the query's own; 0: no limit
    ordered: bool  # key i belongs to query i, and positions ascend: index order is time order
    slot_window: int  # number of visible slots, the newest; 0: all
    scale: float  # factor on the scores
    returns_lse: bool  # the logsumexp is a result, and has a cotangent
    parts: Parts = Parts()
    threads: bool = True  # return the slots; if False, and without sums, their gradients are fresh


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def joint_attention(static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_sums):
    """Compute `reference_attention` by the backends of `static.parts`.

    Returns o_BTNH, lse_BNT, the slots' keys and values (None unless `static.threads`), slot_sums.

    The backward pass adds the slots' gradients in place to a cotangent: that of the returned sums,
    or without sums that of the returned slots. With sums, the cotangent of the slots is passed on
    unchanged. Without either, the backward pass overwrites gradients instead of adding to them.
    """
    results, _ = _forward(static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_sums)
    return results


def _depth(static, way):
    """Return the depth part's function for the pass `way`: forward or backward."""
    module = load_module(getattr(DEPTH[static.parts.depth], way))
    options = {'window': static.slot_window, 'scale': static.scale}
    options['interpret'] = static.parts.interpret
    return functools.partial(getattr(module, f'depth_{way}'), **options)


def _forward(static, q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, slot_sums):
    depth, sides = DEPTH[static.parts.depth], None
    if slots is not None and depth.fused:
        o_BTNH, lse_BNT = load_module(depth.forward).fused_forward(
            q_BTNH, k_BSKH, v_BSKH, mask.segment_ids_BT, q_depth_BTNH, slots, static
        )
        sides = slots[:2]
    else:
        module = load_module(SEQUENCE[static.parts.sequence].forward)
        o_BTNH, lse_BNT = module.sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static)
        if slots is not None:
            q = q_BTNH if q_depth_BTNH is None else q_depth_BTNH
            o_BTNH, lse_BNT, sides = _depth(static, 'forward')(q, o_BTNH, lse_BNT, slots)
    o_BTNH, lse_BNT = checkpoint_name((o_BTNH.astype(q_BTNH.dtype), lse_BNT), ATTENDED)
    residuals = q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, o_BTNH, lse_BNT
    return (o_BTNH, lse_BNT, sides if static.threads else None, slot_sums), residuals


def _backward(static, residuals, cotangents):
    q_BTNH, k_BSKH, v_BSKH, mask, q_depth_BTNH, slots, o_BTNH, lse_BNT = residuals
    do_BTNH, dlse_BNT, dsides, dsums = cotangents
    dlse_BNT = dlse_BNT if static.returns_lse else None
    if not (static.ordered and k_BSKH.shape[1]):  # otherwise every query sees its own key
        lse_BNT = jnp.where(lse_BNT == -jnp.inf, 0.0, lse_BNT)
    joint = o_BTNH, do_BTNH, lse_BNT, dlse_BNT
    dslots, dq_depth_BTNH, sums = None, None, dsides if dsums is None else dsums
    fused = DEPTH[static.parts.depth].fused_backward
    if slots is not None and static.parts.sequence == 'mosaic_gpu' and fused:
        fused_backward = load_module(fused).fused_backward
        dq_BTNH, dk_BSKH, dv_BSKH, dq_depth_BTNH, *sums = fused_backward(
            q_BTNH, k_BSKH, v_BSKH, mask.segment_ids_BT, q_depth_BTNH, slots, sums, static, *joint
        )
    else:
        sequence = SEQUENCE[static.parts.sequence]
        if static.returns_lse and not sequence.takes_dlse:
            sequence = SEQUENCE['xla']
        dq_BTNH, dk_BSKH, dv_BSKH = load_module(sequence.backward).sequence_backward(
            q_BTNH, k_BSKH, v_BSKH, mask, static, *joint
        )
        if slots is not None:
            depth_backward = _depth(static, 'backward')
            if q_depth_BTNH is None:
                dq_BTNH, *sums = depth_backward(q_BTNH, *joint, slots, sums, dq_BTNH)
            else:
                dq_depth_BTNH, *sums = depth_backward(q_depth_BTNH, *joint, slots, sums, None)
    if slots is not None:
        dsides, dsums = (sums, None) if dsums is None else (dsides, tuple(sums))
        dslots = None if dsides is None else Slots(*dsides, None)
    dq_BTNH = dq_BTNH.astype(q_BTNH.dtype)
    dk_BSKH, dv_BSKH = dk_BSKH.astype(k_BSKH.dtype), dv_BSKH.astype(v_BSKH.dtype)
    return dq_BTNH, dk_BSKH, dv_BSKH, None, dq_depth_BTNH, dslots, dsums


joint_attention.defvjp(_forward, _backward)
