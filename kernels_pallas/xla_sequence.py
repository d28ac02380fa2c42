"""Attention over the sequence in static blocks of queries, so that no T x S array exists.

For CPUs and any other backend. Forward and backward walk the same blocks. A block of queries reads
only the keys that causality and the window let it see, as static slices.
"""

import jax
import jax.numpy as jnp

# With gradients, T from 256 to 2048 on two CPU cores: at most a fifth slower than 64, never slower
# than 256 and up to 1.8 times as fast.
QUERY_BLOCK = 128
MAX_BLOCKS = 16  # longer sequences take larger blocks: the program stays small


def blocks(num_queries: int, num_keys: int, ordered: bool, window: int):
    """(first query, end, first key, end) of each block; `ordered`: key i belongs to query i."""
    size = max(QUERY_BLOCK, -(-num_queries // MAX_BLOCKS))
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        if ordered:
            yield start, stop, max(0, start - window + 1) if window else 0, stop
        else:
            yield start, stop, 0, num_keys


def _visible(mask, window, ordered, start, stop, first, end):
    """Visibility of one block, [B or 1, queries, keys]; see reference.visibility."""
    positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS = mask
    if ordered:
        index_T, index_S = jnp.arange(start, stop), jnp.arange(first, end)
        visible = (index_T[:, None] >= index_S[None, :])[None]
    else:
        visible = positions_BT[:, start:stop, None] >= key_positions_BS[:, None, first:end]
    if window:
        distance = positions_BT[:, start:stop, None] - key_positions_BS[:, None, first:end]
        visible = visible & (distance < window)
    if segment_ids_BT is not None:
        same = segment_ids_BT[:, start:stop, None] == key_segment_ids_BS[:, None, first:end]
        visible = visible & same
    return visible


def _dot(equation, x, y):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        x, y = x.astype(wide), y.astype(wide)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def _scores(q_BTKGH, k_BSKH, visible, scale):
    scores_BKGTS = _dot('btkgh,bskh->bkgts', q_BTKGH, k_BSKH) * scale
    return jnp.where(visible[:, None, None], scores_BKGTS, -jnp.inf)


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """(o_BTNH, lse_BNT) over the sequence alone, float32 or wider."""
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    if not k_BSKH.shape[1]:
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        return jnp.zeros(q_BTNH.shape, wide), jnp.full((batch, heads, length), -jnp.inf, wide)
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    outputs, lses = [], []
    for block in blocks(length, k_BSKH.shape[1], static.ordered, static.window):
        start, stop, first, end = block
        visible = _visible(mask, static.window, static.ordered, *block)
        scores = _scores(q_BTKGH[:, start:stop], k_BSKH[:, first:end], visible, static.scale)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        seen = jnp.where(total > 0, total, 1.0)
        output = (
            _dot('bkgts,bskh->bkgth', weights.astype(v_BSKH.dtype), v_BSKH[:, first:end]) / seen
        )
        outputs.append(jnp.moveaxis(output, 3, 1))
        lses.append((highest + jnp.log(total))[..., 0])
    o_BTNH = jnp.concatenate(outputs, axis=1).reshape(q_BTNH.shape)
    return o_BTNH, jnp.concatenate(lses, axis=-1).reshape(batch, heads, length)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, do_BTNH, lse_BNT, delta_BNT):
    """Gradients of q, k, v through the sequence's part of the softmax, float32 or wider."""
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    dk_BSKH = jnp.zeros(k_BSKH.shape, lse_BNT.dtype)
    dv_BSKH = jnp.zeros(v_BSKH.shape, lse_BNT.dtype)
    if not k_BSKH.shape[1]:
        return jnp.zeros(q_BTNH.shape, lse_BNT.dtype), dk_BSKH, dv_BSKH
    grouped = (batch, length, kv_heads, heads // kv_heads, width)
    q_BTKGH, do_BTKGH = q_BTNH.reshape(grouped), do_BTNH.reshape(grouped)
    by_head = (batch, kv_heads, heads // kv_heads, length)
    lse_BKGT, delta_BKGT = lse_BNT.reshape(by_head), delta_BNT.reshape(by_head)
    dqs = []
    for block in blocks(length, k_BSKH.shape[1], static.ordered, static.window):
        start, stop, first, end = block
        visible = _visible(mask, static.window, static.ordered, *block)
        q, k = q_BTKGH[:, start:stop], k_BSKH[:, first:end]
        v, do = v_BSKH[:, first:end], do_BTKGH[:, start:stop]
        scores = _scores(q, k, visible, static.scale)
        weights = jnp.exp(scores - lse_BKGT[..., start:stop, None])
        dweights = _dot('btkgh,bskh->bkgts', do, v)
        dscores = weights * (dweights - delta_BKGT[..., start:stop, None]) * static.scale
        dscores = dscores.astype(q.dtype)
        dv = _dot('bkgts,btkgh->bskh', weights.astype(do.dtype), do)
        dk = _dot('bkgts,btkgh->bskh', dscores, q)
        dv_BSKH = dv_BSKH.at[:, first:end].add(dv)
        dk_BSKH = dk_BSKH.at[:, first:end].add(dk)
        dqs.append(_dot('bkgts,bskh->btkgh', dscores, k))
    return jnp.concatenate(dqs, axis=1).reshape(q_BTNH.shape), dk_BSKH, dv_BSKH
