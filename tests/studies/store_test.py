"""The directory of a study: its content, its progress, and study.json."""

import dataclasses
import json
import os

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.studies import store
from moddepth_jax.studies.plan import Plan, Study
from moddepth_jax.training.run_dir import open_workdir

PLAN = Plan(
    Study('flops', (1e9, 2e9), ('2x64', '4x64'), ('dense', 'mod'), (0, 1), (0.003,)),
    lambda size: size,
)
DESCRIPTION = {'kind': 'flops', 'config': 'configs/study.py', 'overrides': {}}


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
    place = store.run_directory(directory, run.name)
    open_workdir(place, dataclasses.asdict(hparams))
    numbers = ('parameters', 'active_parameters', 'total_flops', 'epochs', 'skipped_steps')
    summary = dict.fromkeys(numbers, 7) | {'flops_per_step': 6.0, 'final_step': 4}
    summary |= {'eval': {'loss': loss, 'bits_per_byte': loss / 0.7}, 'routing': {}, 'experts': {}}
    summary |= {'versions': {'jax': '1'}, 'corpus_sha256': 'c', 'state_sha256': run.name}
    costs = (9.0, 6.0) if run.variant == 'mod' else (6.0,)
    summary['stages'] = [
        {'first_step': first, 'flops_per_step': cost, 'routing': 'top_c'}
        for first, cost in enumerate(costs)
    ]
    summary['seconds'] = id(run)  # different each time, as a clock
    (place / 'summary.json').write_text(json.dumps(summary))
    rows = [{'step': step, 'loss': 5.0 - step} for step in range(1, 5)]
    rows.insert(2, {'step': 2, 'eval/loss': 1.0})
    (place / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def finish_all(directory, hparams_of, order=1):
    while missing := store.progress(directory, PLAN).missing:
        for run in missing[::order]:
            finish(directory, run, hparams_of(run), 1.0 + 0.1 * (run.size == '2x64'))


def test_finished_runs_determine_the_next_ones(tmp_path, hparams_of):
    start = store.progress(tmp_path, PLAN)
    assert len(start.runs) == len(start.missing) == 8 and not start.complete
    finish(tmp_path, start.missing[0], hparams_of(start.missing[0]), 1.0)
    assert store.progress(tmp_path, PLAN).missing == start.missing[1:]
    content = store.collect(tmp_path, PLAN, DESCRIPTION, hparams_of)
    assert [row['run'] for row in content['runs']] == [start.missing[0].name]
    missing = sorted(run.name for run in start.missing[1:])
    assert content['missing'] == missing and not content['complete']
    finish_all(tmp_path, hparams_of)
    end = store.progress(tmp_path, PLAN)
    assert end.complete and not end.missing
    repeated = {(run.size, run.budget) for run in end.runs if run.seed == 1}
    assert repeated == {('4x64', 2e9)}  # only the best size runs with other seeds


def test_study_json_does_not_depend_on_the_order_of_the_runs(tmp_path, hparams_of):
    contents = []
    for name, order in (('forwards', 1), ('backwards', -1)):
        finish_all(tmp_path / name, hparams_of, order)
        contents.append(store.collect(tmp_path / name, PLAN, DESCRIPTION, hparams_of))
    assert json.dumps(contents[0]) == json.dumps(contents[1])
    assert contents[0]['complete'] and not contents[0]['missing']
    rows = contents[0]['runs']
    places = [(row['budget'], row['variant'], row['size'], row['seed']) for row in rows]
    assert places == sorted(places) and len(places) == 10
    assert [row['at_best_size'] for row in rows[:4]] == [False, True, False, True]
    assert rows[0]['curve'] == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]
    first, last = ({'first_step': n, 'flops_per_step': cost} for n, cost in ((0, 9.0), (1, 6.0)))
    stages = {row['variant']: row.get('stages') for row in rows}
    assert stages == {'dense': None, 'mod': [first, last]}  # only where the costs differ


