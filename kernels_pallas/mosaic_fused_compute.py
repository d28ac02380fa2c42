"""The compute side of the fused Hopper kernel: a warpgroup's 64 queries, over keys, then slots.

The scores of a chunk of 32 slots are block-diagonal: a token's slots meet its own 8 rows only. A
stage holds 2 tokens' slots, so that the scores fit a tile of 64 columns, 2 tokens by 32 slots, to
which the products of all 4 stages are added, each with the queries of all other tokens zeroed.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import _compat
from kernels_pallas.mosaic_fused_ring import (
    CHUNK,
    HEADS,
    KEYS,
    ROWS,
    STAGES_A_CHUNK,
    TILES,
    TOKENS,
    TOKENS_A_STAGE,
    stage_of,
)
from kernels_pallas.mosaic_walk import whole

WGMMA = plgpu.Layout.WGMMA
LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


def _accumulate(initial, shape, add_products, static):
    """`initial` (None: zeros) plus the products that add_products(add) adds."""
    if static.interpret:
        # The interpreter's wgmma takes no left side from registers.
        total = [jnp.zeros(shape, jnp.float32) if initial is None else initial]

        def add(a, b, transpose=False):
            a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
            b = (b.T if transpose else b).astype(jnp.float32)
            total[0] = total[0] + jnp.dot(a.astype(jnp.float32), b)
            # To it these were reads that a copy may overtake; those of wgmma are not.
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


def _across(x_R, shape):
    return lax.broadcast_in_dim(x_R, shape, [0])


def _iota(shape, dimension, layout=WGMMA):
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def _soften(scores, acc, highest, total, factor):
    """One step of the online softmax: (weights, acc, highest, total), in base 2."""
    new = jnp.maximum(highest, scores.max(axis=1) * factor)
    keep = jnp.exp2(highest - new)
    weights = jnp.exp2(scores * factor - _across(new, scores.shape))
    return weights, acc * _across(keep, acc.shape), new, total * keep


def _load_queries(refs, shared, tile, token, warpgroup, static):
    sides = [(refs.q, shared.q)]
    if static.own_query:
        sides.append((refs.q_depth, shared.q_depth))
    for source, target in sides:
        for t in range(TOKENS):
            own = jnp.minimum(token + t, static.length - 1)
            rows = source.at[tile.batch, own, pl.ds(tile.head, HEADS), whole(static.width)]
            place = target.at[warpgroup, pl.ds(t * HEADS, HEADS)]
            plgpu.copy_gmem_to_smem(rows, place, shared.q_full.at[warpgroup])
    plgpu.barrier_wait(shared.q_full.at[warpgroup])


def _visible_keys(refs, tile, token, block, static):
    """Visibility [ROWS, KEYS] of a block of keys."""
    shape = (ROWS, KEYS)
    tokens = token + lax.div(_iota(shape, 0), HEADS)
    keys = block * KEYS + _iota(shape, 1)
    visible = tokens >= keys
    if static.window:
        visible &= tokens - keys < static.window
    if static.segments:
        group = lax.div(token, TOKENS)
        own = _compat.load(refs.row_ids.at[tile.batch, group], WGMMA.reduce(1), optimized=False)
        ids = _compat.load(
            refs.ids.at[tile.batch, pl.ds(block * KEYS, KEYS)], WGMMA.reduce(0), optimized=False
        )
        visible &= _across(own, shape) == lax.broadcast_in_dim(ids, shape, [1])
    return visible


def _attend_keys(refs, shared, tile, token, warpgroup, static, carry):
    """The sequence's part; two warpgroups take turns at the tensor core."""
    dtype = shared.ring.dtype

    def turn():
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def one(block, carry, masked):
        acc, highest, total = carry
        step = 2 * (block - tile.begin)
        k_stage, v_stage = stage_of(step, static), stage_of(step + 1, static)
        plgpu.barrier_wait(shared.full.at[k_stage])

        def products(add):
            add(shared.q.at[warpgroup], shared.ring.at[k_stage], transpose=True)
            turn()

        scores = _accumulate(None, (ROWS, KEYS), products, static)
        plgpu.barrier_arrive(shared.used.at[k_stage])
        if masked:
            visible = _visible_keys(refs, tile, token, block, static)
            scores = jnp.where(visible, scores, -jnp.inf)
        weights, acc, highest, total = _soften(scores, acc, highest, total, static.factor)
        total += weights.sum(axis=1)
        narrow = weights.astype(dtype)
        acc, total, highest, narrow = lax.optimization_barrier((acc, total, highest, narrow))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.full.at[v_stage])
        plgpu.barrier_wait(shared.turn)
        acc = _accumulate(acc, acc.shape, lambda add: add(narrow, shared.ring.at[v_stage]), static)
        plgpu.barrier_arrive(shared.used.at[v_stage])
        return acc, highest, total

    plain, masked = (functools.partial(one, masked=masked) for masked in (False, True))
    pl.when(warpgroup == 1)(turn)
    if static.segments:
        carry = lax.fori_loop(tile.begin, tile.end, masked, carry)
    else:
        causal = lax.div(tile.token + 1, KEYS)  # blocks before see no future
        inside = tile.begin
        if static.window:
            first = jnp.maximum(tile.token + TILES * TOKENS - static.window, 0)
            inside = jnp.clip(lax.div(first + KEYS - 1, KEYS), tile.begin, causal)
            carry = lax.fori_loop(tile.begin, inside, masked, carry)
        carry = lax.fori_loop(inside, causal, plain, carry)
        carry = lax.fori_loop(causal, tile.end, masked, carry)
    pl.when(warpgroup == 0)(turn)
    return carry


