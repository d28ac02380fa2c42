"""Decoding: attention of new tokens over a cache, each other and their depth slots."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.backends import DECODING, Shapes, choose, load_module

# (new tokens, keys) whose scores exist at a time. On CPUs the fastest that was measured on two
# cores (on one core 128, 128 is faster); elsewhere not measured.
_CPU_BLOCK, _BLOCK = (512, 256), (256, 1024)
_IN_PLACE = 16  # up to so many tokens read all places at once, since blocks would be copies


def check_arrays(arrays: dict, equal: dict) -> dict[str, int]:
    """Return the size of each axis letter in the names of arrays, such as q_BTNH; None is absent.

    `equal` maps a letter to another of the same size. Raises a ValueError of one line if sizes do
    not fit, if key/value heads K do not divide query heads N, or if the dtype is not as the name
    says: bool for a mask, int for positions, segment ids and rows, otherwise floating.
    """
    sizes = {}
    for name, array in arrays.items():
        if array is None:
            continue
        letters = name.rpartition('_')[2]
        for letter, other in equal.items():
            letters = letters.replace(letter, other)
        found, axes = dict(sizes), zip(letters, array.shape, strict=False)
        fits = all(found.setdefault(letter, size) == size for letter, size in axes)
        if array.ndim != len(letters) or not fits:
            right = ', '.join(str(sizes.get(letter, letter)) for letter in letters)
            raise ValueError(f'{name} of shape {array.shape} must be [{right}]')
        sizes = found
        kind = next((kind for word, kind in _KINDS.items() if word in name), jnp.floating)
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f'{name} of dtype {array.dtype} must be {_KIND_NAMES[kind]}')
    if not sizes['K'] or sizes['N'] % sizes['K']:
        raise ValueError(f'{sizes["K"]} key/value heads must divide {sizes["N"]} query heads')
    for letter in 'NH':
        if not sizes[letter]:
            raise ValueError(f'q has {letter}=0; must have at least one head and one channel')
    return sizes


_KINDS = {
    **dict.fromkeys(('mask', 'visible'), jnp.bool_),
    **dict.fromkeys(('positions', 'segment_ids', 'rows'), jnp.integer),
}
_KIND_NAMES = {jnp.bool_: 'bool', jnp.integer: 'an integer dtype', jnp.floating: 'floating'}


def check_window(name: str, window: int):
    """Raise a ValueError of one line if a window is no int of 0 or more that int32 can hold."""
    if not isinstance(window, int | np.integer) or not 0 <= window < 2**31:
        raise ValueError(f'{name}={window} must be an int below 2**31: 0 (no limit) or more')


def check_slot_sides(slot_window: int, **sides):
    """Raise a ValueError if only one side of the slots is given, or the window is negative."""
    absent = [name for name, side in sides.items() if side is None]
    if len(absent) == 1:
        raise ValueError(f'depth slots need keys and values, and {absent[0]} is None')
    check_window('slot_window', slot_window)


def decode_attention(
    q_CTNH,
    k_CTKH,
    v_CTKH,
    k_BKHS,
    v_BKHS,
    visible_CTS,
    visible_CTT=None,
    rows_C=None,
    k_depth_LCTKH=None,
    v_depth_LCTKH=None,
    slot_mask_LCT=None,
    slot_window: int = 0,
    q_depth_CTNH=None,
    implementation: str | None = None,
):
    """Compute softmax([q . k_cached, q . k_new, q_depth . k_depth] H^-1/2) times all values.

    The result [C, T, N, H] has q's dtype; the softmax is in float32. The cached keys are never
    concatenated with the others, since XLA would copy the cache.

    Args:
      q_CTNH, k_CTKH, v_CTKH: queries, keys and values of T new tokens in each of C rows.
      k_BKHS, v_BKHS: the cache of B rows and S places, read only.
      visible_CTS: bool, whether a place of the cache is visible to a token.
      visible_CTT: bool, whether a new token (last axis) is visible to a token. A token is always
        visible to itself, whatever its entry says. None: only itself, with T = 1.
      rows_C: int32, the row of the cache that a row of tokens reads. B and above, which come last:
        no row. None: C = B, each its own.
      k_depth_LCTKH, v_depth_LCTKH: slots that earlier layers wrote at the new tokens, or None.
      slot_mask_LCT, slot_window, q_depth_CTNH: as in depth_attention.
      implementation: xla | mosaic_gpu (on a CPU it is interpreted, which needs JAX 0.11.2). None:
        chosen by `backends.choose`.

    Raises:
      ValueError: shapes or dtypes do not fit, C, T or S is 0, one side of the slots is missing,
        T > 1 without visible_CTT, or the named implementation does not support the shapes, the
        dtypes or the device.
    """
    check_slot_sides(slot_window, k_depth_LCTKH=k_depth_LCTKH, v_depth_LCTKH=v_depth_LCTKH)
    if implementation not in (None, *DECODING):
        raise ValueError(f'implementation={implementation!r} must be one of {", ".join(DECODING)}')
    named = {
        'q_CTNH': q_CTNH,
        'k_CTKH': k_CTKH,
        'v_CTKH': v_CTKH,
        'k_BKHS': k_BKHS,
        'v_BKHS': v_BKHS,
        'visible_CTS': visible_CTS,
        'visible_CTT': visible_CTT,
        'rows_C': rows_C,
        'k_depth_LCTKH': k_depth_LCTKH,
        'v_depth_LCTKH': v_depth_LCTKH,
        'slot_mask_LCT': slot_mask_LCT,
        'q_depth_CTNH': q_depth_CTNH,
    }
    sizes = check_arrays(named, {'B': 'C'} if rows_C is None else {})
    if not all(sizes[letter] for letter in 'CTS'):
        found = ', '.join(f'{letter}={sizes[letter]}' for letter in 'CTS')
        raise ValueError(f'{found}: rows, new tokens and places of the cache must be at least 1')
    length = sizes['T']
    if visible_CTT is None:
        if length > 1:
            raise ValueError(f'{length} new tokens of a row need visible_CTT, and it is None')
        visible_CTT = jnp.zeros((sizes['C'], 1, 1), bool)
    visible_CTT = visible_CTT | jnp.eye(length, dtype=bool)[None]
    slots = None
    if k_depth_LCTKH is not None and k_depth_LCTKH.shape[0]:
        sides = k_depth_LCTKH, v_depth_LCTKH, slot_mask_LCT
        slots = [side if side is None else side[-slot_window:] for side in sides]
    arrays = q_CTNH, k_CTKH, v_CTKH, k_BKHS, v_BKHS, visible_CTS, visible_CTT
    own = None if slots is None else q_depth_CTNH
    parts = choose(implementation, _shapes(arrays, slots, own))
    module = load_module(DECODING[parts.sequence].forward)
    return module.decode_forward(
        *arrays, rows_C=rows_C, slots=slots, q_depth_CTNH=own, interpret=parts.interpret
    )


def _shapes(arrays, slots, q_depth_CTNH):
    """Return the `Shapes` of the arguments of decode_forward."""
    (q_CTNH, k_CTKH, *_), k_BKHS = arrays, arrays[3]
    given = [*arrays[:5], *(slots or [])[:2], q_depth_CTNH]
    dtypes = (jnp.dtype(side.dtype).name for side in given if side is not None)
    return Shapes(
        q=q_CTNH.shape,
        k=k_CTKH.shape,
        num_slots=0 if slots is None else slots[0].shape[0],
        dtypes=tuple(dict.fromkeys(dtypes)),
        ordered=False,
        consecutive=False,
        segments=False,
        window=0,
        slot_mask=slots is not None and slots[2] is not None,
        slot_queries=q_depth_CTNH is not None,
        places=k_BKHS.shape[-1],
    )


class _NewTokens(NamedTuple):
    """The T new tokens of each row by XLA, what they see, and their slots. None: no slots."""

    q_BTNH: jax.Array
    visible_BTS: jax.Array  # places of the cache
    visible_BTT: jax.Array  # new tokens, along the last axis
    q_depth_BTNH: jax.Array | None = None
    k_depth_BLTKH: jax.Array | None = None
    v_depth_BLTKH: jax.Array | None = None
    slot_mask_BLT: jax.Array | None = None  # None: all are visible


_TOKEN_AXES = _NewTokens(1, 1, 1, 1, 2, 2, 2)


def decode_forward(
    q_CTNH,
    k_CTKH,
    v_CTKH,
    k_BKHS,
    v_BKHS,
    visible_CTS,
    visible_CTT,
    *,
    rows_C=None,
    slots=None,
    q_depth_CTNH=None,
    interpret=False,
):
    """Compute `decode_attention` by XLA, on every platform.

    Arguments are as there, but `slots` are (k_LCTKH, v_LCTKH, mask_LCT or None), those in the
    window, or None without slots. `interpret` is for kernels and has no effect here.
    """
    del interpret
    k_CKHT, v_CKHT = (jnp.moveaxis(side, 1, 3) for side in (k_CTKH, v_CTKH))
    new = _NewTokens(q_CTNH, visible_CTS, visible_CTT)
    if slots is not None:
        # Rows first, as in the other arrays.
        k_depth, v_depth, mask = (
            None if side is None else jnp.moveaxis(side, 0, 1) for side in slots
        )
        new = new._replace(
            q_depth_BTNH=q_CTNH if q_depth_CTNH is None else q_depth_CTNH,
            k_depth_BLTKH=k_depth,
            v_depth_BLTKH=v_depth,
            slot_mask_BLT=mask,
        )
    by_row = k_CKHT, v_CKHT, new
    if rows_C is None:
        return _attend(k_BKHS, v_BKHS, *by_row)
    if jax.default_backend() != 'cpu':
        k_CKHS, v_CKHS = (side.at[rows_C].get(mode='clip') for side in (k_BKHS, v_BKHS))
        return _attend(k_CKHS, v_CKHS, *by_row)

    row_of = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=1)

    def one(i, o_CTNH):
        cached = (row_of(side, rows_C[i]) for side in (k_BKHS, v_BKHS))
        o_1TNH = _attend(*cached, *jax.tree.map(lambda side: row_of(side, i), by_row))
        return jax.lax.dynamic_update_slice_in_dim(o_CTNH, o_1TNH, i, axis=0)

    # On a CPU a gather would copy the rows; one at a time they are read in place.
    num_rows = jnp.sum(rows_C < k_BKHS.shape[0])
    return jax.lax.fori_loop(0, num_rows, one, jnp.zeros_like(q_CTNH))


def _block():
    return _CPU_BLOCK if jax.default_backend() == 'cpu' else _BLOCK


def _attend(k_BKHS, v_BKHS, k_BKHT, v_BKHT, new: _NewTokens):
    """Compute `_attend_block` for a block of the T tokens at a time."""
    keys, length, (size, _) = (k_BKHS, v_BKHS, k_BKHT, v_BKHT), k_BKHT.shape[-1], _block()
    if length <= size or length % size:
        return _attend_block(*keys, new)

    def block(i):
        def cut(side, axis):
            if side is not None:
                return jax.lax.dynamic_slice_in_dim(side, i * size, size, axis)

        return _attend_block(*keys, _NewTokens(*map(cut, new, _TOKEN_AXES)))

    o_XBQNH = jax.lax.map(block, jnp.arange(length // size))
    return jnp.moveaxis(o_XBQNH, 0, 1).reshape(new.q_BTNH.shape)


class _Softmax(NamedTuple):
    """An online softmax over some of the keys, and its weighted sum of values."""

    highest_BKTG: jax.Array  # score
    total_BKTG: jax.Array  # of exp(score - highest)
    o_BKHTG: jax.Array  # sum of exp(score - highest) value

    def join(self, scores_BKTGX, weigh):
        """Return the softmax with more keys; weigh(weights): weighted sum of their values."""
        highest_BKTG = jnp.maximum(self.highest_BKTG, jnp.max(scores_BKTGX, axis=-1))
        weights_BKTGX = jnp.exp(scores_BKTGX - highest_BKTG[..., None])
        keep_BKTG = jnp.exp(self.highest_BKTG - highest_BKTG)
        total_BKTG = self.total_BKTG * keep_BKTG + jnp.sum(weights_BKTGX, axis=-1)
        o_BKHTG = self.o_BKHTG * keep_BKTG[:, :, None] + weigh(weights_BKTGX)
        return _Softmax(highest_BKTG, total_BKTG, o_BKHTG)


def _attend_block(k_BKHS, v_BKHS, k_BKHX, v_BKHX, new: _NewTokens):
    """Compute one softmax over a row's cache, its new tokens X and the slots of T of them."""
    batch, length, heads, width = new.q_BTNH.shape
    kv_heads = k_BKHX.shape[1]
    wide = jnp.promote_types(new.q_BTNH.dtype, jnp.float32)

    def grouped(q_BTNH):
        return jnp.swapaxes(q_BTNH.reshape(batch, length, kv_heads, -1, width), 1, 2)

    q_BKTGH = grouped(new.q_BTNH)
    shape = batch, kv_heads, length, heads // kv_heads
    # Finite, so that a token may see nothing in the first blocks: hidden scores are -inf.
    lowest_BKTG = jnp.full(shape, jnp.finfo(wide).min, wide)
    o_BKHTG = jnp.zeros((*shape[:2], width, *shape[2:]), wide)
    softmax = _Softmax(lowest_BKTG, jnp.zeros(shape, wide), o_BKHTG)
    own = k_BKHX.astype(wide), v_BKHX.astype(wide)
    softmax = _join_places(softmax, q_BKTGH, *own, new.visible_BTT)
    if new.k_depth_BLTKH is not None:
        k_depth_BLTKH, v_depth_BLTKH = (
            side.astype(wide) for side in (new.k_depth_BLTKH, new.v_depth_BLTKH)
        )
        q_depth_BKTGH = grouped(new.q_depth_BTNH.astype(wide) * width**-0.5)
        scores_BKTGL = jnp.einsum('bktgh,bltkh->bktgl', q_depth_BKTGH, k_depth_BLTKH)
        if new.slot_mask_BLT is not None:
            scores_BKTGL = _hide(scores_BKTGL, jnp.swapaxes(new.slot_mask_BLT, 1, 2))
            # A hidden slot may hold NaN, and 0 times NaN is NaN.
            v_depth_BLTKH = jnp.where(new.slot_mask_BLT[..., None, None], v_depth_BLTKH, 0)
        softmax = softmax.join(
            scores_BKTGL, functools.partial(jnp.einsum, 'bltkh,bktgl->bkhtg', v_depth_BLTKH)
        )
    softmax = _join_places(softmax, q_BKTGH, k_BKHS, v_BKHS, new.visible_BTS)
    o_BKHTG = softmax.o_BKHTG / softmax.total_BKTG[:, :, None]
    o_BTKGH = jnp.transpose(o_BKHTG, (0, 3, 1, 4, 2))
    return o_BTKGH.reshape(new.q_BTNH.shape).astype(new.q_BTNH.dtype)


