"""The body of the fused forward kernel on Hopper, and what the backward kernels share with it.

The scores of a chunk of 8 slots are 64 rows of queries by 64 columns, 8 slots of 8 tokens. They are
the sum of a product for each 8 tokens of the tile, with all other queries zeroed. A row uses the 8
columns of its own token.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic.common import (
    LAYOUT,
    LOG2E,
    OCTET,
    accumulate,
    add_product,
    by_column,
    by_row,
    full_slice,
    iota,
    load,
    matrix,
    zeros,
)
from kernels_pallas.mosaic.tiles import (
    KEYS,
    LOWEST,
    ROWS,
    SLOTS,
    TILES,
    place_of,
    run_of,
    stage_of,
)


def _soften(scores, acc, highest, total, factor):
    """Does one step of the online softmax, in base 2; returns (weights, acc, highest, total)."""
    new = jnp.maximum(highest, scores.max(axis=1) * factor)
    keep = jnp.exp2(highest - new)
    weights = jnp.exp2(scores * factor - by_row(new, scores.shape))
    return weights, acc * by_row(keep, acc.shape), new, total * keep


def load_queries(refs, shared, tile, token, warpgroup, sizes):
    """Copy the queries of a tile to shared memory, and q_depth if there are any, and wait."""
    sides = [(refs.q, shared.q, warpgroup)]
    if sizes.own_query:
        sides.append((refs.q_depth, shared.q_depth, TILES + warpgroup))
    for source, target, number in sides:
        start_rows(source, target.at[warpgroup], shared.q_full.at[number], tile, token, sizes)
    for _, _, number in sides:
        plgpu.barrier_wait(shared.q_full.at[number])


def start_rows(source, target, full, tile, token, sizes, columns=None):
    """Start copying the rows of a tile, or their `columns`, from an array to shared memory."""
    columns = full_slice(sizes.width) if columns is None else columns
    for i in range(sizes.runs):
        run, rows = run_of(i, tile, token, sizes)
        plgpu.copy_gmem_to_smem(source.at[tile.batch, *run, columns], target.at[rows], full)


def _first_keys(refs, tile, token, sizes):
    """Return the first key that each row sees, counted from the tile's base; None: no limit."""
    first = None
    if sizes.documents:
        group = lax.div(token, sizes.tokens)
        first = load(refs.row_first.at[tile.batch, group], LAYOUT.reduce(1), optimized=False)
    if sizes.window:
        row = iota((ROWS,), 0, LAYOUT.reduce(1))
        by_window = token - (sizes.window - 1) + sizes.token_of(row)
        first = by_window if first is None else jnp.maximum(first, by_window)
    return None if first is None else first - tile.base


def _hide_by_place(x, start, hidden, tile, token, sizes, first):
    """Set x to `hidden` for keys after each row's token, or before its first visible key."""
    shape = x.shape
    keys = start + iota(shape, 1)
    visible = token - tile.base + sizes.token_of(iota(shape, 0)) >= keys
    x = jnp.where(visible, x, hidden)
    return x if first is None else jnp.where(by_row(first, shape) <= keys, x, hidden)


def _hide_by_id(x, start, hidden, refs, tile, token, sizes):
    """Set x to `hidden` for keys after each row's token, outside its window or with another id."""
    shape, group = x.shape, lax.div(token, sizes.tokens)
    distance = token - tile.base + sizes.token_of(iota(shape, 0))
    distance -= start + iota(shape, 1)
    x = jnp.where(distance >= 0, x, hidden)
    if sizes.window:
        x = jnp.where(distance < sizes.window, x, hidden)
    own = load(refs.row_ids.at[tile.batch, group], LAYOUT.reduce(1), optimized=False)
    ids = refs.ids.at[tile.batch, pl.ds(tile.base + start, shape[1])]
    ids = load(ids, LAYOUT.reduce(0), optimized=False)
    return jnp.where(by_row(own, shape) == by_column(ids, shape), x, hidden)


def over_keys(refs, place, sizes, one, carry, halves=1):
    """Fold carry = one(block, carry, hide, halves) over the blocks of keys that a tile sees.

    Args:
      refs: arrays by name.
      place: function that returns (tile, first token of the warpgroup).
      sizes: `Sizes`.
      one: function. Its hide(x, first key, value) sets x to a value for hidden keys; None: all
        are visible. It splits a block of keys into `halves`, 1 or 2.
      carry: arrays.
      halves: number of parts of a block, unless ids are compared, which needs 2.
    """

    def loop(begin, end, carry, hide=None, halves=halves):
        return lax.fori_loop(begin, end, functools.partial(one, hide=hide, halves=halves), carry)

    if sizes.documents:
        tile, token = place()
        hide = functools.partial(_hide_by_id, refs=refs, tile=tile, token=token, sizes=sizes)
        # In two parts, since the ids of all keys of a block would not fit the registers.
        carry = loop(0, tile.general, carry, hide, 2)
    tile, token = place()
    first = _first_keys(refs, tile, token, sizes)
    hide = functools.partial(_hide_by_place, tile=tile, token=token, sizes=sizes, first=first)
    if first is not None:
        carry = loop(tile.general, tile.inside, carry, hide)
    carry = loop(tile.inside, tile.causal, carry)
    return loop(tile.causal, tile.end, carry, hide)


