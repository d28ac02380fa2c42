"""The memory side of the fused Hopper kernel: its tiles, and the ring of stages in shared memory.

A stage has 128 rows. They are 128 of the sequence's keys or values, which both tiles of a block
use; or each tile has half of them, 32 slots of each of 2 of its 8 tokens. One warpgroup fills the
stages in the order of their use.
"""

import types
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic.common import full_slice

TOKENS = HEADS = 8
ROWS = TOKENS * HEADS
TILES = 2  # of as many warpgroups in a block
KEYS = 128  # rows of a stage
CHUNK = 32  # slots read at a time, rows of a copy, and bits of a word of visibility
TOKENS_PER_STAGE = KEYS // TILES // CHUNK
STAGES_PER_CHUNK = TOKENS // TOKENS_PER_STAGE


class Sizes(NamedTuple):
    """The parameters for which a kernel is compiled."""

    length: int
    group: int  # query heads of a key/value head
    width: int  # H as shared memory holds it
    stages: int  # of the ring
    window: int  # number of visible keys, the query's own among them; 0: no limit
    segments: bool
    own_query: bool  # there are queries for the slots
    by_token: bool  # some slots are visible to some tokens only
    factor: float  # on the scores, including log2(e)
    interpret: bool  # products with a left side in registers are computed off the tensor core


class Shared(NamedTuple):
    """Buffers in shared memory, and their barriers."""

    q: object  # of each tile, as are q_depth and lse; the results are written to q
    q_depth: object
    lse: object
    ring: object  # [stages, KEYS, H]
    q_full: object  # queries of a tile have arrived
    full: object  # a stage has been filled
    used: object  # a stage has been used by both tiles
    turn: object  # passes the tensor core from one warpgroup to the other


def num_tiles(length):
    """Blocks of the grid along the tokens."""
    return -(-length // (TILES * TOKENS))


def tile_of(refs, sizes):
    """The place of a block's first query, and its blocks of keys and chunks of slots."""
    # Along one axis, since the others of a grid end at 65535.
    item, (batches, _, heads, _) = lax.axis_index('item'), refs.q.shape
    octet, rest = lax.rem(item, heads // HEADS), lax.div(item, heads // HEADS)
    batch = lax.rem(rest, batches)
    # Late tiles have the most keys: they start first, so that no long one remains for the end.
    tile = num_tiles(sizes.length) - 1 - lax.div(rest, batches)
    token, head = tile * (TILES * TOKENS), octet * HEADS
    last = jnp.minimum(token + TILES * TOKENS, sizes.length)
    first = jnp.int32(0) if refs.first_key is None else refs.first_key[batch, tile]
    if sizes.window:
        first = jnp.maximum(first, token - sizes.window + 1)
    return types.SimpleNamespace(
        batch=batch,
        head=head,
        kv_head=lax.div(head, sizes.group),
        token=token,
        begin=lax.div(first, KEYS),
        end=lax.div(last + KEYS - 1, KEYS),
        first_chunk=refs.bounds[0],
        end_chunk=refs.bounds[1],
    )


def stage_of(step, sizes):
    """The ring's stage that a step fills and uses."""
    return lax.rem(step, jnp.int32(sizes.stages))


def fill(refs, shared, tile, sizes):
    """The memory warpgroup: keys, values and slots into the ring, in the order of their use."""
    width = full_slice(sizes.width)

    def fill_stage(step, sources):
        stage = stage_of(step, sizes)

        @pl.when(step >= sizes.stages)
        def _():
            plgpu.barrier_wait(shared.used.at[stage])

        for i, source in enumerate(sources):
            place = shared.ring.at[stage, pl.ds(i * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(source, place, shared.full.at[stage])

    blocks = tile.end - tile.begin

    @pl.loop(0, blocks)
    def _(i):
        starts = [(tile.begin + i) * KEYS + start for start in range(0, KEYS, CHUNK)]
        for side, ref in enumerate((refs.k, refs.v)):
            rows = [
                ref.at[tile.batch, pl.ds(start, CHUNK), tile.kv_head, width] for start in starts
            ]
            fill_stage(2 * i + side, rows)

    def place(token):
        token = jnp.minimum(token, sizes.length - 1)
        if refs.places is None:
            return token
        return jnp.minimum(refs.places[tile.batch, token], refs.k_depth.shape[2] - 1)

    @pl.loop(tile.first_chunk, tile.end_chunk)
    def _(chunk):
        step = 2 * blocks + (chunk - tile.first_chunk) * (2 * STAGES_PER_CHUNK)
        slots = pl.ds(chunk * CHUNK, CHUNK)
        for side, ref in enumerate((refs.k_depth, refs.v_depth)):
            for part in range(STAGES_PER_CHUNK):
                tokens = [
                    tile.token + warpgroup * TOKENS + part * TOKENS_PER_STAGE + i
                    for warpgroup in range(TILES)
                    for i in range(TOKENS_PER_STAGE)
                ]
                rows = [ref.at[slots, tile.batch, place(t), tile.kv_head, width] for t in tokens]
                fill_stage(step + side * STAGES_PER_CHUNK + part, rows)

    steps = 2 * blocks + (tile.end_chunk - tile.first_chunk) * (2 * STAGES_PER_CHUNK)

    @pl.loop(jnp.maximum(steps - sizes.stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(shared.used.at[stage_of(step, sizes)])
