"""Starts a command as several processes on this machine, and restarts it if one dies.

python -m launch.local --processes=2 --devices=4 -- --config=configs/tiny.py
python -m launch.local --processes=2 --devices=4 --restarts=3 -- --config=configs/moda.py
python -m launch.local --processes=2 -- launch.evaluate --workdir=runs/moda

Process 0 prints; of the others, stderr is shown. SIGTERM and Ctrl-C stop all of them, saved; a
second Ctrl-C ends them at once. On Linux no process outlives this one, even if it is killed;
elsewhere they would run to their end. The exit status is that of process 0, or of the process that
died.
"""

import collections
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from absl import flags

from launch import cli

PROCESSES = flags.DEFINE_integer('processes', 2, 'How many.', lower_bound=1)
DEVICES = flags.DEFINE_integer(
    'devices', 0, 'Fake CPU devices of each process. 0: the devices that JAX finds.', lower_bound=0
)
RESTARTS = flags.DEFINE_integer(
    'restarts', 0, 'How often all processes are restarted after one died.', lower_bound=0
)

POSITIONAL = (
    'After --: the flags of launch.train. If the first of them is not a flag but a module, such as '
    'launch.evaluate, that module runs.'
)
DEFAULT_MODULE = 'launch.train'
BAD_INPUT = 2  # the status of a command that would fail again
# Of a process that lost another one: see training.multihost, and the abort of JAX's own runtime.
CONSEQUENCES = (75, -signal.SIGABRT)
SETTLE_SECONDS = 2.0  # in which the process that died first may still show up
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL, once a process has died
POLL_SECONDS = 0.05
HOLD_SECONDS = 0.5  # that stderr is held back, to know first whether another process died
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class _StopSignals:
    """Handles SIGTERM and Ctrl-C: `received` is the first one's name, `at_once` a second Ctrl-C."""

    def __init__(self):
        self.received, self.at_once = None, False
        self._interrupts = 0

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number, frame):
        del frame
        self._interrupts += number == signal.SIGINT
        self.received = self.received or signal.Signals(number).name
        self.at_once = self._interrupts > 1


class _Death(NamedTuple):
    """A process that ended in failure; a negative status is that of a signal."""

    index: int
    status: int

    def exit_status(self):
        return self.status if self.status >= 0 else 128 - self.status

    def cause(self):
        return f'status {self.status}' if self.status > 0 else signal.Signals(-self.status).name


class _Processes:
    """One start of all processes."""

    def __init__(self, arguments, count, devices):
        self._readers, self._lines, self._first_death = [], collections.deque(), math.inf
        with socket.socket() as listener:
            listener.bind(('127.0.0.1', 0))
            port = listener.getsockname()[1]
        self._all = [self._start(arguments, i, count, devices, port) for i in range(count)]

    def _start(self, arguments, index, count, devices, port):
        pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE} if index else {}
        process = subprocess.Popen(
            [sys.executable, '-m', *arguments],
            env=os.environ | _environment(index, count, devices, port),
            start_new_session=True,  # so that we alone forward a Ctrl-C
            preexec_fn=_dies_with_parent(),
            **pipes,
        )
        if process.stderr is not None:
            reader = threading.Thread(target=self._read, args=(process.stderr, index), daemon=True)
            reader.start()
            self._readers.append(reader)
        return process

    def _read(self, stream, index):
        for line in stream:
            text = line.decode(errors='replace').rstrip()
            self._lines.append((time.monotonic(), index, text))

    def any_running(self) -> bool:
        """Whether at least one process runs."""
        return any(process.poll() is None for process in self._all)

    def first_status(self) -> int:
        """The status of process 0, once it has ended."""
        return self._all[0].returncode

    def death(self, settled: bool) -> _Death | None:
        """The process that died first, as far as that is known: not one that died because of it.

        Unless `settled`, None for a while in which the first one may still show up.
        """
        bad = [_Death(i, process.poll()) for i, process in enumerate(self._all) if process.poll()]
        if not bad:
            return None
        self._first_death = min(self._first_death, time.monotonic())
        causes = [death for death in bad if death.status not in CONSEQUENCES]
        if causes:
            return causes[0]
        settled = settled or time.monotonic() > self._first_death + SETTLE_SECONDS
        return bad[0] if settled else None

    def first_ended(self) -> _Death | None:
        """The first process that has ended, after all were asked to stop."""
        ended = [_Death(i, process.returncode) for i, process in enumerate(self._all)]
        return next((death for death in ended if death.status is not None), None)

    def send(self, number):
        """Sends a signal to the running processes."""
        for process in self._all:
            process.send_signal(number)  # does nothing to a process that has ended

    def print_stderr(self, seconds=HOLD_SECONDS, only=None):
        """Prints lines of stderr that are `seconds` old; of process `only`, if that is given.

        A process that loses another one ends with pages from JAX's runtime.
        """
        while self._lines and self._lines[0][0] <= time.monotonic() - seconds:
            _, index, text = self._lines.popleft()
            if only is None or index == only:
                print(f'process {index}: {text}', file=sys.stderr, flush=True)

    def join_readers(self):
        """Waits until all stderr is read, after all processes have ended."""
        for reader in self._readers:
            reader.join(timeout=STOP_SECONDS)


