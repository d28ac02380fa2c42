"""A run that was killed or stopped and started again ends bit-equal to an unbroken one."""

import random
import re
import subprocess
import time

from tests.faults.runs import Runs

FIRST_CHECKPOINT, NUM_STEPS = 20, 120


def test_killed_then_terminated_it_ends_bit_equal(tmp_path):
    """SIGKILL at a random moment, then SIGTERM at another: the final state has the same bits.

    No row of metrics is lost or doubled. Terminated, the command prints on stderr that it stops, on
    stdout how to resume, and has a nonzero status.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f'kills drawn from seed {seed}')  # a failure shows it
    draw, runs = random.Random(seed), Runs(tmp_path, training__num_steps=NUM_STEPS)

    def kill_soon(process):
        time.sleep(draw.uniform(0, 0.03))
        process.kill()

    def resumed_step(out):
        (step,) = re.findall(r'resuming after step (\d+)', out)
        return int(step)

    runs.finish('unbroken')
    kill, stop = draw.randrange(FIRST_CHECKPOINT, 50), draw.randrange(60, 90)
    status, out, err = runs.interrupt('broken', kill, kill_soon)
    assert (status, err) == (-9, ''), f'kill at {kill}'
    assert 'resuming' not in out
    status, out, err = runs.interrupt('broken', stop, subprocess.Popen.terminate)
    assert FIRST_CHECKPOINT <= resumed_step(out) < NUM_STEPS
    assert status == 128 + 15
    assert err == 'SIGTERM: stopping after this step, then saving\n'
    (stopped,) = re.findall(r'SIGTERM: stopped and saved at step (\d+) of 120; the same', out)
    assert stop <= int(stopped) < NUM_STEPS
    assert resumed_step(runs.finish('broken')) == int(stopped)
    expected = runs.result('unbroken')
    runs.check_rows(expected[2])
    assert runs.result('broken') == expected, f'kill at {kill}, stop at {stop}'