def half_of(shared, stage, half, halves, sizes):
    """Return the rows of a stage, or half of them, as a matrix."""
    octets = KEYS // OCTET // halves
    return matrix(shared.ring.at[stage, pl.ds(half * octets, octets)], sizes)


def _attend_keys(refs, shared, place, warpgroup, sizes, carry):
    """Add the keys of the sequence to the softmax; warpgroups take turns at the tensor core."""
    dtype = shared.ring.dtype

    def turn():
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def one(block, carry, hide, halves):
        acc, highest, total = carry
        k_stage, v_stage = stage_of(2 * block, sizes), stage_of(2 * block + 1, sizes)
        plgpu.barrier_wait(shared.full.at[k_stage])
        for half in range(halves):
            start = half * (KEYS // halves)

            def products(add, half=half):
                keys = half_of(shared, k_stage, half, halves, sizes)
                add(shared.q.at[warpgroup], keys, transpose=True)
                turn()

            scores = accumulate(None, (ROWS, KEYS // halves), products, sizes)
            if half == halves - 1:
                plgpu.barrier_arrive(shared.used.at[k_stage])
            if hide is not None:
                scores = hide(scores, block * KEYS + start, -jnp.inf)
            weights, acc, highest, total = _soften(scores, acc, highest, total, sizes.factor)
            total += weights.sum(axis=1)
            narrow = weights.astype(dtype)
            acc, total, highest, narrow = lax.optimization_barrier((acc, total, highest, narrow))
            plgpu.barrier_arrive(shared.turn)
            if half == 0:
                plgpu.barrier_wait(shared.full.at[v_stage])
            plgpu.barrier_wait(shared.turn)
            values = half_of(shared, v_stage, half, halves, sizes)
            acc = add_product(acc, narrow, values, sizes)
        plgpu.barrier_arrive(shared.used.at[v_stage])
        return acc, highest, total

    pl.when(warpgroup == 1)(turn)
    carry = over_keys(refs, place, sizes, one, carry)
    pl.when(warpgroup == 0)(turn)
    return carry


def slot_and_token(row, sizes):
    """Return the slot and the token, 0 to 7 each, of a row of a stage."""
    pair = row >> 3, row & (OCTET - 1)
    return pair[::-1] if sizes.copy_by_token else pair


def from_octet(row, token, sizes):
    """Return a row's token, counted from the first octet that its tile (from `token` on) reads."""
    return sizes.token_of(row) + (token & (OCTET - 1) if sizes.by_token else 0)


def visible_slots(tile, words, slot, chunk, sizes):
    """Return whether slots of a chunk are visible, by their bits in `words` or by their number."""
    if sizes.masked:
        return lax.shift_right_logical(words, slot) & 1 != 0
    slot += chunk * SLOTS
    return (tile.first_slot <= slot) & (slot < tile.end_slot)


def shown_rows(refs, tile, octet, chunk, sizes):
    """Return 1 for each row of a stage that is a visible slot of its token, else 0."""
    words, layout = None, LAYOUT.reduce(1)
    if sizes.masked:
        words = load(refs.slot_words.at[tile.batch, octet, chunk], layout, optimized=False)
    slot = slot_and_token(iota((ROWS,), 0, layout), sizes)[0]
    return jnp.where(visible_slots(tile, words, slot, chunk, sizes), 1, 0)


def load_rows(place, sizes):
    """Load what `matrix` returns into registers."""
    return place[...].reshape(ROWS, -1) if sizes.interpret else load(place, LAYOUT)


def store_matrix(place, x, sizes):
    """Write what `load_rows` reads, and make it visible to products and copies."""
    place[...] = x.reshape(place.shape) if sizes.interpret else x
    plgpu.commit_smem()


def clear_hidden(place, refs, tile, octet, chunk, sizes):
    """Zero the hidden slots of a stage, which may hold NaN: 0 times NaN is NaN."""

    def clear():
        shown = shown_rows(refs, tile, octet, chunk, sizes)
        x = load_rows(place, sizes)
        x = jnp.where(by_row(shown, x.shape) != 0, x, jnp.zeros_like(x))
        store_matrix(place, x, sizes)

    if sizes.masked:
        clear()
    else:
        slot = chunk * SLOTS
        pl.when((slot < tile.first_slot) | (slot + SLOTS > tile.end_slot))(clear)


def own_slots(shared, stage, warpgroup, sizes):
    """Return a warpgroup's half of a stage, 8 slots of 8 of its tokens, as a matrix."""
    start = pl.multiple_of(warpgroup * SLOTS, SLOTS)
    return matrix(shared.ring.at[stage, pl.ds(start, SLOTS)], sizes)


def _attend_slots(refs, shared, place, warpgroup, sizes, carry):
    """Add the slots of a tile's tokens to the softmax, a chunk of 8 slots at a time."""
    dtype, (tile, token) = shared.ring.dtype, place()
    queries = (shared.q_depth if sizes.own_query else shared.q).at[warpgroup]

    def of_part(part, x):
        if sizes.parts == 1:
            return x
        here = sizes.token_of(iota(x.shape, 0)) >> 3 == part
        return jnp.where(here, x, jnp.zeros_like(x))

    def add_parts(add, left, step, chunk, clear, transpose):
        def one_part(part, _):
            stage = stage_of(step + part, sizes)
            plgpu.barrier_wait(shared.slots_full.at[stage])
            own = own_slots(shared, stage, warpgroup, sizes)
            if clear:
                clear_hidden(own, refs, tile, lax.div(token, OCTET) + part, chunk, sizes)
            # Queries are loaded again; otherwise the compiler keeps all parts in registers.
            rows = load(queries, LAYOUT) if left is None else left
            add(of_part(part, rows), own, transpose)
            if not sizes.interpret:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(shared.used.at[stage])

        if sizes.interpret:
            for part in range(sizes.parts):
                one_part(part, None)
        else:
            # The barrier prevents unrolling, which would spill registers.
            parts = lax.optimization_barrier(jnp.int32(sizes.parts))
            lax.fori_loop(0, parts, one_part, None)

    def one(chunk, carry):
        acc, highest, total = carry
        step = 2 * (tile.end + chunk * sizes.parts)
        chunk += tile.first_chunk
        # If all tokens see the same slots, hidden ones have their own columns, set to -inf below.
        scores = accumulate(
            None,
            (ROWS, ROWS),
            lambda add: add_parts(add, None, step, chunk, sizes.masked, True),
            sizes,
        )
        words, shape = None, scores.shape
        if sizes.masked:
            words = refs.row_words.at[tile.batch, lax.div(token, sizes.tokens), chunk]
            words = by_row(load(words, LAYOUT.reduce(1), optimized=False), shape)
        slot, of_token = slot_and_token(iota(shape, 1), sizes)
        own = from_octet(iota(shape, 0), token, sizes) & (OCTET - 1) == of_token
        visible = visible_slots(tile, words, slot, chunk, sizes)
        scores = jnp.where(own & visible, scores, -jnp.inf)
        weights, acc, highest, total = _soften(scores, acc, highest, total, sizes.factor)
        total += weights.sum(axis=1)
        narrow, step = weights.astype(dtype), step + sizes.parts
        acc = accumulate(
            acc,
            acc.shape,
            lambda add: add_parts(add, narrow, step, chunk, True, False),
            sizes,
        )
        return acc, highest, total

    return lax.fori_loop(0, tile.chunks, one, carry)


def store_rows(target, result, tile, token, sizes):
    """Start copying a tile's results from shared memory to an array of queries' results."""

    @pl.when(token < sizes.length)
    def _():
        for i in range(sizes.runs):
            run, rows = run_of(i, tile, token, sizes)
            run = target.at[tile.batch, *run, full_slice(sizes.width)]
            plgpu.copy_smem_to_gmem(result.at[rows], run)


def compute(refs, shared, warpgroup, sizes):
    """Compute one tile of queries, from loading them to storing results: a compute warpgroup."""
    place = functools.partial(place_of, refs, warpgroup, sizes)
    tile, token = place()
    load_queries(refs, shared, tile, token, warpgroup, sizes)
    full = functools.partial(plgpu.layout_cast, new_layout=LAYOUT.reduce(1))
    carry = (
        zeros((ROWS, sizes.width)),
        full(jnp.full((ROWS,), LOWEST, jnp.float32)),
        full(jnp.zeros((ROWS,), jnp.float32)),
    )
    carry = _attend_keys(refs, shared, place, warpgroup, sizes, carry)
    if refs.k_depth is not None:
        carry = _attend_slots(refs, shared, place, warpgroup, sizes, carry)
    acc, highest, total = carry
    tile, token = place()
    warpgroup = lax.optimization_barrier(warpgroup)  # addresses again; kept ones would spill
    result, lse = shared.q.at[warpgroup], shared.lse.at[warpgroup]
    result[...] = (acc / by_row(total, acc.shape)).astype(shared.ring.dtype)
    lse[...] = highest * (1 / LOG2E) + jnp.log(total)
    plgpu.commit_smem()
    store_rows(refs.o, result, tile, token, sizes)
    group = lax.div(token, sizes.tokens)
    plgpu.copy_smem_to_gmem(lse, refs.lse.at[tile.batch, tile.kv_head, group])
    plgpu.wait_smem_to_gmem(0)
