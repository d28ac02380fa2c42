"""The XLA form of long sequences: loops over tiles of queries by keys, with an online softmax.

The scores of one tile are the largest temporary, whatever T and S. A tile of queries visits the
tiles of keys from the first to the last that any of its queries may see. The two bounds are
computed from the mask, so that earlier documents, and what a window hides, cost nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Tiles are square, a power of two from 128 to 512, and have at most this many scores: 128 MiB in
# float32; on CPUs 2 MiB, for their caches.
TILE_SIZES = (128, 512)
TILE_SCORES = 2**25
CPU_TILE_SCORES = 2**19


def visible(order, places, ids, window):
    """Visibility of queries and keys, [B or 1, queries, keys]; see reference.visibility.

    Args:
      order: (of queries, of keys), int [B or 1, n]; no key later than the query is seen.
      places: the same for the window, or None without one.
      ids: segment ids, or None.
      window: keys seen, the query's own among them; 0 for no limit.
    """
    result = order[0][:, :, None] >= order[1][:, None, :]
    if window:
        result = result & (places[0][:, :, None] - places[1][:, None, :] < window)
    if ids is not None:
        result = result & (ids[0][:, :, None] == ids[1][:, None, :])
    return result


def dot(equation, x, y):
    """An einsum summed in float32, or wider with x."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        x, y = x.astype(wide), y.astype(wide)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def tile_sizes(batch: int, heads: int, length: int, num_keys: int) -> tuple[int, int]:
    """Queries and keys of a tile."""
    scores = CPU_TILE_SCORES if jax.default_backend() == 'cpu' else TILE_SCORES
    size, largest = TILE_SIZES
    while size < largest and batch * heads * (2 * size) ** 2 <= scores:
        size *= 2
    return min(size, length), min(size, num_keys)


def _limits(ids_BT, size):
    """The least and the greatest of each tile, two arrays [B or 1, tiles]."""
    tiles = -(-ids_BT.shape[1] // size)
    padded = jnp.pad(ids_BT, ((0, 0), (0, tiles * size - ids_BT.shape[1])), mode='edge')
    tiled = padded.reshape(-1, tiles, size)
    return tiled.min(axis=2), tiled.max(axis=2)


def _bounds(order, places, ids, window, sizes):
    """First and end tile of keys for each tile of queries, int32 [tiles of queries].

    Of tiles whose ranges of order, place and segment id do not meet no pair is visible. Ranges that
    meet are visited, whatever the ids: the mask decides.
    """
    (_, latest), (earliest, _) = (_limits(x, size) for x, size in zip(order, sizes, strict=True))
    meet = latest[:, :, None] >= earliest[:, None]
    if window:
        nearest, last = _limits(places[0], sizes[0])[0], _limits(places[1], sizes[1])[1]
        meet = meet & (nearest[:, :, None] - last[:, None] < window)
    if ids is not None:
        (low, high), (key_low, key_high) = (_limits(x, n) for x, n in zip(ids, sizes, strict=True))
        meet = (
            meet & (low[:, :, None] <= key_high[:, None]) & (key_low[:, None] <= high[:, :, None])
        )
    meet_IJ = jnp.any(meet, axis=0)
    first_I = jnp.argmax(meet_IJ, axis=1).astype(jnp.int32)
    end_I = meet_IJ.shape[1] - jnp.argmax(meet_IJ[:, ::-1], axis=1).astype(jnp.int32)
    return first_I, jnp.where(jnp.any(meet_IJ, axis=1), end_I, first_I)


def _cut(x, start, size, axis=1):
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x, tile, start, axis=1):
    return lax.dynamic_update_slice_in_dim(x, tile.astype(x.dtype), start, axis)


