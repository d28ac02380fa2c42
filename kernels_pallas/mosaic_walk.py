"""Depth slots on Hopper: which of them a block of a kernel works on, and how they are fetched.

An item is one token and one key/value head, with its G query heads; a run of consecutive items is
one block's, of one warpgroup. Their slots come from global memory in chunks of 64 rows, by TMA.
The chunks are counted on the device from num_slots, so slots past the last one seen are never
fetched, save a few that complete a block of rows, and are hidden.

Slots lie in octets: eight rows of shared memory, as swizzled tiles have. Where 8 does not divide
the number of slots held, an octet has as many slots as do divide it, and its other rows are hidden.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import _compat
from kernels_pallas.mosaic_tiles import CHUNK, LAYOUT, OCTET, round_up, swizzle_of, tiled, whole

# A run of that many blocks for each of an H200's 132 processors.
BLOCKS = 132 * 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes, and how arrays lie in global and in shared memory.

    Attributes:
      batch, length, kv_heads, group, width, slots, tokens: B, T, K, G, H, L, R.
      dtype: of the slots.
      masked: a mask hides some slots of some tokens.
      mapped: rows_BT says where a query's token is.
      window: newest slots seen; 0: all.
    """

    batch: int
    length: int
    kv_heads: int
    group: int
    width: int
    slots: int
    tokens: int
    dtype: jnp.dtype
    masked: bool
    mapped: bool
    window: int

    @classmethod
    def of(cls, q_BTNH, buffers, mask_LBR, rows_BT, window):
        """That of arguments of depth_forward; a ValueError where there are too many items."""
        batch, length, heads, width = q_BTNH.shape
        slots, _, tokens, kv_heads, _ = buffers[0].shape
        group, dtype = heads // kv_heads, jnp.dtype(buffers[0].dtype)
        masked, mapped = mask_LBR is not None, rows_BT is not None
        if (places := batch * tokens * kv_heads) >= 2**31:
            right = 'must be fewer than 2^31'
            raise ValueError(f'{places} pairs of a token and a key/value head {right}')
        sizes = (batch, length, kv_heads, group, width, slots, tokens)
        return cls(*sizes, dtype, masked, mapped, window)

    @property
    def items(self):
        """Pairs of a query's token and a key/value head."""
        return self.batch * self.length * self.kv_heads

    @property
    def run(self):
        """Items of a block; 2 at least, as TMA fetches their scalars in 128 bytes or more."""
        return next(n for n in (16, 8, 4, 2) if n == 2 or self.items >= n * BLOCKS)

    @property
    def columns(self):
        """Rows of queries of an item, of which the first G are real: a matrix product's depth."""
        return round_up(self.group, 16)

    @property
    def padded_width(self):
        """H, rounded up to what a matrix product reads at once."""
        return round_up(self.width, CHUNK)

    @property
    def octet(self):
        """Slots of an octet; of a prime number of slots above 8 there is one in each."""
        return next(n for n in range(OCTET, 0, -1) if self.slots % n == 0)

    def heads_tile(self, dtype, *leading):
        """Shared memory of an item's heads [columns, padded width]."""
        shape = (*leading, self.columns, self.padded_width)
        return tiled(shape, dtype, swizzle_of(self.width, dtype))

    def slots_tile(self, dtype, *leading):
        """Shared memory of a chunk's slots [64, padded width]."""
        return tiled((*leading, CHUNK, self.padded_width), dtype, swizzle_of(self.width, dtype))

    def by_item(self, x_BTNH):
        """[items, G, H]."""
        return x_BTNH.reshape(self.items, self.group, self.width)

    def scalars_by_item(self, x_BNT, fill):
        """[items, columns], float32."""
        shape = (self.batch, self.kv_heads, self.group, self.length)
        x = jnp.moveaxis(x_BNT.astype(jnp.float32).reshape(shape), 3, 1)
        x = x.reshape(self.items, self.group)
        return jnp.pad(x, ((0, 0), (0, self.columns - self.group)), constant_values=fill)

    def by_octet(self, x_LBRKH):
        """[L, places, H] where octets are full, else [octets, slots of each, places, H]."""
        split = (self.slots,) if self.octet == OCTET else (self.slots // self.octet, self.octet)
        return x_LBRKH.reshape(*split, self.batch * self.tokens * self.kv_heads, self.width)

    def shown(self, mask_LBR):
        """float32 [B R, rows of all octets]: 1 where a row's slot is seen."""
        if mask_LBR is None:
            return jnp.zeros((1, 4), jnp.float32)
        x = mask_LBR.reshape(self.slots // self.octet, self.octet, self.batch * self.tokens)
        x = jnp.pad(x, ((0, 0), (0, OCTET - self.octet), (0, 0)))
        return jnp.moveaxis(x.astype(jnp.float32), 2, 0).reshape(x.shape[2], -1)

    def rows(self, rows_BT):
        """int32 [B T], or nothing."""
        return jnp.zeros(1, jnp.int32) if rows_BT is None else rows_BT.astype(jnp.int32).reshape(-1)


class Walk:
    """A block's way: items, each of the same number of chunks, the pairs of both being steps.

    Attributes:
      shape: Shape.
      start: first item.
      items, chunks, steps: how many.
      first, past: slots seen are from first to before past.
      octet, octets: octets that hold them are from octet to before octets.
    """

    def __init__(self, shape, num_slots, rows):
        start = lax.axis_index('run') * shape.run
        self.shape, self.start, self.rows = shape, start, rows
        self.past = num_slots
        self.first = jnp.maximum(num_slots - shape.window, 0) if shape.window else jnp.int32(0)
        self.octet = lax.div(self.first, jnp.int32(shape.octet))
        self.octets = lax.div(num_slots + (shape.octet - 1), jnp.int32(shape.octet))
        self.chunks = lax.div(self.octets - self.octet + (OCTET - 1), jnp.int32(OCTET))
        self.items = jnp.minimum(shape.run, shape.items - start)
        self.steps = self.items * self.chunks

    def token(self, item):
        """(place of the item's slots among [B R K], place of its token among [B R], seen)."""
        shape = self.shape
        if not shape.mapped:
            item += self.start
            return item, lax.div(item, jnp.int32(shape.kv_heads)), None
        token = lax.div(self.start + item, jnp.int32(shape.kv_heads))
        row = self.rows[token]
        token = lax.div(token, jnp.int32(shape.length)) * shape.tokens
        token += jnp.minimum(row, shape.tokens - 1)
        head = lax.rem(self.start + item, jnp.int32(shape.kv_heads))
        return token * shape.kv_heads + head, token, row < shape.tokens

    def split(self, step):
        """(item, chunk)."""
        item = lax.div(step, self.chunks)
        return item, step - item * self.chunks

    def shown(self, chunk, inside, shown):
        """float32 [64]: 1 where a row's slot is seen; `shown` is the mask's share, or None."""
        layout = LAYOUT.reduce(1)
        row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
        octet = self.octet + chunk * OCTET
        if self.shape.octet == OCTET:
            slot = octet * OCTET + row
            seen = slot >= self.first
        else:
            within = lax.rem(row, jnp.int32(OCTET))
            slot = (octet + lax.div(row, jnp.int32(OCTET))) * self.shape.octet + within
            seen = (within < self.shape.octet) & (slot >= self.first)
        seen &= slot < (jnp.where(inside, self.past, 0) if self.shape.mapped else self.past)
        ones = jnp.where(seen, 1.0, 0.0)
        return ones if shown is None else ones * _compat.load(shown, layout)

    def complete(self, chunk, inside):
        """Whether every row of the chunk holds a slot that is seen; without a mask."""
        slot = (self.octet + chunk * OCTET) * OCTET
        complete = (slot >= self.first) & (slot + CHUNK <= self.past)
        return complete & inside if self.shape.mapped else complete


def chunk_rows(walk, chunk, move, skip):
    """Calls move(octet, rows, row) once for the rows of a chunk that exist, in blocks.

    A barrier must see octet_copies(shape) arrivals: skip() stands in where there is no octet.
    """
    shape, octet = walk.shape, walk.octet + chunk * OCTET
    if shape.octet < OCTET:
        for i in range(OCTET):
            there = functools.partial(move, octet + i, OCTET, i * OCTET)
            lax.cond(octet + i < walk.octets, there, skip)
        return
    most = min(CHUNK, round_up(shape.slots, 16))
    rest = (walk.octets - octet) * OCTET
    choose = functools.partial(move, octet, most, 0)
    for size in reversed(range(16, most, 16)):
        some = functools.partial(move, octet, size, 0)
        choose = functools.partial(lax.cond, rest <= size, some, choose)
    choose()


def octet_copies(shape):
    """Arrivals at a barrier that stand for a chunk."""
    return 1 if shape.octet == OCTET else OCTET


def chunk_in_memory(shape, ref, octet, size, place, part):
    """The octets' rows of one place in an array laid out by by_octet, of that part of the width."""
    if shape.octet == OCTET:
        return ref.at[pl.ds(octet * OCTET, size), place, part]
    return ref.at[octet, whole(OCTET), place, part]


def fetch_chunk(walk, chunk, place, part, ref, stage, barrier):
    """Starts the copy of a part of a chunk of slots, or of their sums, to shared memory."""

    def move(octet, size, row):
        source = chunk_in_memory(walk.shape, ref, octet, size, place, part)
        plgpu.copy_gmem_to_smem(source, stage.at[pl.ds(row, size)], barrier)

    chunk_rows(walk, chunk, move, lambda: plgpu.barrier_arrive(barrier))


def hide_rows(walk, chunk, inside, stage, shown):
    """Zeroes the rows of a chunk that are not seen: 0 times what they hold may be NaN."""

    def hide():
        for i in range(0, stage.shape[1], CHUNK):
            part = stage.at[:, pl.ds(i, CHUNK)]
            x = _compat.load(part, LAYOUT)
            keep = lax.broadcast_in_dim(shown, x.shape, [0]) > 0
            part[...] = jnp.where(keep, x, jnp.zeros_like(x))

    if walk.shape.masked or walk.shape.octet < OCTET:
        hide()
    else:
        pl.when(jnp.logical_not(walk.complete(chunk, inside)))(hide)


def fetch_slots(walk, step, k, v, mask, s):
    """Starts the copies of a step's keys and values to the stage of that step.

    Args:
      walk: of the block's items.
      step: of the walk.
      k, v: laid out by Shape.by_octet.
      mask: laid out by Shape.shown.
      s: shared memory: k, v, shown of several stages, and as many barriers k_ready, v_ready.
    """
    item, chunk = walk.split(step)
    place, token, _ = walk.token(item)
    stage, part = lax.rem(step, s.k.shape[0]), whole(walk.shape.padded_width)
    fetch_chunk(walk, chunk, place, part, k, s.k.at[stage], s.k_ready.at[stage])
    fetch_chunk(walk, chunk, place, part, v, s.v.at[stage], s.v_ready.at[stage])
    if walk.shape.masked:
        row = (walk.octet + chunk * OCTET) * OCTET
        source = mask.at[token, pl.ds(row, CHUNK)]
        plgpu.copy_gmem_to_smem(source, s.shown.at[stage], s.k_ready.at[stage])


def slots_memory(shape, stages):
    """Shared memory that fetch_slots fills."""
    copies = octet_copies(shape)
    return {
        'k': shape.slots_tile(shape.dtype, stages),
        'v': shape.slots_tile(shape.dtype, stages),
        'shown': plgpu.SMEM((stages, CHUNK), jnp.float32),
        'k_ready': plgpu.Barrier(num_barriers=stages, num_arrivals=copies + shape.masked),
        'v_ready': plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
    }
