"""The sequence part on Hopper: any group of query heads, packed documents, windows.

The forward pass is the fused kernel without slots. The backward pass recomputes the weights from
the logsumexp, in two kernels: one by tiles of queries for delta and dq, then one by tiles of keys
for dk and dv (docs/depth_attention.md, section 9). Sizes: tiles.Sizes. Bodies: `_compute_dq` with
tiles.fill, and `_compute_dkv` with `_fill_queries`. Call: fused.run_kernel. Vjp: joint_softmax.py.
Reference: xla/sequence.py.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common, fused, tiles
from kernels_pallas.mosaic import fused_body as body
from kernels_pallas.mosaic.common import (
    CHUNK,
    LAYOUT,
    LOG2E,
    OCTET,
    add_product,
    by_column,
    by_row,
    full_slice,
    iota,
    load,
    matrix,
    zeros,
)
from kernels_pallas.mosaic.tiles import KEYS, ROWS, TILES

SPARE_BYTES = 4 * 1024  # taken from the 7 KiB that fused.SHARED_BYTES leaves for barriers

unsupported = fused.unsupported


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """Compute `xla.sequence.sequence_forward` for supported shapes."""
    return fused.fused_forward(q_BTNH, k_BSKH, v_BSKH, mask.segment_ids_BT, None, None, static)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, o_BTNH, do_BTNH, lse_BNT, dlse_BNT):
    """Compute `xla.sequence.sequence_backward` without atomics, all gradients in q's dtype."""
    ids_BT, swizzle = mask.segment_ids_BT, common.swizzle_of(q_BTNH.shape[3], q_BTNH.dtype)
    of_sizes = q_BTNH, k_BSKH, ids_BT, do_BTNH, None, static
    sizes = dq_sizes(*of_sizes)
    operands = joint_operands(
        q_BTNH, k_BSKH, v_BSKH, ids_BT, static, o_BTNH, do_BTNH, lse_BNT, dlse_BNT, sizes
    )
    q = operands['q']
    dq, delta = fused.run_kernel(
        'sequence_backward_q',
        functools.partial(_compute_dq, sizes=sizes),
        functools.partial(tiles.fill, sizes=sizes),
        operands,
        dq_results(operands),
        dq_scratch(sizes, q.dtype, swizzle),
        sizes,
        sizes.blocks * len(q) * sizes.kv_heads,
    )
    dk, dv = gradients_of_keys(operands, delta, ids_BT, fused.make_sizes(*of_sizes), swizzle)
    return fused.cut_heads(dq, sizes), dk, dv


def joint_operands(
    q_BTNH, k_BSKH, v_BSKH, ids_BT, static, o_BTNH, do_BTNH, lse_BNT, dlse_BNT, sizes
):
    """Return the kernels' arrays by name, without slots; `q_depth` holds do."""
    o_BTNH, do_BTNH = (x.astype(q_BTNH.dtype) for x in (o_BTNH, do_BTNH))
    operands = fused.make_operands(q_BTNH, k_BSKH, v_BSKH, ids_BT, do_BTNH, None, static, sizes)
    return operands | {
        'o': fused.pad_heads(o_BTNH, sizes),
        # Unused rows get weights of 0.
        'lse': fused.to_rows(lse_BNT * LOG2E, sizes, jnp.inf),
        'dlse': None if dlse_BNT is None else fused.to_rows(dlse_BNT, sizes, 0.0),
    }


def dq_results(operands):
    """Return the results of a kernel of dq, by name."""
    q, lse = operands['q'], operands['lse']
    return {
        'dq': jax.ShapeDtypeStruct(q.shape, q.dtype),
        'delta': jax.ShapeDtypeStruct(lse.shape, lse.dtype),
    }


