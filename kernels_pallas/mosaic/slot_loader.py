"""Sizes of the depth kernels on Hopper, and how their blocks load slots.

An item is one token and one key/value head, with its G query heads. A block of the grid is one
warpgroup and computes a run of consecutive items. Their slots come in chunks of 64
(docs/depth_attention.md, section 6).
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import common
from kernels_pallas.mosaic.common import CHUNK, LAYOUT, OCTET, pad, round_up

# Least number of blocks for runs longer than 2: 16 for each of an H200's 132 processors.
BLOCKS = 132 * 16
# Layout of 8 numbers, one a lane and no pairs of neighbors: they are not contiguous in memory.
SCALARS = plgpu.Layout.TILED(
    tiling=plgpu.Tiling(((OCTET,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(4), -2),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call, and the layouts of its arrays in global and in shared memory."""

    batch: int
    length: int
    kv_heads: int
    group: int  # G, query heads of a key/value head
    width: int
    slots: int  # L, rounded up to a multiple of 8
    tokens: int  # R
    dtype: jnp.dtype  # of the slots
    masked: bool  # there is a mask
    mapped: bool  # `rows_BT` gives each query's token
    window: int  # number of visible slots, the newest; 0: all

    @classmethod
    def of(cls, q_BTNH, slots, window):
        """Return the sizes of a call of depth_forward."""
        batch, length, heads, width = q_BTNH.shape
        held, _, tokens, kv_heads, _ = slots.k_LBRKH.shape
        sizes = batch, length, kv_heads, heads // kv_heads, width, round_up(held, OCTET), tokens
        kinds = slots.mask_LBR is not None, slots.rows_BT is not None
        return cls(*sizes, jnp.dtype(slots.k_LBRKH.dtype), *kinds, window)

    @property
    def items(self):
        """Number of items: pairs of a query's token and a key/value head."""
        return self.batch * self.length * self.kv_heads

    @property
    def run(self):
        """Items of a block; at least 2, so that one is loaded while another is computed."""
        return next(n for n in (16, 8, 4, 2) if n == 2 or self.items >= n * BLOCKS)

    @property
    def blocks(self):
        """Blocks of the grid."""
        return -(-self.items // self.run)

    @property
    def columns(self):
        """Query heads of an item in shared memory, G padded to the depth of a matrix product."""
        return round_up(self.group, 16)

    @property
    def heads(self):
        """Query heads of an item in global memory: G, padded to eights above 8."""
        return self.group if self.group <= OCTET else round_up(self.group, OCTET)

    @property
    def scalars(self):
        """Logsumexps of an item in global memory: G, padded to eights."""
        return round_up(self.group, OCTET)

    @property
    def padded_width(self):
        """H, padded to the 64 columns that a matrix product reads at once."""
        return round_up(self.width, CHUNK)

    def heads_tile(self, dtype, *leading):
        """Return shared memory for an item's heads [columns, padded width]."""
        shape = (*leading, self.columns, self.padded_width)
        return common.tiled(shape, dtype, common.swizzle_of(self.width, dtype))

    def slots_memory(self, stages):
        """Return the shared memory and barriers of `SlotLoader.load_slots`, by name."""
        shape = stages, CHUNK, self.padded_width
        slots = common.tiled(shape, self.dtype, common.swizzle_of(self.width, self.dtype))
        return {
            'k': slots,
            'v': slots,
            **({'shown': plgpu.SMEM((stages, CHUNK), jnp.float32)} if self.masked else {}),
            'k_ready': plgpu.Barrier(num_barriers=stages, num_arrivals=1 + self.masked),
            'v_ready': plgpu.Barrier(num_barriers=stages),
        }

    def by_item(self, x_BTNH):
        """Return [items, heads, H], with zeros after G."""
        return pad(x_BTNH.reshape(self.items, self.group, self.width), 1, self.heads)

    def pad_scalars(self, x_BNT):
        """Return [B, K scalars, T], float32: the array itself if 8 divides G."""
        x = x_BNT.astype(jnp.float32).reshape(-1, self.group, self.length)
        return pad(x, 1, self.scalars).reshape(self.batch, -1, self.length)

    def cut_scalars(self, x):
        """Invert `pad_scalars`: returns [B, N, T]."""
        x = x.reshape(-1, self.scalars, self.length)[:, : self.group]
        return x.reshape(self.batch, -1, self.length)

    def by_place(self, x_LBRKH):
        """Return [slots, B R K, H]."""
        return pad(x_LBRKH, 0, self.slots).reshape(self.slots, -1, self.width)

    def slot_operands(self, slots):
        """Return by name: num_slots, rows int32 [B T], mask float32 [B R, slots], k and v."""
        # Dummies of one number are constants; XLA would run a kernel to fill larger ones.
        rows, mask = jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.float32)
        if self.mapped:
            rows = slots.rows_BT.astype(jnp.int32).reshape(-1)
        if self.masked:
            mask = pad(slots.mask_LBR, 0, self.slots).reshape(self.slots, -1).T.astype(jnp.float32)
        return {
            'num_slots': jnp.asarray(slots.num, jnp.int32).reshape(1),
            'rows': rows,
            'mask': mask,
            'k': self.by_place(slots.k_LBRKH),
            'v': self.by_place(slots.v_LBRKH),
        }


