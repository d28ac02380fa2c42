"""launch.bench: a small run of each benchmark, and what it says to bad input."""

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    command = [sys.executable, '-m', 'launch.bench', *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_decode_prints_its_table_as_json():
    """Two key/value head counts are two tables; --json=- leaves stdout to them."""
    small = ['--size=2x64', '--context=64', '--prompt=8', '--batches=1,2', '--repeats=2']
    done = bench('decode', *small, '--kv_heads=2,1', '--json=-')
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    assert [table['kv_heads'] for table in tables] == [2, 1]
    assert [row['batch'] for row in tables[0]['rows']] == [1, 2]
    assert not done.stderr


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ([], ['no benchmark', 'step, decode']),
        (['dekode'], ['dekode', 'step, decode']),
        (['decode', '--batches=0'], ['--batches=0', 'numbers']),
        (['decode', '--size=2x64', '--kv_heads=3'], ['3', 'divide']),
        (['decode', '--size=2x64', '--context=64', '--prompt=100'], ['--prompt=100', '64']),
        (['decode', '--repeats=0'], ['--repeats=0']),
        (
            ['decode', '--size=2x64', '--context=64', '--prompt=8', '--repeats=90'],
            ['--repeats=90', '64'],
        ),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    """Exit status 2 and one line with the value, before anything is timed."""
    done = bench(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
