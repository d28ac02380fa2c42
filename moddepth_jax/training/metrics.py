"""What a run measured: one JSON object a line, and whatever else takes the same numbers."""

import json
import math
import os
import pathlib
import sys

from moddepth_jax.training import workdir as workdir_lib

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
