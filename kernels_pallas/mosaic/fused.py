"""Sequence and depth slots of one tile of queries in a single Hopper kernel: one softmax, no merge.

A warpgroup's tile has 64 rows: 8 tokens times 8 query heads of a key/value head, row 8 t + g.
"""

import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common, depth
from kernels_pallas.mosaic import fused_body as body
from kernels_pallas.mosaic.common import OCTET, pad, round_up, swizzle_of, tiled
from kernels_pallas.mosaic.fused_body import CHUNK, HEADS, KEYS, ROWS, TILES, TOKENS
from kernels_pallas.reference import slot_visibility

MAX_STAGES = 8
SHARED_BYTES = 220 * 1024  # of 227 KiB: the rest is for barriers, logsumexps and alignment


def unsupported(shapes, device=None) -> str | None:
    """Returns in one line why the kernel does not support `backends.Shapes`; None: it does."""
    if reason := depth.unsupported(shapes, device):
        return reason
    if not shapes.ordered or (shapes.window and not shapes.consecutive):
        return 'given positions must be those of the index'
    if shapes.scale <= 0:
        return f'scale {shapes.scale} must be positive'
    if shapes.k[1] != shapes.q[1]:
        return f'{shapes.k[1]} keys must be as many as the {shapes.q[1]} queries'
    if (group := shapes.q[2] // shapes.k[2]) % HEADS:
        return f'{group} query heads per key/value head must be a multiple of {HEADS}'
    return None


def _words(slots, slot_window, groups):
    """Bits of visible slots, int32 [B, groups of 8 tokens or 1, chunks, ROWS]."""
    held, batch, places = slots.k_LBRKH.shape[:3]
    masks = slots.mask_LBR, slots.rows_BT
    if slots.mask_LBR is None and slots.rows_BT is None:
        visible_BGTL = slot_visibility((held, 1, 1), slots.num, slot_window, *masks)[:, None]
    else:
        visible_BTL = slot_visibility((held, batch, places), slots.num, slot_window, *masks)
        visible_BTL = pad(visible_BTL, 1, groups * TOKENS)
        visible_BGTL = visible_BTL.reshape(batch, groups, TOKENS, held)
    bits = pad(visible_BGTL, 3, round_up(held, CHUNK))
    bits = bits.reshape(*bits.shape[:3], -1, CHUNK).astype(jnp.uint32)
    bits <<= lax.broadcasted_iota(jnp.uint32, bits.shape, 4)
    words = jnp.sum(bits, axis=-1, dtype=jnp.uint32)
    words_BGCT = jnp.moveaxis(lax.bitcast_convert_type(words, jnp.int32), 2, 3)
    words_BGCT = jnp.broadcast_to(words_BGCT, (*words_BGCT.shape[:3], TOKENS))
    return jnp.repeat(words_BGCT, HEADS, axis=3)


def _first_keys(ids_BT, tiles):
    """The first key [B, tiles] of each tile's oldest segment."""
    length = ids_BT.shape[1]

    def first(ids_T):
        order_T = jnp.argsort(ids_T, stable=True)
        ids_T = ids_T[order_T]
        starts_T = jnp.concatenate([jnp.ones((1,), bool), ids_T[1:] != ids_T[:-1]])
        start_T = lax.cummax(jnp.where(starts_T, jnp.arange(length), 0))
        return jnp.zeros_like(order_T).at[order_T].set(order_T[start_T])

    first_BT = jax.vmap(first)(ids_BT).astype(jnp.int32)
    last = tiles * TILES * TOKENS - length
    first_BT = jnp.pad(first_BT, ((0, 0), (0, last)), constant_values=length)
    return first_BT.reshape(-1, tiles, TILES * TOKENS).min(axis=2)


def _operands(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_depth_BTNH, slots, slot_window):
    batch, length = q_BTNH.shape[:2]
    tiles = body.num_tiles(length)
    groups = tiles * TILES
    end = jnp.asarray(slots.num, jnp.int32)
    first = jnp.maximum(end - slot_window, 0) if slot_window else 0
    # Tiles of shared memory take whole octets of keys and of slots.
    k, v = (pad(x, 1, round_up(length, OCTET)) for x in (k_BSKH, v_BSKH))
    k_depth, v_depth = (pad(x, 0, round_up(x.shape[0], OCTET)) for x in slots[:2])
    operands = {
        'q': q_BTNH,
        'q_depth': q_depth_BTNH,
        'k': k,
        'v': v,
        'k_depth': k_depth,
        'v_depth': v_depth,
        # First chunk and end of the visible slots.
        'bounds': jnp.stack([first // CHUNK, -(-end // CHUNK)]).astype(jnp.int32),
        'words': _words(slots, slot_window, groups),
        'places': slots.rows_BT,
        **dict.fromkeys(('first_key', 'ids', 'row_ids')),
    }
    if segment_ids_BT is not None:
        ids_BT = segment_ids_BT.astype(jnp.int32)
        row_ids = pad(ids_BT, 1, groups * TOKENS).reshape(batch, groups, TOKENS)
        operands['first_key'] = _first_keys(ids_BT, tiles)
        operands['ids'] = pad(ids_BT, 1, round_up(length, KEYS))
        operands['row_ids'] = jnp.repeat(row_ids, HEADS, axis=2)
    return operands


def fused_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_depth_BTNH, slots, static):
    """`joint_attention` of what is not `unsupported`, in one kernel: o_BTNH and lse_BNT."""
    (batch, length, heads, width), dtype = q_BTNH.shape, q_BTNH.dtype
    tiles, octets = body.num_tiles(length), heads // HEADS
    groups = tiles * TILES
    operands = _operands(
        q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_depth_BTNH, slots, static.slot_window
    )
    own_query = q_depth_BTNH is not None
    swizzle = swizzle_of(width, dtype)
    width = round_up(width, swizzle // dtype.itemsize)
    row_bytes = width * dtype.itemsize
    stages = (SHARED_BYTES - (1 + own_query) * TILES * ROWS * row_bytes) // (KEYS * row_bytes)
    sizes = types.SimpleNamespace(
        length=length,
        group=heads // k_BSKH.shape[2],  # query heads of a key/value head
        width=width,  # as shared memory holds it
        stages=min(stages, MAX_STAGES),
        window=static.window,
        segments=segment_ids_BT is not None,
        own_query=own_query,
        # Some slots are visible to some tokens only.
        by_token=slots.mask_LBR is not None or slots.rows_BT is not None,
        factor=static.scale * common.LOG2E,  # on the scores
        interpret=static.parts.interpret,
    )
    # Of 504 for two and one: what spilled least, of the few splits that were compiled.
    registers = (224, 56) if width <= 64 else (232, 40)
    given = {name: x for name, x in operands.items() if x is not None}

    def run(shared, refs):
        named = dict(zip((*given, 'o', 'lse'), refs, strict=True))
        refs = types.SimpleNamespace(**dict.fromkeys(operands) | named)
        warpgroup = lax.axis_index('warpgroup')

        @pl.when(warpgroup < TILES)
        def _():
            plgpu.set_max_registers(registers[0], action='increase')
            body.compute(refs, shared, body.tile_of(refs, sizes), warpgroup, sizes)

        @pl.when(warpgroup == TILES)
        def _():
            plgpu.set_max_registers(registers[1], action='decrease')
            body.fill(refs, shared, body.tile_of(refs, sizes), sizes)

    def fused_depth_attention(*refs):
        tile_rows = tiled((TILES, ROWS, width), dtype, swizzle)
        scratch = body.Shared(
            q=tile_rows,
            q_depth=tile_rows if own_query else None,
            lse=plgpu.SMEM((TILES, ROWS), jnp.float32),
            ring=tiled((sizes.stages, KEYS, width), dtype, swizzle),
            q_full=plgpu.Barrier(num_arrivals=(1 + own_query) * TOKENS, num_barriers=TILES),
            full=plgpu.Barrier(num_arrivals=KEYS // CHUNK, num_barriers=sizes.stages),
            used=plgpu.Barrier(num_arrivals=TILES, num_barriers=sizes.stages),
            turn=plgpu.Barrier(num_arrivals=TILES),
        )
        pl.run_scoped(lambda shared: run(shared, refs), scratch, collective_axes='warpgroup')

    o_BTNH, lse = plgpu.kernel(
        fused_depth_attention,
        out_type=[
            jax.ShapeDtypeStruct(q_BTNH.shape, dtype),
            jax.ShapeDtypeStruct((batch, octets, groups, ROWS), jnp.float32),
        ],
        grid=(tiles * batch * octets,),
        grid_names=('item',),
        num_threads=TILES + 1,
        thread_name='warpgroup',
        compiler_params=common.compiler_params(approx_math=True),
        interpret=common.interpret_params(sizes.interpret),
    )(*given.values())
    lse = lse.reshape(batch, octets, groups * TOKENS, HEADS)
    lse_BNT = jnp.moveaxis(lse, 3, 2).reshape(batch, heads, groups * TOKENS)
    return o_BTNH, lse_BNT[:, :, :length]
