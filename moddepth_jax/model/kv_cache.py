"""What decoding keeps of earlier tokens: keys and values of each block, of those that entered it.

A dense block holds every token in the slot of its position. A routed block holds the tokens that
entered it, in order, with their original positions, in a static number of slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.model.attention import KeysValues
from moddepth_jax.model.sharding import constrain


class LayerCache(NamedTuple):
    """Keys and values of one block. Slots are the last axis: attention reads them fastest so.

    Attributes:
      k_BKHS, v_BKHS: [B, K, H, slots].
      positions_BS: int32 [B, slots], the original positions of a routed block's entries; None in a
        dense block, whose slot is the position.
      lengths_B: int32 [B], slots in use; None in a dense block, where it is the row's length.
      taken_BE: int32 [B, E], tokens that each expert of a dense block took, where there is a
        `row_capacity`; else None.
    """

    k_BKHS: jax.Array
    v_BKHS: jax.Array
    positions_BS: jax.Array | None
    lengths_B: jax.Array | None
    taken_BE: jax.Array | None = None

    @property
    def slots(self) -> int:
        """S, of a row."""
        return self.k_BKHS.shape[-1]


class Cache(NamedTuple):
    """All of it.

    Attributes:
      layers: a LayerCache for each block, in order of depth.
      lengths_B: int32 [B], tokens of each row so far: the position of its next one.
      documents_B: int32 [B], where each row's current document begins; nothing before is seen.
      dropped_B: int32 [B], times that a token was let in by the rule and found no slot.
    """

    layers: tuple[LayerCache, ...]
    lengths_B: jax.Array
    documents_B: jax.Array
    dropped_B: jax.Array


class CacheUpdate(NamedTuple):
    """What one new token of each row leaves in a block: KeysValues [B, 1, K, H], and who entered.

    `selected_B` is None in a dense block; `taken_BE` as LayerCache has it.
    """

    keys: KeysValues
    selected_B: jax.Array | None
    taken_BE: jax.Array | None = None


def visible_mask(layer: LayerCache, lengths_B, documents_B, window: int, slots: int):
    """bool [B, slots]: the slots that a row's next token, at position `lengths_B`, sees."""
    slots_S = jnp.arange(slots)
    routed = layer.lengths_B is not None
    positions_BS = layer.positions_BS if routed else slots_S[None]
    visible_BS = slots_S[None] < (layer.lengths_B if routed else lengths_B)[:, None]
    visible_BS &= positions_BS >= documents_B[:, None]
    if window:
        visible_BS &= lengths_B[:, None] - positions_BS < window
    return visible_BS


def _split(side):
    """Keys, values or positions of a block as they lie over a mesh: by rows, and by heads."""
    if side.ndim == 2:
        return constrain(side, 'rows', None)
    return constrain(side, 'rows', 'kv_heads', None, None)


def cache_from_prefill(
    keys: KeysValues, slots: int | None, positions_BS=None, lengths_B=None
) -> LayerCache:
    """A block's cache of `slots` slots (None: as many as entries) from KeysValues [B, C, K, H]."""

    def fit(side, axis):
        if slots is None:
            return side
        room = [(0, 0)] * side.ndim
        room[axis] = (0, slots - side.shape[axis])
        return jnp.pad(side, room)

    k_BKHS, v_BKHS = (_split(fit(jnp.moveaxis(side_BCKH, 1, 3), 3)) for side_BCKH in keys)
    positions_BS = None if positions_BS is None else fit(positions_BS, 1)
    return LayerCache(k_BKHS, v_BKHS, positions_BS, lengths_B)


def update_cache(cache: Cache, entries, new_documents_B, dropped_B, active_B) -> Cache:
    """The cache after one token of each active row. Jitted by its caller, which donates `cache`.

    It is a program of its own: in one with the reads, XLA copies every cache.

    Args:
      cache: before it.
      entries: an Entry for each block.
      new_documents_B: bool [B], the token begins a document.
      dropped_B: int32 [B], blocks that had no slot for the token.
      active_B: bool [B], rows that took a token; the others stay as they are.
    """
    layers = []
    for layer, entry in zip(cache.layers, entries, strict=True):
        taken_B = active_B if entry.selected_B is None else entry.selected_B
        free_B = cache.lengths_B if layer.lengths_B is None else layer.lengths_B
        # A row that takes none writes beyond the last slot, which is dropped.
        slots_B = jnp.where(taken_B, free_B, layer.slots)

        def put(side_BX, new_BX, slots_B=slots_B):
            def one(side_X, new_X, slot):
                return side_X.at[..., slot].set(new_X, mode='drop', unique_indices=True)

            # Row by row: indexed by rows too, each device would get the entries of all.
            return _split(jax.vmap(one)(side_BX, new_BX, slots_B))

        k_BKHS = put(layer.k_BKHS, entry.keys.k_BTKH[:, 0])
        v_BKHS = put(layer.v_BKHS, entry.keys.v_BTKH[:, 0])
        if layer.lengths_B is None:
            taken_BE = layer.taken_BE
            if taken_BE is not None:
                taken_BE = jnp.where(active_B[:, None], entry.taken_BE, taken_BE)
            layers.append(LayerCache(k_BKHS, v_BKHS, None, None, taken_BE))
        else:
            positions_BS = put(layer.positions_BS, cache.lengths_B)
            layers.append(LayerCache(k_BKHS, v_BKHS, positions_BS, layer.lengths_B + taken_B))
    begins_B = new_documents_B & active_B
    return Cache(
        tuple(layers),
        cache.lengths_B + active_B,
        jnp.where(begins_B, cache.lengths_B, cache.documents_B),
        cache.dropped_B + jnp.where(active_B, dropped_B, 0),
    )


def longest_routed_row(cache: Cache) -> int:
    """Most entries of a row in a routed block, 0 for a dense model. Waits for the device."""
    lengths = [layer.lengths_B for layer in cache.layers if layer.lengths_B is not None]
    return max((int(jnp.max(lengths_B)) for lengths_B in lengths), default=0)


def resize_cache(cache: Cache, slots: int) -> Cache:
    """The cache with `slots` slots in each routed block, no fewer than its fullest row has."""

    def fit(layer):
        if layer.lengths_B is None:
            return layer

        def cut_or_pad(side):
            side = side[..., :slots]
            return jnp.pad(side, [(0, 0)] * (side.ndim - 1) + [(0, slots - side.shape[-1])])

        return LayerCache(*map(cut_or_pad, layer[:3]), layer.lengths_B)

    return cache._replace(layers=tuple(map(fit, cache.layers)))


def cache_bytes(cache: Cache) -> int:
    """Bytes of all arrays of a cache, or of its shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
