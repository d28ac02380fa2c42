"""The calls of depth_attention with which every implementation is tested, and how to run one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from kernels_pallas.backends import Shapes
from kernels_pallas.xla import depth, sequence
from moddepth_jax.benchmarks.kernel_cases import KINDS, exact, make_case

# Supported by every backend.
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
# `num` may be several numbers of written slots. Then it is traced, in one program for all.
CASES = {
    'no_slots': {'L': 0, 'num': 0},
    'one_slot': {'L': 1, 'N': 2, 'T': 1},
    'group_of_3': {'L': 7, 'own_query': True},
    'group_of_5': {'N': 5, 'K': 1, 'num': 8, 'mask': True, 'window': 4, 'scale': 0.5},
    'group_of_8': {'N': 8, 'K': 1, 'L': 20, 'num': (11,), 'segments': True},
    'newest': {'L': 20, 'num': (17, 3, 0), 'slot_window': 5, 'mask': True},
    'rows': {'T': 7, 'R': 11, 'num': (6, 0), 'mask': True, 'own_query': True},
    'rows_unmasked': {'T': 7, 'R': 6, 'L': 7, 'window': 3, 'segments': True},
    'depth_alone': {'S': 0, 'num': (5,), 'mask': True},
}
# Without slots: several blocks of 16 queries, or tiles of 16 by 16.
LONG = {
    'window': {'T': 97, 'window': 20, 'scale': 0.5},
    'segments': {'T': 60, 'N': 5, 'K': 1, 'segments': True},
    'any_segments': {'T': 70, 'N': 2, 'segments': 'any'},
    'window_over_gaps': {'T': 60, 'N': 2, 'window': 40, 'gaps': True},
    'other_keys': {'T': 45, 'others': 83, 'window': 90, 'gaps': True, 'segments': True},
}
CASES |= {name: {'L': 0, 'num': 0, **case} for name, case in LONG.items()}


def draw(gaps=False, others=0, **changes):
    """make_case of SIZES: inputs, cotangents, arguments, and what `exact` takes after them.

    With `gaps` between positions; with keys of that many other tokens; and segments 'any': ids that
    descend, recur, or are of one token.
    """
    case = SIZES | KINDS | changes
    (batch, length), window = (case['B'], case['T']), case['window']
    segments, _ = case.pop('segments'), case.pop('own_query')
    if not gaps and segments != 'any':
        return make_case(**case, segments=segments)
    made = make_case(**case | {'S': others or None}, segments=False)
    (inputs, cotangents, arguments, taken, _, slots), rng = made, np.random.default_rng(length)
    places = np.tile(np.arange(3 * length), (batch, 1))
    positions = key_positions = places[:, :length]
    ids = key_ids = np.zeros((batch, length), int)
    if gaps:
        positions = key_positions = np.sort(rng.permuted(places, axis=1)[:, :length], axis=1)
        arguments['positions_BT'] = positions
    if segments == 'any':
        ids = key_ids = np.stack([np.arange(length)[::-1] // 20, np.arange(length) * 7 % 5])
    elif segments:
        ids = key_ids = np.sort(rng.integers(0, 4, (batch, length)), axis=1)
    if others:
        key_positions = arguments['key_positions_BS'] = rng.permuted(places, axis=1)[:, :others]
        key_ids = rng.integers(0, 4, (batch, others)) if segments else 0 * key_positions
    if segments:
        arguments['segment_ids_BT'] = ids
        arguments['key_segment_ids_BS'] = key_ids if others else None
    gap = positions[:, :, None] - key_positions[:, None]
    keys = (gap >= 0) & ((window == 0) | (gap < window)) & (ids[:, :, None] == key_ids[:, None])
    return inputs, cotangents, arguments, taken, keys, slots


@functools.cache
def drawn(name):
    """One entry for each `num` of a case: (num, inputs, cotangents, arguments, exact results).

    The exact results are o, lse and the gradients of q, k, v, k_depth, v_depth, q_depth.
    """
    case, found = SIZES | KINDS | CASES[name], []
    for num in case['num'] if isinstance(case['num'], tuple) else (case['num'],):
        inputs, cotangents, arguments, *seen = draw(**case | {'num': num})
        if not case['own_query']:
            inputs[5] = inputs[0]
        scale = case['scale'] or case['H'] ** -0.5
        o, lse, gradients = exact(inputs, cotangents, *seen, scale)
        if not case['own_query']:
            gradients[0] += gradients[5]
            gradients[5] *= 0
        found.append((num, inputs, cotangents, arguments, (o, lse, gradients)))
    return found


def program(cotangents, num=None, own_query=False, **arguments):
    """step(*inputs, traced num): o, lse and the gradients of all inputs through both, jitted.

    Args:
      cotangents: of o and lse.
      num: slots written; a tuple: they are traced.
      own_query: the sixth input is the queries for the slots.
      **arguments: of depth_attention.
    """

    def loss(q, k, v, kd, vd, qd, traced_num):
        slots = (kd, vd) if kd.shape[0] else (None, None)
        if kd.shape[0]:
            arguments['num_slots'] = traced_num if isinstance(num, tuple) else num
            arguments['q_depth_BTNH'] = qd if own_query else None
        o, lse = depth_attention(q, k, v, *slots, return_lse=True, **arguments)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        dot = jnp.vdot(o, cotangents[0]).astype(lse.dtype) + jnp.vdot(finite, cotangents[1])
        return dot, (o, lse)

    step = jax.jit(jax.value_and_grad(loss, argnums=range(6), has_aux=True))

    def run(*inputs):
        (_, (o, lse)), gradients = step(*inputs)
        return jax.tree.map(np.asarray, (o, lse, gradients))

    return run


def in_blocks(monkeypatch, block):
    """XLA's sequence in blocks of queries, one head of one row at a time ('parts') or in 'tiles'.

    Parts have blocks of 16 queries, tiles 16 queries by 16 keys; 'tokens': its slots by 5 tokens.
    """
    if block == 'tiles':
        monkeypatch.setattr(sequence, 'is_long', lambda *shape: True)
        monkeypatch.setattr(sequence, 'TILE_SIZES', (16, 16))
    elif block == 'tokens':
        monkeypatch.setattr(depth, 'TILE_NUMBERS', 5 * 2 * 6 * 8)
    elif block == 'parts':
        monkeypatch.setattr(sequence, 'QUERY_BLOCK', 16)
        monkeypatch.setattr(sequence, 'CPU_BLOCK_SCORES', 1)
    else:
        monkeypatch.setattr(sequence, 'QUERY_BLOCK', block)
