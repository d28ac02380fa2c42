"""An attention as a candidate is tried on it: inputs of given shapes, and the program of its calls.

The attention is called just as it was where it was asked for: the same window, slots, masks and
dtypes.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.candidates import Shapes
from kernels_pallas.depth_attention import depth_attention
from kernels_pallas.joint_softmax import Parts

# The process that measures holds most of a GPU's memory, and may leave a tenth of it.
TIMED_BYTES = 4 << 30


def small(shapes: Shapes) -> Shapes:
    """The shapes of the check: few rows, heads and tokens, which end a block as those of shapes."""
    most = 256
    length, keys, rows = (
        size if size <= most + 128 else most + size % 128
        for size in (shapes.q[1], shapes.k[1], shapes.slot_rows)
    )
    batch, kv_heads = min(2, shapes.q[0]), min(2, shapes.k[2])
    heads, width = shapes.q[2] // shapes.k[2] * kv_heads, shapes.q[3]
    return shapes._replace(
        q=(batch, length, heads, width),
        k=(batch, keys, kv_heads, width),
        slot_rows=max(rows, length) if rows else 0,
        window=min(shapes.window, 50),
    )


def timed(shapes: Shapes) -> Shapes:
    """The shapes whose time is taken: shapes with as many of the rows as TIMED_BYTES hold, or one.

    All candidates are timed on as many: a time says which is faster, and no more.
    """
    held = 0
    for name, side in sides(shapes).items():
        width = jnp.dtype(shapes.dtypes[0]).itemsize
        if name.endswith('_depth') and shapes.sums:
            width += jnp.dtype(shapes.sums).itemsize
        # As an input, a gradient, and, of the queries, an output and its cotangent.
        held += math.prod(side) * width * (4 if name == 'q' else 2)
    rows = shapes.q[0]
    while rows > 1 and held * rows > TIMED_BYTES * shapes.q[0]:
        rows = -(-rows // 2)
    return shapes._replace(q=(rows, *shapes.q[1:]), k=(rows, *shapes.k[1:]))


def visible_slots(shapes: Shapes, num_slots: int, mask_LBR, rows_BT) -> np.ndarray:
    """bool [L, B, R]: which slots some query sees."""
    index_L = np.arange(shapes.num_slots)
    seen_L = index_L < num_slots
    if shapes.slot_window:
        seen_L &= index_L >= num_slots - shapes.slot_window
    batch, tokens = shapes.q[0], shapes.slot_rows or shapes.q[1]
    seen_LBR = np.broadcast_to(seen_L[:, None, None], (len(seen_L), batch, tokens)).copy()
    if mask_LBR is not None:
        seen_LBR &= mask_LBR
    if rows_BT is not None:
        for b, rows in enumerate(rows_BT):
            seen_LBR[:, b, np.setdiff1d(np.arange(tokens), rows)] = False
    return seen_LBR


def documents(shapes: Shapes, count: int) -> np.ndarray:
    """int32 [B, T]: ids of so many documents in a row; of several the second has one token."""
    batch, length = shapes.q[:2]
    ends = np.linspace(0, length, count + 1)[1:-1].astype(int)
    ids_T = 1 + np.searchsorted(np.unique([*ends, *(ends[:1] + 1)]), np.arange(length), 'right')
    return np.tile(ids_T, (batch, 1)).astype(np.int32)


def make_masks(shapes, count):
    """The arguments that are not differentiated, as arrays by name."""
    (batch, length), tokens = shapes.q[:2], shapes.slot_rows
    random, masks = np.random.default_rng(0), {}
    if shapes.segments:
        masks['segment_ids_BT'] = documents(shapes, count)
    if not shapes.consecutive or not shapes.ordered:
        step = 1 if shapes.consecutive else 2  # with gaps, as of a routed block
        masks['positions_BT'] = np.tile(step * np.arange(length), (batch, 1)).astype(np.int32)
    if not shapes.ordered:
        keys = np.arange(shapes.k[1]) * length // max(1, shapes.k[1])
        masks['key_positions_BS'] = np.tile(step * keys, (batch, 1)).astype(np.int32)
        if shapes.segments:
            masks['key_segment_ids_BS'] = masks['segment_ids_BT'][:, keys]
    if tokens:
        rows = np.arange(length) * tokens // length
        masks['slot_rows_BT'] = np.tile(rows, (batch, 1)).astype(np.int32)
    if shapes.slot_mask:
        size = (shapes.num_slots, batch, tokens or length)
        masks['slot_mask_LBR'] = random.random(size) < 0.8
    return masks


def sides(shapes):
    """Shapes of the arrays that are differentiated, by name; those of the slots come last."""
    batch, length = shapes.q[:2]
    sides = {'q': shapes.q, 'k': shapes.k, 'v': shapes.k}
    if shapes.num_slots:
        if shapes.slot_queries:
            sides['q_depth'] = shapes.q
        tokens = shapes.slot_rows or length
        slot = (shapes.num_slots, batch, tokens, *shapes.k[2:])
        sides |= {'k_depth': slot, 'v_depth': slot}
    return sides


def sums_of(shapes):
    """Names of the arrays whose gradients are those of the slots, and their dtype."""
    if not shapes.num_slots:
        return (), ''
    return ('k_sums', 'v_sums') if shapes.sums else ('k_depth', 'v_depth'), (
        shapes.sums or shapes.dtypes[0]
    )


def program(implementation: str | Parts, shapes: Shapes):
    """f(arrays, cotangents, sums, masks, num_slots) -> (outputs, gradients), to be compiled.

    `sums` are what the gradients of the slots are added to; outputs and gradients are by name.
    """
    in_sums, _ = sums_of(shapes)

    def attend(masks, num_slots, arrays):
        given = {
            'q_depth_BTNH': arrays.get('q_depth'),
            'slot_sums': (arrays['k_sums'], arrays['v_sums']) if shapes.sums else None,
        }
        if shapes.num_slots:
            given |= {'num_slots': num_slots, 'slot_window': shapes.slot_window}
        found = depth_attention(
            *(arrays[name] for name in 'qkv'),
            arrays.get('k_depth'),
            arrays.get('v_depth'),
            window=shapes.window,
            scale=shapes.scale,
            implementation=implementation,
            return_lse=shapes.lse,
            thread_slots=shapes.num_slots > 0,
            **given,
            **masks,
        )
        found = found if isinstance(found, tuple) else (found,)
        names = ('o', *(('lse',) * shapes.lse), *(('k_depth', 'v_depth') * (shapes.num_slots > 0)))
        outputs = dict(zip(names + ('k_sums', 'v_sums') * bool(shapes.sums), found, strict=True))
        if shapes.lse:
            outputs['lse'] = jnp.where(jnp.isfinite(outputs['lse']), outputs['lse'], 0)
        return outputs

    def run(arrays, cotangents, sums, masks, num_slots):
        # Their values do not matter.
        wide = {name: array for name, array in sums.items() if name not in arrays}
        outputs, pull = jax.vjp(functools.partial(attend, masks, num_slots), arrays | wide)
        given = {name: cotangents.get(name, sums.get(name)) for name in outputs}
        given = {n: jnp.zeros_like(outputs[n]) if x is None else x for n, x in given.items()}
        (gradients,) = pull(given)
        kept = {name: outputs[name] for name in outputs.keys() & {'o', 'lse'}}
        return kept, gradients, {name: gradients.pop(name) for name in in_sums}

    return run
