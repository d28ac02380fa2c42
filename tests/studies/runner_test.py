"""The command and its runs; training itself is replaced but where a test says so."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import jax
import pytest

from launch.study_config import StudyConfig
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.studies import runner
from moddepth_jax.studies import store as study_lib
from moddepth_jax.studies.plan import Plan, Study
from moddepth_jax.training.plan import resolve_steps
from moddepth_jax.training.run_dir import WorkdirLock, open_workdir
from moddepth_jax.training.stages import run_flops
from moddepth_jax.training.summary import num_parameters
from moddepth_jax.training.train_step import init_state
from moddepth_jax.training.trainer import DivergedError

ROOT = pathlib.Path(__file__).parents[2]
STUDY = Study(
    'flops', (1e11, 2e11), ('2x64', '4x64'), ('dense', 'mod', 'random'), (0, 1), (0.002, 0.004)
)
OVERRIDES = {'data.source': 'synthetic'}
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


def isoflop(*arguments, **environment):
    command = [sys.executable, '-m', 'launch.isoflop', '--config=configs/study.py', *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def runs(tmp_path):
    config = StudyConfig('configs/study.py', OVERRIDES, STUDY.kind)
    plan = Plan(STUDY, config.shallower)
    told = {'kind': STUDY.kind, 'config': 'configs/study.py', 'overrides': OVERRIDES}
    study_lib.open_study(tmp_path, told)
    return runner.StudyRuns(tmp_path, plan, config.hparams, told)


@pytest.fixture
def trained(monkeypatch):
    """Replaces training by the writing of what a run leaves; names of the runs, as they end."""
    names = []

    def train(hparams, directory):
        names.append(directory.name)
        open_workdir(directory, dataclasses.asdict(hparams))
        if hparams.optimizer.learning_rate == 0.004:
            raise DivergedError('no finite step')
        steps = resolve_steps(hparams)
        summary = dict.fromkeys(('parameters', 'active_parameters', 'epochs', 'skipped_steps'), 0)
        summary |= {'eval': {'loss': 1.0 + len(names) / 100, 'bits_per_byte': 1.5}}
        summary['parameters'] = 1000 * hparams.model.num_layers
        summary |= {'flops_per_step': train_step_flops(hparams), 'final_step': steps}
        summary |= {'total_flops': run_flops(hparams, steps), 'routing': {}, 'experts': {}}
        summary |= {'versions': {}, 'corpus_sha256': '', 'state_sha256': directory.name}
        (directory / 'summary.json').write_text(json.dumps(summary))
        (directory / 'metrics.jsonl').write_text('{"step": 1, "loss": 2.0}\n')
        print('what a run prints')
        return types.SimpleNamespace(signal=None, summary=summary)

    monkeypatch.setattr(runner, 'train', train)
    monkeypatch.setattr(runner, 'write_measures', lambda *_: None)  # of no checkpoint
    return names


def rows_of(directory):
    return study_lib.read_study(directory)['runs']


def test_every_run_is_trained_once_and_drawn(runs, trained, tmp_path, capsys):
    assert runs.train((0, 1)) == 0
    assert len(set(trained)) == len(trained)
    again = list(trained)
    assert runs.train((0, 1)) == 0 and trained == again
    assert runs.finish() == 0
    content = study_lib.read_study(tmp_path)
    assert content['whole'] and content['learning_rates'] == {'64': 0.002}
    assert all((tmp_path / name).exists() for name in ('study.html', 'loss_by_parameters.png'))
    shown = capsys.readouterr().out
    assert 'diverged' in shown and 'what a run prints' not in shown
    assert (tmp_path / 'logs' / f'{trained[0]}.txt').read_text() == 'what a run prints\n'


def test_runs_spend_their_budget(runs, trained, tmp_path):
    runs.train((0, 1))
    runs.finish()
    for row in rows_of(tmp_path):
        assert 0.99 < row['total_flops'] / row['budget'] <= 1, row['run']


def test_shards_share_the_runs_and_wait_for_each_other(runs, trained, monkeypatch):
    """The first shard alone comes to a stop; the second does its share whenever the first waits."""
    shares, mine = {0: [], 1: []}, runs._train_one

    def of_shard(shard):
        def train_one(run):
            shares[shard].append(run.name)
            return mine(run)

        return train_one

    def other(_):
        monkeypatch.setattr(runs, '_train_one', of_shard(1))
        monkeypatch.setattr(runner.time, 'sleep', lambda _: (_ for _ in ()).throw(EOFError))
        with contextlib.suppress(EOFError):  # it waits as well, or all are finished
            runs.train((1, 2))
        monkeypatch.setattr(runner.time, 'sleep', other)
        monkeypatch.setattr(runs, '_train_one', of_shard(0))

    monkeypatch.setattr(runner.time, 'sleep', other)
    monkeypatch.setattr(runs, '_train_one', of_shard(0))
    assert runs.train((0, 2)) == 0
    assert not set(shares[0]) & set(shares[1])
    assert len(shares[0]) + len(shares[1]) == len(trained)
    assert abs(len(shares[0]) - len(shares[1])) <= 2


def test_every_run_is_of_one_process_whatever_the_hosts_start():
    hosts = {0: 1, 1: 3, 2: 2}  # shard: processes
    for number in range(60):
        takers = [
            (shard, child)
            for shard, processes in hosts.items()
            for child in range(processes)
            for index, count in [runner.part_of_shard((shard, 3), child, processes)]
            if number % count == index
        ]
        assert len(takers) == 1 and takers[0][0] == number % 3


def test_a_finished_run_of_other_knobs_stops_the_study_before_it_trains(runs, trained, tmp_path):
    runs.train((0, 1))
    runs.check()
    config = tmp_path / 'runs' / trained[0] / 'config.json'
    config.write_text(config.read_text().replace('"weight_decay": 0.1', '"weight_decay": 0.2'))
    with pytest.raises(ValueError, match='optimizer.weight_decay is 0.2'):
        runs.check()


def test_a_signal_ends_the_study_with_its_status(runs, trained, monkeypatch):
    stopped = types.SimpleNamespace(signal='SIGTERM', summary=None)
    monkeypatch.setattr(runner, 'train', lambda *_: stopped)
    assert runs.train((0, 1)) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    'arguments, words',
    [
        (['--sizes=2x64', '--budgets=1e3'], 'dense at size 2x64: flop_budget=1000: pays for no'),
        (
            ['--sizes=2x64', '--budgets=1e9', '--steps=5'],
            '(training FLOPs) or --steps, one of both',
        ),
        (['--sizes=2x64', '--budgets=few'], '--budgets=few: must be numbers'),
        (['--sizes=2x64', '--budgets=1e9', '--shard=2/2'], '--shard=2/2'),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path, arguments, words):
    process = isoflop(f'--workdir={tmp_path}/new', *arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert words in errors and errors.count('\n') == 1
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(
    'spec, kind, overrides, size, words',
    [
        ('configs/study.py', 'flops', {}, '4x65', "size='4x65'"),
        ('configs/study.py', 'steps', {}, '4x64', 'takes size=LxD and steps='),
        ('configs/tiny.py', 'flops', {}, '4x64', 'takes size=LxD and budget='),
        ('configs/study.py', 'flops', {'seed': 3}, '4x64', '--config.seed=3: a study sets it'),
        ('configs/study.py', 'flops', {'model.num_layers': 3}, '4x64', 'use --sizes'),
        ('configs/study.py', 'flops', {'model.routing.capacity': 0.5}, '4x64', 'use --variants'),
    ],
)
def test_a_config_that_makes_no_study_is_told_in_one_line(spec, kind, overrides, size, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        StudyConfig(spec, overrides, kind).shallower(size)
    assert '\n' not in str(error.value)


def flags_of(target):
    """The flags of launch.isoflop in a target of the Makefile."""
    command = ['make', '-n', target, 'VENV_PYTHON=python3']
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    recipe = shown.replace('\\\n', ' ').split('-m launch.isoflop', 1)[1].split('\n')[0]
    return dict(flag.removeprefix('--').split('=', 1) for flag in recipe.split())


@pytest.mark.parametrize(
    'target', ['study', 'study-long', 'study-moda', 'study-experts', 'study-gpu', 'study-moda-gpu']
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


def test_the_shallower_model_costs_most_nearly_what_mod_does():
    config = StudyConfig('configs/study.py', {}, 'flops')
    assert config.shallower('8x64') == '5x64' and config.shallower('4x64') == '2x64'


def test_the_wider_model_has_as_many_parameters_as_moda():
    config = StudyConfig('configs/moda.py', {}, 'steps')
    hparams = [from_config(config.config(name, '8x64', 9)) for name in ('wider', 'moda', 'dense')]
    wider, moda, dense = (
        num_parameters(jax.eval_shape(lambda h=h: init_state(h, 1)).params) for h in hparams
    )
    assert abs(wider - moda) < 0.002 * moda and dense < 0.95 * moda


def test_the_plan_comes_first(tmp_path):
    process = isoflop(*FLAGS, f'--workdir={tmp_path}/new', '--dry_run')
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and not errors
    assert 'budget    1e+09 flops: up to 2 runs' in shown and 'time      about' in shown
    assert not (tmp_path / 'new').exists()


def wait_until_free(run):
    while True:
        try:
            return WorkdirLock(run).close()
        except ValueError:
            time.sleep(0.2)


@pytest.mark.slow
def test_a_study_that_is_killed_and_started_again_ends_with_the_same_bytes(tmp_path):
    """Really trained, by two processes, of which nothing goes on after the first is killed."""
    flags = [*FLAGS, '--processes=2']
    whole = isoflop(*flags, f'--workdir={tmp_path}/whole', NPROC='1')
    shown, errors = whole.communicate(timeout=600)
    assert whole.returncode == 0, shown + errors
    killed = isoflop(*flags, f'--workdir={tmp_path}/killed', NPROC='1')
    while not list((tmp_path / 'killed').glob('runs/*/summary.json')):
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert not (tmp_path / 'killed' / 'study.json').exists()
    time.sleep(3)  # its children notice
    for run in (tmp_path / 'killed' / 'runs').iterdir():
        wait_until_free(run)
    again = isoflop(*flags, f'--workdir={tmp_path}/killed', NPROC='1')
    shown, errors = again.communicate(timeout=600)
    assert again.returncode == 0, shown + errors
    files = ('study.json', 'study.html', 'loss_by_parameters.svg')
    for name in files:
        assert (tmp_path / 'killed' / name).read_bytes() == (tmp_path / 'whole' / name).read_bytes()
