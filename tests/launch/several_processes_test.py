"""A run on several processes: stopped, resumed by fewer and by more, killed and started again."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from launch import config_file
from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.training.loop import train
from moddepth_jax.training.metrics import read_metrics, read_windows

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 110
BATCH = 8

CONFIG = """
from configs import base


def get_config():
    config = base.get_config()
    model, training = config.model, config.training
    model.num_layers, model.d_model, model.d_ff = {layers}, 32, 64
    model.num_heads, model.num_kv_heads, model.head_dim = 4, 2, 8
    model.routing.router = {router!r}
    config.data.source, config.data.log_windows = {source!r}, True
    config.data.sequence_length, config.data.batch_size = 32, 8
    training.num_steps, training.checkpoint_every, training.log_every = 110, 20, 1
    training.compilation_cache = False
    config.evaluation.every, config.evaluation.num_batches = 70, 1
    config.evaluation.final_batches = 2
    config.report.sample_tokens, config.report.heatmap_tokens = 1, 8
    return config
"""

# launch.train whose steps take a while: JAX looks for a SIGTERM once a second.
SLOWLY = """
import time

from launch import command, train
from moddepth_jax.data.pipeline import Dataset

train_batch = Dataset.train_batch


def train_batch_slowly(*given):
    time.sleep(0.04)
    return train_batch(*given)


