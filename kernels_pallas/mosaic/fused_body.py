"""The body of the fused Hopper kernel: what its memory and its compute warpgroups do.

A stage of the ring has 128 rows: keys or values, which both tiles of a block use; or each tile has
half of them, 32 slots of each of 2 of its 8 tokens. The scores of 32 slots are a tile of 2 tokens
by 32 slots, the sum of the products of 4 stages, each with all other queries zeroed.
"""

import collections
import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic.common import LAYOUT, LOG2E, by_column, by_row, full_slice, load

TOKENS = HEADS = 8
ROWS = TOKENS * HEADS
TILES = 2  # of as many warpgroups in a block
KEYS = 128  # rows of a stage
CHUNK = 32  # slots read at a time, rows of a copy, and bits of a word of visibility
TOKENS_PER_STAGE = KEYS // TILES // CHUNK
STAGES_PER_CHUNK = TOKENS // TOKENS_PER_STAGE
LOWEST = float(jnp.finfo(jnp.float32).min)


# In shared memory: q (later the results), q_depth and lse of each tile; the ring [stages, KEYS, H];
# barriers: queries have arrived, a stage has been filled, or used by both tiles, and whose turn it
# is at the tensor core.
Shared = collections.namedtuple('Shared', 'q q_depth lse ring q_full full used turn')


