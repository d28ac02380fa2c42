"""The page holds every run and every warning, escapes what it quotes, and needs no network."""

import html.parser
import re

import pytest

from moddepth_jax.studies import plot_style, plots, study_text
from moddepth_jax.studies.page import write_page
from moddepth_jax.studies.study_warnings import warnings
from tests.studies.made_up_study import SIZED, made_up

HOSTILE = '</td><script>alert(1)</script>&"'
# Of more than 500 steps, an optimum inside the sizes, three seeds, and a weak shallow control.
SOUND = {'budgets': (2e13,), 'sizes': ('4x64', '8x64', '4x128'), 'optimum': 420_000}


class _Reader(html.parser.HTMLParser):
    """Tags, ids, texts and what is linked of a page; unclosed tags stay open."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.texts, self.links = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ('meta', 'path', 'use'):
            self.open.append(tag)
        for name, value in attributes:
            if name == 'id':
                self.ids.append(value)
            if name in ('src', 'href', 'xlink:href') and not value.startswith('#'):
                self.links.append((tag, value))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in ('meta', 'path', 'use'):
            assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def _sound():
    study = made_up(variants=('dense', 'shallow', 'mod', 'random'), **SOUND)
    for row in study['runs']:
        row['loss'] += 0.1 * (row['variant'] == 'shallow')
        if not row['at_best_size']:
            row['loss'] += 0.02
    return study


@pytest.fixture
def page_of(tmp_path):
    """page_of(study): the text of its page; its figures are a rectangle each."""
    svg = (
        '<?xml version="1.0"?>\n<svg width="9pt" height="5pt" viewBox="0 0 9.5 5"><g id="a">'
        f'<path id="p" style="fill: {plot_style.INK}"/><use xlink:href="#p"/></g></svg>'
    )
    for name in plots.FIGURES:
        (tmp_path / f'{name}.svg').write_text(svg)

    def make(study):
        write_page(study, tmp_path)
        return (tmp_path / 'study.html').read_text(encoding='utf-8')

    return make


def test_page_holds_every_run_and_figure(tmp_path):
    """One row of the last table for each run; real figures are inlined, with ids of their own."""
    study = made_up(budgets=(6e11,), variants=('dense', 'mod'), seeds=(0,))
    plots.draw(study, tmp_path)
    write_page(study, tmp_path)
    page = (tmp_path / 'study.html').read_text(encoding='utf-8')
    found = _Reader(page)
    assert not found.open
    assert found.tags.count('svg') == len(plots.FIGURES) == len(study_text.FIGURES)
    assert len(found.ids) == len(set(found.ids)) > 100
    assert plot_style.INK not in page.replace(study_text.STYLE, '')
    assert page.rpartition('<tbody>')[2].count('<tr>') == len(study['runs'])
    for row in study['runs']:
        assert f'{row["loss"]:.4f}' in page
    write_page(study, tmp_path)
    assert (tmp_path / 'study.html').read_text(encoding='utf-8') == page


def test_page_asks_nobody_for_anything(page_of):
    """It links to papers; it loads nothing, and says so to the browser."""
    page = page_of(made_up(variants=SIZED))
    assert all(tag == 'a' for tag, _ in _Reader(page).links)
    assert "default-src 'none'" in page
    assert not re.search(r'@import|url\((?!#)|<link|<img|\bon\w+=', page)


def test_what_a_study_says_is_escaped(page_of):
    """Labels, versions, corpora, runs and knobs are text, wherever they stand."""
    study = made_up(variants=SIZED)
    study['variants']['mod'] = {'label': HOSTILE, 'changes': {HOSTILE: HOSTILE}}
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


def test_a_sound_study_has_no_warning(page_of):
    """So that a warning means something."""
    assert warnings(_sound()) == []
    assert 'Before you read on' not in page_of(_sound())


def _change(rows, **values):
    for row in rows:
        row |= values


@pytest.mark.parametrize(
    ('said', 'spoil'),
    [
        ('fewer than 500 steps', lambda s: _change(s['runs'][:1], steps=499)),
        ('routing gap of 0.05', lambda s: _change(s['runs'][-1:], routing_gap=0.05)),
        ('diverged and are in no figure', lambda s: _change(s['runs'][:1], loss=None)),
        ('diverged and are in no figure: mod-4x64', lambda s: s.update(diverged=['mod-4x64'])),
        ('1% off', lambda s: _change(s['runs'][:1], total_flops=1.9e13)),
        ('not finished: 1 run is', lambda s: s.update(missing=['mod-4x64'])),
        ('no optimum', lambda s: _change(s['runs'][:1], loss=1.0)),
        ('fewer layers', lambda s: _change((r for r in s['runs'] if 'beside' in r), loss=0.9)),
        ('of the 3 seeds', lambda s: s.update(runs=[r for r in s['runs'] if r['seed'] < 2])),
        ('largest of those', lambda s: s.update(learning_rates={'64': 0.006})),
    ],
)
def test_what_spoils_a_study_is_said(said, spoil, page_of):
    """Each thing by itself, at the top of the page."""
    study = _sound()
    spoil(study)
    assert any(said in text for text in warnings(study))
    page = page_of(study)
    assert page.index(said) < page.index('The best of each variant')


def test_numbers_stand_with_their_spread(page_of):
    """Mean, standard deviation and number of seeds; relative to the optimal dense model."""
    study = made_up(budgets=(6e11,), sizes=('4x64',), variants=('dense', 'mod'))
    for row in study['runs']:
        row['loss'] = {'dense': 1.6, 'mod': 1.5}[row['variant']] + 0.01 * (row['seed'] - 1)
        row['bits_per_byte'] = row['loss'] * 1.5
    page = page_of(study)
    assert '1.5000 ± 0.0100 (3 seeds)' in page and '>0.9375<' in page and '>2.2500<' in page


def test_page_tells_what_the_study_is_about(page_of):
    """MoD, MoDA, equal FLOPs or equal tokens, and causal routing only where something is routed."""
    mod = page_of(made_up(variants=SIZED))
    moda = page_of(made_up('steps', (600,), ('4x64',), ('dense', 'moda', 'moda_post')))
    assert study_text.MOD in mod and study_text.CAUSAL in mod and study_text.EQUAL_FLOPS in mod
    assert study_text.MODA in moda and study_text.EQUAL_STEPS in moda
    assert study_text.CAUSAL not in moda and study_text.MODA not in mod
    assert '10¹' in moda and 'FLOPs over budget' not in moda


def test_a_study_without_runs_has_a_page(page_of):
    """It says what is planned."""
    page = page_of(made_up(variants=SIZED) | {'runs': [], 'missing': ['dense-4x64'], 'tuning': []})
    assert 'No run has finished yet' in page and 'dense-4x64' in page


def test_a_missing_figure_is_told(tmp_path):
    """In one line that names it and who makes it."""
    with pytest.raises(ValueError, match=r'loss_by_parameters\.svg: .*draw'):
        write_page(made_up(variants=SIZED), tmp_path)
