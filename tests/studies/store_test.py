import dataclasses
import json

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.studies import store as study_lib
from moddepth_jax.studies.plan import Plan, Study
from moddepth_jax.training.run_dir import open_workdir

PLAN = Plan(
    Study('flops', (1e9, 2e9), ('2x64', '4x64'), ('dense', 'mod'), (0, 1), (0.003,)),
    lambda size: size,
)
TOLD = {'kind': 'flops', 'config': 'configs/study.py', 'overrides': {}}


@pytest.fixture
def hparams_of(tiny_config):
    def build(run):
        config = tiny_config(**{'seed': run.seed})
        config.optimizer.learning_rate = run.learning_rate
        config.model.num_layers = int(run.trained.split('x')[0])
        config.model.routing.router = 'learned' if run.variant == 'mod' else 'none'
        return from_config(config)

    return build


def finish(directory, run, hparams, loss):
    """A finished run as `train` leaves it, as far as a study reads it."""
    place = study_lib.run_directory(directory, run.name)
    open_workdir(place, dataclasses.asdict(hparams))
    numbers = ('parameters', 'active_parameters', 'total_flops', 'epochs', 'skipped_steps')
    summary = dict.fromkeys(numbers, 7) | {'flops_per_step': 6.0, 'final_step': 4}
    summary |= {'eval': {'loss': loss, 'bits_per_byte': loss / 0.7}, 'routing': {}, 'experts': {}}
    summary |= {'versions': {'jax': '1'}, 'corpus_sha256': 'c', 'state_sha256': run.name}
    summary['seconds'] = id(run)  # as unforeseeable as a clock
    (place / 'summary.json').write_text(json.dumps(summary))
    rows = [{'step': step, 'loss': 5.0 - step} for step in range(1, 5)]
    rows.insert(2, {'step': 2, 'eval/loss': 1.0})
    (place / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def finish_all(directory, hparams_of, order=1):
    left = True
    while left:
        _, left, _ = study_lib.known_plan(directory, PLAN)
        for run in left[::order]:
            finish(directory, run, hparams_of(run), 1.0 + 0.1 * (run.size == '2x64'))


def test_a_study_is_known_as_far_as_its_runs_are_finished(tmp_path, hparams_of):
    runs, left, whole = study_lib.known_plan(tmp_path, PLAN)
    assert len(runs) == len(left) == 8 and not whole
    finish(tmp_path, left[0], hparams_of(left[0]), 1.0)
    assert study_lib.known_plan(tmp_path, PLAN)[1] == left[1:]
    finish_all(tmp_path, hparams_of)
    runs, left, whole = study_lib.known_plan(tmp_path, PLAN)
    assert whole and not left
    assert {(run.size, run.budget) for run in runs if run.seed == 1} == {
        ('2x64', 2e9),
        ('4x64', 2e9),
    }


def test_the_order_of_the_runs_leaves_no_trace(tmp_path, hparams_of):
    contents = []
    for name, order in (('forwards', 1), ('backwards', -1)):
        finish_all(tmp_path / name, hparams_of, order)
        contents.append(study_lib.collect(tmp_path / name, PLAN, TOLD, hparams_of))
    assert json.dumps(contents[0]) == json.dumps(contents[1])
    assert contents[0]['whole'] and not contents[0]['missing']
    rows = contents[0]['runs']
    assert [(row['budget'], row['variant'], row['size'], row['seed']) for row in rows[:4]] == [
        (1e9, 'dense', '2x64', 0),
        (1e9, 'dense', '4x64', 0),
        (1e9, 'mod', '2x64', 0),
        (1e9, 'mod', '4x64', 0),
    ]
    assert [row['at_best_size'] for row in rows[:4]] == [False, True, False, True]
    assert rows[0]['curve'] == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]


def test_half_a_study_says_what_is_missing(tmp_path, hparams_of):
    _, left, _ = study_lib.known_plan(tmp_path, PLAN)
    finish(tmp_path, left[0], hparams_of(left[0]), 1.0)
    content = study_lib.collect(tmp_path, PLAN, TOLD, hparams_of)
    assert [row['run'] for row in content['runs']] == [left[0].name]
    assert content['missing'] == sorted(run.name for run in left[1:]) and not content['whole']


def test_a_run_that_diverged_is_no_row_and_is_not_trained_again(tmp_path, hparams_of):
    _, left, _ = study_lib.known_plan(tmp_path, PLAN)
    place = study_lib.run_directory(tmp_path, left[0].name)
    place.mkdir(parents=True)
    (place / study_lib.DIVERGED_FILE).write_text('{}')
    finish_all(tmp_path, hparams_of)
    content = study_lib.collect(tmp_path, PLAN, TOLD, hparams_of)
    assert left[0].name not in {row['run'] for row in content['runs']} | set(content['missing'])
    assert content['diverged'] == [left[0].name]


def test_a_finished_run_of_other_knobs_is_refused(tmp_path, hparams_of):
    _, left, _ = study_lib.known_plan(tmp_path, PLAN)
    hparams = hparams_of(left[0])
    other = dataclasses.replace(
        hparams, optimizer=dataclasses.replace(hparams.optimizer, weight_decay=0.5)
    )
    finish(tmp_path, left[0], other, 1.0)
    with pytest.raises(ValueError, match='optimizer.weight_decay is 0.5 in its config.json'):
        study_lib.check_run(tmp_path, left[0], hparams)
    with pytest.raises(ValueError, match='optimizer.weight_decay'):
        study_lib.collect(tmp_path, PLAN, TOLD, hparams_of)
    report = dataclasses.replace(hparams.report, sample_tokens=3)
    finish(tmp_path, left[1], dataclasses.replace(hparams_of(left[1]), report=report), 1.0)
    study_lib.check_run(tmp_path, left[1], hparams_of(left[1]))


def test_a_directory_belongs_to_one_study_which_may_grow(tmp_path):
    plan = TOLD | {'budgets': [1e9], 'seeds': [0], 'sizes': ['2x64'], 'variants': ['dense']}
    study_lib.open_study(tmp_path / 'new', plan)
    plan |= {'seeds': [0, 1]}
    study_lib.open_study(tmp_path / 'new', plan)
    assert study_lib.read_plan(tmp_path / 'new')['seeds'] == [0, 1]
    for change in (
        {'seeds': [1]},
        {'seeds': [1, 0]},
        {'sizes': ['2x64', '4x64']},
        {'config': 'configs/moda.py'},
    ):
        with pytest.raises(ValueError, match='use another --workdir') as error:
            study_lib.open_study(tmp_path / 'new', plan | change)
        assert next(iter(change)) in str(error.value)
    assert study_lib.read_plan(tmp_path / 'new')['seeds'] == [0, 1]


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(ValueError, match="holds 'config.json' but no plan.json"):
        study_lib.open_study(tmp_path, TOLD)
    with pytest.raises(ValueError, match='is a file'):
        study_lib.open_study(tmp_path / 'config.json', TOLD)
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']
    with pytest.raises(ValueError, match='no study.json in it'):
        study_lib.read_study(tmp_path)


def test_a_curve_is_the_mean_of_what_lies_between_its_points():
    rows = [{'step': step, 'loss': float(step)} for step in range(1, 101)]
    assert study_lib.curve(rows, points=4) == [[25, 13.0], [50, 38.0], [75, 63.0], [100, 88.0]]
    assert study_lib.curve([{'step': 3, 'eval/loss': 1.0}]) == []
