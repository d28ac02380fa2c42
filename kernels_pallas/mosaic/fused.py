"""The fused forward kernel on Hopper: sequence and depth slots in one kernel and one softmax.

It supports any group of query heads, packed documents and windows (docs/depth_attention.md,
section 8). Sizes: tiles.Sizes, by `make_sizes`. Bodies: fused_body.compute and tiles.fill. Call:
`run_kernel`, with operands and scratch memory by name. Vjp: joint_softmax.py. Reference:
reference.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common, depth, tiles
from kernels_pallas.mosaic import fused_body as body
from kernels_pallas.mosaic.common import OCTET, pad, round_up, swizzle_of
from kernels_pallas.mosaic.tiles import KEYS, ROWS, SLOTS, TILES
from kernels_pallas.reference import slot_visibility

MAX_STAGES = 8
SHARED_BYTES = 220 * 1024  # of 227 KiB; the rest is for barriers, logsumexps and alignment


def unsupported(shapes, device) -> str | None:
    """Return why the kernel does not support `backends.Shapes`, in one line; None: it does."""
    if reason := depth.unsupported(shapes, device):
        return reason
    if not shapes.ordered or (shapes.window and not shapes.consecutive):
        return 'given positions must be those of the index'
    if shapes.scale <= 0:
        return f'scale {shapes.scale} must be positive'
    if shapes.k[1] != shapes.q[1]:
        return f'{shapes.k[1]} keys must be as many as the {shapes.q[1]} queries'
    return None


def _documents(ids_BT, sizes):
    """Return the operands that hide other documents, int32, by name.

    first: the first visible key of each query, where the run of its id begins. In a batch row whose
    ids do not ascend an id may come back; there it is -1, and keys are compared by ids.
    """
    changes = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)))
    index_BT = jnp.where(changes, jnp.arange(ids_BT.shape[1], dtype=jnp.int32), 0)
    first_BT = lax.cummax(index_BT, axis=1)
    ascending_B1 = jnp.all(ids_BT[:, 1:] >= ids_BT[:, :-1], axis=1, keepdims=True)
    first_BT = jnp.where(ascending_B1, first_BT, -1)
    return {
        'first': first_BT,
        'row_first': _by_row(first_BT, sizes),
        'ids': pad(ids_BT, 1, round_up(sizes.length, KEYS) + KEYS),  # reach of the last block
        'row_ids': _by_row(ids_BT, sizes),
    }


def _by_row(x_BT, sizes):
    """Return [B, tiles, ROWS], a number of each token repeated for the rows of its tile."""
    x = pad(x_BT, 1, sizes.blocks * TILES * sizes.tokens)
    return _spread(x.reshape(x.shape[0], -1, sizes.tokens), sizes)


def _spread(x, sizes):
    """Repeat numbers of a tile's tokens, along the last axis, for the tile's rows."""
    times = ROWS // sizes.tokens
    if sizes.by_token:
        return jnp.repeat(x, times, -1)
    return jnp.tile(x, times)


def pad_heads(x_BTNH, sizes):
    """Pad the query heads of each key/value head to `sizes.heads`, and tokens to octets."""
    batch, _, _, width = x_BTNH.shape
    x_BTNH = pad(x_BTNH, 1, round_up(sizes.length, OCTET))
    x = x_BTNH.reshape(batch, -1, sizes.kv_heads, sizes.group, width)
    return pad(x, 3, sizes.heads).reshape(*x.shape[:2], -1, width)


def cut_heads(x_BTNH, sizes):
    """Invert `pad_heads`."""
    batch, _, _, width = x_BTNH.shape
    x = x_BTNH.reshape(batch, -1, sizes.kv_heads, sizes.heads, width)
    return x[:, : sizes.length, :, : sizes.group].reshape(batch, sizes.length, -1, width)


def to_rows(x_BNT, sizes, fill):
    """Return a number of each query as float32 [B, K, tiles, ROWS]; rows without one: fill."""
    batch, _, length = x_BNT.shape
    x = x_BNT.astype(jnp.float32).reshape(batch, sizes.kv_heads, sizes.group, length)
    tokens = sizes.blocks * TILES * sizes.tokens
    x = pad(pad(x, 2, sizes.heads, fill), 3, tokens, fill)
    x = x.reshape(*x.shape[:3], -1, sizes.tokens)
    x = jnp.moveaxis(x, 2, 4 if sizes.by_token else 3)
    return pad(x.reshape(*x.shape[:3], -1), 3, ROWS, fill)


def from_rows(x, sizes):
    """Invert `to_rows`."""
    x = x[..., : sizes.heads * sizes.tokens]
    if sizes.by_token:
        x = x.reshape(*x.shape[:3], sizes.tokens, sizes.heads)
    else:
        x = jnp.swapaxes(x.reshape(*x.shape[:3], sizes.heads, sizes.tokens), 3, 4)
    x = jnp.moveaxis(x, 4, 2)  # [B, K, heads, tiles, tokens]
    x = x.reshape(*x.shape[:3], -1)[:, :, : sizes.group, : sizes.length]
    return x.reshape(x.shape[0], -1, sizes.length)


def _words(slots, slot_window, sizes):
    """Return int32 words of a chunk's visible slots as bits, by row of a tile and of a stage."""
    held, batch, places = slots.k_LBRKH.shape[:3]
    masks = slots.mask_LBR, slots.rows_BT
    visible_BTL = slot_visibility((held, batch, places), slots.num, slot_window, *masks)
    visible_BTL = pad(visible_BTL, 1, round_up(sizes.blocks * TILES * sizes.tokens, OCTET))
    bits = pad(visible_BTL, 2, round_up(held, SLOTS)).astype(jnp.int32)
    bits = bits.reshape(*bits.shape[:2], -1, SLOTS)
    bits <<= lax.broadcasted_iota(jnp.int32, bits.shape, 3)
    words_BCT = jnp.moveaxis(jnp.sum(bits, axis=3, dtype=jnp.int32), 2, 1)
    split = words_BCT.reshape(*words_BCT.shape[:2], -1, sizes.tokens)
    octets = words_BCT.reshape(*words_BCT.shape[:2], -1, OCTET)
    by_stage = jnp.repeat(octets, SLOTS, 3) if sizes.copy_by_token else jnp.tile(octets, SLOTS)
    return {
        'row_words': jnp.moveaxis(_spread(split, sizes), 1, 2),
        'slot_words': jnp.moveaxis(by_stage, 1, 2),
    }


