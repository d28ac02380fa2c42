"""The depth slots of each query's own token on Hopper: the softmax continued over them.

Scores of an item (see slot_loader) are computed transposed, slots by heads: the slots fill the 64
rows that a Hopper matrix product always has, and the heads its columns, of which it takes as few as
8. So no product is spent on another token's slots, and a hidden slot, which may hold NaN, is hidden
from this item only.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common
from kernels_pallas.mosaic.common import (
    CHUNK,
    LAYOUT,
    LOG2E,
    OCTET,
    TRANSPOSED,
    by_column,
    by_row,
    full_slice,
    product,
    swizzle_of,
    tiled,
)
from kernels_pallas.mosaic.slot_loader import Sizes, SlotLoader

MAX_WIDTH = 128  # above it the backward pass would spill registers
STAGES = 2  # one chunk ahead; four blocks of H = 64 then share a processor


def unsupported(shapes, device=None) -> str | None:
    """Returns in one line why these kernels do not support `backends.Shapes`; None: they do."""
    del device
    batch, length, heads, width = shapes.q
    kv_heads = shapes.k[2]
    group = heads // kv_heads
    if len(shapes.dtypes) > 1:
        return f'dtypes {", ".join(shapes.dtypes)} must be one'
    if (dtype := shapes.dtypes[0]) not in ('bfloat16', 'float16'):
        return f'dtype {dtype} must be bfloat16 or float16'
    if width > MAX_WIDTH or width % 8 or not swizzle_of(width, dtype):
        right = f'must be at most 64 and divisible by 8, or at most {MAX_WIDTH} and by 16'
        return f'head width {width} {right}'
    if group > OCTET and (group % OCTET or group > 32):
        return f'{group} query heads per key/value head must be at most 8, or 16, 24 or 32'
    if (items := batch * length * kv_heads) >= 2**31:
        return f'{items} pairs of a token and a key/value head must be fewer than 2^31'
    return None


def _forward(q, o, lse, num_slots, rows, mask, k, v, o_out, lse_out, /, *, sizes, scale, **shared):
    s = types.SimpleNamespace(**shared)
    loader = SlotLoader(sizes, num_slots[0], rows)
    scores_shape, sums_shape = (CHUNK, sizes.columns), (sizes.padded_width, sizes.columns)
    heads = full_slice(sizes.columns), full_slice(sizes.padded_width)

    def load_item(item):
        buffer, at = lax.rem(item, 2), loader.start + item
        plgpu.copy_gmem_to_smem(q.at[at, *heads], s.q.at[buffer], s.item_ready.at[buffer])
        plgpu.copy_gmem_to_smem(o.at[at, *heads], s.o.at[buffer], s.item_ready.at[buffer])

    def join(item, inside, chunk, carry):
        highest, total, sums = carry
        step = item * loader.chunks + chunk
        stage = lax.rem(step, STAGES)
        # Into the stage that the last step read: a copy to shared memory waits for all four warps,
        # as long as the compiler is not told to leave such barriers out.
        loader.load_slots(step + (STAGES - 1), k, v, mask, s)
        plgpu.barrier_wait(s.k_ready.at[stage])
        scores = product(scores_shape, s.k.at[stage], s.q.at[lax.rem(item, 2)].T) * (scale * LOG2E)
        shown = loader.shown(chunk, inside, s, stage)
        scores = jnp.where(by_row(shown, scores_shape) > 0, scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(axis=0))
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp2(scores - by_column(finite, scores_shape))
        keep = jnp.exp2(highest - finite)
        s.weights.T[...] = plgpu.layout_cast(weights.astype(sizes.dtype), TRANSPOSED)
        plgpu.barrier_wait(s.v_ready.at[stage])
        loader.hide_rows(chunk, inside, s.v.at[stage], shown)
        plgpu.commit_smem()
        values = product(sums_shape, s.v.at[stage].T, s.weights.T)
        sums = sums * by_column(keep, sums_shape) + values
        # Totals stay spread over the rows until the end: a sum over rows crosses warps.
        return new, total * by_column(keep, scores_shape) + weights, sums

    def one(item, _):
        buffer = lax.rem(item, 2)
        pl.when(item + 1 < loader.items)(lambda: load_item(item + 1))
        plgpu.barrier_wait(s.item_ready.at[buffer])
        inside = loader.token(item)[2]
        highest = common.load(s.lse.at[item], LAYOUT.reduce(0), optimized=False) * LOG2E
        sums = common.load(s.o.at[buffer].T, TRANSPOSED)
        sums = plgpu.layout_cast(sums.astype(jnp.float32), LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, scores_shape, 0, layout=LAYOUT)
        before = by_column(jnp.where(highest == -jnp.inf, 0.0, 1.0), scores_shape)
        carry = highest, jnp.where(row == 0, before, 0.0), sums
        chunks = functools.partial(join, item, inside)
        highest, total, sums = lax.fori_loop(0, loader.chunks, chunks, carry)
        total = total.sum(axis=0)
        sums /= by_column(jnp.where(total > 0, total, 1.0), sums_shape)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.out.T[...] = plgpu.layout_cast(sums, TRANSPOSED).astype(o_out.dtype)
        s.lse.at[item][...] = highest * (1 / LOG2E) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.out, o_out.at[loader.start + item, *heads])

    run = pl.ds(loader.start, sizes.run)
    load_item(jnp.int32(0))
    plgpu.copy_gmem_to_smem(lse.at[run], s.lse, s.lse_ready)
    for step in range(STAGES - 1):
        loader.load_slots(jnp.int32(step), k, v, mask, s)
    plgpu.barrier_wait(s.lse_ready)
    lax.fori_loop(0, loader.items, one, None)
    plgpu.copy_smem_to_gmem(s.lse, lse_out.at[run])
    plgpu.wait_smem_to_gmem(0)


def depth_forward(q_BTNH, o_BTNH, lse_BNT, slots, window, scale, interpret=False):
    """As `xla.depth.depth_forward`, of bfloat16 or float16 slots.

    Raises:
      ValueError: interpret, on a JAX whose interpreter cannot run the kernel.
    """
    sizes = Sizes.of(q_BTNH, slots, window)
    swizzle = swizzle_of(sizes.width, sizes.dtype)
    shared = {
        'q': sizes.heads_tile(sizes.dtype, 2),
        'o': sizes.heads_tile(o_BTNH.dtype, 2),
        'out': sizes.heads_tile(o_BTNH.dtype),
        'lse': plgpu.SMEM((sizes.run, sizes.columns), jnp.float32),
        'weights': tiled((sizes.columns, CHUNK), sizes.dtype, swizzle),
        'item_ready': plgpu.Barrier(num_barriers=2, num_arrivals=2),
        'lse_ready': plgpu.Barrier(),
        **sizes.slots_memory(STAGES),
    }
    run = common.one_warpgroup_kernel(
        functools.partial(_forward, sizes=sizes, scale=scale),
        'depth_forward',
        runs=-(-sizes.items // sizes.run),
        out_type=[
            jax.ShapeDtypeStruct((sizes.items, sizes.group, sizes.width), o_BTNH.dtype),
            jax.ShapeDtypeStruct((sizes.items, sizes.columns), jnp.float32),
        ],
        scratch_types=shared,
        interpret=interpret,
    )
    o, lse = run(
        sizes.by_item(q_BTNH.astype(sizes.dtype)),
        sizes.by_item(o_BTNH),
        sizes.scalars_by_item(lse_BNT, -jnp.inf),
        *sizes.slot_operands(slots),
    )
    lse = lse[:, : sizes.group].reshape(sizes.batch, sizes.length, -1)
    return o.reshape(q_BTNH.shape), jnp.moveaxis(lse, 1, 2), slots[:2]
