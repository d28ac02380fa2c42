"""The depth part on Hopper: scores are computed transposed, slots by heads.

docs/depth_attention.md, sections 6 and 7, explains the design. Sizes: slot_loader.Sizes, and
`Buffers`. Bodies: `_forward` and `_backward`. Calls: `depth_forward` and `depth_backward`. Vjp:
joint_softmax.py. Reference: xla/depth.py.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common
from kernels_pallas.mosaic.common import CHUNK, LAYOUT, OCTET, TRANSPOSED, product, tiled
from kernels_pallas.mosaic.slot_loader import Sizes, SlotLoader

MAX_WIDTH = 128  # above it the backward pass would spill registers
MAX_GROUP = 32
STAGES = 2  # chunks in shared memory, forward; four blocks of H = 64 then share a processor
SHARED_BYTES = 227 * 1024  # of a processor; a block that uses more than half runs alone
REDUCTION_BYTES = 1024  # backward, half of JAX's default: three blocks of H = 64 share a processor


def unsupported(shapes, device) -> str | None:
    """Return why these kernels do not support `backends.Shapes`, in one line; None: they do."""
    del device
    batch, length, heads, width = shapes.q
    kv_heads = shapes.k[2]
    group = heads // kv_heads
    if len(shapes.dtypes) > 1:
        return f'dtypes {", ".join(shapes.dtypes)} must be one'
    if (dtype := shapes.dtypes[0]) not in ('bfloat16', 'float16'):
        return f'dtype {dtype} must be bfloat16 or float16'
    if width > MAX_WIDTH or width % 8 or not common.swizzle_of(width, dtype):
        right = f'must be at most 64 and divisible by 8, or at most {MAX_WIDTH} and by 16'
        return f'head width {width} {right}'
    if group > MAX_GROUP:
        return f'{group} query heads per key/value head must be at most {MAX_GROUP}'
    if (items := batch * max(length, shapes.slot_rows) * kv_heads) >= 2**31:
        return f'{items} pairs of a token and a key/value head must be fewer than 2^31'
    return None


def _forward(g, s, sizes, scale):
    """The body of the forward kernel: one block, from arrays `g` and shared memory `s`, by name."""
    loader = SlotLoader(sizes, g.num_slots[0], g.rows)
    scores_shape, sums_shape = (CHUNK, sizes.columns), (sizes.padded_width, sizes.columns)
    heads = common.full_slice(sizes.columns), common.full_slice(sizes.padded_width)

    def load_item(item):
        buffer, at = lax.rem(item, 2), loader.start + item
        plgpu.copy_gmem_to_smem(g.q.at[at, *heads], s.q.at[buffer], s.item_ready.at[buffer])
        plgpu.copy_gmem_to_smem(g.o.at[at, *heads], s.o.at[buffer], s.item_ready.at[buffer])

    def join(item, has_token, chunk, carry):
        highest, total, sums = carry
        step = item * loader.chunks + chunk
        stage = lax.rem(step, STAGES)
        # The next chunk goes to the stage of the last step; the copy waits for all four warps.
        loader.load_slots(step + (STAGES - 1), g.k, g.v, g.mask, s)
        plgpu.barrier_wait(s.k_ready.at[stage])
        scores = product(scores_shape, s.k.at[stage], s.q.at[lax.rem(item, 2)].T) * (
            scale * common.LOG2E
        )
        shown = loader.shown(chunk, has_token, s, stage)
        scores = jnp.where(common.by_row(shown, scores_shape) > 0, scores, -jnp.inf)
        weights, keep, new = common.soften_columns(scores, highest)
        s.weights.T[...] = plgpu.layout_cast(weights.astype(sizes.dtype), TRANSPOSED)
        plgpu.barrier_wait(s.v_ready.at[stage])
        loader.hide_rows(chunk, has_token, s.v.at[stage], shown)
        plgpu.commit_smem()
        values = product(sums_shape, s.v.at[stage].T, s.weights.T)
        sums = sums * common.by_column(keep, sums_shape) + values
        # Totals are summed over rows only at the end, since that sum crosses warps.
        return new, total * common.by_column(keep, scores_shape) + weights, sums

    def one(item, _):
        buffer = lax.rem(item, 2)
        pl.when(item + 1 < loader.items)(lambda: load_item(item + 1))
        plgpu.barrier_wait(s.item_ready.at[buffer])
        has_token = loader.token(item)[2]
        highest = common.load(s.lse.at[item], LAYOUT.reduce(0), optimized=False) * common.LOG2E
        sums = common.load(s.o.at[buffer].T, TRANSPOSED)
        sums = plgpu.layout_cast(sums.astype(jnp.float32), LAYOUT)
        row = common.iota(scores_shape, 0)
        before = common.by_column(jnp.where(highest == -jnp.inf, 0.0, 1.0), scores_shape)
        carry = highest, jnp.where(row == 0, before, 0.0), sums
        chunks = functools.partial(join, item, has_token)
        highest, total, sums = lax.fori_loop(0, loader.chunks, chunks, carry)
        total = total.sum(axis=0)
        sums /= common.by_column(jnp.where(total > 0, total, 1.0), sums_shape)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.out.T[...] = plgpu.layout_cast(sums, TRANSPOSED).astype(g.o_out.dtype)
        s.lse.at[item][...] = highest * (1 / common.LOG2E) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.out, g.o_out.at[loader.start + item, *heads])

    load_item(jnp.int32(0))
    for step in range(STAGES - 1):
        loader.load_slots(jnp.int32(step), g.k, g.v, g.mask, s)
    loader.load_scalars(g.lse, s.lse)
    lax.fori_loop(0, loader.items, one, None)
    loader.store_scalars(s.lse, g.lse_out)
    plgpu.wait_smem_to_gmem(0)


def depth_forward(q_BTNH, o_BTNH, lse_BNT, slots, window, scale, interpret=False):
    """Compute `xla.depth.depth_forward` for bfloat16 or float16 slots."""
    sizes = Sizes.of(q_BTNH, slots, window)
    swizzle = common.swizzle_of(sizes.width, sizes.dtype)
    shared = {
        'q': sizes.heads_tile(sizes.dtype, 2),
        'o': sizes.heads_tile(o_BTNH.dtype, 2),
        'out': sizes.heads_tile(o_BTNH.dtype),
        'lse': plgpu.SMEM((sizes.run, sizes.columns), jnp.float32),
        'weights': tiled((sizes.columns, CHUNK), sizes.dtype, swizzle),
        'item_ready': plgpu.Barrier(num_barriers=2, num_arrivals=2),
        **sizes.slots_memory(STAGES),
    }
    operands = {
        'q': sizes.by_item(q_BTNH.astype(sizes.dtype)),
        'o': sizes.by_item(o_BTNH),
        'lse': sizes.pad_scalars(lse_BNT),
        **sizes.slot_operands(slots),
    }
    results = {
        'o_out': jax.ShapeDtypeStruct((sizes.items, sizes.heads, sizes.width), o_BTNH.dtype),
        'lse_out': jax.ShapeDtypeStruct(operands['lse'].shape, jnp.float32),
    }
    body = functools.partial(_forward, sizes=sizes, scale=scale)
    o, lse = common.run_one_warpgroup(
        'depth_forward', body, operands, results, shared, sizes.blocks, interpret
    )
    return o[:, : sizes.group].reshape(q_BTNH.shape), sizes.cut_scalars(lse), slots[:2]


class Buffers(NamedTuple):
    """Numbers of chunks, of items' q and do, and of sums in shared memory at once."""

    chunks: int
    heads: int
    sums: int

    @classmethod
    def of(cls, sizes, sum_dtype):
        """Return the most that let two blocks share a processor, or else that fit one."""
        chunk, head = CHUNK * sizes.padded_width, sizes.columns * sizes.padded_width
        size, wide = sizes.dtype.itemsize, jnp.dtype(sum_dtype).itemsize
        fixed = 5 * head * size + 3 * CHUNK * sizes.columns * size
        fixed += 2 * sizes.run * sizes.columns * 4 + 8 * 1024  # lse, dlse; barriers, JAX's own
        kinds = [cls(2, 2, 2), cls(2, 1, 2), cls(1, 1, 2), cls(1, 1, 1)]
        for blocks, kind in itertools.product((2, 1), kinds):
            moving = 2 * size * (kind.chunks * chunk + kind.heads * head)
            if blocks * (fixed + moving + kind.sums * chunk * wide) <= SHARED_BYTES:
                return kind
        return kinds[-1]