class SlotLoader:
    """Loads the slots of a block's items, one chunk a step; all have as many chunks."""

    def __init__(self, sizes, num_slots, rows):
        self.sizes, self.rows = sizes, rows
        self.start = lax.axis_index('block') * sizes.run
        # Visible slots are first to end; the first chunk begins at base.
        self.end = num_slots
        self.first = jnp.maximum(num_slots - sizes.window, 0) if sizes.window else jnp.int32(0)
        self.base = lax.div(self.first, jnp.int32(OCTET)) * OCTET
        self.chunks = lax.div(num_slots - self.base + (CHUNK - 1), jnp.int32(CHUNK))
        self.items = jnp.minimum(sizes.run, sizes.items - self.start)
        self.steps = self.items * self.chunks

    def token(self, item):
        """Return (index of the item in B R K, of its token in B R, whether it has a token)."""
        sizes = self.sizes
        if not sizes.mapped:
            item += self.start
            return item, lax.div(item, jnp.int32(sizes.kv_heads)), None
        token = lax.div(self.start + item, jnp.int32(sizes.kv_heads))
        row = self.rows[token]
        token = lax.div(token, jnp.int32(sizes.length)) * sizes.tokens
        token += jnp.minimum(row, sizes.tokens - 1)
        head = lax.rem(self.start + item, jnp.int32(sizes.kv_heads))
        return token * sizes.kv_heads + head, token, row < sizes.tokens

    def scalars(self, ref, item):
        """Return the reference to an item's logsumexps in an array of `Sizes.pad_scalars`."""
        item = self.start + item
        token, head = (f(item, jnp.int32(self.sizes.kv_heads)) for f in (lax.div, lax.rem))
        batch, token = (f(token, jnp.int32(self.sizes.length)) for f in (lax.div, lax.rem))
        return ref.at[batch, pl.ds(head * self.sizes.scalars, self.sizes.scalars), token]

    def load_scalars(self, ref, stage):
        """Copy the logsumexps of all items to shared memory [run, columns], padded with zeros."""
        layout, scalars = SCALARS, self.sizes.scalars
        # Unrolled, so that all loads are in flight at once. Missing items repeat the last one.
        items = [jnp.minimum(item, self.items - 1) for item in range(self.sizes.run)]
        loaded = [common.load(self.scalars(ref, item), layout, optimized=False) for item in items]
        for item, row in enumerate(loaded):
            stage.at[item, pl.ds(0, scalars)][...] = row
            if rest := self.sizes.columns - scalars:
                zeros = plgpu.layout_cast(jnp.zeros(rest, jnp.float32), layout)
                stage.at[item, pl.ds(scalars, rest)][...] = zeros
        plgpu.commit_smem()

    def store_scalars(self, stage, ref):
        """Write logsumexps from shared memory to where `load_scalars` reads."""

        @pl.loop(0, self.items)
        def _(item):
            row = stage.at[item, pl.ds(0, self.sizes.scalars)]
            row = common.load(row, SCALARS, optimized=False)
            common.store_scattered(self.scalars(ref, item), row)

    def for_rows(self, chunk, move, hidden=False):
        """Call move(first slot, rows) once, for the written rows of a chunk in octets.

        hidden: also those that are not written.
        """
        slot = self.base + chunk * CHUNK

        def choose(least, most):
            if least == most:
                return move(slot, most * OCTET)
            middle = (least + most) // 2
            halves = (least, middle), (middle + 1, most)
            choices = (functools.partial(choose, *half) for half in halves)
            return lax.cond(self.end - slot <= middle * OCTET, *choices)

        most = min(CHUNK, self.sizes.slots) // OCTET
        choose(most if hidden else 1, most)

    def load_chunk(self, chunk, place, part, ref, stage, barrier):
        """Start the copy of some columns of a chunk of slots, or of sums, to shared memory."""

        def move(slot, size):
            source = ref.at[pl.ds(slot, size), place, part]
            plgpu.copy_gmem_to_smem(source, stage.at[pl.ds(0, size)], barrier)

        self.for_rows(chunk, move)

    def load_slots(self, step, k, v, mask, s):
        """Start the copies of step item * chunks + chunk to its stage of s, if the step exists."""

        def start():
            item = lax.div(step, self.chunks)
            chunk = step - item * self.chunks
            place, token, _ = self.token(item)
            stage, part = lax.rem(step, s.k.shape[0]), common.full_slice(self.sizes.padded_width)
            self.load_chunk(chunk, place, part, k, s.k.at[stage], s.k_ready.at[stage])
            self.load_chunk(chunk, place, part, v, s.v.at[stage], s.v_ready.at[stage])
            if self.sizes.masked:
                source = mask.at[token, pl.ds(self.base + chunk * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(source, s.shown.at[stage], s.k_ready.at[stage])

        pl.when(step < self.steps)(start)

    def shown(self, chunk, has_token, s, stage):
        """Return float32 [64], 1 for visible slots of a chunk; has_token: the item has a token."""
        layout = LAYOUT.reduce(1)
        slot = self.base + chunk * CHUNK + common.iota((CHUNK,), 0, layout)
        end = jnp.where(has_token, self.end, 0) if self.sizes.mapped else self.end
        ones = jnp.where((slot >= self.first) & (slot < end), 1.0, 0.0)
        return ones * common.load(s.shown.at[stage], layout) if self.sizes.masked else ones

    def hide_rows(self, chunk, has_token, stage, shown):
        """Zero the hidden rows of a chunk, which may hold NaN: 0 times NaN is NaN."""

        def hide():
            for i in range(0, stage.shape[1], CHUNK):
                part = stage.at[:, pl.ds(i, CHUNK)]
                x = common.load(part, LAYOUT)
                part[...] = jnp.where(common.by_row(shown, x.shape) > 0, x, jnp.zeros_like(x))

        if self.sizes.masked:
            hide()
        else:
            slot = self.base + chunk * CHUNK
            complete = (slot >= self.first) & (slot + CHUNK <= self.end)
            complete = complete & has_token if self.sizes.mapped else complete
            pl.when(jnp.logical_not(complete))(hide)
