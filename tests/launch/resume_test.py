"""A run that was killed or stopped resumes and ends bit-equal to an uninterrupted run."""

import random
import re

from tests.faults.runs import Runs
from tests.forked_commands import run_commands

FIRST_CHECKPOINT, NUM_STEPS = 10, 60

# launch.train that gets a signal some seconds after it has begun a step, and has a checkpoint.
SIGNALLED = """
import os, pathlib, signal, sys, threading

from launch import cli, train
from moddepth_jax.data.pipeline import Dataset

name, begun, delay = sys.argv[1:4]
del sys.argv[1:4]
train_batch, sent = Dataset.train_batch, []


def train_batch_and_signal(dataset, step, *rows):
    saved = any(pathlib.Path('broken').glob('checkpoints/*/manifest.json'))
    if step >= int(begun) and saved and not sent:
        sent.append(name)
        act = os.kill, (os.getpid(), getattr(signal, name))
        threading.Timer(float(delay), *act).start()
    return train_batch(dataset, step, *rows)


Dataset.train_batch = train_batch_and_signal
cli.run(train.main)
"""


def test_a_killed_and_terminated_run_ends_bit_equal(tmp_path):
    """SIGKILL at a random moment, then SIGTERM at another: the final state has the same bits.

    No row of metrics is lost or doubled. Terminated, the command prints on stderr that it stops, on
    stdout how to resume, and has a nonzero status.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f'kills drawn from seed {seed}')  # a failure shows it
    draw = random.Random(seed)
    changes = {'model__routing__router': 'learned', 'training__num_steps': NUM_STEPS}
    changes |= {'training__checkpoint_every': FIRST_CHECKPOINT, 'evaluation__every': 25}
    runs = Runs(tmp_path, devices=0, **changes)
    (tmp_path / 'signalled.py').write_text(SIGNALLED)
    kill, stop = draw.randrange(FIRST_CHECKPOINT, 25), draw.randrange(30, 45)
    broken = [f'--config={runs.config}', '--workdir=broken']
    lines = [
        ['train', f'--config={runs.config}', '--workdir=unbroken'],
        ['signalled.py', 'SIGKILL', str(kill), str(draw.uniform(0, 0.03)), *broken],
        ['signalled.py', 'SIGTERM', str(stop), '0', *broken],
        ['train', *broken],
    ]
    whole, killed, stopped, resumed = run_commands(lines, tmp_path, at_a_time=1, **runs.environment)
    assert (whole.status, killed.status, killed.stderr) == (0, -9, ''), f'kill at {kill}'
    assert 'resuming' not in killed.stdout
    assert stopped.status == 128 + 15
    assert stopped.stderr == 'SIGTERM: stopping after this step, then saving\n'
    stops = r'SIGTERM: stopped and saved at step (\d+) of 60; the same'
    (last,) = re.findall(stops, stopped.stdout)
    assert stop <= int(last) < NUM_STEPS
    assert FIRST_CHECKPOINT <= resumed_step(stopped) < NUM_STEPS
    assert (resumed.status, resumed_step(resumed)) == (0, int(last))
    expected = runs.result('unbroken')
    runs.check_rows(expected[2])
    assert runs.result('broken') == expected, f'kill at {kill}, stop at {stop}'


def resumed_step(finished):
    (step,) = re.findall(r'resuming after step (\d+)', finished.stdout)
    return int(step)