def _column_parts(loader):
    """Return (number, slice) of each 64 columns of the width; the last may exceed it."""
    zero = loader.start * 0  # with a constant start the slice could not exceed the array
    return [(i, pl.ds(zero + i * CHUNK, CHUNK)) for i in range(loader.sizes.padded_width // CHUNK)]


def _write_zeros(s, loader, totals):
    """Start writing zeros to the gradients of slots that are in no chunk."""
    zeros, slots = s.sums.at[0, 0], loader.sizes.slots
    zeros[...] = common.zeros((CHUNK, CHUNK), zeros.dtype)
    plgpu.commit_smem()

    @pl.loop(0, loader.items)
    def _(item):
        place = loader.token(item)[0]

        def write(slot, size):
            for total, (_, part) in itertools.product(totals, _column_parts(loader)):
                target = total.at[pl.ds(slot, size), place, part]
                plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, size)], target)

        if loader.sizes.window:
            pl.loop(0, lax.div(loader.base, OCTET))(lambda octet: write(octet * OCTET, OCTET))
        chunks = lax.div(slots - loader.base + (CHUNK - 1), CHUNK)
        pl.loop(loader.chunks, chunks)(lambda chunk: loader.for_rows(chunk, write, hidden=True))


def _add(s, loader, chunk, place, has_token, side, total, weights, heads, factor, shown, fresh):
    """Add weights @ heads * factor to the sums of a chunk, and start writing them.

    Args:
      s: shared memory by name.
      loader: `SlotLoader`.
      chunk: index of the chunk.
      place: index of the item's slots in B R K.
      has_token: whether the item has a token.
      side: 0 for keys, 1 for values.
      total: the sums in global memory; their copy to shared memory has been started.
      weights: [64, columns] in shared memory: dS for keys, P for values.
      heads: [parts, columns, 64] in shared memory: q for keys, do for values.
      factor: scale for keys, 1 for values.
      shown: 1 for each visible row.
      fresh: whether there are no sums to add to.
    """
    buffer, parts = side % s.sums.shape[0], _column_parts(loader)
    if not fresh:
        plgpu.barrier_wait(s.sums_ready.at[side])

    def one(i, _):
        sums = s.sums.at[buffer, i]
        more = product((CHUNK, CHUNK), weights, heads.at[i])
        old = common.zeros((CHUNK, CHUNK), sums.dtype) if fresh else common.load(sums, LAYOUT)
        new = (old.astype(jnp.float32) + more * factor).astype(old.dtype)
        sums[...] = jnp.where(common.by_row(shown, old.shape) > 0, new, old)

    # Not unrolled: the parts of a wide head would spill registers.
    lax.fori_loop(0, len(parts), one, None)
    plgpu.commit_smem()

    def write():
        for i, part in parts:

            def move(slot, size, i=i, part=part):
                target = total.at[pl.ds(slot, size), place, part]
                plgpu.copy_smem_to_gmem(s.sums.at[buffer, i, pl.ds(0, size)], target)

            loader.for_rows(chunk, move, hidden=fresh)

    # A query without a token has the place of another token.
    pl.when(has_token)(write) if loader.sizes.mapped else write()


