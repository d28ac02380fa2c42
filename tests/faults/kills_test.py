"""Killed or stopped at random moments, a run resumes and ends bit-equal to an unbroken one."""

import contextlib
import os
import re
import subprocess
import time

import pytest

from moddepth_jax.training.manifest import read_manifest
from tests.faults.runs import Runs, last_row

KILLS = ('any', 'any', 'any', 'step', 'step', 'save', 'save', 'save', 'evaluation', 'end')
SPANS = {'step': 0.02, 'save': 0.1, 'evaluation': 0.15, 'end': 3.0}  # seconds, about
STOPS = 5
LIMIT = 10  # seconds from SIGTERM to the end, if each process has a core
pytestmark = pytest.mark.faults


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Run that save and evaluate often, and the result of an unbroken one."""
    runs = Runs(
        tmp_path_factory.mktemp('kills'),
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


def wait_for_moment(kind, draw, process, out, runs, workdir):
    """Wait for a random moment of a start: 'any' of its life, or one soon after a kind of SPANS.

    These are a row of metrics, a new checkpoint, the step of an evaluation, the last evaluation.
    """
    share, count = draw.random(), draw.randint(1, 5)
    if kind == 'any':
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(share * runs.life)
        return
    begun, saves, first = time.time(), set(), None
    while process.poll() is None:
        time.sleep(0.002)
        text = out.read_text()
        if 'plan ' not in text:
            continue
        row = last_row(workdir)
        step = row.get('step', 0)
        if first is None:  # rows after the checkpoint from which it resumes have been dropped
            first = step
        late = step >= first + share * (runs.num_steps - first)
        due = 0 < step < runs.num_steps and step % runs.evaluation_every == 0
        for path in workdir.glob('checkpoints/*'):
            with contextlib.suppress(FileNotFoundError):  # renamed once it is finished
                if not (path / 'manifest.json').exists() and path.stat().st_mtime >= begun:
                    saves.add(path.name)
        if {
            'step': first < runs.num_steps and late,
            'save': len(saves) >= count,
            'evaluation': due and late and 'eval/loss' not in row,
            'end': 'evaluating on held-out' in text,
        }[kind]:
            time.sleep(draw.random() * SPANS[kind])
            return


class Life:
    """One run in many starts, which `history` describes for failures."""

    def __init__(self, runs, name):
        self.runs, self.name = runs, name
        self.workdir, self.history = runs.folder / name, []

    def start(self, kind, draw, send):
        """Return (status, seconds from the signal to the end, stdout)."""
        saved, sent = self.newest(), []

        def act(process, out):
            wait_for_moment(kind, draw, process, out, self.runs, self.workdir)
            if process.poll() is None:
                sent.append(time.monotonic())
                send(process)

        status, out, err = self.runs.start(self.name, act)
        seconds = time.monotonic() - sent[0] if sent else 0.0
        self.history.append(f'{kind} from {saved}: {status} after {last_row(self.workdir)}')
        self._check(out, err, saved)
        return status, seconds, out

    def newest(self):
        """Return the step of the newest finished checkpoint, or 0; checks that all are intact."""
        steps = [int(path.parent.name) for path in self.workdir.glob('checkpoints/*/manifest.json')]
        for step in steps:
            read_manifest(self.workdir / 'checkpoints' / str(step))
        return max(steps, default=0)

    def _check(self, out, err, saved):
        """Check that it resumed from the newest checkpoint and skipped only unfinished ones."""
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


def signalled(runs, draw, tally, name, kinds, send):
    """Send a signal in each kind of moment: (life, status, seconds, stdout) of each start.

    A run that ends before its signal is compared, and another one is started; so is the last one.
    """
    life, number = Life(runs, f'{name}_0'), 0
    for kind in kinds:
        status, seconds, out = life.start(kind, draw, send)
        if status:
            yield life, status, seconds, out
            continue
        life.check_end()
        number += 1
        life = Life(runs, f'{name}_{number}')
    runs.finish(life.name)
    life.check_end()
    tally('runs that ended', 'bit-equal', number + 1)


@pytest.mark.parametrize('part', range(10))
def test_killed_at_random_moments_it_ends_bit_equal(runs, draw, tally, part):
    """Up to ten SIGKILLs, among them in steps, saves and evaluations."""
    kinds, kill = draw.sample(KILLS, len(KILLS)), subprocess.Popen.kill
    for life, status, *_ in signalled(runs, draw, tally, f'killed_{part}', kinds, kill):
        assert status == -9, life.history
        tally('kills', life.history[-1].split()[0])


@pytest.mark.parametrize('part', range(4))
def test_stopped_at_random_moments_it_saves_in_time(runs, draw, tally, part):
    """SIGTERMs that each save at once and end with status 143; the run ends bit-equal.

    Before a start has its state, or after the last step, there is nothing to save, and a SIGTERM
    ends the process at once.
    """
    kinds = draw.choices(('any', 'step', 'save', 'evaluation'), k=STOPS)
    stop = subprocess.Popen.terminate
    for life, status, seconds, out in signalled(runs, draw, tally, f'stopped_{part}', kinds, stop):
        saved = re.findall(r'SIGTERM: stopped and saved at step (\d+) of 200', out)
        assert status == (128 + 15 if saved else -15), life.history
        if saved:
            assert life.newest() == int(saved[0]), life.history
        else:
            assert 'plan ' not in out or 'evaluating on held-out' in out, (life.history, out)
        tally('SIGTERM to end, seconds', 'saved' if saved else 'nothing to save', seconds)
        busy = max(1, os.getloadavg()[0] / os.cpu_count())
        assert seconds < LIMIT * busy, (seconds, busy, life.history)
