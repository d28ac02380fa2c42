"""How far an attention is from the equation, at its own size: a wrong one is not timed.

At T = 65536 nobody can hold T x T scores. So the output's cotangent is zero but for some queries:
of these alone the equation is computed, in float32, and the gradients of all keys, of their slots
and of no others follow from them. What is checked is the very program that is timed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from moddepth_jax.benchmarks.attention_cases import Case, Inputs
from moddepth_jax.benchmarks.attention_forms import ALONE, PLAIN, Form, make_sums

CHECKED = 48  # queries
# Of the error of plain attention in the same dtype, and the least, relative to the largest value.
FACTORS = {'forward': (2, 2e-6), 'backward': (3, 1e-5)}
NAMES = ('o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth')


class Right(NamedTuple):
    """By name: what is right, float32, and the largest error that passes."""

    values: dict[str, jax.Array]
    allowed: dict[str, float]


def checked_queries(length: int) -> np.ndarray:
    """int32, ascending: all of a short sequence; else the first two, the last and others."""
    if length <= 2 * CHECKED:
        return np.arange(length, dtype=np.int32)
    spread = np.linspace(0, length - 1, CHECKED - 1).round()
    return np.unique([*spread, 1]).astype(np.int32)


def only_checked(inputs: Inputs, chosen_C: np.ndarray) -> Inputs:
    """The inputs with the output's cotangent zero for every other query."""
    kept_T = jnp.zeros(inputs.q_BTNH.shape[1], bool).at[chosen_C].set(True)
    return inputs._replace(do_BTNH=jnp.where(kept_T[:, None, None], inputs.do_BTNH, 0))


def _gradients(inputs: Inputs, chosen_C, over: str, implementation: str, dtype):
    """Output and gradients of the chosen queries alone, in that dtype."""
    q, k, v, k_depth, v_depth, do = (x.astype(dtype) for x in _of_queries(inputs, chosen_C, over))
    options = inputs.options(over != PLAIN)
    if 'segment_ids_BT' in options:
        ids_BS = options['segment_ids_BT'][:, : k.shape[1]]
        options['segment_ids_BT'] = options['segment_ids_BT'][:, chosen_C]
        options['key_segment_ids_BS'] = ids_BS
    positions_BC = jnp.broadcast_to(chosen_C, (q.shape[0], len(chosen_C)))
    positions_BS = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])

    def attend(q, k, v, *slots):
        return depth_attention(
            q,
            k,
            v,
            *slots,
            positions_BT=positions_BC,
            key_positions_BS=positions_BS,
            implementation=implementation,
            **options,
        )

    o, pull = jax.vjp(attend, q, k, v, *(() if over == PLAIN else (k_depth, v_depth)))
    return dict(zip(NAMES, (o, *pull(do)), strict=False))


def _of_queries(inputs, chosen_C, over):
    q, k, v, k_depth, v_depth, do = inputs[:6]
    slots = k_depth[:, :, chosen_C], v_depth[:, :, chosen_C]
    if over == ALONE:
        k, v = k[:, :0], v[:, :0]
    return q[:, chosen_C], k, v, *slots, do[:, chosen_C]


def make_right(inputs: Inputs, chosen_C, over: str) -> Right:
    """The equation in float32, and what plain attention in the inputs' dtype allows others."""
    run = jax.jit(_gradients, static_argnums=(2, 3, 4))
    values = run(inputs, chosen_C, over, 'reference', jnp.float32)
    plain = run(inputs, chosen_C, over, 'xla', inputs.q_BTNH.dtype)
    allowed = {}
    for name, value in values.items():
        factor, floor = FACTORS['forward' if name == 'o' else 'backward']
        error = float(jnp.max(jnp.abs(plain[name].astype(jnp.float32) - value), initial=0))
        allowed[name] = factor * error + floor * float(jnp.max(jnp.abs(value), initial=1))
    return Right(values, allowed)


def _pick(name: str, array, chosen_C):
    """The part of a result that the equation was computed for."""
    if name in ('dk', 'dv'):
        return array
    return array[:, :, chosen_C] if name.endswith('_depth') else array[:, chosen_C]


def find_wrong(results: dict, right: Right, chosen_C) -> str | None:
    """What of a program's results is wrong, in one line; None: nothing.

    Args:
      results: of `results_of`.
      right: of the same inputs.
      chosen_C: the queries with a cotangent; gradients of other queries and slots must be zero.
    """
    for name, (array, runs) in results.items():
        mine = _pick(name, array, chosen_C) / runs
        error = float(jnp.max(jnp.abs(mine.astype(jnp.float32) - right.values[name]), initial=0))
        if not error <= right.allowed[name]:
            return f'wrong: {name} is off by {error:.3g}, allowed {right.allowed[name]:.3g}'
        if name != 'o' and int(jnp.count_nonzero(mine)) != int(jnp.count_nonzero(array)):
            return f'wrong: {name} is not zero where nothing depends on it'
    return None


def results_of(form: Form, case: Case, run, inputs: Inputs) -> dict:
    """(array, runs that it is the sum of), by name, of a compiled form.

    A form that accumulates runs twice: what it adds to is not zero then.

    Args:
      form, case: of the program.
      run: the program, see attention_forms.program.
      inputs: what it attends to.
    """
    sums = make_sums(form, case)
    arrays, sums = run(inputs, sums)
    named = dict(zip(NAMES, ((array, 1) for array in arrays), strict=False))
    if sums is not None:
        del arrays
        _, sums = run(inputs, sums)
        named |= dict(zip(NAMES[-2:], ((array, 2) for array in sums), strict=True))
    return {name: (array, runs) for name, (array, runs) in named.items() if array.size}
