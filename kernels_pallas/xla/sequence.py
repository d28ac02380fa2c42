"""The sequence part by XLA, in blocks, so that memory grows with T and not with T x S.

Short sequences use static blocks. Longer ones run loops over tiles, with an online softmax. The
docstrings of sequence_forward and sequence_backward are the contract of every sequence part.
"""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
from jax import lax

QUERY_BLOCK = 128  # on two CPU cores 64 and 256 took up to 1.2 times as long
CPU_MAX_BLOCKS = 16
# Each static block has products of other shapes, which a GPU compiles and measures one by one: 112
# in both passes of 16 blocks.
MAX_BLOCKS = 4
MAX_SCORES = 2**26  # in a static block: 256 MiB in float32
TILE_SIZES = (128, 512)  # smallest and largest; tiles are square, a power of two
TILE_SCORES = 2**25  # at most: 128 MiB in float32
CPU_TILE_SCORES = 2**19  # fits the caches of CPUs
CPU_BLOCK_SCORES = 2**20  # in a static block: 4 MiB in float32, measured on two cores
_static = contextvars.ContextVar('static', default=False)


@contextlib.contextmanager
def static_blocks():
    """In this context new traces use static blocks at any length, so that FLOPs can be counted."""
    token = _static.set(True)
    try:
        yield
    finally:
        _static.reset(token)


def _blocks(sides, static, num_queries, num_keys):
    """Yield (queries, keys, visibility) of each static block; the first two are slices."""
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        first = max(0, start - static.window + 1) if static.ordered and static.window else 0
        queries, keys = slice(start, stop), slice(first, stop if static.ordered else num_keys)
        yield queries, keys, _visible(sides, static.window, queries, keys)


def is_long(q_shape, k_shape) -> bool:
    """Return whether static blocks would be too many or too large (on a CPU: for one key head)."""
    batch, length, heads, _ = q_shape
    _, num_keys, kv_heads, _ = k_shape
    on_cpu = jax.default_backend() == 'cpu'
    at_once = heads // kv_heads if on_cpu else batch * heads
    scores = at_once * min(length, QUERY_BLOCK) * num_keys
    too_long = length > QUERY_BLOCK * (CPU_MAX_BLOCKS if on_cpu else MAX_BLOCKS)
    return (too_long or scores > MAX_SCORES) and not _static.get()


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """Compute causal attention over the sequence.

    Args:
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values.
      mask: `joint_softmax.SequenceMask`.
      static: `joint_softmax.Static`.

    Returns:
      o_BTNH in q's dtype and the natural-log logsumexp lse_BNT, float32 or wider. A query with no
      visible key returns o = 0 and lse = -inf.
    """
    batch, length, heads, width = q_BTNH.shape
    num_keys, kv_heads = k_BSKH.shape[1:3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    if not num_keys:
        return jnp.zeros_like(q_BTNH), jnp.full((batch, heads, length), -jnp.inf, wide)
    sides = _sides(mask, static, kv_heads)
    if is_long(q_BTNH.shape, k_BSKH.shape):
        return _tiled_forward(static, q_BTNH, k_BSKH, v_BSKH, sides)
    q_XGTH, k_X1SH, v_X1SH = (_by_head(x, kv_heads) for x in (q_BTNH, k_BSKH, v_BSKH))
    arrays = q_XGTH, k_X1SH[:, 0], v_X1SH[:, 0], sides
    o_XGTH, lse_XGT = _in_parts(functools.partial(_forward_in_blocks, static), *arrays)
    return _by_token(o_XGTH, batch), lse_XGT.reshape(batch, heads, length)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, o_BTNH, do_BTNH, lse_BNT, dlse_BNT):
    """Return the gradients through the sequence: dq_BTNH in q's dtype, wide dk_BSKH and dv_BSKH.

    Args:
      q_BTNH, k_BSKH, v_BSKH, mask, static: as in sequence_forward.
      o_BTNH, lse_BNT: output and finite logsumexp over sequence and slots.
      do_BTNH, dlse_BNT: their cotangents; dlse may be None, for zeros.
    """
    batch, length = q_BTNH.shape[:2]
    num_keys, kv_heads = k_BSKH.shape[1:3]
    if not num_keys:
        sums = (jnp.zeros(side.shape, lse_BNT.dtype) for side in (k_BSKH, v_BSKH))
        return jnp.zeros_like(q_BTNH), *sums
    wide = lse_BNT.dtype
    delta_BTN = jnp.sum(do_BTNH.astype(wide) * o_BTNH.astype(wide), axis=-1)
    delta_BNT = jnp.moveaxis(delta_BTN, 2, 1)
    if dlse_BNT is not None:
        delta_BNT -= dlse_BNT
    sides = _sides(mask, static, kv_heads)
    if is_long(q_BTNH.shape, k_BSKH.shape):
        by_query = do_BTNH, lse_BNT, delta_BNT
        return _tiled_backward(static, q_BTNH, k_BSKH, v_BSKH, sides, *by_query)
    q_XGTH, k_X1SH, v_X1SH, do_XGTH = (
        _by_head(x, kv_heads) for x in (q_BTNH, k_BSKH, v_BSKH, do_BTNH)
    )
    by_query = do_XGTH, *(x.reshape(q_XGTH.shape[:3]) for x in (lse_BNT, delta_BNT))
    arrays = q_XGTH, k_X1SH[:, 0], v_X1SH[:, 0], sides, *by_query
    dq_XGTH, *sums = _in_parts(functools.partial(_backward_in_blocks, static), *arrays)
    sums = (_by_token(side_XSH[:, None], batch) for side_XSH in sums)
    return _by_token(dq_XGTH, batch), *sums


