"""The check and the timing of a candidate for decoding, for autotune_trial.py.

A layer with slots is measured with SLOTS of them, whatever number it has.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.autotune_trial import (
    TIMED_BYTES,
    find_wrong,
    median_milliseconds,
    on_cold_copies,
)
from kernels_pallas.backends import Parts, Shapes
from kernels_pallas.decode import decode_attention

SLOTS = 72  # more than the Hopper kernel reads at once


def with_slots(shapes: Shapes) -> Shapes:
    """Return the shapes with SLOTS slots, if there are any."""
    return shapes._replace(num_slots=SLOTS * bool(shapes.num_slots))


def check_shapes(shapes: Shapes) -> Shapes:
    """Return the shapes of the check: three rows, two key/value heads, a short cache."""
    rows, kv_heads = 3, min(2, shapes.k[2])
    _, tokens, heads, width = shapes.q
    return with_slots(shapes)._replace(
        q=(rows, tokens, heads // shapes.k[2] * kv_heads, width),
        k=(rows, tokens, kv_heads, width),
        places=shapes.places if shapes.places <= 1088 else 1024 + shapes.places % 64,
    )


def array_shapes(shapes: Shapes, cached_rows: int) -> dict:
    """Return the shapes of the float arrays, by their names in decode_attention."""
    rows, tokens, kv_heads, width = shapes.k
    cache, slots = (cached_rows, kv_heads, width, shapes.places), (shapes.num_slots, *shapes.k)
    found = {'q_CTNH': shapes.q, 'k_CTKH': shapes.k, 'v_CTKH': shapes.k}
    found |= {'k_BKHS': cache, 'v_BKHS': cache}
    if shapes.num_slots:
        found |= {'k_depth_LCTKH': slots, 'v_depth_LCTKH': slots}
    return found | ({'q_depth_CTNH': shapes.q} if shapes.slot_queries else {})


def hidden_number(implementation: str) -> float:
    """Return the number for hidden places: NaN, or 0 for XLA, which multiplies them by 0."""
    return 0.0 if implementation == 'xla' else np.nan


def program(implementation: str):
    """Return a jitted f(arrays and masks by name) -> {'o': o_CTNH}."""
    run = functools.partial(decode_attention, implementation=implementation)
    return jax.jit(lambda given: {'o': run(**given)})


def make_masks(shapes: Shapes, lengths_C) -> dict:
    """Return the masks by name; lengths_C: number of visible places in each row of the cache."""
    (rows, tokens), index_S = shapes.q[:2], np.arange(shapes.places)
    visible_CTS = np.tile((index_S < np.asarray(lengths_C)[:, None])[:, None], (1, tokens, 1))
    masks = {'visible_CTS': visible_CTS}
    masks['visible_CTT'] = np.tile(np.tri(tokens, dtype=bool), (rows, 1, 1))
    if shapes.slot_mask:
        size = shapes.num_slots, rows, tokens
        masks['slot_mask_LCT'] = np.random.default_rng(0).random(size) < 0.8
    return masks


def check(parts: Parts, shapes: Shapes) -> str | None:
    """Return what is wrong with a candidate on a small case, in one line; None: nothing.

    An empty row, a full one, and one of which some places are hidden: these hold NaN.
    """
    shapes, random = check_shapes(shapes), np.random.default_rng(1)
    rows, dtype = shapes.q[0], shapes.dtypes[0]
    masks = make_masks(shapes, [0, shapes.places, shapes.places // 2])
    masks['visible_CTS'][2] &= random.random(masks['visible_CTS'].shape[1:]) < 0.9
    rows_C = masks['rows_C'] = np.arange(rows, dtype=np.int32)[::-1] + 1  # of a cache of one more
    arrays = {n: random.normal(size=size) for n, size in array_shapes(shapes, rows + 1).items()}
    hidden_BS = np.ones((rows + 1, shapes.places), bool)
    hidden_BS[rows_C] = ~masks['visible_CTS'].any(axis=1)
    hidden = {name: np.moveaxis(arrays[name], 3, 1) for name in ('k_BKHS', 'v_BKHS')}
    if shapes.slot_mask:
        slots = {name: arrays[name] for name in ('k_depth_LCTKH', 'v_depth_LCTKH')}

    def results(name, dtype, fill, times=1):
        # Rounded to the candidate's dtype first, so that all forms have the same inputs.
        for side in hidden.values():
            side[hidden_BS] = fill
        if shapes.slot_mask:
            for side in slots.values():
                side[~masks['slot_mask_LCT']] = fill
        given = {n: jnp.asarray(x, shapes.dtypes[0]).astype(dtype) for n, x in arrays.items()}
        run = program(name)
        for _ in range(times):
            yield {n: np.asarray(x) for n, x in run(given | masks).items()}

    with jax.default_matmul_precision('highest'):
        (right,) = results('xla', 'float32', 0.0)
    (plain,) = results('xla', dtype, 0.0)
    first, second = results(parts.sequence, dtype, hidden_number(parts.sequence), 2)
    return find_wrong(right, plain, first, second, hidden={}, dtype=dtype, unordered=())


def milliseconds(parts: Parts, shapes: Shapes) -> float:
    """Return the median time of a call over full caches, with the rows that fit TIMED_BYTES."""
    dtype = jnp.dtype(shapes.dtypes[0])
    per_row = 2 * math.prod(shapes.k[2:]) * shapes.places * dtype.itemsize
    rows = min(shapes.q[0], max(1, TIMED_BYTES // per_row))
    shapes = with_slots(shapes)._replace(q=(rows, *shapes.q[1:]), k=(rows, *shapes.k[1:]))
    sizes = array_shapes(shapes, rows)
    given = {
        name: jax.random.normal(jax.random.key(i), size, dtype)
        for i, (name, size) in enumerate(sizes.items())
    }
    given |= jax.device_put(make_masks(shapes, [shapes.places] * rows))
    return median_milliseconds(*on_cold_copies(program(parts.sequence), given))
