"""The FlashAttention-2 baseline lowers for a Hopper GPU and is right, without having one.

pip install 'jax[cuda13]' jax-triton triton torch
python -m pytest -m aot tests/benchmarks/triton_baseline_test.py
"""

import os
import subprocess
import sys

import jax
import pytest

from tests.kernels.hopper import lower, shape

pytestmark = pytest.mark.aot


@pytest.mark.parametrize('width', [64, 128])
def test_both_passes_lower(width, monkeypatch):
    """A Python float as the scale would make the scores float64, which Triton refuses."""
    pytest.importorskip('triton', reason='needs triton', exc_type=ImportError)
    calls = pytest.importorskip('jax_triton.triton_lib', reason='needs jax-triton')
    monkeypatch.setattr(calls.triton_kernel_call_lib, 'get_compute_capability', lambda _: 90)
    from moddepth_jax.benchmarks.triton_baseline import flash_attention

    def both(do, *arrays):
        o, pull = jax.vjp(flash_attention, *arrays)
        return o, *pull(do)

    text = lower(both, *(shape(1, 1000, heads, width) for heads in (4, 4, 2, 2)))
    assert text.count('triton_kernel_call') >= 3


def test_results_and_gradients_are_those_of_plain_attention():
    """In Triton's interpreter, in float32: grouped heads, rows that no tile divides."""
    pytest.importorskip('triton', reason='needs triton', exc_type=ImportError)
    pytest.importorskip('torch', reason='needs torch')
    command = [sys.executable, '-m', 'tests.benchmarks.triton_on_cpu']
    environment = os.environ | {'TRITON_INTERPRET': '1'}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 3, result.stderr
    for line in lines:
        errors = [float(word) for word in line.split()[4:]]  # of o and three gradients
        assert len(errors) == 4 and all(error < 1e-5 for error in errors), line
