"""Every implementation of attention, compiled for the GPU at hand, against the float64 softmax.

On a machine with a GPU, of all implementations or of one:

  JAX_PLATFORMS=cuda,cpu python -m pytest tests/kernels/gpu_test.py -m gpu
  KERNEL_TESTS=mosaic_gpu JAX_PLATFORMS=cuda,cpu python -m pytest tests/kernels/gpu_test.py -m gpu

KERNEL_TESTS=toy:pallas runs the same tests at toy size on a CPU, so that they are tried themselves.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from kernels_pallas.depth_attention import IMPLEMENTATIONS
from tests.kernels import cases
from tests.kernels.cases import KINDS, SEQUENCE, exact, make_case

*TOY, ONLY = os.environ.get('KERNEL_TESTS', '').split(':')
NAMES = [ONLY] if ONLY else IMPLEMENTATIONS
MASKED = {'T': 200, 'N': 8, 'L': 64, 'num': 63, 'mask': True, 'traced': True}
CASES = {
    'group_of_1': {'T': 97, 'N': 4, 'K': 4, 'L': 7, 'num': 5, 'traced': True},
    'group_of_3': {'T': 200, 'N': 6, 'L': 70, 'num': 65, 'slot_window': 9},
    'group_of_5': {'T': 97, 'N': 5, 'K': 1, 'H': 56, 'L': 7},
    'group_of_8': {'T': 1025, 'N': 8, 'K': 1, 'H': 128, 'L': 64, 'num': 40, 'traced': True},
    'group_of_16': {'T': 256, 'N': 32, 'L': 64, 'B': 1},
    'width_96': {'T': 200, 'N': 8, 'H': 96, 'L': 64},
    'width_256': {'T': 97, 'N': 8, 'H': 256, 'L': 9},
    'one_slot': {'T': 200, 'N': 8, 'L': 1},
    'none_written': {'T': 97, 'N': 8, 'num': 0, 'traced': True},
    'masked': MASKED,
    'fused_octets_of_7': {'T': 97, 'N': 16, 'L': 70, 'num': 66, 'mask': True, 'R': 99},
    'packed': {'T': 200, 'N': 8, 'segments': True, 'mask': True},
    'window': {'T': 200, 'N': 8, 'window': 50, 'L': 64},
    'rows': {'T': 97, 'R': 150, 'N': 8, 'num': 6, 'traced': True, 'mask': True},
    'own_query': {'T': 97, 'N': 8, 'own_query': True, 'num': 6},
    'depth_alone': {'T': 200, 'S': 0, 'N': 8, 'L': 64, 'num': 33, 'traced': True},
    'float32': {'T': 97, 'N': 8, 'L': 7, 'dtype': 'float32'},
}
if TOY:
    CASES = {name: CASES[name] for name in ('group_of_3', 'rows', 'depth_alone')}
DEFAULTS = {'B': 2, 'S': None, 'R': None, 'K': 2, 'H': 64, 'L': 9, 'dtype': 'bfloat16'}
DEFAULTS |= KINDS | SEQUENCE
jit = cases.jit if TOY else jax.jit  # optimised as in a training run
LARGEST_TOYS = {'T': 13, 'R': 17, 'N': 8, 'H': 16, 'L': 7, 'num': 5, 'window': 6, 'slot_window': 3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings('ignore:The Pallas Triton backend:DeprecationWarning'),
]


@pytest.fixture(autouse=True)
def needs_gpu():
    if not TOY and jax.default_backend() != 'gpu':
        pytest.skip(f'needs a GPU, JAX runs on {jax.default_backend()}')


def prepared(case):
    """A case in its dtype: inputs, cotangent, arguments, what is exact, how it is run."""
    case = DEFAULTS | case
    if TOY:
        least = {name: most for name, most in LARGEST_TOYS.items() if case[name]}
        case |= {name: min(case[name], most) for name, most in least.items()}
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


def program(implementation, arguments):
    """f(inputs, do, num) -> o and the gradients of the inputs, compiled."""
    arguments = dict(arguments, implementation=implementation)
    traced, num = arguments.pop('traced'), arguments.pop('num')

    def run(inputs, do, traced_num):
        def attend(*inputs):
            own = {'q_depth_BTNH': inputs[5]} if len(inputs) == 6 else {}
            written = traced_num if traced else num
            return depth_attention(*inputs[:5], num_slots=written, **own, **arguments)

        o, pull = jax.vjp(attend, *inputs)
        return o, *pull(do)

    return jit(run)


def run_or_skip(implementation, inputs, do, arguments):
    """Two runs of the compiled program; a test of what this backend cannot do is skipped."""
    compiled = program(implementation, arguments)
    try:
        first = compiled(inputs, do, arguments['num'])
    except ValueError as error:
        if 'cannot:' not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])
    second = compiled(inputs, do, arguments['num'])
    return [[np.asarray(x, np.float64) for x in results] for results in (first, second)]


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('implementation', NAMES)
def test_error_is_near_that_of_plain_attention(implementation, name):
    """At most twice the error of `xla` in the same dtype, gradients three times; reruns are equal.

    NaN in slots that nobody sees changes nothing. The sequence's gradients may differ in a rerun
    where they are cuDNN's, which does not promise otherwise.
    """
    inputs, do, arguments, right = prepared(CASES[name])
    mine, again = run_or_skip(implementation, inputs, do, arguments)
    plain, _ = run_or_skip('xla', inputs, do, arguments)
    # Whatever `xla` does: three roundings of bfloat16, or of the tensor cores' float32.
    most = {'bfloat16': 0.02, 'float32': 4e-3}[CASES[name].get('dtype', 'bfloat16')]
    names = ('o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth', 'dq_depth')[: len(right)]
    for what, got, same, value, beside in zip(names, mine, again, right, plain, strict=True):
        factor, floor = (2, 2e-6) if what == 'o' else (3, 1e-5)
        largest = np.max(np.abs(value), initial=0)
        allowed = factor * np.max(np.abs(beside - value), initial=0) + floor * max(1, largest)
        assert np.max(np.abs(got - value), initial=0) <= min(allowed, most * max(1, largest)), what
        if what not in ('dq', 'dk', 'dv') or name == 'depth_alone':
            np.testing.assert_array_equal(got, same, err_msg=what)
    hidden = np.isnan(np.asarray(inputs[3], np.float32))
    assert not mine[4][hidden].any() and not mine[5][hidden].any()


@pytest.mark.parametrize('implementation', NAMES)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_gradients_of_slots_are_added_to_sums(implementation, dtype):
    """Sums in the slots' dtype and in float32 take the gradients on top of what they held."""
    inputs, do, arguments, right = prepared(MASKED)
    arguments = {k: v for k, v in arguments.items() if k not in ('traced', 'num')}
    arguments |= {'implementation': implementation, 'num_slots': 3}
    start = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, dtype), inputs[3:5])

    @jit
    def add(inputs, do, sums):
        def attend(*slots):
            if dtype == 'float32':
                return depth_attention(*inputs, slot_sums=slots, **arguments)
            return depth_attention(*inputs[:3], *slots, thread_slots=True, **arguments)

        carried = sums if dtype == 'float32' else inputs[3:5]
        return jax.vjp(attend, *carried)[1]((do, *sums))

    def alone(inputs, do):
        def attend(*slots):
            return depth_attention(*inputs[:3], *slots, **arguments)

        return jax.vjp(attend, *inputs[3:5])[1](do)

    try:
        sums = add(inputs, do, start)
    except ValueError as error:
        if 'cannot:' not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])
    for total, part in zip(sums, jit(alone)(inputs, do), strict=True):
        assert total.dtype == dtype
        total, part = np.asarray(total, np.float64), np.asarray(part, np.float64)
        np.testing.assert_array_equal(total[3:], 0.5)
        np.testing.assert_allclose(total[:3], 0.5 + part[:3], rtol=0.02, atol=0.01)
        assert np.abs(part[:3]).max() > 0.1
