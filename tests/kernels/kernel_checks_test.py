"""The checks that launch.gpu makes on a GPU, tried on a CPU: they pass what is right only."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from moddepth_jax.benchmarks import kernel_checks
from moddepth_jax.benchmarks.kernel_cases import CASES, PACKED_CASES, make_case
from moddepth_jax.benchmarks.kernel_checks import check, check_decode
from moddepth_jax.benchmarks.worker import WrongError


def replace_attention(monkeypatch, function):
    """`xla` stays what it is: it is the ruler. `pallas` becomes depth_attention and a fault."""

    def attention(implementation):
        plain = functools.partial(depth_attention, implementation='xla')
        if implementation == 'xla':
            return plain
        return functools.partial(function, plain)

    monkeypatch.setattr(kernel_checks, '_attention', attention)


def test_what_is_right_passes():
    """Its errors lie within what is allowed, in each result."""
    found = check('xla', 'packed/no_slots', toy=True)
    assert list(found['errors']) == ['o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth']
    assert all(0 < found['errors'][name] <= found['allowed'][name] for name in ('o', 'dq', 'dv'))


def leaking(plain, *arrays, **options):
    """Documents see each other."""
    return plain(*arrays, **options | {'segment_ids_BT': None})


def nan(plain, *arrays, **options):
    return plain(*arrays, **options) * jnp.nan


def rough(plain, *arrays, **options):
    """Right, but for 3%."""
    return plain(*arrays, **options) * jnp.asarray(1.03, arrays[0].dtype)


@pytest.mark.parametrize('fault', [leaking, nan, rough])
def test_what_is_wrong_is_found(fault, monkeypatch):
    """The message names what is wrong and by how much."""
    replace_attention(monkeypatch, fault)
    with pytest.raises(WrongError, match=r'o is off by [\d.e-]+|o is off by nan'):
        check('pallas', 'packed/no_slots', toy=True)


def test_a_rerun_that_differs_is_found(monkeypatch):
    """Each call adds another last bit."""
    calls = []

    def program(*given):
        calls.append(given)
        run, number = kernel_program(*given), len(calls)

        def counted(*arrays):
            o, *gradients = run(*arrays)
            calls.append(None)
            return o + jnp.asarray(2.0**-7 * len(calls), o.dtype) * (number == 1), *gradients

        return counted

    kernel_program = kernel_checks.program
    monkeypatch.setattr(kernel_checks, 'program', program)
    with pytest.raises(WrongError, match='o differs in a rerun'):
        check('xla', 'depth_alone', toy=True)


def test_an_injected_fault_is_found():
    """`bent` is what launch.gpu --inject=wrong:CASE sets."""
    with pytest.raises(WrongError, match='o is off'):
        check('xla', 'depth_alone', toy=True, bent=True)
    with pytest.raises(WrongError, match='o is off'):
        check_decode(3, 9, 4, toy=True, bent=True)


def test_decoding_passes():
    """In bfloat16, as on a GPU."""
    found = check_decode(3, 9, 4, toy=True)
    assert 0 < found['errors']['o'] <= found['allowed']['o']


def test_cudnn_is_refused_on_a_cpu():
    """By name and reason, in the words by which launch.gpu skips a case."""
    with pytest.raises(ValueError, match='cannot: cudnn: cpu must be an NVIDIA GPU'):
        check(kernel_checks.CUDNN, 'depth_alone', toy=True)


@pytest.mark.parametrize('name', [*CASES, *PACKED_CASES])
def test_cases_can_be_drawn(name):
    """Sizes go together, and documents of given lengths fill the row."""
    case = {**CASES, **PACKED_CASES}[name]
    lengths = case.get('segments')
    if isinstance(lengths, tuple):
        assert sum(lengths) == case['T']
    sizes = kernel_checks.DEFAULTS | case
    assert sizes['N'] % sizes['K'] == 0
    if name == 'edges':
        sizes = {k: v for k, v in sizes.items() if k not in ('dtype', 'traced')}
        ids = make_case(**sizes)[2]['segment_ids_BT']
        assert np.bincount(ids[0]).tolist() == list(lengths)
