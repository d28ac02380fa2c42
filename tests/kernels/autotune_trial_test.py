"""A candidate is checked before it is timed, by the same rule as in launch.gpu."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import autotune, autotune_trial
from kernels_pallas.backends import Device, Parts, choose, log_lines
from kernels_pallas.triton import depth as triton
from tests.kernels.cases import USUAL
from tests.kernels.depth_backends_test import interpreted

TINY = USUAL._replace(q=(2, 9, 4, 8), k=(2, 9, 2, 8), num_slots=5, dtypes=('float32',), scale=0.3)
INTERPRETED = Parts('xla', 'pallas', interpret=True)
VALUE = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4)
HIDDEN = np.zeros((2, 3, 4), bool)
HIDDEN[0, 0] = True


def wrong(name='dk_depth', unordered=(), second=None, **change):
    """Return find_wrong of one array with a change in the candidate; XLA is off by 1e-3."""
    value = np.where(HIDDEN, autotune_trial.START, VALUE)
    mine = value + np.where(HIDDEN, 0, change.get('error', 0)).astype(np.float32)
    mine[0, 0] += change.get('hidden', 0)
    mine[1, 2, 3] = change.get('last', mine[1, 2, 3])
    second = mine if second is None else mine + np.float32(second)
    plain = value + np.float32(change.get('plain', 1e-3))
    results = [{name: array} for array in (value, plain, mine, second)]
    return autotune_trial.find_wrong(*results, {name: HIDDEN}, 'bfloat16', unordered)


def test_what_is_wrong_is_found():
    """More than twice XLA's error in outputs, three times in gradients; NaN; any hidden gradient;
    other bits in a second run, but for what is summed in any order.
    """
    assert wrong() is None and wrong(error=2.9e-3) is None
    assert 'dk_depth is off by 0.0031, allowed 0.00302' in wrong(error=3.1e-3)
    assert wrong('o', error=1.9e-3) is None and 'o is off by' in wrong('o', error=2.1e-3)
    for number in (np.nan, np.inf):
        assert 'dk_depth is off by' in wrong(last=number)
    # If XLA itself is far off, or NaN, the error still has a bound.
    for plain in (1.0, np.nan):
        assert wrong(error=0.03, plain=plain) is None and 'off by' in wrong(error=0.05, plain=plain)
    assert wrong(hidden=1e-6) == 'wrong: dk_depth changes at hidden slots'
    assert wrong(second=1e-6) == 'wrong: dk_depth differs in a second run'
    assert wrong(second=1e-6, unordered=('dk_depth',)) is None


def test_the_small_case_ends_its_blocks_as_the_large_one():
    """It keeps remainders, window, groups and slots, with few rows, heads and tokens."""
    large = USUAL._replace(q=(8, 4097, 24, 64), k=(8, 4097, 8, 64), window=512, slot_rows=8200)
    case = autotune_trial.check_shapes(large)
    assert (case.q, case.k) == ((2, 257, 6, 64), (2, 257, 2, 64))
    assert case.slot_rows == 264 and case.window == 50 and case.num_slots == large.num_slots
    assert autotune_trial.check_shapes(large._replace(k=(8, 0, 8, 64))).k == (2, 0, 2, 64)
    assert autotune_trial.check_shapes(TINY) == TINY


def test_a_time_is_taken_of_as_many_rows_as_fit():
    """All rows of a small batch, one row of a large one; nothing else changes."""
    assert autotune_trial.timed_shapes(USUAL) == USUAL
    many = USUAL._replace(q=(64, 4096, 16, 128), k=(64, 4096, 8, 128), num_slots=48)
    for change, rows in (({}, 2), ({'sums': 'float32'}, 1), ({'num_slots': 0}, 42)):
        case = many._replace(**change)
        right = case._replace(q=(rows, *many.q[1:]), k=(rows, *many.k[1:]))
        assert autotune_trial.timed_shapes(case) == right


def test_a_broken_kernel_is_found(monkeypatch):
    """By its one wrong result; o, dq, dk, dv and the other slots' gradients are right."""
    depth_backward = triton.depth_backward

    @functools.wraps(depth_backward)
    def broken(*arrays, **options):
        dq, dk, dv = depth_backward(*arrays, **options)
        return dq, dk.at[0, 0, 3].multiply(1.01), dv

    monkeypatch.setattr(triton, 'depth_backward', broken)
    assert autotune_trial.check(INTERPRETED, TINY).startswith('wrong: dk_depth is off by')