def write_results(directory, results, study, measures='{}'):
    (directory / store.STUDY_FILE).write_text(json.dumps(study))
    (directory / 'measures.json').write_text(measures)
    (directory / 'seeds.png').write_bytes(b'\x89PNG')
    store.copy_results(directory, results, study)


def test_a_study_continues_from_its_results_without_its_runs(tmp_path, hparams_of):
    """Half of the runs are only in the folder of results; study.json is the same."""
    finish_all(tmp_path / 'uninterrupted', hparams_of)
    expected = store.collect(tmp_path / 'uninterrupted', PLAN, DESCRIPTION, hparams_of)
    half = store.progress(tmp_path, PLAN).missing[::2]
    for run in half:
        finish(tmp_path / 'first', run, hparams_of(run), 1.0 + 0.1 * (run.size == '2x64'))
    assert store.read_earlier(tmp_path / 'results', DESCRIPTION, PLAN) == store.NO_RESULTS
    content = store.collect(tmp_path / 'first', PLAN, DESCRIPTION, hparams_of)
    write_results(tmp_path / 'first', tmp_path / 'results', content, '{"mod": {}}')

    earlier = store.read_earlier(tmp_path / 'results', DESCRIPTION, PLAN)
    assert earlier.measures == {'mod': {}} and not store.models_without_digest(earlier)
    second = tmp_path / 'second'
    while missing := store.progress(second, PLAN, earlier).missing:
        assert not {run.name for run in missing} & {run.name for run in half}
        for run in missing:
            finish(second, run, hparams_of(run), 1.0 + 0.1 * (run.size == '2x64'))
    found = store.collect(second, PLAN, DESCRIPTION, hparams_of, earlier)
    assert json.dumps(found) == json.dumps(expected)

    other = earlier._replace(content=content | {'corpus_sha256': 'other'})
    with pytest.raises(ValueError, match='read different texts, with SHA-256 c and other'):
        store.collect(second, PLAN, DESCRIPTION, hparams_of, other)
    with pytest.raises(ValueError, match="config is 'configs/study.py' in its study.json"):
        store.read_earlier(tmp_path / 'results', DESCRIPTION | {'config': 'configs/moda.py'}, PLAN)
    (tmp_path / 'results' / store.STUDY_FILE).write_text('{}')
    with pytest.raises(ValueError, match="kind is None in its study.json and 'flops' in this"):
        store.read_earlier(tmp_path / 'results', DESCRIPTION, PLAN)
    with pytest.raises(ValueError, match='has steps 4 there and 5 in this study'):
        store.check_earlier(earlier, half[0], hparams_of(half[0]), 5)


def other_plan(**changes):
    return Plan(dataclasses.replace(PLAN.study, **changes), lambda size: size)


