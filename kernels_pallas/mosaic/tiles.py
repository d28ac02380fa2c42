"""Sizes and tiles of the fused Hopper kernels, and the warpgroup that copies to shared memory.

A tile is the work of one warpgroup: 64 rows of queries, which are a power of two of tokens times
the query heads of one key/value head. A block of the grid has two tiles and a ring of stages of 128
rows. A stage holds keys or values, which both tiles use, or for each tile 8 slots of 8 tokens.

Shared memory is addressed by 8 rows, so they are in the order of heads where a tile has 8 tokens or
more, and otherwise in the order of tokens.
"""

import collections
import dataclasses
import types

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic.common import OCTET, full_slice

ROWS = 64  # of a tile: tokens times heads
TILES = 2  # tiles of a block, each of one warpgroup
KEYS = 128  # rows of a stage
SLOTS = ROWS // OCTET  # slots in a chunk, for 8 tokens at a time
LOWEST = float(jnp.finfo(jnp.float32).min)


# Shared memory: q (later the results, and in fused_backward.py the slots' queries), q_depth and lse
# of each tile, and the ring [stages, KEYS / 8, 8, H]. Barriers: q_full (queries have arrived), full
# and slots_full (a stage has been filled with keys, or with slots), used (both tiles have used a
# stage), turn (whose turn it is at the tensor core). Only in the kernels of dq: delta, in the array
# of lse, scores (first o, then the slots' weights and their gradients) and o_full. Only in
# fused_backward.py: sums (of the slots) and sums_full.
Shared = collections.namedtuple(
    'Shared',
    'q q_depth lse ring q_full full slots_full used turn scores o_full sums sums_full',
    defaults=(None,) * 4,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes and kinds of a call."""

    length: int
    kv_heads: int
    group: int  # G, query heads of a key/value head
    width: int  # H, padded for shared memory
    stages: int  # of the ring
    window: int  # number of visible keys; 0: no limit
    documents: bool  # there are segment ids
    own_query: bool  # q_depth: other queries for the slots, or in the backward passes do
    masked: bool  # tokens see different slots: there is a mask, or rows_BT
    copy_by_token: bool  # each token's slots are copied by themselves, not 8 tokens at once
    factor: float  # scale * log2(e)
    interpret: bool

    @property
    def tokens(self):
        """Tokens of a tile, a power of two."""
        return ROWS >> (self.group - 1).bit_length()

    @property
    def by_token(self):
        """Whether the rows of a tile are in the order of tokens, not of heads."""
        return self.tokens < OCTET

    @property
    def heads(self):
        """Query heads of a tile: G, in the order of tokens padded to fill all rows."""
        return ROWS // self.tokens if self.by_token else self.group

    @property
    def runs(self):
        """Copies for a tile's rows: one for each token or head, whichever comes first."""
        return self.tokens if self.by_token else self.heads

    def token_of(self, row):
        """Return the token of a row, counted from the first one of the tile."""
        return row >> (self.heads.bit_length() - 1) if self.by_token else row & (self.tokens - 1)

    @property
    def parts(self):
        """Products for the scores of a chunk of slots: one for each 8 tokens."""
        return max(self.tokens // OCTET, 1)

    @property
    def blocks(self):
        """Blocks of the grid along the tokens, for one column of heads."""
        return -(-self.length // (TILES * self.tokens))


def tile_of(refs, sizes):
    """Return what a block of the grid computes: first query, blocks of keys, chunks of slots."""
    # The grid has one axis, since CUDA limits the others to 65,535. With the barrier each phase
    # computes these numbers again; otherwise the compiler keeps all of them in registers.
    item, batches = lax.optimization_barrier(lax.axis_index('item')), refs.q.shape[0]
    kv_head, rest = lax.rem(item, sizes.kv_heads), lax.div(item, sizes.kv_heads)
    batch = lax.rem(rest, batches)
    # Late tokens have the most keys. They start first, so that no long block is left for the end.
    token = (sizes.blocks - 1 - lax.div(rest, batches)) * (TILES * sizes.tokens)
    last = jnp.minimum(token + TILES * sizes.tokens, sizes.length) - 1
    # some: first key that the first query sees. every: first key that all queries see.
    some = every = jnp.int32(0)
    if sizes.documents:
        some, every = refs.first[batch, token], refs.first[batch, last]
    by_ids = some < 0
    if sizes.window:
        some = jnp.maximum(some, token - (sizes.window - 1))
        every = jnp.maximum(every, last - (sizes.window - 1))
    base = lax.div(jnp.maximum(some, 0), OCTET) * OCTET
    end = lax.div(last - base, KEYS) + 1
    general = jnp.where(by_ids, end, 0)
    inside = jnp.clip(lax.div(every - base + (KEYS - 1), KEYS), general, end)
    first_slot = end_slot = jnp.int32(0)
    if refs.bounds is not None:
        first_slot, end_slot = refs.bounds[0], refs.bounds[1]
    first_chunk = lax.div(first_slot, SLOTS)
    chunks = lax.div(end_slot + (SLOTS - 1), SLOTS) - first_chunk
    return types.SimpleNamespace(
        batch=batch,
        kv_head=kv_head,
        token=token,
        # Blocks of 128 keys, counted from key `base`. Up to `general`: compared by ids. From there
        # to `inside`, and from `causal` to `end`: masked. Between these: visible to all queries.
        base=base,
        general=general,
        inside=inside,
        causal=jnp.maximum(lax.div(token + 1 - base, KEYS), inside),
        end=end,
        first_slot=first_slot,
        end_slot=end_slot,
        first_chunk=first_chunk,
        chunks=chunks,
        steps=2 * end + 2 * sizes.parts * chunks,  # number of times that a stage is filled
    )


def place_of(refs, warpgroup, sizes):
    """Return (tile, first token of the warpgroup), again for each phase of a kernel."""
    tile = tile_of(refs, sizes)
    return tile, tile.token + warpgroup * sizes.tokens


def run_of(i, tile, token, sizes):
    """Return run i of a tile's rows: its tokens and query heads in an array, and its rows."""
    head, (tokens, heads) = tile.kv_head * sizes.heads, (sizes.tokens, sizes.heads)
    if sizes.by_token:
        return (token + i, pl.ds(head, heads)), pl.ds(i * heads, heads)
    return (pl.ds(token, tokens), head + i), pl.ds(i * tokens, tokens)


def stage_of(step, sizes):
    """Return the stage of the ring that a step fills and uses."""
    return lax.rem(step, jnp.int32(sizes.stages))


def next_stage(shared, step, sizes):
    """Wait until the stage of a step is free, and return it."""
    stage = stage_of(step, sizes)
    pl.when(step >= sizes.stages)(lambda: plgpu.barrier_wait(shared.used.at[stage]))
    return stage


def finish(shared, steps, sizes):
    """Wait until the stages of the last steps have been used."""

    @pl.loop(jnp.maximum(steps - sizes.stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(shared.used.at[stage_of(step, sizes)])


def for_slots(move, ref, refs, tile, chunk, octet, columns, sizes):
    """Call move(reference, octets, exist) for each piece of 8 slots of 8 tokens in global memory.

    octets is the slice of a stage's octets of rows that the piece fills. exist is whether its
    tokens exist; if not, the reference is to the slots of another token.
    """
    if not sizes.copy_by_token:
        exist, octet = octet < ref.shape[2], jnp.minimum(octet, ref.shape[2] - 1)
        slots = pl.ds(chunk * SLOTS, SLOTS)
        piece = ref.at[slots, tile.batch, octet, :, tile.kv_head, columns]
        move(piece, pl.ds(0, SLOTS), exist)
        return

    # The barrier prevents unrolling, which would spill registers.
    @pl.loop(0, lax.optimization_barrier(jnp.int32(OCTET)))
    def _(i):
        token = octet * OCTET + i
        exists, row = token < sizes.length, jnp.minimum(token, sizes.length - 1)
        if refs.rows is not None:
            row = refs.rows[tile.batch, row]
            exists, row = exists & (row < ref.shape[3]), jnp.minimum(row, ref.shape[3] - 1)
        piece = ref.at[pl.ds(chunk, 1), :, tile.batch, row, tile.kv_head, columns]
        move(piece, pl.ds(i, 1), exists)


def fill(refs, shared, sizes, in_pairs=False):
    """Copy keys, values and slots into the ring, in the order of their use: the memory warpgroup.

    in_pairs: the keys and values of 8 tokens' slots alternate. False: all keys of a chunk come
    first, then all values.
    """
    tile, width = tile_of(refs, sizes), full_slice(sizes.width)

    # Without the barrier the compiler peels the first rounds off, and spills the addresses of their
    # stages (JAX 0.12).
    @pl.loop(lax.optimization_barrier(jnp.int32(0)), tile.end)
    def _(block):
        octets = pl.ds(lax.div(tile.base, OCTET) + block * (KEYS // OCTET), KEYS // OCTET)
        for side, ref in enumerate((refs.k, refs.v)):
            stage = next_stage(shared, 2 * block + side, sizes)
            source = ref.at[tile.batch, octets, :, tile.kv_head, width]
            plgpu.copy_gmem_to_smem(source, shared.ring.at[stage], shared.full.at[stage])

    def fill_slots(ref, chunk, part, step):
        tile = tile_of(refs, sizes)  # again, so that it takes no registers between steps
        stage = next_stage(shared, step, sizes)
        for warpgroup in range(TILES):
            octet = lax.div(tile.token + warpgroup * sizes.tokens, OCTET) + part
            place = shared.ring.at[stage, pl.ds(warpgroup * SLOTS, SLOTS)]

            def move(source, octets, exist, place=place):
                del exist
                plgpu.copy_gmem_to_smem(source, place.at[octets], shared.slots_full.at[stage])

            for_slots(move, ref, refs, tile, tile.first_chunk + chunk, octet, width, sizes)

    sides = () if refs.k_depth is None else (refs.k_depth, refs.v_depth)
    if sides and in_pairs:

        @pl.loop(0, tile.chunks * sizes.parts)
        def _(i):
            for side, ref in enumerate(sides):
                step = 2 * (tile.end + i) + side
                fill_slots(ref, lax.div(i, sizes.parts), lax.rem(i, sizes.parts), step)

    elif sides:

        @pl.loop(0, tile.chunks)
        def _(chunk):
            for side, ref in enumerate(sides):
                step = 2 * tile.end + (2 * chunk + side) * sizes.parts

                @pl.loop(0, sizes.parts)
                def _(part, step=step, ref=ref):
                    fill_slots(ref, chunk, part, step + part)

    finish(shared, tile.steps, sizes)
