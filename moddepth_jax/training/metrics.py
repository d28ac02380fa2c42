"""Metrics of a run, in metrics.jsonl, TensorBoard and Weights & Biases; and the log of windows."""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import sys
import time

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from moddepth_jax.data.compression import read_small
from moddepth_jax.data.directory import parse_object, write_atomically
from moddepth_jax.training import multihost

METRICS_FILE = 'metrics.jsonl'
WINDOWS = 'windows-*.jsonl'  # logs of WindowLog, one of each process
OLDER_EVENTS = 'tensorboard'  # folder of a run in which older versions wrote events
_MAX_BYTES = 1 << 31  # of metrics.jsonl
FLUSH_SECONDS = 30.0  # between flushes of TensorBoard events
WANDB_ID_FILE = 'wandb-id'


def replace_nonfinite(value):
    """Replace numbers that are not finite by None in nested dicts and lists, for JSON."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float('inf'):
        return None
    return value


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends rows to `metrics.jsonl` and passes each row to sinks such as TensorBoardWriter.

    A row is {'step': step, name: value, ...}, flushed as it is written. Names are nested by '/'. An
    evaluation is a separate row whose names begin with `eval/`. When it opens the file, the writer
    drops a truncated last line and the rows after `first_step`, which a run that was killed after
    its last checkpoint left behind.

    Args:
      workdir: directory of the run.
      first_step: step from which the run continues.
      sinks: objects with a `name`, `add(step, values)` and `close()`. A sink that raises is dropped
        with one line on stderr.
      saved: result of `digest` when the checkpoint of `first_step` was saved, or None.

    Attributes:
      problem: a line for the user if the first rows differ from `saved`, otherwise ''.
    """

    def __init__(self, workdir, first_step: int, sinks=(), saved: dict | None = None):
        self._path, self._sinks, self.problem = pathlib.Path(workdir, METRICS_FILE), list(sinks), ''
        found = _parse_all(self._path)
        rows = [row for row in found if row and row['step'] <= first_step]
        self._rewrite(rows)
        count = saved['rows'] if saved else len(rows)
        same = not saved or _sha256(rows[:count]).hexdigest() == saved['sha256']
        if not same or None in found[:-1]:
            what = f'has {len(rows)} of {count} rows up to step {first_step}: rows lost'
            if len(rows) >= count:
                what = f'the rows up to step {first_step} were changed'
            self.problem = f'{self._path}: {what}; the model does not depend on them'

    def digest(self) -> dict:
        """Return the number of `rows` so far and the `sha256` of their text."""
        return {'rows': self._count, 'sha256': self._sha256.hexdigest()}

    def write(self, step: int, values: dict) -> None:
        """Append a row of Python numbers and lists of them; null replaces what is not finite.

        A list whose name ends in `_histogram` has the fractions in equal bins of [0, 1]. The row
        replaces an earlier one of the same step and names, which is there if a finished run is
        evaluated again.
        """
        values = replace_nonfinite(values)
        row = {'step': step} | values
        if _key(row) in self._kept:
            self._file.close()
            rows = read_metrics(self._path.parent)
            self._rewrite([old for old in rows if _key(old) != _key(row)])
        if not self._is_as_written():
            self._file.close()
            before, rows = self._count, list(filter(None, _parse_all(self._path)))
            self._rewrite(rows)
            kept = f'{len(rows)} of {before} rows remain'
            print(f'{self._path}: was changed while the run wrote it: {kept}', file=sys.stderr)
        text = _text([row])
        _append(self._file, text)
        self._count += 1
        self._sha256.update(text.encode())
        for sink in list(self._sinks):
            self._call(sink, sink.add, step, values)

    def _is_as_written(self):
        try:
            found = self._path.stat()
        except OSError:
            return False
        same = os.path.samestat(found, os.fstat(self._file.fileno()))
        return same and found.st_size == self._file.tell()

    def has(self, step: int, name: str) -> bool:
        """Return whether an earlier start of the run wrote a row of `step` with a value `name`."""
        return any(kept_step == step and name in names for kept_step, names in self._kept)

    def close(self) -> None:
        """Close the file and every sink."""
        self._file.close()
        for sink in list(self._sinks):
            self._call(sink, sink.close)

    def _call(self, sink, method, *arguments):
        try:
            method(*arguments)
        except Exception as error:  # W&B raises errors of private classes
            self._sinks.remove(sink)
            reason = getattr(error, 'strerror', None) or multihost.one_line(error)
            print(f'no more metrics for {sink.name}: {reason}', file=sys.stderr)

    def _rewrite(self, rows):
        write_atomically(self._path, _text(rows))
        self._kept, self._count, self._sha256 = set(map(_key, rows)), len(rows), _sha256(rows)
        self._file = open(self._path, 'a', encoding='utf-8')

    def __exit__(self, *_):
        self.close()


