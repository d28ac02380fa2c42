"""A run that was killed or stopped and started again ends bit-equal to an unbroken one."""

import random
import re

import pytest

from tests.faults.runs import NUM_STEPS, Runs, resumed_step, sigkill_soon, sigterm

FIRST_CHECKPOINT = 20


@pytest.fixture(scope='module')
def draw():
    """Random numbers whose seed a failure shows."""
    seed = random.SystemRandom().randrange(10**6)
    print(f'kills drawn from seed {seed}')
    return random.Random(seed)


@pytest.fixture(scope='module')
def on_one_device(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp('one'), 1, hasty=True)


def test_killed_then_terminated_it_ends_bit_equal(on_one_device, draw):
    """SIGKILL at a random moment, then SIGTERM at another: the final state has the same bits.

    No row of metrics is lost or doubled. Terminated, the command prints on stderr that it stops, on
    stdout how to resume, and has a nonzero status.
    """
    runs = on_one_device
    runs.finish('unbroken')
    kill, stop = draw.randrange(FIRST_CHECKPOINT, 120), draw.randrange(160, 260)
    status, out, err = runs.interrupt('broken', kill, sigkill_soon(draw))
    assert (status, err) == (-9, ''), f'kill at {kill}'
    assert 'resuming' not in out
    status, out, err = runs.interrupt('broken', stop, sigterm)
    assert FIRST_CHECKPOINT <= resumed_step(out) < NUM_STEPS
    assert status == 128 + 15
    assert err == 'SIGTERM: stopping after this step, then saving\n'
    (stopped,) = re.findall(r'SIGTERM: stopped and saved at step (\d+) of 300; the same', out)
    assert stop <= int(stopped) < NUM_STEPS
    assert resumed_step(runs.finish('broken')) == int(stopped)
    expected = runs.result('unbroken')
    runs.check_rows(expected[2])
    assert runs.result('broken') == expected, f'kill at {kill}, stop at {stop}'


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 4])
def test_killed_again_and_again_it_ends_bit_equal(tmp_path, devices):
    """Under XLA's full optimisation, eight kills and two stops in one run change no bit and row."""
    draw = random.Random(devices)
    runs = Runs(tmp_path, devices, hasty=False)
    runs.finish('unbroken')
    for i, step in enumerate(sorted(draw.sample(range(FIRST_CHECKPOINT, 280), 10))):
        if i in (3, 7):
            status, _, _ = runs.interrupt('broken', step, sigterm)
            assert status == 128 + 15
        else:
            status, _, _ = runs.interrupt('broken', step, sigkill_soon(draw))
            assert status == -9
    runs.finish('broken')
    expected = runs.result('unbroken')
    runs.check_rows(expected[2])
    assert runs.result('broken') == expected
