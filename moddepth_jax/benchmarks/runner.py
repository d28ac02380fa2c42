"""Runs cases in child processes, in order, with a time limit for each.

The parent sends names of cases to a child, which answers each with a row (worker.py). Cases of one
group share a child, because starting one takes many seconds. A crash or hang of a child only costs
the case that it was running.
"""

import dataclasses
import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from moddepth_jax.benchmarks.results import BAD, FINAL, Results

START_SECONDS = 12.0  # expected time until a new child has imported JAX and found the device
START_LIMIT = 120.0


class Case(NamedTuple):
    """One check or measurement."""

    name: str  # unique, parts separated by slashes
    group: str  # cases of one group share a process
    expected: float  # guess of the seconds on one large GPU, including compilation
    limit: float  # seconds after which the case counts as hung
    run: str  # MODULE:FUNCTION; the function returns a dict of JSON values
    arguments: dict = {}
    needs: tuple[str, ...] = ()  # name prefixes; the case is skipped if such a case went bad
    in_process: bool = True  # False: the case starts a command that uses the device


def pending(cases, results: Results, code: str, again: bool, chosen: bool):
    """Return the cases that still have to run, and lines about the results in the file.

    Args:
      cases: of the visit.
      results: earlier results.
      code: hash of the current sources.
      again: repeat cases whose result is of other code; if `chosen`, repeat all cases.
      chosen: whether the user named the cases.
    """
    rows = {case.name: results.latest.get(case.name, {}) for case in cases}
    done = {name for name, row in rows.items() if row.get('status') in FINAL}
    other, lines = {name for name in done if rows[name].get('code') != code}, []
    if results.damaged:
        lines.append(f'{results.path}: {results.damaged} damaged line(s) ignored')
    if other:
        commits = ', '.join(sorted({str(rows[name].get('commit'))[:12] for name in other}))
        what = 'they run again' if again else '--again repeats them'
        kept = f'{len(other)} results of other code (commit {commits}) are kept'
        lines.append(f'{results.path}: {kept}; {what}')
    if again:
        done = set() if chosen else done - other
    if done:
        lines.append(f'{len(done)} of {len(cases)} cases are done')
    return [case for case in cases if case.name not in done], lines


class LostError(RuntimeError):
    """Child processes can no longer use the device."""


class Child:
    """A process that runs `target`(connection, log, *args) and answers the cases of a group.

    Its output goes to the file `log`.
    """

    def __init__(self, target, args, log):
        context = multiprocessing.get_context('spawn')
        self.connection, theirs = context.Pipe()
        self.log, self.begin = log, log.stat().st_size if log.exists() else 0
        self.process = context.Process(target=target, args=(theirs, log, *args))
        self.process.start()
        theirs.close()

    def answer(self, seconds: float, name: str | None = None) -> dict | None:
        """Send the case `name`, if given, and return the next row; None after the timeout.

        If the process ended, the row has failed with the exit status and the last line of output.
        """
        try:
            if name is not None:
                self.connection.send(name)
            return self.connection.recv() if self.connection.poll(max(0.0, seconds)) else None
        except (BrokenPipeError, EOFError, ConnectionResetError):
            reason = f'the process ended: {self._last_words()}'
            return {'status': 'failed', 'reason': reason, 'ends': True}

    def _last_words(self):
        self.process.join(10)
        status = self.process.exitcode
        if status is None:
            return 'closed its connection'
        with open(self.log, 'rb') as file:
            file.seek(self.begin)
            lines = [line for line in file.read().decode(errors='replace').splitlines() if line]
        how = f'exit status {status}' if status >= 0 else signal.Signals(-status).name
        return ': '.join([how, *lines[-1:]])[:240]

    def end(self):
        """Kill the process and everything that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no process group yet, or no longer
            self.process.kill()
        self.process.join(10)  # a driver may hold a process that spins on the device
        self.connection.close()


@dataclasses.dataclass
class CaseRunner:
    """One pass over a list of cases."""

    results: Results  # gets one row for each case
    start: Callable[[str], Child]  # of a group
    stamp: dict  # fields of every row: device, versions, commit
    seconds_left: Callable[[], float]  # until the deadline
    say: Callable[[str], None]  # prints one line per case

    def run(self, cases) -> list[str]:
        """Run the cases in order and return the names of those that are not done.

        Raises:
          LostError: a child cannot start or has no device; the remaining cases did not run.
        """
        self.child, self.group, self.hung, later = None, None, {}, []
        try:
            for case in cases:
                begin, row = time.monotonic(), self._skip(case)
                if row is None:
                    if self.child is None or self.group != case.group:
                        self._end_child()
                    starting = START_SECONDS * (self.child is None)
                    if self.seconds_left() < case.expected + starting:
                        later.append(case.name)
                        continue
                    self._start_child(case.group)
                    begin, row = time.monotonic(), self._one(case)
                ends = row.pop('ends', False)
                self._add(case, row, time.monotonic() - begin)
                if ends:
                    self._end_child()
                if row['status'] not in FINAL:
                    later.append(case.name)
        finally:
            self._end_child()
        return later

    def _skip(self, case):
        """The row of a case that is skipped; None if it has to run."""
        if hung := self.hung.get(case.group):
            return {'status': 'skipped', 'reason': f'{hung} hung before it'}
        for name, row in self.results.latest.items():
            if row.get('status') in BAD and name.startswith(case.needs):
                reason = f'a wrong kernel is not timed: {name} {row["status"]}'
                return {'status': 'skipped', 'reason': reason}
        return None

    def _one(self, case):
        """Run a case and return its row without the common fields, and whether its child `ends`."""
        left = self.seconds_left()
        row = self.child.answer(min(case.limit, left), case.name)
        if row is None and left < case.limit:
            row = {'status': 'cut', 'reason': 'the deadline came first', 'ends': True}
        elif row is None:
            row = {'status': 'hung', 'reason': f'no answer in {case.limit:g} s', 'ends': True}
            self.hung[case.group] = case.name
        return row

    def _start_child(self, group):
        for _ in range(2):  # the memory of a killed process may not be free yet
            if self.child is not None:
                return
            self.child, self.group = self.start(group), group
            row = self.child.answer(min(START_LIMIT, max(1.0, self.seconds_left())))
            row = row or {'status': 'hung', 'reason': 'no answer'}
            if row['status'] != 'ready':
                self._end_child()
        if self.child is None:
            raise LostError(f'a process of {group} does not start: {row["reason"]}')

    def _end_child(self):
        if self.child is not None:
            self.child.end()
        self.child = None

    def _add(self, case, row, seconds):
        date = datetime.datetime.now().astimezone().isoformat(timespec='seconds')
        row = {'case': case.name, 'reason': '', **row, 'seconds': round(seconds, 2)}
        self.results.add(row | self.stamp | {'date': date})
        why = f': {row["reason"]}' if row['reason'] else ''
        self.say(f'{case.name}: {row["status"]}{why} ({seconds:.1f} s)')
