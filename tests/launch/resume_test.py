"""A run that was killed or stopped and started again ends bit-equal to one that was left alone."""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

import pytest

from moddepth_jax.training.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 300
FIRST_CHECKPOINT = 20
TIMES = {'tokens_per_second', 'flops_per_second', 'data_wait_fraction'}
SHA256 = re.compile('[0-9a-f]{64}')

CONFIG = """
from configs import base


def get_config():
    config = base.get_config()
    model, training = config.model, config.training
    model.num_layers, model.d_model, model.d_ff = 1, 32, 64
    model.num_heads, model.num_kv_heads, model.head_dim = 4, 2, 8
    model.routing.router, model.routing.layers = 'learned', '0'
    config.data.source = {source!r}
    config.data.sequence_length, config.data.batch_size = 32, 4
    training.num_steps, training.checkpoint_every, training.log_every = 300, 20, 1
    config.evaluation.every, config.evaluation.num_batches = 50, 1
    config.evaluation.final_batches = 2
    config.report.sample_tokens, config.report.heatmap_tokens = 4, 8
    return config
"""


class Runs:
    """Starts of launch.train on a number of fake devices, whose CPU threads are pinned."""

    def __init__(self, folder, devices, hasty):
        words, draw = ['to ', 'be, ', 'or ', 'not\n'], random.Random(0)
        for i in range(8):
            text = ''.join(draw.choice(words) for _ in range(2000))
            (folder / f'{i}.txt').write_text(text)
        self.config = folder / 'config.py'
        self.config.write_text(CONFIG.format(source=str(folder / '*.txt')))
        self.folder = folder
        self.environment = os.environ | {
            'PYTHONPATH': str(ROOT),
            'XDG_CACHE_HOME': str(folder / 'cache'),
            'JAX_ENABLE_COMPILATION_CACHE': 'true',
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true' if hasty else 'false',
            'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
            'NPROC': str(2 * devices),
        }

    def start(self, name, act=lambda process, out: None):
        """Trains in the workdir `name`, from where its last start ended; (status, stdout, stderr).

        `act(process, out)` is called meanwhile, `out` being the file that has its stdout.
        """
        arguments = [f'--config={self.config}', f'--workdir={self.folder / name}']
        command = [sys.executable, '-m', 'launch.train', *arguments]
        out, err = self.folder / 'out', self.folder / 'err'
        with open(out, 'w') as stdout, open(err, 'w') as stderr:
            files = {'stdout': stdout, 'stderr': stderr}
            with subprocess.Popen(
                command, env=self.environment, cwd=self.folder, **files
            ) as process:
                act(process, out)
                process.wait(timeout=300)
        return process.returncode, out.read_text(), err.read_text()

    def finish(self, name):
        """Runs it to its end; what it printed."""
        status, out, err = self.start(name)
        assert status == 0, err
        assert 'Next:' in out
        return out

    def interrupt(self, name, step, send):
        """Starts it; `send(process)` once it has logged `step` and a checkpoint is whole."""
        workdir = self.folder / name

        def act(process, out):
            while process.poll() is None and 'compiled' not in out.read_text():
                time.sleep(0.01)
            saved = False
            while process.poll() is None and not (saved and last_step(workdir) >= step):
                saved = saved or any(workdir.glob('checkpoints/*/manifest.json'))
                time.sleep(0.002)
            send(process)

        status, out, err = self.start(name, act)
        assert not (workdir / 'summary.json').exists(), (status, out, err)
        return status, out, err

    def result(self, name):
        """(digest of the final state, held-out loss, rows of metrics without times)."""
        summary = json.loads((self.folder / name / 'summary.json').read_text())
        assert summary['final_step'] == NUM_STEPS
        assert SHA256.fullmatch(summary['state_sha256'])
        rows = [
            {field: value for field, value in row.items() if field not in TIMES}
            for row in read_metrics(self.folder / name)
        ]
        return summary['state_sha256'], summary['eval'], rows


def last_step(workdir):
    try:
        rows = read_metrics(workdir)
    except ValueError:
        return 0
    return rows[-1]['step'] if rows else 0


def sigkill_soon(draw):
    """Kills a process after a wait of up to 30 ms."""

    def send(process):
        time.sleep(draw.uniform(0, 0.03))
        process.kill()

    return send


def sigterm(process):
    process.terminate()


def resumed_step(out):
    """The step that a start went on from, as it says."""
    (step,) = re.findall(r'resuming after step (\d+)', out)
    return int(step)


def check_rows(rows):
    """One row for each step, and one for each evaluation, in order."""
    assert [row['step'] for row in rows if 'loss' in row] == list(range(1, NUM_STEPS + 1))
    evaluated = [row['step'] for row in rows if 'eval/loss' in row]
    assert evaluated == list(range(50, NUM_STEPS + 1, 50))


@pytest.fixture(scope='module')
def draw():
    """Random numbers of a seed that a failure shows."""
    seed = random.SystemRandom().randrange(10**6)
    print(f'kills drawn from seed {seed}')
    return random.Random(seed)


@pytest.fixture(scope='module')
def on_one_device(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp('one'), 1, hasty=True)


@pytest.fixture(scope='module')
def on_four_devices(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp('four'), 4, hasty=True)


def test_killed_then_terminated_it_ends_bit_equal(on_one_device, draw):
    """SIGKILL at a random moment, then SIGTERM at another: the final state has the same bits.

    No row of metrics is lost or doubled. Terminated, the command says on stderr that it stops, on
    stdout how to go on, and has a status that tells a script that its work is not done.
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
    check_rows(expected[2])
    assert runs.result('broken') == expected, f'kill at {kill}, stop at {stop}'


@pytest.mark.slow
def test_killed_on_four_devices_it_ends_bit_equal(on_four_devices, draw):
    """SIGKILL at a random moment on four fake devices: state, evaluation and rows are the same."""
    runs = on_four_devices
    runs.finish('unbroken')
    kill = draw.randrange(FIRST_CHECKPOINT, 240)
    status, _, err = runs.interrupt('broken', kill, sigkill_soon(draw))
    assert (status, err) == (-9, ''), f'kill at {kill}'
    assert FIRST_CHECKPOINT <= resumed_step(runs.finish('broken')) < NUM_STEPS
    expected = runs.result('unbroken')
    check_rows(expected[2])
    assert runs.result('broken') == expected, f'kill at {kill}'


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
    check_rows(expected[2])
    assert runs.result('broken') == expected
