"""A run on several processes is stopped, resumed by fewer and by more, killed and restarted."""

import json
import os
import pathlib
import signal

import pytest

from launch import config_file
from moddepth_jax.hparams import from_config
from moddepth_jax.training.loop import train
from moddepth_jax.training.metrics import read_windows
from tests.faults.runs import Runs, last_step
from tests.launch.commands import is_running, wait_for
from tests.training.conftest import signals  # noqa: F401  a fixture here, too

NUM_STEPS = 110
BATCH = 8
CHANGES = {
    'data__log_windows': True,
    'data__batch_size': BATCH,
    'model__routing__router': 'none',
    'training__num_steps': NUM_STEPS,
    'training__compilation_cache': False,
    'evaluation__every': 70,
    'report__sample_tokens': 1,
}
pytestmark = pytest.mark.slow


class SpreadRuns(Runs):
    """Starts of one config by launch.local, on some processes with some fake devices each."""

    def __init__(self, folder):
        super().__init__(folder, devices=0, **CHANGES)

    def spread(self, processes, devices, mesh='', restarts=0, slowly=False):
        """The arguments of `start` for so many processes."""
        flags = [f'--processes={processes}', f'--devices={devices}', f'--restarts={restarts}']
        command = ['train_slowly'] if slowly else []
        return {'module': ['launch.local', *flags, '--', *command], 'flags': [f'--mesh={mesh}']}

    def stop(self, name, step, processes, devices, mesh=''):
        """Start it, and stop it by SIGTERM once it has logged `step`."""

        def act(process, out):
            self.wait_for(name, step, process)
            process.terminate()

        how = self.spread(processes, devices, mesh, slowly=True)
        status, out, err = self.start(name, act, **how)
        assert status == 143, out + err
        assert f'of {NUM_STEPS}; the same command resumes from there' in out
        assert not (self.folder / name / 'summary.json').exists()

    def run_here(self, name):
        """Run it in this process, without the report, to its end or to a signal in a step."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv('XDG_CACHE_HOME', str(self.folder / 'cache'))
            return train(from_config(config_file.load(str(self.config))), self.folder / name)

    def wait_for(self, name, step, process):
        folder = self.folder / name
        wait_for(lambda: process.poll() is not None or last_step(folder) >= step, seconds=300)

    def check_like_unbroken(self, same_bits=False):
        """Sample of `broken` are those of the unbroken run, its losses up to rounding.

        Each step read its windows once and has one row.
        """
        seen = read_windows(self.folder / 'broken')
        assert list(seen) == list(range(1, NUM_STEPS + 1))
        assert all(len(set(windows)) == BATCH == len(windows) for windows in seen.values())
        assert seen == read_windows(self.folder / 'unbroken')
        self.check_rows(self.result('broken')[2])
        broken, unbroken = (
            json.loads((self.folder / name / 'summary.json').read_text())
            for name in ('broken', 'unbroken')
        )
        assert not same_bits or broken['state_sha256'] == unbroken['state_sha256']
        assert broken['train_loss'] == pytest.approx(unbroken['train_loss'], rel=1e-5)
        assert broken['eval']['loss'] == pytest.approx(unbroken['eval']['loss'], rel=1e-5)


def test_a_run_resumes_with_other_numbers_of_processes(tmp_path, signals):  # noqa: F811
    """Two processes, one, two: every sample once, and the losses of an unbroken run.

    The first two meshes split parameters and heads, the last two only rows.
    """
    runs = SpreadRuns(tmp_path)
    assert runs.run_here('unbroken').signal is None
    runs.stop('broken', 15, 2, 2, 'fsdp=2,tensor=2')
    signals[90] = 'SIGTERM'
    assert runs.run_here('broken').signal == 'SIGTERM'
    assert 'processes was 1, is 2' in runs.finish('broken', **runs.spread(2, 2))
    runs.check_like_unbroken()


@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_stops_the_other_and_both_restart(tmp_path, victim):
    """kill -9 is reported within 40 s, all restart, and the final bits are unchanged."""
    runs = SpreadRuns(tmp_path)
    runs.finish('unbroken', **runs.spread(2, 4))

    def act(process, out):
        runs.wait_for('broken', 45, process)
        children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
        first = sorted(map(int, children.read_text().split()))
        os.kill(first[victim], signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, first)), seconds=40)
        act.done = True

    status, _, err = runs.start('broken', act, **runs.spread(2, 4, restarts=1, slowly=True))
    assert status == 0 and act.done, err
    line = f'process {victim} ended by SIGKILL; stopping the others, then restarting all'
    assert line in err
    runs.check_like_unbroken(same_bits=True)