def make_operands(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_depth_BTNH, slots, static, sizes):
    """Return the kernel's arrays by name; None for those that the call does not have."""
    batch, even = q_BTNH.shape[0], round_up(sizes.length, OCTET)
    # Shared memory has tiles of 8 rows, so tokens come in octets.
    k, v = (pad(x, 1, even).reshape(batch, -1, OCTET, *x.shape[2:]) for x in (k_BSKH, v_BSKH))
    operands = {
        'q': pad_heads(q_BTNH, sizes),
        'q_depth': None if q_depth_BTNH is None else pad_heads(q_depth_BTNH, sizes),
        'k': k,
        'v': v,
        **dict.fromkeys(('first', 'row_first', 'ids', 'row_ids')),
        **dict.fromkeys(('k_depth', 'v_depth', 'bounds', 'rows', 'row_words', 'slot_words')),
    }
    if sizes.documents:
        operands |= _documents(segment_ids_BT.astype(jnp.int32), sizes)
    return operands if slots is None else operands | slot_operands(slots, static, sizes)


def split_slots(x_LBRKH, sizes):
    """Split tokens into octets; if each token is copied by itself, splits slots into octets."""
    if not sizes.copy_by_token:
        return x_LBRKH.reshape(*x_LBRKH.shape[:2], -1, OCTET, *x_LBRKH.shape[3:])
    x_LBRKH = pad(x_LBRKH, 0, round_up(x_LBRKH.shape[0], OCTET))
    return x_LBRKH.reshape(-1, OCTET, *x_LBRKH.shape[1:])


def slot_operands(slots, static, sizes):
    """Return the kernel's arrays of slots and their visibility, by name."""
    k, v = (split_slots(x, sizes) for x in slots[:2])
    slot_window = static.slot_window
    end = jnp.asarray(slots.num, jnp.int32)
    first = jnp.maximum(end - slot_window, 0) if slot_window else 0
    bounds = jnp.stack([first, end]).astype(jnp.int32)  # visible slots: first to end
    operands = {'k_depth': k, 'v_depth': v, 'bounds': bounds, 'rows': slots.rows_BT}
    return operands | _words(slots, slot_window, sizes) if sizes.masked else operands


