"""What a run measured: one JSON object a line, and whatever else takes the same numbers."""

import contextlib
import json
import math
import os
import pathlib
import re
import secrets
import socket
import sys
import time

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from moddepth_jax.training import multihost
from moddepth_jax.training import run_dir as workdir_lib
from moddepth_jax.training.run_dir import write_atomically

METRICS_FILE = 'metrics.jsonl'


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, and gives each to sinks such as Events and WandbRun.

    A row is {'step': step, name: value, ...}; names are nested by '/', and an evaluation is a row
    of its own whose names begin with `eval/`. Numbers that are not finite are written as null,
    since JSON has no NaN. Each row is flushed as it is written.

    Args:
      workdir: directory of the run.
      first_step: the step the run starts after, 0 for a new one. Later rows, left by a run that was
        killed after its last checkpoint, are dropped, and so is a last line that was cut short.
      sinks: what else takes each row, by `add(step, values)`, until `close()`. Each has a
        `failure`, empty or a line that says why it takes no more: told on stderr, once.

    Raises:
      ValueError: one line, where an earlier line of the file is no row.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int, sinks=()):
        workdir = pathlib.Path(workdir)
        self._path = workdir / METRICS_FILE
        rows = read_metrics(workdir) if self._path.exists() else []
        self._rewrite([row for row in rows if row['step'] <= first_step])
        self._sinks = list(sinks)

    def write(self, step: int, values: dict) -> None:
        """Appends a row of numbers (Python, NumPy or JAX scalars), strings, and lists of these.

        A list whose name ends in `_histogram` holds the shares of equal bins of [0, 1].

        It takes the place of a row that an earlier start of the run left, of the same step and
        names: that of the last evaluation, where a finished run is evaluated again.

        Raises:
          ValueError: a value of another kind, or one named `step`.
        """
        if 'step' in values:
            raise ValueError(f'step={values["step"]!r}: must be given as the row, not among values')
        row = {'step': int(step)} | {name: _plain(name, value) for name, value in values.items()}
        if _key(row) in self._kept:
            self._file.close()
            self._rewrite(
                [old for old in read_metrics(self._path.parent) if _key(old) != _key(row)]
            )
        try:
            self._file.write(json.dumps(row, allow_nan=False) + '\n')
            self._file.flush()
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
        step = row.pop('step')
        for sink in list(self._sinks):
            sink.add(step, row)
            if sink.failure:
                print(sink.failure, file=sys.stderr)
                self._sinks.remove(sink)

    def has(self, step: int, name: str) -> bool:
        """Whether an earlier start of the run left a row of `step` with a value `name`."""
        return any(kept_step == step and name in names for kept_step, names in self._kept)

    def close(self) -> None:
        """Closes the file and every sink."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _rewrite(self, rows):
        """Leaves these rows, and the file open for more."""
        text = ''.join(f'{json.dumps(row)}\n' for row in rows)
        workdir_lib.write_atomically(self._path, text)
        self._kept = {_key(row) for row in rows}
        self._file = open(self._path, 'a', encoding='utf-8')

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _key(row):
    return row['step'], frozenset(row)


def read_metrics(workdir: str | os.PathLike) -> list[dict]:
    """The rows of a run, oldest first; a last line that was cut short is left out.

    Raises:
      ValueError: one line, where there is no metrics.jsonl or another line of it is no row.
    """
    path = pathlib.Path(workdir) / METRICS_FILE
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            lines = file.readlines()
    except FileNotFoundError:
        right = 'must be the directory of a run that has begun'
        raise ValueError(f'{workdir}: holds no {METRICS_FILE}; {right}') from None
    rows = []
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


def _plain(name, value):
    """`value` as JSON's own kinds."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if getattr(value, 'ndim', None) == 0:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise ValueError(f'{name}={value!r}: must be a number, a string or a list of these')
    return value if math.isfinite(value) else None


EVENTS_DIRECTORY = 'tensorboard'
FLUSH_SECONDS = 30.0


class TensorBoardWriter:
    """Appends scalars and histograms to a new file of events under `tensorboard/` of a run.

    metrics.jsonl holds the same numbers. So an event that cannot be written is dropped, and the
    rest with it: `failure` says why, in one line.

    tensorboardX's own SummaryWriter hands events to a thread, and blocks for ever once a full disk
    has ended that.

    Args:
      workdir: directory of the run.
      first_step: steps done before this start. TensorBoard hides events of later steps that an
        earlier start left.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int):
        self.failure = ''
        self._writer = None
        folder = pathlib.Path(workdir) / EVENTS_DIRECTORY
        resumed = folder.exists()
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        try:
            folder.mkdir(exist_ok=True)
            name = f'events.out.tfevents.{time.time_ns()}.{socket.gethostname()}'
            self._writer = RecordWriter(str(folder / name))
        except OSError as error:
            self._give_up(error)
        self._write(Event(file_version='brain.Event:2'))
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=first_step + 1, session_log=start))

    def add(self, step: int, values: dict) -> None:
        """Writes the numbers of a row; of its lists those whose name ends in `_histogram`."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._write(Event(step=step, summary=summary.scalar(name, value)))
            elif name.endswith('_histogram') and None not in value:
                self._write(Event(step=step, summary=_histogram(name, value)))
        if time.monotonic() > self._flush_at:
            self._flush_at = time.monotonic() + FLUSH_SECONDS
            self._call('flush')

    def close(self) -> None:
        """Closes the file."""
        self._call('close')
        self._writer = None

    def _write(self, event):
        event.wall_time = time.time()
        self._call('write', event.SerializeToString())

    def _call(self, name, *given):
        if self._writer is not None:
            try:
                getattr(self._writer, name)(*given)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error):
        self.failure = f'no more events for TensorBoard: {error.strerror or error}'
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # of what it still held
                writer.close()


