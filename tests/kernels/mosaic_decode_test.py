"""The decoding kernel on Hopper, interpreted and compared with float64; and when it is used."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import autotune_decoding, decode_attention
from kernels_pallas.autotune_decoding import program
from kernels_pallas.backends import Device, Parts, choose, plan
from kernels_pallas.mosaic import decode
from moddepth_jax.benchmarks import decode_cases
from moddepth_jax.benchmarks.decode_cases import CASES, DEFAULTS, check, make_case, time_one
from moddepth_jax.benchmarks.worker import WrongError
from tests.kernels.cases import USUAL
from tests.kernels.depth_backends_test import interpreted, racing  # noqa: F401

HOPPER = Device('gpu', 'NVIDIA H200', (9, 0), not_measured='')
TOKEN = USUAL._replace(q=(8, 1, 16, 64), k=(8, 1, 2, 64), places=2048)


def run(case, dtype='float32'):
    """Return o of a case by the interpreted kernel, and in float64."""
    window = (DEFAULTS | case)['slot_window']
    given, right, counted = make_case(case, dtype, np.nan)
    slots = [given.pop(name, None) for name in ('k_depth_LCTKH', 'v_depth_LCTKH', 'slot_mask_LCT')]
    slots = [side if side is None else side[-window:] for side in slots]
    names = ('q_CTNH', 'k_CTKH', 'v_CTKH', 'k_BKHS', 'v_BKHS', 'visible_CTS', 'visible_CTT')
    arrays = [given.pop(name) for name in names]
    slots = None if slots[0] is None else slots
    found = decode.decode_forward(*arrays, slots=slots, interpret=True, **given)
    return np.asarray(found)[counted], right[counted]


@interpreted
def test_a_cache_and_slots_are_one_softmax():
    """With row indices, other queries for slots, NaN in hidden places, and two chunks."""
    found, right = run({'B': 2, 'rows': (1, 5), 'K': 1, 'L': 3, 'mask': True, 'own_query': True})
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_equals_float64(name):
    found, right = run(CASES[name])
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', ['length_97', 'rows', 'tokens'])
def test_half_precision_errs_at_most_twice_as_much_as_xla(name):
    """Called by name, in bfloat16; a rerun has equal bits."""
    check('mosaic_gpu', name)


@pytest.mark.parametrize('name', ['rows', 'tokens'])
def test_xla_passes_the_check_of_a_visit(name):
    check('xla', name, toy=True)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    """Each shape is compared with XLA in float32 before it is timed."""
    run = decode_cases.program('xla')
    assert time_one('xla', {'L': 3}, toy=True)['milliseconds'] > 0
    wrong = {'mosaic_gpu': lambda given: 1.05 * run(given)}
    monkeypatch.setattr(decode_cases, 'program', lambda name: wrong.get(name, run))
    with pytest.raises(WrongError, match='o is off by'):
        time_one('mosaic_gpu', {'L': 3}, toy=True)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('name', ['length_200', 'length_1025'])
def test_no_race(name, racing):  # noqa: F811
    """Barriers order copies, products and the clearing of hidden values."""
    found, right = run(CASES[name])
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize('splits', [1, 3])
def test_any_number_of_splits_is_one_softmax(splits, monkeypatch):
    """Some splits are empty: a window shows two of five chunks."""
    monkeypatch.setattr(decode.Sizes, 'splits', splits)
    found, right = run({'B': 1, 'K': 1, 'S': 320, 'length': 300, 'window': 80, 'L': 2})
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({}, None),
        ({'places': 2000}, None),
        ({'places': 97}, 'a cache of 97 places must be divisible by 16'),
        ({'q': (8, 9, 16, 64), 'k': (8, 9, 2, 64)}, '9 new tokens of a row with 72 queries'),
        ({'q': (8, 33, 2, 64), 'k': (8, 33, 2, 64)}, '33 new tokens of a row with 33 queries'),
        ({'dtypes': ('float32',)}, 'dtype float32 must be bfloat16 or float16'),
        ({'q': (8, 1, 16, 192)}, 'head width 192'),
    ],
)
def test_what_it_cannot_do_is_refused(changes, reason):
    """By default XLA decodes; named, the kernel raises an error with the reason."""
    shapes = TOKEN._replace(**changes)
    candidates, refused = plan(shapes, HOPPER)
    assert candidates == [Parts(), *[Parts('mosaic_gpu')] * (reason is None)]
    assert reason is None or refused['mosaic_gpu'].startswith(reason)
    if reason is None:
        assert choose('mosaic_gpu', shapes, HOPPER) == Parts('mosaic_gpu')
    else:
        with pytest.raises(ValueError, match=f'not supported here: {reason}.*; supported: xla'):
            choose('mosaic_gpu', shapes, HOPPER)


def test_it_is_not_taken_unmeasured(monkeypatch):
    """The kernel is not used if nothing can be measured, with small caches, or before a check."""
    asked = []

    def fastest(candidates, *rest):
        asked.append(candidates)
        return candidates[-1], 'the fastest', {}, False

    monkeypatch.setattr('kernels_pallas.autotune.fastest', fastest)
    for shapes, device in (
        (TOKEN, HOPPER._replace(not_measured='8 devices')),
        (TOKEN._replace(places=496), HOPPER),
        (TOKEN, HOPPER._replace(capability=(8, 0))),
    ):
        assert choose(None, shapes, device) == Parts() and not asked
    assert choose(None, TOKEN, HOPPER) == Parts('mosaic_gpu')
    assert asked == [[Parts(), Parts('mosaic_gpu')]]


def test_an_unknown_name_is_refused():
    arrays = [jnp.zeros((1, 1, 1, 8))] * 3 + [jnp.zeros((1, 1, 8, 16))] * 2
    with pytest.raises(ValueError, match="implementation='pallas' must be one of xla, mosaic_gpu"):
        decode_attention(*arrays, jnp.ones((1, 1, 16), bool), implementation='pallas')


PLAIN = program('xla')  # compiled once for all faults


@pytest.mark.parametrize('fault', [None, 'nan', 'wrong', 'rerun'])
def test_a_candidate_is_checked_before_it_is_timed(fault, monkeypatch):
    """Right results pass; leaked NaN, a large error and a rerun with other bits are found."""
    shapes = TOKEN._replace(num_slots=3, q=(2, 1, 4, 8), k=(2, 1, 2, 8), places=64, slot_mask=True)
    calls = []

    def faulty(name):
        def run(given):
            calls.append(name)
            if fault != 'nan':
                given = {n: x if x.dtype == bool else jnp.nan_to_num(x) for n, x in given.items()}
            o = PLAIN(given)['o']
            off = {'wrong': 0.5, 'rerun': 2.0**-10 * (len(calls) == 4)}.get(fault, 0.0)
            return {'o': o + jnp.asarray(off * (name == 'mosaic_gpu'), o.dtype)}

        return run

    monkeypatch.setattr(autotune_decoding, 'program', faulty)
    found = autotune_decoding.check(Parts('mosaic_gpu'), shapes)
    if fault is None:
        assert found is None and calls == ['xla', 'xla', 'mosaic_gpu', 'mosaic_gpu']
    else:
        assert found.startswith('wrong: o differs' if fault == 'rerun' else 'wrong: o is off by')
