"""Which windows of the corpus each step was trained on: how each is shown to be seen once."""

import json
import os
import pathlib
import re

from moddepth_jax.training import agreement
from moddepth_jax.training.workdir import write_atomically

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
        agreement.from_first(lambda: _drop_rows(workdir, first_step))
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
