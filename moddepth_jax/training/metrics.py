"""What a run measures: metrics.jsonl, TensorBoard, Weights & Biases, and the log of windows."""

import contextlib
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

from moddepth_jax.data.directory import write_atomically
from moddepth_jax.training import multihost

METRICS_FILE = 'metrics.jsonl'
OLDER_EVENTS = 'tensorboard'  # folder of a run: where older versions wrote events
FLUSH_SECONDS = 30.0  # between flushes of TensorBoard events
WANDB_ID_FILE = 'wandb-id'


def replace_nonfinite(value):
    """`value` with None for numbers that are not finite, in dicts and lists: JSON has none."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float('inf'):
        return None
    return value


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends rows to `metrics.jsonl` and passes each to TensorBoardWriter, WandbWriter, ...

    A row is {'step': step, name: value, ...}, flushed as it is written. Names are nested by '/'; an
    evaluation is a separate row whose names begin with `eval/`. Rows after `first_step`, which a
    run that was killed after its last checkpoint left, and a truncated last line are dropped.
    `sinks` have a `name`, `add(step, values)` and `close()`; one that raises is dropped with one
    line on stderr. Raises ValueError as `read_metrics`.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int, sinks=()):
        workdir = pathlib.Path(workdir)
        self._path = workdir / METRICS_FILE
        rows = read_metrics(workdir) if self._path.exists() else []
        self._rewrite([row for row in rows if row['step'] <= first_step])
        self._sinks = list(sinks)

    def write(self, step: int, values: dict) -> None:
        """Appends a row of Python numbers and lists of them; null replaces what is not finite.

        A list whose name ends in `_histogram` holds the shares of equal bins of [0, 1]. The row
        replaces one of the same step and names, as if a finished run is evaluated again.
        """
        values = replace_nonfinite(values)
        row = {'step': step} | values
        if _key(row) in self._kept:
            self._file.close()
            rows = read_metrics(self._path.parent)
            self._rewrite([old for old in rows if _key(old) != _key(row)])
        try:
            self._file.write(json.dumps(row, allow_nan=False) + '\n')
            self._file.flush()
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
        for sink in list(self._sinks):
            self._call(sink, sink.add, step, values)

    def has(self, step: int, name: str) -> bool:
        """Whether an earlier start of the run left a row of `step` with a value `name`."""
        return any(kept_step == step and name in names for kept_step, names in self._kept)

    def close(self) -> None:
        """Closes the file and every sink."""
        self._file.close()
        for sink in list(self._sinks):
            self._call(sink, sink.close)

    def _call(self, sink, method, *arguments):
        try:
            method(*arguments)
        except Exception as error:  # of many kinds: W&B raises private ones
            self._sinks.remove(sink)
            reason = getattr(error, 'strerror', None) or multihost.one_line(error)
            print(f'no more metrics for {sink.name}: {reason}', file=sys.stderr)

    def _rewrite(self, rows):
        _write_rows(self._path, rows)
        self._kept = set(map(_key, rows))
        self._file = open(self._path, 'a', encoding='utf-8')

    def __exit__(self, *_):
        self.close()


def _key(row):
    return row['step'], frozenset(row)


def _write_rows(path, rows):
    write_atomically(path, ''.join(f'{json.dumps(row)}\n' for row in rows))


def read_metrics(workdir: str | os.PathLike) -> list[dict]:
    """The rows of a run, oldest first, without a truncated last line.

    Raises ValueError, one line, without a metrics.jsonl, or if another line of it is not a row.
    """
    path = pathlib.Path(workdir) / METRICS_FILE
    if not path.exists():
        right = 'must be the directory of a run that has begun'
        raise ValueError(f'{workdir}: holds no {METRICS_FILE}; {right}')
    lines, rows = path.read_text(encoding='utf-8', errors='replace').splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            int(row['step'])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            right = 'must be a JSON object with a step'
            raise ValueError(f'{path}: line {number} is {line[:40]!r}; {right}') from None
        rows.append(row)
    return rows


class TensorBoardWriter:
    """A sink that appends scalars and histograms to a new event file in the directory of a run.

    The run has the name of that directory there, and what it measures those of `tensorboard_name`.
    TensorBoard hides events after `first_step` that an earlier start left. The SummaryWriter of
    tensorboardX has a thread, which a full disk ends, and then blocks forever; this has none.
    """

    name = 'TensorBoard'

    def __init__(self, workdir: str | os.PathLike, first_step: int):
        older = pathlib.Path(workdir, OLDER_EVENTS)
        self._folder = older if older.exists() else older.parent
        self._first_step, self._flush_at = first_step, 0.0
        self._writer = None

    def add(self, step: int, values: dict) -> None:
        """Writes the numbers of a row, and its lists whose name ends in `_histogram`."""
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
            with contextlib.suppress(OSError):  # of events that are still in its buffer
                self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
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
    """The name of a metric in TensorBoard, which sorts by name and groups by what precedes a slash.

    train/loss comes first, then the rest of training by groups, such as train_speed/mfu, then what
    was held out: val/loss, val_routing/layer_01/recall.
    """
    side, rest = ('val', name[5:]) if name.startswith('eval/') else ('train', name)
    group, slash, tail = rest.partition('/')
    if slash:
        return f'{side}_{group}/{tail}'
    kinds = [kind for kind, names in _TRAIN_GROUPS.items() if rest in names and side == 'train']
    return '/'.join(['_'.join([side, *kinds]), rest])


_TRAIN_GROUPS = {
    'experts': ('balance_loss', 'expert_z_loss'),
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
    """Raises ValueError, one line, if a `project` is given but wandb is not installed."""
    if not project:
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        right = "needs pip install 'moddepth-jax[wandb]'"
        raise ValueError(f'--wandb={project}: {right}') from None


class WandbWriter:
    """A sink that sends rows to one run of Weights & Biases; a resumed run continues the same one.

    With `step` a value of each row, W&B accepts rows that a killed run writes again. Raises
    ValueError, one line, if nobody is logged in, or there is no network.
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
        except Exception as error:  # of many kinds, some of them private
            right = 'log in with `wandb login`, or set WANDB_MODE=offline'
            raise ValueError(f'--wandb={project}: {multihost.one_line(error)}; {right}') from None
        self._run.define_metric('*', step_metric='step')

    def add(self, step: int, values: dict) -> None:
        """Sends the numbers of a row."""
        numbers = {name: x for name, x in values.items() if isinstance(x, (int, float))}
        self._run.log({'step': step, **numbers})

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


