"""Runs cases in child processes, in order, each to its end or its limit; nothing ends the others.

A child takes the names of cases on its standard input and answers each with a line of JSON
(benchmarks/worker.py). Cases of one group share a child as long as it lives: starting one takes
many seconds. A child that crashes or hangs costs the case it was at.
"""

import datetime
import json
import os
import selectors
import signal
import subprocess
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
      needs: beginnings of names; where such a case went wrong, this one is skipped.
      in_process: the child itself uses the device; False where it starts a command that does.
    """

    name: str
    group: str
    expected: float
    limit: float
    run: str
    arguments: dict = {}
    needs: tuple[str, ...] = ()
    in_process: bool = True


def pending(cases, results: Results, code: dict, again: bool, chosen: bool):
    """What is still to be run, and lines about what is in the file.

    Args:
      cases: Cases.
      results: what there is.
      code: of results.code_version.
      again: repeat cases whose result is of other code; if `chosen`, all.
      chosen: the cases were named by the user.

    Returns:
      (Cases, lines).
    """
    rows = {case.name: results.latest.get(case.name, {}) for case in cases}
    done = {name for name, row in rows.items() if row.get('status') in FINAL}
    other = {name for name in done if rows[name].get('code') != code['code']}
    lines = []
    if results.damaged:
        lines.append(f'{results.path}: {results.damaged} damaged line(s) ignored')
    if other:
        commits = sorted({str(rows[name].get('commit'))[:12] for name in other})
        what = 'they run again' if again else '--again repeats them'
        of = f'commit {", ".join(commits)}'
        lines.append(f'{results.path}: {len(other)} results of other code ({of}) are kept; {what}')
    if again:
        done = set() if chosen else done - other
    if done:
        lines.append(f'{len(done)} of {len(cases)} cases are done')
    return [case for case in cases if case.name not in done], lines


class EndedError(RuntimeError):
    """The child ended without an answer."""


class LostError(RuntimeError):
    """No child can use the device any more."""


class Child:
    """One process that answers for the cases of a group.

    Args:
      command: list of words.
      env: its environment.
      log: path of the file that its output is appended to.
    """

    def __init__(self, command, env, log):
        self.log = log
        with open(log, 'ab') as file:
            self.begin = file.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
                start_new_session=True,
            )
        self.waiting = b''
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, name: str):
        """Sends the name of a case."""
        try:
            self.process.stdin.write(name.encode() + b'\n')
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise EndedError(self.last_words()) from error

    def answer(self, seconds: float) -> dict:
        """The next line.

        Raises:
          TimeoutError: none in so many seconds.
          EndedError: the process ended; how, and the last line of its output.
        """
        end = time.monotonic() + seconds
        while b'\n' not in self.waiting:
            if not self.selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise EndedError(self.last_words())
            self.waiting += part
        line, _, self.waiting = self.waiting.partition(b'\n')
        return json.loads(line)

    def last_words(self) -> str:
        """Exit status or signal, and the last line of the output."""
        try:
            status = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return 'closed its output'
        with open(self.log, 'rb') as file:
            file.seek(self.begin)
            lines = [line for line in file.read().decode(errors='replace').splitlines() if line]
        how = f'exit status {status}' if status >= 0 else signal.Signals(-status).name
        return ': '.join([how, *lines[-1:]])[:240]

    def end(self):
        """Kills the process and whatever it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.selector.close()
        self.process.stdin.close()
        self.process.stdout.close()


class Run:
    """One pass over a list of cases.

    Args:
      results: Results; each case adds one row.
      start: makes a Child, given a group.
      stamp: added to every row: device, versions, commit.
      seconds_left: of the deadline; a function without arguments.
      say: is given one line for each case.
      time_all: cases are not skipped for what they need.
    """

    def __init__(self, results: Results, start, stamp, seconds_left, say=print, time_all=False):
        self.results, self.start, self.stamp = results, start, stamp
        self.seconds_left, self.say, self.time_all = seconds_left, say, time_all
        self.child, self.group = None, None
        self.hung = {}  # cases of each group

    def run(self, cases) -> list[str]:
        """Runs the cases in their order.

        Returns:
          Names of those that the deadline did not allow.

        Raises:
          LostError: a child cannot start or has no device; the rest was not run.
        """
        later = []
        try:
            for case in cases:
                if why := self._blocked(case):
                    self._add(case, {'status': 'skipped', 'reason': why}, 0.0)
                    continue
                new = self.child is None or self.group != case.group
                if self.seconds_left() < case.expected + (START_SECONDS if new else 0.0):
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
        """Why a case is skipped; None: it is not."""
        if self.hung.get(case.group, 0) >= MOST_HUNG:
            return f'{MOST_HUNG} cases of {case.group} hung before it'
        for name, row in self.results.latest.items() if not self.time_all else ():
            if row.get('status') in BAD and any(name.startswith(start) for start in case.needs):
                return f'a wrong kernel is not timed: {name} {row["status"]}'
        return None

    def _one(self, case):
        """What became of a case, without what every row has, and its seconds."""
        self._start_child(case.group)
        begin, left = time.monotonic(), self.seconds_left()
        try:
            self.child.ask(case.name)
            row = self.child.answer(min(case.limit, left))
            ends = row.pop('ends', False)
        except TimeoutError:
            row, ends = {'status': 'cut', 'reason': 'the deadline came first'}, True
            if left >= case.limit:
                row = {'status': 'hung', 'reason': f'no answer in {case.limit:g} s'}
                self.hung[case.group] = self.hung.get(case.group, 0) + 1
        except EndedError as error:
            row, ends = {'status': 'failed', 'reason': f'the process ended: {error}'}, True
        seconds = time.monotonic() - begin
        if ends:
            self._end_child()
        if lost := row.get('lost'):
            raise LostError(lost)
        return row, seconds

    def _start_child(self, group):
        if self.child is not None and self.group == group:
            return
        self._end_child()
        for attempt in range(2):
            self.child, self.group = self.start(group), group
            try:
                self.child.answer(min(START_LIMIT, max(1.0, self.seconds_left())))
                return
            except (TimeoutError, EndedError) as error:
                why = str(error) or 'no sign of life'
                self._end_child()
                if attempt:
                    raise LostError(f'a process of {group} does not start: {why}') from error

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
