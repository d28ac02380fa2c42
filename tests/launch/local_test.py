"""launch.local starts several processes as one, reports their ends, and leaves none behind."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.forked_commands import ROOT
from tests.launch.commands import is_running, wait_for

# A command without JAX. Its argument is, for each process, what it does; it notes its start.
CHILD = """
import json, os, pathlib, signal, sys, time
index = int(os.environ['JAX_PROCESS_ID'])
names = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PLATFORMS', 'NPROC', 'XLA_FLAGS')
seen = {name: os.environ.get(name) for name in names} | {'pid': os.getpid(), 'index': index}
def stop(number, frame):
    os.write(2, f'saved {index}\\n'.encode())
    sys.exit(143)
act = sys.argv[1].split(',')[index]
if act != 'stubborn':
    signal.signal(signal.SIGTERM, stop)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('out', index, flush=True)
print('err', index, file=sys.stderr, flush=True)
with open('starts.jsonl', 'a') as file:
    file.write(json.dumps(seen) + chr(10))
while len(pathlib.Path('starts.jsonl').read_text().splitlines()) % 2:
    time.sleep(0.01)
if act == 'kill':
    os.kill(os.getpid(), 9)
if act == 'once':
    if not pathlib.Path('died').exists():
        pathlib.Path('died').touch()
        os.kill(os.getpid(), 9)
    act = '0'
if act.isdigit():
    sys.exit(int(act))
time.sleep(60)
"""


@pytest.fixture
def local(tmp_path):
    """local(acts, *flags): launch.local with two processes of CHILD, as a Popen."""
    (tmp_path / 'child.py').write_text(CHILD)
    path = f'{ROOT}{os.pathsep}{tmp_path}'
    unset = {'XLA_FLAGS', 'NPROC', 'JAX_PLATFORMS'}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    started = []

    def start(acts, *flags, **variables):
        command = [sys.executable, '-m', 'launch.local', *flags, '--', 'child', acts]
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
        given = environment | {'PYTHONPATH': path} | variables
        started.append(subprocess.Popen(command, env=given, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def starts(folder):
    try:
        lines = (folder / 'starts.jsonl').read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), err.splitlines()


def test_processes_get_their_variables_and_exit_cleanly(local, tmp_path):
    """Both know of each other and get fake devices; the output of the first one passes through."""
    status, out, err = finish(local('0,0', '--devices=3', XLA_FLAGS='--xla_dump_to=x'))
    assert (status, out) == (0, ['out 0'])
    assert sorted(err) == ['err 0', 'process 1: err 1']
    first, second = sorted(starts(tmp_path), key=lambda seen: seen['index'])
    assert {'pid', 'index'} == {name for name in first if first[name] != second[name]}
    host, port = first['JAX_COORDINATOR_ADDRESS'].split(':')
    assert (host, first['JAX_NUM_PROCESSES'], first['JAX_PLATFORMS']) == ('127.0.0.1', '2', 'cpu')
    assert int(port) > 0 and (first['index'], second['index'], first['NPROC']) == (0, 1, '6')
    fake = '--xla_dump_to=x --xla_force_host_platform_device_count=3'
    assert first['XLA_FLAGS'] == fake


def test_a_death_is_reported_and_the_others_are_stopped(local, tmp_path):
    """One line names the process and the signal; the status is that of the signal.

    Without --devices their variables are as they were.
    """
    status, _, err = finish(local('sleep,kill', NPROC='5'))
    assert status == 128 + 9
    assert err.count('launch.local: process 1 ended by SIGKILL; stopping the others') == 1
    assert 'saved 0' in err
    for seen in starts(tmp_path):
        assert (seen['XLA_FLAGS'], seen['JAX_PLATFORMS'], seen['NPROC']) == (None, None, '5')
        assert not is_running(seen['pid'])


def test_a_process_that_lost_another_is_not_the_one_that_died(local):
    """Status 75 is a consequence: launch.local waits for the cause and prints its stderr."""
    status, _, err = finish(local('75,3'))
    assert status == 3
    assert 'launch.local: process 1 ended by status 3; stopping the others' in err
    assert 'process 1: err 1' in err


def test_all_processes_restart_as_often_as_allowed(local, tmp_path):
    """A restart uses another address, and may end well; bad input would fail again."""
    status, _, err = finish(local('0,once', '--restarts=2'))
    assert status == 0
    assert sum('then restarting all; restarts left: 1' in line for line in err) == 1
    seen = starts(tmp_path)
    assert len(seen) == 4 and len({one['JAX_COORDINATOR_ADDRESS'] for one in seen}) == 2
    status, _, err = finish(local('7,0', '--restarts=1'))
    assert status == 7
    assert len([line for line in err if 'process 0 ended by status 7' in line]) == 2
    (tmp_path / 'starts.jsonl').unlink()
    status, _, err = finish(local('2,2', '--restarts=5'))
    assert status == 2 and len(starts(tmp_path)) == 2
    assert not any('launch.local' in line for line in err)


def test_sigterm_stops_all_once(local, tmp_path):
    """Both processes get one SIGTERM and save; their status is returned, and no death reported."""
    process = local('sleep,sleep', '--restarts=3')
    wait_for(lambda: len(starts(tmp_path)) == 2)
    process.terminate()
    status, _, err = finish(process)
    assert status == 143 and len(starts(tmp_path)) == 2
    assert sorted(err) == ['err 0', 'process 1: err 1', 'process 1: saved 1', 'saved 0']


def test_ctrl_c_stops_all_and_a_second_one_ends_them_at_once(local, tmp_path):
    """The second Ctrl-C kills processes that ignore the first one."""
    process = local('stubborn,sleep')
    wait_for(lambda: len(starts(tmp_path)) == 2)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: any(not is_running(seen['pid']) for seen in starts(tmp_path)))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert not any(is_running(seen['pid']) for seen in starts(tmp_path))


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='only Linux kills orphans')
def test_no_process_outlives_a_killed_supervisor(local, tmp_path):
    process = local('stubborn,sleep')
    wait_for(lambda: len(starts(tmp_path)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_running(seen['pid']) for seen in starts(tmp_path)))
