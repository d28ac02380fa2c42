"""Which runs a study trains in which process, and what it writes; training is replaced."""

import dataclasses
import json
import signal
import types

import pytest

from launch.study_config import StudyConfig
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.studies import plots, runner, store
from moddepth_jax.studies.plan import Plan, Study
from moddepth_jax.training.plan import resolve_steps, run_flops
from moddepth_jax.training.run_dir import open_workdir
from moddepth_jax.training.trainer import DivergedError

STUDY = Study(
    'flops', (1e11, 2e11), ('2x64', '4x64'), ('dense', 'mod', 'random'), (0, 1), (0.002, 0.004)
)
AXES = ('parameters', 'flops', 'steps')
SOURCE = 'configs/study.py'
DESCRIPTION = {
    'kind': 'flops',
    'config': 'configs/study.py',
    'overrides': {'data.source': 'synthetic'},
}


@pytest.fixture
def study(tmp_path):
    config = StudyConfig('configs/study.py', DESCRIPTION['overrides'], STUDY.kind)
    store.open_study(tmp_path, DESCRIPTION)
    plan = Plan(STUDY, config.shallower)
    results = tmp_path / 'committed' / 'study'
    return runner.StudyRunner(
        tmp_path, plan, config.hparams, DESCRIPTION, results=results, source=SOURCE
    )


@pytest.fixture
def trained(monkeypatch):
    names = []

    def train(hparams, directory, source):
        assert source == SOURCE
        names.append(directory.name)
        open_workdir(directory, dataclasses.asdict(hparams))
        if hparams.optimizer.learning_rate == 0.004:
            raise DivergedError('no finite step')
        steps = resolve_steps(hparams)
        summary = dict.fromkeys(('active_parameters', 'epochs', 'skipped_steps'), 0)
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

    def measures(directory, *_):
        (directory / 'measures.json').write_text('{}')

    monkeypatch.setattr(store, 'write_measures', measures)  # there are no checkpoints

    def draw(study, directory):
        for name in plots.FIGURES:
            (directory / f'{name}.png').write_text('')
            (directory / f'{name}.svg').write_text('')

    monkeypatch.setattr(plots, 'draw', draw)  # plots_test and page_test do
    return names


def test_every_run_is_trained_once_for_its_budget_and_drawn(
    study, trained, tmp_path, capsys, monkeypatch
):
    """Its code is compared when the study goes on, and each run keeps a copy of the config file."""
    assert study.train((0, 1)) == 0
    assert len(set(trained)) == len(trained)
    again = list(trained)
    assert study.train((0, 1)) == 0 and trained == again
    compared = []
    monkeypatch.setattr(store, 'check_source', lambda *given: compared.append(given[:2]))
    study.check()
    finished = [tmp_path / 'runs' / name for name in again if 'lr0.002' in name]
    assert {(run, SOURCE) for run in finished} <= set(compared)
    study.finish()
    content = store.read_study(tmp_path)
    assert content['complete'] and content['learning_rates'] == {'64': 0.002}
    for row in content['runs']:
        assert 0.99 < row['total_flops'] / row['budget'] <= 1, row['run']
    assert all((tmp_path / name).exists() for name in ('study.html', 'loss_by_parameters.png'))
    kept = {'study.json', 'measures.json', 'seeds.png', *(f'loss_by_{x}.png' for x in AXES)}
    kept_at = tmp_path / 'committed' / 'study'
    assert {path.name for path in kept_at.iterdir()} == kept
    elsewhere = runner.StudyRunner(
        tmp_path / 'elsewhere', study._plan, study._hparams_of, DESCRIPTION, results=kept_at
    )
    assert elsewhere.run((0, 1), 1) == 0 and trained == again  # all are known by their results
    shown = capsys.readouterr().out
    assert 'diverged' in shown and 'what a run prints' not in shown
    assert (tmp_path / 'logs' / f'{trained[0]}.txt').read_text() == 'what a run prints\n'


def test_each_run_belongs_to_one_process_for_any_number_of_processes():
    parts = [
        runner.part_of_shard((host, 3), child, processes)
        for host, processes in ((0, 1), (1, 3), (2, 2))
        for child in range(processes)
    ]
    for number in range(60):
        assert sum(number % count == index for index, count in parts) == 1


def test_a_signal_ends_the_study_with_its_status(study, trained, monkeypatch):
    stopped = types.SimpleNamespace(signal='SIGTERM', summary=None)
    monkeypatch.setattr(runner, 'train', lambda *_, source: stopped)
    assert study.train((0, 1)) == 128 + signal.SIGTERM
