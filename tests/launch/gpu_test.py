"""launch.gpu: parts go on where one fails, and all of it runs at toy size on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from launch.gpu import PARTS, Command, read_tests, run_command, run_part
from moddepth_jax.analysis.attempt import HUNG
from moddepth_jax.analysis.gpu_table import gpu_table


def gpu(*arguments):
    command = [sys.executable, '-m', 'launch.gpu', *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def python(name, code, limit=60.0):
    return Command(name, ['-c', code], limit, f'{name}.json')


def test_a_failing_part_is_told_and_the_others_go_on(tmp_path):
    """A good one, one with an error, one over its limit, one by a signal; all is in the log."""
    codes = {
        'good': 'print("fine")',
        'bad': 'print("before"); raise ValueError("bent")',
        'slow': 'import time; print("asleep", flush=True); time.sleep(600)',
        'killed': 'import os; os.kill(os.getpid(), 9)',
    }
    commands = [python(name, code, 2.0 if name == 'slow' else 60.0) for name, code in codes.items()]
    done = {d['name']: d for d in run_part('x', iter(commands), tmp_path, dict(os.environ))}
    assert list(done) == list(codes)
    assert done['good']['failed'] is None
    assert done['bad']['failed'] == 'exit status 1: ValueError: bent'
    assert done['slow']['failed'] == 'not done in 2 s' and done['slow']['seconds'] < 30
    assert done['killed']['failed'] == 'exit status -9'
    log = (tmp_path / 'log.txt').read_text()
    assert all(word in log for word in ('fine', 'before', 'bent', 'asleep'))
    json.dumps(done)


def test_a_lost_device_costs_one_implementation(tmp_path):
    """The benchmark begins again without what ran last, once for each that ends it."""
    code = f"""
import sys
without = sys.argv[1].split('=')[1].split(',') if sys.argv[1:] else []
for name in ('cudnn', 'pallas', 'mosaic_gpu'):
    if name not in without:
        print('running', name, flush=True)
        if name != 'cudnn':
            sys.exit({HUNG})
"""
    (done,) = run_part('x', [python('x', code)], tmp_path, dict(os.environ))
    assert done['status'] == 0 and 'pallas, mosaic_gpu' in done['failed']
    assert (tmp_path / 'log.txt').read_text().count('\n$ python') == 3


def test_what_a_command_leaves_is_of_this_run(tmp_path):
    """The file of an earlier run is gone where the command did not come to write its own."""
    (tmp_path / 'x.json').write_text('[]')
    list(run_part('x', [python('x', 'raise SystemExit(1)')], tmp_path, dict(os.environ)))
    assert not (tmp_path / 'x.json').exists()


def test_environment_of_a_command_is_its_own(tmp_path):
    """`env` is added to that of the others."""
    todo = python('x', 'import os; print(os.environ["HOME"], os.environ["KERNEL_TESTS"])')
    todo = todo._replace(env={'KERNEL_TESTS': 'toy:xla'})
    done = run_command(todo, {'HOME': '/nowhere'}, tmp_path / 'log.txt')
    assert done['said'].split() == ['/nowhere', 'toy:xla']


def test_tests_are_counted(tmp_path):
    """Passed, failed and skipped ones of a real file of pytest's."""
    (tmp_path / 'three_test.py').write_text(
        'import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n'
        'def test_c(): pytest.skip("no such chip")\n'
    )
    arguments = ['-p', 'no:cacheprovider', f'--junitxml={tmp_path / "x.xml"}', tmp_path]
    pytest_command = [sys.executable, '-m', 'pytest', f'--rootdir={tmp_path}', *arguments]
    subprocess.run([*pytest_command, '-c', os.devnull, '-o', 'python_files=*_test.py'], check=False)
    found = read_tests(tmp_path / 'x.xml')
    assert found['passed'] == 1
    assert [line.split(':')[0] for line in found['failed']] == ['test_b']
    assert found['skipped'] == ['test_c: no such chip']


def test_table_of_an_unfinished_run_says_so(tmp_path):
    """Parts that failed, an empty file of a benchmark that was killed, no others."""
    commands = [{'name': 'attention', 'seconds': 3.0, 'status': None, 'failed': 'not done in 3 s'}]
    machine = {'device': 'NVIDIA H200', 'jax': '0.12.0'}
    record = {'date': '2026-11-21', 'machine': machine, 'toy': False, 'commands': commands}
    (tmp_path / 'parts.json').write_text(json.dumps({'attention': record}))
    (tmp_path / 'attention.json').write_text('')
    page = gpu_table(tmp_path)
    assert '| attention, attention | 2026-11-21 | 3 | not done in 3 s |' in page
    assert 'attention: device NVIDIA H200, jax 0.12.0.' in page
    assert '## Attention' not in page


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--parts=tests,trian'], ['--parts=trian', 'train']),
        (['--parts=tests'], ['no GPU', '--toy']),
    ],
)
def test_bad_input_is_one_line(arguments, words, tmp_path):
    """Exit status 2, and nothing is made."""
    done = gpu(f'--out={tmp_path / "out"}', *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_whole_run_at_toy_size(tmp_path):
    """Every part succeeds and has its numbers in the table; a part alone keeps the others'."""
    done = gpu('--toy', f'--out={tmp_path}')
    assert done.returncode == 0, done.stdout + (tmp_path / 'log.txt').read_text()[-3000:]
    parts = json.loads((tmp_path / 'parts.json').read_text())
    assert tuple(parts) == PARTS
    page = (tmp_path / 'table.md').read_text()
    sections = [line for line in page.splitlines() if line.startswith('## ')]
    assert [line[3:] for line in sections] == [
        *('Tests', 'Attention', 'Training step', 'By depth', 'Training run'),
    ]
    for words in ('| xla, slots |', 'MoD and MoDA', 'realised saving', 'eval bits_per_byte'):
        assert words in page, page
    assert 'FAILED' not in page and (tmp_path / 'attention.png').exists()
    again = gpu('--toy', f'--out={tmp_path}', '--parts=tests')
    assert again.returncode == 0, again.stdout
    assert '## Training run' in (tmp_path / 'table.md').read_text()
