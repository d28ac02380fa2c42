"""Runs cases in child processes, in order, each to its end or its limit.

A child is sent the names of cases and answers each with a row (worker.py). Cases of one group share
a child as long as it lives: starting one takes many seconds. A child that crashes or hangs costs
only the case that it was running.
"""

import datetime
import multiprocessing
import os
import signal
import time
from typing import NamedTuple

from moddepth_jax.benchmarks.results import BAD, FINAL, Results

START_SECONDS = 12.0  # of a new child, until it has imported JAX and met the device
START_LIMIT = 120.0
MOST_HUNG = 2  # cases of a group, after which the rest of it is skipped


class Case(NamedTuple):
    """One thing that is checked or measured.

    Attributes:
      name: unique, parts separated by slashes.
      group: cases of one group share a process.
      expected: seconds on one large GPU, compilation included; a guess until it was measured.
      limit: seconds after which it counts as hung.
      run: MODULE:FUNCTION; the function returns a dict of JSON values.
      arguments: of the function.
      needs: beginnings of names; if such a case was not right, this one is skipped.
      in_process: the child itself uses the device; False: it starts a command that does.
    """

    name: str
    group: str
    expected: float
    limit: float
    run: str
    arguments: dict = {}
    needs: tuple[str, ...] = ()
    in_process: bool = True


def pending(cases, results: Results, code: str, again: bool, chosen: bool):
    """The Cases that are still to be run, and lines about what the file holds.

    Args:
      cases: Cases.
      results: so far.
      code: of results.code_version.
      again: repeat cases whose result is of other code; if `chosen`, all.
      chosen: the cases were named by the user.
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
    """No child can use the device any more."""


class Child:
    """One process that answers for the cases of a group.

    Args:
      target: what it runs: a function of a connection, the log and `args`.
      args: further arguments of target.
      log: path of the file that gets its output.
    """

    def __init__(self, target, args, log):
        context = multiprocessing.get_context('spawn')
        self.connection, theirs = context.Pipe()
        self.log, self.begin = log, log.stat().st_size if log.exists() else 0
        self.process = context.Process(target=target, args=(theirs, log, *args))
        self.process.start()
        theirs.close()

    def answer(self, seconds: float, name: str | None = None) -> dict | None:
        """The next row, of the case `name` if there is one; None: none in so many seconds.

        A process that ended has failed, by its exit status and the last line of its output.
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
        """Kills the process and whatever it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet, or any more
            self.process.kill()
        self.process.join()
        self.connection.close()


class Run:
    """One pass over a list of cases.

    Args:
      results: gets one row for each case.
      start: makes a Child.
      stamp: is added to every row: device, versions, commit.
      seconds_left: until the deadline; a function without arguments.
      say: is called with one line for each case.
      time_all: cases run whatever became of those that they need.
    """

    def __init__(self, results: Results, start, stamp, seconds_left, say=print, time_all=False):
        self.results, self.start, self.stamp = results, start, stamp
        self.seconds_left, self.say, self.time_all = seconds_left, say, time_all
        self.child, self.group = None, None
        self.hung = {}  # cases of each group

    def run(self, cases) -> list[str]:
        """Runs the cases in their order and returns the names of those that are not done.

        Raises:
          LostError: a child cannot start or has no device; the rest was not run.
        """
        later = []
        try:
            for case in cases:
                if why := self._blocked(case):
                    self._add(case, {'status': 'skipped', 'reason': why}, 0.0)
                    continue
                starts = self.child is None or self.group != case.group
                if self.seconds_left() < case.expected + START_SECONDS * starts:
                    later.append(case.name)
                    continue
                row, seconds = self._one(case)
                self._add(case, row, seconds)
                if row['status'] not in FINAL:
                    later.append(case.name)
        finally:
            self._end_child()
        return later

    def _blocked(self, case):
        """Why a case is skipped; None if it runs."""
        if self.hung.get(case.group, 0) >= MOST_HUNG:
            return f'{MOST_HUNG} cases of {case.group} hung before it'
        for name, row in self.results.latest.items() if not self.time_all else ():
            if row.get('status') in BAD and name.startswith(case.needs):
                return f'a wrong kernel is not timed: {name} {row["status"]}'
        return None

    def _one(self, case):
        """The row of a case, without what every row has, and its seconds."""
        self._start_child(case.group)
        begin, left = time.monotonic(), self.seconds_left()
        row = self.child.answer(min(case.limit, left), case.name)
        if row is None and left < case.limit:
            row = {'status': 'cut', 'reason': 'the deadline came first', 'ends': True}
        elif row is None:
            row = {'status': 'hung', 'reason': f'no answer in {case.limit:g} s', 'ends': True}
            self.hung[case.group] = self.hung.get(case.group, 0) + 1
        seconds = time.monotonic() - begin
        if row.pop('ends', False):
            self._end_child()
        if lost := row.get('lost'):
            raise LostError(lost)
        return row, seconds

    def _start_child(self, group):
        if self.child is not None and self.group == group:
            return
        for _ in range(2):  # the memory of a killed process may not be free yet
            self._end_child()
            self.child, self.group = self.start(), group
            row = self.child.answer(min(START_LIMIT, max(1.0, self.seconds_left())))
            row = row or {'status': 'hung', 'reason': 'no answer'}
            if row['status'] == 'ready':
                return
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
