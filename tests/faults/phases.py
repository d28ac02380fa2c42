"""Moments in a start of launch.train: drawn at random before, named afterwards."""

import json
import subprocess
import time

POLL = 0.002  # seconds
SPANS = {'step': 0.02, 'save': 0.1, 'evaluation': 0.15, 'end': 3.0}  # seconds, about


def phases_at_death(runs, name, out, began):
    """What a start was doing, by what it printed and its files since it `began`.

    A list, since saves run in the background: of 'start', 'compile', 'step', 'evaluation',
    'summary', 'report', 'end', and 'save' where there is a checkpoint directory without its
    manifest. An evaluation begins after the row of its step, and ends by its own.
    """
    workdir = runs.folder / name
    if 'plan ' not in out:
        return ['start']
    saves = ['save'] * bool(_saves(workdir, began))
    last = last_row(workdir)
    if 'Next:' in out:
        return ['end']
    if 'evaluating on held-out' in out:
        if 'eval/loss' not in last:
            return ['evaluation']
        return ['report' if _written(workdir / 'summary.json') >= began else 'summary']
    if _evaluates(last, runs):
        return ['evaluation', *saves]
    return saves or ['step' if 'compiled' in out else 'compile']


def last_row(workdir):
    """The last whole line of metrics.jsonl, read from its end; {} where there is none."""
    try:
        with open(workdir / 'metrics.jsonl', 'rb') as file:
            file.seek(max(0, file.seek(0, 2) - 20_000))
            return json.loads(file.read().split(b'\n')[-2])
    except (FileNotFoundError, IndexError):
        return {}


def _written(path):
    """When, in seconds of `time.time()`; 0 where it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0


def _saves(workdir, began):
    """Names of checkpoints without a manifest that were touched since `began`."""
    return {
        path.name
        for path in workdir.glob('checkpoints/*')
        if not (path / 'manifest.json').exists() and _written(path) >= began
    }


def _evaluates(last, runs):
    step = last.get('step', 0)
    due = 0 < step < runs.num_steps and step % runs.evaluation_every == 0
    return due and 'eval/loss' not in last


class Moment:
    """A random moment: 'any', uniform over the life of a start, or one soon after a kind of SPANS.

    These are a row of metrics, a new checkpoint, the step of an evaluation, the last evaluation.
    """

    def __init__(self, kind, draw):
        self.kind = kind
        self._share, self._wait = draw.random(), draw.random()
        self._count = draw.randint(1, 5)  # of saves

    def __str__(self):
        return f'{self.kind}({self._share:.3f}, {self._wait:.3f}, {self._count})'

    def wait(self, process, out, runs, name, began):
        """Returns when it has come, or the process has ended. `out` is the file of its stdout."""
        if self.kind == 'any':
            try:
                process.wait(self._share * runs.life)
            except subprocess.TimeoutExpired:
                return
        workdir, saves, first = runs.folder / name, set(), None
        while process.poll() is None:
            time.sleep(POLL)
            text = out.read_text()
            if 'plan ' not in text:
                continue
            if first is None:  # rows after the checkpoint from which it resumes have been dropped
                first = last_row(workdir).get('step', 0)
            last = last_row(workdir)
            step, target = last.get('step', 0), first + self._share * (runs.num_steps - first)
            saves |= _saves(workdir, began)
            if {
                'step': first < runs.num_steps and step >= target,
                'save': len(saves) >= self._count,
                'evaluation': _evaluates(last, runs) and step >= target,
                'end': 'evaluating on held-out' in text,
            }[self.kind]:
                time.sleep(self._wait * SPANS[self.kind])
                return