def _histogram(name, shares):
    """Shares of equal bins of [0, 1]."""
    limits = [(i + 1) / len(shares) for i in range(len(shares))]
    middles = [limit - 0.5 / len(shares) for limit in limits]
    return summary.histogram_raw(
        name,
        min=0.0,
        max=1.0,
        num=1,
        sum=sum(share * x for share, x in zip(shares, middles, strict=True)),
        sum_squares=sum(share * x * x for share, x in zip(shares, middles, strict=True)),
        bucket_limits=limits,
        bucket_counts=shares,
    )


ID_FILE = 'wandb-id'


def check_wandb(project: str) -> None:
    """Raises ValueError, one line, where `project` is asked for and wandb is not installed."""
    if not project:
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        right = "needs pip install 'moddepth-jax[wandb]'"
        raise ValueError(f'--wandb={project}: {right}') from None


class WandbWriter:
    """Sends rows of metrics to one run of W&B; a start that resumes goes on with the same.

    Curves are drawn over `step`, which is sent with each row, so that the rows that a killed run
    writes again are taken. What W&B does not take is dropped, and the rest with it: `failure` says
    why, in one line.

    Args:
      workdir: directory of the run, whose last name is the run's there; holds its id and W&B's own
        files.
      project: of W&B.
      config: nested dict of the run's knobs.

    Raises:
      ValueError: one line, where W&B cannot begin: nobody is logged in, or there is no network.
    """

    def __init__(self, workdir: str | os.PathLike, project: str, config: dict):
        import wandb

        workdir, self.failure = pathlib.Path(workdir), ''
        path = workdir / ID_FILE
        if not path.exists():
            write_atomically(path, secrets.token_hex(8) + '\n')
        try:
            self._run = wandb.init(
                project=project,
                id=path.read_text(encoding='utf-8').strip(),
                resume='allow',
                name=workdir.resolve().name,
                dir=workdir,
                config=config,
                settings=wandb.Settings(console='off', silent=True),
            )
        except Exception as error:  # of many kinds, some of them private
            right = 'log in with `wandb login`, or set WANDB_MODE=offline'
            raise ValueError(
                f'--wandb={project}: {" ".join(str(error).split())}; {right}'
            ) from None
        self._run.define_metric('*', step_metric='step')

    def add(self, step: int, values: dict) -> None:
        """Sends the numbers of a row."""
        row = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        self._call('log', {'step': step, **row})

    def close(self) -> None:
        """Waits until all is sent."""
        self._call('finish')
        self._run = None

    def _call(self, name, *given):
        if self._run is None:
            return
        try:
            getattr(self._run, name)(*given)
        except Exception as error:  # a run must not end because its pictures cannot be drawn
            self.failure = f'no more metrics for W&B: {" ".join(str(error).split())}'
            self._run = None


_NAME = re.compile(r'windows-\d+\.jsonl')


class WindowLog:
    """Appends {"step": S, "windows": [numbers]} to windows-PROCESS.jsonl in the workdir.

    S is 1 for the first step. Each process logs the windows that it read; where processes share
    rows, more than one of them logs a window. A row is flushed before its step is taken, so all
    rows of a checkpoint's steps are there, however the run is killed.

    Every process of a run has to make one: process 0 first drops the rows of all files, those of
    processes that are no more among them, which are of steps after `first_step` or were cut short.

    Args:
      workdir: directory of the run.
      first_step: steps done before this start.
      process: index of this process.
    """

    def __init__(self, workdir: str | os.PathLike, first_step: int, process: int):
        workdir = pathlib.Path(workdir)
        multihost.broadcast_from_leader(lambda: _drop_rows(workdir, first_step))
        self._file = open(workdir / f'windows-{process}.jsonl', 'a', encoding='utf-8')

    def write(self, step: int, windows: list[int]) -> None:
        """Logs the windows of the step that ends as number `step`."""
        self._file.write(json.dumps({'step': step, 'windows': windows}) + '\n')
        self._file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def read_windows(workdir: str | os.PathLike) -> dict[int, list[int]]:
    """The windows of each step, over all processes, sorted; a last line cut short is left out."""
    steps = {}
    for path in _files(workdir):
        for row in _rows(path):
            steps.setdefault(row['step'], []).extend(row['windows'])
    return {step: sorted(steps[step]) for step in sorted(steps)}


def _files(workdir):
    return sorted(path for path in pathlib.Path(workdir).iterdir() if _NAME.fullmatch(path.name))


def _rows(path):
    lines = path.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith('}\n')]


def _drop_rows(workdir, first_step):
    for path in _files(workdir):
        rows = [row for row in _rows(path) if row['step'] <= first_step]
        write_atomically(path, ''.join(f'{json.dumps(row)}\n' for row in rows))
