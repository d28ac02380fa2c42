"""Killed or stopped at random moments, a run resumes and ends bit-equal to an unbroken one."""

import os
import re
import subprocess
import time

import pytest

from moddepth_jax.training.manifest import read_manifest
from tests.faults.phases import Moment, phases_at_death
from tests.faults.runs import Runs

KILLS = ('any', 'any', 'any', 'step', 'step', 'save', 'save', 'save', 'evaluation', 'end')
WANTED = {'step': 2, 'save': 2, 'evaluation': 1}  # minimum kills of each test
MOST_KILLS = 30  # maximum kills of each test
STOPS = 5
LIMIT = 10  # seconds from SIGTERM to the end, where a core has one process
pytestmark = pytest.mark.faults


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Runs that save and evaluate often, and the result of an unbroken one."""
    runs = Runs(
        tmp_path_factory.mktemp('kills'),
        devices=1,
        hasty=True,
        model__routing__router='none',
        data__held_out_fraction=0.2,
        training__num_steps=200,
        training__checkpoint_every=15,
        evaluation__every=35,
        evaluation__num_batches=24,
        evaluation__final_batches=48,
    )
    begin = time.monotonic()
    runs.finish('unbroken')
    runs.life = 0.6 * (time.monotonic() - begin)  # of a start that finds its programs compiled
    runs.expected = runs.result('unbroken')
    runs.check_rows(runs.expected[2])
    return runs


class Life:
    """One run in many starts. `history` describes them, for a failure to show."""

    def __init__(self, runs, name):
        self.runs, self.name = runs, name
        self.workdir, self.history = runs.folder / name, []

    def start(self, moment, send):
        """Returns (status, phases at its end, seconds from the signal to the end, stdout)."""
        saved, begun = self._newest(), time.time()
        sent = []

        def act(process, out):
            moment.wait(process, out, self.runs, self.name, begun)
            if process.poll() is None:
                sent.append(time.monotonic())
                send(process)

        status, out, err = self.runs.start(self.name, act)
        seconds = time.monotonic() - sent[0] if sent else 0.0
        phases = phases_at_death(self.runs, self.name, out, begun)
        self.history.append(f'{moment} from {saved}: {status} in {" and ".join(phases)}')
        self._check(out, err, saved)
        return status, phases, seconds, out

    def _newest(self):
        """The step of the newest finished checkpoint, or 0; each finished one is intact."""
        steps = [int(path.parent.name) for path in self.workdir.glob('checkpoints/*/manifest.json')]
        for step in steps:
            read_manifest(self.workdir / 'checkpoints' / str(step))
        return max(steps, default=0)

    def _check(self, out, err, saved):
        """It resumed from the newest finished checkpoint, and skipped only unfinished ones."""
        assert err in ('', 'SIGTERM: stopping after this step, then saving\n'), (self.history, err)
        if 'plan ' in out:
            resumed = re.findall(r'resuming after step (\d+)', out)
            assert resumed == [str(saved)] * bool(saved), (self.history, out)
        skipped = re.findall('checkpoint .* skipped: (.*)', out)
        assert set(skipped) <= {'unfinished, it has no manifest.json'}, (self.history, out)

    def check_end(self):
        runs = self.runs
        runs.check_rows(runs.result(self.name)[2])
        assert runs.result(self.name) == runs.expected, self.history
        sample = (self.workdir / 'sample.txt').read_bytes()
        assert sample == (runs.folder / 'unbroken' / 'sample.txt').read_bytes(), self.history


@pytest.mark.parametrize('part', range(10))
def test_killed_at_random_moments_it_ends_bit_equal(runs, draw, tally, part):
    """Ten SIGKILLs or more, among them in steps, saves and evaluations.

    A run that ends before its kill is compared, and another one is started.
    """
    missing, kills, number = dict(WANTED), 0, 0
    life = Life(runs, f'killed_{part}_{number}')
    kinds = draw.sample(KILLS, len(KILLS))
    while kinds:
        status, phases, _, _ = life.start(Moment(kinds.pop(), draw), subprocess.Popen.kill)
        if status == -9:
            kills += 1
            for phase in phases:
                missing[phase] = missing.get(phase, 0) - 1
            tally('kills', ' and '.join(phases))
        else:
            assert status == 0, life.history
            life.check_end()
            tally('runs killed and ended', 'bit-equal')
            number += 1
            life = Life(runs, f'killed_{part}_{number}')
        if not kinds and kills < MOST_KILLS:
            kinds = [kind for kind in WANTED if missing[kind] > 0]
            kinds = kinds or ['any'] * (kills < len(KILLS))
    assert all(count <= 0 for count in missing.values()), (missing, life.history)
    if life.history:
        runs.finish(life.name)
        life.check_end()
        tally('runs killed and ended', 'bit-equal')


@pytest.mark.parametrize('part', range(4))
def test_stopped_at_random_moments_it_saves_in_time(runs, draw, tally, part):
    """Five SIGTERMs that each save at once and end with status 143; the run ends bit-equal.

    Before a start has its state, or after the last step, there is nothing to save, and a SIGTERM
    ends the process at once.
    """
    stops, number = 0, 0
    life = Life(runs, f'stopped_{part}_{number}')
    while stops < STOPS:
        kind = draw.choice(('any', 'step', 'save', 'evaluation'))
        status, phases, seconds, out = life.start(Moment(kind, draw), subprocess.Popen.terminate)
        if status == 128 + 15:
            stops += 1
            (step,) = re.findall(r'SIGTERM: stopped and saved at step (\d+) of 200', out)
            assert life._newest() == int(step), life.history
            tally('SIGTERM to end, seconds', 'saved', seconds)
        elif status == -15:
            nothing = {'start', 'evaluation', 'summary', 'report', 'end'}
            assert nothing >= set(phases), life.history
            tally('SIGTERM to end, seconds', f'nothing to save in {phases[0]}', seconds)
        else:
            assert status == 0, life.history
            life.check_end()
            number += 1
            life = Life(runs, f'stopped_{part}_{number}')
        busy = max(1, os.getloadavg()[0] / os.cpu_count())
        assert seconds < LIMIT * busy, (seconds, busy, life.history)
    runs.finish(life.name)
    life.check_end()