def main(argv):
    arguments = argv[1:]
    if not arguments or arguments[0].startswith('-'):
        arguments = [DEFAULT_MODULE, *arguments]
    with _StopSignals() as stop:
        for restarts in range(RESTARTS.value, -1, -1):
            status = _run(arguments, stop, restarts)
            if status in (0, BAD_INPUT) or stop.received:
                break
    return status


def _run(arguments, stop, restarts):
    """Starts all processes and waits for them; returns the exit status."""
    processes = _Processes(arguments, PROCESSES.value, DEVICES.value)
    forwarded, dead, kill_at, only = False, None, math.inf, None
    while True:
        running = processes.any_running()
        if stop.received and not forwarded:
            forwarded = True
            processes.send(signal.SIGTERM)
        if dead is None:
            dead = processes.first_ended() if forwarded else processes.death(settled=not running)
            if dead is not None:
                kill_at = time.monotonic() + STOP_SECONDS
                if not forwarded:
                    only = dead.index
                    _print_death(dead, restarts)
                    processes.send(signal.SIGTERM)
        if stop.at_once or time.monotonic() > kill_at:
            processes.send(signal.SIGKILL)
        if not running:
            break
        processes.print_stderr(only=only)
        time.sleep(POLL_SECONDS)
    processes.join_readers()
    processes.print_stderr(0, only)
    if stop.at_once:
        return 130
    return processes.first_status() if dead is None else dead.exit_status()


def _print_death(dead, restarts):
    then = 'stopping the others'
    if dead.status == BAD_INPUT:
        then += '; not restarting, since it would fail again'
    elif restarts:
        then += f', then restarting all; restarts left: {restarts - 1}'
    line = f'launch.local: process {dead.index} ended by {dead.cause()}; {then}'
    print(line, file=sys.stderr, flush=True)


def _environment(index, count, devices, port):
    """Variables that make a process one of several; see training.multihost.initialize."""
    changes = {
        'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
        'JAX_COORDINATOR_BIND_ADDRESS': f'127.0.0.1:{port}',
        'JAX_NUM_PROCESSES': str(count),
        'JAX_PROCESS_ID': str(index),
        cli.REPORTED_BY_LEADER: '1' if index else '',
    }
    if devices:
        fake = f'--xla_force_host_platform_device_count={devices}'
        changes |= {
            'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {fake}'.strip(),
            'NPROC': os.environ.get('NPROC', str(2 * devices)),
            'JAX_PLATFORMS': 'cpu',
        }
    return changes


def _dies_with_parent():
    """A function that a child calls before it runs, so that the kernel ends it with its parent."""
    if not sys.platform.startswith('linux'):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def before():
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended in between
            os._exit(1)

    return before


if __name__ == '__main__':
    cli.run(main, POSITIONAL)
