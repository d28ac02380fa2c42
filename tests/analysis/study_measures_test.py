import json

from moddepth_jax.studies import study_measures
from tests.studies.made_up_study import made_up


def test_all_seeds_at_the_best_size_of_the_largest_budget_are_measured(tmp_path, monkeypatch):
    """Of the variants that claims ask for; what was measured before is not measured again."""
    study = made_up()
    largest = max(row['budget'] for row in study['runs'])
    wanted = {
        row['run']
        for row in study['runs']
        if row['variant'] in ('dense', 'mod', 'random')
        and row['budget'] == largest
        and row['at_best_size']
    }
    names = study_measures.measured_runs(study)
    assert set(names) == wanted and len(names) == len(wanted) >= 6
    asked = []
    monkeypatch.setattr(
        study_measures, '_measure', lambda place: asked.append(place.name) or {'a': 1}
    )
    study_measures.write_measures(tmp_path, study)
    study_measures.write_measures(tmp_path, study)
    assert asked == names
    assert json.loads((tmp_path / 'measures.json').read_text()) == dict.fromkeys(names, {'a': 1})
