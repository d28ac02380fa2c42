"""launch.bench: a small run of each benchmark; its flags are the arguments of the benchmarks."""

import inspect
import json
import os
import subprocess
import sys

import pytest

from moddepth_jax.benchmarks.registry import BENCHMARKS, flag_texts

SMALL_STEP = ['--size=2x64', '--lengths=32', '--tokens=64', '--repeats=1']


def bench(*arguments):
    command = [sys.executable, '-m', 'launch.bench', *arguments]
    env = os.environ | {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def results_of(*arguments):
    """The results that a benchmark prints as JSON."""
    done = bench(*arguments, '--json=-')
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize('name', BENCHMARKS)
def test_every_argument_has_a_text(name):
    """It becomes the help of its flag."""
    parameters = inspect.signature(BENCHMARKS[name]).parameters
    assert list(flag_texts(BENCHMARKS[name])) == list(parameters)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


def test_experts_by_shape(tmp_path):
    """One result for all shapes, printed as tables and written as JSON."""
    file = tmp_path / 'experts.json'
    flags = ['--shapes=16x32x16x4x2', '--repeats=1', '--dtype=bfloat16']
    done = bench('experts', *flags, f'--json={file}')
    assert done.returncode == 0 and not done.stderr, done.stderr
    (result,) = json.loads(file.read_text())
    assert result['dtype'] == 'bfloat16' and result['expands'] is True
    assert {'blocked', 'ragged_dot'} <= {row['form'] for row in result['rows']}
    assert all((row['tokens'], row['top_k']) == (16, 2) for row in result['rows'])
    assert 'executed / active FLOPs' in done.stdout and 'blocked' in done.stdout


@pytest.mark.slow
def test_decode_by_heads():
    """Two key/value head counts are two results; --json=- prints nothing else."""
    small = ['--size=2x64', '--context=64', '--prompt=8', '--batches=1,2', '--repeats=2']
    results = results_of('decode', *small, '--kv_heads=2,1')
    assert [result['kv_heads'] for result in results] == [2, 1]
    assert [row['batch'] for row in results[0]['rows']] == [1, 2]


@pytest.mark.slow
def test_depth_compares_flops_first(tmp_path):
    """One comparison with FLOPs by remat, then three tables by depth; the file holds all."""
    small = ['--size=2x64', '--depths=2,3', '--lengths=32', '--ratio_length=64', '--rows=1']
    file = tmp_path / 'depth.json'
    done = bench('depth', *small, '--repeats=1', '--unrolled_up_to=0', f'--json={file}')
    assert done.returncode == 0 and not done.stderr, done.stderr
    block, none, depth = json.loads(file.read_text())
    assert (block['remat'], none['remat'], block['length'], block['kv_heads']) == (
        *('block', 'none'),
        *(64, 1),
    )
    assert [row['depth'] for row in depth['rows']] == [2, 2, 2, 3, 3, 3]
    titles = ['realised saving', 'temporary memory', 'compilation', 'train step, ms']
    assert all(title in done.stdout for title in titles), done.stdout


@pytest.mark.slow
def test_step_is_compared_with_the_one_by_hand():
    """Of the dense and the MoD model, without --variants."""
    (result,) = results_of('step', *SMALL_STEP)
    assert [row['model'] for row in result['rows']] == ['dense', 'mod']
    for row in result['rows']:
        assert row['over_by_hand'] > 0 and 0 < row['data_wait_fraction'] < 1


@pytest.mark.slow
def test_variants_are_compared_in_bfloat16():
    """All with the dense one; `mode` stands for both of its forms."""
    variants = '--variants=dense,mod,moda,both,moe,mode'
    (result,) = results_of('step', variants, *SMALL_STEP, '--dtype=bfloat16')
    names = ['dense', 'mod', 'moda', 'both', 'moe', 'staged', 'integrated']
    assert [row['model'] for row in result['rows']] == names
    assert ['product' in row for row in result['rows']] == [False] * 4 + [True] * 3
    assert (result['dtype'], result['batch'], result['size']) == ('bfloat16', 2, '2x64')
    assert all(row['realised_saving'] > 0 for row in result['rows'])


@pytest.mark.slow
def test_attention_writes_json_and_a_picture(tmp_path):
    """Sizes by flags; what cannot run here has a line on stderr, and the exit status is 0."""
    sizes = ['--lengths=16', '--heads=2', '--kv_heads=1', '--widths=8', '--slots=0']
    files = [f'--json={tmp_path / "a.json"}', f'--plot={tmp_path / "a.png"}']
    done = bench('attention', '--implementations=cudnn,xla', *sizes, *files)
    assert done.returncode == 0, done.stderr
    first, case = json.loads((tmp_path / 'a.json').read_text())
    assert first['ceilings']['copy_bytes_per_second'] > 0
    assert (case['length'], case['heads'], case['slots']) == (16, 2, 0)
    assert case['baseline'] == 'xla' and 'xla, no slots' in done.stdout
    assert (tmp_path / 'a.png').exists()
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith('running'))
    assert line.startswith('cudnn (no slots')
