"""Attention over the sequence by XLA, in blocks, so that memory grows with T and not with T x S.

Up to 2048 tokens the blocks are static; longer sequences run loops over tiles, softmax online.
"""

import contextlib
import contextvars

import jax
import jax.numpy as jnp
from jax import lax

QUERY_BLOCK = 128  # on two CPU cores never slower than 256, up to 1.8 times as fast
MAX_BLOCKS = 16
MAX_SCORES = 2**26  # of a static block: 256 MiB in float32
TILE_SIZES = (128, 512)  # least and most; tiles are square, a power of two
TILE_SCORES = 2**25  # at most: 128 MiB in float32
CPU_TILE_SCORES = 2**19  # for the caches of CPUs
_static = contextvars.ContextVar('static', default=False)


@contextlib.contextmanager
def static_blocks():
    """Within this context, new traces use static blocks at any length: FLOPs can be counted."""
    token = _static.set(True)
    try:
        yield
    finally:
        _static.reset(token)


def _blocks(mask, static, num_queries, num_keys):
    """Slices of the queries and the keys of each static block, and the visibility in it."""
    sides = _sides(mask, static)
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        first = max(0, start - static.window + 1) if static.ordered and static.window else 0
        queries, keys = slice(start, stop), slice(first, stop if static.ordered else num_keys)
        yield queries, keys, _visible(sides, static.window, queries, keys)