def keep_earlier(workdir: str | os.PathLike, summary: str, first_step: int = 0) -> str:
    """Renames the summary of an earlier start, before a run goes on after `first_step`.

    Before step 0 it also renames metrics with rows after step 0. `summary` is the name of the
    summary's file. A new name is used each time. Returns a phrase that says what is kept where, or
    ''.
    """
    path, kept = pathlib.Path(workdir, METRICS_FILE), []
    rows = [] if first_step else _parse_all(path)
    if count := sum(row['step'] > 0 for row in filter(None, rows)):
        kept.append(f'{count} rows of metrics in {_set_aside(path)}')
    if (path := path.with_name(summary)).is_file():
        kept.append(f'the summary in {_set_aside(path)}')
    return ' and '.join(kept)


def _set_aside(path):
    ends = itertools.chain([''], map('-{}'.format, itertools.count(2)))
    names = (f'{path.name}.before{end}' for end in ends)
    name = next(name for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(path.with_name(name))
    return name


def _key(row):
    return row['step'], frozenset(row)


def _text(rows):
    return ''.join(f'{json.dumps(row, allow_nan=False)}\n' for row in rows)


def _sha256(rows):
    return hashlib.sha256(_text(rows).encode())


def _lines(path):
    return read_small(path, _MAX_BYTES).decode(errors='replace').splitlines()


def _parse_all(path):
    return [_parse(line) for line in _lines(path)] if path.is_file() else []


def _parse(line):
    """Parse a row, a JSON object of a step and numbers or lists of them; None for other text."""
    try:
        row = replace_nonfinite(parse_object(line))
    except ValueError:
        return None
    values = (value if isinstance(value, list) else [value] for value in row.values())
    known = (value for value in itertools.chain(*values) if value is not None)
    numbers = all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in known)
    return row if numbers and type(row.get('step')) is int else None


