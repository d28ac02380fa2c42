"""Runs a command as several processes on this machine, and restarts them if one dies.

python -m launch.local --processes=2 --devices=4 -- --config=configs/tiny.py
python -m launch.local --processes=2 --devices=4 --restarts=3 -- --config=configs/moda.py
python -m launch.local --processes=2 -- launch.evaluate --workdir=runs/moda

Process 0 prints; the other processes only show stderr. SIGTERM and Ctrl-C make all processes save
and stop; a second Ctrl-C ends them at once. On Linux, no process outlives this one, even if it is
killed. The exit status is that of process 0, or of the process that died.
"""

import ctypes
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from absl import flags

from launch import cli

PROCESSES = flags.DEFINE_integer('processes', 2, 'Number of processes.', lower_bound=1)
DEVICES = flags.DEFINE_integer('devices', 0, 'Fake CPU devices of a process.', lower_bound=0)
RESTARTS = flags.DEFINE_integer('restarts', 0, 'Restarts after a process died.', lower_bound=0)

POSITIONAL = (
    'After --: flags of launch.train, or another module, such as launch.evaluate, and its flags.'
)
BAD_INPUT = 2  # exit status of a command that would fail again
# Statuses of a process that lost another one: see training.multihost, and JAX's runtime aborts.
CONSEQUENCES = (75, -signal.SIGABRT)
SETTLE_SECONDS = 2.0  # wait for the process that died first, if only consequences are seen
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL after a process died
POLL_SECONDS = 0.05
_LIBC = ctypes.CDLL(None)
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class _StopSignals:
    """Handles signals: `received` is set by SIGTERM or Ctrl-C, `at_once` by a second Ctrl-C."""

    def __init__(self):
        self.received = self.at_once = self._interrupted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        self.received = True
        if number == signal.SIGINT:
            self.at_once, self._interrupted = self._interrupted, True


def _run(arguments, stop, restarts) -> int:
    """Run all processes until they end, one dies or a signal arrives; return the exit status."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    processes = [_start(arguments, index, port) for index in range(PROCESSES.value)]
    readers = [
        threading.Thread(target=_print_lines, args=(process.stderr, index), daemon=True)
        for index, process in enumerate(processes[1:], 1)
    ]
    for reader in readers:
        reader.start()

    def send(number):
        for process in processes:
            process.send_signal(number)  # does nothing to a process that has ended

    forwarded, dead, first_death, kill_at, running = False, None, math.inf, math.inf, True
    while running:
        polled = enumerate(process.poll() for process in processes)
        ended = {i: status for i, status in polled if status is not None}
        now, running = time.monotonic(), len(ended) < len(processes)
        if stop.received and not forwarded:
            forwarded = True
            send(signal.SIGTERM)
        bad = [index for index, status in ended.items() if status]
        if bad:
            first_death = min(first_death, now)
        # Ignore processes that died because another one did; that one may show up later.
        causes = [index for index in bad if ended[index] not in CONSEQUENCES]
        if not causes and (not running or now > first_death + SETTLE_SECONDS):
            causes = bad
        if dead is None and (found := list(ended) if forwarded else causes):
            dead, kill_at = found[0], now + STOP_SECONDS
            if not forwarded:
                _print_death(dead, ended[dead], restarts)
                send(signal.SIGTERM)
        if stop.at_once or now > kill_at:
            send(signal.SIGKILL)
        time.sleep(POLL_SECONDS * running)
    for reader in readers:
        reader.join(timeout=STOP_SECONDS)
    if stop.at_once:
        return 130
    status = processes[dead or 0].returncode
    return status if status >= 0 else 128 - status


def _start(arguments, index, port):
    pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE} if index else {}
    linux = sys.platform.startswith('linux')
    return subprocess.Popen(
        [sys.executable, '-m', *arguments],
        env=os.environ | _environment(index, port),
        start_new_session=True,  # so that we alone forward a Ctrl-C
        preexec_fn=functools.partial(_die_with, os.getpid()) if linux else None,
        **pipes,
    )


def main(argv):
    arguments, stop = argv[1:], _StopSignals()
    if not arguments or arguments[0].startswith('-'):
        arguments = ['launch.train', *arguments]
    for restarts in range(RESTARTS.value, -1, -1):
        status = _run(arguments, stop, restarts)
        if status in (0, BAD_INPUT) or stop.received:
            break
    return status


def _print(line):
    """Write a line to stderr in one call, so that lines of processes do not mix."""
    sys.stderr.write(f'{line}\n')
    sys.stderr.flush()


def _print_lines(stream, index):
    for line in stream:
        text = line.decode(errors='replace').rstrip()
        _print(f'process {index}: {text}')


def _print_death(index, status, restarts):
    if status == BAD_INPUT:  # the process has printed why
        return
    cause = f'status {status}' if status > 0 else signal.Signals(-status).name
    then = 'stopping the others'
    if restarts:
        then += f', then restarting all; restarts left: {restarts - 1}'
    _print(f'launch.local: process {index} ended by {cause}; {then}')


def _environment(index, port):
    """Environment variables of one of several processes; see training.multihost.initialize."""
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


def _die_with(parent):
    """Run in a child before exec, so that the kernel ends it with its parent."""
    _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended in between
        os._exit(1)


if __name__ == '__main__':
    cli.run(main, POSITIONAL)