def num_tiles(length):
    """Blocks of the grid along the tokens."""
    return -(-length // (TILES * TOKENS))


def tile_of(refs, sizes):
    """The place of a block's first query, and its blocks of keys and chunks of slots."""
    # One axis, as CUDA has 65,535 of the others.
    item, (batches, _, heads, _) = lax.axis_index('item'), refs.q.shape
    octet, rest = lax.rem(item, heads // HEADS), lax.div(item, heads // HEADS)
    batch = lax.rem(rest, batches)
    # Late tiles have the most keys: they start first, so that no long one remains for the end.
    tile = num_tiles(sizes.length) - 1 - lax.div(rest, batches)
    token, head = tile * (TILES * TOKENS), octet * HEADS
    last = jnp.minimum(token + TILES * TOKENS, sizes.length)
    first = jnp.int32(0) if refs.first_key is None else refs.first_key[batch, tile]
    if sizes.window:
        first = jnp.maximum(first, token - sizes.window + 1)
    return types.SimpleNamespace(
        batch=batch,
        head=head,
        kv_head=lax.div(head, sizes.group),
        token=token,
        begin=lax.div(first, KEYS),
        end=lax.div(last + KEYS - 1, KEYS),
        first_chunk=refs.bounds[0],
        end_chunk=refs.bounds[1],
    )


def stage_of(step, sizes):
    """The ring's stage that a step fills and uses."""
    return lax.rem(step, jnp.int32(sizes.stages))


def fill(refs, shared, tile, sizes):
    """The memory warpgroup: keys, values and slots into the ring, in the order of their use."""
    width = full_slice(sizes.width)

    def fill_stage(step, sources):
        stage = stage_of(step, sizes)

        @pl.when(step >= sizes.stages)
        def _():
            plgpu.barrier_wait(shared.used.at[stage])

        for i, source in enumerate(sources):
            place = shared.ring.at[stage, pl.ds(i * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(source, place, shared.full.at[stage])

    blocks = tile.end - tile.begin

    @pl.loop(0, blocks)
    def _(i):
        starts = [(tile.begin + i) * KEYS + start for start in range(0, KEYS, CHUNK)]
        for side, ref in enumerate((refs.k, refs.v)):
            rows = [
                ref.at[tile.batch, pl.ds(start, CHUNK), tile.kv_head, width] for start in starts
            ]
            fill_stage(2 * i + side, rows)

    def place(token):
        token = jnp.minimum(token, sizes.length - 1)
        if refs.places is None:
            return token
        return jnp.minimum(refs.places[tile.batch, token], refs.k_depth.shape[2] - 1)

    @pl.loop(tile.first_chunk, tile.end_chunk)
    def _(chunk):
        step = 2 * blocks + (chunk - tile.first_chunk) * (2 * STAGES_PER_CHUNK)
        slots = pl.ds(chunk * CHUNK, CHUNK)
        for side, ref in enumerate((refs.k_depth, refs.v_depth)):
            for part in range(STAGES_PER_CHUNK):
                tokens = [
                    tile.token + warpgroup * TOKENS + part * TOKENS_PER_STAGE + i
                    for warpgroup in range(TILES)
                    for i in range(TOKENS_PER_STAGE)
                ]
                rows = [ref.at[slots, tile.batch, place(t), tile.kv_head, width] for t in tokens]
                fill_stage(step + side * STAGES_PER_CHUNK + part, rows)

    steps = 2 * blocks + (tile.end_chunk - tile.first_chunk) * (2 * STAGES_PER_CHUNK)

    @pl.loop(jnp.maximum(steps - sizes.stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(shared.used.at[stage_of(step, sizes)])


def _accumulate(initial, shape, add_products, sizes):
    """`initial` (None: zeros) plus the products that add_products(add) adds."""
    if sizes.interpret:
        # The interpreter's wgmma takes no left side from registers.
        total = [jnp.zeros(shape, jnp.float32) if initial is None else initial]

        def add(a, b, transpose=False):
            a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
            b = (b.T if transpose else b).astype(jnp.float32)
            total[0] = total[0] + jnp.dot(a.astype(jnp.float32), b)
            # The interpreter lets a copy overtake these reads, though not those of wgmma.
            plgpu.commit_smem()

        add_products(add)
        return total[0]

    def run(sum_ref):
        def add(a, b, transpose=False):
            plgpu.wgmma(sum_ref, a, b.T if transpose else b)

        add_products(add)
        return sum_ref[...] if initial is None else None

    if initial is None:
        return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
    return pl.run_state(run)(plgpu.ACC.init(initial))


def _iota(shape, dimension, layout=LAYOUT):
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def _soften(scores, acc, highest, total, factor):
    """One step of the online softmax: (weights, acc, highest, total), in base 2."""
    new = jnp.maximum(highest, scores.max(axis=1) * factor)
    keep = jnp.exp2(highest - new)
    weights = jnp.exp2(scores * factor - by_row(new, scores.shape))
    return weights, acc * by_row(keep, acc.shape), new, total * keep


def _load_queries(refs, shared, tile, token, warpgroup, sizes):
    sides = [(refs.q, shared.q)]
    if sizes.own_query:
        sides.append((refs.q_depth, shared.q_depth))
    for source, target in sides:
        for t in range(TOKENS):
            own = jnp.minimum(token + t, sizes.length - 1)
            rows = source.at[tile.batch, own, pl.ds(tile.head, HEADS), full_slice(sizes.width)]
            place = target.at[warpgroup, pl.ds(t * HEADS, HEADS)]
            plgpu.copy_gmem_to_smem(rows, place, shared.q_full.at[warpgroup])
    plgpu.barrier_wait(shared.q_full.at[warpgroup])


def _visible_keys(refs, tile, token, block, sizes):
    shape = (ROWS, KEYS)
    tokens = token + lax.div(_iota(shape, 0), HEADS)
    keys = block * KEYS + _iota(shape, 1)
    visible = tokens >= keys
    if sizes.window:
        visible &= tokens - keys < sizes.window
    if sizes.segments:
        group = lax.div(token, TOKENS)
        own = load(refs.row_ids.at[tile.batch, group], LAYOUT.reduce(1), optimized=False)
        ids = refs.ids.at[tile.batch, pl.ds(block * KEYS, KEYS)]
        ids = load(ids, LAYOUT.reduce(0), optimized=False)
        visible &= by_row(own, shape) == by_column(ids, shape)
    return visible


def _attend_keys(refs, shared, tile, token, warpgroup, sizes, carry):
    """The sequence's part; two warpgroups take turns at the tensor core."""
    dtype = shared.ring.dtype

    def turn():
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def one(block, carry, masked):
        acc, highest, total = carry
        step = 2 * (block - tile.begin)
        k_stage, v_stage = stage_of(step, sizes), stage_of(step + 1, sizes)
        plgpu.barrier_wait(shared.full.at[k_stage])

        def products(add):
            add(shared.q.at[warpgroup], shared.ring.at[k_stage], transpose=True)
            turn()

        scores = _accumulate(None, (ROWS, KEYS), products, sizes)
        plgpu.barrier_arrive(shared.used.at[k_stage])
        if masked:
            visible = _visible_keys(refs, tile, token, block, sizes)
            scores = jnp.where(visible, scores, -jnp.inf)
        weights, acc, highest, total = _soften(scores, acc, highest, total, sizes.factor)
        total += weights.sum(axis=1)
        narrow = weights.astype(dtype)
        acc, total, highest, narrow = lax.optimization_barrier((acc, total, highest, narrow))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.full.at[v_stage])
        plgpu.barrier_wait(shared.turn)
        acc = _accumulate(acc, acc.shape, lambda add: add(narrow, shared.ring.at[v_stage]), sizes)
        plgpu.barrier_arrive(shared.used.at[v_stage])
        return acc, highest, total

    plain, masked = (functools.partial(one, masked=masked) for masked in (False, True))
    pl.when(warpgroup == 1)(turn)
    if sizes.segments:
        carry = lax.fori_loop(tile.begin, tile.end, masked, carry)
    else:
        causal = lax.div(tile.token + 1, KEYS)  # blocks before see no future
        inside = tile.begin
        if sizes.window:
            first = jnp.maximum(tile.token + TILES * TOKENS - sizes.window, 0)
            inside = jnp.clip(lax.div(first + KEYS - 1, KEYS), tile.begin, causal)
            carry = lax.fori_loop(tile.begin, inside, masked, carry)
        carry = lax.fori_loop(inside, causal, plain, carry)
        carry = lax.fori_loop(causal, tile.end, masked, carry)
    pl.when(warpgroup == 0)(turn)
    return carry


def _attend_slots(refs, shared, tile, token, warpgroup, sizes, carry):
    dtype, half = shared.ring.dtype, KEYS // TILES
    queries = (shared.q_depth if sizes.own_query else shared.q).at[warpgroup]
    base = 2 * (tile.end - tile.begin)
    group = lax.div(token, TOKENS) if sizes.by_token else 0
    batch = tile.batch if sizes.by_token else 0

    def of_part(part, x):
        here = lax.div(_iota(x.shape, 0), TOKENS_PER_STAGE * HEADS) == part
        return jnp.where(here, x, jnp.zeros_like(x))

    def own_slots(stage):
        return shared.ring.at[stage, pl.ds(pl.multiple_of(warpgroup * half, half), half)]

    def clear_hidden(stage, chunk, part):
        """Zeroes the hidden slots of a stage: they may hold NaN, and 0 times NaN is NaN."""
        words = [
            refs.words[batch, group, chunk, (part * TOKENS_PER_STAGE + i) * HEADS]
            for i in range(TOKENS_PER_STAGE)
        ]

        @pl.when(functools.reduce(jnp.bitwise_and, words) != -1)
        def _():
            place = own_slots(stage)
            row = _iota((half,), 0, LAYOUT.reduce(1))
            word = jnp.where(row < CHUNK, words[0], words[1])
            seen = lax.shift_right_logical(word, lax.rem(row, CHUNK)) & 1
            x = load(place, LAYOUT)
            place[...] = jnp.where(by_row(seen, x.shape) != 0, x, jnp.zeros_like(x))
            plgpu.commit_smem()

    def add_parts(add, left, step, chunk, clear, transpose):
        for part in range(STAGES_PER_CHUNK):
            stage = stage_of(step + part, sizes)
            plgpu.barrier_wait(shared.full.at[stage])
            if clear:
                clear_hidden(stage, chunk, part)
            # Queries are loaded again: otherwise the compiler keeps all parts of them in registers.
            rows = load(queries, LAYOUT) if left is None else left
            add(of_part(part, rows), own_slots(stage), transpose)
            if not sizes.interpret:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.used.at[stage])

    def one(chunk, carry):
        acc, highest, total = carry
        step = base + (chunk - tile.first_chunk) * (2 * STAGES_PER_CHUNK)
        word = load(refs.words.at[batch, group, chunk], LAYOUT.reduce(1), optimized=False)
        # If all tokens have the same visible slots, hidden ones fall into columns that are dropped.
        scores = _accumulate(
            None,
            (ROWS, half),
            lambda add: add_parts(add, None, step, chunk, sizes.by_token, True),
            sizes,
        )
        row, column = (_iota(scores.shape, axis) for axis in (0, 1))
        bits = lax.shift_right_logical(by_row(word, scores.shape), lax.rem(column, CHUNK))
        own = lax.rem(lax.div(row, HEADS), TOKENS_PER_STAGE) == lax.div(column, CHUNK)
        scores = jnp.where(((bits & 1) != 0) & own, scores, -jnp.inf)
        weights, acc, highest, total = _soften(scores, acc, highest, total, sizes.factor)
        total += weights.sum(axis=1)
        narrow, step = weights.astype(dtype), step + STAGES_PER_CHUNK
        acc = _accumulate(
            acc,
            acc.shape,
            lambda add: add_parts(add, narrow, step, chunk, True, False),
            sizes,
        )
        return acc, highest, total

    return lax.fori_loop(tile.first_chunk, tile.end_chunk, one, carry)


def compute(refs, shared, tile, warpgroup, sizes):
    """A compute warpgroup: one tile of ROWS queries, from loading them to storing their results."""
    token = tile.token + warpgroup * TOKENS
    _load_queries(refs, shared, tile, token, warpgroup, sizes)
    full = functools.partial(plgpu.layout_cast, new_layout=LAYOUT.reduce(1))
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, sizes.width), jnp.float32), LAYOUT),
        full(jnp.full((ROWS,), LOWEST, jnp.float32)),
        full(jnp.zeros((ROWS,), jnp.float32)),
    )
    for attend in (_attend_keys, _attend_slots):
        carry = attend(refs, shared, tile, token, warpgroup, sizes, carry)
    acc, highest, total = carry
    # Otherwise the compiler keeps the addresses of the queries in registers throughout.
    token, warpgroup = lax.optimization_barrier((token, warpgroup))
    result, lse = shared.q.at[warpgroup], shared.lse.at[warpgroup]
    result[...] = (acc / by_row(total, acc.shape)).astype(shared.ring.dtype)
    lse[...] = highest * (1 / LOG2E) + jnp.log(total)
    plgpu.commit_smem()
    for t in range(TOKENS):

        @pl.when(token + t < sizes.length)
        def _(t=t):
            heads = pl.ds(tile.head, HEADS)
            rows = refs.o.at[tile.batch, token + t, heads, full_slice(sizes.width)]
            plgpu.copy_smem_to_gmem(result.at[pl.ds(t * HEADS, HEADS)], rows)

    octet, group = lax.div(tile.head, HEADS), lax.div(token, TOKENS)
    plgpu.copy_smem_to_gmem(lse, refs.lse.at[tile.batch, octet, group])
    plgpu.wait_smem_to_gmem(0)