def _attend_slots(refs, shared, tile, token, warpgroup, static, carry):
    """The slots of the tile's tokens, chunk by chunk."""
    dtype, half = shared.ring.dtype, KEYS // TILES
    queries = (shared.q_depth if static.own_query else shared.q).at[warpgroup]
    base = 2 * (tile.end - tile.begin)
    group = lax.div(token, TOKENS) if static.by_token else 0
    batch = tile.batch if static.by_token else 0

    def of_part(part, x):
        here = lax.div(_iota(x.shape, 0), TOKENS_A_STAGE * HEADS) == part
        return jnp.where(here, x, jnp.zeros_like(x))

    def own_slots(stage):
        return shared.ring.at[stage, pl.ds(pl.multiple_of(warpgroup * half, half), half)]

    def clear_hidden(stage, chunk, part):
        """Zeros for what a stage's tokens do not see: it may be NaN, and 0 times NaN is NaN."""
        words = [
            refs.words[batch, group, chunk, (part * TOKENS_A_STAGE + i) * HEADS]
            for i in range(TOKENS_A_STAGE)
        ]

        @pl.when(functools.reduce(jnp.bitwise_and, words) != -1)
        def _():
            place = own_slots(stage)
            row = _iota((half,), 0, WGMMA.reduce(1))
            word = jnp.where(row < CHUNK, words[0], words[1])
            seen = lax.shift_right_logical(word, lax.rem(row, CHUNK)) & 1
            x = _compat.load(place, WGMMA)
            place[...] = jnp.where(_across(seen, x.shape) != 0, x, jnp.zeros_like(x))
            plgpu.commit_smem()

    def add_parts(add, left, step, chunk, clear, transpose):
        for part in range(STAGES_A_CHUNK):
            stage = stage_of(step + part, static)
            plgpu.barrier_wait(shared.full.at[stage])
            if clear:
                clear_hidden(stage, chunk, part)
            # Queries are loaded anew: else the compiler keeps every part of them in registers.
            rows = _compat.load(queries, WGMMA) if left is None else left
            add(of_part(part, rows), own_slots(stage), transpose)
            if not static.interpret:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.used.at[stage])

    def one(chunk, carry):
        acc, highest, total = carry
        step = base + (chunk - tile.first_chunk) * (2 * STAGES_A_CHUNK)
        word = _compat.load(refs.words.at[batch, group, chunk], WGMMA.reduce(1), optimized=False)
        # Where all tokens see the same slots, what is hidden falls into columns that are dropped.
        scores = _accumulate(
            None,
            (ROWS, half),
            lambda add: add_parts(add, None, step, chunk, static.by_token, True),
            static,
        )
        row, column = (_iota(scores.shape, axis) for axis in (0, 1))
        bits = lax.shift_right_logical(_across(word, scores.shape), lax.rem(column, CHUNK))
        own = lax.rem(lax.div(row, HEADS), TOKENS_A_STAGE) == lax.div(column, CHUNK)
        scores = jnp.where(((bits & 1) != 0) & own, scores, -jnp.inf)
        weights, acc, highest, total = _soften(scores, acc, highest, total, static.factor)
        total += weights.sum(axis=1)
        narrow, step = weights.astype(dtype), step + STAGES_A_CHUNK
        acc = _accumulate(
            acc,
            acc.shape,
            lambda add: add_parts(add, narrow, step, chunk, True, False),
            static,
        )
        return acc, highest, total

    return lax.fori_loop(tile.first_chunk, tile.end_chunk, one, carry)


def compute(refs, shared, tile, warpgroup, static):
    """A compute warpgroup: one tile of ROWS queries, from loading them to storing their results."""
    token = tile.token + warpgroup * TOKENS
    _load_queries(refs, shared, tile, token, warpgroup, static)
    full = functools.partial(plgpu.layout_cast, new_layout=WGMMA.reduce(1))
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, static.width), jnp.float32), WGMMA),
        full(jnp.full((ROWS,), LOWEST, jnp.float32)),
        full(jnp.zeros((ROWS,), jnp.float32)),
    )
    carry = _attend_keys(refs, shared, tile, token, warpgroup, static, carry)
    acc, highest, total = _attend_slots(refs, shared, tile, token, warpgroup, static, carry)
    # Else the compiler keeps what it derived from them for the queries in registers all along.
    token, warpgroup = lax.optimization_barrier((token, warpgroup))
    result, lse = shared.q.at[warpgroup], shared.lse.at[warpgroup]
    result[...] = (acc / _across(total, acc.shape)).astype(shared.ring.dtype)
    lse[...] = highest * (1 / LOG2E) + jnp.log(total)
    plgpu.commit_smem()
    for t in range(TOKENS):

        @pl.when(token + t < static.length)
        def _(t=t):
            heads = pl.ds(tile.head, HEADS)
            rows = refs.o.at[tile.batch, token + t, heads, whole(static.width)]
            plgpu.copy_smem_to_gmem(result.at[pl.ds(t * HEADS, HEADS)], rows)

    octet, group = lax.div(tile.head, HEADS), lax.div(token, TOKENS)
    plgpu.copy_smem_to_gmem(lse, refs.lse.at[tile.batch, octet, group])
    plgpu.wait_smem_to_gmem(0)