def test_results_never_lose_a_run(tmp_path, hparams_of, monkeypatch):
    """Regression: a smaller study, or one with a larger budget, replaced 72 rows by 4 or by 1.

    Seeds other than the first run at the largest budget only. The new files appear atomically.
    """
    first, results = tmp_path / 'first', tmp_path / 'results'
    finish_all(first, hparams_of)
    write_results(first, results, store.collect(first, PLAN, DESCRIPTION, hparams_of))
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    assert set(before) == {'study.json', 'measures.json', 'seeds.png'}
    for changes, words in (
        ({'seeds': (0,)}, r'seeds is \[0, 1\] in its study.json and \[0\] in this study'),
        ({'variants': ('mod',)}, 'variants is .* may only be added'),
        ({'sizes': ('2x64',)}, 'sizes is'),
        ({'learning_rates': (0.003, 0.006)}, 'learning_rates is'),
        (
            {'budgets': (1e9, 2e9, 4e9)},
            '2 of its runs, such as dense-4x64-2e09-lr0.003-seed1, are not in',
        ),
    ):
        with pytest.raises(ValueError, match=f'^--results={results}: {words}.*; use another --res'):
            store.read_earlier(results, DESCRIPTION, other_plan(**changes))
    grown = other_plan(seeds=(0, 1, 2), variants=('dense', 'mod', 'random'))
    assert len(store.read_earlier(results, DESCRIPTION, grown).rows) == 10

    # The folder may have got more runs since the study began.
    finish_all(tmp_path / 'later', hparams_of)
    fewer = other_plan(seeds=(0,))
    study = store.collect(tmp_path / 'later', fewer, DESCRIPTION, hparams_of)
    with pytest.raises(ValueError, match='2 of its runs, such as .*, are not in this study; use'):
        write_results(tmp_path / 'later', results, study)
    # Regression: another run of the same name replaced it without a word.
    other = store.collect(first, PLAN, DESCRIPTION, hparams_of)
    name = other['runs'][0]['run']
    other['runs'][0]['state_sha256'] = 'another'
    right = f'remove {tmp_path}/later/runs/{name} to keep that run, or use another --results$'
    message = f'{name} has other weights there .state_sha256 {name[:8]}, not another.; {right}'
    with pytest.raises(ValueError, match=f'^--results={results}: {message}'):
        write_results(tmp_path / 'later', results, other)
    # Regression: so did one that had diverged there.
    study = store.collect(first, PLAN, DESCRIPTION, hparams_of)
    rows = [row for row in study['runs'] if row['run'] != name]
    write_results(first, tmp_path / 'lost', study | {'runs': rows, 'diverged': [name]})
    with pytest.raises(ValueError, match=f'state_sha256 diverged, not {name[:8]}'):
        write_results(first, tmp_path / 'lost', study)
    monkeypatch.setattr(os, 'fsync', lambda _: os.write(-1, b''))  # OSError, as if the disk is full
    study = store.collect(first, PLAN, DESCRIPTION | {'new': 1}, hparams_of)
    with pytest.raises(OSError, match='Bad file'):
        write_results(first, results, study)
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


def test_results_of_other_knobs_are_refused(tmp_path, hparams_of, monkeypatch):
    """Regression: runs of other knobs counted as finished if their steps and FLOPs were equal.

    Knobs that change nothing or only rounding may differ, and so may one that was added later, at
    the value that older runs get. A model whose runs have no digest is accepted, and gets none.
    """
    run = store.progress(tmp_path, PLAN).missing[0]
    hparams = hparams_of(run)
    finish(tmp_path, run, hparams, 1.0)
    content = store.collect(tmp_path, PLAN, DESCRIPTION, hparams_of)
    digest = store.settings_sha256(hparams)
    assert content['settings_sha256'] == {'dense-2x64-1e09': digest}
    assert run.name == 'dense-2x64-1e09-lr0.003-seed0'
    earlier = store.NO_RESULTS._replace(content=content)

    def changed(group, **knobs):
        return dataclasses.replace(
            hparams, **{group: dataclasses.replace(getattr(hparams, group), **knobs)}
        )

    for same in (changed('model', remat='block'), changed('report', top_p=0.5)):
        store.check_earlier(earlier, run, dataclasses.replace(same, seed=7), 4)
    other = changed('optimizer', weight_decay=0.5)
    message = f'dense-2x64-1e09 has other knobs there .settings_sha256 {digest[:8]}, not '
    with pytest.raises(ValueError, match=f'^--results: {message}.*; use another folder$'):
        store.check_earlier(earlier, run, other, 4)
    store.check_earlier(store.NO_RESULTS, run, other, 4)
    old = content | {'settings_sha256': {}}
    old = store.NO_RESULTS._replace(content=old, rows={row['run']: row for row in old['runs']})
    assert store.models_without_digest(old) == {run.model_name}
    grown = other_plan(seeds=(0, 1, 2))
    assert store.collect(tmp_path, grown, DESCRIPTION, hparams_of, old)['settings_sha256'] == {}
    monkeypatch.setitem(store.OLDER_RUNS, 'later', 3)
    for value, same in ((3, True), (4, False)):
        knobs = dataclasses.asdict(hparams) | {'later': value}
        with monkeypatch.context() as patch:
            patch.setattr(dataclasses, 'asdict', lambda _, knobs=knobs: knobs)
            assert (store.settings_sha256(hparams) == digest) == same


