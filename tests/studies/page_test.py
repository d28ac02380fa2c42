"""The page holds every run and every warning, escapes what it quotes, and needs no network."""

import html.parser
import re

import pytest

from moddepth_jax.studies import plots
from moddepth_jax.studies.page import warnings, write_page
from tests.studies.made_up_study import SIZED, made_up

HOSTILE = '</td><script>alert(1)</script>&"$title'
VOID = ('meta', 'img')


class _Reader(html.parser.HTMLParser):
    """Tags, texts and links of a page; tags that are not closed stay open."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts, self.links = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [tag] * (tag not in VOID)
        self.links += [(tag, value) for name, value in attributes if name in ('src', 'href')]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def _sound():
    """More than 500 steps, optima inside the sizes, three seeds judge, and weak shallow models."""
    names = ('dense', 'shallow', 'mod', 'random')
    study = made_up(budgets=(2e13,), variants=names, optimum=420_000)
    for row in study['runs']:
        row['loss'] += 0.1 * (row['variant'] == 'shallow') + 0.02 * (not row['at_best_size'])
    return study


@pytest.fixture
def page_of(tmp_path):
    """page_of(study): the text of its page; its figures are empty."""
    for name in plots.FIGURES:
        (tmp_path / f'{name}.svg').write_text('<svg/>')

    def make(study):
        write_page(study, tmp_path)
        return (tmp_path / 'study.html').read_text(encoding='utf-8')

    return make


def test_page_has_every_run_and_figure_and_loads_nothing(tmp_path):
    """One row of the last table for each run; it links to papers only."""
    study = made_up(budgets=(6e11,), variants=('dense', 'mod'), seeds=(0,))
    plots.draw(study, tmp_path)
    write_page(study, tmp_path)
    page = (tmp_path / 'study.html').read_text(encoding='utf-8')
    found = _Reader(page)
    assert not found.open
    images = [link for tag, link in found.links if tag == 'img']
    assert len(images) == len(plots.FIGURES)
    assert all(link.startswith('data:image/svg+xml;base64,') for link in images)
    assert {tag for tag, _ in found.links} == {'img', 'a'}
    assert "default-src 'none'" in page
    assert not re.search(r'@import|url\(|<link|\bon\w+=', page)
    assert page.rpartition('<tbody>')[2].count('<tr>') == len(study['runs'])
    assert all(f'{row["loss"]:.4f}' in page for row in study['runs'])


def test_texts_of_a_study_are_escaped(page_of):
    study = made_up(variants=SIZED)
    study['variants']['mod'] = {'label': HOSTILE, 'changes': {HOSTILE: HOSTILE}}
    study['variants']['dense'] = {'label': HOSTILE, 'changes': {}}
    study |= {'corpus': HOSTILE, 'config': HOSTILE, 'corpus_sha256': HOSTILE}
    study |= {'versions': {HOSTILE: HOSTILE}, 'missing': [HOSTILE], 'overrides': {HOSTILE: 1}}
    for row in study['runs']:
        row |= {'run': HOSTILE, 'rule': HOSTILE, 'size': HOSTILE}
    study['tuning'][0]['run'] = HOSTILE
    page = page_of(study)
    found = _Reader(page)
    assert not found.open and found.tags.count('script') == 1
    assert 'alert(1)' in ''.join(found.texts)
    assert HOSTILE not in page


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
        ('of the 3 seeds', lambda s: s.update(runs=[r for r in s['runs'] if r['seed'] < 3])),
        ('largest of those', lambda s: s.update(learning_rates={'64': 0.006})),
    ],
)
def test_each_flaw_of_a_study_is_a_warning_at_the_top_of_the_page(warning, spoil, page_of):
    study = _sound()
    assert warnings(study) == [] and 'Read this first' not in page_of(study)
    spoil(study)
    assert any(warning in text for text in warnings(study))
    page = page_of(study)
    assert page.index(warning) < page.index('The best of each variant')


def test_means_are_shown_with_their_spread(page_of):
    """Seed 0 chose the learning rates, and is left out."""
    study = made_up(budgets=(6e11,), sizes=('4x64',), variants=('dense', 'mod'))
    for row in study['runs']:
        row['loss'] = {'dense': 1.6, 'mod': 1.5}[row['variant']] + 0.01 * (row['seed'] - 2)
        row['bits_per_byte'] = row['loss'] * 1.5
    page = page_of(study)
    assert '1.5000 ± 0.0100 (3 seeds)' in page and '>0.9375<' in page and '>2.2500<' in page


def test_differences_are_paired_by_seed(page_of):
    """The seed that chose among sizes is left out; in this study only that seed is far off."""
    study = made_up(budgets=(6e11,), variants=('dense', 'mod'), seeds=(0, 1, 2, 3))
    for row in study['runs']:
        shift = {'dense': 0.0, 'mod': -0.1 - 0.001 * row['seed'] - 5 * (row['seed'] == 0)}
        row['bits_per_byte'] = 2.0 + 0.3 * row['seed'] + shift[row['variant']]
    assert '-0.1020 (-0.1045 to -0.0995)' in page_of(study)


def test_a_study_without_runs_has_a_page(page_of):
    page = page_of(made_up(variants=SIZED) | {'runs': [], 'missing': ['dense-4x64'], 'tuning': []})
    assert 'No run has finished yet' in page and 'dense-4x64' in page
