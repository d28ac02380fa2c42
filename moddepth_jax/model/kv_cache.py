"""What decoding keeps of earlier tokens: the keys and values of each block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.model.attention import KeysValues
from moddepth_jax.model.sharding import constrain


class LayerCache(NamedTuple):
    """Keys and values of one block. Tokens are the last axis: attention reads them fastest so."""

    k_BKHS: jax.Array
    v_BKHS: jax.Array | None  # None: those of the first block
    positions_BS: jax.Array | None  # int32, original positions; None in a dense block: the index
    lengths_B: jax.Array | None  # int32, tokens in the cache; None in a dense block: all of the row
    taken_BE: jax.Array | None = None  # int32, of each expert of a dense block, by `row_capacity`

    @property
    def capacity(self) -> int:
        """S, the most tokens of a row."""
        return self.k_BKHS.shape[-1]


class Cache(NamedTuple):
    """The caches of all blocks, in order of depth, and what they share."""

    layers: tuple[LayerCache, ...]
    lengths_B: jax.Array  # int32, tokens of each row so far: the position of its next one
    documents_B: jax.Array  # int32, where the current document begins; earlier tokens are hidden
    dropped_B: jax.Array  # int32, times that a selected token found a routed block's cache full


class CacheUpdate(NamedTuple):
    """What one new token of each row adds to a block's cache."""

    keys: KeysValues  # [B, 1, K, H]
    selected_B: jax.Array | None  # bool, rows that a routed block selected; None in a dense block
    taken_BE: jax.Array | None = None  # as LayerCache


def rows_of_cache(layer: LayerCache, rows_C) -> LayerCache:
    """The cache for some rows, without keys and values: attention reads each row's in place."""

    def pick(side):
        return side.at[rows_C].get(mode='clip')

    return jax.tree.map(pick, layer._replace(k_BKHS=None, v_BKHS=None))


def visible_mask(layer: LayerCache, lengths_B, documents_B, window: int, capacity: int):
    """bool [B, capacity]: the entries that a row's next token, at position `lengths_B`, sees."""
    index_S = jnp.arange(capacity)
    routed = layer.lengths_B is not None
    positions_BS = layer.positions_BS if routed else index_S[None]
    visible_BS = index_S[None] < (layer.lengths_B if routed else lengths_B)[:, None]
    visible_BS &= positions_BS >= documents_B[:, None]
    if window:
        visible_BS &= lengths_B[:, None] - positions_BS < window
    return visible_BS


def _shard(side):
    if side.ndim == 2:
        return constrain(side, 'batch', None)
    return constrain(side, 'batch', 'kv_heads', None, None)


def _fit(side_BXS, capacity):
    side_BXS = side_BXS[..., :capacity]
    widths = [(0, 0)] * (side_BXS.ndim - 1) + [(0, capacity - side_BXS.shape[-1])]
    return jnp.pad(side_BXS, widths)


def cache_from_prefill(keys, capacity: int, positions_BS=None, lengths_B=None) -> LayerCache:
    """A block's cache of `capacity` tokens from KeysValues [B, C, K, H]."""
    k_BKHS, v_BKHS = jax.tree.map(
        lambda side_BCKH: _shard(_fit(jnp.moveaxis(side_BCKH, 1, 3), capacity)), keys
    )
    positions_BS = None if positions_BS is None else _fit(positions_BS, capacity)
    return LayerCache(k_BKHS, v_BKHS, positions_BS, lengths_B)


def update_cache(cache: Cache, updates, new_documents_B, dropped_B, active_B) -> Cache:
    """The cache after one token of each active row, by what `decoding.decode_step` returns.

    Jit it by itself and donate `cache`: in one program with the reads, XLA copies every cache.
    """
    layers = []
    for layer, update in zip(cache.layers, updates, strict=True):
        writes_B = active_B if update.selected_B is None else update.selected_B
        free_B = cache.lengths_B if layer.lengths_B is None else layer.lengths_B
        # A row without an update writes past the capacity, which is dropped.
        index_B = jnp.where(writes_B, free_B, layer.capacity)

        def put(side_BX, new_BX, index_B=index_B):
            def one(side_X, new_X, index):
                return side_X.at[..., index].set(new_X, mode='drop', unique_indices=True)

            # By vmap: with row indices too, each device would get the updates of all rows.
            return _shard(jax.vmap(one)(side_BX, new_BX, index_B))

        layer = layer._replace(k_BKHS=put(layer.k_BKHS, update.keys.k_BTKH[:, 0]))
        if layer.v_BKHS is not None:
            layer = layer._replace(v_BKHS=put(layer.v_BKHS, update.keys.v_BTKH[:, 0]))
        if layer.lengths_B is not None:
            positions_BS = put(layer.positions_BS, cache.lengths_B)
            layer = layer._replace(positions_BS=positions_BS, lengths_B=layer.lengths_B + writes_B)
        elif layer.taken_BE is not None:
            taken_BE = jnp.where(active_B[:, None], update.taken_BE, layer.taken_BE)
            layer = layer._replace(taken_BE=taken_BE)
        layers.append(layer)
    begins_B = new_documents_B & active_B
    return Cache(
        tuple(layers),
        cache.lengths_B + active_B,
        jnp.where(begins_B, cache.lengths_B, cache.documents_B),
        cache.dropped_B + jnp.where(active_B, dropped_B, 0),
    )


def longest_routed_row(cache: Cache) -> int:
    """Most tokens of a row in a routed block, 0 for a dense model. Waits for the device."""
    lengths = [layer.lengths_B for layer in cache.layers if layer.lengths_B is not None]
    return max((int(jnp.max(lengths_B)) for lengths_B in lengths), default=0)


def resize_cache(cache: Cache, capacity: int) -> Cache:
    """The cache with another capacity of each routed block, at least `longest_routed_row`."""

    def resize(layer):
        if layer.lengths_B is None:
            return layer
        return LayerCache(*(_fit(side, capacity) for side in layer[:3]), layer.lengths_B)

    return cache._replace(layers=tuple(map(resize, cache.layers)))


def cache_bytes(cache: Cache) -> int:
    """Bytes of all arrays of a cache, or of its shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
