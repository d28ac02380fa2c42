"""Calls of depth_attention that every implementation is tested with, and how one is run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from kernels_pallas.backends import Shapes
from moddepth_jax.benchmarks.kernel_cases import KINDS, SEQUENCE, exact, make_case

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
# `num` may be several numbers of written slots: then it is traced, in one program for all.
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


def draw(**changes):
    """make_case of SIZES: inputs, cotangents, arguments, and what `exact` takes after them."""
    return make_case(**SIZES | KINDS | SEQUENCE | changes)


@functools.cache
def drawn(name):
    """One entry for each `num` of a case: (num, inputs, cotangents, arguments, exact results).

    The exact results are o, lse and the gradients of q, k, v, k_depth, v_depth, q_depth.
    """
    case, found = SIZES | KINDS | SEQUENCE | CASES[name], []
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
