"""The depth slots of each query's own token on Hopper: the softmax continued over them.

Scores of an item (mosaic_walk says of what) are computed transposed, slots by heads: the slots fill
the 64 rows that a Hopper matrix product always has, and the heads its columns, of which it takes as
few as 8. So no product is spent on another token's slots, and a slot that is hidden, which may hold
NaN, is hidden from this item only.
"""

import functools
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
    OCTET,
    TRANSPOSED,
    columns,
    product,
    swizzle_of,
    tiled,
    whole,
)
from kernels_pallas.mosaic_walk import Shape, Walk, fetch_slots, hide_rows, slots_memory

MAX_WIDTH = 128  # of more, the backward pass would keep registers in memory
STAGES = 2  # one chunk ahead; four blocks of H = 64 then share a processor


def unsupported(q_shape, kv_heads, num_slots_held, dtype) -> str | None:
    """Why these kernels cannot do it, in a line, or None."""
    heads, width = q_shape[2:]
    group = heads // kv_heads
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f'dtype {jnp.dtype(dtype).name} must be bfloat16 or float16'
    if width > MAX_WIDTH or width % 8 or not swizzle_of(width, dtype):
        right = f'must be at most 64 and divisible by 8, or at most {MAX_WIDTH} and by 16'
        return f'head width {width} {right}'
    if group > OCTET and (group % OCTET or group > 32):
        return f'{group} query heads per key/value head must be at most 8, or 16, 24 or 32'
    if (items := q_shape[0] * q_shape[1] * kv_heads) >= 2**31:
        return f'{items} pairs of a token and a key/value head must be fewer than 2^31'
    if num_slots_held < 1:
        return f'{num_slots_held} slots must be 1 or more'
    return None


def _forward(q, o, lse, num_slots, rows, mask, k, v, o_out, lse_out, /, *, shape, scale, **shared):
    s = types.SimpleNamespace(**shared)
    walk = Walk(shape, num_slots[0], rows)
    scores_shape, sums_shape = (CHUNK, shape.columns), (shape.padded_width, shape.columns)
    heads = whole(shape.columns), whole(shape.padded_width)

    def fetch_item(item):
        buffer, at = lax.rem(item, 2), walk.start + item
        plgpu.copy_gmem_to_smem(q.at[at, *heads], s.q.at[buffer], s.item_ready.at[buffer])
        plgpu.copy_gmem_to_smem(o.at[at, *heads], s.o.at[buffer], s.item_ready.at[buffer])

    def fetch(step):
        pl.when(step < walk.steps)(lambda: fetch_slots(walk, step, k, v, mask, s))

    def join(item, inside, chunk, carry):
        highest, total, sums = carry
        step = item * walk.chunks + chunk
        stage = lax.rem(step, STAGES)
        # Into the stage that the last step read: a copy to shared memory waits for all four warps,
        # as long as the compiler is not told to leave such barriers out.
        fetch(step + (STAGES - 1))
        plgpu.barrier_wait(s.k_ready.at[stage])
        scores = product(scores_shape, s.k.at[stage], s.q.at[lax.rem(item, 2)].T) * (scale * LOG2E)
        shown = walk.shown(chunk, inside, s.shown.at[stage] if shape.masked else None)
        keep = lax.broadcast_in_dim(shown, scores_shape, [0]) > 0
        scores = jnp.where(keep, scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(axis=0))
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp2(scores - columns(finite, scores_shape))
        fade = jnp.exp2(highest - finite)
        s.weights.T[...] = plgpu.layout_cast(weights.astype(shape.dtype), TRANSPOSED)
        plgpu.barrier_wait(s.v_ready.at[stage])
        hide_rows(walk, chunk, inside, s.v.at[stage], shown)
        plgpu.commit_smem()
        values = product(sums_shape, s.v.at[stage].T, s.weights.T)
        sums = sums * columns(fade, sums_shape) + values
        # Totals stay spread over the rows until the end: a sum over rows crosses warps.
        return new, total * columns(fade, scores_shape) + weights, sums

    def one(item, _):
        buffer = lax.rem(item, 2)
        pl.when(item + 1 < walk.items)(lambda: fetch_item(item + 1))
        plgpu.barrier_wait(s.item_ready.at[buffer])
        inside = walk.token(item)[2]
        highest = _compat.load(s.lse.at[item], LAYOUT.reduce(0), optimized=False) * LOG2E
        sums = _compat.load(s.o.at[buffer].T, TRANSPOSED)
        sums = plgpu.layout_cast(sums.astype(jnp.float32), LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, scores_shape, 0, layout=LAYOUT)
        before = columns(jnp.where(highest == -jnp.inf, 0.0, 1.0), scores_shape)
        carry = highest, jnp.where(row == 0, before, 0.0), sums
        chunks = functools.partial(join, item, inside)
        highest, total, sums = lax.fori_loop(0, walk.chunks, chunks, carry)
        total = total.sum(axis=0)
        sums /= columns(jnp.where(total > 0, total, 1.0), sums_shape)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.out.T[...] = plgpu.layout_cast(sums, TRANSPOSED).astype(o_out.dtype)
        s.lse.at[item][...] = highest * (1 / LOG2E) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.out, o_out.at[walk.start + item, *heads])

    run = pl.ds(walk.start, shape.run)
    fetch_item(jnp.int32(0))
    plgpu.copy_gmem_to_smem(lse.at[run], s.lse, s.lse_ready)
    for step in range(STAGES - 1):
        fetch(jnp.int32(step))
    plgpu.barrier_wait(s.lse_ready)
    lax.fori_loop(0, walk.items, one, None)
    plgpu.copy_smem_to_gmem(s.lse, lse_out.at[run])
    plgpu.wait_smem_to_gmem(0)


