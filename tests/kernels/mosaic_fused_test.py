"""The fused Hopper forward, by the interpreter of Mosaic GPU kernels, compared with float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from kernels_pallas.mosaic import fused
from tests.kernels.cases import KINDS, SEQUENCE, draw, exact
from tests.kernels.depth_backends_test import interpreted, racing  # noqa: F401

SMALL = KINDS | SEQUENCE | {'B': 1, 'T': 5, 'N': 8, 'K': 1, 'H': 64, 'L': 8, 'num': 8}
CASES = {
    'padded_slots': {'L': 9},
    'two_kv_heads': {'B': 2, 'N': 16, 'K': 2, 'L': 40, 'num': 35, 'slot_window': 30},
    'rows_masked': {'R': 7, 'L': 7, 'num': 6, 'mask': True, 'own_query': True, 'H': 56, 'B': 2},
    'two_blocks': {'T': 131, 'num': 0, 'window': 60},
    'documents': {'T': 132, 'H': 96, 'segments': True, 'mask': True, 'dtype': 'float16'},
}


def run(implementation, inputs, arguments):
    """(o, lse), not in one program: that of an interpreted kernel may have no other operations."""
    *arrays, q_depth = inputs
    options = {'implementation': implementation, 'return_lse': True, 'q_depth_BTNH': q_depth}
    return [np.asarray(x, float) for x in depth_attention(*arrays, **options, **arguments)]


def check(dtype='bfloat16', **sizes):
    """o errs at most twice as much as the equation in the same dtype."""
    case = SMALL | sizes
    inputs, cotangents, arguments, *seen = draw(**case)
    inputs = [jnp.asarray(x, dtype) for x in inputs]
    if not case['own_query']:
        inputs[5] = inputs[0]
    wide = [np.asarray(x.astype(jnp.float32)) for x in inputs]
    o, lse, _ = exact(wide, cotangents, *seen, case['H'] ** -0.5)
    if not case['own_query']:
        inputs[5] = None
    arguments['num_slots'] = jnp.int32(case['num'])
    (got_o, got_lse), (plain, _) = (
        run(name, inputs, arguments) for name in ('mosaic_gpu_fused', 'reference')
    )
    assert np.abs(got_o - o).max() <= 2 * np.abs(plain - o).max()
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name):
    """NaN in hidden slots does not show."""
    check(**CASES[name])


@interpreted
def test_no_race(racing, monkeypatch):  # noqa: F811
    """The ring's barriers, of two stages, order copies, products and zeros for hidden slots."""
    monkeypatch.setattr(fused, 'MAX_STAGES', 2)
    check(mask=True, L=40, num=40, T=9)


def test_first_keys_are_those_of_the_oldest_segment():
    """Blocks of keys before them are skipped: of sorted ids, and of ids that recur."""
    ids = np.array([[0] * 10 + [3] * 20 + [5] * 10, [7] * 5 + [2] * 30 + [7] * 5])
    got = fused._first_keys(jnp.asarray(ids), 3)
    np.testing.assert_array_equal(got, [[0, 10, 30], [0, 5, 0]])
