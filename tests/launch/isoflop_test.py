"""launch.isoflop: configs of runs, refused studies, and a killed study."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import pytest

from launch import config_file
from launch.study_config import StudyConfig
from moddepth_jax.data.directory import lock_directory
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.studies import store
from moddepth_jax.studies.claims import CLAIMS, STUDIES
from moddepth_jax.studies.places import BEST_DENSE, MIN_SIZES
from moddepth_jax.studies.plan import Plan, Study
from moddepth_jax.studies.runner import StudyRunner
from moddepth_jax.training.summary import num_parameters
from moddepth_jax.training.train_step import init_state
from tests.data.prepared_text import refusal
from tests.forked_commands import ROOT, run_commands
from tests.launch.commands import call, wait_for
from tests.studies.claims_test import variants_of

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
    found = refusal(lambda: StudyConfig(spec, overrides, kind).shallower(size))
    assert message in found
    assert ('takes size=LxD' in found) is ('takes size=LxD' in message)


@functools.cache
def commands_of(target):
    """Flags of each command of a study, by name."""
    command = ['make', '-n', target, 'VENV_PYTHON=python3']
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r'-m launch\.isoflop (.*)', shown.replace('\\\n', ' '))
    flags = [[flag.removeprefix('--').partition('=') for flag in each.split()] for each in commands]
    return [{name: value for name, _, value in each} for each in flags]


@pytest.mark.parametrize('target', ['study', *sorted(STUDIES), 'study-gpu', 'study-moda-gpu'])
def test_every_target_trains_different_models(target):
    """Each variant can be built, and no two of one study are the same model."""
    for given in commands_of(target):
        kind = 'flops' if 'budgets' in given else 'steps'
        overrides = {
            name.removeprefix('config.'): value
            for name, value in given.items()
            if name.startswith('config.') and not value.isdecimal()
        }
        budget = float(given['budgets' if kind == 'flops' else 'steps'].split(',')[0])
        size = given['sizes'].split(',')[-1]
        config = StudyConfig(given['config'], overrides, kind)
        models = {
            variant: from_config(config.config(variant, size, budget)).model
            for variant in given['variants'].split(',')
            if variant != 'shallow'  # dense, of another size
        }
        assert len(set(models.values())) == len(models)
        assert int(config.shallower(size).split('x')[0]) < int(size.split('x')[0])


def study_of(flags):
    """The config, plan and description of a command that `commands_of` returned."""
    kind = 'flops' if 'budgets' in flags else 'steps'
    budgets = flags['budgets' if kind == 'flops' else 'steps'].split(',')
    overrides = {
        name.removeprefix('config.'): int(value) if value.isdecimal() else value
        for name, value in flags.items()
        if name.startswith('config.')
    }
    config = StudyConfig(flags['config'], overrides, kind)
    own_rate = str(config_file.load(flags['config']).optimizer.learning_rate)
    study = Study(
        kind,
        tuple(map(float if kind == 'flops' else int, budgets)),
        tuple(flags['sizes'].split(',')),
        tuple(flags['variants'].split(',')),
        tuple(map(int, flags['seeds'].split(','))),
        tuple(map(float, flags.get('learning_rates', own_rate).split(','))),
    )
    description = {'kind': kind, 'config': flags['config'], 'overrides': overrides}
    return config, Plan(study, config.shallower), description


@pytest.mark.parametrize('target', ['study', *sorted(STUDIES)])
def test_a_target_continues_from_its_committed_results(target, tmp_path):
    """No committed run is trained again, and each belongs to the study."""
    for flags in commands_of(target):
        config, plan, description = study_of(flags)
        results = ROOT / 'results/cpu' / pathlib.Path(flags['workdir']).relative_to('runs')
        earlier = store.read_earlier(results, description, plan)
        if target != 'study-text':  # whose text is not here
            made = tmp_path / results.name, plan, config.hparams, description
            StudyRunner(*made, results=results).check()
        found = store.progress(tmp_path / results.name, plan, earlier)
        assert earlier.rows.keys() <= {run.name for run in found.runs}
        assert not earlier.rows.keys() & {run.name for run in found.missing}


def test_the_default_workdir_is_no_other_study_or_run(tmp_path):
    """Regression: it was that of `make study`, which then refused its own directory."""
    for name in ('study', 'isoflop-study'):
        (tmp_path / 'runs' / name).mkdir(parents=True)
        (tmp_path / 'runs' / name / 'config.json').touch()
    line = ['isoflop', '--config=configs/study.py', '--budgets=1e9', '--sizes=2x64']
    (done,) = run_commands([line], tmp_path, ('launch.cli',))
    assert done.status == 2 and done.stderr.startswith('error: --workdir=runs/isoflop-study: holds')
    targets = ['study', *sorted(STUDIES), 'study-gpu', 'study-moda-gpu']
    used = {flags['workdir'] for target in targets for flags in commands_of(target)}
    assert 'runs/study' in used and not [name for name in used if 'isoflop' in name]


def variants_at(spec):
    """The variants that claims compare there, including claims over several budgets."""
    names = set()
    for claim in CLAIMS:
        budgets = claim.args.get('budgets', [])
        if claim.spec == spec or spec.flops in budgets and claim.spec.study == spec.study:
            names |= variants_of(claim)
    return names - {BEST_DENSE} | ({'dense', 'shallow'} if BEST_DENSE in names else set())


@pytest.mark.parametrize(
    'spec', sorted({claim.spec for claim in CLAIMS if claim.spec}), ids=lambda spec: spec.text
)
def test_every_place_of_the_claims_is_trained_as_planned(spec):
    """One command has its budget, size and seeds, and each variant that a claim names there."""
    commands, unit = commands_of(spec.study), 'budgets' if spec.flops else 'steps'
    assert len({flags['workdir'] for flags in commands}) == len(commands)
    (flags,) = (
        flags
        for flags in commands
        if spec.budget in map(float, flags.get(unit, 'nan').split(','))
        and (not spec.size or spec.size in flags['sizes'].split(','))
    )
    assert spec.study in pathlib.PurePath(flags['workdir']).parts
    assert len(set(flags['seeds'].split(','))) == spec.seeds
    if not spec.size:
        assert len(flags['sizes'].split(',')) >= MIN_SIZES
    assert variants_at(spec) <= set(flags['variants'].split(','))


def _parameters(hparams):
    return num_parameters(jax.eval_shape(lambda: init_state(hparams, 1)).params)


@pytest.mark.parametrize(
    'name, other, count, more',
    [('wider', 'moda', _parameters, 0.05), ('wider_mhc', 'mhc', train_step_flops, 0.15)],
)
def test_wider_models_match_the_parameters_or_flops_of_another(name, other, count, more):
    config = StudyConfig('configs/moda.py', {}, 'steps')
    hparams = [from_config(config.config(each, '8x64', 9)) for each in (name, other, 'dense')]
    wider, matched, dense = map(count, hparams)
    assert abs(wider - matched) < 0.002 * matched and dense < (1 - more) * matched


def test_looped_variants_run_as_many_blocks_as_the_plain_model():
    """`once` has the parameters of the looped model."""
    config = StudyConfig('configs/study.py', {}, 'flops')

    def model(name, size='8x64'):
        return from_config(config.config(name, size, 2e12)).model

    for loops, stored in ((2, 5), (3, 4)):
        names = [f'{name}_{loops}' for name in ('looped', 'recursions', 'once')]
        looped, recursions, once = map(model, names)
        assert looped.num_blocks == recursions.num_blocks == 8
        assert {looped.num_layers, recursions.num_layers, once.num_blocks} == {stored}
    first = model('recursions_3_first')
    assert first.num_layers == 4 and sum(first.reads_first_keys) == 4
    with pytest.raises(ValueError, match='9 blocks of looped_3: must be 2 blocks and a multiple'):
        model('looped_3', '9x64')


def wait_until_unlocked(run):
    while True:
        try:
            return lock_directory(run).close()
        except ValueError:
            time.sleep(0.2)


@pytest.mark.slow
def test_a_killed_study_resumes_and_ends_with_the_same_bytes(tmp_path):
    """Two real training processes stop after their parent is killed; the study then resumes."""
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
