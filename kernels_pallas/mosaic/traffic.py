"""Bytes that the Hopper kernels move between global and shared memory, from the sizes of a call.

Counted are TMA's copies, clipped to the arrays, and the loads of logsumexps and deltas. The few
scalars of a block are not. Calls have no mask, `slot_rows_BT`, documents or sequence window, and
those of the fused kernels no slot window. traffic_test.py compares all of it with what the
interpreter moves.
"""

from typing import NamedTuple

from kernels_pallas.mosaic import decode, slot_loader
from kernels_pallas.mosaic.common import CHUNK, OCTET, round_up
from kernels_pallas.mosaic.tiles import KEYS, ROWS, SLOTS, TILES
from kernels_pallas.mosaic.tiles import Sizes as TileSizes

FLOAT = 4  # bytes of a logsumexp or a delta


class Traffic(NamedTuple):
    """Bytes of one call of a kernel."""

    slots: int  # depth slots read
    sums: int = 0  # the slots' gradients, read and written, or, where they are fresh, written
    own: int = 0  # read or written by one block: queries and outputs, or keys of dk and dv
    shared: int = 0  # read by several blocks, mostly from the L2 cache

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(self)


def _rows_of_slots(sizes: slot_loader.Sizes, num_slots: int) -> int:
    """Return the rows of slots that are copied for an item: by octets, from the first visible."""
    first = max(num_slots - sizes.window, 0) if sizes.window else 0
    return round_up(num_slots, OCTET) - first // OCTET * OCTET


def depth_forward(sizes: slot_loader.Sizes, num_slots: int, o_bytes: int = 2) -> Traffic:
    """Return the bytes of `depth.depth_forward`; o_bytes: item size of the sequence's output."""
    item_size, heads = sizes.dtype.itemsize, sizes.heads * sizes.width
    slots = 2 * _rows_of_slots(sizes, num_slots) * sizes.width * item_size
    scalars = (sizes.blocks * sizes.run + sizes.items) * sizes.scalars * FLOAT
    queries = sizes.items * heads * (item_size + 2 * o_bytes)
    return Traffic(sizes.items * slots, own=queries + scalars)


def depth_backward(sizes: slot_loader.Sizes, num_slots: int, sum_bytes: int = 0) -> Traffic:
    """Return the bytes of `depth.depth_backward`, with dq and without dlse.

    sum_bytes: item size of the sums; 0: fresh gradients.
    """
    item_size, heads = sizes.dtype.itemsize, sizes.heads * sizes.width
    side = 2 * _rows_of_slots(sizes, num_slots) * sizes.width
    sums = 2 * side * sum_bytes or 2 * sizes.slots * sizes.width * item_size
    scalars = sizes.blocks * sizes.run * sizes.scalars * FLOAT
    queries = sizes.items * 5 * heads * item_size
    return Traffic(sizes.items * side * item_size, sizes.items * sums, queries + scalars)


def _tiles(sizes: TileSizes, batch: int):
    """Return (key/value heads of all batch rows, T padded to eights, tiles of all of them)."""
    columns = batch * sizes.kv_heads
    return columns, round_up(sizes.length, OCTET), columns * sizes.blocks * TILES