def test_a_run_that_diverged_has_no_row_and_is_not_trained_again(tmp_path, hparams_of):
    left = store.progress(tmp_path, PLAN).missing
    place = store.run_directory(tmp_path, left[0].name)
    place.mkdir(parents=True)
    (place / store.DIVERGED_FILE).write_text('{}')
    finish_all(tmp_path, hparams_of)
    content = store.collect(tmp_path, PLAN, DESCRIPTION, hparams_of)
    assert left[0].name not in {row['run'] for row in content['runs']} | set(content['missing'])
    assert content['diverged'] == [left[0].name]


def test_a_finished_run_with_other_knobs_is_refused(tmp_path, hparams_of):
    left = store.progress(tmp_path, PLAN).missing
    hparams = hparams_of(left[0])
    other = dataclasses.replace(
        hparams, optimizer=dataclasses.replace(hparams.optimizer, weight_decay=0.5)
    )
    finish(tmp_path, left[0], other, 1.0)
    with pytest.raises(ValueError, match='optimizer.weight_decay is 0.5 in its config.json'):
        store.check_run(tmp_path, left[0], hparams)
    with pytest.raises(ValueError, match='optimizer.weight_decay'):
        store.collect(tmp_path, PLAN, DESCRIPTION, hparams_of)
    free = {'report': dataclasses.replace(hparams.report, sample_tokens=3)}
    free['model'] = dataclasses.replace(hparams_of(left[1]).model, remat='block')
    finish(tmp_path, left[1], dataclasses.replace(hparams_of(left[1]), **free), 1.0)
    assert hparams.model.remat != 'block'
    store.check_run(tmp_path, left[1], hparams_of(left[1]))


def test_a_directory_belongs_to_one_study_which_may_grow(tmp_path):
    plan = DESCRIPTION | {'budgets': [1e9], 'seeds': [0], 'sizes': ['2x64'], 'variants': ['dense']}
    store.open_study(tmp_path / 'new', plan)
    plan |= {'seeds': [0, 1]}
    store.open_study(tmp_path / 'new', plan)
    assert json.loads((tmp_path / 'new/plan.json').read_text())['seeds'] == [0, 1]
    changes = {'seeds': [1]}, {'seeds': [1, 0]}, {'sizes': ['2x64', '4x64']}, {'config': 'other.py'}
    for change in changes:
        with pytest.raises(ValueError, match='use another --workdir') as error:
            store.open_study(tmp_path / 'new', plan | change)
        assert next(iter(change)) in str(error.value)
    assert json.loads((tmp_path / 'new/plan.json').read_text())['seeds'] == [0, 1]


def test_a_directory_with_other_content_is_refused(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(ValueError, match="holds 'config.json' but no plan.json"):
        store.open_study(tmp_path, DESCRIPTION)
    with pytest.raises(ValueError, match='is a file'):
        store.open_study(tmp_path / 'config.json', DESCRIPTION)
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']
    with pytest.raises(ValueError, match='no study.json in it'):
        store.read_study(tmp_path)


def test_each_point_of_a_curve_is_the_mean_since_the_previous_point():
    rows = [{'step': step, 'loss': float(step)} for step in range(1, 101)]
    assert store.training_curve(rows, 4) == [[25, 13.0], [50, 38.0], [75, 63.0], [100, 88.0]]
    assert store.training_curve([{'step': 3, 'eval/loss': 1.0}], 4) == []
