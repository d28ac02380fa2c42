"""Measures are of the weights of a study, and are made once."""

import json

from moddepth_jax.studies import measures, store
from tests.studies.made_up_study import made_up


def test_all_seeds_at_the_best_size_of_the_largest_budget_are_measured_once(tmp_path, monkeypatch):
    """Of the variants that claims need, and of one that a config file adds."""
    study = made_up()
    added = [row for row in study['runs'] if row['variant'] == 'random']
    study['runs'] += [row | {'variant': 'mine', 'run': f'mine of {row["run"]}'} for row in added]
    expected = {
        row['run']
        for row in study['runs']
        if row['variant'] in ('dense', 'mod', 'random', 'mine')
        and row['budget'] == max(study['budgets'])
        and row['at_best_size']
    }
    names = measures.measured_runs(study)
    assert set(names) == expected and len(names) == len(expected) >= 6
    measured = []
    monkeypatch.setattr(measures, '_measure', lambda run: measured.append(run.name) or {'a': 1})
    for _ in range(2):
        measures.write_measures(tmp_path, study)
    assert measured == names
    state = study['runs'][0]['state_sha256']
    expected = dict.fromkeys(names, {'state_sha256': state, 'a': 1})
    assert json.loads((tmp_path / 'measures.json').read_text()) == expected
    # Regression: measures in a folder of results were lost after a larger budget was added.
    smaller = next(row['run'] for row in study['runs'] if row['budget'] < max(study['budgets']))
    earlier = store.NO_RESULTS._replace(measures={smaller: {'state_sha256': state, 'a': 2}})
    measures.write_measures(tmp_path, study, earlier)
    assert json.loads((tmp_path / 'measures.json').read_text()) == expected | earlier.measures


def test_measures_of_other_weights_are_not_kept(tmp_path, monkeypatch):
    """Regression: measures of one run were given to another of the same name.

    The run may be trained again here, or be another one in the folder of results.
    """
    study = made_up(variants=('dense',))
    first, *others = measures.measured_runs(study)
    state = study['runs'][0]['state_sha256']
    monkeypatch.setattr(measures, '_measure', lambda run: {'a': run.name})
    expected = {name: {'state_sha256': state, 'a': name} for name in (first, *others)}
    rows = {first: {}}
    for directory, kept in (('own', {'a': 1}), ('older', {'state_sha256': 'other', 'a': 1})):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / 'measures.json').write_text(json.dumps({first: kept}))
        measures.write_measures(tmp_path / directory, study)
        assert json.loads((tmp_path / directory / 'measures.json').read_text()) == expected
        # A run without a directory cannot be measured again.
        (tmp_path / directory / 'measures.json').unlink()
        earlier = store.NO_RESULTS._replace(rows=rows, measures={first: kept})
        measures.write_measures(tmp_path / directory, study, earlier)
        found = json.loads((tmp_path / directory / 'measures.json').read_text())
        assert found == {name: expected[name] for name in others}
