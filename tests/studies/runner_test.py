"""Which runs a study trains in which process, and what it writes; training is replaced."""

import dataclasses
import functools
import json
import signal
import types

import pytest

from launch.study_config import StudyConfig
from moddepth_jax.data.corpus import load_corpus
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.studies import measures, plots, runner, store
from moddepth_jax.studies.plan import VARIANTS, Plan, Study
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
    store.open_study(tmp_path, store.plan_content(DESCRIPTION, STUDY))
    plan = Plan(STUDY, config.shallower)
    results = tmp_path / 'committed' / 'study'
    return runner.StudyRunner(
        tmp_path, plan, config.hparams, DESCRIPTION, results=results, source=SOURCE
    )


@functools.cache
def sha256_of(data):
    return load_corpus(data).sha256


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
        text = sha256_of(hparams.data)
        summary |= {'versions': {}, 'corpus_sha256': text, 'state_sha256': directory.name}
        (directory / 'summary.json').write_text(json.dumps(summary))
        (directory / 'metrics.jsonl').write_text('{"step": 1, "loss": 2.0}\n')
        print('what a run prints')
        return types.SimpleNamespace(signal=None, summary=summary)

    monkeypatch.setattr(runner, 'train', train)

    def no_measures(directory, *_):
        (directory / 'measures.json').write_text('{}')

    monkeypatch.setattr(measures, 'write_measures', no_measures)  # there are no checkpoints

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
    count = len(again)
    assert f'in all    {count} runs, ' in shown and f'; {count} runs are finished' in shown
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


def test_nothing_is_drawn_without_a_finished_run(study, trained, tmp_path):
    """Regression: a wrong --workdir got an empty study."""
    with pytest.raises(ValueError, match='no finished run of this study; train first, without'):
        study.run((0, 1), 1, draw_only=True)
    assert not (tmp_path / 'study.json').exists()


@pytest.mark.parametrize('look', ['purple h', 'rose', 'rose nothing'])
def test_a_look_that_cannot_be_drawn_is_refused_before_a_run_trains(look, study, monkeypatch):
    monkeypatch.setitem(VARIANTS, 'random', VARIANTS['random']._replace(look=look))
    with pytest.raises(ValueError, match=f'^variants=random: look={look!r}: must be one of black'):
        study.check()


@pytest.mark.parametrize('place', ['.', 'elsewhere'])
def test_a_budget_below_that_of_the_tuning_is_refused_at_the_start(place, study, trained, tmp_path):
    """Regression: all runs were trained again, and then refused."""
    assert study.run((0, 1), 1) == 0
    more = Plan(dataclasses.replace(STUDY, budgets=(1e10, 1e11, 2e11)), study._plan._shallower)
    found = r'budget 1e\+10 is below 1e\+11, at which the learning rates were tuned'
    with pytest.raises(ValueError, match=found):
        made = tmp_path / place, more, study._hparams_of, DESCRIPTION
        results = None if place == '.' else tmp_path / 'committed' / 'study'
        runner.StudyRunner(*made, results=results, source=SOURCE).run((0, 1), 1)


def test_a_signal_ends_the_study_with_its_status(study, trained, monkeypatch):
    stopped = types.SimpleNamespace(signal='SIGTERM', summary=None)
    monkeypatch.setattr(runner, 'train', lambda *_, source: stopped)
    assert study.train((0, 1)) == 128 + signal.SIGTERM


def with_another_seed(study, tmp_path, place='.'):
    plan = Plan(dataclasses.replace(STUDY, seeds=(0, 1, 2)), study._plan._shallower)
    results = tmp_path / 'committed' / 'study'
    made = tmp_path / place, plan, study._hparams_of, DESCRIPTION
    return runner.StudyRunner(*made, results=results, source=SOURCE)


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize('place', ['.', 'elsewhere'])
def test_another_text_is_refused_before_a_run_trains(place, study, trained, tmp_path):
    """Regression: with another Python all runs were trained, and then refused.

    The finished runs are in the directory of the study or only in the folder of results.
    """
    assert study.train((0, 1)) == 0
    study.finish()
    names = list(trained)
    text = store.read_study(tmp_path)['corpus_sha256'][:8]
    if place == '.':
        path = tmp_path / 'runs' / names[0] / 'summary.json'
        where = path.parent
    else:
        path, where = tmp_path / 'committed' / 'study' / 'study.json', '--results'
    edit(path, lambda content: content.update(corpus_sha256='another'))
    read = f'another text was read there .corpus_sha256 another, here {text}.'
    right = 'use the same versions of Python and packages, or another folder'
    with pytest.raises(ValueError, match=f'^{where}: {read}; {right}$'):
        with_another_seed(study, tmp_path, place).run((0, 1), 1)
    assert trained == names


def test_another_run_of_a_name_in_the_results_is_refused_at_the_start(study, trained, tmp_path):
    assert study.train((0, 1)) == 0
    study.finish()
    file = tmp_path / 'committed' / 'study' / 'study.json'
    edit(file, lambda content: content['runs'][0].update(state_sha256='another'))
    with pytest.raises(ValueError, match='has other weights there .state_sha256 another, not'):
        with_another_seed(study, tmp_path).check()


def test_models_whose_knobs_cannot_be_compared_are_announced(study, trained, tmp_path, capsys):
    assert study.train((0, 1)) == 0
    study.finish()
    with_another_seed(study, tmp_path).announce()
    assert 'settings_sha256' not in capsys.readouterr().out
    file = tmp_path / 'committed' / 'study' / 'study.json'
    edit(file, lambda content: content['settings_sha256'].pop('dense-2x64-1e11'))
    with_another_seed(study, tmp_path).announce()
    shown = capsys.readouterr().out
    assert '1 models, such as dense-2x64-1e11, have no settings_sha256: only their' in shown
