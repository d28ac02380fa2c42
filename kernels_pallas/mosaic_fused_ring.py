"""The memory side of the fused Hopper kernel: its tiles, and the ring of stages in shared memory.

A stage has 128 rows. They are 128 of the sequence's keys or values, which both tiles of a block
use; or either tile has half of them, 32 slots of each of 2 of its 8 tokens. One warpgroup fills the
stages in the order of their use.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic_walk import OCTET, whole

TOKENS = HEADS = 8
ROWS = TOKENS * HEADS
TILES = 2  # of as many warpgroups in a block
KEYS = 128  # rows of a stage
CHUNK = 32  # slots read at a time, and bits of a word of visibility
TOKENS_A_STAGE = KEYS // TILES // CHUNK
STAGES_A_CHUNK = TOKENS // TOKENS_A_STAGE


class Static(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
      length, group, width: T, query heads of a key/value head, H as shared memory holds it.
      octet: slots in eight rows of a stage: 8, or what divides their number.
      stages: of the ring.
      window: keys seen, the query's own among them; 0 for no limit.
      segments, own_query, by_token: there are segment ids; queries for the slots; visibilities that
        differ from token to token.
      factor: on the scores, log2(e) in it.
      interpret: products with a left side in registers are computed outside the tensor core.
    """

    length: int
    group: int
    width: int
    octet: int
    stages: int
    window: int
    segments: bool
    own_query: bool
    by_token: bool
    factor: float
    interpret: bool


class Refs(NamedTuple):
    """The kernel's operands and results in global memory; None what the case does not have.

    Attributes:
      q, k, v, k_depth, v_depth, q_depth, o: as in fused_forward; slots as octets by slots of each
        where 8 does not divide their number.
      bounds: (first chunk, end) of the visible slots.
      words: bits of visible slots, [B, groups of 8 tokens, chunks, ROWS], of 1 for all of the first
        two where all tokens see the same.
      places: rows_BT.
      first_key: [B, tiles], of the oldest segment of each tile.
      ids, row_ids: segment ids of keys, and [B, groups, ROWS] of queries.
      lse: [B, N / 8, groups, ROWS].
    """

    q: object
    k: object
    v: object
    k_depth: object
    v_depth: object
    bounds: object
    words: object
    q_depth: object
    places: object
    first_key: object
    ids: object
    row_ids: object
    o: object
    lse: object


class Shared(NamedTuple):
    """Buffers in shared memory, and their barriers.

    Attributes:
      q, q_depth, lse: of either tile; the results end up in q.
      ring: [stages, KEYS, H].
      q_full: queries of a tile have come.
      full, used: a stage has been filled, or used by both tiles.
      turn: passes the tensor core from one warpgroup to the other.
    """

    q: object
    q_depth: object
    lse: object
    ring: object
    q_full: object
    full: object
    used: object
    turn: object


class Tile(NamedTuple):
    """Where a block of the grid is, and which steps it takes.

    Attributes:
      batch, head, kv_head, token: of its first query.
      begin, end: blocks of KEYS keys.
      first_chunk, end_chunk: chunks of CHUNK slots.
    """

    batch: object
    head: object
    kv_head: object
    token: object
    begin: object
    end: object
    first_chunk: object
    end_chunk: object


def num_tiles(length):
    """Blocks of the grid along the tokens."""
    return -(-length // (TILES * TOKENS))


def tile_of(refs, static):
    """The Tile of a block of the grid."""
    # Along one axis, since the others of a grid end at 65535.
    item, (batches, _, heads, _) = lax.axis_index('item'), refs.q.shape
    octet, rest = lax.rem(item, heads // HEADS), lax.div(item, heads // HEADS)
    batch = lax.rem(rest, batches)
    # Late tiles have the most keys: they start first, so that no long one is left for the end.
    tile = num_tiles(static.length) - 1 - lax.div(rest, batches)
    token, head = tile * (TILES * TOKENS), octet * HEADS
    last = jnp.minimum(token + TILES * TOKENS, static.length)
    first = jnp.int32(0) if refs.first_key is None else refs.first_key[batch, tile]
    if static.window:
        first = jnp.maximum(first, token - static.window + 1)
    return Tile(
        batch,
        head,
        lax.div(head, static.group),
        token,
        lax.div(first, KEYS),
        lax.div(last + KEYS - 1, KEYS),
        refs.bounds[0],
        refs.bounds[1],
    )


def stage_of(step, static):
    """The ring's stage that a step fills and uses."""
    return lax.rem(step, jnp.int32(static.stages))


def piece_of(static):
    """Rows that are copied at a time."""
    return CHUNK if static.octet == OCTET else OCTET


def fill(refs, shared, tile, static):
    """The memory warpgroup: keys, values and slots into the ring, in the order of their use."""
    piece, width = piece_of(static), whole(static.width)

    def fill(step, sources):
        stage = stage_of(step, static)

        @pl.when(step >= static.stages)
        def _():
            plgpu.barrier_wait(shared.used.at[stage])

        for i, source in enumerate(sources):
            place = shared.ring.at[stage, pl.ds(i * piece, piece)]
            plgpu.copy_gmem_to_smem(source, place, shared.full.at[stage])

    blocks = tile.end - tile.begin

    @pl.loop(0, blocks)
    def _(i):
        for side, ref in enumerate((refs.k, refs.v)):
            starts = [(tile.begin + i) * KEYS + start for start in range(0, KEYS, piece)]
            at = [(tile.batch, pl.ds(start, piece), tile.kv_head, width) for start in starts]
            rows = [ref.at[place] for place in at]
            fill(2 * i + side, rows)

    def slots(ref, chunk, token):
        """The chunk's slots of a token, in pieces."""
        at = tile.batch, place(token), tile.kv_head, width
        if static.octet == OCTET:
            return [ref.at[(pl.ds(chunk * CHUNK, CHUNK), *at)]]
        octets = [chunk * (CHUNK // OCTET) + i for i in range(CHUNK // OCTET)]
        return [ref.at[(jnp.minimum(i, ref.shape[0] - 1), whole(OCTET), *at)] for i in octets]

    def place(token):
        token = jnp.minimum(token, static.length - 1)
        if refs.places is None:
            return token
        return jnp.minimum(refs.places[tile.batch, token], refs.k_depth.shape[-3] - 1)

    @pl.loop(tile.first_chunk, tile.end_chunk)
    def _(chunk):
        step = 2 * blocks + (chunk - tile.first_chunk) * (2 * STAGES_A_CHUNK)
        for side, ref in enumerate((refs.k_depth, refs.v_depth)):
            for part in range(STAGES_A_CHUNK):
                tokens = [
                    tile.token + warpgroup * TOKENS + part * TOKENS_A_STAGE + i
                    for warpgroup in range(TILES)
                    for i in range(TOKENS_A_STAGE)
                ]
                rows = [rows for token in tokens for rows in slots(ref, chunk, token)]
                fill(step + side * STAGES_A_CHUNK + part, rows)

    steps = 2 * blocks + (tile.end_chunk - tile.first_chunk) * (2 * STAGES_A_CHUNK)

    @pl.loop(jnp.maximum(steps - static.stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(shared.used.at[stage_of(step, static)])
