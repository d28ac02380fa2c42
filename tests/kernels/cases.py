"""Cases of depth attention that every implementation is tested with, and how one is run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from kernels_pallas.backends import Shapes
from moddepth_jax.benchmarks.kernel_cases import KINDS as _KINDS
from moddepth_jax.benchmarks.kernel_cases import SEQUENCE, exact, make_case

__all__ = ['CASES', 'KINDS', 'SEQUENCE', 'SIZES', 'USUAL', 'exact', 'jit', 'make_case', 'run']

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
KINDS = {'traced': False, **_KINDS}
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