def _by_head(x_BTNH, kv_heads):
    """Return [X, G, T, H], X = B K, so that products are plain batches of matrices."""
    batch, length, heads, width = x_BTNH.shape
    x_BTKGH = x_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return x_BTKGH.transpose(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads, length, width)


def _by_token(x_XGTH, batch):
    """Invert `_by_head`."""
    _, group, length, width = x_XGTH.shape
    x_BKGTH = x_XGTH.reshape(batch, -1, group, length, width)
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, width)


def _in_parts(function, q_XGTH, k_XSH, *arrays):
    """Call function(q, k, *arrays), on a CPU for few X at a time, so scores stay in its cache."""
    count, group, length, _ = q_XGTH.shape
    scores = group * min(length, QUERY_BLOCK) * k_XSH.shape[1]
    size = max(1, CPU_BLOCK_SCORES // scores)
    # A prime count runs one at a time. From 32 tokens on that took no longer than all at once.
    size = next(n for n in range(min(size, count), 0, -1) if count % n == 0)
    if size == count or _static.get() or jax.default_backend() != 'cpu':
        return function(q_XGTH, k_XSH, *arrays)
    leaves, structure = jax.tree.flatten((q_XGTH, k_XSH, *arrays))
    cut = [len(leaf) == count for leaf in leaves]  # the others are the same for all X

    def part(some):
        some = iter(some)
        both = zip(cut, leaves, strict=True)
        return function(*structure.unflatten([next(some) if c else leaf for c, leaf in both]))

    parts = [x.reshape(-1, size, *x.shape[1:]) for x, c in zip(leaves, cut, strict=True) if c]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(part, parts))


def _forward_in_blocks(static, q_XGTH, k_XSH, v_XSH, sides):
    outputs, lses = [], []
    for queries, keys, visible in _blocks(sides, static, q_XGTH.shape[2], k_XSH.shape[1]):
        scores = _scores(q_XGTH[:, :, queries], k_XSH[:, keys], visible, static.scale)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        output = _weighted(weights, v_XSH[:, keys]) / jnp.where(total > 0, total, 1.0)
        outputs.append(output.astype(q_XGTH.dtype))
        lses.append((highest + jnp.log(total))[..., 0])
    return jnp.concatenate(outputs, axis=2), jnp.concatenate(lses, axis=2)