def _backward(g, s, sizes, buffers, scale, fresh):
    """The body of the backward kernel, as `_forward`."""
    loader = SlotLoader(sizes, g.num_slots[0], g.rows)
    scores_shape, dq_shape = (CHUNK, sizes.columns), (sizes.padded_width, sizes.columns)
    heads = common.full_slice(sizes.columns), common.full_slice(sizes.padded_width)

    def load_item(item):
        buffer = lax.rem(item, buffers.heads)
        for source, target in ((g.q, s.q), (g.do, s.do)):
            load_heads(item, source, target.at[buffer], s.item_ready.at[buffer])

    def load_heads(item, source, target, ready):
        source = source.at[loader.start + item, *heads]
        copy = functools.partial(plgpu.copy_gmem_to_smem, source, target, ready)
        pl.when(item < loader.items)(copy)

    def one_chunk(item, has_token, lse_row, delta_row, chunk, dq):
        step, place = item * loader.chunks + chunk, loader.token(item)[0]
        stage, buffer = lax.rem(step, buffers.chunks), lax.rem(item, buffers.heads)

        def start_sums(sides):
            """Wait until the sums' memory is free, and start loading them unless fresh."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for side, (i, part) in itertools.product(() if fresh else sides, _column_parts(loader)):
                target, ready = s.sums.at[side % buffers.sums, i], s.sums_ready.at[side]
                loader.load_chunk(chunk, place, part, (g.dk, g.dv)[side], target, ready)

        loader.load_slots(step + (buffers.chunks - 1), g.k, g.v, g.mask, s)
        if not fresh:
            start_sums(range(buffers.sums))
        plgpu.barrier_wait(s.k_ready.at[stage])
        scores = product(scores_shape, s.k.at[stage], s.q.at[buffer].T) * (scale * common.LOG2E)
        shown = loader.shown(chunk, has_token, s, stage)
        keep = common.by_row(shown, scores_shape) > 0
        weights = jnp.where(keep, jnp.exp2(scores - common.by_column(lse_row, scores_shape)), 0.0)
        plgpu.barrier_wait(s.v_ready.at[stage])
        dweights = product(scores_shape, s.v.at[stage], s.do.at[buffer].T)
        dscores = weights * (dweights - common.by_column(delta_row, scores_shape))
        dscores = jnp.where(keep, dscores, 0.0).astype(sizes.dtype)
        s.weights[...] = weights.astype(sizes.dtype)
        s.dscores[...] = dscores
        s.dscores_by_head.T[...] = plgpu.layout_cast(dscores, TRANSPOSED)
        loader.hide_rows(chunk, has_token, s.k.at[stage], shown)
        plgpu.commit_smem()
        dq += product(dq_shape, s.k.at[stage].T, s.dscores_by_head.T)
        add = functools.partial(_add, s, loader, chunk, place, has_token, shown=shown, fresh=fresh)
        if fresh:
            start_sums(range(buffers.sums))
        add(0, g.dk, s.dscores, s.flat_q, scale)
        if buffers.sums == 1:
            start_sums((1,))
        add(1, g.dv, s.weights, s.flat_do, 1.0)
        return dq

    def one(item, _):
        buffer = lax.rem(item, buffers.heads)
        load_item(item + (buffers.heads - 1))
        plgpu.barrier_wait(s.item_ready.at[buffer])
        plgpu.barrier_wait(s.o_ready)
        products = []
        for i in range(sizes.padded_width // CHUNK):
            q, do, o = (
                common.load(tile.at[:, pl.ds(i * CHUNK, CHUNK)].T, TRANSPOSED)
                for tile in (s.q.at[buffer], s.do.at[buffer], s.o)
            )
            s.flat_q.at[i].T[...], s.flat_do.at[i].T[...] = q, do
            products.append(do.astype(jnp.float32) * o.astype(jnp.float32))
        delta_row = plgpu.layout_cast(sum(products), LAYOUT).sum(axis=0)
        if g.dlse is not None:
            delta_row -= common.load(s.dlse.at[item], LAYOUT.reduce(0), optimized=False)
        plgpu.commit_smem()  # the copy comes after the reads
        load_heads(item + 1, g.o, s.o, s.o_ready)
        has_token = loader.token(item)[2]
        lse_row = common.load(s.lse.at[item], LAYOUT.reduce(0), optimized=False) * common.LOG2E
        dq = common.zeros(dq_shape)
        chunks = functools.partial(one_chunk, item, has_token, lse_row, delta_row)
        dq = lax.fori_loop(0, loader.chunks, chunks, dq)
        dq = plgpu.layout_cast(dq * scale, TRANSPOSED)
        if g.dq is not None:
            plgpu.barrier_wait(s.dq_ready)
            dq += common.load(s.dq.T, TRANSPOSED).astype(jnp.float32)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.dq_out.T[...] = dq.astype(g.dq_out.dtype)
        plgpu.commit_smem()
        if g.dq is not None:
            load_heads(item + 1, g.dq, s.dq, s.dq_ready)
        plgpu.copy_smem_to_gmem(s.dq_out, g.dq_out.at[loader.start + item, *heads])

    for item in range(buffers.heads - 1):
        load_item(jnp.int32(item))
    load_heads(jnp.int32(0), g.o, s.o, s.o_ready)
    if g.dq is not None:
        load_heads(jnp.int32(0), g.dq, s.dq, s.dq_ready)
    for step in range(buffers.chunks - 1):
        loader.load_slots(jnp.int32(step), g.k, g.v, g.mask, s)
    if fresh and not sizes.mapped:
        _write_zeros(s, loader, (g.dk, g.dv))
    loader.load_scalars(g.lse, s.lse)
    if g.dlse is not None:
        loader.load_scalars(g.dlse, s.dlse)
    lax.fori_loop(0, loader.items, one, None)
    plgpu.wait_smem_to_gmem(0)


def _shared(sizes, buffers, sum_dtype, operands):
    """Return the shared memory and barriers of the backward kernel, by name."""
    dtype, parts = sizes.dtype, sizes.padded_width // CHUNK
    # The narrowest swizzle: the depth of these products is 16 or 32 heads, too few for a wider one.
    flat = tiled((parts, sizes.columns, CHUNK), dtype, 32)
    scores, scalars = (CHUNK, sizes.columns), plgpu.SMEM((sizes.run, sizes.columns), jnp.float32)
    sums = (buffers.sums, parts, CHUNK, CHUNK)
    optional = {'dlse': scalars, 'dq': sizes.heads_tile(dtype)}
    return {
        **{name: memory for name, memory in optional.items() if operands[name] is not None},
        'q': sizes.heads_tile(dtype, buffers.heads),
        'do': sizes.heads_tile(dtype, buffers.heads),
        'flat_q': flat,
        'flat_do': flat,
        'o': sizes.heads_tile(dtype),
        'dq_out': sizes.heads_tile(dtype),
        'lse': scalars,
        'sums': tiled(sums, sum_dtype, common.swizzle_of(sizes.width, sum_dtype)),
        'weights': tiled(scores, dtype, 32),
        'dscores': tiled(scores, dtype, 32),
        'dscores_by_head': tiled(scores[::-1], dtype, common.swizzle_of(sizes.width, dtype)),
        'item_ready': plgpu.Barrier(num_barriers=buffers.heads, num_arrivals=2),
        'o_ready': plgpu.Barrier(),
        'dq_ready': plgpu.Barrier(),
        'sums_ready': plgpu.Barrier(num_barriers=2, num_arrivals=parts),
        **sizes.slots_memory(buffers.chunks),
    }


def depth_backward(
    q_BTNH, o_BTNH, do_BTNH, lse_BNT, dlse_BNT, slots, sums, dq_BTNH, window, scale, interpret=False
):
    """Compute `xla.depth.depth_backward` for bfloat16 or float16 slots, without atomics."""
    sizes, fresh = Sizes.of(q_BTNH, slots, window), sums is None
    heads = {'q': q_BTNH, 'o': o_BTNH, 'do': do_BTNH, 'dq': dq_BTNH}
    operands = {
        name: None if x is None else sizes.by_item(x.astype(sizes.dtype))
        for name, x in heads.items()
    }
    operands['lse'] = sizes.pad_scalars(lse_BNT)
    operands['dlse'] = None if dlse_BNT is None else sizes.pad_scalars(dlse_BNT)
    operands |= sizes.slot_operands(slots)
    sum_dtype = sizes.dtype if fresh else sums[0].dtype
    whole, refs = jax.ShapeDtypeStruct(operands['k'].shape, sum_dtype), {}
    results = {'dk': whole, 'dv': whole}
    if not fresh or sizes.mapped:
        # No item writes the places without a query in `rows_BT`, so these must be zero before.
        sums = [jnp.zeros_like(side) for side in slots[:2]] if fresh else sums
        totals = (jax.new_ref(sizes.by_place(total)) for total in sums)
        refs, results = dict(zip(results, totals, strict=True)), {}
    buffers = Buffers.of(sizes, sum_dtype)
    *totals, dq = common.run_one_warpgroup(
        'depth_backward',
        functools.partial(_backward, sizes=sizes, buffers=buffers, scale=scale, fresh=fresh),
        operands | refs,
        results | {'dq_out': jax.ShapeDtypeStruct(operands['q'].shape, sizes.dtype)},
        _shared(sizes, buffers, sum_dtype, operands),
        sizes.blocks,
        interpret,
        REDUCTION_BYTES,
    )
    totals, shape = totals or [jax.freeze(ref) for ref in refs.values()], slots.k_LBRKH.shape
    sums = (total[: shape[0]].reshape(shape) for total in totals)
    return dq[:, : sizes.group].reshape(q_BTNH.shape), *sums
