"""The page holds every run and every warning, and links to the figures."""

import re

import pytest

from moddepth_jax.studies import plots
from moddepth_jax.studies.page import warnings, write_page
from tests.studies.made_up_study import SIZED, made_up


def _sound():
    """More than 500 steps, optima inside the sizes, three seeds, and a weak shallow control."""
    names = ('dense', 'shallow', 'mod', 'random')
    study = made_up(budgets=(2e13,), variants=names, optimum=420_000)
    for row in study['runs']:
        row['loss'] += 0.1 * (row['variant'] == 'shallow') + 0.02 * (not row['at_best_size'])
    return study


@pytest.fixture
def page_of(tmp_path):
    """page_of(study): the text of its page."""

    def make(study):
        write_page(study, tmp_path)
        return (tmp_path / 'study.md').read_text(encoding='utf-8')

    return make


def test_page_holds_every_run_and_figure(page_of):
    """One row of the last table for each run, whatever is in the names."""
    study = made_up(budgets=(6e11,), variants=('dense', 'mod'), seeds=(0,))
    study['variants']['mod']['label'] = 'a | b'
    page = page_of(study)
    assert re.findall(r'\]\((.*)\)', page) == [f'{name}.png' for name in plots.FIGURES]
    runs = page.rpartition('---|')[2].strip().splitlines()
    for row, line in zip(study['runs'], runs, strict=True):
        assert line.startswith(f'| {row["run"]} |') and f'| {row["loss"]:.4f} |' in line
    best = page.partition('**All runs**')[0].splitlines()
    assert len({len(re.findall(r'(?<!\\)\|', line)) for line in best if line[:1] == '|'}) == 1


def _change(rows, **values):
    for row in rows:
        row |= values


@pytest.mark.parametrize(
    ('warning', 'spoil'),
    [
        ('fewer than 500 steps', lambda s: _change(s['runs'][:1], steps=499)),
        ('routing gap of 0.05', lambda s: _change(s['runs'][-1:], routing_gap=0.05)),
        ('diverged and are in no figure', lambda s: _change(s['runs'][:1], loss=None)),
        ('diverged and are in no figure: mod-4x64', lambda s: s.update(diverged=['mod-4x64'])),
        ('1% off', lambda s: _change(s['runs'][:1], total_flops=1.9e13)),
        ('not finished: 1 run is', lambda s: s.update(missing=['mod-4x64'])),
        ('no optimum', lambda s: _change(s['runs'][:1], loss=1.0)),
        ('fewer layers', lambda s: _change((r for r in s['runs'] if 'size_of_mod' in r), loss=0.9)),
        ('of the 3 seeds', lambda s: s.update(runs=[r for r in s['runs'] if r['seed'] < 2])),
        ('largest of those', lambda s: s.update(learning_rates={'64': 0.006})),
    ],
)
def test_each_flaw_of_a_study_is_a_warning_at_the_top_of_the_page(warning, spoil, page_of):
    study = _sound()
    assert warnings(study) == [] and 'Read this first' not in page_of(study)
    spoil(study)
    assert any(warning in text for text in warnings(study))
    page = page_of(study)
    assert page.index(warning) < page.index('![')


def test_means_stand_with_their_spread(page_of):
    study = made_up(budgets=(6e11,), sizes=('4x64',), variants=('dense', 'mod'))
    for row in study['runs']:
        row['loss'] = {'dense': 1.6, 'mod': 1.5}[row['variant']] + 0.01 * (row['seed'] - 1)
        row['bits_per_byte'] = row['loss'] * 1.5
    page = page_of(study)
    assert '| 1.5000 ± 0.0100 | 3 | 2.2500 |' in page and '| 0.9375 |' in page


def test_differences_are_those_of_seeds_in_pairs(page_of):
    """The seed that chose among sizes is left out: here it alone is far off."""
    study = made_up(budgets=(6e11,), variants=('dense', 'mod'), seeds=(0, 1, 2, 3))
    for row in study['runs']:
        shift = {'dense': 0.0, 'mod': -0.1 - 0.001 * row['seed'] - 5 * (row['seed'] == 0)}
        row['bits_per_byte'] = 2.0 + 0.3 * row['seed'] + shift[row['variant']]
    assert '-0.1020 (-0.1045 to -0.0995)' in page_of(study)


def test_a_study_without_runs_has_a_page(page_of):
    page = page_of(made_up(variants=SIZED) | {'runs': [], 'missing': ['dense-4x64'], 'tuning': []})
    assert '0 runs finished, 1 missing' in page and 'The study is not finished' in page