def dq_sizes(q_BTNH, k_BSKH, ids_BT, do_BTNH, slots, static, reserved=0):
    """Return `fused.make_sizes` of a kernel of dq; reserved: bytes of shared memory for sums."""
    reserved += 2 * TILES * ROWS * ROWS * q_BTNH.dtype.itemsize - SPARE_BYTES
    return fused.make_sizes(q_BTNH, k_BSKH, ids_BT, do_BTNH, slots, static, reserved)


def dq_scratch(sizes, dtype, swizzle):
    """Return `fused.make_scratch` of a kernel of dq."""
    copies = sizes.runs * -(-sizes.width // CHUNK)
    return fused.make_scratch(sizes, dtype, swizzle)._replace(
        lse=plgpu.SMEM((2 * TILES, ROWS), jnp.float32),  # also delta
        scores=common.tiled((2 * TILES, ROWS, ROWS), dtype, swizzle),
        o_full=plgpu.Barrier(num_arrivals=copies, num_barriers=TILES),
        turn=None,
    )


def gradients_of_keys(operands, delta, ids_BT, sizes, swizzle):
    """Return dk and dv, from `joint_operands` and the delta of the kernel of dq."""
    operands = _by_octet(operands, ids_BT, sizes) | {'delta': delta, 'o': None, 'dlse': None}
    k = operands['k']
    # Wide heads take 32 queries at a time, which a wider swizzle does not allow.
    scratch = fused.make_scratch(sizes, k.dtype, swizzle if sizes.width <= 64 else min(swizzle, 64))
    scratch = scratch._replace(
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=TILES),
        full=plgpu.Barrier(num_arrivals=2 * _runs(sizes), num_barriers=sizes.stages),
    )
    found = fused.run_kernel(
        'sequence_backward_kv',
        functools.partial(_compute_dkv, sizes=sizes),
        functools.partial(_fill_queries, sizes=sizes),
        operands,
        {key: jax.ShapeDtypeStruct(k.shape, k.dtype) for key in ('dk', 'dv')},
        scratch,
        sizes,
        -(-sizes.length // KEYS) * len(k) * sizes.kv_heads,
    )
    return [x[:, : sizes.length] for x in found]


def _compute_dq(refs, shared, warpgroup, sizes):
    """Compute dq of a tile of queries: a compute warpgroup."""
    place = functools.partial(tiles.place_of, refs, warpgroup, sizes)
    dq = dq_over_keys(refs, shared, place, warpgroup, sizes)
    store_dq(refs.dq, shared, place, warpgroup, sizes, dq)
    plgpu.wait_smem_to_gmem(0)


def store_dq(target, shared, place, warpgroup, sizes, dq):
    """Start copying dq of a tile, by way of its queries' shared memory, to an array."""
    # The barrier lets the addresses of its rows be computed again; they would spill registers.
    result = shared.q.at[lax.optimization_barrier(warpgroup)]
    result[...] = (dq * (sizes.factor / LOG2E)).astype(result.dtype)
    plgpu.commit_smem()
    body.store_rows(target, result, *place(), sizes)


def _load_tile(refs, shared, place, warpgroup, sizes):
    """Load a tile's queries, cotangents and outputs, and return (lse, delta) of its rows.

    delta goes to its array, and both to shared memory, where the slots read them.
    """
    tile, token = place()
    full, start = shared.o_full.at[warpgroup], tile.token * 0  # traced: a slice may exceed o
    parts = range(0, sizes.width, CHUNK)
    outputs = [shared.scores.at[i * TILES + warpgroup] for i in range(len(parts))]
    for output, first in zip(outputs, parts, strict=True):
        columns = pl.ds(start + first, CHUNK)
        body.start_rows(refs.o, output, full, tile, token, sizes, columns)
    body.load_queries(refs, shared, tile, token, warpgroup, sizes)
    plgpu.barrier_wait(full)
    delta = 0.0
    for output, first in zip(outputs, parts, strict=True):
        size = min(CHUNK, sizes.width - first)
        sides = output.at[:, pl.ds(0, size)], shared.q_depth.at[warpgroup, :, pl.ds(first, size)]
        o, do = (load(x, LAYOUT).astype(jnp.float32) for x in sides)
        delta += (o * do).sum(axis=1)
    row, layout = (tile.batch, tile.kv_head, lax.div(token, sizes.tokens)), LAYOUT.reduce(1)
    lse = load(refs.lse.at[row], layout, optimized=False)
    if refs.dlse is not None:
        delta -= load(refs.dlse.at[row], layout, optimized=False)
    if (used := sizes.heads * sizes.tokens) < ROWS:  # the others have no head, and may hold NaN
        delta = jnp.where(iota((ROWS,), 0, layout) < used, delta, 0.0)
    if refs.k_depth is not None:
        shared.lse.at[warpgroup][...] = lse
    shared.lse.at[TILES + warpgroup][...] = delta
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.lse.at[TILES + warpgroup], refs.delta.at[row])
    return lse, delta