def read_metrics(workdir: str | os.PathLike) -> list[dict]:
    """Read the rows of a run, oldest first, without a truncated last line.

    Raises ValueError, one line, if there is no metrics.jsonl, or if another line is not a row.
    """
    path = pathlib.Path(workdir) / METRICS_FILE
    if not path.is_file():
        right = 'must be the directory of a run that has begun'
        raise ValueError(f'{workdir}: holds no {METRICS_FILE}; {right}')
    lines = _lines(path)
    rows = [_parse(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        bad, right = rows.index(None), 'must be a JSON object with a step, numbers and lists'
        raise ValueError(f'{path}: line {bad + 1} is {lines[bad][:40]!r}; {right}')
    return rows


class TensorBoardWriter:
    """A sink that writes scalars and histograms to a new event file in the directory of a run.

    TensorBoard shows the run under the name of that directory, and metrics under their
    `tensorboard_name`. It hides events of an earlier start after `first_step`. This does not use
    tensorboardX's SummaryWriter, whose thread dies on a full disk, so that writing blocks forever.
    """

    name = 'TensorBoard'

    def __init__(self, workdir: str | os.PathLike, first_step: int):
        older = pathlib.Path(workdir, OLDER_EVENTS)
        self._folder = older if older.exists() else older.parent
        self._first_step, self._flush_at = first_step, 0.0
        self._writer = None

    def add(self, step: int, values: dict) -> None:
        """Write the numbers of a row, and its lists whose name ends in `_histogram`."""
        try:
            if self._writer is None:
                self._open()
            for name, value in values.items():
                shown = tensorboard_name(name)
                if isinstance(value, (int, float)):
                    self._write(step=step, summary=summary.scalar(shown, value))
                elif name.endswith('_histogram') and None not in value:
                    self._write(step=step, summary=_histogram(shown, value))
            if time.monotonic() > self._flush_at:
                self._flush_at = time.monotonic() + FLUSH_SECONDS
                self._writer.flush()
        except OSError:
            with contextlib.suppress(OSError):  # from events that are still in the buffer
                self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self):
        resumed = any(self._folder.glob('events.*'))
        self._writer = EventsWriter(str(self._folder / 'events'), f'.{time.time_ns()}')
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._write(step=self._first_step + 1, session_log=start)

    def _write(self, **fields):
        self._writer.write_event(Event(wall_time=time.time(), **fields))


def tensorboard_name(name: str) -> str:
    """Return the name of a metric in TensorBoard, which sorts by name and groups by prefix.

    train/loss comes first, then the other groups of training, such as train_speed/mfu, then those
    of held-out text, such as val/loss and val_routing/layer_01/recall.
    """
    side, rest = ('val', name[5:]) if name.startswith('eval/') else ('train', name)
    group, slash, tail = rest.partition('/')
    if slash:
        return f'{side}_{group}/{tail}'
    kinds = [kind for kind, names in _TRAIN_GROUPS.items() if rest in names and side == 'train']
    return '/'.join(['_'.join([side, *kinds]), rest])


_TRAIN_GROUPS = {
    'experts': ('balance_loss', 'expert_z_loss'),
    'routing': ('dead_tokens',),
    'optimizer': ('grad_norm', 'learning_rate', 'skipped', 'skipped_in_a_row'),
    'speed': (
        *('tokens_per_second', 'flops_per_second', 'data_wait_fraction'),
        *('mfu', 'peak_memory_bytes'),
    ),
}


def _histogram(name, shares):
    limits = (np.arange(len(shares)) + 1) / len(shares)
    centers = limits - 0.5 / len(shares)
    mean, mean_square = np.dot(shares, centers), np.dot(shares, centers**2)
    return summary.histogram_raw(name, 0.0, 1.0, 1, mean, mean_square, limits, shares)


def check_wandb(project: str) -> None:
    """Raise ValueError, one line, if a `project` is given and wandb is not installed."""
    if not project:
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        right = "needs pip install 'moddepth-jax[wandb]'"
        raise ValueError(f'--wandb={project}: {right}') from None


class WandbWriter:
    """A sink that sends rows to a run of Weights & Biases; a resumed run continues it.

    `step` is a value of each row, so that W&B accepts rows that a killed run writes again. Raises
    ValueError, one line, if nobody is logged in or there is no network.
    """

    name = 'W&B'

    def __init__(self, workdir: str | os.PathLike, project: str, config: dict):
        import wandb

        path = pathlib.Path(workdir, WANDB_ID_FILE)
        if not path.exists():
            write_atomically(path, secrets.token_hex(8) + '\n')
        try:
            self._run = wandb.init(
                project=project,
                id=path.read_text(encoding='utf-8').strip(),
                resume='allow',
                name=path.resolve().parent.name,
                dir=workdir,
                config=config,
                settings=wandb.Settings(console='off', silent=True),
            )
        except Exception as error:  # some are of private classes
            right = 'log in with `wandb login`, or set WANDB_MODE=offline'
            raise ValueError(f'--wandb={project}: {multihost.one_line(error)}; {right}') from None
        self._run.define_metric('*', step_metric='step')

    def add(self, step: int, values: dict) -> None:
        """Send the numbers of a row."""
        numbers = {name: x for name, x in values.items() if isinstance(x, (int, float))}
        self._run.log({'step': step, **numbers})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


def _append(file, text):
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        error.filename = os.fspath(file.name)
        with contextlib.suppress(OSError):
            file.close()  # now, since it would raise once more, without the name
        raise


class WindowLog(contextlib.AbstractContextManager):
    """Logs the windows of each step: {"step": S, "windows": [numbers]}, S = 1 for the first step.

    Every process has its own file, windows-PROCESS.jsonl in the workdir, for the windows that it
    reads; processes that share batch rows log the same windows. A row is flushed before its step,
    so that a checkpoint has the rows of all its steps. Rows after `first_step` and truncated rows
    are dropped first, in the files of all processes, which may have been more before.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int, process: int):
        def drop_later():
            for path, rows in _window_rows(workdir).items():
                write_atomically(path, _text(row for row in rows if row['step'] <= first_step))

        multihost.run_on_leader(drop_later)
        path = pathlib.Path(workdir, WINDOWS.replace('*', str(process)))
        self._file = open(path, 'a', encoding='utf-8')

    def write(self, step: int, windows: list[int]) -> None:
        """Log the windows of step number `step`, which is 1 for the first step."""
        _append(self._file, json.dumps({'step': step, 'windows': windows}) + '\n')

    def __exit__(self, *_):
        self._file.close()


def read_windows(workdir: str | os.PathLike) -> dict[int, list[int]]:
    """Read the sorted windows of each step from the files of all processes."""
    steps = {}
    for rows in _window_rows(workdir).values():
        for row in rows:
            steps.setdefault(row['step'], []).extend(row['windows'])
    return {step: sorted(steps[step]) for step in sorted(steps)}


def _window_rows(workdir):
    paths = pathlib.Path(workdir).glob(WINDOWS)
    return {path: list(filter(None, map(_parse, _lines(path)))) for path in paths}
