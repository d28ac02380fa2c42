"""Whether a kernel is right on this device: values, gradients, and equal bits in a second run.

The ruler is the softmax in float64 (kernel_cases.exact); what error is allowed follows from plain
attention by XLA in the same dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import decode_attention, depth_attention
from kernels_pallas.joint_softmax import Parts
from kernels_pallas.reference import allowed_error
from moddepth_jax.benchmarks.kernel_cases import (
    CASES,
    DEFAULTS,
    LARGEST_TOYS,
    MASKED,
    PACKED_CASES,
    exact,
    make_case,
)
from moddepth_jax.benchmarks.worker import WrongError

CUDNN = 'cudnn'  # cuDNN's sequence part with the depth part by XLA: no kernel of ours
NAMES = ('o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth', 'dq_depth')
_ARRAYS = ('_BT', '_LBR')  # ends of the names of arguments that are arrays


def _jit(function, toy):
    """Toys are compiled without optimisation, which takes longer than they do."""
    options = {'xla_backend_optimization_level': 0} if toy else None
    return jax.jit(function, compiler_options=options)


def prepared(case: dict, toy: bool):
    """Inputs of a case, cotangent, arguments of the attention, and the exact o and gradients.

    Args:
      case: of kernel_cases, its defaults left out.
      toy: sizes are cut down.
    """
    case = DEFAULTS | {'dtype': 'bfloat16', 'traced': False} | case
    if toy:
        cut = {name: most for name, most in LARGEST_TOYS.items() if case[name]}
        case |= {name: min(case[name], most) for name, most in cut.items()}
        case['segments'] = bool(case['segments'])
    dtype, traced, num = case.pop('dtype'), case.pop('traced'), case['num']
    inputs, (do, _), arguments, *seen = make_case(**case)
    inputs = [jnp.asarray(x, dtype) for x in (*inputs[:5], inputs[5 if case['own_query'] else 0])]
    do = jnp.asarray(do, dtype)
    scale = case['scale'] or case['H'] ** -0.5
    nothing = np.zeros(do.shape[:1] + (do.shape[2], do.shape[1]), np.float32)
    o, _, gradients = exact(inputs, (do, nothing), *seen, scale)
    if not case['own_query']:
        gradients[0] += gradients.pop()
        inputs = inputs[:5]
    return inputs, do, arguments | {'traced': traced, 'num': num}, [o, *gradients]


def arrays_of(arguments: dict) -> dict:
    """The masks, rows and segment ids among the arguments of `prepared`."""
    return {name: jnp.asarray(x) for name, x in arguments.items() if name.endswith(_ARRAYS)}


def _attention(implementation):
    """depth_attention by an implementation; of CUDNN with the depth part by XLA."""
    chosen = Parts('cudnn', 'xla') if implementation == CUDNN else implementation
    return functools.partial(depth_attention, implementation=chosen)


def program(implementation: str, arguments: dict, toy: bool):
    """f(inputs, do, num, masks) -> o and the gradients of the inputs, compiled at its first call.

    Args:
      implementation: of kernels_pallas, or CUDNN.
      arguments: of `prepared`; `masks` are the arrays among them.
      toy: as there.
    """
    options = {name: value for name, value in arguments.items() if not name.endswith(_ARRAYS)}
    traced, num = options.pop('traced'), options.pop('num')
    attention = _attention(implementation)

    def run(inputs, do, traced_num, masks):
        def attend(*inputs):
            own = {'q_depth_BTNH': inputs[5]} if len(inputs) == 6 else {}
            written = traced_num if traced else num
            return attention(*inputs[:5], num_slots=written, **own, **masks, **options)

        o, pull = jax.vjp(attend, *inputs)
        return o, *pull(do)

    return _jit(run, toy)


def _float64(arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def _largest(array):
    return float(np.max(np.abs(array), initial=0))


def check(implementation: str, case: str, toy: bool = False, bent: bool = False) -> dict:
    """Compares an implementation with the exact softmax, in values and in all gradients.

    At most twice the error of XLA in the same dtype, gradients three times; equal bits in a rerun,
    but for the sequence's gradients, which may be cuDNN's; NaN in hidden slots changes nothing.

    Args:
      implementation: of kernels_pallas, or CUDNN.
      case: name in kernel_cases; those of packed documents as packed/NAME.
      toy: sizes are cut down, for CPUs.
      bent: the results are made wrong, to test what follows.

    Returns:
      `errors` and `allowed`: the largest absolute error of each result, and its bound; and
      `sequence_gradients_rerun_equal`.

    Raises:
      WrongError: names the first result that is wrong.
      ValueError: this device cannot do it.
    """
    packed = case.startswith('packed/')
    chosen = PACKED_CASES[case.removeprefix('packed/')] if packed else CASES[case]
    inputs, do, arguments, right = prepared(chosen, toy)
    run, masks = program(implementation, arguments, toy), arrays_of(arguments)
    run_xla, num = program('xla', arguments, toy), arguments['num']
    mine, again = (_float64(run(inputs, do, num, masks)) for _ in range(2))
    plain = _float64(run_xla(inputs, do, num, masks))
    if bent:
        mine = [1.5 * array for array in mine]
    dtype = inputs[0].dtype.name
    found, allowed, wrong, equal = {}, {}, [], True
    for name, got, same, value, xla in zip(NAMES, mine, again, right, plain, strict=False):
        found[name] = _largest(got - value)
        gradient = name != 'o'
        allowed[name] = allowed_error(dtype, gradient, _largest(xla - value), _largest(value))
        if not found[name] <= allowed[name]:
            wrong.append(f'{name} is off by {found[name]:.3g}, allowed {allowed[name]:.3g}')
        if name in ('dq', 'dk', 'dv') and case != 'depth_alone':
            equal &= bool((got == same).all())
        elif not bent and not (got == same).all():
            wrong.append(f'{name} differs in a rerun')
    hidden = np.isnan(np.asarray(inputs[3], np.float32))
    if mine[4][hidden].any() or mine[5][hidden].any():
        wrong.append('hidden slots have gradients')
    if wrong:
        raise WrongError('; '.join(wrong))
    return {'errors': found, 'allowed': allowed, 'sequence_gradients_rerun_equal': equal}


def check_sums(implementation: str, dtype: str, toy: bool = False, bent: bool = False) -> dict:
    """Slots' gradients are added in place to what the sums held before.

    Args:
      implementation: of kernels_pallas.
      dtype: of the sums: bfloat16, that of the slots, or float32.
      toy, bent: as in check.

    Raises:
      WrongError: the sums are not what they held and the gradients together.
    """
    inputs, do, arguments, _ = prepared(MASKED, toy)
    arguments = {k: v for k, v in arguments.items() if k not in ('traced', 'num')}
    masks = arrays_of(arguments)
    options = {name: value for name, value in arguments.items() if name not in masks}
    options |= {'implementation': implementation, 'num_slots': 3}
    start = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, dtype), inputs[3:5])
    apart = dtype == 'float32'

    def add(inputs, do, sums, masks):
        call = functools.partial(depth_attention, **options, **masks)

        def attend(*slots):
            if apart:
                return call(*inputs, slot_sums=slots)
            return call(*inputs[:3], *slots, thread_slots=True)

        return jax.vjp(attend, *(sums if apart else inputs[3:5]))[1]((do, *sums))

    def alone(inputs, do, masks):
        def attend(*slots):
            return depth_attention(*inputs[:3], *slots, **options, **masks)

        return jax.vjp(attend, *inputs[3:5])[1](do)

    sums = _float64(_jit(add, toy)(inputs, do, start, masks))
    parts, largest = _float64(_jit(alone, toy)(inputs, do, masks)), 0.0
    for total, part in zip(sums, parts, strict=True):
        error = np.abs(total * (1.5 if bent else 1) - 0.5 - part)
        error[3:] *= 1e3  # where nothing is added nothing may change
        largest = max(largest, float(np.max(error - 0.02 * np.abs(0.5 + part))))
        if not np.abs(part[:3]).max() > 0.1:
            raise WrongError('the gradients of the slots are too small to be compared')
    if not largest <= 0.01:
        raise WrongError(f'sums of the gradients in {dtype} are off by {largest:.3g}')
    return {'error_beyond_rounding': largest}


def check_decode(batch: int, length: int, slots: int, toy: bool = False, bent: bool = False):
    """decode_attention in bfloat16 against the exact softmax: at most twice float32's error.

    Args:
      batch: rows, each at its own place in the cache.
      length: places of the cache.
      slots: depth slots of the new token.
      toy, bent: as in check.

    Raises:
      WrongError: the error is larger, or a rerun differs.
    """
    batch, length = (3, 13) if toy else (batch, length)
    sizes = {'B': batch, 'T': 1, 'S': length + 1, 'N': 8, 'K': 4, 'H': 128, 'L': slots}
    inputs, (do, dlse), _, taken, _, seen = make_case(**DEFAULTS | sizes)
    q, k, v, k_depth, v_depth, _ = inputs = [jnp.asarray(x, jnp.bfloat16) for x in inputs]
    inputs[5] = q
    filled_B = np.linspace(0, length, batch).astype(int)
    visible_BS = np.arange(length) < filled_B[:, None]
    keys = np.concatenate([visible_BS, np.ones((batch, 1), bool)], axis=1)[:, None]
    value, *_ = exact(inputs, (do, dlse), taken, keys, seen, 128**-0.5)

    def decode(q, k, v, k_depth, v_depth, visible_BS):
        cached = (jnp.transpose(side[:, :length], (0, 2, 3, 1)) for side in (k, v))
        new = (k[:, length:], v[:, length:])
        return decode_attention(q, *new, *cached, visible_BS, None, k_depth, v_depth)

    run, arrays = _jit(decode, toy), (q, k, v, k_depth, v_depth)
    mine, again = (np.asarray(run(*arrays, visible_BS), np.float64) for _ in range(2))
    wide = run(*(x.astype(jnp.float32) for x in arrays), visible_BS).astype(jnp.bfloat16)
    errors = [_largest(x * (1.5 if bent else 1) - value) for x in (mine, np.float64(wide))]
    allowed = 2 * _largest(np.float64(wide) - value) + 2e-6
    if not errors[0] <= allowed:
        raise WrongError(f'o is off by {errors[0]:.3g}, allowed {allowed:.3g}')
    if (mine != again).any():
        raise WrongError('o differs in a rerun')
    return {'errors': {'o': errors[0]}, 'allowed': {'o': allowed}}
