"""Starts a command as several processes on this machine, and restarts it if one dies.

python -m launch.local --processes=2 --devices=4 -- --config=configs/tiny.py
python -m launch.local --processes=2 --devices=4 --restarts=3 -- --config=configs/moda.py
python -m launch.local --processes=2 -- launch.evaluate --workdir=runs/moda

Process 0 prints; of the others, stderr is shown. SIGTERM and Ctrl-C stop all of them, saved; a
second Ctrl-C ends them at once. On Linux no process outlives this one, even if it is killed;
elsewhere they would run to their end. The exit status is that of process 0, or of the process that
died.
"""

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
BAD_INPUT = 2  # the status of a command that would fail again
# Of a process that lost another one: see training.multihost, and the abort of JAX's own runtime.
CONSEQUENCES = (75, -signal.SIGABRT)
SETTLE_SECONDS = 2.0  # in which the process that died first may still show up
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL, once a process has died
POLL_SECONDS = 0.05
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class _StopSignals:
    """Handles SIGTERM and Ctrl-C: `received` any of them, `at_once` a second Ctrl-C."""

    def __init__(self):
        self.received = self.at_once = self._interrupted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        self.received = True
        if number == signal.SIGINT:
            self.at_once, self._interrupted = self._interrupted, True


class _Death(NamedTuple):
    """A process that has ended; a negative status is that of a signal."""

    index: int
    status: int


class _Processes:
    """One start of all processes."""

    def __init__(self, arguments):
        self._readers, self._first_death = [], math.inf
        with socket.socket() as listener:
            listener.bind(('127.0.0.1', 0))
            port = listener.getsockname()[1]
        self._all = [self._start(arguments, i, port) for i in range(PROCESSES.value)]

    def _start(self, arguments, index, port):
        pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE} if index else {}
        process = subprocess.Popen(
            [sys.executable, '-m', *arguments],
            env=os.environ | _environment(index, port),
            start_new_session=True,  # so that we alone forward a Ctrl-C
            preexec_fn=_dies_with_parent(),
            **pipes,
        )
        if index:
            args = (process.stderr, index)
            self._readers.append(threading.Thread(target=_print_lines, args=args, daemon=True))
            self._readers[-1].start()
        return process

    def ended(self) -> list[_Death]:
        """The processes that have ended, in order; the first of the list may be process 0."""
        ended = (_Death(i, process.poll()) for i, process in enumerate(self._all))
        return [death for death in ended if death.status is not None]

    def death(self, ended) -> _Death | None:
        """The process that died first, as far as that is known: not one that died because of it.

        While another one runs, None for a while in which the first one may still show up.
        """
        bad = [death for death in ended if death.status]
        if not bad:
            return None
        self._first_death = min(self._first_death, time.monotonic())
        causes = [death for death in bad if death.status not in CONSEQUENCES]
        waited = time.monotonic() > self._first_death + SETTLE_SECONDS
        if causes or waited or len(ended) == len(self._all):
            return (causes or bad)[0]
        return None

    def send(self, number):
        """Sends a signal to the running processes."""
        for process in self._all:
            process.send_signal(number)  # does nothing to a process that has ended

    def wait(self, stop, restarts) -> int:
        """Waits for all processes, and stops them if one dies or we are asked to; their status."""
        forwarded, dead, kill_at, running = False, None, math.inf, True
        while running:
            ended = self.ended()
            running = len(ended) < len(self._all)
            if stop.received and not forwarded:
                forwarded = True
                self.send(signal.SIGTERM)
            if dead is None:
                dead = next(iter(ended), None) if forwarded else self.death(ended)
                if dead is not None:
                    kill_at = time.monotonic() + STOP_SECONDS
                    if not forwarded:
                        _print_death(dead, restarts)
                        self.send(signal.SIGTERM)
            if stop.at_once or time.monotonic() > kill_at:
                self.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS * running)
        for reader in self._readers:
            reader.join(timeout=STOP_SECONDS)
        if stop.at_once:
            return 130
        status = self._all[0].returncode if dead is None else dead.status
        return status if status >= 0 else 128 - status


def main(argv):
    arguments, stop = argv[1:], _StopSignals()
    if not arguments or arguments[0].startswith('-'):
        arguments = ['launch.train', *arguments]
    for restarts in range(RESTARTS.value, -1, -1):
        status = _Processes(arguments).wait(stop, restarts)
        if status in (0, BAD_INPUT) or stop.received:
            break
    return status


def _print_lines(stream, index):
    for line in stream:
        text = line.decode(errors='replace').rstrip()
        print(f'process {index}: {text}', file=sys.stderr, flush=True)


def _print_death(dead, restarts):
    cause = f'status {dead.status}' if dead.status > 0 else signal.Signals(-dead.status).name
    then = 'stopping the others'
    if dead.status == BAD_INPUT:
        then += '; not restarting, since it would fail again'
    elif restarts:
        then += f', then restarting all; restarts left: {restarts - 1}'
    line = f'launch.local: process {dead.index} ended by {cause}; {then}'
    print(line, file=sys.stderr, flush=True)


def _environment(index, port):
    """Variables that make a process one of several; see training.multihost.initialize."""
    devices, changes = DEVICES.value, {}
    if devices:
        fake = f'--xla_force_host_platform_device_count={devices}'
        changes = {
            'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {fake}'.strip(),
            'NPROC': os.environ.get('NPROC', str(2 * devices)),
            'JAX_PLATFORMS': 'cpu',
        }
    return changes | {
        'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
        'JAX_COORDINATOR_BIND_ADDRESS': f'127.0.0.1:{port}',
        'JAX_NUM_PROCESSES': str(PROCESSES.value),
        'JAX_PROCESS_ID': str(index),
        cli.REPORTED_BY_LEADER: '1' if index else '',
    }


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
