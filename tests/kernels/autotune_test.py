"""The fastest candidate that passes the check is measured once and remembered.

Candidates are played by small programs that speak as autotune_trial.py does. No device is used.
"""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from absl import logging

from kernels_pallas import autotune, backends
from kernels_pallas.backends import Device, Parts, choose
from tests.kernels.cases import USUAL
from tests.launch.commands import is_running

H200 = Device('gpu', 'NVIDIA H200', (9, 0), 'cuda 13000', not_measured='')
LARGE = USUAL._replace(q=(8, 1024, 16, 64), k=(8, 1024, 2, 64))
NAMES = ('cudnn+xla', 'cudnn+mosaic_gpu', 'cudnn+mosaic_gpu_fused', 'cudnn+pallas')
NAMES += ('mosaic_gpu+mosaic_gpu_fused', 'xla+xla')
TIMES = dict(zip(NAMES, (5, 1, 2, 3, 4, 9), strict=True))
# What a candidate may do instead of returning its time.
CRASH = 'os.abort()'
NO_MEMORY = 'raise SystemExit("RESOURCE_EXHAUSTED: 9 bytes")'
HANG = 'import subprocess; print(subprocess.Popen(["sleep", "600"]).pid, file=log); say(); \
time.sleep(600)'
CANDIDATE = """
import json, os, sys, time
def say(**what):
    print(json.dumps(what), flush=True)
    log.flush()
request = json.loads(sys.stdin.readline())
parts, log = request['parts'], open(os.environ['TRIALS'], 'a')
name = f"{parts['sequence']}+{parts['depth']}"
print(name, os.getpid(), os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], file=log)
acts = json.loads(os.environ['ACTS']).get(name, 7)
if acts != 'unavailable':
    say(ready=1)
    exec(acts) if isinstance(acts, str) else say(milliseconds=acts)
else:
    say(unavailable='a child process finds cpu, not NVIDIA H200')
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return act(candidates' behavior): choose(None), its log lines, the started candidates."""
    log, lines = tmp_path / 'trials', []
    monkeypatch.setattr(autotune, 'COMMAND', (sys.executable, '-I', '-S', '-c', CANDIDATE))
    monkeypatch.setattr(autotune, '_spent', 0.0)
    for level in ('warning', 'info'):
        monkeypatch.setattr(logging, level, lambda text, *rest: lines.append(text % rest))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('TRIALS', str(log))

    def act(changes=(), shapes=LARGE, device=H200):
        # As if in a new process.
        monkeypatch.setattr(autotune, '_known', {})
        monkeypatch.setattr(backends, '_log_lines', [])
        monkeypatch.setenv('ACTS', json.dumps(TIMES | dict(changes)))
        log.write_text('')
        lines.clear()
        parts = choose(None, shapes, device)
        started = [line.split()[0] for line in log.read_text().splitlines() if ' ' in line]
        return parts, list(lines), started

    act.cache, act.log = tmp_path / 'cache', log
    return act


def test_the_fastest_is_taken_and_remembered(machine, monkeypatch):
    """One line says so. The next process reads the file, further traces do not even do that."""
    parts, lines, started = machine()
    assert parts == Parts('cudnn', 'mosaic_gpu') and started == list(NAMES)
    first, last = lines
    assert 'measuring 6 candidates for 8 x 1024 queries, once' in first
    assert last == (
        'depth_attention on NVIDIA H200: sequence by cudnn, depth by mosaic_gpu, the fastest of '
        'cudnn+mosaic_gpu 1 ms, cudnn+mosaic_gpu_fused 2 ms, cudnn+pallas 3 ms, '
        'mosaic_gpu+mosaic_gpu_fused 4 ms, cudnn+xla 5 ms, xla+xla 9 ms'
    )
    assert ' false' in machine.log.read_text()
    assert machine() == (parts, [last], [])
    assert backends.log_lines() == [last]
    (kept,) = (machine.cache / 'moddepth_jax/attention').glob('*.json')
    assert kept.name.startswith('NVIDIA_H200-')
    monkeypatch.setattr(autotune, '_read', None)
    assert choose(None, LARGE, H200) == parts


@pytest.mark.parametrize(
    ('name', 'act', 'reason'),
    [
        ('cudnn+mosaic_gpu', CRASH, 'it ended by signal 6'),
        ('cudnn+xla', 'raise SystemExit("bent")', 'it ended with status 1: bent'),
        ('cudnn+mosaic_gpu', 'say(failed="wrong: o is off")', 'wrong: o is off'),
        ('xla+xla', NO_MEMORY, 'out of device memory'),
    ],
)
def test_a_failure_costs_its_candidate_alone(machine, name, act, reason):
    """One warning names it, the fastest of the others runs, and that is remembered."""
    others = [other for other in NAMES if other != name]
    parts, lines, started = machine({name: act})
    assert parts.label(LARGE) == min(others, key=TIMES.get)
    assert started == list(NAMES)
    (warning,) = [line for line in lines[:-1] if 'is not used' in line]
    assert warning.startswith(f'depth_attention: {name} is not used: {reason}')
    assert lines[-1].count(f'; not {name}: {reason}') == 1
    assert all(f'{other} {TIMES[other]} ms' in lines[-1] for other in others)
    assert machine() == (parts, [lines[-1]], [])


