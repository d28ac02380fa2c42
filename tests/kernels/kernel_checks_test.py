"""The checks of launch.gpu, run on a CPU: they pass only what is right."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import depth_attention
from kernels_pallas.backends import DEPTH, Device, choose, recorded
from moddepth_jax.benchmarks import gpu_cases, kernel_checks
from moddepth_jax.benchmarks.attention_check import NAMES
from moddepth_jax.benchmarks.attention_forms import PARTS
from moddepth_jax.benchmarks.kernel_cases import CASES, PACKED_CASES
from moddepth_jax.benchmarks.kernel_checks import check
from moddepth_jax.benchmarks.worker import WrongError

CASE = 'packed/no_slots'
HOPPER = Device('gpu', 'NVIDIA H200', (9, 0))


def test_what_is_right_passes():
    """Each result is within the allowed error in bfloat16, as on a GPU."""
    found = check('xla', CASE, toy=True)
    assert list(found['errors']) == ['o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth']
    assert all(0 < found['errors'][name] <= found['allowed'][name] for name in ('o', 'dq', 'dv'))
    assert check('xla', 'sums', toy=True)['errors']['dk_depth'] > 0


def test_each_check_of_the_list_is_supported_on_an_h200(monkeypatch):
    """None would be skipped there. Only described: this checks the list, not the kernels."""
    monkeypatch.setattr(kernel_checks, 'exact', lambda *_: (0, 0, [0] * 6))
    checks = [c for c in gpu_cases.cases() if c.run.endswith('kernel_checks:check')]
    assert {c.arguments['implementation'] for c in checks} == {*PARTS, *DEPTH}
    for name in dict.fromkeys(c.arguments['case'] for c in checks):
        packed = name.startswith('packed/')
        sizes = PACKED_CASES[name.removeprefix('packed/')] if packed else CASES[name]
        inputs, static, _ = kernel_checks.prepare(sizes, toy=False)
        with recorded() as calls:
            jax.eval_shape(kernel_checks.program('xla', static, toy=True), inputs)
        for c in checks:
            implementation = c.arguments['implementation']
            # Before JAX 0.11.2 cuDNN misplaces grouped keys of documents.
            known = jax.__version_info__ >= (0, 11, 2) or not (implementation == 'cudnn' and packed)
            if c.arguments['case'] == name and known:
                choose(PARTS.get(implementation, implementation), calls[0], HOPPER)


def leaking(*arrays, **options):
    """The wrong form lets documents see each other."""
    return depth_attention(*arrays, **options | {'segment_ids_BT': None})


def nan(*arrays, **options):
    return depth_attention(*arrays, **options) * jnp.nan


@pytest.mark.parametrize('fault', [leaking, nan])
def test_what_is_wrong_is_found(fault, monkeypatch):
    """`xla`, the baseline, is unchanged. The message says what is wrong and by how much."""

    def attention(*arrays, implementation, **options):
        function = depth_attention if implementation == 'xla' else fault
        return function(*arrays, implementation='xla', **options)

    monkeypatch.setattr(kernel_checks, 'depth_attention', attention)
    with pytest.raises(WrongError, match=r'o is off by [\d.e-]+|o is off by nan'):
        check('pallas', CASE, toy=True)


@pytest.mark.parametrize('case', ['depth_alone', CASE])
@pytest.mark.parametrize('name', ['o', 'dq'])
def test_a_rerun_that_differs_is_found(name, case, monkeypatch):
    """Each call of the wrong form changes a last bit. Only cuDNN's gradients may differ."""
    calls, kernel_program = itertools.count(), kernel_checks.program

    def program(*given):
        run = kernel_program(*given)

        def counted(*arrays):
            results = dict(zip(NAMES, run(*arrays), strict=False))
            changed = results[name]
            results[name] = changed + jnp.asarray(2.0**-9 * next(calls), changed.dtype)
            return results.values()

        return counted

    monkeypatch.setattr(kernel_checks, 'program', program)
    with pytest.raises(WrongError, match=f'{name} differs in a rerun'):
        check('xla', case, toy=True)


def test_cudnn_is_refused_on_a_cpu():
    """The error has the name, the reason, and the words by which launch.gpu skips a case."""
    with pytest.raises(ValueError, match='not supported here: cudnn: cpu must be an NVIDIA GPU'):
        check('cudnn', 'depth_alone', toy=True)
