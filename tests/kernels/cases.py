"""Random cases of depth attention, and their exact values in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from kernels_pallas.choice import Shapes

# Unoptimised programs, of the same operations, compile in less than half the time.
jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
# What every implementation can do.
USUAL = Shapes(
    q=(2, 1024, 16, 64),
    k=(2, 1024, 2, 64),
    num_slots=12,
    dtypes=('bfloat16',),
    ordered=True,
    consecutive=True,
    segments=False,
    window=0,
)

SIZES = {'B': 2, 'T': 13, 'S': None, 'R': None, 'N': 6, 'K': 2, 'H': 8, 'L': 9}
KINDS = {'num': None, 'traced': False, 'slot_window': 0, 'mask': False, 'own_query': False}
SEQUENCE = {'window': 0, 'segments': False, 'scale': None}
CASES = {
    'no_slots': {'L': 0, 'num': 0},
    'one_slot': {'L': 1, 'N': 2, 'T': 1},
    'group_of_3': {'L': 7, 'own_query': True},
    'group_of_5': {'N': 5, 'K': 1, 'num': 8, 'mask': True, 'window': 4, 'scale': 0.5},
    'group_of_8': {'N': 8, 'K': 1, 'L': 20, 'num': 11, 'traced': True, 'segments': True},
    'none_written': {'L': 20, 'num': 0, 'traced': True},
    'newest': {'L': 20, 'num': 17, 'slot_window': 5, 'traced': True, 'mask': True},
    'fewer_than_the_newest': {'num': 3, 'slot_window': 5},
    'rows': {'T': 7, 'R': 11, 'num': 6, 'traced': True, 'mask': True, 'own_query': True},
    'rows_unmasked': {'T': 7, 'R': 6, 'L': 7, 'window': 3, 'segments': True},
    'depth_alone': {'S': 0, 'num': 5, 'traced': True, 'mask': True},
}


def make_case(B, T, S, R, N, K, H, L, num, slot_window, mask, own_query, window, segments, scale):
    """(q, k, v, k_depth, v_depth, q_depth), cotangents, arguments, key grid, slot grid.

    Slots that no query may see hold NaN.
    """
    rng = np.random.default_rng(T + N + L + window)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    S = T if S is None else S
    inputs = [normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H)]
    inputs += [normal(L, B, R or T, K, H), normal(L, B, R or T, K, H), normal(B, T, N, H)]
    arguments = {'slot_window': slot_window, 'window': window, 'scale': scale}
    rows = np.tile(np.arange(T), (B, 1))
    if R:
        rows = np.stack([np.sort(rng.choice(R + 3, T, replace=False)) for _ in range(B)])
        assert (rows >= R).any()
        arguments['slot_rows_BT'] = rows.astype(np.int32)
    shown = np.ones((L, B, R or T), bool)
    if mask:
        arguments['slot_mask_LBR'] = shown = rng.random(shown.shape) < 0.6
    written = np.arange(L) < (L if num is None else num)
    if slot_window:
        written &= np.arange(L) >= num - slot_window
    shown = shown & written[:, None, None]
    for side in inputs[3:5]:
        side[~shown] = np.nan
    taken = np.minimum(rows, (R or T) - 1)
    slots = np.stack([shown[:, b, taken[b]].T & (rows[b] < (R or T))[:, None] for b in range(B)])
    gap = np.arange(T)[:, None] - np.arange(S)
    keys = np.tile((gap >= 0) & ((window == 0) | (gap < window)), (B, 1, 1))
    if segments:
        arguments['segment_ids_BT'] = ids = np.sort(rng.integers(0, 3, (B, T)), axis=1)
        keys &= ids[:, :, None] == ids[:, None]
    return inputs, (normal(B, T, N, H), normal(B, N, T)), arguments, taken, keys, slots


def exact(inputs, cotangents, taken, keys, slots, scale):
    """o, lse and six gradients in float64: the softmax over the concatenation, by its Jacobian."""
    q, k, v, kd, vd, qd, do, dlse = (
        np.nan_to_num(np.asarray(x, np.float64)) for x in (*inputs, *cotangents)
    )
    gradients = [np.zeros_like(x) for x in (q, k, v, kd, vd, qd)]
    dq, dk, dv, dkd, dvd, dqd = gradients
    o, lse = np.zeros_like(q), np.full(dlse.shape, -np.inf)
    for b, t, head in np.ndindex(*q.shape[:3]):
        kv, row = head // (q.shape[2] // k.shape[2]), taken[b, t]
        at, seen = (b, keys[b, t], kv), (slots[b, t], b, row, kv)
        scores = np.concatenate([k[at] @ q[b, t, head], kd[seen] @ qd[b, t, head]]) * scale
        if not scores.size:
            continue
        lse[b, head, t] = np.logaddexp.reduce(scores)
        p = np.exp(scores - lse[b, head, t])
        values, here = np.concatenate([v[at], vd[seen]]), do[b, t, head]
        o[b, t, head] = p @ values
        ds = p * (values @ here - here @ o[b, t, head] + dlse[b, head, t]) * scale
        split = keys[b, t].sum()
        dq[b, t, head] = ds[:split] @ k[at]
        dqd[b, t, head] = ds[split:] @ kd[seen]
        dk[at] += np.outer(ds[:split], q[b, t, head])
        dkd[seen] += np.outer(ds[split:], qd[b, t, head])
        dv[at] += np.outer(p[:split], here)
        dvd[seen] += np.outer(p[split:], here)
    return o, lse, gradients


def run(inputs, cotangents, num, traced, own_query, **arguments):
    """o, lse and the gradients of all inputs through both, under one jit."""
    *given, qd = (jnp.asarray(x) for x in inputs)

    def loss(q, k, v, kd, vd, qd, traced_num):
        slots = (kd, vd) if kd.shape[0] else (None, None)
        if kd.shape[0]:
            arguments['num_slots'] = traced_num if traced else num
            arguments['q_depth_BTNH'] = qd if own_query else None
        o, lse = depth_attention(q, k, v, *slots, return_lse=True, **arguments)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        dot = jnp.vdot(o, cotangents[0]).astype(lse.dtype) + jnp.vdot(finite, cotangents[1])
        return dot, (o, lse)

    step = jit(jax.value_and_grad(loss, argnums=range(6), has_aux=True))
    (_, (o, lse)), gradients = step(*given, qd, num)
    return jax.tree.map(np.asarray, (o, lse, gradients))