def test_a_hang_ends_with_all_that_it_started(machine, monkeypatch):
    """It is killed at the limit, with its own children; it alone is tried once more."""
    monkeypatch.setattr(autotune, 'LIMIT_SECONDS', 2.0)
    monkeypatch.setattr(autotune, 'MIN_SECONDS', 0.0)
    parts, lines, started = machine({'cudnn+mosaic_gpu': HANG})
    assert parts == Parts('cudnn', 'mosaic_gpu_fused') and started == list(NAMES)
    assert '; not cudnn+mosaic_gpu: not done in 2 s' in lines[-1]
    (sleeper,) = [line for line in machine.log.read_text().splitlines() if ' ' not in line]
    time.sleep(0.1)
    assert not is_running(int(sleeper))
    # Most of that time may be compilation, which the next run finds in a cache.
    assert machine({'cudnn+mosaic_gpu': HANG})[::2] == (parts, ['cudnn+mosaic_gpu'])
    assert machine()[::2] == (parts, [])


def test_a_candidate_stopped_early_is_tried_again(machine, monkeypatch):
    """The time of the process was nearly spent, which is not counted as a try."""
    monkeypatch.setattr(autotune, 'MIN_SECONDS', 0.0)
    monkeypatch.setattr(autotune, 'TOTAL_SECONDS', 4.0)
    parts, lines, _ = machine({'xla+xla': 'time.sleep(60)'})
    assert 'not xla+xla: not done in' in lines[-1]
    (kept,) = machine.cache.rglob('*.json')
    assert json.loads(kept.read_text())['results']['xla+xla']['tries'] == 0
    monkeypatch.setattr(autotune, '_spent', 0.0)
    assert machine()[::2] == (parts, ['xla+xla'])


def test_another_candidate_is_measured_alone(machine, monkeypatch):
    """Regression: cuDNN refuses 100,000 packed queries, and was then not tried for 80,000."""
    plan = backends.plan
    monkeypatch.setattr(backends, 'plan', lambda *call: (plan(*call)[0][1:], {}))
    parts, _, started = machine()
    assert started == list(NAMES[1:])
    monkeypatch.setattr(backends, 'plan', plan)
    assert choose(None, LARGE, H200) == parts  # also within one process
    again, lines, started = machine()
    assert again == parts and not started and 'cudnn+xla 5 ms' in lines[-1]


def test_only_the_main_thread_measures(machine):
    """Regression: a program compiled ahead was measured while the main thread trained.

    Another thread takes what is in the file, or the default.
    """
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(machine()))
        thread.start()
        thread.join()
        parts, lines, started = found[-1]
        assert not started
        assert machine()[0] == Parts('cudnn', 'mosaic_gpu')
    (first, lines, _), (second, *_) = found
    assert first == Parts('cudnn') and 'not measured: only the main thread' in lines[-1]
    assert second == Parts('cudnn', 'mosaic_gpu')


def test_more_memory_is_measured_again(machine, monkeypatch):
    """The fraction of memory that the process takes is in the key."""
    machine({'cudnn+mosaic_gpu': NO_MEMORY})
    assert not machine()[2]
    monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.5')
    assert machine()[2] == list(NAMES)