def _moved(sizes: TileSizes, batch: int, read: int, written: int) -> int:
    """Return the bytes of arrays of queries that tiles read and of those that they write."""
    columns, even, tiles = _tiles(sizes, batch)
    tokens = read * min(tiles // columns * sizes.tokens, even)
    tokens += written * min(round_up(sizes.length, sizes.tokens), even)
    return columns * sizes.heads * tokens * sizes.width * 2


def _keys(sizes, batch):
    """Return the bytes of keys and values that blocks read, each up to its last query."""
    columns, even, _ = _tiles(sizes, batch)
    tokens = TILES * sizes.tokens
    ends = (min(token + tokens, sizes.length) for token in range(0, sizes.length, tokens))
    rows = sum(min(round_up(end, KEYS), even) for end in ends)
    return 2 * columns * rows * sizes.width * 2


def _slots(sizes, held, num_slots):
    """Return the rows of slots that are copied for each token, in eights."""
    held = round_up(held, OCTET) if sizes.copy_by_token else held
    return sum(min(SLOTS, held - start) for start in range(0, num_slots, SLOTS))


def fused_forward(sizes: TileSizes, batch: int, held: int, num_slots: int) -> Traffic:
    """Return the bytes of `fused.fused_forward` in 16 bits; held: L, 0 for only the sequence."""
    *_, tiles = _tiles(sizes, batch)
    rows = _slots(sizes, held, num_slots) * max(sizes.tokens, OCTET)
    return Traffic(
        2 * tiles * rows * sizes.width * 2,
        own=_moved(sizes, batch, 1 + sizes.own_query, 1) + tiles * ROWS * FLOAT,
        shared=_keys(sizes, batch),
    )


def sequence_backward_q(sizes: TileSizes, batch: int) -> Traffic:
    """Return the bytes of the dq kernel of `sequence.sequence_backward`: 16 bits, no dlse."""
    *_, tiles = _tiles(sizes, batch)
    own = _moved(sizes, batch, 3, 1) + 2 * tiles * ROWS * FLOAT
    return Traffic(0, own=own, shared=_keys(sizes, batch))


def fused_backward_q(
    sizes: TileSizes, batch: int, held: int, num_slots: int, sum_bytes: int = 0, own_query=False
) -> Traffic:
    """Return the bytes of the dq kernel of `fused_backward.fused_backward`, in 16 bits.

    sum_bytes: item size of the sums; 0: fresh gradients. own_query: the slots have other queries.
    """
    (columns, _, tiles), plain = _tiles(sizes, batch), sequence_backward_q(sizes, batch)
    rows = _slots(sizes, held, num_slots)
    # Fresh gradients are written for all slots; sums are read and written for the visible ones.
    by_token = 2 * rows * sum_bytes or _slots(sizes, held, held) * 2
    return plain._replace(
        slots=2 * tiles * max(sizes.tokens, OCTET) * rows * sizes.width * 2,
        sums=2 * columns * sizes.length * by_token * sizes.width,
        own=plain.own + own_query * _moved(sizes, batch, 1, 1),
    )


def sequence_backward_kv(sizes: TileSizes, batch: int) -> Traffic:
    """Return the bytes of the kernel of dk and dv, in 16 bits.

    Each block of keys reads queries and cotangents (`shared`), and each of its two warpgroups the
    logsumexps and deltas.
    """
    even, end, shared = round_up(sizes.length, OCTET), (sizes.length - 1) // sizes.tokens + 1, 0
    for key in range(0, sizes.length, KEYS):
        begin = key // sizes.tokens
        rows = (min(end * sizes.tokens, even) - begin * sizes.tokens) * ROWS // sizes.tokens
        shared += 2 * rows * sizes.width * 2 + (end - begin) * TILES * 2 * ROWS * FLOAT
    heads = batch * sizes.kv_heads
    own = heads * 4 * even * sizes.width * 2
    return Traffic(0, own=own, shared=heads * shared)


def decode_forward(sizes: decode.Sizes, length: int) -> Traffic:
    """Return the bytes of `decode.decode_forward` if the first `length` places are visible.

    `own` is everything but the slots: cache, new tokens, visibility, queries and results.
    """
    pairs, item_size = sizes.rows * sizes.kv_heads, sizes.dtype.itemsize
    places = min(round_up(length, CHUNK), sizes.places)
    tokens = sizes.tokens if sizes.tokens <= OCTET else round_up(sizes.tokens, OCTET)
    sides = 2 * sizes.width * item_size  # of a key and its value
    words = FLOAT * (places + CHUNK * (1 + sizes.tokens * sizes.slot_chunks))
    queries = (1 + sizes.own_query) * sizes.heads * sizes.width * item_size
    results = FLOAT * (sizes.heads * sizes.width + 2 * sizes.columns)
    own = pairs * ((places + tokens) * sides + words) + sizes.blocks * (queries + results)
    return Traffic(pairs * sizes.tokens * sizes.slots * sides, own=own)