def depth_forward(
    q_BTNH,
    o_BTNH,
    lse_BNT,
    buffers,
    num_slots,
    mask_LBR,
    rows_BT,
    window,
    scale,
    *,
    interpret=False,
):
    """As xla_depth.depth_forward, of bfloat16 or float16 slots.

    Args:
      interpret: run by the interpreter of Mosaic GPU kernels, on any machine.

    Raises:
      ValueError: this JAX's interpreter cannot run the kernel.
    """
    shape = Shape.of(q_BTNH, buffers, mask_LBR, rows_BT, window)
    f32, swizzle = jnp.float32, swizzle_of(shape.width, shape.dtype)
    shared = {
        'q': shape.heads_tile(shape.dtype, 2),
        'o': shape.heads_tile(o_BTNH.dtype, 2),
        'out': shape.heads_tile(o_BTNH.dtype),
        'lse': plgpu.SMEM((shape.run, shape.columns), f32),
        'weights': tiled((shape.columns, CHUNK), shape.dtype, swizzle),
        'item_ready': plgpu.Barrier(num_barriers=2, num_arrivals=2),
        'lse_ready': plgpu.Barrier(),
        **slots_memory(shape, STAGES),
    }
    run = _compat.one_warpgroup_kernel(
        functools.partial(_forward, shape=shape, scale=scale),
        'depth_forward',
        runs=-(-shape.items // shape.run),
        out_type=[
            jax.ShapeDtypeStruct((shape.items, shape.group, shape.width), o_BTNH.dtype),
            jax.ShapeDtypeStruct((shape.items, shape.columns), f32),
        ],
        scratch_types=shared,
        interpret=_compat.interpret_params(interpret),
    )
    o, lse = run(
        shape.by_item(q_BTNH.astype(shape.dtype)),
        shape.by_item(o_BTNH),
        shape.scalars_by_item(lse_BNT, -jnp.inf),
        jnp.asarray(num_slots, jnp.int32).reshape(1),
        shape.rows(rows_BT),
        shape.shown(mask_LBR),
        *(shape.by_octet(side) for side in buffers),
    )
    lse = lse[:, : shape.group].reshape(shape.batch, shape.length, -1)
    return o.reshape(q_BTNH.shape), jnp.moveaxis(lse, 1, 2), buffers
