"""The benchmark of log-likelihoods compares two ways to the same numbers."""

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
    assert [(row['model'], row['options'], row['requests']) for row in result['rows']] == [
        ('dense', 'one token', 12),
        ('dense', '4 to 12 tokens', 12),
        ('mod', 'one token', 12),
        ('mod', '4 to 12 tokens', 12),
    ]
    for row in result['rows']:
        assert row['difference'] < 1e-4 and row['ratio'] == pytest.approx(row['ratio_range'][0])
        assert row['one_by_one_milliseconds'] > 0
    table = scoring.scoring_table(result, 'tiny')
    assert 'tiny' in table.title and len(table.lines) == 5
    assert {len(cells) for cells in table.lines.values()} == {len(table.heads) - 1} == {4}
