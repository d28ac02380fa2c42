"""Stores the result of each case as a JSON line in a file that survives crashes."""

import hashlib
import json
import os
import pathlib
import subprocess

from moddepth_jax.data.directory import parse_object

FILE = 'results.jsonl'
# Cases with one of these statuses are done; all others run again.
FINAL = ('ok', 'failed', 'wrong', 'hung', 'skipped')
BAD = ('failed', 'wrong', 'hung')
ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ('configs', 'kernels_pallas', 'launch', 'moddepth_jax')


class Results:
    """A file of results, which may not exist yet.

    `latest` has the newest row of each case. `damaged` is the number of lines that are not a JSON
    object with a case, because a write was cut short.
    """

    def __init__(self, path):
        self.path, self.latest, self.damaged = pathlib.Path(path), {}, 0
        text = self.path.read_bytes().decode(errors='replace') if self.path.exists() else ''
        for line in filter(str.strip, text.splitlines()):
            try:
                row = parse_object(line)
                self.latest[row['case']] = row
            except (ValueError, KeyError, TypeError):
                self.damaged += 1
        # The first new line must not continue a damaged line.
        self._separator = '\n' if text and not text.endswith('\n') else ''

    def add(self, row: dict):
        """Append a row, which has at least `case` and `status`, and sync it to disk."""
        # JSON has no NaN or infinity: they become strings.
        row = self.latest[row['case']] = json.loads(json.dumps(row), parse_constant=str)
        with open(self.path, 'a', encoding='utf-8') as file:
            file.write(self._separator + json.dumps(row) + '\n')
            file.flush()
            os.fsync(file.fileno())
        self._separator = ''

    def status(self, case: str) -> str | None:
        """Return the status of a case; None if it never ran."""
        return self.latest.get(case, {}).get('status')


def code_version() -> dict[str, str]:
    """Return `commit` ('unknown' without git) and `code`, a hash of all sources.

    A copy of the sources without git has the same `code` as its commit.
    """
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob('*.py')):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b'\0' + path.read_bytes())
    asked = ['git', '-C', str(ROOT), 'rev-parse', 'HEAD']
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip() if done.returncode == 0 else ''
    except (OSError, subprocess.TimeoutExpired):
        commit = ''
    return {'commit': commit or 'unknown', 'code': digest.hexdigest()[:12]}
