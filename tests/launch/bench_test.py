"""launch.bench: a small run of each benchmark, and what it says to bad input."""

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    command = [sys.executable, '-m', 'launch.bench', *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_decode_prints_its_table_as_json():
    """Two key/value head counts are two tables; --json=- leaves stdout to them."""
    small = ['--size=2x64', '--context=64', '--prompt=8', '--batches=1,2', '--repeats=2']
    done = bench('decode', *small, '--kv_heads=2,1', '--json=-')
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    assert [table['kv_heads'] for table in tables] == [2, 1]
    assert [row['batch'] for row in tables[0]['rows']] == [1, 2]
    assert not done.stderr


@pytest.mark.slow
def test_depth_prints_its_tables_and_writes_json(tmp_path):
    """One comparison with FLOPs, then three tables by depth; the file holds both results."""
    small = ['--size=2x64', '--depths=2,3', '--lengths=32', '--ratio_length=64', '--rows=1']
    file = tmp_path / 'depth.json'
    done = bench('depth', *small, '--repeats=1', '--unrolled_up_to=0', f'--json={file}')
    assert done.returncode == 0, done.stderr
    cost, depth = json.loads(file.read_text())
    assert (cost['depth'], cost['length'], cost['kv_heads']) == (2, 64, 1)
    assert [row['depth'] for row in depth['rows']] == [2, 2, 2, 3, 3, 3]
    titles = ['time ratio / FLOP ratio', 'temporary memory', 'compilation', 'train step, ms']
    assert all(title in done.stdout for title in titles), done.stdout
    assert not done.stderr


@pytest.mark.slow
def test_models_are_compared_in_bfloat16():
    """All beside the dense one, by length; `mode` stands for both of its forms."""
    small = ['--size=2x64', '--lengths=32', '--tokens=64', '--repeats=1', '--dtype=bfloat16']
    done = bench('step', '--variants=dense,mod,moda,both,moe,mode', *small, '--json=-')
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(done.stdout)
    names = ['dense', 'mod', 'moda', 'both', 'moe', 'staged', 'integrated']
    assert [row['model'] for row in table['rows']] == names
    assert [bool(row['experts']) for row in table['rows']] == [False] * 4 + [True] * 3
    assert (table['dtype'], table['batch'], table['size']) == ('bfloat16', 2, '2x64')
    assert all(row['realised_saving'] > 0 for row in table['rows'])


@pytest.mark.slow
def test_experts_by_shape():
    """One result for all shapes, by each product; a row for each of them."""
    shapes = '--shapes=64x32x16x4x2,16x32x16x8x8'
    done = bench('experts', shapes, '--repeats=1', '--dtype=bfloat16', '--json=-')
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(done.stdout)
    assert table['dtype'] == 'bfloat16' and table['expands'] is True
    assert [(row['tokens'], row['top_k']) for row in table['rows']] == [(64, 2), (16, 8)]
    assert {'blocked', 'ragged_dot'} <= set(table['rows'][0]['forms'])


def test_attention_writes_json_and_a_picture(tmp_path):
    """Sizes by flags; what cannot run here has a line on stderr and the exit status is 0."""
    sizes = ['--lengths=16', '--heads=2', '--kv_heads=1', '--widths=8', '--slots=0']
    files = [f'--json={tmp_path / "a.json"}', f'--plot={tmp_path / "a.png"}']
    done = bench('attention', '--implementations=cudnn,xla', *sizes, *files)
    assert done.returncode == 0, done.stderr
    first, case = json.loads((tmp_path / 'a.json').read_text())
    assert first['ceilings']['copy_bytes_per_second'] > 0
    assert (case['length'], case['heads'], case['slots']) == (16, 2, 0)
    assert case['baseline'] == 'xla' and 'xla, no slots' in done.stdout
    assert (tmp_path / 'a.png').exists()
    told = [line for line in done.stderr.splitlines() if not line.startswith('running')]
    assert len(told) == 1 and told[0].startswith('cudnn (no slots'), told


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ([], ['no benchmark', 'step, decode, depth, experts, attention']),
        (['dekode'], ['dekode', 'step, decode, depth, experts, attention']),
        (['experts', '--shapes=64x32x16x4x5'], ['--shapes=64x32x16x4x5', 'five numbers', 'last']),
        (['experts', '--size=6x128'], ['--size', 'experts has no use']),
        (['decode', '--batches=0'], ['--batches=0', 'numbers']),
        (['decode', '--size=2x64', '--kv_heads=3'], ['3', 'divide']),
        (['decode', '--size=2x64', '--context=64', '--prompt=100'], ['--prompt=100', '64']),
        (['decode', '--repeats=0'], ['--repeats=0']),
        (
            ['decode', '--size=2x64', '--context=64', '--prompt=8', '--repeats=90'],
            ['--repeats=90', '64'],
        ),
        (['depth', '--depths=8,deep'], ['--depths=8,deep', 'numbers']),
        (['depth', '--depths='], ['--depths=', 'numbers']),
        (['depth', '--unrolled_up_to=-1'], ['--unrolled_up_to=-1']),
        (['depth', '--size=16x100'], ['16x100', 'multiple of 64']),
        (['depth', '--size=2x128', '--kv_heads=3'], ['3', 'divide']),
        (['depth', '--tokens=64'], ['--tokens', 'is of step', 'depth']),
        (['step', '--kv_heads=2'], ['--kv_heads', 'needs --variants']),
        (['step', '--size=124m'], ['--size=124m', 'needs --variants']),
        (['step', '--variants=mode,dense'], ['--variants=mode,dense', 'begin with dense']),
        (['step', '--variants=dense,mood'], ['--variants=mood', 'both', 'mode']),
        (['step', '--batches=8'], ['--batches', 'is of decode', 'step']),
        (['attention', '--implementations=cudn'], ['--implementations=cudn', 'cudnn']),
        (['attention', '--heads=6', '--kv_heads=4'], ['--kv_heads=4', '--heads=6']),
        (['attention', '--size=6x128'], ['--size', 'attention has no use']),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    """Exit status 2 and one line with the value, before anything is timed."""
    done = bench(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
