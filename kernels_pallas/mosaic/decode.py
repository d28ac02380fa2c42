"""Decoding on Hopper: new tokens over a cache, each other and their depth slots, in one softmax.

Each row and key/value head has several blocks of the grid, of one warpgroup each. Each computes a
split of the cache; one more computes the new tokens and their slots. XLA merges their results
(docs/depth_attention.md, section 9). Sizes: `Sizes`. Body: `_decode`. Call: `decode_forward`.
There is no vjp. Reference: kernels_pallas/decode.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common, depth
from kernels_pallas.mosaic.common import (
    CHUNK,
    LAYOUT,
    OCTET,
    TRANSPOSED,
    by_column,
    by_row,
    iota,
    pad,
    round_up,
)

MAX_COLUMNS = 64  # new tokens times query heads of a key/value head
MAX_TOKENS = 32  # each has a bit of an int32
BLOCKS = 2 * 132  # wanted in the grid: two for each processor of an H200
LEAST_CHUNKS = 4  # of a full cache in each split
MAX_STAGES = 4
SHARED_BYTES = 112 * 1024  # of 227 KiB, so that two blocks share a processor


def unsupported(shapes, device) -> str | None:
    """Return why the kernel does not support `backends.Shapes`, in one line; None: it does."""
    if reason := depth.unsupported(shapes, device):
        return reason
    tokens, columns = shapes.q[1], shapes.q[1] * shapes.q[2] // shapes.k[2]
    if tokens > MAX_TOKENS or columns > MAX_COLUMNS:
        most = f'at most {MAX_TOKENS}, and {MAX_COLUMNS} queries of a key/value head'
        return f'{tokens} new tokens of a row with {columns} queries must be {most}'
    if not common.swizzle_of(shapes.places, shapes.dtypes[0]) or shapes.places < 16:
        return f'a cache of {shapes.places} places must be divisible by 16'
    return None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    rows: int  # C
    tokens: int  # T, new tokens of a row
    kv_heads: int
    group: int  # G, query heads of a key/value head
    width: int
    places: int  # S, length of a cache row
    slots: int  # L, rounded up to a multiple of 8
    dtype: jnp.dtype
    own_query: bool  # other queries for the slots

    @property
    def chunks(self):
        """Chunks of a row's cache."""
        return -(-self.places // CHUNK)

    @property
    def slot_chunks(self):
        """Chunks of a token's slots."""
        return -(-self.slots // CHUNK)

    @property
    def splits(self):
        """Blocks among which a row's cache is split."""
        wanted = -(-BLOCKS // (self.rows * self.kv_heads))
        return max(1, min(wanted, self.chunks // LEAST_CHUNKS))

    @property
    def blocks(self):
        """Blocks of the grid: the splits and one more for each row and key/value head."""
        return self.rows * self.kv_heads * (self.splits + 1)

    @property
    def queries(self):
        """Queries of a row and key/value head, T G: token after token."""
        return self.tokens * self.group

    @property
    def heads(self):
        """Queries of a row and key/value head in global memory, padded to eights above 8."""
        return self.queries if self.queries <= OCTET else round_up(self.queries, OCTET)

    @property
    def columns(self):
        """Queries in shared memory, padded for matrix products."""
        return round_up(self.queries, 16)

    @property
    def padded_width(self):
        """H, padded to the 64 columns that a matrix product reads at once."""
        return round_up(self.width, CHUNK)

    @property
    def swizzle(self):
        """Bytes of a swizzle whose tiles divide rows of the cache and of the slots."""
        sides = self.places, self.width
        return min(common.swizzle_of(side, self.dtype) for side in sides)

    @property
    def stages(self):
        """Chunks in shared memory at once."""
        size, wide = self.dtype.itemsize, self.columns * self.padded_width
        fixed = (1 + self.own_query) * wide * size + wide * 4 + self.columns * CHUNK * size + 4096
        room = (SHARED_BYTES - fixed) // (2 * self.padded_width * CHUNK * size)
        return min(max(room, 2), MAX_STAGES)


class _Cache:
    """One split of a row's cache: chunks of 64 places, keys and values [H, 64]."""

    key_axis = 1  # of the values

    def __init__(self, refs, s, sizes, row, head, split):
        self.refs, self.s, self.sizes, self.row = refs, s, sizes, row
        # Chunks first to end have visible places; in chunks inside to outside nothing is hidden.
        first, end, self.inside, self.outside = (refs.bounds[row, i] for i in range(4))
        most = lax.div(end - first + (sizes.splits - 1), jnp.int32(sizes.splits))
        self.first = first + split * most
        self.count = jnp.clip(end - self.first, 0, most)
        self.place = refs.rows[row] * sizes.kv_heads + head
        self.ready = s.k_ready, s.v_ready

    def load(self, chunk, stage):
        """Start the copies of a chunk."""
        refs, s, places = self.refs, self.s, pl.ds((self.first + chunk) * CHUNK, CHUNK)
        words = refs.words.at[self.row, places]
        plgpu.copy_gmem_to_smem(words, s.words.at[stage], self.ready[0].at[stage])
        width = common.full_slice(self.sizes.padded_width)
        for source, target, ready in zip((refs.k, refs.v), (s.k, s.v), self.ready, strict=True):
            source = source.at[self.place, width, places]
            plgpu.copy_gmem_to_smem(source, target.at[stage], ready.at[stage])

    def score_products(self, chunk, stage):
        """Return pairs of factors whose products add up to the scores [64, columns]."""
        del chunk
        return [(self.s.k.at[stage].T, self.s.q.at[0].T)]

    def values(self, stage):
        """Return references to the values, one for each part of the width."""
        return [self.s.v.at[stage]]

    def is_complete(self, chunk):
        """Return whether no place of a chunk is hidden."""
        chunk += self.first
        return (chunk >= self.inside) & (chunk < self.outside)


class _New:
    """The new tokens of a row, then the slots of each token: chunks [64, H]."""

    key_axis = 0

    def __init__(self, refs, s, sizes, row, head):
        self.refs, self.s, self.sizes, self.row, self.head = refs, s, sizes, row, head
        self.count = jnp.int32(1 + sizes.tokens * sizes.slot_chunks)
        self.ready = s.k_new_ready, s.v_new_ready
        starts = range(0, sizes.padded_width, CHUNK)
        # With a constant start the slice could not exceed the array.
        zero = row * 0
        self.pieces = [(pl.ds(i, CHUNK), pl.ds(zero + i, CHUNK)) for i in starts]

    def load(self, chunk, stage):
        """Start the copies of a chunk."""
        refs, s, sizes = self.refs, self.s, self.sizes
        words = refs.new_words.at[self.row, pl.ds(chunk * CHUNK, CHUNK)]
        plgpu.copy_gmem_to_smem(words, s.words.at[stage], self.ready[0].at[stage])

        def copy(sides, first, place):
            for source, target, ready in zip(sides, (s.k, s.v), self.ready, strict=True):
                for piece, columns in self.pieces:
                    source_rows = source.at[pl.ds(first, CHUNK), place, columns]
                    plgpu.copy_gmem_to_smem(source_rows, target.at[stage, piece], ready.at[stage])

        def copy_tokens():
            copy((refs.k_new, refs.v_new), chunk, self.row * sizes.kv_heads + self.head)

        def copy_slots():
            token = lax.div(chunk - 1, jnp.int32(sizes.slot_chunks))
            first = (chunk - 1 - token * sizes.slot_chunks) * CHUNK
            place = (self.row * sizes.tokens + token) * sizes.kv_heads + self.head
            copy((refs.k_depth, refs.v_depth), first, place)

        lax.cond(chunk == 0, copy_tokens, copy_slots) if sizes.slots else copy_tokens()

    def score_products(self, chunk, stage):
        """As `_Cache.score_products`."""
        queries = self.s.q.at[jnp.where(chunk == 0, 0, int(self.sizes.own_query))]
        return [(self.s.k.at[stage, piece], queries.at[:, piece].T) for piece, _ in self.pieces]

    def values(self, stage):
        """As `_Cache.values`."""
        return [self.s.v.at[stage, piece] for piece, _ in self.pieces]

    def is_complete(self, chunk):
        """Return False: slots rarely fill a chunk."""
        return chunk < 0


def _attend(keys, s, sizes, scale):
    """Compute the softmax over `keys`, a `_Cache` or `_New`.

    Returns the highest score [columns] in base 2, the total of the weights [columns], and the
    weighted sums of values, each [a part of the width, columns].
    """
    stages, scores_shape = sizes.stages, (CHUNK, sizes.columns)

    def start(step):
        pl.when(step < keys.count)(lambda: keys.load(step, lax.rem(step, jnp.int32(stages))))

    def hide(stage):
        spread = (by_row, by_column)[keys.key_axis]
        words = common.load(s.words.at[stage], LAYOUT.reduce(1 - keys.key_axis))
        for part in keys.values(stage):
            x = common.load(part, LAYOUT)
            part[...] = jnp.where(spread(words, x.shape) != 0, x, jnp.zeros_like(x))

    def one(step, carry):
        highest, total, sums = carry
        stage = lax.rem(step, jnp.int32(stages))
        # The next chunk goes to the stage of the last step; the copy waits for all four warps.
        start(step + (stages - 1))
        plgpu.barrier_wait(keys.ready[0].at[stage])
        scores = common.sum_products(scores_shape, keys.score_products(step, stage))
        words = by_row(common.load(s.words.at[stage], LAYOUT.reduce(1)), scores_shape)
        if sizes.tokens > 1:
            token = lax.div(iota(scores_shape, 1), jnp.int32(sizes.group))
            words = lax.shift_right_logical(words, token) & 1
        scores = jnp.where(words != 0, scores * (scale * common.LOG2E), -jnp.inf)
        weights, keep, new = common.soften_columns(scores, highest)
        s.weights.T[...] = plgpu.layout_cast(weights.astype(sizes.dtype), TRANSPOSED)
        plgpu.barrier_wait(keys.ready[1].at[stage])
        # A hidden place may hold NaN, and 0 times NaN is NaN.
        pl.when(jnp.logical_not(keys.is_complete(step)))(lambda: hide(stage))
        plgpu.commit_smem()
        added = []
        for old, values in zip(sums, keys.values(stage), strict=True):
            values = values if keys.key_axis else values.T
            more = common.product(old.shape, values, s.weights.T)
            added.append(old * by_column(keep, old.shape) + more)
        # Totals are summed over rows only at the end, since that sum crosses warps.
        return new, total * by_column(keep, scores_shape) + weights, added

    # A constant step would make constant slices, which copies do not accept.
    zero = lax.axis_index('block') * 0
    for step in range(stages - 1):
        start(zero + step)
    rows = [part.shape[keys.key_axis ^ 1] for part in keys.values(0)]

    def full(shape, value, layout=LAYOUT):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    carry = (
        full((sizes.columns,), -jnp.inf, LAYOUT.reduce(0)),
        full(scores_shape, 0.0),
        [full((size, sizes.columns), 0.0) for size in rows],
    )
    highest, total, sums = lax.fori_loop(0, keys.count, one, carry)
    return highest, total.sum(axis=0), sums


def _decode(refs, s, sizes, scale):
    """The body of the kernel: one block, from arrays `refs` and shared memory `s`, by name."""
    block = lax.axis_index('block')
    # The block of new tokens comes first, since it may be the longest.
    of_pair = jnp.int32(sizes.splits + 1)
    pair, split = lax.div(block, of_pair), lax.rem(block, of_pair)
    row, head = lax.div(pair, jnp.int32(sizes.kv_heads)), lax.rem(pair, jnp.int32(sizes.kv_heads))
    tile = common.full_slice(sizes.columns), common.full_slice(sizes.padded_width)
    queries = (refs.q, refs.q_depth) if sizes.own_query else (refs.q,)
    for i, source in enumerate(queries):
        plgpu.copy_gmem_to_smem(source.at[pair, *tile], s.q.at[i], s.q_ready)
    plgpu.barrier_wait(s.q_ready)

    def finish(keys):
        highest, total, sums = _attend(keys, s, sizes, scale)
        size = sizes.padded_width // len(sums)
        for i, part in enumerate(sums):
            columns = s.out.at[:, pl.ds(i * size, size)]
            columns.T[...] = plgpu.layout_cast(part, TRANSPOSED)
        s.stats.at[0][...] = highest
        s.stats.at[1][...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.out, refs.o.at[block, *tile])
        plgpu.copy_smem_to_gmem(s.stats, refs.stats.at[block])

    pl.when(split == 0)(lambda: finish(_New(refs, s, sizes, row, head)))
    pl.when(split > 0)(lambda: finish(_Cache(refs, s, sizes, row, head, split - 1)))
    plgpu.wait_smem_to_gmem(0)


def _words(visible_CTX):
    """Return int32 [C, X]; bit t: token t sees the place."""
    bits_T = jnp.left_shift(1, jnp.arange(visible_CTX.shape[1], dtype=jnp.int32))
    return jnp.sum(jnp.where(visible_CTX, bits_T[:, None], 0), axis=1, dtype=jnp.int32)


def _bounds(words_CS):
    """Return int32 [C, 4]: first and end of chunks with visible places, and of complete chunks.

    Complete chunks have no hidden place. If they are not one run, the second range is empty.
    """
    rows, places = words_CS.shape
    seen_CXP = pad(words_CS != 0, 1, round_up(places, CHUNK)).reshape(rows, -1, CHUNK)
    index_X, ends = jnp.arange(seen_CXP.shape[1], dtype=jnp.int32), []
    some_CX, every_CX = jnp.any(seen_CXP, axis=2), jnp.all(seen_CXP, axis=2)
    for chosen_CX in (some_CX, every_CX):
        end_C = jnp.max(jnp.where(chosen_CX, index_X + 1, 0), axis=1)
        first_C = jnp.min(jnp.where(chosen_CX, index_X, len(index_X)), axis=1)
        ends += [jnp.minimum(first_C, end_C), end_C]
    run_C = ends[3] - ends[2] == jnp.sum(every_CX, axis=1, dtype=jnp.int32)
    return jnp.stack([*ends[:3], jnp.where(run_C, ends[3], 0)], axis=1)


def _new_words(visible_CTT, slots, sizes):
    """Return `_words` of the new tokens and of their slots: int32 [C, chunks of `_New` * 64]."""
    words = [pad(_words(visible_CTT), 1, CHUNK)]
    if sizes.slots:
        k_LCTKH, _, mask_LCT = slots
        shape = k_LCTKH.shape[:3]
        mask_LCT = jnp.ones(shape, bool) if mask_LCT is None else mask_LCT
        bits_T = jnp.left_shift(1, jnp.arange(sizes.tokens, dtype=jnp.int32))
        bits_LCT = pad(jnp.where(mask_LCT, bits_T, 0), 0, sizes.slot_chunks * CHUNK)
        words.append(jnp.moveaxis(bits_LCT, 0, 2).reshape(sizes.rows, -1))
    return jnp.concatenate(words, axis=1)


def _operands(q_CTNH, new, cache, visible_CTS, visible_CTT, rows_C, slots, q_depth_CTNH, sizes):
    """Return the kernel's arrays by name."""
    words_CS = _words(visible_CTS)
    bounds_C4 = _bounds(words_CS)
    if rows_C is None:
        rows_C = jnp.arange(sizes.rows, dtype=jnp.int32)
    last = cache[0].shape[0] - 1
    bounds_C4 = jnp.where((rows_C <= last)[:, None], bounds_C4, 0)

    def by_pair(q_CTNH):
        q = q_CTNH.reshape(sizes.rows, sizes.tokens, sizes.kv_heads, sizes.group, sizes.width)
        q = jnp.moveaxis(q, 1, 2).reshape(-1, sizes.queries, sizes.width)
        return pad(q, 1, sizes.heads)

    def by_key(side_XYKH, size):
        """Return [keys padded to eights, other axes as one, H]."""
        size = round_up(size, OCTET) if size > OCTET else size
        return pad(side_XYKH, 0, size).reshape(size, -1, sizes.width)

    operands = {
        'bounds': bounds_C4,
        'rows': jnp.minimum(rows_C, last).astype(jnp.int32),
        'words': words_CS,
        'new_words': _new_words(visible_CTT, slots, sizes),
        'q': by_pair(q_CTNH),
    }
    for name, side in zip(('k', 'v'), cache, strict=True):
        operands[name] = side.reshape(-1, sizes.width, sizes.places)
    for name, side in zip(('k_new', 'v_new'), new, strict=True):
        operands[name] = by_key(jnp.moveaxis(side, 1, 0), sizes.tokens)
    if sizes.own_query:
        operands['q_depth'] = by_pair(q_depth_CTNH)
    if sizes.slots:
        for name, side in zip(('k_depth', 'v_depth'), slots, strict=False):
            operands[name] = by_key(side, sizes.slots)
    return operands


def _join(o, stats, sizes):
    """Merge the softmaxes of the blocks of each row and key/value head: float32 [C, K, T G, H]."""
    shape = sizes.rows, sizes.kv_heads, sizes.splits + 1
    o = o.reshape(*shape, sizes.heads, sizes.width)[:, :, :, : sizes.queries]
    stats = stats.reshape(*shape, 2, sizes.columns)[..., : sizes.queries]
    highest, total = stats[:, :, :, 0], stats[:, :, :, 1]
    # A new token sees itself, so the highest score is finite.
    weights = jnp.exp2(highest - jnp.max(highest, axis=2, keepdims=True))
    total = jnp.sum(weights * total, axis=2)
    return jnp.sum(weights[..., None] * o, axis=2) / total[..., None]


def decode_forward(
    q_CTNH,
    k_CTKH,
    v_CTKH,
    k_BKHS,
    v_BKHS,
    visible_CTS,
    visible_CTT,
    *,
    rows_C=None,
    slots=None,
    q_depth_CTNH=None,
    interpret: bool = False,
) -> jax.Array:
    """Compute `decode.decode_forward` for bfloat16 or float16; the cache is read in place."""
    rows, tokens, heads, width = q_CTNH.shape
    _, kv_heads, _, places = k_BKHS.shape
    held = 0 if slots is None else slots[0].shape[0]
    sizes = Sizes(
        rows=rows,
        tokens=tokens,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        width=width,
        places=places,
        slots=round_up(held, OCTET),
        dtype=jnp.dtype(k_BKHS.dtype),
        own_query=q_depth_CTNH is not None and held > 0,
    )
    new, cache = (k_CTKH, v_CTKH), (k_BKHS, v_BKHS)
    operands = _operands(
        q_CTNH, new, cache, visible_CTS, visible_CTT, rows_C, slots, q_depth_CTNH, sizes
    )
    stages, wide = sizes.stages, (sizes.columns, sizes.padded_width)
    tiles = common.tiled((stages, sizes.padded_width, CHUNK), sizes.dtype, sizes.swizzle)
    pieces = sizes.padded_width // CHUNK
    shared = {
        'q': common.tiled((1 + sizes.own_query, *wide), sizes.dtype, sizes.swizzle),
        'k': tiles,
        'v': tiles,
        'words': plgpu.SMEM((stages, CHUNK), jnp.int32),
        'weights': common.tiled((sizes.columns, CHUNK), sizes.dtype, sizes.swizzle),
        'out': common.tiled(wide, jnp.float32, common.swizzle_of(width, jnp.float32)),
        'stats': plgpu.SMEM((2, sizes.columns), jnp.float32),
        'q_ready': plgpu.Barrier(num_arrivals=1 + sizes.own_query),
        'k_ready': plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        'v_ready': plgpu.Barrier(num_barriers=stages),
        'k_new_ready': plgpu.Barrier(num_barriers=stages, num_arrivals=1 + pieces),
        'v_new_ready': plgpu.Barrier(num_barriers=stages, num_arrivals=pieces),
    }
    results = {
        'o': jax.ShapeDtypeStruct((sizes.blocks, sizes.heads, width), jnp.float32),
        'stats': jax.ShapeDtypeStruct((sizes.blocks, 2, sizes.columns), jnp.float32),
    }
    body = functools.partial(_decode, sizes=sizes, scale=width**-0.5)
    o, stats = common.run_one_warpgroup(
        'decode', body, operands, results, shared, sizes.blocks, interpret
    )
    o = _join(o, stats, sizes).reshape(rows, kv_heads, tokens, -1, width)
    return jnp.moveaxis(o, 1, 2).reshape(q_CTNH.shape).astype(q_CTNH.dtype)