def dq_over_keys(refs, shared, place, warpgroup, sizes):
    """Load a tile's queries and cotangents, and return dq / scale over its blocks of keys."""
    # The barrier lets what follows compute its addresses again; kept ones would spill registers.
    lse, delta = _load_tile(refs, shared, place, lax.optimization_barrier(warpgroup), sizes)
    dtype, q, do = shared.ring.dtype, shared.q.at[warpgroup], shared.q_depth.at[warpgroup]

    def one(block, carry, hide, halves):
        (dq,) = carry
        k_stage, v_stage = (tiles.stage_of(2 * block + i, sizes) for i in range(2))
        plgpu.barrier_wait(shared.full.at[k_stage])
        plgpu.barrier_wait(shared.full.at[v_stage])
        shape = (ROWS, KEYS // halves)
        for half in range(halves):
            k, v = (body.half_of(shared, x, half, halves, sizes) for x in (k_stage, v_stage))
            scores = add_product(None, q, k, sizes, shape, transpose=True)
            weights = jnp.exp2(scores * sizes.factor - by_row(lse, shape))
            if hide is not None:
                # Of scores of -inf LLVM makes a product and a difference, not one instruction.
                weights = hide(weights, block * KEYS + half * shape[1], 0.0)
            dweights = add_product(None, do, v, sizes, shape, transpose=True)
            dscores = (weights * (dweights - by_row(delta, shape))).astype(dtype)
            dq = add_product(dq, dscores, k, sizes)
        plgpu.barrier_arrive(shared.used.at[k_stage])
        plgpu.barrier_arrive(shared.used.at[v_stage])
        return (dq,)

    (dq,) = body.over_keys(refs, place, sizes, one, (zeros((ROWS, sizes.width)),), halves=2)
    return dq


def _runs(sizes):
    """Return the copies that fill the rows of a tile of queries, also those without a head."""
    return sizes.tokens if sizes.by_token else ROWS // sizes.tokens


def _by_octet(operands, ids_BT, sizes):
    """Return the operands of `_compute_dkv`: queries in octets, and the ends of documents."""

    def in_octets(x):
        axis = 2 if sizes.by_token else 1
        return x.reshape(*x.shape[:axis], -1, OCTET, *x.shape[axis + 1 :])

    split = {key: in_octets(operands[key]) for key in ('q', 'q_depth')}
    joined = {key: operands[key] for key in ('k', 'v')}
    joined = {key: x.reshape(x.shape[0], -1, *x.shape[3:]) for key, x in joined.items()}
    operands = operands | split | joined | {'last': None, 'key_ids': None}
    if sizes.documents:
        first_BT = operands['first']
        length = sizes.length
        ends = jnp.pad(first_BT[:, 1:] != first_BT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
        index_BT = jnp.where(ends, jnp.arange(length, dtype=jnp.int32), length)
        last_BT = lax.cummin(index_BT, axis=1, reverse=True)
        operands['last'] = jnp.where(first_BT < 0, -1, last_BT)
        ids_BT = common.pad(ids_BT.astype(jnp.int32), 1, common.round_up(length, KEYS))
        operands['key_ids'] = ids_BT.reshape(ids_BT.shape[0], -1, ROWS)
    return operands


def _keys_of(refs, sizes):
    """Return what a block of the grid computes: its first key, and the tiles of queries."""
    item, batches = lax.optimization_barrier(lax.axis_index('item')), refs.q.shape[0]
    kv_head, rest = lax.rem(item, sizes.kv_heads), lax.div(item, sizes.kv_heads)
    batch, key = lax.rem(rest, batches), lax.div(rest, batches) * KEYS
    last_key = jnp.minimum(key + KEYS, sizes.length) - 1
    # every: last query that sees the first key. some: last query that sees the last key.
    every = some = lax.optimization_barrier(jnp.int32(sizes.length - 1))
    by_ids = jnp.bool_(False)
    if sizes.documents:
        every, some = refs.last[batch, key], refs.last[batch, last_key]
        by_ids = some < 0
        some = jnp.where(by_ids, sizes.length - 1, some)
    if sizes.window:
        every = jnp.minimum(every, key + (sizes.window - 1))
        some = jnp.minimum(some, last_key + (sizes.window - 1))
    begin, end = lax.div(key, sizes.tokens), lax.div(some, sizes.tokens) + 1
    general = jnp.where(by_ids, end, begin)
    # Tiles before `causal` have queries before the last key; those from `inside` on have queries
    # that do not see the first key. Both are masked.
    causal = jnp.clip(lax.div(last_key + (sizes.tokens - 1), sizes.tokens), general, end)
    inside = end
    if sizes.documents or sizes.window:
        inside = jnp.clip(lax.div(every + 1, sizes.tokens), causal, end)
    return types.SimpleNamespace(
        batch=batch,
        kv_head=kv_head,
        key=key,
        begin=begin,
        general=general,
        causal=causal,
        inside=inside,
        end=end,
    )


def _fill_queries(refs, shared, sizes):
    """Copy tiles of queries and cotangents of o, one of each a stage: the memory warpgroup."""
    keys, runs = _keys_of(refs, sizes), _runs(sizes)
    octets, width = ROWS // OCTET // runs, full_slice(sizes.width)

    def run_of(ref, batch, kv_head, tile, i):
        """Return run i of the rows of a tile, in octets: a token's heads, or a head's tokens."""
        if sizes.by_token:
            heads = pl.ds(kv_head * octets, octets)
            return ref.at[batch, tile * sizes.tokens + i, heads, :, width]
        # Rows without a head get those of the last head, and an infinite logsumexp.
        head = kv_head * sizes.heads + jnp.minimum(i, sizes.heads - 1)
        return ref.at[batch, pl.ds(tile * octets, octets), :, head, width]

    @pl.loop(keys.begin, keys.end)
    def _(tile):
        keys = _keys_of(refs, sizes)  # again, so that it takes no registers between steps
        stage = tiles.next_stage(shared, tile - keys.begin, sizes)
        for side, ref in enumerate((refs.q, refs.q_depth)):
            # The barrier prevents unrolling, which would spill registers.
            @pl.loop(0, lax.optimization_barrier(jnp.int32(runs)))
            def _(i, side=side, ref=ref):
                source = run_of(ref, keys.batch, keys.kv_head, tile, i)
                place = pl.ds(side * (ROWS // OCTET) + i * octets, octets)
                target = shared.ring.at[stage, place]
                plgpu.copy_gmem_to_smem(source, target, shared.full.at[stage])

    tiles.finish(shared, keys.end - keys.begin, sizes)


def _compute_dkv(refs, shared, warpgroup, sizes):
    """Compute dk and dv of 64 keys, over tiles of queries: a compute warpgroup."""
    dtype, width = shared.ring.dtype, full_slice(sizes.width)

    def place():
        """Return (`_keys_of`, the warpgroup's first key), again for each phase of the kernel."""
        keys = _keys_of(refs, sizes)
        return keys, keys.key + warpgroup * ROWS

    keys, key = place()
    sides = shared.q.at[warpgroup], shared.q_depth.at[warpgroup]
    for source, target in zip((refs.k, refs.v), sides, strict=True):
        source = source.at[keys.batch, pl.ds(key, ROWS), keys.kv_head, width]
        plgpu.copy_gmem_to_smem(source, target, shared.q_full.at[warpgroup])
    plgpu.barrier_wait(shared.q_full.at[warpgroup])
    k, v = sides

    # For wide heads two sums and the scores of 64 queries would not fit the registers.
    halves = 1 if sizes.width <= 64 else 2
    shape = ROWS, ROWS // halves

    def by_query(ref, at, start):
        return load(ref.at[*at, pl.ds(start, shape[1])], LAYOUT.reduce(0), optimized=False)

    def hide(weights, keys, key, tile, start):
        token = sizes.token_of(start + iota(shape, 1))
        distance = tile * sizes.tokens - key + token - iota(shape, 0)
        weights = jnp.where(distance >= 0, weights, 0.0)
        if sizes.window:
            weights = jnp.where(distance < sizes.window, weights, 0.0)
        if not sizes.documents:
            return weights
        own = refs.key_ids.at[keys.batch, lax.div(key, ROWS)]
        own = by_row(load(own, LAYOUT.reduce(1), optimized=False), shape)
        ids = by_column(by_query(refs.row_ids, (keys.batch, tile), start), shape)
        return jnp.where(own == ids, weights, 0.0)

    def part_of(stage, side, start):
        octet = side * (ROWS // OCTET) + lax.div(start, OCTET)
        return matrix(shared.ring.at[stage, pl.ds(octet, shape[1] // OCTET)], sizes)

    def one(tile, carry, keys, key, masked):
        at = keys.batch, keys.kv_head, tile
        stage = tiles.stage_of(tile - keys.begin, sizes)
        plgpu.barrier_wait(shared.full.at[stage])

        def half(j, carry):
            dk, dv = carry
            start = j * shape[1]
            q, do = (part_of(stage, side, start) for side in range(2))
            scores = add_product(None, k, q, sizes, shape, transpose=True)
            lse = by_column(by_query(refs.lse, at, start), shape)
            weights = jnp.exp2(scores * sizes.factor - lse)
            if masked:
                weights = hide(weights, keys, key, tile, start)
            dv = add_product(dv, weights.astype(dtype), do, sizes)
            dweights = add_product(None, v, do, sizes, shape, transpose=True)
            delta = by_column(by_query(refs.delta, at, start), shape)
            dscores = (weights * (dweights - delta)).astype(dtype)
            return add_product(dk, dscores, q, sizes), dv

        # The barrier prevents unrolling, which would spill registers.
        carry = lax.fori_loop(0, lax.optimization_barrier(jnp.int32(halves)), half, carry)
        plgpu.barrier_arrive(shared.used.at[stage])
        return carry

    carry = (zeros((ROWS, sizes.width)),) * 2
    loops = [('begin', 'causal', True), ('causal', 'inside', False)]
    if sizes.documents or sizes.window:
        loops.append(('inside', 'end', True))
    for first, last, masked in loops:
        keys, key = place()
        step = functools.partial(one, keys=keys, key=key, masked=masked)
        carry = lax.fori_loop(getattr(keys, first), getattr(keys, last), step, carry)
    dk, dv = carry
    for target, total in zip(sides, (dk * (sizes.factor / LOG2E), dv), strict=True):
        target[...] = total.astype(dtype)
    plgpu.commit_smem()
    keys, key = place()

    @pl.when(key < sizes.length)
    def _():
        for source, result in zip(sides, (refs.dk, refs.dv), strict=True):
            target = result.at[keys.batch, pl.ds(key, ROWS), keys.kv_head, width]
            plgpu.copy_smem_to_gmem(source, target)

    plgpu.wait_smem_to_gmem(0)
