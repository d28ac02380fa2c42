"""The sequence kernels on Hopper, interpreted and compared with float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import depth_attention
from kernels_pallas.backends import Parts
from kernels_pallas.joint_softmax import SequenceMask, Static, joint_attention
from kernels_pallas.mosaic import fused
from tests.kernels.cases import KINDS, draw, exact
from tests.kernels.depth_backends_test import interpreted, racing  # noqa: F401
from tests.kernels.mosaic_fused_test import EDGES

SMALL = KINDS | {'B': 1, 'T': 9, 'N': 1, 'K': 1, 'H': 64, 'L': 0, 'num': 0}
OURS = Parts('mosaic_gpu', 'mosaic_gpu_fused', interpret=True)
CASES = {
    'group_of_1': {'window': 5},
    'group_of_9': {'N': 9, 'H': 128},
    'group_of_2': {'N': 4, 'K': 2, 'T': 200, 'segments': EDGES},
    'window': {'N': 3, 'T': 200, 'window': 70, 'H': 96},
    'window_in_documents': {'N': 5, 'T': 200, 'window': 90, 'segments': EDGES, 'H': 56},
    'group_of_12': {'N': 12, 'T': 97, 'segments': (1, 60, 3, 33), 'H': 128},
    'any_ids': {'N': 2, 'B': 2, 'T': 200, 'segments': 'any', 'window': 150},
    'long': {'T': 1025, 'segments': (1, 383, 513, 128)},
}


def check(**sizes):
    """In float32 o and lse are right to 2e-6, gradients through both to 1e-5."""
    case = SMALL | sizes
    inputs, (do, dlse), arguments, *seen = draw(**case)
    o, lse, gradients = exact(inputs, (do, dlse), *seen, case['H'] ** -0.5)
    positions = jnp.broadcast_to(jnp.arange(case['T']), (case['B'], case['T']))
    ids = arguments.get('segment_ids_BT')
    ids = None if ids is None else jnp.asarray(ids)
    mask = SequenceMask(positions, positions, ids, ids)
    static = Static(case['window'], True, 0, case['H'] ** -0.5, True, OURS)

    def attend(*arrays):
        return joint_attention(static, *arrays, mask, None, None, None)[:2]

    found, pull = jax.vjp(attend, *(jnp.asarray(x) for x in inputs[:3]))
    for got, right in zip(found, (o, lse), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=2e-6)
    for got, right in zip(pull((jnp.asarray(do), jnp.asarray(dlse))), gradients, strict=False):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-5 * max(1, np.abs(right).max()))


@interpreted
def test_documents_of_an_odd_group_equal_float64():
    check(N=3, T=17, segments=(1, 9, 7))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name):
    check(**CASES[name])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('segments', [False, 'any'])
def test_no_race(segments, racing, monkeypatch):  # noqa: F811
    """Barriers order copies and products in all three kernels, with rings of two stages."""
    monkeypatch.setattr(fused, 'MAX_STAGES', 2)
    check(N=2, B=2, T=40, segments=segments)


@interpreted
@pytest.mark.slow
def test_bfloat16_errs_at_most_three_times_as_much_as_xla_and_reruns_are_bit_equal():
    """The fused forward, and gradients of sequence and slots, with documents."""
    sizes = {'N': 4, 'K': 2, 'T': 40, 'L': 9, 'num': 6, 'segments': (1, 30, 9)}
    inputs, (do, dlse), arguments, *seen = draw(**SMALL | sizes)
    inputs, do = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]], jnp.asarray(do, jnp.bfloat16)
    rounded = [np.nan_to_num(np.asarray(x, float)) for x in (*inputs, inputs[0])]
    o, _, gradients = exact(rounded, (np.asarray(do, float), dlse), *seen, 64**-0.5)
    gradients[0] += gradients[5]

    def errors(implementation):
        def attend(*arrays):
            options = {'num_slots': 6, 'implementation': implementation, 'return_lse': True}
            return depth_attention(*arrays, **options, **arguments)

        (found, _), pull = jax.vjp(attend, *inputs)
        results = [np.asarray(x, float) for x in (found, *pull((do, jnp.asarray(dlse))))]
        right = zip(results, (o, *gradients[:5]), strict=True)
        return results, [np.abs(np.nan_to_num(x) - y).max() for x, y in right]

    (results, found), (_, plain) = errors(OURS), errors('xla')
    assert all(
        mine <= most * theirs
        for mine, theirs, most in zip(found, plain, (2, *[3] * 5), strict=True)
    )
    again, _ = errors(OURS)
    assert [x.tobytes() for x in results] == [x.tobytes() for x in again]
