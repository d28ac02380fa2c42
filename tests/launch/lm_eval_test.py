"""launch.lm_eval prints a clean table, and keeps what was finished where a task has no data."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.run_dir import open_workdir
from moddepth_jax.training.train_step import init_state

ROOT = pathlib.Path(__file__).parents[2]
TASKS = 'tests/launch/lm_eval_tasks'  # whose data are named from the root on

pytestmark = pytest.mark.usefixtures('compiled_in_haste')


@pytest.fixture(scope='module')
def folder(tiny_config, tmp_path_factory):
    """Where `run` is a run of 4 steps, of a routed model."""
    folder = tmp_path_factory.mktemp('lm_eval')
    changes = {'model.routing.router': 'learned', 'data.sequence_length': 16}
    hparams = from_config(tiny_config(**changes))
    state = jax.jit(functools.partial(init_state, hparams, 4))()
    open_workdir(folder / 'run', dataclasses.asdict(hparams))
    with Checkpoints(folder / 'run' / 'checkpoints', keep=1) as checkpoints:
        checkpoints.save(4, state, {'num_steps': 4, 'fingerprint': {}})
    return folder


def lm_eval(folder, *arguments, program=('-m', 'launch.lm_eval')):
    environment = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': '',
        'XDG_CACHE_HOME': str(folder / 'cache'),
        'HF_HOME': str(folder / 'hf'),
        'HF_HUB_OFFLINE': '1',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
        'COLUMNS': '100',
    }
    arguments = [argument.format(folder) for argument in arguments]
    command = [sys.executable, *program, '--workdir', str(folder / 'run'), *arguments]
    pipes = {'capture_output': True, 'text': True, 'timeout': 120}
    return subprocess.run(command, cwd=ROOT, env=environment, **pipes)


def test_what_was_finished_is_kept(folder):
    """The second of two tasks has no data: status 2 and one line; the first is printed and saved.

    None of the logs, warnings and bars of other libraries is seen.
    """
    arguments = [f'--include_path={TASKS}', '--json={}/out.json', '--batch_size=3', '--limit=3']
    done = lm_eval(folder, '--tasks=toy_choice,toy_missing', *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: task 'toy_missing': its data set"), done.stderr
    assert done.stderr.count('\n') == 1 and 'not_there.jsonl' in done.stderr
    report = json.loads((folder / 'out.json').read_text())
    assert list(report['results']) == ['toy_choice']
    assert (report['step'], report['routing'], report['limit']) == (4, 'predictor', 3)
    assert report['n-samples']['toy_choice'] == {'original': 4, 'effective': 3}
    lines = done.stdout.splitlines()
    first, second = (line for line in lines if 'acc' in line)
    value, stderr = (report['results']['toy_choice'][f'acc{part},none'] for part in ('', '_stderr'))
    cells = [cell.strip() for cell in first.strip('│').split('│')]
    assert cells == ['toy_choice', '0', '3', 'acc', f'{value:.4f}', f'{stderr:.4f}']
    assert second.split('│')[4].strip() == 'acc_norm'
    assert lines[0].endswith('run, step 4 of 4') and 'a trial, not a result' in lines[-1]


def test_without_the_library_it_says_how_to_get_it(folder):
    """One line with the command that installs it, before anything is loaded."""
    hide = "import runpy, sys; sys.modules['lm_eval'] = None; "
    run = "runpy.run_module('launch.lm_eval', run_name='__main__', alter_sys=True)"
    done = lm_eval(folder, '--tasks=arc_easy', program=('-c', hide + run))
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.count('\n') == 1
    assert 'not installed' in done.stderr and "pip install 'moddepth-jax[lm_eval]'" in done.stderr


@pytest.mark.slow
def test_stdout_is_json_alone(folder):
    """With --json=-; a group has the mean of its tasks' metrics."""
    done = lm_eval(folder, '--tasks=toy_group', f'--include_path={TASKS}', '--json=-')
    assert (done.returncode, done.stderr) == (0, '')
    report = json.loads(done.stdout)
    results = report['results']
    assert list(results) == ['toy_choice', 'toy_rolling'] and report['limit'] is None
    mean = (
        results['toy_choice']['acc_norm,none'] + results['toy_rolling']['bits_per_byte,none']
    ) / 2
    assert report['groups']['toy_group']['mean,none'] == pytest.approx(mean)


# name: (arguments with {} for the folder, words of the line)
REFUSED = {
    'a task of nobody': (
        ['--tasks=hellaswagg'],
        ["'hellaswagg'", 'group or tag', 'did you mean hellaswag?'],
    ),
    'a rule that looks ahead': (['--tasks=toy_choice', '--routing=top_c'], ['top_c', 'later']),
    'no documents': (['--tasks=toy_choice', '--limit=0'], ['--limit=0', 'above 0']),
    'no task': ([], ['--tasks: missing']),
    'json nowhere': (
        ['--tasks=toy_choice', f'--include_path={TASKS}', '--json={}/no/a.json'],
        ['/no/a.json: No such file'],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', REFUSED)
def test_bad_input_is_one_line(folder, name):
    """Status 2, nothing on stdout, and one line on stderr that names the culprit."""
    arguments, words = REFUSED[name]
    done = lm_eval(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