@interpreted
def test_a_kernel_may_round_weights_that_xla_keeps_in_float32():
    """A right Hopper kernel passes with sums in float32, the default of a bfloat16 model."""
    sizes = {'q': (1, 16, 2, 64), 'k': (1, 16, 1, 64), 'dtypes': ('bfloat16',), 'sums': 'float32'}
    parts = Parts('xla', 'mosaic_gpu', interpret=True)
    assert autotune_trial.check(parts, TINY._replace(**sizes)) is None


CALLS = {
    'bfloat16 with float32 sums': (
        {'dtypes': ('bfloat16',), 'sums': 'float32', 'slot_queries': True, 'slot_mask': True},
        INTERPRETED,
    ),
    'routed': (
        {'slot_rows': 16, 'consecutive': False, 'segments': True, 'slot_window': 3},
        INTERPRETED,
    ),
    'other positions': ({'k': (2, 13, 2, 8), 'ordered': False, 'segments': True}, INTERPRETED),
}


@pytest.mark.slow
@pytest.mark.parametrize(('change', 'parts'), CALLS.values(), ids=CALLS)
def test_a_child_process_checks_and_times_a_call(change, parts, monkeypatch, tmp_path):
    """With real candidates on a CPU."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    found = autotune.run_trial(parts, TINY._replace(**change), Device('cpu', 'cpu'), 300)
    assert set(found) == {'milliseconds'} and found['milliseconds'] > 0


@pytest.mark.slow
def test_a_measurement_by_real_child_processes(monkeypatch, tmp_path):
    """On a CPU that pretends to be a GPU: cuDNN fails, XLA runs."""
    environment = autotune._environment
    monkeypatch.setattr(
        autotune, '_environment', lambda device: environment(device) | {'JAX_PLATFORMS': 'cpu'}
    )
    monkeypatch.setattr(autotune, '_known', {})
    monkeypatch.setattr(autotune, 'LIMIT_SECONDS', 300.0)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    shapes = TINY._replace(q=(4, 1024, 2, 8), k=(4, 1024, 1, 8), num_slots=0, dtypes=('bfloat16',))
    device = Device('gpu', 'cpu', (9, 0), not_measured='')
    assert choose(None, shapes, device) == Parts()
    assert 'the fastest of xla ' in log_lines()[-1] and '; not cudnn: ' in log_lines()[-1]
    (path,) = tmp_path.glob('moddepth_jax/attention/cpu-*.json')
    assert '"milliseconds"' in path.read_text() and '"failed"' in path.read_text()


def test_cold_copies_are_read_in_turn_by_one_program():
    """Neither are the products joined, nor are they moved out of the loop or left out."""
    drawn = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    given = {'x': jnp.asarray(drawn[0]), 'y': jnp.asarray(drawn[1])}
    call, times = autotune_trial.on_cold_copies(lambda given: given['x'] @ given['y'], given)
    results = call()
    assert times == autotune_trial.ROUNDS * len(results) == 8 * 16
    for result in results:
        np.testing.assert_allclose(result, drawn[0] @ drawn[1], rtol=1e-5)
    (program,) = (
        cell.cell_contents for cell in call.__closure__ if hasattr(cell.cell_contents, 'lower')
    )
    text = program.lower([given] * len(results), results).compile().as_text()
    in_loop, _, outside = text.partition('\nENTRY ')
    assert len(re.findall(r' dot\(', in_loop)) == len(results) and ' dot(' not in outside
