"""launch.lm_eval prints a clean table, and keeps finished tasks if another task has no data."""

import json
import subprocess
import sys

import pytest

from tests.forked_commands import ROOT
from tests.launch.commands import call

TASKS = '--include_path=tests/launch/lm_eval_tasks'  # whose data are named from the root on


@pytest.fixture
def lm_eval(trained, hasty, tmp_path):
    variables = hasty | {'HF_HOME': str(tmp_path / 'hf'), 'HF_HUB_OFFLINE': '1', 'COLUMNS': '100'}
    return lambda *words: call('lm_eval', f'--workdir={trained}/run', TASKS, *words, **variables)


@pytest.mark.slow
def test_finished_tasks_are_kept(lm_eval, tmp_path):
    """The second of two tasks has no data: status 2, one line; the first is printed and saved."""
    json_file = f'--json={tmp_path}/out.json'
    done = lm_eval('--tasks=toy_choice,toy_missing', json_file, '--batch_size=3', '--limit=3')
    assert done.status == 2
    assert done.stderr.startswith("error: task 'toy_missing': its data set"), done.stderr
    assert done.stderr.count('\n') == 1 and 'not_there.jsonl' in done.stderr
    report = json.loads((tmp_path / 'out.json').read_text())
    assert list(report['results']) == ['toy_choice']
    assert (report['step'], report['routing'], report['limit']) == (4, 'predictor', 3)
    assert report['n-samples']['toy_choice'] == {'original': 4, 'effective': 3}
    lines = done.stdout.splitlines()
    first, second = (line for line in lines if 'acc' in line)
    value, stderr = (report['results']['toy_choice'][f'acc{part},none'] for part in ('', '_stderr'))
    cells = [cell.strip() for cell in first.strip('|').split('|')]
    assert cells[0] == 'toy_choice' and cells[3:5] == ['0', 'acc']
    assert cells[6:] == [f'{value:.4f}', '±', f'{stderr:.4f}']
    assert second.split('|')[5].strip() == 'acc_norm'
    assert lines[0].endswith('run, step 4 of 4') and 'a trial, not a result' in lines[-1]


def test_without_lm_eval_the_error_says_how_to_install_it():
    hide = "import runpy, sys; sys.modules['lm_eval'] = None; "
    run = "runpy.run_module('launch.lm_eval', run_name='__main__', alter_sys=True)"
    line = [sys.executable, '-c', hide + run, '--workdir=none', '--tasks=arc_easy']
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert 'not installed' in done.stderr and "pip install 'moddepth-jax[lm_eval]'" in done.stderr