def _hide(scores_BKTGX, visible_BTX):
    return jnp.where(visible_BTX[:, None, :, None], scores_BKTGX, -jnp.inf)


def _join_places(softmax, q_BKTGH, k_BKHS, v_BKHS, visible_BTS):
    """Return the _Softmax with the keys of the places S, read in blocks unless T is small.

    Blocks before the first visible place, and after the last one, are not read.

    Places are the innermost axis, values are the left operand of their product, and its result is
    transposed last: otherwise XLA on CPUs is several times slower.
    """
    places, (length, _, width) = k_BKHS.shape[-1], q_BKTGH.shape[2:]
    _, size = _block()
    wide = softmax.o_BKHTG.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def join(softmax, k_BKHX, v_BKHX, visible_BTX):
        if jax.default_backend() == 'cpu':
            # XLA on CPU cannot run some bfloat16 products with a float32 result.
            k_BKHX, v_BKHX = k_BKHX.astype(wide), v_BKHX.astype(wide)
        # Scores are scaled, not queries: half-precision queries would be rounded once more.
        scores_BKTGX = product('bktgh,bkhx->bktgx', q_BKTGH.astype(k_BKHX.dtype), k_BKHX)
        return softmax.join(
            _hide(scores_BKTGX * width**-0.5, visible_BTX),
            lambda weights: product('bkhx,bktgx->bkhtg', v_BKHX, weights.astype(v_BKHX.dtype)),
        )

    if length <= _IN_PLACE or places <= size:
        return join(softmax, k_BKHS, v_BKHS, visible_BTS)
    index_S, seen_S = jnp.arange(places), jnp.any(visible_BTS, axis=(0, 1))
    begin, end = jnp.argmax(seen_S), jnp.max(jnp.where(seen_S, index_S + 1, 0))

    def some(i, softmax):
        # The last block reaches back over places that are already in the softmax.
        first = jnp.minimum(i * size, places - size)
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=-1)
        new_X = cut(index_S, first) >= i * size
        visible_BTX = cut(visible_BTS, first) & new_X[None, None]
        return join(softmax, cut(k_BKHS, first), cut(v_BKHS, first), visible_BTX)

    return jax.lax.fori_loop(begin // size, -(-end // size), some, softmax)
