"""Checks an attention program against the reference at the size at which it is timed.

T x T scores do not fit at T = 65536. So the cotangent of the output is zero except at some queries.
The reference is computed in float32 for these queries only. It gives the gradients of all keys and
of the slots of these queries; all other gradients must be zero.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from kernels_pallas.autotune_trial import UNTUNED
from kernels_pallas.reference import allowed_error
from moddepth_jax.benchmarks.attention_cases import Inputs
from moddepth_jax.benchmarks.attention_forms import make_program

CHECKED = 48  # queries
NAMES = ('o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth', 'dq_depth')


def largest(array) -> float:
    """Return the largest absolute value; 0 for an empty array."""
    return float(abs(array).max(initial=0))


def allowed_errors(exact: dict, plain: dict, dtype: str) -> dict[str, float]:
    """Return the allowed error of each result, from the error of XLA's form in the same dtype."""
    return {
        name: allowed_error(dtype, name != 'o', largest(plain[name] - value), largest(value))
        for name, value in exact.items()
    }


def errors_of(found: dict, exact: dict, allowed: dict) -> tuple[dict[str, float], list[str]]:
    """Return the largest error of each result, and a line for each result above its limit."""
    errors = {name: largest(value - exact[name]) for name, value in found.items()}
    return errors, [
        f'{name} is off by {error:.3g}, allowed {allowed[name]:.3g}'
        for name, error in errors.items()
        if not error <= allowed[name]  # NaN is wrong too
    ]


def checked_queries(length: int) -> np.ndarray:
    """Return the checked positions, int32 ascending: all of a short sequence, else a sample.

    The sample includes the first two positions and the last.
    """
    if length <= 2 * CHECKED:
        return np.arange(length, dtype=np.int32)
    spread = np.linspace(0, length - 1, CHECKED - 1).round()
    return np.unique([*spread, 1]).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), compiler_options=UNTUNED)
def _compute(inputs, chosen_C, over, implementation, dtype):
    """Both passes for the chosen queries only, in a dtype."""
    q, k, v, k_depth, v_depth, do = (x.astype(dtype) for x in inputs[:6])
    batch, length = k.shape[:2]
    options = dict(inputs.options)
    options['positions_BT'] = jnp.broadcast_to(chosen_C, (batch, len(chosen_C)))
    options['key_positions_BS'] = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if 'segment_ids_BT' in options:
        options['key_segment_ids_BS'] = options['segment_ids_BT']
        options['segment_ids_BT'] = options['segment_ids_BT'][:, chosen_C]
    slots = k_depth[:, :, chosen_C], v_depth[:, :, chosen_C]
    chosen = Inputs(q[:, chosen_C], k, v, *slots, do[:, chosen_C], options=options)
    function = functools.partial(depth_attention, implementation=implementation)
    results = make_program(function, over, 'fresh')(chosen)
    return dict(zip(NAMES, (x.astype('float32') for x in results), strict=False))


def compute_expected(inputs: Inputs, chosen_C, over: str) -> tuple[dict, dict[str, float]]:
    """Return the reference in float32 for some queries, and the allowed error of each result.

    The allowed errors follow from XLA's form in the dtype of the inputs. `over` is that of a Form.
    """
    dtype = inputs.q_BTNH.dtype.name
    values = _compute(inputs, chosen_C, over, 'reference', 'float32')
    plain = _compute(inputs, chosen_C, over, 'xla', dtype)
    return values, allowed_errors(values, plain, dtype)


def find_wrong(results, expected, chosen_C) -> str | None:
    """Return one line on what is wrong with (o, *gradients), or None.

    `expected` is a result of `compute_expected`. Gradients of other queries and slots must be zero.
    """
    for name, array in zip(NAMES, results, strict=False):
        if not array.size:
            continue
        index = (slice(None),) * (2 if name.endswith('_depth') else 1)
        found = array if name in ('dk', 'dv') else array[*index, chosen_C]
        if wrong := errors_of({name: found}, *expected)[1]:
            return f'wrong: {wrong[0]}'
        if name != 'o' and int(jnp.count_nonzero(found)) != int(jnp.count_nonzero(array)):
            return f'wrong: {name} is not zero where nothing depends on it'
    return None
