"""The FlashAttention-2 baseline lowers for a Hopper GPU, without having one.

pip install 'jax[cuda13]' jax-triton triton
python -m pytest -m aot tests/benchmarks/triton_baseline_test.py
"""

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

    text = lower(both, *(shape(1, 1000, 2, width),) * 4)
    assert text.count('triton_kernel_call') >= 3