def is_long(q_shape, num_keys: int) -> bool:
    """Whether static blocks would be too many, or too large."""
    batch, length, heads, _ = q_shape
    scores = batch * heads * min(length, QUERY_BLOCK) * num_keys
    too_long = length > QUERY_BLOCK * MAX_BLOCKS or scores > MAX_SCORES
    return too_long and not _static.get()


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """o_BTNH in q's dtype, wide logsumexp lse_BNT; 0 and -inf for a query with no visible key."""
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    if not k_BSKH.shape[1]:
        return jnp.zeros_like(q_BTNH), jnp.full((batch, heads, length), -jnp.inf, wide)
    if is_long(q_BTNH.shape, k_BSKH.shape[1]):
        return _tiled_forward(q_BTNH, k_BSKH, v_BSKH, mask, static)
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    outputs, lses = [], []
    for queries, keys, visible in _blocks(mask, static, length, k_BSKH.shape[1]):
        scores = _scores(q_BTKGH[:, queries], k_BSKH[:, keys], visible, static.scale)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(v_BSKH.dtype)
        output = dot('bkgts,bskh->bkgth', weights, v_BSKH[:, keys])
        output = output / jnp.where(total > 0, total, 1.0)
        outputs.append(jnp.moveaxis(output, 3, 1).astype(q_BTNH.dtype))
        lses.append((highest + jnp.log(total))[..., 0])
    o_BTNH = jnp.concatenate(outputs, axis=1).reshape(q_BTNH.shape)
    return o_BTNH, jnp.concatenate(lses, axis=-1).reshape(batch, heads, length)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, o_BTNH, do_BTNH, lse_BNT, delta_BNT):
    """Gradients through the sequence's part: dq_BTNH in q's dtype, and wide dk_BSKH and dv_BSKH.

    o_BTNH (not used here) and lse_BNT, finite, are joint; delta_BNT is rowsum(do o) - dlse.
    """
    del o_BTNH
    (batch, length, heads, width), kv_heads = q_BTNH.shape, k_BSKH.shape[2]
    if is_long(q_BTNH.shape, k_BSKH.shape[1]):
        return _tiled_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, do_BTNH, lse_BNT, delta_BNT)
    dk_BSKH = jnp.zeros(k_BSKH.shape, lse_BNT.dtype)
    dv_BSKH = jnp.zeros(v_BSKH.shape, lse_BNT.dtype)
    if not k_BSKH.shape[1]:
        return jnp.zeros_like(q_BTNH), dk_BSKH, dv_BSKH
    grouped = (batch, length, kv_heads, heads // kv_heads, width)
    q_BTKGH, do_BTKGH = q_BTNH.reshape(grouped), do_BTNH.reshape(grouped)
    by_head = (batch, kv_heads, heads // kv_heads, length)
    lse_BKGT, delta_BKGT = lse_BNT.reshape(by_head), delta_BNT.reshape(by_head)
    dqs = []
    for queries, keys, visible in _blocks(mask, static, length, k_BSKH.shape[1]):
        q, do = q_BTKGH[:, queries], do_BTKGH[:, queries]
        k, v = k_BSKH[:, keys], v_BSKH[:, keys]
        lse, delta = lse_BKGT[..., queries], delta_BKGT[..., queries]
        dq, dk, dv = _gradients(q, k, v, do, lse, delta, visible, static.scale)
        dk_BSKH, dv_BSKH = _add(dk_BSKH, keys.start, dk), _add(dv_BSKH, keys.start, dv)
        dqs.append(dq.astype(q_BTNH.dtype))
    return jnp.concatenate(dqs, axis=1).reshape(q_BTNH.shape), dk_BSKH, dv_BSKH


def dot(equation, x, y):
    """An einsum summed in float32, or wider with x."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        x, y = x.astype(wide), y.astype(wide)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def _sides(mask, static):
    """(order, places, segment ids or None), each of queries and of keys, int [B or 1, n]."""
    places = order = mask.positions_BT, mask.key_positions_BS
    if static.ordered:
        order = tuple(jnp.arange(side.shape[1])[None] for side in places)
    ids = mask.segment_ids_BT, mask.key_segment_ids_BS
    return order, places, None if ids[0] is None else ids


def _visible(sides, window, queries, keys):
    """Visibility [B or 1, queries, keys] of slices or of (start, size), as reference.visibility."""

    def cut(x, part):
        return x[:, part] if isinstance(part, slice) else _cut(x, *part)

    order, places, ids = (
        None if side is None else (cut(side[0], queries)[:, :, None], cut(side[1], keys)[:, None])
        for side in sides
    )
    result = order[0] >= order[1]
    if window:
        result = result & (places[0] - places[1] < window)
    if ids is not None:
        result = result & (ids[0] == ids[1])
    return result


def _scores(q_BTKGH, k_BSKH, visible, scale):
    scores_BKGTS = dot('btkgh,bskh->bkgts', q_BTKGH, k_BSKH) * scale
    return jnp.where(visible[:, None, None], scores_BKGTS, -jnp.inf)


def _gradients(q_BTKGH, k_BSKH, v_BSKH, do_BTKGH, lse_BKGT, delta_BKGT, visible, scale):
    """(dq, dk, dv) through one block of scores, in float32 or wider."""
    weights = jnp.exp(_scores(q_BTKGH, k_BSKH, visible, scale) - lse_BKGT[..., None])
    dweights = dot('btkgh,bskh->bkgts', do_BTKGH, v_BSKH)
    dscores = (weights * (dweights - delta_BKGT[..., None]) * scale).astype(q_BTKGH.dtype)
    dv = dot('bkgts,btkgh->bskh', weights.astype(do_BTKGH.dtype), do_BTKGH)
    dk = dot('bkgts,btkgh->bskh', dscores, q_BTKGH)
    return dot('bkgts,bskh->btkgh', dscores, k_BSKH), dk, dv


def _add(total_BSKH, first, part_BSKH):
    # Not `total.at[...].add`: JAX 0.11.2 cannot compile its empty indices in a shard_map.
    old_BSKH = lax.slice_in_dim(total_BSKH, first, first + part_BSKH.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(total_BSKH, old_BSKH + part_BSKH, first, axis=1)


def _limits(ids_BT, size):
    tiles = -(-ids_BT.shape[1] // size)
    padded = jnp.pad(ids_BT, ((0, 0), (0, tiles * size - ids_BT.shape[1])), mode='edge')
    tiled = padded.reshape(-1, tiles, size)
    return tiled.min(axis=2), tiled.max(axis=2)


def _bounds(order, places, ids, window, sizes):
    """First and end tile of keys for each tile of queries, int32; others hold nothing visible."""
    (_, latest), (earliest, _) = (_limits(x, size) for x, size in zip(order, sizes, strict=True))
    meet = latest[:, :, None] >= earliest[:, None]
    if window:
        nearest, last = _limits(places[0], sizes[0])[0], _limits(places[1], sizes[1])[1]
        meet = meet & (nearest[:, :, None] - last[:, None] < window)
    if ids is not None:
        (low, high), (key_low, key_high) = (_limits(x, n) for x, n in zip(ids, sizes, strict=True))
        meet = meet & (low[:, :, None] <= key_high[:, None])
        meet = meet & (key_low[:, None] <= high[:, :, None])
    meet_IJ = jnp.any(meet, axis=0)
    first_I = jnp.argmax(meet_IJ, axis=1).astype(jnp.int32)
    end_I = meet_IJ.shape[1] - jnp.argmax(meet_IJ[:, ::-1], axis=1).astype(jnp.int32)
    return first_I, jnp.where(jnp.any(meet_IJ, axis=1), end_I, first_I)


def _cut(x, start, size, axis=1):
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x, tile, start, axis=1):
    return lax.dynamic_update_slice_in_dim(x, tile.astype(x.dtype), start, axis)


def _flat(x):
    """Heads and width as one axis: otherwise XLA transposes all of an array for the tiles."""
    return x.reshape(*x.shape[:2], -1)


class _Tiles:
    """Tiles of queries by tiles of keys, all of one size.

    The last one reaches back over rows of the one before, which comes later and overwrites them.
    """

    def __init__(self, q_BTNH, k_BSKH, mask, static):
        batch, self.length, heads, width = q_BTNH.shape
        self.num_keys, kv_heads = k_BSKH.shape[1:3]
        self.grouped = (batch, self.length, kv_heads, heads // kv_heads, width)
        self.by_head = (batch, kv_heads, heads // kv_heads, self.length)
        scores = CPU_TILE_SCORES if jax.default_backend() == 'cpu' else TILE_SCORES
        size, largest = TILE_SIZES
        while size < largest and batch * heads * (2 * size) ** 2 <= scores:
            size *= 2
        self.queries, self.keys = min(size, self.length), min(size, self.num_keys)
        self.sides, self.window = _sides(mask, static), static.window
        sizes = self.queries, self.keys
        self.first_I, self.end_I = _bounds(*self.sides, self.window, sizes)

    def cut_queries(self, x_BTX, row):
        tile = _cut(x_BTX, row, self.queries)
        return tile.reshape(tile.shape[0], self.queries, *self.grouped[2:])

    def over_queries(self, step, carry):
        """step(index, first row, carry) for each tile of queries, the last one first."""
        tiles = -(-self.length // self.queries)

        def body(i, carry):
            index = tiles - 1 - i
            return step(index, jnp.minimum(index * self.queries, self.length - self.queries), carry)

        return lax.fori_loop(0, tiles, body, carry)

    def over_keys(self, index, row, step, carry):
        """step(first key, visible, carry) for the tiles of keys that a tile of queries may see."""

        def body(key_index, carry):
            column = jnp.minimum(key_index * self.keys, self.num_keys - self.keys)
            at = (row, self.queries), (column, self.keys)
            rows = row + jnp.arange(self.queries) >= index * self.queries
            columns = column + jnp.arange(self.keys) >= key_index * self.keys
            visible = _visible(self.sides, self.window, *at)
            return step(column, visible & (rows[:, None] & columns[None])[None], carry)

        return lax.fori_loop(self.first_I[index], self.end_I[index], body, carry)


def _tiled_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    tiles = _Tiles(q_BTNH, k_BSKH, mask, static)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    batch, _, kv_heads, group, width = tiles.grouped
    q_BTX = _flat(q_BTNH)

    def rows(index, row, carry):
        q = tiles.cut_queries(q_BTX, row)

        def columns(column, visible, carry):
            o, highest, total = carry
            k, v = (_cut(side, column, tiles.keys) for side in (k_BSKH, v_BSKH))
            scores = _scores(q, k, visible, static.scale)
            new = jnp.maximum(highest, jnp.max(scores, axis=-1))
            finite = jnp.where(new == -jnp.inf, 0.0, new)
            weights, keep = jnp.exp(scores - finite[..., None]), jnp.exp(highest - finite)
            total = total * keep + jnp.sum(weights, axis=-1)
            more = dot('bkgts,bskh->bkgth', weights.astype(v.dtype), v)
            return o * keep[..., None] + more, new, total

        shape = (batch, kv_heads, group, tiles.queries)
        start = jnp.zeros((*shape, width), wide), jnp.full(shape, -jnp.inf, wide)
        o, highest, total = tiles.over_keys(index, row, columns, (*start, jnp.zeros(shape, wide)))
        o = o / jnp.where(total > 0, total, 1.0)[..., None]
        lse = jnp.where(highest == -jnp.inf, 0.0, highest) + jnp.log(total)
        o_BTX, lse_BKGT = carry
        o = _flat(jnp.moveaxis(o, 3, 1).astype(o_BTX.dtype))
        return _put(o_BTX, o, row), _put(lse_BKGT, lse, row, axis=3)

    carry = jnp.zeros(q_BTX.shape, q_BTNH.dtype), jnp.zeros(tiles.by_head, wide)
    o_BTX, lse_BKGT = tiles.over_queries(rows, carry)
    return o_BTX.reshape(q_BTNH.shape), lse_BKGT.reshape(batch, kv_heads * group, -1)


def _tiled_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, do_BTNH, lse_BNT, delta_BNT):
    tiles = _Tiles(q_BTNH, k_BSKH, mask, static)
    wide = lse_BNT.dtype
    q_BTX, do_BTX = _flat(q_BTNH), _flat(do_BTNH)
    lse_BKGT, delta_BKGT = lse_BNT.reshape(tiles.by_head), delta_BNT.reshape(tiles.by_head)

    def rows(index, row, carry):
        dq_BTX, dk_BSKH, dv_BSKH = carry
        q, do = tiles.cut_queries(q_BTX, row), tiles.cut_queries(do_BTX, row)
        lse, delta = (_cut(x, row, tiles.queries, axis=3) for x in (lse_BKGT, delta_BKGT))

        def columns(column, visible, carry):
            total, dk_BSKH, dv_BSKH = carry
            k, v = _cut(k_BSKH, column, tiles.keys), _cut(v_BSKH, column, tiles.keys)
            dq, dk, dv = _gradients(q, k, v, do, lse, delta, visible, static.scale)
            dv_BSKH = _put(dv_BSKH, _cut(dv_BSKH, column, tiles.keys) + dv, column)
            dk_BSKH = _put(dk_BSKH, _cut(dk_BSKH, column, tiles.keys) + dk, column)
            return total + dq, dk_BSKH, dv_BSKH

        carry = jnp.zeros(q.shape, wide), dk_BSKH, dv_BSKH
        dq, dk_BSKH, dv_BSKH = tiles.over_keys(index, row, columns, carry)
        return _put(dq_BTX, _flat(dq.astype(q.dtype)), row), dk_BSKH, dv_BSKH

    sums = jnp.zeros(k_BSKH.shape, wide), jnp.zeros(v_BSKH.shape, wide)
    dq_BTX, *sums = tiles.over_queries(rows, (jnp.zeros_like(q_BTX), *sums))
    return dq_BTX.reshape(q_BTNH.shape), *sums