def test_an_interrupted_measurement_leaves_no_process(machine):
    """By Ctrl-C, or by a signal that ends the program while a child runs."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            machine({'cudnn+xla': HANG})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    started = machine.log.read_text().split()
    assert started[0] == 'cudnn+xla' and not is_running(int(started[1]))
    assert not list(machine.cache.rglob('*.json'))


@pytest.mark.parametrize(
    ('acts', 'num_slots', 'parts', 'tried'),
    [
        # If cuDNN does not work, the depth kernels are still tried.
        ({'xla+mosaic_gpu': 2, **dict.fromkeys(NAMES[:4], CRASH)}, 12, 'xla+mosaic_gpu', 9),
        ({'cudnn+xla': CRASH, 'mosaic_gpu+xla': CRASH, 'xla+xla': CRASH}, 0, 'xla', 3),
        # A candidate that only ran out of memory is not taken for broken.
        ({'cudnn+xla': NO_MEMORY, 'mosaic_gpu+xla': CRASH, 'xla+xla': CRASH}, 0, 'cudnn', 3),
    ],
)
def test_where_many_fail(machine, acts, num_slots, parts, tried):
    shapes = LARGE._replace(num_slots=num_slots)
    found, lines, started = machine(acts, shapes)
    assert found.label(shapes) == parts and len(started) == tried
    assert num_slots or 'as no candidate was right' in lines[-1]
    # Another run may have the memory.
    again = ['cudnn+xla'] if NO_MEMORY in acts.values() else []
    assert machine(acts, shapes)[::2] == (found, again)


def test_another_machine_or_shape_is_measured_again(machine, monkeypatch):
    """GPU, software, JAX, kernel sources, flags and shapes are in the key; near sizes share one."""
    shapes = LARGE._replace(num_slots=0)
    machine(shapes=shapes)
    assert not machine(shapes=shapes._replace(q=(7, 900, 16, 64), k=(7, 900, 2, 64)))[2]
    for change in ({'kind': 'NVIDIA H100'}, {'software': 'cuda 13010'}):
        assert machine(shapes=shapes, device=H200._replace(**change))[2], change
    longer = {'q': (8, 1100, 16, 64), 'k': (8, 1100, 2, 64)}
    for change in (longer, {'window': 64}, {'dtypes': ('float16',)}, {'lse': True}):
        assert machine(shapes=shapes._replace(**change))[2], change
    versions = autotune._versions()
    assert {'jax', 'jaxlib', 'kernels'} <= set(versions)
    monkeypatch.setattr(autotune, '_versions', lambda: versions | {'jax': '0.99'})
    assert machine(shapes=shapes)[2]
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_exclude_nondeterministic_ops=true')
    assert machine(shapes=shapes)[2] and not machine(shapes=shapes)[2]


@pytest.mark.parametrize(
    'damage',
    [b'{"key"', b'[]', {'results': {NAMES[0]: {'milliseconds': -1}}}, {'key': {}}],
)
def test_a_damaged_file_is_measured_again(machine, damage):
    """It is replaced, and none of it is used."""
    parts, *_ = machine()
    (path,) = (machine.cache / 'moddepth_jax/attention').glob('*.json')
    good = json.loads(path.read_text())
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(good | damage).encode())
    assert machine()[::2] == (parts, list(NAMES))
    assert json.loads(path.read_text()) == good
    assert [p.suffix for p in path.parent.iterdir() if p != path] == ['.lock']


@pytest.mark.parametrize('relative', [False, True])
def test_a_directory_that_cannot_be_written_costs_one_warning(machine, relative, monkeypatch):
    """The measured result is used. A relative XDG_CACHE_HOME is no directory of the user."""
    if relative:
        monkeypatch.chdir(machine.cache.parent)
        monkeypatch.setenv('XDG_CACHE_HOME', machine.cache.name)
    else:
        machine.cache.write_text('a file, where a directory would be')
    parts, lines, started = machine()
    assert parts == Parts('cudnn', 'mosaic_gpu') and started
    assert sum('each start will measure again' in line for line in lines) == 1
    assert machine()[2] and not machine.cache.is_dir()


def test_a_machine_that_cannot_start_a_child_runs_what_is_proven(machine, monkeypatch):
    """One warning says why. No candidate counts as failed, and nothing is remembered."""
    parts, lines, started = machine(dict.fromkeys(NAMES, 'unavailable'))
    assert parts == Parts('cudnn') and started == ['cudnn+xla']
    assert 'nothing can be measured: a child process finds cpu' in lines[1]
    assert 'not measured: a child process finds cpu' in lines[-1] and len(lines) == 3
    assert not list(machine.cache.rglob('*.json'))
    monkeypatch.setattr(autotune, 'COMMAND', (sys.executable, '-c', 'import no_such_module'))
    parts, lines, _ = machine()
    assert parts == Parts('cudnn') and "No module named 'no_such_module'" in lines[1]


def test_a_process_spends_no_more_than_its_seconds(machine, monkeypatch):
    """The next process measures the candidates that were left out."""
    monkeypatch.setattr(autotune, 'TOTAL_SECONDS', 0.0)
    parts, lines, started = machine()
    assert parts == Parts('cudnn') and not started
    assert 'not measured: the 0 s of this process are spent' in lines[-1]
    for name in ('MIN_SECONDS', 'TOTAL_SECONDS'):
        monkeypatch.setattr(autotune, name, 10.0)
    parts, lines, started = machine()
    assert parts == Parts('cudnn') and started == ['cudnn+xla']
    assert 'the fastest of cudnn+xla 5 ms' in lines[-1]
    monkeypatch.setattr(autotune, '_spent', 0.0)
    monkeypatch.setattr(autotune, 'MIN_SECONDS', 0.0)
    monkeypatch.setattr(autotune, 'TOTAL_SECONDS', 300.0)
    assert machine()[::2] == (Parts('cudnn', 'mosaic_gpu'), list(NAMES[1:]))


def test_two_processes_do_not_measure_the_same_at_once(tmp_path):
    """The second waits for the first, and then reads its file."""
    path, entered = tmp_path / 'x.json', threading.Event()

    def second():
        with autotune._exclusive(path):
            entered.set()

    with autotune._exclusive(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    thread.join(timeout=60)
    assert entered.is_set()


def test_a_trial_ends_at_its_limit_where_nobody_kills_it():
    """It has its own alarm, since its parent may be gone."""
    shapes = USUAL._replace(q=(1, 64, 4, 16), k=(1, 64, 2, 16))
    request = {'parts': Parts()._asdict(), 'shapes': shapes._asdict(), 'kind': 'cpu', 'limit': 0}
    command = [sys.executable, '-m', 'kernels_pallas.autotune_trial']
    done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True)
    assert done.returncode == -signal.SIGALRM and b'milliseconds' not in done.stdout