Dataset.train_batch = train_batch_slowly
command.run(train.main)
"""


class Runs:
    """Starts of one config in a folder, on some processes with some fake devices each."""

    def __init__(self, folder, router='none', layers=1):
        words, draw = ['to ', 'be, ', 'or ', 'not\n'], random.Random(0)
        for i in range(8):
            text = ''.join(draw.choice(words) for _ in range(4000))
            (folder / f'{i}.txt').write_text(text)
        self.folder, self.config = folder, folder / 'config.py'
        source = str(folder / '*.txt')
        self.config.write_text(CONFIG.format(source=source, router=router, layers=layers))
        (folder / 'train_slowly.py').write_text(SLOWLY)
        self.environment = os.environ | {
            'PYTHONPATH': f'{ROOT}{os.pathsep}{folder}',
            'XDG_CACHE_HOME': str(folder / 'cache'),
            'MPLCONFIGDIR': str(folder / 'fonts'),
            'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
        }

    def start(self, name, processes, devices, act=None, flags=(), slowly=False, mesh=''):
        """(status, stdout, stderr) of a start in the workdir `name`; `act(process)` meanwhile."""
        arguments = ['train_slowly'] if slowly else []
        arguments += [f'--config={self.config}', f'--workdir={self.folder / name}']
        arguments += [f'--mesh={mesh}']
        given = [f'--processes={processes}', f'--devices={devices}', *flags, '--', *arguments]
        out, err = self.folder / 'out', self.folder / 'err'
        with open(out, 'w') as stdout, open(err, 'w') as stderr:
            files = {'stdout': stdout, 'stderr': stderr}
            command = [sys.executable, '-m', 'launch.local', *given]
            with subprocess.Popen(command, env=self.environment, cwd=ROOT, **files) as process:
                if act is not None:
                    act(process)
                process.wait(timeout=300)
        return process.returncode, out.read_text(), err.read_text()

    def stop(self, name, step, processes, devices, mesh=''):
        """Starts it, and stops it by SIGTERM once it has logged `step`."""

        def act(process):
            self.wait_for(name, step, process)
            process.terminate()

        status, out, err = self.start(name, processes, devices, act, slowly=True, mesh=mesh)
        assert status == 143, out + err
        assert f'of {NUM_STEPS}; the same command goes on from there' in out
        assert not (self.folder / name / 'summary.json').exists()

    def run_here(self, name, stop_at=None):
        """Runs it in this process, without the report, to its end or to a SIGTERM in a step."""
        train_batch = Dataset.train_batch

        def train_batch_and_stop(dataset, step, *rows):
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_batch(dataset, step, *rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Dataset, 'train_batch', train_batch_and_stop)
            patch.setenv('XDG_CACHE_HOME', str(self.folder / 'cache'))
            run = train(from_config(config_file.load(str(self.config))), self.folder / name)
        assert (run.summary is None) == (stop_at is not None)

    def finish(self, name, processes, devices, mesh=''):
        """Starts it, to its end."""
        status, out, err = self.start(name, processes, devices, mesh=mesh)
        assert status == 0, out + err
        assert 'Next:' in out and 'error' not in err
        return out

    def wait_for(self, name, step, process):
        while process.poll() is None and last_step(self.folder / name) < step:
            time.sleep(0.02)

    def summary(self, name):
        return json.loads((self.folder / name / 'summary.json').read_text())

    def check_windows(self, name, reference):
        """Each step saw its windows once, those that it saw in the run `reference`."""
        seen = read_windows(self.folder / name)
        assert list(seen) == list(range(1, NUM_STEPS + 1))
        assert all(len(set(windows)) == BATCH == len(windows) for windows in seen.values())
        assert seen == read_windows(self.folder / reference)

    def check_rows(self, name):
        """One row of metrics for each step, in order."""
        rows = read_metrics(self.folder / name)
        assert [row['step'] for row in rows if 'loss' in row] == list(range(1, NUM_STEPS + 1))
        assert [row['step'] for row in rows if 'eval/loss' in row] == [70, NUM_STEPS]


def last_step(workdir):
    try:
        rows = read_metrics(workdir)
    except ValueError:
        return 0
    return rows[-1]['step'] if rows else 0


def check_like_unbroken(runs):
    """Of a run in pieces: rows, samples and losses are those of one that was left alone."""
    runs.check_windows('broken', 'unbroken')
    runs.check_rows('broken')
    broken, unbroken = runs.summary('broken'), runs.summary('unbroken')
    assert broken['train_loss'] == pytest.approx(unbroken['train_loss'], rel=1e-5)
    assert broken['eval']['loss'] == pytest.approx(unbroken['eval']['loss'], rel=1e-5)


@pytest.mark.usefixtures('compiled_in_haste')
def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path):
    """Two processes, one, two: every sample once, and the losses of a run that was left alone.

    The first two split parameters and heads, the last two rows alone.
    """
    runs = Runs(tmp_path)
    runs.run_here('unbroken')
    runs.stop('broken', 15, 2, 2, 'fsdp=2,tensor=2')
    runs.run_here('broken', stop_at=90)
    assert 'processes was 1, is 2' in runs.finish('broken', 2, 2)
    check_like_unbroken(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('router', 'meshes'),
    [('position', ('', '', '')), ('none', ('data=2,fsdp=2,tensor=2', 'fsdp=2', 'fsdp=4,tensor=2'))],
    ids=['position', 'dense, all axes'],
)
def test_eight_devices_go_on_with_other_numbers_of_processes(tmp_path, router, meshes):
    """The same with four devices a process: blocks that positions enter, and on other meshes."""
    runs = Runs(tmp_path, router, layers=2)
    runs.finish('unbroken', 1, 1)
    runs.stop('broken', 15, 2, 4, meshes[0])
    runs.stop('broken', 60, 1, 2, meshes[1])
    assert 'processes was 1, is 2' in runs.finish('broken', 2, 4, meshes[2])
    check_like_unbroken(runs)


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_stops_the_other_and_both_start_again(tmp_path, victim):
    """kill -9 of either: told within 40 s, started again, and the bits of an unbroken run."""
    runs = Runs(tmp_path, layers=2)
    runs.finish('unbroken', 2, 4)
    seconds = []

    def act(process):
        runs.wait_for('broken', 45, process)
        children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
        first = sorted(map(int, children.read_text().split()))
        os.kill(first[victim], signal.SIGKILL)
        begin = time.monotonic()
        while any(pathlib.Path(f'/proc/{pid}').exists() for pid in first):
            assert time.monotonic() < begin + 40
            time.sleep(0.05)
        seconds.append(time.monotonic() - begin)

    status, _, err = runs.start('broken', 2, 4, act, ['--restarts=1'], slowly=True)
    assert status == 0 and seconds, err
    told = f'process {victim} ended by SIGKILL; stopping the others, then starting all again'
    assert told in err
    assert runs.summary('broken')['state_sha256'] == runs.summary('unbroken')['state_sha256']
    runs.check_windows('broken', 'unbroken')
    runs.check_rows('broken')
