"""Gradients through the depth slots on Hopper, those of the slots added in place.

The forward kernel's way through items and chunks (mosaic_walk), and its shapes: scores and their
gradients are slots by heads. A slot's gradient sums over the heads of its own item alone, so that
one block reads each sum, adds to it and writes it back: nothing is atomic, reruns are equal bit for
bit, and what a hidden slot's sum holds is written back as it was.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import _compat
from kernels_pallas.mosaic_tiles import (
    CHUNK,
    LAYOUT,
    LOG2E,
    TRANSPOSED,
    columns,
    product,
    swizzle_of,
    tiled,
    whole,
)
from kernels_pallas.mosaic_walk import (
    Shape,
    Walk,
    chunk_in_memory,
    chunk_rows,
    fetch_chunk,
    fetch_slots,
    hide_rows,
    octet_copies,
    slots_memory,
)

SHARED_BYTES = 227 * 1024  # of a processor; a block that uses more than half runs alone


@dataclasses.dataclass(frozen=True)
class Buffers:
    """How many of each are in shared memory."""

    chunks: int
    heads: int
    sums: int

    @classmethod
    def of(cls, shape, sum_dtype):
        """As many as let two blocks run side by side, or, where none do, one."""
        chunk, head = CHUNK * shape.padded_width, shape.columns * shape.padded_width
        size, wide = shape.dtype.itemsize, jnp.dtype(sum_dtype).itemsize
        fixed = head * (2 * size + 4) + 3 * CHUNK * shape.columns * size
        fixed += 2 * shape.run * shape.columns * 4 + 8 * 1024  # small arrays, and JAX's own
        kinds = [cls(2, 2, 2), cls(2, 1, 2), cls(1, 1, 2), cls(1, 1, 1)]
        for blocks, kind in itertools.product((2, 1), kinds):
            moving = 2 * size * (kind.chunks * chunk + kind.heads * head)
            if blocks * (fixed + moving + kind.sums * chunk * wide) <= SHARED_BYTES:
                return kind
        return kinds[-1]


def _parts(walk):
    """64 columns each of the width, by number; the last may reach past the end."""
    # A constant start would be held to the array's end.
    zero = walk.start * 0
    return [(i, pl.ds(zero + i * CHUNK, CHUNK)) for i in range(walk.shape.padded_width // CHUNK)]


def _add(s, walk, chunk, place, inside, side, total, weights, heads, factor, shown):
    """Adds weights @ heads to a chunk's rows of one side's sums, which are on their way."""
    buffer, parts = side % s.sums.shape[0], _parts(walk)
    plgpu.barrier_wait(s.sums_ready.at[side])

    def one(i, _):
        sums = s.sums.at[buffer, i]
        more = product((CHUNK, CHUNK), weights, heads.at[i])
        old = _compat.load(sums, LAYOUT)
        new = (old.astype(jnp.float32) + more * factor).astype(old.dtype)
        sums[...] = jnp.where(lax.broadcast_in_dim(shown, old.shape, [0]) > 0, new, old)

    # A loop on the device: side by side, the parts of a wide head spill registers.
    lax.fori_loop(0, len(parts), one, None)
    plgpu.commit_smem()

    def write():
        for i, part in parts:

            def move(octet, size, row, i=i, part=part):
                target = chunk_in_memory(walk.shape, total, octet, size, place, part)
                plgpu.copy_smem_to_gmem(s.sums.at[buffer, i, pl.ds(row, size)], target)

            chunk_rows(walk, chunk, move, lambda: None)

    # Places of tokens that are nowhere belong to others.
    pl.when(inside)(write) if walk.shape.mapped else write()


def _backward(
    q,
    do,
    lse,
    delta,
    num_slots,
    rows,
    mask,
    k,
    v,
    dk,
    dv,
    dq_out,
    /,
    *,
    shape,
    buffers,
    scale,
    **shared,
):
    s = types.SimpleNamespace(**shared)
    walk = Walk(shape, num_slots[0], rows)
    scores_shape, dq_shape = (CHUNK, shape.columns), (shape.padded_width, shape.columns)
    heads = whole(shape.columns), whole(shape.padded_width)

    def fetch_item(item):
        buffer, at = lax.rem(item, buffers.heads), walk.start + item

        def start():
            plgpu.copy_gmem_to_smem(q.at[at, *heads], s.q.at[buffer], s.item_ready.at[buffer])
            plgpu.copy_gmem_to_smem(do.at[at, *heads], s.do.at[buffer], s.item_ready.at[buffer])

        pl.when(item < walk.items)(start)

    def fetch(step):
        pl.when(step < walk.steps)(lambda: fetch_slots(walk, step, k, v, mask, s))

    def one_chunk(item, inside, lse_row, delta_row, chunk, dq):
        step, place = item * walk.chunks + chunk, walk.token(item)[0]
        stage, buffer = lax.rem(step, buffers.chunks), lax.rem(item, buffers.heads)

        def fetch_sums(side):
            total, ready = (dk, dv)[side], s.sums_ready.at[side]
            for i, part in _parts(walk):
                target = s.sums.at[side % buffers.sums, i]
                fetch_chunk(walk, chunk, place, part, total, target, ready)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        fetch(step + (buffers.chunks - 1))
        for side in range(buffers.sums):
            fetch_sums(side)
        plgpu.barrier_wait(s.k_ready.at[stage])
        scores = product(scores_shape, s.k.at[stage], s.q.at[buffer].T) * (scale * LOG2E)
        shown = walk.shown(chunk, inside, s.shown.at[stage] if shape.masked else None)
        keep = lax.broadcast_in_dim(shown, scores_shape, [0]) > 0
        weights = jnp.where(keep, jnp.exp2(scores - columns(lse_row, scores_shape)), 0.0)
        plgpu.barrier_wait(s.v_ready.at[stage])
        dweights = product(scores_shape, s.v.at[stage], s.do.at[buffer].T)
        dscores = weights * (dweights - columns(delta_row, scores_shape))
        dscores = jnp.where(keep, dscores, 0.0).astype(shape.dtype)
        s.weights[...] = weights.astype(shape.dtype)
        s.dscores[...] = dscores
        s.dscores_by_head.T[...] = plgpu.layout_cast(dscores, TRANSPOSED)
        hide_rows(walk, chunk, inside, s.k.at[stage], shown)
        plgpu.commit_smem()
        dq += product(dq_shape, s.k.at[stage].T, s.dscores_by_head.T)
        add = functools.partial(_add, s, walk, chunk, place, inside, shown=shown)
        add(0, dk, s.dscores, s.flat_q, scale)
        if buffers.sums == 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_sums(1)
        add(1, dv, s.weights, s.flat_do, 1.0)
        return dq

    def one(item, _):
        buffer = lax.rem(item, buffers.heads)
        fetch_item(item + (buffers.heads - 1))
        plgpu.barrier_wait(s.item_ready.at[buffer])
        for given, flat in ((s.q, s.flat_q), (s.do, s.flat_do)):
            for i in range(shape.padded_width // CHUNK):
                part = given.at[buffer, :, pl.ds(i * CHUNK, CHUNK)]
                flat.at[i].T[...] = _compat.load(part.T, TRANSPOSED)
        inside = walk.token(item)[2]
        lse_row = _compat.load(s.lse.at[item], LAYOUT.reduce(0), optimized=False) * LOG2E
        delta_row = _compat.load(s.delta.at[item], LAYOUT.reduce(0), optimized=False)
        dq = plgpu.layout_cast(jnp.zeros(dq_shape, jnp.float32), LAYOUT)
        chunks = functools.partial(one_chunk, item, inside, lse_row, delta_row)
        dq = lax.fori_loop(0, walk.chunks, chunks, dq)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.dq.T[...] = plgpu.layout_cast(dq * scale, TRANSPOSED).astype(dq_out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.dq, dq_out.at[walk.start + item, *heads])

    run = pl.ds(walk.start, shape.run)
    plgpu.copy_gmem_to_smem(lse.at[run], s.lse, s.scalars_ready)
    plgpu.copy_gmem_to_smem(delta.at[run], s.delta, s.scalars_ready)
    for item in range(buffers.heads - 1):
        fetch_item(jnp.int32(item))
    for step in range(buffers.chunks - 1):
        fetch(jnp.int32(step))
    plgpu.barrier_wait(s.scalars_ready)
    lax.fori_loop(0, walk.items, one, None)
    plgpu.wait_smem_to_gmem(0)


def _shared(shape, buffers, sum_dtype):
    """Shared memory of the kernel.

    flat_q, flat_do, weights and dscores are of the narrowest tiles: a product whose depth is that
    of the heads, 16 at the least, takes no wider ones.
    """
    dtype, f32 = shape.dtype, jnp.float32
    parts = shape.padded_width // CHUNK
    flat = tiled((parts, shape.columns, CHUNK), dtype, 32)
    scores, scalars = (CHUNK, shape.columns), plgpu.SMEM((shape.run, shape.columns), f32)
    return {
        'q': shape.heads_tile(dtype, buffers.heads),
        'do': shape.heads_tile(dtype, buffers.heads),
        'flat_q': flat,
        'flat_do': flat,
        'dq': shape.heads_tile(dtype),
        'lse': scalars,
        'delta': scalars,
        'sums': tiled(
            (buffers.sums, parts, CHUNK, CHUNK), sum_dtype, swizzle_of(shape.width, sum_dtype)
        ),
        'weights': tiled(scores, dtype, 32),
        'dscores': tiled(scores, dtype, 32),
        'dscores_by_head': tiled(scores[::-1], dtype, swizzle_of(shape.width, dtype)),
        'item_ready': plgpu.Barrier(num_barriers=buffers.heads, num_arrivals=2),
        'scalars_ready': plgpu.Barrier(num_arrivals=2),
        'sums_ready': plgpu.Barrier(num_barriers=2, num_arrivals=parts * octet_copies(shape)),
        **slots_memory(shape, buffers.chunks),
    }


def depth_backward(
    q_BTNH,
    do_BTNH,
    lse_BNT,
    delta_BNT,
    buffers,
    sums,
    num_slots,
    mask_LBR,
    rows_BT,
    window,
    scale,
    *,
    interpret=False,
):
    """As xla_depth.depth_backward, of bfloat16 or float16 slots, with dq in their dtype.

    Args:
      sums: float32 or of the slots' dtype; written in place.
      interpret: run by the interpreter of Mosaic GPU kernels, on any machine.

    Raises:
      ValueError: this JAX's interpreter cannot run the kernel.
    """
    shape = Shape.of(q_BTNH, buffers, mask_LBR, rows_BT, window)
    held = Buffers.of(shape, sums[0].dtype)
    run = _compat.one_warpgroup_kernel(
        functools.partial(_backward, shape=shape, buffers=held, scale=scale),
        'depth_backward',
        runs=-(-shape.items // shape.run),
        out_type=jax.ShapeDtypeStruct((shape.items, shape.group, shape.width), shape.dtype),
        scratch_types=_shared(shape, held, sums[0].dtype),
        interpret=_compat.interpret_params(interpret),
    )
    refs = [jax.new_ref(shape.by_octet(total)) for total in sums]
    dq = run(
        shape.by_item(q_BTNH.astype(shape.dtype)),
        shape.by_item(do_BTNH.astype(shape.dtype)),
        shape.scalars_by_item(lse_BNT, 0.0),
        shape.scalars_by_item(delta_BNT, 0.0),
        jnp.asarray(num_slots, jnp.int32).reshape(1),
        shape.rows(rows_BT),
        shape.shown(mask_LBR),
        *(shape.by_octet(side) for side in buffers),
        *refs,
    )
    totals = (jax.freeze(ref).reshape(buffers[0].shape) for ref in refs)
    return dq.reshape(q_BTNH.shape), *totals
