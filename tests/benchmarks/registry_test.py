"""launch.bench: a small run of each benchmark; its flags are the arguments of the benchmarks."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest

from moddepth_jax.benchmarks.depths import REMAT
from moddepth_jax.benchmarks.registry import MODULES, benchmarks, flag_texts
from tests.forked_commands import ROOT, run_commands


def bench(folder, *arguments):
    """(results in the JSON file, stdout, stderr) of a benchmark, which must succeed."""
    file = folder / 'found.json'
    command = [sys.executable, '-m', 'launch.bench', *arguments, f'--json={file}']
    env = os.environ | {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout, done.stderr


def test_help_lists_the_flags_of_each_benchmark_with_their_texts():
    """Flags are grouped by benchmark and have a text; a name shows only that benchmark."""
    lines = [['bench', '--help'], *(['bench', name, '--help'] for name in MODULES)]
    everything, *alone = run_commands(lines, ROOT, MODULES.values())
    for (name, benchmark), help_ in zip(benchmarks().items(), alone, strict=True):
        parameters, texts = inspect.signature(benchmark).parameters, flag_texts(benchmark)
        assert list(texts) == list(parameters)
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
        section = everything.stdout.partition(f'\n{name}: ')[2].partition('\n\n')[0]
        flags = re.findall(r'^  --(\w+) +[^ ]', section, re.MULTILINE)
        assert flags == list(parameters) and section in help_.stdout
        assert len(re.findall('^[a-z]+: ', help_.stdout, re.MULTILINE)) == 1


@pytest.mark.slow
def test_experts_by_shape(tmp_path):
    """One result for all shapes, printed as tables and written as JSON."""
    flags = ['--shapes=16x32x16x4x2', '--repeats=1', '--dtype=bfloat16']
    (result,), out, errors = bench(tmp_path, 'experts', *flags)
    assert result['dtype'] == 'bfloat16' and result['expands'] is True and not errors
    assert {'blocked', 'ragged_dot'} <= {row['form'] for row in result['rows']}
    assert all((row['tokens'], row['top_k']) == (16, 2) for row in result['rows'])
    assert 'executed / active FLOPs' in out and 'blocked' in out


@pytest.mark.slow
def test_decode_by_heads(tmp_path):
    """Two key/value head counts are two results."""
    small = ['--size=2x64', '--context=64', '--prompt=8', '--batches=1,2', '--repeats=2']
    results, *_ = bench(tmp_path, 'decode', *small, '--kv_heads=2,1')
    assert [result['kv_heads'] for result in results] == [2, 1]
    assert [row['batch'] for row in results[0]['rows']] == [1, 2]
    for row in results[0]['rows']:
        assert row['dense_tokens_per_second'] == row['batch'] / row['dense_seconds'] > 0
        # One of two blocks keeps an eighth of the tokens and some more.
        assert 0.5 < row['cache_ratio'] < 0.8 and 0 <= row['selected_fraction'] < 0.5


@pytest.mark.slow
def test_depth_compares_flops_first(tmp_path):
    """One comparison with FLOPs by remat, then three tables by depth; deep models are scanned."""
    small = ['--size=2x64', '--depths=2,3', '--length=32', '--ratio_length=64', '--rows=1']
    found, out, errors = bench(tmp_path, 'depth', *small, '--repeats=1', '--unrolled_up_to=2')
    *ratios, depth = found
    assert [one['remat'] for one in ratios] == list(REMAT)
    assert {(one['length'], one['kv_heads']) for one in ratios} == {(64, 1)}
    rows = [(row['depth'], row['layer_loop'], row['remat']) for row in depth['rows']]
    by_depth = [(2, 'scan'), (2, 'unrolled'), (3, 'scan')]
    assert sorted(rows) == sorted(2 * [(*form, remat) for form in by_depth for remat in REMAT])
    dense, moda = (
        [row['temp_bytes'] for row in depth['rows'] if (row['depth'], row['model']) == (3, name)]
        for name in ('dense', 'MoDA')
    )
    assert 0 < dense[0] < dense[1] < dense[2]
    assert moda[0] < moda[1] < moda[2] and dense[0] < moda[0]  # which has slots
    titles = ['realised saving', 'temporary memory', 'compilation', 'train step, ms']
    assert all(title in out for title in titles), out


@pytest.mark.slow
def test_a_looped_model_needs_only_the_memory_of_its_activations_and_one_program(tmp_path):
    """For any number of loops; routed loops have one scan per size."""
    small = ['--size=1x64', '--length=48', '--rows=2', '--repeats=1', '--counts=2,3,4']
    (result,), out, errors = bench(tmp_path, 'loops', *small, '--variants=looped,mor')
    assert not errors and 'beyond saved activations' in out
    programs = {}
    for row in result['rows']:
        programs.setdefault(row['model'], []).append(row['instructions'])
    two, *more = programs['looped']
    assert more == [two, two]
    looped = [row for row in result['rows'] if row['model'] == 'looped']
    beyond = [row['temp_bytes'] - row['saved_bytes'] for row in looped]
    # XLA finds memory in use before for some of the activations of one loop.
    assert max(beyond) - min(beyond) < 1.1 * (looped[1]['saved_bytes'] - looped[0]['saved_bytes'])
    two, three, four = programs['MoR']
    assert two < three < four


@pytest.mark.slow
def test_step(tmp_path):
    """All models are compared with the dense one; `mode` stands for both forms of MoDE."""
    flags = ['--size=2x64', '--lengths=32', '--tokens=64', '--repeats=1', '--dtype=bfloat16']
    (result,), *_ = bench(tmp_path, 'step', *flags, '--variants=dense,mod,mod_moda,moe,mode,mhc')
    rows = {row['model']: row for row in result['rows']}
    assert list(rows) == ['dense', 'mod', 'mod_moda', 'moe', 'staged', 'integrated', 'mhc']
    assert (result['batch'], result['size']) == (2, '2x64')
    assert all(row['realised_saving'] > 0 for row in rows.values())


@pytest.mark.slow
def test_both_ways_of_scoring_agree(tmp_path):
    """They agree up to rounding; the table has a column for each model and option length."""
    (result,), out, _ = bench(tmp_path, 'scoring', '--size=2x64', '--repeats=1')
    assert [row['model'] for row in result['rows']] == ['dense', 'dense', 'mod', 'mod']
    for row in result['rows']:
        assert row['difference'] < 1e-4 and row['one_by_one_milliseconds'] > 0
        assert f'{row["model"]}, {row["options"]}' in out


@pytest.mark.slow
def test_prompts_in_chunks(tmp_path):
    """For both models, a chunk needs less memory than the complete prompt."""
    flags = ['--size=2x64', '--length=96', '--chunk=16', '--repeats=1']
    (result,), out, _ = bench(tmp_path, 'prompts', *flags)
    assert [row['model'] for row in result['rows']] == ['dense', 'mod']
    assert all(0 < row['memory_ratio'] < 1 < row['one_pass_temp_bytes'] for row in result['rows'])
    assert 'time, chunks / one pass' in out


@pytest.mark.slow
def test_attention_of_given_sizes(tmp_path):
    """Implementations that cannot run here have a line on stderr, and the exit status is 0."""
    flags = ['--lengths=16', '--heads=2', '--kv_heads=1', '--widths=8', '--slots=2', '--seconds=1']
    first, case = bench(tmp_path, 'attention', '--implementations=cudnn,xla', *flags)[0]
    assert first['ceilings']['copy_bytes_per_second'] > 0
    assert (case['length'], case['heads'], case['slots'], case['baseline']) == (16, 2, 2, 'xla')
    assert {row['implementation'] for row in case['rows'] if 'failed' in row} == {'cudnn'}
