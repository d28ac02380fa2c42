"""Checks kernels on this device: values, gradients, and equal bits in a rerun.

The reference is the softmax in float64 (kernel_cases.exact). The allowed error follows from that of
XLA's attention in the same dtype. `toy` reduces the sizes for CPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import depth_attention
from kernels_pallas.autotune_trial import UNTUNED
from kernels_pallas.backends import choose, recorded
from moddepth_jax.benchmarks.attention_cases import Inputs
from moddepth_jax.benchmarks.attention_check import NAMES, allowed_errors, errors_of
from moddepth_jax.benchmarks.attention_forms import BOTH, chosen, make_program
from moddepth_jax.benchmarks.kernel_cases import (
    CASES,
    DEFAULTS,
    LARGEST_TOYS,
    PACKED_CASES,
    exact,
    make_case,
)
from moddepth_jax.benchmarks.worker import WrongError


def prepare(case: dict, toy: bool) -> tuple[Inputs, dict, dict]:
    """Return the Inputs of a case, static options, and the exact o and gradients by name."""
    case = DEFAULTS | {'dtype': 'bfloat16', 'traced': False, 'sums': False} | case
    if toy:
        cut = {name: most for name, most in LARGEST_TOYS.items() if case[name]}
        case |= {name: min(case[name], most) for name, most in cut.items()}
        case['segments'] = bool(case['segments'])
    dtype, traced, num = case.pop('dtype'), case.pop('traced'), case['num']
    sums, own = case.pop('sums'), case.pop('own_query')
    (*arrays, q_depth), (do, dlse), arguments, *visible = make_case(**case)
    *arrays, q_depth, do = (jnp.asarray(x, dtype) for x in (*arrays, q_depth, do))
    scale = case['scale'] or case['H'] ** -0.5
    q_of_slots = q_depth if own else arrays[0]
    o, _, gradients = exact([*arrays, q_of_slots], (do, 0 * dlse), *visible, scale)
    if not own:
        gradients[0] += gradients.pop()
    options = {n: jnp.asarray(x) for n, x in arguments.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in arguments.items() if name not in options} | {'sums': sums}
    if traced:
        options['num_slots'] = jnp.asarray(num, jnp.int32)
    else:
        static['num_slots'] = num
    inputs = Inputs(*arrays, do, q_depth if own else None, options)
    return inputs, static, dict(zip(NAMES, [o, *gradients], strict=False))


def _in_two_layers(attend):
    """Function that averages two calls of `attend` which share sums of slot gradients.

    The second layer adds to the sums of the first.
    """

    def layers(q_BTNH, k_BTKH, v_BTKH, k_depth_LBTKH, v_depth_LBTKH, **options):
        slots = k_depth_LBTKH, v_depth_LBTKH
        sums = [side.astype('float32') for side in slots]  # gradients of slots flow to these
        arrays = q_BTNH, k_BTKH, v_BTKH, *map(jax.lax.stop_gradient, slots)
        first_BTNH, *sums = attend(*arrays, slot_sums=sums, **options)
        second_BTNH, *sums = attend(*arrays, slot_sums=sums, **options)
        return first_BTNH / 2 + second_BTNH / 2

    return layers


def program(implementation: str, static: dict, toy: bool):
    """Return a jitted function from Inputs to (o, *gradients); `static` is from `prepare`."""
    given = {name: value for name, value in static.items() if name != 'sums'}
    function = functools.partial(depth_attention, implementation=chosen(implementation), **given)
    function = _in_two_layers(function) if static['sums'] else function
    # For a toy, compilation with optimisation would take longer than the run.
    options = {'xla_backend_optimization_level': 0} if toy else UNTUNED
    return jax.jit(make_program(function, BOTH, 'fresh'), compiler_options=options)


def _run(run, inputs):
    """The results of a program in float64, by name."""
    return dict(zip(NAMES, (np.asarray(x, np.float64) for x in run(inputs)), strict=False))


def check(implementation: str, case: str, toy: bool = False) -> dict:
    """Compare the values and all gradients of an implementation with the exact softmax.

    The error must be at most twice that of XLA in the same dtype (for gradients, three times). A
    rerun must give equal bits, except for gradients of the sequence if cuDNN computes them. NaN in
    hidden slots must change nothing.

    Args:
      implementation: of kernels_pallas, or a key of attention_forms.PARTS.
      case: key of CASES, or packed/NAME with a key of PACKED_CASES.
      toy: reduces the sizes for a CPU.

    Raises:
      WrongError: a property does not hold.
      ValueError: this device does not support the case.
    """
    packed = case.startswith('packed/')
    sizes = PACKED_CASES[case.removeprefix('packed/')] if packed else CASES[case]
    inputs, static, right = prepare(sizes, toy)
    run = program(implementation, static, toy)
    with recorded() as calls:
        first, second = _run(run, inputs), _run(run, inputs)
    plain = _run(program('xla', static, toy), inputs)
    allowed = allowed_errors(right, plain, inputs.q_BTNH.dtype.name)
    errors, wrong = errors_of({name: first[name] for name in right}, right, allowed)
    differing = {name for name in right if (first[name] != second[name]).any()}
    parts = [choose(chosen(implementation), shapes) for shapes in calls]
    by_cudnn = case != 'depth_alone' and any(one.sequence == 'cudnn' for one in parts)
    cudnns = {'dq', 'dk', 'dv'} if by_cudnn else set()
    wrong += [f'{name} differs in a rerun' for name in sorted(differing - cudnns)]
    hidden = np.isnan(np.asarray(inputs.k_depth_LBTKH, np.float32))
    if first['dk_depth'][hidden].any() or first['dv_depth'][hidden].any():
        wrong.append('hidden slots have gradients')
    if wrong:
        raise WrongError('; '.join(wrong))
    equal = not differing & cudnns
    return {'errors': errors, 'allowed': allowed, 'sequence_gradients_rerun_equal': equal}