class WindowLog(contextlib.AbstractContextManager):
    """Appends {"step": S, "windows": [numbers]} to windows-PROCESS.jsonl in the workdir.

    S is 1 for the first step. Every process makes one and logs the windows that it reads; those
    that share batch rows log the same ones. A row is flushed before its step, so all rows of a
    checkpoint's steps exist. Rows of steps after `first_step` and truncated ones are dropped first,
    also those of processes that no longer exist.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int, process: int):
        def drop_later():
            for path, rows in _window_rows(workdir).items():
                _write_rows(path, [row for row in rows if row['step'] <= first_step])

        multihost.run_on_leader(drop_later)
        path = pathlib.Path(workdir, f'windows-{process}.jsonl')
        self._file = open(path, 'a', encoding='utf-8')

    def write(self, step: int, windows: list[int]) -> None:
        """Logs the windows of the step that ends as number `step`."""
        self._file.write(json.dumps({'step': step, 'windows': windows}) + '\n')
        self._file.flush()

    def __exit__(self, *_):
        self._file.close()


def read_windows(workdir: str | os.PathLike) -> dict[int, list[int]]:
    """The sorted windows of each step, over all processes, without a truncated last line."""
    steps = {}
    for rows in _window_rows(workdir).values():
        for row in rows:
            steps.setdefault(row['step'], []).extend(row['windows'])
    return {step: sorted(steps[step]) for step in sorted(steps)}


def _window_rows(workdir):
    found = {}
    for path in pathlib.Path(workdir).glob('windows-*.jsonl'):
        lines = path.read_text(encoding='utf-8', errors='replace').splitlines(True)
        found[path] = [json.loads(line) for line in lines if line.endswith('}\n')]
    return found
