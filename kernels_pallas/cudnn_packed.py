"""Packed documents by cuDNN's ragged layout, each document an attention of its own.

JAX takes the length and the first token of every document, [B, M], and gives the logsumexp by
document and place in it, [B * M, N, T]. Here segment ids become the one, and the other is mapped to
tokens and back. A row with fewer documents than M has empty ones at its end, so that document j of
row b is always the (b M + j)-th, however the batch is divided over devices.

M is static: cudnn.packed_sizes. A batch goes through in groups of rows. A group with more than M
documents in a row, or with ids that come back after others, takes XLA's form by `lax.cond`, which
is exact for any ids.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import cudnn
from kernels_pallas.xla import sequence

# Places beyond the end of a document: exp(score - UNUSED) is 0, whatever the score.
UNUSED = 1e30


def _documents(segment_ids_BT, most):
    """(document of each token [B, T], first tokens [B, M + 1], whether they fit the layout).

    The first token of what is no document is T.
    """
    ids, length = segment_ids_BT, segment_ids_BT.shape[1]
    begins_BT = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    index_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)
    before = index_BT[:, :, None] < jnp.arange(most + 1)[None, None]
    starts = jnp.sum(before, axis=1, dtype=jnp.int32)
    # Contiguous: no two documents of a row have one id.
    of_BM = jnp.take_along_axis(ids, jnp.minimum(starts[:, :most], length - 1), axis=1)
    again = (of_BM[:, :, None] == of_BM[:, None]) & jnp.tri(most, k=-1, dtype=bool)[None]
    again &= (starts[:, :most] < length)[:, :, None]
    return index_BT, starts, jnp.all(index_BT < most) & ~jnp.any(again)


def _layout(starts):
    """(lengths_BM, offsets [B, M + 1]) as JAX takes them, from the first tokens."""
    return jnp.diff(starts, axis=1), starts.at[:, -1].set(-1)


def _lse_of_tokens(stats, index_BT, starts):
    """lse_BNT out of [B * M, N, T]."""
    batch, most = starts.shape[0], starts.shape[1] - 1
    places_BT = jnp.arange(index_BT.shape[1])[None] - jnp.take_along_axis(
        starts, jnp.minimum(index_BT, most), axis=1
    )

    def row(stats_MNT, index_T, places_T):
        return stats_MNT.at[index_T, :, places_T].get(mode='clip')

    stats_BMNT = stats.reshape(batch, most, *stats.shape[1:])
    return jnp.moveaxis(jax.vmap(row)(stats_BMNT, index_BT, places_BT), 1, 2)


def _lse_of_documents(lse_BNT, starts):
    """[B * M, N, T] out of lse_BNT, UNUSED beyond the end of each document."""
    batch, heads, length = lse_BNT.shape
    lengths_BM = jnp.diff(starts, axis=1)

    def document(lse_NT, start):
        return lax.dynamic_slice_in_dim(lse_NT, start, length, axis=1)

    padded = jnp.pad(lse_BNT, ((0, 0), (0, 0), (0, length)))
    moved_BMNT = jax.vmap(jax.vmap(document, (None, 0)))(padded, starts[:, :-1])
    inside = jnp.arange(length)[None, None, None] < lengths_BM[:, :, None, None]
    return jnp.where(inside, moved_BMNT, UNUSED).reshape(-1, heads, length)


def _by_groups(function, arrays, rows):
    """The function of groups of rows of the arrays, one after the other."""
    batch = jax.tree.leaves(arrays)[0].shape[0]
    if rows == batch:
        return function(arrays)
    groups = jax.tree.map(lambda x: x.reshape(batch // rows, rows, *x.shape[1:]), arrays)
    results = lax.map(function, groups)
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), results)


def _dispatch(q_BTNH, operands, mask, by_cudnn, by_xla):
    """by_cudnn(operands, documents), or by_xla(operands, mask) where the layout does not fit."""
    documents, rows = cudnn.packed_sizes(*q_BTNH.shape)

    def group(given):
        operands, mask = given
        index_BT, starts, fit = _documents(mask[2], documents)
        fit &= jnp.all(mask[2] == mask[3])
        return lax.cond(
            fit,
            lambda: by_cudnn(operands, index_BT, starts),
            lambda: by_xla(operands, mask),
        )

    return _by_groups(group, (operands, mask), rows)


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """Causal attention over the tokens of each query's own document.

    Args:
      q_BTNH, k_BSKH, v_BSKH, mask, static: as in joint.joint_attention, with segment ids; what
        cudnn.unsupported refuses is not asked for.

    Returns:
      o_BTNH in q's dtype, and the natural-log logsumexp lse_BNT in float32.
    """

    def by_cudnn(operands, index_BT, starts):
        o, stats = cudnn.sequence_forward(*operands, 0, static.scale, _layout(starts))
        return o, _lse_of_tokens(stats, index_BT, starts)

    def by_xla(operands, mask):
        return sequence.sequence_forward(*operands, mask, static)

    return _dispatch(q_BTNH, (q_BTNH, k_BSKH, v_BSKH), mask, by_cudnn, by_xla)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, o_BTNH, do_BTNH, lse_BNT, delta_BNT):
    """Gradients of q, k, v through the sequence's part of a joint softmax without dlse.

    Args:
      q_BTNH, k_BSKH, v_BSKH, mask, static: as in sequence_forward.
      o_BTNH, do_BTNH: joint output and its cotangent, in q's dtype.
      lse_BNT, delta_BNT: the joint logsumexp, finite, and rowsum(do o).

    Returns:
      (dq_BTNH, dk_BSKH, dv_BSKH), in the dtypes of q, k, v.
    """

    def by_cudnn(operands, index_BT, starts):
        q, k, v, o, do, lse, _ = operands
        stats = _lse_of_documents(lse, starts)
        return cudnn.sequence_backward(q, k, v, o, stats, do, 0, static.scale, _layout(starts))

    def by_xla(operands, mask):
        q, k, v, _, do, lse, delta = operands
        dq, dk, dv = sequence.sequence_backward(q, k, v, mask, static, do, lse, delta)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    operands = q_BTNH, k_BSKH, v_BSKH, o_BTNH, do_BTNH, lse_BNT, delta_BNT
    return _dispatch(q_BTNH, operands, mask, by_cudnn, by_xla)
