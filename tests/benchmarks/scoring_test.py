"""The benchmark of log-likelihoods compares two ways to the same numbers."""

import itertools

import pytest

from moddepth_jax.benchmarks import scoring
from moddepth_jax.hparams import from_config


@pytest.mark.slow
def test_both_ways_agree(tiny_config, monkeypatch):
    """Up to rounding; the table has a column for each model and length of options."""
    monkeypatch.setattr(scoring, 'QUESTIONS', 3)
    dense = {'data.sequence_length': 128}
    changes = {'dense': dense, 'mod': {**dense, 'model.routing.router': 'learned'}}
    models = {name: from_config(tiny_config(**changed)) for name, changed in changes.items()}
    result = scoring.bench_scoring(models, 1)
    columns = [(row['model'], row['options']) for row in result['rows']]
    assert columns == list(itertools.product(models, scoring.OPTION_TOKENS))
    for row in result['rows']:
        assert row['difference'] < 1e-4 and row['ratio'] == pytest.approx(row['ratio_range'][0])
        assert row['one_by_one_milliseconds'] > 0 and row['requests'] == 12
    table = scoring.scoring_table(result, 'tiny')
    assert {len(cells) for cells in table.lines.values()} == {len(table.heads) - 1} == {4}
