"""Attention over the sequence by blocks, so that memory grows with T and not with T x S.

For CPUs and any other backend. Up to 2048 tokens the blocks are static, each some queries with all
keys that they may see. Longer sequences run the loops of xla_sequence_loops.
"""

import contextlib
import contextvars

import jax.numpy as jnp
from jax import lax

from kernels_pallas import xla_sequence_loops

# With gradients, T from 256 to 2048 on two CPU cores: at most a fifth slower than 64, never slower
# than 256 and up to 1.8 times as fast.
QUERY_BLOCK = 128
MAX_BLOCKS = 16
# Scores of a static block: 256 MiB in float32.
MAX_SCORES = 2**26
_counted = contextvars.ContextVar('counted', default=False)


@contextlib.contextmanager
def static_blocks():
    """Traces in this context can be counted: rows of any length take static blocks.

    The products of a loop whose length depends on the documents cannot be counted. Trace functions
    that were not traced before: what is cached is as it was.
    """
    token = _counted.set(True)
    try:
        yield
    finally:
        _counted.reset(token)


def blocks(num_queries: int, num_keys: int, ordered: bool, window: int):
    """(first query, end, first key, end) of each block; `ordered`: key i belongs to query i."""
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        if ordered:
            yield start, stop, max(0, start - window + 1) if window else 0, stop
        else:
            yield start, stop, 0, num_keys


def is_long(q_shape, num_keys: int) -> bool:
    """Whether static blocks would be too many, or too large."""
    batch, length, heads, _ = q_shape
    scores = batch * heads * min(length, QUERY_BLOCK) * num_keys
    too_long = length > QUERY_BLOCK * MAX_BLOCKS or scores > MAX_SCORES
    return too_long and not _counted.get()


def _visible(mask, static, start, stop, first, end):
    """Visibility of one block, [B or 1, queries, keys]; see reference.visibility."""
    positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS = mask
    queries, keys = slice(start, stop), slice(first, end)
    ids = None
    if segment_ids_BT is not None:
        ids = segment_ids_BT[:, queries], key_segment_ids_BS[:, keys]
    places = positions_BT[:, queries], key_positions_BS[:, keys]
    order = places
    if static.ordered:
        order = jnp.arange(start, stop)[None], jnp.arange(first, end)[None]
    return xla_sequence_loops.visible(order, places, ids, static.window)


def _scores(q_BTKGH, k_BSKH, visible, scale):
    scores_BKGTS = xla_sequence_loops.dot('btkgh,bskh->bkgts', q_BTKGH, k_BSKH) * scale
    return jnp.where(visible[:, None, None], scores_BKGTS, -jnp.inf)


def _add(total_BSKH, first, part_BSKH):
    """The total with a part added from key `first` on.

    Not `total.at[...].add`: of the whole array its indices are empty, and JAX 0.11.2 cannot compile
    an empty operand of a shard_map.
    """
    old_BSKH = lax.slice_in_dim(total_BSKH, first, first + part_BSKH.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(total_BSKH, old_BSKH + part_BSKH, first, axis=1)


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """Attention over the sequence alone.

    Args:
      q_BTNH, k_BSKH, v_BSKH, mask, static: as in joint.joint_attention.

    Returns:
      o_BTNH in q's dtype, and the natural-log logsumexp lse_BNT in float32 or wider. A query with
      no visible key returns 0 and -inf.
    """
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    if not k_BSKH.shape[1]:
        return jnp.zeros_like(q_BTNH), jnp.full((batch, heads, length), -jnp.inf, wide)
    if is_long(q_BTNH.shape, k_BSKH.shape[1]):
        return xla_sequence_loops.forward(q_BTNH, k_BSKH, v_BSKH, mask, static)
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    outputs, lses = [], []
    for block in blocks(length, k_BSKH.shape[1], static.ordered, static.window):
        start, stop, first, end = block
        visible = _visible(mask, static, *block)
        scores = _scores(q_BTKGH[:, start:stop], k_BSKH[:, first:end], visible, static.scale)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        seen = jnp.where(total > 0, total, 1.0)
        weights = weights.astype(v_BSKH.dtype)
        output = xla_sequence_loops.dot('bkgts,bskh->bkgth', weights, v_BSKH[:, first:end]) / seen
        outputs.append(jnp.moveaxis(output, 3, 1).astype(q_BTNH.dtype))
        lses.append((highest + jnp.log(total))[..., 0])
    o_BTNH = jnp.concatenate(outputs, axis=1).reshape(q_BTNH.shape)
    return o_BTNH, jnp.concatenate(lses, axis=-1).reshape(batch, heads, length)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, do_BTNH, lse_BNT, delta_BNT):
    """Gradients through the sequence's part of the softmax.

    Args:
      q_BTNH, k_BSKH, v_BSKH, mask, static: as in sequence_forward.
      do_BTNH: the output's cotangent.
      lse_BNT, delta_BNT: the joint logsumexp, finite, and rowsum(do o) - dlse.

    Returns:
      dq_BTNH in q's dtype; dk_BSKH and dv_BSKH as wide as lse_BNT.
    """
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    if is_long(q_BTNH.shape, k_BSKH.shape[1]):
        return xla_sequence_loops.backward(
            q_BTNH, k_BSKH, v_BSKH, mask, static, do_BTNH, lse_BNT, delta_BNT
        )
    dk_BSKH = jnp.zeros(k_BSKH.shape, lse_BNT.dtype)
    dv_BSKH = jnp.zeros(v_BSKH.shape, lse_BNT.dtype)
    if not k_BSKH.shape[1]:
        return jnp.zeros_like(q_BTNH), dk_BSKH, dv_BSKH
    dot = xla_sequence_loops.dot
    grouped = (batch, length, kv_heads, heads // kv_heads, width)
    q_BTKGH, do_BTKGH = q_BTNH.reshape(grouped), do_BTNH.reshape(grouped)
    by_head = (batch, kv_heads, heads // kv_heads, length)
    lse_BKGT, delta_BKGT = lse_BNT.reshape(by_head), delta_BNT.reshape(by_head)
    dqs = []
    for block in blocks(length, k_BSKH.shape[1], static.ordered, static.window):
        start, stop, first, end = block
        visible = _visible(mask, static, *block)
        q, k = q_BTKGH[:, start:stop], k_BSKH[:, first:end]
        v, do = v_BSKH[:, first:end], do_BTKGH[:, start:stop]
        scores = _scores(q, k, visible, static.scale)
        weights = jnp.exp(scores - lse_BKGT[..., start:stop, None])
        dweights = dot('btkgh,bskh->bkgts', do, v)
        dscores = weights * (dweights - delta_BKGT[..., start:stop, None]) * static.scale
        dscores = dscores.astype(q.dtype)
        dv = dot('bkgts,btkgh->bskh', weights.astype(do.dtype), do)
        dk = dot('bkgts,btkgh->bskh', dscores, q)
        dk_BSKH, dv_BSKH = _add(dk_BSKH, first, dk), _add(dv_BSKH, first, dv)
        dqs.append(dot('bkgts,bskh->btkgh', dscores, k).astype(q.dtype))
    return jnp.concatenate(dqs, axis=1).reshape(q_BTNH.shape), dk_BSKH, dv_BSKH