class _Tiles:
    """Tiles of queries by tiles of keys.

    The last tile reaches back over rows of the one before it, so that all are of one size. There it
    sees nothing, and as it comes first, the tile that owns these rows overwrites what it wrote.
    """

    def __init__(self, q_BTNH, k_BSKH, mask, static):
        batch, length, heads, width = q_BTNH.shape
        self.num_keys, self.kv_heads = k_BSKH.shape[1:3]
        self.length, self.static = length, static
        self.grouped = (batch, length, self.kv_heads, heads // self.kv_heads, width)
        self.by_head = (batch, self.kv_heads, heads // self.kv_heads, length)
        self.queries, self.keys = tile_sizes(batch, heads, length, self.num_keys)
        positions_BT, key_positions_BS, segment_ids_BT, key_segment_ids_BS = mask
        self.places = self.order = positions_BT, key_positions_BS
        if static.ordered:
            self.order = jnp.arange(length)[None], jnp.arange(self.num_keys)[None]
        self.ids = None if segment_ids_BT is None else (segment_ids_BT, key_segment_ids_BS)
        sizes = self.queries, self.keys
        self.first_I, self.end_I = _bounds(self.order, self.places, self.ids, static.window, sizes)

    def flat(self, x):
        """Heads and width as one axis: else XLA transposes all of an array for the tiles' sake."""
        return x.reshape(*x.shape[:2], -1)

    def cut_queries(self, x_BTX, row):
        """A tile [B, queries, K, G, H] of an array of queries."""
        tile = _cut(x_BTX, row, self.queries)
        return tile.reshape(tile.shape[0], self.queries, *self.grouped[2:])

    def over_queries(self, step, carry):
        """step(index, first row, carry) for each tile of queries, the last one first."""
        tiles = -(-self.length // self.queries)

        def body(round, carry):
            index = tiles - 1 - round
            return step(index, jnp.minimum(index * self.queries, self.length - self.queries), carry)

        return lax.fori_loop(0, tiles, body, carry)

    def over_keys(self, index, row, step, carry):
        """step(first key, visible, carry) for the tiles of keys that a tile of queries may see."""

        def body(key_index, carry):
            column = jnp.minimum(key_index * self.keys, self.num_keys - self.keys)
            pairs = [
                None
                if sides is None
                else (_cut(sides[0], row, self.queries), _cut(sides[1], column, self.keys))
                for sides in (self.order, self.places, self.ids)
            ]
            seen = visible(*pairs, self.static.window)
            rows = row + jnp.arange(self.queries) >= index * self.queries
            columns = column + jnp.arange(self.keys) >= key_index * self.keys
            return step(column, seen & (rows[:, None] & columns[None])[None], carry)

        return lax.fori_loop(self.first_I[index], self.end_I[index], body, carry)

    def scores(self, q_BTKGH, k_BSKH, seen):
        """Scores of one tile [B, K, G, queries, keys], -inf where nothing is seen."""
        scores_BKGTS = dot('btkgh,bskh->bkgts', q_BTKGH, k_BSKH) * self.static.scale
        return jnp.where(seen[:, None, None], scores_BKGTS, -jnp.inf)


def forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """As xla_sequence.sequence_forward, with one key or more."""
    tiles = _Tiles(q_BTNH, k_BSKH, mask, static)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    batch, _, kv_heads, group, width = tiles.grouped
    q_BTX = tiles.flat(q_BTNH)

    def rows(index, row, carry):
        q = tiles.cut_queries(q_BTX, row)

        def columns(column, seen, carry):
            o, highest, total = carry
            k, v = _cut(k_BSKH, column, tiles.keys), _cut(v_BSKH, column, tiles.keys)
            scores = tiles.scores(q, k, seen)
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
        o = tiles.flat(jnp.moveaxis(o, 3, 1).astype(o_BTX.dtype))
        return _put(o_BTX, o, row), _put(lse_BKGT, lse, row, axis=3)

    carry = jnp.zeros(q_BTX.shape, q_BTNH.dtype), jnp.zeros(tiles.by_head, wide)
    o_BTX, lse_BKGT = tiles.over_queries(rows, carry)
    return o_BTX.reshape(q_BTNH.shape), lse_BKGT.reshape(batch, kv_heads * group, -1)


def backward(q_BTNH, k_BSKH, v_BSKH, mask, static, do_BTNH, lse_BNT, delta_BNT):
    """As xla_sequence.sequence_backward, with one key or more."""
    tiles = _Tiles(q_BTNH, k_BSKH, mask, static)
    wide = lse_BNT.dtype
    q_BTX, do_BTX = tiles.flat(q_BTNH), tiles.flat(do_BTNH)
    lse_BKGT, delta_BKGT = lse_BNT.reshape(tiles.by_head), delta_BNT.reshape(tiles.by_head)

    def rows(index, row, carry):
        dq_BTX, dk_BSKH, dv_BSKH = carry
        q, do = tiles.cut_queries(q_BTX, row), tiles.cut_queries(do_BTX, row)
        lse, delta = (_cut(x, row, tiles.queries, axis=3) for x in (lse_BKGT, delta_BKGT))

        def columns(column, seen, carry):
            dq, dk_BSKH, dv_BSKH = carry
            k, v = _cut(k_BSKH, column, tiles.keys), _cut(v_BSKH, column, tiles.keys)
            weights = jnp.exp(tiles.scores(q, k, seen) - lse[..., None])
            dweights = dot('btkgh,bskh->bkgts', do, v)
            dscores = (weights * (dweights - delta[..., None]) * static.scale).astype(q.dtype)
            dv = dot('bkgts,btkgh->bskh', weights.astype(do.dtype), do)
            dk = dot('bkgts,btkgh->bskh', dscores, q)
            dv_BSKH = _put(dv_BSKH, _cut(dv_BSKH, column, tiles.keys) + dv, column)
            dk_BSKH = _put(dk_BSKH, _cut(dk_BSKH, column, tiles.keys) + dk, column)
            return dq + dot('bkgts,bskh->btkgh', dscores, k), dk_BSKH, dv_BSKH

        carry = jnp.zeros(q.shape, wide), dk_BSKH, dv_BSKH
        dq, dk_BSKH, dv_BSKH = tiles.over_keys(index, row, columns, carry)
        return _put(dq_BTX, tiles.flat(dq.astype(q.dtype)), row), dk_BSKH, dv_BSKH

    sums = jnp.zeros(k_BSKH.shape, wide), jnp.zeros(v_BSKH.shape, wide)
    dq_BTX, *sums = tiles.over_queries(rows, (jnp.zeros_like(q_BTX), *sums))
    return dq_BTX.reshape(q_BTNH.shape), *sums
