"""Starts a command as several processes of this machine, and starts it again when one dies.

python -m launch.local --processes=2 --devices=4 -- --config=configs/tiny.py
python -m launch.local --processes=2 --devices=4 --restarts=3 -- --config=configs/moda.py
python -m launch.local --processes=2 -- launch.evaluate --workdir=runs/moda

Process 0 prints; of the others, what they write on stderr. SIGTERM and Ctrl-C stop all of them,
saved; a second Ctrl-C ends them at once. On Linux no process outlives this one, even where it is
killed; elsewhere they would run on to their end. The exit status is that of process 0, or of the
process that died.
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
    'restarts', 0, 'How often all are started again after one died.', lower_bound=0
)

POSITIONAL = (
    'After --: the flags of launch.train. Where the first of them is no flag but a module, such as '
    'launch.evaluate, that is what runs.'
)
DEFAULT_MODULE = 'launch.train'
BAD_INPUT = 2  # the status of a command that would fail again
# Of a process that lost another one: see training.processes, and the abort of JAX's own runtime.
CONSEQUENCES = (75, -signal.SIGABRT)
SETTLE_SECONDS = 2.0  # for the one that was lost to show
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL, once a process has died
POLL_SECONDS = 0.05
HOLD_SECONDS = 0.5  # what is written on stderr, to know first whether another process died
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class _Stop:
    """Takes SIGTERM and Ctrl-C: `asked` is the first one's name, `at_once` a second Ctrl-C."""

    def __init__(self):
        self.asked, self.at_once = None, False
        self._interrupts = 0

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)
        return self

    def __exit__(self, *_):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    def _take(self, number, frame):
        del frame
        self._interrupts += number == signal.SIGINT
        self.asked = self.asked or signal.Signals(number).name
        self.at_once = self._interrupts > 1


class _Death(NamedTuple):
    """A process that ended in failure; a status below 0 is that of a signal."""

    index: int
    status: int

    def exit_status(self):
        return self.status if self.status >= 0 else 128 - self.status

    def how(self):
        return f'status {self.status}' if self.status > 0 else signal.Signals(-self.status).name


class _Processes:
    """One start of all processes."""

    def __init__(self, arguments, count, devices):
        self._readers, self._written, self._first_bad = [], collections.deque(), math.inf
        port = _free_port()
        self._all = [self._start(arguments, i, count, devices, port) for i in range(count)]

    def _start(self, arguments, index, count, devices, port):
        others = {} if index == 0 else {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, '-m', *arguments],
            env=os.environ | _environment(index, count, devices, port),
            start_new_session=True,  # a Ctrl-C is ours to forward
            preexec_fn=_dies_with_parent(),
            **others,
        )
        if process.stderr is not None:
            reader = threading.Thread(target=self._read, args=(process.stderr, index), daemon=True)
            reader.start()
            self._readers.append(reader)
        return process

    def _read(self, stream, index):
        for line in stream:
            text = line.decode(errors='replace').rstrip()
            self._written.append((time.monotonic(), index, text))

    def run(self) -> bool:
        """Whether any of them still does."""
        return any(process.poll() is None for process in self._all)

    def first_status(self) -> int:
        """Of process 0, once it has ended."""
        return self._all[0].returncode

    def death(self, settled: bool) -> _Death | None:
        """The one that died, and not of the death of another, as far as that can be told.

        Unless `settled`, None for a while where the one that all others died of may yet show.
        """
        bad = [_Death(i, process.poll()) for i, process in enumerate(self._all) if process.poll()]
        if not bad:
            return None
        self._first_bad = min(self._first_bad, time.monotonic())
        causes = [death for death in bad if death.status not in CONSEQUENCES]
        if causes:
            return causes[0]
        settled = settled or time.monotonic() > self._first_bad + SETTLE_SECONDS
        return bad[0] if settled else None

    def stopped(self) -> _Death | None:
        """The first that has ended, all having been asked to."""
        ended = [_Death(i, process.returncode) for i, process in enumerate(self._all)]
        return next((death for death in ended if death.status is not None), None)

    def send(self, number):
        """Sends a signal to those that still run."""
        for process in self._all:
            process.send_signal(number)  # nothing to one that was waited for

    def pass_on(self, seconds=HOLD_SECONDS, only=None):
        """Prints what was written on stderr that long ago, or of it the lines of process `only`.

        Who loses another process ends with pages of what JAX's runtime has to say of that.
        """
        while self._written and self._written[0][0] <= time.monotonic() - seconds:
            _, index, text = self._written.popleft()
            if only is None or index == only:
                print(f'process {index}: {text}', file=sys.stderr, flush=True)

    def finish(self):
        """Waits until what they wrote is read, all having ended."""
        for reader in self._readers:
            reader.join(timeout=STOP_SECONDS)


def main(argv):
    arguments = argv[1:]
    if not arguments or arguments[0].startswith('-'):
        arguments = [DEFAULT_MODULE, *arguments]
    with _Stop() as stop:
        for restarts_left in range(RESTARTS.value, -1, -1):
            status = _run(arguments, stop, restarts_left)
            if status in (0, BAD_INPUT) or stop.asked:
                break
    return status


def _run(arguments, stop, restarts_left):
    """Starts all and waits for them; the exit status."""
    processes = _Processes(arguments, PROCESSES.value, DEVICES.value)
    forwarded, dead, kill_at, only = False, None, math.inf, None
    while True:
        running = processes.run()
        if stop.asked and not forwarded:
            forwarded = True
            processes.send(signal.SIGTERM)
        if dead is None:
            dead = processes.stopped() if forwarded else processes.death(settled=not running)
            if dead is not None:
                kill_at = time.monotonic() + STOP_SECONDS
                if not forwarded:
                    only = dead.index
                    _tell(dead, restarts_left)
                    processes.send(signal.SIGTERM)
        if stop.at_once or time.monotonic() > kill_at:
            processes.send(signal.SIGKILL)
        if not running:
            break
        processes.pass_on(only=only)
        time.sleep(POLL_SECONDS)
    processes.finish()
    processes.pass_on(0, only)
    if stop.at_once:
        return 130
    return processes.first_status() if dead is None else dead.exit_status()


def _tell(dead, restarts_left):
    then = 'stopping the others'
    if dead.status == BAD_INPUT:
        then += '; not starting again, for it would fail again'
    elif restarts_left:
        then += f', then starting all again; restarts left: {restarts_left - 1}'
    line = f'launch.local: process {dead.index} ended by {dead.how()}; {then}'
    print(line, file=sys.stderr, flush=True)


def _environment(index, count, devices, port):
    """What makes a process one of several; see moddepth_jax.training.multihost.join."""
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


def _free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def _dies_with_parent():
    """What a child calls before it runs: the kernel ends it when its parent has ended."""
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
