"""The KV cache: keys and values of earlier tokens for each block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moddepth_jax.model.attention import KeysValues, KVView
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.sharding import constrain


class LayerCache(NamedTuple):
    """Keys and values of one block. Tokens are the last axis, which attention reads fastest."""

    k_BKHS: jax.Array
    v_BKHS: jax.Array | None  # None: the block uses the values of the first block
    positions_BS: jax.Array | None  # int32, original positions; None (dense block): the index
    lengths_B: jax.Array | None  # int32, tokens in the cache; None (dense block): all of the row
    taken_BE: jax.Array | None = None  # int32, tokens per expert, under `row_capacity`
    # int32, tokens that the mlp has selected, if only the mlp is routed; the cache has all tokens
    selected_B: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """S, the most tokens of a row that fit."""
        return self.k_BKHS.shape[-1]


class Cache(NamedTuple):
    """The caches of all blocks, in order, and the state that they share."""

    layers: tuple[LayerCache, ...]
    lengths_B: jax.Array  # int32, tokens of each row so far, which is the next position
    documents_B: jax.Array  # int32, where the current document begins; earlier tokens are hidden
    dropped_B: jax.Array  # int32, how often a selected token did not fit a routed block's cache


class CacheUpdate(NamedTuple):
    """What new tokens of each row add to a block's cache."""

    keys: KeysValues  # [B, T, K, H]
    selected_BT: jax.Array | None  # bool, tokens that a routed block selected; None: dense block
    taken_BE: jax.Array | None = None  # as LayerCache


def view_of(cache: LayerCache, tokens: TokenInfo, documents_CT, window: int, rows_C=None) -> KVView:
    """Return what new tokens see of a block's cache and of each other.

    Args:
      cache: the LayerCache of all rows.
      tokens: the new tokens of all rows, or of `rows_C`. The segment id is the branch of a token. A
        branch is in time order. A token does not see other branches, nor tokens of id 0.
      documents_CT: where the document of each token begins.
      window: of the attention; 0: no limit.
      rows_C: rows of the cache; None: all.
    """
    positions_CT = tokens.positions_BT
    seen = cache._replace(k_BKHS=None, v_BKHS=None)  # attention reads those in place
    if rows_C is not None:
        seen = jax.tree.map(lambda side: side.at[rows_C].get(mode='clip'), seen)
    index_S = jnp.arange(cache.capacity)
    routed = seen.lengths_B is not None
    positions_CS = seen.positions_BS if routed else index_S[None]
    filled_CS = index_S[None] < (seen.lengths_B if routed else positions_CT[:, 0])[:, None]

    def visible(positions_CX):
        distance_CTX = positions_CT[:, :, None] - positions_CX[:, None]
        visible_CTX = positions_CX[:, None] >= documents_CT[:, :, None]
        return visible_CTX & (distance_CTX < window) if window else visible_CTX

    branches_CT = tokens.segment_ids_BT
    earlier_TT = jnp.tri(positions_CT.shape[1], k=-1, dtype=bool)
    own_CTT = branches_CT[:, :, None] == branches_CT[:, None]
    own_CTT &= visible(positions_CT) & earlier_TT[None]
    own_CTT |= jnp.eye(positions_CT.shape[1], dtype=bool)[None]
    visible_CTS = filled_CS[:, None] & visible(positions_CS)
    return KVView(cache.k_BKHS, cache.v_BKHS, visible_CTS, own_CTT, rows_C)


def select_into_cache(cache: LayerCache, wanted_BT, branches_BT, most: int | None = None):
    """Return the wanted tokens for which a routed block has room, the first ones of each branch.

    The room is the capacity of its cache, or `most` tokens of a row if only the mlp is routed.
    """
    rank_BT = jnp.cumsum(wanted_BT, axis=1)
    earlier_BT = jnp.where(_begins(branches_BT), rank_BT - wanted_BT, 0)
    rank_BT -= jax.lax.cummax(earlier_BT, axis=1)
    used_B, capacity = cache.lengths_B, cache.capacity
    if cache.selected_B is not None:
        used_B, capacity = cache.selected_B, most
    return wanted_BT & (used_B[:, None] + rank_BT <= capacity)