def _backward_in_blocks(static, q_XGTH, k_XSH, v_XSH, sides, do_XGTH, lse_XGT, delta_XGT):
    dk_XSH, dv_XSH = (jnp.zeros(x.shape, lse_XGT.dtype) for x in (k_XSH, v_XSH))
    dqs = []
    for queries, keys, visible in _blocks(sides, static, q_XGTH.shape[2], k_XSH.shape[1]):
        of_queries = (x[:, :, queries] for x in (q_XGTH, do_XGTH, lse_XGT, delta_XGT))
        dq, dk, dv = _gradients(*of_queries, k_XSH[:, keys], v_XSH[:, keys], visible, static.scale)
        dk_XSH, dv_XSH = _add(dk_XSH, keys.start, dk), _add(dv_XSH, keys.start, dv)
        dqs.append(dq.astype(q_XGTH.dtype))
    return jnp.concatenate(dqs, axis=2), dk_XSH, dv_XSH


def dot(equation, x, y):
    """Compute an einsum in float32, or in the dtype of x or y if that is wider."""
    wide = jnp.promote_types(jnp.promote_types(x.dtype, y.dtype), jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        x, y = x.astype(wide), y.astype(wide)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def _sides(mask, static, kv_heads):
    """Return (order, positions, ids or None), each for queries and keys: int [X or 1, n]."""
    places = order = mask.positions_BT, mask.key_positions_BS
    if static.ordered:
        order = tuple(jnp.arange(side.shape[1])[None] for side in places)
    ids = mask.segment_ids_BT, mask.key_segment_ids_BS
    sides = order, places, None if ids[0] is None else ids
    return jax.tree.map(lambda x: x if len(x) == 1 else jnp.repeat(x, kv_heads, axis=0), sides)


def _visible(sides, window, queries, keys):
    """Return reference.visibility, [X or 1, queries, keys], of slices or of (start, size)."""

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


def _rows(x_XGTH):
    """Return the queries of all heads of a group as the rows of one matrix, [X, G T, H]."""
    return x_XGTH.reshape(x_XGTH.shape[0], -1, x_XGTH.shape[3])


def _scores(q_XGTH, k_XSH, visible_XTS, scale):
    scores_XRS = dot('xrh,xsh->xrs', _rows(q_XGTH), k_XSH)
    scores_XGTS = scores_XRS.reshape(*q_XGTH.shape[:3], -1) * scale
    return jnp.where(visible_XTS[:, None], scores_XGTS, -jnp.inf)


def _weighted(weights_XGTS, v_XSH):
    """Return the weighted sums of values, in float32 or wider."""
    rows = _rows(weights_XGTS.astype(v_XSH.dtype))
    return dot('xrs,xsh->xrh', rows, v_XSH).reshape(*weights_XGTS.shape[:3], -1)


def _gradients(q_XGTH, do_XGTH, lse_XGT, delta_XGT, k_XSH, v_XSH, visible_XTS, scale):
    """Return (dq, dk, dv) through one block of scores, in float32 or wider.

    Scores are keys by queries, as dk and dv need them. Otherwise XLA on CPUs would transpose them.
    """
    q_XRH, do_XRH = _rows(q_XGTH), _rows(do_XGTH)
    group, length = q_XGTH.shape[1:3]
    by_key = len(k_XSH), k_XSH.shape[1], group, length
    scores = dot('xsh,xrh->xsr', k_XSH, q_XRH).reshape(by_key) * scale
    visible = visible_XTS.swapaxes(1, 2)[:, :, None]
    weights = jnp.exp(jnp.where(visible, scores - lse_XGT[:, None], -jnp.inf))
    dweights = dot('xsh,xrh->xsr', v_XSH, do_XRH).reshape(by_key)
    dscores = weights * (dweights - delta_XGT[:, None]) * scale
    weights, dscores = (x.reshape(*by_key[:2], -1).astype(q_XRH.dtype) for x in (weights, dscores))
    dv = dot('xsr,xrh->xsh', weights, do_XRH)
    dk = dot('xsr,xrh->xsh', dscores, q_XRH)
    return dot('xsr,xsh->xrh', dscores, k_XSH).reshape(q_XGTH.shape), dk, dv


def _add(total_XSH, first, part_XSH):
    # Not `total.at[...].add`: JAX 0.11.2 cannot compile its empty indices in a shard_map.
    old_XSH = lax.slice_in_dim(total_XSH, first, first + part_XSH.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(total_XSH, old_XSH + part_XSH, first, axis=1)


def _limits(ids_BT, size):
    """Return the least and the largest number in each tile of `size`, [B, tiles]."""
    tiles = -(-ids_BT.shape[1] // size)
    padded = jnp.pad(ids_BT, ((0, 0), (0, tiles * size - ids_BT.shape[1])), mode='edge')
    tiled = padded.reshape(-1, tiles, size)
    return tiled.min(axis=2), tiled.max(axis=2)


def _bounds(order, places, ids, window, sizes):
    """Return first and end tile of keys for each tile of queries; others are hidden."""
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
    """Return x with heads and width as one axis: otherwise XLA transposes it for the tiles."""
    return x.reshape(*x.shape[:2], -1)


class _Tiles:
    """Loops over tiles of queries and tiles of keys, all of one size.

    The last tile of queries reaches back over rows of the one before, which runs later and
    overwrites them.
    """

    def __init__(self, q_BTNH, k_BSKH, sides, static):
        self.batch, self.length, heads, self.width = q_BTNH.shape
        self.num_keys, self.kv_heads = k_BSKH.shape[1:3]
        self.by_head = self.batch * self.kv_heads, heads // self.kv_heads, self.length
        self.sides, self.window = sides, static.window
        scores = CPU_TILE_SCORES if jax.default_backend() == 'cpu' else TILE_SCORES
        size, largest = TILE_SIZES
        while size < largest and self.batch * heads * (2 * size) ** 2 <= scores:
            size *= 2
        self.queries, self.keys = sizes = min(size, self.length), min(size, self.num_keys)
        self.first_I, self.end_I = _bounds(*sides, self.window, sizes)

    def cut_queries(self, x_BTX, row):
        """Return a tile [X, G, queries, H] of a flat array."""
        tile = _cut(x_BTX, row, self.queries)
        return _by_head(tile.reshape(self.batch, self.queries, -1, self.width), self.kv_heads)

    def cut_keys(self, x_BSKH, column):
        return _by_head(_cut(x_BSKH, column, self.keys), self.kv_heads)[:, 0]

    def add_keys(self, total_BSKH, tile_XSH, column):
        tile_BSKH = _by_token(tile_XSH[:, None], self.batch)
        return _put(total_BSKH, _cut(total_BSKH, column, self.keys) + tile_BSKH, column)

    def put_queries(self, x_BTX, tile_XGTH, row):
        return _put(x_BTX, _flat(_by_token(tile_XGTH, self.batch)), row)

    def over_queries(self, step, carry):
        """Fold step(index, first row, carry) over the tiles of queries, the last one first."""
        tiles = -(-self.length // self.queries)

        def body(i, carry):
            index = tiles - 1 - i
            return step(index, jnp.minimum(index * self.queries, self.length - self.queries), carry)

        return lax.fori_loop(0, tiles, body, carry)

    def over_keys(self, index, row, step, carry):
        """Fold step(first key, visible, carry) over the tiles of keys that queries may see."""

        def body(key_index, carry):
            column = jnp.minimum(key_index * self.keys, self.num_keys - self.keys)
            at = (row, self.queries), (column, self.keys)
            rows = row + jnp.arange(self.queries) >= index * self.queries
            columns = column + jnp.arange(self.keys) >= key_index * self.keys
            visible = _visible(self.sides, self.window, *at)
            return step(column, visible & (rows[:, None] & columns[None])[None], carry)

        return lax.fori_loop(self.first_I[index], self.end_I[index], body, carry)


def _tiled_forward(static, q_BTNH, k_BSKH, v_BSKH, sides):
    tiles = _Tiles(q_BTNH, k_BSKH, sides, static)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTX = _flat(q_BTNH)

    def rows(index, row, outputs):
        q = tiles.cut_queries(q_BTX, row)

        def columns(column, visible, carry):
            o, highest, total = carry
            k, v = (tiles.cut_keys(side, column) for side in (k_BSKH, v_BSKH))
            scores = _scores(q, k, visible, static.scale)
            new = jnp.maximum(highest, jnp.max(scores, axis=-1))
            finite = jnp.where(new == -jnp.inf, 0.0, new)
            weights, keep = jnp.exp(scores - finite[..., None]), jnp.exp(highest - finite)
            total = total * keep + jnp.sum(weights, axis=-1)
            return o * keep[..., None] + _weighted(weights, v), new, total

        start = jnp.zeros(q.shape, wide), jnp.full(q.shape[:3], -jnp.inf, wide)
        carry = (*start, jnp.zeros(q.shape[:3], wide))
        o, highest, total = tiles.over_keys(index, row, columns, carry)
        o = o / jnp.where(total > 0, total, 1.0)[..., None]
        lse = jnp.where(highest == -jnp.inf, 0.0, highest) + jnp.log(total)
        o_BTX, lse_XGT = outputs
        return tiles.put_queries(o_BTX, o, row), _put(lse_XGT, lse, row, axis=2)

    outputs = jnp.zeros_like(q_BTX), jnp.zeros(tiles.by_head, wide)
    o_BTX, lse_XGT = tiles.over_queries(rows, outputs)
    return o_BTX.reshape(q_BTNH.shape), lse_XGT.reshape(tiles.batch, -1, tiles.length)


def _tiled_backward(static, q_BTNH, k_BSKH, v_BSKH, sides, do_BTNH, lse_BNT, delta_BNT):
    tiles = _Tiles(q_BTNH, k_BSKH, sides, static)
    q_BTX, do_BTX = _flat(q_BTNH), _flat(do_BTNH)
    by_query = [x.reshape(tiles.by_head) for x in (lse_BNT, delta_BNT)]

    def rows(index, row, carry):
        dq_BTX, *sums = carry
        q, do = (tiles.cut_queries(x, row) for x in (q_BTX, do_BTX))
        lse, delta = (_cut(x, row, tiles.queries, axis=2) for x in by_query)

        def columns(column, visible, carry):
            total, dk_BSKH, dv_BSKH = carry
            k, v = (tiles.cut_keys(side, column) for side in (k_BSKH, v_BSKH))
            dq, dk, dv = _gradients(q, do, lse, delta, k, v, visible, static.scale)
            dv_BSKH = tiles.add_keys(dv_BSKH, dv, column)
            return total + dq, tiles.add_keys(dk_BSKH, dk, column), dv_BSKH

        carry = jnp.zeros(q.shape, lse.dtype), *sums
        dq, *sums = tiles.over_keys(index, row, columns, carry)
        return tiles.put_queries(dq_BTX, dq, row), *sums

    sums = (jnp.zeros(side.shape, lse_BNT.dtype) for side in (k_BSKH, v_BSKH))
    dq_BTX, *sums = tiles.over_queries(rows, (jnp.zeros_like(q_BTX), *sums))
    return dq_BTX.reshape(q_BTNH.shape), *sums
