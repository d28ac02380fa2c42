"""launch.isoflop: the configs of a study's runs, what it refuses, and a study that is killed."""

import os
import re
import subprocess
import sys
import time

import jax
import pytest

from launch.study_config import StudyConfig
from moddepth_jax.data.directory import lock_directory
from moddepth_jax.hparams import from_config
from moddepth_jax.training.summary import num_parameters
from moddepth_jax.training.train_step import init_state
from tests.forked_commands import ROOT
from tests.launch.commands import call, wait_for

FLAGS = [
    '--budgets=1e9,2e9',
    '--sizes=2x64',
    '--variants=dense,mod',
    '--config.data.source=synthetic',
    '--config.data.sequence_length=32',
    '--config.data.batch_size=4',
    '--config.evaluation.final_batches=2',
    '--config.report.sample_tokens=8',
]


@pytest.mark.parametrize(
    'spec, kind, overrides, size, message',
    [
        ('configs/study.py', 'flops', {}, '4x65', "size='4x65'"),
        ('configs/study.py', 'steps', {}, '4x64', 'takes size=LxD and steps='),
        ('configs/tiny.py', 'flops', {}, '4x64', 'takes size=LxD and budget='),
        ('configs/study.py', 'flops', {'seed': 3}, '4x64', '--config.seed=3: a study sets it'),
        ('configs/study.py', 'flops', {'model.num_layers': 3}, '4x64', 'use --sizes'),
        ('configs/study.py', 'flops', {'model.routing.capacity': 0.5}, '4x64', 'use --variants'),
    ],
)
def test_configs_that_no_study_can_use_are_refused_in_one_line(
    spec, kind, overrides, size, message
):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        StudyConfig(spec, overrides, kind).shallower(size)
    assert '\n' not in str(error.value)


def flags_of(target):
    command = ['make', '-n', target, 'VENV_PYTHON=python3']
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    recipe = shown.replace('\\\n', ' ').split('-m launch.isoflop', 1)[1].split('\n')[0]
    return dict(flag.removeprefix('--').split('=', 1) for flag in recipe.split())


@pytest.mark.parametrize(
    'target', ['study', 'study-moda', 'study-experts', 'study-gpu', 'study-moda-gpu']
)
def test_every_target_trains_different_models(target):
    """Each variant can be built, and no two of one study are the same model."""
    given = flags_of(target)
    kind = 'flops' if 'budgets' in given else 'steps'
    overrides = {
        name.removeprefix('config.'): value
        for name, value in given.items()
        if name.startswith('config.') and not value.isdecimal()
    }
    budget = float(given['budgets' if kind == 'flops' else 'steps'].split(',')[0])
    size = given['sizes'].split(',')[0]
    config = StudyConfig(given['config'], overrides, kind)
    models = {
        variant: from_config(config.config(variant, size, budget)).model
        for variant in given['variants'].split(',')
        if variant != 'shallow'  # dense, of another size
    }
    assert len(set(models.values())) == len(models)
    assert int(config.shallower(size).split('x')[0]) < int(size.split('x')[0])


def test_the_wider_model_has_as_many_parameters_as_moda():
    config = StudyConfig('configs/moda.py', {}, 'steps')
    hparams = [from_config(config.config(name, '8x64', 9)) for name in ('wider', 'moda', 'dense')]
    wider, moda, dense = (
        num_parameters(jax.eval_shape(lambda h=h: init_state(h, 1)).params) for h in hparams
    )
    assert abs(wider - moda) < 0.002 * moda and dense < 0.95 * moda


def wait_until_unlocked(run):
    while True:
        try:
            return lock_directory(run).close()
        except ValueError:
            time.sleep(0.2)


@pytest.mark.slow
def test_a_killed_study_resumes_and_ends_with_the_same_bytes(tmp_path):
    """Really trained, by two processes, which stop after the one that started them is killed."""
    flags = ['--config=configs/study.py', *FLAGS, '--processes=2']
    done = call('isoflop', *flags, f'--workdir={tmp_path}/uninterrupted', NPROC='1')
    assert done.status == 0, done
    command = [sys.executable, '-m', 'launch.isoflop', *flags, f'--workdir={tmp_path}/killed']
    environment = os.environ | {
        'NPROC': '1',
        'XLA_FLAGS': '',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    }
    with subprocess.Popen(command, cwd=ROOT, env=environment) as killed:
        wait_for(lambda: list((tmp_path / 'killed').glob('runs/*/summary.json')), seconds=600)
        killed.kill()
    assert not (tmp_path / 'killed' / 'study.json').exists()
    time.sleep(3)  # its children notice
    for run in (tmp_path / 'killed' / 'runs').iterdir():
        wait_until_unlocked(run)
    done = call('isoflop', *flags, f'--workdir={tmp_path}/killed', NPROC='1')
    assert done.status == 0, done
    for name in ('study.json', 'study.html', 'loss_by_parameters.svg'):
        content = [(tmp_path / place / name).read_bytes() for place in ('killed', 'uninterrupted')]
        assert content[0] == content[1], name
