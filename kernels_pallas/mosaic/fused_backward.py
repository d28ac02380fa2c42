"""The fused backward pass on Hopper: one kernel for dq and the slots, another for dk and dv.

A tile of queries has the slots of its own tokens, as in the fused forward. After its keys it adds
the slots' part to dq, or computes that of the slots' own queries, and adds the slots' gradients to
their sums, in place (docs/depth_attention.md, section 8). Sizes: tiles.Sizes, by `make_sizes`.
Bodies: `_compute` and tiles.fill. Call: `fused_backward`. Vjp: joint_softmax.py. Reference:
xla/depth.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common, fused, sequence, tiles
from kernels_pallas.mosaic import fused_body as body
from kernels_pallas.mosaic.common import (
    CHUNK,
    LAYOUT,
    LOG2E,
    OCTET,
    add_product,
    by_row,
    iota,
    load,
    matrix,
    zeros,
)
from kernels_pallas.mosaic.tiles import ROWS, SLOTS, TILES

MIN_STAGES = 3  # of the ring; with fewer no keys are copied while others are used
SUMS = 'dk_depth', 'dv_depth'  # names of the slots' sums


def fused_backward(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    segment_ids_BT,
    q_depth_BTNH,
    slots,
    sums,
    static,
    o_BTNH,
    do_BTNH,
    lse_BNT,
    dlse_BNT,
):
    """Return dq, dk, dv and dq_depth (or None) in q's dtype, and the two sums.

    Args:
      q_BTNH: queries.
      k_BSKH, v_BSKH: keys and values.
      segment_ids_BT: int, or None.
      q_depth_BTNH: other queries for the slots; None: q_BTNH.
      slots: `joint_softmax.Slots`.
      sums: two arrays [L, B, R, K, H], float32 or of q's dtype, to which gradients are added;
        None: fresh gradients, in q's dtype.
      static: `joint_softmax.Static`.
      o_BTNH, lse_BNT: the joint output and logsumexp.
      do_BTNH, dlse_BNT: their cotangents; dlse may be None, for zeros.
    """
    dtype, width = q_BTNH.dtype, q_BTNH.shape[3]
    plain = fused.make_sizes(q_BTNH, k_BSKH, segment_ids_BT, do_BTNH, None, static)
    joint = sequence.joint_operands(
        q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, static, o_BTNH, do_BTNH, lse_BNT, dlse_BNT, plain
    )
    fresh = sums is None
    sum_dtype = dtype if fresh else sums[0].dtype
    sizes, buffers = make_sizes(q_BTNH, k_BSKH, segment_ids_BT, do_BTNH, slots, static, sum_dtype)
    operands = joint | fused.slot_operands(slots, static, sizes)
    results, refs, sides = sequence.dq_results(joint), {}, slots[:2]
    operands['slot_queries'] = q_depth_BTNH
    if q_depth_BTNH is not None:
        operands['slot_queries'] = fused.pad_heads(q_depth_BTNH, sizes)
        results['dq_depth'] = results['dq']
    if fresh and slots.rows_BT is None:
        whole = jax.ShapeDtypeStruct(operands['k_depth'].shape, sum_dtype)
        results |= dict.fromkeys(SUMS, whole)
    else:
        # No tile writes the places without a query in `rows_BT`, so these must be zero before.
        sums = [jnp.zeros_like(side) for side in sides] if fresh else sums
        totals = (jax.new_ref(fused.split_slots(total, sizes)) for total in sums)
        refs = dict(zip(SUMS, totals, strict=True))
    found = fused.run_kernel(
        'fused_backward_q',
        functools.partial(_compute, sizes=sizes, fresh=fresh),
        functools.partial(tiles.fill, sizes=sizes, in_pairs=True),
        operands | refs,
        results,
        _make_scratch(sizes, dtype, sum_dtype, width, buffers),
        sizes,
        sizes.blocks * len(q_BTNH) * sizes.kv_heads,
    )
    found = dict(zip(results, found, strict=True))
    found |= {key: jax.freeze(ref) for key, ref in refs.items()}
    sums = (_joined(found[key], sizes, sides[0].shape) for key in SUMS)
    dq, dq_depth = (
        fused.cut_heads(found[key], sizes) if key in found else None for key in ('dq', 'dq_depth')
    )
    swizzle = common.swizzle_of(width, dtype)
    dk, dv = sequence.gradients_of_keys(joint, found['delta'], segment_ids_BT, plain, swizzle)
    return dq, dk, dv, dq_depth, *sums


def _joined(total, sizes, shape):
    """Invert `fused.split_slots` for a sum."""
    if sizes.copy_by_token:
        return total.reshape(-1, *shape[1:])[: shape[0]]
    return total.reshape(shape)


def make_sizes(q_BTNH, k_BSKH, segment_ids_BT, do_BTNH, slots, static, sum_dtype):
    """Return (`Sizes` of the kernel of dq, number of buffers for sums of each tile)."""
    arguments = q_BTNH, k_BSKH, segment_ids_BT, do_BTNH, slots, static
    columns = piece_columns(fused.make_sizes(*arguments).width, q_BTNH.dtype)
    for buffers in (2, 1):
        wide = buffers * columns * jnp.dtype(sum_dtype).itemsize
        sizes = sequence.dq_sizes(*arguments, TILES * ROWS * wide)
        # Of 8 tokens a smaller tile has the sums of its own, which are copied by themselves.
        sizes = dataclasses.replace(sizes, copy_by_token=sizes.copy_by_token or sizes.by_token)
        if sizes.stages >= MIN_STAGES:
            break
    return sizes, buffers


def piece_columns(width, dtype):
    """Return the columns of a piece of the sums: more than 64 would not fit the registers."""
    minor = common.swizzle_of(width, dtype) // jnp.dtype(dtype).itemsize
    return max(x for x in range(minor, CHUNK + 1, minor) if width % x == 0)


def _make_scratch(sizes, dtype, sum_dtype, width, buffers):
    swizzle, sum_swizzle = (common.swizzle_of(width, x) for x in (dtype, sum_dtype))
    minor = sum_swizzle // jnp.dtype(sum_dtype).itemsize
    transforms = plgpu.TilingTransform((1, OCTET, minor)), plgpu.SwizzleTransform(sum_swizzle)
    shape = TILES * buffers, SLOTS, OCTET, piece_columns(sizes.width, dtype)
    copies = OCTET if sizes.copy_by_token else 1
    return sequence.dq_scratch(sizes, dtype, swizzle)._replace(
        q=common.tiled((2 * TILES, ROWS, sizes.width), dtype, swizzle),
        q_depth=None,
        sums=plgpu.SMEM(shape, sum_dtype, transforms=transforms),
        sums_full=plgpu.Barrier(num_arrivals=copies, num_barriers=TILES * buffers),
    )


def _compute(refs, shared, warpgroup, sizes, fresh):
    """Compute one tile of queries: a compute warpgroup."""
    # Queries and cotangents are one array, since `_Sums.add` indexes it by side.
    shared = shared._replace(q_depth=shared.q.at[pl.ds(TILES, TILES)])
    if fresh and refs.rows is None:
        _write_zeros(refs, shared, warpgroup, sizes)
    place, result = functools.partial(tiles.place_of, refs, warpgroup, sizes), refs.dq
    dq = sequence.dq_over_keys(refs, shared, place, warpgroup, sizes)
    if refs.slot_queries is not None:
        # The slots' queries take the memory of q, and their dq the registers of dq.
        sequence.store_dq(result, shared, place, warpgroup, sizes, dq)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        of = lax.optimization_barrier(warpgroup)  # computed again, as in store_dq
        full = shared.q_full.at[of]
        body.start_rows(refs.slot_queries, shared.q.at[of], full, *place(), sizes)
        plgpu.barrier_wait(full)
        dq, result = zeros(dq.shape), refs.dq_depth
    dq = _over_slots(refs, shared, place, warpgroup, sizes, dq, fresh)
    sequence.store_dq(result, shared, place, warpgroup, sizes, dq)
    plgpu.wait_smem_to_gmem(0)


def _write_zeros(refs, shared, warpgroup, sizes):
    """Start writing zeros to the gradients of a tile's slots in chunks with no visible slot."""
    tile = tiles.tile_of(refs, sizes)
    first = lax.div(tile.token + warpgroup * sizes.tokens, OCTET)
    held = -(-refs.k_depth.shape[0] // (1 if sizes.copy_by_token else SLOTS))
    buffer = shared.sums.at[warpgroup * (shared.sums.shape[0] // TILES)]
    body.store_matrix(matrix(buffer, sizes), zeros((ROWS, buffer.shape[-1]), buffer.dtype), sizes)

    @pl.loop(0, (held - tile.chunks) * sizes.parts)
    def _(i):
        chunk = lax.div(i, sizes.parts)
        chunk += jnp.where(chunk < tile.first_chunk, 0, tile.chunks)
        octet = first + lax.rem(i, sizes.parts)
        sums = _Sums(refs, shared, lambda: (tile, chunk, octet), warpgroup, sizes, fresh=True)
        for step in range(sums.steps):
            sums.write(jnp.int32(step), buffer)


def _clear_unused(rows, sizes):
    """Zero the rows of a tile without a head, which may hold NaN."""
    used = sizes.heads * sizes.tokens
    if used < ROWS:
        x = load(rows, LAYOUT)
        rows[...] = jnp.where(iota(x.shape, 0) < used, x, jnp.zeros_like(x))
        plgpu.commit_smem()


class _Sums:
    """The sums of 8 slots of 8 tokens, in `steps` pieces of columns: those of keys, then of values.

    at() returns (tile, chunk, octet of tokens). fresh: there are no sums to add to, and nothing is
    loaded.
    """

    def __init__(self, refs, shared, at, warpgroup, sizes, fresh):
        self.refs, self.shared, self.warpgroup, self.sizes = refs, shared, warpgroup, sizes
        self.at, self.fresh = at, fresh
        self.buffers, self.columns = shared.sums.shape[0] // TILES, shared.sums.shape[-1]
        self.pieces = sizes.width // self.columns
        self.steps = 2 * self.pieces

    def start(self):
        """Wait until the buffers are free, and start loading the first pieces into them."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for step in range(self.buffers):
            self._load(jnp.int32(step))

    def _place(self, step):
        """Return (side, 0 for keys and 1 for values, and the first column) of a step's piece."""
        start = lax.rem(step, jnp.int32(self.pieces)) * self.columns
        return lax.div(step, jnp.int32(self.pieces)), pl.multiple_of(start, self.columns)

    def _buffer(self, step):
        number = self.warpgroup * self.buffers + lax.rem(step, jnp.int32(self.buffers))
        return self.shared.sums_full.at[number], self.shared.sums.at[number]

    def _for_places(self, step, move):
        tile, chunk, octet = self.at()
        side, start = self._place(step)
        columns, sizes = pl.ds(start, self.columns), self.sizes

        def own(piece, octets, exist):
            if sizes.by_token:  # the octet has tokens of other tiles
                token = octet * OCTET + octets.start - tile.token - self.warpgroup * sizes.tokens
                exist &= (token >= 0) & (token < sizes.tokens)
            move(piece, octets, exist)

        for i, ref in enumerate((self.refs.dk_depth, self.refs.dv_depth)):
            places = ref, self.refs, tile, chunk, octet, columns, self.sizes
            pl.when(side == i)(functools.partial(tiles.for_slots, own, *places))

    def _load(self, step):
        """Start loading the piece of a step, if there is one."""
        if self.fresh:
            return
        full, buffer = self._buffer(step)

        def move(source, octets, exist):
            # The sums of a missing token belong to another tile.
            copy = functools.partial(plgpu.copy_gmem_to_smem, source, buffer.at[octets], full)
            lax.cond(exist, copy, functools.partial(plgpu.barrier_arrive, full))

        self._for_places(step, move)

    def write(self, step, buffer):
        """Start writing the piece of a step."""

        def move(target, octets, exist):
            copy = functools.partial(plgpu.copy_smem_to_gmem, buffer.at[octets], target)
            pl.when(exist)(copy)

        self._for_places(step, move)

    def add(self, step, _):
        """Add gradients to the piece of a step, whose load has begun, and start writing it."""
        sizes, (side, start) = self.sizes, self._place(step)
        number = side * TILES + self.warpgroup
        left = self.shared.scores.at[number]
        left = left[...].T if sizes.interpret else left.T
        right = self.shared.q.at[number, :, pl.ds(start, self.columns)]
        more = add_product(None, left, right, sizes, (ROWS, self.columns))
        factor = jnp.where(side == 0, jnp.float32(sizes.factor / LOG2E), 1.0)
        full, buffer = self._buffer(step)
        rows = matrix(buffer, sizes)
        if self.fresh:
            new = (more * factor).astype(buffer.dtype)  # 0 for hidden slots, whose weights are 0
        else:
            plgpu.barrier_wait(full)
            old = body.load_rows(rows, sizes)
            tile, chunk, octet = self.at()
            shown = by_row(body.shown_rows(self.refs, tile, octet, chunk, sizes), old.shape)
            new = (old.astype(jnp.float32) + more * factor).astype(old.dtype)
            new = jnp.where(shown != 0, new, old)  # hidden slots keep their bits
        body.store_matrix(rows, new, sizes)
        self.write(step, buffer)
        if not self.fresh or self.buffers < self.steps:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._load(step + self.buffers)


def _over_slots(refs, shared, place, of, sizes, dq, fresh):
    """Return dq plus the slots' part, and add to the slots' sums, 8 slots of 8 tokens at a time.

    Of the 64 columns of scores a row uses those whose slot belongs to its own token.
    """
    dtype, shape = shared.ring.dtype, (ROWS, ROWS)
    tile, token = place()
    at = tile.batch, lax.div(token, sizes.tokens)
    for rows in (shared.q, shared.q_depth):
        _clear_unused(rows.at[of], sizes)

    def by_query(number):
        return by_row(load(shared.lse.at[number], LAYOUT.reduce(1)), shape)

    def visible(chunk, part):
        """Return whether a column's slot is visible and belongs to the row's token."""
        words = None
        if sizes.masked:
            words = by_row(load(refs.row_words.at[*at, chunk], LAYOUT.reduce(1), False), shape)
        slot, of_token = body.slot_and_token(iota(shape, 1), sizes)
        part = lax.optimization_barrier(part * OCTET)
        own = body.from_octet(iota(shape, 0), token, sizes) == part + of_token
        return own & body.visible_slots(tile, words, slot, chunk, sizes)

    def one(i, dq):
        # With the barriers each step computes its numbers again; they would not fit the registers.
        i, warpgroup = lax.optimization_barrier((i, of))
        q, do = shared.q.at[warpgroup], shared.q_depth.at[warpgroup]

        def at():
            (tile, token), step = place(), lax.optimization_barrier(i)
            octet = lax.div(token, OCTET) + lax.rem(step, sizes.parts)
            return tile, tile.first_chunk + lax.div(step, sizes.parts), octet

        tile, chunk, octet = at()
        # For wide heads each copy computes them again; kept, they would spill registers.
        of_copy = at if sizes.width > CHUNK else lambda: (tile, chunk, octet)
        k_stage, v_stage = (tiles.stage_of(2 * (tile.end + i) + side, sizes) for side in range(2))
        sums = _Sums(refs, shared, of_copy, warpgroup, sizes, fresh)
        if not fresh:
            sums.start()
        plgpu.barrier_wait(shared.slots_full.at[k_stage])
        k, v = (body.own_slots(shared, x, warpgroup, sizes) for x in (k_stage, v_stage))
        body.clear_hidden(k, refs, tile, octet, chunk, sizes)
        keep = visible(chunk, lax.rem(i, sizes.parts))
        scores = add_product(None, q, k, sizes, shape, transpose=True)
        weights = jnp.exp2(scores * sizes.factor - by_query(of))
        weights = jnp.where(keep, weights, 0.0)
        plgpu.barrier_wait(shared.slots_full.at[v_stage])
        if not sizes.masked:  # else each chunk may have hidden slots; clearing costs more then
            body.clear_hidden(v, refs, tile, octet, chunk, sizes)
        dweights = add_product(None, do, v, sizes, shape, transpose=True)
        plgpu.barrier_arrive(shared.used.at[v_stage])
        dscores = weights * (dweights - by_query(TILES + of))
        if sizes.masked:
            # Values of hidden slots may be NaN. By the weights: `keep` would take 32 registers.
            dscores = jnp.where(weights > 0, dscores, 0.0)
        dscores, weights = dscores.astype(dtype), weights.astype(dtype)
        dq = add_product(dq, dscores, k, sizes)
        plgpu.barrier_arrive(shared.used.at[k_stage])
        # Products read them transposed, which needs shared memory.
        for side, x in enumerate((dscores, weights)):
            shared.scores.at[side * TILES + warpgroup][...] = x
        plgpu.commit_smem()
        if fresh:
            sums.start()
        # The barrier prevents unrolling, which would spill registers.
        lax.fori_loop(0, lax.optimization_barrier(jnp.int32(sums.steps)), sums.add, None)
        return dq

    return lax.fori_loop(0, tile.chunks * sizes.parts, one, dq)