def _begins(branches_BT):
    """Return a bool mask of the first token of each branch."""
    before_BT = jnp.pad(branches_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return branches_BT != before_BT


def next_positions(cache: Cache, branches_BT):
    """Return the positions of new tokens, int32 [B, T]. Each branch continues from the cache."""
    index_BT = jnp.broadcast_to(jnp.arange(branches_BT.shape[1]), branches_BT.shape)
    begin_BT = jax.lax.cummax(jnp.where(_begins(branches_BT), index_BT, 0), axis=1)
    return cache.lengths_B[:, None] + index_BT - begin_BT


def documents_of(cache: Cache, begins_BT):
    """Return where the documents of new tokens begin, int32 [B, T].

    `begins_BT` marks the tokens that begin a document.
    """
    positions_BT = cache.lengths_B[:, None] + jnp.arange(begins_BT.shape[1])[None]
    begin_BT = jnp.where(begins_BT, positions_BT, cache.documents_B[:, None])
    return jax.lax.cummax(begin_BT, axis=1)


def _shard(side):
    if side.ndim == 2:
        return constrain(side, 'batch', None)
    return constrain(side, 'batch', 'kv_heads', None, None)


def _fit(side_BXS, capacity):
    side_BXS = side_BXS[..., :capacity]
    widths = [(0, 0)] * (side_BXS.ndim - 1) + [(0, capacity - side_BXS.shape[-1])]
    return jnp.pad(side_BXS, widths)


def cache_from_prefill(keys, capacity: int, positions_BS=None, lengths_B=None) -> LayerCache:
    """Return a block's cache of `capacity` tokens from KeysValues [B, C, K, H]."""
    k_BKHS, v_BKHS = jax.tree.map(
        lambda side_BCKH: _shard(_fit(jnp.moveaxis(side_BCKH, 1, 3), capacity)), keys
    )
    positions_BS = None if positions_BS is None else _fit(positions_BS, capacity)
    return LayerCache(k_BKHS, v_BKHS, positions_BS, lengths_B)


def without_newest(layer: LayerCache, selected_B) -> LayerCache:
    """Return the cache as it was before it took the newest token of the rows that selected it."""
    counts = {name: getattr(layer, name) for name in ('lengths_B', 'selected_B')}
    fewer = {name: old_B - selected_B for name, old_B in counts.items() if old_B is not None}
    return layer._replace(**fewer)


def _put_tokens(side_XS, new_TX, index_T, free):
    """Put new tokens into one row of a cache at distinct places.

    Places of S or more are dropped. All others lie in [free, free + T).
    """
    length, (*_, capacity) = len(new_TX), side_XS.shape
    if length == 1:
        new_X1 = jnp.moveaxis(new_TX, 0, -1)
        return side_XS.at[..., index_T].set(new_X1, mode='drop', unique_indices=True)
    # XLA on CPUs writes a slice at once, but a scatter number by number.
    size = min(length, capacity)
    first = jnp.minimum(free, capacity - size)
    token_C = jnp.full(size, length).at[index_T - first].set(jnp.arange(length), mode='drop')
    new_XC = jnp.moveaxis(new_TX.at[token_C].get(mode='fill', fill_value=0), 0, -1)
    old_XC = jax.lax.dynamic_slice_in_dim(side_XS, first, size, axis=-1)
    some_XC = jnp.where(token_C < length, new_XC, old_XC)
    return jax.lax.dynamic_update_slice_in_dim(side_XS, some_XC, first, axis=-1)


def update_cache(cache: Cache, updates, begins_BT, dropped_BT, active_BT) -> Cache:
    """Return the cache after the active tokens, given what `decoding.extend` returned.

    The active tokens are the first ones of each row. They may be fewer than in `extend`, unless a
    layer counts `taken_BE`.

    Jit this function by itself and donate `cache`. In one program with the reads, XLA would copy
    every cache.
    """
    layers, each_T = [], jnp.arange(active_BT.shape[1])
    positions_BT = cache.lengths_B[:, None] + each_T[None]
    for layer, update in zip(cache.layers, updates, strict=True):
        writes_BT, free_B = active_BT, cache.lengths_B
        if layer.lengths_B is not None:  # the cache has only selected tokens
            writes_BT = active_BT & update.selected_BT
            free_B = layer.lengths_B
        rank_BT = jnp.cumsum(writes_BT, axis=1) - 1
        # A token that is not written gets a place past the capacity, which is dropped.
        nowhere_T = layer.capacity + each_T
        index_BT = jnp.where(writes_BT, free_B[:, None] + rank_BT, nowhere_T[None])

        def put(side_BX, new_BTX, index_BT=index_BT, free_B=free_B):
            # A vmap, since with row indices each device would get the updates of all rows.
            return _shard(jax.vmap(_put_tokens)(side_BX, new_BTX, index_BT, free_B))

        layer = layer._replace(k_BKHS=put(layer.k_BKHS, update.keys.k_BTKH))
        if layer.v_BKHS is not None:
            layer = layer._replace(v_BKHS=put(layer.v_BKHS, update.keys.v_BTKH))
        if layer.lengths_B is not None:
            positions_BS = put(layer.positions_BS, positions_BT)
            lengths_B = layer.lengths_B + jnp.sum(writes_BT, axis=1, dtype=jnp.int32)
            layer = layer._replace(positions_BS=positions_BS, lengths_B=lengths_B)
        elif layer.taken_BE is not None:
            layer = layer._replace(taken_BE=update.taken_BE)
        elif layer.selected_B is not None:
            more_B = jnp.sum(active_BT & update.selected_BT, axis=1, dtype=jnp.int32)
            layer = layer._replace(selected_B=layer.selected_B + more_B)
        layers.append(layer)
    documents_BT = documents_of(cache, begins_BT & active_BT)
    lengths_B = cache.lengths_B + jnp.sum(active_BT, axis=1, dtype=jnp.int32)
    dropped_B = cache.dropped_B + jnp.sum(active_BT * dropped_BT, axis=1)
    return Cache(tuple(layers), lengths_B, documents_BT[:, -1], dropped_B)


def longest_routed_row(cache: Cache) -> int:
    """Return the most tokens of a row in a routed block, 0 if dense. Waits for the device."""
    lengths = [layer.lengths_B for layer in cache.layers if layer.lengths_B is not None]
    return max((int(jnp.max(lengths_B)) for lengths_B in lengths), default=0)


def cut_cache(cache: Cache, lengths_B, documents_B) -> Cache | None:
    """Return the Cache as it was after the first `lengths_B` tokens of each row, or None.

    `documents_B` is where the document of the last of these begins. None means that the cache has
    counts which cannot be undone: of dropped tokens, of a routed mlp, or of `row_capacity`.
    """
    counts = (side for layer in cache.layers for side in (layer.taken_BE, layer.selected_B))
    if any(side is not None for side in counts) or bool(jnp.any(cache.dropped_B)):
        return None

    def cut(layer):
        if layer.lengths_B is None:
            return layer
        places_S = jnp.arange(layer.capacity)
        held_BS = places_S[None] < layer.lengths_B[:, None]
        held_BS &= layer.positions_BS < jnp.asarray(lengths_B)[:, None]
        return layer._replace(lengths_B=jnp.sum(held_BS, axis=1, dtype=jnp.int32))

    rest = (jnp.asarray(side, jnp.int32) for side in (lengths_B, documents_B))
    return Cache(tuple(map(cut, cache.layers)), *rest, cache.dropped_B)


def resize_cache(cache: Cache, capacity: int) -> Cache:
    """Return the cache with another capacity of routed blocks, at least `longest_routed_row`."""

    def resize(layer):
        if layer.lengths_B is None:
            return layer
        return LayerCache(*(_fit(side, capacity) for side in layer[:3]), layer.lengths_B)

    return cache._replace(layers=tuple(map(resize, cache.layers)))


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of all arrays of a cache, or of its shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