def make_sizes(q_BTNH, k_BSKH, segment_ids_BT, q_depth_BTNH, slots, static, reserved=0):
    """Return the `Sizes` of a call; reserved: bytes of shared memory for something else."""
    _, length, heads, width = q_BTNH.shape
    size, swizzle = q_BTNH.dtype.itemsize, swizzle_of(width, q_BTNH.dtype)
    width, own_query = round_up(width, swizzle // size), q_depth_BTNH is not None
    held, mask, rows = (None,) * 3
    if slots is not None:
        held, mask, rows = slots.k_LBRKH, slots.mask_LBR, slots.rows_BT
    room = SHARED_BYTES - reserved - (1 + own_query) * TILES * ROWS * width * size
    return tiles.Sizes(
        length=length,
        kv_heads=k_BSKH.shape[2],
        group=heads // k_BSKH.shape[2],
        width=width,
        # Keys and values need 2. Wide float32 heads have no room, but are only interpreted.
        stages=min(max(room // (KEYS * width * size), 2), MAX_STAGES),
        window=static.window,
        documents=segment_ids_BT is not None,
        own_query=own_query,
        masked=mask is not None or rows is not None,
        copy_by_token=rows is not None or held is not None and held.shape[2] % OCTET != 0,
        factor=static.scale * common.LOG2E,
        interpret=static.parts.interpret,
    )


def make_scratch(sizes, dtype, swizzle):
    """Return `Shared` with the memory and barriers to allocate."""
    minor = swizzle // dtype.itemsize
    rows = common.tiled((TILES, ROWS, sizes.width), dtype, swizzle)
    # Copies write octets of rows; products read a stage as one matrix.
    transforms = plgpu.TilingTransform((1, OCTET, minor)), plgpu.SwizzleTransform(swizzle)
    ring = (sizes.stages, KEYS // OCTET, OCTET, sizes.width)
    copies = TILES * (OCTET if sizes.copy_by_token else 1)
    return tiles.Shared(
        q=rows,
        q_depth=rows if sizes.own_query else None,
        lse=plgpu.SMEM((TILES, ROWS), jnp.float32),
        ring=plgpu.SMEM(ring, dtype, transforms=transforms),
        q_full=plgpu.Barrier(num_arrivals=sizes.runs, num_barriers=(1 + sizes.own_query) * TILES),
        full=plgpu.Barrier(num_barriers=sizes.stages),
        slots_full=plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
        used=plgpu.Barrier(num_arrivals=TILES, num_barriers=sizes.stages),
        turn=plgpu.Barrier(num_arrivals=TILES),
    )


def run_kernel(name, compute, fill, operands, results, scratch, sizes, blocks):
    """Run a Hopper kernel of two warpgroups that compute and one that copies.

    Args:
      name, operands, results: as in `common.run_by_name`, whose results are returned.
      compute: function of (refs by name, `Shared`, warpgroup).
      fill: function of (refs by name, `Shared`).
      scratch: `Shared`, as `make_scratch` returns it.
      sizes: `Sizes`.
      blocks: number of blocks of the grid.
    """
    # 504 for two and one. Of the few splits that were compiled, these do not spill on JAX 0.11.2.
    registers = (224, 56) if sizes.width <= 64 else (232, 40)

    def run(shared, refs):
        warpgroup = lax.axis_index('warpgroup')

        @pl.when(warpgroup < TILES)
        def _():
            plgpu.set_max_registers(registers[0], action='increase')
            compute(refs, shared, warpgroup)

        @pl.when(warpgroup == TILES)
        def _():
            plgpu.set_max_registers(registers[1], action='decrease')
            fill(refs, shared)

    def scoped(refs):
        pl.run_scoped(lambda shared: run(shared, refs), scratch, collective_axes='warpgroup')

    mesh = plgpu.Mesh(
        grid=(blocks,), grid_names=('item',), num_threads=TILES + 1, thread_name='warpgroup'
    )
    # Sums and maxima over the columns of a row stay within a warp and need no memory.
    options = {'reduction_scratch_bytes': 0}
    return common.run_by_name(name, scoped, operands, results, mesh, sizes.interpret, **options)


def fused_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_depth_BTNH, slots, static):
    """Compute o_BTNH and lse_BNT of `joint_attention` in one kernel, for supported shapes.

    slots may be None, for attention over the sequence only.
    """
    batch, dtype = len(q_BTNH), q_BTNH.dtype
    sizes = make_sizes(q_BTNH, k_BSKH, segment_ids_BT, q_depth_BTNH, slots, static)
    operands = make_operands(
        q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_depth_BTNH, slots, static, sizes
    )
    rows = batch, sizes.kv_heads, sizes.blocks * TILES, ROWS
    o, lse = run_kernel(
        'fused_forward',
        functools.partial(body.compute, sizes=sizes),
        functools.partial(tiles.fill, sizes=sizes),
        operands,
        {
            'o': jax.ShapeDtypeStruct(operands['q'].shape, dtype),
            'lse': jax.ShapeDtypeStruct(rows, jnp.float32),
        },
        make_scratch(sizes, dtype, swizzle_of(q_BTNH.shape[3], dtype)),
        sizes,
        sizes.blocks * batch * sizes.kv_heads,
    )
    return cut_heads(o, sizes), from_rows(lse, sizes)
